//! One session's KV cache, of the layers that a device computes.

use super::super::kv::{CacheType, LayerShape};
use crate::Result;
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::{Device, DeviceBuffer, DeviceSlice, Graph, Stream};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a layer has of the buffer: keys (or latent rows) and values, or a delta rule's past inputs
/// and state.
struct LayerPlaces {
    shape: LayerShape,
    first: Range<usize>,
    second: Range<usize>,
}

/// What a layer's first part is queued as, and for how many positions.
pub type LayerGraph = Option<(usize, Graph)>;

pub struct GpuCache {
    /// Of decoded tokens, one a layer: they read and write `buffer`.
    graphs: Vec<Mutex<LayerGraph>>,
    buffer: DeviceBuffer,
    /// One for each of the model's layers; none for those that are elsewhere.
    layers: Vec<Option<LayerPlaces>>,
    types: (CacheType, CacheType),
    n_ctx: usize,
}

/// Bytes of a layer's two parts, each up to where the next can begin.
fn parts(shape: LayerShape, n_ctx: usize, (k, v): (CacheType, CacheType)) -> [usize; 2] {
    let bytes = match shape {
        LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
            [n_ctx * n_head_kv * k.row_bytes(k_dim), n_ctx * n_head_kv * v.row_bytes(v_dim)]
        }
        LayerShape::Latent { dim } => [n_ctx * k.row_bytes(dim), 0],
        LayerShape::Delta(shape) => [4 * shape.n_past(), 4 * shape.n_state()],
    };
    bytes.map(|bytes| bytes.next_multiple_of(256))
}

impl GpuCache {
    /// Of the layers in `on_device`; states are zero, positions of any content.
    pub fn new(
        gpu: &Device,
        shapes: &[LayerShape],
        on_device: &Range<usize>,
        n_ctx: usize,
        types: (CacheType, CacheType),
    ) -> Result<GpuCache> {
        let mut end = 0;
        let mut places = |l: usize, shape: LayerShape| {
            on_device.contains(&l).then(|| {
                let [first, second] = parts(shape, n_ctx, types);
                let start = end;
                end = start + first + second;
                LayerPlaces { shape, first: start..start + first, second: start + first..end }
            })
        };
        let layers = shapes.iter().enumerate().map(|(l, shape)| places(l, *shape)).collect();
        let buffer = DeviceBuffer::of(gpu, end.max(256), "KV cache", "-c, --vram, -ngl")?;
        let graphs = shapes.iter().map(|_| Mutex::default()).collect();
        let cache = GpuCache { graphs, buffer, layers, types, n_ctx };
        cache.clear_states()?;
        Ok(cache)
    }

    pub fn graph(&self, l: usize) -> MutexGuard<'_, LayerGraph> {
        // A panic leaves a graph or none, either of which will do.
        self.graphs[l].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn layer(&self, l: usize) -> &LayerPlaces {
        self.layers[l].as_ref().expect("a layer on the device")
    }

    fn rows(
        &self,
        place: &Range<usize>,
        ty: CacheType,
        heads: usize,
        dim: usize,
    ) -> DeviceRows<'_> {
        let (ty, data) = (ty.tensor_type(), self.buffer.slice(place.clone()));
        DeviceRows { ty, data, heads, dim, stride: dim, n_ctx: self.n_ctx }
    }

    /// Keys and values of a layer; of latent attention the rows, and no values.
    pub fn of_layer(&self, l: usize) -> (DeviceRows<'_>, Option<DeviceRows<'_>>) {
        let LayerPlaces { shape, first, second } = self.layer(l);
        match *shape {
            LayerShape::Heads { n_head_kv, k_dim, v_dim } => {
                let values = self.rows(second, self.types.1, n_head_kv, v_dim);
                (self.rows(first, self.types.0, n_head_kv, k_dim), Some(values))
            }
            LayerShape::Latent { dim } => (self.rows(first, self.types.0, 1, dim), None),
            LayerShape::Delta(_) => panic!("layer {l} keeps no positions"),
        }
    }

    /// A delta rule's past inputs and its state.
    pub fn delta(&self, l: usize) -> (DeviceSlice<'_>, DeviceSlice<'_>) {
        let LayerPlaces { shape, first, second } = self.layer(l);
        let LayerShape::Delta(shape) = shape else { panic!("layer {l} has no state") };
        let part =
            |place: &Range<usize>, n: usize| self.buffer.slice(place.start..place.start + 4 * n);
        (part(first, shape.n_past()), part(second, shape.n_state()))
    }

    /// States begin anew.
    pub fn clear_states(&self) -> Result<()> {
        let has_state = |l: &LayerPlaces| matches!(l.shape, LayerShape::Delta(_));
        if !self.layers.iter().flatten().any(has_state) {
            return Ok(());
        }
        let stream = Stream::new(self.buffer.gpu())?;
        for layer in self.layers.iter().flatten() {
            if let LayerShape::Delta(_) = layer.shape {
                stream.fill(self.buffer.slice(layer.first.start..layer.second.end), 0)?;
            }
        }
        stream.synchronize()
    }
}
