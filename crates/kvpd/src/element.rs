//! Element types. Two types that share a width are still two types: `float8_e4m3fn` and
//! `float8_e4m3fnuz` give every byte another value, so a raw copy between them halves it.

use std::fmt;
use std::str::FromStr;

use crate::error::FormatError;

macro_rules! element_types {
    ($($variant:ident $name:literal $bytes:literal $doc:literal;)*) => {
        /// The type of a component's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ElementType { $(#[doc = $doc] $variant,)* }

        impl ElementType {
            /// Every element type.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name that torch uses.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bytes per element.
            pub const fn bytes(self) -> u32 {
                match self { $(Self::$variant => $bytes,)* }
            }
        }
    };
}

element_types! {
    BFloat16 "bfloat16" 2 "bfloat16";
    Float16 "float16" 2 "IEEE half";
    Float32 "float32" 4 "IEEE single";
    Float8E4M3Fn "float8_e4m3fn" 1 "OCP fp8, as on NVIDIA and MI350";
    Float8E4M3Fnuz "float8_e4m3fnuz" 1 "fp8 as on MI300";
    UInt8 "uint8" 1 "bytes without a meaning of their own";
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ElementType {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, FormatError> {
        Self::ALL
            .iter()
            .copied()
            .find(|element| element.name() == name)
            .ok_or_else(|| FormatError::UnknownElementType { got: name.chars().take(64).collect() })
    }
}
