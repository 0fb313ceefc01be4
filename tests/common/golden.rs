//! The golden checkpoints. Their large files are tracked packed, as `tests/golden/pack.py` writes
//! them: bytes at even places, then bytes at odd ones, in LZMA.

use crate::{program, repo};
use flate2::read::GzDecoder;
use lzma_rust2::LzmaReader;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The folder of a golden checkpoint as the hub has it: unpacked beside the program under test,
/// once for each content.
pub fn golden(name: &str) -> PathBuf {
    let packed = repo().join("tests/golden").join(name);
    let mut files: Vec<PathBuf> = fs::read_dir(&packed)
        .unwrap_or_else(|e| panic!("{}: {e}", packed.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    let contents: Vec<Vec<u8>> = files.iter().map(|path| fs::read(path).unwrap()).collect();
    let mut sum = flate2::Crc::new();
    contents.iter().for_each(|content| sum.update(content));
    let program = program();
    let all = program.parent().unwrap().join("golden").join(format!("{:08x}", sum.sum()));
    // The name of a model is that of its folder.
    let folder = all.join(name);
    if folder.is_dir() {
        return folder;
    }
    // Several tests may do this at once: each fills a folder of its own, and one becomes it.
    fs::create_dir_all(&all).unwrap();
    let own = tempfile::tempdir_in(&all).unwrap();
    for (file, content) in files.iter().zip(&contents) {
        let name = file.file_name().unwrap().to_str().unwrap();
        match name.strip_suffix(".packed") {
            Some(name) => fs::write(own.path().join(name), unpack(content)),
            None => fs::write(own.path().join(name), content),
        }
        .unwrap();
    }
    let renamed = fs::rename(own.path(), &folder);
    assert!(renamed.is_ok() || folder.is_dir(), "{renamed:?}: {}", folder.display());
    folder
}

/// The contents of a file that is tracked compressed.
pub fn gunzip(path: &Path) -> Vec<u8> {
    let file = fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut content = Vec::new();
    GzDecoder::new(file).read_to_end(&mut content).unwrap();
    content
}

fn unpack(lzma: &[u8]) -> Vec<u8> {
    let mut planes = Vec::new();
    let mut reader = LzmaReader::new_mem_limit(lzma, u32::MAX, None).unwrap();
    reader.read_to_end(&mut planes).unwrap();
    let (even, odd) = planes.split_at(planes.len().div_ceil(2));
    let mut out: Vec<u8> = even.iter().zip(odd).flat_map(|(a, b)| [*a, *b]).collect();
    out.extend(even.get(odd.len()));
    out
}
