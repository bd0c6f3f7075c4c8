//! Builders that the tests share.

use kvpd::family::Shape;
use kvpd::region::CacheMemory;
use kvpd::{Address, ShuffledV};
use kvpd::{
    ElementType, EngineDescription, EngineFacts, Interior, Layout, Memory, PageFormat, Region,
};

pub(crate) fn shape(heads: u32, tokens: u32, head_dim: u32, element: ElementType) -> Shape {
    Shape::new(heads, tokens, head_dim, element).unwrap()
}

pub(crate) fn standard(heads: u32, tokens: u32, head_dim: u32) -> PageFormat {
    PageFormat::standard(shape(heads, tokens, head_dim, ElementType::BFloat16), Interior::Hnc)
        .unwrap()
}

pub(crate) fn shuffle(heads: u32, tokens: u32, head_dim: u32) -> PageFormat {
    let shape = shape(heads, tokens, head_dim, ElementType::BFloat16);
    PageFormat::aiter_shuffle(shape, ShuffledV::Tiled).unwrap()
}

pub(crate) fn cache(format: &PageFormat, layout: Layout, layers: u32) -> Vec<Region> {
    let names: Vec<String> = (0..layers).map(|layer| format!("layers.{layer}")).collect();
    let cache =
        CacheMemory { address: Address(1 << 20), num_blocks: 32, memory: Memory::Dram, device: 0 };
    kvpd::cache_regions(format, layout, &names, cache).unwrap()
}

pub(crate) fn facts() -> EngineFacts {
    EngineFacts {
        model: "qwen3-8b".into(),
        model_config: Some([("hidden_size".into(), "4096".into())].into()),
        model_weights: Some("weights 1".into()),
        quantization: "none".into(),
        model_dtype: "bfloat16".into(),
        cache_dtype: "bfloat16".into(),
        cache_dtype_setting: "auto".into(),
        quantised_cache: false,
        scales: None,
        total_kv_heads: 8,
        head_dim: 128,
        block_size: 16,
        layout: "LBHNC".into(),
        backend: "FLASH_ATTN".into(),
        release: "0.33.0+cu129".into(),
        connector: "kvpd 1".into(),
        speculative: "none".into(),
        hybrid_manager: false,
        tp_size: 1,
        tp_rank: 0,
        pp_size: 1,
        num_kv_groups: 1,
        uses_mla: false,
    }
}

pub(crate) fn engine(format: &PageFormat, layout: Layout, layers: u32) -> EngineDescription {
    EngineDescription::new(facts(), cache(format, layout, layers)).unwrap()
}
