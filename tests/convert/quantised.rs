//! Checkpoints that other libraries quantised: every weight becomes what the library makes of it,
//! to the bit. tests/fixtures/convert/quantised/make_quantised.py wrote them with those libraries.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::golden;
use moeba::convert::{ConvertOptions, Mix, convert};
use moeba::gguf::{Gguf, TensorType, Value as Metadata};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const O_PROJ: &str = "model.layers.1.self_attn.o_proj";
const DOWN_PROJ: &str = "model.layers.0.mlp.experts.3.down_proj";

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/convert/quantised");
    folder.join(name)
}

fn formats() -> Value {
    serde_json::from_slice(&fs::read(fixture("formats.json")).unwrap()).unwrap()
}

/// A tensor: type, shape and bytes.
type Tensor = (safetensors::Dtype, Vec<usize>, Vec<u8>);

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let own = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(own).collect()
}

/// The golden checkpoint with a format's two matrices in the place of its own.
struct Checkpoint {
    folder: tempfile::TempDir,
    tensors: BTreeMap<String, Tensor>,
    config: Value,
}

impl Checkpoint {
    fn new(format: &str) -> Checkpoint {
        let (golden, folder) = (golden("qwen3moe"), tempfile::tempdir().unwrap());
        let mut all = BTreeMap::new();
        for entry in fs::read_dir(&golden).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            match name {
                _ if name.ends_with(".safetensors") => all.extend(tensors(&path)),
                _ if name.ends_with(".index.json") || path.is_dir() => {}
                _ => drop(fs::copy(&path, folder.path().join(name)).unwrap()),
            }
        }
        for module in [O_PROJ, DOWN_PROJ] {
            all.remove(&format!("{module}.weight")).unwrap();
        }
        all.extend(tensors(&fixture(&format!("{format}.safetensors"))));
        let config = formats()[format]["config"].clone();
        Checkpoint { folder, tensors: all, config }
    }

    fn write(&self) {
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let path = self.folder.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &path).unwrap();
        let path = self.folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        // Modelopt has a file of its own.
        if self.config.get("producer").is_some() {
            let own = self.folder.path().join("hf_quant_config.json");
            fs::write(own, self.config.to_string()).unwrap();
        } else {
            config["quantization_config"] = self.config.clone();
        }
        fs::write(path, config.to_string()).unwrap();
    }

    fn convert(&self, mix: Option<Mix>) -> moeba::Result<Gguf> {
        self.write();
        let output = self.folder.path().join("out.gguf");
        let folder = self.folder.path().to_owned();
        let options =
            ConvertOptions { folder, output: output.clone(), mix, ..ConvertOptions::default() };
        convert(&options)?;
        Gguf::open(&output)
    }

    /// The error's sentence must have these words.
    fn fails(&self, words: &[&str]) {
        let Err(e) = self.convert(Some(Mix::F32)) else { panic!("converts, without {words:?}") };
        let sentence = e.to_string();
        for word in words {
            assert!(sentence.contains(word), "{word:?} in {sentence:?}");
        }
    }

    fn change(&mut self, name: &str, change: impl Fn(&mut Tensor)) -> &mut Checkpoint {
        change(self.tensors.get_mut(name).unwrap_or_else(|| panic!("{name}")));
        self
    }
}

fn fnv1a(values: &[f32]) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let bytes = values.iter().flat_map(|v| v.to_le_bytes());
    format!("{:016x}", bytes.fold(0xcbf2_9ce4_8422_2325, step))
}

fn values(file: &Gguf, name: &str) -> Vec<f32> {
    let tensor = file.tensors().iter().find(|t| t.name == name).unwrap();
    let mut values = vec![0.0; tensor.dims.iter().product::<u64>() as usize];
    moeba::quant::dequantize(tensor.ty, file.bytes(tensor), &mut values);
    values
}

/// The two matrices of a file.
fn matrices(file: &Gguf) -> [(&'static str, Vec<f32>); 2] {
    let experts = values(file, "blk.0.ffn_down_exps.weight");
    let expert = experts[3 * 64 * 64..][..64 * 64].to_vec();
    [(O_PROJ, values(file, "blk.1.attn_output.weight")), (DOWN_PROJ, expert)]
}

#[test]
fn every_format_has_the_librarys_values() {
    let formats = formats();
    let mut wrong = Vec::new();
    for (format, of) in formats.as_object().unwrap() {
        match Checkpoint::new(format).convert(Some(Mix::F32)) {
            Ok(file) => {
                for (name, got) in matrices(&file) {
                    if of["want"][name] != json!(fnv1a(&got)) {
                        wrong.push(format!("{format}: {name}: {:?}", &got[..4]));
                    }
                }
            }
            Err(e) => wrong.push(format!("{format}: {e}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(formats.as_object().unwrap().len(), 32);
}

/// Old AutoGPTQ and AutoAWQ wrote files of their own beside config.json.
#[test]
fn old_files_say_how_weights_are_quantised() {
    let gptq = json!({ "bits": 3, "group_size": 32, "damp_percent": 0.1, "desc_act": false,
        "sym": false, "true_sequential": true, "model_name_or_path": null });
    let awq = json!({ "zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM" });
    for (format, name, own) in
        [("gptq_3bit", "quantize_config.json", gptq), ("awq_4bit", "quant_config.json", awq)]
    {
        let mut checkpoint = Checkpoint::new(format);
        fs::write(checkpoint.folder.path().join(name), own.to_string()).unwrap();
        checkpoint.config = Value::Null;
        let file = checkpoint.convert(Some(Mix::F32)).unwrap();
        for (tensor, got) in matrices(&file) {
            assert_eq!(formats()[format]["want"][tensor], json!(fnv1a(&got)), "{format} {tensor}");
        }
    }
}

/// The two matrices are as wide as their scales are if nothing else is asked for.
#[test]
fn own_types() {
    for (format, ty) in [
        ("gptq_4bit", TensorType::F32),
        ("gptq_4bit_channel", TensorType::BF16),
        ("ct_int4_group", TensorType::BF16),
        ("fbgemm_fp8", TensorType::BF16),
        ("modelopt_fp8", TensorType::F8_E4M3),
        ("ct_fp8_tensor", TensorType::F8_E4M3),
        ("torchao_fp8_tensor", TensorType::F8_E4M3),
        ("modelopt_nvfp4", TensorType::NVFP4),
        ("ct_nvfp4", TensorType::NVFP4),
        ("ct_mxfp4", TensorType::MXFP4),
    ] {
        let file = Checkpoint::new(format).convert(None).unwrap();
        let of = |name: &str| file.tensors().iter().find(|t| t.name == name).map(|t| t.ty);
        assert_eq!(of("blk.1.attn_output.weight"), Some(ty), "{format}");
        let file_type = file.get("general.file_type").unwrap();
        let number = match ty {
            TensorType::NVFP4 => 39,
            TensorType::MXFP4 => 38,
            TensorType::F8_E4M3 => 42,
            TensorType::F32 => 0,
            _ => 32,
        };
        assert_eq!(file_type, Metadata::U32(number), "{format}");
    }
}

/// NVFP4 stays what it is, with the factor of the matrix beside it.
#[test]
fn nvfp4_keeps_its_blocks() {
    let folder = Checkpoint::new("modelopt_nvfp4");
    let [(_, asked), _] = matrices(&folder.convert(Some(Mix::F32)).unwrap());
    let file = folder.convert(None).unwrap();
    let factor = values(&file, "blk.1.attn_output.scale");
    let of_2 = &folder.tensors[&format!("{O_PROJ}.weight_scale_2")].2;
    assert_eq!(factor, [f32::from_le_bytes(of_2[..4].try_into().unwrap())]);
    // A product of three is rounded in another order.
    for (kept, asked) in values(&file, "blk.1.attn_output.weight").iter().zip(&asked) {
        let kept = kept * factor[0];
        assert!((kept - asked).abs() <= 2e-7 * asked.abs(), "{kept} {asked}");
    }
    // One expert of eight is in NVFP4, so that the stack is not.
    assert!(!file.tensors().iter().any(|t| t.name == "blk.0.ffn_down_exps.scale"));
}

/// Floats of 8 bits with one scale a matrix stay what they are, with the scales beside them.
#[test]
fn fp8_keeps_its_bytes() {
    let mut folder = Checkpoint::new("modelopt_fp8");
    let [weight, scale] = ["weight", "weight_scale"].map(|end| format!("{DOWN_PROJ}.{end}"));
    let (weight, scale) = (folder.tensors[&weight].clone(), folder.tensors[&scale].clone());
    let of_3 = f32::from_le_bytes(scale.2[..4].try_into().unwrap());
    let factors = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| of_3 * (i + 1) as f32);
    let mut bytes = Vec::new();
    for (i, factor) in factors.into_iter().enumerate() {
        let module = DOWN_PROJ.replace("experts.3", &format!("experts.{i}"));
        let mut weight = weight.clone();
        weight.2.rotate_left(i);
        bytes.extend_from_slice(&weight.2);
        let scale = (scale.0, scale.1.clone(), factor.to_le_bytes().to_vec());
        folder.tensors.insert(format!("{module}.weight"), weight);
        folder.tensors.insert(format!("{module}.weight_scale"), scale);
    }
    let asked = folder.convert(Some(Mix::F32)).unwrap();
    let asked = values(&asked, "blk.0.ffn_down_exps.weight");
    let file = folder.convert(None).unwrap();
    let kept = file.tensors().iter().find(|t| t.name == "blk.0.ffn_down_exps.weight").unwrap();
    assert_eq!((kept.ty, file.bytes(kept)), (TensorType::F8_E4M3, &bytes[..]));
    assert_eq!(values(&file, "blk.0.ffn_down_exps.scale"), factors);
    let kept = values(&file, "blk.0.ffn_down_exps.weight");
    for (i, (kept, asked)) in kept.iter().zip(&asked).enumerate() {
        assert_eq!(kept * factors[i / (64 * 64)], *asked, "{i}");
    }
    assert_eq!(values(&file, "blk.1.attn_output.scale").len(), 1);
    // An expert in another type, or a factor that no reader takes: nothing of the stack is kept.
    let name = format!("{DOWN_PROJ}.weight_scale");
    folder.change(&name, |scale| scale.2.copy_from_slice(&0f32.to_le_bytes()));
    let file = folder.convert(None).unwrap();
    let of = |name: &str| file.tensors().iter().find(|t| t.name == name).map(|t| t.ty);
    assert_eq!(of("blk.0.ffn_down_exps.weight"), Some(TensorType::BF16));
    assert_eq!(of("blk.0.ffn_down_exps.scale"), None);
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let config = |format: &str, field: &str, value: Value| {
        let mut checkpoint = Checkpoint::new(format);
        checkpoint.config[field] = value;
        checkpoint
    };
    let spoil = |format: &str, field: &str, value: Value, words: &[&str]| {
        config(format, field, value).fails(&[&[field], words].concat());
    };
    config("gptq_4bit", "quant_method", json!("hqq"))
        .fails(&["quantization_config", "hqq weights"]);
    spoil("gptq_4bit", "checkpoint_format", json!("marlin"), &["gptq or gptq_v2", "marlin"]);
    spoil("gptq_4bit", "rotation", json!("hadamard"), &["no rotation"]);
    spoil("awq_4bit", "version", json!("gemv"), &["gemm", "gemv"]);
    spoil("auto_round_zp", "packing_format", json!("auto_round:x"), &["auto_round:x"]);
    spoil("auto_round_zp", "packing_format", Value::Null, &["nothing"]);
    spoil("modelopt_fp8", "quant_algo", json!("W4A16_AWQ"), &["NVFP4", "W4A16_AWQ"]);
    let mixed = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "NVFP4_AWQ"}}});
    let mut checkpoint = Checkpoint::new("modelopt_fp8");
    checkpoint.config = mixed;
    checkpoint.fails(&["quantized_layers", "model.layers.0.mlp", "NVFP4_AWQ"]);
    let sparse = json!({"format": "sparse-24-bitmask"});
    spoil("ct_int8_channel", "sparsity_config", sparse, &["dense", "sparse-24"]);
    let turned = json!({"config_groups": {"u": {"type": "hadamard"}}});
    spoil("ct_int8_channel", "transform_config", turned, &["no transforms", "u"]);
    let groups = config("ct_int4_group", "config_groups", json!({}));
    groups.fails(&["weight_packed: shape", "in words of [] bits"]);
}

#[test]
fn parts_that_do_not_fit() {
    let part = |module: &str, end: &str| format!("{module}.{end}");
    let without = |format: &str, end: &str, words: &[&str]| {
        let mut checkpoint = Checkpoint::new(format);
        checkpoint.tensors.remove(&part(O_PROJ, end)).unwrap();
        checkpoint.fails(&[&[O_PROJ], words].concat());
    };
    without("gptq_4bit", "scales", &["scales too"]);
    without("gptq_4bit", "qzeros", &["qzeros too"]);
    without("ct_fp8_channel", "weight_scale", &["a scale beside 8-bit floats"]);
    without("modelopt_nvfp4", "weight_scale_2", &["weight_scale_2 or"]);
    without("torchao_fp8_row", "_weight_scale", &["_weight_scale too"]);
    without("bnb_nf4", "weight.absmax", &["absmax too"]);
    without("bnb_nf4_nested", "weight.nested_absmax", &["nested_absmax too"]);
    without("bnb_nf4", "weight.quant_state.bitsandbytes__nf4", &["name"]);
    let cut = |format: &str, end: &str| {
        let mut checkpoint = Checkpoint::new(format);
        checkpoint.change(&part(O_PROJ, end), |(_, shape, bytes)| {
            let row = bytes.len() / shape[0];
            shape[0] -= 1;
            bytes.truncate(shape[0] * row);
        });
        checkpoint.fails(&[O_PROJ, "shape"]);
    };
    for (format, end) in [
        ("gptq_4bit", "qweight"),
        ("gptq_4bit", "qzeros"),
        ("awq_4bit", "qweight"),
        ("awq_4bit", "scales"),
        ("ct_int4_group", "weight_packed"),
        ("ct_int4_asymmetric", "weight_zero_point"),
        ("ct_int8_asymmetric", "weight_zero_point"),
        ("ct_nvfp4", "weight_scale"),
        ("ct_fp8_block", "weight_scale"),
        ("bnb_nf4", "weight"),
        ("bnb_nf4", "weight.absmax"),
        ("bnb_int8", "SCB"),
        ("fbgemm_fp8", "weight_scale"),
    ] {
        cut(format, end);
    }
    let mut checkpoint = Checkpoint::new("gptq_4bit_order");
    checkpoint.change(&part(O_PROJ, "g_idx"), |(_, _, bytes)| bytes[0] = 4);
    checkpoint.fails(&[O_PROJ, "g_idx", "groups 0 to 3", "4"]);
}
