//! The golden checkpoints, converted: tensor by tensor and key by key what llama.cpp's converter
//! makes of them, but for the differences that tests/fixtures/convert/README.md explains.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use common::golden;
use moeba::convert::{ConvertOptions, Layout, Mix, QuantizeOptions, convert, quantize};
use moeba::gguf::{Gguf, TensorInfo, TensorType, Value};
use moeba::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::{Value as Json, json};

fn fixture(name: &str) -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/convert").join(name);
    serde_json::from_slice(&common::gunzip(&path)).unwrap()
}

fn converted(name: &str, mix: Option<Mix>, folder: &Path) -> Gguf {
    let output = folder.join(format!("{name}.gguf"));
    let options = ConvertOptions {
        folder: golden(name),
        output: output.clone(),
        mix,
        no_mtp: true,
        ..ConvertOptions::default()
    };
    let written = convert(&options).unwrap();
    let gguf = Gguf::open(&output).unwrap();
    assert_eq!(gguf.tensors().len(), written.n_tensors);
    assert_eq!(gguf.tensors().iter().map(|t| t.n_bytes).sum::<u64>(), written.bytes_out);
    gguf
}

fn fnv1a(bytes: &[u8]) -> String {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// A value as the fixture has it: arrays by length and digest.
fn plain(value: Value<'_>) -> Json {
    let Some(array) = value.as_array() else {
        return match value {
            Value::Bool(b) => json!(b),
            Value::F32(x) => json!(f64::from(x)),
            Value::String(s) => json!(String::from_utf8_lossy(s)),
            other => json!(other.as_i64()),
        };
    };
    let texts = |separator: &str| {
        let text = |v: Value<'_>| match v {
            Value::String(s) => String::from_utf8_lossy(s).into_owned(),
            Value::F32(x) => format!("{:?}", f64::from(x)),
            Value::Bool(b) => b.to_string(),
            other => other.as_i64().unwrap().to_string(),
        };
        array.iter().map(text).collect::<Vec<_>>().join(separator)
    };
    let is_text = matches!(array.get(0), Some(Value::String(_)));
    let text = if is_text { texts("\n") } else { format!("[{}]", texts(", ")) };
    json!({"length": array.len(), "fnv1a": fnv1a(text.as_bytes())})
}

/// Keys that differ from llama.cpp's; the README beside the fixtures says why.
fn is_known_difference(checkpoint: &str, key: &str) -> bool {
    let is = |names: &[&str]| names.iter().any(|name| checkpoint.starts_with(name));
    let is_llama = is(&["llama", "mixtral"]);
    match key.split_once('.').map_or(key, |(_, rest)| rest) {
        "name" => true,
        "attention.key_length" | "attention.value_length" => is_llama,
        "expert_weights_norm" => !is_llama,
        "vocab_size" => is(&["qwen", "olmoe", "phimoe", "gpt_oss", "glm4moe"]),
        "expert_feed_forward_length" => checkpoint == "olmoe",
        "rope.scaling.long_mscale" | "rope.scaling.short_mscale" | "router_jitter_noise" => {
            checkpoint == "phimoe"
        }
        "rope.scaling.type" => checkpoint == "deepseek",
        "attention.recurrent_layers" => checkpoint == "qwen3next",
        "ggml.add_space_prefix" => is_llama || is(&["granitemoe", "phimoe", "arctic"]),
        "ggml.unknown_token_id" => is_llama || is(&["phimoe", "arctic", "glm4"]),
        "ggml.bos_token_id" => is(&["glm4"]),
        "ggml.pre" => is(&["glm4"]),
        "ggml.scores" | "ggml.token_type" => checkpoint == "arctic",
        "ggml.add_sep_token" => checkpoint == "llama3_rope",
        _ => false,
    }
}

/// The keys that differ without an explanation.
fn metadata_faults(name: &str, expected: &Json, ours: &Gguf) -> Vec<String> {
    let ours: BTreeMap<String, Json> =
        ours.keys().map(|(key, value)| (key.to_owned(), plain(value))).collect();
    let theirs = expected.as_object().unwrap();
    // A decimal of an f32 need not be parsed to its last bit.
    let rounded = |value: Option<&Json>| match value {
        Some(Json::Number(n)) if n.is_f64() => n.as_f64().map(|x| json!(x as f32)),
        value => value.cloned(),
    };
    let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let differ = |key: &&String| rounded(ours.get(*key)) != rounded(theirs.get(*key));
    let differ: Vec<_> = keys.into_iter().filter(differ).collect();
    let unknown = differ.iter().filter(|key| !is_known_difference(name, key));
    let shown =
        unknown.map(|key| format!("{name}: {key}: {:?}, {:?}", ours.get(*key), theirs.get(*key)));
    shown.collect()
}

fn same_bytes(a: &Path, b: &Path) -> bool {
    std::fs::read(a).unwrap() == std::fs::read(b).unwrap()
}

fn shown(gguf: &Gguf, tensor: &TensorInfo) -> String {
    let dims: Vec<String> = tensor.dims.iter().map(u64::to_string).collect();
    format!("{} {} {}", tensor.ty, dims.join("x"), fnv1a(gguf.bytes(tensor)))
}

/// The type in the request to llama.cpp. It keeps 4-bit floats in any case, we only if no other
/// type is named.
fn asked(name: &str, outtype: &str, folder: &Path) -> (Gguf, Option<Gguf>) {
    let gguf = converted(name, Mix::from_name(outtype), folder);
    let kept = folder.join("kept");
    std::fs::create_dir_all(&kept).unwrap();
    (gguf, name.ends_with("mxfp4").then(|| converted(name, None, &kept)))
}

#[test]
fn floats_and_q8_0_are_what_llama_cpp_converts_to() {
    let folder = tempfile::tempdir().unwrap();
    let mut faults = Vec::new();
    for (name, expected) in fixture("checkpoints.json.gz").as_object().unwrap() {
        for (outtype, tensors) in expected["tensors"].as_object().unwrap() {
            let (gguf, kept) = asked(name, outtype, folder.path());
            if outtype == "f32" {
                let file = kept.as_ref().unwrap_or(&gguf);
                faults.extend(metadata_faults(name, &expected["metadata"], file));
            }
            let ours = gguf.tensors().iter().map(|t| {
                let of = |gguf: &Gguf| shown(gguf, gguf.tensor(&t.name).unwrap());
                let kept = kept.as_ref().map(of).filter(|shown| shown.starts_with("MXFP4"));
                (t.name.as_str(), kept.unwrap_or_else(|| shown(&gguf, t)))
            });
            let theirs = tensors.as_object().unwrap().iter().map(|(k, v)| {
                // A gate of one output is a vector here and a matrix of one row there.
                let vector = k.ends_with("ffn_gate_inp_shexp.weight");
                let v = v.as_str().unwrap();
                (k.as_str(), if vector { v.replace("x1 ", " ") } else { v.to_owned() })
            });
            let (ours, theirs): (BTreeMap<_, _>, BTreeMap<_, _>) =
                (ours.collect(), theirs.collect());
            assert_eq!(
                ours.keys().collect::<Vec<_>>(),
                theirs.keys().collect::<Vec<_>>(),
                "{name}"
            );
            for (tensor, ours) in &ours {
                // An exponential, whose last bit differs.
                let n = if tensor.ends_with(".ssm_a") { 2 } else { 3 };
                let parts =
                    |text: &String| text.splitn(3, ' ').take(n).map(str::to_owned).collect();
                let (ours, theirs): (Vec<_>, Vec<_>) = (parts(ours), parts(&theirs[tensor]));
                if ours != theirs {
                    faults.push(format!("{name} {outtype}: {tensor}: {ours:?}, {theirs:?}"));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

/// Asked for floats, the experts of a checkpoint in 4-bit floats have the values that the blocks of
/// the other file have.
#[test]
fn four_bit_floats_have_the_values_of_their_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let (floats, blocks) = asked("gpt_oss_mxfp4", "f32", folder.path());
    let blocks = blocks.unwrap();
    let mut compared = 0;
    for tensor in blocks.tensors().iter().filter(|t| t.ty == TensorType::MXFP4) {
        let wanted = floats.bytes(floats.tensor(&tensor.name).unwrap());
        let mut values = vec![0.0f32; wanted.len() / 4];
        moeba::quant::dequantize(TensorType::MXFP4, blocks.bytes(tensor), &mut values);
        let wanted = wanted.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        assert!(values.iter().any(|x| *x < 0.0) && wanted.eq(values), "{}", tensor.name);
        compared += 1;
    }
    assert_eq!(compared, 6);
}

/// A checkpoint of FP8 blocks converts to the values of the products, which F32 and BF16 files of
/// the same name hold: rounded once there.
#[test]
fn scaled_checkpoints_become_bf16_on_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let own = converted("deepseek_v3_fp8", None, folder.path());
    let tensor = own.tensor("blk.1.ffn_up_exps.weight").unwrap();
    assert_eq!(tensor.ty, TensorType::BF16);
    let asked = folder.path().join("asked");
    std::fs::create_dir_all(&asked).unwrap();
    let bf16 = converted("deepseek_v3_fp8", Some(Mix::Bf16), &asked);
    assert!(same_bytes(own.path(), bf16.path()));
}

/// Includes checkpoints that llama.cpp cannot convert (dense layers among routed ones) and types
/// that only our rules choose.
#[test]
fn every_checkpoint_converts_to_every_type() {
    let folder = tempfile::tempdir().unwrap();
    let names = [
        "llama",
        "llama_tied",
        "llama3_rope",
        "mixtral",
        "qwen2moe",
        "qwen2moe_mixed",
        "qwen3moe",
        "qwen3moe_mixed",
    ];
    for name in names {
        for outtype in Mix::names() {
            let mix = Mix::from_name(outtype).unwrap();
            let gguf = converted(name, Some(mix), folder.path());
            assert_eq!(gguf.u32("general.file_type").unwrap(), Some(mix.file_type()));
            assert_eq!(gguf.tensor("output.weight").is_none(), name == "llama_tied");
            for tensor in gguf.tensors() {
                let is_f32 = tensor.dims.len() == 1 || tensor.name.contains("ffn_gate_inp");
                assert!(!is_f32 || tensor.ty == TensorType::F32, "{name} {outtype}: {tensor:?}");
            }
        }
        // The checkpoint's own type loses nothing.
        let gguf = converted(name, None, folder.path());
        let own = match name {
            "llama_tied" => TensorType::F32,
            "qwen2moe_mixed" => TensorType::F16,
            _ => TensorType::BF16,
        };
        assert_eq!(gguf.tensor("token_embd.weight").unwrap().ty, own, "{name}");
    }
}

#[test]
fn dense_layers_stand_where_the_config_has_them() {
    let folder = tempfile::tempdir().unwrap();
    for (name, dense) in [("qwen2moe_mixed", vec![0]), ("qwen3moe_mixed", vec![0, 2])] {
        let gguf = converted(name, Some(Mix::F32), folder.path());
        for layer in 0..gguf.require_u32(&format!("{}.block_count", &name[..8])).unwrap() {
            let is_dense = gguf.tensor(&format!("blk.{layer}.ffn_gate.weight")).is_some();
            let is_routed = gguf.tensor(&format!("blk.{layer}.ffn_gate_exps.weight")).is_some();
            assert_eq!((is_dense, is_routed), (dense.contains(&layer), !dense.contains(&layer)));
        }
    }
}

/// `convert --outtype T` and `convert --outtype f32` with `quantize T` after it are one thing.
#[test]
fn quantize_gives_the_bytes_that_convert_gives() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["qwen2moe", "mixtral", "llama_tied"] {
        let input = converted(name, Some(Mix::F32), folder.path()).path().to_owned();
        for outtype in Mix::names() {
            let mix = Mix::from_name(outtype).unwrap();
            let output = folder.path().join("quantized.gguf");
            let options = QuantizeOptions {
                input: input.clone(),
                output: output.clone(),
                mix: Some(mix),
                layout: Layout::Standard,
                imatrix: None,
                allow_requantize: false,
                ..Default::default()
            };
            quantize(&options).unwrap();
            let direct = folder.path().join("direct");
            std::fs::create_dir_all(&direct).unwrap();
            let direct = converted(name, Some(mix), &direct);
            assert!(same_bytes(&output, direct.path()), "{name} {outtype}");
        }
    }
}

#[test]
fn quantised_weights_are_quantised_again_only_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let input = converted("qwen3moe", Some(Mix::Q8_0), folder.path()).path().to_owned();
    let output = folder.path().join("out.gguf");
    let mut options = QuantizeOptions {
        input: input.clone(),
        output: output.clone(),
        mix: Some(Mix::Q4_0),
        layout: Layout::Standard,
        imatrix: None,
        allow_requantize: false,
        ..Default::default()
    };
    let e = quantize(&options).unwrap_err().to_string();
    assert!(e.contains("Q8_0") && e.contains("--allow-requantize"), "{e}");
    assert!(!output.exists());
    options.allow_requantize = true;
    quantize(&options).unwrap();
    let gguf = Gguf::open(&output).unwrap();
    assert_eq!(gguf.tensor("token_embd.weight").unwrap().ty, TensorType::Q4_0);
    assert_eq!(gguf.u32("general.file_type").unwrap(), Some(2));
    // The same type again is a copy and loses nothing.
    options.mix = Some(Mix::Q8_0);
    options.allow_requantize = false;
    quantize(&options).unwrap();
    assert!(same_bytes(&input, &output));
}

/// These have SentencePiece's files only.
#[test]
fn encoder_decoder_checkpoints_get_their_ids() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["switch", "nllb_moe"] {
        let gguf = converted(name, None, folder.path());
        let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
        let texts = common::repo().join("tests/golden").join(name).join("expect/text.json");
        let texts: Vec<Json> = serde_json::from_slice(&std::fs::read(texts).unwrap()).unwrap();
        assert!(texts.len() > 5);
        for text in texts {
            let ids: Vec<u32> = serde_json::from_value(text["ids"].clone()).unwrap();
            let text = text["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, EncodeOptions::PROMPT), ids, "{name}: {text:?}");
        }
    }
}
