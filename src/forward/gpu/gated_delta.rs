//! Gated delta rule layers on a device: the stages of `forward::gated_delta`.

use crate::Result;
use crate::backend::gpu::conv::{ConvRows, DeviceConv, Units};
use crate::backend::gpu::delta::{DeviceGates, GateProducts, NormGate};
use crate::forward::gpu::mixer::GpuMixer;
use crate::forward::gpu::mixer_layout::{DeviceSizes, MixerSizes, raise};
use crate::forward::gpu::pack::{OnDevice, Pack, pack};
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::{GpuLinear, Packer};
use crate::model::weights::{DeltaWeights, Gates};

impl GpuMixer for DeltaWeights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (n, m, dev) = (cx.n(), &cx.layout().mixer, cx.dev);
        let (ops, stream, vector) =
            (&dev.ops.delta, cx.stream(), |vector| dev.weights.vector(vector));
        // q, k, v, the output's gate, beta and alpha
        let inputs = [&self.qkv, &self.z].into_iter().chain(self.gates.linears());
        let acts = cx.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let qkv = cx.words(&m.qkv, n * self.shape.channels());
        let gate = cx.words(&m.gate, n * self.shape.value_width());
        cx.linear(&self.qkv, &acts, qkv)?;
        cx.linear(&self.z, &acts, gate)?;
        let product = |linear: &GpuLinear, place| {
            let out = cx.words(place, n * linear.weight.rows);
            cx.linear(linear, &acts, out).map(|()| out)
        };
        let products = match &self.gates {
            Gates::Mixed(both) => GateProducts::Mixed(product(both, &m.gates[0])?),
            Gates::Apart { beta, alpha } => GateProducts::Apart {
                beta: product(beta, &m.gates[0])?,
                alpha: product(alpha, &m.gates[1])?,
            },
        };
        // convolution, recurrence: each text with its own state
        let (channels, width) = (self.shape.channels(), self.shape.value_width());
        let convolved = cx.words(&m.convolved, n * channels);
        let attended = cx.words(&m.attended, n * width);
        let units = Some(Units::of(self.shape));
        let conv = DeviceConv { units, ..dev.weights.conv(&self.conv) };
        let rates = [&self.dt, &self.a].map(vector);
        cx.over_states(l, |part, [past, state]| {
            let rows = ConvRows::plain(part.of(qkv, channels), channels);
            let convolved = part.of(convolved, channels);
            dev.ops.conv.launch(stream, &conv, past, rows, convolved)?;
            let products = match products {
                GateProducts::Mixed(both) => {
                    GateProducts::Mixed(part.of(both, 2 * self.shape.n_v_heads))
                }
                GateProducts::Apart { beta, alpha } => GateProducts::Apart {
                    beta: part.of(beta, self.shape.n_v_heads),
                    alpha: part.of(alpha, self.shape.n_v_heads),
                },
            };
            let gates = DeviceGates { products, dt: rates[0], a: rates[1] };
            ops.rule(stream, self.shape, convolved, gates, state, part.of(attended, width))
        })?;
        // norm, gate, output projection
        let eps = cx.hyper().norm_eps;
        let function = if self.sigmoid_gate { NormGate::Sigmoid } else { NormGate::Silu };
        ops.rms_norm_gated(stream, attended, vector(&self.norm), eps, function, gate)?;
        cx.mixer_output(l, &self.output)
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }
}

impl DeviceSizes for DeltaWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        raise(&mut sizes.projected, self.shape.channels());
        raise(&mut sizes.convolved, self.shape.channels());
        sizes.raise_values(self.shape.value_width());
        raise(&mut sizes.heads, self.shape.n_v_heads);
    }
}

pack! {
    DeltaWeights { shape, qkv, z, gates, conv, a, dt, norm, sigmoid_gate, output }
}

impl<'a> Pack<'a> for Gates {
    type Packed = Gates<OnDevice>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Gates<OnDevice> {
        match self {
            Gates::Mixed(both) => Gates::Mixed(both.pack(packer)),
            Gates::Apart { beta, alpha } => {
                Gates::Apart { beta: beta.pack(packer), alpha: alpha.pack(packer) }
            }
        }
    }
}
