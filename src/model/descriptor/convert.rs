//! The converter's half of a descriptor: which config.json values become which GGUF keys, which
//! checkpoint tensors which GGUF tensors, and how their values are rearranged on the way.
//!
//! # Expressions
//!
//! Values are small expressions over config.json: field names (`a.b` descends, into a list by
//! number; a nested `text_config` is looked into first), numbers, `+ - * / ( )`, and the functions
//! `floor(x)`, `sqrt(x)`, `first(list)`, the number that a list or a text of such starts with,
//! `len(list)` and `leading(list, word)`, which counts the leading elements of a list that are
//! `word`. Where a list of expressions stands, the first whose fields are all there counts. Shapes
//! and steps are made of the names in `[convert.sizes]` instead of fields.
//!
//! # Tensors
//!
//! A row `"checkpoint name" = { to = "file name", shape = "rows, columns", … }` takes a tensor of
//! that shape, written as the checkpoint has it (row length last). `{layer}` and `{expert}` in a
//! name stand for numbers; `{expert}` on the left alone stacks the experts along a new outermost
//! dimension. A list of targets takes a tensor apart. A row whose shape has a size that is 0 or
//! that the config lacks expects nothing. `steps` rearrange, in order, dimensions counted from 0:
//!
//! - `view A, B, …` — the same elements under another shape
//! - `take D: FROM .. TO` — elements FROM to TO - 1 of dimension D; `… by STEP` every STEPth
//! - `swap D E` — two dimensions exchanged: the transpose of matrices
//! - `squeeze` — dimensions of length one dropped
//! - `rope-pairs HEADS` — dimension 0 holds heads; each one's rows from halves (i, i + d/2), as
//!   checkpoints turn them, to neighbours (2i, 2i + 1)
//! - `rope-halves HEADS` — the inverse
//! - `add X` — X added to every value: norms stored as their distance from one
//! - `exp` — x becomes eˣ
//! - `neg-exp` — x becomes -eˣ
//! - `exp-neg` — x becomes e⁻ˣ
//!
//! Other fields of a row: `part`, the place among the rows whose tensors lie one behind the other
//! in one target; `in`, the kind of layers that have it (`moe`, `dense`, `recurrent`, `attention`,
//! `next`); `optional`, that a checkpoint may lack it; `unless`, a size whose models do not have
//! it; `layers` and `experts`, the sizes that count its `{layer}` and `{expert}`; `integers`, that
//! it is a table of such; `zeros`, that a checkpoint without it has zeros there.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Descriptor;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Convert {
    /// Named expressions over config.json, for shapes and steps. The converter itself uses
    /// `layers` and `vocab`, and where they are there `experts`, `heads` and `heads_kv`.
    pub sizes: BTreeMap<String, Vec<String>>,
    /// Sizes that differ from layer to layer, where the field is there.
    #[serde(default)]
    pub layer_sizes: BTreeMap<String, LayerSize>,
    /// GGUF key, `{arch}.` left out → how it is read.
    metadata: BTreeMap<String, OneOrMore<MetadataRow>>,
    /// Fields that change the results and have no GGUF key: absent, or one of these values. Before
    /// a field may stand the only class that has it: `"Class: field"`.
    #[serde(default)]
    pub expect: BTreeMap<String, Vec<toml::Value>>,
    /// Names of one and the same field, by the first: a config may have any of them.
    #[serde(default)]
    pub synonyms: BTreeMap<String, Vec<String>>,
    /// The values of fields that a config lacks.
    #[serde(default)]
    pub defaults: BTreeMap<String, toml::Value>,
    /// Which layers see a window, in configs without `layer_types`.
    #[serde(default)]
    pub window: Option<WindowLayers>,
    /// A field: RoPE's base of each layer, 0 where a layer does not rotate. All others are one.
    #[serde(default)]
    pub theta_by_layer: Option<String>,
    /// RoPE's base by class, where a config has none; 10000 in others.
    #[serde(default)]
    pub theta: BTreeMap<String, f64>,
    /// A field that `per_layer_config` has, and its name for a kind of layers.
    #[serde(default)]
    pub by_kind: BTreeMap<String, BTreeMap<String, String>>,
    /// Fields whose null switches a part off that the engine always has.
    #[serde(default)]
    pub not_null: Vec<String>,
    /// Checkpoint tensors whose name ends in one of these are dropped.
    pub ignore: Vec<String>,
    /// Whether the output is the embedding, where the config lacks `tie_word_embeddings`.
    #[serde(default)]
    pub tied: bool,
    /// How many layers may follow the last: they predict further tokens. Those with the tensors of
    /// rows `in = "next"` are kept, others dropped.
    #[serde(default)]
    pub extra_layers: Vec<String>,
    /// The beginning of the names of those layers' tensors, where they are not numbered with the
    /// others: `mtp.layers.0.` is then read as the layer behind the last, and `mtp.` too.
    #[serde(default)]
    pub extra_under: Option<String>,
    /// Checkpoint tensors whose name begins with one of these are dropped.
    #[serde(default)]
    pub ignore_under: Vec<String>,
    /// Beginnings of checkpoint names and what is read for them.
    #[serde(default)]
    pub prefixes: BTreeMap<String, String>,
    /// The `model_type` of a nested text_config that tells checkpoints of this architecture from
    /// others of the same class.
    #[serde(default)]
    pub text_model: Option<String>,
    /// A kind of vocabulary that tokenizer.json does not tell apart from others.
    #[serde(default)]
    pub vocabulary: Option<Vocabulary>,
    /// Beginnings of names within a layer and what is read for them: names of newer checkpoints.
    #[serde(default)]
    pub renamed: BTreeMap<String, String>,
    /// transformers' first version whose stacked experts are not transposed, where a shape does
    /// not tell; 0 for all.
    #[serde(default)]
    pub transposed_before: u64,
    tensors: BTreeMap<String, OneOrMore<Target>>,
    #[serde(default)]
    layer_tensors: BTreeMap<String, OneOrMore<Target>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetadataRow {
    #[serde(rename = "type")]
    pub ty: MetadataType,
    /// Expressions, the first whose fields are there counts.
    pub from: Vec<String>,
    /// Skipped where no expression has its fields; an error otherwise.
    #[serde(default)]
    pub optional: bool,
    /// The number written for each text in the config, or expressions for it with ` or ` between
    /// them; for a flag, 1 is true, and the config may have numbers.
    #[serde(default)]
    pub values: BTreeMap<String, Named>,
    /// A text is a list of its letters.
    #[serde(default)]
    pub letters: bool,
    /// The layers that have the number; the others have 0.
    #[serde(default)]
    pub layers: Option<Layers>,
    /// Expressions of the same value, where their fields are there.
    #[serde(default)]
    pub same: Vec<String>,
    /// A list has an element a layer; those of layers behind the last are left out.
    #[serde(default)]
    pub by_layer: bool,
    /// The sizes of this name in `[convert.layer_sizes]`, or the one that all layers have.
    #[serde(default)]
    pub layer_size: Option<String>,
    /// A list is filled up with zeros to this length.
    #[serde(default)]
    pub pad: usize,
    /// The list that counts where no expression has its fields.
    #[serde(default)]
    pub otherwise: Vec<u32>,
    /// 0 is a number as others are; elsewhere readers take it for a key that is absent.
    #[serde(default)]
    pub zero: bool,
    /// The only classes that get the key; all if empty.
    #[serde(default)]
    pub classes: Vec<String>,
}

/// The vocabulary of an architecture.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vocabulary {
    pub model: VocabularyModel,
    /// Special tokens that belong to an answer's text: readers of tool calls look for them.
    #[serde(default)]
    pub visible: Vec<String>,
}

/// `tokenizer.ggml.model`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum VocabularyModel {
    /// SentencePiece BPE with its merges in place of scores.
    Gemma4,
}

/// How configs that do not list their layers say which of them see a window.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowLayers {
    /// A field: the number of layers of which the last sees everything, or a letter for each.
    #[serde(default)]
    pub period: String,
    /// A field: a list with 1 for those that see a window.
    #[serde(default)]
    pub flags: Option<String>,
    /// A field: a list with 1 for those that rotate, which must be those that see a window, or all
    /// where none does.
    #[serde(default)]
    pub rotating: Option<String>,
}

/// A size by layer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSize {
    /// Fields, the first that is there counts: a list has an element a layer.
    pub from: Vec<String>,
    /// The size for each text or number in the config: expressions with ` or ` between them, the
    /// first whose fields are there counts. A number is the size itself without them.
    #[serde(default)]
    pub values: BTreeMap<String, String>,
    /// The size of the last layers.
    #[serde(default)]
    pub last: Option<LastLayers>,
}

/// Expressions of a size and of how many layers have it, where a flag of the config is set.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LastLayers {
    pub when: String,
    pub n: String,
    pub size: String,
}

/// Some layers of a model.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layers {
    /// Expressions of a period and of the first of them.
    Every([String; 2]),
    /// The field that lists them, counted from 1.
    Listed(String),
}

/// A text or number of the config stands for this.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Named {
    Number(u32),
    Expression(String),
}

/// A field of a list becomes an array.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum MetadataType {
    U32,
    F32,
    Bool,
    String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> OneOrMore<T> {
    fn as_slice(&self) -> &[T] {
        match self {
            OneOrMore::One(one) => std::slice::from_ref(one),
            OneOrMore::More(all) => all,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Target {
    to: String,
    shape: String,
    #[serde(default)]
    steps: Vec<String>,
    #[serde(default)]
    part: u64,
    #[serde(default)]
    optional: bool,
    #[serde(default, rename = "in")]
    kind: Kind,
    #[serde(default = "all_layers")]
    layers: String,
    #[serde(default = "all_experts")]
    experts: String,
    unless: Option<String>,
    #[serde(default)]
    integers: bool,
    #[serde(default)]
    zeros: bool,
}

/// Which layers have a tensor.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    All,
    /// Layers that route: any layer that has a tensor whose targets are all of this kind.
    Moe,
    /// The others.
    Dense,
    /// Layers that mix positions by a recurrent state, told in the way of `Moe`.
    Recurrent,
    /// The others.
    Attention,
    /// Layers behind the last, which predict further tokens.
    Next,
}

/// One conversion row with full names: patterns with `{layer}` and `{expert}`.
#[derive(Clone, Debug)]
pub struct TensorRow {
    pub hf: String,
    pub gguf: String,
    /// Shape of the checkpoint's tensor, row length last.
    pub shape: String,
    pub steps: Vec<String>,
    /// Parts of one target lie one behind the other along its outermost dimension, by number.
    pub part: u64,
    /// A checkpoint may lack it.
    pub optional: bool,
    pub kind: Kind,
    /// The size that counts the layers of `{layer}`.
    pub layers: String,
    /// The size that counts the experts of `{expert}`.
    pub experts: String,
    /// A size that a config of such a checkpoint does not have.
    pub unless: Option<String>,
    pub integers: bool,
    /// A checkpoint that lacks it has zeros in its place.
    pub zeros: bool,
    /// The row is for checkpoints whose stacked experts are transposed, or for those whose are not.
    pub transposed: Option<bool>,
}

fn all_layers() -> String {
    "layers".into()
}

fn all_experts() -> String {
    "experts".into()
}

impl Convert {
    /// GGUF keys, `{arch}.` left out, and how each is read. A key may have several rows, each for
    /// some classes.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &MetadataRow)> {
        let rows = self.metadata.iter();
        rows.flat_map(|(key, rows)| rows.as_slice().iter().map(move |row| (key.as_str(), row)))
    }
}

impl Descriptor {
    /// All conversion rows with full names.
    pub fn tensor_rows(&self) -> Vec<TensorRow> {
        let mut rows = Vec::new();
        let tables = [
            (&self.convert.tensors, "", ""),
            (&self.convert.layer_tensors, "model.layers.{layer}.", "blk.{layer}."),
        ];
        for (table, before_hf, before_gguf) in tables {
            for (hf, targets) in table {
                rows.extend(targets.as_slice().iter().cloned().map(|target| TensorRow {
                    hf: format!("{before_hf}{hf}"),
                    gguf: format!("{before_gguf}{}", target.to),
                    shape: target.shape,
                    steps: target.steps,
                    part: target.part,
                    optional: target.optional,
                    kind: target.kind,
                    layers: target.layers,
                    experts: target.experts,
                    unless: target.unless,
                    integers: target.integers,
                    zeros: target.zeros,
                    transposed: None,
                }));
            }
        }
        let stacked = stacked_rows(&rows);
        rows.extend(stacked);
        rows
    }
}

/// The beginnings of names of experts, where one tensor has all of a layer's.
const STACKS: [&str; 4] = ["mlp", "block_sparse_moe", "feed_forward", "mixer"];

/// Rows for checkpoints with all experts of a layer in one tensor, gate and up behind one another,
/// made of the rows for single experts: transformers 5 writes such tensors on request.
fn stacked_rows(rows: &[TensorRow]) -> Vec<TensorRow> {
    let single = |name: &str| {
        let gguf = format!("blk.{{layer}}.ffn_{name}_exps.weight");
        let is_single = |row: &&TensorRow| row.gguf == gguf && row.hf.contains("{expert}");
        rows.iter().find(is_single).filter(|row| row.steps.is_empty())
    };
    let mut stacked = Vec::new();
    let mut add = |row: &TensorRow, name: &str, [rows_in, columns]: [&str; 2], steps: &[String]| {
        for stack in STACKS {
            let hf = format!("model.layers.{{layer}}.{stack}.experts.{name}");
            if rows.iter().any(|row| row.hf == hf) {
                continue;
            }
            for transposed in [false, true] {
                let shape = match transposed {
                    false => format!("experts, {rows_in}, {columns}"),
                    true => format!("experts, {columns}, {rows_in}"),
                };
                let swap = transposed.then(|| "swap 1 2".to_owned());
                stacked.push(TensorRow {
                    hf: hf.clone(),
                    shape,
                    steps: swap.into_iter().chain(steps.iter().cloned()).collect(),
                    optional: true,
                    transposed: Some(transposed),
                    ..row.clone()
                });
            }
        }
    };
    if let Some(down) = single("down")
        && let Some((embd, ff)) = down.shape.split_once(", ")
    {
        add(down, "down_proj", [embd, ff], &[]);
    }
    let Some(up) = single("up") else { return stacked };
    let Some((ff, embd)) = up.shape.split_once(", ") else { return stacked };
    match single("gate") {
        None => add(up, "up_proj", [ff, embd], &[]),
        Some(gate) => {
            let both = format!("2 * {ff}");
            let half = |from: &str, to: &str| vec![format!("take 1: {from} .. {to}")];
            add(gate, "gate_up_proj", [&both, embd], &half("0", ff));
            add(up, "gate_up_proj", [&both, embd], &half(ff, &both));
        }
    }
    stacked
}
