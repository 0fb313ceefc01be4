//! Architecture descriptors: `models/<arch>.toml`, embedded in the binary; `models/README.md`
//! describes their keys. The engine reads which parts a model has and which tensor plays which
//! role; the converter reads how the model's Hugging Face checkpoint maps onto them. This is the
//! only file that lists architectures.

mod convert;
mod inherit;
mod parts;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::{Error, Result};

pub use convert::{
    Convert, Kind, LastLayers, LayerSize, Layers, MetadataRow, MetadataType, Named, TensorRow,
    Vocabulary, VocabularyModel,
};
pub use parts::{
    Form, KeySharing, Mixer, Ngrams, Norm, Parts, Positions, RecurrenceKind, Residual, RopeLayers,
    RopeRows, Router, RouterInput, SharedSum, Tempering, ValueGate, Window,
};

/// The descriptor of `models/NAME.toml`, embedded.
macro_rules! source {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../models/", $name, ".toml")))
    };
}

/// Every architecture.
const SOURCES: &[(&str, &str)] = &[
    source!("afmoe"),
    source!("arctic"),
    source!("bailingmoe"),
    source!("bailingmoe2"),
    source!("bailingmoe3"),
    source!("beam"),
    source!("cohere2moe"),
    source!("dbrx"),
    source!("deepseek"),
    source!("deepseek2"),
    source!("deepseek32"),
    source!("deepseek4"),
    source!("deepseek41"),
    source!("dots1"),
    source!("dots3note"),
    source!("ernie4_5"),
    source!("ernie4_5-moe"),
    source!("exaone-moe"),
    source!("flint"),
    source!("gemma4"),
    source!("glm-dsa"),
    source!("glm4moe"),
    source!("glm5-next"),
    source!("gpt-oss"),
    source!("granite"),
    source!("granite_swa"),
    source!("granitehybrid"),
    source!("granitemoe"),
    source!("grok"),
    source!("grovemoe"),
    source!("hunyuan-moe"),
    source!("hy_v3"),
    source!("hy_v4"),
    source!("jamba"),
    source!("k2-horizon"),
    source!("kimi-k3"),
    source!("kimi-linear"),
    source!("kolibri1"),
    source!("laguna"),
    source!("lfm2"),
    source!("lfm2moe"),
    source!("llada-moe"),
    source!("llama"),
    source!("llama4"),
    source!("maion-coder"),
    source!("maple"),
    source!("mellum"),
    source!("minicpm"),
    source!("mimo2"),
    source!("minimax-01"),
    source!("minimax-m2"),
    source!("minimax-m3"),
    source!("mistral-large4"),
    source!("mistral3"),
    source!("mistral4"),
    source!("muse-spark"),
    source!("nemotron_h"),
    source!("nemotron_h_moe"),
    source!("nllb-moe"),
    source!("nomic-bert-moe"),
    source!("olmoe"),
    source!("paddleocr"),
    source!("phimoe"),
    source!("qwen2"),
    source!("qwen2moe"),
    source!("qwen3"),
    source!("qwen35moe"),
    source!("qwen3moe"),
    source!("qwen3next"),
    source!("qwen3vlmoe"),
    source!("qwen4exp"),
    source!("refact"),
    source!("rnd1"),
    source!("smallthinker"),
    source!("step35"),
    source!("switch"),
];

/// Descriptors that others inherit from and that are no architecture by themselves.
const BASES: &[(&str, &str)] = &[
    source!("common"),
    source!("common-dense"),
    source!("common-encoder-decoder"),
    source!("common-mixed"),
    source!("common-moe"),
    source!("common-shared"),
];

/// A line of the list of architectures.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    /// The first model of the architecture, or a well-known one.
    pub first: String,
    /// How it differs from RMSNorm, grouped-query attention and SwiGLU.
    pub particular: String,
    /// The program whose logits tests expect.
    pub compared_with: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Descriptor {
    /// `general.architecture` and the prefix of the model's GGUF keys.
    pub architecture: String,
    /// `architectures[0]` of a config.json that this descriptor converts.
    pub hf_classes: Vec<String>,
    pub about: About,
    pub parts: Parts,
    pub router: Router,
    /// Keys, `{arch}.` left out, whose default would be another model than the published ones: a
    /// file that lacks one is refused.
    #[serde(default)]
    pub requires: Vec<String>,
    /// Keys of parts that the engine lacks: a file with another value than 0 is refused.
    #[serde(default)]
    pub refuses: Vec<String>,
    /// Role → GGUF tensor name; `{layer}` is the layer, of an encoder–decoder within its stack; a
    /// trailing `?` marks an optional tensor.
    pub tensors: BTreeMap<String, String>,
    pub convert: Convert,
}

impl Descriptor {
    /// Every architecture, in file order.
    pub fn all() -> Vec<Descriptor> {
        SOURCES.iter().map(|(name, _)| parse(name)).collect()
    }

    /// The descriptor of a GGUF file's `general.architecture`.
    pub fn for_architecture(name: &str, path: &Path) -> Result<Descriptor> {
        let found = SOURCES.iter().find(|(known, _)| *known == name);
        found.map(|(name, _)| parse(name)).ok_or_else(|| {
            let expected = "a Mixture-of-Experts model that `moeba inspect --architectures` lists";
            let got = format!("{name:?}, which llama.cpp may run");
            Error::format(path, "general.architecture", expected, got)
        })
    }

    /// The descriptor that converts a checkpoint of this `architectures[0]`; `text_model` is the
    /// `model_type` of its text_config, if it has one.
    pub fn for_hf_class(class: &str, text_model: Option<&str>, path: &Path) -> Result<Descriptor> {
        let all = Descriptor::all().into_iter();
        let of_class = all.filter(|d| d.hf_classes.iter().any(|c| c == class));
        // One that names this text model, else one that names none.
        let fits = |d: &Descriptor| match d.convert.text_model.as_deref() {
            Some(own) if Some(own) == text_model => 0,
            None => 1,
            Some(_) => 2,
        };
        of_class.min_by_key(fits).ok_or_else(|| {
            // There are too many for a sentence.
            let expected = "a class that moeba inspect --architectures lists";
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

/// A descriptor with what it inherits. Descriptors are part of the program: one that does not parse
/// is a bug, found by the tests below.
fn parse(name: &str) -> Descriptor {
    let all = || SOURCES.iter().chain(BASES);
    let text_of = |name: &str| Some(all().find(|(known, _)| *known == name)?.1);
    let table = inherit::resolve(name, &text_of).unwrap_or_else(|fault| panic!("{fault}"));
    Descriptor::deserialize(table).unwrap_or_else(|e| panic!("models/{name}.toml: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_descriptor_parses_and_is_named_as_its_file() {
        for ((name, _), d) in SOURCES.iter().zip(Descriptor::all()) {
            assert_eq!(*name, d.architecture);
            assert!(d.tensor_name("token_embd", 0).is_some());
        }
    }

    #[test]
    fn every_base_is_inherited() {
        for (base, _) in BASES {
            let by = format!("inherits = \"{base}\"");
            assert!(SOURCES.iter().chain(BASES).any(|(_, text)| text.contains(&by)), "{base}");
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
    fn the_text_model_tells_architectures_of_one_class_apart() {
        let of = |class: &str, text_model: Option<&str>| {
            Descriptor::for_hf_class(class, text_model, Path::new("")).unwrap().architecture
        };
        let both = "Mistral3ForConditionalGeneration";
        assert_eq!(of(both, Some("mistral4")), "mistral4");
        assert_eq!(of(both, Some("ministral3")), "mistral3");
        assert_eq!(of(both, None), "mistral3");
        assert_eq!(of("Mistral4ForCausalLM", None), "mistral4");
    }

    #[test]
    fn unknown_names_are_told_where_the_known_are() {
        let e = Descriptor::for_architecture("gpt9", Path::new("m.gguf")).unwrap_err().to_string();
        assert!(e.contains("m.gguf") && e.contains("llama") && e.contains("gpt9"), "{e}");
        let e = Descriptor::for_hf_class("Gpt9", None, Path::new("config.json"))
            .unwrap_err()
            .to_string();
        assert!(e.contains("--architectures") && e.contains("Gpt9"), "{e}");
    }
}
