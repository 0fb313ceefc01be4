//! Feed-forward parts: dense, routed, shared, and a dense branch beside the routed one.

use super::super::adjugate::AdjugateParams;
use super::super::descriptor;
use super::super::granules;
use super::binder::Binder;
use super::experts::{ADJUGATE, ADJUGATE_WIDTH, DENSE, DENSE_WIDTH, ROUTED, ROUTED_WIDTH};
use super::experts::{SHARED, SHARED_WIDTH};
use super::residence::{Host, Residence};
use super::{Matrix, Norm};
use crate::backend::ops::{ExpertBiases, ExpertForm, ExpertScales, ExpertShape, Score};
use crate::experts::LayerExperts;
use crate::gguf::TensorType;
use crate::{Error, Result};

/// How a layer's tokens find their experts.
#[derive(Clone, Debug)]
pub enum Gate {
    /// One expert of this weight, 1 as a rule: a dense layer.
    Dense(f32),
    Router(Router),
}

#[derive(Clone, Debug)]
pub struct Router<R: Residence = Host> {
    pub logits: R::Linear,
    /// Added to the probabilities to choose by (DeepSeek-V3, section 2.1.2).
    pub choice_bias: Option<R::Vector>,
    /// Normalises its input, instead of the experts' norm.
    pub norm: Option<Norm<R>>,
    /// The experts of each token of the vocabulary, whatever the logits: u32 [vocabulary, k].
    pub fixed: Option<R::Ids>,
    /// Factors on the chosen experts' weights: [experts].
    pub scales: Option<R::Vector>,
}

/// Factors of an expert that every token goes to: on its products of gate and up, and on its
/// result.
#[derive(Clone, Debug)]
pub struct OnlyScales {
    pub inner: Option<ExpertScales>,
    pub outer: f32,
}

/// Routed experts whose input and output are narrower than the stream: up · norm(Σ
/// experts(input_norm(down · h))).
#[derive(Clone, Debug)]
pub struct Latent<R: Residence = Host> {
    pub down: R::Linear,
    pub input_norm: Option<R::Vector>,
    pub norm: Option<R::Vector>,
    pub up: R::Linear,
}

/// Small experts that see the sum of the routed ones, one for each group of these, chosen and
/// weighed by the same router (GroveMoE, arXiv 2508.07785).
#[derive(Clone, Debug)]
pub struct Adjugate {
    pub shape: ExpertShape,
    pub n_experts: usize,
    /// Experts that a token uses.
    pub k: usize,
    /// Routed experts of a group.
    pub group: usize,
    /// Factor on their sum.
    pub scale: f32,
}

#[derive(Clone, Debug)]
pub struct SharedExpert {
    pub shape: ExpertShape,
    pub scales: OnlyScales,
    /// Its output is multiplied by the sigmoid of this vector times the input.
    pub gate: Option<Matrix>,
}

/// A dense feed-forward part that a layer has besides its routed one.
#[derive(Clone, Debug)]
pub struct DenseBranch {
    pub norm: Norm,
    pub shape: ExpertShape,
    pub scales: OnlyScales,
    /// Normalises its output, which then joins the experts' instead of the stream.
    pub post_norm: Option<Norm>,
}

#[derive(Clone, Debug)]
pub struct FfnWeights {
    pub norm: Norm,
    pub gate: Gate,
    pub expert: ExpertShape,
    pub biases: Option<ExpertBiases>,
    pub scales: Option<ExpertScales>,
    pub latent: Option<Latent>,
    pub adjugate: Option<Adjugate>,
    pub shared: Option<SharedExpert>,
    /// Computed before the routed experts, which then see what attention saw.
    pub branch: Option<DenseBranch>,
    /// The part sees the stream as it was before attention.
    pub sees_before: bool,
    /// Added to the experts' sum: [n_embd].
    pub sum_bias: Option<Vec<f32>>,
    /// Normalises the sum that the part adds to the stream.
    pub post_norm: Option<Norm>,
    /// Normalises the experts' sum before a branch joins it.
    pub experts_norm: Option<Norm>,
    /// Normalises each expert's result before the router's weight.
    pub result_norm: Option<Norm>,
    /// Factor on what it adds to the stream, besides the model's.
    pub scale: f32,
    /// The router reads the stream before attention, as it is.
    pub routes_stream: bool,
    /// The router's weight multiplies an expert's input.
    pub weights_input: bool,
    /// Then each of a token's experts has an input of its own, if there are several.
    pub splits_input: bool,
}

impl FfnWeights {
    pub fn form(&self) -> ExpertForm<'_> {
        let (biases, scales) = (self.biases.as_ref(), self.scales.as_ref());
        ExpertForm { biases, scales, ..self.expert.form() }
    }

    /// The type of the router's matrix.
    pub fn router_input(&self) -> Option<TensorType> {
        match &self.gate {
            Gate::Router(router) => Some(router.logits.weight.ty),
            Gate::Dense(_) => None,
        }
    }

    /// The norm of a router that has one of its own.
    pub fn router_norm(&self) -> Option<&Norm> {
        match &self.gate {
            Gate::Router(router) => router.norm.as_ref(),
            Gate::Dense(_) => None,
        }
    }

    /// Whether devices have kernels for all of it.
    pub fn has_kernels(&self) -> bool {
        !(self.weights_input && self.latent.is_some())
            && self.expert.activation.has_kernels()
            && self.sum_bias.is_none()
            && self.result_norm.is_none()
            && self.post_norm.as_ref().is_none_or(|norm| norm.kind != descriptor::Norm::ScaledRms)
    }

    /// Whether routed experts read other rows than the rest of it.
    pub fn has_own_input(&self) -> bool {
        self.latent.is_some() || self.splits_input
    }

    /// Rows that routed experts read of `n` tokens with `k` experts each.
    pub fn n_inputs(&self, n: usize, k: usize) -> usize {
        if self.splits_input { n * k } else { n }
    }

    /// Types of everything that reads the normalised input.
    pub fn inputs(&self) -> impl Iterator<Item = TensorType> {
        let router =
            self.router_input().filter(|_| !self.routes_stream && self.router_norm().is_none());
        let shared = self.shared.iter();
        let shared = shared.flat_map(|s| s.shape.inputs().chain(s.gate.as_ref().map(|m| m.ty)));
        let latent = self.latent.iter().map(|latent| latent.down.weight.ty);
        let expert = self.expert.inputs().filter(|_| self.latent.is_none());
        expert.chain(router).chain(shared).chain(latent)
    }
}

/// The experts of a layer, by kind.
#[derive(Default)]
pub(crate) struct Experts {
    pub routed: Option<LayerExperts>,
    pub dense: Option<LayerExperts>,
    pub shared: Option<LayerExperts>,
}

impl Binder<'_> {
    pub fn ffn(&self, l: usize) -> Result<(FfnWeights, Experts)> {
        let mut places = Experts::default();
        let Some(router) = self.router(l)? else { return self.dense_ffn(l) };
        let latent = self.latent_experts(l)?;
        let width = latent.as_ref().map_or(self.hyper.n_embd, |latent| latent.up.weight.cols);
        let (expert, routed) = self.routed(l, width)?;
        self.check_width(ROUTED_WIDTH, l, &routed, expert.n_ff)?;
        places.routed = Some(routed);
        let shared = match self.together(&SHARED, l)? {
            false => None,
            true => {
                let (shape, experts) = self.only(l, SHARED)?;
                self.check_width(SHARED_WIDTH, l, &experts, shape.n_ff)?;
                places.shared = Some(experts);
                let gate = self.find("ffn_gate_inp_shexp", l)?;
                let gate = gate.map(|t| self.matrix(t, 1, self.hyper.n_embd)).transpose()?;
                Some(SharedExpert { shape, scales: self.only_scales(l, SHARED)?, gate })
            }
        };
        let (branch, norm) = self.branch(l, &mut places)?;
        let n = self.hyper.routing.n_experts;
        let mut biases = self.expert_biases(l, n, &expert, ROUTED)?;
        if let (Some(biases), Some(scales)) = (&mut biases, &router.scales) {
            // The router's weight has the factor, which is on products without biases.
            let of_experts = biases.down.chunks_exact_mut(expert.n_embd).zip(scales);
            of_experts.for_each(|(bias, scale)| bias.iter_mut().for_each(|b| *b /= scale));
        }
        let adjugate = self.adjugate(l, &mut places)?;
        let gate = Gate::Router(router);
        let sees_before = matches!(
            self.descriptor.parts.residual,
            descriptor::Residual::ParallelMoe | descriptor::Residual::Parallel
        );
        let post_norm = self.post_norm("ffn_post_norm", l)?;
        let result_norm = self.find("ffn_exps_norm", l)?;
        let result_norm = result_norm.map(|index| self.scaled_norm(index, expert.n_embd));
        let sum = self.descriptor.parts.shared_sum;
        let scale = if shared.is_some() { sum.factor() } else { 1.0 };
        let ffn = FfnWeights {
            norm,
            gate,
            expert,
            biases,
            scales: self.inner_scales(l, n, ROUTED)?,
            latent,
            adjugate,
            shared,
            branch,
            sees_before,
            sum_bias: self.optional_vector("ffn_sum_bias", l, self.hyper.n_embd)?,
            post_norm,
            experts_norm: match self.descriptor.parts.residual {
                descriptor::Residual::NormedBranches => Some(self.norm("ffn_exps_post_norm", l)?),
                _ => None,
            },
            result_norm: result_norm.transpose()?,
            scale,
            routes_stream: self.descriptor.router.input == descriptor::RouterInput::Stream,
            weights_input: self.descriptor.parts.weights_before_experts,
            splits_input: self.descriptor.parts.weights_before_experts && self.hyper.routing.k > 1,
        };
        Ok((ffn, places))
    }

    fn dense_ffn(&self, l: usize) -> Result<(FfnWeights, Experts)> {
        let (expert, dense) = self.only(l, DENSE)?;
        self.check_width(DENSE_WIDTH, l, &dense, expert.n_ff)?;
        let scales = self.only_scales(l, DENSE)?;
        let mut biases = self.expert_biases(l, 1, &expert, DENSE)?;
        if let (Some(biases), Some(scales)) = (&mut biases, &scales.inner) {
            // The factors are on products with biases.
            biases.gate.iter_mut().for_each(|b| *b *= scales.gate[0]);
            biases.up.iter_mut().for_each(|b| *b *= scales.up[0]);
        }
        let ffn = FfnWeights {
            norm: self.norm("ffn_norm", l)?,
            gate: Gate::Dense(scales.outer),
            expert,
            biases,
            scales: scales.inner,
            latent: None,
            adjugate: None,
            shared: None,
            branch: None,
            sees_before: self.descriptor.parts.residual == descriptor::Residual::Parallel,
            sum_bias: None,
            post_norm: self.post_norm("ffn_post_norm", l)?,
            experts_norm: None,
            result_norm: None,
            scale: 1.0,
            routes_stream: false,
            weights_input: false,
            splits_input: false,
        };
        Ok((ffn, Experts { dense: Some(dense), ..Experts::default() }))
    }

    /// A dense branch, if the layer has one, and the experts' norm.
    fn branch(&self, l: usize, places: &mut Experts) -> Result<(Option<DenseBranch>, Norm)> {
        let norm = self.norm("ffn_norm", l)?;
        let post_norm = match self.descriptor.parts.residual {
            descriptor::Residual::ParallelMoe => None,
            descriptor::Residual::NormedBranches => Some(self.norm("ffn_branch_post_norm", l)?),
            _ => return Ok((None, norm)),
        };
        let (shape, dense) = self.only(l, DENSE)?;
        places.dense = Some(dense);
        let scales = self.only_scales(l, DENSE)?;
        let branch = DenseBranch { norm, shape, scales, post_norm };
        Ok((Some(branch), self.norm("ffn_norm_exps", l)?))
    }

    /// The matrices around narrow experts, if the layer has them.
    fn latent_experts(&self, l: usize) -> Result<Option<Latent>> {
        let given = |key: &str| self.gguf.u32(&self.descriptor.key(key));
        if !self.descriptor.tensors.contains_key("ffn_latent_down") {
            return Ok(None);
        }
        let keys = ["expert_latent_length", "moe_latent_size"];
        let mut width = None;
        for key in keys {
            width = width.or(given(key)?.filter(|n| *n > 0));
        }
        if !self.together(&["ffn_latent_down", "ffn_latent_up"], l)? && width.is_none() {
            return Ok(None);
        }
        let down = self.require("ffn_latent_down", l)?;
        let own = self.tensor(down).dims.get(1).copied().unwrap_or(1) as usize;
        let (rows, n_embd) = (width.map_or(own, |n| n as usize), self.hyper.n_embd);
        Ok(Some(Latent {
            down: self.linear("ffn_latent_down", l, rows, n_embd)?,
            input_norm: self.optional_vector("ffn_latent_input_norm", l, rows)?,
            norm: self.optional_vector("ffn_latent_norm", l, rows)?,
            up: self.linear("ffn_latent_up", l, n_embd, rows)?,
        }))
    }

    /// Experts behind the routed ones, if the layer has them.
    fn adjugate(&self, l: usize, places: &mut Experts) -> Result<Option<Adjugate>> {
        let Some(params) = self.hyper.routing.adjugate else { return Ok(None) };
        let (shape, experts) = self.experts(l, params.n_experts, ADJUGATE, self.hyper.n_embd)?;
        self.check_width(ADJUGATE_WIDTH, l, &experts, shape.n_ff)?;
        places.dense = Some(experts);
        let AdjugateParams { n_experts, group, k, scale } = params;
        Ok(Some(Adjugate { shape, n_experts, k, group, scale }))
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
        self.check_experts_of_layer(l, n)?;
        let logits = self.linear("ffn_gate_inp", l, n, self.hyper.n_embd)?;
        let scales = self.scales("ffn_down_exps", l, n)?;
        let fixed = self.fixed_experts(l, n)?;
        let choice_bias =
            if fixed.is_some() { None } else { self.choice_bias("exp_probs_b", l, n)? };
        let norm = self.own_router_norm(l)?;
        Ok(Some(Router { logits, choice_bias, norm, fixed, scales }))
    }

    /// Refuses a layer with fewer experts than others, as pruned models have.
    fn check_experts_of_layer(&self, l: usize, n: usize) -> Result<()> {
        let Some(index) = self.find("ffn_gate_inp", l)? else { return Ok(()) };
        match self.tensor(index).dims[..] {
            [_, own] if own != n as u64 => {
                let key = self.descriptor.key("expert_count");
                let expected = format!("{n} rows, as {key} is the number of experts in each layer");
                Err(self.wrong(index, expected, own.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Experts of leading layers, `hash_layer_count` of them, for each token; `None` in others.
    fn fixed_experts(&self, l: usize, n: usize) -> Result<Option<Vec<u32>>> {
        let count = self.gguf.u32(&self.descriptor.key("hash_layer_count"))?.unwrap_or(0);
        if l >= count as usize || !self.descriptor.tensors.contains_key("ffn_fixed") {
            return Ok(None);
        }
        let index = self.require("ffn_fixed", l)?;
        let tensor = self.tensor(index);
        let (k, vocab) = (self.hyper.routing.k as u64, self.require("token_embd", 0)?);
        let wanted = [k, self.tensor(vocab).dims.get(1).copied().unwrap_or(1)];
        if tensor.ty != TensorType::I32 || tensor.dims != wanted {
            let got = format!("{:?} of {}", tensor.dims, tensor.ty);
            return Err(self.wrong(index, format!("{wanted:?} of I32"), got));
        }
        let bytes = self.gguf.bytes(tensor).chunks_exact(4);
        let ids = bytes.map(|id| u32::from_le_bytes(id.try_into().expect("four bytes")));
        let ids: Vec<u32> = ids.collect();
        match ids.iter().find(|id| **id as usize >= n) {
            None => Ok(Some(ids)),
            Some(id) => Err(self.wrong(index, format!("experts below {n}"), id.to_string())),
        }
    }

    /// The norm of a router that has one: RMSNorm with these weights, divided by √n_embd.
    fn own_router_norm(&self, l: usize) -> Result<Option<Norm>> {
        let n = self.hyper.n_embd;
        if !self.descriptor.tensors.contains_key("router_norm") {
            return Ok(None);
        }
        let mut weight = self.vector(self.require("router_norm", l)?, n)?;
        weight.iter_mut().for_each(|w| *w /= (n as f32).sqrt());
        let (kind, eps) = (descriptor::Norm::Rms, self.hyper.norm_eps);
        Ok(Some(Norm { kind, weight, bias: vec![0.0; n], eps }))
    }

    /// Published models with sigmoid gates choose by a bias, where their architecture has it and
    /// does not say that models may lack it. An architecture that began with another gate says
    /// beside the bias that it is a later one.
    pub fn choice_bias(&self, role: &str, l: usize, n: usize) -> Result<Option<Vec<f32>>> {
        let router = &self.descriptor.router;
        let is_biased = router.choice_bias || self.hyper.routing.choice.score == Score::Sigmoid;
        let is_biased = is_biased || router.score == Score::SqrtSoftplus;
        let is_known = self.descriptor.tensors.contains_key(role);
        if is_biased && is_known && !router.bias_is_optional {
            self.require(role, l)?;
        }
        let Some(bias) = self.find(role, l)? else { return Ok(None) };
        let is_own = matches!(router.score, Score::Sigmoid | Score::SqrtSoftplus);
        if !is_own && !router.choice_bias {
            self.require_key("expert_gating_func", bias)?;
            self.require_key("expert_weights_norm", bias)?;
        }
        self.vector(bias, n).map(Some)
    }
}
