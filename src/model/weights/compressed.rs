//! Weights of attention to a window and to compressed rows (DeepSeek-V4).

use super::binder::Binder;
use super::{HeadMatrices, Linear};
use crate::Result;
use crate::model::compressed::INDEXED;

#[derive(Clone, Debug)]
pub struct CompressedWeights {
    pub n_head: usize,
    /// Elements of a head of queries, and of a position's one row, which is key and value.
    pub head_dim: usize,
    pub n_rot: usize,
    pub window: usize,
    /// Queries through a row of low rank.
    pub q_a: Linear,
    pub q_a_norm: Vec<f32>,
    pub q_b: Linear,
    /// Ones, the weight of each head's norm.
    pub ones: Vec<f32>,
    pub row: Linear,
    pub row_norm: Vec<f32>,
    pub sinks: Vec<f32>,
    /// A matrix a group of heads, and one for what these make.
    pub output_a: HeadMatrices,
    pub output_b: Linear,
    /// Turns as layers without compressed rows do.
    pub slides: bool,
    pub compressor: Option<Compressor>,
    pub indexer: Option<CompressedIndexer>,
}

/// Makes one row of several positions' rows: in each element their mean, weighed by the softmax of
/// their scores.
#[derive(Clone, Debug)]
pub struct Compressor {
    /// Elements of a compressed row.
    pub dim: usize,
    /// Positions of a block.
    pub ratio: usize,
    /// Rows have two halves: a compressed row is made of the first ones of the block before and of
    /// the second ones of its own.
    pub overlaps: bool,
    pub values: Linear,
    pub scores: Linear,
    /// Added to the scores, by a position's place in its block: [ratio, row].
    pub places: Vec<f32>,
    pub norm: Vec<f32>,
}

impl Compressor {
    /// Elements of a position's row.
    pub fn width(&self) -> usize {
        self.dim * (1 + usize::from(self.overlaps))
    }

    /// Positions whose rows are remembered.
    pub fn n_kept(&self) -> usize {
        self.ratio * (1 + usize::from(self.overlaps))
    }
}

/// Scores of compressed rows, by compressed keys of its own.
#[derive(Clone, Debug)]
pub struct CompressedIndexer {
    /// From the row of low rank that queries are made of.
    pub q: Linear,
    pub weights: Linear,
    pub compressor: Compressor,
}

impl Binder<'_> {
    pub fn compressed(&self, l: usize) -> Result<CompressedWeights> {
        let h = self.hyper;
        let params = h.compressed.as_ref().expect("a model with compressed rows");
        let (n_embd, n_head, head_dim) = (h.n_embd, h.n_head, h.head_dim);
        let ratio = params.ratios[l];
        let rank = h.q_rank;
        let vector = |role: &str, n| self.vector(self.require(role, l)?, n);
        let (rows, groups) = (params.group_rank, params.n_groups);
        let group_dim = n_head * head_dim / groups;
        let output = self.require("attn_output_a", l)?;
        let is_stack = self.tensor(output).dims.len() > 2;
        let all = match is_stack {
            true => self.stack(output, rows, group_dim, groups)?,
            false => self.matrix(output, rows * groups, group_dim)?,
        };
        let index = h.indexer.as_ref().filter(|index| index.own[l]);
        Ok(CompressedWeights {
            n_head,
            head_dim,
            n_rot: h.rope.n_rot,
            window: params.window,
            q_a: self.linear("attn_q_a", l, rank, n_embd)?,
            q_a_norm: vector("attn_q_a_norm", rank)?,
            q_b: self.linear("attn_q_b", l, n_head * head_dim, rank)?,
            ones: vec![1.0; head_dim],
            row: self.linear("attn_kv", l, head_dim, n_embd)?,
            row_norm: vector("attn_kv_a_norm", head_dim)?,
            sinks: vector("attn_sinks", n_head)?,
            output_a: HeadMatrices::stacked(all, groups),
            output_b: self.linear("attn_output_b", l, n_embd, groups * rows)?,
            slides: h.kinds.slides(l),
            compressor: match ratio {
                0 => None,
                _ => Some(self.compressor("attn_compressor", l, ratio, head_dim)?),
            },
            indexer: match index {
                None => None,
                Some(index) => Some(CompressedIndexer {
                    q: self.linear("indexer_q", l, index.n_heads * index.dim, rank)?,
                    weights: self.linear("indexer_weights", l, index.n_heads, n_embd)?,
                    compressor: self.compressor("indexer_compressor", l, ratio, index.dim)?,
                }),
            },
        })
    }

    fn compressor(&self, role: &str, l: usize, ratio: usize, dim: usize) -> Result<Compressor> {
        let overlaps = ratio == INDEXED;
        let width = dim * (1 + usize::from(overlaps));
        let linear =
            |part: &str| self.linear(&format!("{role}_{part}"), l, width, self.hyper.n_embd);
        let places = self.require(&format!("{role}_ape"), l)?;
        Ok(Compressor {
            dim,
            ratio,
            overlaps,
            values: linear("kv")?,
            scores: linear("gate")?,
            places: self.values(places, &[width, ratio])?,
            norm: self.vector(self.require(&format!("{role}_norm"), l)?, dim)?,
        })
    }
}
