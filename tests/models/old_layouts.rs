//! Layouts of model files that converters no longer write, or that others write.

use std::path::Path;

use common::edits::{File, Tensor};
use common::{convert_golden, moeba};
use moeba::engine::{Engine, EngineOptions};

fn logits(path: &Path) -> Vec<f32> {
    let options = EngineOptions { n_threads: Some(1), ..EngineOptions::default() };
    let engine = Engine::load(path, &options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"));
    let tokens: Vec<u32> = (5..45).collect();
    let mut all = Vec::new();
    let mut take = |_, l: &mut [f32]| all.extend_from_slice(l);
    engine.new_session().unwrap().eval_all(&tokens, &mut take).unwrap();
    all
}

/// Each head's keys [rank, nope] transposed, then its values [value, rank].
fn joined(keys: &Tensor, values: &Tensor, name: &str) -> Tensor {
    let [nope, rank, n_head] = keys.dims[..] else { panic!("{:?}", keys.dims) };
    let [_, value, _] = values.dims[..] else { panic!("{:?}", values.dims) };
    let (k, v) = (keys.f32s(), values.f32s());
    let mut all = Vec::new();
    for head in 0..n_head {
        for i in 0..nope {
            all.extend((0..rank).map(|r| k[((head * rank + r) * nope + i) as usize]));
        }
        all.extend(&v[(head * value * rank) as usize..((head + 1) * value * rank) as usize]);
    }
    Tensor::of(name, &[rank, n_head * (nope + value)], &all)
}

/// Until April 2025 latent attention's up-projections were one tensor, and the plain keys gave the
/// widths of heads.
#[test]
fn keys_and_values_of_latent_attention_in_one_tensor() {
    let dir = tempfile::tempdir().unwrap();
    for golden in ["deepseek_v2_lite", "deepseek_v3"] {
        let split = convert_golden(golden, "f32", dir.path());
        let mut file = File::read(&split);
        for layer in 0.. {
            let name = |part: &str| format!("blk.{layer}.attn_{part}.weight");
            if !file.tensors.iter().any(|t| t.name == name("k_b")) {
                assert!(layer > 0);
                break;
            }
            let (keys, values) = (file.take(&name("k_b")), file.take(&name("v_b")));
            file.tensors.push(joined(&keys, &values, &name("kv_b")));
        }
        let key = |key: &str| format!("deepseek2.attention.{key}");
        let value_of = |file: &File, key: &str| {
            file.keys.iter().find(|(k, _)| k == key).unwrap_or_else(|| panic!("{key}")).1.clone()
        };
        for (old, new) in [
            ("key_length", "key_length_mla"),
            ("value_length", "value_length_mla"),
            ("head_count_kv", "head_count"),
        ] {
            let value = value_of(&file, &key(new));
            file.set(&key(old), value);
        }
        file.drop_key(&key("key_length_mla"));
        file.drop_key(&key("value_length_mla"));
        let old = dir.path().join("old.gguf");
        file.write(&old);
        let (expected, got) = (logits(&split), logits(&old));
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        let worst = expected.iter().zip(&got).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 1e-5 * largest, "{golden}: off by {worst} of {largest}");
    }
}

/// Until April 2024 each expert had tensors of its own; llama.cpp does not read them any more
/// either.
#[test]
fn a_tensor_an_expert_is_to_be_converted_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::read(&convert_golden("mixtral", "f32", dir.path()));
    for part in ["gate", "up", "down"] {
        let all = file.take(&format!("blk.1.ffn_{part}_exps.weight"));
        let [cols, rows, n] = all.dims[..] else { panic!("{:?}", all.dims) };
        for (e, values) in all.f32s().chunks_exact((cols * rows) as usize).enumerate() {
            let name = format!("blk.1.ffn_{part}.{e}.weight");
            file.tensors.push(Tensor::of(&name, &[cols, rows], values));
        }
        assert_eq!(n, 8);
    }
    let old = dir.path().join("old.gguf");
    file.write(&old);
    let mut run = moeba();
    run.arg("logits").arg(&old).args(["--tokens", "1,2", "-o"]).arg(dir.path().join("l.npy"));
    let output = run.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    for part in ["old.gguf", "blk.1.ffn_up.0.weight", "ffn_up_exps", "convert the model again"] {
        assert!(stderr.contains(part), "{part:?} is not in {stderr}");
    }
}

/// llama.cpp's converter writes Qwen 4's matrices of one input as one, and reads both forms.
#[test]
fn matrices_of_one_input_in_one_tensor() {
    let dir = tempfile::tempdir().unwrap();
    for outtype in ["f32", "q8_0"] {
        let apart = convert_golden("qwen4exp", outtype, dir.path());
        let mut file = File::read(&apart);
        let mut n_joined = 0;
        for (both, first, second) in [
            ("attn_qkv_gate", "attn_qkv", "attn_gate"),
            ("ssm_beta_alpha", "ssm_beta", "ssm_alpha"),
            ("hc_attn_down_inject", "hc_attn_down", "hc_attn_inject"),
            ("hc_ffn_down_inject", "hc_ffn_down", "hc_ffn_inject"),
        ] {
            for layer in 0..8 {
                let name = |part: &str| format!("blk.{layer}.{part}.weight");
                let find = |part: &str| file.tensors.iter().find(|t| t.name == name(part));
                match (find(first), find(second)) {
                    (Some(first), Some(second)) if first.ty == second.ty => (),
                    _ => continue,
                }
                let (mut all, after) = (file.take(&name(first)), file.take(&name(second)));
                all.name = name(both);
                all.dims[1] += after.dims[1];
                all.bytes.extend(after.bytes);
                file.tensors.push(all);
                n_joined += 1;
            }
        }
        assert!(n_joined >= 8, "{n_joined}");
        let joined = dir.path().join("joined.gguf");
        file.write(&joined);
        let (expected, got) = (logits(&apart), logits(&joined));
        assert!(expected == got, "{outtype}: the very bits");
        // The first rows of another width.
        let broken = file.tensors.iter_mut().find(|t| t.name.contains("down_inject")).unwrap();
        broken.dims[1] -= 1;
        let row = broken.bytes.len() / (broken.dims[1] + 1) as usize;
        broken.bytes.truncate(broken.bytes.len() - row);
        file.write(&joined);
        let refused = Engine::load(&joined, &EngineOptions::default(), &mut |_| ());
        let Err(refused) = refused else { panic!("{outtype}") };
        assert!(refused.to_string().contains("down_inject.weight: expected shape"), "{refused}");
    }
}

/// Pruned models of llama.cpp 0.8.0 may have fewer experts in some layers.
#[test]
fn layers_with_other_numbers_of_experts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::read(&convert_golden("nemotron_h_moe", "f32", dir.path()));
    let router = file.tensors.iter_mut().find(|t| t.name.ends_with("ffn_gate_inp.weight")).unwrap();
    let row = router.bytes.len() / router.dims[1] as usize;
    router.dims[1] -= 1;
    router.bytes.truncate(router.bytes.len() - row);
    let path = dir.path().join("pruned.gguf");
    file.write(&path);
    let refused = Engine::load(&path, &EngineOptions::default(), &mut |_| ());
    let Err(refused) = refused else { panic!("it loads") };
    let refused = refused.to_string();
    assert!(refused.contains("nemotron_h_moe.expert_count is the number of experts"), "{refused}");
}
