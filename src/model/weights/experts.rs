//! The places of a layer's experts in the file, and their parts: matrices, biases, factors.

use super::super::granules;
use super::binder::Binder;
use super::ffn::OnlyScales;
use crate::backend::ops::{Activation, ExpertBiases, ExpertScales, ExpertShape};
use crate::experts::{ExpertTensors, LayerExperts};
use crate::gguf::Value;
use crate::{Error, Result};

pub const DENSE: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];
pub const ROUTED: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
pub const SHARED: [&str; 3] = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
pub const ADJUGATE: [&str; 3] = ["ffn_gate_chexps", "ffn_up_chexps", "ffn_down_chexps"];

/// The keys that say how wide these are.
pub const DENSE_WIDTH: &str = "feed_forward_length";
pub const ROUTED_WIDTH: &str = "expert_feed_forward_length";
pub const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";
pub const ADJUGATE_WIDTH: &str = "expert_chunk_feed_forward_length";

impl Binder<'_> {
    /// Refuses a key that gives these experts another width. It may have a value a layer, and 0 is
    /// none given.
    pub fn check_width(
        &self,
        key: &str,
        l: usize,
        experts: &LayerExperts,
        n_ff: usize,
    ) -> Result<()> {
        // The two stacks of an encoder–decoder differ, and share the key.
        if self.hyper.encoder.is_some() {
            return Ok(());
        }
        let key = self.descriptor.key(key);
        let given = match self.gguf.get(&key) {
            Some(Value::Array(_)) => self.gguf.u32s(&key)?.and_then(|list| list.get(l).copied()),
            _ => self.gguf.u32(&key)?,
        };
        match given {
            Some(given) if given != 0 && given as usize != n_ff => {
                let tensor = experts.tensors().next().expect("every expert has a tensor");
                let expected = format!("{n_ff}, as in {}", self.tensor(tensor).name);
                Err(Error::format(self.gguf.path(), key, expected, given.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// The biases of `n` experts of a shape, if the layer has them.
    pub fn expert_biases(
        &self,
        l: usize,
        n: usize,
        shape: &ExpertShape,
        [gate, up, down]: [&str; 3],
    ) -> Result<Option<ExpertBiases>> {
        let role = |matrix: &str| format!("{matrix}_bias");
        let roles = [gate, up, down].map(role);
        if !self.together(&roles.each_ref().map(String::as_str), l)? {
            return Ok(None);
        }
        let read = |matrix: &str, width| self.values(self.require(&role(matrix), l)?, &[width, n]);
        let gated = self.activation().is_gated();
        Ok(Some(ExpertBiases {
            gate: if gated { read(gate, shape.n_ff)? } else { Vec::new() },
            up: read(up, shape.n_ff)?,
            down: read(down, shape.n_embd)?,
        }))
    }

    /// Factors on gate's and up's products of `n` experts, if the layer has any.
    pub fn inner_scales(
        &self,
        l: usize,
        n: usize,
        [gate, up, _]: [&str; 3],
    ) -> Result<Option<ExpertScales>> {
        let is_gated = self.activation().is_gated();
        let gate = if is_gated { self.scales(gate, l, n)? } else { None };
        let up = self.scales(up, l, n)?;
        if gate.is_none() && up.is_none() {
            return Ok(None);
        }
        let ones = vec![1.0; n];
        let gate = gate.unwrap_or_else(|| if is_gated { ones.clone() } else { Vec::new() });
        Ok(Some(ExpertScales { gate, up: up.unwrap_or(ones) }))
    }

    /// Factors of an expert that every token goes to.
    pub fn only_scales(&self, l: usize, roles: [&str; 3]) -> Result<OnlyScales> {
        let outer = self.scales(roles[2], l, 1)?.map_or(1.0, |scale| scale[0]);
        Ok(OnlyScales { inner: self.inner_scales(l, 1, roles)?, outer })
    }

    /// An expert that every token goes to. In architectures without a tensor of its gate, up's has
    /// both.
    pub fn only(&self, l: usize, roles: [&str; 3]) -> Result<(ExpertShape, LayerExperts)> {
        if self.activation().is_gated() && self.name(roles[0], l).is_none() {
            let gate_up = self.require(roles[1], l)?;
            return self.fused_experts(l, 1, roles, gate_up, self.hyper.n_embd);
        }
        self.experts(l, 1, roles, self.hyper.n_embd)
    }

    fn activation(&self) -> Activation {
        self.descriptor.parts.activation
    }

    /// The routed experts of a layer, in whichever layout the file has them; `n_embd` is the width
    /// of their input.
    pub fn routed(&self, l: usize, n_embd: usize) -> Result<(ExpertShape, LayerExperts)> {
        let n = self.hyper.routing.n_experts;
        let granules = match &self.granules {
            Some(keys) if self.activation().is_gated() => keys.layer(self.gguf, l)?,
            _ => None,
        };
        let Some(typed) = granules else {
            if let Some(gate_up) = self.fused_tensor(l) {
                return self.fused_experts(l, n, ROUTED, gate_up, n_embd);
            }
            self.refuse_single_experts(l)?;
            return self.experts(l, n, ROUTED, n_embd);
        };
        let index = typed.experts.tensors().next().expect("the granule-major tensor");
        self.mark_used(index);
        for ty in typed.types {
            self.check_type(index, ty)?;
        }
        if typed.experts.n_experts != n {
            let expected = format!("{n} experts");
            return Err(self.wrong(index, expected, typed.experts.n_experts.to_string()));
        }
        let ([gate, up, down], n_ff) = (typed.types, typed.experts.geometry.n_ff);
        let (gate, n_embd, activation) = (Some(gate), typed.n_embd, self.activation());
        let (limit, up_limit) = (0.0, 0.0);
        let shape = ExpertShape { gate, up, down, n_embd, n_ff, activation, limit, up_limit };
        Ok((self.activated(l, ROUTED, shape)?, typed.experts))
    }

    /// One tensor of gate and up, which some files have in the place of the two.
    pub fn fused_tensor(&self, l: usize) -> Option<usize> {
        let (up, _) = self.name(ROUTED[1], l).filter(|_| self.activation().is_gated())?;
        self.gguf.tensor_index(&up.replace("ffn_up_exps", "ffn_gate_up_exps"))
    }

    /// Experts with gate and up [n_embd, 2 · n_ff, n] in one tensor, gate first.
    fn fused_experts(
        &self,
        l: usize,
        n: usize,
        roles: [&str; 3],
        gate_up: usize,
        n_embd: usize,
    ) -> Result<(ExpertShape, LayerExperts)> {
        let down = self.require(roles[2], l)?;
        self.mark_used(gate_up);
        let n_ff = self.tensor(gate_up).dims.get(1).copied().unwrap_or(0) as usize / 2;
        self.check(gate_up, &[n_embd, 2 * n_ff, n])?;
        self.check(down, &[n_ff, n_embd, n])?;
        let (up, down_type) = (self.tensor(gate_up).ty, self.tensor(down).ty);
        let sizes = [n_embd, n_ff, n].map(|n| n as u64);
        let tensors = ExpertTensors::Fused { gate_up, down };
        let experts = granules::cut((Some(up), up, down_type), sizes, tensors);
        let experts = experts.ok_or_else(|| {
            self.wrong(gate_up, "a size that can be addressed".into(), format!("{n_ff} rows"))
        })?;
        let (gate, down, activation) = (Some(up), down_type, self.activation());
        let (limit, up_limit) = (0.0, 0.0);
        let shape = ExpertShape { gate, up, down, n_embd, n_ff, activation, limit, up_limit };
        Ok((self.activated(l, roles, shape)?, experts))
    }

    /// Until April 2024 converters wrote a tensor an expert.
    fn refuse_single_experts(&self, l: usize) -> Result<()> {
        let Some((stacked, _)) = self.name(ROUTED[1], l) else { return Ok(()) };
        let single = stacked.replace("_exps.", ".0.");
        match self.gguf.tensor_index(&single) {
            None => Ok(()),
            Some(index) => Err(self.wrong(
                index,
                format!("all experts of a layer in one tensor {stacked}"),
                "one tensor per expert, an old file format: convert the model again".into(),
            )),
        }
    }

    /// The expert tensors of `n` experts: gate, if they have one, and up [n_embd, n_ff, n], down
    /// [n_ff, n_embd, n]. The intermediate size is taken from the up tensor.
    pub fn experts(
        &self,
        l: usize,
        n: usize,
        roles: [&str; 3],
        n_embd: usize,
    ) -> Result<(ExpertShape, LayerExperts)> {
        let [gate, up, down] = roles;
        let gate = self.activation().is_gated().then(|| self.require(gate, l)).transpose()?;
        let (up, down) = (self.require(up, l)?, self.require(down, l)?);
        let n_ff = self.tensor(up).dims.get(1).copied().unwrap_or(0) as usize;
        for matrix in gate.into_iter().chain([up]) {
            self.check(matrix, &[n_embd, n_ff, n])?;
        }
        self.check(down, &[n_ff, n_embd, n])?;
        let ty = |index: usize| self.tensor(index).ty;
        let types = (gate.map(ty), ty(up), ty(down));
        let sizes = [n_embd, n_ff, n].map(|n| n as u64);
        let experts = granules::cut(types, sizes, ExpertTensors::Stacked { gate, up, down });
        let experts = experts.ok_or_else(|| {
            self.wrong(up, "a size that can be addressed".into(), format!("{n_ff} rows"))
        })?;
        let ((gate, up, down), activation) = (types, self.activation());
        let (limit, up_limit) = (0.0, 0.0);
        let shape = ExpertShape { gate, up, down, n_embd, n_ff, activation, limit, up_limit };
        Ok((self.activated(l, roles, shape)?, experts))
    }

    /// A shape with the activation and the limit of a layer's experts of these roles.
    fn activated(&self, l: usize, roles: [&str; 3], shape: ExpertShape) -> Result<ExpertShape> {
        let activation = self.activation();
        if activation == Activation::Situ {
            let of = |key: &str| Ok(self.gguf.f32(&self.descriptor.key(key))?.unwrap_or(0.0));
            let [key, up_key] = ["activation.situ_beta", "activation.situ_linear_beta"];
            let (limit, up_limit): (f32, f32) = (of(key)?, of(up_key)?);
            for (key, limit, least) in [(key, limit, f32::MIN_POSITIVE), (up_key, up_limit, 0.0)] {
                if !(limit.is_finite() && limit >= least) {
                    let key = self.descriptor.key(key);
                    let expected = "a positive number".to_owned();
                    return Err(Error::format(self.gguf.path(), key, expected, limit.to_string()));
                }
            }
            return Ok(ExpertShape { activation, limit, up_limit, ..shape });
        }
        if !activation.is_limited() {
            return Ok(ExpertShape { activation, ..shape });
        }
        // Layers without a limit have the activation that it limits.
        match self.activation_limit(l, roles)? {
            0.0 => Ok(ExpertShape { activation: Activation::Silu, ..shape }),
            limit => Ok(ExpertShape { activation, limit, ..shape }),
        }
    }

    /// The limit of a layer's experts, one for all layers or a number a layer; 0 is none.
    fn activation_limit(&self, l: usize, roles: [&str; 3]) -> Result<f32> {
        let routed = roles == ROUTED;
        let own =
            self.descriptor.key(if routed { "swiglu_clamp_exp" } else { "swiglu_clamp_shexp" });
        let is_routed =
            self.descriptor.parts.shared_limit_is_routed && self.gguf.get(&own).is_none();
        let key = if is_routed { self.descriptor.key("swiglu_clamp_exp") } else { own };
        let limit = match self.gguf.get(&key) {
            Some(Value::Array(_)) => {
                let list = self.gguf.f32s(&key)?.unwrap_or_default();
                // Some count the layers that predict further tokens, some do not.
                if list.len() < self.hyper.n_layers {
                    let expected = format!("numbers for {} layers", self.hyper.n_layers);
                    let got = format!("{} of them", list.len());
                    return Err(Error::format(self.gguf.path(), key, expected, got));
                }
                list[l]
            }
            _ => self.gguf.f32(&key)?.unwrap_or(0.0),
        };
        match limit.is_finite() && limit >= 0.0 {
            true => Ok(limit),
            false => {
                let expected = "numbers of at least 0".to_owned();
                Err(Error::format(self.gguf.path(), key, expected, limit.to_string()))
            }
        }
    }
}
