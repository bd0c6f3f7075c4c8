//! What a transfer costs: one affine formula whose numbers are measured or configured.
//!
//! A READ takes a fixed time, a time for each descriptor that is left after NIXL merged neighbours, and
//! the time of its bytes. Over NVLink the descriptors dominate as soon as pages are scattered; in host
//! memory many descriptors can run on several threads and be *faster* than merged ones, hence the
//! second rate.

use std::fmt;

use crate::error::PlanError;
use crate::region::Memory;

/// The numbers of a [`LinkModel`], before they are checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes per second of a READ in which NIXL merged nothing.
    pub bytes_per_second: f64,
    /// Bytes per second of a READ in which NIXL merged neighbours.
    pub merged_bytes_per_second: f64,
    /// Seconds for each descriptor, whatever its length.
    pub seconds_per_descriptor: f64,
    /// Seconds for each chunk: a READ and a launch, however small.
    pub seconds_per_chunk: f64,
    /// Bytes of pages converted per second.
    pub convert_bytes_per_second: f64,
    /// Bytes of pages per second when the conversion itself reads the peer's memory.
    pub direct_bytes_per_second: f64,
}

impl Rates {
    /// Defaults: between two H200s over NVLink, and between two processes of one host.
    pub const fn of(memory: Memory) -> Self {
        match memory {
            Memory::Vram => Self {
                bytes_per_second: 280e9,
                merged_bytes_per_second: 280e9,
                seconds_per_descriptor: 3.3e-6,
                seconds_per_chunk: 50e-6,
                convert_bytes_per_second: 2e12,
                direct_bytes_per_second: 360e9,
            },
            Memory::Dram => Self {
                bytes_per_second: 3e9,
                merged_bytes_per_second: 3e9,
                seconds_per_descriptor: 10e-6,
                seconds_per_chunk: 100e-6,
                // By the core, in one thread.
                convert_bytes_per_second: 2e9,
                direct_bytes_per_second: 3e9,
            },
        }
    }
}

/// Positive, finite rates, and the times that follow from them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkModel(Rates);

impl LinkModel {
    /// Checked rates.
    ///
    /// # Errors
    /// A number is not finite or not above 0.
    pub fn new(rates: Rates) -> Result<Self, PlanError> {
        let numbers = [
            ("bytes_per_second", rates.bytes_per_second),
            ("merged_bytes_per_second", rates.merged_bytes_per_second),
            ("seconds_per_descriptor", rates.seconds_per_descriptor),
            ("seconds_per_chunk", rates.seconds_per_chunk),
            ("convert_bytes_per_second", rates.convert_bytes_per_second),
            ("direct_bytes_per_second", rates.direct_bytes_per_second),
        ];
        match numbers.iter().find(|(_, number)| !(number.is_finite() && *number > 0.0)) {
            Some(&(field, got)) => Err(PlanError::Rate { field, got: got.to_string() }),
            None => Ok(Self(rates)),
        }
    }

    /// The numbers.
    pub const fn rates(&self) -> &Rates {
        &self.0
    }

    /// The length at which a descriptor runs at four fifths of the rate: 4 x rate x time per descriptor.
    pub fn best_descriptor_bytes(&self) -> f64 {
        4.0 * self.0.bytes_per_second * self.0.seconds_per_descriptor
    }

    /// Seconds of READs of `num_bytes`, `planned` descriptors of which `merged` are left.
    pub(crate) fn read_seconds(
        &self,
        reads: u64,
        planned: u64,
        merged: u64,
        num_bytes: u64,
    ) -> f64 {
        let rates = &self.0;
        let rate =
            if merged < planned { rates.merged_bytes_per_second } else { rates.bytes_per_second };
        float(reads) * rates.seconds_per_chunk
            + float(merged) * rates.seconds_per_descriptor
            + float(num_bytes) / rate
    }

    /// Seconds to convert pages of `num_bytes` on the decoder.
    pub(crate) fn convert_seconds(&self, num_bytes: u64) -> f64 {
        float(num_bytes) / self.0.convert_bytes_per_second
    }

    /// Seconds of a conversion that reads `num_bytes` over the link itself.
    pub(crate) fn direct_seconds(&self, num_bytes: u64) -> f64 {
        self.0.seconds_per_chunk + float(num_bytes) / self.0.direct_bytes_per_second
    }
}

/// The nearest float. Only times are made of it, never an address or a count.
pub(crate) fn float(number: u64) -> f64 {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    f64::from(u32::from_le_bytes([e, f, g, h])) * 4_294_967_296.0
        + f64::from(u32::from_le_bytes([a, b, c, d]))
}

impl fmt::Display for LinkModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rates = &self.0;
        write!(
            f,
            "{:.1} GB/s ({:.1} merged, {:.1} direct), {:.2} us a descriptor, {:.0} us a chunk, \
             conversion {:.1} GB/s, best descriptor {:.0} KiB",
            rates.bytes_per_second / 1e9,
            rates.merged_bytes_per_second / 1e9,
            rates.direct_bytes_per_second / 1e9,
            rates.seconds_per_descriptor * 1e6,
            rates.seconds_per_chunk * 1e6,
            rates.convert_bytes_per_second / 1e9,
            self.best_descriptor_bytes() / 1024.0
        )
    }
}
