//! kvpd's core: what a KV page looks like inside, where pages lie in memory, whether two engines fit,
//! and which descriptors move the bytes.
//!
//! The data flow is the module order: [`format`] (the interior of a page) and [`layout`] (the order of
//! a cache in memory) make [`region`]s; two formats make a [`permutation`]; regions and [`facts`] make an
//! [`engine`] description; two descriptions make a [`verdict`]; block ids make [`runs`]; runs and
//! regions make a [`plan`]; a [`planner`] chooses among plans by what the [`link`] costs; the blocks of
//! what is under way are [`claims`].
//!
//! Numbers come from peers and are hostile. Everything is checked at construction with checked
//! arithmetic; a value that exists is valid, and look-ups on it do not fail. Nothing here panics, does
//! I/O, logs, or knows of Python.

pub mod claims;
pub mod component;
pub mod element;
pub mod engine;
pub mod error;
pub mod facts;
pub mod family;
pub mod format;
pub mod layout;
pub mod link;
pub mod permutation;
pub mod plan;
pub mod planner;
pub mod reason;
pub mod region;
pub mod request;
pub mod rows;
pub mod runs;
pub mod slots;
pub mod units;
pub mod verdict;

pub use claims::Claims;
pub use component::{Component, Tiling};
pub use element::ElementType;
pub use engine::EngineDescription;
pub use error::{DescriptionError, Explain, FormatError, PlanError, RegionError};
pub use facts::{EngineFacts, LayerScales, Scale};
pub use family::{Interior, ShuffledV};
pub use format::{PageFormat, PlaneSpan};
pub use layout::Layout;
pub use link::{LinkModel, Rates};
pub use permutation::Permutation;
pub use plan::{DescriptorRows, TransferPlan, slab_bytes};
pub use planner::{Placement, Planner};
pub use reason::{Code, Reason};
pub use region::{Memory, Region, cache_regions};
pub use request::{Chunk, RequestPlan};
pub use rows::{Order, Row};
pub use runs::{Run, Runs};
pub use slots::{Cut, Slots};
pub use units::{Address, BlockId, Bytes};
pub use verdict::{Outcome, Policy, Verdict, negotiate, negotiate_formats};
