//! A second opinion on a file: the crate gguf-rs reads it as well, and has to find the tensors and
//! keys that `Gguf` has found. Sizes in bytes are not compared, as it gets those of some types
//! wrong (`tests/gguf-oracle/README.md`).

use super::{Gguf, Shard, TensorInfo, TensorType};
use crate::{Error, Result};
use gguf_rs::{GGUFModel, get_gguf_container_array_size};
use std::fmt::Display;
use std::panic::catch_unwind;

/// Types that gguf-rs 0.1.8 does not know.
const UNKNOWN: [TensorType; 4] =
    [TensorType::NVFP4, TensorType::Q1_0, TensorType::Q2_0, TensorType::F8_E4M3];

/// Elements of an array of metadata that are read: none is compared.
const N_ELEMENTS: u64 = 3;

/// A clause with gguf-rs's reading of all files of a model. Fails where it contradicts ours.
pub fn second_opinion(gguf: &Gguf) -> Result<String> {
    if let Some(tensor) = gguf.tensors().iter().find(|tensor| UNKNOWN.contains(&tensor.ty)) {
        return Ok(format!("gguf-rs does not know the type {}", tensor.ty.name()));
    }
    for (number, shard) in gguf.shards().iter().enumerate() {
        let own: Vec<&TensorInfo> =
            gguf.tensors().iter().filter(|tensor| tensor.shard == number).collect();
        let theirs = read(shard)?;
        compare(shard, &theirs, &own)?;
        if number == 0 {
            let keys = gguf.keys().filter(|(key, _)| !theirs.metadata().contains_key(*key));
            same(shard, "keys that it lacks", keys.count(), 0)?;
        }
    }
    Ok(format!("gguf-rs finds the same {} tensors", gguf.tensors().len()))
}

fn read(shard: &Shard) -> Result<GGUFModel> {
    let path = shard.path();
    let failed = |why: &dyn Display| {
        Error::invalid(format!("{}: gguf-rs cannot read it: {why}", path.display()))
    };
    let name = path.to_str().ok_or_else(|| failed(&"its name is not UTF-8"))?;
    let model = catch_unwind(|| get_gguf_container_array_size(name, N_ELEMENTS)?.decode());
    model.map_err(|_| failed(&"it panics"))?.map_err(|e| failed(&e))
}

fn compare(shard: &Shard, theirs: &GGUFModel, own: &[&TensorInfo]) -> Result<()> {
    same(shard, "tensors", theirs.tensors().len(), own.len())?;
    for (a, b) in theirs.tensors().iter().zip(own) {
        same(shard, "a tensor", &*a.name, &*b.name)?;
        let field = |what: &str| format!("the {what} of {}", b.name);
        same(shard, &field("type"), u64::from(a.kind), u64::from(b.ty.id()))?;
        same(shard, &field("shape"), format!("{:?}", a.shape), format!("{:?}", &*b.dims))?;
        same(shard, &field("place"), theirs.data_offset() + a.offset, b.file_offset)?;
    }
    Ok(())
}

fn same<T: PartialEq + Display>(shard: &Shard, what: &str, theirs: T, ours: T) -> Result<()> {
    match theirs == ours {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{}: {what}: gguf-rs reads {theirs}, moeba {ours}",
            shard.path().display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn file(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
    }

    #[test]
    fn both_read_the_demo_model_and_split_files() {
        for name in [
            "models/demo/moeba-demo.gguf",
            "tests/fixtures/gguf/split-00001-of-00003.gguf",
            "tests/fixtures/gguf/version2.gguf",
        ] {
            let gguf = Gguf::open(file(name)).unwrap();
            let expected = format!("gguf-rs finds the same {} tensors", gguf.tensors().len());
            assert_eq!(second_opinion(&gguf).unwrap(), expected);
        }
    }

    /// A file that is another one by the time that gguf-rs reads it.
    #[test]
    fn a_difference_is_told_with_both_readings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        fs::copy(file("models/demo/moeba-demo.gguf"), &path).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let other = folder.path().join("y.gguf");
        fs::copy(file("tests/fixtures/gguf/version2.gguf"), &other).unwrap();
        fs::rename(&other, &path).unwrap();
        let why = second_opinion(&gguf).unwrap_err().to_string();
        assert!(why.contains("x.gguf: tensors: gguf-rs reads"), "{why}");
        fs::write(&path, "GGUX").unwrap();
        let why = second_opinion(&gguf).unwrap_err().to_string();
        assert!(why.contains("gguf-rs cannot read it"), "{why}");
    }
}
