//! One session's KV cache for the layers on a device. Slots are those of the model
//! (`HyperParams::cache_shapes`).

mod copies;
mod positions;
mod states;

pub use copies::CacheCopies;

use crate::Result;
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::{DeviceBuffer, Graph};
use crate::forward::TopK;
use crate::model::kv::{CacheType, LayerShape};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A slot's ranges of the buffer: keys (or latent rows) and values, or a delta rule's past inputs
/// and state; and what is kept of a block that is not whole yet.
struct SlotRanges {
    shape: LayerShape,
    first: Range<usize>,
    second: Range<usize>,
    kept: Range<usize>,
}

/// The captured graph of what is before a layer's experts, and the numbers of positions of the text
/// and of the source text that it is captured for.
pub type LayerGraph = Option<([usize; 2], Graph)>;

/// The part of a graph behind the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenHead {
    None,
    /// The output norm and the head.
    Products,
    /// And the choice of the best logits.
    Best(TopK),
}

impl TokenHead {
    /// Whether it makes all that `wanted` does. The best logits are the first of more of them.
    pub fn covers(self, wanted: TokenHead) -> bool {
        match (self, wanted) {
            (_, TokenHead::None) | (TokenHead::Best(_), TokenHead::Products) => true,
            (TokenHead::Best(own), TokenHead::Best(wanted)) => {
                own.n_vocab == wanted.n_vocab && own.k >= wanted.k
            }
            (own, wanted) => own == wanted,
        }
    }
}

/// The captured graph of a decoded token.
pub struct TokenGraph {
    /// See `GpuPass::graph_key`.
    pub key: [usize; 2],
    pub head: TokenHead,
    pub graph: Graph,
}

pub struct GpuCache {
    /// No other cache of the process has it, or had it.
    id: u64,
    /// By slot: the graph of the layer for decoded tokens, which reads and writes `buffer`.
    /// Declared before `buffer`, so that it is dropped first.
    graphs: Vec<Mutex<LayerGraph>>,
    /// The graph of all of a decoded token.
    token_graph: Mutex<Option<TokenGraph>>,
    buffer: DeviceBuffer,
    /// None for layers on the CPU.
    slots: Vec<Option<SlotRanges>>,
    types: (CacheType, CacheType),
    n_ctx: usize,
    copies: Arc<CacheCopies>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Bytes of a layer's parts, each with the padding behind it.
fn parts(shape: LayerShape, n_ctx: usize, k: CacheType, v: CacheType) -> [usize; 3] {
    let bytes = match shape {
        LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
            [n_ctx * n_head_kv * k.row_bytes(k_dim), n_ctx * n_head_kv * v.row_bytes(v_dim), 0]
        }
        LayerShape::Latent { dim, index, kept } => {
            [n_ctx * k.row_bytes(dim), n_ctx * v.row_bytes(index), 4 * kept]
        }
        LayerShape::State(size) => [4 * size.n_past, 4 * size.n_state, 0],
    };
    bytes.map(|bytes| bytes.next_multiple_of(256))
}

impl GpuCache {
    /// Allocates the slots for which `on_device` is true, with keys and values of types `k` and
    /// `v`. States are zero; keys and values are uninitialised.
    pub fn new(
        copies: &Arc<CacheCopies>,
        shapes: &[LayerShape],
        on_device: &dyn Fn(usize) -> bool,
        n_ctx: usize,
        [k, v]: [CacheType; 2],
    ) -> Result<GpuCache> {
        let mut end = 0;
        let mut ranges = |slot: usize, shape: LayerShape| {
            on_device(slot).then(|| {
                let [first, second, kept] = parts(shape, n_ctx, k, v).map(|bytes| {
                    let start = end;
                    end += bytes;
                    start..end
                });
                SlotRanges { shape, first, second, kept }
            })
        };
        let slots = shapes.iter().enumerate().map(|(slot, shape)| ranges(slot, *shape)).collect();
        let buffer = DeviceBuffer::of(copies.gpu(), end.max(256), "KV cache", "-c, --vram, -ngl")?;
        let graphs = shapes.iter().map(|_| Mutex::default()).collect();
        let copies = copies.clone();
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (token_graph, types) = (Mutex::default(), (k, v));
        let cache = GpuCache { id, graphs, token_graph, buffer, slots, types, n_ctx, copies };
        cache.clear_states()?;
        Ok(cache)
    }

    /// Resets the values of a slot's last head to zero.
    pub fn clear_last_values(&self, slot: usize) -> Result<()> {
        let values = self.of_slot(slot).1.expect("values beside the keys");
        let stream = self.copies.stream();
        stream.fill(values.last_head().data, 0)?;
        stream.synchronize()
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn graph(&self, slot: usize) -> MutexGuard<'_, LayerGraph> {
        // After a panic there is a valid graph or none.
        self.graphs[slot].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn token_graph(&self) -> MutexGuard<'_, Option<TokenGraph>> {
        // As above.
        self.token_graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the graphs of layers.
    pub fn drop_layer_graphs(&self) {
        (0..self.graphs.len()).for_each(|slot| *self.graph(slot) = None);
    }

    /// Whether the device has the slot's layer.
    pub fn has(&self, slot: usize) -> bool {
        self.slots[slot].is_some()
    }

    fn ranges(&self, slot: usize) -> &SlotRanges {
        self.slots[slot].as_ref().expect("a layer on the device")
    }

    fn rows(
        &self,
        range: &Range<usize>,
        ty: CacheType,
        heads: usize,
        dim: usize,
    ) -> DeviceRows<'_> {
        let (ty, data) = (ty.tensor_type(), self.buffer.slice(range.clone()));
        DeviceRows { ty, data, heads, dim, stride: dim, n_ctx: self.n_ctx }
    }

    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    pub fn types(&self) -> (CacheType, CacheType) {
        self.types
    }

    /// Keys and values of a slot. Latent attention has rows and, where an indexer chooses among
    /// them, the keys of these.
    pub fn of_slot(&self, slot: usize) -> (DeviceRows<'_>, Option<DeviceRows<'_>>) {
        let SlotRanges { shape, first, second, .. } = self.ranges(slot);
        match *shape {
            LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                let values = self.rows(second, self.types.1, n_head_kv, v_dim);
                (self.rows(first, self.types.0, n_head_kv, k_dim), Some(values))
            }
            LayerShape::Latent { dim, index, .. } => {
                let keys = self.rows(second, self.types.1, 1, index);
                (self.rows(first, self.types.0, 1, dim), (index > 0).then_some(keys))
            }
            LayerShape::State(_) => panic!("slot {slot} keeps no positions"),
        }
    }
}
