//! Host-routed experts: the host reads the route and divides the experts among the devices and the
//! CPU. Experts in VRAM, and those that are loaded there or read in place before the CPU would be
//! done, are computed by devices, the others by the CPU. The sums of pairs are added up in one
//! order, so results do not depend on the division.

pub mod call;
pub mod division;
pub mod in_place;

use crate::Result;
use crate::forward::gpu::devices::PassState;
use crate::forward::gpu::expert_parallel::share::DeviceShare;
use crate::forward::gpu::expert_parallel::workspace::RoutedLayer;
use crate::forward::gpu::hybrid_moe::call::LayerCall;
use crate::forward::gpu::pass::GpuPass;

impl<'a> GpuPass<'a> {
    /// A layer whose route is on the first device, for use on the stream of the layers.
    pub fn routed_layer(&self, l: usize) -> RoutedLayer<'a> {
        RoutedLayer {
            l,
            w: self.ffn_weights(l),
            n_tokens: self.n(),
            stream: self.stream(),
            h: self.expert_input(l),
            chosen: self.device_route().chosen,
            halves: self.routed_halves(l),
        }
    }

    /// The call for all of a layer's routed experts.
    pub fn layer_call(&self, l: usize) -> LayerCall<'a> {
        let (routed, shape) = (self.routed_layer(l), self.routed_shape(l));
        LayerCall {
            model: self.model,
            tiers: self.tiers(l),
            routed,
            shape,
            is_grouped: self.groups(&shape),
            with_cpu: !self.routes_halves(l),
            n_pairs: self.n() * self.hyper().routing.k,
            n_decode: self.batch.decode_rows().len(),
            is_miss: false,
        }
    }

    /// y += Σ weights · chosen experts; residual. The route is in `b.ffn.route`.
    pub fn host_routed_experts(&mut self, l: usize) -> Result<()> {
        let (mut call, context) = (self.layer_call(l), self.expert_context());
        let (stream, routed) = (self.stream(), call.routed);
        let pair_rows = self.words(&self.layout().ffn.pair_rows, call.n_pairs);
        let (acts, form) = (self.ffn_acts(l), self.expert_form(l));
        let PassState { staging, hybrid, peers, .. } = &mut *self.state;
        hybrid.plan(&call, self.b.ffn.route.chosen.iter().copied());
        if call.is_grouped {
            call.n_pairs = hybrid.all.n_pairs();
            staging.upload(stream, pair_rows, hybrid.all.places(), u32::to_le_bytes)?;
        }
        if !hybrid.cpu.is_empty() {
            match routed.w.has_own_input() {
                false => staging.download_floats(stream, routed.h, &mut self.b.h)?,
                true => staging.download_floats(stream, routed.h, &mut self.b.ffn.latent)?,
            }
        }
        let chosen = routed.chosen;
        let first = DeviceShare { device: 0, context, acts, chosen, form, staging, to_first: None };
        hybrid.compute(&call, first, peers, self.cpu, self.b)?;
        hybrid.begin_attention();
        self.routed_sum(l, call.n_pairs, call.is_grouped)
    }
}
