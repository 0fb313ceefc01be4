//! Rotary embeddings that reach past the trained context: `rope_scaling`, which newer versions of
//! transformers call `rope_parameters` and write with `rope_theta` inside.

use serde_json::Value;

use super::hparams::Sizes;
use super::json::{Json, shown};
use super::plan::{Planned, Source};
use crate::gguf::OwnedValue;
use crate::model::descriptor::{Descriptor, Mixer, RopeLayers};
use crate::{Error, Result};

/// The parts of a GGUF file that express a checkpoint's scaling.
#[derive(Debug, Default)]
pub struct RopeScaling {
    /// `{arch}.rope.scaling.*`
    pub keys: Vec<(String, OwnedValue)>,
    /// Divisors of the frequencies: for all contexts, or within and beyond the original context.
    pub tensors: Vec<Planned>,
}

/// The group of layers that see compressed rows.
const COMPRESSED: &str = "rope_parameters.compress";

const KNOWN: &str = "default, linear, yarn, llama3, longrope or proportional";

/// Reads the scaling of a model. The config is one of `config::standard`.
pub fn read(config: &Json, descriptor: &Descriptor, sizes: &Sizes) -> Result<RopeScaling> {
    if descriptor.parts.rope_layers == RopeLayers::None {
        return Ok(RopeScaling::default());
    }
    // Layers that see everything, or compressed rows, may have a group of their own.
    let groups = ["rope_parameters.full_attention", COMPRESSED, "rope_scaling", "rope_parameters"];
    let group = groups.into_iter().find(|f| config.at(f).is_some());
    let Some(group) = group else { return Ok(RopeScaling::default()) };
    let fields = Fields { config, descriptor, group };
    let head_dim = sizes.get("head_dim").unwrap_or(0);
    let no_tensors = |keys| Ok(RopeScaling { keys, tensors: Vec::new() });
    match fields.str("rope_type")?.unwrap_or("default") {
        "default" => no_tensors(Vec::new()),
        "linear" => {
            let factor = fields.require_positive("factor")?;
            no_tensors(vec![fields.key("type", "linear"), fields.key("factor", factor)])
        }
        "yarn" => no_tensors(yarn(&fields)?),
        "llama3" => {
            // Where a part of a head turns, in files the factors are as many as for a whole one.
            let turning = sizes.get("turning").unwrap_or(head_dim);
            let mut factors = llama3(&fields, turning)?;
            factors.resize((head_dim / 2) as usize, 1.0);
            let tensors = vec![fields.tensor("rope_freqs", factors)?];
            Ok(RopeScaling { keys: Vec::new(), tensors })
        }
        "longrope" | "su" => longrope(&fields, head_dim),
        "proportional" => {
            let head_dim = sizes.get("full_head_dim").unwrap_or(head_dim);
            let tensors = vec![fields.tensor("rope_freqs", proportional(&fields, head_dim)?)?];
            Ok(RopeScaling { keys: Vec::new(), tensors })
        }
        other => Err(config.fail(&fields.name("rope_type"), KNOWN, other)),
    }
}

struct Fields<'a> {
    config: &'a Json,
    descriptor: &'a Descriptor,
    group: &'a str,
}

impl<'a> Fields<'a> {
    fn name(&self, field: &str) -> String {
        format!("{}.{field}", self.group)
    }

    fn str(&self, field: &str) -> Result<Option<&'a str>> {
        self.config.str(&self.name(field))
    }

    fn number(&self, field: &str) -> Result<Option<f64>> {
        self.config.number(&self.name(field))
    }

    fn require_positive(&self, field: &str) -> Result<f32> {
        let x = self.config.require_number(&self.name(field))? as f32;
        let fail = || self.config.fail(&self.name(field), "a number above 0", x.to_string());
        (x.is_finite() && x > 0.0).then_some(x).ok_or_else(fail)
    }

    fn key(&self, rest: &str, value: impl Into<OwnedValue>) -> (String, OwnedValue) {
        (self.descriptor.key(&format!("rope.scaling.{rest}")), value.into())
    }

    /// The context that the model was trained on before it was stretched.
    fn original_context(&self) -> Result<u64> {
        self.config.require_count(&self.name("original_max_position_embeddings"))
    }

    /// How many times longer the stretched context is: `factor`, or what the contexts tell.
    fn stretch(&self) -> Result<f64> {
        if let Some(factor) = self.number("factor")? {
            return Ok(factor);
        }
        let context = self.config.require_count("max_position_embeddings")?;
        Ok(context as f64 / self.original_context()? as f64)
    }

    /// A tensor of factors, if the architecture has its role.
    fn tensor(&self, role: &str, values: Vec<f32>) -> Result<Planned> {
        let (name, _) = self.descriptor.tensor_name(role, 0).ok_or_else(|| {
            let expected = format!("no frequency factors for {}", self.descriptor.architecture);
            self.config.fail(&self.name("rope_type"), expected, role)
        })?;
        let dims = vec![values.len() as u64];
        Ok(Planned { name, dims, source: Source::Values(values) })
    }
}

/// YaRN (arXiv 2309.00071). The rotation's magnitude is the model's `attention_factor`, or follows
/// from `mscale` and `mscale_all_dim` where both are there, else from the factor; keys have what it
/// is of the magnitude that readers take without them.
fn yarn(fields: &Fields<'_>) -> Result<Vec<(String, OwnedValue)>> {
    let parts = &fields.descriptor.parts;
    // The range of blended pairs is rounded unless the model's own group says otherwise.
    let rounds = fields.config.bool("rope_parameters.truncate")?;
    let rounds = rounds.or(fields.config.bool("rope_scaling.truncate")?).unwrap_or(true);
    if rounds != parts.yarn_rounds {
        let got = rounds.to_string();
        return Err(fields.config.fail(
            &fields.name("truncate"),
            format!(
                "{}, which files of {} imply",
                parts.yarn_rounds, fields.descriptor.architecture
            ),
            got,
        ));
    }
    let factor = fields.stretch()?;
    let mut keys: Vec<(String, OwnedValue)> = vec![
        fields.key("type", "yarn"),
        fields.key("factor", factor as f32),
        fields.key("original_context_length", fields.original_context()? as u32),
    ];
    if let Some(x) = fields.number("extrapolation_factor")? {
        keys.push(fields.key("yarn_ext_factor", x as f32));
    }
    for (field, key) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
        if let Some(x) = fields.number(field)?.filter(|x| *x != 0.0) {
            keys.push(fields.key(key, x as f32));
        }
    }
    let scale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
    let given = |field: &str| Ok::<_, Error>(fields.number(field)?.filter(|x| *x != 0.0));
    let (one, all) = (given("mscale")?, given("mscale_all_dim")?);
    let magnitude = match (fields.number("attention_factor")?, one, all) {
        (Some(magnitude), ..) => magnitude,
        (None, Some(one), Some(all)) => scale(one) / scale(all),
        _ => scale(1.0),
    };
    let mut plain = scale(1.0);
    if parts.mixer == Mixer::Compressed {
        // Rows are turned back by another position: they have no magnitude.
        return match fields.number("attention_factor")? {
            Some(1.0) => Ok(keys),
            // A class puts 1 into a group that it makes of a flat one.
            None if fields.group != COMPRESSED => Ok(keys),
            None => Err(fields.config.fail(&fields.name("attention_factor"), "1", "nothing")),
            Some(x) => {
                Err(fields.config.fail(&fields.name("attention_factor"), "1", x.to_string()))
            }
        };
    }
    if parts.mixer == Mixer::Latent {
        // Latent attention scales its scores by it, and readers then leave the magnitude at 1.
        keys.push(fields.key("yarn_log_multiplier", (0.1 * all.unwrap_or(0.0)) as f32));
        plain = if all.is_some() { 1.0 } else { plain };
    }
    if (magnitude / plain) as f32 != 1.0 {
        keys.push(fields.key("attn_factor", (magnitude / plain) as f32));
    }
    Ok(keys)
}

/// LongRoPE (Ding et al. 2024): factors for texts within the original context and for longer ones,
/// and what the rotation's magnitude is multiplied by.
fn longrope(fields: &Fields<'_>, head_dim: u64) -> Result<RopeScaling> {
    let config = fields.config;
    let mut tensors = Vec::new();
    for (field, role) in
        [("long_factor", "rope_factors_long"), ("short_factor", "rope_factors_short")]
    {
        let name = fields.name(field);
        let values: Option<Vec<f32>> =
            config.elements(&name)?.iter().map(|v| v.as_f64().map(|x| x as f32)).collect();
        let fits = |v: &Vec<f32>| v.len() as u64 == head_dim / 2 && v.iter().all(|x| *x > 0.0);
        let values = values.filter(fits).ok_or_else(|| {
            let expected = format!("{} numbers above 0", head_dim / 2);
            config.fail(&name, expected, config.at(&name).map_or("nothing".into(), shown))
        })?;
        tensors.push(fields.tensor(role, values)?);
    }
    let (original, stretch) = (fields.original_context()? as f64, fields.stretch()?);
    let magnitude = match fields.number("attention_factor")? {
        Some(magnitude) => magnitude,
        None if stretch > 1.0 => (1.0 + stretch.ln() / original.ln()).sqrt(),
        None => 1.0,
    };
    let mut keys = vec![
        fields.key("original_context_length", original as u32),
        fields.key("attn_factor", magnitude as f32),
    ];
    // Where a model has its own magnitudes, they replace that formula.
    for field in ["long_mscale", "short_mscale"] {
        if let Some(x) = fields.number(field)? {
            keys.push(fields.key(field, x as f32));
        }
    }
    Ok(RopeScaling { keys, tensors })
}

/// The first pairs turn as those of a head that turns whole, the others do not turn.
fn proportional(fields: &Fields<'_>, head_dim: u64) -> Result<Vec<f32>> {
    /// A divisor that leaves no angle in any context.
    const STILL: f32 = 1e30;
    let part = fields.number("partial_rotary_factor")?.unwrap_or(1.0);
    let factor = fields.number("factor")?.unwrap_or(1.0) as f32;
    let n_turning = (part * head_dim as f64 / 2.0) as u64;
    Ok((0..head_dim / 2).map(|i| if i < n_turning { factor } else { STILL }).collect())
}

/// Llama 3.1: short wavelengths keep their frequency, long ones are slowed by `factor`, and those
/// between go smoothly from one to the other. In f32 throughout, as transformers computes it.
fn llama3(fields: &Fields<'_>, head_dim: u64) -> Result<Vec<f32>> {
    let config = fields.config;
    let theta_fields = [fields.name("rope_theta"), "rope_theta.0".to_owned()];
    let theta = config.first(&theta_fields).and_then(|(_, v)| Value::as_f64(v)).unwrap_or(1e4);
    let factor = fields.require_positive("factor")?;
    let low = fields.require_positive("low_freq_factor")?;
    let high = fields.require_positive("high_freq_factor")?;
    let context = fields.require_positive("original_max_position_embeddings")?;
    if high <= low {
        let expected = format!("more than low_freq_factor ({low})");
        return Err(config.fail(&fields.name("high_freq_factor"), expected, high.to_string()));
    }
    let factor_of = |i: u64| {
        let frequency = 1.0 / (theta as f32).powf((2 * i) as f32 / head_dim as f32);
        let wavelength = std::f32::consts::TAU / frequency;
        if wavelength < context / high {
            1.0
        } else if wavelength > context / low {
            factor
        } else {
            let smooth = (context / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    Ok((0..head_dim / 2).map(factor_of).collect())
}
