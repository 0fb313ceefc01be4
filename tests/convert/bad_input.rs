//! Checkpoints that are not what they should be: each ends in one sentence that names the file and
//! the field, and leaves nothing behind.

use std::fs;
use std::path::{Path, PathBuf};

use moeba::Error;
use moeba::convert::{ConvertOptions, Layout, Mix, Routing, SynthOptions, convert, synth};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A golden checkpoint's files in a folder of its own, to be spoilt.
struct Spoilt {
    folder: TempDir,
}

impl Spoilt {
    fn new(name: &str) -> Spoilt {
        let from = common::golden(name);
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
            if entry.path().is_file() {
                fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
            }
        }
        Spoilt { folder }
    }

    /// The checkpoint of a card.
    fn card(name: &str) -> Spoilt {
        let folder = tempfile::tempdir().unwrap();
        common::cards::checkpoint(name, folder.path());
        Spoilt { folder }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    fn json(&self, file: &str, change: impl Fn(&mut Value)) -> &Spoilt {
        let mut value = serde_json::from_slice(&fs::read(self.path(file)).unwrap()).unwrap();
        change(&mut value);
        fs::write(self.path(file), serde_json::to_vec(&value).unwrap()).unwrap();
        self
    }

    fn config(&self, field: &str, value: Value) -> &Spoilt {
        self.json("config.json", |config| config[field] = value.clone())
    }

    /// Rewrites the JSON header of a safetensors file; the data stays.
    fn header(&self, file: &str, change: impl Fn(&mut Value)) -> &Spoilt {
        let bytes = fs::read(self.path(file)).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        change(&mut header);
        self.raw_header(file, &serde_json::to_vec(&header).unwrap())
    }

    fn raw_header(&self, file: &str, header: &[u8]) -> &Spoilt {
        let bytes = fs::read(self.path(file)).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let length = (header.len() as u64).to_le_bytes();
        fs::write(self.path(file), [&length, header, &bytes[8 + n..]].concat()).unwrap();
        self
    }

    /// Converts, which must fail with a sentence that has all of these in it.
    fn fails(&self, words: &[&str]) {
        let output = self.path("out.gguf");
        let before = files(self.folder.path());
        let options = ConvertOptions {
            folder: self.folder.path().to_owned(),
            output: output.clone(),
            mix: Some(Mix::Q8_0),
            ..ConvertOptions::default()
        };
        let e = convert(&options).expect_err("must not convert");
        let sentence = e.to_string();
        assert!(!matches!(e, Error::Usage(_)), "{sentence}");
        assert!(!sentence.contains('\n') && sentence.len() < 600, "{sentence}");
        for word in words {
            assert!(sentence.contains(word), "{word:?} is not in: {sentence}");
        }
        assert_eq!(files(self.folder.path()), before, "{sentence}");
    }
}

fn files(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
    let mut names: Vec<_> = names.map(|n| n.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const SHARD: &str = "model-00001-of-00002.safetensors";
const NORM: &str = "model.norm.weight";

#[test]
fn header_lengths_that_no_file_has() {
    for (length, words) in [
        (u64::MAX, ["header length", "18446744073709551615"]),
        (1 << 63, ["header length", "9223372036854775808"]),
        (1 << 40, ["header length", "1099511627776"]),
        (0, ["header", "JSON"]),
        (7, ["header", "JSON"]),
    ] {
        let spoilt = Spoilt::new("llama");
        let mut bytes = fs::read(spoilt.path(SINGLE)).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(spoilt.path(SINGLE), bytes).unwrap();
        spoilt.fails(&[SINGLE, words[0], words[1]]);
    }
}

#[test]
fn files_cut_anywhere() {
    let spoilt = Spoilt::new("llama");
    let whole = fs::read(spoilt.path(SINGLE)).unwrap();
    let n = whole.len();
    for cut in [0, 1, 7, 8, 9, 100, n / 2, n - 1] {
        fs::write(spoilt.path(SINGLE), &whole[..cut]).unwrap();
        spoilt.fails(&[SINGLE]);
    }
    fs::write(spoilt.path(SINGLE), [&whole[..], b"x"].concat()).unwrap();
    spoilt.fails(&[SINGLE, "file size"]);
}

#[test]
fn headers_that_lie() {
    let spoil = |change: fn(&mut Value), words: &[&str]| {
        let spoilt = Spoilt::new("llama");
        spoilt.header(SINGLE, change).fails(&[&[SINGLE, NORM], words].concat());
    };
    // The data of another tensor: the second of the two is named.
    let spoilt = Spoilt::new("llama");
    spoilt.header(SINGLE, |h| h[NORM]["data_offsets"] = json!([0, 128]));
    spoilt.fails(&[SINGLE, "lm_head.weight", "data_offsets", "from 128", "0 to 49152"]);
    spoil(|h| h[NORM]["data_offsets"] = json!([128, 0]), &["data_offsets"]);
    spoil(|h| h[NORM]["data_offsets"][1] = json!(1u64 << 40), &["data_offsets", "128 bytes"]);
    spoil(|h| h[NORM]["data_offsets"] = json!([u64::MAX - 127, u64::MAX]), &["data_offsets"]);
    spoil(|h| h[NORM]["data_offsets"] = json!([-1, 127]), &["header"]);
    spoil(|h| h[NORM]["shape"] = json!([65]), &["data_offsets", "130 bytes"]);
    spoil(|h| h[NORM]["shape"] = json!([1u64 << 63, 4]), &["shape"]);
    spoil(|h| h[NORM]["dtype"] = json!("F12"), &["F12"]);
    spoil(|h| h[NORM]["dtype"] = json!("I16"), &["dtype", "F32, F16 or BF16", "I16"]);
    spoil(|h| h[NORM] = json!(1), &["header"]);
}

#[test]
fn headers_that_are_no_descriptions() {
    let raw = |header: &[u8], words: &[&str]| {
        Spoilt::new("llama")
            .raw_header(SINGLE, header)
            .fails(&[&[SINGLE, "header"], words].concat())
    };
    raw(b"<!DOCTYPE html>", &["JSON"]);
    raw(b"[]", &["tensors"]);
    raw(b"{\"a\":\xff}", &["JSON"]);
    raw("[".repeat(100_000).as_bytes(), &[]);
    let twice = br#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},
        "a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#;
    raw(twice, &["a twice"]);
}

#[test]
fn names_in_the_index_that_leave_the_folder() {
    for name in ["../model.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "c:x"] {
        let spoilt = Spoilt::new("mixtral");
        spoilt.json(INDEX, |index| index["weight_map"][NORM] = json!(name));
        spoilt.fails(&[INDEX, "weight_map", NORM, "file name"]);
    }
    let spoilt = Spoilt::new("mixtral");
    spoilt.json(INDEX, |index| index["weight_map"][NORM] = json!(7)).fails(&[INDEX, NORM]);
    spoilt.json(INDEX, |index| index["weight_map"] = json!([])).fails(&[INDEX, "weight_map"]);
}

#[test]
fn shards_that_are_not_what_the_index_says() {
    let spoilt = Spoilt::new("mixtral");
    fs::remove_file(spoilt.path(SHARD)).unwrap();
    spoilt.fails(&[SHARD, "No such file"]);
    fs::create_dir(spoilt.path(SHARD)).unwrap();
    spoilt.fails(&[SHARD, "regular file"]);

    let spoilt = Spoilt::new("mixtral");
    spoilt.json(INDEX, |index| index["weight_map"]["model.other"] = json!(SHARD));
    spoilt.fails(&[INDEX, "model.other", SHARD]);

    let spoilt = Spoilt::new("mixtral");
    fs::copy(spoilt.path(SHARD), spoilt.path("copy.safetensors")).unwrap();
    let name = "model.embed_tokens.weight";
    spoilt.json(INDEX, |index| index["weight_map"][name] = json!("copy.safetensors"));
    spoilt.fails(&["no other shard", "copy.safetensors"]);

    let spoilt = Spoilt::new("mixtral");
    fs::remove_file(spoilt.path(INDEX)).unwrap();
    spoilt.fails(&["model.safetensors or model.safetensors.index.json"]);
}

#[test]
fn tensors_missing_unknown_or_misshapen() {
    let spoil = |name: &str, rename: (&str, &str), words: &[&str]| {
        let spoilt = Spoilt::new(name);
        let change = |header: &mut Value| {
            let map = header.as_object_mut().unwrap();
            let info = map.remove(rename.0).unwrap();
            map.insert(rename.1.to_owned(), info);
        };
        spoilt.header(SINGLE, change).fails(words);
    };
    spoil("llama", (NORM, "model.norm.bias"), &["model.norm.bias", "llama"]);
    spoil("llama", (NORM, "a.rotary_emb.inv_freq"), &["output_norm.weight", NORM]);
    let q = "model.layers.1.self_attn.q_proj.weight";
    spoil("llama", (q, "a.rotary_emb.inv_freq"), &["blk.1.attn_q.weight", q]);
    let expert = "model.layers.2.mlp.experts.5.up_proj.weight";
    let beyond = "model.layers.2.mlp.experts.8.up_proj.weight";
    spoil("qwen2moe", (expert, beyond), &["blk.2.ffn_up_exps.weight", "no expert 5"]);
    let gate = "model.layers.2.mlp.gate.weight";
    spoil("qwen2moe", (gate, "a.rotary_emb.inv_freq"), &["blk.2.ffn_gate_inp.weight", gate]);
    let shared = "model.layers.0.mlp.shared_expert.up_proj.weight";
    let ignored = "a.rotary_emb.inv_freq";
    spoil("qwen2moe", (shared, ignored), &["blk.0.ffn_up_shexp.weight", shared]);
    let dense = "model.layers.0.mlp.up_proj.weight";
    spoil("qwen2moe_mixed", (dense, ignored), &["blk.0.ffn_up.weight", dense]);
    let norm = "model.layers.0.input_layernorm.weight";
    let far = "model.layers.7.input_layernorm.weight";
    spoil("llama", (norm, far), &[far, "layers 0 to 2"]);
}

#[test]
fn configs_that_say_something_else_than_the_weights() {
    let spoil = |name: &str, field: &str, value: Value, words: &[&str]| {
        Spoilt::new(name).config(field, value).fails(words);
    };
    let embed = "model.embed_tokens.weight";
    spoil("llama", "hidden_size", json!(32), &[embed, "shape", "[384, 32]", "[384, 64]"]);
    spoil("llama", "vocab_size", json!(400), &[embed, "shape", "[400, 64]"]);
    spoil("llama", "num_attention_heads", json!(8), &["shape"]);
    spoil("llama", "num_key_value_heads", json!(3), &["shape"]);
    spoil("llama", "intermediate_size", json!(95), &["shape", "[64, 95]"]);
    spoil("llama", "num_hidden_layers", json!(2), &["model.layers.2", "layers 0 to 1"]);
    spoil("llama", "num_hidden_layers", json!(4), &["blk.3.", "none of that name"]);
    let used = "num_experts_per_tok";
    spoil("qwen2moe", used, json!(0), &[used, "1 to 8, the number of experts", "got 0"]);
    spoil("qwen2moe", used, json!(9), &[used, "1 to 8, the number of experts", "got 9"]);
    spoil("mixtral", used, json!(0), &[used, "1 to 8", "got 0"]);
    spoil("gpt_oss", used, json!(99), &[used, "the number of experts", "got 99"]);
    spoil("qwen2moe", "num_experts", json!(9), &["experts 0 to 8", "no expert 8"]);
    spoil("qwen2moe", "num_experts", json!(7), &["experts.7", "7 experts"]);
    spoil("qwen2moe", "moe_intermediate_size", json!(32), &["experts.0", "[64, 32]"]);
}

#[test]
fn configs_out_of_range_or_of_other_models() {
    let spoil = |field: &str, value: Value, words: &[&str]| {
        Spoilt::new("llama").config(field, value).fails(&[&["config.json"], words].concat());
    };
    spoil("architectures", json!(["GptForCausalLM"]), &["GptForCausalLM", "--architectures"]);
    spoil("architectures", json!([]), &["architectures"]);
    spoil("architectures", Value::Null, &["architectures", "nothing"]);
    spoil("num_hidden_layers", json!(0), &["num_hidden_layers", "0"]);
    spoil("num_hidden_layers", json!(-1), &["num_hidden_layers", "-1"]);
    spoil("num_hidden_layers", json!(4_000_000_000u64), &["num_hidden_layers"]);
    spoil("num_attention_heads", json!(0), &["num_attention_heads"]);
    spoil("num_key_value_heads", json!(8), &["num_key_value_heads", "1 to 4"]);
    spoil("hidden_size", json!("64"), &["hidden_size", "\"64\""]);
    spoil("hidden_size", json!(1u64 << 40), &["hidden_size"]);
    spoil("hidden_size", Value::Null, &["hidden_size", "nothing"]);
    spoil("head_dim", json!(15), &["head_dim", "even"]);
    spoil("vocab_size", json!(0), &["vocab_size"]);
    spoil("rms_norm_eps", json!(true), &["rms_norm_eps", "number"]);
    spoil("hidden_act", json!("gelu"), &["hidden_act", "silu", "gelu"]);
    spoil("quantization_config", json!({"quant_method": "hqq"}), &["quantization_config", "hqq"]);
    spoil(
        "rope_scaling",
        json!({"rope_type": "mystery", "factor": 2.0}),
        &["rope_type", "mystery"],
    );
    spoil("rope_scaling", json!({"type": "linear"}), &["rope_scaling.factor", "nothing"]);
    spoil("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}), &["low_freq_factor"]);
    let spoilt = Spoilt::new("llama");
    fs::write(spoilt.path("config.json"), "not json").unwrap();
    spoilt.fails(&["config.json", "JSON"]);
    fs::remove_file(spoilt.path("config.json")).unwrap();
    spoilt.fails(&["config.json", "No such file"]);
}

#[test]
fn pairs_of_quantised_tensors_that_do_not_fit() {
    let scale = "model.layers.0.mlp.down_proj.weight_scale_inv";
    let spoilt = Spoilt::new("deepseek_v3_fp8");
    spoilt.config("quantization_config", json!({"quant_method": "fp8"}));
    spoilt.fails(&[scale, "[1, 1], one for each 128 × 128"]);
    spoilt.config(
        "quantization_config",
        json!({"quant_method": "fp8", "weight_block_size": [32, 64]}),
    );
    spoilt.fails(&[scale, "[2, 2], one for each 32 × 64", "[2, 3]"]);
    let spoilt = Spoilt::new("deepseek_v3_fp8");
    spoilt
        .config("quantization_config", Value::Null)
        .fails(&["one that no row takes", "scale_inv"]);

    let spoilt = Spoilt::new("gpt_oss_mxfp4");
    spoilt.config("quantization_config", Value::Null).fails(&["_scales", "one that no row takes"]);
    let spoilt = Spoilt::new("gpt_oss_mxfp4");
    spoilt.header(SINGLE, |h| {
        let map = h.as_object_mut().unwrap();
        let info = map.remove("model.layers.0.mlp.experts.down_proj_scales").unwrap();
        map.insert("model.layers.0.rotary_emb.inv_freq".into(), info);
    });
    spoilt.fails(&["down_proj_blocks", "down_proj_scales too"]);
}

#[test]
fn configs_whose_layers_do_not_fit() {
    let spoil = |name: &str, field: &str, value: Value, words: &[&str]| {
        Spoilt::card(name).config(field, value).fails(&[&["config.json", field], words].concat());
    };
    let linear = json!({"full_attn_layers": [9], "head_dim": 16, "num_heads": 4,
        "short_conv_kernel_size": 4});
    spoil("kimi-linear_hf", "linear_attn_config", linear, &["layers 1 to 4", "9"]);
    spoil("minimax-01_hf", "full_attn_alpha_factor", json!(2.0), &["1.7", "2"]);
    spoil("nemotron_h_moe_hf", "hybrid_override_pattern", json!("ME*EMX"), &["M or", "ME*EMX"]);
    spoil("laguna_hf", "gating", json!("sometimes"), &["per-element", "sometimes"]);
    spoil("laguna_hf", "num_attention_heads_per_layer", json!([4, 0, 6, 4]), &["1 to", "0"]);
    spoil("deepseek4_hf", "compress_ratios", json!([0, 8, 128, 4]), &["0 or 128 or 4", "8"]);
    spoil("deepseek4_hf", "scoring_func", json!("tanh"), &["sqrtsoftplus", "tanh"]);
    spoil("smallthinker_hf", "rope_layout", json!([0, 1, 0, 1, 0]), &["rope_layout.2", "1, which"]);
    let bases = json!([0, 2, 1, 2]);
    spoil("granitemoe_swa_hf", "layer_rope_theta", bases, &["layer_rope_theta.2", "0 or 2"]);
    spoil("bailingmoe_hf", "norm_head", json!(true), &["norm_head", "false"]);
    spoil("bailingmoe3_hf", "layer_group_size", json!("big"), &["number", "big"]);
    spoil("gemma4_dense_hf", "use_double_wide_mlp", json!("yes"), &["true or false", "yes"]);
    spoil("jamba_hf", "attn_layer_period", json!("often"), &["number", "often"]);
}

/// Lists of a nested config, and tables of integers.
#[test]
fn layers_of_nested_configs_and_tables() {
    let text = |name: &str, field: &str, value: Value, words: &[&str]| {
        let spoilt = Spoilt::card(name);
        spoilt.json("config.json", |config| config["text_config"][field] = value.clone());
        spoilt.fails(&[&["config.json", field], words].concat());
    };
    let all = json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
    text("step35_hf", "layer_types", all, &["full_attention", "sliding_attention"]);
    text("step35_hf", "moe_layers_enum", json!("some"), &["list of numbers", "some"]);
    let groups = json!({"num_attention_heads": 6, "num_attention_groups": 4});
    text("step35_hf", "attention_other_setting", groups, &["2", "4"]);
    text("step35_hf", "num_hidden_layers", json!("four"), &["integer", "four"]);
    text("minimax-m3_hf", "swiglu_limit", json!(3.0), &["7", "3"]);
    text("glm5-next_hf", "index_topk_freq", json!(4), &["1", "4"]);
    let spoilt = Spoilt::card("deepseek4_hf");
    spoilt.header(SINGLE, |h| h["layers.0.ffn.gate.tid2eid"]["dtype"] = json!("F64"));
    spoilt.fails(&["tid2eid", "I32 or I64", "F64"]);
    let spoilt = Spoilt::card("deepseek4_hf");
    spoilt.header(SINGLE, |h| {
        let table = h["layers.0.ffn.gate.tid2eid"].clone();
        h["layers.0.ffn.gate.bias"] = table;
        h["layers.0.ffn.gate.bias"]["shape"] = json!([960]);
        h.as_object_mut().unwrap().remove("layers.0.ffn.gate.tid2eid");
    });
    spoilt.fails(&["ffn.gate.bias"]);
}

#[test]
fn configs_of_parts_that_are_not_computed() {
    let spoil = |name: &str, field: &str, value: Value, words: &[&str]| {
        Spoilt::new(name).config(field, value).fails(&[&["config.json"], words].concat());
    };
    spoil("olmoe", "clip_qkv", json!(8.0), &["clip_qkv", "nothing", "8"]);
    spoil("gpt_oss", "swiglu_limit", json!(5.0), &["swiglu_limit", "7", "5"]);
    spoil("deepseek_v3", "scoring_func", json!("tanh"), &["scoring_func", "softmax", "tanh"]);
    spoil("deepseek_v3", "topk_method", json!("best"), &["topk_method", "noaux_tc", "best"]);
    spoil("deepseek_v3", "kv_lora_rank", Value::Null, &["kv_lora_rank", "nothing"]);
    spoil("phimoe", "num_experts_per_tok", json!(3), &["num_experts_per_tok", "2", "3"]);
    spoil("arctic", "use_residual", json!(false), &["use_residual", "true"]);
    let yarn = |field: &str, value: Value| {
        let spoilt = Spoilt::new("deepseek_v3");
        spoilt.json("config.json", |config| config["rope_scaling"][field] = value.clone());
        spoilt.fails(&["rope_scaling", field]);
    };
    yarn("truncate", json!(false));
    yarn("factor", json!("four"));
    yarn("original_max_position_embeddings", json!(0.5));
    let spoilt = Spoilt::new("phimoe");
    spoilt.json("config.json", |c| c["rope_scaling"]["long_factor"] = json!([1.0, 2.0]));
    spoilt.fails(&["rope_scaling.long_factor", "8 numbers above 0"]);
}

#[test]
fn sizes_that_contradict_the_weights_of_other_families() {
    let spoil = |name: &str, field: &str, value: Value, words: &[&str]| {
        Spoilt::new(name).config(field, value).fails(words);
    };
    // With a rank there must be two halves of q's projection, without one there must not.
    spoil("deepseek_v3", "q_lora_rank", Value::Null, &["attn_q.weight", "self_attn.q_proj"]);
    spoil("deepseek_v2_lite", "q_lora_rank", json!(16), &["q_proj", "no such tensor"]);
    spoil("deepseek_v3", "v_head_dim", json!(16), &["shape", "kv_b_proj"]);
    spoil("granitemoe", "intermediate_size", json!(24), &["output_linear", "[8, 64, 24]"]);
    spoil("gpt_oss", "num_local_experts", json!(9), &["experts", "9"]);
    spoil("phimoe", "hidden_size", json!(66), &["hidden_size / num_attention_heads", "16.5"]);
    spoil("qwen35moe", "architectures", json!(["Qwen3_5Next"]), &["architectures"]);
    let spoilt = Spoilt::new("deepseek_v3");
    let gate = "model.layers.1.mlp.gate.weight";
    spoilt.header(SINGLE, |h| {
        let map = h.as_object_mut().unwrap();
        let info = map.remove(gate).unwrap();
        map.insert("model.layers.1.rotary_emb.inv_freq".into(), info);
    });
    spoilt.fails(&["blk.1.ffn_gate_inp.weight", gate]);
}

#[test]
fn tokenizers_that_cannot_be_converted() {
    const FILE: &str = "tokenizer.json";
    let spoil = |change: fn(&mut Value), words: &[&str]| {
        Spoilt::new("qwen3moe").json(FILE, change).fails(&[&[FILE], words].concat());
    };
    let unknown = |t: &mut Value| {
        t["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("\\w+");
    };
    spoil(unknown, &["pre_tokenizer", "--pre NAME", "qwen2", "w+"]);
    spoil(|t| t["pre_tokenizer"] = Value::Null, &["pre_tokenizer", "--pre NAME"]);
    spoil(|t| t["model"]["type"] = json!("WordPiece"), &["model.type", "BPE or Unigram", "WordP"]);
    spoil(|t| t["model"]["type"] = json!("Unigram"), &["model.vocab", "array"]);
    spoil(|t| t["normalizer"] = json!({"type": "Lowercase"}), &["normalizer", "none or NFC"]);
    spoil(|t| t["model"]["vocab"]["he"] = json!(1u64 << 40), &["model.vocab", "he"]);
    spoil(|t| t["model"]["vocab"]["he"] = json!(-1), &["model.vocab", "he"]);
    spoil(|t| t["model"]["merges"][3] = json!("abc"), &["model.merges[3]"]);
    spoil(|t| t["added_tokens"][0]["id"] = json!("x"), &["added_tokens[0]"]);
    let spoilt = Spoilt::new("qwen3moe");
    spoilt.json(FILE, |t| t["model"]["vocab"]["extra"] = json!(320));
    spoilt.fails(&["vocabulary", "at most 320", "321"]);
    fs::remove_file(spoilt.path(FILE)).unwrap();
    spoilt.fails(&["tokenizer.json or tokenizer.model"]);

    let spoilt = Spoilt::new("llama");
    for bytes in [&b""[..], b"\x08", b"not a model", &[0xff; 100]] {
        fs::write(spoilt.path("tokenizer.model"), bytes).unwrap();
        spoilt.fails(&["tokenizer.model"]);
    }
}

#[test]
fn folders_that_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let convert_from = |path: PathBuf| {
        let options = ConvertOptions {
            folder: path,
            output: folder.path().join("out.gguf"),
            ..ConvertOptions::default()
        };
        convert(&options).unwrap_err().to_string()
    };
    let e = convert_from(folder.path().join("nothing"));
    assert!(e.contains("nothing") && e.contains("folder"), "{e}");
    fs::write(folder.path().join("file"), "x").unwrap();
    let e = convert_from(folder.path().join("file"));
    assert!(e.contains("a file"), "{e}");
    assert!(!folder.path().join("out.gguf").exists());
}

#[test]
fn outputs_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let golden = common::golden("llama");
    for output in [folder.path().to_owned(), folder.path().join("no/such/folder/out.gguf")] {
        let options = ConvertOptions {
            folder: golden.clone(),
            output: output.clone(),
            ..ConvertOptions::default()
        };
        let e = convert(&options).unwrap_err().to_string();
        assert!(e.contains(&output.display().to_string()), "{e}");
    }
    assert_eq!(files(folder.path()), Vec::<String>::new());
}

#[test]
fn synth_takes_only_what_it_knows() {
    let folder = tempfile::tempdir().unwrap();
    let options = |preset: &str, ty: &str, layers| SynthOptions {
        preset: preset.into(),
        output: folder.path().join("out.gguf"),
        layers,
        ty: ty.into(),
        seed: 0,
        routing: Routing::Uniform,
        layout: Layout::Standard,
    };
    for (options, word) in [
        (options("gpt", "q4_k", None), "qwen3-30b-a3b"),
        (options("mixtral-8x7b", "iq9_s", None), "q4_k"),
        (options("mixtral-8x7b", "q4_k", Some(0)), "1 to 32"),
        (options("mixtral-8x7b", "q4_k", Some(33)), "1 to 32"),
    ] {
        let e = synth(&options).unwrap_err();
        assert!(matches!(e, Error::Usage(_)) && e.to_string().contains(word), "{e}");
    }
    assert_eq!(files(folder.path()), Vec::<String>::new());
}
