//! What can be wrong with a number someone gave us. Each enum is closed; each variant carries the values.
//!
//! Prose is made in one place, from [`Detail`]: callers match variants or codes, never text.

use std::fmt;

use crate::units::{MAX_EXTENT, MAX_LAYERS_PER_REGION, MAX_PAGE_BYTES, MAX_PLANES, MAX_REGIONS};

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

/// Memory that cannot be described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionError {
    /// A count or size of 0 or above its limit.
    OutOfRange {
        /// Which number.
        field: &'static str,
        /// The number.
        got: u64,
        /// The largest accepted.
        max: u64,
    },
    /// More bytes per block than from one block to the next: rows would overlap.
    LengthOverStride {
        /// Bytes per block.
        block_bytes: u64,
        /// Bytes from one block to the next.
        block_stride_bytes: u64,
    },
    /// The last block ends past the registered memory.
    OutOfExtent {
        /// One past the last byte, from the region's address.
        end_bytes: u64,
        /// Registered bytes from the region's address.
        extent_bytes: u64,
    },
    /// Addresses past 2^64.
    Overflow {
        /// Which number.
        field: &'static str,
    },
    /// A region with planes but no format, or with a format but no planes.
    Planes {
        /// What contradicts.
        got: &'static str,
    },
    /// A plane span that is not inside the format's planes, or empty.
    NoSuchSpan {
        /// The plane named.
        plane: u32,
        /// First byte.
        start_bytes: u64,
        /// Length.
        num_bytes: u64,
    },
    /// The spans add up to another length than the block's.
    SpanBytes {
        /// Bytes of all spans.
        span_bytes: u64,
        /// Bytes per block.
        block_bytes: u64,
    },
    /// A layer name that is too long or not plain text, or too many of them.
    Layers,
    /// A block outside the region.
    NoSuchBlock {
        /// The block asked for.
        block: u64,
        /// Blocks there are.
        num_blocks: u64,
    },
    /// Not one of the layouts.
    UnknownLayout {
        /// The name given.
        got: String,
    },
    /// The layout orders heads and tokens in another way than the format.
    LayoutAgainstFormat {
        /// The layout.
        layout: &'static str,
        /// The format's name.
        format: String,
    },
}

impl Explain for RegionError {
    fn detail(&self) -> Detail {
        match self {
            Self::OutOfRange { field, got, max } => {
                detail("out-of-range", field, got, format_args!("1 to {max}"))
            }
            Self::LengthOverStride { block_bytes, block_stride_bytes } => detail(
                "length-over-stride",
                "block_bytes",
                block_bytes,
                format_args!(
                    "at most block_stride_bytes, {block_stride_bytes} (blocks would overlap; \
                     is this a logical block over several kernel blocks?)"
                ),
            ),
            Self::OutOfExtent { end_bytes, extent_bytes } => detail(
                "out-of-extent",
                "end of the last block",
                end_bytes,
                format_args!("at most extent_bytes, {extent_bytes}"),
            ),
            Self::Overflow { field } => detail("overflow", field, "past 2^64", "below 2^64"),
            Self::Planes { got } => detail(
                "planes",
                "planes",
                got,
                "a format with the planes that a block holds, or neither (untagged)",
            ),
            Self::NoSuchSpan { plane, start_bytes, num_bytes } => detail(
                "no-such-span",
                "planes",
                format_args!("plane {plane} bytes {start_bytes}+{num_bytes}"),
                "a non-empty span inside a plane of the format",
            ),
            Self::SpanBytes { span_bytes, block_bytes } => detail(
                "span-bytes",
                "block_bytes",
                block_bytes,
                format_args!("the bytes of its planes, {span_bytes}"),
            ),
            Self::Layers => detail(
                "layers",
                "layers",
                "not a list of names",
                format_args!("at most {MAX_LAYERS_PER_REGION} printable names, each once"),
            ),
            Self::NoSuchBlock { block, num_blocks } => {
                detail("no-such-block", "block_id", block, format_args!("below {num_blocks}"))
            }
            Self::UnknownLayout { got } => detail(
                "unknown-layout",
                "layout",
                format_args!("{got:?}"),
                "LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC, HND or NHD",
            ),
            Self::LayoutAgainstFormat { layout, format } => detail(
                "layout-against-format",
                "layout",
                layout,
                format_args!("one that orders heads and tokens as {format} does"),
            ),
        }
    }
}

/// Facts and regions that do not make one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DescriptionError {
    /// A text that is empty, too long or not plain.
    Text {
        /// Which fact.
        field: &'static str,
    },
    /// A number of 0 or above its limit.
    OutOfRange {
        /// Which fact.
        field: &'static str,
        /// The number.
        got: u64,
        /// The largest accepted.
        max: u64,
    },
    /// No region, or too many.
    RegionCount {
        /// How many.
        got: usize,
    },
    /// A tagged region that names no layer: its pages could be paired with nothing.
    RegionWithoutLayers {
        /// Its index.
        region: usize,
    },
    /// A layer whose regions do not all name the same layers or formats.
    LayerSplit {
        /// The layer.
        layer: String,
    },
    /// The regions of a layer hold a byte of its page twice or not at all.
    PageNotCovered {
        /// The layer.
        layer: String,
        /// First byte of the page (planes in order) at fault.
        offset_bytes: u64,
    },
    /// Two regions share memory, or lie interleaved so that it cannot be ruled out.
    Overlap {
        /// Index of the first.
        first: usize,
        /// Index of the second.
        second: usize,
    },
}

impl Explain for DescriptionError {
    fn detail(&self) -> Detail {
        match self {
            Self::Text { field } => {
                detail("text", field, "empty or not plain text", "a printable name")
            }
            Self::OutOfRange { field, got, max } => detail(
                "out-of-range",
                field,
                got,
                format_args!("at most {max}, and a count at least 1"),
            ),
            Self::RegionCount { got } => {
                detail("region-count", "regions", got, format_args!("1 to {MAX_REGIONS}"))
            }
            Self::RegionWithoutLayers { region } => detail(
                "region-without-layers",
                format_args!("regions[{region}].layers"),
                "empty",
                "the names of the layers whose pages it holds",
            ),
            Self::LayerSplit { layer } => detail(
                "layer-split",
                format_args!("layer {layer}"),
                "in regions that name different layers or formats",
                "all regions of a layer to name the same layers and format",
            ),
            Self::PageNotCovered { layer, offset_bytes } => detail(
                "page-not-covered",
                format_args!("layer {layer}"),
                format_args!("not held exactly once at byte {offset_bytes} of its page"),
                "each byte of a page in exactly one region",
            ),
            Self::Overlap { first, second } => detail(
                "overlap",
                format_args!("regions[{first}] and regions[{second}]"),
                "in the same memory, or interleaved with different strides",
                "regions that share no byte",
            ),
        }
    }
}

/// Block ids or regions from which no transfer can be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanError {
    /// As many local as remote blocks are needed.
    LengthMismatch {
        /// Local blocks.
        local: usize,
        /// Remote blocks.
        remote: usize,
    },
    /// A block id below 0 or past 2^31 - 1.
    BlockId {
        /// On which side.
        side: &'static str,
        /// The id.
        got: i64,
    },
    /// A block id that occurs twice on one side.
    DuplicateBlock {
        /// On which side.
        side: &'static str,
        /// The id.
        block: u32,
    },
    /// A block outside the regions of its side.
    NoSuchBlock {
        /// On which side.
        side: &'static str,
        /// The id.
        block: u32,
        /// Blocks that every region of the side has.
        num_blocks: u32,
    },
    /// A region without a format or without layers.
    Untagged {
        /// On which side.
        side: &'static str,
    },
    /// The sides do not hold the same layers.
    Layers {
        /// A layer that only one side has.
        layer: String,
    },
    /// A page of a layer has another size on the other side.
    PageBytes {
        /// The layer.
        layer: String,
        /// Bytes on the local side.
        local: u64,
        /// Bytes on the remote side.
        remote: u64,
    },
    /// The regions of one side lie in different kinds of memory.
    MixedMemory {
        /// On which side.
        side: &'static str,
    },
    /// More descriptors than int32 ids can name.
    TooManyDescriptors,
    /// Facts and regions contradict each other.
    Description(DescriptionError),
    /// A slab that cannot be described.
    Region(RegionError),
}

impl From<DescriptionError> for PlanError {
    fn from(error: DescriptionError) -> Self {
        Self::Description(error)
    }
}

impl From<RegionError> for PlanError {
    fn from(error: RegionError) -> Self {
        Self::Region(error)
    }
}

impl Explain for PlanError {
    fn detail(&self) -> Detail {
        match self {
            Self::LengthMismatch { local, remote } => detail(
                "length-mismatch",
                "block ids",
                format_args!("{local} local, {remote} remote"),
                "one remote block for each local block",
            ),
            Self::BlockId { side, got } => {
                detail("block-id", format_args!("{side} block id"), got, "0 to 2^31 - 1")
            }
            Self::DuplicateBlock { side, block } => detail(
                "duplicate-block",
                format_args!("{side} block ids"),
                format_args!("holding {block} twice"),
                "each block once (it would be written or converted twice)",
            ),
            Self::NoSuchBlock { side, block, num_blocks } => detail(
                "no-such-block",
                format_args!("{side} block id"),
                block,
                format_args!("below {num_blocks}"),
            ),
            Self::Untagged { side } => detail(
                "untagged",
                format_args!("{side} regions"),
                "without a format",
                "regions with a format, planes and layers",
            ),
            Self::Layers { layer } => detail(
                "layers",
                "regions",
                format_args!("layer {layer} on one side only"),
                "the same layers",
            ),
            Self::PageBytes { layer, local, remote } => detail(
                "page-bytes",
                format_args!("page of layer {layer}"),
                format_args!("{local} B locally, {remote} B remotely"),
                "pages of one size",
            ),
            Self::MixedMemory { side } => detail(
                "mixed-memory",
                format_args!("{side} regions"),
                "in dram and vram",
                "one kind of memory on a side",
            ),
            Self::TooManyDescriptors => {
                detail("too-many-descriptors", "rows x blocks", "past 2^31 - 1", "at most 2^31 - 1")
            }
            Self::Description(error) => error.detail(),
            Self::Region(error) => error.detail(),
        }
    }
}
