//! Weights of attention to a window and to compressed rows (DeepSeek-V4 and V4.1).

use super::binder::Binder;
use super::mixer::{MixerWeights, vector_bytes};
use super::residence::{Host, Residence};
use super::{HeadMatrices, Linear};
use crate::Result;
use crate::model::compressed::INDEXED;

#[derive(Clone, Debug)]
pub struct CompressedWeights<R: Residence = Host> {
    pub n_head: usize,
    /// Elements of a head of queries, and of a position's one row, which is key and value.
    pub head_dim: usize,
    pub n_rot: usize,
    pub window: usize,
    /// Queries through a row of low rank.
    pub q_a: R::Linear,
    pub q_a_norm: R::Vector,
    pub q_b: R::Linear,
    /// Ones, the weight of each head's norm, if heads are normalised.
    pub ones: Option<R::Vector>,
    pub row: R::Linear,
    pub row_norm: R::Vector,
    pub sinks: R::Vector,
    /// A matrix a group of heads, and one for what these make.
    pub output_a: R::Heads,
    pub output_b: R::Linear,
    /// Turns as layers without compressed rows do.
    pub slides: bool,
    /// Positions of a block; 0 in layers without compressed rows.
    pub ratio: usize,
    /// The layer whose compressed rows it sees.
    pub source: usize,
    /// Whether it sees those that the last indexer has chosen: its own, or one before it.
    pub sees_chosen: bool,
    /// Attention's and its indexer's, as far as there are any.
    pub compressors: Vec<Compressor<R>>,
    /// Makes keys of an indexer of attention's compressed rows.
    pub keys: Option<RowKeys<R>>,
    /// Chooses among compressed rows; `None` on devices in contexts where it sees all.
    pub chooser: Option<Chooser<R>>,
}

/// Makes an indexer's key of a compressed row, before the row turns.
#[derive(Clone, Debug)]
pub struct RowKeys<R: Residence = Host> {
    pub weight: R::Linear,
    pub norm: R::Vector,
}

/// Makes one row of several positions' rows: in each element their mean, weighed by the softmax of
/// their scores.
#[derive(Clone, Debug)]
pub struct Compressor<R: Residence = Host> {
    /// Elements of a compressed row.
    pub dim: usize,
    /// Positions of a block.
    pub ratio: usize,
    /// Rows have two halves: a compressed row is made of the first ones of the block before and of
    /// the second ones of its own.
    pub overlaps: bool,
    pub values: R::Linear,
    /// A block of one position has no scores.
    pub scores: Option<R::Linear>,
    /// Added to the scores, by a position's place in its block: [ratio, row].
    pub places: R::Vector,
    pub norm: R::Vector,
}

impl<R: Residence> Compressor<R> {
    /// Elements of a position's row.
    pub fn width(&self) -> usize {
        self.dim * (1 + usize::from(self.overlaps))
    }

    pub fn linears(&self) -> impl Iterator<Item = &R::Linear> {
        std::iter::once(&self.values).chain(&self.scores)
    }

    /// Positions whose rows are remembered.
    pub fn n_kept(&self) -> usize {
        self.ratio * (1 + usize::from(self.overlaps))
    }
}

/// The products of an indexer, which scores compressed rows by compressed keys of its own.
#[derive(Clone, Debug)]
pub struct Chooser<R: Residence = Host> {
    /// From the row of low rank that queries are made of.
    pub q: R::Linear,
    pub weights: R::Linear,
}

impl MixerWeights for CompressedWeights {
    fn linears(&self) -> Vec<&Linear> {
        let made = self.compressors.iter().flat_map(Compressor::linears);
        let keys = self.keys.iter().map(|keys| &keys.weight);
        let index = self.chooser.iter().flat_map(|chooser| [&chooser.q, &chooser.weights]);
        let always = [&self.q_a, &self.q_b, &self.row, &self.output_b];
        always.into_iter().chain(made).chain(keys).chain(index).collect()
    }

    fn has_kernels(&self) -> bool {
        // Of layers that share compressed rows no heads are normalised.
        self.ones.is_some()
    }

    fn other_macs(&self) -> usize {
        self.output_a.macs()
    }

    fn unpacked_bytes(&self) -> usize {
        self.ones.as_ref().map_or(0, |ones| vector_bytes(ones.len()))
    }
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
        let shares = self.descriptor.parts.shares_compressed;
        let makes_rows = ratio > 0 && params.sources[l] == l;
        let index = h.indexer.as_ref().filter(|index| index.own[l]);
        let mut compressors = Vec::new();
        if makes_rows {
            compressors.push(self.compressor("attn_compressor", l, ratio, head_dim)?);
        }
        if let Some(index) = index.filter(|_| !shares) {
            compressors.push(self.compressor("indexer_compressor", l, ratio, index.dim)?);
        }
        let keys = match &h.indexer {
            Some(index) if shares && makes_rows => Some(RowKeys {
                weight: self.linear("indexer_k", l, index.dim, head_dim)?,
                norm: vector("indexer_k_norm", index.dim)?,
            }),
            _ => None,
        };
        Ok(CompressedWeights {
            n_head,
            head_dim,
            n_rot: h.rope.n_rot,
            window: params.window,
            q_a: self.linear("attn_q_a", l, rank, n_embd)?,
            q_a_norm: vector("attn_q_a_norm", rank)?,
            q_b: self.linear("attn_q_b", l, n_head * head_dim, rank)?,
            ones: (!shares).then(|| vec![1.0; head_dim]),
            row: self.linear("attn_kv", l, head_dim, n_embd)?,
            row_norm: vector("attn_kv_a_norm", head_dim)?,
            sinks: vector("attn_sinks", n_head)?,
            output_a: HeadMatrices::stacked(all, groups),
            output_b: self.linear("attn_output_b", l, n_embd, groups * rows)?,
            slides: h.kinds.slides(l),
            ratio,
            source: params.sources[l],
            sees_chosen: index.is_some() || shares && ratio > 0,
            compressors,
            keys,
            chooser: match index {
                None => None,
                Some(index) => Some(Chooser {
                    q: self.linear("indexer_q", l, index.n_heads * index.dim, rank)?,
                    weights: self.linear("indexer_weights", l, index.n_heads, n_embd)?,
                }),
            },
        })
    }

    fn compressor(&self, role: &str, l: usize, ratio: usize, dim: usize) -> Result<Compressor> {
        let overlaps = ratio == INDEXED;
        let width = dim * (1 + usize::from(overlaps));
        let linear =
            |part: &str| self.linear(&format!("{role}_{part}"), l, width, self.hyper.n_embd);
        let places = match self.find(&format!("{role}_ape"), l)? {
            Some(places) => self.values(places, &[width, ratio])?,
            None => vec![0.0; width * ratio],
        };
        Ok(Compressor {
            dim,
            ratio,
            overlaps,
            values: linear("kv")?,
            scores: if ratio > 1 { Some(linear("gate")?) } else { None },
            places,
            norm: self.vector(self.require(&format!("{role}_norm"), l)?, dim)?,
        })
    }
}
