//! Feed-forward parts: dense, routed, shared, and a dense branch beside the routed one.

use super::super::descriptor;
use super::super::granules;
use super::binder::Binder;
use super::{Linear, Matrix, Norm};
use crate::backend::ops::{Activation, ExpertBiases, ExpertForm, ExpertShape, Score};
use crate::experts::{ExpertTensors, LayerExperts};
use crate::gguf::{TensorType, Value};
use crate::{Error, Result};

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
    /// Normalises its input, instead of the experts' norm.
    pub norm: Option<Norm>,
    /// Factors on the chosen experts' weights: [experts].
    pub scales: Option<Vec<f32>>,
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
    /// Normalises its output, which then joins the experts' instead of the stream.
    pub post_norm: Option<Norm>,
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
    /// The part sees the stream as it was before attention.
    pub sees_before: bool,
    /// Normalises the sum that the part adds to the stream.
    pub post_norm: Option<Norm>,
    /// Normalises the experts' sum before a branch joins it.
    pub experts_norm: Option<Norm>,
    /// Factor on what it adds to the stream, besides the model's.
    pub scale: f32,
    /// The router reads the stream before attention, as it is.
    pub routes_stream: bool,
    /// The router's weight multiplies an expert's input.
    pub weights_input: bool,
}

impl FfnWeights {
    pub fn form(&self) -> ExpertForm<'_> {
        let ExpertShape { activation, limit, .. } = self.expert;
        ExpertForm { activation, limit, biases: self.biases.as_ref() }
    }

    /// The type of the router's matrix.
    pub fn router_input(&self) -> Option<TensorType> {
        match &self.gate {
            Gate::Router(router) => Some(router.logits.weight.ty),
            Gate::Dense => None,
        }
    }

    /// The norm of a router that has one of its own.
    pub fn router_norm(&self) -> Option<&Norm> {
        match &self.gate {
            Gate::Router(router) => router.norm.as_ref(),
            Gate::Dense => None,
        }
    }

    /// Whether devices have kernels for all of it.
    pub fn has_kernels(&self) -> bool {
        let scales = match &self.gate {
            Gate::Router(router) => router.scales.is_some(),
            Gate::Dense => false,
        };
        self.router_norm().is_none() && self.experts_norm.is_none() && !scales
    }

    /// Types of everything that reads the normalised input.
    pub fn inputs(&self) -> impl Iterator<Item = TensorType> {
        let router =
            self.router_input().filter(|_| !self.routes_stream && self.router_norm().is_none());
        let shared = self.shared.iter();
        let shared = shared.flat_map(|s| s.shape.inputs().chain(s.gate.as_ref().map(|m| m.ty)));
        self.expert.inputs().chain(router).chain(shared)
    }
}

/// The experts of a layer, by kind.
#[derive(Default)]
pub(crate) struct Experts {
    pub routed: Option<LayerExperts>,
    pub dense: Option<LayerExperts>,
    pub shared: Option<LayerExperts>,
}

const DENSE: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];
const ROUTED: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
const SHARED: [&str; 3] = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];

/// The keys that say how wide these are.
const DENSE_WIDTH: &str = "feed_forward_length";
const ROUTED_WIDTH: &str = "expert_feed_forward_length";
const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";

impl Binder<'_> {
    pub fn ffn(&self, l: usize) -> Result<(FfnWeights, Experts)> {
        let mut places = Experts::default();
        let Some(router) = self.router(l)? else {
            let (expert, dense) = self.experts(l, 1, DENSE)?;
            self.check_width(DENSE_WIDTH, l, &dense, expert.n_ff)?;
            places.dense = Some(dense);
            let biases = self.expert_biases(l, (1, expert.n_ff), DENSE)?;
            let ffn = FfnWeights {
                norm: self.norm("ffn_norm", l)?,
                gate: Gate::Dense,
                expert,
                biases,
                shared: None,
                branch: None,
                sees_before: self.descriptor.parts.residual == descriptor::Residual::Parallel,
                post_norm: self.optional_norm("ffn_post_norm", l)?,
                experts_norm: None,
                scale: 1.0,
                routes_stream: false,
                weights_input: false,
            };
            return Ok((ffn, places));
        };
        let (expert, routed) = self.routed(l)?;
        self.check_width(ROUTED_WIDTH, l, &routed, expert.n_ff)?;
        places.routed = Some(routed);
        let shared = match self.together(&SHARED, l)? {
            false => None,
            true => {
                let (shape, experts) = self.experts(l, 1, SHARED)?;
                self.check_width(SHARED_WIDTH, l, &experts, shape.n_ff)?;
                places.shared = Some(experts);
                let gate = self.find("ffn_gate_inp_shexp", l)?;
                let gate = gate.map(|t| self.matrix(t, 1, self.hyper.n_embd)).transpose()?;
                Some(SharedExpert { shape, gate })
            }
        };
        let (branch, norm) = self.branch(l, &mut places)?;
        let n = self.hyper.routing.n_experts;
        let biases = self.expert_biases(l, (n, expert.n_ff), ROUTED)?;
        let gate = Gate::Router(router);
        let sees_before = matches!(
            self.descriptor.parts.residual,
            descriptor::Residual::ParallelMoe | descriptor::Residual::Parallel
        );
        let post_norm = self.optional_norm("ffn_post_norm", l)?;
        let sum = self.descriptor.parts.shared_sum;
        let scale = if shared.is_some() { sum.factor() } else { 1.0 };
        let ffn = FfnWeights {
            norm,
            gate,
            expert,
            biases,
            shared,
            branch,
            sees_before,
            post_norm,
            experts_norm: match self.descriptor.parts.residual {
                descriptor::Residual::NormedBranches => Some(self.norm("ffn_exps_post_norm", l)?),
                _ => None,
            },
            scale,
            routes_stream: self.descriptor.router.input == descriptor::RouterInput::Stream,
            weights_input: self.descriptor.parts.weights_before_experts,
        };
        Ok((ffn, places))
    }

    /// A dense branch, if the layer has one, and the experts' norm.
    fn branch(&self, l: usize, places: &mut Experts) -> Result<(Option<DenseBranch>, Norm)> {
        Ok(match self.descriptor.parts.residual {
            descriptor::Residual::ParallelMoe => {
                let (shape, dense) = self.experts(l, 1, DENSE)?;
                places.dense = Some(dense);
                let (norm, post_norm) = (self.norm("ffn_norm", l)?, None);
                (Some(DenseBranch { norm, shape, post_norm }), self.norm("ffn_norm_exps", l)?)
            }
            descriptor::Residual::NormedBranches => {
                let (shape, dense) = self.experts(l, 1, DENSE)?;
                places.dense = Some(dense);
                let norm = self.norm("ffn_norm", l)?;
                let post_norm = Some(self.norm("ffn_branch_post_norm", l)?);
                (Some(DenseBranch { norm, shape, post_norm }), self.norm("ffn_norm_exps", l)?)
            }
            _ => (None, self.norm("ffn_norm", l)?),
        })
    }

    /// Refuses a key that gives these experts another width. It may have a value a layer, and 0 is
    /// none given.
    fn check_width(&self, key: &str, l: usize, experts: &LayerExperts, n_ff: usize) -> Result<()> {
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

    /// `None` in a dense layer.
    fn router(&self, l: usize) -> Result<Option<Router>> {
        let n = self.hyper.routing.n_experts;
        // A layer with expert tensors is not dense, even if its router or their number is missing.
        let experts = self.gguf.tensor_index(&granules::tensor_name(l));
        let experts = experts.or_else(|| self.fused_tensor(l));
        let experts = experts.or(self.find(ROUTED[1], l).ok().flatten());
        match (experts, n) {
            (Some(experts), 0) => {
                let key = self.descriptor.key("expert_count");
                let expected = format!("the number of experts in {}", self.tensor(experts).name);
                return Err(Error::format(self.gguf.path(), key, expected, "none"));
            }
            (None, 0) => return Ok(None),
            (None, _) if self.find("ffn_gate_inp", l)?.is_none() => return Ok(None),
            _ => (),
        }
        let logits = self.linear("ffn_gate_inp", l, n, self.hyper.n_embd)?;
        let scales = match self.descriptor.tensors.contains_key("ffn_exps_scale") {
            true => Some(self.vector(self.require("ffn_exps_scale", l)?, n)?),
            false => None,
        };
        let (choice_bias, norm) = (self.choice_bias(l, n)?, self.own_router_norm(l)?);
        Ok(Some(Router { logits, choice_bias, norm, scales }))
    }

    /// The norm of a router that has one: RMSNorm with these weights, divided by √n_embd.
    fn own_router_norm(&self, l: usize) -> Result<Option<Norm>> {
        let n = self.hyper.n_embd;
        if !self.descriptor.tensors.contains_key("ffn_gate_inp_scale") {
            return Ok(None);
        }
        let mut weight = self.vector(self.require("ffn_gate_inp_scale", l)?, n)?;
        weight.iter_mut().for_each(|w| *w /= (n as f32).sqrt());
        Ok(Some(Norm { kind: descriptor::Norm::Rms, weight, bias: vec![0.0; n] }))
    }

    /// Published models with sigmoid gates all choose by a bias, where their architecture has it.
    /// An architecture that began with another gate says beside the bias that it is a later one.
    fn choice_bias(&self, l: usize, n: usize) -> Result<Option<Vec<f32>>> {
        let role = "exp_probs_b";
        let router = &self.descriptor.router;
        let is_biased = router.choice_bias || self.hyper.routing.choice.score == Score::Sigmoid;
        if is_biased && self.descriptor.tensors.contains_key(role) {
            self.require(role, l)?;
        }
        let Some(bias) = self.find(role, l)? else { return Ok(None) };
        if router.score != Score::Sigmoid && !router.choice_bias {
            self.require_key("expert_gating_func", bias)?;
            self.require_key("expert_weights_norm", bias)?;
        }
        self.vector(bias, n).map(Some)
    }

    fn expert_biases(
        &self,
        l: usize,
        (n, n_ff): (usize, usize),
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
            gate: if gated { read(gate, n_ff)? } else { Vec::new() },
            up: read(up, n_ff)?,
            down: read(down, self.hyper.n_embd)?,
        }))
    }

    fn activation(&self) -> Activation {
        self.descriptor.parts.activation
    }

    /// The routed experts of a layer, in whichever layout the file has them.
    fn routed(&self, l: usize) -> Result<(ExpertShape, LayerExperts)> {
        let n = self.hyper.routing.n_experts;
        let granules = match &self.granules {
            Some(keys) if self.activation().is_gated() => keys.layer(self.gguf, l)?,
            _ => None,
        };
        let Some(typed) = granules else {
            if let Some(gate_up) = self.fused_tensor(l) {
                return self.fused_experts(l, n, gate_up);
            }
            self.refuse_single_experts(l)?;
            return self.experts(l, n, ROUTED);
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
        let shape = ExpertShape { gate, up, down, n_embd, n_ff, activation, limit: 0.0 };
        Ok((self.activated(l, ROUTED, shape)?, typed.experts))
    }

    /// One tensor of gate and up, which some files have in the place of the two.
    fn fused_tensor(&self, l: usize) -> Option<usize> {
        let (up, _) = self.name(ROUTED[1], l).filter(|_| self.activation().is_gated())?;
        self.gguf.tensor_index(&up.replace("ffn_up_exps", "ffn_gate_up_exps"))
    }

    /// Experts with gate and up [n_embd, 2 · n_ff, n] in one tensor, gate first.
    fn fused_experts(
        &self,
        l: usize,
        n: usize,
        gate_up: usize,
    ) -> Result<(ExpertShape, LayerExperts)> {
        let n_embd = self.hyper.n_embd;
        let down = self.require(ROUTED[2], l)?;
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
        let shape = ExpertShape { gate, up, down, n_embd, n_ff, activation, limit: 0.0 };
        Ok((self.activated(l, ROUTED, shape)?, experts))
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
    fn experts(&self, l: usize, n: usize, roles: [&str; 3]) -> Result<(ExpertShape, LayerExperts)> {
        let ([gate, up, down], n_embd) = (roles, self.hyper.n_embd);
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
        let shape = ExpertShape { gate, up, down, n_embd, n_ff, activation, limit: 0.0 };
        Ok((self.activated(l, roles, shape)?, experts))
    }

    /// A shape with the activation and the limit of a layer's experts of these roles.
    fn activated(&self, l: usize, roles: [&str; 3], shape: ExpertShape) -> Result<ExpertShape> {
        let activation = self.activation();
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
        let key = if routed { "swiglu_clamp_exp" } else { "swiglu_clamp_shexp" };
        let key = self.descriptor.key(key);
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
