//! The order of a whole cache in memory: vLLM's six layouts of `[L, B, H, N, C]`.
//!
//! L layer, B block, H head slot, N token, C the content of one slot and token. The names are those of
//! vLLM's `KVCacheLayout`, outermost axis first; HND and NHD are the old names of two of them.

use std::fmt;
use std::str::FromStr;

use crate::error::RegionError;
use crate::family::Interior;

/// An axis of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Layer,
    Block,
    Slot,
    Token,
}

/// One of vLLM's layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[L, B, H, N, C]`, also HND.
    Lbhnc,
    /// `[L, B, N, H, C]`, also NHD.
    Lbnhc,
    /// `[L, H, B, N, C]`: each head slot a plane over all blocks.
    Lhbnc,
    /// `[B, L, H, N, C]`.
    Blhnc,
    /// `[B, L, N, H, C]`.
    Blnhc,
    /// `[B, H, L, N, C]`.
    Bhlnc,
}

/// Extents of a cache; `content_bytes` is C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Layers.
    pub layers: u64,
    /// Blocks.
    pub blocks: u64,
    /// Head slots of a page.
    pub slots: u64,
    /// Tokens of a page.
    pub tokens: u64,
    /// Bytes of one slot and token.
    pub content_bytes: u64,
}

/// Bytes from one index of an axis to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strides {
    /// Layer.
    pub layer_bytes: u64,
    /// Block.
    pub block_bytes: u64,
    /// Head slot.
    pub slot_bytes: u64,
    /// Token.
    pub token_bytes: u64,
    /// The whole cache.
    pub total_bytes: u64,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Self; 6] =
        [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// The name of `KVCacheLayout`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// Axes from the outermost in; C is always innermost.
    const fn order(self) -> [Axis; 4] {
        use Axis::{Block, Layer, Slot, Token};
        match self {
            Self::Lbhnc => [Layer, Block, Slot, Token],
            Self::Lbnhc => [Layer, Block, Token, Slot],
            Self::Lhbnc => [Layer, Slot, Block, Token],
            Self::Blhnc => [Block, Layer, Slot, Token],
            Self::Blnhc => [Block, Layer, Token, Slot],
            Self::Bhlnc => [Block, Slot, Layer, Token],
        }
    }

    /// Whether heads or tokens are outermost inside a page.
    pub const fn interior(self) -> Interior {
        match self {
            Self::Lbnhc | Self::Blnhc => Interior::Nhc,
            _ => Interior::Hnc,
        }
    }

    /// Whether a page is one contiguous run; otherwise each of its head slots is.
    pub const fn is_page_contiguous(self) -> bool {
        !matches!(self, Self::Lhbnc | Self::Bhlnc)
    }

    /// Dense byte strides of a cache, or `None` past 2^64.
    pub fn strides(self, extents: Extents) -> Option<Strides> {
        let mut strides = Strides::default();
        let mut bytes = extents.content_bytes;
        for axis in self.order().into_iter().rev() {
            let (stride, extent) = match axis {
                Axis::Layer => (&mut strides.layer_bytes, extents.layers),
                Axis::Block => (&mut strides.block_bytes, extents.blocks),
                Axis::Slot => (&mut strides.slot_bytes, extents.slots),
                Axis::Token => (&mut strides.token_bytes, extents.tokens),
            };
            *stride = bytes;
            bytes = bytes.checked_mul(extent)?;
        }
        strides.total_bytes = bytes;
        Some(strides)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Layout {
    type Err = RegionError;

    fn from_str(name: &str) -> Result<Self, RegionError> {
        match name {
            "HND" => Ok(Self::Lbhnc),
            "NHD" => Ok(Self::Lbnhc),
            _ => Self::ALL
                .into_iter()
                .find(|layout| layout.name() == name)
                .ok_or_else(|| RegionError::UnknownLayout { got: name.chars().take(64).collect() }),
        }
    }
}
