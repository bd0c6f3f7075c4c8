//! `Claims`.

use kvpd::Claims as CoreClaims;
use pyo3::prelude::*;

use crate::arguments::narrow;
use crate::errors::CoreResult;
use crate::runs::Runs;

#[pyclass(module = "kvpd._kvpd")]
pub(crate) struct Claims(CoreClaims);

#[pymethods]
impl Claims {
    #[new]
    fn new(num_blocks: u64) -> Self {
        Self(CoreClaims::new(narrow(num_blocks)))
    }

    fn claim(&mut self, runs: &Runs) -> CoreResult<()> {
        Ok(self.0.claim(&runs.0)?)
    }

    fn release(&mut self, runs: &Runs) {
        self.0.release(&runs.0);
    }

    #[getter]
    fn num_claimed(&self) -> usize {
        self.0.num_claimed()
    }
}
