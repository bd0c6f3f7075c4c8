//! Whether two sides keep the same K and V: configuration, weights, names, scales, groups.

use crate::support::{cache, engine, facts, shuffle, standard};
use kvpd::{
    Code, DescriptionError, EngineDescription, EngineFacts, Explain, LayerScales, Layout, Outcome,
    Policy, Reason, Region, Verdict, negotiate,
};

const PLAIN: Policy<'_> =
    Policy { convert: false, require_tagged: false, allow_other_weights: false, converters: &[] };
const CONVERT: Policy<'_> = Policy { convert: true, ..PLAIN };
const OTHER_WEIGHTS: Policy<'_> = Policy { allow_other_weights: true, ..PLAIN };

fn with(change: impl FnOnce(&mut EngineFacts)) -> EngineDescription {
    let mut facts = facts();
    change(&mut facts);
    EngineDescription::new(facts, cache(&standard(8, 16, 128), Layout::Lbhnc, 3)).unwrap()
}

fn codes(reasons: &[Reason]) -> Vec<Code> {
    reasons.iter().map(|reason| reason.code).collect()
}

/// Refused for one reason: its values.
fn refused(verdict: &Verdict, code: Code) -> (&str, &str) {
    assert_eq!(codes(&verdict.reasons), [code], "{verdict}");
    assert_eq!(verdict.outcome, Outcome::Refuse);
    (&verdict.reasons[0].local, &verdict.reasons[0].remote)
}

fn accepted(verdict: &Verdict, warnings: &[Code]) {
    assert_eq!(verdict.outcome, Outcome::Identical, "{verdict}");
    assert_eq!(codes(&verdict.warnings), warnings, "{verdict}");
}

#[test]
fn names_are_information_where_both_sides_know() {
    let other_name = with(|facts| facts.model = "/models/Qwen3-8B".into());
    accepted(&negotiate(&with(|_| ()), Some(&other_name), PLAIN), &[]);
}

#[test]
fn one_name_with_other_weights_is_refused() {
    let other = with(|facts| facts.model_weights = Some("weights 2".into()));
    let verdict = negotiate(&with(|_| ()), Some(&other), PLAIN);
    let values = refused(&verdict, Code::ModelWeights);
    assert_eq!(values, ("weights 1 of qwen3-8b", "weights 2 of qwen3-8b"));
    accepted(&negotiate(&with(|_| ()), Some(&other), OTHER_WEIGHTS), &[Code::ModelWeights]);
}

#[test]
fn unknown_equals_nothing_and_then_names_decide() {
    type Change = fn(&mut EngineFacts);
    let unknowns: [Change; 3] = [
        |facts| facts.model_weights = None,
        |facts| facts.model_config = None,
        |facts| (facts.model_config, facts.model_weights) = (None, None),
    ];
    for change in unknowns {
        let renamed = with(|facts| {
            change(facts);
            facts.model = "/models/Qwen3-8B".into();
        });
        let unknown = with(change);
        for (local, remote, other) in [
            (&unknown, &with(|_| ()), &renamed),
            (&with(|_| ()), &unknown, &renamed),
            (&unknown, &unknown, &renamed),
        ] {
            let warned = negotiate(local, Some(remote), PLAIN);
            accepted(&warned, &[Code::ModelUnproved]);
            assert_eq!(warned.warnings[0].is_shared, local == remote);
            let verdict = negotiate(local, Some(other), PLAIN);
            assert_eq!(refused(&verdict, Code::Model), ("qwen3-8b", "/models/Qwen3-8B"));
        }
    }
}

/// What is known to differ refuses also where the rest is unknown.
#[test]
fn known_differences_count_beside_unknowns() {
    let unknown = with(|facts| facts.model_config = None);
    let other = with(|facts| facts.model_weights = Some("weights 2".into()));
    refused(&negotiate(&unknown, Some(&other), PLAIN), Code::ModelWeights);
}

#[test]
fn differing_configuration_is_named_field_by_field() {
    let config = |fields: &[(&str, &str)]| {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let fields = fields.iter().map(own).collect();
        with(|facts| facts.model_config = Some(fields))
    };
    let local = config(&[("hidden_size", "4096"), ("rope", "{\"theta\":10000}")]);
    let remote = config(&[("hidden_size", "4096"), ("sliding_window", "512")]);
    for policy in [PLAIN, OTHER_WEIGHTS] {
        let verdict = negotiate(&local, Some(&remote), policy);
        let values = refused(&verdict, Code::ModelConfig);
        assert_eq!(
            values,
            ("rope={\"theta\":10000}, no sliding_window", "no rope, sliding_window=512")
        );
    }
}

#[test]
fn other_weights_are_allowed_but_not_other_shapes() {
    let quantised = with(|facts| {
        facts.model = "Qwen3-8B-FP8".into();
        facts.model_weights = Some("weights 2".into());
        facts.quantization = "fp8".into();
    });
    let here = with(|_| ());
    let both = [Code::Quantization, Code::ModelWeights];
    assert_eq!(codes(&negotiate(&here, Some(&quantised), PLAIN).reasons), both);
    accepted(&negotiate(&here, Some(&quantised), OTHER_WEIGHTS), &both);
    // Unknown weights: the names differ, and configurations say that it is one model.
    let unknown = |knows_config: bool| {
        with(|facts| {
            facts.model = "Qwen3-8B-FP8".into();
            facts.model_weights = None;
            if !knows_config {
                facts.model_config = None;
            }
        })
    };
    let verdict = negotiate(&here, Some(&unknown(true)), OTHER_WEIGHTS);
    accepted(&verdict, &[Code::ModelUnproved]);
    refused(&negotiate(&here, Some(&unknown(false)), OTHER_WEIGHTS), Code::Model);
}

#[test]
fn a_refusal_carries_no_warnings() {
    let unknown = with(|facts| (facts.model_weights, facts.tp_size) = (None, 2));
    assert!(negotiate(&with(|_| ()), Some(&unknown), PLAIN).warnings.is_empty());
}

#[test]
fn an_element_type_has_one_meaning_under_any_setting() {
    let explicit = with(|facts| facts.cache_dtype_setting = "bfloat16".into());
    accepted(&negotiate(&with(|_| ()), Some(&explicit), PLAIN), &[]);
    let flavour = |dtype: &str| {
        with(|facts| {
            facts.cache_dtype = dtype.into();
            facts.cache_dtype_setting = "fp8".into();
        })
    };
    let verdict = negotiate(&flavour("float8_e4m3fn"), Some(&flavour("float8_e4m3fnuz")), PLAIN);
    assert_eq!(refused(&verdict, Code::CacheDtype), ("float8_e4m3fn", "float8_e4m3fnuz"));
}

fn scales(values: &[(&str, &[f64], &[f64])]) -> Option<Vec<LayerScales>> {
    let of = |&(layer, k, v): &(&str, &[f64], &[f64])| LayerScales::new(layer.into(), k, v);
    Some(values.iter().map(of).collect::<Result<_, _>>().unwrap())
}

fn quantised(scales: Option<Vec<LayerScales>>) -> EngineDescription {
    with(|facts| (facts.quantised_cache, facts.scales) = (true, scales))
}

#[test]
fn scales_are_compared_layer_by_layer() {
    let local = quantised(scales(&[
        ("layers.0", &[1.0], &[1.0]),
        ("layers.1", &[0.5], &[0.25]),
        ("layers.2", &[0.5], &[0.25]),
    ]));
    accepted(&negotiate(&local, Some(&local), PLAIN), &[]);
    let remote = quantised(scales(&[
        ("layers.2", &[2.0], &[0.25]),
        ("layers.1", &[0.5], &[0.125]),
        ("layers.0", &[1.0], &[1.0]),
    ]));
    let verdict = negotiate(&local, Some(&remote), PLAIN);
    assert_eq!(
        refused(&verdict, Code::ScalesDiffer),
        ("k 0.5, v 0.25 in layers.1", "k 0.5, v 0.125 in layers.1")
    );
    let fewer = quantised(scales(&[("layers.0", &[1.0], &[1.0]), ("layers.1", &[0.5], &[0.25])]));
    for (a, b) in [(&local, &fewer), (&fewer, &local)] {
        let verdict = negotiate(a, Some(b), PLAIN);
        let (ours, theirs) = refused(&verdict, Code::ScalesDiffer);
        assert!(ours.ends_with("in layers.2") && theirs.ends_with("in layers.2"));
    }
}

#[test]
fn scales_of_heads_name_the_head() {
    let side = |last: f64| quantised(scales(&[("layers.0", &[1.0, 2.0], &[1.0, last])]));
    let verdict = negotiate(&side(3.0), Some(&side(4.0)), PLAIN);
    assert_eq!(
        refused(&verdict, Code::ScalesDiffer),
        ("k 2, v 3 of head 1 in layers.0", "k 2, v 4 of head 1 in layers.0")
    );
    let short = quantised(scales(&[("layers.0", &[1.0], &[1.0])]));
    refused(&negotiate(&side(3.0), Some(&short), PLAIN), Code::ScalesDiffer);
}

#[test]
fn unknown_scales_equal_nothing() {
    let known = quantised(scales(&[("layers.0", &[1.0], &[1.0])]));
    let unknown = quantised(None);
    for (local, remote) in [(&known, &unknown), (&unknown, &known), (&unknown, &unknown)] {
        let verdict = negotiate(local, Some(remote), PLAIN);
        refused(&verdict, Code::ScalesUnknown);
        assert_eq!(verdict.reasons[0].is_shared, local == remote);
    }
    let verdict = negotiate(&known, Some(&with(|_| ())), PLAIN);
    refused(&verdict, Code::CacheDtype);
}

#[test]
fn scales_are_proved_at_construction() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, -1.0] {
        for (k, v) in [(bad, 1.0), (1.0, bad)] {
            let error = LayerScales::new("layers.0".into(), &[k], &[v]).unwrap_err();
            assert_eq!(error.detail().code, "scale-value");
        }
    }
    let check = |is_quantised: bool, layers: &[(&str, &[f64], &[f64])]| {
        let mut facts = facts();
        (facts.quantised_cache, facts.scales) = (is_quantised, scales(layers));
        facts.check()
    };
    let one: (&str, &[f64], &[f64]) = ("a", &[1.0], &[1.0]);
    assert!(check(true, &[one]).is_ok());
    assert_eq!(check(false, &[one]), Err(DescriptionError::ScalesOfPlainCache));
    for layers in [[one, one].as_slice(), &[("a", &[], &[1.0])], &[("a", &[1.0], &[])]] {
        let error = check(true, layers).unwrap_err();
        assert_eq!(error, DescriptionError::LayerScales { layer: "a".into() });
    }
    let many = vec![1.0; (1 << 16) - 1];
    assert!(check(true, &[("a", &many, &[1.0])]).is_ok());
    let error = check(true, &[("a", &many, &[1.0, 1.0])]).unwrap_err();
    assert_eq!(error.detail().field, "scales");
}

#[test]
fn configurations_are_bounded() {
    let check = |fields: Vec<(String, String)>| {
        let mut facts = facts();
        facts.model_config = Some(fields.into_iter().collect());
        facts.check()
    };
    let fields = |count: usize| (0..count).map(|i| (format!("f{i}"), "1".to_owned())).collect();
    assert!(check(fields(256)).is_ok());
    assert!(check(fields(257)).is_err());
    assert!(check(vec![("f".into(), "x".repeat(1 << 12))]).is_ok());
    for bad in [String::new(), "\n".into(), "x".repeat((1 << 12) + 1)] {
        let error = check(vec![("f".into(), bad)]).unwrap_err();
        assert_eq!(error, DescriptionError::Text { field: "model_config" });
    }
    assert!(check(vec![(String::new(), "1".into())]).is_err());
}

#[test]
fn pipeline_stages_are_refused_also_where_they_are_equal() {
    let staged = with(|facts| facts.pp_size = 2);
    let verdict = negotiate(&staged, Some(&staged), PLAIN);
    refused(&verdict, Code::PpSize);
    assert!(verdict.to_string().contains("pp_size is 2 on both sides"), "{verdict}");
}

/// A connector that is one of several switches the manager off on its side alone.
#[test]
fn the_hybrid_manager_matters_only_where_there_are_groups() {
    let side = |groups, manager| {
        with(|facts| (facts.num_kv_groups, facts.hybrid_manager) = (groups, manager))
    };
    accepted(&negotiate(&side(1, true), Some(&side(1, false)), PLAIN), &[]);
    accepted(&negotiate(&side(2, true), Some(&side(2, true)), PLAIN), &[]);
    let verdict = negotiate(&side(2, true), Some(&side(1, false)), PLAIN);
    assert_eq!(refused(&verdict, Code::HybridManager), ("on", "off"));
    let verdict = negotiate(&side(2, true), Some(&side(1, true)), PLAIN);
    assert_eq!(refused(&verdict, Code::KvGroups), ("2", "1"));
}

/// Full and sliding-window layers under the manager: one layer of each kind shares its pages.
#[test]
fn a_hybrid_pair_names_layers_formats_and_the_switch() {
    let shared = |format: &kvpd::PageFormat, manager: bool| {
        let own = engine(format, Layout::Lbhnc, 2);
        let names = [["layers.0", "layers.2"], ["layers.1", "layers.3"]];
        let regions = own.regions().iter().zip(names).map(|(region, names)| {
            let strided = kvpd::region::Strided {
                address: region.address(),
                num_blocks: region.num_blocks().into(),
                block_bytes: region.block_bytes(),
                block_stride_bytes: region.block_stride_bytes(),
                extent_bytes: None,
                memory: region.memory(),
                device: region.device(),
            };
            Region::new(strided, region.tag().cloned(), names.map(str::to_owned).to_vec()).unwrap()
        });
        let mut facts = facts();
        (facts.num_kv_groups, facts.hybrid_manager) = (2, manager);
        EngineDescription::new(facts, regions.collect()).unwrap()
    };
    let (local, remote) = (shared(&shuffle(8, 16, 128), true), shared(&standard(8, 16, 128), true));
    let verdict = negotiate(&local, Some(&remote), CONVERT);
    let reason = verdict.reasons.iter().find(|reason| reason.code == Code::Hybrid).unwrap();
    assert_eq!(
        reason.local,
        "2 KV groups, hybrid manager on: layers.0 sharing its pages with layers.2, layers.1 \
         sharing its pages with layers.3 in aiter-shuffle(H=8, N=16, D=128, bfloat16, v=tiled)"
    );
    assert_ne!(reason.local, reason.remote);
    assert!(reason.to_string().contains("--disable-hybrid-kv-cache-manager on both sides"));
    // The other side without it: its layers have their own pages, for that one reason.
    let off = engine(&standard(8, 16, 128), Layout::Lbhnc, 4);
    let verdict = negotiate(&remote, Some(&off), CONVERT);
    assert_eq!(refused(&verdict, Code::HybridManager), ("on", "off"));
}
