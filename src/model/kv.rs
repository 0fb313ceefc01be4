//! The KV cache of one session: keys (after RoPE) and values of every layer, position and KV head.
//! A head's positions lie one after the other, so that attention reads them as a stream.

use crate::backend::cpu::attention::Rows;
use crate::backend::cpu::attention::RowsMut;
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

pub struct KvCache {
    n_ctx: usize,
    k_dim: usize,
    v_dim: usize,
    k: Vec<Plane>,
    v: Vec<Plane>,
}

/// Sizes of a cache: heads and elements a head.
#[derive(Clone, Copy, Debug)]
pub struct KvShape {
    pub n_layers: usize,
    pub n_head_kv: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    pub n_ctx: usize,
}

impl KvShape {
    pub fn n_bytes(&self, k: CacheType, v: CacheType) -> u64 {
        let row = self.k_dim * k.bytes() + self.v_dim * v.bytes();
        (self.n_layers * self.n_head_kv * self.n_ctx) as u64 * row as u64
    }
}

impl KvCache {
    /// Zeroed memory that the system provides as it is first written.
    pub fn new(shape: KvShape, k: CacheType, v: CacheType) -> KvCache {
        let plane = |ty, dim: usize| {
            let n = shape.n_head_kv * shape.n_ctx * dim;
            match ty {
                CacheType::F32 => Plane::F32(vec![0.0; n]),
                CacheType::F16 => Plane::F16(vec![0; n]),
            }
        };
        KvCache {
            n_ctx: shape.n_ctx,
            k_dim: shape.k_dim,
            v_dim: shape.v_dim,
            k: (0..shape.n_layers).map(|_| plane(k, shape.k_dim)).collect(),
            v: (0..shape.n_layers).map(|_| plane(v, shape.v_dim)).collect(),
        }
    }

    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Keys and values of a layer, to read.
    pub fn rows(&self, layer: usize) -> (Rows<'_>, Rows<'_>) {
        (self.k[layer].rows(self.k_dim, self.n_ctx), self.v[layer].rows(self.v_dim, self.n_ctx))
    }

    /// Keys and values of a layer, to write.
    pub fn rows_mut(&mut self, layer: usize) -> (RowsMut<'_>, RowsMut<'_>) {
        let (k_dim, v_dim, n_ctx) = (self.k_dim, self.v_dim, self.n_ctx);
        (self.k[layer].rows_mut(k_dim, n_ctx), self.v[layer].rows_mut(v_dim, n_ctx))
    }
}

impl Plane {
    fn rows(&self, dim: usize, n_ctx: usize) -> Rows<'_> {
        match self {
            Plane::F32(data) => Rows::F32 { data, dim, n_ctx },
            Plane::F16(data) => Rows::F16 { data, dim, n_ctx },
        }
    }

    fn rows_mut(&mut self, dim: usize, n_ctx: usize) -> RowsMut<'_> {
        match self {
            Plane::F32(data) => RowsMut::F32 { data, dim, n_ctx },
            Plane::F16(data) => RowsMut::F16 { data, dim, n_ctx },
        }
    }
}
