//! Runs and plans, executed on simulated memory: every byte lands once, where it belongs.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::memory::{descriptors, merge, moved, page_addresses, random_cache};
use crate::support::{cache, shuffle, standard};

use kvpd::region::{Strided, Tag};
use kvpd::{Address, Layout, Memory, PlanError, Region, Row, Run, Runs, TransferPlan};
use proptest::prelude::*;

fn some_blocks() -> impl Strategy<Value = Vec<i64>> {
    Just((0_i64..6).collect::<Vec<_>>()).prop_shuffle()
}

proptest! {
    #[test]
    fn a_plan_tiles_the_destination_exactly_once(
        target in random_cache(shuffle(1, 16, 16), &["a", "b"]),
        source in random_cache(standard(1, 16, 16), &["a", "b"]),
        local in some_blocks(),
        remote in some_blocks(),
        count in 0_usize..6,
    ) {
        let plan = TransferPlan::new(&target, &source).unwrap();
        let runs = Runs::pair(&local[..count], &remote[..count]).unwrap();
        let (local_ids, remote_ids) = plan.descriptor_ids(&runs).unwrap();
        let to = descriptors(plan.rows().local_rows(), &local_ids);
        let from = descriptors(plan.rows().remote_rows(), &remote_ids);
        let parts: Vec<_> = to.iter().zip(&from).map(|(to, from)| {
            assert_eq!(to.1, from.1);
            (to.0, from.0, to.1)
        }).collect();
        let moved = moved(&parts).expect("a byte was written twice");

        let mut expected = BTreeMap::new();
        for layer in ["a", "b"] {
            for (&local, &remote) in local.iter().zip(&remote).take(count) {
                let block = |id: i64| u64::try_from(id).unwrap();
                let to = page_addresses(&target, layer, block(local));
                let from = page_addresses(&source, layer, block(remote));
                expected.extend(to.into_iter().zip(from));
            }
        }
        prop_assert_eq!(&moved, &expected);

        // Merging changes how many descriptors there are, not one byte.
        let merged = merge(plan.rows(), &local_ids, &remote_ids);
        prop_assert_eq!(crate::memory::moved(&merged).unwrap(), expected);
        let predicted = plan.num_merged_descriptors(&runs);
        prop_assert_eq!(u64::try_from(merged.len()).unwrap(), predicted);
        let before = plan.num_descriptors(&runs).unwrap();
        prop_assert_eq!(u64::try_from(parts.len()).unwrap(), before);
    }

    #[test]
    fn runs_are_the_pairs_sorted_and_maximal(
        pairs in prop::collection::hash_map(0_i64..60, 0_i64..60, 0..40),
    ) {
        let mut seen = HashSet::new();
        let pairs: Vec<_> = pairs.into_iter().filter(|pair| seen.insert(pair.1)).collect();
        let (local, remote): (Vec<i64>, Vec<i64>) = pairs.iter().copied().unzip();
        let runs = Runs::pair(&local, &remote).unwrap();
        let page = |start: u32, step: u32| i64::from(start) + i64::from(step);
        let flat: Vec<_> = runs
            .as_slice()
            .iter()
            .flat_map(|run| (0..run.num_pages).map(|step| (page(run.local, step), page(run.remote, step))))
            .collect();
        let mut sorted = pairs;
        sorted.sort_by_key(|pair| pair.1);
        prop_assert_eq!(&flat, &sorted);
        let ids: Vec<_> = runs.local_ids().iter().zip(runs.remote_ids()).map(|(&l, &r)| (i64::from(l), i64::from(r))).collect();
        prop_assert_eq!(&ids, &sorted);
        // Maximal: no two runs of any order could be joined.
        let ends: HashSet<_> = runs.as_slice().iter().map(|run| (run.local + run.num_pages, run.remote + run.num_pages)).collect();
        prop_assert!(!runs.as_slice().iter().any(|run| ends.contains(&(run.local, run.remote))));
    }

    #[test]
    fn hostile_ids_do_not_panic(local in prop::collection::vec(any::<i64>(), 0..9), remote in prop::collection::vec(any::<i64>(), 0..9)) {
        let target = cache(&shuffle(1, 16, 16), Layout::Lhbnc, 2);
        let source = cache(&standard(1, 16, 16), Layout::Lbhnc, 2);
        let plan = TransferPlan::new(&target, &source).unwrap();
        if let Ok(runs) = Runs::pair(&local, &remote) {
            let _ = plan.descriptor_ids(&runs);
        }
    }
}

#[test]
fn descending_and_interleaved_ids_merge() {
    let run = |local, remote, num_pages| Run { local, remote, num_pages };
    let found =
        |local: &[i64], remote: &[i64]| Runs::pair(local, remote).unwrap().as_slice().to_vec();
    assert_eq!(found(&[9, 8, 7], [5, 4, 3].as_slice()), [run(7, 3, 3)]);
    assert_eq!(found(&[0, 8, 1, 9], &[10, 20, 11, 21]), [run(0, 10, 2), run(8, 20, 2)]);
    assert_eq!(found(&[], &[]), []);
}

#[test]
fn ids_that_cannot_be_are_refused() {
    let pair = |local: &[i64], remote: &[i64]| Runs::pair(local, remote).map(|_| ());
    let duplicate = |side, block| Err(PlanError::DuplicateBlock { side, block });
    assert_eq!(pair(&[1], &[]), Err(PlanError::LengthMismatch { local: 1, remote: 0 }));
    assert_eq!(pair(&[1, 2, 1], &[3, 4, 5]), duplicate("local", 1));
    assert_eq!(pair(&[1, 2, 3], &[4, 5, 4]), duplicate("remote", 4));
    // However far apart.
    let far = i64::from(i32::MAX);
    assert_eq!(pair(&[far, 0, far], &[3, 4, 5]), duplicate("local", u32::MAX / 2));
    assert!(pair(&[far, 0, far - 1], &[3, 4, 5]).is_ok());
    for got in [-1, 1 << 31] {
        assert_eq!(pair(&[got], &[0]), Err(PlanError::BlockId { side: "local", got }));
    }
    assert!(pair(&[(1 << 31) - 1], &[0]).is_ok());
}

#[test]
fn blocks_outside_the_rows_are_refused() {
    let target = cache(&shuffle(1, 16, 16), Layout::Lhbnc, 2);
    let source = cache(&standard(1, 16, 16), Layout::Lbhnc, 2);
    let plan = TransferPlan::new(&target, &source).unwrap();
    let ids = |local: i64, remote: i64| {
        plan.descriptor_ids(&Runs::pair(&[local], &[remote]).unwrap()).map(|_| ())
    };
    let outside = |side| Err(PlanError::NoSuchBlock { side, block: 32, num_blocks: 32 });
    assert_eq!(ids(32, 0), outside("local"));
    assert_eq!(ids(0, 32), outside("remote"));
    assert_eq!(ids(31, 31), Ok(()));
}

/// Regions may differ in blocks, so ids count what lies before, not a common number of blocks.
#[test]
fn ids_of_unequal_regions_are_cumulative() {
    let format = standard(1, 1, 4);
    let region = |address, num_blocks, layer: &str| {
        let strided = Strided {
            address: Address(address),
            num_blocks,
            block_bytes: 16,
            block_stride_bytes: 16,
            extent_bytes: None,
            memory: Memory::Dram,
            device: 0,
        };
        let tag = Tag { spans: format.whole_planes(), format: format.clone() };
        Region::new(strided, Some(tag), vec![layer.into()]).unwrap()
    };
    let regions = [region(100, 2, "a"), region(1000, 3, "b")];
    let plan = TransferPlan::new(&regions, &regions).unwrap();
    let all: Vec<i32> = (0..5).collect();
    let addresses: Vec<u64> =
        descriptors(plan.rows().local_rows(), &all).iter().map(|d| d.0).collect();
    assert_eq!(addresses, [100, 116, 1000, 1016, 1032]);
    let runs = Runs::pair(&[1_i64, 0], &[0_i64, 1]).unwrap();
    assert_eq!(plan.descriptor_ids(&runs).unwrap(), (vec![1, 0, 3, 2], vec![0, 1, 2, 3]));
}

#[test]
fn in_place_a_page_fills_the_k_block_and_then_the_v_block() {
    let target = cache(&shuffle(2, 16, 64), Layout::Lhbnc, 1);
    let source = cache(&standard(2, 16, 64), Layout::Lbhnc, 1);
    let plan = TransferPlan::new(&target, &source).unwrap();
    let half = 4096;
    let rows = |rows: &[Row]| -> Vec<[u64; 5]> { rows.iter().map(|row| row.to_array()).collect() };
    let base = 1 << 20;
    assert_eq!(
        rows(plan.rows().local_rows()),
        [[base, half, 0, half, 32], [base + 32 * half, half, 0, half, 32]]
    );
    assert_eq!(
        rows(plan.rows().remote_rows()),
        [[base, half, 0, 2 * half, 32], [base + half, half, 0, 2 * half, 32]]
    );
    let runs = Runs::pair(&[0_i64, 1, 2], &[4_i64, 5, 6]).unwrap();
    // The remote halves have gaps between them, so nothing merges.
    assert_eq!(plan.num_merged_descriptors(&runs), 6);
}

#[test]
fn sides_that_do_not_belong_together_are_refused() {
    let shuffled = cache(&shuffle(2, 16, 64), Layout::Lhbnc, 2);
    let plan = |source: &[Region]| TransferPlan::new(&shuffled, source).map(|_| ());
    let one_layer = cache(&standard(2, 16, 64), Layout::Lbhnc, 1);
    assert_eq!(plan(&one_layer), Err(PlanError::Layers { layer: "layers.1".into() }));
    let three = cache(&standard(2, 16, 64), Layout::Lbhnc, 3);
    assert_eq!(plan(&three), Err(PlanError::Layers { layer: "layers.2".into() }));
    let larger = cache(&standard(4, 16, 64), Layout::Lbhnc, 2);
    let (local, remote) = (8192, 16384);
    let error = Err(PlanError::PageBytes { layer: "layers.0".into(), local, remote });
    assert_eq!(plan(&larger), error);
    let strided = Strided {
        address: Address(0),
        num_blocks: 1,
        block_bytes: 1,
        block_stride_bytes: 1,
        extent_bytes: None,
        memory: Memory::Dram,
        device: 0,
    };
    let untagged = Region::new(strided, None, Vec::new()).unwrap();
    assert_eq!(plan(&[untagged]), Err(PlanError::Untagged { side: "remote" }));
}

/// The page of layer x in one map, so that the simulated layouts above are not all alike.
#[test]
fn every_layout_holds_the_same_page() {
    let format = standard(2, 16, 64);
    let mut pages: HashMap<Layout, usize> = HashMap::new();
    for layout in [Layout::Lbhnc, Layout::Lhbnc, Layout::Blhnc, Layout::Bhlnc] {
        let regions = cache(&format, layout, 2);
        let page = page_addresses(&regions, "layers.1", 3);
        assert_eq!(u64::try_from(page.len()).unwrap(), format.page_bytes());
        pages.insert(layout, page.windows(2).filter(|pair| pair[1] != pair[0] + 1).count());
    }
    // Breaks inside a page: none where pages are whole, one between two heads elsewhere.
    assert_eq!(pages[&Layout::Lbhnc], 0);
    assert_eq!(pages[&Layout::Blhnc], 0);
    assert_eq!(pages[&Layout::Lhbnc], 1);
    assert_eq!(pages[&Layout::Bhlnc], 1);
}
