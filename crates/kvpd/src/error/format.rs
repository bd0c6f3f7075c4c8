//! A page format that cannot be.

use super::{Detail, Explain, detail};
use crate::units::{MAX_EXTENT, MAX_PAGE_BYTES, MAX_PLANES};
/// A page format that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FormatError {
    /// Not one of the element types.
    UnknownElementType {
        /// The name given.
        got: String,
    },
    /// An extent of 0 or above the limit.
    Extent {
        /// Which axis.
        field: &'static str,
        /// The extent.
        got: u64,
    },
    /// A tile that does not divide its axis.
    NotDivisible {
        /// Which axis.
        field: &'static str,
        /// Its extent.
        got: u32,
        /// The tile.
        divisor: u32,
    },
    /// A component's name is not 1 to 32 of `a-z0-9_`.
    ComponentName {
        /// The name given.
        got: String,
    },
    /// A family's label is too long or not plain text.
    FamilyName,
    /// Two components of one name.
    DuplicateComponent {
        /// The name.
        component: String,
    },
    /// No component with that name.
    UnknownComponent {
        /// The name asked for.
        got: String,
        /// The names there are.
        known: String,
    },
    /// None, or too many, components, planes or padding spans.
    Count {
        /// Which list.
        field: &'static str,
        /// Its length.
        got: usize,
    },
    /// Offsets past 2^64.
    Overflow {
        /// Which number.
        field: &'static str,
        /// Of which component.
        component: String,
    },
    /// A page above the limit, or a plane of 0 bytes.
    PageBytes {
        /// Its bytes.
        got: u64,
    },
    /// A component or padding names a plane that is not there.
    NoSuchPlane {
        /// Which component, or "padding".
        component: String,
        /// The plane named.
        plane: u32,
        /// How many there are.
        num_planes: usize,
    },
    /// A component or padding reaches past its plane.
    OutOfPlane {
        /// Which component, or "padding".
        component: String,
        /// One past its last byte.
        end_bytes: u64,
        /// Bytes of the plane.
        plane_bytes: u64,
    },
    /// Two elements claim one byte.
    Overlap {
        /// The second component to claim it, or "padding".
        component: String,
        /// In which plane.
        plane: u32,
        /// The first byte claimed twice.
        offset_bytes: u64,
    },
    /// A byte that no element covers and that is not declared padding.
    Uncovered {
        /// In which plane.
        plane: u32,
        /// The first such byte.
        offset_bytes: u64,
    },
    /// An element outside the component's extents.
    OutsideExtents {
        /// Which axis.
        field: &'static str,
        /// The index asked for.
        got: u32,
        /// Number of indices.
        extent: u32,
    },
}

impl Explain for FormatError {
    fn detail(&self) -> Detail {
        match self {
            Self::UnknownElementType { got } => {
                let names: Vec<_> =
                    crate::element::ElementType::ALL.iter().map(|element| element.name()).collect();
                detail("unknown-element-type", "dtype", format_args!("{got:?}"), names.join(", "))
            }
            Self::Extent { field, got } => {
                detail("extent", field, got, format_args!("1 to {MAX_EXTENT}"))
            }
            Self::NotDivisible { field, got, divisor } => {
                detail("not-divisible", field, got, format_args!("a multiple of {divisor}"))
            }
            Self::ComponentName { got } => detail(
                "component-name",
                "name",
                format_args!("{got:?}"),
                "1 to 32 characters of a-z, 0-9 and _",
            ),
            Self::FamilyName => {
                detail("family-name", "family", "not plain text", "1 to 64 printable characters")
            }
            Self::DuplicateComponent { component } => {
                detail("duplicate-component", "components", component, "each name once")
            }
            Self::UnknownComponent { got, known } => {
                detail("unknown-component", "component", format_args!("{got:?}"), known)
            }
            Self::Count { field, got } => detail(
                "count",
                field,
                format_args!("{got} entries"),
                format_args!("1 to {MAX_PLANES}"),
            ),
            Self::Overflow { field, component } => {
                detail("overflow", field, component, "offsets below 2^64")
            }
            Self::PageBytes { got } => detail(
                "page-bytes",
                "plane_bytes",
                got,
                format_args!("1 to {MAX_PAGE_BYTES} in all"),
            ),
            Self::NoSuchPlane { component, plane, num_planes } => detail(
                "no-such-plane",
                format_args!("plane of {component}"),
                plane,
                format_args!("below {num_planes}"),
            ),
            Self::OutOfPlane { component, end_bytes, plane_bytes } => detail(
                "out-of-plane",
                format_args!("last byte of {component}"),
                end_bytes,
                format_args!("at most the plane's {plane_bytes}"),
            ),
            Self::Overlap { component, plane, offset_bytes } => detail(
                "overlap",
                format_args!("{component} in plane {plane}"),
                format_args!("a second claim on byte {offset_bytes}"),
                "every byte covered once",
            ),
            Self::Uncovered { plane, offset_bytes } => detail(
                "uncovered",
                format_args!("plane {plane}"),
                format_args!("without an element at byte {offset_bytes}"),
                "every byte covered, or declared padding",
            ),
            Self::OutsideExtents { field, got, extent } => {
                detail("outside-extents", field, got, format_args!("below {extent}"))
            }
        }
    }
}
