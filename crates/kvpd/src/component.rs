//! A component: a named tensor inside a page, placed by one affine map over split axes.

use std::fmt::Write;

use crate::element::ElementType;
use crate::error::FormatError;
use crate::units::MAX_EXTENT;

/// How one axis is placed: index `i` lies at
/// `(i / tile) * tile_stride_bytes + (i % tile) * stride_bytes`.
///
/// Kept in canonical form, so that two tilings are equal exactly when they place every index alike:
/// a tile is only kept where the axis really breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    extent: u32,
    tile: u32,
    tile_stride_bytes: u64,
    stride_bytes: u64,
}

impl Tiling {
    /// An axis of `extent` indices in tiles of `tile`.
    ///
    /// # Errors
    /// The extent is 0 or above the limit, or the tile does not divide it.
    pub fn new(
        axis: &'static str,
        extent: u32,
        tile: u32,
        tile_stride_bytes: u64,
        stride_bytes: u64,
    ) -> Result<Self, FormatError> {
        if extent == 0 || extent > MAX_EXTENT {
            return Err(FormatError::Extent { field: axis, got: extent.into() });
        }
        if tile == 0 || !extent.is_multiple_of(tile) {
            return Err(FormatError::NotDivisible { field: axis, got: extent, divisor: tile });
        }
        let whole =
            |stride_bytes| Self { extent, tile: extent, tile_stride_bytes: 0, stride_bytes };
        Ok(if extent == 1 {
            whole(0)
        } else if tile == extent {
            whole(stride_bytes)
        } else if tile == 1 || stride_bytes.checked_mul(tile.into()) == Some(tile_stride_bytes) {
            whole(if tile == 1 { tile_stride_bytes } else { stride_bytes })
        } else {
            Self { extent, tile, tile_stride_bytes, stride_bytes }
        })
    }

    /// An axis with one stride.
    ///
    /// # Errors
    /// The extent is 0 or above the limit.
    pub fn plain(axis: &'static str, extent: u32, stride_bytes: u64) -> Result<Self, FormatError> {
        Self::new(axis, extent, extent.max(1), 0, stride_bytes)
    }

    /// Number of indices.
    pub const fn extent(&self) -> u32 {
        self.extent
    }

    /// Indices per tile; the extent when the axis has one stride.
    pub const fn tile(&self) -> u32 {
        self.tile
    }

    /// Bytes from one tile to the next; 0 when there is only one.
    pub const fn tile_stride_bytes(&self) -> u64 {
        self.tile_stride_bytes
    }

    /// Bytes from one index to the next inside a tile.
    pub const fn stride_bytes(&self) -> u64 {
        self.stride_bytes
    }

    /// Byte offset of an index. Saturates where the axis was never proved to fit a plane.
    pub fn offset(&self, index: u32) -> u64 {
        // `tile` is at least 1 by construction, so neither division is undefined.
        let (high, low) = (index / self.tile, index % self.tile);
        let high = u64::from(high).saturating_mul(self.tile_stride_bytes);
        high.saturating_add(u64::from(low).saturating_mul(self.stride_bytes))
    }

    /// The largest offset of any index, or `None` past 2^64.
    fn span(&self) -> Option<u64> {
        let steps =
            |count: u32, stride: u64| u64::from(count.saturating_sub(1)).checked_mul(stride);
        let tiles = self.extent / self.tile;
        steps(tiles, self.tile_stride_bytes)?.checked_add(steps(self.tile, self.stride_bytes)?)
    }
}

/// A named tensor of `[heads, tokens, channels]` elements inside one plane of a page.
///
/// The byte of element (h, n, d) is `base_bytes + heads.offset(h) + tokens.offset(n) + channels.offset(d)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Component {
    name: String,
    element: ElementType,
    plane: u32,
    base_bytes: u64,
    heads: Tiling,
    tokens: Tiling,
    channels: Tiling,
}

impl Component {
    /// A component; whether it fits its plane is proved by the format that holds it.
    ///
    /// # Errors
    /// The name is not 1 to 32 of `a-z0-9_`, or the largest offset passes 2^64.
    pub fn new(
        name: &str,
        element: ElementType,
        plane: u32,
        base_bytes: u64,
        heads: Tiling,
        tokens: Tiling,
        channels: Tiling,
    ) -> Result<Self, FormatError> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if name.is_empty() || name.len() > 32 || !name.bytes().all(plain) {
            return Err(FormatError::ComponentName { got: name.chars().take(64).collect() });
        }
        let component =
            Self { name: name.to_owned(), element, plane, base_bytes, heads, tokens, channels };
        match component.end_bytes() {
            Some(_) => Ok(component),
            None => Err(FormatError::Overflow { field: "component", component: name.to_owned() }),
        }
    }

    /// `k`, `v`, `k_scale`, ...
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Type of the elements.
    pub const fn element(&self) -> ElementType {
        self.element
    }

    /// Number of the plane that holds the component.
    pub const fn plane(&self) -> u32 {
        self.plane
    }

    /// Byte of element (0, 0, 0) in the plane.
    pub const fn base_bytes(&self) -> u64 {
        self.base_bytes
    }

    /// The head axis.
    pub const fn heads(&self) -> &Tiling {
        &self.heads
    }

    /// The token axis.
    pub const fn tokens(&self) -> &Tiling {
        &self.tokens
    }

    /// The channel axis.
    pub const fn channels(&self) -> &Tiling {
        &self.channels
    }

    /// Number of elements.
    pub fn num_elements(&self) -> u64 {
        // Three extents of at most 2^16: cannot overflow.
        u64::from(self.heads.extent)
            .saturating_mul(u64::from(self.tokens.extent))
            .saturating_mul(u64::from(self.channels.extent))
    }

    /// Byte of element (h, n, d), or `None` outside the extents.
    pub fn offset(&self, head: u32, token: u32, channel: u32) -> Option<u64> {
        let inside = head < self.heads.extent
            && token < self.tokens.extent
            && channel < self.channels.extent;
        inside.then(|| {
            self.base_bytes
                .saturating_add(self.heads.offset(head))
                .saturating_add(self.tokens.offset(token))
                .saturating_add(self.channels.offset(channel))
        })
    }

    /// One past the last byte, or `None` past 2^64.
    pub fn end_bytes(&self) -> Option<u64> {
        self.base_bytes
            .checked_add(self.heads.span()?)?
            .checked_add(self.tokens.span()?)?
            .checked_add(self.channels.span()?)?
            .checked_add(self.element.bytes().into())
    }

    /// Whether index i of `axis` keeps to bytes `[i * slot_bytes, (i + 1) * slot_bytes)` of the plane.
    pub(crate) fn keeps_to_slots(&self, axis: &Tiling, slot_bytes: u64) -> bool {
        let uniform =
            axis.extent == 1 || (axis.tile == axis.extent && axis.stride_bytes == slot_bytes);
        let rest = self.end_bytes().zip(axis.span()).and_then(|(end, span)| end.checked_sub(span));
        uniform && rest.is_some_and(|end| end <= slot_bytes)
    }

    /// Whether the two hold the same tensor, wherever its elements lie.
    pub fn same_tensor(&self, other: &Self) -> bool {
        self.name == other.name
            && self.element == other.element
            && self.heads.extent == other.heads.extent
            && self.tokens.extent == other.tokens.extent
            && self.channels.extent == other.channels.extent
    }

    /// The line of the canonical text that a digest is taken of.
    pub(crate) fn write_canonical(&self, text: &mut String) {
        let axis = |axis: &Tiling| {
            format!(
                "{}/{}:{}:{}",
                axis.extent, axis.tile, axis.tile_stride_bytes, axis.stride_bytes
            )
        };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "component {} {} plane {} base {} heads {} tokens {} channels {}",
            self.name,
            self.element,
            self.plane,
            self.base_bytes,
            axis(&self.heads),
            axis(&self.tokens),
            axis(&self.channels),
        );
    }
}
