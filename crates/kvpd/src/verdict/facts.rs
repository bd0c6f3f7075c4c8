//! The facts of two sides, compared.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use crate::facts::{EngineFacts, LayerScales, Scale};
use crate::reason::{Code, Reason};

use super::Policy;
use super::words::{on_off, shorten};

/// What has to agree whatever the model is.
pub(super) fn compare(local: &EngineFacts, remote: &EngineFacts, reasons: &mut Vec<Reason>) {
    let mut compare = |code, ours: &dyn fmt::Display, theirs: &dyn fmt::Display, equal: bool| {
        if !equal {
            reasons.push(Reason::differing(code, ours, theirs));
        }
    };
    macro_rules! same {
        ($($code:ident $field:ident;)*) => {$(
            compare(Code::$code, &local.$field, &remote.$field, local.$field == remote.$field);
        )*};
    }
    same! {
        Connector connector;
        Speculative speculative;
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
    if local.num_kv_groups > 1 || remote.num_kv_groups > 1 {
        let managers = (local.hybrid_manager, remote.hybrid_manager);
        let (ours, theirs) = (on_off(managers.0), on_off(managers.1));
        compare(Code::HybridManager, &ours, &theirs, managers.0 == managers.1);
    }
    if local.pp_size > 1 || remote.pp_size > 1 {
        reasons.push(Reason::either(Code::PpSize, local.pp_size, remote.pp_size));
    }
    if !(local.heads_divide() && remote.heads_divide()) {
        let over = |facts: &EngineFacts| {
            format!("{} KV heads over TP {}", facts.total_kv_heads, facts.tp_size)
        };
        reasons.push(Reason::either(Code::HeadsNotDivisible, over(local), over(remote)));
    }
}

/// Whether both sides compute the same K and V of the same tokens, as far as they say.
///
/// Where both know their configuration and weights, those decide and names are information. Where
/// a side does not know, names have to be equal, and that is all that an accepted pair rests on.
pub(super) fn compare_models(
    local: &EngineFacts,
    remote: &EngineFacts,
    policy: Policy<'_>,
    reasons: &mut Vec<Reason>,
    warnings: &mut Vec<Reason>,
) {
    let mut of_weights = |reason| {
        if policy.allow_other_weights { &mut *warnings } else { &mut *reasons }.push(reason);
    };
    if local.quantization != remote.quantization {
        let (ours, theirs) = (&local.quantization, &remote.quantization);
        of_weights(Reason::differing(Code::Quantization, ours, theirs));
    }
    let weights = local.model_weights.as_ref().zip(remote.model_weights.as_ref());
    if let Some((ours, theirs)) = weights.filter(|(ours, theirs)| ours != theirs) {
        let of = |weights: &String, facts: &EngineFacts| format!("{weights} of {}", facts.model);
        let (ours, theirs) = (of(ours, local), of(theirs, remote));
        of_weights(Reason::differing(Code::ModelWeights, ours, theirs));
    }
    let configs = local.model_config.as_ref().zip(remote.model_config.as_ref());
    if let Some((ours, theirs)) = configs.filter(|(ours, theirs)| ours != theirs) {
        let (ours, theirs) = differing_fields(ours, theirs);
        reasons.push(Reason::differing(Code::ModelConfig, ours, theirs));
    }
    if weights.is_some() && configs.is_some() {
        return;
    }
    // Other weights have other names; that the shapes are equal then rests on configurations.
    let names_matter = !(policy.allow_other_weights && configs.is_some());
    if names_matter && local.model != remote.model {
        reasons.push(Reason::differing(Code::Model, &local.model, &remote.model));
    }
    let known = |facts: &EngineFacts| {
        let part = |is_known| if is_known { "known" } else { "unknown" };
        let weights = part(facts.model_weights.is_some());
        format!("weights {weights}, configuration {}", part(facts.model_config.is_some()))
    };
    warnings.push(Reason::either(Code::ModelUnproved, known(local), known(remote)));
}

/// The first few fields that differ, with the values of either side.
fn differing_fields(
    local: &BTreeMap<String, String>,
    remote: &BTreeMap<String, String>,
) -> (String, String) {
    let names: BTreeSet<&String> = local.keys().chain(remote.keys()).collect();
    let fields: Vec<_> = names
        .into_iter()
        .map(|name| (name, local.get(name), remote.get(name)))
        .filter(|(_, ours, theirs)| ours != theirs)
        .map(|(name, ours, theirs)| {
            let (ours, theirs) = from_difference(ours, theirs);
            let text = |value: Option<String>| match value {
                Some(value) => format!("{name}={value}"),
                None => format!("no {name}"),
            };
            (text(ours), text(theirs))
        })
        .collect();
    let side = |texts: Vec<&str>| shorten(&texts, texts.len());
    (
        side(fields.iter().map(|field| field.0.as_str()).collect()),
        side(fields.iter().map(|field| field.1.as_str()).collect()),
    )
}

/// Two values that differ, long ones from shortly before the first difference.
fn from_difference(
    local: Option<&String>,
    remote: Option<&String>,
) -> (Option<String>, Option<String>) {
    const SHOWN: usize = 160;
    let (Some(ours), Some(theirs)) = (local, remote) else {
        let text = |value: Option<&String>| value.map(|value| cut(value.chars(), SHOWN));
        return (text(local), text(remote));
    };
    let same = ours.chars().zip(theirs.chars()).take_while(|(a, b)| a == b).count();
    let skipped = if same < SHOWN / 2 { 0 } else { same - SHOWN / 4 };
    let lead = if skipped == 0 { "" } else { "... " };
    let text = |value: &String| format!("{lead}{}", cut(value.chars().skip(skipped), SHOWN));
    (Some(text(ours)), Some(text(theirs)))
}

fn cut(mut characters: impl Iterator<Item = char>, shown: usize) -> String {
    let mut text: String = characters.by_ref().take(shown).collect();
    if characters.next().is_some() {
        text.push_str(" ...");
    }
    text
}

/// Equal bytes of a quantised cache are equal values only under equal scales. Of a pair of which
/// one side is not quantised, the element types say so.
pub(super) fn compare_scales(local: &EngineFacts, remote: &EngineFacts, reasons: &mut Vec<Reason>) {
    let quantised = (local.quantised_cache, remote.quantised_cache);
    if quantised.0 != quantised.1 && local.cache_dtype == remote.cache_dtype {
        let text = |facts: &EngineFacts| {
            let word = if facts.quantised_cache { "quantised" } else { "not quantised" };
            format!("{} ({word})", facts.cache_dtype)
        };
        reasons.push(Reason::differing(Code::CacheDtype, text(local), text(remote)));
    }
    if quantised != (true, true) {
        return;
    }
    let (Some(ours), Some(theirs)) = (&local.scales, &remote.scales) else {
        let known = |scales: &Option<Vec<LayerScales>>| match scales {
            Some(layers) => format!("known of {} layers", layers.len()),
            None => "unknown".to_owned(),
        };
        reasons.push(Reason::either(
            Code::ScalesUnknown,
            known(&local.scales),
            known(&remote.scales),
        ));
        return;
    };
    let by_layer = |scales: &[LayerScales]| -> HashMap<String, LayerScales> {
        scales.iter().map(|scales| (scales.layer.clone(), scales.clone())).collect()
    };
    let (here, there) = (by_layer(ours), by_layer(theirs));
    let differs = |layer: &&String| here.get(*layer) != there.get(*layer);
    if let Some(layer) = ours.iter().chain(theirs).map(|scales| &scales.layer).find(differs) {
        let (ours, theirs) = scales_that_differ(here.get(layer), there.get(layer));
        let of = |text| format!("{text} in {layer}");
        reasons.push(Reason::differing(Code::ScalesDiffer, of(ours), of(theirs)));
    }
}

/// The scales of one layer on two sides: of the first head that differs, where heads have their own.
fn scales_that_differ(
    local: Option<&LayerScales>,
    remote: Option<&LayerScales>,
) -> (String, String) {
    let at = |scales: &[Scale], index: usize| {
        scales.get(index).map_or_else(|| "none".to_owned(), |scale| scale.get().to_string())
    };
    let length = |scales: Option<&LayerScales>| scales.map_or(0, |s| s.k.len().max(s.v.len()));
    let entry = |scales: Option<&LayerScales>, index: usize| {
        scales.map(|s| (s.k.get(index).copied(), s.v.get(index).copied()))
    };
    let longest = length(local).max(length(remote));
    let head = (0..longest).find(|&head| entry(local, head) != entry(remote, head)).unwrap_or(0);
    let text = |scales: Option<&LayerScales>| match scales {
        None => "no scales".to_owned(),
        Some(scales) if longest == 1 => format!("k {}, v {}", at(&scales.k, 0), at(&scales.v, 0)),
        Some(scales) => {
            format!("k {}, v {} of head {head}", at(&scales.k, head), at(&scales.v, head))
        }
    };
    (text(local), text(remote))
}
