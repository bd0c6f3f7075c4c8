//! `negotiate`, `Verdict`, `Reason`.

use kvpd::reason::Reason as CoreReason;
use kvpd::verdict::{Outcome, Policy, Verdict as CoreVerdict};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::engine::EngineDescription;
use crate::format::PageFormat;

#[pyclass(module = "kvpd", frozen, eq, hash)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Reason(CoreReason);

#[pymethods]
impl Reason {
    #[getter]
    fn code(&self) -> &'static str {
        self.0.code.name()
    }

    #[getter]
    fn field(&self) -> &'static str {
        self.0.code.field()
    }

    #[getter]
    fn local(&self) -> &str {
        &self.0.local
    }

    #[getter]
    fn remote(&self) -> &str {
        &self.0.remote
    }

    #[getter]
    fn is_shared(&self) -> bool {
        self.0.is_shared
    }

    #[getter]
    fn remedy(&self) -> &'static str {
        self.0.code.remedy()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Reason {}>", self.0)
    }
}

#[pyclass(module = "kvpd", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Verdict(CoreVerdict);

#[pymethods]
impl Verdict {
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind()
    }

    #[getter]
    fn reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.reasons.iter().cloned().map(Reason))
    }

    #[getter]
    fn warnings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.warnings.iter().cloned().map(Reason))
    }

    #[getter]
    fn source(&self) -> Option<PageFormat> {
        match &self.0.outcome {
            Outcome::Convert { source, .. } => Some(PageFormat(source.clone())),
            _ => None,
        }
    }

    #[getter]
    fn target(&self) -> Option<PageFormat> {
        match &self.0.outcome {
            Outcome::Convert { target, .. } => Some(PageFormat(target.clone())),
            _ => None,
        }
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Verdict {}>", self.0)
    }
}

/// A format alone, or all that an engine published.
#[derive(FromPyObject)]
pub(crate) enum Side {
    Format(PageFormat),
    Engine(Py<EngineDescription>),
}

#[pyfunction]
#[pyo3(
    signature = (local, remote, *, convert = false, require_tagged = false,
        allow_other_weights = false, converters = Vec::new()),
    text_signature = "(local, remote, *, convert=False, require_tagged=False, \
        allow_other_weights=False, converters=())"
)]
pub(crate) fn negotiate(
    py: Python<'_>,
    local: Side,
    remote: Option<Side>,
    convert: bool,
    require_tagged: bool,
    allow_other_weights: bool,
    converters: Vec<(PageFormat, PageFormat)>,
) -> PyResult<Verdict> {
    let converters: Vec<_> = converters.into_iter().map(|(from, to)| (from.0, to.0)).collect();
    let policy = Policy { convert, require_tagged, allow_other_weights, converters: &converters };
    match (local, remote) {
        (Side::Engine(local), remote) => {
            let local = &local.get().0;
            let remote = match &remote {
                None => None,
                Some(Side::Engine(remote)) => Some(&remote.get().0),
                Some(Side::Format(_)) => return Err(mixed_sides()),
            };
            Ok(Verdict(py.detach(|| kvpd::negotiate(local, remote, policy))))
        }
        (Side::Format(local), Some(Side::Format(remote))) => {
            Ok(Verdict(kvpd::negotiate_formats(&local.0, &remote.0, policy)))
        }
        (Side::Format(_), _) => Err(mixed_sides()),
    }
}

fn mixed_sides() -> PyErr {
    PyTypeError::new_err(
        "negotiate takes two PageFormats, or an EngineDescription and an EngineDescription or None",
    )
}
