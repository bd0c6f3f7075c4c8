//! The one mapping from the core's errors to `kvpd.errors`.

use kvpd::error::Detail;
use kvpd::{DescriptionError, Explain, FormatError, PlanError, RegionError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An error of the core on its way to Python.
pub(crate) struct CoreError {
    class: &'static str,
    detail: Box<Detail>,
}

impl CoreError {
    pub(crate) fn new(class: &'static str, detail: Detail) -> Self {
        Self { class, detail: Box::new(detail) }
    }
}

macro_rules! core_errors {
    ($($error:ident)*) => {$(
        impl From<$error> for CoreError {
            fn from(error: $error) -> Self {
                Self::new(stringify!($error), error.detail())
            }
        }
    )*};
}
core_errors! { FormatError RegionError DescriptionError PlanError }

impl From<CoreError> for PyErr {
    fn from(error: CoreError) -> Self {
        Python::attach(|py| build(py, &error).unwrap_or_else(|failure| failure))
    }
}

fn build(py: Python<'_>, error: &CoreError) -> PyResult<PyErr> {
    let class = py.import("kvpd.errors")?.getattr(error.class)?;
    let fields = PyDict::new(py);
    fields.set_item("code", error.detail.code)?;
    fields.set_item("field", &error.detail.field)?;
    fields.set_item("got", &error.detail.got)?;
    fields.set_item("expected", &error.detail.expected)?;
    let value = class.call((error.detail.to_string(),), Some(&fields))?;
    Ok(PyErr::from_value(value))
}

pub(crate) type CoreResult<T> = Result<T, CoreError>;
