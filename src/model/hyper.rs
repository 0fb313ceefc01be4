//! A model's numbers, from GGUF metadata: read once, checked once.

use super::adjugate::AdjugateParams;
use super::compressed::CompressedParams;
use super::descriptor::{Descriptor, Norm, Positions, RopeRows};
use super::heads::LatentShape;
use super::indexer::IndexerParams;
use super::kv::LayerShape;
use super::ngrams::NgramParams;
use super::recurrent::{Recurrence, Recurrent};
use super::rope::{RopeParams, Temperature};
use super::streams::StreamParams;
use super::values::ValueParams;
use crate::backend::ops::{Choice, RopePairing, Score};
use crate::gguf::{Array, Gguf, Value};
use crate::model::encoder::EncoderParams;
use crate::model::layers::{LayerKinds, key_sources};
use crate::{Error, Result};
use std::ops::Range;

/// Hyper-parameters. Counts are for the whole model unless stated otherwise.
#[derive(Clone, Debug)]
pub struct HyperParams {
    /// Layers that are computed, without multi-token prediction layers. An encoder's come first.
    pub n_layers: usize,
    /// The encoder's parameters; `None` in a decoder-only model.
    pub encoder: Option<EncoderParams>,
    /// Tokens of context the model was trained for.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Heads of a layer, of queries and of keys; the most of any layer where they differ.
    pub n_head: usize,
    pub n_head_kv: usize,
    /// Heads of each layer, of queries and of keys, if they differ.
    pub layer_heads: Option<Vec<[usize; 2]>>,
    /// Elements of one head of q and k.
    pub head_dim: usize,
    /// Elements of one head of v.
    pub head_dim_v: usize,
    /// Every token sees the whole text, which is computed at once.
    pub sees_all: bool,
    /// The model embeds texts and has no output matrix.
    pub embeds: bool,
    /// Elements of a head in layers that slide, if they have others.
    pub sliding_head_dim: Option<usize>,
    /// Elements of latent attention's compressed keys and values; 0 in other models.
    pub kv_rank: usize,
    /// Sizes of latent attention in layers that slide, if they have others.
    pub sliding_latent: Option<LatentShape>,
    pub rope: RopeParams,
    /// How sliding layers turn their heads.
    pub sliding_rope: RopeParams,
    /// Factor on queries that grows with the position.
    pub temperature: Option<Temperature>,
    /// Index in a head of the first element that rotates.
    pub rope_offset: usize,
    /// Factor on the attention scores.
    pub attention_scale: f32,
    /// Soft caps of attention scores and of logits.
    pub attention_cap: Option<f32>,
    pub logit_cap: Option<f32>,
    /// Queries, keys and values are limited to ± this.
    pub qkv_limit: Option<f32>,
    /// Factor on attention's output.
    pub attention_output_scale: f32,
    /// How latent attention chooses the positions that it sees.
    pub indexer: Option<IndexerParams>,
    /// Attention to compressed rows, and the rank of the row that its queries are made of.
    pub compressed: Option<CompressedParams>,
    pub q_rank: usize,
    /// The bound of logarithms of decays, if they have one.
    pub decay_bound: Option<f32>,
    /// Which elements of a head rotate together.
    pub rope_pairing: RopePairing,
    /// Layers that mix positions by a recurrence, and its sizes.
    pub recurrent: Option<Recurrent>,
    /// Layers of a feed-forward part only, if layers have one part; empty if they have two.
    pub ffn_only: Vec<bool>,
    /// Which layers slide and which rotate.
    pub kinds: LayerKinds,
    pub norm: Norm,
    pub norm_eps: f32,
    /// Parts of the stream of which each has a mean in its norms.
    pub norm_groups: usize,
    pub routing: Routing,
    /// Factors on the embedding and on what each part adds to the stream; divisor of the logits.
    pub embedding_scale: f32,
    pub residual_scale: f32,
    pub logit_divisor: Option<f32>,
    /// Several residual streams, if the model has them.
    pub streams: Option<StreamParams>,
    /// Layers from one that leaves a stream behind to the next; 0 if none does.
    pub kept_every: usize,
    /// Embeddings of the last tokens together, of each layer that they join.
    pub ngrams: Vec<NgramParams>,
    /// The layers whose keys and values layers see; empty if each has its own.
    pub key_sources: Vec<usize>,
    /// Elements of a layer's own input; 0 where layers have none.
    pub layer_input: usize,
}

/// Indices in `cache_shapes` of a decoder layer's caches.
#[derive(Clone, Copy, Debug)]
pub struct CacheSlots {
    /// Self-attention's cache.
    pub own: usize,
    /// Cross-attention's cache, in a model with an encoder.
    pub source: usize,
}

/// How many experts a layer has, and how its router chooses.
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    /// Routed experts a layer; 0 in a dense model.
    pub n_experts: usize,
    /// Experts a token uses.
    pub k: usize,
    pub choice: Choice,
    /// Tokens of one pass that an expert takes: of later ones it computes nothing.
    pub capacity: Option<usize>,
    /// Small experts behind the routed ones.
    pub adjugate: Option<AdjugateParams>,
    /// Experts that make values, if the model has them.
    pub values: Option<ValueParams>,
}

/// Upper bound of a count: above any real model, and products of counts stay far from overflow.
const MAX_COUNT: u64 = 1 << 24;

impl HyperParams {
    pub fn read(gguf: &Gguf, descriptor: &Descriptor) -> Result<HyperParams> {
        let keys = Keys { gguf, descriptor };
        keys.check_required()?;
        let n_embd = keys.require("embedding_length")?;
        let heads = keys.heads(n_embd)?;
        let n_ctx_train = keys.require("context_length")?;
        let rope = RopeParams::read(&keys, heads.n_rot, n_ctx_train)?;
        let sliding_head_dim = keys.sliding_head_dim(heads.head_dim, heads.head_dim_v)?;
        let of_sliding = sliding_head_dim.unwrap_or(heads.head_dim);
        let sliding_rope = rope.of_sliding_layers(&keys, of_sliding)?;
        let attention_scale = keys.attention_scale(&rope, heads.head_dim)?;
        let encoder = EncoderParams::read(&keys)?;
        let n_layers = match &encoder {
            Some(encoder) => encoder.n_layers + encoder.n_decoder_layers,
            None => keys.layers()?,
        };
        let kinds = LayerKinds::read(&keys, n_layers)?;
        let recurrent = Recurrent::read(&keys, n_layers, heads.n_head, heads.head_dim)?;
        let streams = keys.streams()?;
        let ngrams =
            NgramParams::read(&keys, n_layers, n_embd, streams.as_ref(), recurrent.as_ref())?;
        Ok(HyperParams {
            n_layers,
            encoder,
            n_ctx_train,
            n_embd,
            n_head: heads.n_head,
            n_head_kv: heads.n_head_kv,
            layer_heads: heads.of_layers.clone(),
            head_dim: heads.head_dim,
            head_dim_v: heads.head_dim_v,
            sliding_head_dim,
            sees_all: descriptor.parts.sees_all,
            embeds: descriptor.parts.embeds,
            kv_rank: heads.kv_rank,
            sliding_latent: keys.sliding_latent(&heads)?,
            rope_offset: match descriptor.parts.rope_rows {
                RopeRows::First => 0,
                RopeRows::Last => heads.head_dim - heads.n_rot,
            },
            temperature: Temperature::read(&keys, &rope)?,
            rope,
            sliding_rope,
            attention_scale,
            attention_cap: keys.soft_cap("attn_logit_softcapping")?,
            logit_cap: keys.logit_cap()?,
            qkv_limit: keys.factor("attention.clamp_kqv")?,
            attention_output_scale: keys.factor("attention.value_scale")?.unwrap_or(1.0),
            indexer: IndexerParams::read(&keys, &kinds, recurrent.as_ref(), heads.n_rot)?,
            compressed: CompressedParams::read(&keys, n_layers, &heads)?,
            q_rank: keys.number("attention.q_lora_rank")?,
            decay_bound: keys.decay_bound()?,
            rope_pairing: keys.rope_pairing()?,
            recurrent,
            ffn_only: keys.ffn_only(n_layers)?,
            key_sources: key_sources(&keys, &kinds)?,
            layer_input: keys.layer_input()?,
            kinds,
            norm: keys.norm(n_embd)?,
            norm_groups: keys.norm_groups(n_embd)?,
            norm_eps: keys.norm_eps()?,
            routing: keys.routing()?,
            embedding_scale: keys.embedding_scale(n_embd)?,
            residual_scale: keys.factor("residual_scale")?.unwrap_or(1.0),
            logit_divisor: keys.logit_divisor()?,
            streams,
            kept_every: keys.kept_every()?,
            ngrams,
        })
    }

    /// The parameters of the model with one layer more, which sees everything and has no state.
    pub(super) fn with_next_layer(&self) -> HyperParams {
        let mut hyper = self.clone();
        hyper.n_layers += 1;
        hyper.kinds.add_full();
        if let Some(recurrent) = &mut hyper.recurrent {
            recurrent.layers.push(false);
        }
        if let Some(heads) = &mut hyper.layer_heads {
            heads.extend(heads.last().copied());
        }
        hyper
    }

    /// The parameters of a model that is the last layer alone, which has no state.
    pub(super) fn of_last_layer(&self) -> HyperParams {
        let [n_head, n_head_kv] = self.heads_of(self.n_layers - 1);
        let kinds = self.kinds.of_last();
        let (layer_heads, recurrent) = (None, None);
        let own = self.clone();
        let (n_layers, key_sources, layer_input, ngrams) = (1, Vec::new(), 0, Vec::new());
        HyperParams {
            n_layers,
            n_head,
            n_head_kv,
            layer_heads,
            recurrent,
            kinds,
            key_sources,
            layer_input,
            ngrams,
            ..own
        }
    }

    /// Heads of queries and of keys of a layer.
    pub fn heads_of(&self, layer: usize) -> [usize; 2] {
        let same = [self.n_head, self.n_head_kv];
        self.layer_heads.as_ref().map_or(same, |heads| heads[layer])
    }

    /// The recurrence of a layer that has one instead of attention.
    pub fn recurrence_of(&self, layer: usize) -> Option<Recurrence> {
        let recurrent = self.recurrent.as_ref().filter(|r| r.layers[layer]);
        recurrent.filter(|_| self.mixes(layer)).map(|r| r.recurrence)
    }

    /// Whether a layer mixes positions.
    pub fn mixes(&self, layer: usize) -> bool {
        !self.ffn_only.get(layer).copied().unwrap_or(false)
    }

    /// Whether a layer has a feed-forward part.
    pub fn has_ffn(&self, layer: usize) -> bool {
        self.ffn_only.get(layer).copied().unwrap_or(true)
    }

    /// The layer whose keys and values a layer sees: itself, or one before it.
    pub fn keys_of(&self, layer: usize) -> usize {
        self.key_sources.get(layer).copied().unwrap_or(layer)
    }

    /// The indexer, if it chooses among positions in contexts of `n_ctx`.
    pub fn choosing_indexer(&self, n_ctx: usize) -> Option<&IndexerParams> {
        self.indexer.as_ref().filter(|indexer| indexer.chooses(n_ctx))
    }

    /// Positions of a block, if an indexer has one key a block, the mean of theirs.
    pub fn means_block(&self) -> Option<usize> {
        self.indexer.as_ref().filter(|indexer| indexer.means).map(|indexer| indexer.block)
    }

    /// By layer: the first of those that a device takes together with it, since one sees keys and
    /// values of another, or what another's indexer has chosen.
    pub fn leaders(&self, n_ctx: usize) -> Vec<usize> {
        let indexer = self.choosing_indexer(n_ctx).filter(|_| self.kv_rank > 0);
        let chooser = |l: usize| {
            let indexer = indexer.filter(|_| !self.kinds.slides(l))?;
            let may_share = self.recurrence_of(l).is_none();
            (0..=l).rev().find(|other| may_share && indexer.own[*other])
        };
        let mut leaders: Vec<usize> = (0..self.n_layers).collect();
        for l in 0..self.n_layers {
            for other in [Some(self.keys_of(l)), chooser(l)].into_iter().flatten() {
                let (a, b) = (leaders[l], leaders[other]);
                let joined = leaders.iter_mut().filter(|leader| **leader == a.max(b));
                joined.for_each(|leader| *leader = a.min(b));
            }
        }
        leaders
    }

    /// Numbers of a row of the factors on queries by position.
    pub fn temperature_width(&self) -> usize {
        match self.temperature {
            None => 0,
            Some(Temperature::Heads) => 2,
            Some(_) => self.head_dim,
        }
    }

    /// Layers of the encoder, if there is one: those that come first.
    pub fn n_encoder_layers(&self) -> usize {
        self.encoder.as_ref().map_or(0, |encoder| encoder.n_layers)
    }

    /// The decoder's layers; all that there are in a model without an encoder.
    pub fn decoder_layers(&self) -> Range<usize> {
        self.n_encoder_layers()..self.n_layers
    }

    /// The indices in `cache_shapes` of a decoder layer.
    pub fn cache_slots(&self, layer: usize) -> CacheSlots {
        let own = layer - self.n_encoder_layers();
        CacheSlots { own, source: own + self.decoder_layers().len() }
    }

    /// The layer that has a place of `cache_shapes`.
    pub fn layer_of_slot(&self, slot: usize) -> usize {
        let layers = self.decoder_layers();
        layers.start + slot % layers.len()
    }

    /// Elements of a layer's heads, of q and k and of v.
    pub fn head_dims(&self, layer: usize) -> [usize; 2] {
        match self.sliding_head_dim.filter(|_| self.kinds.slides(layer)) {
            Some(dim) => [dim, dim],
            None => [self.head_dim, self.head_dim_v],
        }
    }

    /// Sizes of a layer's latent attention.
    pub fn latent_of(&self, layer: usize) -> LatentShape {
        let own = self.sliding_latent.filter(|_| self.kinds.slides(layer));
        let shape = own.unwrap_or(LatentShape {
            n_head: self.n_head,
            head_dim: self.head_dim,
            head_dim_v: self.head_dim_v,
            rank: self.kv_rank,
            n_rot: if self.kinds.has_rotated_part(layer) { self.rope.n_rot } else { 0 },
        });
        LatentShape { n_head: self.heads_of(layer)[0], ..shape }
    }

    /// The cache of each layer. With an encoder: self-attention's cache of each decoder layer, then
    /// cross-attention's cache of each.
    pub fn cache_shapes(&self) -> Vec<LayerShape> {
        if let Some(encoder) = &self.encoder {
            let (k_dim, v_dim) = (self.head_dim, self.head_dim_v);
            let shape = LayerShape::Heads { n_head_kv: self.n_head_kv, k_dim, v_dim };
            return vec![shape; 2 * encoder.n_decoder_layers];
        }
        if let Some(compressed) = &self.compressed {
            let index = self.indexer.as_ref().map_or(0, |indexer| indexer.dim);
            let mut shapes = compressed.cache_shapes(self.head_dim, index);
            if !self.ngrams.is_empty() {
                shapes.extend((0..self.n_layers).map(|l| self.ngram_state(l)));
            }
            return shapes;
        }
        let shape = |l: usize| {
            let (n_head_kv, [k_dim, v_dim]) = (self.heads_of(l)[1], self.head_dims(l));
            match self.latent_of(l) {
                LatentShape { rank: 0, .. } => LayerShape::Heads { n_head_kv, k_dim, v_dim },
                LatentShape { rank, n_rot, .. } => {
                    LayerShape::Latent { dim: rank + n_rot, index: 0, kept: 0 }
                }
            }
        };
        let of_layer = |l: usize| match self.recurrence_of(l) {
            Some(recurrence) => LayerShape::State(recurrence.state_size()),
            None if !self.mixes(l) => LayerShape::ELSEWHERE,
            None if self.keys_of(l) != l => match &self.indexer {
                // The indexer's keys are the layer's own.
                Some(indexer) if indexer.own[l] => {
                    LayerShape::Latent { dim: 0, index: indexer.cached_dim(), kept: 0 }
                }
                _ => LayerShape::ELSEWHERE,
            },
            None => match (shape(l), &self.indexer) {
                (LayerShape::Latent { dim, .. }, Some(indexer)) if indexer.own[l] => {
                    let (index, kept) = (indexer.cached_dim(), indexer.n_kept());
                    LayerShape::Latent { dim, index, kept }
                }
                // The indexer's keys are a head behind the others.
                (LayerShape::Heads { n_head_kv, k_dim, v_dim }, Some(indexer))
                    if indexer.own[l] && !indexer.means =>
                {
                    LayerShape::Heads { n_head_kv: n_head_kv + 1, k_dim, v_dim }
                }
                (shape, _) => shape,
            },
        };
        let behind = self.has_second_caches().then(|| (0..self.n_layers).map(|l| self.second(l)));
        (0..self.n_layers).map(of_layer).chain(behind.into_iter().flatten()).collect()
    }

    /// Shapes of layers' caches on a device, which keeps no keys of indexers that never choose.
    pub fn device_cache_shapes(&self, n_ctx: usize) -> Vec<LayerShape> {
        if self.choosing_indexer(n_ctx).is_some() {
            return self.cache_shapes();
        }
        let has_head = |l: usize| {
            self.indexer.as_ref().is_some_and(|i| i.by_head && i.own.get(l) == Some(&true))
        };
        let of_slot = |(slot, shape)| match shape {
            LayerShape::Latent { .. } if slot >= self.n_layers => LayerShape::ELSEWHERE,
            LayerShape::Latent { dim, .. } => LayerShape::Latent { dim, index: 0, kept: 0 },
            LayerShape::Heads { n_head_kv, k_dim, v_dim } if has_head(slot) => {
                LayerShape::Heads { n_head_kv: n_head_kv - 1, k_dim, v_dim }
            }
            shape => shape,
        };
        self.cache_shapes().into_iter().enumerate().map(of_slot).collect()
    }

    /// Whether layers have a second cache, in a place of its own: [`HyperParams::second_slot`].
    fn has_second_caches(&self) -> bool {
        !self.ngrams.is_empty() || self.indexer.as_ref().is_some_and(|indexer| indexer.means)
    }

    /// The index in `cache_shapes` of a layer's second cache.
    pub fn second_slot(&self, layer: usize) -> usize {
        self.n_layers + layer
    }

    /// The second cache of a layer: what its part of the last tokens remembers, or its indexer's
    /// keys of blocks and the sum of those of a block that is not whole.
    fn second(&self, layer: usize) -> LayerShape {
        let indexer = self.indexer.as_ref().filter(|i| i.means && i.own[layer]);
        match indexer.filter(|_| self.ngrams_of(layer).is_none()) {
            Some(indexer) => {
                LayerShape::Latent { dim: indexer.cached_dim(), index: 0, kept: indexer.dim }
            }
            None => self.ngram_state(layer),
        }
    }
}

/// The model's keys, `{arch}.` left out.
pub(super) struct Keys<'a> {
    pub gguf: &'a Gguf,
    pub descriptor: &'a Descriptor,
}

impl Keys<'_> {
    pub fn bad(&self, key: &str, expected: String, got: impl ToString) -> Error {
        Error::format(self.gguf.path(), self.descriptor.key(key), expected, got.to_string())
    }

    /// The value of a key that must be there.
    pub fn some<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.bad(key, "a value".into(), "nothing"))
    }

    pub fn has(&self, key: &str) -> bool {
        self.gguf.get(&self.descriptor.key(key)).is_some()
    }

    /// Whether these layers have the tensor of a role.
    pub fn have_tensor(&self, role: &str, layers: &[bool]) -> bool {
        layers.iter().enumerate().filter(|(_, has)| **has).all(|(l, _)| {
            let name = self.descriptor.tensor_name(role, l);
            name.is_some_and(|(name, _)| self.gguf.tensor_index(&name).is_some())
        })
    }

    /// Fails if a key that the descriptor requires is missing, or one that it refuses is not 0.
    fn check_required(&self) -> Result<()> {
        for key in &self.descriptor.refuses {
            let value = self.gguf.get(&self.descriptor.key(key));
            if let Some(value) = value.filter(|value| value.as_u64() != Some(0)) {
                return Err(self.bad(key, "0, as moeba lacks this part".into(), value));
            }
        }
        let missing = self.descriptor.requires.iter().find(|key| !self.has(key));
        missing.map_or(Ok(()), |key| self.some(key, None))
    }

    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        match self.gguf.u32(&self.descriptor.key(key))? {
            None => Ok(None),
            Some(v) if (1..=MAX_COUNT).contains(&u64::from(v)) => Ok(Some(v as usize)),
            Some(v) => Err(self.bad(key, format!("1 to {MAX_COUNT}"), v)),
        }
    }

    /// A count that may be 0, which is also what a file without the key has.
    pub fn number(&self, key: &str) -> Result<usize> {
        Ok(self.gguf.u32(&self.descriptor.key(key))?.unwrap_or(0) as usize)
    }

    pub fn require(&self, key: &str) -> Result<usize> {
        self.some(key, self.count(key)?)
    }

    fn layer_input(&self) -> Result<usize> {
        let key = "embedding_length_per_layer_input";
        match self.descriptor.parts.layer_inputs && self.number(key)? > 0 {
            true => self.require(key),
            false => Ok(0),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.gguf.str(&self.descriptor.key(key))
    }

    pub fn positive(&self, key: &str) -> Result<Option<f32>> {
        match self.gguf.f32(&self.descriptor.key(key))? {
            Some(v) if !(v.is_finite() && v > 0.0) => {
                Err(self.bad(key, "a positive number".into(), v))
            }
            other => Ok(other),
        }
    }

    /// A positive number; 0 is none given, as llama.cpp saves models.
    pub fn factor(&self, key: &str) -> Result<Option<f32>> {
        match self.gguf.f32(&self.descriptor.key(key))? {
            Some(0.0) => Ok(None),
            _ => self.positive(key),
        }
    }

    /// 0 is no cap.
    fn soft_cap(&self, key: &str) -> Result<Option<f32>> {
        if self.descriptor.parts.soft_caps { self.factor(key) } else { Ok(None) }
    }

    fn norm(&self, n_embd: usize) -> Result<Norm> {
        let parts = &self.descriptor.parts;
        let rms = self.factor("attention.layer_norm_rms_epsilon")?;
        let is_plain = parts.norm == Norm::GroupedRms && self.norm_groups(n_embd)? == 1;
        let is_rms = is_plain || parts.rms_by_epsilon && rms.is_some();
        Ok(if is_rms { Norm::Rms } else { parts.norm })
    }

    /// The file's factor of scores, or 1/√`head_dim` with what the rotation adds to it.
    fn attention_scale(&self, rope: &RopeParams, head_dim: usize) -> Result<f32> {
        let plain = match self.descriptor.parts.positions {
            Positions::RelativeBias => 1.0,
            _ if self.descriptor.parts.unscaled_scores => 1.0,
            _ => 1.0 / (head_dim as f32).sqrt() * rope.score_factor(self)?,
        };
        let own = self.factor("attention.scale")?.or(self.factor("attention.output_scale")?);
        Ok(own.unwrap_or(plain))
    }

    fn logit_cap(&self) -> Result<Option<f32>> {
        match self.descriptor.parts.caps_logits {
            true => self.factor("final_logit_softcapping"),
            false => self.soft_cap("final_logit_softcapping"),
        }
    }

    fn logit_divisor(&self) -> Result<Option<f32>> {
        let multiplies = self.descriptor.parts.multiply_logits;
        let divisor = |scale: f32| if multiplies { 1.0 / scale } else { scale };
        Ok(self.factor("logit_scale")?.map(divisor))
    }

    fn embedding_scale(&self, n_embd: usize) -> Result<f32> {
        let scaled = self.descriptor.parts.scale_embedding;
        let plain = if scaled { (n_embd as f32).sqrt() } else { 1.0 };
        Ok(self.factor("embedding_scale")?.unwrap_or(plain))
    }

    /// Some converters write the one name whatever the norm.
    pub(super) fn norm_eps(&self) -> Result<f32> {
        let key = "attention.layer_norm_rms_epsilon";
        match self.factor(key)?.or(self.factor("attention.layer_norm_epsilon")?) {
            None if self.has(key) => Err(self.bad(key, "a positive number".into(), 0)),
            None if self.descriptor.parts.rms_by_epsilon => {
                self.some("attention.layer_norm_epsilon", None)
            }
            either => self.some(key, either),
        }
    }

    fn decay_bound(&self) -> Result<Option<f32>> {
        let key = "kda.gate_lower_bound";
        if !self.descriptor.parts.bounded_decays {
            return Ok(None);
        }
        let bound = self.some(key, self.gguf.f32(&self.descriptor.key(key))?)?;
        match bound.is_finite() && bound < 0.0 {
            true => Ok(Some(bound)),
            false => Err(self.bad(key, "a number below 0".into(), bound)),
        }
    }

    /// Files of models that see images as well pair the two halves of a head.
    fn rope_pairing(&self) -> Result<RopePairing> {
        let parts = &self.descriptor.parts;
        let key = self.descriptor.key("rope.dimension_sections");
        if !parts.halves_with_sections {
            return Ok(parts.rope);
        }
        let sections = self.gguf.i32s(&key)?.unwrap_or_default();
        let has_sections = sections.iter().any(|n| *n != 0);
        Ok(if has_sections { RopePairing::Halves } else { parts.rope })
    }

    /// Layers of a feed-forward part only.
    fn ffn_only(&self, n: usize) -> Result<Vec<bool>> {
        if !self.descriptor.parts.one_part_a_layer {
            return Ok(Vec::new());
        }
        let key = "feed_forward_length";
        let widths = self.gguf.u32s(&self.descriptor.key(key))?.unwrap_or_default();
        match widths.get(..n) {
            Some(widths) => Ok(widths.iter().map(|width| *width > 0).collect()),
            None => {
                let expected = format!("a width for each of {n} layers, 0 for those without");
                Err(self.bad(key, expected, format!("{} of them", widths.len())))
            }
        }
    }

    /// All blocks but those that predict further tokens.
    pub(super) fn layers(&self) -> Result<usize> {
        let n = self.require("block_count")?;
        let further = self.gguf.u32(&self.descriptor.key("nextn_predict_layers"))?.unwrap_or(0);
        if further as usize >= n {
            let expected = format!("fewer than block_count = {n}");
            return Err(self.bad("nextn_predict_layers", expected, further));
        }
        let n_layers = n - further as usize;
        match (0..n_layers).find(|l| self.predicts(*l)) {
            None => Ok(n_layers),
            Some(l) => {
                let expected = format!("{}, as layer {l} has nextn tensors", n - l);
                Err(self.bad("nextn_predict_layers", expected, further))
            }
        }
    }

    /// Whether the file has tensors of a layer that predict further tokens.
    fn predicts(&self, layer: usize) -> bool {
        let name = self.descriptor.tensor_name("nextn_eh_proj", layer);
        name.is_some_and(|(name, _)| self.gguf.tensor_index(&name).is_some())
    }

    /// A flag for each of `n` layers, of a file of `n_blocks`.
    pub fn flags(
        &self,
        key: &str,
        listed: Value<'_>,
        n: usize,
        n_blocks: usize,
    ) -> Result<Vec<bool>> {
        let expected = || format!("true or false for {n_blocks} layers");
        // llama.cpp saves whole numbers, and a single one where all layers are alike.
        let is_true = |v: Value<'_>| match v {
            Value::Bool(b) => Some(b),
            number => number.as_u64().filter(|n| *n <= 1).map(|n| n == 1),
        };
        let all = |list: Array<'_>| -> Option<Vec<bool>> {
            (0..list.len()).map(|i| list.get(i).and_then(is_true)).collect()
        };
        let same = listed.as_u64().and_then(|_| is_true(listed)).map(|is| vec![is; n]);
        match listed.as_array().and_then(all).or(same) {
            // Some count the layers that predict further tokens, some do not.
            Some(mut values) if values.len() == n_blocks || values.len() == n => {
                values.truncate(n);
                Ok(values)
            }
            Some(values) => Err(self.bad(key, expected(), format!("{} of them", values.len()))),
            None => Err(self.bad(key, expected(), listed.type_name())),
        }
    }

    fn routing(&self) -> Result<Routing> {
        let (n_experts, k) = self.experts()?;
        let (n_groups, n_groups_used) = self.groups(n_experts, k)?;
        let given = self.gguf.bool(&self.descriptor.key("expert_weights_norm"))?;
        // llama.cpp saves both keys of every model: a gate of 0 says that they are not the model's,
        // but the architecture's own.
        let is_own = self.gguf.u32(&self.descriptor.key("expert_gating_func"))? != Some(0);
        let has_key = !self.descriptor.router.normalize_has_no_key;
        let given = given.filter(|norm| has_key && (*norm || is_own));
        let score = self.score()?;
        if score == Score::SparseMixer && n_experts > 0 && k != 2 {
            return Err(self.bad("expert_used_count", "2, by SparseMixer".into(), k));
        }
        Ok(Routing {
            n_experts,
            k,
            choice: Choice {
                score,
                cap: self.soft_cap("router_logit_softcapping")?.unwrap_or(0.0),
                normalize: given.unwrap_or(self.descriptor.router.normalize),
                scale: self.factor("expert_weights_scale")?.unwrap_or(1.0),
                bias_on_logits: self.descriptor.router.bias_on_logits,
                n_groups,
                n_groups_used,
                jitter: self.positive("router_jitter_noise")?.unwrap_or(0.01),
            },
            capacity: self.count("expert_capacity")?,
            adjugate: AdjugateParams::read(self, n_experts, k)?,
            values: ValueParams::read(self, n_experts)?,
        })
    }

    fn score(&self) -> Result<Score> {
        match self.gguf.u32(&self.descriptor.key("expert_gating_func"))? {
            None | Some(0) => Ok(self.descriptor.router.score),
            Some(1) => Ok(Score::Softmax),
            Some(2) => Ok(Score::Sigmoid),
            Some(3) => Ok(Score::SoftmaxChosen),
            Some(4) => Ok(Score::SqrtSoftplus),
            Some(other) => {
                let expected = "1 (softmax), 2 (sigmoid), 3 (softmax of the chosen) or 4 (root of \
                                softplus)";
                Err(self.bad("expert_gating_func", expected.into(), other))
            }
        }
    }

    /// Routed experts and how many of them a token uses; zeros in a dense model.
    fn experts(&self) -> Result<(usize, usize)> {
        match self.gguf.u32(&self.descriptor.key("expert_count"))? {
            None | Some(0) => return Ok((0, 0)),
            Some(_) => (),
        }
        let n = self.require("expert_count")?;
        let used = self.experts_used()?;
        if used > n {
            let expected = format!("at most expert_count = {n}");
            return Err(self.bad("expert_used_count", expected, used));
        }
        Ok((n, used))
    }

    /// Experts that a token uses: one number, or one a layer, 0 in dense ones.
    fn experts_used(&self) -> Result<usize> {
        let key = "expert_used_count";
        let full_key = self.descriptor.key(key);
        if !matches!(self.gguf.get(&full_key), Some(Value::Array(_))) {
            return self.require(key);
        }
        let mut counts = self.gguf.u32s(&full_key)?.unwrap_or_default();
        counts.retain(|n| *n > 0);
        counts.dedup();
        match counts[..] {
            [used] => Ok(used as usize),
            _ => {
                let expected = "one number for all layers with experts".into();
                Err(self.bad(key, expected, format!("{counts:?}")))
            }
        }
    }

    /// Groups of experts and how many of them a token uses; one group where there are none.
    fn groups(&self, n_experts: usize, k: usize) -> Result<(usize, usize)> {
        let used = self.gguf.u32(&self.descriptor.key("expert_group_used_count"))?;
        let n = match self.gguf.u32(&self.descriptor.key("expert_group_count"))? {
            _ if n_experts == 0 => return Ok((1, 1)),
            Some(1) => return Ok((1, 1)),
            None | Some(0) if used.unwrap_or(0) == 0 => return Ok((1, 1)),
            _ => self.require("expert_group_count")?,
        };
        let used = self.require("expert_group_used_count")?;
        // Groups are compared by their best two.
        if !n_experts.is_multiple_of(n) || n_experts < 2 * n {
            let expected =
                format!("a divisor of expert_count = {n_experts} that is no more than half");
            return Err(self.bad("expert_group_count", expected, n));
        }
        if used > n || used * (n_experts / n) < k {
            let expected = format!("at most {n} groups with {k} experts or more in all");
            return Err(self.bad("expert_group_used_count", expected, used));
        }
        Ok((n, used))
    }
}
