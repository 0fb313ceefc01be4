//! Our reader and writer against gguf-rs 0.1.8, where gguf-rs is right; README.md says where it is
//! not.

use gguf_rs::{GGUFModel, get_gguf_container_array_size};
use moeba::gguf::{Header, OwnedArray, OwnedValue, TensorInfo, TensorType as T, Value, Writer};
use serde_json::Value as Json;
use std::fs;
use std::path::{Path, PathBuf};

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

/// A type that makes gguf-rs panic.
const PANICS: T = T::NVFP4;

fn theirs(path: &Path) -> GGUFModel {
    let container = get_gguf_container_array_size(path.to_str().unwrap(), u64::MAX);
    container.unwrap().decode().unwrap()
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
        Value::U64(n) => number() == n.to_string(),
        Value::Array(array) => {
            let Some(list) = theirs.as_array() else { return false };
            array.len() == list.len() && array.iter().zip(list).all(|(a, b)| same(a, b))
        }
        integer => integer.as_i64().map(|n| n.to_string()) == Some(number()),
    }
}

fn compare_tensor(t: &TensorInfo, theirs: &gguf_rs::Tensor, data_offset: u64) {
    assert_eq!(t.name, theirs.name);
    assert_eq!(t.ty.id(), theirs.kind, "{}", t.name);
    assert_eq!(t.dims, theirs.shape, "{}", t.name);
    assert_eq!(t.file_offset, data_offset + theirs.offset, "{}", t.name);
    match WRONG_SIZES.iter().find(|(ty, _)| *ty == t.ty) {
        None => assert_eq!(t.n_bytes, theirs.size, "{}", t.name),
        // So that we learn when it is put right.
        Some((_, wrong)) if t.n_elements() == 768 => assert_eq!(theirs.size, *wrong, "{}", t.name),
        Some(_) => assert_ne!(t.n_bytes, theirs.size, "{}", t.name),
    }
}

fn compare(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let ours = Header::parse(path, &bytes, bytes.len() as u64).unwrap();
    let theirs = theirs(path);
    assert_eq!(theirs.get_version(), format!("v{}", ours.version));
    assert_eq!(theirs.alignment(), ours.alignment);
    assert_eq!(theirs.data_offset(), ours.data_offset);
    assert_eq!(theirs.num_kv() as usize, ours.metadata.iter(&bytes).count());
    for (key, value) in ours.metadata.iter(&bytes) {
        let found = &theirs.metadata()[key];
        assert!(same(value, found), "{key}: {value:?} and {found}");
    }
    assert_eq!(theirs.tensors().len(), ours.tensors.len());
    for (a, b) in ours.tensors.iter().zip(theirs.tensors()) {
        compare_tensor(a, b, theirs.data_offset());
    }
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gguf")
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
        compare(&fixtures().join(name));
    }
}

#[test]
fn the_demo_models_read_alike() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let Ok(entries) = fs::read_dir(folder) else { return };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "gguf")).for_each(|p| compare(&p));
}

/// A file by our writer: all types but the one, and some metadata.
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
    let types: Vec<T> = T::all().filter(|ty| *ty != PANICS).collect();
    compare(&written(dir.path(), &types));
}

#[test]
fn gguf_rs_still_panics_where_we_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), &[PANICS]);
    assert!(moeba::gguf::Gguf::open(&path).is_ok());
    assert!(std::panic::catch_unwind(|| theirs(&path).tensors().len()).is_err());
}
