//! Granule-major files: the same bits as standard files, there and back, and whatever is wrong
//! with one said in a sentence. llama.cpp does not read them.

use std::path::{Path, PathBuf};

use common::{Npy, convert_golden, moeba, repo, set_small_header, succeed};
use moeba::gguf::{Gguf, OwnedValue, TensorType, Writer};

const GOLDEN: [&str; 8] = [
    "llama",
    "llama3_rope",
    "llama_tied",
    "mixtral",
    "qwen2moe",
    "qwen2moe_mixed",
    "qwen3moe",
    "qwen3moe_mixed",
];

fn quantize(input: &Path, name: &str, ty: &str, layout: &str) -> PathBuf {
    let out = input.with_file_name(name);
    let mut command = moeba();
    command.arg("quantize").arg(input).arg(&out).args([ty, "--layout", layout]);
    succeed(&mut command);
    out
}

/// The bits of all logits, and the chosen experts.
fn logits(model: &Path, tokens: &str) -> (Vec<u32>, Vec<i32>) {
    let (out, chosen) = (model.with_extension("npy"), model.with_extension("experts.npy"));
    let mut command = moeba();
    command.arg("logits").arg(model).args(["--tokens", tokens, "-t", "2", "-o"]).arg(&out);
    succeed(command.arg("--experts").arg(&chosen));
    let bits = Npy::read(&out).f32s().iter().map(|x| x.to_bits()).collect();
    (bits, Npy::read(&chosen).i32s())
}

fn granule_tensors(gguf: &Gguf) -> usize {
    gguf.tensors().iter().filter(|t| t.name.contains("ffn_granule_exps")).count()
}

fn same_tensors(a: &Path, b: &Path) {
    let (a, b) = (Gguf::open(a).unwrap(), Gguf::open(b).unwrap());
    assert_eq!(a.tensors().len(), b.tensors().len());
    for t in a.tensors() {
        let other = b.require_tensor(&t.name).unwrap();
        assert_eq!((&t.dims, t.ty), (&other.dims, other.ty), "{}", t.name);
        assert!(a.bytes(t) == b.bytes(other), "{}", t.name);
    }
}

#[track_caller]
fn same_file(a: &Path, b: &Path) {
    assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap(), "{a:?} {b:?}");
}

#[test]
fn golden_checkpoints_say_the_same_in_both_layouts() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = (0..40).map(|i| (i * 37 % 300 + 3).to_string()).collect::<Vec<_>>().join(",");
    for name in GOLDEN {
        for outtype in ["f32", "q8_0"] {
            let standard = convert_golden(name, outtype, dir.path());
            let granule = dir.path().join("granule.gguf");
            let mut command = moeba();
            command.arg("convert").arg(common::golden(name)).arg("-o");
            command.arg(&granule).args(["--outtype", outtype, "--layout", "granule"]);
            // The name of a model is that of its folder, not of its file.
            succeed(&mut command);
            assert_eq!(logits(&standard, &tokens), logits(&granule, &tokens), "{name} {outtype}");

            let is_moe = Gguf::open(&standard).unwrap().tensors().iter().any(|t| t.dims.len() == 3);
            assert_eq!(granule_tensors(&Gguf::open(&granule).unwrap()) > 0, is_moe, "{name}");
            let relaid = quantize(&standard, "relaid.gguf", "copy", "granule");
            same_file(&relaid, &granule);
            let back = quantize(&granule, "back.gguf", "copy", "standard");
            same_tensors(&back, &standard);
        }
    }
}

#[test]
fn the_demo_model_says_the_same_in_all_types() {
    let dir = tempfile::tempdir().unwrap();
    let demo = dir.path().join("demo.gguf");
    std::fs::copy(repo().join("models/demo/moeba-demo.gguf"), &demo).unwrap();
    let tokens = (0..64).map(|i| (i * 53 % 8000 + 3).to_string()).collect::<Vec<_>>().join(",");
    let mut types = vec![(demo.clone(), "copy")];
    for ty in ["q4_k_m", "q6_k"] {
        let out = dir.path().join(format!("{ty}.gguf"));
        let mut command = moeba();
        command.arg("quantize").arg(&demo).arg(&out).args([ty, "--allow-requantize"]);
        succeed(&mut command);
        types.push((out, ty));
    }
    for (standard, ty) in types {
        let granule = quantize(&standard, "granule.gguf", ty, "granule");
        assert_eq!(logits(&standard, &tokens), logits(&granule, &tokens), "{ty}");
        same_tensors(&quantize(&granule, "back.gguf", "copy", "standard"), &standard);
    }
}

const N_EMBD: u64 = 256;
/// 19 blocks of 256: no number of granules is of one size but 1 and 19.
const N_FF: u64 = 19 * 256;
const N_EXPERTS: u64 = 3;

/// A model of one layer whose experts are large enough to be cut.
fn wide(dir: &Path) -> PathBuf {
    let path = dir.join("wide.gguf");
    let mut out = Writer::create(&path, None).unwrap();
    let numbers = [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", N_EMBD as u32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("expert_count", N_EXPERTS as u32),
        ("expert_used_count", 2),
    ];
    set_small_header(&mut out, &numbers);
    let shapes: [(&str, &[u64]); 14] = [
        ("token_embd", &[N_EMBD, 256]),
        ("output_norm", &[N_EMBD]),
        ("output", &[N_EMBD, 256]),
        ("blk.0.attn_norm", &[N_EMBD]),
        ("blk.0.attn_q", &[N_EMBD, 256]),
        ("blk.0.attn_k", &[N_EMBD, 128]),
        ("blk.0.attn_v", &[N_EMBD, 128]),
        ("blk.0.attn_q_norm", &[64]),
        ("blk.0.attn_k_norm", &[64]),
        ("blk.0.attn_output", &[256, N_EMBD]),
        ("blk.0.ffn_norm", &[N_EMBD]),
        ("blk.0.ffn_gate_inp", &[N_EMBD, N_EXPERTS]),
        // Down before gate: a file's order is its own.
        ("blk.0.ffn_down_exps", &[N_FF, N_EMBD, N_EXPERTS]),
        ("blk.0.ffn_gate_exps", &[N_EMBD, N_FF, N_EXPERTS]),
    ];
    let up: (&str, &[u64]) = ("blk.0.ffn_up_exps", &[N_EMBD, N_FF, N_EXPERTS]);
    let shapes: Vec<_> = shapes.into_iter().chain([up]).collect();
    for (name, dims) in &shapes {
        out.declare(&format!("{name}.weight"), dims, TensorType::F32).unwrap();
    }
    let mut random = 1u64;
    for (name, dims) in &shapes {
        let mut value = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let spread = (random >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            if name.contains("norm") { 1.0 + spread } else { spread / 4.0 }
        };
        let n = dims.iter().product::<u64>();
        let bytes: Vec<u8> = (0..n).flat_map(|_| value().to_le_bytes()).collect();
        out.write_tensor(&format!("{name}.weight"), &bytes).unwrap();
    }
    out.finish().unwrap();
    path
}

#[test]
fn experts_of_many_granules_say_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let wide = wide(dir.path());
    for (ty, n_granules) in [("f32", 19), ("q8_0", 4), ("q4_k_m", 4), ("q6_k", 4)] {
        let standard = quantize(&wide, "standard.gguf", ty, "standard");
        let granule = quantize(&wide, "granule.gguf", ty, "granule");
        assert_eq!(logits(&standard, "1,2,3,4,5,6,7"), logits(&granule, "1,2,3,4,5,6,7"), "{ty}");
        same_tensors(&quantize(&granule, "back.gguf", "copy", "standard"), &standard);

        let (of_standard, of_granule) = (inspect(&standard), inspect(&granule));
        assert_eq!(of_standard["experts"], of_granule["experts"], "{ty}");
        assert_eq!(of_granule["experts"][0]["n_granules"], n_granules, "{ty}");
        let layouts = (of_standard["layout"].as_str(), of_granule["layout"].as_str());
        assert_eq!(layouts, (Some("standard"), Some("granule")));
        // From granules, a type like any other.
        let via = quantize(&granule, "via.gguf", ty, "granule");
        same_file(&via, &granule);
    }
    // Quantised from granules as from the standard file.
    let granule = quantize(&wide, "granule.gguf", "copy", "granule");
    let via = quantize(&granule, "via.gguf", "q4_k_m", "granule");
    let direct = quantize(&wide, "direct.gguf", "q4_k_m", "granule");
    same_file(&via, &direct);
}

fn inspect(model: &Path) -> serde_json::Value {
    let output = succeed(moeba().arg("inspect").arg(model).args(["--json", "--check"]));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks the position of every granule of a file, from outside.
#[test]
fn granules_are_aligned_and_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let wide = wide(dir.path());
    let path = quantize(&wide, "granule.gguf", "q4_k_m", "granule");
    let file = Gguf::open(&path).unwrap();
    assert_eq!(file.u32("general.alignment").unwrap(), Some(4096));
    assert_eq!(file.str("moeba.layout").unwrap(), Some("granule"));
    let types = |part| file.require_u32s(&format!("moeba.granule.{part}_types")).unwrap();
    // Q4_K, Q4_K and, in the first layer, Q6_K.
    assert_eq!((types("gate"), types("up"), types("down")), (vec![12], vec![12], vec![14]));
    assert_eq!(file.require_u32s("moeba.granule.feed_forward_lengths").unwrap(), [N_FF as u32]);
    assert_eq!(file.require_u32s("moeba.granule.rows").unwrap(), [5 * 256]);
    let t = file.require_tensor("blk.0.ffn_granule_exps.weight").unwrap();
    assert_eq!((t.ty, t.dims[1]), (TensorType::I8, N_EXPERTS));
    assert!(t.file_offset.is_multiple_of(4096) && t.dims[0].is_multiple_of(4096));
}

/// The experts of the wide model in f32 as their tensor should have them, by hand.
fn woven(wide: &Path, rows: usize) -> Vec<u8> {
    let file = Gguf::open(wide).unwrap();
    let bytes = |part: &str| file.bytes(file.tensor(&format!("blk.0.{part}.weight")).unwrap());
    let (n_embd, n_ff) = (N_EMBD as usize, N_FF as usize);
    let mut out = Vec::new();
    for expert in 0..N_EXPERTS as usize {
        let matrix = |part| &bytes(part)[expert * 4 * n_embd * n_ff..][..4 * n_embd * n_ff];
        for start in (0..n_ff).step_by(rows) {
            let end = (start + rows).min(n_ff);
            for part in ["ffn_gate_exps", "ffn_up_exps"] {
                out.extend(&matrix(part)[4 * n_embd * start..4 * n_embd * end]);
            }
            for row in matrix("ffn_down_exps").chunks_exact(4 * n_ff) {
                out.extend(&row[4 * start..4 * end]);
            }
            out.resize(out.len().next_multiple_of(4096), 0);
        }
    }
    out
}

/// A file whose cut is another version's does not run, but can be cut again.
#[test]
fn an_old_cut_can_be_brought_up_to_date() {
    let dir = tempfile::tempdir().unwrap();
    let wide = wide(dir.path());
    let granule = quantize(&wide, "granule.gguf", "copy", "granule");
    let name = "blk.0.ffn_granule_exps.weight";
    let file = Gguf::open(&granule).unwrap();
    assert!(file.bytes(file.tensor(name).unwrap()) == woven(&wide, 256));

    let bytes = woven(&wide, 512 + 32);
    let dims = [bytes.len() as u64 / N_EXPERTS, N_EXPERTS];
    let old = dir.path().join("old.gguf");
    let mut out = Writer::create(&old, Some(4096)).unwrap();
    for (key, value) in file.keys().filter(|(key, _)| *key != "general.alignment") {
        match key {
            "moeba.granule.rows" => out.set(key, vec![512u32 + 32]).unwrap(),
            _ => out.set(key, value).unwrap(),
        }
    }
    for t in file.tensors() {
        let dims = if t.name == name { &dims[..] } else { &t.dims };
        out.declare(&t.name, dims, t.ty).unwrap();
    }
    for t in file.tensors() {
        out.write_tensor(&t.name, if t.name == name { &bytes } else { file.bytes(t) }).unwrap();
    }
    out.finish().unwrap();
    refused(&old, &["moeba.granule.rows", "expected 256", "quantize IN OUT copy", "got 544"]);
    same_file(&quantize(&old, "new.gguf", "copy", "granule"), &granule);
}

/// A change to a sound file.
enum Edit {
    Set(&'static str, OwnedValue),
    Drop(&'static str),
    DropTensor(&'static str),
    /// Declares another type and shape.
    Declare(TensorType, [u64; 2]),
    /// Writes the file with this alignment.
    Align(u32),
}

fn edited(source: &Path, edit: &Edit) -> PathBuf {
    let gguf = Gguf::open(source).unwrap();
    let path = source.with_file_name("edited.gguf");
    let alignment = if let Edit::Align(n) = edit { *n } else { 4096 };
    let mut out = Writer::create(&path, Some(alignment)).unwrap();
    for (key, value) in gguf.keys().filter(|(key, _)| *key != "general.alignment") {
        match edit {
            Edit::Set(k, new) if *k == key => out.set(key, new.clone()).unwrap(),
            Edit::Drop(k) if *k == key => (),
            _ => out.set(key, OwnedValue::from(value)).unwrap(),
        }
    }
    let kept = |t: &&moeba::gguf::TensorInfo| !matches!(edit, Edit::DropTensor(n) if *n == t.name);
    for t in gguf.tensors().iter().filter(kept) {
        match edit {
            Edit::Declare(ty, dims) if t.name == TENSOR => out.declare(TENSOR, dims, *ty).unwrap(),
            _ => out.declare(&t.name, &t.dims, t.ty).unwrap(),
        };
    }
    for t in out.tensors().to_vec() {
        let bytes = gguf.bytes(gguf.require_tensor(&t.name).unwrap());
        out.write_tensor(&t.name, &bytes[..t.n_bytes as usize]).unwrap();
    }
    out.finish().unwrap();
    path
}

const TENSOR: &str = "blk.1.ffn_granule_exps.weight";

#[test]
fn bad_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let sound = convert_golden("qwen3moe", "q8_0", dir.path());
    let sound = quantize(&sound, "sound.gguf", "copy", "granule");
    let gguf = Gguf::open(&sound).unwrap();
    let dims = gguf.require_tensor(TENSOR).unwrap().dims.clone();
    let set = |key, numbers: [u32; 3]| Edit::Set(key, numbers.to_vec().into());
    let rows = gguf.require_u32s("moeba.granule.rows").unwrap()[1];
    let n_ff = [rows; 3];
    let cases: Vec<(Edit, &[&str])> = vec![
        (Edit::Drop("moeba.layout"), &["moeba.layout", "expected \"granule\"", "got nothing"]),
        (Edit::Set("moeba.layout", "woven".into()), &["moeba.layout", "or no such key", "woven"]),
        (Edit::Drop("moeba.granule.up_types"), &["moeba.granule.up_types", "got nothing"]),
        (Edit::Drop("moeba.granule.rows"), &["moeba.granule.rows", "got nothing"]),
        (Edit::Drop("moeba.granule.feed_forward_lengths"), &["feed_forward_lengths", "nothing"]),
        (
            Edit::Set("moeba.granule.rows", vec![rows; 2].into()),
            &["moeba.granule.rows", "3 numbers", "got 2"],
        ),
        (set("moeba.granule.down_types", [8, 99, 8]), &["down_types", "layer 1", "got 99"]),
        (set("moeba.granule.down_types", [8, 12, 8]), &["feed_forward_lengths", "Q4_K"]),
        (set("moeba.granule.gate_types", [8, 24, 8]), &[TENSOR, "one of the types F32", "I8"]),
        (set("moeba.granule.gate_types", [8, 0, 8]), &[TENSOR, "shape", "at least"]),
        (set("moeba.granule.rows", [rows, 32, rows]), &["rows", "this version cuts", "got 32"]),
        (set("moeba.granule.rows", [rows, 33, rows]), &["rows", "a multiple of 32", "got 33"]),
        (
            set("moeba.granule.feed_forward_lengths", [n_ff[0], 0, n_ff[2]]),
            &["feed_forward_lengths", TENSOR, "got none"],
        ),
        (Edit::DropTensor(TENSOR), &[TENSOR, "expected a tensor"]),
        (Edit::Declare(TensorType::I8, [4096, dims[1]]), &[TENSOR, "shape", "at least", "[4096"]),
        (Edit::Declare(TensorType::I8, [dims[0], dims[1] - 1]), &[TENSOR, "experts, got"]),
        (Edit::Declare(TensorType::I16, [dims[0] / 2, dims[1]]), &[TENSOR, "type", "I8", "I16"]),
        (Edit::Align(32), &["blk.0.ffn_granule_exps.weight", "4096", "general.alignment"]),
    ];
    for (edit, parts) in cases {
        let broken = edited(&sound, &edit);
        refused(&broken, parts);
    }
}

/// `logits` ends with exit code 1 and one sentence that names the file and has all `parts`.
#[track_caller]
fn refused(model: &Path, parts: &[&str]) {
    let mut command = moeba();
    command.arg("logits").arg(model).args(["--tokens", "1,2", "-o"]);
    let output = command.arg(model.with_extension("npy")).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{parts:?}: {stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|l| l.contains("error: ")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    let file = model.file_name().unwrap().to_str().unwrap();
    for part in parts.iter().chain(&[file]) {
        assert!(errors[0].contains(part), "{part:?} is not in {:?}", errors[0]);
    }
}

#[test]
fn weights_that_are_no_numbers_are_found_in_granules_too() {
    let dir = tempfile::tempdir().unwrap();
    let standard = convert_golden("mixtral", "f32", dir.path());
    let path = quantize(&standard, "granule.gguf", "copy", "granule");
    let t = Gguf::open(&path).unwrap().require_tensor(TENSOR).unwrap().clone();
    let mut bytes = std::fs::read(&path).unwrap();
    let at = (t.file_offset + t.dims[0]) as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let output = moeba().arg("inspect").arg(&path).arg("--check").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    for part in [TENSOR, "gate of expert 1, granule 0", "NaN", "granule.gguf"] {
        assert!(stderr.contains(part), "{part:?} is not in {stderr}");
    }
}
