//! Rotary embeddings that reach past the trained context: `rope_scaling`, which newer versions of
//! transformers call `rope_parameters` and write with `rope_theta` inside.

use serde_json::Value;

use super::json::Json;
use crate::Result;
use crate::gguf::OwnedValue;
use crate::model::descriptor::Descriptor;

/// What a checkpoint's scaling becomes in a GGUF file.
#[derive(Debug, Default)]
pub struct RopeScaling {
    /// `{arch}.rope.scaling.*`
    pub keys: Vec<(String, OwnedValue)>,
    /// `rope_freqs.weight`: what each frequency is divided by.
    pub factors: Option<Vec<f32>>,
}

const KNOWN: &str = "default, linear, yarn or llama3";

/// Reads the scaling of a model whose heads have `head_dim` elements.
pub fn read(config: &Json, descriptor: &Descriptor, head_dim: u64) -> Result<RopeScaling> {
    let group = ["rope_parameters", "rope_scaling"].into_iter().find(|f| config.at(f).is_some());
    let Some(group) = group else { return Ok(RopeScaling::default()) };
    let fields = Fields { config, group };
    let kind = match fields.str("rope_type")? {
        Some(kind) => kind,
        None => fields.str("type")?.unwrap_or("default"),
    };
    match kind {
        "default" => Ok(RopeScaling::default()),
        "linear" => {
            let keys = vec![
                (descriptor.key("rope.scaling.type"), "linear".into()),
                (descriptor.key("rope.scaling.factor"), fields.require_f32("factor")?.into()),
            ];
            Ok(RopeScaling { keys, factors: None })
        }
        "yarn" => Ok(RopeScaling { keys: yarn(&fields, descriptor)?, factors: None }),
        "llama3" => {
            let factors = Some(llama3(&fields, head_dim)?);
            Ok(RopeScaling { keys: Vec::new(), factors })
        }
        other => Err(config.fail(&fields.name("rope_type"), KNOWN, other)),
    }
}

struct Fields<'a> {
    config: &'a Json,
    group: &'a str,
}

impl<'a> Fields<'a> {
    fn name(&self, field: &str) -> String {
        format!("{}.{field}", self.group)
    }

    fn str(&self, field: &str) -> Result<Option<&'a str>> {
        self.config.str(&self.name(field))
    }

    fn f32(&self, field: &str) -> Result<Option<f32>> {
        Ok(self.config.number(&self.name(field))?.map(|x| x as f32))
    }

    fn require_f32(&self, field: &str) -> Result<f32> {
        Ok(self.config.require_number(&self.name(field))? as f32)
    }
}

fn yarn(fields: &Fields<'_>, descriptor: &Descriptor) -> Result<Vec<(String, OwnedValue)>> {
    let config = fields.config;
    // transformers takes the model's own context where the scaling does not say.
    let original = match config.count(&fields.name("original_max_position_embeddings"))? {
        Some(n) => n,
        None => config.require_count("max_position_embeddings")?,
    };
    let mut keys: Vec<(String, OwnedValue)> = vec![
        (descriptor.key("rope.scaling.type"), "yarn".into()),
        (descriptor.key("rope.scaling.factor"), fields.require_f32("factor")?.into()),
        (descriptor.key("rope.scaling.original_context_length"), (original as u32).into()),
    ];
    let optional = [
        ("extrapolation_factor", "rope.scaling.yarn_ext_factor"),
        ("attention_factor", "rope.scaling.yarn_attn_factor"),
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ];
    for (field, key) in optional {
        if let Some(x) = fields.f32(field)? {
            keys.push((descriptor.key(key), x.into()));
        }
    }
    Ok(keys)
}

/// Llama 3.1: short wavelengths keep their frequency, long ones are slowed by `factor`, and those
/// between go smoothly from one to the other. In f32 throughout, as transformers computes it.
fn llama3(fields: &Fields<'_>, head_dim: u64) -> Result<Vec<f32>> {
    let config = fields.config;
    let theta_fields = [fields.name("rope_theta"), "rope_theta".to_owned()];
    let theta = config.first(&theta_fields).and_then(|(_, v)| Value::as_f64(v)).unwrap_or(1e4);
    let factor = fields.require_f32("factor")?;
    let low = fields.require_f32("low_freq_factor")?;
    let high = fields.require_f32("high_freq_factor")?;
    let context = fields.require_f32("original_max_position_embeddings")?;
    for (name, x) in [("factor", factor), ("low_freq_factor", low), ("high_freq_factor", high)] {
        if !(x.is_finite() && x > 0.0) {
            return Err(config.fail(&fields.name(name), "a number above 0", x.to_string()));
        }
    }
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
