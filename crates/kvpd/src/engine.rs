//! What one rank of an engine publishes: its facts, and its regions.

use std::collections::HashMap;

use crate::error::DescriptionError;
use crate::facts::EngineFacts;
use crate::format::PageFormat;
use crate::region::Region;
use crate::units::MAX_REGIONS;

/// A byte range of a page and where a region's blocks hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// First byte in the page, planes counted one after another.
    pub(crate) page_start: u64,
    /// Length.
    pub(crate) num_bytes: u64,
    /// Index of the region.
    pub(crate) region: usize,
    /// First byte in the region's block.
    pub(crate) block_offset: u64,
}

/// The regions of one layer (or of several layers that share their KV).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerGroup {
    pub(crate) layers: Vec<String>,
    /// `None` when untagged.
    pub(crate) format: Option<PageFormat>,
    /// In page order, neighbours that are also neighbours in the block joined; empty when untagged.
    pub(crate) held: Vec<Held>,
    /// Indices of its regions, in the order published.
    pub(crate) regions: Vec<usize>,
}

/// Facts and regions of one rank, each proved by itself. They are not compared with each other: a
/// verdict compares facts with the peer's facts, and formats and regions with the peer's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineDescription {
    facts: EngineFacts,
    regions: Vec<Region>,
    groups: Vec<LayerGroup>,
}

impl EngineDescription {
    /// # Errors
    /// No or too many regions; regions that overlap; a layer whose regions disagree on its layers or
    /// format, or do not hold each byte of its page exactly once.
    pub fn new(facts: EngineFacts, regions: Vec<Region>) -> Result<Self, DescriptionError> {
        let facts = facts.check()?;
        check_apart(&regions)?;
        let groups = group_layers(&regions)?;
        Ok(Self { facts, regions, groups })
    }

    /// The facts.
    pub const fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    /// The regions, in the order published.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    pub(crate) fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    /// Layer names, in the order of their first region.
    pub fn layers(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flat_map(|group| &group.layers).map(String::as_str)
    }

    /// The format that all layers share; `None` when a region is untagged or formats differ.
    pub fn format(&self) -> Option<&PageFormat> {
        let first = self.groups.first()?.format.as_ref()?;
        self.groups.iter().all(|group| group.format.as_ref() == Some(first)).then_some(first)
    }

    /// Blocks that every region has.
    pub fn num_blocks(&self) -> u32 {
        self.regions.iter().map(Region::num_blocks).min().unwrap_or(0)
    }
}

/// Sorts regions into layers and proves that each tagged layer's page is held exactly once.
pub(crate) fn group_layers(regions: &[Region]) -> Result<Vec<LayerGroup>, DescriptionError> {
    if regions.is_empty() || regions.len() > MAX_REGIONS {
        return Err(DescriptionError::RegionCount { got: regions.len() });
    }
    let mut groups: Vec<LayerGroup> = Vec::new();
    let mut group_of: HashMap<&str, usize> = HashMap::new();
    for (index, region) in regions.iter().enumerate() {
        let format = region.tag().map(|tag| &tag.format);
        let Some(first) = region.layers().first() else {
            if format.is_some() {
                return Err(DescriptionError::RegionWithoutLayers { region: index });
            }
            let (layers, format) = (Vec::new(), None);
            groups.push(LayerGroup { layers, format, held: Vec::new(), regions: vec![index] });
            continue;
        };
        let known = group_of.get(first.as_str()).copied();
        let at = known.unwrap_or(groups.len());
        match groups.get_mut(at) {
            Some(group) if group.layers == region.layers() && group.format.as_ref() == format => {
                group.regions.push(index);
            }
            Some(_) => return Err(DescriptionError::LayerSplit { layer: first.clone() }),
            None => {
                for layer in region.layers() {
                    if group_of.insert(layer, at).is_some() {
                        return Err(DescriptionError::LayerSplit { layer: layer.clone() });
                    }
                }
                groups.push(LayerGroup {
                    layers: region.layers().to_vec(),
                    format: format.cloned(),
                    held: Vec::new(),
                    regions: vec![index],
                });
            }
        }
    }
    for group in &mut groups {
        if let Some(format) = &group.format {
            let layer = || group.layers.first().cloned().unwrap_or_default();
            group.held = held_bytes(format, regions, &group.regions).map_err(|offset_bytes| {
                DescriptionError::PageNotCovered { layer: layer(), offset_bytes }
            })?;
        }
    }
    Ok(groups)
}

/// Where each byte of a page lies, in page order; the first byte held twice or not at all otherwise.
fn held_bytes(
    format: &PageFormat,
    regions: &[Region],
    members: &[usize],
) -> Result<Vec<Held>, u64> {
    let mut held = Vec::new();
    for &index in members {
        let mut block_offset = 0;
        for span in regions.get(index).and_then(Region::tag).map_or(&[][..], |tag| &tag.spans) {
            let start = format.plane_start(span.plane).unwrap_or(u64::MAX);
            held.push(Held {
                page_start: start.saturating_add(span.start_bytes),
                num_bytes: span.num_bytes,
                region: index,
                block_offset,
            });
            block_offset += span.num_bytes;
        }
    }
    held.sort_by_key(|part| part.page_start);
    let mut joined: Vec<Held> = Vec::with_capacity(held.len());
    let mut expected = 0;
    for part in held {
        if part.page_start != expected {
            return Err(expected.min(part.page_start));
        }
        expected += part.num_bytes;
        match joined.last_mut() {
            Some(last)
                if last.region == part.region
                    && last.block_offset + last.num_bytes == part.block_offset =>
            {
                last.num_bytes += part.num_bytes;
            }
            _ => joined.push(part),
        }
    }
    if expected == format.page_bytes() { Ok(joined) } else { Err(expected) }
}

/// Proves that no two regions share a byte.
fn check_apart(regions: &[Region]) -> Result<(), DescriptionError> {
    let mut order: Vec<(usize, &Region)> = regions.iter().enumerate().collect();
    let place = |region: &Region| (region.memory().name(), region.device());
    order.sort_by_key(|(_, region)| (place(region), region.address()));
    for (position, &(first, a)) in order.iter().enumerate() {
        let later = order.iter().skip(position + 1);
        for &(second, b) in
            later.take_while(|(_, b)| place(a) == place(b) && b.address().get() < a.end())
        {
            if may_overlap(a, b) {
                return Err(DescriptionError::Overlap { first, second });
            }
        }
    }
    Ok(())
}

/// Whether two regions can share a byte; `a` begins first. Exact for equal strides. With different
/// strides in one range it is not decided but assumed: no cache lies like that.
fn may_overlap(a: &Region, b: &Region) -> bool {
    let stride = a.block_stride_bytes();
    if stride != b.block_stride_bytes() {
        return true;
    }
    let ahead = b.address().get() - a.address().get();
    let (blocks_ahead, into) = (ahead / stride, ahead % stride);
    let a_blocks = u64::from(a.num_blocks());
    // b's first block begins inside block `blocks_ahead` of a, or reaches into the one after it.
    (into < a.block_bytes() && blocks_ahead < a_blocks)
        || (into > 0 && into + b.block_bytes() > stride && blocks_ahead + 1 < a_blocks)
}
