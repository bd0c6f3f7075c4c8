//! The page formats that engines are known to keep: each is a row of strides, none is a class.

use std::fmt::Write;

use crate::component::{Component, Tiling};
use crate::element::ElementType;
use crate::error::FormatError;
use crate::units::MAX_EXTENT;

/// Order of heads and tokens inside a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interior {
    /// Heads outside tokens.
    Hnc,
    /// Tokens outside heads.
    Nhc,
}

impl Interior {
    /// "HNC" or "NHC".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hnc => "HNC",
            Self::Nhc => "NHC",
        }
    }
}

/// The two V planes that AITER's kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShuffledV {
    /// `[H, N/x, D, x]`, read by the assembly paged attention.
    Tiled,
    /// `[H, D, N]`, written by the Triton cache writer.
    Transposed,
}

impl ShuffledV {
    /// "tiled" or "transposed".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tiled => "tiled",
            Self::Transposed => "transposed",
        }
    }
}

/// Extents of K and V in a page, checked against the limits, so that products of them and of an
/// element size stay below 2^53.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub(crate) heads: u32,
    pub(crate) tokens: u32,
    pub(crate) head_dim: u32,
    pub(crate) element: ElementType,
}

impl Shape {
    /// # Errors
    /// An extent is 0 or above the limit.
    pub fn new(
        heads: u32,
        tokens: u32,
        head_dim: u32,
        element: ElementType,
    ) -> Result<Self, FormatError> {
        for (field, got) in [("heads", heads), ("tokens", tokens), ("head_dim", head_dim)] {
            if got == 0 || got > MAX_EXTENT {
                return Err(FormatError::Extent { field, got: got.into() });
            }
        }
        Ok(Self { heads, tokens, head_dim, element })
    }
}

/// A known family with its variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Family {
    Standard(Interior),
    SplitKv(Interior),
    AiterShuffle(ShuffledV),
}

/// Where one axis of one component goes: (tile, bytes per tile, bytes per index).
type Axis = (u32, u64, u64);

/// Components and bytes of each plane.
pub(crate) type Rows = (Vec<Component>, Vec<u64>);

impl Family {
    /// In the order in which a map is recognised: where two variants place every element alike
    /// (one head; as many tokens as `x`), the first names both.
    pub(crate) const ALL: [Self; 6] = [
        Self::Standard(Interior::Hnc),
        Self::Standard(Interior::Nhc),
        Self::SplitKv(Interior::Hnc),
        Self::SplitKv(Interior::Nhc),
        Self::AiterShuffle(ShuffledV::Tiled),
        Self::AiterShuffle(ShuffledV::Transposed),
    ];

    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Standard(_) => "standard",
            Self::SplitKv(_) => "split-kv",
            Self::AiterShuffle(_) => "aiter-shuffle",
        }
    }

    /// The table of strides. With e = element bytes and x = 16 / e:
    ///
    /// | family | K | V |
    /// |---|---|---|
    /// | standard HNC, NHC | `[H, N, 2*D]`, `[N, H, 2*D]`, first D | the same, last D |
    /// | split-kv HNC, NHC | `[H, N, D]`, `[N, H, D]` | the same, second plane |
    /// | aiter-shuffle | `[H, D/x, N, x]` | `[H, N/x, D, x]` or `[H, D, N]`, second plane |
    pub(crate) fn rows(self, shape: Shape) -> Result<Rows, FormatError> {
        let Shape { heads, tokens, head_dim, element } = shape;
        let (h, n, d) = (u64::from(heads), u64::from(tokens), u64::from(head_dim));
        let e = u64::from(element.bytes());
        let x = 16 / element.bytes();
        let xe = 16; // bytes of x elements: the width of one vector access
        let row = |name, plane, base_bytes, head_stride, token: Axis, channel: Axis| {
            Component::new(
                name,
                element,
                plane,
                base_bytes,
                Tiling::plain("heads", heads, head_stride)?,
                Tiling::new("tokens", tokens, token.0, token.1, token.2)?,
                Tiling::new("head_dim", head_dim, channel.0, channel.1, channel.2)?,
            )
        };
        let interleaved = |interior, width: u64| match interior {
            Interior::Hnc => (n * width, (tokens, 0, width)),
            Interior::Nhc => (width, (tokens, 0, h * width)),
        };
        let channel = (head_dim, 0, e);
        let one_side = h * n * d * e;
        Ok(match self {
            Self::Standard(interior) => {
                let (head, token) = interleaved(interior, 2 * d * e);
                let k = row("k", 0, 0, head, token, channel)?;
                let v = row("v", 0, d * e, head, token, channel)?;
                (vec![k, v], vec![2 * one_side])
            }
            Self::SplitKv(interior) => {
                let (head, token) = interleaved(interior, d * e);
                let k = row("k", 0, 0, head, token, channel)?;
                let v = row("v", 1, 0, head, token, channel)?;
                (vec![k, v], vec![one_side, one_side])
            }
            Self::AiterShuffle(variant) => {
                let head = n * d * e;
                let k = row("k", 0, 0, head, (tokens, 0, xe), (x, n * xe, e))?;
                let v = match variant {
                    ShuffledV::Tiled => row("v", 1, 0, head, (x, d * xe, e), (head_dim, 0, xe))?,
                    ShuffledV::Transposed => {
                        row("v", 1, 0, head, (tokens, 0, e), (head_dim, 0, n * e))?
                    }
                };
                (vec![k, v], vec![one_side, one_side])
            }
        })
    }

    /// The family whose table gives exactly this map, if any, and the shape.
    pub(crate) fn recognise(
        components: &[Component],
        plane_bytes: &[u64],
    ) -> Option<(Self, Shape)> {
        let k = components.iter().find(|component| component.name() == "k")?;
        let (heads, tokens) = (k.heads().extent(), k.tokens().extent());
        let shape = Shape::new(heads, tokens, k.channels().extent(), k.element()).ok()?;
        let fits = |family: &Self| {
            family
                .rows(shape)
                .is_ok_and(|(rows, planes)| rows == components && planes == plane_bytes)
        };
        Self::ALL.into_iter().find(fits).map(|family| (family, shape))
    }

    pub(crate) fn name(self, shape: Shape) -> String {
        let Shape { heads, tokens, head_dim, element } = shape;
        let mut name = format!("{}(H={heads}, N={tokens}, D={head_dim}, {element}, ", self.label());
        // Writing to a String cannot fail.
        let _ = match self {
            Self::Standard(interior) | Self::SplitKv(interior) => name.write_str(interior.name()),
            Self::AiterShuffle(v) => write!(name, "v={}", v.name()),
        };
        name.push(')');
        name
    }
}
