//! A page format: the interior of a page, proved at construction.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::component::Component;
use crate::element::ElementType;
use crate::error::FormatError;
use crate::family::{Family, Interior, Shape, ShuffledV};
use crate::units::{MAX_PAGE_BYTES, MAX_PLANES};

/// A contiguous byte range of one plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaneSpan {
    /// Number of the plane.
    pub plane: u32,
    /// First byte in the plane.
    pub start_bytes: u64,
    /// Length.
    pub num_bytes: u64,
}

/// Where each element of each component lies in a page's planes.
///
/// Every byte of every plane is covered exactly once or is declared padding; construction proves it.
/// Equality, hash and digest are of the map: formats that place every element alike are equal,
/// whatever they are called. Clones share.
#[derive(Clone)]
pub struct PageFormat(Arc<Inner>);

struct Inner {
    components: Vec<Component>,
    plane_bytes: Vec<u64>,
    padding: Vec<PlaneSpan>,
    page_bytes: u64,
    known: Option<Family>,
    family: String,
    name: String,
    digest: String,
}

impl PageFormat {
    /// vLLM's packed page: one plane, K and V side by side per token.
    ///
    /// # Errors
    /// An extent is 0 or above the limit, or the page is too large.
    pub fn standard(shape: Shape, interior: Interior) -> Result<Self, FormatError> {
        Self::known(Family::Standard(interior), shape)
    }

    /// The legacy page: a K plane and a V plane in the same order.
    ///
    /// # Errors
    /// As [`PageFormat::standard`].
    pub fn split_kv(shape: Shape, interior: Interior) -> Result<Self, FormatError> {
        Self::known(Family::SplitKv(interior), shape)
    }

    /// AITER's shuffled page: a K plane `[H, D/x, N, x]` and a V plane, x = 16 / element bytes.
    ///
    /// # Errors
    /// As [`PageFormat::standard`]; also when x does not divide the head size, or, for a tiled V, the tokens.
    pub fn aiter_shuffle(shape: Shape, v: ShuffledV) -> Result<Self, FormatError> {
        Self::known(Family::AiterShuffle(v), shape)
    }

    fn known(family: Family, shape: Shape) -> Result<Self, FormatError> {
        let (components, plane_bytes) = family.rows(shape)?;
        Self::new(family.label(), components, plane_bytes, Vec::new())
    }

    /// Any map: components, the bytes of each plane, and the bytes that no element covers.
    ///
    /// `family` is a name for people; a map that a known family also has goes by that family's name.
    ///
    /// # Errors
    /// Whatever keeps the map from covering every byte of every plane exactly once.
    pub fn new(
        family: &str,
        mut components: Vec<Component>,
        plane_bytes: Vec<u64>,
        mut padding: Vec<PlaneSpan>,
    ) -> Result<Self, FormatError> {
        if family.is_empty() || family.len() > 64 || family.chars().any(char::is_control) {
            return Err(FormatError::FamilyName);
        }
        components.sort_by(|a, b| a.name().cmp(b.name()));
        padding.sort();
        let page_bytes = prove(&components, &plane_bytes, &padding)?;
        let known = Family::recognise(&components, &plane_bytes);
        let (family, name) = match known {
            Some((family, shape)) => (family.label().to_owned(), family.name(shape)),
            None => (family.to_owned(), describe(family, &components)),
        };
        let digest = digest(&components, &plane_bytes);
        let known = known.map(|(family, _)| family);
        let inner =
            Inner { components, plane_bytes, padding, page_bytes, known, family, name, digest };
        Ok(Self(Arc::new(inner)))
    }

    /// Components, sorted by name.
    pub fn components(&self) -> &[Component] {
        &self.0.components
    }

    /// The component of that name.
    pub fn component(&self, name: &str) -> Option<&Component> {
        self.0.components.iter().find(|component| component.name() == name)
    }

    /// Bytes of each plane.
    pub fn plane_bytes(&self) -> &[u64] {
        &self.0.plane_bytes
    }

    /// Bytes that no element covers.
    pub fn padding(&self) -> &[PlaneSpan] {
        &self.0.padding
    }

    /// Bytes of all planes.
    pub fn page_bytes(&self) -> u64 {
        self.0.page_bytes
    }

    /// Tokens of a page (the block size).
    pub fn tokens(&self) -> u32 {
        self.0.components.iter().map(|component| component.tokens().extent()).max().unwrap_or(0)
    }

    /// The family, for people.
    pub fn family(&self) -> &str {
        &self.0.family
    }

    /// The family with its parameters, for people.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// SHA-256 of the map, as 64 hex digits.
    pub fn digest(&self) -> &str {
        &self.0.digest
    }

    pub(crate) fn family_of_map(&self) -> Option<Family> {
        self.0.known
    }

    /// (plane, byte in the plane) of one element.
    ///
    /// # Errors
    /// There is no such component, or the element is outside its extents.
    pub fn offset(
        &self,
        component: &str,
        head: u32,
        token: u32,
        channel: u32,
    ) -> Result<(u32, u64), FormatError> {
        let found = self.component(component).ok_or_else(|| {
            let known: Vec<_> = self.0.components.iter().map(Component::name).collect();
            FormatError::UnknownComponent {
                got: component.chars().take(64).collect(),
                known: known.join(", "),
            }
        })?;
        let axes = [
            ("head", head, found.heads()),
            ("token", token, found.tokens()),
            ("channel", channel, found.channels()),
        ];
        for (field, got, axis) in axes {
            if got >= axis.extent() {
                return Err(FormatError::OutsideExtents { field, got, extent: axis.extent() });
            }
        }
        let bytes = found.offset(head, token, channel).unwrap_or(found.base_bytes());
        Ok((found.plane(), bytes))
    }

    /// First byte of a plane, counting the planes of a page one after another.
    pub fn plane_start(&self, plane: u32) -> Option<u64> {
        let index = usize::try_from(plane).ok()?;
        self.0.plane_bytes.get(index)?;
        Some(self.0.plane_bytes.iter().take(index).sum())
    }

    /// Every plane, whole, in order.
    pub fn whole_planes(&self) -> Vec<PlaneSpan> {
        let whole = |(plane, &num_bytes)| PlaneSpan { plane, start_bytes: 0, num_bytes };
        (0..).zip(&self.0.plane_bytes).map(whole).collect()
    }

    /// Whether heads lie one after another in each plane (HNC), or tokens do (NHC); both with one head.
    pub(crate) fn keeps(&self, interior: Interior) -> bool {
        self.0.components.iter().all(|component| {
            let axis = match interior {
                Interior::Hnc => component.heads(),
                Interior::Nhc => component.tokens(),
            };
            let index = usize::try_from(component.plane()).ok();
            let plane_bytes = index.and_then(|index| self.0.plane_bytes.get(index)).copied();
            plane_bytes.is_some_and(|plane_bytes| {
                let slot_bytes = plane_bytes / u64::from(axis.extent());
                slot_bytes.checked_mul(axis.extent().into()) == Some(plane_bytes)
                    && component.keeps_to_slots(axis, slot_bytes)
            })
        })
    }

    /// Head slots of a page, as vLLM's caches count them: one per plane where there are several,
    /// else one per head.
    pub(crate) fn head_slots(&self) -> Vec<PlaneSpan> {
        let heads = self.0.components.iter().map(|component| component.heads().extent()).max();
        match (self.0.plane_bytes.as_slice(), heads) {
            ([plane_bytes], Some(heads)) => {
                let num_bytes = plane_bytes / u64::from(heads);
                let slot = |head| PlaneSpan {
                    plane: 0,
                    start_bytes: num_bytes.saturating_mul(u64::from(head)),
                    num_bytes,
                };
                (0..heads).map(slot).collect()
            }
            _ => self.whole_planes(),
        }
    }

    /// Whether the two hold the same tensors, so that a permutation turns one into the other.
    pub fn same_tensors(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.0.components, &other.0.components);
        ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| a.same_tensor(b))
    }
}

impl PartialEq for PageFormat {
    fn eq(&self, other: &Self) -> bool {
        self.0.components == other.0.components && self.0.plane_bytes == other.0.plane_bytes
    }
}

impl Eq for PageFormat {}

impl Hash for PageFormat {
    fn hash<S: Hasher>(&self, state: &mut S) {
        self.0.digest.hash(state);
    }
}

impl fmt::Display for PageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.name)
    }
}

impl fmt::Debug for PageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageFormat({} {:.12})", self.0.name, self.0.digest)
    }
}

fn describe(family: &str, components: &[Component]) -> String {
    let parts: Vec<_> = components
        .iter()
        .map(|c| {
            let (h, n, d) = (c.heads().extent(), c.tokens().extent(), c.channels().extent());
            format!("{}: H={h}, N={n}, D={d}, {}", c.name(), c.element())
        })
        .collect();
    format!("custom {family:?} ({})", parts.join("; "))
}

/// The digest is of this text alone; padding is what the components leave of the planes.
fn digest(components: &[Component], plane_bytes: &[u64]) -> String {
    let mut text = String::from("kvpd page format 1\n");
    for bytes in plane_bytes {
        text.push_str(&format!("plane {bytes}\n"));
    }
    for component in components {
        component.write_canonical(&mut text);
    }
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes already claimed, one bit each, plane by plane.
struct Claims {
    planes: Vec<Vec<u64>>,
}

impl Claims {
    fn new(plane_bytes: &[u64]) -> Self {
        let words = |&bytes: &u64| usize::try_from(bytes.div_ceil(64)).unwrap_or(0);
        Self { planes: plane_bytes.iter().map(|bytes| vec![0; words(bytes)]).collect() }
    }

    /// Claims `[start, start + len)`; gives back the first byte that was claimed before or is outside.
    fn claim(&mut self, plane: u32, start: u64, len: u64) -> Result<(), u64> {
        let plane = usize::try_from(plane).ok().and_then(|plane| self.planes.get_mut(plane));
        let Some(words) = plane else { return Err(start) };
        let end = start.saturating_add(len);
        let mut at = start;
        while at < end {
            let low = at % 64;
            let count = (64 - low).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << low;
            let word = usize::try_from(at / 64).ok().and_then(|index| words.get_mut(index));
            let Some(word) = word else { return Err(at) };
            if *word & mask != 0 {
                return Err(at - low + u64::from((*word & mask).trailing_zeros()));
            }
            *word |= mask;
            at += count;
        }
        Ok(())
    }

    /// The first unclaimed byte of a plane of `bytes`.
    fn first_gap(words: &[u64], bytes: u64) -> Option<u64> {
        let gap = |(index, word): (u64, &u64)| {
            let at = index * 64 + u64::from(word.trailing_ones());
            (*word != u64::MAX).then_some(at)
        };
        (0..).zip(words).find_map(gap).filter(|&at| at < bytes)
    }
}

/// Proves that the components and the padding cover every byte of every plane exactly once.
/// Returns the bytes of all planes.
fn prove(
    components: &[Component],
    plane_bytes: &[u64],
    padding: &[PlaneSpan],
) -> Result<u64, FormatError> {
    for (field, got) in [("components", components.len()), ("plane_bytes", plane_bytes.len())] {
        if got == 0 || got > MAX_PLANES {
            return Err(FormatError::Count { field, got });
        }
    }
    if padding.len() > MAX_PLANES {
        return Err(FormatError::Count { field: "padding", got: padding.len() });
    }
    let page_bytes = plane_bytes.iter().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes));
    if page_bytes > MAX_PAGE_BYTES || plane_bytes.contains(&0) {
        return Err(FormatError::PageBytes { got: page_bytes });
    }
    for (first, second) in components.iter().zip(components.iter().skip(1)) {
        if first.name() == second.name() {
            return Err(FormatError::DuplicateComponent { component: first.name().to_owned() });
        }
    }
    let inside = |component: &str, plane: u32, end: Option<u64>| {
        let num_planes = plane_bytes.len();
        let bytes = usize::try_from(plane).ok().and_then(|plane| plane_bytes.get(plane));
        let component = component.to_owned();
        match (bytes, end) {
            (None, _) => Err(FormatError::NoSuchPlane { component, plane, num_planes }),
            (Some(_), None) => Err(FormatError::Overflow { field: "end", component }),
            (Some(&plane_bytes), Some(end_bytes)) if end_bytes > plane_bytes => {
                Err(FormatError::OutOfPlane { component, end_bytes, plane_bytes })
            }
            _ => Ok(()),
        }
    };
    // Bounds before claims: what passes has no more elements than the page has bytes, or overlaps
    // within the first page's worth of claims.
    for component in components {
        inside(component.name(), component.plane(), component.end_bytes())?;
    }
    for span in padding {
        inside("padding", span.plane, span.start_bytes.checked_add(span.num_bytes))?;
    }
    let mut claims = Claims::new(plane_bytes);
    for component in components {
        claim_component(&mut claims, component).map_err(|offset_bytes| FormatError::Overlap {
            component: component.name().to_owned(),
            plane: component.plane(),
            offset_bytes,
        })?;
    }
    for span in padding {
        claims.claim(span.plane, span.start_bytes, span.num_bytes).map_err(|offset_bytes| {
            FormatError::Overlap {
                component: "padding".to_owned(),
                plane: span.plane,
                offset_bytes,
            }
        })?;
    }
    for ((plane, words), &bytes) in (0..).zip(&claims.planes).zip(plane_bytes) {
        if let Some(offset_bytes) = Claims::first_gap(words, bytes) {
            return Err(FormatError::Uncovered { plane, offset_bytes });
        }
    }
    Ok(page_bytes)
}

/// Claims every element; contiguous channels are claimed as one run.
fn claim_component(claims: &mut Claims, component: &Component) -> Result<(), u64> {
    let element = u64::from(component.element().bytes());
    let channels = component.channels();
    let contiguous = channels.stride_bytes() == element && channels.extent() > 1;
    let step = if contiguous { channels.tile() } else { 1 };
    let run = element.saturating_mul(step.into());
    for head in 0..component.heads().extent() {
        for token in 0..component.tokens().extent() {
            let row = component
                .base_bytes()
                .saturating_add(component.heads().offset(head))
                .saturating_add(component.tokens().offset(token));
            let mut channel = 0;
            while channel < channels.extent() {
                let start = row.saturating_add(channels.offset(channel));
                claims.claim(component.plane(), start, run)?;
                channel += step;
            }
        }
    }
    Ok(())
}

/// The element type that all components share, if they do.
pub(crate) fn shared_element(format: &PageFormat) -> Option<ElementType> {
    let mut elements = format.components().iter().map(Component::element);
    let first = elements.next()?;
    elements.all(|element| element == first).then_some(first)
}
