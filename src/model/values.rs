//! Experts that make attention's values, and norms of parts of the stream (K2 Horizon).

use super::descriptor::Norm;
use super::hyper::{HyperParams, Keys};
use crate::Result;

/// How many experts make a layer's values, of which a token uses `k`. Layers with a dense
/// feed-forward part have none.
#[derive(Clone, Copy, Debug)]
pub struct ValueParams {
    pub n_experts: usize,
    pub k: usize,
}

impl ValueParams {
    /// `None` in a file without the keys, and in a dense one.
    pub(super) fn read(keys: &Keys, n_routed: usize) -> Result<Option<ValueParams>> {
        let (key, used) = ("attention.value_expert_count", "attention.value_expert_used_count");
        if keys.descriptor.tensor_name("attn_v_exps", 0).is_none() {
            return Ok(None);
        }
        let (n_experts, k) = (keys.number(key)?, keys.number(used)?);
        if k > 0 && n_experts == 0 {
            keys.require(key)?;
            let expected = format!("at least {k}, which is {}", keys.descriptor.key(used));
            return Err(keys.bad(key, expected, n_experts));
        }
        if k > n_experts || k == 0 && n_experts > 0 {
            let expected = format!("1 to {n_experts}, which is {}", keys.descriptor.key(key));
            return Err(keys.bad(used, expected, k));
        }
        if n_experts == 0 || n_routed == 0 {
            return Ok(None);
        }
        Ok(Some(ValueParams { n_experts, k }))
    }
}

impl HyperParams {
    /// The number in the tiers of a layer's routed experts. In a model with experts that make
    /// values a layer has two numbers, as these come first.
    pub fn tier_layer(&self, layer: usize) -> usize {
        if self.routing.values.is_some() { 2 * layer + 1 } else { layer }
    }

    /// The number in the tiers of the experts that make a layer's values.
    pub fn tier_layer_of_values(&self, layer: usize) -> usize {
        2 * layer
    }

    /// The layer that has a number in the tiers, and whether that is of its values.
    pub fn layer_in_tier(&self, number: usize) -> (usize, bool) {
        match self.routing.values {
            None => (number, false),
            Some(_) => (number / 2, number.is_multiple_of(2)),
        }
    }
}

impl Keys<'_> {
    /// Parts of which each has a norm of its own: more than one with `Norm::GroupedRms` alone.
    pub(super) fn norm_groups(&self, n_embd: usize) -> Result<usize> {
        let key = "attention.group_norm_groups";
        if self.descriptor.parts.norm != Norm::GroupedRms {
            return Ok(1);
        }
        let n = self.number(key)?.max(1);
        match n_embd.is_multiple_of(n) {
            true => Ok(n),
            false => {
                let expected =
                    format!("a divisor of {} = {n_embd}", self.descriptor.key("embedding_length"));
                Err(self.bad(key, expected, n))
            }
        }
    }
}
