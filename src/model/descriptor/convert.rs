//! What a descriptor says to the converter: which config.json values become which GGUF keys, which
//! checkpoint tensors which GGUF tensors.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Descriptor;

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
