//! Transfer plans: descriptor rows once per peer, descriptor ids once per READ.
//!
//! Bytes are moved raw: byte i of a page on the remote side lands at byte i of the page on the local
//! side, planes counted one after another. Where that is decides the placement: in the cache itself (in
//! place, per page: a standard page fills the K block and then the V block), or in slots of a slab, as
//! pages in the remote's format (staged). Both are the same overlap of two ways to hold a page.

use std::collections::HashMap;

use crate::engine::{Held, LayerGroup, group_layers};
use crate::error::PlanError;
use crate::region::{Memory, Region};
use crate::rows::{Landing, Order, Part, Read, Row, Side};
use crate::runs::Runs;
use crate::slots::Slots;
use crate::units::Bytes;

/// The descriptor rows of both sides: what is prepared once per peer and placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorRows {
    local: Side,
    remote: Side,
    /// Of each layer, in the target's order.
    parts: Vec<Vec<Part>>,
    page_bytes_all_layers: u64,
}

impl DescriptorRows {
    /// Rows for raw reads of `source`'s pages into `target`.
    fn in_place(target: &[Region], source: &[Region]) -> Result<Self, PlanError> {
        let mut plan = Self::empty(target, source)?;
        for (ours, theirs) in matched(target, source)? {
            let mut parts = Vec::new();
            for (ours, theirs) in overlaps(&ours.held, &theirs.held) {
                parts.push(plan.part(target, ours, source, theirs)?);
            }
            plan.add_layer(parts, &theirs);
        }
        Ok(plan)
    }

    /// Rows for raw reads of `source`'s pages into slots of `slab`, layers in the order of `target`.
    ///
    /// Every layer position of every slot is a page of the slab, so one local row serves all layers:
    /// page p at layer position j of slot s is block `s*stride_pages + j*slot_pages + p`.
    ///
    /// # Errors
    /// As [`TransferPlan::new`]; also when pages of layers differ in size.
    pub(crate) fn staged(
        target: &[Region],
        source: &[Region],
        slab: &Region,
        slots: &Slots,
    ) -> Result<Self, PlanError> {
        let pages = [slots.view(slab, 0, None, Vec::new())?];
        let mut plan = Self::empty(&pages, source)?;
        let mut known: HashMap<(u64, u64), i32> = HashMap::new();
        for (ours, theirs) in matched(target, source)? {
            let got = page_bytes(&theirs);
            if got != slots.page_bytes() {
                let layer = ours.layers.first().cloned().unwrap_or_default();
                let expected = slots.page_bytes();
                return Err(PlanError::UnequalPages { layer, got, expected });
            }
            let mut parts = Vec::new();
            for &held in &theirs.held {
                let Held { page_start, num_bytes, .. } = held;
                let in_slab = Held { page_start, num_bytes, region: 0, block_offset: page_start };
                let base = known.get(&(page_start, num_bytes)).copied();
                let local_base = match base {
                    Some(base) => base,
                    None => plan.local.push(&pages, in_slab)?,
                };
                known.insert((page_start, num_bytes), local_base);
                let remote_base = plan.remote.push(source, held)?;
                let merges = num_bytes == slots.page_bytes() && plan.remote.last_is_dense();
                parts.push(Part { local_base, remote_base, merges });
            }
            plan.add_layer(parts, &theirs);
        }
        Ok(plan)
    }

    fn empty(target: &[Region], source: &[Region]) -> Result<Self, PlanError> {
        let (local, remote) = (Side::new("local", target)?, Side::new("remote", source)?);
        Ok(Self { local, remote, parts: Vec::new(), page_bytes_all_layers: 0 })
    }

    fn part(
        &mut self,
        target: &[Region],
        ours: Held,
        source: &[Region],
        theirs: Held,
    ) -> Result<Part, PlanError> {
        let local_base = self.local.push(target, ours)?;
        let remote_base = self.remote.push(source, theirs)?;
        let merges = self.local.last_is_dense() && self.remote.last_is_dense();
        Ok(Part { local_base, remote_base, merges })
    }

    fn add_layer(&mut self, parts: Vec<Part>, theirs: &LayerGroup) {
        self.parts.push(parts);
        self.page_bytes_all_layers = self.page_bytes_all_layers.saturating_add(page_bytes(theirs));
    }

    /// Rows of this side. Read in place, one per row of the remote side; staged, one for all layers
    /// (or one for each part of a page, where the peer holds it in several regions).
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

    /// Parts of each layer, in the target's order.
    pub(crate) fn parts(&self) -> &[Vec<Part>] {
        &self.parts
    }

    /// Refuses blocks outside the rows of both sides.
    fn check(&self, runs: &Runs) -> Result<(), PlanError> {
        self.local.check(runs.local_ids())?;
        self.remote.check(runs.remote_ids())
    }
}

/// How pages travel from a peer's regions into local ones, block to block: in place, per page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPlan(DescriptorRows);

impl TransferPlan {
    /// Plans raw reads of `source`'s pages into `target`.
    ///
    /// # Errors
    /// A side has an untagged region, or does not hold its pages exactly once; layers or page sizes
    /// differ; a side mixes kinds of memory; the rows have more blocks than int32 ids can name.
    pub fn new(target: &[Region], source: &[Region]) -> Result<Self, PlanError> {
        DescriptorRows::in_place(target, source).map(Self)
    }

    /// The rows: row r of this side is read from row r of the peer.
    pub const fn rows(&self) -> &DescriptorRows {
        &self.0
    }

    /// Refuses blocks outside the rows of both sides.
    pub(crate) fn check(&self, runs: &Runs) -> Result<(), PlanError> {
        self.0.check(runs)
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
    /// As there; also when a side has another length.
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
        self.check(runs)?;
        self.read(runs).write(local, remote);
        Ok(())
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
        self.read(runs).num_ids().ok_or(PlanError::TooManyDescriptors)
    }

    /// Descriptors after NIXL merged neighbours: one per run where both rows are dense, else one per page.
    pub fn num_merged_descriptors(&self, runs: &Runs) -> u64 {
        self.read(runs).num_merged(runs.len())
    }

    /// One READ of all layers into the blocks themselves.
    fn read<'a>(&'a self, runs: &'a Runs) -> Read<'a> {
        let landing = Landing::Blocks(runs.local_ids());
        Read { layers: &self.0.parts, landing, remote: runs.remote_ids(), order: Order::ByRow }
    }
}

/// Layers of the target with the same layers of the source, in the target's order.
pub(crate) fn matched(
    target: &[Region],
    source: &[Region],
) -> Result<Vec<(LayerGroup, LayerGroup)>, PlanError> {
    let ours = tagged_groups("local", target)?;
    let mut theirs: HashMap<Vec<String>, LayerGroup> = tagged_groups("remote", source)?
        .into_iter()
        .map(|group| (group.layers.clone(), group))
        .collect();
    let missing = |group: &LayerGroup| PlanError::Layers {
        layer: group.layers.first().cloned().unwrap_or_default(),
    };
    let mut pairs = Vec::with_capacity(ours.len());
    for group in ours {
        let peer = theirs.remove(&group.layers).ok_or_else(|| missing(&group))?;
        let (here, there) = (page_bytes(&group), page_bytes(&peer));
        if here != there {
            let layer = group.layers.first().cloned().unwrap_or_default();
            return Err(PlanError::PageBytes { layer, local: here, remote: there });
        }
        pairs.push((group, peer));
    }
    // Of several, the one first by name: an error must not differ from run to run.
    match theirs.into_values().min_by(|a, b| a.layers.cmp(&b.layers)) {
        Some(group) => Err(missing(&group)),
        None => Ok(pairs),
    }
}

/// Bytes of a layer's page.
fn page_bytes(group: &LayerGroup) -> u64 {
    group.held.last().map_or(0, |last| last.page_start + last.num_bytes)
}

pub(crate) fn tagged_groups(
    side: &'static str,
    regions: &[Region],
) -> Result<Vec<LayerGroup>, PlanError> {
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

/// Bytes of `num_pages` pages of every layer of `source`.
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
