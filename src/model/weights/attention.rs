//! Weights of grouped-query attention and of latent attention.

use super::super::descriptor;
use super::binder::Binder;
use super::{HeadMatrices, Linear, Matrix, Mixer};
use crate::Result;
use crate::quant;

#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// Makes a gate beside the query if `gated`: [q, gate] a head.
    pub q: Linear,
    pub gated: bool,
    pub k: Linear,
    pub v: Linear,
    /// Makes a gate of the heads' values: they are multiplied by its sigmoid.
    pub gate: Option<Linear>,
    /// RMSNorm before or after RoPE, over each head or, where it is as long as all of them, over a
    /// token's heads together.
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    /// Queries and keys are rotated.
    pub rotates: bool,
    /// A score a head that takes part in the softmax.
    pub sinks: Option<Vec<f32>>,
    pub output: Linear,
    /// Positions that a query sees; all if none is given.
    pub window: Option<usize>,
}

/// Multi-head latent attention (DeepSeek-V2, section 2.1.2 and appendix C).
#[derive(Clone, Debug)]
pub struct LatentWeights {
    pub query: Query,
    /// The compressed row and the key part that all heads turn: [kv_rank + n_rot, n_embd].
    pub kv_a: Linear,
    pub kv_a_norm: Vec<f32>,
    /// Matrices that take a head's query to the compressed space: [kv_rank, head_dim − n_rot] each.
    pub k_b: HeadMatrices,
    /// A head's values from the compressed space: [head_dim_v, kv_rank] each.
    pub v_b: HeadMatrices,
    pub output: Linear,
}

#[derive(Clone, Debug)]
pub enum Query {
    Direct(Linear),
    /// Through a compressed row of its own.
    Compressed {
        a: Linear,
        norm: Vec<f32>,
        b: Linear,
    },
}

impl Binder<'_> {
    pub fn mixer(&self, l: usize) -> Result<Mixer> {
        if let Some((layers, shape)) = &self.hyper.delta
            && layers[l]
        {
            return Ok(Mixer::Delta(self.delta(l, *shape)?));
        }
        match self.descriptor.parts.mixer {
            descriptor::Mixer::Attention => Ok(Mixer::Attention(self.attention("attn", l)?)),
            descriptor::Mixer::Latent => Ok(Mixer::Latent(self.latent(l)?)),
        }
    }

    /// The attention whose roles begin with `role`.
    pub fn attention(&self, role: &str, l: usize) -> Result<AttentionWeights> {
        let h = self.hyper;
        let of = |part: &str| format!("{role}_{part}");
        let gated = self.descriptor.parts.gated_attention;
        let parts = if gated { 2 } else { 1 };
        self.together(&["attn_q_bias", "attn_k_bias", "attn_v_bias"], l)?;
        self.together(&["attn_q_norm", "attn_k_norm"], l)?;
        let rows =
            [parts * h.n_head * h.head_dim, h.n_head_kv * h.head_dim, h.n_head_kv * h.head_dim_v];
        let [q, k, v] = match self.find(&of("qkv_fused"), l)? {
            Some(index) => self.rows_apart(index, rows)?,
            None => {
                let [q, k, v] = ["q", "k", "v"].map(|part| of(part));
                [
                    self.linear(&q, l, rows[0], h.n_embd)?,
                    self.linear(&k, l, rows[1], h.n_embd)?,
                    self.linear(&v, l, rows[2], h.n_embd)?,
                ]
            }
        };
        let gate = match self.name(&of("value_gate"), l) {
            Some(_) => {
                Some(self.linear(&of("value_gate"), l, h.n_head * h.head_dim_v, h.n_embd)?)
            }
            None => None,
        };
        Ok(AttentionWeights {
            q,
            gated,
            k,
            v,
            gate,
            rotates: h.kinds.rotates(l),
            q_norm: self.head_norm(&of("q_norm"), l, h.n_head)?,
            k_norm: self.head_norm(&of("k_norm"), l, h.n_head_kv)?,
            sinks: self.optional_vector(&of("sinks"), l, h.n_head)?,
            output: self.linear(&of("output"), l, h.n_embd, h.n_head * h.head_dim_v)?,
            window: h.kinds.window_of(l),
        })
    }

    /// Matrices of these numbers of rows that lie one behind the other in one tensor.
    fn rows_apart(&self, index: usize, rows: [usize; 3]) -> Result<[Linear; 3]> {
        let all = self.matrix(index, rows.iter().sum(), self.hyper.n_embd)?;
        let mut first = 0;
        Ok(rows.map(|n| {
            first += n;
            Linear { weight: all.clone().rows_of(first - n, n), bias: None }
        }))
    }

    /// A norm as long as one head, or as all `n_heads` of a token.
    fn head_norm(&self, role: &str, l: usize, n_heads: usize) -> Result<Option<Vec<f32>>> {
        let Some(index) = self.find(role, l)? else { return Ok(None) };
        let (one, all) = (self.hyper.head_dim, n_heads * self.hyper.head_dim);
        let given = self.tensor(index).dims.iter().product::<u64>() as usize;
        self.vector(index, if given == all { all } else { one }).map(Some)
    }

    fn latent(&self, l: usize) -> Result<LatentWeights> {
        let h = self.hyper;
        let n_q = h.n_head * h.head_dim;
        let query = match self.together(&["attn_q_a", "attn_q_a_norm", "attn_q_b"], l)? {
            false => Query::Direct(self.linear("attn_q", l, n_q, h.n_embd)?),
            true => {
                let a = self.require("attn_q_a", l)?;
                let rows = self.tensor(a).dims.get(1).copied().unwrap_or(0) as usize;
                let key = self.descriptor.key("attention.q_lora_rank");
                let rank = self.gguf.u32(&key)?.map_or(rows, |rank| rank as usize);
                Query::Compressed {
                    a: self.linear("attn_q_a", l, rank, h.n_embd)?,
                    norm: self.vector(self.require("attn_q_a_norm", l)?, rank)?,
                    b: self.linear("attn_q_b", l, n_q, rank)?,
                }
            }
        };
        let (k_b, v_b) = self.up_projections(l)?;
        Ok(LatentWeights {
            query,
            kv_a: self.linear("attn_kv_a_mqa", l, h.kv_rank + h.rope.n_rot, h.n_embd)?,
            kv_a_norm: self.vector(self.require("attn_kv_a_norm", l)?, h.kv_rank)?,
            k_b,
            v_b,
            output: self.linear("attn_output", l, h.n_embd, h.n_head * h.head_dim_v)?,
        })
    }

    /// Files of today have them apart and the keys' transposed; older ones have both in one
    /// tensor, whose keys are unpacked and transposed here.
    fn up_projections(&self, l: usize) -> Result<(HeadMatrices, HeadMatrices)> {
        let h = self.hyper;
        let (rank, n_head, nope, value) =
            (h.kv_rank, h.n_head, h.head_dim - h.rope.n_rot, h.head_dim_v);
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
