//! Transfer plans: descriptor rows once per peer, descriptor ids once per request.
//!
//! Bytes are moved raw: byte i of a page on the remote side lands at byte i of the page on the local
//! side, planes counted one after another. Where that is decides the placement: in the cache itself (in
//! place, per page: a standard page fills the K block and then the V block), or in a slab of pages in
//! the remote's format (staged). Both are the same overlap of two ways to hold a page.

use std::collections::HashMap;

use crate::engine::{Held, LayerGroup, group_layers};
use crate::error::PlanError;
use crate::region::{Memory, Region, Strided, Tag};
use crate::runs::Runs;
use crate::units::{Address, Bytes};

/// One descriptor row as NIXL's strided lists take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// First byte of block 0's part.
    pub address: u64,
    /// Bytes of the part.
    pub num_bytes: u64,
    /// Number of the device.
    pub device: u64,
    /// Bytes from one block's part to the next.
    pub stride_bytes: u64,
    /// Blocks.
    pub num_blocks: u64,
}

impl Row {
    /// Whether NIXL (1.5 and later) merges consecutive ids of this row.
    pub const fn is_dense(&self) -> bool {
        self.num_bytes == self.stride_bytes
    }

    /// The five numbers in NIXL's order: address, length, device, stride, count.
    pub const fn to_array(self) -> [u64; 5] {
        [self.address, self.num_bytes, self.device, self.stride_bytes, self.num_blocks]
    }
}

/// The rows of one side and the id of each row's block 0.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Side {
    name: &'static str,
    memory: Memory,
    rows: Vec<Row>,
    /// Cumulative counts: regions may differ in their number of blocks.
    bases: Vec<i32>,
    /// Blocks that every row has.
    num_blocks: u32,
}

/// How pages travel from a peer's regions into local ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPlan {
    local: Side,
    remote: Side,
    page_bytes_all_layers: u64,
}

impl TransferPlan {
    /// Plans raw reads of `source`'s pages into `target`.
    ///
    /// # Errors
    /// A side has an untagged region, or does not hold its pages exactly once; layers or page sizes
    /// differ; a side mixes kinds of memory; the rows have more blocks than int32 ids can name.
    pub fn new(target: &[Region], source: &[Region]) -> Result<Self, PlanError> {
        let ours = tagged_groups("local", target)?;
        let theirs = tagged_groups("remote", source)?;
        let by_name: HashMap<&[String], &LayerGroup> =
            theirs.iter().map(|group| (group.layers.as_slice(), group)).collect();
        let unmatched =
            theirs.iter().find(|group| !ours.iter().any(|our| our.layers == group.layers));
        let mut local = Side::new("local", target)?;
        let mut remote = Side::new("remote", source)?;
        let mut page_bytes_all_layers = 0_u64;
        let missing = |group: &LayerGroup| PlanError::Layers {
            layer: group.layers.first().cloned().unwrap_or_default(),
        };
        if let Some(group) = unmatched {
            return Err(missing(group));
        }
        for group in &ours {
            let peer = by_name.get(group.layers.as_slice()).ok_or_else(|| missing(group))?;
            let bytes =
                |held: &[Held]| held.last().map_or(0, |last| last.page_start + last.num_bytes);
            let (here, there) = (bytes(&group.held), bytes(&peer.held));
            if here != there {
                let layer = group.layers.first().cloned().unwrap_or_default();
                return Err(PlanError::PageBytes { layer, local: here, remote: there });
            }
            page_bytes_all_layers = page_bytes_all_layers.saturating_add(here);
            for (ours, theirs) in overlaps(&group.held, &peer.held) {
                local.push(target, ours)?;
                remote.push(source, theirs)?;
            }
        }
        Ok(Self { local, remote, page_bytes_all_layers })
    }

    /// Rows of this side, one per row of the remote side.
    pub fn local_rows(&self) -> &[Row] {
        &self.local.rows
    }

    /// Rows of the peer.
    pub fn remote_rows(&self) -> &[Row] {
        &self.remote.rows
    }

    /// Kind of this side's memory.
    pub const fn local_memory(&self) -> Memory {
        self.local.memory
    }

    /// Kind of the peer's memory.
    pub const fn remote_memory(&self) -> Memory {
        self.remote.memory
    }

    /// Bytes moved per block: the pages of all layers.
    pub const fn page_bytes_all_layers(&self) -> u64 {
        self.page_bytes_all_layers
    }

    /// Descriptor ids (local, remote), row by row, pages in run order.
    ///
    /// # Errors
    /// A block is outside the rows; there are more descriptors than int32 ids can name.
    pub fn descriptor_ids(&self, runs: &Runs) -> Result<(Vec<i32>, Vec<i32>), PlanError> {
        let count = self.num_ids(runs)?;
        let (mut local, mut remote) = (vec![0; count], vec![0; count]);
        self.write_descriptor_ids(runs, &mut local, &mut remote)?;
        Ok((local, remote))
    }

    /// [`Self::descriptor_ids`] into memory of the caller, [`Self::num_descriptors`] long on each side.
    ///
    /// # Errors
    /// As there; also when a side has another length. What was written then is meaningless.
    pub fn write_descriptor_ids(
        &self,
        runs: &Runs,
        local: &mut [i32],
        remote: &mut [i32],
    ) -> Result<(), PlanError> {
        let count = self.num_ids(runs)?;
        if local.len() != count || remote.len() != count {
            return Err(PlanError::LengthMismatch { local: local.len(), remote: remote.len() });
        }
        self.local.write_ids(runs.local_ids(), local)?;
        self.remote.write_ids(runs.remote_ids(), remote)
    }

    /// Descriptors before merging: rows x pages.
    ///
    /// # Errors
    /// More than int32 ids can name.
    pub fn num_descriptors(&self, runs: &Runs) -> Result<u64, PlanError> {
        let count = self.num_ids(runs)?;
        u64::try_from(count).map_err(|_| PlanError::TooManyDescriptors)
    }

    fn num_ids(&self, runs: &Runs) -> Result<usize, PlanError> {
        let count = self.local.rows.len().checked_mul(runs.num_pages());
        count.filter(|&count| i32::try_from(count).is_ok()).ok_or(PlanError::TooManyDescriptors)
    }

    /// Descriptors after NIXL merged neighbours: one per run where both rows are dense, else one per page.
    pub fn num_merged_descriptors(&self, runs: &Runs) -> u64 {
        let count = |value: usize| u64::try_from(value).unwrap_or(u64::MAX);
        let per_row = |(ours, theirs): (&Row, &Row)| {
            let merges = ours.is_dense() && theirs.is_dense();
            count(if merges { runs.len() } else { runs.num_pages() })
        };
        self.local.rows.iter().zip(&self.remote.rows).map(per_row).fold(0, u64::saturating_add)
    }
}

impl Side {
    fn new(name: &'static str, regions: &[Region]) -> Result<Self, PlanError> {
        let memory = regions.first().map_or(Memory::Dram, Region::memory);
        if regions.iter().any(|region| region.memory() != memory) {
            return Err(PlanError::MixedMemory { side: name });
        }
        let num_blocks = regions.iter().map(Region::num_blocks).min().unwrap_or(0);
        Ok(Self { name, memory, rows: Vec::new(), bases: Vec::new(), num_blocks })
    }

    fn push(&mut self, regions: &[Region], part: Held) -> Result<(), PlanError> {
        let Some(region) = regions.get(part.region) else { return Ok(()) };
        let base =
            self.bases.last().copied().zip(self.rows.last()).map_or(Some(0), |(base, row)| {
                i32::try_from(row.num_blocks).ok().and_then(|blocks| base.checked_add(blocks))
            });
        let base = base.filter(|&base| {
            i32::try_from(region.num_blocks())
                .is_ok_and(|blocks| base.checked_add(blocks).is_some())
        });
        self.bases.push(base.ok_or(PlanError::TooManyDescriptors)?);
        self.rows.push(Row {
            // Inside block 0, which the region proved to exist.
            address: region.address().get().saturating_add(part.block_offset),
            num_bytes: part.num_bytes,
            device: region.device().into(),
            stride_bytes: region.block_stride_bytes(),
            num_blocks: region.num_blocks().into(),
        });
        Ok(())
    }

    /// Writes the ids of `blocks` in every row; `ids` is rows x blocks long.
    fn write_ids(&self, blocks: &[i32], ids: &mut [i32]) -> Result<(), PlanError> {
        let outside = |block: &&i32| block.unsigned_abs() >= self.num_blocks;
        if let Some(block) = blocks.iter().find(outside) {
            let (side, num_blocks) = (self.name, self.num_blocks);
            return Err(PlanError::NoSuchBlock { side, block: block.unsigned_abs(), num_blocks });
        }
        for (&base, row) in self.bases.iter().zip(ids.chunks_exact_mut(blocks.len().max(1))) {
            for (id, &block) in row.iter_mut().zip(blocks) {
                // base + block < base + the row's blocks, which was proved to fit.
                *id = base.wrapping_add(block);
            }
        }
        Ok(())
    }
}

fn tagged_groups(side: &'static str, regions: &[Region]) -> Result<Vec<LayerGroup>, PlanError> {
    if regions.iter().any(|region| region.tag().is_none()) {
        return Err(PlanError::Untagged { side });
    }
    Ok(group_layers(regions)?)
}

/// Cuts two ways to hold one page into parts that lie in one region on both sides.
fn overlaps(ours: &[Held], theirs: &[Held]) -> Vec<(Held, Held)> {
    let mut parts = Vec::new();
    let (mut ours, mut theirs) =
        (ours.iter().copied().peekable(), theirs.iter().copied().peekable());
    while let (Some(a), Some(b)) = (ours.peek_mut(), theirs.peek_mut()) {
        let num_bytes = a.num_bytes.min(b.num_bytes);
        parts.push((Held { num_bytes, ..*a }, Held { num_bytes, ..*b }));
        let is_done = |part: &mut Held| {
            part.page_start += num_bytes;
            part.block_offset += num_bytes;
            part.num_bytes -= num_bytes;
            part.num_bytes == 0
        };
        let (a_done, b_done) = (is_done(a), is_done(b));
        if a_done {
            ours.next();
        }
        if b_done {
            theirs.next();
        }
    }
    parts
}

/// Bytes of a slab for `num_pages` pages of every layer of `source`.
///
/// # Errors
/// `source` has an untagged region or does not hold its pages exactly once; the size passes 2^64.
pub fn slab_bytes(source: &[Region], num_pages: u64) -> Result<u64, PlanError> {
    let overflow = crate::error::RegionError::Overflow { field: "slab bytes" };
    let groups = tagged_groups("remote", source)?;
    let page_bytes = groups
        .iter()
        .filter_map(|group| group.format.as_ref())
        .try_fold(Bytes(0), |sum, format| sum.plus(Bytes(format.page_bytes())));
    let total = page_bytes.and_then(|bytes| bytes.times(num_pages));
    Ok(total.ok_or(overflow)?.get())
}

/// A dense slab for raw pages of `source`: one region per layer, layer after layer.
///
/// # Errors
/// As [`slab_bytes`]; also when the slab cannot be described (no pages, addresses past 2^64).
pub fn slab_regions(
    source: &[Region],
    address: Address,
    num_pages: u64,
    memory: Memory,
    device: u32,
) -> Result<Vec<Region>, PlanError> {
    slab_bytes(source, num_pages)?;
    let overflow = || crate::error::RegionError::Overflow { field: "slab address" };
    let mut at = address;
    let mut regions = Vec::new();
    for group in tagged_groups("remote", source)? {
        let Some(format) = group.format else { continue };
        let page_bytes = format.page_bytes();
        let strided = Strided {
            address: at,
            num_blocks: num_pages,
            block_bytes: page_bytes,
            block_stride_bytes: page_bytes,
            extent_bytes: None,
            memory,
            device,
        };
        let layer_bytes = Bytes(page_bytes).times(num_pages).ok_or_else(overflow)?;
        at = at.plus(layer_bytes).ok_or_else(overflow)?;
        let tag = Tag { spans: format.whole_planes(), format };
        regions.push(Region::new(strided, Some(tag), group.layers)?);
    }
    Ok(regions)
}
