//! Newtypes with their units, and the limits that bound what a peer can make us compute.

use std::fmt;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self + other`, or `None` past 2^64.
    pub fn plus(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// `self * count`, or `None` past 2^64.
    pub fn times(self, count: u64) -> Option<Self> {
        self.0.checked_mul(count).map(Self)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.0)
    }
}

/// A virtual address in the process that owns the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address `bytes` further on, or `None` past 2^64.
    pub fn plus(self, bytes: Bytes) -> Option<Self> {
        self.0.checked_add(bytes.0).map(Self)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The number of a page inside a region. NIXL takes ids as int32, so a block id is at most 2^31 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The largest id.
    pub const MAX: u32 = i32::MAX.unsigned_abs();

    /// `None` for a negative id or one past 2^31 - 1.
    pub fn new(id: i64) -> Option<Self> {
        u32::try_from(id).ok().filter(|&id| id <= Self::MAX).map(Self)
    }

    /// The plain number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Heads, tokens or channels of one component.
pub const MAX_EXTENT: u32 = 1 << 16;
/// Bytes of one page. The proof of a format visits every element, so this bounds its time: a fraction
/// of a second for the largest page of single bytes.
pub const MAX_PAGE_BYTES: u64 = 1 << 24;
/// Planes of one page, and components of one format.
pub const MAX_PLANES: usize = 16;
/// Regions of one engine's rank.
pub const MAX_REGIONS: usize = 1 << 12;
/// Layers that share one region.
pub const MAX_LAYERS_PER_REGION: usize = 1 << 10;
/// Bytes of a name: layer, model, backend, family.
pub const MAX_NAME_BYTES: usize = 512;
/// Fields of a model's configuration that one engine names.
pub const MAX_MODEL_FIELDS: usize = 256;
/// Bytes of one such field as text.
pub const MAX_MODEL_FIELD_BYTES: usize = 1 << 12;
/// Scales of a quantised cache, of all layers together.
pub const MAX_SCALES: usize = 1 << 16;
