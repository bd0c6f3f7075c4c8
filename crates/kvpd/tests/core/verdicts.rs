//! The verdict: each pair of engines, and each reason with both values.

use crate::support::{cache, engine, facts, shape, shuffle, standard};
use kvpd::{
    Code, ElementType, EngineDescription, EngineFacts, Interior, Layout, Outcome, PageFormat,
    Policy, Region, ShuffledV, Verdict, negotiate, negotiate_formats,
};

const PLAIN: Policy<'_> =
    Policy { convert: false, require_tagged: false, allow_other_weights: false, converters: &[] };
const CONVERT: Policy<'_> = Policy { convert: true, ..PLAIN };

fn codes(verdict: &Verdict) -> Vec<Code> {
    verdict.reasons.iter().map(|reason| reason.code).collect()
}

/// The only reason, with its values.
fn only(verdict: &Verdict) -> (Code, &str, &str) {
    assert_eq!(verdict.reasons.len(), 1, "{verdict}");
    let reason = &verdict.reasons[0];
    (reason.code, &reason.local, &reason.remote)
}

fn prefill() -> EngineDescription {
    engine(&standard(8, 16, 128), Layout::Lbhnc, 3)
}

fn decode() -> EngineDescription {
    engine(&shuffle(8, 16, 128), Layout::Lhbnc, 3)
}

/// The prefill with one fact changed.
fn prefill_with(change: impl FnOnce(&mut EngineFacts)) -> EngineDescription {
    let mut facts = facts();
    change(&mut facts);
    EngineDescription::new(facts, prefill().regions().to_vec()).unwrap()
}

#[test]
fn the_pair_we_serve_is_converted() {
    let verdict = negotiate(&decode(), Some(&prefill()), CONVERT);
    let (source, target) = (standard(8, 16, 128), shuffle(8, 16, 128));
    assert_eq!(verdict.outcome, Outcome::Convert { source, target }, "{verdict}");
    assert!(verdict.reasons.is_empty() && verdict.warnings.is_empty());
}

#[test]
fn conversion_is_off_unless_enabled() {
    let verdict = negotiate(&decode(), Some(&prefill()), PLAIN);
    let names = (
        "aiter-shuffle(H=8, N=16, D=128, bfloat16, v=tiled)",
        "standard(H=8, N=16, D=128, bfloat16, HNC)",
    );
    assert_eq!(only(&verdict), (Code::ConversionDisabled, names.0, names.1));
}

#[test]
fn the_way_back_is_out_of_scope() {
    let verdict = negotiate(&prefill(), Some(&decode()), CONVERT);
    assert_eq!(only(&verdict).0, Code::PairOutOfScope);
}

#[test]
fn equal_formats_held_alike_are_identical() {
    for side in [prefill(), decode(), engine(&shuffle(8, 16, 128), Layout::Lbhnc, 3)] {
        for policy in [PLAIN, CONVERT] {
            assert_eq!(negotiate(&side, Some(&side), policy).outcome, Outcome::Identical);
        }
    }
}

/// Regions and lengths that coincide decide nothing: H=2 in LHBNC has two regions of 8,192 bytes a layer on both sides.
#[test]
fn equal_geometry_with_other_bytes_is_never_identical() {
    for heads in [1, 2, 4, 8] {
        for layouts in [(Layout::Lhbnc, Layout::Lhbnc), (Layout::Lbhnc, Layout::Lbhnc)] {
            let packed = engine(&standard(heads, 16, 128), layouts.0, 3);
            let shuffled = engine(&shuffle(heads, 16, 128), layouts.1, 3);
            for (local, remote) in [(&packed, &shuffled), (&shuffled, &packed)] {
                for policy in [PLAIN, CONVERT] {
                    let verdict = negotiate(local, Some(remote), policy);
                    assert_eq!(
                        verdict.kind(),
                        if heads == 1
                            && policy.convert
                            && local == &shuffled
                            && layouts.1 == Layout::Lhbnc
                        {
                            "convert"
                        } else {
                            "refuse"
                        }
                    );
                }
            }
        }
    }
}

#[test]
fn holdings_outside_the_first_scope_are_named() {
    let joint = engine(&shuffle(8, 16, 128), Layout::Lbhnc, 3);
    let verdict = negotiate(&joint, Some(&prefill()), CONVERT);
    let reason = only(&verdict);
    assert_eq!(reason.0, Code::LocalHoldingOutOfScope);
    assert_eq!(
        reason.1,
        "1 region a layer (plane 0 +0 32768 B then plane 1 +0 32768 B) of \
         aiter-shuffle(H=8, N=16, D=128, bfloat16, v=tiled)"
    );
    let per_head = engine(&standard(8, 16, 128), Layout::Lhbnc, 3);
    let verdict = negotiate(&decode(), Some(&per_head), CONVERT);
    assert_eq!(only(&verdict).0, Code::RemoteHoldingOutOfScope);
}

#[test]
fn one_format_held_differently_is_refused_in_those_words() {
    let joint = engine(&shuffle(8, 16, 128), Layout::Lbhnc, 3);
    let verdict = negotiate(&decode(), Some(&joint), CONVERT);
    let (code, local, remote) = only(&verdict);
    assert_eq!(code, Code::PagesHeldDifferently);
    assert!(local.starts_with("2 regions") && remote.starts_with("1 region a layer"));
}

#[test]
fn layers_in_another_order_are_not_identical() {
    let mut regions: Vec<Region> = prefill().regions().to_vec();
    regions.swap(0, 2);
    let swapped = EngineDescription::new(facts(), regions).unwrap();
    let verdict = negotiate(&prefill(), Some(&swapped), PLAIN);
    assert_eq!(only(&verdict).0, Code::LayerOrder);
    // A converting pair is paired by name, so the order does not matter.
    assert_eq!(negotiate(&decode(), Some(&swapped), CONVERT).kind(), "convert");
}

#[test]
fn an_untagged_peer_is_taken_at_stocks_word_only_with_standard_pages() {
    let verdict = negotiate(&prefill(), None, PLAIN);
    assert_eq!(verdict.outcome, Outcome::Identical);
    assert_eq!(verdict.warnings[0].code, Code::UntaggedPeer);
    let strict = Policy { require_tagged: true, ..PLAIN };
    assert_eq!(only(&negotiate(&prefill(), None, strict)).0, Code::UntaggedPeer);
    assert_eq!(only(&negotiate(&decode(), None, CONVERT)).0, Code::UntaggedPeer);
}

/// Unknown is not equal to unknown.
#[test]
fn untagged_regions_are_refused_even_against_each_other() {
    let bare = |region: &Region| {
        let strided = kvpd::region::Strided {
            address: region.address(),
            num_blocks: region.num_blocks().into(),
            block_bytes: region.block_bytes(),
            block_stride_bytes: region.block_stride_bytes(),
            extent_bytes: None,
            memory: region.memory(),
            device: region.device(),
        };
        Region::new(strided, None, region.layers().to_vec()).unwrap()
    };
    let untagged = prefill().regions().iter().map(bare).collect();
    let untagged = EngineDescription::new(facts(), untagged).unwrap();
    for local in [&untagged, &prefill()] {
        let verdict = negotiate(local, Some(&untagged), CONVERT);
        assert_eq!(only(&verdict).0, Code::UntaggedRegion);
    }
}

#[test]
fn a_single_differing_fact_is_named_with_both_values() {
    type Change = fn(&mut EngineFacts);
    let changes: [(Change, Code, &str, &str); 15] = [
        (
            |f| f.model_weights = Some("weights 2".into()),
            Code::ModelWeights,
            "weights 1 of qwen3-8b",
            "weights 2 of qwen3-8b",
        ),
        (
            |f| f.model_config = Some([("hidden_size".into(), "2048".into())].into()),
            Code::ModelConfig,
            "hidden_size=4096",
            "hidden_size=2048",
        ),
        (|f| f.quantization = "fp8".into(), Code::Quantization, "none", "fp8"),
        (|f| f.speculative = "eagle".into(), Code::Speculative, "none", "eagle"),
        (|f| f.pp_size = 2, Code::PpSize, "1", "2"),
        (
            |f| (f.model, f.model_weights) = ("llama-3".into(), None),
            Code::Model,
            "qwen3-8b",
            "llama-3",
        ),
        (|f| f.model_dtype = "float16".into(), Code::ModelDtype, "bfloat16", "float16"),
        (|f| f.cache_dtype = "fp8".into(), Code::CacheDtype, "bfloat16", "fp8"),
        (|f| f.release = "0.32.0".into(), Code::Release, "0.33.0+cu129", "0.32.0"),
        (|f| f.connector = "kvpd 2".into(), Code::Connector, "kvpd 1", "kvpd 2"),
        (|f| f.total_kv_heads = 16, Code::TotalKvHeads, "8", "16"),
        (|f| f.tp_size = 2, Code::TpSize, "1", "2"),
        (|f| f.block_size = 32, Code::BlockSize, "16", "32"),
        (|f| f.head_dim = 64, Code::HeadDim, "128", "64"),
        (|f| f.uses_mla = true, Code::Mla, "false", "true"),
    ];
    for (change, code, local, remote) in changes {
        for side in [prefill(), decode()] {
            let verdict = negotiate(&side, Some(&prefill_with(change)), CONVERT);
            assert_eq!(only(&verdict), (code, local, remote));
        }
    }
}

#[test]
fn facts_that_may_differ_do_not_refuse() {
    let other = prefill_with(|facts| {
        facts.backend = "TRITON_ATTN".into();
        facts.layout = "HND".into();
        facts.release = "0.33.0+rocm700".into();
        facts.model = "/models/qwen3-8b".into();
        facts.cache_dtype_setting = "bfloat16".into();
        facts.hybrid_manager = true;
    });
    assert_eq!(negotiate(&prefill(), Some(&other), PLAIN).outcome, Outcome::Identical);
}

#[test]
fn ranks_pair_with_the_same_rank() {
    let rank = |tp_rank| prefill_with(|facts| (facts.tp_size, facts.tp_rank) = (2, tp_rank));
    assert_eq!(negotiate(&rank(1), Some(&rank(1)), PLAIN).outcome, Outcome::Identical);
    assert_eq!(only(&negotiate(&rank(0), Some(&rank(1)), PLAIN)), (Code::TpRank, "0", "1"));
}

#[test]
fn missing_layers_are_named() {
    let verdict =
        negotiate(&decode(), Some(&engine(&standard(8, 16, 128), Layout::Lbhnc, 5)), CONVERT);
    assert_eq!(only(&verdict), (Code::Layers, "3 layers, without layers.3, layers.4", "5 layers"));
}

#[test]
fn every_reason_is_listed_and_the_element_type_comes_first() {
    let fp8 = shape(4, 32, 128, ElementType::Float8E4M3Fn);
    let fp8 = PageFormat::aiter_shuffle(fp8, ShuffledV::Tiled).unwrap();
    let mut other = facts();
    other.model_weights = Some("weights 2".into());
    other.cache_dtype = "fp8".into();
    other.block_size = 32;
    let local = EngineDescription::new(other, cache(&fp8, Layout::Lhbnc, 3)).unwrap();
    let verdict = negotiate(&local, Some(&prefill()), PLAIN);
    let expected = [
        Code::ElementType,
        Code::ModelWeights,
        Code::BlockSize,
        Code::Heads,
        Code::ConversionDisabled,
    ];
    assert_eq!(codes(&verdict), expected, "{verdict}");
    let reason = &verdict.reasons[0];
    assert_eq!((&*reason.local, &*reason.remote), ("float8_e4m3fn", "bfloat16"));
    let text = verdict.to_string();
    for reason in &verdict.reasons {
        assert!(text.contains(reason.code.name()) && text.contains(reason.code.remedy()));
    }
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    for (heads, ours, theirs) in [(10, 4, 4), (6, 4, 2)] {
        let side = |tp_size| {
            prefill_with(|facts| (facts.total_kv_heads, facts.tp_size) = (heads, tp_size))
        };
        let verdict = negotiate(&side(ours), Some(&side(theirs)), PLAIN);
        assert!(codes(&verdict).contains(&Code::HeadsNotDivisible), "{verdict}");
    }
    let replicated = prefill_with(|facts| (facts.total_kv_heads, facts.tp_size) = (2, 8));
    assert_eq!(negotiate(&replicated, Some(&replicated), PLAIN).outcome, Outcome::Identical);
}

#[test]
fn unequal_tp_names_tp_and_not_what_follows_from_it() {
    let mut other = facts();
    (other.tp_size, other.tp_rank) = (2, 1);
    let local =
        EngineDescription::new(other, cache(&shuffle(4, 16, 128), Layout::Lhbnc, 3)).unwrap();
    let remote = engine(&shuffle(8, 16, 128), Layout::Lhbnc, 3);
    assert_eq!(only(&negotiate(&local, Some(&remote), CONVERT)), (Code::TpSize, "2", "1"));
}

#[test]
fn hybrid_and_mla_are_identical_or_refused_by_name() {
    let with = |base: &EngineDescription, groups, mla| {
        let mut facts = facts();
        (facts.num_kv_groups, facts.uses_mla) = (groups, mla);
        EngineDescription::new(facts, base.regions().to_vec()).unwrap()
    };
    for (groups, mla, code) in [(2, false, Code::Hybrid), (1, true, Code::Mla)] {
        let (local, remote) = (with(&decode(), groups, mla), with(&prefill(), groups, mla));
        assert_eq!(negotiate(&local, Some(&local), CONVERT).outcome, Outcome::Identical);
        assert_eq!(only(&negotiate(&local, Some(&remote), CONVERT)).0, code);
    }
    let one = with(&prefill(), 2, false);
    assert_eq!(only(&negotiate(&one, Some(&prefill()), PLAIN)), (Code::KvGroups, "2", "1"));
}

#[test]
fn only_the_verified_shapes_convert() {
    let pair = |tokens, element| {
        let shape = shape(2, tokens, 64, element);
        let local = PageFormat::aiter_shuffle(shape, ShuffledV::Tiled).unwrap();
        let remote = PageFormat::standard(shape, Interior::Hnc).unwrap();
        negotiate_formats(&local, &remote, CONVERT)
    };
    for tokens in [16, 32] {
        for element in [ElementType::BFloat16, ElementType::Float16] {
            assert_eq!(pair(tokens, element).kind(), "convert");
        }
    }
    assert_eq!(only(&pair(64, ElementType::Float16)).0, Code::BlockSizeOutOfScope);
    for element in [ElementType::Float32, ElementType::Float8E4M3Fn] {
        assert_eq!(only(&pair(16, element)).0, Code::ElementTypeOutOfScope);
    }
}

#[test]
fn equal_sizes_in_another_order_are_out_of_scope() {
    let shape = shape(8, 32, 128, ElementType::BFloat16);
    let split = |interior| PageFormat::split_kv(shape, interior).unwrap();
    let (hnc, nhc) = (split(Interior::Hnc), split(Interior::Nhc));
    assert!(hnc.same_tensors(&nhc));
    assert_eq!(codes(&negotiate_formats(&hnc, &nhc, CONVERT)), [Code::PairOutOfScope]);
    let both = [Code::PairOutOfScope, Code::ConversionDisabled];
    let mut found = codes(&negotiate_formats(&hnc, &nhc, PLAIN));
    found.sort_unstable_by_key(|code| *code != Code::PairOutOfScope);
    assert_eq!(found, both);
}

/// A backend's own converter: any map, so any components; everything else is judged as ever.
#[test]
fn a_backends_own_converter_brings_its_pair_into_scope() {
    let own = standard(8, 16, 64);
    let local = engine(&own, Layout::Lbhnc, 3);
    let converters = [(standard(8, 16, 128), own.clone())];
    let with = |convert| Policy { convert, converters: &converters, ..PLAIN };
    let mut remote_facts = facts();
    remote_facts.head_dim = local.facts().head_dim;
    let remote = EngineDescription::new(remote_facts, prefill().regions().to_vec()).unwrap();
    assert_eq!(codes(&negotiate(&local, Some(&remote), CONVERT)), [Code::HeadDim]);
    let verdict = negotiate(&local, Some(&remote), with(true));
    assert_eq!((verdict.kind(), codes(&verdict)), ("convert", Vec::new()), "{verdict}");
    let refused = negotiate(&local, Some(&remote), with(false));
    assert_eq!(codes(&refused), [Code::ConversionDisabled]);
    // One direction only, and no other pair.
    let reverse = negotiate(&remote, Some(&local), with(true));
    assert_eq!(codes(&reverse), [Code::HeadDim]);
    assert_eq!(
        codes(&negotiate_formats(&own, &shuffle(8, 16, 128), with(true))),
        [Code::HeadDim, Code::PairOutOfScope]
    );
}

#[test]
fn fp8_flavours_are_element_types() {
    let fp8 = |element| PageFormat::standard(shape(2, 16, 64, element), Interior::Hnc).unwrap();
    let (fn_, fnuz) = (fp8(ElementType::Float8E4M3Fn), fp8(ElementType::Float8E4M3Fnuz));
    let verdict = negotiate_formats(&fn_, &fnuz, CONVERT);
    assert_eq!(only(&verdict), (Code::ElementType, "float8_e4m3fn", "float8_e4m3fnuz"));
}

#[test]
fn the_two_v_variants_are_never_taken_for_each_other() {
    let shape = shape(8, 16, 128, ElementType::BFloat16);
    let [tiled, transposed] = [ShuffledV::Tiled, ShuffledV::Transposed]
        .map(|v| PageFormat::aiter_shuffle(shape, v).unwrap());
    assert_eq!(only(&negotiate_formats(&tiled, &transposed, CONVERT)).0, Code::PairOutOfScope);
}

/// Codes are public: operators' dashboards and tests name them.
#[test]
fn codes_are_distinct_and_documented() {
    let mut names: Vec<_> = Code::ALL.iter().map(|code| code.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Code::ALL.len());
    assert!(Code::ALL.iter().all(|code| !code.field().is_empty() && !code.remedy().is_empty()));
}
