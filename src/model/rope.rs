//! How positions turn the heads: base, scaling and magnitude, from GGUF metadata. What comes out is
//! a frequency a pair, for a context of a given length.

use super::descriptor::{Mixer, Tempering, Window};
use super::hyper::Keys;
use crate::Result;
use crate::backend::ops::Frequencies;

/// The turning of a model's heads.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParams {
    /// Elements of a head that turn.
    pub n_rot: usize,
    pub base: f32,
    pub scaling: RopeScaling,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions are divided by `factor`.
    Linear {
        factor: f32,
    },
    Yarn(Yarn),
    Long(LongRope),
}

/// YaRN (arXiv 2309.00071, section 3.2): fast pairs keep their frequency, slow ones are divided by
/// `factor`, those between are blended.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f32,
    /// Tokens of context before the extension.
    pub original: usize,
    /// Turns within the original context from which on a pair is fast, and below which it is slow.
    pub beta_fast: f32,
    pub beta_slow: f32,
    /// Ends of the blended range are rounded to whole pairs, outwards.
    pub rounds: bool,
    /// Factor on cosines and sines.
    pub magnitude: f32,
}

/// LongRoPE (arXiv 2402.13753): one list of factors up to the original context, another beyond.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    pub original: usize,
    pub short_magnitude: f32,
    pub long_magnitude: f32,
}

/// A factor on queries by their position, so that scores stay apart in long texts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Temperature {
    /// 1 + scale · ln(1 + ⌊(position + first) / length⌋) (Llama 4, Ministral 3)
    Steps { scale: f32, length: usize, first: usize },
    /// log(position) / log(length) beyond `length`, else 1 (Grok 2)
    Logarithm { length: usize },
    /// (1 + (position + 1) / length)^scale (Beam)
    Power { scale: f32, length: usize },
    /// ln(position + 1), of which each head makes a factor of its own (SSMax)
    Heads,
}

/// Divisors of the frequencies that a file has as tensors.
#[derive(Clone, Debug, Default)]
pub struct RopeFactors {
    /// Whatever the context (Llama 3.1).
    pub all: Option<Vec<f32>>,
    pub short: Option<Vec<f32>>,
    pub long: Option<Vec<f32>>,
}

impl Temperature {
    /// 0 is none given. Without a length of its own it grows from the original context on.
    pub(super) fn read(keys: &Keys, rope: &RopeParams) -> Result<Option<Temperature>> {
        let key = "attention.temperature_length";
        match keys.descriptor.parts.tempering {
            Tempering::ByKeys => {}
            Tempering::Heads => return Ok(Some(Temperature::Heads)),
            Tempering::Unrotated { scale, length, first } => {
                return Ok(Some(Temperature::Steps { scale, length, first }));
            }
            Tempering::Power { scale, length } => {
                let scale = keys.factor("attention.temperature_scale")?.unwrap_or(scale);
                let length = keys.count(key)?.unwrap_or(length);
                return Ok(Some(Temperature::Power { scale, length }));
            }
            Tempering::Logarithm => {
                let length = keys.number(key)?;
                return Ok((length > 1).then_some(Temperature::Logarithm { length }));
            }
        }
        let Some(scale) = keys.factor("attention.temperature_scale")? else { return Ok(None) };
        let length = match (&rope.scaling, keys.number(key)?) {
            (RopeScaling::Yarn(yarn), 0) => yarn.original,
            _ => keys.require(key)?,
        };
        Ok(Some(Temperature::Steps { scale, length, first: 0 }))
    }

    /// The factor at a position, or what factors are made of.
    pub fn at(&self, position: usize) -> f32 {
        match *self {
            Temperature::Steps { scale, length, first } => {
                1.0 + scale * ((1 + (position + first) / length) as f32).ln()
            }
            Temperature::Logarithm { length } if position > length => {
                (position as f32).ln() / (length as f32).ln()
            }
            Temperature::Logarithm { .. } => 1.0,
            Temperature::Heads => ((position + 1) as f32).ln(),
            Temperature::Power { scale, length } => {
                (scale * ((position + 1) as f32 / length as f32).ln_1p()).exp()
            }
        }
    }
}

impl RopeParams {
    /// How sliding layers turn: with a base of their own, and by another scaling if they have
    /// none.
    pub(super) fn of_sliding_layers(&self, keys: &Keys, head_dim: usize) -> Result<RopeParams> {
        // Others have no layers that turn otherwise.
        let parts = &keys.descriptor.parts;
        if parts.window == Window::None || parts.sliding_rope_is_models {
            return Ok(self.clone());
        }
        let scaling = match parts.sliding_rope_is_unscaled {
            true => RopeScaling::None,
            false => self.scaling.clone(),
        };
        let base = match parts.mixer {
            Mixer::Compressed => keys.positive("rope.freq_base")?.unwrap_or(self.base),
            _ => keys.factor("rope.freq_base_swa")?.unwrap_or(self.base),
        };
        let plain = if parts.half_of_full_rope { 2 * self.n_rot } else { self.n_rot };
        let n_rot = keys.count("rope.dimension_count_swa")?.unwrap_or(plain);
        if n_rot % 2 != 0 || n_rot > head_dim {
            let expected = format!("an even number of at most {head_dim}");
            return Err(keys.bad("rope.dimension_count_swa", expected, n_rot));
        }
        Ok(RopeParams { n_rot, base, scaling })
    }

    pub(super) fn read(keys: &Keys, n_rot: usize, n_ctx_train: usize) -> Result<RopeParams> {
        let is_compressed = keys.descriptor.parts.mixer == Mixer::Compressed;
        let base = match is_compressed {
            true => keys.positive("attention.compress_rope_freq_base")?,
            false => keys.positive("rope.freq_base")?,
        };
        let base = base.unwrap_or(10000.0);
        let has_long = keys.descriptor.tensors.contains_key("rope_factors_long");
        // llama.cpp saves models that are not scaled as linear ones, with 0 for a factor.
        let unscaled = keys.gguf.f32(&keys.descriptor.key("rope.scaling.factor"))? == Some(0.0);
        let kind = keys.text("rope.scaling.type")?.filter(|kind| !(*kind == "linear" && unscaled));
        let scaling = match kind {
            Some("linear") => {
                let factor = keys.positive("rope.scaling.factor")?;
                RopeScaling::Linear { factor: keys.some("rope.scaling.factor", factor)? }
            }
            // What is turned back by another position has no magnitude.
            Some("yarn") if is_compressed => {
                RopeScaling::Yarn(Yarn { magnitude: 1.0, ..yarn(keys)? })
            }
            Some("yarn") => RopeScaling::Yarn(yarn(keys)?),
            Some("longrope") | None if has_long => match long(keys, n_ctx_train)? {
                Some(long) => RopeScaling::Long(long),
                None => RopeScaling::None,
            },
            None if unscaled => RopeScaling::None,
            None => unnamed(keys)?,
            Some("none") => RopeScaling::None,
            Some(other) => {
                let known = if has_long { " or \"longrope\"" } else { "" };
                let expected = format!("\"none\", \"linear\", \"yarn\"{known}");
                return Err(keys.bad("rope.scaling.type", expected, format!("{other:?}")));
            }
        };
        Ok(RopeParams { n_rot, base, scaling })
    }

    /// Factor on the attention scores that YaRN wants of models with
    /// `rope.scaling.yarn_log_multiplier` (DeepSeek-V2's `mscale_all_dim`, divided by ten).
    pub(super) fn score_factor(&self, keys: &Keys) -> Result<f32> {
        match (&self.scaling, log_multiplier(keys)?) {
            _ if !scales_scores(keys) => Ok(1.0),
            (RopeScaling::Yarn(yarn), Some(by)) => Ok((1.0 + by * yarn.factor.ln()).powi(2)),
            (RopeScaling::Yarn(_), None) => keys.some(LOG_MULTIPLIER, None),
            _ => Ok(1.0),
        }
    }

    /// Whether sessions of `n_ctx` positions take the factors of an extended context.
    pub fn is_long(&self, n_ctx: usize) -> bool {
        matches!(&self.scaling, RopeScaling::Long(long) if n_ctx > long.original)
    }

    /// Frequencies of the pairs for sessions of `n_ctx` positions.
    pub fn frequencies(&self, factors: &RopeFactors, n_ctx: usize) -> Frequencies {
        let plain = |i: usize| 1.0 / f64::from(self.base).powf((2 * i) as f64 / self.n_rot as f64);
        let pairs = |of: &dyn Fn(usize) -> f32| (0..self.n_rot / 2).map(of).collect::<Vec<f32>>();
        let divided = |by: &Option<Vec<f32>>, times: f32| {
            pairs(&|i| plain(i) as f32 * times / by.as_ref().map_or(1.0, |f| f[i]))
        };
        match &self.scaling {
            RopeScaling::None => Frequencies::new(divided(&factors.all, 1.0), 1.0),
            RopeScaling::Linear { factor } => {
                Frequencies::new(divided(&factors.all, 1.0 / factor), 1.0)
            }
            RopeScaling::Yarn(yarn) => {
                let blend = yarn.blend(self.n_rot, self.base);
                let pair = |i: usize| {
                    let (fast, slow) = (plain(i), plain(i) / f64::from(yarn.factor));
                    let slowness = blend(i);
                    let blended = (slow * slowness + fast * (1.0 - slowness)) as f32;
                    blended / factors.all.as_ref().map_or(1.0, |f| f[i])
                };
                Frequencies::new(pairs(&pair), yarn.magnitude)
            }
            RopeScaling::Long(long) if self.is_long(n_ctx) => {
                Frequencies::new(divided(&factors.long, 1.0), long.long_magnitude)
            }
            RopeScaling::Long(long) => {
                Frequencies::new(divided(&factors.short, 1.0), long.short_magnitude)
            }
        }
    }
}

impl Yarn {
    /// How slow pair i is: 0 keeps its frequency, 1 divides it by the factor (equation 17 with the
    /// range in pairs).
    fn blend(&self, n_rot: usize, base: f32) -> impl Fn(usize) -> f64 {
        let pair_of = |turns: f32| {
            let wave = self.original as f64 / (f64::from(turns) * std::f64::consts::TAU);
            n_rot as f64 * wave.ln() / (2.0 * f64::from(base).ln())
        };
        let (low, high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        let (low, high) = if self.rounds { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(n_rot as f64 - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        move |i| ((i as f64 - low) / width).clamp(0.0, 1.0)
    }
}

/// The magnitude is what `rope.scaling.attn_factor` or `yarn_attn_factor` says; else
/// 1 + 0.1·ln(factor) as the paper has it, divided by 1 + 0.1·m·ln(factor) with
/// m = `yarn_log_multiplier`, but for models whose scores are scaled instead: the published ones
/// have `mscale` = `mscale_all_dim`, whose ratio is 1.
fn yarn(keys: &Keys) -> Result<Yarn> {
    let factor = keys.some("rope.scaling.factor", keys.positive("rope.scaling.factor")?)?;
    let original = keys.require("rope.scaling.original_context_length")?;
    let scaled = |by: f32| 1.0 + 0.1 * by * factor.ln().max(0.0);
    let plain = match log_multiplier(keys)?.filter(|by| *by > 0.0) {
        Some(_) if scales_scores(keys) => 1.0,
        by => scaled(1.0) / scaled(by.unwrap_or(0.0)),
    };
    let given = keys.positive("rope.scaling.attn_factor")?;
    let magnitude = plain * given.unwrap_or(1.0);
    let beta = |key: &str, plain: f32| {
        let given = keys.positive(key)?.filter(|_| !keys.descriptor.parts.yarn_betas_are_fixed);
        Result::Ok(given.unwrap_or(plain))
    };
    Ok(Yarn {
        factor,
        original,
        beta_fast: beta("rope.scaling.yarn_beta_fast", 32.0)?,
        beta_slow: beta("rope.scaling.yarn_beta_slow", 1.0)?,
        rounds: keys.descriptor.parts.yarn_rounds,
        magnitude: own_magnitude(keys)?.unwrap_or(magnitude),
    })
}

/// llama.cpp saves a factor of 1 for every model, and beside it what tells that none was given.
fn own_magnitude(keys: &Keys) -> Result<Option<f32>> {
    let beside = keys.gguf.f32(&keys.descriptor.key("rope.scaling.yarn_ext_factor"))?;
    let given = keys.positive("rope.scaling.yarn_attn_factor")?;
    Ok(given.filter(|_| beside.is_none_or(|factor| factor >= 0.0)))
}

const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// Whether YaRN's log multiplier is a factor on the scores.
fn scales_scores(keys: &Keys) -> bool {
    let parts = &keys.descriptor.parts;
    parts.mixer == Mixer::Latent && !parts.yarn_leaves_scores
}

/// 0 leaves the scores alone.
fn log_multiplier(keys: &Keys) -> Result<Option<f32>> {
    match keys.gguf.f32(&keys.descriptor.key(LOG_MULTIPLIER))? {
        Some(0.0) => Ok(Some(0.0)),
        _ => keys.positive(LOG_MULTIPLIER),
    }
}

/// A file that names no kind of scaling: none, or by its old key a linear one. What only a kind
/// can make sense of is no accident.
fn unnamed(keys: &Keys) -> Result<RopeScaling> {
    let of_a_kind = ["rope.scaling.factor", "rope.scaling.original_context_length", LOG_MULTIPLIER];
    if let Some(key) = of_a_kind.into_iter().find(|key| keys.has(key)) {
        let expected = format!("\"linear\" or \"yarn\" beside {}", keys.descriptor.key(key));
        return Err(keys.bad("rope.scaling.type", expected, "nothing"));
    }
    let linear = keys.positive("rope.scale_linear")?;
    Ok(linear.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor }))
}

/// `None` where the file says nothing of an extended context.
fn long(keys: &Keys, n_ctx_train: usize) -> Result<Option<LongRope>> {
    let key = "rope.scaling.original_context_length";
    let (factors, _) = keys.descriptor.tensor_name("rope_factors_long", 0).expect("asked for");
    let has_factors = keys.gguf.tensor(&factors).is_some();
    let original = match keys.count(key)? {
        Some(original) => original,
        None if has_factors || keys.text("rope.scaling.type")?.is_some() => {
            return keys.some(key, None);
        }
        None => return Ok(None),
    };
    // llama.cpp saves a context that is not extended as the original one.
    let is_named = keys.text("rope.scaling.type")? == Some("longrope");
    if !has_factors && !is_named && original >= n_ctx_train {
        return Ok(None);
    }
    let factor = n_ctx_train as f32 / original as f32;
    let plain =
        if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f32).ln()).sqrt() };
    let plain = keys.positive("rope.scaling.attn_factor")?.unwrap_or(plain);
    Ok(Some(LongRope {
        original,
        short_magnitude: keys.positive("rope.scaling.short_mscale")?.unwrap_or(plain),
        long_magnitude: keys.positive("rope.scaling.long_mscale")?.unwrap_or(plain),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(scaling: RopeScaling) -> RopeParams {
        RopeParams { n_rot: 64, base: 10000.0, scaling }
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_divides_slow_ones() {
        let yarn = Yarn {
            factor: 8.0,
            original: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            rounds: true,
            magnitude: 1.2,
        };
        let none = params(RopeScaling::None).frequencies(&RopeFactors::default(), 1);
        let scaled =
            params(RopeScaling::Yarn(yarn.clone())).frequencies(&RopeFactors::default(), 1);
        let ratio = |i: usize| none.pairs()[i] / scaled.pairs()[i];
        assert_eq!((ratio(0), scaled.magnitude()), (1.0, 1.2));
        assert!((ratio(31) - 8.0).abs() < 1e-5);
        assert!((0..31).all(|i| ratio(i) <= ratio(i + 1) * 1.000001));
        // 32 turns at pair 10.5, one at 22.5: pairs 10 to 23 are blended if the range is rounded.
        assert!(ratio(10) == 1.0 && ratio(11) > 1.0 && ratio(22) < 8.0);
        // A file's own divisors come on top.
        let twos = RopeFactors { all: Some(vec![2.0; 32]), ..RopeFactors::default() };
        let halved = params(RopeScaling::Yarn(yarn.clone())).frequencies(&twos, 1);
        assert!(halved.pairs().iter().zip(scaled.pairs()).all(|(a, b)| 2.0 * a == *b));
        let exact = Yarn { rounds: false, ..yarn };
        let exact = params(RopeScaling::Yarn(exact)).frequencies(&RopeFactors::default(), 1);
        assert_ne!(exact.pairs()[15], scaled.pairs()[15]);
    }

    #[test]
    fn long_factors_count_beyond_the_original_context() {
        let long = LongRope { original: 32, short_magnitude: 1.0, long_magnitude: 1.5 };
        let factors =
            RopeFactors { all: None, short: Some(vec![1.0; 32]), long: Some(vec![4.0; 32]) };
        let at = |n_ctx| params(RopeScaling::Long(long.clone())).frequencies(&factors, n_ctx);
        assert_eq!((at(32).pairs()[0], at(32).magnitude()), (1.0, 1.0));
        assert_eq!((at(33).pairs()[0], at(33).magnitude()), (0.25, 1.5));
    }
}
