//! Which layers of two sides belong together.

use std::collections::{HashMap, HashSet};

use crate::engine::{EngineDescription, LayerGroup};
use crate::reason::{Code, Reason};
use crate::region::Region;

use super::words::shorten;

/// Pairs the layers of two sides by name, and says which are missing.
pub(super) fn pair<'a>(
    local: &'a EngineDescription,
    remote: &'a EngineDescription,
    reasons: &mut Vec<Reason>,
) -> Vec<(&'a LayerGroup, &'a LayerGroup)> {
    let by_name: HashMap<&[String], &LayerGroup> =
        remote.groups().iter().map(|group| (group.layers.as_slice(), group)).collect();
    let pairs: Vec<_> = local
        .groups()
        .iter()
        .filter_map(|ours| by_name.get(ours.layers.as_slice()).map(|theirs| (ours, *theirs)))
        .collect();
    if pairs.len() != local.groups().len() || pairs.len() != remote.groups().len() {
        let (here, there) = differing(local, remote);
        reasons.push(Reason::differing(Code::Layers, here, there));
    }
    pairs
}

/// Whether both sides have the same layers, whichever of them share their pages.
pub(super) fn have_one_set(local: &EngineDescription, remote: &EngineDescription) -> bool {
    local.layers().collect::<HashSet<_>>() == remote.layers().collect::<HashSet<_>>()
}

fn differing(local: &EngineDescription, remote: &EngineDescription) -> (String, String) {
    let count = |side: &EngineDescription| {
        let nameless = side.groups().iter().filter(|group| group.layers.is_empty()).count();
        let layers = format!("{} layers", side.layers().count());
        if nameless == 0 { layers } else { format!("{layers} and {nameless} regions of no layer") }
    };
    let text = |side: &EngineDescription, other: &EngineDescription| {
        let has: HashSet<&str> = side.layers().collect();
        let missing: Vec<&str> = other.layers().filter(|name| !has.contains(name)).collect();
        match missing.len() {
            0 => count(side),
            more => format!("{}, without {}", count(side), shorten(&missing, more)),
        }
    };
    let (here, there) = (text(local, remote), text(remote, local));
    if here != there {
        return (here, there);
    }
    // The same layers, of which others share their pages.
    let with = |side: &EngineDescription, layer: &str| -> Vec<String> {
        let mut groups = side.groups().iter();
        let group = groups.find(|group| group.layers.iter().any(|name| name == layer));
        group.map(|group| group.layers.clone()).unwrap_or_default()
    };
    for layer in local.layers() {
        let (ours, theirs) = (with(local, layer), with(remote, layer));
        if ours != theirs {
            let same = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
            let share = |count: &str, names: &[String]| {
                let rest: Vec<&str> = names.iter().skip(same).map(String::as_str).collect();
                let rest = match (same, rest.len()) {
                    (0, total) => shorten(&rest, total),
                    (_, 0) => format!("{same} and no more"),
                    (_, total) => format!("{same} and {}", shorten(&rest, total)),
                };
                format!("{count}, in the pages of {layer} those of {rest}")
            };
            return (share(&here, &ours), share(&there, &theirs));
        }
    }
    (here, there)
}

/// Equal formats are served as stock serves them, region by region in the order published: another
/// order would swap layers without a word.
pub(super) fn compare_order(
    local: &EngineDescription,
    remote: &EngineDescription,
    reasons: &mut Vec<Reason>,
) {
    let regions = || (0..).zip(local.regions().iter().zip(remote.regions()));
    let name = |index: usize, region: &Region| {
        let layers: Vec<&str> = region.layers().iter().map(String::as_str).collect();
        format!("regions[{index}] of {}", shorten(&layers, layers.len()))
    };
    let place = |region: &Region| (region.layers().to_vec(), region.tag().cloned());
    if let Some((index, (ours, theirs))) = regions().find(|(_, (a, b))| place(a) != place(b)) {
        let (ours, theirs) = (name(index, ours), name(index, theirs));
        reasons.push(Reason::differing(Code::LayerOrder, ours, theirs));
    }
}
