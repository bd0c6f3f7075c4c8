//! Regions, layouts and descriptions: real strides, and every way they cannot be.

use crate::support::{cache, facts, shuffle, standard};
use kvpd::layout::Extents;
use kvpd::region::{CacheMemory, Strided, Tag};
use kvpd::{
    Address, DescriptionError, EngineDescription, Layout, Memory, PlaneSpan, Region, RegionError,
};
use proptest::prelude::*;

fn strided(num_blocks: u64, block_bytes: u64, block_stride_bytes: u64) -> Strided {
    Strided {
        address: Address(4096),
        num_blocks,
        block_bytes,
        block_stride_bytes,
        extent_bytes: None,
        memory: Memory::Dram,
        device: 0,
    }
}

fn untagged(strided: Strided) -> Result<Region, RegionError> {
    Region::new(strided, None, Vec::new())
}

#[test]
fn layouts_have_the_strides_of_their_axis_order() {
    let extents = Extents { layers: 3, blocks: 5, slots: 2, tokens: 16, content_bytes: 64 };
    // (layer, block, slot, token), written down from the names alone.
    let expected = [
        (Layout::Lbhnc, (10240, 2048, 1024, 64)),
        (Layout::Lbnhc, (10240, 2048, 64, 128)),
        (Layout::Lhbnc, (10240, 1024, 5120, 64)),
        (Layout::Blhnc, (2048, 6144, 1024, 64)),
        (Layout::Blnhc, (2048, 6144, 64, 128)),
        (Layout::Bhlnc, (1024, 6144, 3072, 64)),
    ];
    for (layout, strides) in expected {
        let found = layout.strides(extents).unwrap();
        let found_strides =
            (found.layer_bytes, found.block_bytes, found.slot_bytes, found.token_bytes);
        assert_eq!(found_strides, strides, "{layout}");
        assert_eq!(found.total_bytes, 30720);
    }
    assert_eq!("HND".parse(), Ok(Layout::Lbhnc));
    assert_eq!("NHD".parse(), Ok(Layout::Lbnhc));
    assert!("LBHCN".parse::<Layout>().is_err());
}

/// Regions a layer, and what a block of each holds: layout lives in the regions.
#[test]
fn the_layout_decides_how_regions_hold_a_page() {
    let (packed, shuffled) = (standard(4, 16, 128), shuffle(4, 16, 128));
    let holds = |format, layout| -> Vec<(u64, u64, Vec<PlaneSpan>)> {
        let spans = |region: &Region| region.tag().unwrap().spans.clone();
        cache(format, layout, 1)
            .iter()
            .map(|region| (region.block_bytes(), region.block_stride_bytes(), spans(region)))
            .collect()
    };
    let span = |plane, start_bytes, num_bytes| PlaneSpan { plane, start_bytes, num_bytes };
    assert_eq!(holds(&packed, Layout::Lbhnc), [(32768, 32768, vec![span(0, 0, 32768)])]);
    let heads: Vec<_> = (0..4).map(|head| (8192, 8192, vec![span(0, 8192 * head, 8192)])).collect();
    assert_eq!(holds(&packed, Layout::Lhbnc), heads);
    let joint = vec![span(0, 0, 16384), span(1, 0, 16384)];
    assert_eq!(holds(&shuffled, Layout::Lbhnc), [(32768, 32768, joint)]);
    let planes = [(16384, 16384, vec![span(0, 0, 16384)]), (16384, 16384, vec![span(1, 0, 16384)])];
    assert_eq!(holds(&shuffled, Layout::Lhbnc), planes);
}

#[test]
fn every_layout_of_a_cache_uses_each_byte_once() {
    for format in [standard(3, 16, 64), shuffle(3, 16, 64)] {
        for layout in [Layout::Lbhnc, Layout::Lhbnc, Layout::Blhnc, Layout::Bhlnc] {
            let mut blocks = Vec::new();
            for region in cache(&format, layout, 4) {
                for block in 0..region.num_blocks() {
                    let address = region.block_address(block.into()).unwrap().get();
                    blocks.push((address, address + region.block_bytes()));
                }
            }
            blocks.sort_unstable();
            assert_eq!(blocks[0].0, 1 << 20);
            assert!(blocks.windows(2).all(|pair| pair[0].1 == pair[1].0), "{layout} has gaps");
            assert_eq!(blocks.last().unwrap().1 - (1 << 20), 4 * 32 * format.page_bytes());
        }
    }
}

#[test]
fn a_layout_must_order_heads_and_tokens_as_the_format_does() {
    let cache = CacheMemory { address: Address(0), num_blocks: 2, memory: Memory::Dram, device: 0 };
    let layers = ["a".to_owned()];
    for (format, layout) in
        [(standard(2, 16, 64), Layout::Lbnhc), (shuffle(2, 16, 64), Layout::Blnhc)]
    {
        let error = kvpd::cache_regions(&format, layout, &layers, cache).unwrap_err();
        assert!(matches!(error, RegionError::LayoutAgainstFormat { .. }), "{error}");
    }
}

#[test]
fn regions_that_cannot_be_are_refused() {
    let (block_bytes, block_stride_bytes) = (884_736, 73_728);
    assert_eq!(
        untagged(strided(12, block_bytes, block_stride_bytes)).unwrap_err(),
        RegionError::LengthOverStride { block_bytes, block_stride_bytes }
    );
    let error = untagged(Strided { extent_bytes: Some(1023), ..strided(2, 512, 512) }).unwrap_err();
    assert_eq!(error, RegionError::OutOfExtent { end_bytes: 1024, extent_bytes: 1023 });
    let overflow = |error| matches!(error, RegionError::Overflow { .. });
    assert!(overflow(untagged(strided(1 << 30, 1, 1 << 40)).unwrap_err()));
    assert!(overflow(
        untagged(Strided { address: Address(u64::MAX), ..strided(1, 1, 1) }).unwrap_err()
    ));
    for blocks in [0, 1 << 31] {
        let error = untagged(strided(blocks, 1, 1)).unwrap_err();
        assert!(matches!(error, RegionError::OutOfRange { field: "num_blocks", .. }));
    }
    let region = untagged(strided(4, 512, 1024)).unwrap();
    assert_eq!(region.block_address(3), Ok(Address(4096 + 3072)));
    assert!(!region.is_dense());
    let missing = RegionError::NoSuchBlock { block: 4, num_blocks: 4 };
    assert_eq!(region.block_address(4), Err(missing));
}

#[test]
fn spans_must_be_in_the_page_once_and_fill_the_block() {
    let format = shuffle(2, 16, 64);
    let region = |block_bytes, spans: &[(u32, u64, u64)]| {
        let span = |&(plane, start_bytes, num_bytes)| PlaneSpan { plane, start_bytes, num_bytes };
        let tag = Tag { format: format.clone(), spans: spans.iter().map(span).collect() };
        Region::new(strided(2, block_bytes, 8192), Some(tag), vec!["a".into()])
    };
    assert!(region(8192, &[(1, 0, 4096), (0, 0, 4096)]).is_ok());
    assert!(matches!(region(4096, &[]), Err(RegionError::Planes { .. })));
    assert!(matches!(region(4096, &[(2, 0, 4096)]), Err(RegionError::NoSuchSpan { .. })));
    assert!(matches!(region(4096, &[(1, 1, 4096)]), Err(RegionError::NoSuchSpan { .. })));
    assert!(matches!(region(4096, &[(1, u64::MAX, 2)]), Err(RegionError::NoSuchSpan { .. })));
    assert!(matches!(region(0, &[(1, 0, 0)]), Err(RegionError::OutOfRange { .. })));
    assert!(matches!(region(4096, &[(0, 0, 2048)]), Err(RegionError::SpanBytes { .. })));
    let twice = region(8192, &[(0, 0, 4096), (0, 0, 4096)]);
    assert!(matches!(twice, Err(RegionError::Planes { .. })));
}

#[test]
fn layer_names_must_be_plain_and_distinct() {
    for layers in [vec!["a", "a"], vec![""], vec!["a\nb"]] {
        let layers = layers.into_iter().map(str::to_owned).collect();
        assert_eq!(Region::new(strided(1, 1, 1), None, layers), Err(RegionError::Layers));
    }
}

#[test]
fn a_layers_page_is_held_exactly_once() {
    let regions = cache(&shuffle(2, 16, 64), Layout::Lhbnc, 2);
    assert!(EngineDescription::new(facts(), regions.clone()).is_ok());
    let without_v = EngineDescription::new(facts(), regions[..3].to_vec()).unwrap_err();
    let (layer, offset_bytes) = ("layers.1".into(), 4096);
    assert_eq!(without_v, DescriptionError::PageNotCovered { layer, offset_bytes });
}

#[test]
fn regions_that_share_memory_are_refused() {
    let one = || untagged(strided(4, 512, 1024)).unwrap();
    let at =
        |address| untagged(Strided { address: Address(address), ..strided(4, 512, 1024) }).unwrap();
    let describe = |regions| EngineDescription::new(facts(), regions);
    assert!(describe(vec![one(), at(4096 + 512)]).is_ok(), "interleaved without touching");
    assert!(describe(vec![one(), at(4096 + 3584)]).is_ok(), "after the last block");
    for address in [4096, 4097, 4096 + 511, 4096 + 1025, 4096 + 600] {
        let error = describe(vec![one(), at(address)]).unwrap_err();
        assert!(matches!(error, DescriptionError::Overlap { .. }), "{address}: {error}");
    }
    let device = untagged(Strided { device: 1, ..strided(4, 512, 1024) }).unwrap();
    assert!(describe(vec![one(), device]).is_ok(), "another device is other memory");
}

#[test]
fn facts_are_checked() {
    let with = |change: &dyn Fn(&mut kvpd::EngineFacts)| {
        let mut facts = facts();
        change(&mut facts);
        facts.check().map(|_| ())
    };
    assert_eq!(with(&|_| ()), Ok(()));
    let text = |field| Err(DescriptionError::Text { field });
    assert_eq!(with(&|facts| facts.model.clear()), text("model"));
    assert_eq!(with(&|facts| facts.backend = "x\u{1b}[31m".into()), text("backend"));
    assert_eq!(with(&|facts| facts.release = "9".repeat(513)), text("release"));
    let (got, max) = (2, 1);
    assert_eq!(
        with(&|facts| (facts.tp_size, facts.tp_rank) = (2, 2)),
        Err(DescriptionError::OutOfRange { field: "tp_rank", got, max })
    );
}

proptest! {
    /// The arithmetic of `check_apart` against walking every byte.
    #[test]
    fn overlap_is_found_exactly_when_two_regions_share_a_byte(
        a in (0_u64..200, 1_u64..5, 1_u64..20),
        b in (0_u64..200, 1_u64..5, 1_u64..20),
        stride in 20_u64..40,
    ) {
        let region = |(address, blocks, bytes): (u64, u64, u64)| {
            untagged(Strided { address: Address(address), ..strided(blocks, bytes, stride) }).unwrap()
        };
        let bytes = |(address, blocks, bytes): (u64, u64, u64)| -> std::collections::HashSet<u64> {
            (0..blocks).flat_map(|block| (0..bytes).map(move |byte| address + block * stride + byte)).collect()
        };
        let shared = !bytes(a).is_disjoint(&bytes(b));
        let refused = EngineDescription::new(facts(), vec![region(a), region(b)]).is_err();
        prop_assert_eq!(refused, shared);
    }

    #[test]
    fn hostile_numbers_do_not_panic(
        address in any::<u64>(),
        numbers in prop::collection::vec(prop_oneof![0_u64..9, any::<u64>()], 4),
    ) {
        let strided = Strided {
            address: Address(address),
            num_blocks: numbers[0],
            block_bytes: numbers[1],
            block_stride_bytes: numbers[2],
            extent_bytes: Some(numbers[3]),
            memory: Memory::Vram,
            device: 7,
        };
        if let Ok(region) = untagged(strided) {
            let end = region.block_address(u64::from(region.num_blocks()) - 1).unwrap().get();
            prop_assert!(end.checked_add(region.block_bytes()).is_some());
        }
    }
}
