//! The vectors that an oracle outside this crate made (`tests/oracle`): offsets and digests.

use std::path::Path;

use kvpd::family::Shape;
use kvpd::{Interior, PageFormat, ShuffledV};
use serde::Deserialize;

#[derive(Deserialize)]
struct Vector {
    family: String,
    variant: String,
    heads: u32,
    tokens: u32,
    head_dim: u32,
    dtype: String,
    digest: String,
    elements: Vec<Element>,
}

#[derive(Deserialize)]
struct Element {
    component: String,
    at: (u32, u32, u32),
    plane: u32,
    offset_bytes: u64,
}

fn vectors() -> Vec<Vector> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/formats.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn format(vector: &Vector) -> PageFormat {
    let element = vector.dtype.parse().unwrap();
    let shape = Shape::new(vector.heads, vector.tokens, vector.head_dim, element).unwrap();
    let interior = if vector.variant == "NHC" { Interior::Nhc } else { Interior::Hnc };
    let v = if vector.variant == "tiled" { ShuffledV::Tiled } else { ShuffledV::Transposed };
    match vector.family.as_str() {
        "standard" => PageFormat::standard(shape, interior),
        "split-kv" => PageFormat::split_kv(shape, interior),
        "aiter-shuffle" => PageFormat::aiter_shuffle(shape, v),
        other => unreachable!("{other}"),
    }
    .unwrap()
}

#[test]
fn offsets_match_the_oracle() {
    let vectors = vectors();
    assert_eq!(vectors.len(), 42);
    for vector in &vectors {
        let format = format(vector);
        assert_eq!(vector.elements.len(), 16);
        for element in &vector.elements {
            let (head, token, channel) = element.at;
            let found = format.offset(&element.component, head, token, channel);
            assert_eq!(
                found,
                Ok((element.plane, element.offset_bytes)),
                "{format} {:?}",
                element.at
            );
        }
    }
}

/// A changed digest is a changed wire format.
#[test]
fn digests_match_the_oracle() {
    for vector in &vectors() {
        assert_eq!(format(vector).digest(), vector.digest, "{} {}", vector.family, vector.variant);
    }
}
