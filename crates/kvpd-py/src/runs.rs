//! `runs`, `Runs`, `Run`.

use kvpd::runs::{Run as CoreRun, Runs as CoreRuns};
use numpy::{PyArray1, ToPyArray};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyTuple};

use crate::arguments::{BlockIds, pair};
use crate::errors::CoreResult;

#[pyclass(module = "kvpd", frozen, eq, hash, get_all)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Run {
    local: u32,
    remote: u32,
    num_pages: u32,
}

impl From<CoreRun> for Run {
    fn from(run: CoreRun) -> Self {
        let CoreRun { local, remote, num_pages } = run;
        Self { local, remote, num_pages }
    }
}

#[pymethods]
impl Run {
    fn __repr__(&self) -> String {
        let Self { local, remote, num_pages } = self;
        format!("Run(local={local}, remote={remote}, num_pages={num_pages})")
    }
}

#[pyclass(module = "kvpd", frozen)]
pub(crate) struct Runs(pub(crate) CoreRuns);

#[pymethods]
impl Runs {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyTuple::new(py, self.0.as_slice().iter().copied().map(Run::from))?.try_iter()
    }

    fn __getitem__(&self, index: isize) -> PyResult<Run> {
        let found = usize::try_from(index).ok().or_else(|| self.0.len().checked_add_signed(index));
        let run = found.and_then(|index| self.0.as_slice().get(index));
        run.copied().map(Run::from).ok_or_else(|| PyIndexError::new_err("no such run"))
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.0.num_pages()
    }

    #[getter]
    fn local_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.local_ids().to_pyarray(py)
    }

    #[getter]
    fn remote_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.remote_ids().to_pyarray(py)
    }

    fn __repr__(&self) -> String {
        format!("<Runs: {} pages in {} runs>", self.0.num_pages(), self.0.len())
    }
}

#[pyfunction]
pub(crate) fn runs(local_ids: BlockIds<'_>, remote_ids: BlockIds<'_>) -> CoreResult<Runs> {
    Ok(Runs(pair(&local_ids, &remote_ids)?))
}
