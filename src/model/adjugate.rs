//! Small experts behind the routed ones, one for each group of them: their numbers.

use super::hyper::Keys;
use crate::Result;

/// See `Adjugate` of the weights.
#[derive(Clone, Copy, Debug)]
pub struct AdjugateParams {
    pub n_experts: usize,
    pub k: usize,
    pub group: usize,
    pub scale: f32,
}

impl AdjugateParams {
    /// The parameters of a model that routes to `k` of `n` experts.
    pub(super) fn read(keys: &Keys<'_>, n: usize, k: usize) -> Result<Option<AdjugateParams>> {
        if n == 0 || !keys.descriptor.tensors.contains_key("ffn_up_chexps") {
            return Ok(None);
        }
        let group = keys.require("experts_per_group")?;
        if !n.is_multiple_of(group) {
            let expected = format!("a divisor of expert_count = {n}");
            return Err(keys.bad("experts_per_group", expected, group));
        }
        let key = "expert_group_scale";
        let scale = keys.some(key, keys.factor(key)?)?;
        Ok(Some(AdjugateParams { n_experts: n / group, k: k.min(n / group), group, scale }))
    }
}
