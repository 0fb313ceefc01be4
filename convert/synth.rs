//! Random weights in the shapes of published models, to time on: files of the true size whose
//! activations stay finite. `presets/` has the shapes.
//!
//! Blocks are drawn as blocks: random integers under scales that give the weights a mean of zero
//! and a standard deviation of 1/√(row length), so that a normalised vector keeps its length
//! through a matrix. A piece's bits depend on the seed, the tensor's place and the piece's number,
//! never on threads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde::Deserialize;

use super::layout::{self, Layout, Target};
use super::mix::{self, Mix, ModelFacts};
use super::noise;
use super::routing::{Change, Heads, Routing};
use super::stream::TensorJob;
use super::vocab::{TokenType, Vocab};
use super::{Written, write_file_type, write_general};
use crate::gguf::{Gguf, OwnedValue, TensorType, Writer};
use crate::{Error, Result};

#[derive(Clone, Debug)]
pub struct SynthOptions {
    pub preset: String,
    pub output: PathBuf,
    /// All of the preset's if not given.
    pub layers: Option<u32>,
    /// One of `synth_type_names`.
    pub ty: String,
    pub seed: u64,
    pub routing: Routing,
    pub layout: Layout,
}

/// A published model's shapes: numbers of its config.json, under the keys and tensor names that
/// llama.cpp gives the architecture.
///
/// In `metadata` integers become u32, decimals f32, and { special, other } a list with one for each
/// layer; "{arch}." goes before each key. Shapes are in GGUF order, row length first.
/// `layer_tensors` are in every layer, `dense_tensors` in the first `dense_layers`, `moe_tensors`
/// in the others; `special_tensors` are in `special_layers`, counted from 0, `other_tensors` in the
/// others; "blk.{layer}." goes before them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Preset {
    name: String,
    architecture: String,
    layers: u32,
    #[serde(default)]
    dense_layers: u32,
    #[serde(default)]
    special_layers: Vec<u32>,
    vocab: usize,
    metadata: toml::Table,
    tensors: BTreeMap<String, Vec<u64>>,
    layer_tensors: BTreeMap<String, Vec<u64>>,
    #[serde(default)]
    special_tensors: BTreeMap<String, Vec<u64>>,
    #[serde(default)]
    other_tensors: BTreeMap<String, Vec<u64>>,
    #[serde(default)]
    dense_tensors: BTreeMap<String, Vec<u64>>,
    moe_tensors: BTreeMap<String, Vec<u64>>,
}

macro_rules! presets {
    ($n:literal: $($name:literal,)*) => {
        /// The names of the files in `presets/`, for help texts.
        pub const PRESETS: [&str; $n] = [$($name),*];
        const FILES: [&str; $n] = [$(include_str!(concat!("presets/", $name, ".toml"))),*];
    };
}

presets! { 17:
    "qwen3-30b-a3b",
    "qwen1.5-moe",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "phi-3.5-moe",
    "gpt-oss-20b",
    "granite-3.0-1b-a400m",
    "gpt-oss-120b",
    "qwen3-235b-a22b",
    "glm-4.5-air",
    "deepseek-v3",
    "kimi-k2",
    "llama-4-scout",
    "minimax-m2",
    "gemma-4-26b-a4b",
    "glm-5",
    "kimi-linear-48b-a3b",
}

/// The files are part of the program: one that does not parse is a bug, found by any test of them.
fn presets() -> Vec<Preset> {
    let parse = |(file, name): (&str, &str)| {
        toml::from_str(file).unwrap_or_else(|e| panic!("presets/{name}.toml: {e}"))
    };
    FILES.into_iter().zip(PRESETS).map(parse).collect()
}

/// Types that every matrix gets alike; the numbers are llama.cpp's for its mixes without extras.
const PURE: &[(&str, TensorType, u32)] =
    &[("q4_k", TensorType::Q4_K, 14), ("q5_k", TensorType::Q5_K, 16)];

/// The values of `--type`: the mixes of `quantize`, and K-quants for every matrix.
pub fn synth_type_names() -> Vec<&'static str> {
    Mix::names().chain(PURE.iter().map(|row| row.0)).collect()
}

enum Types {
    Mix(Mix),
    Pure(TensorType, u32),
}

impl Types {
    fn from_name(name: &str) -> Result<Types> {
        let pure = PURE.iter().find(|row| row.0.eq_ignore_ascii_case(name));
        match (pure, Mix::from_name(name)) {
            // Not the mix that has one of these names as an alias.
            (Some((_, ty, file_type)), _) => Ok(Types::Pure(*ty, *file_type)),
            (None, Some(mix)) => Ok(Types::Mix(mix)),
            (None, None) => Err(unknown("type", name, &synth_type_names())),
        }
    }

    fn file_type(&self) -> u32 {
        match self {
            Types::Mix(mix) => mix.file_type(),
            Types::Pure(_, file_type) => *file_type,
        }
    }

    fn of(&self, facts: &ModelFacts, name: &str, dims: &[u64]) -> TensorType {
        match self {
            Types::Mix(mix) => mix::tensor_type(*mix, facts, name, dims),
            Types::Pure(ty, _) if mix::is_matrix(name, dims) => mix::fitting(*ty, dims[0]),
            Types::Pure(..) => TensorType::F32,
        }
    }
}

fn unknown(what: &str, got: &str, known: &[impl AsRef<str>]) -> Error {
    let known: Vec<&str> = known.iter().map(AsRef::as_ref).collect();
    Error::Usage(format!("{what}: expected one of {}, got {got:?}", known.join(", ")))
}

/// Writes a preset's file.
pub fn synth(options: &SynthOptions) -> Result<Written> {
    let SynthOptions { preset, ty, layers, seed, routing, layout, output } = options;
    let model = Shape::new(preset, *layers, ty)?;
    let mut writer = Writer::create(output, layout.alignment(None))?;
    model.write_metadata(&mut writer)?;
    let heads = model.preset.heads();
    let job = |i: usize| {
        let change = routing.change(&heads, &model.targets[i].name);
        job(&model.targets[i], i as u64, *seed, change)
    };
    layout::write(writer, *layout, &model.targets, "drawing", job)
}

/// The file that `synth` writes, without data.
pub fn preset_header(preset: &str, layers: Option<u32>, ty: &str) -> Result<Gguf> {
    let model = Shape::new(preset, layers, ty)?;
    let mut writer = Writer::of_header(Path::new(preset), None)?;
    model.write_metadata(&mut writer)?;
    layout::without_data(writer, Layout::Standard, &model.targets)
}

/// A preset with its number of layers and the types of its tensors.
struct Shape {
    preset: Preset,
    layers: u32,
    file_type: u32,
    targets: Vec<Target>,
}

impl Shape {
    fn new(name: &str, layers: Option<u32>, ty: &str) -> Result<Shape> {
        let preset = presets().into_iter().find(|preset| preset.name == name);
        let preset = preset.ok_or_else(|| unknown("preset", name, &PRESETS))?;
        let types = Types::from_name(ty)?;
        let layers = layers.unwrap_or(preset.layers);
        if layers == 0 || layers > preset.layers {
            let expected = format!("1 to {}", preset.layers);
            return Err(Error::Usage(format!("layers: expected {expected}, got {layers}")));
        }
        let tensors = preset.all_tensors(layers);
        let names = tensors.iter().map(|(name, _)| name.as_str());
        let facts = preset.facts(layers).with_tensors(names);
        let typed = |(name, dims): (String, Vec<u64>)| {
            let ty = types.of(&facts, &name, &dims);
            Target { name, dims, ty }
        };
        let targets = tensors.into_iter().map(typed).collect();
        Ok(Shape { preset, layers, file_type: types.file_type(), targets })
    }

    fn write_metadata(&self, writer: &mut Writer) -> Result<()> {
        self.preset.write_metadata(writer, self.layers, self.file_type)
    }
}

/// How the `i`th tensor is drawn.
fn job(target: &Target, i: u64, seed: u64, change: Change) -> TensorJob<'_> {
    let Target { name, dims, ty } = target;
    let draw = noise::Draw::new(name, *ty, dims[0] as usize).times(change.factor.unwrap_or(1.0));
    let make = Box::new(move |first: u64, bytes: &mut [u8]| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // No tensor has 2^40 rows, and no file 2^24 tensors.
        rng.set_stream(i << 40 | first);
        draw.fill(&mut rng, bytes);
        if let Some(start) = &change.start {
            start.set(first, *ty, dims[0] as usize, &mut rng, bytes);
        }
        Ok(0)
    });
    TensorJob::of_rows(name, dims, *ty, make)
}

impl Preset {
    /// In the order of the file.
    fn all_tensors(&self, layers: u32) -> Vec<(String, Vec<u64>)> {
        let mut all = Vec::new();
        let is_last = |name: &str| name.starts_with("output");
        let global = |last: bool| {
            let some = self.tensors.iter().filter(move |(name, _)| is_last(name) == last);
            some.map(|(name, dims)| (name.clone(), dims.clone()))
        };
        all.extend(global(false));
        for layer in 0..layers {
            let is_dense = layer < self.dense_layers;
            let ffn = if is_dense { &self.dense_tensors } else { &self.moe_tensors };
            let is_special = self.special_layers.contains(&layer);
            let mixer = if is_special { &self.special_tensors } else { &self.other_tensors };
            for (name, dims) in self.layer_tensors.iter().chain(mixer).chain(ffn) {
                all.push((format!("blk.{layer}.{name}"), dims.clone()));
            }
        }
        all.extend(global(true));
        all
    }

    fn number(&self, key: &str) -> u64 {
        let value = match self.metadata.get(key) {
            Some(toml::Value::Table(by_layer)) => by_layer.get("other"),
            value => value,
        };
        value.and_then(toml::Value::as_integer).and_then(|n| u64::try_from(n).ok()).unwrap_or(0)
    }

    fn float(&self, key: &str) -> Option<f64> {
        self.metadata.get(key).and_then(toml::Value::as_float)
    }

    fn heads(&self) -> Heads {
        let or = |n: u64, other: u64| if n > 0 { n } else { other };
        let rank = self.number("attention.kv_lora_rank");
        let plain = self.number("embedding_length") / self.number("attention.head_count");
        let keys = ["attention.key_length_mla", "attention.key_length"].map(|key| self.number(key));
        let rows = keys.into_iter().find(|n| *n > 0).unwrap_or(plain);
        let n_rotated = or(self.number("rope.dimension_count"), rows);
        let is_latent = rank > 0;
        Heads {
            rows,
            rotated: if is_latent { rows - n_rotated..rows } else { 0..rows },
            n_rotated,
            latent: is_latent.then(|| rank..rank + n_rotated),
            scale: self.float("attention.scale").unwrap_or((rows as f64).sqrt().recip()) as f32,
            rope_base: self.float("rope.freq_base").unwrap_or(10_000.0) as f32,
            is_normed: self.layer_tensors.contains_key("attn_q_norm.weight"),
            embedding_scale: self.embedding_scale(),
        }
    }

    fn embedding_scale(&self) -> f32 {
        let factor = |key: &str| self.float(key).unwrap_or(1.0);
        (factor("embedding_scale") / factor("residual_scale")) as f32
    }

    fn facts(&self, layers: u32) -> ModelFacts {
        ModelFacts {
            n_layers: layers.into(),
            n_experts: self.number("expert_count"),
            n_heads: self.number("attention.head_count"),
            n_heads_kv: self.number("attention.head_count_kv"),
            ..Default::default()
        }
    }

    fn write_metadata(&self, writer: &mut Writer, layers: u32, file_type: u32) -> Result<()> {
        // Not the preset's name: llama.cpp wants certain tokens of models that it knows by name.
        let name = format!("{} with random weights", self.architecture);
        write_general(writer, &self.architecture, &name)?;
        writer.set(&format!("{}.block_count", self.architecture), layers)?;
        writer.set(&format!("{}.vocab_size", self.architecture), self.vocab as u32)?;
        for (key, value) in &self.metadata {
            let value: OwnedValue = match value {
                toml::Value::Integer(n) => (*n as u32).into(),
                toml::Value::Float(x) => (*x as f32).into(),
                toml::Value::Boolean(x) => (*x).into(),
                toml::Value::String(text) => text.as_str().into(),
                toml::Value::Table(kinds) => self.by_layer(kinds, layers),
                other => panic!("presets: {key}: {other}"),
            };
            writer.set(&format!("{}.{key}", self.architecture), value)?;
        }
        write_file_type(writer, file_type)?;
        write_vocab(writer, self.vocab)
    }

    /// The value of `special` or of `other` for each layer.
    fn by_layer(&self, kinds: &toml::Table, layers: u32) -> OwnedValue {
        let of = |layer: u32| match self.special_layers.contains(&layer) {
            true => &kinds["special"],
            false => &kinds["other"],
        };
        match kinds["other"].is_bool() {
            true => (0..layers).map(|l| of(l) == &true.into()).collect::<Vec<bool>>().into(),
            false => {
                let number = |l| of(l).as_integer().map_or(0, |n| n as u32);
                (0..layers).map(number).collect::<Vec<u32>>().into()
            }
        }
    }
}

/// A tokenizer that takes any text: the 256 bytes, one merge (readers expect at least one), an end
/// of text, and unused tokens up to the model's true number, so that the head costs what it costs.
fn write_vocab(writer: &mut Writer, n: usize) -> Result<()> {
    let mut vocab = Vocab::new("gpt2", "gpt-2");
    for byte in 0..=255 {
        vocab.put(usize::from(byte), &byte_char(byte).to_string(), TokenType::Normal, 0.0);
    }
    vocab.put(256, "ĠĠ", TokenType::Normal, 0.0);
    vocab.put(END_OF_TEXT as usize, "<|endoftext|>", TokenType::Control, 0.0);
    vocab.merges = Some(vec!["Ġ Ġ".into()]);
    vocab.fit(n as u64, writer.path())?;
    vocab.write(writer)?;
    writer.set("tokenizer.ggml.bos_token_id", END_OF_TEXT)?;
    writer.set("tokenizer.ggml.eos_token_id", END_OF_TEXT)?;
    writer.set("tokenizer.ggml.add_bos_token", false)?;
    writer.set("tokenizer.ggml.add_eos_token", false)
}

const END_OF_TEXT: u32 = 257;

/// The character that stands for a byte in byte-level vocabularies: itself if it is printable,
/// else the next one free from U+0100 on.
fn byte_char(byte: u8) -> char {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|b| !plain(*b)).count() as u32;
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// A preset's architecture.
pub fn preset_architecture(name: &str) -> Option<String> {
    presets().into_iter().find(|p| p.name == name).map(|p| p.architecture)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_parse_and_have_the_names_of_their_models() {
        let names: Vec<_> = presets().into_iter().map(|p| p.name).collect();
        assert_eq!(names, PRESETS);
    }

    /// Parameters of the whole models, as their cards state them.
    #[test]
    fn presets_have_the_published_size() {
        let billions = [
            30.5, 14.3, 46.7, 15.7, 41.9, 20.9, 1.3, 116.8, 235.1, 106.9, 671.0, 1026.4, 107.8,
            228.7, 25.2, 743.9, 49.1,
        ];
        assert_eq!(presets().len(), billions.len());
        for (preset, published) in presets().iter().zip(billions) {
            let tensors = preset.all_tensors(preset.layers);
            let n: u64 = tensors.iter().map(|(_, dims)| dims.iter().product::<u64>()).sum();
            let n = n as f64 / 1e9;
            assert!((n - published).abs() < 0.06, "{}: {n} B", preset.name);
        }
    }
}
