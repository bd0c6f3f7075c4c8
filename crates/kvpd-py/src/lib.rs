//! `kvpd._kvpd`: the core, exposed to Python. Parsing of arguments and errors live here, decisions do not.

mod arguments;
mod claims;
mod engine;
mod errors;
mod format;
mod permutation;
mod plan;
mod planner;
mod region;
mod runs;
mod verdict;

use pyo3::prelude::*;

#[pymodule]
mod _kvpd {
    #[pymodule_export]
    use crate::claims::Claims;
    #[pymodule_export]
    use crate::engine::{EngineDescription, EngineFacts};
    #[pymodule_export]
    use crate::format::{Component, PageFormat, PlaneSpan};
    #[pymodule_export]
    use crate::permutation::Permutation;
    #[pymodule_export]
    use crate::plan::{DescriptorRows, TransferPlan, slab_bytes};
    #[pymodule_export]
    use crate::planner::{Chunk, Cut, LinkModel, Planner, RequestPlan};
    #[pymodule_export]
    use crate::region::{Region, cache_regions};
    #[pymodule_export]
    use crate::runs::{Run, Runs, runs};
    #[pymodule_export]
    use crate::verdict::{Reason, Verdict, negotiate};

    #[expect(non_upper_case_globals, reason = "the name Python expects")]
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
