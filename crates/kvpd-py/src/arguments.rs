//! Python arguments, parsed into the core's types before a function sees them.

use kvpd::error::Detail;
use kvpd::runs::Runs;
use kvpd::{ElementType, Interior, Layout, Memory, Placement, PlanError, ShuffledV};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use crate::errors::CoreError;

/// "bfloat16", or anything whose text is "torch.bfloat16".
pub(crate) struct Dtype(pub(crate) ElementType);

impl FromPyObject<'_, '_> for Dtype {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let text = object.str()?.to_string();
        let name = text.strip_prefix("torch.").unwrap_or(&text);
        Ok(Self(name.parse().map_err(CoreError::from)?))
    }
}

/// Words out of closed lists.
macro_rules! words {
    ($($wrapper:ident($inner:ty) $error:literal $field:literal { $($word:literal => $value:expr,)* })*) => {$(
        pub(crate) struct $wrapper(pub(crate) $inner);

        impl FromPyObject<'_, '_> for $wrapper {
            type Error = PyErr;

            fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
                match object.extract::<String>()?.as_str() {
                    $($word => Ok(Self($value)),)*
                    other => Err(CoreError::new($error, Detail {
                        code: "unknown-word",
                        field: $field.to_owned(),
                        got: format!("{other:?}"),
                        expected: [$($word),*].join(" or "),
                    }).into()),
                }
            }
        }
    )*};
}
words! {
    InteriorWord(Interior) "FormatError" "interior" {
        "HNC" => Interior::Hnc,
        "NHC" => Interior::Nhc,
    }
    VWord(ShuffledV) "FormatError" "v" {
        "tiled" => ShuffledV::Tiled,
        "transposed" => ShuffledV::Transposed,
    }
    MemoryWord(Memory) "RegionError" "memory" {
        "dram" => Memory::Dram,
        "vram" => Memory::Vram,
    }
    PlacementWord(Placement) "PlanError" "placement" {
        "direct" => Placement::Direct,
        "in_place" => Placement::InPlace,
        "staged" => Placement::Staged,
    }
}

/// One of vLLM's layouts by name.
pub(crate) struct LayoutWord(pub(crate) Layout);

impl FromPyObject<'_, '_> for LayoutWord {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        Ok(Self(object.extract::<String>()?.parse().map_err(CoreError::from)?))
    }
}

/// Block ids: an int32 or int64 array, read where it lies, or any sequence of ints.
pub(crate) enum BlockIds<'py> {
    Int32(PyReadonlyArray1<'py, i32>),
    Int64(PyReadonlyArray1<'py, i64>),
    List(Vec<i64>),
}

impl<'py> FromPyObject<'_, 'py> for BlockIds<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(ids) = object.extract() {
            return Ok(Self::Int32(ids));
        }
        if let Ok(ids) = object.extract() {
            return Ok(Self::Int64(ids));
        }
        let ids: Vec<ListedId> = object.extract().map_err(|_| {
            PyTypeError::new_err(
                "block ids must be a sequence of ints, or a 1-D int32 or int64 array",
            )
        })?;
        Ok(Self::List(ids.into_iter().map(|id| id.0).collect()))
    }
}

/// What does not fit becomes the largest number, which the core refuses as a block id.
struct ListedId(i64);

impl<'py> FromPyObject<'_, 'py> for ListedId {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<i64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(i64::MAX))
            }
            id => id.map(Self),
        }
    }
}

impl BlockIds<'_> {
    /// As int64; an array of them is copied once.
    fn widen(&self) -> Vec<i64> {
        match self {
            Self::Int32(ids) => ids.as_array().iter().map(|&id| id.into()).collect(),
            Self::Int64(ids) => ids.as_array().to_vec(),
            Self::List(ids) => ids.clone(),
        }
    }
}

/// Runs of (local, remote) pairs. With the interpreter held: a request's ids take microseconds, and
/// whoever lets go of it can wait milliseconds to have it back.
pub(crate) fn pair(local: &BlockIds<'_>, remote: &BlockIds<'_>) -> Result<Runs, PlanError> {
    Runs::pair(&local.widen(), &remote.widen())
}

/// The core counts heads, tokens, devices and ranks in 32 bits and has limits far below; what does
/// not fit becomes the largest number and is refused there, with its field.
pub(crate) fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
