//! Simulated memory: what descriptors mean to NIXL, and caches held in odd ways.

use std::collections::BTreeMap;

use kvpd::region::{Strided, Tag};
use kvpd::{Address, DescriptorRows, Memory, PageFormat, PlaneSpan, Region, Row};
use proptest::prelude::*;

/// (address, bytes) of each descriptor, in order, from rows and ids as NIXL understands them.
pub(crate) fn descriptors(rows: &[Row], ids: &[i32]) -> Vec<(u64, u64)> {
    let mut table = Vec::new();
    for row in rows {
        for block in 0..row.num_blocks {
            table.push((row.address + block * row.stride_bytes, row.num_bytes));
        }
    }
    ids.iter().map(|&id| table[usize::try_from(id).unwrap()]).collect()
}

/// NIXL's rule: neighbours in the list become one where ids follow each other on both sides and both rows are dense.
pub(crate) fn merge(rows: &DescriptorRows, local: &[i32], remote: &[i32]) -> Vec<(u64, u64, u64)> {
    let row_of = |side: &[Row], id: i32| {
        let mut base = 0;
        for (number, row) in side.iter().enumerate() {
            base += row.num_blocks;
            if u64::try_from(id).unwrap() < base {
                return (number, row.is_dense());
            }
        }
        unreachable!()
    };
    let from = descriptors(rows.remote_rows(), remote);
    let to = descriptors(rows.local_rows(), local);
    let mut merged: Vec<(u64, u64, u64)> = Vec::new();
    for at in 0..local.len() {
        let ours = row_of(rows.local_rows(), local[at]);
        let theirs = row_of(rows.remote_rows(), remote[at]);
        let follows = at > 0
            && local[at] == local[at - 1] + 1
            && remote[at] == remote[at - 1] + 1
            && row_of(rows.local_rows(), local[at - 1]) == ours
            && row_of(rows.remote_rows(), remote[at - 1]) == theirs;
        match merged.last_mut() {
            Some(last) if follows && ours.1 && theirs.1 => last.2 += to[at].1,
            _ => merged.push((to[at].0, from[at].0, to[at].1)),
        }
    }
    merged
}

/// What each byte of a transfer is read from, by where it lands.
pub(crate) fn moved(parts: &[(u64, u64, u64)]) -> Result<BTreeMap<u64, u64>, u64> {
    let mut bytes = BTreeMap::new();
    for &(to, from, len) in parts {
        for byte in 0..len {
            if bytes.insert(to + byte, from + byte).is_some() {
                return Err(to + byte);
            }
        }
    }
    Ok(bytes)
}

/// Address of every byte of a page, in page order.
pub(crate) fn page_addresses(regions: &[Region], layer: &str, block: u64) -> Vec<u64> {
    let mut found = BTreeMap::new();
    for region in regions.iter().filter(|region| region.layers() == [layer]) {
        let tag = region.tag().unwrap();
        let mut at = region.block_address(block).unwrap().get();
        for span in &tag.spans {
            let start = tag.format.plane_start(span.plane).unwrap() + span.start_bytes;
            for byte in 0..span.num_bytes {
                found.insert(start + byte, at);
                at += 1;
            }
        }
    }
    found.into_values().collect()
}

/// A page cut into regions at random places, with gaps between blocks, regions in any order.
pub(crate) fn random_cache(
    format: PageFormat,
    layers: &'static [&'static str],
) -> impl Strategy<Value = Vec<Region>> {
    let cuts = prop::collection::vec((0_u32..2, 1_u64..1024), 0..4);
    (cuts, prop::collection::vec(0_u64..3, 12), any::<bool>()).prop_map(
        move |(cuts, gaps, turn)| {
            let mut regions = Vec::new();
            let mut address = 4096;
            for (number, &layer) in layers.iter().enumerate() {
                let mut spans = Vec::new();
                for (plane, &bytes) in (0..).zip(format.plane_bytes()) {
                    let mut at: Vec<u64> =
                        cuts.iter().filter(|cut| cut.0 == plane).map(|cut| cut.1 % bytes).collect();
                    at.extend([0, bytes]);
                    at.sort_unstable();
                    at.dedup();
                    for pair in at.windows(2) {
                        let (start_bytes, num_bytes) = (pair[0], pair[1] - pair[0]);
                        spans.push(PlaneSpan { plane, start_bytes, num_bytes });
                    }
                }
                if turn {
                    spans.reverse();
                }
                // Two spans to a region, where there are enough.
                for (index, spans) in spans.chunks(2).enumerate() {
                    let block_bytes: u64 = spans.iter().map(|span| span.num_bytes).sum();
                    let stride = block_bytes + 16 * gaps[(index + number) % gaps.len()];
                    let strided = Strided {
                        address: Address(address),
                        num_blocks: 6,
                        block_bytes,
                        block_stride_bytes: stride,
                        extent_bytes: None,
                        memory: Memory::Dram,
                        device: 0,
                    };
                    address += 6 * stride;
                    let tag = Tag { format: format.clone(), spans: spans.to_vec() };
                    regions.push(Region::new(strided, Some(tag), vec![layer.into()]).unwrap());
                }
            }
            regions
        },
    )
}
