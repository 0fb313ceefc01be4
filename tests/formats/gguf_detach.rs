//! Files whose map is given up: what was kept survives the file, and nothing else takes memory.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use moeba::gguf::{Gguf, TensorType, Writer};

const MIB: usize = 1 << 20;

fn noise(seed: u64, n: usize) -> Vec<u8> {
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    };
    (0..n).map(|_| next()).collect()
}

/// I8 tensors of these sizes, the `i`th filled with `noise(i)`.
fn write(path: &Path, no: Option<u32>, sizes: &[(&str, usize)]) {
    let mut out = Writer::create(path, None).unwrap();
    out.set("general.name", "to be kept").unwrap();
    if let Some(no) = no {
        out.set("split.no", no).unwrap();
        out.set("split.count", 2u32).unwrap();
        out.set("split.tensors.count", 2 * sizes.len() as u32).unwrap();
    }
    for (name, n) in sizes {
        out.declare(name, &[*n as u64], TensorType::I8).unwrap();
    }
    for (i, (name, n)) in sizes.iter().enumerate() {
        out.write_tensor(name, &noise(i as u64, *n)).unwrap();
    }
    out.finish().unwrap();
}

fn truncate(path: &Path) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
}

/// Resident bytes of the process's memory from `start` on, as the kernel counts them.
fn resident(memory: &[u8]) -> usize {
    let range = memory.as_ptr().addr()..memory.as_ptr().addr() + memory.len();
    let (mut inside, mut sum) = (false, 0);
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let first = line.split(' ').next().unwrap();
        let bounds = first.split_once('-').and_then(|(a, b)| {
            Some(usize::from_str_radix(a, 16).ok()?..usize::from_str_radix(b, 16).ok()?)
        });
        if let Some(bounds) = bounds {
            inside = bounds.start < range.end && range.start < bounds.end;
        } else if inside && first == "Rss:" {
            let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            sum += kib << 10;
        }
    }
    sum
}

const SIZES: [(&str, usize); 6] = [
    ("a", 3 * MIB + 17),
    ("dropped", 40 * MIB),
    ("b", 9 * MIB),
    ("small", 100),
    ("dropped too", 60 * MIB + 1),
    ("last", 5),
];

fn keeps(name: &str) -> bool {
    !name.starts_with("dropped")
}

fn detached(path: &Path) -> Gguf {
    let gguf = Gguf::open(path).unwrap();
    let kept: Vec<bool> = gguf.tensors().iter().map(|t| keeps(&t.name)).collect();
    let mut n = 0;
    let mut all = 0;
    let gguf = gguf.detached(|i| kept[i], &mut |done, total| {
        assert!(done > n && (all == 0 || all == total));
        (n, all) = (done, total);
    });
    let gguf = gguf.unwrap();
    assert_eq!(n, all);
    let wanted: u64 = gguf.tensors().iter().filter(|t| keeps(&t.name)).map(|t| t.n_bytes).sum();
    assert!(n >= wanted && n < wanted + 64 * 1024, "{n} bytes read for {wanted}");
    gguf
}

#[test]
fn what_was_kept_survives_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write(&path, None, &SIZES);
    let gguf = detached(&path);
    truncate(&path);
    assert_eq!(gguf.str("general.name").unwrap(), Some("to be kept"));
    for (i, (name, n)) in SIZES.iter().enumerate() {
        let tensor = gguf.require_tensor(name).unwrap();
        assert_eq!(tensor.n_bytes as usize, *n);
        if keeps(name) {
            assert!(gguf.bytes(tensor) == noise(i as u64, *n), "{name}");
        } else {
            let result = std::panic::catch_unwind(|| gguf.bytes(tensor).len());
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains(name) && message.contains("not kept"), "{message}");
        }
    }
    let kept: usize = SIZES.iter().filter(|(name, _)| keeps(name)).map(|(_, n)| n).sum();
    let resident = resident(gguf.shards()[0].map());
    assert!(resident >= kept && resident < kept + 2 * MIB, "{resident} for {kept}");
    // For the reads of streamed experts.
    assert_eq!(gguf.shards()[0].file().metadata().unwrap().len(), 0);
}

#[test]
fn every_shard_is_detached() {
    let dir = tempfile::tempdir().unwrap();
    let path = |no| dir.path().join(format!("m-0000{no}-of-00002.gguf"));
    let paths: [PathBuf; 2] = [path(1), path(2)];
    write(&paths[0], Some(0), &[("a", MIB), ("dropped", MIB)]);
    write(&paths[1], Some(1), &[("dropped too", 300), ("b", 3 * MIB)]);
    let gguf = detached(&paths[0]);
    paths.iter().for_each(|path| truncate(path));
    for (name, seed, n) in [("a", 0, MIB), ("b", 1, 3 * MIB)] {
        assert!(gguf.bytes(gguf.require_tensor(name).unwrap()) == noise(seed, n), "{name}");
    }
}

#[test]
fn a_file_that_is_cut_before_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write(&path, None, &SIZES);
    let gguf = Gguf::open(&path).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(50 * MIB as u64).unwrap();
    let e = gguf.detached(|_| true, &mut |_, _| ()).unwrap_err().to_string();
    assert!(e.contains("m.gguf"), "{e}");
}

/// Bytes of the file in the page cache, from its own map's point of view.
fn cached(path: &Path) -> usize {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    // SAFETY: the file is this test's own and not changed while it is mapped.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let mut pages = vec![0u8; len.div_ceil(4096)];
    // SAFETY: the range is that of the map, and there is a byte for each of its pages.
    let result = unsafe { mincore(map.as_ptr().cast_mut().cast(), len, pages.as_mut_ptr()) };
    assert_eq!(result, 0);
    pages.iter().filter(|page| **page & 1 == 1).count() * 4096
}

unsafe extern "C" {
    fn mincore(start: *mut std::ffi::c_void, len: usize, pages: *mut u8) -> i32;
}

#[test]
fn the_page_cache_is_no_second_copy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write(&path, None, &SIZES);
    let before = cached(&path);
    let _gguf = detached(&path);
    let kept: usize = SIZES.iter().filter(|(name, _)| keeps(name)).map(|(_, n)| n).sum();
    let after = cached(&path);
    if before < 100 * MIB || after == before {
        // A file system in memory has no cache to drop, and another's may have lost it before.
        eprintln!("skipped: {before} bytes cached before, {after} after");
        return;
    }
    assert!(after <= before - kept + 2 * MIB, "{after} of {before}, {kept} kept");
}
