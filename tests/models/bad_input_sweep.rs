//! Every key and every tensor of a model of each architecture, dropped and damaged one at a time:
//! the file computes the very same or is refused with a sentence. What computes something else is
//! in a table here, with the reason. And the keys of all of them as llama.cpp saves a model.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use common::edits::{File, Tensor};
use common::{cards, convert_golden, repo};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{CacheType, Engine, EngineOptions};
use moeba::gguf::{OwnedArray, OwnedValue};
use moeba::model::descriptor::Descriptor;

/// One of each architecture, and of each variant of its files.
const GOLDEN: [&str; 79] = [
    "afmoe",
    "arctic",
    "arctic_mixed",
    "bailingmoe",
    "bailingmoe2",
    "beam",
    "cohere2moe",
    "dbrx",
    "deepseek",
    "deepseek32",
    "deepseek4",
    "deepseek41",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "dots1",
    "dots3note",
    "ernie4_5",
    "ernie4_5-moe",
    "exaone-moe",
    "flint",
    "gemma4",
    "gemma4_shared_hf",
    "glm-dsa",
    "glm4_moe_lite",
    "glm4moe",
    "glm4moe_air",
    "glm5-next",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitehybrid",
    "granitemoe",
    "grok",
    "grovemoe",
    "hunyuan-moe",
    "hy_v3",
    "hy_v4",
    "jamba",
    "k2-horizon",
    "k2-horizon_mova",
    "kimi-k3",
    "kimi-linear",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm2_window",
    "lfm2moe",
    "llama3_rope",
    "llama4",
    "maion-coder",
    "maple",
    "mellum",
    "mimo2",
    "minicpm",
    "minimax-01",
    "minimax-m2",
    "minimax-m3",
    "mistral-large4",
    "mistral3",
    "mistral4",
    "mixtral",
    "muse-spark",
    "nemotron_h",
    "nemotron_h_moe",
    "olmoe",
    "paddleocr",
    "phimoe",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen35moe",
    "qwen3moe_mixed",
    "qwen3next",
    "qwen3vlmoe",
    "qwen4exp",
    "refact",
    "smallthinker",
    "step35",
];

/// Entries that files may lack although they then compute something else, with the reason; of
/// layers, behind the only golden that may.
const DEFAULTS: [(&str, &str); 33] = [
    ("flint: exp_probs_b.bias", "the published model has none"),
    ("output.weight", "without it the embedding is the output, as everywhere in GGUF"),
    ("rope_freqs.weight", "Llama 3.1 has it, Llama 3 has not, and no key tells them apart"),
    ("llama.rope.freq_base", "files of Llama 1 and 2 lack it: 10000"),
    ("gpt-oss.rope.scaling.yarn_beta_fast", "32, as the paper and the published models have it"),
    ("phimoe.router_jitter_noise", "0.01, as the published models have it"),
    ("qwen3moe.expert_weights_norm", "true, as the published models have it"),
    ("beam.attention.temperature_scale", "0.1, as the published models have it"),
    ("beam.attention.temperature_length", "2048, as the published models have it"),
    ("deepseek41.attention.indexer.candidate_source_layer", "a choice may have one level"),
    ("deepseek41.engram.pad_token_id", "0 is an id like others"),
    ("flint.expert_weights_scale", "a model without it has no factor"),
    ("granite_swa.residual_scale", "a model without it has no factor"),
    ("granite_swa.embedding_scale", "a model without it has no factor"),
    ("granite_swa.attention.scale", "a model without it divides by the root of a head's width"),
    ("k2-horizon.attention.group_norm_groups", "a model without it has one norm of the stream"),
    ("k2-horizon.expert_weights_scale", "a model without it has no factor"),
    ("k2-horizon.expert_weights_norm", "false, as in llama.cpp: dense models have no such key"),
    ("lfm2.attention.sliding_window", "most models of the family have none"),
    ("afmoe.rope.freq_base_swa", "sliding layers turn as the others, as in published models"),
    ("glm5-next.swiglu_clamp_exp", "a model without a limit has none"),
    ("granitehybrid.rope.scaling.finetuned", "attention rotates, as in files of other models"),
    ("grok.final_logit_softcapping", "Grok 1 has none"),
    ("laguna.attention.sliding_window", "Laguna M.1 has none"),
    ("laguna.rope.freq_base_swa", "Laguna M.1 has no such layers"),
    ("laguna.rope.dimension_count_swa", "Laguna M.1 has no such layers"),
    ("mimo2.attention.value_scale", "a model without it has no factor"),
    ("qwen4exp.ple.eos_token_id", "0 is an id like others, which llama.cpp's test model has"),
    ("smallthinker.attention.sliding_window", "SmallThinker-4B has none"),
    ("mistral3.attention.temperature_scale", "Mistral 3 lacks it, Ministral 3 has it"),
    ("mistral3.rope.scaling.yarn_log_multiplier", "the magnitude of YaRN's paper without it"),
    ("phimoe.rope.scaling.short_mscale", "llama.cpp's files lack it: their attn_factor counts"),
    ("phimoe.rope.scaling.long_mscale", "llama.cpp's files lack it: their attn_factor counts"),
];

struct Golden {
    file: File,
    tokens: Vec<u32>,
    /// Contexts in which frequencies of positions may differ.
    contexts: Vec<usize>,
    expected: Vec<u32>,
    /// Memory for experts.
    ram: RamBudget,
    dir: tempfile::TempDir,
}

impl Golden {
    fn new(name: &str) -> Golden {
        let dir = tempfile::tempdir().unwrap();
        let path = convert_golden(name, "f32", dir.path());
        let file = File::read(&path);
        let tokens = repo().join("tests/golden").join(name).join("expect/p70.tokens.json");
        let mut tokens: Vec<u32> = match cards::names().iter().any(|card| card == name) {
            true => cards::expected(name).0,
            false => serde_json::from_str(&std::fs::read_to_string(tokens).unwrap()).unwrap(),
        };
        // Beyond a window of 16.
        tokens.truncate(20);
        let is_long = file.tensors.iter().any(|t| t.name.starts_with("rope_factors"));
        let contexts = if is_long { vec![20, 90] } else { vec![90] };
        let mut golden =
            Golden { file, tokens, contexts, expected: Vec::new(), ram: RamBudget::Auto, dir };
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
                ram: self.ram,
                cache_type_k: CacheType::F32,
                cache_type_v: CacheType::F32,
                ..EngineOptions::default()
            };
            let engine = Engine::load(path, &options, &mut |_| ())?;
            let mut session = engine.new_session()?;
            let mut take = |_, l: &mut [f32]| bits.extend(l.iter().map(|value| value.to_bits()));
            session.eval_all(&self.tokens, &mut take)?;
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

/// The faults found, and the defaults met.
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
                // A count of 0 is none given.
                let is_of = |name: &str| match name.split_once(": ") {
                    Some((of, part)) => {
                        of == golden && what.starts_with("without blk.") && what.ends_with(part)
                    }
                    None => [format!("without {name}"), format!("U32(0) for {name}")]
                        .contains(&what.to_owned()),
                };
                let known = DEFAULTS.iter().find(|(name, _)| is_of(name));
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
    let own = name.to_owned();
    move |field| {
        field.ends_with(&own)
            || field.contains(&part)
            || of_vocabulary && vocabulary.iter().any(|v| field.contains(v))
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
        OwnedValue::F32(value) => {
            let opposite = if *value < 0.0 { 1.0f32 } else { -1.0 };
            vec![f32::NAN.into(), opposite.into(), f32::INFINITY.into(), true.into()]
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

/// Keys that llama.cpp writes for every model that it saves, `{arch}.` left out, with what it
/// writes where the model has nothing of the kind.
fn saved_keys() -> Vec<(&'static str, OwnedValue)> {
    let mut keys: Vec<(&str, OwnedValue)> = vec![
        ("rope.scaling.type", "linear".into()),
        ("rope.scaling.factor", 0.0f32.into()),
        ("rope.scaling.attn_factor", 1.0f32.into()),
        ("rope.scaling.finetuned", false.into()),
        ("rope.scaling.yarn_log_multiplier", 0.0f32.into()),
        ("rope.scaling.yarn_ext_factor", (-1.0f32).into()),
        ("rope.scaling.yarn_attn_factor", 1.0f32.into()),
        ("rope.scaling.yarn_beta_fast", 32.0f32.into()),
        ("rope.scaling.yarn_beta_slow", 1.0f32.into()),
        ("rope.dimension_sections", vec![0i32; 4].into()),
        ("swiglu_clamp_exp", vec![0.0f32; 2].into()),
        ("classifier.output_labels", Vec::<String>::new().into()),
        ("attention.causal", true.into()),
        ("pooling_type", u32::MAX.into()),
        ("expert_group_scale", 0.05f32.into()),
        ("kda.gate_lower_bound", f32::NEG_INFINITY.into()),
    ];
    let zero_numbers = [
        "attention.scale",
        "attention.output_scale",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.max_alibi_bias",
        "expert_weights_scale",
        "logit_scale",
        "residual_scale",
        "embedding_scale",
    ];
    let zero_counts = [
        "attention.key_length_mla",
        "attention.value_length_mla",
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.sliding_window",
        "attention.recurrent_layers",
        "attention.relative_buckets_count",
        "decoder_block_count",
        "expert_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_group_count",
        "expert_group_used_count",
        "expert_shared_count",
        "expert_used_count",
        "feed_forward_length",
        "leading_dense_block_count",
        "nextn_predict_layers",
        "ssm.conv_kernel",
        "ssm.inner_size",
    ];
    keys.extend(zero_numbers.map(|key| (key, 0.0f32.into())));
    keys.extend(zero_counts.map(|key| (key, 0u32.into())));
    keys
}

/// The same model with the keys as llama.cpp would save them.
fn saved(file: &mut File) {
    let architecture = file.keys.iter().find(|(key, _)| key == "general.architecture");
    let OwnedValue::String(name) = architecture.unwrap().1.clone() else { panic!("a text") };
    let name = String::from_utf8(name).unwrap();
    let at = |key: &str| format!("{name}.{key}");
    let value = |file: &File, key: &str| {
        file.keys.iter().find(|(k, _)| *k == at(key)).map(|(_, value)| value.clone())
    };
    let Some(OwnedValue::U32(n_layers)) = value(file, "block_count") else { panic!("a count") };
    if let Some(OwnedValue::U32(every)) = value(file, "full_attention_interval") {
        let layers: Vec<u32> = (1..=n_layers).map(|l| u32::from(l % every != 0)).collect();
        file.set(&at("attention.recurrent_layers"), layers);
        file.drop_key(&at("full_attention_interval"));
    }
    if let Some(OwnedValue::Array(OwnedArray::Bool(list))) =
        value(file, "attention.recurrent_layers")
    {
        let layers: Vec<u32> = list.into_iter().map(u32::from).collect();
        file.set(&at("attention.recurrent_layers"), layers);
    }
    let context = value(file, "context_length").unwrap();
    let keys = saved_keys().into_iter();
    for (key, none) in keys.chain([("rope.scaling.original_context_length", context)]) {
        if value(file, key).is_none() {
            file.set(&at(key), none);
        }
    }
    // Where the gate is the architecture's own, so is what becomes of its weights.
    let descriptor = Descriptor::for_architecture(&name, Path::new("")).unwrap();
    let own = OwnedValue::Bool(descriptor.router.normalize);
    let is_own = value(file, "expert_weights_norm").is_none_or(|given| given == own);
    if value(file, "expert_gating_func").is_none() && is_own {
        file.set(&at("expert_gating_func"), 0u32);
        file.set(&at("expert_weights_norm"), false);
    }
}

#[test]
fn files_as_llama_cpp_saves_them_compute_the_same() {
    let mut wrong = Vec::new();
    for name in GOLDEN {
        let mut golden = Golden::new(name);
        saved(&mut golden.file);
        let outcome = golden.outcome(&golden.file);
        if !matches!(outcome, Outcome::Same) {
            wrong.push(format!("{name}: {outcome:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Puts gate and up of each layer's experts into one tensor, expert by expert.
fn fuse(file: &mut File) {
    let is_gate = |t: &Tensor| t.name.ends_with("ffn_gate_exps.weight");
    while let Some(gate) = file.tensors.iter().find(|t| is_gate(t)).map(|t| t.name.clone()) {
        let (gate, up) = (file.take(&gate), file.take(&gate.replace("_gate_", "_up_")));
        let n = *gate.dims.last().unwrap() as usize;
        let [of_gate, of_up] = [&gate, &up].map(|t| t.bytes.chunks(t.bytes.len() / n));
        let bytes = of_gate.zip(of_up).flat_map(|(gate, up)| [gate, up].concat()).collect();
        let dims = vec![gate.dims[0], 2 * gate.dims[1], gate.dims[2]];
        let name = gate.name.replace("_gate_", "_gate_up_");
        file.tensors.push(Tensor { name, dims, ty: gate.ty, bytes });
    }
}

#[test]
fn gate_and_up_in_one_tensor_compute_the_same() {
    for name in ["mixtral", "deepseek_v3", "qwen3next"] {
        let mut golden = Golden::new(name);
        fuse(&mut golden.file);
        assert!(golden.file.tensors.iter().any(|t| t.name.contains("ffn_gate_up_exps")));
        for ram in [RamBudget::Auto, RamBudget::Percent(40.0)] {
            golden.ram = ram;
            let outcome = golden.outcome(&golden.file);
            assert!(matches!(outcome, Outcome::Same), "{name}, {ram:?}: {outcome:?}");
        }
        let index = golden.file.tensors.iter().position(|t| t.name.contains("gate_up")).unwrap();
        golden.file.tensors[index] = golden.file.tensors[index].cut().unwrap();
        let outcome = golden.outcome(&golden.file);
        let Outcome::Refused(sentence) = outcome else { panic!("{name}: {outcome:?}") };
        assert!(sentence.contains("ffn_gate_up_exps.weight: expected shape"), "{sentence}");
    }
}
