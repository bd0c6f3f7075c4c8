//! `EngineFacts` and `EngineDescription`.

use std::collections::BTreeMap;

use kvpd::{EngineDescription as CoreDescription, EngineFacts as CoreFacts, LayerScales, Scale};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::narrow;
use crate::errors::CoreResult;
use crate::format::PageFormat;
use crate::region::{Region, core_regions, region_tuple};

#[pyclass(module = "kvpd", frozen, eq, hash, from_py_object)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct EngineFacts(CoreFacts);

/// Of one layer: its name, and the scales of K and of V.
type ScalesOfLayer = (String, Vec<f64>, Vec<f64>);

/// A getter for each fact.
macro_rules! facts {
    ($($field:ident: $kind:ty),* $(,)?) => {
        #[pymethods]
        impl EngineFacts {
            #[new]
            #[pyo3(signature = (*, model, model_dtype, cache_dtype, total_kv_heads, head_dim,
                block_size, layout, backend, release, connector, model_config = None,
                model_weights = None, quantization = "none".to_owned(), cache_dtype_setting = None,
                quantised_cache = false, scales = None, speculative = "none".to_owned(),
                hybrid_manager = false, tp_size = 1, tp_rank = 0, pp_size = 1, num_kv_groups = 1,
                uses_mla = false),
                text_signature = "(*, model, model_dtype, cache_dtype, total_kv_heads, head_dim, \
                block_size, layout, backend, release, connector, model_config=None, \
                model_weights=None, quantization='none', cache_dtype_setting=None, \
                quantised_cache=False, scales=None, speculative='none', hybrid_manager=False, \
                tp_size=1, tp_rank=0, pp_size=1, num_kv_groups=1, uses_mla=False)")]
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
                model_config: Option<BTreeMap<String, String>>,
                model_weights: Option<String>,
                quantization: String,
                cache_dtype_setting: Option<String>,
                quantised_cache: bool,
                scales: Option<Vec<ScalesOfLayer>>,
                speculative: String,
                hybrid_manager: bool,
                tp_size: u64,
                tp_rank: u64,
                pp_size: u64,
                num_kv_groups: u64,
                uses_mla: bool,
            ) -> CoreResult<Self> {
                let of_layer = |(layer, k, v): ScalesOfLayer| LayerScales::new(layer, &k, &v);
                let of_layers =
                    |layers: Vec<ScalesOfLayer>| layers.into_iter().map(of_layer).collect();
                let facts = CoreFacts {
                    model,
                    model_config,
                    model_weights,
                    quantization,
                    model_dtype,
                    cache_dtype_setting: cache_dtype_setting
                        .unwrap_or_else(|| cache_dtype.clone()),
                    cache_dtype,
                    quantised_cache,
                    scales: scales.map(of_layers).transpose()?,
                    total_kv_heads: narrow(total_kv_heads),
                    head_dim: narrow(head_dim),
                    block_size: narrow(block_size),
                    layout,
                    backend,
                    release,
                    connector,
                    speculative,
                    hybrid_manager,
                    tp_size: narrow(tp_size),
                    tp_rank: narrow(tp_rank),
                    pp_size: narrow(pp_size),
                    num_kv_groups: narrow(num_kv_groups),
                    uses_mla,
                };
                Ok(Self(facts.check()?))
            }

            #[getter]
            fn scales<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
                let Some(layers) = &self.0.scales else { return Ok(None) };
                let numbers =
                    |scales: &[Scale]| PyTuple::new(py, scales.iter().map(|scale| scale.get()));
                let layers = layers
                    .iter()
                    .map(|of| Ok((&of.layer, numbers(&of.k)?, numbers(&of.v)?)))
                    .collect::<PyResult<Vec<_>>>()?;
                Ok(Some(PyTuple::new(py, layers)?))
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
    model_config: Option<BTreeMap<String, String>>,
    model_weights: Option<String>,
    quantization: String,
    model_dtype: String,
    cache_dtype: String,
    cache_dtype_setting: String,
    quantised_cache: bool,
    total_kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    layout: String,
    backend: String,
    release: String,
    connector: String,
    speculative: String,
    hybrid_manager: bool,
    tp_size: u32,
    tp_rank: u32,
    pp_size: u32,
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
