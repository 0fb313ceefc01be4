//! Gated delta rule layers on a device: the stages of `forward::gated_delta`.

use crate::Result;
use crate::backend::gpu::conv::ConvRows;
use crate::backend::gpu::delta::{DeviceGates, GateProducts};
use crate::forward::gpu::layers::{GpuDelta, GpuGates};
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::GpuLinear;

impl GpuPass<'_> {
    /// x → y
    pub fn delta_rule(&mut self, l: usize, w: &GpuDelta) -> Result<()> {
        let (n, m, dev) = (self.n(), &self.layout().mixer, self.dev);
        let (ops, stream, vector) =
            (&dev.ops.delta, self.stream(), |vector| dev.weights.vector(vector));
        // q, k, v, the output's gate, beta and alpha
        let of_gates = match &w.gates {
            GpuGates::Mixed(both) => vec![both],
            GpuGates::Apart { beta, alpha } => vec![beta, alpha],
        };
        let inputs = [&w.qkv, &w.z].into_iter().chain(of_gates);
        let acts = self.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let qkv = self.words(&m.qkv, n * w.shape.channels());
        let gate = self.words(&m.gate, n * w.shape.value_width());
        self.linear(&w.qkv, &acts, qkv)?;
        self.linear(&w.z, &acts, gate)?;
        let product = |linear: &GpuLinear, place| {
            let out = self.words(place, n * linear.weight.rows);
            self.linear(linear, &acts, out).map(|()| out)
        };
        let products = match &w.gates {
            GpuGates::Mixed(both) => GateProducts::Mixed(product(both, &m.gates[0])?),
            GpuGates::Apart { beta, alpha } => GateProducts::Apart {
                beta: product(beta, &m.gates[0])?,
                alpha: product(alpha, &m.gates[1])?,
            },
        };
        // convolution, recurrence: each text with its own state
        let (channels, width) = (w.shape.channels(), w.shape.value_width());
        let convolved = self.words(&m.convolved, n * channels);
        let attended = self.words(&m.attended, n * width);
        let (conv, rates) = (dev.weights.conv(&w.conv), [&w.dt, &w.a].map(vector));
        self.over_states(l, |part, [past, state]| {
            let rows = ConvRows::plain(part.of(qkv, channels), channels);
            let convolved = part.of(convolved, channels);
            dev.ops.conv.launch(stream, &conv, past, rows, convolved)?;
            let products = match products {
                GateProducts::Mixed(both) => {
                    GateProducts::Mixed(part.of(both, 2 * w.shape.n_v_heads))
                }
                GateProducts::Apart { beta, alpha } => GateProducts::Apart {
                    beta: part.of(beta, w.shape.n_v_heads),
                    alpha: part.of(alpha, w.shape.n_v_heads),
                },
            };
            let gates = DeviceGates { products, dt: rates[0], a: rates[1] };
            ops.rule(stream, w.shape, convolved, gates, state, part.of(attended, width))
        })?;
        // norm, gate, output projection
        let eps = self.hyper().norm_eps;
        ops.rms_norm_gated(stream, attended, vector(&w.norm), eps, w.norm_gate, gate)?;
        self.mixer_output(l, &w.output)
    }
}
