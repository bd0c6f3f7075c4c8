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
        "run one connector version on both sides";
    Model "model" "model"
        "serve one model on both sides";
    ModelDtype "model-dtype" "model_dtype"
        "load the model with one dtype on both sides";
    CacheDtype "cache-dtype" "cache_dtype"
        "set one KV cache dtype on both sides";
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
    BlockSize "block-size" "block_size"
        "use one block size on both sides";
    KvGroups "kv-groups" "num_kv_groups"
        "use one setting of the hybrid KV cache manager on both sides";
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
        "enable page format conversion on the decoder, or use one page format on both sides";
    PairOutOfScope "pair-out-of-scope" "page_format"
        "prefill with standard HNC pages and decode with AITER shuffled pages, or use one page format";
    ElementTypeOutOfScope "element-type-out-of-scope" "dtype"
        "convert bfloat16 or float16 pages, or use one page format on both sides";
    BlockSizeOutOfScope "block-size-out-of-scope" "block_size"
        "convert pages of 16 or 32 tokens, or use one page format on both sides";
    LocalHoldingOutOfScope "local-holding-out-of-scope" "layout"
        "keep shuffled pages in layout LHBNC: a K region and a V region a layer";
    RemoteHoldingOutOfScope "remote-holding-out-of-scope" "layout"
        "keep standard pages whole, one region a layer (layout LBHNC)";
    Mla "mla" "uses_mla"
        "use one page format on both sides: MLA pages are not converted";
    Hybrid "hybrid" "num_kv_groups"
        "use one page format on both sides: hybrid models are not converted";
}

/// One reason: a code and both values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reason {
    /// What differs.
    pub code: Code,
    /// The reader's value.
    pub local: String,
    /// The peer's value.
    pub remote: String,
}

impl Reason {
    pub(crate) fn new(code: Code, local: impl fmt::Display, remote: impl fmt::Display) -> Self {
        Self { code, local: local.to_string(), remote: remote.to_string() }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (code, field, remedy) = (self.code.name(), self.code.field(), self.code.remedy());
        write!(f, "{code}: {field} is {} here and {} there; {remedy}", self.local, self.remote)
    }
}
