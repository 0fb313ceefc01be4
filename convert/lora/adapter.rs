//! A PEFT folder: adapter_config.json says which modules are adapted and how their products are
//! scaled, adapter_model.safetensors has the factors.

use std::collections::BTreeMap;
use std::path::Path;

use regex::Regex;
use serde_json::Value;

use super::super::checkpoint::{Checkpoint, HfTensor};
use super::super::json::{Json, shown};
use crate::{Error, Result};

const WEIGHTS: &str = "adapter_model.safetensors";

/// The beginning of every name in `WEIGHTS`.
const PREFIX: &str = "base_model.model.";

/// Fields of the config that do not change what an adapter computes, and those that are read.
/// Another field with a value is refused: peft adds kinds of LoRA as fields.
const KNOWN: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    // Of transformers' Conv1D alone, which no class here has; peft sets it aside elsewhere.
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_dora",
    "use_rslora",
    // Compresses gradients.
    "velora_config",
];

/// Ways to draw the first factors that leave the base as it is.
const PLAIN_STARTS: &[&str] = &["gaussian", "eva", "orthogonal", "mica"];

#[derive(Debug)]
pub struct Adapter {
    pub config: Json,
    pub targets: Vec<Target>,
    /// Tensors that take the place of the base's, under the base's names.
    pub saved: Vec<HfTensor>,
}

/// A pair of factors.
#[derive(Debug)]
pub struct Target {
    /// Name of the adapted tensor.
    pub name: String,
    pub kind: TargetKind,
    pub a: HfTensor,
    pub b: HfTensor,
    /// Behind `b`, for the module's bias.
    pub bias: Option<HfTensor>,
    /// The lengths that the rows of the sum get (DoRA): [rows].
    pub magnitude: Option<HfTensor>,
    /// The scale of the product, times the rank or the root of the rank.
    alpha: f64,
    use_rslora: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// A [rank, inputs], B [outputs, rank]
    Linear,
    /// A [rank, rows], B [columns, rank]
    Embedding,
    /// A parameter of a module, which may be a stack of matrices: A [experts · rank, inputs],
    /// B [outputs, rank · experts], a column's expert being its number modulo their number.
    Parameter,
}

impl Target {
    /// The factor of the product of factors of this rank.
    pub fn scale(&self, rank: u64) -> f32 {
        let rank = rank as f64;
        (self.alpha / if self.use_rslora { rank.sqrt() } else { rank }) as f32
    }
}

/// The tensors of a module.
#[derive(Debug, Default)]
struct Parts {
    a: Option<HfTensor>,
    b: Option<HfTensor>,
    bias: Option<HfTensor>,
    magnitude: Option<HfTensor>,
    is_embedding: bool,
}

impl Adapter {
    /// Reads a folder; the file of its tensors is read as one more shard of the checkpoint.
    ///
    /// # Errors
    ///
    /// A field of the config that asks for another kind of adapter, a tensor that is no part of
    /// a pair, and files that are not there.
    pub fn open(folder: &Path, checkpoint: &mut Checkpoint) -> Result<Adapter> {
        let config = Json::open(folder.join("adapter_config.json"))?;
        check(&config)?;
        let path = folder.join(WEIGHTS);
        if !path.exists() {
            return Err(Error::format(folder, "weights", WEIGHTS, "no such file"));
        }
        let mut modules: BTreeMap<String, Parts> = BTreeMap::new();
        let mut saved = Vec::new();
        for mut tensor in checkpoint.open_beside(&path)? {
            let Some(name) = tensor.name.strip_prefix(PREFIX) else {
                let expected = format!("one that begins with {PREFIX}");
                return Err(fail(checkpoint, &tensor, "name", expected, "another"));
            };
            if tensor.encoding.is_none() {
                return Err(checkpoint.bad_type(&tensor));
            }
            match name.split_once(".lora_") {
                Some((module, part)) => {
                    let (module, part) = (module.to_owned(), part.to_owned());
                    let parts = modules.entry(module).or_default();
                    parts.is_embedding |= part.starts_with("embedding_");
                    let place = match part.as_str() {
                        "A.weight" | "embedding_A" => &mut parts.a,
                        "B.weight" | "embedding_B" => &mut parts.b,
                        "B.bias" => &mut parts.bias,
                        "magnitude_vector" | "magnitude_vector.weight" => &mut parts.magnitude,
                        _ => {
                            let expected =
                                "lora_A, lora_B and lora_magnitude_vector; merge it with peft";
                            return Err(fail(checkpoint, &tensor, "name", expected, part));
                        }
                    };
                    *place = Some(tensor);
                }
                None if ["token_adapter", "original_module"].iter().any(|p| name.contains(p)) => {
                    let expected = "a pair of factors or a module to save; merge it with peft";
                    return Err(fail(checkpoint, &tensor, "name", expected, "another"));
                }
                None => {
                    let name = name.replace(".modules_to_save.", ".");
                    tensor.name = name.replace(".base_layer.", ".");
                    saved.push(tensor);
                }
            }
        }
        let mut adapter = Adapter { config, targets: Vec::new(), saved };
        let names: Vec<String> = modules.keys().cloned().collect();
        for (module, parts) in modules {
            adapter.add(&module, parts, &names, checkpoint)?;
        }
        Ok(adapter)
    }

    fn add(
        &mut self,
        path: &str,
        parts: Parts,
        all: &[String],
        checkpoint: &Checkpoint,
    ) -> Result<()> {
        let (a, b) = match (parts.a, parts.b) {
            (Some(a), Some(b)) => (a, b),
            (Some(one), None) | (None, Some(one)) => {
                let got = "one of the two";
                return Err(fail(checkpoint, &one, "name", "both lora_A and lora_B", got));
            }
            (None, None) => {
                return Err(self.config.fail(path, "lora_A and lora_B", "lora_B's bias alone"));
            }
        };
        let (module, depth) = unwrapped(path);
        let parameters = self.parameters(module)?;
        let (name, kind) = match parameters.is_empty() {
            _ if parts.is_embedding => (format!("{module}.weight"), TargetKind::Embedding),
            true => (format!("{module}.weight"), TargetKind::Linear),
            // Wrappers are nested in the order in which the module defines its parameters.
            false => {
                let deepest = all.iter().map(|p| unwrapped(p)).filter(|(m, _)| *m == module);
                let n = deepest.map(|(_, depth)| depth + 1).max().unwrap_or(1);
                if n != parameters.len() {
                    let expected = format!("{} of {}", parameters.join(" and "), module);
                    let got = format!("{n} pairs of factors");
                    return Err(self.config.fail("target_parameters", expected, got));
                }
                (format!("{module}.{}", parameters[n - 1 - depth]), TargetKind::Parameter)
            }
        };
        // Patterns are matched with modules' names, or with those of parameters if they were meant.
        let is_weight = |target| is_end(target, module, "weight");
        let is_parameter =
            kind == TargetKind::Parameter || self.target_parameters()?.any(is_weight);
        let key = if is_parameter { name.as_str() } else { module };
        let alpha = match self.by_pattern("alpha_pattern", key)? {
            Some(alpha) => alpha,
            None => self.config.require_number("lora_alpha")?,
        };
        let use_rslora = self.config.bool("use_rslora")?.unwrap_or(false);
        let magnitude = parts.magnitude;
        let has_lengths = self.config.bool("use_dora")? == Some(true);
        if magnitude.is_some() != has_lengths || (has_lengths && kind != TargetKind::Linear) {
            let expected = format!("{has_lengths}, or lengths of linear layers alone");
            return Err(self.config.fail("use_dora", expected, format!("another for {name}")));
        }
        self.targets.push(Target {
            name,
            kind,
            a,
            b,
            bias: parts.bias,
            magnitude,
            alpha,
            use_rslora,
        });
        Ok(())
    }

    /// The adapted parameters of a stack of experts, in the order in which its class defines them.
    fn parameters(&self, module: &str) -> Result<Vec<String>> {
        let mut found: Vec<String> = Vec::new();
        for target in self.target_parameters()? {
            let parameter = target.rsplit('.').next().unwrap_or(target);
            let is_new = !found.iter().any(|p| p == parameter);
            if is_new && module.ends_with("experts") && is_end(target, module, parameter) {
                found.push(parameter.to_owned());
            }
        }
        // Each class defines what reads an expert's intermediate rows last.
        found.sort_by_key(|parameter| parameter.starts_with("down"));
        Ok(found)
    }

    fn target_parameters(&self) -> Result<impl Iterator<Item = &str>> {
        Ok(self.config.elements("target_parameters")?.iter().filter_map(Value::as_str))
    }

    /// The number that a table of the config has for a name: of the first key that is its end.
    fn by_pattern(&self, field: &str, name: &str) -> Result<Option<f64>> {
        for (key, value) in self.config.entries(field)? {
            let whole = Regex::new(&format!(r"^(?:.*\.)?(?:{key})$"));
            let whole = whole.map_err(|_| {
                self.config.fail(
                    field,
                    "keys that are regular expressions without look-around",
                    key,
                )
            })?;
            if whole.is_match(name) {
                let number = value.as_f64();
                let expected = || self.config.fail(field, "numbers", shown(value));
                return number.map(Some).ok_or_else(expected);
            }
        }
        Ok(None)
    }
}

/// Whether a target of the config is a module's parameter.
fn is_end(target: &str, module: &str, parameter: &str) -> bool {
    let key = format!(".{module}.{parameter}");
    key.ends_with(&format!(".{target}"))
}

/// A module's own name, and how many times it is wrapped.
fn unwrapped(path: &str) -> (&str, usize) {
    let (mut module, mut depth) = (path, 0);
    while let Some(inner) = module.strip_suffix(".base_layer") {
        (module, depth) = (inner, depth + 1);
    }
    (module, depth)
}

/// Whether the config describes an adapter that is products of factors and nothing else.
fn check(config: &Json) -> Result<()> {
    match config.str("peft_type")? {
        Some("LORA") => {}
        other => {
            return Err(config.fail("peft_type", "LORA", other.unwrap_or("nothing")));
        }
    }
    for (field, value) in config.fields() {
        let is_set = match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        };
        if is_set && !KNOWN.contains(&field) {
            let expected = "no such value: merge the adapter with peft and convert the result";
            return Err(config.fail(field, expected, shown(value)));
        }
    }
    // Other starts subtract their product from the base that they are loaded onto.
    if let Some(start) = config.at("init_lora_weights").and_then(Value::as_str)
        && !PLAIN_STARTS.contains(&start)
    {
        let expected = "an adapter of the unchanged base, as peft saves with \
                        path_initial_model_for_weight_conversion";
        return Err(config.fail("init_lora_weights", expected, start));
    }
    Ok(())
}

/// The complaint about a tensor of an adapter.
pub fn fail(
    checkpoint: &Checkpoint,
    tensor: &HfTensor,
    part: &str,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> Error {
    let field = format!("tensor {}: {part}", tensor.name);
    Error::format(checkpoint.path_of(tensor), field, expected, got)
}
