//! The planner: once per peer what is possible and how the slab is cut, per request what is fastest.

use std::fmt;

use crate::error::PlanError;
use crate::link::LinkModel;
use crate::plan::{DescriptorRows, TransferPlan, matched};
use crate::region::{Region, Tag};
use crate::request::{Chunk, RequestPlan, Way};
use crate::rows::{Landing, Order, Read};
use crate::runs::Runs;
use crate::slots::{Cut, Needs, Slots};

/// Where the bytes of a peer's pages land before they are local pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Nowhere: the conversion reads the peer's memory itself.
    Direct,
    /// In the cache, and converted where they lie (equal formats: nothing is left to do).
    InPlace,
    /// In slots of a slab, and converted into the cache.
    Staged,
}

impl Placement {
    /// "direct", "in_place" or "staged".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::InPlace => "in_place",
            Self::Staged => "staged",
        }
    }
}

/// What a planner may use.
#[derive(Clone, Debug)]
pub struct Options {
    /// What transfers cost.
    pub link: LinkModel,
    /// Pages per layer of the largest request.
    pub max_pages: u32,
    /// Registered memory for raw pages; without one nothing is staged.
    pub slab: Option<Region>,
    /// Slots to cut the slab into.
    pub num_slots: u32,
    /// Whether the conversion can read the peer's memory.
    pub direct: bool,
    /// Whether raw pages may land in the cache.
    pub in_place: bool,
}

/// Plans one peer's requests.
#[derive(Clone, Debug)]
pub struct Planner {
    options: Options,
    /// Also when in place is not allowed: its construction proves that the sides belong together.
    in_place: TransferPlan,
    staged: Option<(DescriptorRows, Slots)>,
    /// Names, and the peer's format, of each layer in the target's order.
    layers: Vec<(Vec<String>, Option<Tag>)>,
    converts: bool,
}

impl Planner {
    /// Fixes what all requests of a peer share.
    ///
    /// # Errors
    /// As [`TransferPlan::new`]; no placement is possible; the slab does not hold a page, or pages of
    /// the layers differ in size; a count is 0.
    pub fn new(target: &[Region], source: &[Region], options: Options) -> Result<Self, PlanError> {
        if options.max_pages == 0 {
            return Err(PlanError::Count { field: "max_pages", got: 0 });
        }
        if !options.direct && !options.in_place && options.slab.is_none() {
            return Err(PlanError::NoPlacement);
        }
        let in_place = TransferPlan::new(target, source)?;
        let groups = matched(target, source)?;
        let converts = groups.iter().any(|(ours, theirs)| ours.format != theirs.format);
        let page_bytes = groups
            .first()
            .and_then(|(_, theirs)| theirs.format.as_ref())
            .map_or(0, crate::format::PageFormat::page_bytes);
        let num_layers = u32::try_from(groups.len()).unwrap_or(u32::MAX);
        let staged = match &options.slab {
            Some(slab) => {
                let needs = Needs { num_layers, page_bytes, max_pages: options.max_pages };
                let link = &options.link;
                let slots = Slots::new(link, needs, slab.extent_bytes(), options.num_slots)?;
                Some((DescriptorRows::staged(target, source, slab, &slots)?, slots))
            }
            None => None,
        };
        let layers = groups
            .into_iter()
            .map(|(ours, theirs)| {
                let tag = theirs.format.map(|format| Tag { spans: format.whole_planes(), format });
                (ours.layers, tag)
            })
            .collect();
        Ok(Self { options, in_place, staged, layers, converts })
    }

    /// The placements to choose from.
    pub fn placements(&self) -> Vec<Placement> {
        [
            (self.options.direct, Placement::Direct),
            (self.options.in_place, Placement::InPlace),
            (self.staged.is_some(), Placement::Staged),
        ]
        .into_iter()
        .filter_map(|(is_possible, placement)| is_possible.then_some(placement))
        .collect()
    }

    /// Whether the peer's pages have another format than the local ones.
    pub const fn converts(&self) -> bool {
        self.converts
    }

    /// The slots and how they may be filled; `None` without a slab.
    pub fn slots(&self) -> Option<&Slots> {
        self.staged.as_ref().map(|(_, slots)| slots)
    }

    /// The descriptor rows of a placement.
    ///
    /// # Errors
    /// The placement is not possible, or needs no rows (direct).
    pub fn rows(&self, placement: Placement) -> Result<&DescriptorRows, PlanError> {
        let rows = match placement {
            Placement::Direct => None,
            Placement::InPlace => self.options.in_place.then_some(self.in_place.rows()),
            Placement::Staged => self.staged.as_ref().map(|(rows, _)| rows),
        };
        rows.ok_or_else(|| PlanError::Absent {
            field: "rows",
            got: placement.name().to_owned(),
            expected: "in_place or staged, where the planner may use it".to_owned(),
        })
    }

    /// The slab as raw pages of one group of layers by the cut of this index, one region per layer:
    /// page p of slot s is block `s*stride_pages + p` of each.
    ///
    /// # Errors
    /// There is no slab, or no such cut or group.
    pub fn slab_regions(&self, cut: usize, group: u32) -> Result<Vec<Region>, PlanError> {
        let (Some((_, slots)), Some(slab)) = (&self.staged, &self.options.slab) else {
            return Err(absent("group", group, 0));
        };
        let number = slots.cuts().len();
        let cut = slots.cuts().get(cut).ok_or_else(|| absent("cut", cut, number))?;
        let num_groups = cut.num_groups(self.num_layers());
        if group >= num_groups {
            return Err(absent("group", group, num_groups));
        }
        let first = index(group.saturating_mul(cut.group_layers()));
        let layers = self.layers.iter().skip(first).take(index(cut.group_layers()));
        (0_u64..)
            .zip(layers)
            .map(|(position, (layers, tag))| {
                let before = position.saturating_mul(cut.slot_pages().into());
                slots.view(slab, before, tag.clone(), layers.clone())
            })
            .collect()
    }

    /// What was fixed for this peer, in words.
    pub fn explain(&self) -> String {
        let placements: Vec<_> = self.placements().into_iter().map(Placement::name).collect();
        let pages = if self.converts { "converted" } else { "of equal format" };
        let mut text = format!(
            "{} layers, pages {pages}; possible: {}\n  link: {}",
            self.layers.len(),
            placements.join(", "),
            self.options.link
        );
        if let Some(slots) = self.slots() {
            let max_pages = self.options.max_pages;
            text.push_str(&format!(
                "\n  slab: {slots}; each is the fastest for some number of consecutive pages up to \
                 {max_pages}"
            ));
        }
        text
    }

    /// Plans one request: the placement and order with the least predicted time, and its chunks.
    ///
    /// # Errors
    /// More pages than the planner was made for; a block that a side does not have; more descriptors
    /// than int32 ids can name.
    pub fn plan(&self, runs: &Runs) -> Result<RequestPlan, PlanError> {
        let (got, max_pages) = (runs.num_pages(), self.options.max_pages);
        let pages = u32::try_from(got).ok().filter(|&pages| pages <= max_pages);
        let pages = pages.ok_or(PlanError::TooManyPages { got, max_pages })?;
        self.in_place.num_descriptors(runs)?;
        self.in_place.check(runs)?;
        let num_bytes = self.in_place.rows().page_bytes_all_layers().saturating_mul(pages.into());
        let mut ways = Vec::new();
        if self.options.direct {
            let seconds = self.options.link.direct_seconds(num_bytes);
            ways.push(Way::new(Placement::Direct, Order::ByRow, (0, 0), seconds));
        }
        if self.options.in_place {
            ways.push(faster(|order| self.in_place_way(runs, order, num_bytes)));
        }
        if let Some((rows, slots)) = &self.staged {
            let by_cut = slots.cuts().iter().enumerate().map(|(number, cut)| {
                let way = faster(|order| self.staged_way(rows, slots, cut, runs, order));
                Way { cut: Some((number, *cut)), ..way }
            });
            ways.extend(by_cut.min_by(|a, b| a.seconds.total_cmp(&b.seconds)));
        }
        // Of equals the first: direct, in place, staged.
        ways.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let chosen = *ways.first().ok_or(PlanError::NoPlacement)?;
        let num_layers = self.num_layers();
        let chunks = match chosen.cut {
            _ if pages == 0 => Vec::new(),
            Some((_, cut)) => chunks(num_layers, pages, cut.group_layers(), cut.slot_pages()),
            None => chunks(num_layers, pages, num_layers, pages),
        };
        Ok(RequestPlan::new(runs.clone(), chosen, ways, chunks, num_layers, num_bytes))
    }

    fn in_place_way(&self, runs: &Runs, order: Order, num_bytes: u64) -> Way {
        let read = Read {
            layers: self.in_place.rows().parts(),
            landing: Landing::Blocks(runs.local_ids()),
            remote: runs.remote_ids(),
            order,
        };
        let (planned, merged) = (read.num_planned(), read.num_merged(runs.len()));
        let link = &self.options.link;
        let convert = if self.converts { link.convert_seconds(num_bytes) } else { 0.0 };
        let seconds = link.read_seconds(1, planned, merged, num_bytes) + convert;
        Way::new(Placement::InPlace, order, (planned, merged), seconds)
    }

    fn staged_way(
        &self,
        rows: &DescriptorRows,
        slots: &Slots,
        cut: &Cut,
        runs: &Runs,
        order: Order,
    ) -> Way {
        // A slot's end also ends a run; every group of layers is cut at the same pages.
        let slices = runs.remote_ids().chunks(index(cut.slot_pages()).max(1));
        let num_runs = slices.map(num_runs).sum();
        let (mut planned, mut merged) = (0_u64, 0_u64);
        for layers in rows.parts().chunks(index(cut.group_layers()).max(1)) {
            let landing = Landing::Slot { first: 0, layer_pages: 0 };
            let read = Read { layers, landing, remote: runs.remote_ids(), order };
            planned = planned.saturating_add(read.num_planned());
            merged = merged.saturating_add(read.num_merged(num_runs));
        }
        let pages = u32::try_from(runs.num_pages()).unwrap_or(u32::MAX);
        let seconds = slots.seconds(&self.options.link, cut, pages, planned, merged);
        Way::new(Placement::Staged, order, (planned, merged), seconds)
    }

    /// Number of descriptor ids of a chunk on each side.
    ///
    /// # Errors
    /// As [`Self::write_chunk_ids`].
    pub fn num_chunk_ids(&self, request: &RequestPlan, chunk: usize) -> Result<usize, PlanError> {
        self.read(request, chunk, 0)?.num_ids().ok_or(PlanError::TooManyDescriptors)
    }

    /// Writes the descriptor ids of one chunk of a request that this planner planned: what is read
    /// into `slot` (which only staged requests have).
    ///
    /// # Errors
    /// There is no such chunk or slot; the request is direct; a side is not
    /// [`Self::num_chunk_ids`] long.
    pub fn write_chunk_ids(
        &self,
        request: &RequestPlan,
        chunk: usize,
        slot: u32,
        local: &mut [i32],
        remote: &mut [i32],
    ) -> Result<(), PlanError> {
        let read = self.read(request, chunk, slot)?;
        let count = read.num_ids().ok_or(PlanError::TooManyDescriptors)?;
        if local.len() != count || remote.len() != count {
            return Err(PlanError::LengthMismatch { local: local.len(), remote: remote.len() });
        }
        read.write(local, remote);
        Ok(())
    }

    fn read<'a>(
        &'a self,
        request: &'a RequestPlan,
        chunk: usize,
        slot: u32,
    ) -> Result<Read<'a>, PlanError> {
        let placement = request.placement();
        let rows = self.rows(placement)?;
        let number = request.chunks().len();
        let no_chunk = || absent("chunk", chunk, number);
        let Chunk { first_layer, num_layers, first_page, num_pages } =
            *request.chunks().get(chunk).ok_or_else(no_chunk)?;
        let layers = span(rows.parts(), first_layer, num_layers).ok_or_else(no_chunk)?;
        let remote =
            span(request.runs().remote_ids(), first_page, num_pages).ok_or_else(no_chunk)?;
        let local = span(request.runs().local_ids(), first_page, num_pages).ok_or_else(no_chunk)?;
        let landing = match (&self.staged, request.chosen().cut) {
            (Some((_, slots)), Some((_, cut))) => {
                if slot >= slots.num_slots() {
                    return Err(absent("slot", slot, slots.num_slots()));
                }
                // Below the pages of the slab, which int32 ids can name.
                Landing::Slot {
                    first: slot.saturating_mul(slots.stride_pages()).cast_signed(),
                    layer_pages: cut.slot_pages().cast_signed(),
                }
            }
            _ if slot > 0 => return Err(absent("slot", slot, 0)),
            _ => Landing::Blocks(local),
        };
        Ok(Read { layers, landing, remote, order: request.order() })
    }

    /// Layers of a request.
    pub fn num_layers(&self) -> u32 {
        u32::try_from(self.layers.len()).unwrap_or(u32::MAX)
    }
}

fn absent(field: &'static str, got: impl fmt::Display, number: impl fmt::Display) -> PlanError {
    let (got, expected) = (got.to_string(), format!("below {number}"));
    PlanError::Absent { field, got, expected }
}

/// The better order; of equals by row, which leaves fewer descriptors.
fn faster(way: impl Fn(Order) -> Way) -> Way {
    let (by_row, by_page) = (way(Order::ByRow), way(Order::ByPage));
    if by_page.seconds < by_row.seconds { by_page } else { by_row }
}

/// Tiles layers x pages, groups of layers outermost.
fn chunks(num_layers: u32, pages: u32, group_layers: u32, slot_pages: u32) -> Vec<Chunk> {
    let steps = |end: u32, step: u32| {
        (0..end.div_ceil(step.max(1))).map(move |at| {
            let first = at.saturating_mul(step);
            (first, step.min(end.saturating_sub(first)))
        })
    };
    steps(num_layers, group_layers)
        .flat_map(|layers| steps(pages, slot_pages).map(move |pages| (layers, pages)))
        .map(|((first_layer, num_layers), (first_page, num_pages))| Chunk {
            first_layer,
            num_layers,
            first_page,
            num_pages,
        })
        .collect()
}

/// Maximal stretches of consecutive ids.
fn num_runs(ids: &[i32]) -> usize {
    let breaks = ids.iter().zip(ids.iter().skip(1)).filter(|&(a, b)| a.checked_add(1) != Some(*b));
    breaks.count() + usize::from(!ids.is_empty())
}

fn span<T>(items: &[T], first: u32, count: u32) -> Option<&[T]> {
    let first = index(first);
    items.get(first..first.checked_add(index(count))?)
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
