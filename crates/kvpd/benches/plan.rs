//! Planning requests, descriptor ids and run detection, with numpy's broadcast add as the reference of
//! the ids in the same run.
//!
//! `cargo bench` prints nanoseconds per id for each size (regions x blocks); the reference needs a
//! Python with numpy (`KVPD_PYTHON`, else the project's `.venv`, else `python3`).

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::hint::black_box;
use std::path::Path;
use std::process::Command;

use criterion::{BenchmarkId, Criterion, Throughput};
use kvpd::planner::{Options, Planner};
use kvpd::region::{CacheMemory, Strided, Tag};
use kvpd::{
    Address, ElementType, Interior, LinkModel, Memory, PageFormat, Rates, Region, Runs,
    TransferPlan, family::Shape,
};

/// (regions, blocks) of one request.
const SIZES: [(usize, usize); 3] = [(36, 256), (72, 1024), (160, 8192)];

fn regions(count: usize, blocks: u64) -> Vec<Region> {
    let shape = Shape::new(8, 16, 128, ElementType::BFloat16).unwrap();
    let format = PageFormat::standard(shape, Interior::Hnc).unwrap();
    let names: Vec<String> = (0..count).map(|layer| layer.to_string()).collect();
    let (address, memory, device) = (Address(1 << 40), Memory::Vram, 0);
    let cache = CacheMemory { address, num_blocks: blocks, memory, device };
    let regions = kvpd::cache_regions(&format, kvpd::Layout::Lbhnc, &names, cache).unwrap();
    // Block strides above the page keep the bench honest: nothing may depend on dense rows.
    let spread = |region: &Region, index: u64| {
        let strided = Strided {
            address: Address(region.address().get() + index * blocks * 4096),
            num_blocks: blocks,
            block_bytes: region.block_bytes(),
            block_stride_bytes: region.block_stride_bytes() + 4096,
            extent_bytes: None,
            memory,
            device,
        };
        let tag = Tag { format: format.clone(), spans: format.whole_planes() };
        Region::new(strided, Some(tag), region.layers().to_vec()).unwrap()
    };
    regions.iter().zip(0..).map(|(region, index)| spread(region, index)).collect()
}

/// Distinct ids in a scrambled order: a multiplier coprime with the number of blocks.
fn scrambled(blocks: usize, total: u64, step: u64) -> Vec<i32> {
    (0..u64::try_from(blocks).unwrap())
        .map(|index| i32::try_from(index * step % total).unwrap())
        .collect()
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("plan");
    for (num_regions, num_blocks) in SIZES {
        let total = 4 * u64::try_from(num_blocks).unwrap();
        let regions = regions(num_regions, total);
        let plan = TransferPlan::new(&regions, &regions).unwrap();
        let local = scrambled(num_blocks, total, 2_654_435_761);
        let remote = scrambled(num_blocks, total, 40_503);
        let runs = Runs::pair(&local, &remote).unwrap();
        let size = format!("{num_regions}x{num_blocks}");

        // Ids of both sides.
        let num_ids = u64::try_from(2 * num_regions * num_blocks).unwrap();
        group.throughput(Throughput::Elements(num_ids));
        // Into memory that is kept: fresh pages from the system would be most of the time.
        let (mut ours, mut theirs) = plan.descriptor_ids(&runs).unwrap();
        group.bench_function(BenchmarkId::new("descriptor_ids", &size), |bencher| {
            bencher.iter(|| {
                plan.write_descriptor_ids(black_box(&runs), &mut ours, &mut theirs).unwrap();
                black_box((&ours, &theirs));
            });
        });
        group.throughput(Throughput::Elements(u64::try_from(num_blocks).unwrap()));
        for (pattern, local, remote) in [
            ("random", &local, &remote),
            ("reversed", &(0..i32::try_from(num_blocks).unwrap()).rev().collect(), &remote),
        ] {
            let name = format!("runs_{pattern}");
            group.bench_function(BenchmarkId::new(name, &size), |bencher| {
                bencher
                    .iter(|| black_box(Runs::pair(black_box(local), black_box(remote)).unwrap()));
            });
        }
    }
    group.finish();
    planning(&mut criterion);
    numpy_reference();
}

/// One request from block ids to a plan: pairing and sorting, the choice, the chunks; and then the
/// ids of all its chunks into memory that is kept.
fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("planner");
    for num_blocks in [1_usize, 256, 2048] {
        let total = 8192;
        let regions = regions(36, total);
        let slab_bytes = 1 << 30;
        let slab = Strided {
            address: Address(1 << 44),
            num_blocks: 1,
            block_bytes: slab_bytes,
            block_stride_bytes: slab_bytes,
            extent_bytes: None,
            memory: Memory::Vram,
            device: 0,
        };
        let options = Options {
            link: LinkModel::new(Rates::of(Memory::Vram)).unwrap(),
            max_pages: 2048,
            slab: Some(Region::new(slab, None, Vec::new()).unwrap()),
            num_slots: 4,
            direct: false,
            in_place: false,
        };
        let planner = Planner::new(&regions, &regions, options).unwrap();
        let local = scrambled(num_blocks, total, 2_654_435_761);
        let remote = scrambled(num_blocks, total, 40_503);
        group.bench_function(BenchmarkId::new("plan", format!("36x{num_blocks}")), |bencher| {
            bencher.iter(|| {
                let runs = Runs::pair(black_box(&local), black_box(&remote)).unwrap();
                black_box(planner.plan(&runs).unwrap())
            });
        });
        let plan = planner.plan(&Runs::pair(&local, &remote).unwrap()).unwrap();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let slots = planner.slots().unwrap().num_slots();
        group.bench_function(BenchmarkId::new("all_ids", format!("36x{num_blocks}")), |bencher| {
            bencher.iter(|| {
                for (chunk, slot) in (0..plan.chunks().len()).zip((0..slots).cycle()) {
                    let count = planner.num_chunk_ids(&plan, chunk).unwrap();
                    ours.resize(count, 0);
                    theirs.resize(count, 0);
                    planner.write_chunk_ids(&plan, chunk, slot, &mut ours, &mut theirs).unwrap();
                    black_box((&ours, &theirs));
                }
            });
        });
    }
    group.finish();
}

/// The broadcast add that stock connectors use, timed by numpy itself.
fn numpy_reference() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let venv = here.join("../../.venv/bin/python");
    let python = std::env::var("KVPD_PYTHON").ok();
    let python = python.unwrap_or_else(|| {
        if venv.exists() { venv.display().to_string() } else { "python3".to_owned() }
    });
    let sizes = SIZES.map(|(regions, blocks)| format!("{regions}x{blocks}"));
    let script = here.join("benches/numpy_reference.py");
    match Command::new(&python).arg(script).args(&sizes).status() {
        Ok(status) if status.success() => {}
        outcome => println!("no numpy reference: {python} gave {outcome:?}"),
    }
}
