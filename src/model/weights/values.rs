//! Experts that make attention's values: Σ weight · silu(W · x) over those that a token uses.

use super::super::granules;
use super::binder::Binder;
use super::ffn::Router;
use crate::Result;
use crate::backend::ops::{Activation, ExpertShape};
use crate::experts::LayerExperts;
use crate::model::values::ValueParams;

#[derive(Clone, Debug)]
pub struct ValueExperts {
    /// Chooses and weighs as the router of the layer's other experts does.
    pub router: Router,
    /// Experts that a token uses.
    pub k: usize,
    /// Experts of one matrix, up: `n_ff` is the length of the values.
    pub shape: ExpertShape,
    pub experts: LayerExperts,
}

impl Binder<'_> {
    /// The experts that make the values of a layer, `n_rows` numbers; `None` in a layer with one
    /// matrix of values, as layers with a dense feed-forward part have.
    pub fn value_experts(&self, l: usize, n_rows: usize) -> Result<Option<Box<ValueExperts>>> {
        let found = self.find("attn_v_exps", l)?;
        let Some(ValueParams { n_experts, k }) = self.hyper.routing.values else {
            if let Some(index) = found {
                self.require_key("attention.value_expert_count", index)?;
            }
            return Ok(None);
        };
        if self.find("ffn_gate_inp", l)?.is_none() {
            return Ok(None);
        }
        let n_embd = self.hyper.n_embd;
        let tensor = self.require("attn_v_exps", l)?;
        self.check(tensor, &[n_embd, n_rows, n_experts])?;
        let logits = self.linear("attn_v_gate", l, n_experts, n_embd)?;
        let choice_bias = self.choice_bias("attn_v_gate_b", l, n_experts)?;
        let router = Router { logits, choice_bias, norm: None, fixed: None, scales: None };
        let ty = self.tensor(tensor).ty;
        let experts = granules::cut_single(ty, [n_embd, n_rows, n_experts], tensor);
        let experts = experts.ok_or_else(|| {
            self.wrong(tensor, "a size that can be addressed".into(), format!("{n_rows} rows"))
        })?;
        let shape = ExpertShape {
            gate: None,
            up: ty,
            down: ty,
            n_embd,
            n_ff: n_rows,
            activation: Activation::SiluPlain,
            limit: 0.0,
            up_limit: 0.0,
        };
        Ok(Some(Box::new(ValueExperts { router, k, shape, experts })))
    }
}
