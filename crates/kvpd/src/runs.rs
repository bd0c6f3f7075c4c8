//! Runs: maximal stretches of pages that are consecutive on both sides.
//!
//! Only consecutive ids in dense rows merge into one descriptor, and an engine's freed blocks come back
//! in reverse and in pieces, so pairs are sorted before they are merged.

use crate::error::PlanError;
use crate::units::BlockId;

/// Pages `[local, local + num_pages)` are read from `[remote, remote + num_pages)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// First local block.
    pub local: u32,
    /// First remote block.
    pub remote: u32,
    /// Pages.
    pub num_pages: u32,
}

/// The runs of one request, ordered by remote id, and its pages in that order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    runs: Vec<Run>,
    local_ids: Vec<i32>,
    remote_ids: Vec<i32>,
}

impl Runs {
    /// Pairs ids by position, sorts and merges.
    ///
    /// # Errors
    /// The lists differ in length; an id is below 0 or past 2^31 - 1; a side names a block twice.
    pub fn pair<I: Copy + Into<i64>>(local: &[I], remote: &[I]) -> Result<Self, PlanError> {
        if local.len() != remote.len() {
            return Err(PlanError::LengthMismatch { local: local.len(), remote: remote.len() });
        }
        let mut locals = checked("local", local)?;
        let remotes = checked("remote", remote)?;
        // One integer a pair: the remote id decides the order.
        let mut pairs: Vec<u64> = locals
            .iter()
            .zip(&remotes)
            .map(|(&local, &remote)| (u64::from(remote) << 32) | u64::from(local))
            .collect();
        pairs.sort_unstable();
        locals.sort_unstable();
        refuse_twice("local", locals.iter().copied())?;
        refuse_twice("remote", pairs.iter().map(|&pair| high(pair)))?;
        Ok(Self::merge(pairs.into_iter().map(|pair| (low(pair), high(pair)))))
    }

    /// Merges pairs (local, remote) that are sorted by remote id and distinct.
    fn merge(pairs: impl Iterator<Item = (u32, u32)>) -> Self {
        let mut merged = Self::default();
        for (local, remote) in pairs {
            match merged.runs.last_mut() {
                Some(run)
                    if run.local.saturating_add(run.num_pages) == local
                        && run.remote.saturating_add(run.num_pages) == remote =>
                {
                    run.num_pages += 1;
                }
                _ => merged.runs.push(Run { local, remote, num_pages: 1 }),
            }
            merged.local_ids.push(local.cast_signed());
            merged.remote_ids.push(remote.cast_signed());
        }
        merged
    }

    /// The runs.
    pub fn as_slice(&self) -> &[Run] {
        &self.runs
    }

    /// Number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Number of pages.
    pub fn num_pages(&self) -> usize {
        self.local_ids.len()
    }

    /// Local ids, page by page.
    pub fn local_ids(&self) -> &[i32] {
        &self.local_ids
    }

    /// Remote ids, page by page, ascending.
    pub fn remote_ids(&self) -> &[i32] {
        &self.remote_ids
    }
}

fn checked<I: Copy + Into<i64>>(side: &'static str, ids: &[I]) -> Result<Vec<u32>, PlanError> {
    let check = |&id: &I| {
        let got = id.into();
        BlockId::new(got).map(BlockId::get).ok_or(PlanError::BlockId { side, got })
    };
    ids.iter().map(check).collect()
}

/// Refuses a block that occurs twice among sorted ids: it would be written, or converted, twice.
fn refuse_twice(
    side: &'static str,
    sorted: impl Iterator<Item = u32> + Clone,
) -> Result<(), PlanError> {
    match sorted.clone().zip(sorted.skip(1)).find(|(first, second)| first == second) {
        Some((block, _)) => Err(PlanError::DuplicateBlock { side, block }),
        None => Ok(()),
    }
}

fn high(pair: u64) -> u32 {
    low(pair >> 32)
}

fn low(pair: u64) -> u32 {
    let [a, b, c, d, ..] = pair.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
