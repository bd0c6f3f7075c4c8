//! How a slab is cut into equal slots, once per peer.
//!
//! A slot holds raw pages as [layer position][page], densely: `group_layers` consecutive layers of up to
//! `slot_pages` pages. Neighbouring pages of a layer are neighbours in a slot, so a run of the peer's
//! pages stays one descriptor.

use std::fmt;

use crate::error::{PlanError, RegionError};
use crate::link::{LinkModel, float};
use crate::region::{Region, Strided, Tag};
use crate::units::{BlockId, Bytes};

/// What staged requests have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Layers of a request.
    pub num_layers: u32,
    /// Bytes of a page, the same in all layers.
    pub page_bytes: u64,
    /// Pages per layer of the largest request.
    pub max_pages: u32,
}

/// The geometry of the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    pub(crate) needs: Needs,
    pub(crate) group_layers: u32,
    pub(crate) slot_pages: u32,
    pub(crate) num_slots: u32,
    pub(crate) stride_pages: u32,
}

impl Slots {
    /// Cuts a slab into `num_slots` slots (fewer where it has fewer pages), and a slot into layers and
    /// pages so that the worst slowdown over requests of 1 to `max_pages` pages is least.
    ///
    /// Long requests want long runs, which more pages and fewer layers a slot keep whole; short ones
    /// want few chunks, which more layers give.
    ///
    /// # Errors
    /// The slab does not hold one page, or there is nothing to hold.
    pub fn choose(
        link: &LinkModel,
        needs: Needs,
        slab_bytes: u64,
        num_slots: u32,
    ) -> Result<Self, PlanError> {
        for (field, number) in [
            ("num_slots", num_slots),
            ("max_pages", needs.max_pages),
            ("num_layers", needs.num_layers),
        ] {
            if number == 0 || number > BlockId::MAX {
                return Err(PlanError::Count { field, got: number });
            }
        }
        let page_bytes = needs.page_bytes;
        let too_small = PlanError::SlabTooSmall { slab_bytes, page_bytes };
        let pages = slab_bytes.checked_div(page_bytes).filter(|&pages| pages > 0);
        let pages = pages.ok_or(too_small)?;
        // More pages than ids can name are left unused.
        let pages = u32::try_from(pages).unwrap_or(u32::MAX).min(BlockId::MAX);
        let num_slots = num_slots.min(pages);
        let stride_pages = pages / num_slots;
        let mut best: Option<(f64, Self)> = None;
        for groups in 1..=needs.num_layers {
            let group_layers = needs.num_layers.div_ceil(groups);
            let slot_pages = (stride_pages / group_layers).min(needs.max_pages);
            if slot_pages == 0 || best.is_some_and(|(_, slots)| slots.group_layers == group_layers)
            {
                continue;
            }
            let slots = Self { needs, group_layers, slot_pages, num_slots, stride_pages };
            let slowdown = slots.worst_slowdown(link);
            if best.is_none_or(|(least, _)| slowdown < least) {
                best = Some((slowdown, slots));
            }
        }
        best.map(|(_, slots)| slots).ok_or(PlanError::SlabTooSmall { slab_bytes, page_bytes })
    }

    /// Consecutive layers of a chunk.
    pub const fn group_layers(&self) -> u32 {
        self.group_layers
    }

    /// Pages per layer that a slot has room for.
    pub const fn slot_pages(&self) -> u32 {
        self.slot_pages
    }

    /// Slots.
    pub const fn num_slots(&self) -> u32 {
        self.num_slots
    }

    /// Pages from one slot to the next; a slot may end before.
    pub const fn stride_pages(&self) -> u32 {
        self.stride_pages
    }

    /// Bytes of a page.
    pub const fn page_bytes(&self) -> u64 {
        self.needs.page_bytes
    }

    /// Bytes from one slot to the next.
    pub fn slot_bytes(&self) -> u64 {
        self.needs.page_bytes.saturating_mul(self.stride_pages.into())
    }

    /// All slots of `slab` seen as pages of one layer position: page p of slot s is block
    /// `s*stride_pages + p`.
    ///
    /// # Errors
    /// The slab does not hold them.
    pub(crate) fn view(
        &self,
        slab: &Region,
        position: u32,
        tag: Option<Tag>,
        layers: Vec<String>,
    ) -> Result<Region, PlanError> {
        let page_bytes = self.needs.page_bytes;
        let before = u64::from(position).saturating_mul(self.slot_pages.into());
        let pages = u64::from(self.num_slots).saturating_mul(self.stride_pages.into());
        let address = Bytes(page_bytes).times(before).and_then(|bytes| slab.address().plus(bytes));
        let overflow = RegionError::Overflow { field: "slab address" };
        let strided = Strided {
            address: address.ok_or(overflow)?,
            num_blocks: pages.saturating_sub(before),
            block_bytes: page_bytes,
            block_stride_bytes: page_bytes,
            extent_bytes: None,
            memory: slab.memory(),
            device: slab.device(),
        };
        Ok(Region::new(strided, tag, layers)?)
    }

    /// Groups of layers.
    pub const fn num_groups(&self) -> u32 {
        self.needs.num_layers.div_ceil(self.group_layers)
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_bytes(&self, num_layers: u32, num_pages: u32) -> u64 {
        let pages = u64::from(num_layers).saturating_mul(num_pages.into());
        pages.saturating_mul(self.needs.page_bytes)
    }

    /// Over requests of one run: the largest time as a multiple of a READ of everything at once.
    pub fn worst_slowdown(&self, link: &LinkModel) -> f64 {
        let Needs { num_layers, max_pages, .. } = self.needs;
        let layers = u64::from(num_layers);
        let doubled = std::iter::successors(Some(1_u32), |pages| pages.checked_mul(2));
        let sizes = doubled.take_while(|&pages| pages < max_pages).chain([max_pages]);
        let slowdown = |pages: u32| {
            let num_bytes = self.chunk_bytes(num_layers, pages);
            let planned = layers.saturating_mul(pages.into());
            let merged = layers.saturating_mul(pages.div_ceil(self.slot_pages).into());
            self.seconds(link, pages, planned, merged)
                / link.read_seconds(1, planned, layers, num_bytes)
        };
        sizes.map(slowdown).fold(0.0, f64::max)
    }

    /// Seconds of a staged request: READs one after another, each chunk converted while the next is
    /// read, unless there is no slot for the next.
    pub(crate) fn seconds(&self, link: &LinkModel, pages: u32, planned: u64, merged: u64) -> f64 {
        let num_layers = self.needs.num_layers;
        let (groups, slices) = (self.num_groups(), pages.div_ceil(self.slot_pages));
        let chunks = u64::from(groups).saturating_mul(slices.into());
        let num_bytes = self.chunk_bytes(num_layers, pages);
        let read = link.read_seconds(chunks, planned, merged, num_bytes);
        let convert = link.convert_seconds(num_bytes);
        if self.num_slots == 1 {
            return read + convert;
        }
        // A chunk is never less than one page of one layer; of a request without pages nothing is left.
        let first = self.chunk_bytes(self.group_layers, self.slot_pages.min(pages));
        let last = self.chunk_bytes(
            num_layers.saturating_sub((groups.saturating_sub(1)).saturating_mul(self.group_layers)),
            pages.saturating_sub(slices.saturating_sub(1).saturating_mul(self.slot_pages)),
        );
        let share = float(first) / float(num_bytes.max(1));
        let reads_bound = read + link.convert_seconds(last);
        let conversions_bound = read * share + convert;
        reads_bound.max(conversions_bound)
    }
}

impl fmt::Display for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_slots, group_layers, slot_pages, .. } = self;
        let megabytes = float(self.slot_bytes()) / 1e6;
        let page_bytes = self.needs.page_bytes;
        write!(
            f,
            "{num_slots} slots of {megabytes:.1} MB, each {group_layers} layers x {slot_pages} \
             pages of {page_bytes} bytes"
        )
    }
}
