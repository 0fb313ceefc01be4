//! Broken and hostile files: each ends in one sentence that names file, field, expected and got,
//! without a panic and without allocating more than a small multiple of the file's length.

use common::gguf::{ARRAY, BOOL, Raw, STRING, U8, U32, fixture};
use moeba::Error;
use moeba::gguf::{Gguf, Header};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

/// Counts this thread's live bytes and their peak; the tests run side by side.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    LIVE.set(LIVE.get() + change);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: every call is handed to the system's allocator unchanged; the counters are plain
// thread-local cells without destructors, which allocate nothing themselves.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `f` held at one time.
fn peak_of<X>(f: impl FnOnce() -> X) -> (X, isize) {
    let before = LIVE.get();
    PEAK.set(before);
    let x = f();
    (x, PEAK.get() - before)
}

/// Parses `bytes` as a whole file, watching memory.
fn parse(bytes: &[u8]) -> moeba::Result<Header> {
    parse_as(bytes, bytes.len() as u64)
}

fn parse_as(bytes: &[u8], file_len: u64) -> moeba::Result<Header> {
    let path = Path::new("model.gguf");
    let (result, peak) = peak_of(|| Header::parse(path, bytes, file_len));
    let bound = 4096 + 16 * bytes.len() as isize;
    assert!(peak <= bound, "{peak} bytes of memory for a file of {}", bytes.len());
    result
}

/// Checks that the refusal is one sentence with these parts.
#[track_caller]
fn refused<X>(result: moeba::Result<X>, file: &str, field: &str, expected: &str, got: &str) {
    let Err(error) = result else { panic!("accepted; expected a refusal of {field}") };
    let sentence = error.to_string();
    let Error::Format { path, field: f, expected: e, got: g } = error else {
        panic!("not a format error: {sentence}");
    };
    assert!(path.to_str().unwrap().ends_with(file), "file: {sentence}");
    assert_eq!(f, field, "{sentence}");
    assert!(e.contains(expected), "expected {expected:?} in: {sentence}");
    assert!(g.contains(got), "got {got:?} in: {sentence}");
    assert!(!sentence.contains('\n') && sentence.len() < 300, "{sentence}");
}

#[track_caller]
fn bad(raw: Raw, field: &str, expected: &str, got: &str) {
    refused(parse(&raw.0), "model.gguf", field, expected, got);
}

#[test]
fn other_kinds_of_files() {
    let safetensors = [&40u64.to_le_bytes()[..], b"{\"x\":{\"dtype\":\"F32\"}}"].concat();
    let cases: [(&[u8], &str); 14] = [
        (b"", "an empty file"),
        (b"GG", "the end of the file after 2 bytes"),
        (b"<!DOCTYPE html><html>", "an HTML or XML page"),
        (b"\r\n  <html lang=en>", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (&safetensors, "a safetensors file"),
        (b"PK\x03\x04abcdef", "a zip archive"),
        (b"tjgg\x01\0\0\0", "format older than GGUF"),
        (b"FUGG\0\0\0\x03", "a byte-swapped file"),
        (b"{\"error\": \"not found\"}", "a JSON document"),
        (b"\x7fELF\x02\x01", "starts with the bytes [7f, 45, 4c, 46]"),
        (b"\n", "starts with the bytes [0a]"),
        (b"Dear reader, this is no model", "a text that starts with \"Dear reader, thi\""),
        (b"FROM ./model.gguf\n", "a Modelfile"),
    ];
    for (bytes, got) in cases {
        refused(parse(bytes), "model.gguf", "file", "a GGUF file", got);
    }
}

#[test]
fn versions() {
    bad(Raw::new(0, 0, 0), "version", "2 or 3", "0");
    bad(Raw::new(1, 0, 0), "version", "2 or 3", "1, an obsolete GGUF version");
    bad(Raw::new(4, 0, 0), "version", "2 or 3", "4");
    bad(Raw::new(3 << 24, 0, 0), "version", "2 or 3", "3 in big-endian byte order");
    bad(Raw(b"GGUF\x03\0".to_vec()), "version", "4 bytes at position 4", "2 bytes later (the file");
    let big = Gguf::open(fixture("big_endian.gguf"));
    refused(big, "big_endian.gguf", "version", "2 or 3", "3 in big-endian byte order");
}

/// Every file cut short at every byte is refused, whether the bytes or the length say so.
#[test]
fn cut_at_every_byte() {
    for name in ["kinds.gguf", "types.gguf", "no_tensors.gguf", "split-00001-of-00003.gguf"] {
        let bytes = std::fs::read(fixture(name)).unwrap();
        let whole = parse(&bytes).unwrap();
        // Padding behind the last tensor may be missing.
        let end = whole.tensors.last().map(|t| t.file_offset + t.n_bytes);
        let header_end = (0..bytes.len())
            .find(|&n| parse_as(&bytes[..n], bytes.len() as u64).is_ok())
            .unwrap_or(bytes.len());
        let end = end.map_or(header_end, |end| end as usize);
        assert!(header_end > 24 && header_end <= end && end <= bytes.len(), "{name}");
        for n in 0..end {
            let error = parse(&bytes[..n]).expect_err("a cut file");
            assert!(matches!(error, Error::Format { .. }), "{name} cut to {n}: {error}");
            let sentence = error.to_string();
            let whole_header = n >= header_end;
            let words = match n {
                0 => "an empty file",
                _ if whole_header => "cut short: download it again",
                _ => "the file ends within its header: download it again",
            };
            assert!(sentence.contains(words), "{name} cut to {n}: {sentence}");
        }
        assert!(parse(&bytes[..end]).is_ok());
    }
}

/// The refusal of a count or a length of `n`: `cut` and the cure where a cut file has such numbers,
/// `broken` where no file does.
#[track_caller]
fn too_many(raw: Raw, field: &str, n: u64, cut: &str, broken: &str) {
    match n < 1 << 32 {
        true => bad(raw, field, cut, "later (the file ends within its header: download it again)"),
        false => bad(raw, field, broken, &n.to_string()),
    }
}

#[test]
fn huge_counts() {
    for n in [1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX] {
        let cut = format!("{n} of at least ");
        too_many(Raw::new(3, n, 0), "tensor count", n, &cut, "at most 0, as 8 bytes are left");
        too_many(Raw::new(3, 0, n), "metadata count", n, &cut, "at most 0, as 0 bytes are left");
    }
    let many = Raw::new(3, 0, 3).key("a", U8).bytes(&[1]).key("b", U8).bytes(&[1]);
    bad(many, "metadata count", "3 of at least 14 bytes each at position 24", "28 bytes later");
    let missing = Raw::new(3, 0, 2).key("a", U32).u32(1).bytes(&[0; 11]);
    bad(missing, "metadata key 1", "1 to 65535 bytes", "0 bytes");
}

#[test]
fn huge_lengths() {
    for n in [100, 1 << 30, 1 << 31, 1 << 63, u64::MAX] {
        let cut = format!("a string of {n} bytes at position ");
        let string = |raw, field, left: u64| {
            too_many(raw, field, n, &cut, &format!("at most {left} bytes (all that is left)"));
        };
        string(Raw::new(3, 0, 1).u64(n).bytes(&[b'k'; 20]), "metadata key 0", 20);
        string(Raw::new(3, 0, 1).key("k", STRING).u64(n).bytes(b"text"), "k", 4);
        string(Raw::new(3, 0, 1).array("k", STRING, 2).string("ab").u64(n), "k", 0);
        string(Raw::new(3, 1, 0).u64(n).bytes(&[b'n'; 40]), "name of tensor 0", 40);
        for ty in [U8, U32, BOOL, STRING] {
            let array = Raw::new(3, 0, 1).array("k", ty, n).bytes(&[0; 12]);
            too_many(array, "k", n, &format!("{n} of at least "), "as 12 bytes are left");
        }
    }
    // Times eight this is zero, in 64 bits.
    let wrapping = Raw::new(3, 0, 1).array("k", 10, 1 << 61);
    bad(wrapping, "k", "at most 0", "2305843009213693952");
}

#[test]
fn arrays_of_arrays() {
    let nested = Raw::new(3, 0, 1).array("k", ARRAY, 1).u32(U8).u64(0);
    bad(nested, "k", "an array of plain values", "an array of arrays");
    // As deep as a file of this length can go: no recursion, so no stack to exhaust.
    let deep = (0..100_000).fold(Raw::new(3, 0, 1).key("k", ARRAY), |raw, _| raw.u32(ARRAY).u64(1));
    bad(deep, "k", "an array of plain values", "an array of arrays");
}

#[test]
fn values() {
    bad(Raw::new(3, 0, 1).key("k", 13).u64(0), "k", "a value type from 0 to 12", "13");
    bad(Raw::new(3, 0, 1).key("k", u32::MAX).u64(0), "k", "a value type", "4294967295");
    bad(Raw::new(3, 0, 1).array("k", 13, 0), "k", "a value type", "13");
    bad(Raw::new(3, 0, 1).key("k", BOOL).bytes(&[2]), "k", "a bool of 0 or 1", "2");
    bad(Raw::new(3, 0, 1).array("k", BOOL, 3).bytes(&[0, 1, 255]), "k", "a bool of 0 or 1", "255");
    bad(
        Raw::new(3, 0, 1).key("kk", U32).bytes(&[0; 3]),
        "kk",
        "4 bytes at position",
        "3 bytes later",
    );
}

#[test]
fn keys() {
    let twice = Raw::new(3, 0, 2).key("same", U8).bytes(&[1]).key("same", U8).bytes(&[1]);
    bad(twice, "metadata key 1", "a new key", "\"same\" again");
    let empty = Raw::new(3, 0, 1).key("", U32).u32(0);
    bad(empty, "metadata key 0", "1 to 65535 bytes", "0 bytes");
    let long = Raw::new(3, 0, 1).key(vec![b'k'; 65_536], U32).u32(0);
    bad(long, "metadata key 0", "1 to 65535 bytes", "65536 bytes");
    let invalid = Raw::new(3, 0, 1).key(b"k\xff", U32).u32(0);
    // What a file calls things must not spoil the message.
    let shown = format!("{}…", "\\n\\u{1b}[2J".repeat(16));
    bad(Raw::new(3, 0, 1).key("\n\x1b[2J".repeat(99), BOOL).bytes(&[9]), &shown, "a bool", "9");
    bad(invalid, "metadata key 0", "UTF-8 text", "\"k\u{fffd}\"");
}

#[test]
fn alignments() {
    for n in [0, 1, 4, 24, 33, 96, (1 << 20) + 8, 1 << 21, 1 << 31, u32::MAX] {
        let raw = Raw::new(3, 0, 1).key("general.alignment", U32).u32(n);
        bad(raw, "general.alignment", "a power of two from 8 to 1048576", &n.to_string());
    }
    let wide = Raw::new(3, 0, 1).key("general.alignment", 10).u64(32);
    bad(wide, "general.alignment", "a u32", "u64 32");
    let text = Raw::new(3, 0, 1).key("general.alignment", STRING).string("32");
    bad(text, "general.alignment", "a u32", "string \"32\"");
}

fn with_dims(dims: &[u64], ty: u32) -> Raw {
    Raw::new(3, 1, 0).tensor("w", dims, ty, 0).data(32, 64)
}

#[test]
fn dimensions() {
    let n_dims = "tensor w: number of dimensions";
    let number = parse(&with_dims(&[], 0).0).unwrap();
    assert_eq!(number.tensors[0].dims, [1]);
    bad(with_dims(&[1; 5], 0), n_dims, "at most 4", "5");
    let most = Raw::new(3, 1, 0).string("w").u32(u32::MAX).bytes(&[0; 40]);
    bad(most, n_dims, "at most 4", "4294967295");
    let dims = "tensor w: dimensions";
    bad(with_dims(&[0], 0), dims, "at least 1 each", "[0]");
    bad(with_dims(&[4, 0, 2], 0), dims, "at least 1 each", "[4, 0, 2]");
    for big in [
        &[1u64 << 63][..],
        &[u64::MAX],
        &[1 << 61],
        &[1 << 32, 1 << 32],
        &[1 << 40, 1, 1 << 40],
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
        &[1, 1 << 62, 1 << 62],
    ] {
        bad(with_dims(big, 0), dims, "fewer than 2^63 bytes", &format!("{big:?}"));
    }
    // Elements fit, bytes do not; and the other way round.
    bad(with_dims(&[1 << 60, 4], 1), dims, "fewer than 2^63 bytes", "");
    bad(with_dims(&[1 << 63], 2), dims, "fewer than 2^63 bytes", "");
    let row = "tensor w: row length";
    bad(with_dims(&[33], 8), row, "a multiple of 32 for type Q8_0", "33");
    bad(with_dims(&[32, 256], 12), row, "a multiple of 256 for type Q4_K", "32");
}

#[test]
fn tensor_types() {
    for ty in [4, 5, 31, 33, 36, 38, 44, 1000, u32::MAX] {
        bad(with_dims(&[256], ty), "tensor w: type", "a known tensor type", &ty.to_string());
    }
}

#[test]
fn tensor_names() {
    let twice = Raw::new(3, 2, 0).tensor("w", &[8], 0, 0).tensor("w", &[8], 0, 32).data(32, 64);
    bad(twice, "name of tensor 1", "a new name", "\"w\" again");
    let empty = Raw::new(3, 1, 0).tensor("", &[8], 0, 0).data(32, 32);
    bad(empty, "name of tensor 0", "1 to 63 bytes", "0 bytes");
    let long = Raw::new(3, 1, 0).tensor("w".repeat(64), &[8], 0, 0).data(32, 32);
    bad(long, "name of tensor 0", "1 to 63 bytes", "64 bytes");
    let longest = Raw::new(3, 1, 0).tensor("w".repeat(63), &[8], 0, 0).data(32, 32);
    assert!(parse(&longest.0).is_ok());
    let invalid = Raw::new(3, 1, 0).tensor(b"w\x80", &[8], 0, 0).data(32, 32);
    bad(invalid, "name of tensor 0", "UTF-8 text", "\"w\u{fffd}\"");
}

#[test]
fn offsets() {
    let at = |first, second| {
        Raw::new(3, 2, 0).tensor("a", &[8], 0, first).tensor("b", &[8], 0, second).data(32, 96)
    };
    assert!(parse(&at(0, 32).0).is_ok());
    bad(at(32, 64), "tensor a: offset", "0, right behind", "32");
    bad(at(0, 0), "tensor b: offset", "32, right behind", "0");
    bad(at(0, 16), "tensor b: offset", "32, right behind", "16");
    bad(at(0, 64), "tensor b: offset", "32, right behind", "64");
    bad(at(0, 1 << 60), "tensor b: offset", "32, right behind", "1152921504606846976");
    bad(at(0, u64::MAX), "tensor b: offset", "32, right behind", "18446744073709551615");
}

#[test]
fn data_past_the_end() {
    let short = Raw::new(3, 1, 0).tensor("w", &[8], 0, 0).data(32, 31);
    bad(short, "tensor w", "data up to position 96", "a file of 95 bytes");
    let far = Raw::new(3, 1, 0).tensor("w", &[1 << 40], 0, 0).data(32, 32);
    bad(far, "tensor w", "data up to position 4398046511168", "a file of 96 bytes");
    // The sum of sizes leaves 64 bits.
    let half = (1 << 62) - 8;
    let sum = (0..5u64).fold(Raw::new(3, 5, 0), |raw, i| {
        raw.tensor(format!("w{i}"), &[half], 24, i.wrapping_mul(half + 8))
    });
    bad(sum, "tensor w3", "fewer than 2^64 bytes", "more");
}

#[test]
fn what_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("folder.gguf");
    std::fs::create_dir(&folder).unwrap();
    refused(Gguf::open(&folder), "folder.gguf", "file", "a GGUF file", "a directory");
    #[cfg(unix)]
    refused(Gguf::open("/dev/null"), "null", "file", "a regular file", "a device");
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    refused(Gguf::open(&empty), "empty.gguf", "file", "a GGUF file", "an empty file");
    let error = Gguf::open(dir.path().join("absent.gguf")).unwrap_err();
    assert!(matches!(error, Error::Io { .. }));
    assert!(error.to_string().contains("absent.gguf: No such file"), "{error}");
}

/// A folder with the split fixture in it.
fn split() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for i in 1..=3 {
        let name = format!("split-0000{i}-of-00003.gguf");
        std::fs::copy(fixture(&name), dir.path().join(&name)).unwrap();
    }
    dir
}

/// Replaces the only place where `from` stands in a file.
fn patch(path: &Path, from: &[u8], to: &[u8]) {
    let mut bytes = std::fs::read(path).unwrap();
    let found: Vec<_> = (0..bytes.len()).filter(|&i| bytes[i..].starts_with(from)).collect();
    assert_eq!(found.len(), 1, "places to patch");
    bytes[found[0]..found[0] + to.len()].copy_from_slice(to);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn shards() {
    let dir = split();
    let shard = |i: usize| dir.path().join(format!("split-0000{i}-of-00003.gguf"));
    let (second, name) = (Gguf::open(shard(2)), "split-00001-of-00003.gguf");
    refused(second, "split-00002-of-00003.gguf", "file", name, "shard 2 of 3");
    std::fs::rename(shard(2), dir.path().join("away")).unwrap();
    let expected = "shard 2 of 3 beside the first";
    refused(Gguf::open(shard(1)), "split-00002-of-00003.gguf", "file", expected, "no such file");
    // A copy of another shard in its place.
    std::fs::copy(shard(3), shard(2)).unwrap();
    refused(Gguf::open(shard(1)), "split-00002-of-00003.gguf", "split.no", "1", "2");
    std::fs::rename(dir.path().join("away"), shard(2)).unwrap();
    assert!(Gguf::open(shard(1)).is_ok());
    let renamed = dir.path().join("model.gguf");
    std::fs::copy(shard(1), &renamed).unwrap();
    let expected = "ends in -00001-of-00003.gguf";
    refused(Gguf::open(&renamed), "model.gguf", "file name", expected, "\"model.gguf\"");
}

#[test]
fn shards_that_disagree() {
    let dir = split();
    let shard = |i: usize| dir.path().join(format!("split-0000{i}-of-00003.gguf"));
    patch(&shard(3), b"blk.4.w", b"blk.3.w");
    let got = "one of an earlier shard again";
    let file = "split-00003-of-00003.gguf";
    refused(Gguf::open(shard(1)), file, "tensor blk.3.w", "a new name", got);
    patch(&shard(3), b"blk.3.w", b"blk.9.w");
    patch(&shard(3), b"split.count\x02\0\0\0\x03", b"split.count\x02\0\0\0\x04");
    refused(Gguf::open(shard(1)), file, "split.count", "3", "4");
    patch(&shard(3), b"split.count", b"split.kount");
    refused(Gguf::open(shard(1)), file, "split.count", "3", "nothing");
    patch(&shard(3), b"split.kount\x02\0\0\0\x04", b"split.count\x02\0\0\0\x03");
    let count = b"split.tensors.count\x05\0\0\0";
    patch(&shard(1), count, b"split.tensors.count\x05\0\0\0\x06");
    let field = "split.tensors.count";
    refused(Gguf::open(shard(1)), "split-00001-of-00003.gguf", field, "6 tensors", "5");
    // A third shard that was cut short.
    let bytes = std::fs::read(shard(3)).unwrap();
    std::fs::write(shard(3), &bytes[..bytes.len() / 2]).unwrap();
    assert!(Gguf::open(shard(1)).unwrap_err().to_string().contains("00003-of-00003.gguf: "));
}
