//! Every key and every tensor of a model of each architecture, dropped and damaged one at a time:
//! the file computes the very same or is refused with a sentence. What computes something else is
//! in a table here, with the reason.

mod common;
mod edits;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use common::{convert_golden, repo};
use edits::{File, Tensor};
use moeba::engine::{CacheType, Engine, EngineOptions, Session, Want};
use moeba::gguf::OwnedValue;

/// Of each architecture, and of what its files differ in.
const GOLDEN: [&str; 22] = [
    "arctic",
    "arctic_mixed",
    "deepseek",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "dots1",
    "glm4_moe_lite",
    "glm4moe",
    "glm4moe_air",
    "gpt_oss",
    "granitemoe",
    "llama3_rope",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe_mixed",
    "qwen35moe",
    "qwen3next",
];

/// What files may lack although they then compute something else, and why that is no mistake.
const DEFAULTS: [(&str, &str); 8] = [
    ("output.weight", "without it the embedding is the output, as everywhere in GGUF"),
    ("rope_freqs.weight", "Llama 3.1 has it, Llama 3 has not, and no key tells them apart"),
    ("llama.rope.freq_base", "files of Llama 1 and 2 lack it: 10000"),
    ("gpt-oss.rope.scaling.yarn_beta_fast", "32, as the paper and the published models have it"),
    ("phimoe.router_jitter_noise", "0.01, as the published models have it"),
    ("qwen3moe.expert_weights_norm", "true, as the published models have it"),
    ("phimoe.rope.scaling.short_mscale", "llama.cpp's files lack it: their attn_factor counts"),
    ("phimoe.rope.scaling.long_mscale", "llama.cpp's files lack it: their attn_factor counts"),
];

struct Golden {
    file: File,
    tokens: Vec<u32>,
    /// Contexts in which frequencies of positions may differ.
    contexts: Vec<usize>,
    expected: Vec<u32>,
    dir: tempfile::TempDir,
}

impl Golden {
    fn new(name: &str) -> Golden {
        let dir = tempfile::tempdir().unwrap();
        let path = convert_golden(name, "f32", dir.path());
        let file = File::read(&path);
        let tokens = repo().join("tests/golden").join(name).join("expect/p70.tokens.json");
        let mut tokens: Vec<u32> =
            serde_json::from_str(&std::fs::read_to_string(tokens).unwrap()).unwrap();
        // Beyond a window of 16.
        tokens.truncate(20);
        let is_long = file.tensors.iter().any(|t| t.name.starts_with("rope_factors"));
        let contexts = if is_long { vec![20, 90] } else { vec![90] };
        let mut golden = Golden { file, tokens, contexts, expected: Vec::new(), dir };
        golden.expected = golden.answer(&path).unwrap();
        golden
    }

    /// Bits of the logits at all positions, in every context.
    fn answer(&self, path: &Path) -> moeba::Result<Vec<u32>> {
        let mut bits = Vec::new();
        for n_ctx in &self.contexts {
            let options = EngineOptions {
                n_threads: Some(1),
                n_ctx: Some(*n_ctx),
                cache_type_k: CacheType::F32,
                cache_type_v: CacheType::F32,
                ..EngineOptions::default()
            };
            let engine = Engine::load(path, &options, &mut |_| ())?;
            let mut session = Session::new(&engine)?;
            let mut take = |_, l: &mut [f32]| bits.extend(l.iter().map(|value| value.to_bits()));
            session.eval(&self.tokens, Want::All, &mut take)?;
        }
        Ok(bits)
    }

    fn outcome(&self, file: &File) -> Outcome {
        let path = self.dir.path().join("edited.gguf");
        file.write(&path);
        let answer = catch_unwind(AssertUnwindSafe(|| self.answer(&path)));
        match answer {
            Err(_) => Outcome::Panicked,
            Ok(Ok(bits)) if bits == self.expected => Outcome::Same,
            Ok(Ok(_)) => Outcome::Different,
            Ok(Err(error)) => Outcome::Refused(error.to_string()),
        }
    }
}

#[derive(Debug)]
enum Outcome {
    Same,
    Different,
    Panicked,
    Refused(String),
}

/// What has been found wrong, and which defaults were met.
#[derive(Default)]
struct Findings {
    wrong: Vec<String>,
    defaults: BTreeSet<&'static str>,
}

impl Findings {
    /// A refusal is one sentence whose field is one that `names` knows.
    fn judge(&mut self, golden: &str, what: &str, outcome: Outcome, names: impl Fn(&str) -> bool) {
        let fine = match &outcome {
            Outcome::Same => true,
            Outcome::Refused(sentence) => {
                let field = sentence.split(": expected ").next().unwrap();
                let whole = sentence.contains(": expected ") && sentence.contains(", got ");
                whole && !sentence.contains('\n') && names(field)
            }
            Outcome::Different => {
                let known = DEFAULTS.iter().find(|(name, _)| what == format!("without {name}"));
                self.defaults.extend(known.map(|(name, _)| *name));
                known.is_some()
            }
            Outcome::Panicked => false,
        };
        if !fine {
            self.wrong.push(format!("{golden}: {what}: {outcome:?}"));
        }
    }

    fn expect_none(self) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
    }
}

/// The field of a message is this tensor, or one that has to fit it: of the same part of the layer,
/// or of the vocabulary.
fn fits(name: &str) -> impl Fn(&str) -> bool {
    let vocabulary = ["token_embd", "output.", "tokenizer.ggml.tokens"];
    let part = match name.strip_prefix("blk.") {
        None => name.to_owned(),
        Some(rest) => format!("blk.{}_", rest.split_once('_').unwrap_or((rest, "")).0),
    };
    let of_vocabulary = vocabulary.iter().any(|v| name.starts_with(v));
    move |field| {
        field.contains(&part) || of_vocabulary && vocabulary.iter().any(|v| field.contains(v))
    }
}

#[test]
fn every_tensor_is_missed() {
    let mut findings = Findings::default();
    for name in GOLDEN {
        let mut golden = Golden::new(name);
        for i in 0..golden.file.tensors.len() {
            let tensor = golden.file.tensors.remove(i);
            let outcome = golden.outcome(&golden.file);
            let what = format!("without {}", tensor.name);
            findings.judge(name, &what, outcome, |field| field.ends_with(&tensor.name));
            golden.file.tensors.insert(i, tensor);
        }
    }
    assert!(findings.defaults.contains("output.weight"), "{:?}", findings.defaults);
    findings.expect_none();
}

#[test]
fn every_tensor_has_its_shape() {
    let mut findings = Findings::default();
    for name in GOLDEN {
        let mut golden = Golden::new(name);
        for i in 0..golden.file.tensors.len() {
            let sound = &golden.file.tensors[i];
            let sound_name = sound.name.clone();
            let damaged = [Some(sound.turned()), sound.cut()];
            let damaged = damaged.into_iter().flatten().filter(|t| t.dims != sound.dims);
            for tensor in damaged.collect::<Vec<Tensor>>() {
                let what = format!("{:?} {}", tensor.dims, tensor.name);
                let sound = std::mem::replace(&mut golden.file.tensors[i], tensor);
                let outcome = golden.outcome(&golden.file);
                findings.judge(name, &what, outcome, fits(&sound_name));
                golden.file.tensors[i] = sound;
            }
        }
    }
    findings.expect_none();
}

/// Other values of a key that no model has.
fn bad_values(value: &OwnedValue) -> Vec<OwnedValue> {
    match value {
        OwnedValue::U32(_) => vec![0u32.into(), u32::MAX.into(), "seven".into()],
        OwnedValue::F32(_) => {
            vec![f32::NAN.into(), (-1.0f32).into(), f32::INFINITY.into(), true.into()]
        }
        OwnedValue::Bool(_) => vec!["yes".into(), 7u32.into()],
        OwnedValue::String(_) => vec!["another".into(), 7u32.into()],
        _ => vec![vec![true; 2].into(), vec![1.0f32; 4].into(), true.into()],
    }
}

#[test]
fn every_key_is_missed_or_checked() {
    let mut findings = Findings::default();
    for name in GOLDEN {
        let mut golden = Golden::new(name);
        let tensors: Vec<String> = golden.file.tensors.iter().map(|t| t.name.clone()).collect();
        for i in 0..golden.file.keys.len() {
            let (key, value) = golden.file.keys[i].clone();
            if key.starts_with("tokenizer.") || key.starts_with("general.") {
                continue;
            }
            // Counts contradict tensors; whatever else is wrong is itself.
            let about = |field: &str| {
                field.ends_with(&key) || tensors.iter().any(|t| field.ends_with(t.as_str()))
            };
            golden.file.keys.remove(i);
            let outcome = golden.outcome(&golden.file);
            findings.judge(name, &format!("without {key}"), outcome, about);
            golden.file.keys.insert(i, (key.clone(), value.clone()));
            for bad in bad_values(&value) {
                let what = format!("{bad:?} for {key}");
                let is_count = matches!(bad, OwnedValue::U32(_));
                golden.file.keys[i].1 = bad;
                let outcome = golden.outcome(&golden.file);
                findings.judge(name, &what, outcome, |field| match is_count {
                    true => about(field) || field.contains("blk."),
                    false => field.ends_with(&key),
                });
            }
            golden.file.keys[i].1 = value;
        }
    }
    assert!(findings.defaults.contains("llama.rope.freq_base"), "{:?}", findings.defaults);
    findings.expect_none();
}
