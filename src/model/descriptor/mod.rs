//! Architecture descriptors: `models/<arch>.toml`, embedded in the binary. The engine reads which
//! parts a model is made of and which tensor plays which role; the converter reads how the same
//! model's Hugging Face checkpoint maps onto them. This is the only file that lists architectures.

mod convert;
mod parts;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::{Error, Result};

pub use convert::{Convert, Expect, Kind, MetadataRow, MetadataType, TensorRow};
pub use parts::{Form, Mixer, Norm, Parts, Positions, Residual, RopeRows, Router, Window};

/// Every descriptor in the binary, file name for messages.
const SOURCES: &[(&str, &str)] = &[
    ("models/arctic.toml", include_str!("../../../models/arctic.toml")),
    ("models/deepseek.toml", include_str!("../../../models/deepseek.toml")),
    ("models/deepseek2.toml", include_str!("../../../models/deepseek2.toml")),
    ("models/dots1.toml", include_str!("../../../models/dots1.toml")),
    ("models/glm4moe.toml", include_str!("../../../models/glm4moe.toml")),
    ("models/gpt-oss.toml", include_str!("../../../models/gpt-oss.toml")),
    ("models/granitemoe.toml", include_str!("../../../models/granitemoe.toml")),
    ("models/llama.toml", include_str!("../../../models/llama.toml")),
    ("models/nllb-moe.toml", include_str!("../../../models/nllb-moe.toml")),
    ("models/olmoe.toml", include_str!("../../../models/olmoe.toml")),
    ("models/phimoe.toml", include_str!("../../../models/phimoe.toml")),
    ("models/qwen2.toml", include_str!("../../../models/qwen2.toml")),
    ("models/qwen2moe.toml", include_str!("../../../models/qwen2moe.toml")),
    ("models/qwen3.toml", include_str!("../../../models/qwen3.toml")),
    ("models/qwen35moe.toml", include_str!("../../../models/qwen35moe.toml")),
    ("models/qwen3moe.toml", include_str!("../../../models/qwen3moe.toml")),
    ("models/qwen3next.toml", include_str!("../../../models/qwen3next.toml")),
    ("models/switch.toml", include_str!("../../../models/switch.toml")),
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
    /// Keys, `{arch}.` left out, whose default would be another model than the published ones: a
    /// file that lacks one is refused.
    #[serde(default)]
    pub requires: Vec<String>,
    /// Role → GGUF tensor name; `{layer}` is the layer, of an encoder–decoder within its stack; a
    /// trailing `?` marks an optional tensor.
    pub tensors: BTreeMap<String, String>,
    pub convert: Convert,
}

impl Descriptor {
    /// Every architecture, in file order.
    pub fn all() -> Vec<Descriptor> {
        SOURCES.iter().map(|(name, text)| parse(name, text)).collect()
    }

    /// The descriptor of a GGUF file's `general.architecture`.
    pub fn for_architecture(name: &str, path: &Path) -> Result<Descriptor> {
        let found = SOURCES.iter().find(|(file, _)| architecture_of(file) == name);
        found.map(|(file, text)| parse(file, text)).ok_or_else(|| {
            let known: Vec<_> = SOURCES.iter().map(|(file, _)| architecture_of(file)).collect();
            let expected = format!("one of {}", known.join(", "));
            Error::format(path, "general.architecture", expected, format!("{name:?}"))
        })
    }

    /// The descriptor that converts a checkpoint of this `architectures[0]`.
    pub fn for_hf_class(class: &str, path: &Path) -> Result<Descriptor> {
        let all = Descriptor::all();
        // Classes without what all of them end in: there are too many for a sentence otherwise.
        let family = |class: &String| class.split("For").next().unwrap_or_default().to_owned();
        let mut known: Vec<_> = all.iter().flat_map(|d| &d.hf_classes).map(family).collect();
        known.dedup();
        all.into_iter().find(|d| d.hf_classes.iter().any(|c| c == class)).ok_or_else(|| {
            let ends = "ForCausalLM or ForConditionalGeneration";
            let expected = format!("{ends} behind one of {}", known.join(", "));
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
}

/// A descriptor's file has the name of its architecture, as the test below holds.
fn architecture_of(file: &str) -> &str {
    file.trim_start_matches("models/").trim_end_matches(".toml")
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
            }
        }
    }

    #[test]
    fn unknown_names_are_told_what_is_known() {
        let e = Descriptor::for_architecture("gpt9", Path::new("m.gguf")).unwrap_err().to_string();
        assert!(e.contains("m.gguf") && e.contains("llama") && e.contains("gpt9"), "{e}");
        let e = Descriptor::for_hf_class("Gpt9", Path::new("config.json")).unwrap_err().to_string();
        assert!(e.contains("Mixtral,") && e.contains("Gpt9"), "{e}");
    }
}
