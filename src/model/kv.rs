//! The KV cache of one session: keys (after RoPE) and values of every layer, position and KV head,
//! or latent attention's one row for both. A head's positions lie one after the other, so that
//! attention reads them as a stream.

use crate::backend::cpu::attention::{Elements, Rows, RowsMut};
use crate::{Error, Result};

/// How keys or values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheType {
    F32,
    F16,
}

impl CacheType {
    pub fn bytes(self) -> usize {
        match self {
            CacheType::F32 => 4,
            CacheType::F16 => 2,
        }
    }
}

impl std::str::FromStr for CacheType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "f32" => Ok(CacheType::F32),
            "f16" => Ok(CacheType::F16),
            other => Err(Error::Usage(format!("cache type: expected f32 or f16, got {other:?}"))),
        }
    }
}

/// One layer's keys or values: [n_head][n_ctx][dim].
enum Plane {
    F32(Vec<f32>),
    F16(Vec<u16>),
}

/// What one layer keeps of each position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerShape {
    /// A key and a value for each KV head.
    Heads { n_head_kv: usize, k_dim: usize, v_dim: usize },
    /// Latent attention: one row for all heads.
    Latent { dim: usize },
}

impl LayerShape {
    /// Bytes of one position.
    fn n_bytes(self, k: CacheType, v: CacheType) -> usize {
        match self {
            LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                n_head_kv * (k_dim * k.bytes() + v_dim * v.bytes())
            }
            LayerShape::Latent { dim } => dim * k.bytes(),
        }
    }
}

/// Bytes of a cache of `n_ctx` positions.
pub fn n_bytes(layers: &[LayerShape], n_ctx: usize, k: CacheType, v: CacheType) -> u64 {
    layers.iter().map(|layer| (layer.n_bytes(k, v) * n_ctx) as u64).sum()
}

struct LayerCache {
    shape: LayerShape,
    k: Plane,
    v: Plane,
}

pub struct KvCache {
    n_ctx: usize,
    layers: Vec<LayerCache>,
}

impl KvCache {
    /// Zeroed memory that the system provides as it is first written.
    pub fn new(shapes: &[LayerShape], n_ctx: usize, k: CacheType, v: CacheType) -> KvCache {
        let plane = |ty, dim: usize| match ty {
            CacheType::F32 => Plane::F32(vec![0.0; n_ctx * dim]),
            CacheType::F16 => Plane::F16(vec![0; n_ctx * dim]),
        };
        let layer = |&shape: &LayerShape| match shape {
            LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                let (k, v) = (plane(k, n_head_kv * k_dim), plane(v, n_head_kv * v_dim));
                LayerCache { shape, k, v }
            }
            LayerShape::Latent { dim } => LayerCache { shape, k: plane(k, dim), v: plane(v, 0) },
        };
        KvCache { n_ctx, layers: shapes.iter().map(layer).collect() }
    }

    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Keys and values of a layer, to read; of latent attention the rows twice.
    pub fn rows(&self, layer: usize) -> (Rows<'_>, Rows<'_>) {
        let LayerCache { shape, k, v } = &self.layers[layer];
        match *shape {
            LayerShape::Heads { k_dim, v_dim, .. } => {
                (k.rows(k_dim, self.n_ctx), v.rows(v_dim, self.n_ctx))
            }
            LayerShape::Latent { dim } => (k.rows(dim, self.n_ctx), k.rows(dim, self.n_ctx)),
        }
    }

    /// Keys and values of a layer, to write.
    pub fn rows_mut(&mut self, layer: usize) -> (RowsMut<'_>, RowsMut<'_>) {
        let n_ctx = self.n_ctx;
        let LayerCache { shape, k, v } = &mut self.layers[layer];
        let (k_dim, v_dim) = match *shape {
            LayerShape::Heads { k_dim, v_dim, .. } => (k_dim, v_dim),
            LayerShape::Latent { dim } => (dim, 0),
        };
        (k.rows_mut(k_dim, n_ctx), v.rows_mut(v_dim, n_ctx))
    }
}

impl Plane {
    fn rows(&self, dim: usize, n_ctx: usize) -> Rows<'_> {
        let data = match self {
            Plane::F32(data) => Elements::F32(data),
            Plane::F16(data) => Elements::F16(data),
        };
        Rows { data, dim, stride: dim, n_ctx }
    }

    fn rows_mut(&mut self, dim: usize, n_ctx: usize) -> RowsMut<'_> {
        match self {
            Plane::F32(data) => RowsMut::F32 { data, dim, n_ctx },
            Plane::F16(data) => RowsMut::F16 { data, dim, n_ctx },
        }
    }
}
