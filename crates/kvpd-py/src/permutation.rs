//! `Permutation`, of pages that lie in numpy arrays.

use kvpd::Permutation as CorePermutation;
use kvpd::error::Detail;
use numpy::ndarray::{ArrayBase, ArrayView2, ArrayViewMut2, Data, Ix2};
use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray2};
use pyo3::prelude::*;

use crate::errors::{CoreError, CoreResult};
use crate::format::PageFormat;

#[pyclass(module = "kvpd._kvpd", frozen)]
pub(crate) struct Permutation(CorePermutation);

#[pymethods]
impl Permutation {
    #[new]
    fn new(source: &PageFormat, target: &PageFormat) -> CoreResult<Self> {
        CorePermutation::new(&source.0, &target.0).map(Self).ok_or_else(|| {
            refused("components-differ", "components", source.0.name(), target.0.name())
        })
    }

    /// With the interpreter released: pages take milliseconds, and peers ask for handshakes.
    fn convert(
        &self,
        py: Python<'_>,
        source: Option<Vec<PyReadonlyArray2<'_, u8>>>,
        mut target: Vec<PyReadwriteArray2<'_, u8>>,
        source_ids: PyReadonlyArray1<'_, i64>,
        target_ids: PyReadonlyArray1<'_, i64>,
    ) -> CoreResult<()> {
        let source: Option<Vec<_>> =
            source.as_ref().map(|pieces| pieces.iter().map(PyReadonlyArray2::as_array).collect());
        let mut target: Vec<_> = target.iter_mut().map(PyReadwriteArray2::as_array_mut).collect();
        let pairs = (source_ids.as_array(), target_ids.as_array());
        py.detach(|| {
            let mut raw = vec![0; self.0.source_bytes()];
            let mut page = vec![0; self.0.target_bytes()];
            for (&from, &to) in pairs.0.iter().zip(pairs.1) {
                let done = self.page(source.as_deref(), &mut target, from, to, &mut raw, &mut page);
                done.ok_or_else(|| {
                    refused("id-range", "ids", &format!("{from} and {to}"), "pages of the arrays")
                })?;
            }
            Ok(())
        })
    }
}

impl Permutation {
    /// Page `from` becomes page `to`; `None` where an array has no such page, or pages of another
    /// length. `raw` and `page` are a page long.
    fn page(
        &self,
        source: Option<&[ArrayView2<'_, u8>]>,
        target: &mut [ArrayViewMut2<'_, u8>],
        from: i64,
        to: i64,
        raw: &mut [u8],
        page: &mut [u8],
    ) -> Option<()> {
        let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
        let raw = match source {
            Some([whole]) => row(whole, from)?,
            Some(pieces) => {
                gather(pieces.iter().map(|piece| row(piece, from)), raw)?;
                raw
            }
            None => {
                gather(target.iter().map(|piece| row(piece, from)), raw)?;
                raw
            }
        };
        if let [whole] = target {
            return self.0.apply(raw, row_mut(whole, to)?).then_some(());
        }
        // Padding is written back as it was.
        gather(target.iter().map(|piece| row(piece, to)), page)?;
        self.0.apply(raw, page).then_some(())?;
        let mut rest = &*page;
        for piece in target {
            let piece = row_mut(piece, to)?;
            let (first, others) = rest.split_at_checked(piece.len())?;
            piece.copy_from_slice(first);
            rest = others;
        }
        Some(())
    }
}

/// A block's bytes of one piece; `None` where there is no such block or they do not lie side by side.
fn row<S: Data<Elem = u8>>(piece: &ArrayBase<S, Ix2>, block: usize) -> Option<&[u8]> {
    if block < piece.nrows() { piece.row(block).to_slice() } else { None }
}

fn row_mut<'a>(piece: &'a mut ArrayViewMut2<'_, u8>, block: usize) -> Option<&'a mut [u8]> {
    if block < piece.nrows() { piece.row_mut(block).into_slice() } else { None }
}

/// Pieces one after another; `None` unless they fill the page.
fn gather<'a>(pieces: impl Iterator<Item = Option<&'a [u8]>>, page: &mut [u8]) -> Option<()> {
    let mut rest = page;
    for piece in pieces {
        let piece = piece?;
        let (first, others) = rest.split_at_mut_checked(piece.len())?;
        first.copy_from_slice(piece);
        rest = others;
    }
    rest.is_empty().then_some(())
}

fn refused(code: &'static str, field: &str, got: &str, expected: &str) -> CoreError {
    let (field, got, expected) = (field.to_owned(), got.to_owned(), expected.to_owned());
    CoreError::new("ConversionError", Detail { code, field, got, expected })
}
