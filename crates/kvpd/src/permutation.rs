//! A page of one format made of a page of another, on the host.

use crate::component::{Component, Tiling};
use crate::format::PageFormat;

/// Where every element of a page lies in a page of another format with the same components.
///
/// Both offsets of an element are sums of one term an axis, so that a component needs a list an axis
/// instead of an entry an element. Elements that are neighbours on both sides move together.
pub struct Permutation {
    source_bytes: usize,
    target_bytes: usize,
    parts: Vec<Part>,
}

/// One component: what is at every sum of a head, a row and a step moves as `moves` says.
struct Part {
    heads: Vec<Offset>,
    rows: Vec<Offset>,
    steps: Vec<Offset>,
    moves: Moves,
}

#[derive(Clone, Copy)]
enum Moves {
    /// So many bytes each, which lie side by side on both sides.
    Units(u32),
    /// Elements of so many bytes, `TILE_BYTES` of which lie side by side along the steps in the
    /// source and along the rows in the target.
    Tiles(u32),
}

/// What a vector register holds.
const TILE_BYTES: u32 = 16;

/// Bytes from the start of the page, or of an enclosing offset, on either side.
#[derive(Clone, Copy)]
struct Offset {
    source: usize,
    target: usize,
}

impl Permutation {
    /// From `source` pages to `target` pages; `None` unless both hold the same tensors.
    pub fn new(source: &PageFormat, target: &PageFormat) -> Option<Self> {
        if !source.same_tensors(target) {
            return None;
        }
        // Components are sorted by name on both sides.
        let pairs = source.components().iter().zip(target.components());
        let parts = pairs.map(|(from, to)| {
            Part::new(from, start_bytes(source, from)?, to, start_bytes(target, to)?)
        });
        Some(Self {
            source_bytes: usize::try_from(source.page_bytes()).ok()?,
            target_bytes: usize::try_from(target.page_bytes()).ok()?,
            parts: parts.collect::<Option<_>>()?,
        })
    }

    /// Bytes of a source page.
    pub const fn source_bytes(&self) -> usize {
        self.source_bytes
    }

    /// Bytes of a target page.
    pub const fn target_bytes(&self) -> usize {
        self.target_bytes
    }

    /// Write every element of `source` to its place in `target`; the target's padding is left alone.
    ///
    /// Returns false, having written nothing, where a slice is not a page long.
    pub fn apply(&self, source: &[u8], target: &mut [u8]) -> bool {
        let fits = source.len() == self.source_bytes && target.len() == self.target_bytes;
        if fits {
            for part in &self.parts {
                part.apply(source, target);
            }
        }
        fits
    }
}

impl Part {
    fn new(from: &Component, from_bytes: u64, to: &Component, to_bytes: u64) -> Option<Self> {
        let element_bytes = from.element().bytes();
        let start = Offset {
            source: usize::try_from(from_bytes).ok()?,
            target: usize::try_from(to_bytes).ok()?,
        };
        let tokens = Axis::new(from.tokens(), to.tokens(), element_bytes);
        let channels = Axis::new(from.channels(), to.channels(), element_bytes);
        let along_channels = (tokens, channels);
        let along_tokens = (channels, tokens);
        let longest =
            if tokens.shared_run() > channels.shared_run() { along_tokens } else { along_channels };
        let unit = longest.1.shared_run();
        let tile = TILE_BYTES / element_bytes;
        let tiled = [along_channels, along_tokens].into_iter().find(|(rows, steps)| {
            rows.target_run.is_multiple_of(tile) && steps.source_run.is_multiple_of(tile)
        });
        let ((rows, steps), step, moves) = match tiled {
            Some(order) if unit < tile => (order, 1, Moves::Tiles(element_bytes)),
            _ => (longest, unit, Moves::Units(unit.checked_mul(element_bytes)?)),
        };
        Some(Self {
            heads: offsets(from.heads(), to.heads(), 1, start)?,
            rows: offsets(rows.source, rows.target, 1, Offset::NONE)?,
            steps: offsets(steps.source, steps.target, step, Offset::NONE)?,
            moves,
        })
    }

    fn apply(&self, source: &[u8], target: &mut [u8]) {
        // Of a length known here a unit is a load and a store.
        match self.moves {
            Moves::Units(1) => self.move_units::<1>(source, target),
            Moves::Units(2) => self.move_units::<2>(source, target),
            Moves::Units(4) => self.move_units::<4>(source, target),
            Moves::Units(8) => self.move_units::<8>(source, target),
            Moves::Units(16) => self.move_units::<16>(source, target),
            Moves::Units(bytes) => {
                self.move_runs(usize::try_from(bytes).unwrap_or(0), source, target)
            }
            Moves::Tiles(1) => self.move_tiles::<1, 16>(source, target),
            Moves::Tiles(2) => self.move_tiles::<2, 8>(source, target),
            Moves::Tiles(_) => self.move_tiles::<4, 4>(source, target),
        }
    }

    fn move_units<const BYTES: usize>(&self, source: &[u8], target: &mut [u8]) {
        self.for_each(|at| {
            let from = source.get(at.source..).and_then(<[u8]>::first_chunk::<BYTES>);
            let to = target.get_mut(at.target..).and_then(<[u8]>::first_chunk_mut::<BYTES>);
            // Both are there: formats prove at construction that elements are in the page.
            if let (Some(from), Some(to)) = (from, to) {
                *to = *from;
            }
        });
    }

    fn move_runs(&self, num_bytes: usize, source: &[u8], target: &mut [u8]) {
        self.for_each(|at| {
            let from = source.get(at.source..).and_then(|rest| rest.get(..num_bytes));
            let to = target.get_mut(at.target..).and_then(|rest| rest.get_mut(..num_bytes));
            if let (Some(from), Some(to)) = (from, to) {
                to.copy_from_slice(from);
            }
        });
    }

    fn for_each(&self, mut visit: impl FnMut(Offset)) {
        for head in &self.heads {
            for row in &self.rows {
                let row = head.plus(*row);
                for step in &self.steps {
                    visit(row.plus(*step));
                }
            }
        }
    }

    /// `SIDE` units of a row each become `SIDE` units of a step each: a tile turned over.
    fn move_tiles<const BYTES: usize, const SIDE: usize>(&self, source: &[u8], target: &mut [u8]) {
        for head in &self.heads {
            for rows in self.rows.as_chunks::<SIDE>().0 {
                for steps in self.steps.as_chunks::<SIDE>().0 {
                    let mut tile = [[[0; BYTES]; SIDE]; SIDE];
                    for (unit, row) in tile.iter_mut().zip(rows) {
                        let at = head.plus(*row).plus(steps[0]);
                        let from = source.get(at.source..).unwrap_or_default();
                        if let Some(from) = from.as_chunks().0.first_chunk() {
                            *unit = *from;
                        }
                    }
                    for (index, step) in steps.iter().enumerate() {
                        let at = head.plus(rows[0]).plus(*step);
                        let to = target.get_mut(at.target..).unwrap_or_default();
                        if let Some(to) = to.as_chunks_mut().0.first_chunk_mut::<SIDE>() {
                            *to = tile.map(|unit| unit[index]);
                        }
                    }
                }
            }
        }
    }
}

impl Offset {
    const NONE: Self = Self { source: 0, target: 0 };

    fn plus(self, other: Self) -> Self {
        Self {
            source: self.source.saturating_add(other.source),
            target: self.target.saturating_add(other.target),
        }
    }
}

/// Byte of a component's first element in the page, planes one after another.
fn start_bytes(format: &PageFormat, component: &Component) -> Option<u64> {
    let plane = usize::try_from(component.plane()).ok()?;
    let before = format.plane_bytes().iter().take(plane).sum::<u64>();
    before.checked_add(component.base_bytes())
}

/// An axis on both sides, and how many elements along it lie side by side on each.
#[derive(Clone, Copy)]
struct Axis<'a> {
    source: &'a Tiling,
    target: &'a Tiling,
    source_run: u32,
    target_run: u32,
}

impl<'a> Axis<'a> {
    fn new(source: &'a Tiling, target: &'a Tiling, element_bytes: u32) -> Self {
        let run = |axis: &Tiling| {
            if axis.stride_bytes() == u64::from(element_bytes) { axis.tile() } else { 1 }
        };
        Self { source, target, source_run: run(source), target_run: run(target) }
    }

    /// Elements side by side on both sides, wherever a group of so many begins.
    fn shared_run(&self) -> u32 {
        gcd(self.source_run, self.target_run)
    }
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Offsets of every `step`-th index of an axis, from `start` on.
fn offsets(from: &Tiling, to: &Tiling, step: u32, start: Offset) -> Option<Vec<Offset>> {
    let indices = (0..from.extent()).step_by(usize::try_from(step).ok()?);
    let offset = |index| {
        let source = usize::try_from(from.offset(index)).ok()?;
        let target = usize::try_from(to.offset(index)).ok()?;
        Some(start.plus(Offset { source, target }))
    };
    indices.map(offset).collect()
}
