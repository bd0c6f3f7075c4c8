//! What can be wrong with a number someone gave us. Each enum is closed; each variant carries the values.
//!
//! Prose is made in one place, from [`Detail`]: callers match variants or codes, never text.

mod description;
mod format;
mod plan;
mod region;

use std::fmt;

pub use description::DescriptionError;
pub use format::FormatError;
pub use plan::PlanError;
pub use region::RegionError;

/// An error taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detail {
    /// Stable name of the failure.
    pub code: &'static str,
    /// The parameter at fault.
    pub field: String,
    /// The value found.
    pub got: String,
    /// What would have been accepted.
    pub expected: String,
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, field, got, expected } = self;
        write!(f, "{field} is {got}; expected {expected} [{code}]")
    }
}

/// Errors that can be taken apart.
pub trait Explain {
    /// Code, field and both values.
    fn detail(&self) -> Detail;
}

fn detail(
    code: &'static str,
    field: impl fmt::Display,
    got: impl fmt::Display,
    expected: impl fmt::Display,
) -> Detail {
    Detail { code, field: field.to_string(), got: got.to_string(), expected: expected.to_string() }
}

macro_rules! display_from_detail {
    ($($error:ty),*) => {$(
        impl fmt::Display for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.detail().fmt(f)
            }
        }
        impl std::error::Error for $error {}
    )*};
}
display_from_detail!(FormatError, RegionError, DescriptionError, PlanError);
