//! `DescriptorRows`, `TransferPlan`, `slab_bytes`.

use kvpd::{DescriptorRows as CoreRows, Row, TransferPlan as CorePlan};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::errors::{CoreError, CoreResult};
use crate::region::{Region, core_regions};
use crate::runs::Runs;

/// Local and remote ids.
pub(crate) type IdArrays<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i32>>);

#[pyclass(module = "kvpd", frozen)]
pub(crate) struct DescriptorRows(pub(crate) CoreRows);

#[pymethods]
impl DescriptorRows {
    #[getter]
    fn local_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u64>>> {
        rows(py, self.0.local_rows())
    }

    #[getter]
    fn remote_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u64>>> {
        rows(py, self.0.remote_rows())
    }

    #[getter]
    fn local_memory(&self) -> &'static str {
        self.0.local_memory().name()
    }

    #[getter]
    fn remote_memory(&self) -> &'static str {
        self.0.remote_memory().name()
    }
}

#[pyclass(module = "kvpd", frozen)]
pub(crate) struct TransferPlan(CorePlan);

#[pymethods]
impl TransferPlan {
    #[new]
    fn new(py: Python<'_>, target: Vec<Region>, source: Vec<Region>) -> CoreResult<Self> {
        let (target, source) = (core_regions(target), core_regions(source));
        Ok(Self(py.detach(|| CorePlan::new(&target, &source))?))
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.0.rows().remote_rows().len()
    }

    #[getter]
    fn page_bytes_all_layers(&self) -> u64 {
        self.0.rows().page_bytes_all_layers()
    }

    #[getter]
    fn local_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u64>>> {
        rows(py, self.0.rows().local_rows())
    }

    #[getter]
    fn remote_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u64>>> {
        rows(py, self.0.rows().remote_rows())
    }

    #[getter]
    fn local_memory(&self) -> &'static str {
        self.0.rows().local_memory().name()
    }

    #[getter]
    fn remote_memory(&self) -> &'static str {
        self.0.rows().remote_memory().name()
    }

    fn descriptor_ids<'py>(&self, py: Python<'py>, runs: &Runs) -> PyResult<IdArrays<'py>> {
        let count = self.0.num_descriptors(&runs.0).map_err(CoreError::from)?;
        let count = usize::try_from(count)?;
        // numpy's memory, written in place: its allocator asks for huge pages, which for millions of
        // ids matters more than the additions.
        let arrays = (PyArray1::zeros(py, count, false), PyArray1::zeros(py, count, false));
        {
            let (mut local, mut remote) = (arrays.0.try_readwrite()?, arrays.1.try_readwrite()?);
            let (local, remote) = (local.as_slice_mut()?, remote.as_slice_mut()?);
            py.detach(|| self.0.write_descriptor_ids(&runs.0, local, remote))
                .map_err(CoreError::from)?;
        }
        Ok(arrays)
    }

    fn num_descriptors(&self, runs: &Runs) -> CoreResult<u64> {
        Ok(self.0.num_descriptors(&runs.0)?)
    }

    fn num_merged_descriptors(&self, runs: &Runs) -> u64 {
        self.0.num_merged_descriptors(&runs.0)
    }
}

/// Rows as NIXL takes them: N x 5, uint64.
fn rows<'py>(py: Python<'py>, rows: &[Row]) -> PyResult<Bound<'py, PyArray2<u64>>> {
    let flat: Vec<u64> = rows.iter().flat_map(|row| row.to_array()).collect();
    flat.into_pyarray(py).reshape([rows.len(), 5])
}

#[pyfunction]
#[pyo3(signature = (source, *, num_pages))]
pub(crate) fn slab_bytes(source: Vec<Region>, num_pages: u64) -> CoreResult<u64> {
    Ok(kvpd::slab_bytes(&core_regions(source), num_pages)?)
}
