//! Importance matrices: both formats as llama-imatrix writes them (tests/fixtures/convert), each
//! matrix of a stack with columns of its own, and what is wrong with a file in one sentence.

use std::path::{Path, PathBuf};

use moeba::convert::{ConvertOptions, Imatrix, Mix, QuantizeOptions, convert, quantize};
use moeba::gguf::{Gguf, TensorType, Writer};
use moeba::quant;
use serde_json::Value as Json;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/convert").join(name)
}

/// The golden Qwen 3 MoE (64 columns, eight experts) in f32.
fn model(folder: &TempDir) -> PathBuf {
    let output = folder.path().join("f32.gguf");
    let golden = common::golden("qwen3moe");
    let mix = Some(Mix::F32);
    convert(&ConvertOptions { folder: golden, output: output.clone(), mix, ..Default::default() })
        .unwrap();
    output
}

/// Quantises the model to OUT.gguf beside it.
fn quantized(
    folder: &TempDir,
    ty: &str,
    imatrix: Option<&Path>,
) -> Result<(Gguf, Gguf), moeba::Error> {
    let (input, output) = (model(folder), folder.path().join("out.gguf"));
    quantize(&QuantizeOptions {
        input: input.clone(),
        output: output.clone(),
        mix: Mix::from_name(ty),
        imatrix: imatrix.map(Into::into),
        ..Default::default()
    })?;
    Ok((Gguf::open(input)?, Gguf::open(output)?))
}

/// A GGUF imatrix of the one tensor NAME.
fn imatrix_of(folder: &TempDir, name: &str, sums: &[f32], counts: &[f32]) -> PathBuf {
    let path = folder.path().join("made.imatrix");
    let mut writer = Writer::create(&path, None).unwrap();
    writer.set("general.type", "imatrix").unwrap();
    let (n, matrices) = (sums.len() as u64, counts.len() as u64);
    let (sums_name, counts_name) = (format!("{name}.in_sum2"), format!("{name}.counts"));
    let dims = if n % matrices == 0 { vec![n / matrices, matrices] } else { vec![n] };
    writer.declare(&sums_name, &dims, TensorType::F32).unwrap();
    writer.declare(&counts_name, &[1, matrices], TensorType::F32).unwrap();
    for (name, values) in [(sums_name, sums), (counts_name, counts)] {
        writer.begin_tensor(&name).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        writer.write(&bytes).unwrap();
        writer.end_tensor().unwrap();
    }
    writer.finish().unwrap();
    path
}

fn dims_of(gguf: &Gguf, name: &str) -> Vec<u64> {
    gguf.require_tensor(name).unwrap().dims.clone()
}

#[test]
fn both_formats_have_what_llama_imatrix_measured() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(model(&folder)).unwrap();
    let expected = std::fs::read(fixture("imatrix.json")).unwrap();
    let expected: Json = serde_json::from_slice(&expected).unwrap();
    for file in ["imatrix.gguf", "imatrix.dat"] {
        let imatrix = Imatrix::open(&fixture(file)).unwrap();
        for (name, numbers) in expected.as_object().unwrap() {
            let importance = imatrix.of(name, &dims_of(&gguf, name)).unwrap().unwrap();
            let columns = importance.columns;
            assert_eq!(columns.len() as u64, numbers[0].as_u64().unwrap(), "{file}: {name}");
            let mean = columns.iter().map(|x| f64::from(*x)).sum::<f64>() / columns.len() as f64;
            let (first, last) = (columns[0].into(), columns[columns.len() - 1].into());
            for (got, want) in [mean, first, last].into_iter().zip([1, 2, 3]) {
                let want = numbers[want].as_f64().unwrap();
                assert!((got - want).abs() <= 1e-5 * want, "{file}: {name}: {got} and {want}");
            }
        }
        assert!(imatrix.of("token_embd.weight", &[64, 96]).unwrap().is_none());
    }
}

#[test]
fn an_expert_that_met_nothing_counts_all_columns_alike() {
    let dims = [64, 64, 8];
    for file in ["imatrix.gguf", "imatrix.dat"] {
        let imatrix = Imatrix::open(&fixture(file)).unwrap();
        let importance = imatrix.of("blk.2.ffn_gate_exps.weight", &dims).unwrap().unwrap();
        let experts: Vec<&[f32]> = importance.columns.chunks_exact(64).collect();
        assert!(experts[5].iter().all(|x| *x == 1.0));
        assert!(experts[4].iter().any(|x| *x != 1.0));
    }
}

#[test]
fn each_matrix_is_quantised_with_its_own_columns() {
    let folder = tempfile::tempdir().unwrap();
    for ty in ["q4_0", "q4_k_m", "q2_k_s"] {
        let path = fixture("imatrix.gguf");
        let (from, to) = quantized(&folder, ty, Some(&path)).unwrap();
        let imatrix = Imatrix::open(&path).unwrap();
        let (mut searched, mut moved) = (0, 0);
        for tensor in to.tensors().iter().filter(|t| t.ty.block_len() > 1) {
            let source = from.require_tensor(&tensor.name).unwrap();
            let mut values = vec![0.0; source.dims.iter().product::<u64>() as usize];
            quant::dequantize(source.ty, from.bytes(source), &mut values);
            let row_len = tensor.dims[0] as usize;
            let importance = imatrix.of(&tensor.name, &tensor.dims).unwrap();
            let matrix = row_len * tensor.dims[1] as usize;
            let bytes = to.bytes(tensor);
            let matrix_bytes = bytes.len() / (values.len() / matrix);
            for (i, values) in values.chunks_exact(matrix).enumerate() {
                let columns = importance.as_ref().map(|w| &w.columns[i * row_len..][..row_len]);
                let (mut weighted, mut plain) = (vec![0; matrix_bytes], vec![0; matrix_bytes]);
                quant::quantize_weighted(tensor.ty, values, columns, row_len, &mut weighted);
                quant::quantize(tensor.ty, values, &mut plain);
                let got = &bytes[i * matrix_bytes..][..matrix_bytes];
                assert!(got == weighted, "{ty}: {} matrix {i}", tensor.name);
                searched += 1;
                moved += usize::from(weighted != plain);
            }
        }
        // The weights do something, so that the comparison above is one.
        assert!(4 * moved > 3 * searched, "{ty}: {moved} of {searched} matrices differ");
    }
}

#[test]
fn the_output_says_which_matrix_it_was() {
    let folder = tempfile::tempdir().unwrap();
    for (file, entries) in [("imatrix.gguf", 24), ("imatrix.dat", 24)] {
        let path = fixture(file);
        let (_, to) = quantized(&folder, "q4_0", Some(&path)).unwrap();
        let text = |key| to.require_str(key).unwrap();
        assert_eq!(text("quantize.imatrix.file"), path.to_str().unwrap());
        assert_eq!(text("quantize.imatrix.dataset"), "story.txt");
        assert_eq!(to.require_u32("quantize.imatrix.entries_count").unwrap(), entries);
        assert_eq!(to.require_u32("quantize.imatrix.chunks_count").unwrap(), 1);
    }
    let (_, to) = quantized(&folder, "q4_0", None).unwrap();
    assert!(to.keys().all(|(key, _)| !key.starts_with("quantize.")));
}

/// The sentence of a failed run, which must leave no output.
fn refused(folder: &TempDir, ty: &str, imatrix: Option<&Path>, parts: &[&str]) {
    let _ = std::fs::remove_file(folder.path().join("out.gguf"));
    let e = quantized(folder, ty, imatrix).map(drop).unwrap_err().to_string();
    assert!(!e.contains('\n') && e.len() < 400, "{e}");
    assert!(parts.iter().all(|part| e.contains(part)), "{e}: no {parts:?}");
    assert!(!folder.path().join("out.gguf").exists(), "{e}");
}

#[test]
fn entries_that_do_not_fit_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let name = "blk.1.ffn_up_exps.weight";
    let refuse = |sums: &[f32], counts: &[f32], parts: &[&str]| {
        let path = imatrix_of(&folder, name, sums, counts);
        refused(&folder, "q4_0", Some(&path), &[&[name, "made.imatrix"], parts].concat());
    };
    // Columns for one expert, not for eight.
    refuse(&[1.0; 64], &[1.0], &["expected 512 values", "got 64"]);
    refuse(&[1.0; 100], &[1.0; 3], &["multiple of 3", "got 100"]);
    let mut sums = [1.0; 512];
    sums[300] = f32::NAN;
    refuse(&sums, &[1.0; 8], &["finite", "NaN"]);
    sums[300] = -1.0;
    refuse(&sums, &[2.0; 8], &["not negative", "-0.5"]);
    // Where it fits, the file is taken; the embedding's size is no fault.
    imatrix_of(&folder, name, &[1.0; 512], &[1.0; 8]);
    quantized(&folder, "q4_0", Some(&folder.path().join("made.imatrix"))).unwrap();
    let path = imatrix_of(&folder, "token_embd.weight", &[1.0; 96], &[1.0]);
    quantized(&folder, "q4_0", Some(&path)).unwrap();
}

#[test]
fn types_that_are_nothing_without_importance_ask_for_it() {
    let folder = tempfile::tempdir().unwrap();
    // Rows of 64 take Q4_0 for Q2_K, which needs none: a model of wider rows is asked.
    quantized(&folder, "q2_k_s", None).unwrap();
    let input = folder.path().join("wide.gguf");
    let mut writer = Writer::create(&input, None).unwrap();
    writer.set("general.architecture", "qwen3moe").unwrap();
    for name in ["token_embd.weight", "blk.0.ffn_up.weight"] {
        writer.declare(name, &[256, 2], TensorType::F32).unwrap();
    }
    for name in ["token_embd.weight", "blk.0.ffn_up.weight"] {
        writer.begin_tensor(name).unwrap();
        writer.write(&[0; 2048]).unwrap();
        writer.end_tensor().unwrap();
    }
    writer.finish().unwrap();
    let run = |ty, imatrix: Option<&Path>| {
        quantize(&QuantizeOptions {
            input: input.clone(),
            output: folder.path().join("wide.out"),
            mix: Mix::from_name(ty),
            imatrix: imatrix.map(Into::into),
            ..Default::default()
        })
    };
    let e = run("q2_k_s", None).unwrap_err().to_string();
    assert!(e.contains("blk.0.ffn_up.weight") && e.contains("--imatrix"), "{e}");
    let e = run("q2_k_s", Some(&fixture("imatrix.dat"))).unwrap_err().to_string();
    assert!(e.contains("imatrix.dat: Q2_K of blk.0.ffn_up.weight"), "{e}");
    run("q2_k", None).unwrap();
    let path = imatrix_of(&folder, "blk.0.ffn_up.weight", &[1.0; 256], &[4.0]);
    run("q2_k_s", Some(&path)).unwrap();
}

#[test]
fn files_that_are_no_importance_matrix_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("broken.dat");
    let refuse = |bytes: &[u8], parts: &[&str]| {
        std::fs::write(&file, bytes).unwrap();
        refused(&folder, "q4_0", Some(&file), &[&["broken.dat"], parts].concat());
    };
    let whole = std::fs::read(fixture("imatrix.dat")).unwrap();
    // Cut everywhere: an error each time but where only the optional end is missing.
    let end = whole.len() - "story.txt".len() - 8;
    for cut in [4, 7, 8, 20, 30, 40, 300, end - 1, end + 2, end + 6, whole.len() - 1] {
        refuse(&whole[..cut], &["expected"]);
    }
    std::fs::write(&file, &whole[..end]).unwrap();
    quantized(&folder, "q4_0", Some(&file)).unwrap();
    refuse(b"no!", &[]);
    refuse(&[0; 64], &["number of entries", "got 0"]);
    refuse(&[255; 64], &["number of entries", "got -1"]);
    let mut huge = whole.clone();
    huge[4..8].copy_from_slice(&i32::MAX.to_le_bytes());
    refuse(&huge, &["name", "2147483647 bytes"]);
    // A model is no importance matrix.
    let path = model(&folder);
    refused(&folder, "q4_0", Some(&path), &["general.type", "imatrix", "model"]);
    refused(&folder, "q4_0", Some(Path::new("/no/such.imatrix")), &["/no/such.imatrix"]);
}
