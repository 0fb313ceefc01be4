//! Architecture descriptors: `models/<arch>.toml`, embedded in the binary. The engine reads which
//! parts a model is made of and which tensor plays which role; the converter reads how the same
//! model's Hugging Face checkpoint maps onto them. This is the only file that lists architectures.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::{Error, Result};

/// Every descriptor in the binary, file name for messages.
const SOURCES: &[(&str, &str)] = &[
    ("models/llama.toml", include_str!("../../models/llama.toml")),
    ("models/qwen2moe.toml", include_str!("../../models/qwen2moe.toml")),
    ("models/qwen3moe.toml", include_str!("../../models/qwen3moe.toml")),
];

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Descriptor {
    /// `general.architecture` and the prefix of the model's GGUF keys.
    pub architecture: String,
    /// `architectures[0]` of a config.json that this descriptor converts.
    pub hf_classes: Vec<String>,
    pub parts: Parts,
    pub router: Router,
    /// Role → GGUF tensor name; `{layer}` is the layer, a trailing `?` marks an optional tensor.
    pub tensors: BTreeMap<String, String>,
    pub convert: Convert,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parts {
    pub norm: Norm,
    pub rope: Rope,
    pub activation: Activation,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Norm {
    Rms,
}

/// Which elements of a head a rotation turns together.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Rope {
    /// (2i, 2i + 1)
    Norm,
    /// (i, i + d/2)
    Neox,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// silu(gate) ⊙ up
    Silu,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Router {
    pub score: Score,
    /// Whether the chosen experts' weights are divided by their sum; the key
    /// `{arch}.expert_weights_norm` overrides it.
    pub normalize: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// Over all experts, before the top k are taken.
    Softmax,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Convert {
    pub metadata: Vec<MetadataRow>,
    /// Checkpoint tensors whose name ends in one of these are dropped.
    pub ignore: Vec<String>,
    tensors: BTreeMap<String, TensorTarget>,
    layer_tensors: BTreeMap<String, TensorTarget>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetadataRow {
    pub key: String,
    #[serde(rename = "type")]
    pub ty: MetadataType,
    /// Paths in config.json, the first that is there counts.
    pub from: Vec<String>,
    #[serde(default)]
    pub optional: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum MetadataType {
    U32,
    F32,
    Bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum TensorTarget {
    Plain(String),
    #[serde(rename_all = "kebab-case")]
    Transformed {
        to: String,
        transform: Transform,
        heads: Option<String>,
    },
}

/// What happens to a checkpoint tensor's values besides the change of type.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Transform {
    None,
    /// Rows of each head from (i, i + d/2) to (2i, 2i + 1) order; needs `heads`.
    RopePairs,
    /// Dimensions of length one dropped.
    Squeeze,
}

/// One conversion row with full names: patterns with `{layer}` and `{expert}`.
#[derive(Clone, Debug)]
pub struct TensorRow {
    pub hf: String,
    pub gguf: String,
    pub transform: Transform,
    /// The config.json value that counts the heads of a `RopePairs` tensor.
    pub heads: Option<String>,
}

impl Descriptor {
    /// Every architecture, in file order.
    pub fn all() -> Vec<Descriptor> {
        SOURCES.iter().map(|(name, text)| parse(name, text)).collect()
    }

    /// The descriptor of a GGUF file's `general.architecture`.
    pub fn for_architecture(name: &str, path: &Path) -> Result<Descriptor> {
        let all = Descriptor::all();
        let known: Vec<_> = all.iter().map(|d| d.architecture.clone()).collect();
        all.into_iter().find(|d| d.architecture == name).ok_or_else(|| {
            let expected = format!("one of {}", known.join(", "));
            Error::format(path, "general.architecture", expected, format!("{name:?}"))
        })
    }

    /// The descriptor that converts a checkpoint of this `architectures[0]`.
    pub fn for_hf_class(class: &str, path: &Path) -> Result<Descriptor> {
        let all = Descriptor::all();
        let known: Vec<_> = all.iter().flat_map(|d| d.hf_classes.clone()).collect();
        all.into_iter().find(|d| d.hf_classes.iter().any(|c| c == class)).ok_or_else(|| {
            let expected = format!("one of {}", known.join(", "));
            Error::format(path, "architectures", expected, format!("{class:?}"))
        })
    }

    /// `{arch}.rest`
    pub fn key(&self, rest: &str) -> String {
        format!("{}.{rest}", self.architecture)
    }

    /// The file's name for a role and whether it may be absent; `None` if the architecture has no
    /// such role.
    pub fn tensor_name(&self, role: &str, layer: usize) -> Option<(String, bool)> {
        let pattern = self.tensors.get(role)?;
        let optional = pattern.ends_with('?');
        let name = pattern.trim_end_matches('?').replace("{layer}", &layer.to_string());
        Some((name, optional))
    }

    /// All conversion rows with full names.
    pub fn tensor_rows(&self) -> Vec<TensorRow> {
        let row = |hf: String, target: &TensorTarget, prefix: &str| match target {
            TensorTarget::Plain(to) => TensorRow {
                hf,
                gguf: format!("{prefix}{to}"),
                transform: Transform::None,
                heads: None,
            },
            TensorTarget::Transformed { to, transform, heads } => TensorRow {
                hf,
                gguf: format!("{prefix}{to}"),
                transform: *transform,
                heads: heads.clone(),
            },
        };
        let global = self.convert.tensors.iter().map(|(hf, t)| row(hf.clone(), t, ""));
        let layer = self.convert.layer_tensors.iter();
        let layer =
            layer.map(|(hf, t)| row(format!("model.layers.{{layer}}.{hf}"), t, "blk.{layer}."));
        global.chain(layer).collect()
    }
}

/// Descriptors are part of the program: one that does not parse is a bug, found by the test below.
fn parse(name: &str, text: &str) -> Descriptor {
    toml::from_str(text).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_descriptor_parses_and_is_named_as_its_file() {
        for ((file, _), d) in SOURCES.iter().zip(Descriptor::all()) {
            assert_eq!(*file, format!("models/{}.toml", d.architecture));
            assert!(d.tensor_name("token_embd", 0).is_some());
        }
    }

    #[test]
    fn every_converted_tensor_has_a_role() {
        for d in Descriptor::all() {
            for row in d.tensor_rows() {
                let named = |p: &String| p.trim_end_matches('?') == row.gguf;
                assert!(d.tensors.values().any(named), "{}: {}", d.architecture, row.gguf);
                assert_eq!(row.transform == Transform::RopePairs, row.heads.is_some());
            }
        }
    }

    #[test]
    fn unknown_names_are_told_what_is_known() {
        let e = Descriptor::for_architecture("gpt9", Path::new("m.gguf")).unwrap_err().to_string();
        assert!(e.contains("m.gguf") && e.contains("llama") && e.contains("gpt9"), "{e}");
        let e = Descriptor::for_hf_class("Gpt9", Path::new("config.json")).unwrap_err().to_string();
        assert!(e.contains("MixtralForCausalLM") && e.contains("Gpt9"), "{e}");
    }
}
