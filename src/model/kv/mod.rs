//! The KV cache of one session: keys (after RoPE) and values of every layer, position and KV head,
//! or latent attention's one row for both. A head's positions lie one after the other, so that
//! attention reads them as a stream.

mod positions;
mod states;

pub use states::States;

use crate::backend::ops::{RowBytes, Rows, RowsMut, StateSize, row_bytes};
use crate::gguf::TensorType;
use crate::{Error, Result};
use std::io;

/// Positions that are kept together: what a cache has at them depends on a text up to the last one.
pub const PAGE: usize = 64;

/// How keys or values are stored: one of [`CacheType::ALL`]. Those that are neither floats nor
/// halves are blocks of 32 along a head's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheType(TensorType);

impl CacheType {
    pub const F32: CacheType = CacheType(TensorType::F32);
    pub const F16: CacheType = CacheType(TensorType::F16);
    pub const BF16: CacheType = CacheType(TensorType::BF16);
    pub const Q8_0: CacheType = CacheType(TensorType::Q8_0);
    pub const Q4_0: CacheType = CacheType(TensorType::Q4_0);
    pub const Q4_1: CacheType = CacheType(TensorType::Q4_1);
    pub const IQ4_NL: CacheType = CacheType(TensorType::IQ4_NL);
    pub const Q5_0: CacheType = CacheType(TensorType::Q5_0);
    pub const Q5_1: CacheType = CacheType(TensorType::Q5_1);

    /// In llama.cpp's order.
    pub const ALL: [CacheType; 9] = [
        CacheType::F32,
        CacheType::F16,
        CacheType::BF16,
        CacheType::Q8_0,
        CacheType::Q4_0,
        CacheType::Q4_1,
        CacheType::IQ4_NL,
        CacheType::Q5_0,
        CacheType::Q5_1,
    ];

    /// Their names, as llama.cpp's flags have them.
    pub const NAMES: &str = "f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1";

    pub(crate) fn tensor_type(self) -> TensorType {
        self.0
    }

    /// Bytes of a row; one that cuts a block counts as whole blocks.
    pub(crate) fn row_bytes(self, dim: usize) -> usize {
        row_bytes(self.0, dim)
    }

    /// Whether rows are whole blocks; `which` is the option's name.
    fn check(self, which: &str, what: &str, dim: usize) -> Result<()> {
        let len = self.0.block_len();
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
        f.write_str(&self.0.name().to_ascii_lowercase())
    }
}

impl std::str::FromStr for CacheType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let found = CacheType::ALL.into_iter().find(|ty| ty.to_string() == s);
        let wrong = || format!("cache type: expected {}, got {s:?}", CacheType::NAMES);
        found.ok_or_else(|| Error::Usage(wrong()))
    }
}

/// One layer's keys or values: [n_head][n_ctx][dim].
struct Plane {
    ty: TensorType,
    data: RowBytes,
}

/// The cached rows of one position in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerShape {
    /// A key and a value for each KV head.
    Heads { n_head_kv: usize, k_dim: usize, v_dim: usize },
    /// Latent attention: one row for all heads, and `index` elements of a key to choose it by, 0
    /// where all rows are seen. `kept` values in f32 are of a block that is not whole yet.
    Latent { dim: usize, index: usize, kept: usize },
    /// A recurrence: the same for any number of positions, in f32.
    State(StateSize),
}

impl LayerShape {
    /// A layer whose rows are in another cache: none are here.
    pub const ELSEWHERE: LayerShape = LayerShape::Heads { n_head_kv: 0, k_dim: 0, v_dim: 0 };

    /// Bytes for `n_ctx` positions.
    pub fn n_bytes(self, n_ctx: usize, k: CacheType, v: CacheType) -> usize {
        match self {
            LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                n_ctx * n_head_kv * (k.row_bytes(k_dim) + v.row_bytes(v_dim))
            }
            LayerShape::Latent { dim, index, kept } => {
                n_ctx * (k.row_bytes(dim) + v.row_bytes(index)) + 4 * kept
            }
            LayerShape::State(size) => 4 * (size.n_past + size.n_state),
        }
    }
}

/// Bytes of a cache of `n_ctx` positions.
pub fn n_bytes(layers: &[LayerShape], n_ctx: usize, k: CacheType, v: CacheType) -> u64 {
    layers.iter().map(|layer| layer.n_bytes(n_ctx, k, v) as u64).sum()
}

/// Bytes of `n_sessions` caches in pages whose texts have `n_ctx` positions together. A head's rows
/// may begin and end within a page.
pub fn n_shared_bytes(
    layers: &[LayerShape],
    n_ctx: usize,
    n_sessions: usize,
    k: CacheType,
    v: CacheType,
) -> u64 {
    let n_heads = |layer: &LayerShape| match *layer {
        LayerShape::Heads { n_head_kv, .. } => 2 * n_head_kv,
        LayerShape::Latent { index, .. } => 1 + index.min(1),
        LayerShape::State(_) => 0,
    };
    let n_pages = 2 * layers.iter().map(n_heads).sum::<usize>();
    let own = n_bytes(layers, 0, k, v) + (n_pages * rustix::param::page_size()) as u64;
    let positions = n_bytes(layers, n_ctx, k, v) - n_bytes(layers, 0, k, v);
    positions + n_sessions as u64 * own
}

/// Whether the types can hold rows of these layers.
pub fn check(layers: &[LayerShape], k: CacheType, v: CacheType) -> Result<()> {
    for layer in layers {
        match *layer {
            LayerShape::Heads { k_dim, v_dim, .. } => {
                k.check("k", "keys", k_dim)?;
                v.check("v", "values", v_dim)?;
            }
            LayerShape::Latent { dim, index, .. } => {
                k.check("k", "latent rows", dim)?;
                v.check("v", "keys of rows", index)?;
            }
            LayerShape::State(_) => {}
        }
    }
    Ok(())
}

struct LayerCache {
    shape: LayerShape,
    k: Plane,
    v: Plane,
    state: State,
}

/// A recurrent layer carries this on from position to position.
#[derive(Default)]
pub struct State {
    /// Inputs that its convolution remembers: [kernel − 1, channels].
    pub past: Vec<f32>,
    /// [heads, keys, values]
    pub state: Vec<f32>,
}

pub struct KvCache {
    n_ctx: usize,
    /// Positions of the source text that an encoder has read; 0 if there is none.
    n_source: usize,
    layers: Vec<LayerCache>,
    /// States that the next pass is asked for.
    marks: Vec<states::Mark>,
}

impl KvCache {
    /// Zeroed memory that the system provides as it is first written. The types have passed
    /// [`check`].
    pub fn new(shapes: &[LayerShape], n_ctx: usize, k: CacheType, v: CacheType) -> KvCache {
        let cache = KvCache::with(shapes, n_ctx, [k, v], |n| Ok(RowBytes::zeroed(n)));
        cache.expect("nothing that fails is called")
    }

    /// A cache whose positions can be given back, see [`KvCache::give_back`].
    pub fn in_pages(
        shapes: &[LayerShape],
        n_ctx: usize,
        k: CacheType,
        v: CacheType,
    ) -> Result<KvCache> {
        let cache = KvCache::with(shapes, n_ctx, [k, v], RowBytes::mapped);
        cache.map_err(|e| {
            Error::invalid(format!(
                "cannot reserve the addresses of {n_ctx} positions of a KV cache: {e}: lower -c"
            ))
        })
    }

    fn with(
        shapes: &[LayerShape],
        n_ctx: usize,
        [k, v]: [CacheType; 2],
        memory: impl Fn(usize) -> io::Result<RowBytes>,
    ) -> io::Result<KvCache> {
        let plane = |ty: CacheType, width: usize| {
            let data = memory(n_ctx * ty.row_bytes(width))?;
            io::Result::Ok(Plane { ty: ty.0, data })
        };
        let layer = |&shape: &LayerShape| {
            let mut state = State::default();
            let (k_width, v_width) = match shape {
                LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                    (n_head_kv * k_dim, n_head_kv * v_dim)
                }
                LayerShape::Latent { dim, index, kept } => {
                    state.past = vec![0.0; kept];
                    (dim, index)
                }
                LayerShape::State(size) => {
                    state.past = vec![0.0; size.n_past];
                    state.state = vec![0.0; size.n_state];
                    (0, 0)
                }
            };
            Ok(LayerCache { shape, k: plane(k, k_width)?, v: plane(v, v_width)?, state })
        };
        let layers = shapes.iter().map(layer).collect::<io::Result<_>>()?;
        Ok(KvCache { n_ctx, n_source: 0, layers, marks: Vec::new() })
    }

    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Positions of the source text that the decoder sees; 0 if there is none.
    pub fn n_source(&self) -> usize {
        self.n_source
    }

    pub fn set_source(&mut self, n: usize) {
        self.n_source = n;
    }

    /// Whether some layer has a state, which no position can be taken from.
    pub fn has_state(&self) -> bool {
        self.n_state_values() > 0
    }

    /// A layer's state.
    pub fn state_mut(&mut self, layer: usize) -> &mut State {
        &mut self.layers[layer].state
    }

    /// Keys and values of a layer, to read; of latent attention the rows and their keys.
    pub fn rows(&self, layer: usize) -> (Rows<'_>, Rows<'_>) {
        let LayerCache { shape, k, v, .. } = &self.layers[layer];
        match *shape {
            LayerShape::Heads { k_dim, v_dim, .. } => {
                (k.rows(k_dim, self.n_ctx), v.rows(v_dim, self.n_ctx))
            }
            LayerShape::Latent { dim, index, .. } => {
                (k.rows(dim, self.n_ctx), v.rows(index, self.n_ctx))
            }
            LayerShape::State(_) => (k.rows(0, 0), v.rows(0, 0)),
        }
    }

    /// Keys and values of a layer, to write.
    pub fn rows_mut(&mut self, layer: usize) -> (RowsMut<'_>, RowsMut<'_>) {
        let n_ctx = self.n_ctx;
        let LayerCache { shape, k, v, .. } = &mut self.layers[layer];
        let (k_dim, v_dim) = match *shape {
            LayerShape::Heads { k_dim, v_dim, .. } => (k_dim, v_dim),
            LayerShape::Latent { dim, index, .. } => (dim, index),
            LayerShape::State(_) => (0, 0),
        };
        (k.rows_mut(k_dim, n_ctx), v.rows_mut(v_dim, n_ctx))
    }
}

impl Plane {
    fn rows(&self, dim: usize, n_ctx: usize) -> Rows<'_> {
        Rows { ty: self.ty, data: &self.data, dim, stride: dim, n_ctx }
    }

    fn rows_mut(&mut self, dim: usize, n_ctx: usize) -> RowsMut<'_> {
        RowsMut { ty: self.ty, data: &mut self.data, dim, n_ctx }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_what_is_held() {
        let layers = [
            LayerShape::Heads { n_head_kv: 2, k_dim: 64, v_dim: 96 },
            LayerShape::Latent { dim: 576, index: 0, kept: 0 },
            LayerShape::Latent { dim: 576, index: 128, kept: 0 },
        ];
        let all = CacheType::ALL;
        for (k, v) in all.into_iter().flat_map(|k| all.map(|v| (k, v))) {
            check(&layers, k, v).unwrap();
            let cache = KvCache::new(&layers, 10, k, v);
            let held: usize = cache.layers.iter().map(|l| l.k.data.len() + l.v.data.len()).sum();
            assert_eq!(n_bytes(&layers, 10, k, v), held as u64, "{k} and {v}");
        }
        // 18 blocks of a latent row of 576.
        let blocks = CacheType::ALL[3..].iter().map(|ty| n_bytes(&layers[1..2], 1, *ty, all[0]));
        assert_eq!(blocks.collect::<Vec<_>>(), [34, 18, 20, 18, 22, 24].map(|bytes| 18 * bytes));
    }

    #[test]
    fn names_are_read_back_and_others_refused() {
        let names = CacheType::ALL.map(|ty| ty.to_string());
        assert_eq!(names.join(", "), CacheType::NAMES.replace(" or ", ", "));
        for (ty, name) in CacheType::ALL.into_iter().zip(&names) {
            assert_eq!(name.parse::<CacheType>().unwrap(), ty);
        }
        let refused = "q6_k".parse::<CacheType>().unwrap_err().to_string();
        assert!(refused.contains(CacheType::NAMES) && refused.contains("q6_k"), "{refused}");
    }

    #[test]
    fn rows_that_cut_a_block_are_refused() {
        let heads = LayerShape::Heads { n_head_kv: 1, k_dim: 80, v_dim: 64 };
        check(&[heads], CacheType::F16, CacheType::Q8_0).unwrap();
        for ty in &CacheType::ALL[3..] {
            let refused = check(&[heads], *ty, CacheType::F16).unwrap_err().to_string();
            for part in [&*format!("--cache-type-k {ty}"), "keys", "multiple of 32", "got 80"] {
                assert!(refused.contains(part), "{refused}");
            }
        }
    }
}
