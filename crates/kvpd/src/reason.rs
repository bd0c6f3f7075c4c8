//! Why a pair is refused: a closed list of codes, each with its field and remedy in one table.

use std::fmt;

macro_rules! codes {
    ($($variant:ident $code:literal $field:literal $remedy:literal;)*) => {
        /// What kept two engines apart.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Code { $(#[doc = $remedy] $variant,)* }

        impl Code {
            /// Every code, in the order in which reasons are listed.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The stable name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $code,)* }
            }

            /// The field that differs.
            pub const fn field(self) -> &'static str {
                match self { $(Self::$variant => $field,)* }
            }

            /// What to change.
            pub const fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy,)* }
            }
        }
    };
}

codes! {
    UntaggedPeer "untagged-peer" "page_format"
        "load kvpd's connector on the peer, so that it publishes its page format";
    UntaggedRegion "untagged-region" "page_format"
        "declare the page format of the backend that owns the region";
    ElementType "element-type" "dtype"
        "run both engines with one KV cache element type; bytes of one are not values of the other";
    Release "release" "release"
        "run one release on both sides; builds of it (after '+') may differ";
    Connector "connector" "connector"
        "run one connector version, in one mode, on both sides";
    Speculative "speculative" "speculative"
        "speculate with one method and one draft model on both sides";
    Model "model" "model"
        "serve one model by one name on both sides; where both load local safetensors files, weights are compared in place of names";
    ModelConfig "model-config" "model_config"
        "serve one model with one configuration on both sides: these fields decide what K and V are";
    Quantization "quantization" "quantization"
        "quantise the weights alike on both sides; where they differ on purpose, set allow_other_weights on the reader";
    ModelWeights "model-weights" "model_weights"
        "load one revision of one model on both sides; where weights differ on purpose, set allow_other_weights on the reader";
    ModelUnproved "model-unproved" "model_weights"
        "only names are compared where weights or configuration are not known on both sides; load local safetensors files to have them compared (the log of the engine that does not know says why)";
    ModelDtype "model-dtype" "model_dtype"
        "load the model with one dtype on both sides";
    CacheDtype "cache-dtype" "cache_dtype"
        "keep one KV cache element type on both sides (--kv-cache-dtype)";
    ScalesDiffer "scales-differ" "scales"
        "load one checkpoint with one set of KV scales on both sides: equal bytes stand for other values here";
    ScalesUnknown "scales-unknown" "scales"
        "keep a KV cache that is not quantised, or one whose scales are fixed when the weights are loaded";
    TotalKvHeads "total-kv-heads" "total_kv_heads"
        "serve one model on both sides";
    HeadDim "head-dim" "head_dim"
        "serve one model on both sides";
    HeadsNotDivisible "heads-not-divisible" "tp_size"
        "choose a tensor-parallel size that divides the KV heads, or is a multiple of them";
    TpSize "tp-size" "tp_size"
        "use one tensor-parallel size on both sides: a page of another size cannot be cut by bytes";
    TpRank "tp-rank" "tp_rank"
        "pair each rank with the same rank of the peer";
    PpSize "pp-size" "pp_size"
        "run both sides without pipeline parallelism: which stage holds which layers is not compared";
    BlockSize "block-size" "block_size"
        "use one block size on both sides";
    HybridManager "hybrid-manager" "hybrid_manager"
        "set --disable-hybrid-kv-cache-manager on both sides or on neither; a connector that is one of several may have switched the manager off";
    KvGroups "kv-groups" "num_kv_groups"
        "serve one model with the same kinds of layers on both sides";
    Layers "layers" "layers"
        "serve one model with the same layers on both sides";
    LayerOrder "layer-order" "layers"
        "register the layers in one order on both sides";
    Heads "heads" "heads"
        "give both ranks the same KV heads";
    Components "components" "page_format"
        "use backends that keep the same tensors in a page";
    PagesHeldDifferently "pages-held-differently" "regions"
        "use one KV cache layout on both sides, so that pages are held in the same regions";
    MixedFormats "mixed-formats" "page_format"
        "use one page format for all layers";
    ConversionDisabled "conversion-disabled" "page_format"
        "enable page format conversion on the reader, or use one page format on both sides";
    PairOutOfScope "pair-out-of-scope" "page_format"
        "keep standard HNC pages on the side that owns the pages and AITER shuffled ones on the reader, or use one page format";
    ElementTypeOutOfScope "element-type-out-of-scope" "dtype"
        "convert bfloat16 or float16 pages, or use one page format on both sides";
    BlockSizeOutOfScope "block-size-out-of-scope" "block_size"
        "convert pages of 16 or 32 tokens, or use one page format on both sides";
    LocalHoldingOutOfScope "local-holding-out-of-scope" "layout"
        "keep the reader's shuffled pages in layout LHBNC: a K region and a V region a layer";
    RemoteHoldingOutOfScope "remote-holding-out-of-scope" "layout"
        "keep the owner's standard pages whole, one region a layer (layout LBHNC)";
    Mla "mla" "uses_mla"
        "use one page format on both sides: MLA pages are not converted";
    Hybrid "hybrid" "num_kv_groups"
        "set --disable-hybrid-kv-cache-manager on both sides (models of attention layers alone), or use one page format on both sides: pages of several KV groups are not converted";
}

/// One reason: a code, and both values or the one that the sides share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reason {
    /// What is wrong.
    pub code: Code,
    /// The reader's value.
    pub local: String,
    /// The peer's value.
    pub remote: String,
    /// The sides agree, and what they agree on is what is wrong: both texts are that value.
    pub is_shared: bool,
}

impl Reason {
    /// Values that differ; so do their texts.
    pub(crate) fn differing(
        code: Code,
        local: impl fmt::Display,
        remote: impl fmt::Display,
    ) -> Self {
        Self { code, local: local.to_string(), remote: remote.to_string(), is_shared: false }
    }

    /// One value of both sides.
    pub(crate) fn shared(code: Code, value: impl fmt::Display) -> Self {
        let value = value.to_string();
        Self { code, local: value.clone(), remote: value, is_shared: true }
    }

    /// Values of which either side's, or that of both, is what is wrong.
    pub(crate) fn either<T: fmt::Display + PartialEq>(code: Code, local: T, remote: T) -> Self {
        if local == remote {
            Self::shared(code, local)
        } else {
            Self::differing(code, local, remote)
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (code, field, remedy) = (self.code.name(), self.code.field(), self.code.remedy());
        let (local, remote) = (&self.local, &self.remote);
        if self.is_shared {
            write!(f, "{code}: {field} is {local} on both sides; {remedy}")
        } else {
            write!(f, "{code}: {field} is {local} here and {remote} there; {remedy}")
        }
    }
}
