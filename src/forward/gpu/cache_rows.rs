//! The rows of the KV cache that a layer reads and writes.
//!
//! The encoder's own keys and values are read within its layer only. They are f32, as on the CPU,
//! if the session's cache is f32; otherwise f16, if the attention kernel for prompts takes such
//! rows.

use crate::backend::gpu::attention::DeviceBias;
use crate::backend::gpu::cache::DeviceRows;
use crate::forward::gpu::cache::GpuCache;
use crate::forward::gpu::layers::GpuEncoder;
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};
use crate::gguf::TensorType;
use crate::model::hyper::CacheSlots;
use crate::model::kv::CacheType;

impl<'a> GpuPass<'a> {
    /// The slots of the cache that belong to layer `l` of the decoder.
    pub fn cache_slots(&self, l: usize) -> CacheSlots {
        self.hyper().cache_slots(l)
    }

    /// The keys and values of the layer's own text.
    pub fn own_rows(&self, l: usize, segment: &GpuSegment<'a>) -> (DeviceRows<'a>, DeviceRows<'a>) {
        if self.role == Role::Source {
            return self.encoder_rows(segment.cache);
        }
        let (keys, values) = segment.cache.of_slot(self.cache_slots(l).own);
        (keys, values.expect("values beside the keys"))
    }

    /// Keys and values of the source text for layer `l` of the decoder.
    pub fn source_rows(
        &self,
        l: usize,
        segment: &GpuSegment<'a>,
    ) -> (DeviceRows<'a>, DeviceRows<'a>) {
        let (keys, values) = segment.cache.of_slot(self.cache_slots(l).source);
        (keys, values.expect("values beside the keys"))
    }

    /// Keys and values of the encoder's layer that is being computed: one text after the other has
    /// them at the same place.
    fn encoder_rows(&self, cache: &GpuCache) -> (DeviceRows<'a>, DeviceRows<'a>) {
        let (hyper, [k, v]) = (self.hyper(), &self.layout().encoder);
        let rows = |ty, range, dim| {
            let (data, heads) = (self.slice(range), hyper.n_head_kv);
            DeviceRows { ty, data, heads, dim, stride: dim, n_ctx: cache.n_ctx() }
        };
        let both = |ty| (rows(ty, k, hyper.head_dim), rows(ty, v, hyper.head_dim_v));
        let (keys, values) = both(TensorType::F16);
        let is_exact = cache.types() == (CacheType::F32, CacheType::F32);
        match !is_exact && self.dev.ops.attention.has_prompt_kernel(&keys, &values) {
            true => (keys, values),
            false => both(TensorType::F32),
        }
    }

    /// The bias added to the scores when a text attends to itself.
    pub fn distance_bias(&self) -> Option<DeviceBias<'a>> {
        let bias = match self.role {
            Role::Only => None,
            Role::Source => self.encoder().encoder_bias.as_ref(),
            Role::Answer => self.encoder().decoder_bias.as_ref(),
        }?;
        Some(DeviceBias::Near { reach: bias.reach, values: self.dev.weights.vector(&bias.values) })
    }

    /// The parts of a model with an encoder besides its layers.
    pub fn encoder(&self) -> &'a GpuEncoder {
        self.dev.encoder.as_ref().expect("a model with an encoder")
    }
}
