//! The KV cache of one session: keys (after RoPE) and values of every layer, position and KV head,
//! or latent attention's one row for both. A head's positions lie one after the other, so that
//! attention reads them as a stream.

use crate::backend::cpu::attention::{Elements, Rows, RowsMut};
use crate::backend::cpu::delta::DeltaShape;
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
    /// A gated delta rule: the same for any number of positions, in f32.
    Delta(DeltaShape),
}

impl LayerShape {
    /// Bytes for `n_ctx` positions.
    pub fn n_bytes(self, n_ctx: usize, k: CacheType, v: CacheType) -> usize {
        match self {
            LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                n_ctx * n_head_kv * (k_dim * k.bytes() + v_dim * v.bytes())
            }
            LayerShape::Latent { dim } => n_ctx * dim * k.bytes(),
            LayerShape::Delta(shape) => 4 * (shape.n_past() + shape.n_state()),
        }
    }
}

/// Bytes of a cache of `n_ctx` positions.
pub fn n_bytes(layers: &[LayerShape], n_ctx: usize, k: CacheType, v: CacheType) -> u64 {
    layers.iter().map(|layer| layer.n_bytes(n_ctx, k, v) as u64).sum()
}

struct LayerCache {
    shape: LayerShape,
    k: Plane,
    v: Plane,
    delta: DeltaState,
}

/// What a gated delta rule carries on from position to position.
#[derive(Default)]
pub struct DeltaState {
    /// [kernel − 1, channels]
    pub past: Vec<f32>,
    /// [n_v_heads, k_dim, v_dim]
    pub state: Vec<f32>,
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
        let layer = |&shape: &LayerShape| {
            let mut delta = DeltaState::default();
            let (k_width, v_width) = match shape {
                LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                    (n_head_kv * k_dim, n_head_kv * v_dim)
                }
                LayerShape::Latent { dim } => (dim, 0),
                LayerShape::Delta(shape) => {
                    delta.past = vec![0.0; shape.n_past()];
                    delta.state = vec![0.0; shape.n_state()];
                    (0, 0)
                }
            };
            LayerCache { shape, k: plane(k, k_width), v: plane(v, v_width), delta }
        };
        KvCache { n_ctx, layers: shapes.iter().map(layer).collect() }
    }

    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Takes back positions from `n` of `n_past` on; answers how many are left. What layers with a
    /// state have seen cannot be taken back: they begin anew.
    pub fn truncate(&mut self, n_past: usize, n: usize) -> usize {
        let has_state = self.layers.iter().any(|l| matches!(l.shape, LayerShape::Delta(_)));
        if !has_state || n >= n_past {
            return n.min(n_past);
        }
        for layer in &mut self.layers {
            layer.delta.past.fill(0.0);
            layer.delta.state.fill(0.0);
        }
        0
    }

    /// A layer's state.
    pub fn delta_mut(&mut self, layer: usize) -> &mut DeltaState {
        &mut self.layers[layer].delta
    }

    /// Keys and values of a layer, to read; of latent attention the rows twice.
    pub fn rows(&self, layer: usize) -> (Rows<'_>, Rows<'_>) {
        let LayerCache { shape, k, v, .. } = &self.layers[layer];
        match *shape {
            LayerShape::Heads { k_dim, v_dim, .. } => {
                (k.rows(k_dim, self.n_ctx), v.rows(v_dim, self.n_ctx))
            }
            LayerShape::Latent { dim } => (k.rows(dim, self.n_ctx), k.rows(dim, self.n_ctx)),
            LayerShape::Delta(_) => (k.rows(0, 0), v.rows(0, 0)),
        }
    }

    /// Keys and values of a layer, to write.
    pub fn rows_mut(&mut self, layer: usize) -> (RowsMut<'_>, RowsMut<'_>) {
        let n_ctx = self.n_ctx;
        let LayerCache { shape, k, v, .. } = &mut self.layers[layer];
        let (k_dim, v_dim) = match *shape {
            LayerShape::Heads { k_dim, v_dim, .. } => (k_dim, v_dim),
            LayerShape::Latent { dim } => (dim, 0),
            LayerShape::Delta(_) => (0, 0),
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
