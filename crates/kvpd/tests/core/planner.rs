//! The planner: whatever it chooses tiles the destination, stays in its slot, and costs what it says.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::memory::{descriptors, merge, moved, page_addresses, random_cache};
use crate::support::{cache, shuffle, standard};
use kvpd::planner::{Options, Placement, Planner};
use kvpd::region::Strided;
use kvpd::{
    Address, Chunk, Layout, LinkModel, Memory, Order, PlanError, Rates, Region, RequestPlan, Runs,
};
use proptest::prelude::*;

const LAYERS: [&str; 5] = ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4"];
const PAGE_BYTES: u64 = 1024;
const SLAB_ADDRESS: u64 = 1 << 40;

fn slab(num_bytes: u64) -> Region {
    let strided = Strided {
        address: Address(SLAB_ADDRESS),
        num_blocks: 1,
        block_bytes: num_bytes,
        block_stride_bytes: num_bytes,
        extent_bytes: None,
        memory: Memory::Dram,
        device: 0,
    };
    Region::new(strided, None, Vec::new()).unwrap()
}

fn options(link: LinkModel, slab: Option<Region>) -> Options {
    Options { link, max_pages: 6, slab, num_slots: 4, direct: false, in_place: false }
}

fn ids(planner: &Planner, plan: &RequestPlan, chunk: usize, slot: u32) -> (Vec<i32>, Vec<i32>) {
    let count = planner.num_chunk_ids(plan, chunk).unwrap();
    let (mut local, mut remote) = (vec![-1; count], vec![-1; count]);
    planner.write_chunk_ids(plan, chunk, slot, &mut local, &mut remote).unwrap();
    (local, remote)
}

/// Rates of any size, so that every choice is the fastest sometimes.
fn any_link() -> impl Strategy<Value = LinkModel> {
    prop::array::uniform6(-6.0..6.0_f64).prop_map(|exponents| {
        let [bytes, merged, descriptor, chunk, convert, direct] =
            exponents.map(|exponent| 10_f64.powf(exponent));
        LinkModel::new(Rates {
            bytes_per_second: bytes,
            merged_bytes_per_second: merged,
            seconds_per_descriptor: descriptor,
            seconds_per_chunk: chunk,
            convert_bytes_per_second: convert,
            direct_bytes_per_second: direct,
        })
        .unwrap()
    })
}

fn some_runs() -> impl Strategy<Value = Runs> {
    let blocks = || Just((0_i64..6).collect::<Vec<_>>()).prop_shuffle();
    (blocks(), blocks(), 0_usize..7, any::<bool>()).prop_map(
        |(local, mut remote, count, sorted)| {
            if sorted {
                remote.sort_unstable();
            }
            Runs::pair(&local[..count], &remote[..count]).unwrap()
        },
    )
}

/// Where the raw byte of each page must land: from address on the peer to address here.
type Expected = BTreeMap<u64, u64>;

/// The bytes of one chunk: into the blocks themselves, or into the slab as the conversion sees it.
fn expected(
    planner: &Planner,
    plan: &RequestPlan,
    chunk: Chunk,
    slot: u32,
    (target, source): (&[Region], &[Region]),
) -> Expected {
    let mut bytes = Expected::new();
    for layer in chunk.first_layer..chunk.first_layer + chunk.num_layers {
        let name = LAYERS[usize::try_from(layer).unwrap()];
        for page in 0..chunk.num_pages {
            let at = usize::try_from(chunk.first_page + page).unwrap();
            let block = |ids: &[i32]| u64::try_from(ids[at]).unwrap();
            let from = page_addresses(source, name, block(plan.runs().remote_ids()));
            let to = match (planner.slots(), plan.chosen().cut) {
                (Some(slots), Some((number, cut))) => {
                    assert_eq!(slots.cuts()[number], cut);
                    let raw = planner.slab_regions(number, layer / cut.group_layers()).unwrap();
                    page_addresses(&raw, name, (slot * slots.stride_pages() + page).into())
                }
                _ => page_addresses(target, name, block(plan.runs().local_ids())),
            };
            bytes.extend(to.into_iter().zip(from));
        }
    }
    bytes
}

proptest! {
    // A case moves some 10,000 bytes one by one, three times.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever was chosen: the chunks tile layers x pages, every byte goes where the conversion
    /// looks for it, inside the chunk's slot, and descriptors are as many as counted one by one.
    #[test]
    fn chunks_tile_the_destination_exactly_once(
        target in random_cache(shuffle(1, 16, 16), &LAYERS),
        source in random_cache(standard(1, 16, 16), &LAYERS),
        runs in some_runs(),
        link in any_link(),
        slab_bytes in PAGE_BYTES..40 * PAGE_BYTES,
        (num_slots, used_slot) in (1_u32..5, 0_u32..5),
        max_pages in 6_u32..9,
        may in (any::<bool>(), any::<bool>()),
    ) {
        let slab = may.0.then(|| slab(slab_bytes));
        let in_place = may.1 || slab.is_none();
        let options = Options { max_pages, num_slots, in_place, ..options(link, slab) };
        let planner = Planner::new(&target, &source, options).unwrap();
        let plan = planner.plan(&runs).unwrap();
        let rows = planner.rows(plan.placement()).unwrap();
        let slot = match planner.slots() {
            Some(slots) if plan.placement() == Placement::Staged => used_slot % slots.num_slots(),
            _ => 0,
        };

        let mut tiles: HashMap<(u32, u32), u32> = HashMap::new();
        let (mut planned, mut merged) = (0, 0);
        for (number, &chunk) in plan.chunks().iter().enumerate() {
            for layer in chunk.first_layer..chunk.first_layer + chunk.num_layers {
                for page in chunk.first_page..chunk.first_page + chunk.num_pages {
                    *tiles.entry((layer, page)).or_default() += 1;
                }
            }
            let (local, remote) = ids(&planner, &plan, number, slot);
            let to = descriptors(rows.local_rows(), &local);
            let from = descriptors(rows.remote_rows(), &remote);
            let parts: Vec<_> = to.iter().zip(&from).map(|(to, from)| {
                assert_eq!(to.1, from.1);
                (to.0, from.0, to.1)
            }).collect();
            let bytes = moved(&parts).expect("a byte was written twice");
            let expected = expected(&planner, &plan, chunk, slot, (&target, &source));
            prop_assert_eq!(&bytes, &expected);
            let left = merge(rows, &local, &remote);
            prop_assert_eq!(&moved(&left).unwrap(), &expected);
            planned += parts.len();
            merged += left.len();
            if let Some(slots) = planner.slots().filter(|_| plan.placement() == Placement::Staged) {
                let start = SLAB_ADDRESS + u64::from(slot) * slots.slot_bytes();
                prop_assert!(start + slots.slot_bytes() <= SLAB_ADDRESS + slab_bytes);
                prop_assert!(bytes.keys().all(|&at| at >= start && at - start < slots.slot_bytes()));
            }
        }
        let pages = u32::try_from(runs.num_pages()).unwrap();
        let all = (0..5).flat_map(|layer| (0..pages).map(move |page| ((layer, page), 1)));
        prop_assert_eq!(tiles, all.collect());
        prop_assert_eq!(plan.chosen().num_descriptors, u64::try_from(planned).unwrap());
        prop_assert_eq!(plan.chosen().num_merged_descriptors, u64::try_from(merged).unwrap());
    }

    /// What is chosen is no slower than any placement that was allowed alone.
    #[test]
    fn the_least_predicted_time_is_chosen(
        runs in some_runs(), link in any_link(), slab_bytes in PAGE_BYTES..40 * PAGE_BYTES,
    ) {
        let (target, source) = (cache(&shuffle(1, 16, 16), Layout::Lhbnc, 5), cache(&standard(1, 16, 16), Layout::Lbhnc, 5));
        let alone = |options: Options| {
            Planner::new(&target, &source, options).unwrap().plan(&runs).unwrap().chosen().seconds
        };
        let none = options(link, None);
        let seconds = [
            alone(Options { direct: true, ..none.clone() }),
            alone(Options { in_place: true, ..none.clone() }),
            alone(Options { slab: Some(slab(slab_bytes)), ..none.clone() }),
        ];
        let together = Options { direct: true, in_place: true, slab: Some(slab(slab_bytes)), ..none };
        prop_assert_eq!(alone(together), seconds.into_iter().fold(f64::INFINITY, f64::min));
    }
}

/// A page in two equal pieces: the slab has a row for each, which all layers share.
#[test]
fn a_page_that_the_peer_holds_in_equal_pieces_is_put_together() {
    let target = cache(&shuffle(2, 16, 16), Layout::Lhbnc, 5);
    let source = cache(&standard(2, 16, 16), Layout::Lhbnc, 5);
    let link = LinkModel::new(Rates::of(Memory::Vram)).unwrap();
    let planner = Planner::new(&target, &source, options(link, Some(slab(1 << 20)))).unwrap();
    let rows = planner.rows(Placement::Staged).unwrap();
    assert_eq!((rows.local_rows().len(), rows.remote_rows().len()), (2, 10));
    let plan = planner.plan(&Runs::pair(&[4_i64, 2, 9], &[7_i64, 8, 3]).unwrap()).unwrap();
    for (number, &chunk) in plan.chunks().iter().enumerate() {
        let (local, remote) = ids(&planner, &plan, number, 1);
        let to = descriptors(rows.local_rows(), &local);
        let from = descriptors(rows.remote_rows(), &remote);
        let parts: Vec<_> = to.iter().zip(&from).map(|(to, from)| (to.0, from.0, to.1)).collect();
        let expected = expected(&planner, &plan, chunk, 1, (&target, &source));
        assert_eq!(moved(&parts).unwrap(), expected);
    }
}

/// The property above covers every choice, or it would say less than it seems to.
#[test]
fn every_placement_and_order_is_chosen_somewhere() {
    let (target, source) = (
        cache(&shuffle(1, 16, 16), Layout::Lhbnc, 5),
        cache(&standard(1, 16, 16), Layout::Lbhnc, 5),
    );
    let runs = Runs::pair(&[0_i64, 1, 2], &[3_i64, 4, 9]).unwrap();
    let usual = *LinkModel::new(Rates::of(Memory::Vram)).unwrap().rates();
    let mut found = HashSet::new();
    for rates in [
        usual,
        Rates { direct_bytes_per_second: 1e-3, ..usual },
        Rates { direct_bytes_per_second: 1e-3, merged_bytes_per_second: 1.0, ..usual },
    ] {
        let link = LinkModel::new(rates).unwrap();
        for slab_bytes in [None, Some(64 * PAGE_BYTES)] {
            let slab = slab_bytes.map(slab);
            let options = Options { direct: true, in_place: true, ..options(link, slab) };
            let plan = Planner::new(&target, &source, options).unwrap().plan(&runs).unwrap();
            found.insert((plan.placement(), plan.order()));
        }
    }
    // In place nothing merges, so there the order makes no difference here.
    let all = [
        (Placement::Direct, Order::ByRow),
        (Placement::InPlace, Order::ByRow),
        (Placement::Staged, Order::ByRow),
        (Placement::Staged, Order::ByPage),
    ];
    assert_eq!(found, all.into_iter().collect());
}

#[test]
fn staged_pages_merge_along_the_remote_runs() {
    let (target, source) = (
        cache(&shuffle(1, 16, 16), Layout::Lhbnc, 3),
        cache(&standard(1, 16, 16), Layout::Lbhnc, 3),
    );
    let link = LinkModel::new(Rates::of(Memory::Vram)).unwrap();
    let options = Options { max_pages: 5, ..options(link, Some(slab(4 * 15 * PAGE_BYTES))) };
    let planner = Planner::new(&target, &source, options).unwrap();
    let runs = Runs::pair(&[9_i64, 1, 3, 5, 7], &[20_i64, 5, 19, 4, 18]).unwrap();
    let plan = planner.plan(&runs).unwrap();
    assert_eq!(plan.chunks().len(), 1);
    assert_eq!((plan.chosen().num_descriptors, plan.chosen().num_merged_descriptors), (15, 6));
    let (local, remote) = ids(&planner, &plan, 0, 2);
    // Slot 2 begins at page 30, layer j of it at 30 + 5*j; a remote row has 32 blocks.
    assert_eq!(local, (30..45).collect::<Vec<_>>());
    let of_layer = |layer: i32| [4, 5, 18, 19, 20].map(|block| 32 * layer + block);
    assert_eq!(remote, (0..3).flat_map(of_layer).collect::<Vec<_>>());
}

/// By hand: 8 layers, slots of 8 layers x 4 pages, 12 pages in two runs of the peer.
#[test]
fn a_staged_request_costs_its_reads_and_the_last_conversion() {
    let (target, source) = (
        cache(&shuffle(1, 16, 16), Layout::Lhbnc, 8),
        cache(&standard(1, 16, 16), Layout::Lbhnc, 8),
    );
    let link = LinkModel::new(Rates {
        bytes_per_second: 1e6,
        merged_bytes_per_second: 2e6,
        seconds_per_descriptor: 1e-3,
        seconds_per_chunk: 10.0,
        convert_bytes_per_second: 1e5,
        direct_bytes_per_second: 1e6,
    })
    .unwrap();
    // Chunks are so dear that a slot takes all layers it can; 2 slots of 32 pages: 8 layers x 4.
    let options =
        Options { max_pages: 12, num_slots: 2, ..options(link, Some(slab(65 * PAGE_BYTES))) };
    let planner = Planner::new(&target, &source, options).unwrap();
    let slots = planner.slots().unwrap();
    assert_eq!((slots.num_slots(), slots.stride_pages()), (2, 32));
    // The other one takes 8 pages in two chunks too, and keeps their run whole.
    let cuts: Vec<_> =
        slots.cuts().iter().map(|cut| (cut.group_layers(), cut.slot_pages())).collect();
    assert_eq!(cuts, [(8, 4), (4, 8)]);
    let (groups, slices) = (1, 3);
    let local: Vec<i64> = (0..12).collect();
    let remote: Vec<i64> = (0..6).chain(20..26).rev().collect();
    let plan = planner.plan(&Runs::pair(&local, &remote).unwrap()).unwrap();
    assert_eq!(plan.chunks().len(), usize::try_from(groups * slices).unwrap());
    let way = plan.chosen();
    assert_eq!(way.cut.map(|(number, _)| number), Some(0));
    assert_eq!(way.num_descriptors, 8 * 12);
    let bytes = f64::from(8 * 12 * 1024);
    let merged = f64::from(u32::try_from(way.num_merged_descriptors).unwrap());
    let reads = f64::from(groups * slices) * 10.0 + merged * 1e-3 + bytes / 2e6;
    let last = f64::from(4 * 8 * 1024) / 1e5;
    assert!((way.seconds - (reads + last)).abs() < 1e-9, "{way}");
}

#[test]
fn peers_with_equal_pages_share_slots_whatever_their_link() {
    let (target, source) = (
        cache(&shuffle(1, 16, 16), Layout::Lhbnc, 8),
        cache(&standard(1, 16, 16), Layout::Lbhnc, 8),
    );
    let usual = Rates::of(Memory::Vram);
    let starts: HashSet<_> =
        [usual, Rates { seconds_per_chunk: 10.0, ..usual }, Rates::of(Memory::Dram)]
            .into_iter()
            .map(|rates| {
                let options =
                    options(LinkModel::new(rates).unwrap(), Some(slab(100 * PAGE_BYTES + 7)));
                let planner = Planner::new(&target, &source, options).unwrap();
                let slots = planner.slots().unwrap();
                (slots.num_slots(), slots.slot_bytes())
            })
            .collect();
    assert_eq!(starts, HashSet::from([(4, 25 * PAGE_BYTES)]));
}

#[test]
fn what_cannot_be_is_refused_by_type() {
    let (target, source) = (
        cache(&shuffle(1, 16, 16), Layout::Lhbnc, 2),
        cache(&standard(1, 16, 16), Layout::Lbhnc, 2),
    );
    let rates = Rates::of(Memory::Vram);
    let link = LinkModel::new(rates).unwrap();
    let new = |options| Planner::new(&target, &source, options);
    for got in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = LinkModel::new(Rates { seconds_per_chunk: got, ..rates });
        let got = got.to_string();
        assert_eq!(error, Err(PlanError::Rate { field: "seconds_per_chunk", got }));
    }
    assert_eq!(new(options(link, None)).err(), Some(PlanError::NoPlacement));
    let small = new(options(link, Some(slab(PAGE_BYTES - 1)))).err();
    let slab_bytes = PAGE_BYTES - 1;
    assert_eq!(small, Some(PlanError::SlabTooSmall { slab_bytes, page_bytes: PAGE_BYTES }));
    let full = options(link, Some(slab(8 * PAGE_BYTES)));
    for (field, options) in [
        ("max_pages", Options { max_pages: 0, ..full.clone() }),
        ("num_slots", Options { num_slots: 0, ..full.clone() }),
    ] {
        assert_eq!(new(options).err(), Some(PlanError::Count { field, got: 0 }));
    }

    let planner = new(Options { max_pages: 3, ..full.clone() }).unwrap();
    let runs = |count: i64| {
        Runs::pair(&(0..count).collect::<Vec<_>>(), &(0..count).collect::<Vec<_>>()).unwrap()
    };
    let many = planner.plan(&runs(4)).err();
    assert_eq!(many, Some(PlanError::TooManyPages { got: 4, max_pages: 3 }));
    let outside = Runs::pair(&[0_i64], &[32]).unwrap();
    let error = PlanError::NoSuchBlock { side: "remote", block: 32, num_blocks: 32 };
    assert_eq!(planner.plan(&outside).err(), Some(error));
    assert!(planner.rows(Placement::InPlace).is_err());
    let cuts = planner.slots().unwrap().cuts();
    assert!(planner.slab_regions(0, cuts[0].num_groups(2)).is_err());
    assert!(planner.slab_regions(cuts.len(), 0).is_err());

    let plan = planner.plan(&runs(3)).unwrap();
    let code = |chunk, slot| match planner.write_chunk_ids(&plan, chunk, slot, &mut [], &mut []) {
        Err(PlanError::Absent { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(code(plan.chunks().len(), 0), "chunk");
    assert_eq!(code(0, 4), "slot");
    let direct = new(Options { direct: true, slab: None, ..full }).unwrap();
    let plan = direct.plan(&runs(3)).unwrap();
    assert_eq!((plan.placement(), plan.chunks().len()), (Placement::Direct, 1));
    let error = direct.num_chunk_ids(&plan, 0).err();
    assert!(matches!(error, Some(PlanError::Absent { field: "rows", .. })), "{error:?}");
}
