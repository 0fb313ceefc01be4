//! Feed-forward parts: dense, routed, shared, and a dense branch beside the routed one.

use super::super::descriptor;
use super::super::granules::TypedExperts;
use super::binder::Binder;
use super::{Linear, Matrix, Norm};
use crate::Result;
use crate::backend::cpu::expert::{Activation, ExpertBiases, ExpertForm};
use crate::experts::{LayerExperts, Place};
use crate::gguf::TensorType;

/// Types and widths of one expert, routed, shared or dense.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    pub gate: TensorType,
    pub up: TensorType,
    pub down: TensorType,
    pub n_embd: usize,
    pub n_ff: usize,
    pub activation: Activation,
}

/// How a layer's tokens find their experts.
#[derive(Clone, Debug)]
pub enum Gate {
    /// One expert, weight 1: a dense layer.
    Dense,
    Router(Router),
}

#[derive(Clone, Debug)]
pub struct Router {
    pub logits: Linear,
    /// Added to the probabilities to choose by (DeepSeek-V3, section 2.1.2).
    pub choice_bias: Option<Vec<f32>>,
}

#[derive(Clone, Debug)]
pub struct SharedExpert {
    pub shape: ExpertShape,
    /// Its output is multiplied by the sigmoid of this vector times the input.
    pub gate: Option<Matrix>,
}

/// A dense feed-forward part that a layer has besides its routed one.
#[derive(Clone, Debug)]
pub struct DenseBranch {
    pub norm: Norm,
    pub shape: ExpertShape,
}

#[derive(Clone, Debug)]
pub struct FfnWeights {
    pub norm: Norm,
    pub gate: Gate,
    pub expert: ExpertShape,
    pub biases: Option<ExpertBiases>,
    pub shared: Option<SharedExpert>,
    /// Computed before the routed experts, which then see what attention saw.
    pub branch: Option<DenseBranch>,
}

impl FfnWeights {
    pub fn form(&self) -> ExpertForm<'_> {
        ExpertForm { activation: self.expert.activation, biases: self.biases.as_ref() }
    }
}

impl ExpertShape {
    fn of(typed: &TypedExperts, activation: Activation) -> ExpertShape {
        let [gate, up, down] = typed.types;
        let n_ff = typed.experts.geometry.n_ff;
        ExpertShape { gate, up, down, n_embd: typed.n_embd, n_ff, activation }
    }

    /// Of experts without biases.
    pub fn form(&self) -> ExpertForm<'static> {
        ExpertForm { activation: self.activation, biases: None }
    }
}

/// Where a layer's experts of each kind are.
#[derive(Default)]
pub(super) struct Experts {
    pub routed: Option<LayerExperts>,
    pub dense: Option<LayerExperts>,
    pub shared: Option<LayerExperts>,
}

const DENSE: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];
const ROUTED: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
const SHARED: [&str; 3] = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];

impl Binder<'_> {
    pub fn ffn(&self, l: usize) -> Result<(FfnWeights, Experts)> {
        let mut places = Experts::default();
        let Some(router) = self.router(l)? else {
            let (expert, dense) = self.experts(l, 1, DENSE)?;
            places.dense = Some(dense);
            let norm = self.norm("ffn_norm", l)?;
            let (gate, biases, shared, branch) = (Gate::Dense, None, None, None);
            return Ok((FfnWeights { norm, gate, expert, biases, shared, branch }, places));
        };
        let (expert, routed) = self.routed(l)?;
        places.routed = Some(routed);
        let shared = match self.find(SHARED[0], l)? {
            None => None,
            Some(_) => {
                let (shape, experts) = self.experts(l, 1, SHARED)?;
                places.shared = Some(experts);
                let gate = self.find("ffn_gate_inp_shexp", l)?;
                let gate = gate.map(|t| self.matrix(t, 1, self.hyper.n_embd)).transpose()?;
                Some(SharedExpert { shape, gate })
            }
        };
        let (branch, norm) = match self.descriptor.parts.residual {
            descriptor::Residual::Sequential => (None, self.norm("ffn_norm", l)?),
            descriptor::Residual::ParallelMoe => {
                let (shape, dense) = self.experts(l, 1, DENSE)?;
                places.dense = Some(dense);
                let branch = DenseBranch { norm: self.norm("ffn_norm", l)?, shape };
                (Some(branch), self.norm("ffn_norm_exps", l)?)
            }
        };
        let biases = self.expert_biases(l, expert.n_ff)?;
        let gate = Gate::Router(router);
        Ok((FfnWeights { norm, gate, expert, biases, shared, branch }, places))
    }

    /// `None` in a dense layer.
    fn router(&self, l: usize) -> Result<Option<Router>> {
        let n = self.hyper.routing.n_experts;
        if n == 0 || self.find("ffn_gate_inp", l)?.is_none() {
            return Ok(None);
        }
        let logits = self.linear("ffn_gate_inp", l, n, self.hyper.n_embd)?;
        Ok(Some(Router { logits, choice_bias: self.optional_vector("exp_probs_b", l, n)? }))
    }

    fn expert_biases(&self, l: usize, n_ff: usize) -> Result<Option<ExpertBiases>> {
        if self.find("ffn_gate_exps_bias", l)?.is_none() {
            return Ok(None);
        }
        let n = self.hyper.routing.n_experts;
        let read = |role: &str, width| self.values(self.require(role, l)?, &[width, n]);
        Ok(Some(ExpertBiases {
            gate: read("ffn_gate_exps_bias", n_ff)?,
            up: read("ffn_up_exps_bias", n_ff)?,
            down: read("ffn_down_exps_bias", self.hyper.n_embd)?,
        }))
    }

    fn activation(&self) -> Activation {
        match self.descriptor.parts.activation {
            descriptor::Activation::Silu => Activation::Silu,
            descriptor::Activation::SiluClamped => Activation::SiluClamped,
        }
    }

    /// The routed experts of a layer, in whichever layout the file has them.
    fn routed(&self, l: usize) -> Result<(ExpertShape, LayerExperts)> {
        let n = self.hyper.routing.n_experts;
        let granules = match &self.granules {
            Some(keys) => keys.layer(self.gguf, l)?,
            None => None,
        };
        let Some(typed) = granules else {
            return self.experts(l, n, ROUTED);
        };
        let index = typed.experts.tensors().next().expect("the granule-major tensor");
        for ty in typed.types {
            self.check_type(index, ty)?;
        }
        if typed.experts.n_experts != n {
            let expected = format!("{n} experts");
            return Err(self.wrong(index, expected, typed.experts.n_experts.to_string()));
        }
        Ok((ExpertShape::of(&typed, self.activation()), typed.experts))
    }

    /// Three expert tensors of `n` experts: gate and up [n_embd, n_ff, n], down [n_ff, n_embd, n].
    /// The intermediate size is taken from the gate tensor.
    fn experts(
        &self,
        l: usize,
        n: usize,
        [gate, up, down]: [&str; 3],
    ) -> Result<(ExpertShape, LayerExperts)> {
        let n_embd = self.hyper.n_embd;
        let (gate, up, down) =
            (self.require(gate, l)?, self.require(up, l)?, self.require(down, l)?);
        let n_ff = self.tensor(gate).dims.get(1).copied().unwrap_or(0) as usize;
        self.check(gate, &[n_embd, n_ff, n])?;
        self.check(up, &[n_embd, n_ff, n])?;
        self.check(down, &[n_ff, n_embd, n])?;
        let types = [gate, up, down].map(|index| self.tensor(index).ty);
        let sizes = [n_embd, n_ff, n].map(|n| n as u64);
        let place = Place::Stacked { gate, up, down };
        let typed = TypedExperts::cut(types, sizes, place).ok_or_else(|| {
            self.wrong(gate, "a size that can be addressed".into(), format!("{n_ff} rows"))
        })?;
        Ok((ExpertShape::of(&typed, self.activation()), typed.experts))
    }
}
