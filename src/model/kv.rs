//! The KV cache of one session: keys (after RoPE) and values of every layer, position and KV head,
//! or latent attention's one row for both. A head's positions lie one after the other, so that
//! attention reads them as a stream.

use crate::backend::cpu::attention::{Elements, ElementsMut, Rows, RowsMut};
use crate::backend::cpu::delta::DeltaShape;
use crate::gguf::TensorType;
use crate::{Error, Result};

/// How keys or values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)] // the names are the format's own
pub enum CacheType {
    F32,
    F16,
    BF16,
    /// Blocks of 32 along a head's elements.
    Q8_0,
}

impl CacheType {
    /// All of them, as llama.cpp's flags name them.
    pub const NAMES: &str = "f32, f16, bf16 or q8_0";

    pub(super) fn tensor_type(self) -> TensorType {
        match self {
            CacheType::F32 => TensorType::F32,
            CacheType::F16 => TensorType::F16,
            CacheType::BF16 => TensorType::BF16,
            CacheType::Q8_0 => TensorType::Q8_0,
        }
    }

    /// Bytes of a row; one that cuts a block counts as whole blocks.
    pub(super) fn row_bytes(self, dim: usize) -> usize {
        let ty = self.tensor_type();
        dim.div_ceil(ty.block_len()) * ty.block_bytes()
    }

    /// Whether rows are whole blocks; `which` is the option's name.
    fn check(self, which: &str, what: &str, dim: usize) -> Result<()> {
        let len = self.tensor_type().block_len();
        if dim.is_multiple_of(len) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "--cache-type-{which} {self}: expected {what} of a multiple of {len} elements, got \
             {dim}: take f16"
        )))
    }
}

impl std::fmt::Display for CacheType {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            CacheType::F32 => "f32",
            CacheType::F16 => "f16",
            CacheType::BF16 => "bf16",
            CacheType::Q8_0 => "q8_0",
        })
    }
}

impl std::str::FromStr for CacheType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let all = [CacheType::F32, CacheType::F16, CacheType::BF16, CacheType::Q8_0];
        let found = all.into_iter().find(|ty| ty.to_string() == s);
        let wrong = || format!("cache type: expected {}, got {s:?}", CacheType::NAMES);
        found.ok_or_else(|| Error::Usage(wrong()))
    }
}

/// One layer's keys or values: [n_head][n_ctx][dim].
enum Plane {
    F32(Vec<f32>),
    F16(Vec<u16>),
    BF16(Vec<u16>),
    Q8_0(Vec<u8>),
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
                n_ctx * n_head_kv * (k.row_bytes(k_dim) + v.row_bytes(v_dim))
            }
            LayerShape::Latent { dim } => n_ctx * k.row_bytes(dim),
            LayerShape::Delta(shape) => 4 * (shape.n_past() + shape.n_state()),
        }
    }
}

/// Bytes of a cache of `n_ctx` positions.
pub fn n_bytes(layers: &[LayerShape], n_ctx: usize, k: CacheType, v: CacheType) -> u64 {
    layers.iter().map(|layer| layer.n_bytes(n_ctx, k, v) as u64).sum()
}

/// Whether the types can hold rows of these layers.
pub fn check(layers: &[LayerShape], k: CacheType, v: CacheType) -> Result<()> {
    for layer in layers {
        match *layer {
            LayerShape::Heads { k_dim, v_dim, .. } => {
                k.check("k", "keys", k_dim)?;
                v.check("v", "values", v_dim)?;
            }
            LayerShape::Latent { dim } => k.check("k", "latent rows", dim)?,
            LayerShape::Delta(_) => {}
        }
    }
    Ok(())
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
    /// Zeroed memory that the system provides as it is first written. The types have passed
    /// [`check`].
    pub fn new(shapes: &[LayerShape], n_ctx: usize, k: CacheType, v: CacheType) -> KvCache {
        let plane = |ty: CacheType, dim: usize| match ty {
            CacheType::F32 => Plane::F32(vec![0.0; n_ctx * dim]),
            CacheType::F16 => Plane::F16(vec![0; n_ctx * dim]),
            CacheType::BF16 => Plane::BF16(vec![0; n_ctx * dim]),
            CacheType::Q8_0 => Plane::Q8_0(vec![0; n_ctx * ty.row_bytes(dim)]),
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
            Plane::BF16(data) => Elements::BF16(data),
            Plane::Q8_0(data) => Elements::Q8_0(data),
        };
        Rows { data, dim, stride: dim, n_ctx }
    }

    fn rows_mut(&mut self, dim: usize, n_ctx: usize) -> RowsMut<'_> {
        let data = match self {
            Plane::F32(data) => ElementsMut::F32(data),
            Plane::F16(data) => ElementsMut::F16(data),
            Plane::BF16(data) => ElementsMut::BF16(data),
            Plane::Q8_0(data) => ElementsMut::Q8_0(data),
        };
        RowsMut { data, dim, n_ctx }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [CacheType; 4] = [CacheType::F32, CacheType::F16, CacheType::BF16, CacheType::Q8_0];

    #[test]
    fn what_is_counted_is_what_is_held() {
        let layers = [
            LayerShape::Heads { n_head_kv: 2, k_dim: 64, v_dim: 96 },
            LayerShape::Latent { dim: 576 },
        ];
        let held = |plane: &Plane| match plane {
            Plane::F32(data) => 4 * data.len(),
            Plane::F16(data) | Plane::BF16(data) => 2 * data.len(),
            Plane::Q8_0(data) => data.len(),
        };
        for (k, v) in ALL.into_iter().flat_map(|k| ALL.map(|v| (k, v))) {
            check(&layers, k, v).unwrap();
            let cache = KvCache::new(&layers, 10, k, v);
            let held: usize = cache.layers.iter().map(|l| held(&l.k) + held(&l.v)).sum();
            assert_eq!(n_bytes(&layers, 10, k, v), held as u64, "{k} and {v}");
        }
        assert_eq!(n_bytes(&layers[1..], 1, CacheType::Q8_0, CacheType::F32), 612);
    }

    #[test]
    fn names_are_read_back_and_others_refused() {
        assert!(ALL.into_iter().all(|ty| ty.to_string().parse::<CacheType>().unwrap() == ty));
        let refused = "q4_0".parse::<CacheType>().unwrap_err().to_string();
        assert!(refused.contains(CacheType::NAMES) && refused.contains("q4_0"), "{refused}");
    }

    #[test]
    fn rows_that_cut_a_block_are_refused() {
        let heads = LayerShape::Heads { n_head_kv: 1, k_dim: 80, v_dim: 64 };
        check(&[heads], CacheType::F16, CacheType::Q8_0).unwrap();
        let refused = check(&[heads], CacheType::Q8_0, CacheType::F16).unwrap_err().to_string();
        for part in ["--cache-type-k q8_0", "keys", "multiple of 32", "got 80"] {
            assert!(refused.contains(part), "{refused}");
        }
    }
}
