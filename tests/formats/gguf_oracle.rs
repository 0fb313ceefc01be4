//! Our GGUF reader and writer against gguf-rs 0.1.8, where gguf-rs is right; the README of
//! `tests/gguf-oracle`, the program that reads with it, says where it is not.

use common::{repo, succeed};
use moeba::gguf::{Header, OwnedArray, OwnedValue, TensorInfo, TensorType as T, Value, Writer};
use serde_json::Value as Json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Types whose size gguf-rs gets wrong, with the bytes that it finds in 768 elements.
const WRONG_SIZES: &[(T, u64)] = &[
    (T::Q8_1, 960),
    (T::IQ4_NL, 54),
    (T::I8, 3),
    (T::I16, 6),
    (T::I32, 12),
    (T::I64, 24),
    (T::F64, 24),
    (T::BF16, 6),
    (T::MXFP4, 819),
];

/// Types that make gguf-rs panic.
const PANICS: [T; 4] = [T::NVFP4, T::Q1_0, T::Q2_0, T::F8_E4M3];

/// The values that gguf-rs reads from a file; null where it panics.
fn theirs(path: &Path) -> Json {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").expect("cargo runs the tests");
        let mut build = Command::new(cargo);
        build.args(["build", "--locked", "--manifest-path"]);
        build.arg(repo().join("tests/gguf-oracle/Cargo.toml"));
        // A target folder of its own: cargo holds a lock on the one that this test was built in.
        let target = repo().join("target/gguf-oracle");
        succeed(build.env("CARGO_TARGET_DIR", &target));
        target.join("debug/gguf-oracle")
    });
    let output = succeed(Command::new(program).arg(path));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Whether the two values are the same, as far as JSON can tell.
fn same(ours: Value<'_>, theirs: &Json) -> bool {
    let number = || theirs.to_string();
    match ours {
        // Tokens that are not UTF-8 lose their bytes there.
        Value::String(s) => theirs.as_str() == Some(&*String::from_utf8_lossy(s)),
        Value::Bool(b) => theirs.as_bool() == Some(b),
        // JSON has neither NaN nor infinity.
        Value::F32(x) if !x.is_finite() => theirs.is_null(),
        Value::F64(x) if !x.is_finite() => theirs.is_null(),
        Value::F32(x) => number().parse() == Ok(x),
        Value::F64(x) => number().parse() == Ok(x),
        Value::U64(n) => theirs.as_u64() == Some(n),
        Value::Array(array) => {
            let Some(list) = theirs.as_array() else { return false };
            array.len() == list.len() && array.iter().zip(list).all(|(a, b)| same(a, b))
        }
        integer => theirs.is_i64() && integer.as_i64() == theirs.as_i64(),
    }
}

fn compare_tensor(t: &TensorInfo, theirs: &Json, data_offset: u64) {
    let number = |key: &str| theirs[key].as_u64().unwrap();
    assert_eq!(theirs["name"], t.name);
    assert_eq!(number("type"), u64::from(t.ty.id()), "{}", t.name);
    assert_eq!(theirs["dims"], Json::from(t.dims.to_vec()), "{}", t.name);
    assert_eq!(t.file_offset, data_offset + number("offset"), "{}", t.name);
    let n_bytes = number("n_bytes");
    match WRONG_SIZES.iter().find(|(ty, _)| *ty == t.ty) {
        None => assert_eq!(t.n_bytes, n_bytes, "{}", t.name),
        // So that we learn when it is put right.
        Some((_, wrong)) if t.n_elements() == 768 => assert_eq!(n_bytes, *wrong, "{}", t.name),
        Some(_) => assert_ne!(t.n_bytes, n_bytes, "{}", t.name),
    }
}

fn compare(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let ours = Header::parse(path, &bytes, bytes.len() as u64).unwrap();
    let theirs = theirs(path);
    assert_eq!(theirs["version"], format!("v{}", ours.version));
    assert_eq!(theirs["alignment"], ours.alignment);
    assert_eq!(theirs["data_offset"], ours.data_offset);
    assert_eq!(theirs["n_keys"], ours.metadata.iter(&bytes).count());
    for (key, value) in ours.metadata.iter(&bytes) {
        let found = &theirs["metadata"][key];
        assert!(same(value, found), "{key}: {value:?} and {found}");
    }
    let tensors = theirs["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), ours.tensors.len());
    for (a, b) in ours.tensors.iter().zip(tensors) {
        compare_tensor(a, b, ours.data_offset);
    }
}

#[test]
fn fixtures_read_alike() {
    for name in [
        "kinds.gguf",
        "version2.gguf",
        "no_tensors.gguf",
        "split-00001-of-00003.gguf",
        "split-00002-of-00003.gguf",
        "split-00003-of-00003.gguf",
    ] {
        compare(&repo().join("tests/fixtures/gguf").join(name));
    }
}

#[test]
fn the_demo_models_read_alike() {
    let entries = fs::read_dir(repo().join("models/demo")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "gguf")).for_each(|p| compare(&p));
}

/// A file by our writer: these types, and some metadata.
fn written(folder: &Path, types: &[T]) -> PathBuf {
    let path = folder.join("written.gguf");
    let mut writer = Writer::create(&path, Some(64)).unwrap();
    writer.set("general.architecture", "llama").unwrap();
    writer.set("tokens", OwnedValue::Array(OwnedArray::String(vec![vec![], vec![0xe2]]))).unwrap();
    writer.set("scores", vec![0.25f32, -1e-9]).unwrap();
    for ty in types {
        writer.declare(ty.name(), &[256, 3], *ty).unwrap();
    }
    for t in writer.tensors().to_vec() {
        writer.write_tensor(&t.name, &vec![1; t.n_bytes as usize]).unwrap();
    }
    writer.finish().unwrap();
    path
}

#[test]
fn what_we_write_reads_alike() {
    let dir = tempfile::tempdir().unwrap();
    let types: Vec<T> = T::all().filter(|ty| !PANICS.contains(ty)).collect();
    compare(&written(dir.path(), &types));
}

#[test]
fn gguf_rs_still_panics_where_we_do_not() {
    let dir = tempfile::tempdir().unwrap();
    for ty in PANICS {
        let path = written(dir.path(), &[ty]);
        assert!(moeba::gguf::Gguf::open(&path).is_ok());
        assert!(theirs(&path).is_null(), "{ty}");
    }
}
