//! Formats: every constructor is a bijection, equality is of the map, and nonsense is refused.

use std::collections::HashSet;

use crate::support::{shape, shuffle, standard};
use kvpd::family::Shape;
use kvpd::{
    Component, ElementType, FormatError, Interior, PageFormat, Permutation, PlaneSpan, ShuffledV,
    Tiling,
};
use proptest::prelude::*;

fn known_format() -> impl Strategy<Value = PageFormat> {
    let element = prop::sample::select(ElementType::ALL);
    (1_u32..6, 1_u32..3, 1_u32..4, element, 0..6).prop_map(|(heads, n, d, element, family)| {
        let shape = Shape::new(heads, 16 * n, 16 * d, element).unwrap();
        match family {
            0 => PageFormat::standard(shape, Interior::Hnc),
            1 => PageFormat::standard(shape, Interior::Nhc),
            2 => PageFormat::split_kv(shape, Interior::Hnc),
            3 => PageFormat::split_kv(shape, Interior::Nhc),
            4 => PageFormat::aiter_shuffle(shape, ShuffledV::Tiled),
            _ => PageFormat::aiter_shuffle(shape, ShuffledV::Transposed),
        }
        .unwrap()
    })
}

/// Every element with its plane and offset.
fn elements(format: &PageFormat) -> Vec<(u32, u64, u32)> {
    let mut found = Vec::new();
    for component in format.components() {
        for head in 0..component.heads().extent() {
            for token in 0..component.tokens().extent() {
                for channel in 0..component.channels().extent() {
                    let (plane, offset) =
                        format.offset(component.name(), head, token, channel).unwrap();
                    found.push((plane, offset, component.element().bytes()));
                }
            }
        }
    }
    found
}

/// Moves every element from where one format has it to where the other does.
fn convert(source: &PageFormat, target: &PageFormat, page: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let bytes = |bytes: &u64| usize::try_from(*bytes).unwrap();
    let mut out: Vec<Vec<u8>> =
        target.plane_bytes().iter().map(|plane| vec![0; bytes(plane)]).collect();
    for (from, to) in elements(source).into_iter().zip(elements(target)) {
        let at =
            |(plane, offset, _): (u32, u64, u32)| (usize::try_from(plane).unwrap(), bytes(&offset));
        let ((from_plane, from_at), (to_plane, to_at)) = (at(from), at(to));
        let width = usize::try_from(from.2).unwrap();
        let element = &page[from_plane][from_at..from_at + width];
        out[to_plane][to_at..to_at + width].copy_from_slice(element);
    }
    out
}

proptest! {
    #[test]
    fn every_constructor_is_a_bijection(format in known_format()) {
        let mut bytes = HashSet::new();
        for (plane, offset, width) in elements(&format) {
            for byte in offset..offset + u64::from(width) {
                prop_assert!(bytes.insert((plane, byte)), "byte {byte} of plane {plane} twice");
            }
        }
        let planes = (0..).zip(format.plane_bytes());
        let all: HashSet<_> =
            planes.flat_map(|(plane, &bytes)| (0..bytes).map(move |byte| (plane, byte))).collect();
        prop_assert_eq!(bytes, all);
    }

    #[test]
    fn converting_there_and_back_is_the_identity(
        source in known_format(),
        family in 0..4,
        seed in any::<u8>(),
    ) {
        let k = source.component("k").unwrap();
        let shape =
            Shape::new(k.heads().extent(), k.tokens().extent(), k.channels().extent(), k.element())
                .unwrap();
        let target = match family {
            0 => PageFormat::standard(shape, Interior::Nhc),
            1 => PageFormat::split_kv(shape, Interior::Nhc),
            2 => PageFormat::aiter_shuffle(shape, ShuffledV::Tiled),
            _ => PageFormat::aiter_shuffle(shape, ShuffledV::Transposed),
        }
        .unwrap();
        let mut next = u32::from(seed);
        let mut byte = || {
            next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            next.to_le_bytes()[3]
        };
        let page: Vec<Vec<u8>> =
            source.plane_bytes().iter().map(|&bytes| (0..bytes).map(|_| byte()).collect()).collect();
        let there = convert(&source, &target, &page);
        let permutation = Permutation::new(&source, &target).unwrap();
        let mut moved = vec![0; there.concat().len()];
        prop_assert!(permutation.apply(&page.concat(), &mut moved));
        prop_assert_eq!(moved, there.concat());
        prop_assert_eq!(convert(&target, &source, &there), page);
    }

    /// Numbers from anywhere make a format or an error, never a panic.
    #[test]
    fn hostile_numbers_do_not_panic(
        numbers in prop::collection::vec(prop_oneof![0_u64..64, any::<u64>()], 10),
        planes in prop::collection::vec(prop_oneof![0_u64..4096, any::<u64>()], 0..4),
    ) {
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let n = &numbers;
        let tiling = |a: usize| {
            Tiling::new("tokens", small(n[a]), small(n[a + 1]), n[a + 2], n[(a + 3) % 10])
        };
        if let (Ok(heads), Ok(tokens), Ok(channels)) = (tiling(0), tiling(3), tiling(6)) {
            let element = ElementType::BFloat16;
            let component = Component::new("k", element, small(n[9] % 3), n[2], heads, tokens, channels);
            if let Ok(component) = component {
                let _ = PageFormat::new("hostile", vec![component], planes, Vec::new());
            }
        }
    }

    /// Two ways to write one axis are one tiling; what places an index elsewhere is another.
    #[test]
    fn tilings_are_equal_exactly_when_they_place_alike(
        extent in prop::sample::select(vec![1_u32, 2, 4, 8, 12]),
        a in (1_u32..13, 0_u64..40, 0_u64..6, any::<bool>()),
        b in (1_u32..13, 0_u64..40, 0_u64..6, any::<bool>()),
    ) {
        // Half of them do not really break at their tile.
        let tiling = |(tile, far, near, linear): (u32, u64, u64, bool)| {
            let far = if linear { near * u64::from(tile) } else { far };
            Tiling::new("tokens", extent, tile, far, near)
        };
        if let (Ok(a), Ok(b)) = (tiling(a), tiling(b)) {
            let alike = (0..extent).all(|index| a.offset(index) == b.offset(index));
            prop_assert_eq!(a == b, alike);
        }
    }
}

fn k_and_v(v: Component) -> Vec<Component> {
    vec![standard(2, 16, 16).component("k").unwrap().clone(), v]
}

#[test]
fn an_uncovered_byte_is_found() {
    let k = standard(1, 16, 16).component("k").unwrap().clone();
    let error = PageFormat::new("half", vec![k], vec![1024], Vec::new()).unwrap_err();
    assert_eq!(error, FormatError::Uncovered { plane: 0, offset_bytes: 32 });
}

#[test]
fn declared_padding_covers_what_elements_leave() {
    let k = shuffle(1, 16, 16).component("k").unwrap().clone();
    let padding = vec![PlaneSpan { plane: 0, start_bytes: 512, num_bytes: 64 }];
    let padded = PageFormat::new("padded", vec![k.clone()], vec![576], padding.clone()).unwrap();
    assert_eq!(padded.padding(), padding);
    let over = vec![PlaneSpan { plane: 0, start_bytes: 511, num_bytes: 65 }];
    let error = PageFormat::new("padded", vec![k], vec![576], over).unwrap_err();
    let component = "padding".into();
    assert_eq!(error, FormatError::Overlap { component, plane: 0, offset_bytes: 511 });
}

#[test]
fn a_byte_claimed_twice_is_found() {
    let k = standard(2, 16, 16).component("k").unwrap().clone();
    let v = Component::new("v", k.element(), 0, 0, *k.heads(), *k.tokens(), *k.channels()).unwrap();
    let error = PageFormat::new("twice", k_and_v(v), vec![2048], Vec::new()).unwrap_err();
    let component = "v".into();
    assert_eq!(error, FormatError::Overlap { component, plane: 0, offset_bytes: 0 });
}

#[test]
fn a_component_outside_its_plane_is_found() {
    let v = standard(2, 16, 16).component("v").unwrap().clone();
    let error = PageFormat::new("short", k_and_v(v), vec![2047], Vec::new()).unwrap_err();
    let (component, end_bytes, plane_bytes) = ("v".into(), 2048, 2047);
    assert_eq!(error, FormatError::OutOfPlane { component, end_bytes, plane_bytes });
}

#[test]
fn one_name_twice_is_refused() {
    let k = standard(2, 16, 16).component("k").unwrap().clone();
    let error = PageFormat::new("twice", k_and_v(k), vec![2048], Vec::new()).unwrap_err();
    assert_eq!(error, FormatError::DuplicateComponent { component: "k".into() });
}

#[test]
fn a_page_past_the_limit_is_refused_before_it_is_walked() {
    let wide = shape(1 << 16, 1 << 16, 1 << 16, ElementType::Float32);
    let error = PageFormat::standard(wide, Interior::Hnc).unwrap_err();
    assert_eq!(error, FormatError::PageBytes { got: 1 << 51 });
}

#[test]
fn shuffle_needs_channels_and_tokens_in_whole_vectors() {
    let odd = |tokens, head_dim, v| {
        PageFormat::aiter_shuffle(shape(2, tokens, head_dim, ElementType::BFloat16), v)
    };
    let not = |field, got| Err(FormatError::NotDivisible { field, got, divisor: 8 });
    assert_eq!(odd(16, 20, ShuffledV::Tiled).map(|_| ()), not("head_dim", 20));
    assert_eq!(odd(12, 16, ShuffledV::Tiled).map(|_| ()), not("tokens", 12));
    assert!(odd(12, 16, ShuffledV::Transposed).is_ok());
}

#[test]
fn formats_that_place_every_element_alike_are_equal_whatever_they_are_called() {
    let one_head = shape(1, 16, 64, ElementType::BFloat16);
    let hnc = PageFormat::standard(one_head, Interior::Hnc).unwrap();
    let nhc = PageFormat::standard(one_head, Interior::Nhc).unwrap();
    assert_eq!((&hnc, hnc.digest(), hnc.name()), (&nhc, nhc.digest(), nhc.name()));
    let parts = (hnc.components().to_vec(), hnc.plane_bytes().to_vec());
    let other = PageFormat::new("mine", parts.0, parts.1, Vec::new()).unwrap();
    assert_eq!((&other, other.family()), (&hnc, "standard"));
}

/// A label cannot make a map pass for another: the family of an unlisted map is shown as custom.
#[test]
fn a_peers_label_is_not_believed() {
    let k = shuffle(2, 16, 16).component("k").unwrap().clone();
    let lone = PageFormat::new("standard", vec![k], vec![1024], Vec::new()).unwrap();
    assert!(lone.name().starts_with("custom \"standard\""), "{lone}");
}

/// One fp8 tile is as wide as 16 tokens, so there both V variants are one map; in bf16 they are not.
#[test]
fn the_two_shuffled_v_differ_where_they_place_elements_apart() {
    let both = |element| {
        let shape = shape(2, 16, 64, element);
        (
            PageFormat::aiter_shuffle(shape, ShuffledV::Tiled).unwrap(),
            PageFormat::aiter_shuffle(shape, ShuffledV::Transposed).unwrap(),
        )
    };
    let (tiled, transposed) = both(ElementType::BFloat16);
    assert_ne!(tiled, transposed);
    let (tiled, transposed) = both(ElementType::Float8E4M3Fn);
    assert_eq!(tiled, transposed);
}

#[test]
fn elements_outside_a_page_have_no_offset() {
    let format = standard(2, 16, 16);
    let outside = |field, got, extent| Err(FormatError::OutsideExtents { field, got, extent });
    assert_eq!(format.offset("k", 2, 0, 0), outside("head", 2, 2));
    assert_eq!(format.offset("v", 0, 16, 0), outside("token", 16, 16));
    assert_eq!(format.offset("v", 0, 0, u32::MAX), outside("channel", u32::MAX, 16));
    assert!(matches!(format.offset("q", 0, 0, 0), Err(FormatError::UnknownComponent { .. })));
}

#[test]
fn permutations_take_whole_pages_of_the_same_tensors() {
    let (source, target) = (standard(2, 16, 64), shuffle(2, 16, 64));
    let permutation = Permutation::new(&source, &target).unwrap();
    let mut page = vec![0; permutation.target_bytes()];
    let raw = vec![1; permutation.source_bytes() + 1];
    assert!(!permutation.apply(&raw, &mut page));
    let (_, long) = raw.split_first().unwrap();
    let (_, short) = page.split_first_mut().unwrap();
    assert!(!permutation.apply(long, short));
    assert!(page.iter().all(|&byte| byte == 0));
    assert!(Permutation::new(&source, &shuffle(1, 16, 64)).is_none());
}

/// One head of float16 elements, each axis in tiles: (tile, bytes from tile to tile, from index to index).
fn tiled(extents: (u32, u32), tokens: (u32, u64, u64), channels: (u32, u64, u64)) -> PageFormat {
    let axis = |extent, (tile, tile_stride, stride)| {
        Tiling::new("axis", extent, tile, tile_stride, stride).unwrap()
    };
    let heads = Tiling::plain("heads", 1, 0).unwrap();
    let (tokens, channels) = (axis(extents.0, tokens), axis(extents.1, channels));
    let k = Component::new("k", ElementType::Float16, 0, 0, heads, tokens, channels).unwrap();
    PageFormat::new("tiled", vec![k], vec![u64::from(extents.0 * extents.1 * 2)], vec![]).unwrap()
}

#[test]
fn permutations_move_no_more_at_once_than_lies_together() {
    let pairs = [
        // Channels in fours and in sixes, between which the two tokens take turns.
        (tiled((2, 12), (2, 0, 8), (4, 16, 2)), tiled((2, 12), (2, 0, 12), (6, 24, 2))),
        // Rows of eight channels become columns of four tokens, not of eight.
        (tiled((16, 8), (16, 0, 16), (8, 0, 2)), tiled((16, 8), (4, 64, 2), (8, 0, 8))),
    ];
    for (source, target) in pairs.iter().flat_map(|(a, b)| [(a, b), (b, a)]) {
        let page: Vec<u8> = (0..=255).take(usize::try_from(source.page_bytes()).unwrap()).collect();
        let mut moved = vec![0; page.len()];
        assert!(Permutation::new(source, target).unwrap().apply(&page, &mut moved));
        assert_eq!(moved, convert(source, target, &[page]).concat());
    }
}
