//! Random models of architectures without a golden checkpoint: a card, `tests/golden/cards/*.json`,
//! has keys and shapes, a generator makes the weights.
//!
//! A card with `keys` is a GGUF file. In one with `config`, a checkpoint, `#` in a tensor's name
//! stands for the experts, which the last dimension counts. `*` or a list stands for layers.

use crate::{moeba, repo, succeed};
use moeba::gguf::{OwnedValue, TensorType, Writer};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Tokens of the reference's logits, and for how many ids there are logits of each: the first.
const N_TOKENS: usize = 24;
pub const N_IDS: usize = 64;
const N_VOCAB: usize = 256;

struct Card {
    name: String,
    card: Value,
    /// In full, with dimensions as the kind of file orders them.
    tensors: Vec<(String, Vec<u64>)>,
}

fn folder() -> PathBuf {
    repo().join("tests/golden/cards")
}

/// The cards' names, in order.
pub fn names() -> Vec<String> {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().path());
    let cards = files.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let mut names: Vec<String> =
        cards.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// A card's model as a GGUF file in `dir`; `None` if there is no card of this name.
pub fn model(name: &str, outtype: &str, dir: &Path) -> Option<PathBuf> {
    let card = Card::read(name)?;
    let out = dir.join(format!("{name}.{outtype}.gguf"));
    if card.card["config"].is_object() {
        let checkpoint = dir.join(format!("{name}.checkpoint"));
        card.write_checkpoint(&checkpoint);
        let mut convert = moeba();
        let convert = convert.arg("convert").arg(checkpoint).arg("-o").arg(&out);
        succeed(convert.args(["--outtype", outtype]));
        return Some(out);
    }
    let plain = dir.join(format!("{name}.f32.gguf"));
    card.write(&plain);
    if outtype != "f32" {
        succeed(moeba().arg("quantize").arg(&plain).arg(&out).arg(outtype));
    }
    Some(out)
}

/// Whether a card is a checkpoint, not a GGUF file.
pub fn is_checkpoint(name: &str) -> bool {
    Card::read(name).is_some_and(|card| card.card["config"].is_object())
}

/// The checkpoint of a card, in `folder`.
pub fn checkpoint(name: &str, folder: &Path) {
    Card::read(name).expect("a card").write_checkpoint(folder);
}

/// The tokens of the reference's logits, and these, [tokens, N_IDS].
pub fn expected(name: &str) -> (Vec<u32>, Vec<f32>) {
    logits_in(&folder(), name)
}

/// The tokens of the logits of a reference in a folder, and these.
pub fn logits_in(folder: &Path, name: &str) -> (Vec<u32>, Vec<f32>) {
    let path = folder.join(format!("{name}.logits.f32"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let logits: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(logits.len(), N_TOKENS * N_IDS, "{}", path.display());
    ((0..N_TOKENS).map(|i| (1 + i * 37 % (N_VOCAB - 1)) as u32).collect(), logits)
}

impl Card {
    fn read(name: &str) -> Option<Card> {
        let text = std::fs::read_to_string(folder().join(format!("{name}.json"))).ok()?;
        let card: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        let config = &card["config"];
        let counts = [
            &card["keys"]["block_count"],
            &config["num_hidden_layers"],
            &config["text_config"]["num_hidden_layers"],
        ];
        let n_layers = counts.into_iter().find_map(Value::as_u64).expect("a number of layers");
        let mut tensors = Vec::new();
        for (pattern, dims) in card["tensors"].as_object().expect("tensors") {
            let dims: Vec<u64> =
                dims.as_array().expect("dimensions").iter().map(|d| d.as_u64().unwrap()).collect();
            for name in of_layers(pattern, n_layers) {
                match name.contains('#') {
                    false => tensors.push((name, dims.clone())),
                    true => tensors.extend(
                        (0..dims[2]).map(|e| (name.replace('#', &e.to_string()), dims[..2].into())),
                    ),
                }
            }
        }
        Some(Card { name: name.to_owned(), card, tensors })
    }

    fn write(&self, path: &Path) {
        let mut out = Writer::create(path, None).unwrap();
        let architecture = self.card["architecture"].as_str().expect("an architecture");
        out.set("general.architecture", architecture).unwrap();
        for (key, value) in self.card["keys"].as_object().expect("keys") {
            out.set(&format!("{architecture}.{key}"), owned(value)).unwrap();
        }
        let pieces: Vec<String> = (0..N_VOCAB).map(|i| format!("<{i}>")).collect();
        out.set("tokenizer.ggml.model", "gpt2").unwrap();
        out.set("tokenizer.ggml.pre", "qwen2").unwrap();
        out.set("tokenizer.ggml.token_type", vec![1i32; pieces.len()]).unwrap();
        out.set("tokenizer.ggml.tokens", pieces).unwrap();
        out.set("tokenizer.ggml.merges", Vec::<String>::new()).unwrap();
        out.set("tokenizer.ggml.eos_token_id", 0u32).unwrap();
        for (name, dims) in &self.tensors {
            out.declare(name, dims, TensorType::F32).unwrap();
        }
        for (name, dims) in &self.tensors {
            out.write_tensor(name, &self.bytes(name, dims, dims[0])).unwrap();
        }
        out.finish().unwrap();
    }

    /// A folder as of the hub, with the tokenizer of a golden checkpoint.
    fn write_checkpoint(&self, folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        let golden = repo().join("tests/golden/deepseek");
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(golden.join(file), folder.join(file)).unwrap();
        }
        std::fs::write(folder.join("config.json"), self.card["config"].to_string()).unwrap();
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, dims) in &self.tensors {
            let (start, row_len) = (data.len(), *dims.last().unwrap());
            let dtype = match name.ends_with("tid2eid") {
                true => {
                    data.extend(self.experts_of_tokens(name, dims[0], row_len));
                    "I64"
                }
                false => {
                    data.extend(self.bytes(name, dims, row_len));
                    "F32"
                }
            };
            let place = json!({"dtype": dtype, "shape": dims, "data_offsets": [start, data.len()]});
            header.insert(name.clone(), place);
        }
        let header = Value::Object(header).to_string().into_bytes();
        let length = (header.len() as u64).to_le_bytes().to_vec();
        let whole = [length, header, data].concat();
        std::fs::write(folder.join("model.safetensors"), whole).unwrap();
    }

    /// `k` of eight experts for each token.
    fn experts_of_tokens(&self, name: &str, n_tokens: u64, k: u64) -> Vec<u8> {
        let seed = seed(&self.name, name);
        let of_token = |token| (0..k).map(move |i| (mixed(seed ^ token) % 8 + i) % 8);
        (0..n_tokens).flat_map(of_token).flat_map(u64::to_le_bytes).collect()
    }

    fn bytes(&self, name: &str, dims: &[u64], n_inputs: u64) -> Vec<u8> {
        values(&self.name, name, dims, n_inputs).flat_map(f32::to_le_bytes).collect()
    }
}

fn seed(card: &str, name: &str) -> u64 {
    let text = card.bytes().chain(name.bytes());
    text.fold(0u64, |seed, byte| mixed(seed ^ u64::from(byte)))
}

/// Uniform f32s: around 1 for norms, small for biases, and of matrices that read `n_inputs` such
/// that products are about as large as what they read.
pub fn values(
    card: &str,
    name: &str,
    dims: &[u64],
    n_inputs: u64,
) -> impl Iterator<Item = f32> + use<> {
    let seed = seed(card, name);
    let is_vector = dims.iter().filter(|d| **d != 1).count() == 1;
    let (centre, width) = match is_vector {
        // Logarithms of decays, for steps of 1.
        _ if name.ends_with("ssm_a") => (-0.3, 0.25),
        true if name.contains("norm") => (1.0, 0.5),
        true => (0.0, 0.25),
        false if name.contains("token_embd") || name.contains("embed_tokens") => (0.0, 1.7),
        false => (0.0, (3.0 / n_inputs as f32).sqrt()),
    };
    let spread = move |i| (mixed(seed ^ i) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
    (0..dims.iter().product()).map(move |i| centre + width * spread(i))
}

/// The names of a pattern such as `blk.0,2.attn_q.weight` or `model.layers.*.mlp.gate.weight`.
fn of_layers(pattern: &str, n_layers: u64) -> Vec<String> {
    let befores = [
        "blk.",
        "layers.",
        "model.layers.",
        "backbone.layers.",
        "model.language_model.layers.",
        "language_model.model.layers.",
    ];
    let Some(before) = befores.into_iter().find(|before| pattern.starts_with(before)) else {
        return vec![pattern.to_owned()];
    };
    let (layers, rest) = pattern[before.len()..].split_once('.').expect("a name in the layer");
    let named = |layer: &dyn std::fmt::Display| format!("{before}{layer}.{rest}");
    match layers {
        "*" => (0..n_layers).map(|l| named(&l)).collect(),
        list => list.split(',').map(|l| named(&l)).collect(),
    }
}

/// SplitMix64's output function.
fn mixed(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

fn owned(value: &Value) -> OwnedValue {
    let number = |value: &Value| value.as_u64().expect("a whole number") as u32;
    match value {
        Value::Bool(flag) => (*flag).into(),
        Value::String(text) => text.as_str().into(),
        Value::Object(typed) => match (typed.get("u64"), &value["i32"]) {
            (Some(list), _) => {
                let list = list.as_array().expect("a list of large numbers");
                list.iter().map(|n| n.as_u64().unwrap()).collect::<Vec<u64>>().into()
            }
            (None, Value::Array(list)) => {
                list.iter().map(|n| n.as_i64().unwrap() as i32).collect::<Vec<i32>>().into()
            }
            (None, whole) => (whole.as_i64().expect("a number with a sign") as i32).into(),
        },
        Value::Array(list) if list.iter().all(Value::is_boolean) => {
            list.iter().map(|flag| flag.as_bool().unwrap()).collect::<Vec<bool>>().into()
        }
        Value::Array(list) if list.iter().all(Value::is_f64) => {
            list.iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<f32>>().into()
        }
        Value::Array(list) => list.iter().map(number).collect::<Vec<u32>>().into(),
        float if float.is_f64() => (float.as_f64().unwrap() as f32).into(),
        whole => number(whole).into(),
    }
}
