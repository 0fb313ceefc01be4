//! Weights of grouped-query attention and of latent attention.

use super::super::descriptor::{Positions, ValueGate};
use super::super::heads::LatentShape;
use super::binder::Binder;
use super::mixer::{MixerWeights, vector_bytes};
use super::residence::{Host, Residence};
use super::values::ValueExperts;
use super::{HeadMatrices, Linear, Matrix};
use crate::backend::ops::{DistanceBias, RopeShape};
use crate::quant;
use crate::{Error, Result};

#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// Heads of queries and of keys.
    pub n_head: usize,
    pub n_head_kv: usize,
    /// Elements of a head of q and k, and of v.
    pub head_dim: usize,
    pub head_dim_v: usize,
    /// Makes a gate beside the query if `gated`: [q, gate] a head.
    pub q: Linear,
    pub gated: bool,
    /// They have no rows where keys and values are another layer's.
    pub k: Linear,
    pub v: Linear,
    /// Make the values, in the place of `v`, which has no rows then.
    pub values: Option<Box<ValueExperts>>,
    /// The layer whose keys and values these are.
    pub shared_with: Option<usize>,
    /// Ones, over each head, if values are normalised.
    pub v_norm: Option<Vec<f32>>,
    /// Ones, over each head's result, if it is normalised before its gate.
    pub result_norm: Option<Vec<f32>>,
    /// Makes a gate of the heads' values, a number an element or a head, and its function.
    pub gate: Option<(Linear, ValueGate)>,
    /// RMSNorm before or after RoPE, over each head or, where it is as long as all of them, over a
    /// token's heads together, unless `Parts::qk_norm_by_head`.
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    /// Queries and keys are rotated.
    pub rotates: bool,
    /// Queries and keys turn like those of layers that see part of a text.
    pub slides: bool,
    /// Queries have the model's factor by position.
    pub tempers: bool,
    /// A score a head that takes part in the softmax.
    pub sinks: Option<Vec<f32>>,
    /// Added to the scores.
    pub bias: Option<DistanceBias>,
    /// Chooses the blocks that it sees.
    pub index: Option<Box<BlockIndexer>>,
    pub output: Linear,
    /// Positions that a query sees; all if none is given.
    pub window: Option<usize>,
    /// Positions of the chunks of which it sees its own.
    pub chunk: Option<usize>,
}

/// Multi-head latent attention (DeepSeek-V2, section 2.1.2 and appendix C).
#[derive(Clone, Debug)]
pub struct LatentWeights<R: Residence = Host> {
    pub shape: LatentShape,
    /// Factor on the scores.
    pub scale: f32,
    pub query: Query<R>,
    /// The layer whose rows it sees: its own number if it makes rows.
    pub source: usize,
    pub row: Option<LatentRow<R>>,
    /// Matrices that take a head's query to the compressed space: [rank, head_dim − n_rot] each.
    pub k_b: R::Heads,
    /// A head's values from the compressed space: [head_dim_v, rank] each.
    pub v_b: R::Heads,
    /// The last parts of queries and rows are rotated.
    pub rotates: bool,
    /// Queries and rows turn like those of layers that see part of a text.
    pub slides: bool,
    /// Numbers whose sigmoid multiplies the heads' values, one a head or an element.
    pub gate: Option<R::Linear>,
    /// See [`AttentionWeights`].
    pub sinks: Option<R::Vector>,
    pub window: Option<usize>,
    pub sees: Sees<R>,
    /// Makes the factors of heads' queries of [ln(position + 1), 1]: [n_head, 2].
    pub head_factors: Option<R::Linear>,
    pub output: R::Linear,
}

/// Makes a position's row.
#[derive(Clone, Debug)]
pub struct LatentRow<R: Residence = Host> {
    /// The compressed row and the key part that all heads turn: [rank + n_rot, n_embd].
    pub a: R::Linear,
    pub norm: R::Vector,
    /// RMSNorm of the key part, before it turns.
    pub k_norm: Option<R::Vector>,
}

/// The positions that latent attention sees.
#[derive(Clone, Debug)]
pub enum Sees<R: Residence = Host> {
    All,
    /// Positions that the layer's indexer chooses.
    Chosen(Box<Indexer<R>>),
    /// Positions that the indexer before it has chosen.
    AsBefore,
}

/// Scores of positions: Σ over heads of weight · max(query · key, 0).
#[derive(Clone, Debug)]
pub struct Indexer<R: Residence = Host> {
    /// Queries, from the compressed row of attention's or from the layer's input: [n_heads · dim,
    /// rank or n_embd].
    pub q: R::Linear,
    /// LayerNorm of the layer's input, before `q`.
    pub q_norm: Option<[R::Vector; 2]>,
    /// See [`LatentWeights`].
    pub head_factors: Option<R::Linear>,
    /// A position's key, after which LayerNorm comes.
    pub k: R::Linear,
    pub k_norm: [R::Vector; 2],
    /// The heads' weights: [n_heads, n_embd].
    pub weights: R::Linear,
    /// `None` in layers that do not rotate.
    pub rope: Option<RopeShape>,
    /// Makes one key of several positions'.
    pub pool: Option<KeyPool<R>>,
}

/// Makes a block's key of those of its positions: in each element their mean, weighed by the
/// softmax of their scores.
#[derive(Clone, Debug)]
pub struct KeyPool<R: Residence = Host> {
    /// [dim, n_embd]
    pub scores: R::Linear,
    /// Added to the scores, by a position's place in its block: [block, dim].
    pub places: R::Vector,
}

/// Scores of positions for each head of keys, query · key, or of blocks for all heads together, Σ
/// over its own heads of max(query · mean of keys, 0).
#[derive(Clone, Debug)]
pub struct BlockIndexer<R: Residence = Host> {
    pub means: bool,
    /// [heads · dim, n_embd] and [dim, n_embd]
    pub q: R::Linear,
    pub k: R::Linear,
    /// RMSNorm of each head, and of each mean, before it turns.
    pub q_norm: R::Vector,
    pub k_norm: R::Vector,
}

#[derive(Clone, Debug)]
pub enum Query<R: Residence = Host> {
    Direct(R::Linear),
    /// Through a compressed row of its own.
    Compressed {
        a: R::Linear,
        norm: R::Vector,
        b: R::Linear,
    },
}

impl MixerWeights for AttentionWeights {
    fn linears(&self) -> Vec<&Linear> {
        let gate = self.gate.as_ref().map(|(gate, _)| gate);
        let router = self.values.as_ref().map(|values| &values.router.logits);
        let all = [&self.q, &self.k, &self.v, &self.output].into_iter();
        all.chain(gate).chain(router).collect()
    }

    fn other_macs(&self) -> usize {
        self.values.as_ref().map_or(0, |values| values.k * values.shape.n_ff * values.shape.n_embd)
    }

    fn n_seen(&self) -> Option<usize> {
        self.window.or(self.chunk)
    }

    fn takes_adapters(&self) -> bool {
        true
    }

    fn has_kernels(&self) -> bool {
        self.result_norm.is_none() && self.values.is_none()
    }

    /// Values are normalised without weights, and slopes are in no file.
    fn unpacked_bytes(&self) -> usize {
        let ones = self.v_norm.as_ref().map(Vec::len);
        let slopes = self.bias.as_ref().map(|bias| bias.slopes().len());
        // A gate's bias may be one a head in the file.
        let gate = self.gate.as_ref().and_then(|(gate, _)| gate.bias.as_ref()).map(Vec::len);
        [ones, slopes, gate].into_iter().flatten().map(vector_bytes).sum()
    }
}

impl MixerWeights for LatentWeights {
    fn linears(&self) -> Vec<&Linear> {
        let query = match &self.query {
            Query::Direct(q) => vec![q],
            Query::Compressed { a, b, .. } => vec![a, b],
        };
        let row = self.row.as_ref().map(|row| &row.a);
        query.into_iter().chain(row).chain([&self.output]).chain(&self.gate).collect()
    }

    fn other_macs(&self) -> usize {
        self.k_b.macs() + self.v_b.macs()
    }

    fn takes_adapters(&self) -> bool {
        true
    }

    fn unpacked_bytes(&self) -> usize {
        let indexer = match &self.sees {
            Sees::Chosen(indexer) => indexer.head_factors.as_ref(),
            _ => None,
        };
        let factors = self.head_factors.iter().chain(indexer).map(|f| f.weight.own_bytes());
        self.k_b.all.own_bytes() + factors.map(|n| n.next_multiple_of(256)).sum::<usize>()
    }
}

impl Binder<'_> {
    /// The attention whose roles begin with `role`.
    pub fn attention(&self, role: &str, l: usize) -> Result<AttentionWeights> {
        let h = self.hyper;
        let of = |part: &str| format!("{role}_{part}");
        let gated = self.descriptor.parts.gated_attention;
        let parts = if gated { 2 } else { 1 };
        self.together(&["attn_q_bias", "attn_k_bias", "attn_v_bias"], l)?;
        let shared_with = Some(h.keys_of(l)).filter(|other| *other != l);
        let is_own = shared_with.is_none();
        if is_own {
            self.together(&["attn_q_norm", "attn_k_norm"], l)?;
        }
        let [n_head, n_head_kv] = h.heads_of(l);
        self.check_shared(shared_with, l)?;
        let [head_dim, head_dim_v] = h.head_dims(l);
        let values = if is_own { self.value_experts(l, n_head_kv * head_dim_v)? } else { None };
        let v_rows = if values.is_some() { 0 } else { n_head_kv * head_dim_v };
        let rows = [parts * n_head * head_dim, n_head_kv * head_dim, v_rows];
        let [q, k, v] = self.queries_keys_values(role, l, rows, is_own)?;
        self.as_in_its_kind(&of("value_gate"), l)?;
        self.as_in_its_kind(&of("sinks"), l)?;
        let gate = match self.find(&of("value_gate"), l)? {
            Some(_) => {
                let linear = self.gate_of_values(&of("value_gate"), l, n_head, h.head_dim_v)?;
                Some((linear, self.descriptor.parts.value_gate))
            }
            None => None,
        };
        Ok(AttentionWeights {
            n_head,
            n_head_kv,
            head_dim,
            head_dim_v,
            q,
            gated,
            k,
            v,
            values,
            shared_with,
            v_norm: (self.descriptor.parts.normed_values && is_own).then(|| vec![1.0; head_dim_v]),
            result_norm: self.descriptor.parts.normed_heads.then(|| vec![1.0; head_dim_v]),
            gate,
            rotates: h.kinds.rotates(l),
            slides: h.kinds.slides(l),
            tempers: h.kinds.tempers(l),
            q_norm: self.head_norm(&of("q_norm"), l, n_head, head_dim)?,
            k_norm: match is_own {
                true => self.head_norm(&of("k_norm"), l, n_head_kv, head_dim)?,
                false => None,
            },
            sinks: self.optional_vector(&of("sinks"), l, n_head)?,
            bias: match self.descriptor.parts.positions {
                Positions::Alibi => Some(DistanceBias::alibi(n_head)),
                _ => None,
            },
            index: self.block_indexer(l, n_head_kv, head_dim)?,
            output: self.linear(&of("output"), l, h.n_embd, n_head * head_dim_v)?,
            window: h.kinds.window_of(l),
            chunk: h.kinds.chunk_of(l),
        })
    }

    /// The matrices of queries, keys and values, of so many rows, or none; only of queries unless
    /// `is_own`.
    fn queries_keys_values(
        &self,
        role: &str,
        l: usize,
        rows: [usize; 3],
        is_own: bool,
    ) -> Result<[Linear; 3]> {
        let n_embd = self.hyper.n_embd;
        let [q, k, v] = ["q", "k", "v"].map(|part| format!("{role}_{part}"));
        let nothing = || Linear::plain(Matrix::of_values(&[], n_embd));
        if !is_own {
            // Some files have them all the same: they are not computed with.
            for part in [&k, &v, &format!("{role}_k_norm")] {
                self.find(part, l)?;
            }
            return Ok([self.linear(&q, l, rows[0], n_embd)?, nothing(), nothing()]);
        }
        let fused = format!("{role}_qkv_fused");
        if let Some(index) = self.find(&fused, l)? {
            return self.rows_apart(&fused, l, index, rows, n_embd);
        }
        // Values may be the keys, before these are normalised and rotated.
        let is_key = self.descriptor.parts.normed_values && self.find(&v, l)?.is_none();
        if is_key {
            self.as_in_its_kind(&v, l)?;
        }
        let v = if is_key { &k } else { &v };
        Ok([
            self.linear(&q, l, rows[0], n_embd)?,
            self.linear(&k, l, rows[1], n_embd)?,
            if rows[2] == 0 { nothing() } else { self.linear(v, l, rows[2], n_embd)? },
        ])
    }

    /// Refuses a layer with other heads of keys than the layer whose keys it sees.
    fn check_shared(&self, shared_with: Option<usize>, l: usize) -> Result<()> {
        let n_heads = |l: usize| self.hyper.heads_of(l)[1];
        match shared_with.filter(|other| n_heads(*other) != n_heads(l)) {
            None => Ok(()),
            Some(other) => {
                let key = self.descriptor.key("attention.head_count_kv");
                let expected = format!("{} in layer {l}, as in layer {other}", n_heads(other));
                Err(Error::format(self.gguf.path(), key, expected, n_heads(l).to_string()))
            }
        }
    }

    /// Refuses a layer without a tensor that another layer has which slides as it does, or sees
    /// everything as it does.
    fn as_in_its_kind(&self, role: &str, l: usize) -> Result<()> {
        if self.hyper.encoder.is_some() || self.find(role, l)?.is_some() {
            return Ok(());
        }
        let kinds = &self.hyper.kinds;
        let has = |l: usize| {
            self.name(role, l).is_some_and(|(name, _)| self.gguf.tensor_index(&name).is_some())
        };
        let mut others = (0..self.hyper.n_layers).filter(|o| kinds.slides(*o) == kinds.slides(l));
        if others.any(has) { self.require(role, l).map(drop) } else { Ok(()) }
    }

    /// A gate of as many rows as values, of `n_head` heads of `dim`, or as heads.
    fn gate_of_values(&self, role: &str, l: usize, n_head: usize, dim: usize) -> Result<Linear> {
        let index = self.require(role, l)?;
        let rows = self.tensor(index).dims.get(1).copied().unwrap_or(1) as usize;
        let rows = if rows == n_head { n_head } else { n_head * dim };
        let mut gate = self.linear(role, l, rows, self.hyper.n_embd)?;
        // A number a head, for each element of it.
        if let Some(bias) = self.optional_vector(&format!("{role}_head_bias"), l, n_head)? {
            let each = rows / n_head;
            gate.bias = Some(bias.iter().flat_map(|b| std::iter::repeat_n(*b, each)).collect());
        }
        Ok(gate)
    }

    /// A norm as long as one head, or as all `n_heads` of a token.
    fn head_norm(
        &self,
        role: &str,
        l: usize,
        n_heads: usize,
        one: usize,
    ) -> Result<Option<Vec<f32>>> {
        let Some(index) = self.find(role, l)? else { return Ok(self.plain_head_norm(l)) };
        let all = n_heads * one;
        if self.descriptor.parts.qk_norm_by_head {
            // Written flat, or as a matrix.
            let is_flat = self.tensor(index).dims.len() == 1;
            let dims = if is_flat { &[all][..] } else { &[one, n_heads] };
            return self.values(index, dims).map(Some);
        }
        let given = self.tensor(index).dims.iter().product::<u64>() as usize;
        self.vector(index, if given == all { all } else { one }).map(Some)
    }

    /// Ones, where heads are normalised without weights.
    fn plain_head_norm(&self, l: usize) -> Option<Vec<f32>> {
        let unless = self.descriptor.parts.plain_qk_norm_unless_experts?;
        let is_normed = self.hyper.kinds.rotates(l) && self.hyper.routing.n_experts != unless;
        is_normed.then(|| vec![1.0; self.hyper.head_dim])
    }

    pub fn latent(&self, l: usize) -> Result<LatentWeights> {
        let h = self.hyper;
        let shape = h.latent_of(l);
        let LatentShape { n_head, head_dim, head_dim_v, rank, n_rot } = shape;
        let (query, q_rank) = self.latent_query(l, n_head * head_dim)?;
        let (k_b, v_b) = self.up_projections(l, shape)?;
        let is_own = head_dim != h.head_dim;
        Ok(LatentWeights {
            shape,
            scale: if is_own { 1.0 / (head_dim as f32).sqrt() } else { h.attention_scale },
            query,
            source: h.keys_of(l),
            row: match h.keys_of(l) == l {
                false => None,
                true => Some(LatentRow {
                    a: self.linear("attn_kv_a_mqa", l, rank + n_rot, h.n_embd)?,
                    norm: self.vector(self.require("attn_kv_a_norm", l)?, rank)?,
                    k_norm: self.optional_vector("attn_k_norm", l, n_rot)?,
                }),
            },
            k_b,
            v_b,
            rotates: h.kinds.rotates(l),
            slides: h.kinds.slides(l),
            gate: match self.find("attn_latent_gate", l)? {
                Some(_) => Some(self.gate_of_values("attn_latent_gate", l, n_head, head_dim_v)?),
                None => None,
            },
            sinks: self.optional_vector("attn_sinks", l, n_head)?,
            window: h.kinds.window_of(l),
            sees: self.sees(l, q_rank)?,
            head_factors: self.head_factors("attn_ssmax", l, n_head)?,
            output: self.linear("attn_output", l, h.n_embd, n_head * head_dim_v)?,
        })
    }

    /// A head's scale and bias are a row.
    fn head_factors(&self, role: &str, l: usize, n_heads: usize) -> Result<Option<Linear>> {
        if self.name(role, l).is_none() {
            return Ok(None);
        }
        let vector = |role: &str| self.vector(self.require(role, l)?, n_heads);
        let (scales, biases) = (vector(role)?, vector(&format!("{role}_bias"))?);
        let rows: Vec<f32> = scales.into_iter().zip(biases).flat_map(<[f32; 2]>::from).collect();
        Ok(Some(Linear::plain(Matrix::of_values(&rows, 2))))
    }

    /// The matrices of queries with `rows` elements, and the rank of a compressed row of theirs.
    fn latent_query(&self, l: usize, rows: usize) -> Result<(Query, usize)> {
        let n_embd = self.hyper.n_embd;
        if !self.together(&["attn_q_a", "attn_q_a_norm", "attn_q_b"], l)? {
            return Ok((Query::Direct(self.linear("attn_q", l, rows, n_embd)?), 0));
        }
        let a = self.require("attn_q_a", l)?;
        let given = self.tensor(a).dims.get(1).copied().unwrap_or(0) as usize;
        let key = self.descriptor.key("attention.q_lora_rank");
        let rank = self.gguf.u32(&key)?.map_or(given, |rank| rank as usize);
        let query = Query::Compressed {
            a: self.linear("attn_q_a", l, rank, n_embd)?,
            norm: self.vector(self.require("attn_q_a_norm", l)?, rank)?,
            b: self.linear("attn_q_b", l, rows, rank)?,
        };
        Ok((query, rank))
    }

    /// One head for each of keys, as long as these, whose place in the cache is behind theirs; or,
    /// if blocks have one key, heads of its own.
    fn block_indexer(
        &self,
        l: usize,
        n_head_kv: usize,
        head_dim: usize,
    ) -> Result<Option<Box<BlockIndexer>>> {
        let Some(params) = self.hyper.indexer.as_ref().filter(|params| params.own[l]) else {
            return Ok(None);
        };
        let counts = [
            ("attention.indexer.head_count", params.n_heads, n_head_kv),
            ("attention.indexer.key_length", params.dim, head_dim),
        ];
        for (key, given, expected) in counts {
            if given != expected && !params.means {
                let (key, expected) = (self.descriptor.key(key), format!("{expected}, as of keys"));
                return Err(Error::format(self.gguf.path(), key, expected, given.to_string()));
            }
        }
        let (n_embd, dim) = (self.hyper.n_embd, params.dim);
        let vector = |role: &str| self.vector(self.require(role, l)?, dim);
        Ok(Some(Box::new(BlockIndexer {
            means: params.means,
            q: self.linear("indexer_q", l, params.n_heads * dim, n_embd)?,
            k: self.linear("indexer_k", l, dim, n_embd)?,
            q_norm: vector("indexer_q_norm")?,
            k_norm: vector("indexer_k_norm")?,
        })))
    }

    /// An indexer reads the compressed row of `rank` elements that queries are made of, or the
    /// layer's input.
    fn sees(&self, l: usize, rank: usize) -> Result<Sees> {
        let (Some(params), Some(pairing)) = (&self.hyper.indexer, self.descriptor.parts.indexer)
        else {
            return Ok(Sees::All);
        };
        if !params.own[l] {
            let slides = self.hyper.kinds.slides(l);
            return Ok(if slides { Sees::All } else { Sees::AsBefore });
        }
        let (n_embd, dim) = (self.hyper.n_embd, params.dim);
        let vector = |role: &str| self.vector(self.require(role, l)?, dim);
        let of_input = |role: &str| self.vector(self.require(role, l)?, n_embd);
        let q_norm = match self.descriptor.parts.indexer_reads_input {
            true => Some([of_input("indexer_q_norm")?, of_input("indexer_q_norm_bias")?]),
            false => self.require("attn_q_a", l).map(|_| None)?,
        };
        let has_rotated_part = self.hyper.kinds.has_rotated_part(l);
        Ok(Sees::Chosen(Box::new(Indexer {
            q: {
                let n_inputs = if q_norm.is_some() { n_embd } else { rank };
                self.linear("indexer_q", l, params.n_heads * dim, n_inputs)?
            },
            q_norm,
            head_factors: self.head_factors("indexer_ssmax", l, params.n_heads)?,
            k: self.linear("indexer_k", l, dim, n_embd)?,
            k_norm: [vector("indexer_k_norm")?, vector("indexer_k_norm_bias")?],
            weights: self.linear("indexer_weights", l, params.n_heads, n_embd)?,
            rope: has_rotated_part.then_some(RopeShape {
                head_dim: dim,
                offset: params.rope_offset,
                pairing,
            }),
            pool: match params.block {
                1 => None,
                block => Some(KeyPool {
                    scores: self.linear("indexer_compressor_gate", l, dim, n_embd)?,
                    places: {
                        let places = self.require("indexer_compressor_ape", l)?;
                        self.values(places, &[dim, block])?
                    },
                }),
            },
        })))
    }

    /// Files of today have them apart and the keys' transposed; older ones have both in one
    /// tensor, whose keys are unpacked and transposed here.
    fn up_projections(&self, l: usize, shape: LatentShape) -> Result<(HeadMatrices, HeadMatrices)> {
        let LatentShape { n_head, head_dim, head_dim_v: value, rank, n_rot } = shape;
        let nope = head_dim - n_rot;
        let both = self.find("attn_kv_b", l)?;
        if let (Some(both), None) = (both, self.find("attn_k_b", l)?) {
            let rows = nope + value;
            let all = self.matrix(both, n_head * rows, rank)?;
            let k_b = self.transposed_keys(&all, nope, rows);
            let v_b = HeadMatrices { all, n_heads: n_head, rows: value, first: nope, step: rows };
            return Ok((HeadMatrices::stacked(k_b, n_head), v_b));
        }
        let k_b = self.stack(self.require("attn_k_b", l)?, rank, nope, n_head)?;
        let v_b = self.stack(self.require("attn_v_b", l)?, value, rank, n_head)?;
        Ok((HeadMatrices::stacked(k_b, n_head), HeadMatrices::stacked(v_b, n_head)))
    }

    /// The first `nope` of each `step` rows, a head's transposed to [kv_rank, nope].
    fn transposed_keys(&self, both: &Matrix, nope: usize, step: usize) -> Matrix {
        let mat = both.mat(self.gguf);
        let (rank, n_head) = (both.cols, both.rows / step);
        let mut row = vec![0.0; rank];
        let mut values = vec![0.0; n_head * rank * nope];
        for (h, head) in values.chunks_exact_mut(rank * nope).enumerate() {
            for i in 0..nope {
                quant::dequantize(mat.ty, mat.row(h * step + i), &mut row);
                row.iter().enumerate().for_each(|(r, v)| head[r * nope + i] = *v);
            }
        }
        Matrix::of_values(&values, nope)
    }
}
