//! Facts and regions that do not make one engine.

use super::{Detail, Explain, detail};
use crate::units::{MAX_NAME_BYTES, MAX_REGIONS};

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
    /// Scales of a cache that is said not to be quantised.
    ScalesOfPlainCache,
    /// A scale that no value can be multiplied by.
    ScaleValue {
        /// The layer.
        layer: String,
        /// The scale.
        got: String,
    },
    /// A layer without a scale of K or of V, or listed twice.
    LayerScales {
        /// The layer.
        layer: String,
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
            Self::Text { field } => detail(
                "text",
                field,
                "empty, too long or not plain text",
                format_args!("1 to {MAX_NAME_BYTES} printable bytes"),
            ),
            Self::OutOfRange { field, got, max } => detail(
                "out-of-range",
                field,
                got,
                format_args!("at most {max}, and a count at least 1"),
            ),
            Self::ScalesOfPlainCache => detail(
                "scales-of-plain-cache",
                "scales",
                "scales of a cache that is not quantised",
                "none",
            ),
            Self::ScaleValue { layer, got } => detail(
                "scale-value",
                format_args!("scales of layer {layer}"),
                got,
                "a finite number above 0",
            ),
            Self::LayerScales { layer } => detail(
                "layer-scales",
                format_args!("scales of layer {layer}"),
                "none of K or of V, or the layer twice",
                "each layer once, with scales of K and of V",
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
