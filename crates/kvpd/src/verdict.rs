//! The verdict over a pair: identical, convertible, or refused with every reason.
//!
//! Judged from the reader's side: `local` wants to read `remote`'s pages. Formats are compared by their
//! maps, so what a peer calls its format decides nothing.

use std::collections::HashMap;
use std::fmt;

use crate::element::ElementType;
use crate::engine::{EngineDescription, EngineFacts, LayerGroup};
use crate::family::{Family, Interior};
use crate::format::{PageFormat, shared_element};
use crate::reason::{Code, Reason};
use crate::region::Region;

/// What the operator allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy<'a> {
    /// Convert pages of another format, where the pair is in scope.
    pub convert: bool,
    /// Refuse peers that publish no page format, whatever the local format is.
    pub require_tagged: bool,
    /// Pairs (remote, local) that a backend converts itself. They are in scope whatever their
    /// components are: nothing is known about the map from one to the other.
    pub converters: &'a [(PageFormat, PageFormat)],
}

impl Policy<'_> {
    fn has_converter(self, local: &PageFormat, remote: &PageFormat) -> bool {
        self.converters.iter().any(|(source, target)| (source, target) == (remote, local))
    }
}

/// How a pair is served.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Equal formats, held alike: bytes move as they are.
    Identical,
    /// Bytes move as they are and are then converted.
    Convert {
        /// What is read.
        source: PageFormat,
        /// What is kept.
        target: PageFormat,
    },
    /// Not served.
    Refuse,
}

/// The outcome with its reasons.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Verdict {
    /// How the pair is served.
    pub outcome: Outcome,
    /// Why it is refused; empty otherwise.
    pub reasons: Vec<Reason>,
    /// What an accepted pair rests on unproved.
    pub warnings: Vec<Reason>,
}

impl Verdict {
    fn new(served: Outcome, mut reasons: Vec<Reason>) -> Self {
        reasons.sort_by_key(|reason| reason.code);
        reasons.dedup();
        drop_implied(&mut reasons);
        let outcome = if reasons.is_empty() { served } else { Outcome::Refuse };
        Self { outcome, reasons, warnings: Vec::new() }
    }

    /// "identical", "convert" or "refuse".
    pub const fn kind(&self) -> &'static str {
        match self.outcome {
            Outcome::Identical => "identical",
            Outcome::Convert { .. } => "convert",
            Outcome::Refuse => "refuse",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Identical => write!(f, "identical: pages are moved as they are")?,
            Outcome::Convert { source, target } => write!(f, "convert: {source} into {target}")?,
            Outcome::Refuse => {
                let plural = if self.reasons.len() == 1 { "" } else { "s" };
                write!(f, "refuse, for {} reason{plural}:", self.reasons.len())?;
            }
        }
        for reason in &self.reasons {
            write!(f, "\n  - {reason}")?;
        }
        for warning in &self.warnings {
            write!(f, "\n  warning: {warning}")?;
        }
        Ok(())
    }
}

/// Judges two formats alone; how regions hold their pages is not known here.
pub fn negotiate_formats(local: &PageFormat, remote: &PageFormat, policy: Policy<'_>) -> Verdict {
    let reasons =
        if local == remote { Vec::new() } else { differing_formats(local, remote, policy) };
    Verdict::new(serve(local, remote), reasons)
}

/// Judges what two ranks published; `remote` is `None` for a peer that published nothing of kvpd's.
pub fn negotiate(
    local: &EngineDescription,
    remote: Option<&EngineDescription>,
    policy: Policy<'_>,
) -> Verdict {
    let Some(remote) = remote else { return untagged_peer(local, policy) };
    let mut reasons = Vec::new();
    compare_facts(local.facts(), remote.facts(), &mut reasons);
    let pairs = pair_layers(local, remote, &mut reasons);
    let mut served = Outcome::Identical;
    let mut seen: Vec<(&PageFormat, &PageFormat)> = Vec::new();
    for (ours, theirs) in pairs {
        let (Some(a), Some(b)) = (&ours.format, &theirs.format) else {
            let name = |format: &Option<PageFormat>| {
                format.as_ref().map_or("untagged", PageFormat::name).to_owned()
            };
            let code = Code::UntaggedRegion;
            reasons.push(Reason::new(code, name(&ours.format), name(&theirs.format)));
            continue;
        };
        let mut hold = |code| {
            reasons.push(Reason::new(code, held(local, ours), held(remote, theirs)));
        };
        if a == b {
            if spans(local, ours) != spans(remote, theirs) {
                hold(Code::PagesHeldDifferently);
            }
        } else if is_enabled_pair(a, b) && !policy.has_converter(a, b) {
            if ours.held.len() != 2 || ours.regions.len() != 2 {
                hold(Code::LocalHoldingOutOfScope);
            }
            if theirs.held.len() != 1 {
                hold(Code::RemoteHoldingOutOfScope);
            }
        }
        if !seen.contains(&(a, b)) {
            seen.push((a, b));
        }
    }
    for &(a, b) in seen.iter().filter(|(a, b)| a != b) {
        served = serve(a, b);
        reasons.extend(differing_formats(a, b, policy));
        let (ours, theirs) = (local.facts(), remote.facts());
        if ours.uses_mla || theirs.uses_mla {
            reasons.push(Reason::new(Code::Mla, ours.uses_mla, theirs.uses_mla));
        }
        if ours.num_kv_groups > 1 || theirs.num_kv_groups > 1 {
            let groups = (ours.num_kv_groups, theirs.num_kv_groups);
            reasons.push(Reason::new(Code::Hybrid, groups.0, groups.1));
        }
    }
    if served != Outcome::Identical && seen.len() > 1 {
        let names = |side: Vec<&PageFormat>| {
            let mut names: Vec<_> = side.into_iter().map(PageFormat::name).collect();
            names.sort_unstable();
            names.dedup();
            names.join(", ")
        };
        let ours = names(seen.iter().map(|(a, _)| *a).collect());
        let theirs = names(seen.iter().map(|(_, b)| *b).collect());
        reasons.push(Reason::new(Code::MixedFormats, ours, theirs));
    }
    if served == Outcome::Identical && reasons.is_empty() {
        compare_order(local, remote, &mut reasons);
    }
    Verdict::new(served, reasons)
}

fn serve(local: &PageFormat, remote: &PageFormat) -> Outcome {
    if local == remote {
        Outcome::Identical
    } else {
        Outcome::Convert { source: remote.clone(), target: local.clone() }
    }
}

/// Of an untagged peer only what stock knows is known: it may be taken at stock's word where the local
/// pages are what stock assumes, never where they are not.
fn untagged_peer(local: &EngineDescription, policy: Policy<'_>) -> Verdict {
    let standard = local.groups().iter().all(|group| {
        let family = group.format.as_ref().and_then(PageFormat::family_of_map);
        matches!(family, Some(Family::Standard(_)))
    });
    let ours = match local.format() {
        Some(format) => format.name(),
        None => "untagged or mixed",
    };
    let reason = Reason::new(Code::UntaggedPeer, ours, "untagged");
    if standard && !policy.require_tagged {
        let mut verdict = Verdict::new(Outcome::Identical, Vec::new());
        verdict.warnings.push(reason);
        verdict
    } else {
        Verdict::new(Outcome::Refuse, vec![reason])
    }
}

fn compare_facts(local: &EngineFacts, remote: &EngineFacts, reasons: &mut Vec<Reason>) {
    let mut compare = |code, ours: &dyn fmt::Display, theirs: &dyn fmt::Display, equal: bool| {
        if !equal {
            reasons.push(Reason::new(code, ours, theirs));
        }
    };
    macro_rules! same {
        ($($code:ident $field:ident;)*) => {$(
            compare(Code::$code, &local.$field, &remote.$field, local.$field == remote.$field);
        )*};
    }
    same! {
        Connector connector;
        Model model;
        ModelDtype model_dtype;
        CacheDtype cache_dtype;
        TotalKvHeads total_kv_heads;
        HeadDim head_dim;
        TpSize tp_size;
        BlockSize block_size;
        KvGroups num_kv_groups;
        Mla uses_mla;
    }
    let same_release = local.public_release() == remote.public_release();
    compare(Code::Release, &local.release, &remote.release, same_release);
    if local.tp_size == remote.tp_size {
        compare(Code::TpRank, &local.tp_rank, &remote.tp_rank, local.tp_rank == remote.tp_rank);
    }
    let over = |facts: &EngineFacts| {
        format!("{} KV heads over TP {}", facts.total_kv_heads, facts.tp_size)
    };
    let divide = local.heads_divide() && remote.heads_divide();
    compare(Code::HeadsNotDivisible, &over(local), &over(remote), divide);
}

/// Pairs the layers of two sides by name, and says which are missing.
fn pair_layers<'a>(
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
        let text = |side: &EngineDescription, other: &EngineDescription| {
            let names: Vec<&str> = side.layers().collect();
            let has: std::collections::HashSet<&str> = names.iter().copied().collect();
            let missing: Vec<&str> = other.layers().filter(|name| !has.contains(name)).collect();
            match missing.len() {
                0 => format!("{} layers", names.len()),
                more => format!("{} layers, without {}", names.len(), shorten(&missing, more)),
            }
        };
        reasons.push(Reason::new(Code::Layers, text(local, remote), text(remote, local)));
    }
    pairs
}

/// Equal formats are served as stock serves them, region by region in the order published: another
/// order would swap layers without a word.
fn compare_order(local: &EngineDescription, remote: &EngineDescription, reasons: &mut Vec<Reason>) {
    let regions = || (0..).zip(local.regions().iter().zip(remote.regions()));
    let name = |index: usize, region: &Region| {
        format!("regions[{index}] of {}", region.layers().join(", "))
    };
    let place = |region: &Region| (region.layers().to_vec(), region.tag().cloned());
    if let Some((index, (ours, theirs))) = regions().find(|(_, (a, b))| place(a) != place(b)) {
        let (ours, theirs) = (name(index, ours), name(index, theirs));
        reasons.push(Reason::new(Code::LayerOrder, ours, theirs));
    }
}

fn shorten(names: &[&str], total: usize) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if total > SHOWN {
        text.push_str(&format!(" and {} more", total - SHOWN));
    }
    text
}

/// Why pages of one format cannot be turned into another.
fn differing_formats(local: &PageFormat, remote: &PageFormat, policy: Policy<'_>) -> Vec<Reason> {
    let disabled = || Reason::new(Code::ConversionDisabled, local, remote);
    if policy.has_converter(local, remote) {
        return if policy.convert { Vec::new() } else { vec![disabled()] };
    }
    let mut reasons = Vec::new();
    let names = |format: &PageFormat| {
        let names: Vec<_> = format.components().iter().map(|c| c.name().to_owned()).collect();
        names.join(", ")
    };
    if names(local) != names(remote) {
        reasons.push(Reason::new(Code::Components, local, remote));
    }
    for ours in local.components() {
        let Some(theirs) = remote.component(ours.name()) else { continue };
        if ours.element() != theirs.element() {
            reasons.push(Reason::new(Code::ElementType, ours.element(), theirs.element()));
        }
        let extents = [
            (Code::Heads, ours.heads().extent(), theirs.heads().extent()),
            (Code::BlockSize, ours.tokens().extent(), theirs.tokens().extent()),
            (Code::HeadDim, ours.channels().extent(), theirs.channels().extent()),
        ];
        for (code, a, b) in extents {
            if a != b {
                reasons.push(Reason::new(code, a, b));
            }
        }
    }
    let families = (local.family_of_map(), remote.family_of_map());
    let one_family = families.0.is_some() && families.0 == families.1;
    let comparable = families.0.is_some() && families.1.is_some() || local.same_tensors(remote);
    if comparable && !one_family {
        if !policy.convert {
            reasons.push(disabled());
        }
        if is_enabled_pair(local, remote) {
            scope_of_shape(local, remote, &mut reasons);
        } else {
            reasons.push(Reason::new(Code::PairOutOfScope, local, remote));
        }
    }
    reasons
}

/// The pairs of families that policy enables: standard pages into AITER shuffled ones.
fn is_enabled_pair(local: &PageFormat, remote: &PageFormat) -> bool {
    remote.family_of_map() == Some(Family::Standard(Interior::Hnc))
        && matches!(local.family_of_map(), Some(Family::AiterShuffle(_)))
}

/// The shapes whose conversion is verified end to end.
fn scope_of_shape(local: &PageFormat, remote: &PageFormat, reasons: &mut Vec<Reason>) {
    let elements = (shared_element(local), shared_element(remote));
    if elements.0 == elements.1
        && !matches!(elements.0, Some(ElementType::BFloat16 | ElementType::Float16))
    {
        let name = elements.0.map_or("mixed", ElementType::name);
        reasons.push(Reason::new(Code::ElementTypeOutOfScope, name, name));
    }
    let tokens = (local.tokens(), remote.tokens());
    if tokens.0 == tokens.1 && !matches!(tokens.0, 16 | 32) {
        reasons.push(Reason::new(Code::BlockSizeOutOfScope, tokens.0, tokens.1));
    }
}

/// Removes what another reason already explains: heads a rank when the model's heads or the ranks
/// differ, the cache's dtype setting when the element types do.
fn drop_implied(reasons: &mut Vec<Reason>) {
    let has = |code| reasons.iter().any(|reason: &Reason| reason.code == code);
    let heads_implied = has(Code::TotalKvHeads) || has(Code::TpSize);
    let dtype_implied = has(Code::ElementType);
    reasons.retain(|reason| match reason.code {
        Code::Heads => !heads_implied,
        Code::CacheDtype => !dtype_implied,
        _ => true,
    });
}

/// The spans of a layer, region by region.
fn spans<'a>(
    side: &'a EngineDescription,
    group: &LayerGroup,
) -> Vec<&'a [crate::format::PlaneSpan]> {
    let region = |&index: &usize| side.regions().get(index).and_then(Region::tag);
    group.regions.iter().filter_map(region).map(|tag| tag.spans.as_slice()).collect()
}

/// How the regions of a layer hold its page, in words.
fn held(side: &EngineDescription, group: &LayerGroup) -> String {
    let regions = spans(side, group);
    let planes = |spans: &&[crate::format::PlaneSpan]| {
        let span = |span: &crate::format::PlaneSpan| {
            format!("plane {} +{} {} B", span.plane, span.start_bytes, span.num_bytes)
        };
        spans.iter().map(span).collect::<Vec<_>>().join(" then ")
    };
    let texts: Vec<String> = regions.iter().map(planes).collect();
    let shown: Vec<&str> = texts.iter().map(String::as_str).collect();
    let plural = if texts.len() == 1 { "" } else { "s" };
    format!("{} region{plural} a layer ({})", texts.len(), shorten(&shown, texts.len()))
}
