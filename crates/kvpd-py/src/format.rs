//! `PageFormat`, `Component`, `PlaneSpan`.

use kvpd::component::{Component as CoreComponent, Tiling};
use kvpd::family::Shape;
use kvpd::format::{PageFormat as CoreFormat, PlaneSpan as CoreSpan};
use kvpd::{FormatError, Interior, ShuffledV};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{Dtype, InteriorWord, VWord, narrow};
use crate::errors::CoreResult;

#[pyclass(module = "kvpd", frozen, eq, hash, from_py_object)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Component(CoreComponent);

#[pymethods]
impl Component {
    #[new]
    #[pyo3(signature = (name, *, dtype, heads, tokens, channels, plane, base_bytes,
        head_stride_bytes, token_tile, token_tile_stride_bytes, token_stride_bytes,
        channel_tile, channel_tile_stride_bytes, channel_stride_bytes))]
    #[expect(clippy::too_many_arguments, reason = "one keyword per parameter of the formula")]
    fn new(
        name: &str,
        dtype: Dtype,
        heads: u64,
        tokens: u64,
        channels: u64,
        plane: u64,
        base_bytes: u64,
        head_stride_bytes: u64,
        token_tile: u64,
        token_tile_stride_bytes: u64,
        token_stride_bytes: u64,
        channel_tile: u64,
        channel_tile_stride_bytes: u64,
        channel_stride_bytes: u64,
    ) -> CoreResult<Self> {
        let axis = |field, extent, tile, tile_stride, stride| {
            Tiling::new(field, narrow(extent), narrow(tile), tile_stride, stride)
        };
        Ok(Self(CoreComponent::new(
            name,
            dtype.0,
            narrow(plane),
            base_bytes,
            axis("heads", heads, heads.max(1), 0, head_stride_bytes)?,
            axis("tokens", tokens, token_tile, token_tile_stride_bytes, token_stride_bytes)?,
            axis(
                "channels",
                channels,
                channel_tile,
                channel_tile_stride_bytes,
                channel_stride_bytes,
            )?,
        )?))
    }

    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.element().name()
    }

    #[getter]
    fn element_bytes(&self) -> u32 {
        self.0.element().bytes()
    }

    #[getter]
    fn heads(&self) -> u32 {
        self.0.heads().extent()
    }

    #[getter]
    fn tokens(&self) -> u32 {
        self.0.tokens().extent()
    }

    #[getter]
    fn channels(&self) -> u32 {
        self.0.channels().extent()
    }

    #[getter]
    fn plane(&self) -> u32 {
        self.0.plane()
    }

    #[getter]
    fn base_bytes(&self) -> u64 {
        self.0.base_bytes()
    }

    #[getter]
    fn head_stride_bytes(&self) -> u64 {
        self.0.heads().stride_bytes()
    }

    #[getter]
    fn token_tile(&self) -> u32 {
        self.0.tokens().tile()
    }

    #[getter]
    fn token_tile_stride_bytes(&self) -> u64 {
        self.0.tokens().tile_stride_bytes()
    }

    #[getter]
    fn token_stride_bytes(&self) -> u64 {
        self.0.tokens().stride_bytes()
    }

    #[getter]
    fn channel_tile(&self) -> u32 {
        self.0.channels().tile()
    }

    #[getter]
    fn channel_tile_stride_bytes(&self) -> u64 {
        self.0.channels().tile_stride_bytes()
    }

    #[getter]
    fn channel_stride_bytes(&self) -> u64 {
        self.0.channels().stride_bytes()
    }

    fn __repr__(&self) -> String {
        let (h, n, d) = (self.heads(), self.tokens(), self.channels());
        format!(
            "Component({:?}, {}, [{h}, {n}, {d}] in plane {})",
            self.name(),
            self.dtype(),
            self.plane()
        )
    }
}

#[pyclass(module = "kvpd", frozen, eq, hash, get_all, from_py_object)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PlaneSpan {
    plane: u32,
    start_bytes: u64,
    num_bytes: u64,
}

impl From<CoreSpan> for PlaneSpan {
    fn from(span: CoreSpan) -> Self {
        let CoreSpan { plane, start_bytes, num_bytes } = span;
        Self { plane, start_bytes, num_bytes }
    }
}

impl From<PlaneSpan> for CoreSpan {
    fn from(span: PlaneSpan) -> Self {
        let PlaneSpan { plane, start_bytes, num_bytes } = span;
        Self { plane, start_bytes, num_bytes }
    }
}

#[pymethods]
impl PlaneSpan {
    #[new]
    fn new(plane: u64, start_bytes: u64, num_bytes: u64) -> Self {
        Self { plane: narrow(plane), start_bytes, num_bytes }
    }

    fn __repr__(&self) -> String {
        let Self { plane, start_bytes, num_bytes } = self;
        format!("PlaneSpan(plane={plane}, start_bytes={start_bytes}, num_bytes={num_bytes})")
    }
}

/// A tuple of spans.
pub(crate) fn spans<'py>(py: Python<'py>, spans: &[CoreSpan]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, spans.iter().copied().map(PlaneSpan::from))
}

#[pyclass(module = "kvpd", frozen, eq, hash, from_py_object)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PageFormat(pub(crate) CoreFormat);

impl PageFormat {
    /// A constructor's own work visits every element of a page, so it runs without the GIL.
    fn build(
        py: Python<'_>,
        extents: [u64; 3],
        dtype: &Dtype,
        make: impl FnOnce(Shape) -> Result<CoreFormat, FormatError> + Send,
    ) -> CoreResult<Self> {
        let [heads, tokens, head_dim] = extents.map(narrow);
        let shape = Shape::new(heads, tokens, head_dim, dtype.0)?;
        Ok(Self(py.detach(|| make(shape))?))
    }
}

#[pymethods]
impl PageFormat {
    #[staticmethod]
    #[pyo3(signature = (*, heads, tokens, head_dim, dtype, interior = InteriorWord(Interior::Hnc)),
        text_signature = "(*, heads, tokens, head_dim, dtype, interior='HNC')")]
    fn standard(
        py: Python<'_>,
        heads: u64,
        tokens: u64,
        head_dim: u64,
        dtype: Dtype,
        interior: InteriorWord,
    ) -> CoreResult<Self> {
        Self::build(py, [heads, tokens, head_dim], &dtype, |shape| {
            CoreFormat::standard(shape, interior.0)
        })
    }

    #[staticmethod]
    #[pyo3(signature = (*, heads, tokens, head_dim, dtype, interior = InteriorWord(Interior::Hnc)),
        text_signature = "(*, heads, tokens, head_dim, dtype, interior='HNC')")]
    fn split_kv(
        py: Python<'_>,
        heads: u64,
        tokens: u64,
        head_dim: u64,
        dtype: Dtype,
        interior: InteriorWord,
    ) -> CoreResult<Self> {
        Self::build(py, [heads, tokens, head_dim], &dtype, |shape| {
            CoreFormat::split_kv(shape, interior.0)
        })
    }

    #[staticmethod]
    #[pyo3(signature = (*, heads, tokens, head_dim, dtype, v = VWord(ShuffledV::Tiled)),
        text_signature = "(*, heads, tokens, head_dim, dtype, v='tiled')")]
    fn aiter_shuffle(
        py: Python<'_>,
        heads: u64,
        tokens: u64,
        head_dim: u64,
        dtype: Dtype,
        v: VWord,
    ) -> CoreResult<Self> {
        Self::build(py, [heads, tokens, head_dim], &dtype, |shape| {
            CoreFormat::aiter_shuffle(shape, v.0)
        })
    }

    #[staticmethod]
    #[pyo3(signature = (family, components, plane_bytes, padding = Vec::new()),
        text_signature = "(family, components, plane_bytes, padding=())")]
    fn from_components(
        py: Python<'_>,
        family: &str,
        components: Vec<Component>,
        plane_bytes: Vec<u64>,
        padding: Vec<PlaneSpan>,
    ) -> CoreResult<Self> {
        let components = components.into_iter().map(|component| component.0).collect();
        let padding = padding.into_iter().map(CoreSpan::from).collect();
        Ok(Self(py.detach(|| CoreFormat::new(family, components, plane_bytes, padding))?))
    }

    #[getter]
    fn family(&self) -> &str {
        self.0.family()
    }

    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    #[getter]
    fn digest(&self) -> &str {
        self.0.digest()
    }

    #[getter]
    fn components<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.components().iter().cloned().map(Component))
    }

    #[getter]
    fn padding<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        spans(py, self.0.padding())
    }

    #[getter]
    fn plane_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.plane_bytes())
    }

    #[getter]
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes()
    }

    #[getter]
    fn tokens(&self) -> u32 {
        self.0.tokens()
    }

    fn offset(
        &self,
        component: &str,
        head: u64,
        token: u64,
        channel: u64,
    ) -> CoreResult<(u32, u64)> {
        Ok(self.0.offset(component, narrow(head), narrow(token), narrow(channel))?)
    }

    fn __str__(&self) -> &str {
        self.0.name()
    }

    fn __repr__(&self) -> String {
        format!("<PageFormat {} {:.12}>", self.0.name(), self.0.digest())
    }
}
