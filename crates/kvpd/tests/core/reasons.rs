//! Whatever two sides are: a reason shows what differs, or says that one value is wrong on both.

use crate::support::{facts, shape};
use kvpd::region::{Strided, Tag};
use kvpd::{
    Address, Component, ElementType, EngineDescription, EngineFacts, Interior, LayerScales, Memory,
    PageFormat, PlaneSpan, Policy, Region, ShuffledV, Tiling, negotiate,
};
use proptest::prelude::*;

/// A map of a peer's own, of one name and one shape whatever the order is.
fn custom(heads: u32, tokens: u32, is_swapped: bool) -> PageFormat {
    let (h, n, d) = (u64::from(heads), u64::from(tokens), 16);
    let half = h * n * d * 2;
    let component = |name, base| {
        Component::new(
            name,
            ElementType::BFloat16,
            0,
            base,
            Tiling::plain("heads", heads, n * d * 2).unwrap(),
            Tiling::plain("tokens", tokens, d * 2).unwrap(),
            Tiling::plain("head_dim", 16, 2).unwrap(),
        )
        .unwrap()
    };
    let (k, v) = if is_swapped { (half, 0) } else { (0, half) };
    let components = vec![component("k", k), component("v", v)];
    PageFormat::new("custom", components, vec![2 * half], Vec::new()).unwrap()
}

fn format() -> impl Strategy<Value = PageFormat> {
    let element = prop_oneof![
        Just(ElementType::BFloat16),
        Just(ElementType::Float32),
        Just(ElementType::Float8E4M3Fn)
    ];
    (0..7, prop_oneof![Just(1), Just(12)], prop_oneof![Just(16), Just(64)], element).prop_map(
        |(kind, heads, tokens, element)| {
            let shape = shape(heads, tokens, 16, element);
            match kind {
                0 => PageFormat::standard(shape, Interior::Hnc).unwrap(),
                1 => PageFormat::standard(shape, Interior::Nhc).unwrap(),
                2 => PageFormat::split_kv(shape, Interior::Hnc).unwrap(),
                3 => PageFormat::aiter_shuffle(shape, ShuffledV::Tiled).unwrap(),
                4 => PageFormat::aiter_shuffle(shape, ShuffledV::Transposed).unwrap(),
                5 => custom(heads, tokens, false),
                _ => custom(heads, tokens, true),
            }
        },
    )
}

/// How a layer's page is cut into regions: whole, per plane, or in that many equal parts, whose
/// order two of which may be swapped.
#[derive(Clone, Debug)]
struct Cut {
    parts: u64,
    swap: Option<(usize, usize)>,
}

fn cut() -> impl Strategy<Value = Cut> {
    let parts = prop_oneof![Just(1), Just(2), Just(4), Just(16)];
    (parts, proptest::option::of((0..16_usize, 0..16_usize)))
        .prop_map(|(parts, swap)| Cut { parts, swap })
}

/// The spans of each region of a page.
fn spans(format: &PageFormat, cut: &Cut) -> Vec<Vec<PlaneSpan>> {
    let length = format.page_bytes() / cut.parts;
    let mut regions: Vec<Vec<PlaneSpan>> = (0..cut.parts)
        .map(|part| {
            let (first, last) = (part * length, (part + 1) * length);
            let mut start = 0;
            let mut spans = Vec::new();
            for (plane, &bytes) in (0..).zip(format.plane_bytes()) {
                let (low, high) = (first.max(start), last.min(start + bytes));
                if low < high {
                    spans.push(PlaneSpan {
                        plane,
                        start_bytes: low - start,
                        num_bytes: high - low,
                    });
                }
                start += bytes;
            }
            spans
        })
        .collect();
    if let Some((a, b)) = cut.swap {
        let count = regions.len();
        regions.swap(a % count, b % count);
    }
    regions
}

/// Layers of each group: apart, in another order, sharing pages, long lists that differ late.
const LAYERS: &[&[&[&str]]] = &[
    &[&["a"], &["b"]],
    &[&["b"], &["a"]],
    &[&["a", "b"]],
    &[&["b", "a"]],
    &[&["a"], &["b"], &["c"]],
    &[&["a", "c", "d", "e", "f", "g", "h", "i", "j", "k"], &["b"]],
    &[&["a", "c", "d", "e", "f", "g", "h", "i", "k", "j"], &["b"]],
    &[&["a", "c", "d", "e", "f", "g", "h", "i"], &["b", "j", "k"]],
];

fn change() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0..22_usize, 0..4)
}

fn apply(facts: &mut EngineFacts, change: usize) {
    let scales =
        |layer: &str, k: f64| Some(vec![LayerScales::new(layer.to_owned(), &[k], &[1.0]).unwrap()]);
    match change {
        0 => facts.model = "other".into(),
        1 => facts.model_weights = None,
        2 => facts.model_weights = Some("weights 2".into()),
        3 => facts.model_config = None,
        4 => facts.model_config = Some([("rope".into(), "x".repeat(300))].into()),
        5 => facts.model_config = Some([("rope".into(), "x".repeat(299) + "y")].into()),
        6 => facts.model_config = Some([("rope".into(), "x".repeat(301))].into()),
        7 => facts.quantization = "fp8".into(),
        8 => (facts.quantised_cache, facts.scales) = (true, None),
        9 => (facts.quantised_cache, facts.scales) = (true, scales("a", 1.0)),
        10 => (facts.quantised_cache, facts.scales) = (true, scales("a", 2.0)),
        11 => (facts.quantised_cache, facts.scales) = (true, scales("b", 2.0)),
        12 => facts.hybrid_manager = true,
        13 => facts.num_kv_groups = 2,
        14 => facts.pp_size = 2,
        15 => facts.tp_size = 3,
        16 => facts.uses_mla = true,
        17 => facts.speculative = "eagle".into(),
        18 => facts.connector = "kvpd 2".into(),
        19 => facts.release = "0.32.0+rocm".into(),
        20 => facts.cache_dtype = "fp8".into(),
        _ => facts.total_kv_heads = 10,
    }
}

/// What a side is made of.
#[derive(Clone, Debug)]
struct Spec {
    formats: Vec<Option<PageFormat>>,
    cut: Cut,
    layers: usize,
    changes: Vec<usize>,
}

fn spec() -> impl Strategy<Value = Spec> {
    let formats = proptest::collection::vec(proptest::option::weighted(0.9, format()), 2);
    (formats, cut(), 0..LAYERS.len(), change()).prop_map(|(formats, cut, layers, changes)| Spec {
        formats,
        cut,
        layers,
        changes,
    })
}

/// A pair that often differs in few things.
fn pair() -> impl Strategy<Value = (EngineDescription, EngineDescription)> {
    (spec(), spec(), any::<[bool; 4]>()).prop_map(|(local, mut remote, same)| {
        if same[0] {
            remote.formats.clone_from(&local.formats);
        }
        if same[1] {
            remote.cut = local.cut.clone();
        }
        if same[2] {
            remote.layers = local.layers;
        }
        if same[3] {
            remote.changes.clone_from(&local.changes);
        }
        (side(&local), side(&remote))
    })
}

fn side(spec: &Spec) -> EngineDescription {
    let mut facts = facts();
    for &change in &spec.changes {
        apply(&mut facts, change);
    }
    let mut regions = Vec::new();
    for (names, index) in LAYERS[spec.layers].iter().zip([0, 1, 0]) {
        let format = &spec.formats[index];
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let held = match format {
            Some(format) => spans(format, &spec.cut),
            None => vec![vec![PlaneSpan { plane: 0, start_bytes: 0, num_bytes: 64 }]],
        };
        for spans in held {
            let block_bytes = spans.iter().map(|span| span.num_bytes).sum();
            let strided = Strided {
                address: Address((1 + u64::try_from(regions.len()).unwrap()) << 32),
                num_blocks: 2,
                block_bytes,
                block_stride_bytes: block_bytes,
                extent_bytes: None,
                memory: Memory::Dram,
                device: 0,
            };
            let tag = format.clone().map(|format| Tag { format, spans });
            regions.push(Region::new(strided, tag, names.clone()).unwrap());
        }
    }
    EngineDescription::new(facts, regions).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_reason_never_prints_one_text_for_both_sides(
        (local, remote) in pair(), same in any::<bool>(),
        convert in any::<bool>(), allow_other_weights in any::<bool>(),
    ) {
        let policy = Policy { convert, require_tagged: false, allow_other_weights, converters: &[] };
        let remote = if same { &local } else { &remote };
        let verdict = negotiate(&local, Some(remote), policy);
        prop_assert_eq!(verdict.kind() == "refuse", !verdict.reasons.is_empty());
        for reason in verdict.reasons.iter().chain(&verdict.warnings) {
            prop_assert_eq!(reason.is_shared, reason.local == reason.remote, "{}", reason);
            let once = format!("{} on both sides; {}", reason.local, reason.code.remedy());
            prop_assert_eq!(reason.to_string().ends_with(&once), reason.is_shared);
        }
        // Of one and the same side nothing differs.
        if same {
            let shared = verdict.reasons.iter().all(|reason| reason.is_shared);
            prop_assert!(shared, "{}", verdict);
        }
        // Judged from the other end, the same things differ.
        let back = negotiate(remote, Some(&local), policy);
        for reason in verdict.reasons.iter().filter(|reason| !reason.is_shared) {
            let named = |code| back.reasons.iter().any(|other| other.code == code);
            let is_one_way = matches!(
                reason.code.name(),
                "conversion-disabled" | "pair-out-of-scope" | "local-holding-out-of-scope"
                    | "remote-holding-out-of-scope"
            );
            prop_assert!(is_one_way || named(reason.code), "{}\n{}", verdict, back);
        }
    }
}
