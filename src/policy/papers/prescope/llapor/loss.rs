//! The training loss, a reconstruction, because our copy of the paper lacks the equations
//! (PreScope, section 4.2.2). The mean over the J experts of a layer of
//!
//! ```text
//! L = λ · wⱼ · BCE(pⱼ, aⱼ) + (1 − λ) · FL(pⱼ, aⱼ)
//! BCE = −ln pₜ        FL = −(1 − pₜ)^γ · ln pₜ
//! ```
//!
//! with pₜ the probability that was given to what happened, p if the expert was chosen, else
//! 1 − p, and wⱼ falling with the frequency of the expert: rare ones count as much as hot ones.

/// The loss of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// λ, from 0, focal loss alone, to 1, balanced cross-entropy alone.
    pub lambda: f32,
    /// γ: how much less examples count that are right already.
    pub gamma: f32,
    /// w, of each expert, with a mean of 1.
    pub balance: Vec<f32>,
}

impl Loss {
    /// Plain binary cross-entropy.
    pub fn plain(n_experts: usize) -> Loss {
        Loss { lambda: 1.0, gamma: 0.0, balance: vec![1.0; n_experts] }
    }

    /// L of one expert, from its logit.
    pub fn value(&self, expert: usize, logit: f32, chosen: bool) -> f32 {
        let sign = if chosen { 1.0 } else { -1.0 };
        let entropy = softplus(-sign * logit);
        let focal = sigmoid(-sign * logit).powf(self.gamma) * entropy;
        self.lambda * self.balance[expert] * entropy + (1.0 - self.lambda) * focal
    }

    /// ∂L/∂x of one expert, x being the logit.
    pub fn gradient(&self, expert: usize, logit: f32, chosen: bool) -> f32 {
        let sign = if chosen { 1.0 } else { -1.0 };
        let p_t = sigmoid(sign * logit);
        let ln_p_t = -softplus(-sign * logit);
        let miss = 1.0 - p_t;
        let focal = miss.powf(self.gamma) * (self.gamma * p_t * ln_p_t - miss);
        sign * (self.lambda * self.balance[expert] * -miss + (1.0 - self.lambda) * focal)
    }
}

pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// ln(1 + eˣ), without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The loss as the module's comment writes it.
    fn value(loss: &Loss, expert: usize, logit: f64, chosen: bool) -> f64 {
        let p = 1.0 / (1.0 + (-logit).exp());
        let p_t = if chosen { p } else { 1.0 - p };
        let lambda = f64::from(loss.lambda);
        let focal = -(1.0 - p_t).powf(f64::from(loss.gamma)) * p_t.ln();
        lambda * f64::from(loss.balance[expert]) * -p_t.ln() + (1.0 - lambda) * focal
    }

    proptest! {
        #[test]
        fn the_gradient_is_the_slope(
            logit in -6.0..6.0f64,
            chosen: bool,
            lambda in 0.0..=1.0f32,
            gamma in 0.0..4.0f32,
        ) {
            let loss = Loss { lambda, gamma, balance: vec![1.0, 2.5] };
            let step = 1e-5;
            let (after, before) = (value(&loss, 1, logit + step, chosen),
                value(&loss, 1, logit - step, chosen));
            let slope = (after - before) / (2.0 * step);
            let gradient = f64::from(loss.gradient(1, logit as f32, chosen));
            prop_assert!((gradient - slope).abs() < 1e-4, "{gradient} {slope}");
            let (got, expected) =
                (f64::from(loss.value(1, logit as f32, chosen)), value(&loss, 1, logit, chosen));
            prop_assert!((got - expected).abs() < 1e-4 * expected.max(1.0), "{got} {expected}");
        }
    }

    #[test]
    fn certainty_does_not_overflow() {
        let loss = Loss { lambda: 0.5, gamma: 2.0, balance: vec![1.0] };
        for logit in [-200.0, 200.0] {
            for chosen in [false, true] {
                let wrong = chosen == (logit < 0.0);
                let gradient = loss.gradient(0, logit, chosen);
                let expected = if wrong { if chosen { -1.0 } else { 1.0 } } else { 0.0 };
                assert!((gradient - expected).abs() < 1e-6, "{logit} {chosen} {gradient}");
            }
        }
    }
}
