//! Fields that several formats share: sampling, the end of a text, and the number of answers.

use std::time::Duration;

use serde_json::Value;

use crate::engine::{ContextShift, Limits, SpecMode};
use crate::sample::{LogitBias, PARAMETERS, Parameter, SamplerKind, SamplerOptions};
use crate::server::adapters;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Fields, integer, wrong};
use crate::server::limits;
use crate::server::request::Scheduling;
use crate::server::service::Service;
use crate::tokenizer::EncodeOptions;

/// Fields that are accepted and have no effect: they say how something is computed or stored, not
/// what.
pub const WITHOUT_EFFECT: &[&str] = &[
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "verbosity",
    "web_search_options",
];

/// The field of a parameter: llama-server's names.
pub fn field(parameter: &Parameter) -> &'static str {
    match parameter.name {
        "temp" => "temperature",
        "dynatemp-range" => "dynatemp_range",
        "dynatemp-exp" => "dynatemp_exponent",
        "top-k" => "top_k",
        "top-p" => "top_p",
        "min-p" => "min_p",
        "typical" => "typical_p",
        "top-nsigma" => "top_n_sigma",
        "xtc-probability" => "xtc_probability",
        "xtc-threshold" => "xtc_threshold",
        "repeat-penalty" => "repeat_penalty",
        "repeat-last-n" => "repeat_last_n",
        "presence-penalty" => "presence_penalty",
        "frequency-penalty" => "frequency_penalty",
        "dry-multiplier" => "dry_multiplier",
        "dry-base" => "dry_base",
        "dry-allowed-length" => "dry_allowed_length",
        "dry-penalty-last-n" => "dry_penalty_last_n",
        "mirostat-lr" => "mirostat_eta",
        "mirostat-ent" => "mirostat_tau",
        "adaptive-target" => "adaptive_target",
        "adaptive-decay" => "adaptive_decay",
        other => other,
    }
}

/// Whether a request may have this value: flags may have more.
pub fn takes(field: &str, parameter: &Parameter, value: f64) -> bool {
    let is_less = match field {
        "temperature" => value >= 0.0,
        "xtc_probability" | "dry_multiplier" => value >= 0.0,
        "presence_penalty" | "frequency_penalty" => (-2.0..=2.0).contains(&value),
        _ => true,
    };
    is_less && parameter.takes(value)
}

/// The values that a request may have.
pub fn expected(field: &str, parameter: &Parameter) -> String {
    match field {
        "temperature" => "a number of at least 0".into(),
        "xtc_probability" => "a number from 0 to 1".into(),
        "dry_multiplier" => "a number of at least 0".into(),
        "presence_penalty" | "frequency_penalty" => "a number from -2 to 2".into(),
        _ => parameter.expected(),
    }
}

/// The salt of requests that say nothing of it.
pub const NO_SALT: &str = "\0";

/// Texts of requests with other values of these share no cache.
pub fn salt(fields: &Fields<'_>) -> ApiResult<String> {
    let part = |name| Ok(fields.string(name)?.unwrap_or_default().replace('\0', ""));
    Ok([part("cache_salt")?, part("prompt_cache_key")?].join("\0"))
}

/// How a request is queued and where it is computed. The number of a priority is checked when it
/// is known that the request may have one.
pub fn scheduling(fields: &Fields<'_>) -> ApiResult<Scheduling> {
    let slot = fields.integer("id_slot", -1..=i64::MAX)?;
    Ok(Scheduling {
        is_cached: fields.boolean("cache_prompt")?.unwrap_or(true),
        slot: slot.and_then(|slot| usize::try_from(slot).ok()),
        priority: fields.integer("priority", i64::MIN..=i64::MAX)?,
        spec: spec(fields)?,
        lora: fields.get("lora").map(|list| adapters::list("lora", list)).transpose()?,
    })
}

/// When drafts of the answer are verified.
fn spec(fields: &Fields<'_>) -> ApiResult<Option<SpecMode>> {
    let mode = fields.string("spec")?.map(str::parse).transpose();
    mode.map_err(|_| fields.wrong("spec", SpecMode::NAMES))
}

/// OpenAI's prediction of the answer: a text, or the texts of parts.
pub fn prediction(fields: &Fields<'_>) -> ApiResult<Option<String>> {
    let Some(value) = fields.get("prediction") else { return Ok(None) };
    let fields = Fields::of(value, "prediction")?;
    if fields.string("type")?.is_some_and(|kind| kind != "content") {
        return Err(fields.wrong("type", "\"content\""));
    }
    let expected = "a string or an array of text parts";
    match fields.get("content") {
        None => Err(fields.missing("content")),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| part["text"].as_str());
            let text = texts.collect::<Option<String>>();
            text.map(Some).ok_or_else(|| fields.wrong("content", expected))
        }
        Some(_) => Err(fields.wrong("content", expected)),
    }
}

/// The sampling that a request asks for; the rest is the server's.
pub fn sampling(fields: &Fields<'_>, service: &Service) -> ApiResult<SamplerOptions> {
    let mut options = service.defaults.sampling.clone();
    for parameter in PARAMETERS {
        let name = field(parameter);
        let Some(value) = fields.get(name) else { continue };
        let number = value.as_f64().map(|x| f64::from(x as f32));
        let number = if parameter.is_whole() { integer(value).map(|n| n as f64) } else { number };
        let fits = |x: &f64| takes(name, parameter, *x);
        match number.filter(fits) {
            Some(number) => parameter.set(&mut options, number),
            None => return Err(fields.wrong(name, &expected(name, parameter))),
        }
    }
    if let Some(seed) = fields.seed("seed")? {
        options.seed = seed;
    }
    options.min_keep = fields.integer("min_keep", 0..=i64::MAX)?.unwrap_or(0) as usize;
    // Half of what may leave a full context leaves it.
    fields.integer("n_discard", 0..=0)?;
    if let Some(texts) = fields.strings("dry_sequence_breakers")? {
        options.dry.breakers = texts.into_iter().map(str::to_owned).collect();
    }
    if let Some(names) = fields.strings("samplers")? {
        let kinds = SamplerKind::from_names(&names.join(";"));
        let path = fields.path("samplers");
        let wrong = |why: String| ApiError::invalid(&path, format!("{path}: {why}"));
        options.samplers = kinds.map_err(wrong)?;
    }
    if let Some(value) = fields.get("logit_bias") {
        options.logit_bias = biases(&fields.path("logit_bias"), value, service)?;
    }
    Ok(options)
}

const BIAS: &str = "a number from -100 to 100";

/// An object of token ids or texts and their biases, or llama-server's list of pairs of them, where
/// `false` bans.
fn biases(path: &str, value: &Value, service: &Service) -> ApiResult<Vec<LogitBias>> {
    let tokenizer = service.engine().tokenizer();
    let mut pairs: Vec<(Vec<u32>, &Value)> = Vec::new();
    match value {
        Value::Object(map) => {
            for (token, bias) in map {
                let id = token.parse::<u32>().map(|id| vec![id]);
                let ids = id.unwrap_or_else(|_| tokenizer.encode(token, EncodeOptions::TEXT));
                pairs.push((ids, bias));
            }
        }
        Value::Array(list) => {
            for (i, pair) in list.iter().enumerate() {
                let path = format!("{path}[{i}]");
                let pair = pair.as_array().map(Vec::as_slice);
                let Some([token, bias]) = pair else {
                    let message = format!("{path}: expected a pair of a token and a bias");
                    return Err(ApiError::invalid(path, message));
                };
                let id = || integer(token).and_then(|id| u32::try_from(id).ok());
                let ids = match token {
                    Value::String(text) => tokenizer.encode(text, EncodeOptions::TEXT),
                    _ => vec![id().ok_or_else(|| wrong(&path, "a token id or a text", token))?],
                };
                pairs.push((ids, bias));
            }
        }
        other => return Err(wrong(path, "an object or an array of pairs", other)),
    }
    if pairs.iter().map(|(ids, _)| ids.len()).sum::<usize>() > limits::MAX_BIASES {
        let message = format!("{path}: at most {} tokens", limits::MAX_BIASES);
        return Err(ApiError::invalid(path, message));
    }
    let mut out = Vec::new();
    for (ids, bias) in pairs {
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            other => {
                let number = other.as_f64().filter(|x| x.abs() <= limits::MAX_BIAS);
                number.ok_or_else(|| wrong(path, BIAS, other))? as f32
            }
        };
        for id in ids {
            if id as usize >= tokenizer.n_vocab() {
                let n = tokenizer.n_vocab();
                let message =
                    format!("{path}: token id {id} is out of range: the model has {n} tokens");
                return Err(ApiError::invalid(path, message));
            }
            out.push(LogitBias { id, bias });
        }
    }
    Ok(out)
}

/// The end of a text. `names` are those of the field with the most tokens; the first that is there
/// counts.
pub fn limits(fields: &Fields<'_>, service: &Service, names: &[&'static str]) -> ApiResult<Limits> {
    let mut n_predict = None;
    for name in names {
        let given = fields.count(name)?;
        n_predict = n_predict.or(given);
    }
    Ok(Limits {
        n_predict: n_predict.unwrap_or(service.defaults.n_predict),
        ignore_eos: fields.flag("ignore_eos")?,
        stops: stops(fields, "stop")?,
        context_shift: context_shift(fields, service, "n_keep")?,
    })
}

/// The part of the prompt that stays where a text goes on in a full context: a number of tokens in
/// the field of this name, 0 if it is absent, or -1 for all.
pub fn context_shift(
    fields: &Fields<'_>,
    service: &Service,
    name: &'static str,
) -> ApiResult<Option<ContextShift>> {
    let n_keep = usize::try_from(fields.integer(name, -1..=i64::MAX)?.unwrap_or(0)).ok();
    Ok(service.defaults.context_shift.then_some(ContextShift { n_keep }))
}

/// The strings that end the text, in the field of this name. Empty ones end none.
pub fn stops(fields: &Fields<'_>, name: &'static str) -> ApiResult<Vec<String>> {
    let mut stops = fields.strings(name)?.unwrap_or_default();
    stops.retain(|stop| !stop.is_empty());
    let is_long = |stop: &&str| stop.len() > limits::MAX_STOP_BYTES;
    if stops.len() > limits::MAX_STOPS || stops.iter().any(is_long) {
        let message = format!(
            "{name}: expected at most {} strings of up to {} bytes",
            limits::MAX_STOPS,
            limits::MAX_STOP_BYTES
        );
        return Err(ApiError::invalid(name, message));
    }
    Ok(stops.into_iter().map(str::to_owned).collect())
}

/// The number of answers.
pub fn n_choices(fields: &Fields<'_>) -> ApiResult<usize> {
    Ok(fields.integer("n", 1..=limits::MAX_CHOICES as i64)?.unwrap_or(1) as usize)
}

/// The time that a text may take after its first token.
pub fn time_limit(fields: &Fields<'_>) -> ApiResult<Option<Duration>> {
    let ms = fields.integer("t_max_predict_ms", -1..=i64::MAX)?;
    Ok(ms.and_then(|ms| u64::try_from(ms).ok()).filter(|ms| *ms > 0).map(Duration::from_millis))
}

/// The longest silence of a stream; the inner `None` is any.
pub fn ping(fields: &Fields<'_>) -> ApiResult<Option<Option<Duration>>> {
    let seconds = fields.integer("sse_ping_interval", -1..=86_400)?;
    let time = |n: i64| u64::try_from(n).ok().filter(|n| *n > 0).map(Duration::from_secs);
    Ok(seconds.map(time))
}

/// Refuses a model that is not served, if the server is strict.
pub fn check_model(fields: &Fields<'_>, service: &Service, is_strict: bool) -> ApiResult<()> {
    let model = fields.string("model")?;
    match model.filter(|_| is_strict) {
        Some(name) if !service.info.names.iter().any(|own| own == name) => {
            Err(super::models::unknown(name))
        }
        _ => Ok(()),
    }
}
