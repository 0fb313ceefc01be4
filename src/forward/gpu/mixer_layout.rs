//! The buffers of mixers: as large as the layer that needs most.

use crate::backend::gpu::attention::Attention;
use crate::forward::gpu::acts::acts_bytes;
use crate::forward::gpu::bump::{BumpLayout, ByteRange};
use crate::forward::gpu::index_layers::scores_bytes;
use crate::model::hyper::HyperParams;
use crate::model::weights::{Mixer, Weights, any_mixer};

#[derive(Clone, Default)]
pub struct MixerLayout {
    pub q: ByteRange,
    /// Products that are split afterwards.
    pub raw: ByteRange,
    pub k: ByteRange,
    pub v: ByteRange,
    pub attended: ByteRange,
    pub gate: ByteRange,
    pub compressed: ByteRange,
    pub nope: ByteRange,
    pub absorbed: ByteRange,
    /// `k`, `nope` and `absorbed` together, which lie one behind the other: latent attention needs
    /// them, or keys and values of the heads.
    pub latent: ByteRange,
    pub kv: ByteRange,
    pub acts: ByteRange,
    pub work: ByteRange,
    pub qkv: ByteRange,
    pub convolved: ByteRange,
    pub gates: [ByteRange; 2],
    pub decays: ByteRange,
    pub head_factors: ByteRange,
    pub ranks: ByteRange,
    pub scan: ByteRange,
}

/// The most that any layer's mixer needs: numbers of a token unless said.
pub struct MixerSizes<'a> {
    pub hyper: &'a HyperParams,
    /// The largest micro-batch, and the context.
    pub n: usize,
    pub n_ctx: usize,
    pub q: usize,
    /// Queries with their gates, if one product makes both.
    pub gated: usize,
    /// Keys and values of all heads.
    pub keys: [usize; 2],
    /// Values that a mixer weighs, or that a state gives.
    values: usize,
    /// The row of low rank that queries are made of.
    pub low_rank: usize,
    /// Bytes of products' inputs of the micro-batch.
    acts: usize,
    /// Rows that a token sees besides those of its context.
    pub n_seen: usize,
    /// Latent attention: rows of the cache, queries and values in the compressed space and queries'
    /// first parts, all heads together, and one head's values in the compressed space.
    pub latent_row: usize,
    pub latent_queries: usize,
    pub latent_values: usize,
    pub latent_rank: usize,
    pub nope: usize,
    /// The product that comes first.
    pub projected: usize,
    /// A convolution's output, if the state reads it.
    pub convolved: usize,
    /// Gates, a number a head.
    pub heads: usize,
    /// Factors of heads' queries.
    pub head_factors: usize,
    /// Numbers that decays are made of, if each element of a key or each channel has its own.
    pub decays: usize,
    /// The first product of a matrix in two parts.
    rank: usize,
    /// The product that is put into states and reads them, if a convolution comes before it.
    pub scan: usize,
}

/// The room that a mixer needs on a device.
pub trait DeviceSizes {
    fn raise(&self, sizes: &mut MixerSizes);
}

/// `None` for a layer that has a feed-forward part only.
fn sizes_of(mixer: &Mixer) -> Option<&dyn DeviceSizes> {
    any_mixer!(mixer)
}

pub fn raise(most: &mut usize, own: usize) {
    *most = own.max(*most);
}

impl<'a> MixerSizes<'a> {
    /// For micro-batches of up to `n` tokens in contexts of `n_ctx`.
    pub fn of(h: &'a HyperParams, weights: &Weights, n: usize, n_ctx: usize) -> MixerSizes<'a> {
        let mut sizes = MixerSizes {
            hyper: h,
            n,
            n_ctx,
            q: h.n_head * h.head_dim,
            gated: 0,
            keys: [h.head_dim, h.head_dim_v].map(|dim| h.n_head_kv * dim),
            values: 0,
            low_rank: 0,
            acts: 0,
            n_seen: n_ctx,
            latent_row: 0,
            latent_queries: 0,
            latent_values: 0,
            latent_rank: 0,
            nope: 0,
            projected: 0,
            convolved: 0,
            heads: 0,
            head_factors: 0,
            decays: 0,
            rank: 0,
            scan: 0,
        };
        sizes.raise_values(h.n_head * h.head_dim_v);
        sizes.raise_values(h.layer_input);
        for layer in &weights.layers {
            if let Some(mixer) = sizes_of(&layer.mixer) {
                mixer.raise(&mut sizes);
            }
        }
        sizes
    }

    /// Values, which the last projection reads.
    pub fn raise_values(&mut self, values: usize) {
        raise(&mut self.values, values);
        self.raise_acts(self.n, values);
    }

    pub fn raise_rank(&mut self, rank: usize) {
        raise(&mut self.rank, rank);
        self.raise_acts(self.n, rank);
    }

    /// The input of a product, [rows, cols].
    pub fn raise_acts(&mut self, rows: usize, cols: usize) {
        raise(&mut self.acts, acts_bytes(rows, cols));
    }

    pub fn layout(&self, bump: &mut BumpLayout) -> MixerLayout {
        let MixerSizes { hyper, n, n_ctx, keys, .. } = *self;
        let latent = [keys[0].max(self.latent_queries), self.nope, self.latent_values];
        let [k, nope, absorbed] = latent.map(|size| bump.words(n * size));
        let v_dim = if self.latent_rank > 0 { self.latent_rank } else { hyper.head_dim_v };
        let work = Attention::work_bytes(hyper.n_head, v_dim, self.n_seen, n);
        MixerLayout {
            // Products of keys or values come here before their factor.
            q: bump.words(n * self.q.max(keys[0]).max(keys[1])),
            raw: bump.words(n * self.gated),
            latent: k.start..absorbed.end,
            k,
            v: bump.words(n * keys[1]),
            attended: bump.words(n * self.values),
            gate: bump.words(n * self.values),
            compressed: bump.words(n * self.low_rank),
            nope,
            absorbed,
            kv: bump.words(n * self.latent_row),
            acts: bump.bytes(self.acts),
            work: bump.bytes(work.max(scores_bytes(hyper, n_ctx))),
            qkv: bump.words(n * self.projected),
            convolved: bump.words(n * self.convolved),
            gates: [bump.words(2 * n * self.heads), bump.words(n * self.heads)],
            decays: bump.words(n * self.decays),
            head_factors: bump.words(n * self.head_factors),
            ranks: bump.words(n * self.rank),
            scan: bump.words(n * self.scan),
        }
    }
}
