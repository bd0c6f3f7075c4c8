//! What one rank says about itself beside its regions: what has to agree with a peer's, and what a
//! mismatch is explained with.

use std::collections::{BTreeMap, HashSet};

use crate::error::DescriptionError;
use crate::units::{MAX_MODEL_FIELD_BYTES, MAX_MODEL_FIELDS, MAX_NAME_BYTES, MAX_SCALES};

/// Printable, not empty, and short enough to keep.
pub(crate) fn is_plain_name(text: &str) -> bool {
    is_plain_text(text, MAX_NAME_BYTES)
}

fn is_plain_text(text: &str, max_bytes: usize) -> bool {
    !text.is_empty() && text.len() <= max_bytes && !text.chars().any(char::is_control)
}

/// A factor by which quantised values are multiplied when they are read: finite and positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scale(u64);

impl Scale {
    /// The number.
    pub const fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// The scales of one layer's quantised cache: one each for the layer, or one for each head.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerScales {
    /// Name of the layer.
    pub layer: String,
    /// Of K.
    pub k: Vec<Scale>,
    /// Of V.
    pub v: Vec<Scale>,
}

impl LayerScales {
    /// # Errors
    /// A scale is not finite or not positive.
    pub fn new(layer: String, k: &[f64], v: &[f64]) -> Result<Self, DescriptionError> {
        let scales = |values: &[f64]| {
            let scale = |&value: &f64| {
                if value.is_finite() && value > 0.0 {
                    Ok(Scale(value.to_bits()))
                } else {
                    Err(DescriptionError::ScaleValue {
                        layer: layer.clone(),
                        got: value.to_string(),
                    })
                }
            };
            values.iter().map(scale).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self { k: scales(k)?, v: scales(v)?, layer })
    }
}

/// Facts that must agree, or that a mismatch is explained with. What is `None` is unknown, and an
/// unknown is never equal to anything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EngineFacts {
    /// Model name or path. Compared only where weights or configuration are unknown on a side.
    pub model: String,
    /// The fields of the model's configuration that decide what K and V are, each as canonical text.
    pub model_config: Option<BTreeMap<String, String>>,
    /// A digest of samples of the weights that were loaded.
    pub model_weights: Option<String>,
    /// How weights are quantised; "none" where they are not.
    pub quantization: String,
    /// The model's dtype.
    pub model_dtype: String,
    /// The cache's element type, resolved ("bfloat16", "float8_e4m3fn", ...).
    pub cache_dtype: String,
    /// The setting that it was resolved from ("auto", "fp8", ...); never compared.
    pub cache_dtype_setting: String,
    /// Whether cached values are quantised, and scales say what they stand for.
    pub quantised_cache: bool,
    /// The scales of each layer of a quantised cache.
    pub scales: Option<Vec<LayerScales>>,
    /// KV heads of the whole model.
    pub total_kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Name of the cache's layout.
    pub layout: String,
    /// Name of the attention backend; never compared.
    pub backend: String,
    /// Release of the engine; what follows a '+' (a build) is not compared.
    pub release: String,
    /// Name, version and mode of the connector.
    pub connector: String,
    /// How tokens are speculated, where the draft model keeps a cache of its own; "none" otherwise.
    pub speculative: String,
    /// Whether layers of different kinds have block tables of their own. Compared only where there
    /// are several KV groups.
    pub hybrid_manager: bool,
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// This rank.
    pub tp_rank: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// Groups of layers that have block tables of their own; more than one in a hybrid model.
    pub num_kv_groups: u32,
    /// Whether the model's attention keeps a latent instead of K and V.
    pub uses_mla: bool,
}

impl EngineFacts {
    /// Checks that texts are plain, numbers in range and lists bounded.
    ///
    /// # Errors
    /// The first fact that is not.
    pub fn check(self) -> Result<Self, DescriptionError> {
        let texts = [
            ("model", &self.model),
            ("quantization", &self.quantization),
            ("model_dtype", &self.model_dtype),
            ("cache_dtype", &self.cache_dtype),
            ("cache_dtype_setting", &self.cache_dtype_setting),
            ("layout", &self.layout),
            ("backend", &self.backend),
            ("release", &self.release),
            ("connector", &self.connector),
            ("speculative", &self.speculative),
        ];
        let weights = self.model_weights.iter().map(|text| ("model_weights", text));
        for (field, text) in texts.into_iter().chain(weights) {
            if !is_plain_name(text) {
                return Err(DescriptionError::Text { field });
            }
        }
        let counts = [
            ("total_kv_heads", self.total_kv_heads),
            ("head_dim", self.head_dim),
            ("block_size", self.block_size),
            ("tp_size", self.tp_size),
            ("pp_size", self.pp_size),
            ("num_kv_groups", self.num_kv_groups),
        ];
        let max = 1 << 16;
        for (field, got) in counts {
            if got == 0 || got > max {
                return Err(DescriptionError::OutOfRange {
                    field,
                    got: got.into(),
                    max: max.into(),
                });
            }
        }
        if self.tp_rank >= self.tp_size {
            let (got, max) = (self.tp_rank.into(), self.tp_size.saturating_sub(1).into());
            return Err(DescriptionError::OutOfRange { field: "tp_rank", got, max });
        }
        self.check_model_config()?;
        self.check_scales()?;
        Ok(self)
    }

    fn check_model_config(&self) -> Result<(), DescriptionError> {
        let Some(fields) = &self.model_config else { return Ok(()) };
        within("model_config", fields.len(), MAX_MODEL_FIELDS)?;
        let plain = |(name, value): (&String, &String)| {
            is_plain_name(name) && is_plain_text(value, MAX_MODEL_FIELD_BYTES)
        };
        if fields.iter().all(plain) {
            Ok(())
        } else {
            Err(DescriptionError::Text { field: "model_config" })
        }
    }

    fn check_scales(&self) -> Result<(), DescriptionError> {
        let Some(layers) = &self.scales else { return Ok(()) };
        if !self.quantised_cache {
            return Err(DescriptionError::ScalesOfPlainCache);
        }
        let numbers = layers.iter().map(|scales| scales.k.len().saturating_add(scales.v.len()));
        within("scales", numbers.fold(0, usize::saturating_add), MAX_SCALES)?;
        let mut seen = HashSet::new();
        for LayerScales { layer, k, v } in layers {
            if !is_plain_name(layer) {
                return Err(DescriptionError::Text { field: "scales" });
            }
            if k.is_empty() || v.is_empty() || !seen.insert(layer) {
                return Err(DescriptionError::LayerScales { layer: layer.clone() });
            }
        }
        Ok(())
    }

    /// The release without the build's local suffix.
    pub fn public_release(&self) -> &str {
        self.release.split('+').next().unwrap_or(&self.release)
    }

    /// Whether every rank has the same number of KV heads, or every head the same number of ranks.
    pub fn heads_divide(&self) -> bool {
        let (heads, ranks) = (self.total_kv_heads, self.tp_size);
        heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads)
    }
}

fn within(field: &'static str, got: usize, max: usize) -> Result<(), DescriptionError> {
    let wide = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    if got > max {
        return Err(DescriptionError::OutOfRange { field, got: wide(got), max: wide(max) });
    }
    Ok(())
}
