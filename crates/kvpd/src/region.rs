//! A region: registered strided memory, and which bytes of a page each of its blocks holds.
//!
//! The layout of a cache lives here. A packed cache in LBHNC is one region a layer; in LHBNC it is one
//! region per head; a shuffled cache in LHBNC is a K region and a V region, in LBHNC one region that
//! holds the K plane and then the V plane.

use crate::error::RegionError;
use crate::facts::is_plain_name;
use crate::family::Interior;
use crate::format::{PageFormat, PlaneSpan};
use crate::layout::{Extents, Layout};
use crate::units::{Address, BlockId, Bytes, MAX_LAYERS_PER_REGION, MAX_REGIONS};

/// Kind of memory, as NIXL tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Host memory.
    Dram,
    /// Device memory.
    Vram,
}

impl Memory {
    /// "dram" or "vram".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Vram => "vram",
        }
    }
}

/// The numbers of a region, before they are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// First byte of block 0.
    pub address: Address,
    /// Blocks.
    pub num_blocks: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes from one block to the next; may exceed the block's bytes.
    pub block_stride_bytes: u64,
    /// Registered bytes from `address`, if known.
    pub extent_bytes: Option<u64>,
    /// Kind of memory.
    pub memory: Memory,
    /// Number of the device; 0 for host memory.
    pub device: u32,
}

/// What the blocks of a region hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Format of the page.
    pub format: PageFormat,
    /// Which of the page's bytes a block holds, in order.
    pub spans: Vec<PlaneSpan>,
}

/// Registered strided memory whose last byte is known to exist.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    address: Address,
    num_blocks: u32,
    block_bytes: u64,
    block_stride_bytes: u64,
    end: u64,
    extent_bytes: u64,
    memory: Memory,
    device: u32,
    tag: Option<Tag>,
    layers: Vec<String>,
}

impl Region {
    /// A region; `tag` is `None` for memory whose format nobody declared.
    ///
    /// # Errors
    /// Counts out of range; a block longer than the stride; blocks past the extent or past 2^64; spans
    /// outside the format's planes, overlapping, or of another length than the block; unusable layer names.
    pub fn new(
        strided: Strided,
        tag: Option<Tag>,
        layers: Vec<String>,
    ) -> Result<Self, RegionError> {
        let Strided { address, block_bytes, block_stride_bytes, memory, device, .. } = strided;
        let max_blocks = u64::from(BlockId::MAX);
        let num_blocks = u32::try_from(strided.num_blocks)
            .ok()
            .filter(|blocks| (1..=BlockId::MAX).contains(blocks))
            .ok_or(RegionError::OutOfRange {
                field: "num_blocks",
                got: strided.num_blocks,
                max: max_blocks,
            })?;
        if block_bytes == 0 {
            return Err(RegionError::OutOfRange { field: "block_bytes", got: 0, max: u64::MAX });
        }
        if block_bytes > block_stride_bytes {
            return Err(RegionError::LengthOverStride { block_bytes, block_stride_bytes });
        }
        let used_bytes = Bytes(block_stride_bytes)
            .times(u64::from(num_blocks).saturating_sub(1))
            .and_then(|last| last.plus(Bytes(block_bytes)))
            .ok_or(RegionError::Overflow { field: "num_blocks x block_stride_bytes" })?;
        let extent_bytes = strided.extent_bytes.unwrap_or(used_bytes.get());
        if used_bytes.get() > extent_bytes {
            let end_bytes = used_bytes.get();
            return Err(RegionError::OutOfExtent { end_bytes, extent_bytes });
        }
        if address.plus(Bytes(extent_bytes)).is_none() {
            return Err(RegionError::Overflow { field: "address + extent_bytes" });
        }
        if let Some(tag) = &tag {
            check_spans(tag, block_bytes)?;
        }
        let mut names: Vec<_> = layers.iter().collect();
        names.sort_unstable();
        names.dedup();
        if names.len() != layers.len()
            || layers.len() > MAX_LAYERS_PER_REGION
            || !layers.iter().all(|layer| is_plain_name(layer))
        {
            return Err(RegionError::Layers);
        }
        let end = address.get().saturating_add(used_bytes.get());
        Ok(Self {
            address,
            num_blocks,
            block_bytes,
            block_stride_bytes,
            end,
            extent_bytes,
            memory,
            device,
            tag,
            layers,
        })
    }

    /// First byte of block 0.
    pub const fn address(&self) -> Address {
        self.address
    }

    /// Blocks.
    pub const fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Bytes of a block.
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes from one block to the next.
    pub const fn block_stride_bytes(&self) -> u64 {
        self.block_stride_bytes
    }

    /// Registered bytes from the address.
    pub const fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// One past the last byte of the last block.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Kind of memory.
    pub const fn memory(&self) -> Memory {
        self.memory
    }

    /// Number of the device.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Format and spans; `None` when nobody declared them.
    pub const fn tag(&self) -> Option<&Tag> {
        self.tag.as_ref()
    }

    /// Names of the layers whose pages these are (several when layers share their KV).
    pub fn layers(&self) -> &[String] {
        &self.layers
    }

    /// Whether blocks follow each other without a gap. Only then does NIXL merge neighbours.
    pub const fn is_dense(&self) -> bool {
        self.block_bytes == self.block_stride_bytes
    }

    /// Address of a block.
    ///
    /// # Errors
    /// The region has no such block.
    pub fn block_address(&self, block: u64) -> Result<Address, RegionError> {
        let num_blocks = u64::from(self.num_blocks);
        if block >= num_blocks {
            return Err(RegionError::NoSuchBlock { block, num_blocks });
        }
        // Below `end`, which fits.
        Ok(Address(
            self.address.get().saturating_add(self.block_stride_bytes.saturating_mul(block)),
        ))
    }
}

/// The spans lie in their planes, do not overlap, and add up to the block.
fn check_spans(tag: &Tag, block_bytes: u64) -> Result<(), RegionError> {
    if tag.spans.is_empty() {
        return Err(RegionError::Planes { got: "empty, beside a format" });
    }
    let planes = tag.format.plane_bytes();
    let mut sum = 0_u64;
    for span in &tag.spans {
        let PlaneSpan { plane, start_bytes, num_bytes } = *span;
        let end = start_bytes.checked_add(num_bytes);
        let plane_bytes = usize::try_from(plane).ok().and_then(|plane| planes.get(plane));
        if num_bytes == 0 || end.zip(plane_bytes).is_none_or(|(end, &bytes)| end > bytes) {
            return Err(RegionError::NoSuchSpan { plane, start_bytes, num_bytes });
        }
        sum = sum.saturating_add(num_bytes);
    }
    let mut sorted = tag.spans.clone();
    sorted.sort();
    for (first, second) in sorted.iter().zip(sorted.iter().skip(1)) {
        if first.plane == second.plane
            && first.start_bytes.saturating_add(first.num_bytes) > second.start_bytes
        {
            return Err(RegionError::Planes { got: "holding a byte of the page twice" });
        }
    }
    if sum != block_bytes {
        return Err(RegionError::SpanBytes { span_bytes: sum, block_bytes });
    }
    Ok(())
}

/// Where a cache of one dense allocation begins and how many blocks it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheMemory {
    /// First byte of the cache.
    pub address: Address,
    /// Blocks.
    pub num_blocks: u64,
    /// Kind of memory.
    pub memory: Memory,
    /// Number of the device.
    pub device: u32,
}

/// The regions of a whole cache laid out densely from one address.
///
/// A page's head slots are its planes, or its heads when it has one plane. Where the layout keeps the
/// page together there is one region a layer, else one per layer and slot, layer after layer.
///
/// # Errors
/// The layout orders heads and tokens in another way than the format; sizes are out of range.
pub fn cache_regions(
    format: &PageFormat,
    layout: Layout,
    layers: &[String],
    cache: CacheMemory,
) -> Result<Vec<Region>, RegionError> {
    let slots = format.head_slots();
    let tokens = u64::from(format.tokens());
    let slot_bytes = slots.first().map_or(0, |slot| slot.num_bytes);
    let uniform = slots.iter().all(|slot| slot.num_bytes == slot_bytes);
    let one_plane = format.plane_bytes().len() == 1;
    // Tokens outside heads only makes sense for one plane: two planes would interleave per token,
    // which is another page.
    let orders_alike = match layout.interior() {
        Interior::Hnc => !one_plane || format.keeps(Interior::Hnc),
        Interior::Nhc => one_plane && format.keeps(Interior::Nhc),
    };
    if !orders_alike || !uniform || !slot_bytes.is_multiple_of(tokens.max(1)) {
        let format = format.name().to_owned();
        return Err(RegionError::LayoutAgainstFormat { layout: layout.name(), format });
    }
    let num_layers = layers.len();
    let num_regions = if layout.is_page_contiguous() {
        num_layers
    } else {
        num_layers.saturating_mul(slots.len())
    };
    if num_layers == 0 || num_regions > MAX_REGIONS {
        let got = u64::try_from(num_regions).unwrap_or(u64::MAX);
        return Err(RegionError::OutOfRange { field: "layers", got, max: 1 << 12 });
    }
    let overflow = || RegionError::Overflow { field: "cache bytes" };
    let extents = Extents {
        layers: u64::try_from(num_layers).map_err(|_| overflow())?,
        blocks: cache.num_blocks,
        slots: u64::try_from(slots.len()).map_err(|_| overflow())?,
        tokens,
        content_bytes: slot_bytes / tokens.max(1),
    };
    let strides = layout.strides(extents).ok_or_else(overflow)?;
    let holdings: Vec<Vec<PlaneSpan>> = if layout.is_page_contiguous() {
        vec![format.whole_planes()]
    } else {
        slots.into_iter().map(|slot| vec![slot]).collect()
    };
    let mut regions = Vec::with_capacity(num_regions);
    for (layer, name) in (0_u64..).zip(layers) {
        for (slot, spans) in (0_u64..).zip(&holdings) {
            let offset = Bytes(strides.layer_bytes)
                .times(layer)
                .and_then(|bytes| bytes.plus(Bytes(strides.slot_bytes).times(slot)?));
            let strided = Strided {
                address: offset.and_then(|bytes| cache.address.plus(bytes)).ok_or_else(overflow)?,
                num_blocks: cache.num_blocks,
                block_bytes: spans.iter().fold(0, |sum, span| sum.saturating_add(span.num_bytes)),
                block_stride_bytes: strides.block_bytes,
                extent_bytes: None,
                memory: cache.memory,
                device: cache.device,
            };
            let tag = Tag { format: format.clone(), spans: spans.clone() };
            regions.push(Region::new(strided, Some(tag), vec![name.clone()])?);
        }
    }
    Ok(regions)
}
