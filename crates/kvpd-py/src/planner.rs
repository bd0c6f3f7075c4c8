//! `LinkModel`, `Planner`, `RequestPlan`, `Chunk`.

use std::sync::Arc;

use kvpd::planner::{Options, Planner as CorePlanner};
use kvpd::{LinkModel as CoreLink, Memory, Placement, Rates, RequestPlan as CoreRequest};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{MemoryWord, PlacementWord, narrow};
use crate::errors::{CoreError, CoreResult};
use crate::plan::{DescriptorRows, IdArrays};
use crate::region::{Region, core_regions, region_tuple};
use crate::runs::Runs;

#[pyclass(module = "kvpd", frozen, eq)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct LinkModel(CoreLink);

#[pymethods]
impl LinkModel {
    #[new]
    #[pyo3(signature = (memory = MemoryWord(Memory::Vram), *, bytes_per_second = None,
        merged_bytes_per_second = None, seconds_per_descriptor = None, seconds_per_chunk = None,
        convert_bytes_per_second = None, direct_bytes_per_second = None),
        text_signature = "(memory='vram', *, bytes_per_second=None, merged_bytes_per_second=None, \
            seconds_per_descriptor=None, seconds_per_chunk=None, convert_bytes_per_second=None, \
            direct_bytes_per_second=None)")]
    fn new(
        memory: MemoryWord,
        bytes_per_second: Option<f64>,
        merged_bytes_per_second: Option<f64>,
        seconds_per_descriptor: Option<f64>,
        seconds_per_chunk: Option<f64>,
        convert_bytes_per_second: Option<f64>,
        direct_bytes_per_second: Option<f64>,
    ) -> CoreResult<Self> {
        let defaults = Rates::of(memory.0);
        let merged = merged_bytes_per_second.or(bytes_per_second);
        let direct = direct_bytes_per_second.or(bytes_per_second);
        let or = |number: Option<f64>, default: f64| number.unwrap_or(default);
        Ok(Self(CoreLink::new(Rates {
            bytes_per_second: or(bytes_per_second, defaults.bytes_per_second),
            merged_bytes_per_second: or(merged, defaults.merged_bytes_per_second),
            seconds_per_descriptor: or(seconds_per_descriptor, defaults.seconds_per_descriptor),
            seconds_per_chunk: or(seconds_per_chunk, defaults.seconds_per_chunk),
            convert_bytes_per_second: or(
                convert_bytes_per_second,
                defaults.convert_bytes_per_second,
            ),
            direct_bytes_per_second: or(direct, defaults.direct_bytes_per_second),
        })?))
    }

    #[getter]
    fn bytes_per_second(&self) -> f64 {
        self.0.rates().bytes_per_second
    }

    #[getter]
    fn merged_bytes_per_second(&self) -> f64 {
        self.0.rates().merged_bytes_per_second
    }

    #[getter]
    fn seconds_per_descriptor(&self) -> f64 {
        self.0.rates().seconds_per_descriptor
    }

    #[getter]
    fn seconds_per_chunk(&self) -> f64 {
        self.0.rates().seconds_per_chunk
    }

    #[getter]
    fn convert_bytes_per_second(&self) -> f64 {
        self.0.rates().convert_bytes_per_second
    }

    #[getter]
    fn direct_bytes_per_second(&self) -> f64 {
        self.0.rates().direct_bytes_per_second
    }

    #[getter]
    fn best_descriptor_bytes(&self) -> f64 {
        self.0.best_descriptor_bytes()
    }

    fn __repr__(&self) -> String {
        format!("LinkModel({})", self.0)
    }
}

#[pyclass(module = "kvpd", frozen, eq, hash, get_all)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Chunk {
    first_layer: u32,
    num_layers: u32,
    first_page: u32,
    num_pages: u32,
}

impl From<kvpd::Chunk> for Chunk {
    fn from(chunk: kvpd::Chunk) -> Self {
        let kvpd::Chunk { first_layer, num_layers, first_page, num_pages } = chunk;
        Self { first_layer, num_layers, first_page, num_pages }
    }
}

#[pymethods]
impl Chunk {
    fn __repr__(&self) -> String {
        let Self { first_layer, num_layers, first_page, num_pages } = self;
        format!(
            "Chunk(first_layer={first_layer}, num_layers={num_layers}, first_page={first_page}, \
             num_pages={num_pages})"
        )
    }
}

#[pyclass(module = "kvpd", frozen, eq, hash, get_all)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Cut {
    group_layers: u32,
    slot_pages: u32,
    num_groups: u32,
}

#[pymethods]
impl Cut {
    fn __repr__(&self) -> String {
        let Self { group_layers, slot_pages, num_groups } = self;
        format!(
            "Cut(group_layers={group_layers}, slot_pages={slot_pages}, num_groups={num_groups})"
        )
    }
}

#[pyclass(module = "kvpd", frozen)]
pub(crate) struct Planner(Arc<CorePlanner>);

#[pymethods]
impl Planner {
    #[new]
    #[pyo3(signature = (target, source, *, link, max_pages, slab = None, num_slots = 4,
        direct = false, in_place = true))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        target: Vec<Region>,
        source: Vec<Region>,
        link: &LinkModel,
        max_pages: u64,
        slab: Option<Region>,
        num_slots: u64,
        direct: bool,
        in_place: bool,
    ) -> CoreResult<Self> {
        let (target, source) = (core_regions(target), core_regions(source));
        let options = Options {
            link: link.0,
            max_pages: narrow(max_pages),
            slab: slab.map(|slab| slab.0),
            num_slots: narrow(num_slots),
            direct,
            in_place,
        };
        Ok(Self(Arc::new(py.detach(|| CorePlanner::new(&target, &source, options))?)))
    }

    #[getter]
    fn placements(&self) -> Vec<&'static str> {
        self.0.placements().into_iter().map(Placement::name).collect()
    }

    #[getter]
    fn converts(&self) -> bool {
        self.0.converts()
    }

    #[getter]
    fn cuts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let cuts = self.0.slots().map_or(&[][..], kvpd::Slots::cuts);
        let num_layers = self.0.num_layers();
        PyTuple::new(
            py,
            cuts.iter().map(|cut| Cut {
                group_layers: cut.group_layers(),
                slot_pages: cut.slot_pages(),
                num_groups: cut.num_groups(num_layers),
            }),
        )
    }

    #[getter]
    fn num_slots(&self) -> u32 {
        self.0.slots().map_or(0, kvpd::Slots::num_slots)
    }

    #[getter]
    fn slot_stride_pages(&self) -> u32 {
        self.0.slots().map_or(0, kvpd::Slots::stride_pages)
    }

    #[getter]
    fn slot_bytes(&self) -> u64 {
        self.0.slots().map_or(0, kvpd::Slots::slot_bytes)
    }

    fn rows(&self, placement: PlacementWord) -> CoreResult<DescriptorRows> {
        Ok(DescriptorRows(self.0.rows(placement.0)?.clone()))
    }

    fn slab_regions<'py>(
        &self,
        py: Python<'py>,
        cut: usize,
        group: u64,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let regions = self.0.slab_regions(cut, narrow(group));
        region_tuple(py, regions.map_err(CoreError::from)?)
    }

    fn plan(&self, runs: &Runs) -> CoreResult<RequestPlan> {
        Ok(RequestPlan { request: self.0.plan(&runs.0)?, planner: Arc::clone(&self.0) })
    }

    fn explain(&self) -> String {
        self.0.explain()
    }
}

#[pyclass(module = "kvpd", frozen)]
pub(crate) struct RequestPlan {
    request: CoreRequest,
    /// The one that made it: ids of another planner's rows would name other memory.
    planner: Arc<CorePlanner>,
}

#[pymethods]
impl RequestPlan {
    #[getter]
    fn placement(&self) -> &'static str {
        self.request.placement().name()
    }

    #[getter]
    fn cut(&self) -> usize {
        self.request.chosen().cut.map_or(0, |(number, _)| number)
    }

    #[getter]
    fn order(&self) -> &'static str {
        self.request.order().name()
    }

    #[getter]
    fn chunks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.request.chunks().iter().copied().map(Chunk::from))
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.request.runs().num_pages()
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.request.num_bytes()
    }

    #[getter]
    fn num_descriptors(&self) -> u64 {
        self.request.chosen().num_descriptors
    }

    #[getter]
    fn num_merged_descriptors(&self) -> u64 {
        self.request.chosen().num_merged_descriptors
    }

    #[getter]
    fn predicted_seconds(&self) -> f64 {
        self.request.chosen().seconds
    }

    #[pyo3(signature = (chunk, slot = 0))]
    fn descriptor_ids<'py>(
        &self,
        py: Python<'py>,
        chunk: usize,
        slot: u64,
    ) -> PyResult<IdArrays<'py>> {
        let (planner, request) = (&self.planner, &self.request);
        let count = planner.num_chunk_ids(request, chunk).map_err(CoreError::from)?;
        let arrays = (PyArray1::zeros(py, count, false), PyArray1::zeros(py, count, false));
        {
            let (mut local, mut remote) = (arrays.0.try_readwrite()?, arrays.1.try_readwrite()?);
            let (local, remote) = (local.as_slice_mut()?, remote.as_slice_mut()?);
            py.detach(|| planner.write_chunk_ids(request, chunk, narrow(slot), local, remote))
                .map_err(CoreError::from)?;
        }
        Ok(arrays)
    }

    fn explain(&self) -> String {
        self.request.explain()
    }
}
