//! `EngineFacts` and `EngineDescription`.

use kvpd::engine::{EngineDescription as CoreDescription, EngineFacts as CoreFacts};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::narrow;
use crate::errors::CoreResult;
use crate::format::PageFormat;
use crate::region::{Region, core_regions, region_tuple};

#[pyclass(module = "kvpd", frozen, eq, hash, from_py_object)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct EngineFacts(CoreFacts);

/// A getter for each fact.
macro_rules! facts {
    ($($field:ident: $kind:ty),* $(,)?) => {
        #[pymethods]
        impl EngineFacts {
            #[new]
            #[pyo3(signature = (*, model, model_dtype, cache_dtype, total_kv_heads, head_dim,
                block_size, layout, backend, release, connector, tp_size = 1, tp_rank = 0,
                num_kv_groups = 1, uses_mla = false))]
            #[expect(clippy::too_many_arguments, reason = "one keyword per fact")]
            fn new(
                model: String,
                model_dtype: String,
                cache_dtype: String,
                total_kv_heads: u64,
                head_dim: u64,
                block_size: u64,
                layout: String,
                backend: String,
                release: String,
                connector: String,
                tp_size: u64,
                tp_rank: u64,
                num_kv_groups: u64,
                uses_mla: bool,
            ) -> CoreResult<Self> {
                let facts = CoreFacts {
                    model,
                    model_dtype,
                    cache_dtype,
                    total_kv_heads: narrow(total_kv_heads),
                    head_dim: narrow(head_dim),
                    block_size: narrow(block_size),
                    layout,
                    backend,
                    release,
                    connector,
                    tp_size: narrow(tp_size),
                    tp_rank: narrow(tp_rank),
                    num_kv_groups: narrow(num_kv_groups),
                    uses_mla,
                };
                Ok(Self(facts.check()?))
            }

            fn __repr__(&self) -> String {
                format!("{:?}", self.0)
            }

            $(#[getter]
            fn $field(&self) -> $kind {
                self.0.$field.clone()
            })*
        }
    };
}
facts! {
    model: String,
    model_dtype: String,
    cache_dtype: String,
    total_kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    layout: String,
    backend: String,
    release: String,
    connector: String,
    tp_size: u32,
    tp_rank: u32,
    num_kv_groups: u32,
    uses_mla: bool,
}

#[pyclass(module = "kvpd", frozen, eq)]
#[derive(PartialEq, Eq)]
pub(crate) struct EngineDescription(pub(crate) CoreDescription);

#[pymethods]
impl EngineDescription {
    #[new]
    fn new(py: Python<'_>, facts: EngineFacts, regions: Vec<Region>) -> CoreResult<Self> {
        let regions = core_regions(regions);
        Ok(Self(py.detach(|| CoreDescription::new(facts.0, regions))?))
    }

    #[getter]
    fn facts(&self) -> EngineFacts {
        EngineFacts(self.0.facts().clone())
    }

    #[getter]
    fn regions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        region_tuple(py, self.0.regions().to_vec())
    }

    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.layers().collect::<Vec<_>>())
    }

    #[getter]
    fn format(&self) -> Option<PageFormat> {
        self.0.format().cloned().map(PageFormat)
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks()
    }

    fn __repr__(&self) -> String {
        let format = self.0.format().map_or("untagged or mixed", |format| format.name());
        let (layers, blocks) = (self.0.layers().count(), self.0.num_blocks());
        format!("<EngineDescription {layers} layers, {blocks} blocks, {format}>")
    }
}
