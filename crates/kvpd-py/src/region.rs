//! `Region` and `cache_regions`.

use std::hash::{Hash, Hasher};

use kvpd::format::PlaneSpan as CoreSpan;
use kvpd::region::{CacheMemory, Region as CoreRegion, Strided, Tag};
use kvpd::{Address, Memory, RegionError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{LayoutWord, MemoryWord, narrow};
use crate::errors::CoreResult;
use crate::format::{PageFormat, PlaneSpan, spans};

/// A plane by number (whole), or a span of one.
#[derive(FromPyObject)]
pub(crate) enum Plane {
    Whole(u64),
    Span(PlaneSpan),
}

#[pyclass(module = "kvpd", frozen, eq, hash, from_py_object)]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Region(pub(crate) CoreRegion);

impl Hash for Region {
    fn hash<S: Hasher>(&self, state: &mut S) {
        self.0.hash(state);
    }
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(signature = (address, num_blocks, block_bytes, block_stride_bytes, *, format = None,
        planes = None, layers = Vec::new(), memory = MemoryWord(Memory::Dram), device = 0,
        extent_bytes = None),
        text_signature = "(address, num_blocks, block_bytes, block_stride_bytes, *, format=None, \
        planes=None, layers=(), memory='dram', device=0, extent_bytes=None)")]
    #[expect(clippy::too_many_arguments, reason = "one keyword per fact of a region")]
    fn new(
        address: u64,
        num_blocks: u64,
        block_bytes: u64,
        block_stride_bytes: u64,
        format: Option<PageFormat>,
        planes: Option<Vec<Plane>>,
        layers: Vec<String>,
        memory: MemoryWord,
        device: u64,
        extent_bytes: Option<u64>,
    ) -> CoreResult<Self> {
        let strided = Strided {
            address: Address(address),
            num_blocks,
            block_bytes,
            block_stride_bytes,
            extent_bytes,
            memory: memory.0,
            device: narrow(device),
        };
        let tag = match (format, planes) {
            (Some(PageFormat(format)), None) => Some(Tag { spans: format.whole_planes(), format }),
            (Some(PageFormat(format)), Some(planes)) => {
                let whole = format.whole_planes();
                let span = |plane| match plane {
                    Plane::Span(span) => CoreSpan::from(span),
                    Plane::Whole(plane) => {
                        let plane = narrow(plane);
                        let known = whole.iter().copied().find(|span| span.plane == plane);
                        // An empty span of a plane that is not there: refused with its number.
                        known.unwrap_or(CoreSpan { plane, start_bytes: 0, num_bytes: 0 })
                    }
                };
                let spans = planes.into_iter().map(span).collect();
                Some(Tag { spans, format })
            }
            (None, Some(planes)) if !planes.is_empty() => {
                return Err(RegionError::Planes { got: "given without a format" }.into());
            }
            (None, _) => None,
        };
        Ok(Self(CoreRegion::new(strided, tag, layers)?))
    }

    #[getter]
    fn address(&self) -> u64 {
        self.0.address().get()
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks()
    }

    #[getter]
    fn block_bytes(&self) -> u64 {
        self.0.block_bytes()
    }

    #[getter]
    fn block_stride_bytes(&self) -> u64 {
        self.0.block_stride_bytes()
    }

    #[getter]
    fn format(&self) -> Option<PageFormat> {
        self.0.tag().map(|tag| PageFormat(tag.format.clone()))
    }

    #[getter]
    fn planes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        spans(py, self.0.tag().map_or(&[], |tag| &tag.spans))
    }

    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.layers())
    }

    #[getter]
    fn memory(&self) -> &'static str {
        self.0.memory().name()
    }

    #[getter]
    fn device(&self) -> u32 {
        self.0.device()
    }

    #[getter]
    fn extent_bytes(&self) -> u64 {
        self.0.extent_bytes()
    }

    #[getter]
    fn is_dense(&self) -> bool {
        self.0.is_dense()
    }

    fn block_address(&self, block_id: u64) -> CoreResult<u64> {
        Ok(self.0.block_address(block_id)?.get())
    }

    fn __repr__(&self) -> String {
        let region = &self.0;
        let (address, blocks) = (region.address(), region.num_blocks());
        let (length, stride) = (region.block_bytes(), region.block_stride_bytes());
        let format = region.tag().map_or("untagged", |tag| tag.format.name());
        format!("<Region {address} {blocks} x {length} B every {stride} B, {format}>")
    }
}

/// The core's regions as a tuple.
pub(crate) fn region_tuple<'py>(
    py: Python<'py>,
    regions: impl IntoIterator<Item = CoreRegion, IntoIter: ExactSizeIterator>,
) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, regions.into_iter().map(Region))
}

/// The core's regions out of Python's.
pub(crate) fn core_regions(regions: Vec<Region>) -> Vec<CoreRegion> {
    regions.into_iter().map(|region| region.0).collect()
}

#[pyfunction]
#[pyo3(signature = (format, layout, *, address, num_blocks, layers,
    memory = MemoryWord(Memory::Dram), device = 0),
    text_signature = "(format, layout, *, address, num_blocks, layers, memory='dram', device=0)")]
#[expect(clippy::too_many_arguments, reason = "one keyword per fact of a cache")]
pub(crate) fn cache_regions<'py>(
    py: Python<'py>,
    format: PageFormat,
    layout: LayoutWord,
    address: u64,
    num_blocks: u64,
    layers: Vec<String>,
    memory: MemoryWord,
    device: u64,
) -> PyResult<Bound<'py, PyTuple>> {
    let (address, memory, device) = (Address(address), memory.0, narrow(device));
    let cache = CacheMemory { address, num_blocks, memory, device };
    let regions = kvpd::cache_regions(&format.0, layout.0, &layers, cache);
    region_tuple(py, regions.map_err(crate::errors::CoreError::from)?)
}
