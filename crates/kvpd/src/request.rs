//! The plan of one request: where its pages land, in which order and pieces, and what that will cost.

use std::fmt;

use crate::planner::Placement;
use crate::rows::Order;
use crate::runs::Runs;
use crate::slots::Cut;

/// What one READ moves, or one launch where nothing is read: some layers of some pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// In the order of the local cache's layers.
    pub first_layer: u32,
    /// Consecutive layers.
    pub num_layers: u32,
    /// In run order.
    pub first_page: u32,
    /// Consecutive pages in run order.
    pub num_pages: u32,
}

/// One way to move a request, and what it is expected to cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Way {
    /// Where pages land.
    pub placement: Placement,
    /// How slots are filled, and its index among the planner's cuts; `None` where nothing is staged.
    pub cut: Option<(usize, Cut)>,
    /// Order of the descriptors.
    pub order: Order,
    /// Descriptors before merging, of all chunks.
    pub num_descriptors: u64,
    /// Descriptors after NIXL merged neighbours.
    pub num_merged_descriptors: u64,
    /// Predicted time, conversion included.
    pub seconds: f64,
}

impl Way {
    pub(crate) const fn new(
        placement: Placement,
        order: Order,
        (num_descriptors, num_merged_descriptors): (u64, u64),
        seconds: f64,
    ) -> Self {
        Self { placement, cut: None, order, num_descriptors, num_merged_descriptors, seconds }
    }
}

/// The plan of one request.
#[derive(Clone, Debug)]
pub struct RequestPlan {
    runs: Runs,
    /// At least one; the first is chosen.
    ways: Vec<Way>,
    chosen: Way,
    chunks: Vec<Chunk>,
    num_layers: u32,
    num_bytes: u64,
}

impl RequestPlan {
    pub(crate) fn new(
        runs: Runs,
        chosen: Way,
        ways: Vec<Way>,
        chunks: Vec<Chunk>,
        num_layers: u32,
        num_bytes: u64,
    ) -> Self {
        Self { runs, ways, chosen, chunks, num_layers, num_bytes }
    }

    /// The request's pages.
    pub const fn runs(&self) -> &Runs {
        &self.runs
    }

    /// Where pages land.
    pub const fn placement(&self) -> Placement {
        self.chosen.placement
    }

    /// Order of the descriptors.
    pub const fn order(&self) -> Order {
        self.chosen.order
    }

    /// What was chosen.
    pub const fn chosen(&self) -> &Way {
        &self.chosen
    }

    /// Everything that was possible, fastest first.
    pub fn ways(&self) -> &[Way] {
        &self.ways
    }

    /// The READs (or launches), which tile layers x pages; none for a request without pages.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Bytes of all pages.
    pub const fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Each choice in words, with its predicted time and those that were not taken.
    pub fn explain(&self) -> String {
        let (pages, layers) = (self.runs.num_pages(), self.num_layers);
        let (runs, megabytes) = (self.runs.len(), crate::link::float(self.num_bytes) / 1e6);
        let mut text = format!(
            "pages {pages} x layers {layers} ({megabytes:.1} MB), runs {runs}, chunks {}; chosen is \
             what is predicted to be fastest, conversion included",
            self.chunks.len()
        );
        for (number, way) in self.ways.iter().enumerate() {
            let mark = if number == 0 { "chosen" } else { "not" };
            text.push_str(&format!("\n  {mark}: {way}"));
        }
        text
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.seconds * 1e3;
        let Self { placement, cut, order, num_descriptors, num_merged_descriptors, .. } = self;
        match placement {
            Placement::Direct => write!(f, "direct, no descriptors, {milliseconds:.3} ms"),
            _ => write!(
                f,
                "{}{} {}, {num_descriptors} descriptors, {num_merged_descriptors} after merging, \
                 {milliseconds:.3} ms",
                placement.name(),
                cut.map_or_else(String::new, |(_, cut)| format!(" in slots of {cut},")),
                order.name()
            ),
        }
    }
}
