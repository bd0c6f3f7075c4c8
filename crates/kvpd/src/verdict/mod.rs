//! The verdict over a pair: identical, convertible, or refused with every reason.
//!
//! Judged from the reader's side: `local` wants to read `remote`'s pages. Formats are compared by their
//! maps, so what a peer calls its format decides nothing.

mod facts;
mod formats;
mod layers;
mod words;

use std::fmt;

use crate::engine::{EngineDescription, LayerGroup};
use crate::facts::EngineFacts;
use crate::family::Family;
use crate::format::PageFormat;
use crate::reason::{Code, Reason};

/// What the operator allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy<'a> {
    /// Convert pages of another format, where the pair is in scope.
    pub convert: bool,
    /// Refuse peers that publish no page format, whatever the local format is.
    pub require_tagged: bool,
    /// Read from peers that loaded other weights, or the same ones quantised otherwise. What decides
    /// the shape of K and V is compared all the same.
    pub allow_other_weights: bool,
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
        if local == remote { Vec::new() } else { formats::differing(local, remote, policy) };
    Verdict::new(serve(local, remote), reasons)
}

/// Judges what two ranks published; `remote` is `None` for a peer that published nothing of kvpd's.
pub fn negotiate(
    local: &EngineDescription,
    remote: Option<&EngineDescription>,
    policy: Policy<'_>,
) -> Verdict {
    let Some(remote) = remote else { return untagged_peer(local, policy) };
    let (mut reasons, mut warnings) = (Vec::new(), Vec::new());
    facts::compare(local.facts(), remote.facts(), &mut reasons);
    facts::compare_models(local.facts(), remote.facts(), policy, &mut reasons, &mut warnings);
    facts::compare_scales(local.facts(), remote.facts(), &mut reasons);
    let pairs = layers::pair(local, remote, &mut reasons);
    if reasons.iter().any(|reason| reason.code == Code::HybridManager)
        && layers::have_one_set(local, remote)
    {
        // Which layers share their pages is the manager's doing.
        reasons.retain(|reason| reason.code != Code::Layers);
    }
    let mut formats: Vec<FormatPair<'_>> = Vec::new();
    for (ours, theirs) in pairs {
        let (Some(a), Some(b)) = (&ours.format, &theirs.format) else {
            reasons.push(untagged_region(ours, theirs));
            continue;
        };
        if a == b {
            if words::spans(local, ours) != words::spans(remote, theirs) {
                let (here, there) = words::held_differently((local, ours), (remote, theirs));
                reasons.push(Reason::differing(Code::PagesHeldDifferently, here, there));
            }
        } else if formats::is_enabled_pair(a, b) && !policy.has_converter(a, b) {
            let mut hold = |code| {
                let (here, there) = (words::held(local, ours), words::held(remote, theirs));
                let (here, there) = (format!("{here} of {a}"), format!("{there} of {b}"));
                reasons.push(Reason::differing(code, here, there));
            };
            if ours.held.len() != 2 || ours.regions.len() != 2 {
                hold(Code::LocalHoldingOutOfScope);
            }
            if theirs.held.len() != 1 {
                hold(Code::RemoteHoldingOutOfScope);
            }
        }
        match formats.iter_mut().find(|pair| (pair.local, pair.remote) == (a, b)) {
            Some(pair) => pair.layers.push((ours, theirs)),
            None => {
                formats.push(FormatPair { local: a, remote: b, layers: vec![(ours, theirs)] });
            }
        }
    }
    let served = serve_differing(local.facts(), remote.facts(), &formats, policy, &mut reasons);
    if served == Outcome::Identical && reasons.is_empty() {
        layers::compare_order(local, remote, &mut reasons);
    }
    let mut verdict = Verdict::new(served, reasons);
    if verdict.outcome != Outcome::Refuse {
        verdict.warnings = warnings;
    }
    verdict
}

/// Two formats, and the layers whose pages are in one here and in the other there.
struct FormatPair<'a> {
    local: &'a PageFormat,
    remote: &'a PageFormat,
    layers: Vec<(&'a LayerGroup, &'a LayerGroup)>,
}

impl FormatPair<'_> {
    fn has_shared_pages(&self) -> bool {
        self.layers.iter().any(|(ours, theirs)| ours.layers.len().max(theirs.layers.len()) > 1)
    }
}

/// How pages of several formats are served, and what keeps those that differ from being converted.
fn serve_differing(
    local: &EngineFacts,
    remote: &EngineFacts,
    formats: &[FormatPair<'_>],
    policy: Policy<'_>,
    reasons: &mut Vec<Reason>,
) -> Outcome {
    let differing: Vec<_> = formats.iter().filter(|pair| pair.local != pair.remote).collect();
    let mut served = Outcome::Identical;
    for pair in &differing {
        served = serve(pair.local, pair.remote);
        reasons.extend(formats::differing(pair.local, pair.remote, policy));
    }
    if !differing.is_empty() {
        if local.uses_mla || remote.uses_mla {
            reasons.push(Reason::either(Code::Mla, local.uses_mla, remote.uses_mla));
        }
        let is_hybrid = local.num_kv_groups > 1 || remote.num_kv_groups > 1;
        if is_hybrid {
            let (here, there) = words::formats_of_layers(&differing);
            let (here, there) = (words::in_groups(local, &here), words::in_groups(remote, &there));
            reasons.push(Reason::differing(Code::Hybrid, here, there));
            // Kinds of layers that share memory have pages of no one format: turned off, the
            // manager gives each its own.
            if differing.iter().all(|pair| pair.has_shared_pages()) {
                reasons.retain(|reason| reason.code != Code::Components);
            }
        } else if formats.len() > 1 {
            let all: Vec<_> = differing
                .iter()
                .copied()
                .chain(formats.iter().filter(|pair| pair.local == pair.remote))
                .collect();
            let (here, there) = words::formats_of_layers(&all);
            reasons.push(Reason::differing(Code::MixedFormats, here, there));
        }
    }
    served
}

fn untagged_region(local: &LayerGroup, remote: &LayerGroup) -> Reason {
    let name = |group: &LayerGroup| {
        group.format.as_ref().map_or_else(|| "untagged".to_owned(), ToString::to_string)
    };
    Reason::either(Code::UntaggedRegion, name(local), name(remote))
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
    let reason = Reason::differing(Code::UntaggedPeer, ours, "untagged");
    if standard && !policy.require_tagged {
        let mut verdict = Verdict::new(Outcome::Identical, Vec::new());
        verdict.warnings.push(reason);
        verdict
    } else {
        Verdict::new(Outcome::Refuse, vec![reason])
    }
}

/// Removes what another reason already explains: heads a rank when the model's heads or the ranks
/// differ, the cache's dtype when the element types of pages do, groups when one side's manager does
/// not make them.
fn drop_implied(reasons: &mut Vec<Reason>) {
    let has = |code| reasons.iter().any(|reason: &Reason| reason.code == code);
    let heads_implied = has(Code::TotalKvHeads) || has(Code::TpSize);
    let dtype_implied = has(Code::ElementType);
    let groups_implied = has(Code::HybridManager);
    reasons.retain(|reason| match reason.code {
        Code::Heads => !heads_implied,
        Code::CacheDtype => !dtype_implied,
        Code::KvGroups => !groups_implied,
        _ => true,
    });
}
