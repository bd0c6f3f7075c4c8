//! How a slab is divided into equal slots, once per peer, and how a request fills them.
//!
//! A slot holds raw pages as [layer position][page], densely: by a [`Cut`], `group_layers` consecutive
//! layers of up to `slot_pages` pages. Neighbouring pages of a layer are neighbours in a slot, so a run of the peer's
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

/// One way to fill slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    group_layers: u32,
    slot_pages: u32,
}

impl Cut {
    /// Consecutive layers of a chunk.
    pub const fn group_layers(&self) -> u32 {
        self.group_layers
    }

    /// Pages per layer that a slot has room for.
    pub const fn slot_pages(&self) -> u32 {
        self.slot_pages
    }

    /// Groups of `num_layers` layers.
    pub const fn num_groups(&self, num_layers: u32) -> u32 {
        num_layers.div_ceil(self.group_layers)
    }
}

/// The slots, and the ways to fill them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    pub(crate) needs: Needs,
    pub(crate) num_slots: u32,
    pub(crate) stride_pages: u32,
    cuts: Vec<Cut>,
}

impl Slots {
    /// Divides a slab into `num_slots` slots (fewer where it has fewer pages), and keeps of all cuts
    /// those that are fastest for consecutive pages of some number up to `max_pages`.
    ///
    /// Long requests want long runs, which more pages and fewer layers a slot keep whole; short ones
    /// want few chunks, which more layers give.
    ///
    /// # Errors
    /// The slab does not hold one page, or there is nothing to hold.
    pub fn new(
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
        let mut slots =
            Self { needs, num_slots, stride_pages: pages / num_slots, cuts: Vec::new() };
        let doubled = std::iter::successors(Some(1_u32), |pages| pages.checked_mul(2));
        let sizes = doubled.take_while(|&pages| pages < needs.max_pages).chain([needs.max_pages]);
        for pages in sizes {
            let fastest = slots.possible_cuts().min_by(|a, b| {
                let seconds = |cut: &Cut| slots.seconds_of_one_run(link, cut, pages);
                seconds(a).total_cmp(&seconds(b))
            });
            if let Some(cut) = fastest.filter(|cut| !slots.cuts.contains(cut)) {
                slots.cuts.push(cut);
            }
        }
        Ok(slots)
    }

    /// Every division of the layers into groups, the largest groups first.
    fn possible_cuts(&self) -> impl Iterator<Item = Cut> {
        let Self { needs, stride_pages, .. } = *self;
        (1..=needs.num_layers).filter_map(move |groups| {
            let group_layers = needs.num_layers.div_ceil(groups);
            let slot_pages = (stride_pages / group_layers).min(needs.max_pages);
            (slot_pages > 0).then_some(Cut { group_layers, slot_pages })
        })
    }

    /// The cuts to choose from, at least one.
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
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

    /// All slots of `slab` seen as pages of the layer position that begins `before` pages into each
    /// slot: its page p of slot s is block `s*stride_pages + p`.
    ///
    /// # Errors
    /// The slab does not hold them.
    pub(crate) fn view(
        &self,
        slab: &Region,
        before: u64,
        tag: Option<Tag>,
        layers: Vec<String>,
    ) -> Result<Region, PlanError> {
        let page_bytes = self.needs.page_bytes;
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

    /// Bytes of a chunk.
    pub(crate) fn chunk_bytes(&self, num_layers: u32, num_pages: u32) -> u64 {
        let pages = u64::from(num_layers).saturating_mul(num_pages.into());
        pages.saturating_mul(self.needs.page_bytes)
    }

    fn seconds_of_one_run(&self, link: &LinkModel, cut: &Cut, pages: u32) -> f64 {
        let layers = u64::from(self.needs.num_layers);
        let planned = layers.saturating_mul(pages.into());
        let merged = layers.saturating_mul(pages.div_ceil(cut.slot_pages).into());
        self.seconds(link, cut, pages, planned, merged)
    }

    /// Seconds of a staged request: READs one after another, each chunk converted while the next is
    /// read, unless there is no slot for the next.
    pub(crate) fn seconds(
        &self,
        link: &LinkModel,
        cut: &Cut,
        pages: u32,
        planned: u64,
        merged: u64,
    ) -> f64 {
        let Cut { group_layers, slot_pages } = *cut;
        let num_layers = self.needs.num_layers;
        let (groups, slices) = (cut.num_groups(num_layers), pages.div_ceil(slot_pages));
        let chunks = u64::from(groups).saturating_mul(slices.into());
        let num_bytes = self.chunk_bytes(num_layers, pages);
        let read = link.read_seconds(chunks, planned, merged, num_bytes);
        let convert = link.convert_seconds(num_bytes);
        if self.num_slots == 1 {
            return read + convert;
        }
        // A chunk is never less than one page of one layer; of a request without pages nothing is left.
        let first = self.chunk_bytes(group_layers, slot_pages.min(pages));
        let last = self.chunk_bytes(
            num_layers.saturating_sub((groups.saturating_sub(1)).saturating_mul(group_layers)),
            pages.saturating_sub(slices.saturating_sub(1).saturating_mul(slot_pages)),
        );
        let share = float(first) / float(num_bytes.max(1));
        let reads_bound = read + link.convert_seconds(last);
        let conversions_bound = read * share + convert;
        reads_bound.max(conversions_bound)
    }
}

impl fmt::Display for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_slots, needs, cuts, .. } = self;
        let megabytes = float(self.slot_bytes()) / 1e6;
        let page_bytes = needs.page_bytes;
        let cuts: Vec<String> = cuts.iter().map(Cut::to_string).collect();
        write!(
            f,
            "{num_slots} slots of {megabytes:.1} MB, each for {} (pages of {page_bytes} bytes)",
            cuts.join(" or ")
        )
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group_layers, slot_pages } = self;
        write!(f, "{group_layers} layers x {slot_pages} pages")
    }
}
