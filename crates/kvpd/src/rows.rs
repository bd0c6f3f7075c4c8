//! Descriptor rows of one side, and the ids that name their blocks.

use crate::engine::Held;
use crate::error::PlanError;
use crate::region::{Memory, Region};

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

/// The rows of one side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Side {
    name: &'static str,
    pub(crate) memory: Memory,
    pub(crate) rows: Vec<Row>,
    /// The id after the last row's last block: regions may differ in their number of blocks.
    next_id: i32,
    /// Blocks that every row has.
    num_blocks: u32,
}

impl Side {
    pub(crate) fn new(name: &'static str, regions: &[Region]) -> Result<Self, PlanError> {
        let memory = regions.first().map_or(Memory::Dram, Region::memory);
        if regions.iter().any(|region| region.memory() != memory) {
            return Err(PlanError::MixedMemory { side: name });
        }
        let num_blocks = regions.iter().map(Region::num_blocks).min().unwrap_or(0);
        Ok(Self { name, memory, rows: Vec::new(), next_id: 0, num_blocks })
    }

    /// Adds the row of a part of one region's blocks, and returns the id of its block 0.
    pub(crate) fn push(&mut self, regions: &[Region], part: Held) -> Result<i32, PlanError> {
        let region = regions.get(part.region).ok_or(PlanError::Untagged { side: self.name })?;
        let base = self.next_id;
        let next = i32::try_from(region.num_blocks())
            .ok()
            .and_then(|num_blocks| base.checked_add(num_blocks));
        self.next_id = next.ok_or(PlanError::TooManyDescriptors)?;
        self.rows.push(Row {
            // Inside block 0, which the region proved to exist.
            address: region.address().get().saturating_add(part.block_offset),
            num_bytes: part.num_bytes,
            device: region.device().into(),
            stride_bytes: region.block_stride_bytes(),
            num_blocks: region.num_blocks().into(),
        });
        Ok(base)
    }

    /// Whether the row added last is dense.
    pub(crate) fn last_is_dense(&self) -> bool {
        self.rows.last().is_some_and(Row::is_dense)
    }

    /// Refuses a block that some row has not.
    pub(crate) fn check(&self, blocks: &[i32]) -> Result<(), PlanError> {
        let outside = |block: &&i32| block.unsigned_abs() >= self.num_blocks;
        match blocks.iter().find(outside) {
            Some(block) => Err(PlanError::NoSuchBlock {
                side: self.name,
                block: block.unsigned_abs(),
                num_blocks: self.num_blocks,
            }),
            None => Ok(()),
        }
    }
}

/// What one region on each side has in common of one layer's page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Id of the local row's block 0.
    pub(crate) local_base: i32,
    /// Id of the remote row's block 0.
    pub(crate) remote_base: i32,
    /// Whether NIXL merges neighbours: both rows are dense.
    pub(crate) merges: bool,
}

/// Where the pages of a READ lie on the local side.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Landing<'a> {
    /// In these blocks of every layer.
    Blocks(&'a [i32]),
    /// From page `first` of the slab on, layer after layer, each `layer_pages` long.
    Slot {
        /// Page of the slab.
        first: i32,
        /// Pages from one layer position to the next.
        layer_pages: i32,
    },
}

impl Landing<'_> {
    /// Writes the ids of a row's pages at one layer position.
    fn write<'i>(self, ids: impl Iterator<Item = &'i mut i32>, base: i32, position: i32) {
        match self {
            Self::Blocks(blocks) => write(ids, base, blocks.iter().copied()),
            Self::Slot { first, layer_pages } => {
                write(ids, base, first + position * layer_pages..);
            }
        }
    }
}

/// The order of a READ's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Row after row: neighbours merge.
    ByRow,
    /// Page after page: neighbours lie in different rows, so none merge (unless there is one row).
    ByPage,
}

impl Order {
    /// "by_row" or "by_page".
    pub const fn name(self) -> &'static str {
        match self {
            Self::ByRow => "by_row",
            Self::ByPage => "by_page",
        }
    }
}

/// One READ: which layers' parts, where its pages land, and where they lie on the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read<'a> {
    /// Parts of each layer.
    pub(crate) layers: &'a [Vec<Part>],
    pub(crate) landing: Landing<'a>,
    /// As many as land.
    pub(crate) remote: &'a [i32],
    pub(crate) order: Order,
}

impl Read<'_> {
    /// Number of ids on each side.
    pub(crate) fn num_ids(&self) -> Option<usize> {
        self.num_rows().checked_mul(self.remote.len()).filter(|&ids| i32::try_from(ids).is_ok())
    }

    /// Descriptors before merging.
    pub(crate) fn num_planned(&self) -> u64 {
        u64::try_from(self.num_rows().saturating_mul(self.remote.len())).unwrap_or(u64::MAX)
    }

    fn num_rows(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }

    /// Descriptors that are left when the pages make `num_runs` runs.
    pub(crate) fn num_merged(&self, num_runs: usize) -> u64 {
        let count = |value: usize| u64::try_from(value).unwrap_or(u64::MAX);
        let keeps_rows = self.order == Order::ByRow || self.num_rows() == 1;
        let pages = self.remote.len();
        let left = |part: &Part| count(if part.merges && keeps_rows { num_runs } else { pages });
        self.layers.iter().flatten().map(left).fold(0, u64::saturating_add)
    }

    /// Writes the ids of both sides; each is [`Self::num_ids`] long.
    pub(crate) fn write(&self, local: &mut [i32], remote: &mut [i32]) {
        let num_rows = self.num_rows().max(1);
        let pages = self.remote.len().max(1);
        let parts =
            (0..).zip(self.layers).flat_map(|(at, parts)| parts.iter().map(move |p| (at, p)));
        for (row, (position, part)) in parts.enumerate() {
            // Two loops, so that the compiler sees plain slices in the one that matters.
            match self.order {
                Order::ByRow => {
                    let range = row * pages..(row + 1) * pages;
                    let (Some(ours), Some(theirs)) =
                        (local.get_mut(range.clone()), remote.get_mut(range))
                    else {
                        return;
                    };
                    self.landing.write(ours.iter_mut(), part.local_base, position);
                    write(theirs.iter_mut(), part.remote_base, self.remote.iter().copied());
                }
                Order::ByPage => {
                    let ours = local.iter_mut().skip(row).step_by(num_rows);
                    let theirs = remote.iter_mut().skip(row).step_by(num_rows);
                    self.landing.write(ours, part.local_base, position);
                    write(theirs, part.remote_base, self.remote.iter().copied());
                }
            }
        }
    }
}

/// Ids of blocks that were checked to lie in the row: base + block fits.
fn write<'i>(ids: impl Iterator<Item = &'i mut i32>, base: i32, blocks: impl Iterator<Item = i32>) {
    for (id, block) in ids.zip(blocks) {
        *id = base + block;
    }
}
