//! Memory that cannot be described.

use super::{Detail, Explain, detail};
use crate::units::MAX_LAYERS_PER_REGION;
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
