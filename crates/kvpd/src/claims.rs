//! Which blocks of our own cache belong to requests in flight.

use crate::error::PlanError;
use crate::runs::Runs;

/// One flag for each block of a cache.
#[derive(Clone, Debug)]
pub struct Claims {
    is_claimed: Vec<bool>,
}

impl Claims {
    /// No block of `num_blocks` is claimed.
    pub fn new(num_blocks: u32) -> Self {
        Self { is_claimed: (0..num_blocks).map(|_| false).collect() }
    }

    /// Claims the local blocks of a request: all of them, or none.
    ///
    /// # Errors
    /// A block that the cache does not have, or that is claimed.
    pub fn claim(&mut self, runs: &Runs) -> Result<(), PlanError> {
        let mut taken = Vec::new();
        for block in blocks(runs) {
            match self.flag(block).copied() {
                Some(false) => {}
                Some(true) => taken.push(block),
                None => {
                    let num_blocks = u32::try_from(self.is_claimed.len()).unwrap_or(u32::MAX);
                    return Err(PlanError::NoSuchBlock { side: "local", block, num_blocks });
                }
            }
        }
        if !taken.is_empty() {
            taken.sort_unstable();
            return Err(PlanError::BlocksInFlight { blocks: taken });
        }
        self.set(runs, true);
        Ok(())
    }

    /// Gives the local blocks of a request back.
    pub fn release(&mut self, runs: &Runs) {
        self.set(runs, false);
    }

    /// Number of claimed blocks.
    pub fn num_claimed(&self) -> usize {
        self.is_claimed.iter().filter(|&&is_claimed| is_claimed).count()
    }

    fn set(&mut self, runs: &Runs, value: bool) {
        for block in blocks(runs) {
            if let Some(flag) = self.flag(block) {
                *flag = value;
            }
        }
    }

    fn flag(&mut self, block: u32) -> Option<&mut bool> {
        self.is_claimed.get_mut(usize::try_from(block).ok()?)
    }
}

fn blocks(runs: &Runs) -> impl Iterator<Item = u32> {
    runs.local_ids().iter().map(|id| id.cast_unsigned())
}
