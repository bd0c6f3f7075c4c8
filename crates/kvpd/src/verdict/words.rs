//! Values of a reason in words. Texts of two values that differ differ too, however long the values
//! are: what is left out is never where the difference is.

use crate::component::Component;
use crate::engine::{EngineDescription, LayerGroup};
use crate::facts::EngineFacts;
use crate::format::{PageFormat, PlaneSpan};
use crate::region::Region;

use super::FormatPair;

const SHOWN: usize = 8;

/// The first few of `names`, of which there are `total`.
pub(super) fn shorten(names: &[&str], total: usize) -> String {
    let mut text = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if total > SHOWN {
        text.push_str(&format!(" and {} more", total - SHOWN));
    }
    text
}

/// Two formats that differ: their names and, where those are equal, the first thing that is not.
pub(super) fn formats(local: &PageFormat, remote: &PageFormat) -> (String, String) {
    let (here, there) = (local.name(), remote.name());
    if here != there {
        return (here.to_owned(), there.to_owned());
    }
    let lines = |format: &PageFormat| {
        let line = |component: &Component| {
            let mut text = String::new();
            component.write_canonical(&mut text);
            text.trim_end().to_owned()
        };
        let mut lines: Vec<String> = format.components().iter().map(line).collect();
        lines.push(format!("planes of {:?} bytes", format.plane_bytes()));
        lines
    };
    let (ours, theirs) = (lines(local), lines(remote));
    let first = ours.iter().zip(&theirs).find(|(a, b)| a != b);
    let with = |name: &str, line: Option<&String>| {
        line.map_or_else(|| name.to_owned(), |line| format!("{name}: {line}"))
    };
    (with(here, first.map(|pair| pair.0)), with(there, first.map(|pair| pair.1)))
}

/// The layers that share one page.
fn sharing(group: &LayerGroup) -> String {
    let names: Vec<&str> = group.layers.iter().map(String::as_str).collect();
    match names.split_first() {
        Some((first, [])) => (*first).to_owned(),
        Some((first, rest)) => {
            format!("{first} sharing its pages with {}", shorten(rest, rest.len()))
        }
        None => "regions of no layer".to_owned(),
    }
}

/// Which layers keep which format, on either side.
pub(super) fn formats_of_layers(pairs: &[&FormatPair<'_>]) -> (String, String) {
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for pair in pairs {
        // Paired layers have one set of names.
        let all: Vec<String> = pair.layers.iter().map(|(group, _)| sharing(group)).collect();
        let shown: Vec<&str> = all.iter().map(String::as_str).collect();
        let names = shorten(&shown, shown.len());
        let (ours, theirs) = formats(pair.local, pair.remote);
        here.push(format!("{names} in {ours}"));
        there.push(format!("{names} in {theirs}"));
    }
    let join = |parts: &[String]| {
        let mut text = parts.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("; ");
        if parts.len() > SHOWN {
            text.push_str(&format!("; and {} more formats", parts.len() - SHOWN));
        }
        text
    };
    (join(&here), join(&there))
}

/// What layers keep, in so many KV groups.
pub(super) fn in_groups(facts: &EngineFacts, layers: &str) -> String {
    let plural = if facts.num_kv_groups == 1 { "" } else { "s" };
    let manager = on_off(facts.hybrid_manager);
    format!("{} KV group{plural}, hybrid manager {manager}: {layers}", facts.num_kv_groups)
}

pub(super) const fn on_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

/// The spans of a layer, region by region.
pub(super) fn spans<'a>(side: &'a EngineDescription, group: &LayerGroup) -> Vec<&'a [PlaneSpan]> {
    let region = |&index: &usize| side.regions().get(index).and_then(Region::tag);
    group.regions.iter().filter_map(region).map(|tag| tag.spans.as_slice()).collect()
}

fn planes(spans: &[PlaneSpan]) -> String {
    let span = |span: &PlaneSpan| {
        format!("plane {} +{} {} B", span.plane, span.start_bytes, span.num_bytes)
    };
    spans.iter().map(span).collect::<Vec<_>>().join(" then ")
}

/// How the regions of a layer hold its page.
pub(super) fn held(side: &EngineDescription, group: &LayerGroup) -> String {
    held_from(side, group, 0)
}

/// The same of two sides that hold a page differently, from the first region that does.
pub(super) fn held_differently(
    local: (&EngineDescription, &LayerGroup),
    remote: (&EngineDescription, &LayerGroup),
) -> (String, String) {
    let (ours, theirs) = (spans(local.0, local.1), spans(remote.0, remote.1));
    let same = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
    let first = if same < SHOWN { 0 } else { same };
    (held_from(local.0, local.1, first), held_from(remote.0, remote.1, first))
}

fn held_from(side: &EngineDescription, group: &LayerGroup, first: usize) -> String {
    let texts: Vec<String> = spans(side, group).into_iter().map(planes).collect();
    let shown: Vec<&str> = texts.iter().skip(first).map(String::as_str).collect();
    let plural = if texts.len() == 1 { "" } else { "s" };
    let from = if first == 0 { String::new() } else { format!("from the {first}th on ") };
    format!("{} region{plural} a layer ({from}{})", texts.len(), shorten(&shown, shown.len()))
}
