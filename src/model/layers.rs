//! Which layers slide, and which rotate queries and keys: from the descriptor and GGUF metadata.

use super::compressed::ratios;
use super::descriptor::{KeySharing, Mixer, RopeLayers, Tempering, Window};
use super::hyper::Keys;
use crate::Result;
use crate::gguf::Value;

#[derive(Clone, Debug)]
pub struct LayerKinds {
    /// Positions that a sliding layer sees, or of a chunk.
    window: Option<usize>,
    is_chunked: bool,
    sliding: Vec<bool>,
    rotated: Vec<bool>,
    tempers_unrotated: bool,
    /// Latent rows of layers that do not rotate have no part for it.
    drops_unrotated: bool,
}

const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";
const ROTATED: &str = "attention.rope_pattern";

impl LayerKinds {
    pub(super) fn read(keys: &Keys, n_layers: usize) -> Result<LayerKinds> {
        let window = window(keys)?;
        let sliding = match window {
            Some(_) => sliding(keys, n_layers)?,
            None => vec![false; n_layers],
        };
        let parts = &keys.descriptor.parts;
        let rotated = match parts.rope_layers {
            RopeLayers::All => vec![true; n_layers],
            RopeLayers::Sliding if window.is_none() && parts.window_is_optional => {
                vec![true; n_layers]
            }
            RopeLayers::Sliding => sliding.clone(),
            RopeLayers::SlidingOrDense => {
                let n_dense = (0..n_layers).take_while(|l| is_dense(keys, *l)).count();
                sliding.iter().enumerate().map(|(l, slides)| *slides || l < n_dense).collect()
            }
            RopeLayers::None => vec![false; n_layers],
            RopeLayers::IfFinetuned => {
                let key = keys.descriptor.key("rope.scaling.finetuned");
                vec![keys.gguf.bool(&key)? != Some(false); n_layers]
            }
            RopeLayers::Listed => match keys.gguf.get(&keys.descriptor.key(ROTATED)) {
                None => vec![true; n_layers],
                Some(listed) => {
                    keys.flags(ROTATED, listed, n_layers, keys.require("block_count")?)?
                }
            },
            RopeLayers::ThreeOfFour => (0..n_layers).map(|l| (l + 1) % 4 != 0).collect(),
        };
        let tempers_unrotated =
            matches!(parts.tempering, Tempering::Unrotated { .. } | Tempering::Power { .. });
        let is_chunked = parts.chunk > 0;
        let drops_unrotated =
            parts.mixer == Mixer::Latent && parts.rope_layers == RopeLayers::Listed;
        Ok(LayerKinds { window, is_chunked, sliding, rotated, tempers_unrotated, drops_unrotated })
    }

    pub fn n_layers(&self) -> usize {
        self.sliding.len()
    }

    /// Adds a layer that sees everything.
    pub(super) fn add_full(&mut self) {
        self.sliding.push(false);
        self.rotated.push(true);
    }

    /// The last layer alone.
    pub(super) fn of_last(&self) -> LayerKinds {
        let last = |of_layers: &[bool]| of_layers.last().copied().into_iter().collect();
        let (sliding, rotated) = (last(&self.sliding), last(&self.rotated));
        LayerKinds { sliding, rotated, ..self.clone() }
    }

    /// Whether a layer sees part of a text only, and turns as such layers do.
    pub fn slides(&self, layer: usize) -> bool {
        self.sliding[layer]
    }

    /// Positions that queries of a layer see, counted back from their own; `None` for all.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|_| self.sliding[layer] && !self.is_chunked)
    }

    /// Positions of the chunks of which queries of a layer see their own; `None` for all.
    pub fn chunk_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|_| self.sliding[layer] && self.is_chunked)
    }

    /// Whether queries of a layer have the model's factor by position.
    pub fn tempers(&self, layer: usize) -> bool {
        !(self.tempers_unrotated && self.rotated[layer])
    }

    pub fn rotates(&self, layer: usize) -> bool {
        self.rotated[layer]
    }

    /// Whether a latent row of a layer has a part to rotate.
    pub fn has_rotated_part(&self, layer: usize) -> bool {
        self.rotated[layer] || !self.drops_unrotated
    }
}

/// By layer: the layer whose keys and values it sees. Empty if each has its own.
pub(super) fn key_sources(keys: &Keys, kinds: &LayerKinds) -> Result<Vec<usize>> {
    match keys.descriptor.parts.shares_keys {
        KeySharing::None => Ok(Vec::new()),
        KeySharing::Last => sources_of_last(keys, kinds),
        KeySharing::Listed => listed_sources(keys, kinds),
    }
}

/// A layer without keys sees those of the last layer with them that slides as it does.
fn sources_of_last(keys: &Keys, kinds: &LayerKinds) -> Result<Vec<usize>> {
    let key = "attention.shared_kv_layers";
    let (n, n_layers) = (keys.number(key)?, kinds.n_layers());
    let n_own = n_layers.saturating_sub(n);
    let source = |l: usize| match l < n_own {
        true => Some(l),
        false => (0..n_own).rev().find(|own| kinds.slides(*own) == kinds.slides(l)),
    };
    let sources: Option<Vec<usize>> = (0..n_layers).map(source).collect();
    sources.ok_or_else(|| {
        keys.bad(key, "less, so that layers of each kind have keys of their own".into(), n)
    })
}

fn listed_sources(keys: &Keys, kinds: &LayerKinds) -> Result<Vec<usize>> {
    let (key, n) = ("attention.kv_source_map", kinds.n_layers());
    let Some(listed) = keys.gguf.get(&keys.descriptor.key(key)) else {
        return match keys.have_tensor("attn_kv_a_mqa", &vec![true; n]) {
            true => Ok(Vec::new()),
            false => keys.some(key, None),
        };
    };
    let number = |v: Value<'_>| v.as_u64().map(|l| l as usize);
    // llama.cpp saves a single number where all layers have the same.
    let sources: Option<Vec<usize>> = match listed.as_array() {
        Some(list) => (0..list.len()).map(|l| list.get(l).and_then(number)).collect(),
        None => number(listed).map(|source| vec![source; n]),
    };
    let sources = sources.unwrap_or_default();
    if sources.len() != n {
        return Err(keys.bad(key, format!("the number of a layer for each of {n}"), listed));
    }
    let fits = |l: usize| {
        let source = sources[l];
        source <= l && sources[source] == source && kinds.rotates(source) == kinds.rotates(l)
    };
    match (0..n).find(|l| !fits(*l)) {
        None => Ok(sources),
        Some(l) => {
            let expected = format!(
                "for layer {l} itself, or a layer before it with keys of its own that rotates if \
                 and only if it does"
            );
            Err(keys.bad(key, expected, sources[l]))
        }
    }
}

pub(super) fn is_dense(keys: &Keys, layer: usize) -> bool {
    let router = keys.descriptor.tensor_name("ffn_gate_inp", layer);
    router.is_none_or(|(name, _)| keys.gguf.tensor_index(&name).is_none())
}

/// 0 is no window, but not where layers are known to slide.
fn window(keys: &Keys) -> Result<Option<usize>> {
    match keys.descriptor.parts.window {
        Window::None if keys.number(WINDOW)? == 0 => Ok(None),
        _ if keys.descriptor.parts.window_is_optional && keys.number(WINDOW)? == 0 => Ok(None),
        Window::None => keys.count(WINDOW),
        Window::Pattern if keys.descriptor.parts.chunk > 0 => {
            Ok(keys.count(WINDOW)?.or(Some(keys.descriptor.parts.chunk)))
        }
        Window::All | Window::Pattern | Window::Uncompressed => keys.require(WINDOW).map(Some),
    }
}

fn sliding(keys: &Keys, n: usize) -> Result<Vec<bool>> {
    let parts = &keys.descriptor.parts;
    let by_period = |period: usize| -> Vec<bool> {
        let full = if parts.window_full_first { 0 } else { period.saturating_sub(1) };
        (0..n).map(|l| period == 0 || l % period != full).collect()
    };
    match parts.window {
        Window::None => Ok(vec![false; n]),
        Window::Uncompressed => Ok(ratios(keys, n)?.iter().map(|ratio| *ratio == 0).collect()),
        Window::All => Ok(vec![true; n]),
        Window::Pattern => match keys.gguf.get(&keys.descriptor.key(PATTERN)) {
            None => Ok(by_period(parts.window_period)),
            Some(listed) => match listed.as_u64().filter(|_| listed.as_array().is_none()) {
                Some(period) => Ok(by_period(period as usize)),
                None => keys.flags(PATTERN, listed, n, keys.require("block_count")?),
            },
        },
    }
}
