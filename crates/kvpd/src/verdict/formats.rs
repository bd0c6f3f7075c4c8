//! Two formats that differ: why pages of one cannot be turned into the other.

use crate::element::ElementType;
use crate::family::{Family, Interior};
use crate::format::{PageFormat, shared_element};
use crate::reason::{Code, Reason};

use super::{Policy, words};

/// Why pages of one format cannot be turned into another.
pub(super) fn differing(
    local: &PageFormat,
    remote: &PageFormat,
    policy: Policy<'_>,
) -> Vec<Reason> {
    let of_formats = |code| {
        let (here, there) = words::formats(local, remote);
        Reason::differing(code, here, there)
    };
    let disabled = || of_formats(Code::ConversionDisabled);
    if policy.has_converter(local, remote) {
        return if policy.convert { Vec::new() } else { vec![disabled()] };
    }
    let mut reasons = Vec::new();
    let names = |format: &PageFormat| {
        let names: Vec<_> = format.components().iter().map(|c| c.name().to_owned()).collect();
        names.join(", ")
    };
    if names(local) != names(remote) {
        reasons.push(of_formats(Code::Components));
    }
    for ours in local.components() {
        let Some(theirs) = remote.component(ours.name()) else { continue };
        if ours.element() != theirs.element() {
            reasons.push(Reason::differing(Code::ElementType, ours.element(), theirs.element()));
        }
        let extents = [
            (Code::Heads, ours.heads().extent(), theirs.heads().extent()),
            (Code::BlockSize, ours.tokens().extent(), theirs.tokens().extent()),
            (Code::HeadDim, ours.channels().extent(), theirs.channels().extent()),
        ];
        for (code, a, b) in extents {
            if a != b {
                reasons.push(Reason::differing(code, a, b));
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
            reasons.push(of_formats(Code::PairOutOfScope));
        }
    }
    reasons
}

/// The pairs of families that policy enables: standard pages into AITER shuffled ones.
pub(super) fn is_enabled_pair(local: &PageFormat, remote: &PageFormat) -> bool {
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
        reasons.push(Reason::shared(Code::ElementTypeOutOfScope, name));
    }
    let tokens = (local.tokens(), remote.tokens());
    if tokens.0 == tokens.1 && !matches!(tokens.0, 16 | 32) {
        reasons.push(Reason::shared(Code::BlockSizeOutOfScope, tokens.0));
    }
}
