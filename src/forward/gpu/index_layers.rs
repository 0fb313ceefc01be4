//! The indexers of layers on the device, uploaded, and their buffers.

use crate::backend::gpu::index::{Scores, list_width};
use crate::forward::gpu::bump::{BumpLayout, ByteRange};
use crate::forward::gpu::pack::{OnDevice, Pack, pack};
use crate::forward::gpu::weights::Packer;
use crate::model::hyper::HyperParams;
use crate::model::indexer::IndexerParams;
use crate::model::weights::{BlockIndexer, Indexer, KeyPool, Sees};

/// Bytes of rows that are gathered at once, unless a token has more: enough blocks for a device,
/// and little beside a model's weights.
const GATHERED_BYTES: usize = 64 << 20;

/// Buffers of indexers: f32, with a row for each token.
#[derive(Clone, Default)]
pub struct IndexLayout {
    /// [tokens, n_heads, dim]
    pub q: ByteRange,
    /// [tokens, dim]
    pub k: ByteRange,
    pub normed: ByteRange,
    /// [tokens, n_heads]
    pub weights: ByteRange,
    /// [tokens, dim]: scores of positions in each element of their keys, if blocks have one key
    pub scores: ByteRange,
    /// Rows of keys and of values of a cache of any type, [tokens, KV heads, list], of as many
    /// tokens as there is room for.
    pub gathered: [ByteRange; 2],
}

impl IndexLayout {
    /// For micro-batches of up to `n` tokens in contexts of `n_ctx`.
    pub fn new(hyper: &HyperParams, n: usize, n_ctx: usize, bump: &mut BumpLayout) -> IndexLayout {
        let Some(params) = hyper.choosing_indexer(n_ctx) else { return IndexLayout::default() };
        // Latent rows are keys and values of all heads. Layers with compressed rows, and keys made
        // of them, have buffers of their own.
        let (heads, dims, n_keys) = match (&hyper.compressed, hyper.kv_rank) {
            (Some(_), _) => (0, [0; 2], 0),
            (None, 0) => (hyper.n_head_kv, [hyper.head_dim, hyper.head_dim_v], n),
            (None, rank) => (1, [rank + hyper.rope.n_rot, 0], n),
        };
        let n_rows = heads * width(params);
        let bytes = 4 * n_rows * dims.iter().sum::<usize>();
        let fit = GATHERED_BYTES.checked_div(bytes).unwrap_or(1);
        let n_gathered = fit.clamp(1, n.max(1));
        IndexLayout {
            q: bump.words(n * params.n_heads * params.dim),
            k: bump.words(n_keys * params.dim),
            normed: bump.words(n_keys * params.dim),
            weights: bump.words(n * params.n_heads),
            scores: bump.words(if params.block > 1 { n_keys * params.dim } else { 0 }),
            gathered: dims.map(|dim| bump.words(n_gathered * n_rows * dim)),
        }
    }
}

/// The lists of positions that a pass keeps from layer to layer.
#[derive(Clone, Default)]
pub struct ListsLayout {
    /// u32 [tokens, lists, list] and [tokens, lists]: see `DeviceLists`.
    pub chosen: ByteRange,
    pub last: ByteRange,
}

impl ListsLayout {
    pub fn new(hyper: &HyperParams, n: usize, n_ctx: usize, bump: &mut BumpLayout) -> ListsLayout {
        let Some(params) = hyper.choosing_indexer(n_ctx) else { return ListsLayout::default() };
        let n_lists = n * n_lists(params);
        ListsLayout { chosen: bump.words(n_lists * width(params)), last: bump.words(n_lists) }
    }
}

/// The scores that lists are made of.
pub fn scores(params: &IndexerParams) -> Scores {
    if params.by_head { Scores::Largest } else { Scores::Sums }
}

/// The number of a token's lists.
pub fn n_lists(params: &IndexerParams) -> usize {
    if params.by_head { params.n_heads } else { 1 }
}

/// The bytes of a token's scores in contexts of `n_ctx`.
pub fn scores_bytes(hyper: &HyperParams, n_ctx: usize) -> usize {
    let params = hyper.choosing_indexer(n_ctx);
    params.map_or(0, |params| 4 * n_lists(params) * n_ctx.div_ceil(params.block))
}

/// The length of the longest list.
pub fn width(params: &IndexerParams) -> usize {
    list_width(scores(params), params.top_k, params.block)
}

/// All in contexts where no indexer chooses.
impl<'a> Pack<'a> for Sees {
    type Packed = Sees<OnDevice>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Sees<OnDevice> {
        match self {
            Sees::Chosen(w) if packer.chooses => Sees::Chosen(w.pack(packer)),
            Sees::AsBefore if packer.chooses => Sees::AsBefore,
            _ => Sees::All,
        }
    }
}

pack! {
    Indexer { q, q_norm, head_factors, k, k_norm, weights, rope, pool }
    KeyPool { scores, places }
    BlockIndexer { means, q, k, q_norm, k_norm }
}
