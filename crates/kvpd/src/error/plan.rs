//! Transfers that cannot be planned.

use super::{DescriptionError, Detail, Explain, RegionError, detail};
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
    /// Blocks that a request in flight still owns.
    BlocksInFlight {
        /// All of them, ascending.
        blocks: Vec<u32>,
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
    /// A rate or time that is not finite or not above 0.
    Rate {
        /// Which number.
        field: &'static str,
        /// The number.
        got: String,
    },
    /// A count of 0 or above its limit.
    Count {
        /// Which count.
        field: &'static str,
        /// The count.
        got: u32,
    },
    /// A slab without room for one page.
    SlabTooSmall {
        /// Bytes of the slab.
        slab_bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// A slot holds pages of one size; these layers have several.
    UnequalPages {
        /// A layer whose pages have another size than the first layer's.
        layer: String,
        /// Bytes of its pages.
        got: u64,
        /// Bytes of the first layer's.
        expected: u64,
    },
    /// Neither direct nor in place is allowed, and there is no slab.
    NoPlacement,
    /// A request larger than was planned for.
    TooManyPages {
        /// Pages of the request.
        got: usize,
        /// Pages of the largest.
        max_pages: u32,
    },
    /// Something that this plan has not.
    Absent {
        /// What: "chunk", "slot", "group" or "rows".
        field: &'static str,
        /// Which was asked for.
        got: String,
        /// How many there are, or why there are none.
        expected: String,
    },
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
            Self::BlocksInFlight { blocks } => detail(
                "blocks-in-flight",
                "local block ids",
                format_args!("blocks of a live request: {}", few(blocks)),
                "blocks that no live request owns",
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
            Self::Rate { field, got } => detail("rate", field, got, "a finite number above 0"),
            Self::Count { field, got } => {
                detail("count", field, got, "at least 1 and at most 2^31 - 1")
            }
            Self::SlabTooSmall { slab_bytes, page_bytes } => detail(
                "slab-too-small",
                "slab",
                format_args!("{slab_bytes} bytes"),
                format_args!("room for at least one page of {page_bytes} bytes"),
            ),
            Self::UnequalPages { layer, got, expected } => detail(
                "unequal-pages",
                format_args!("page of layer {layer}"),
                format_args!("{got} bytes"),
                format_args!("{expected}, as in the first layer (slots hold pages of one size)"),
            ),
            Self::NoPlacement => detail(
                "no-placement",
                "placement",
                "neither direct nor in place, and there is no slab",
                "at least one of them",
            ),
            Self::TooManyPages { got, max_pages } => detail(
                "too-many-pages",
                "pages of the request",
                got,
                format_args!("at most max_pages, {max_pages}"),
            ),
            Self::Absent { field, got, expected } => detail("absent", field, got, expected),
            Self::TooManyDescriptors => {
                detail("too-many-descriptors", "rows x blocks", "past 2^31 - 1", "at most 2^31 - 1")
            }
            Self::Description(error) => error.detail(),
            Self::Region(error) => error.detail(),
        }
    }
}

/// The first of many numbers, and how many more there are.
fn few(numbers: &[u32]) -> String {
    let shown: Vec<String> = numbers.iter().take(8).map(u32::to_string).collect();
    let rest = numbers.len().saturating_sub(shown.len());
    let more = if rest == 0 { String::new() } else { format!(" and {rest} more") };
    format!("{}{more}", shown.join(", "))
}
