//! The reader against the fixtures that PyPI's `gguf` made (tests/fixtures/gguf/make_fixtures.py).

use common::gguf::{Raw, fixture};
use moeba::Error;
use moeba::gguf::{Gguf, Header, TensorInfo, Value};
use serde_json::{Value as Json, json};
use std::path::Path;

fn hex(bytes: &[u8]) -> Json {
    bytes.iter().map(|b| format!("{b:02x}")).collect::<String>().into()
}

/// A value as the fixtures' JSON has it.
fn plain(value: Value<'_>) -> Json {
    match value {
        Value::F32(v) => hex(&v.to_le_bytes()),
        Value::F64(v) => hex(&v.to_le_bytes()),
        Value::Bool(v) => v.into(),
        Value::String(v) => hex(v),
        Value::Array(v) => v.iter().map(plain).collect(),
        Value::U64(v) => v.to_string().into(),
        other => other.as_i64().expect("an integer").to_string().into(),
    }
}

fn tensor(gguf: &Gguf, t: &TensorInfo) -> Json {
    json!({
        "name": t.name, "type": t.ty.name(), "dims": t.dims, "shard": t.shard,
        "offset": t.file_offset, "data": hex(gguf.bytes(t)),
    })
}

/// All of a file, as its JSON has it.
fn described(gguf: &Gguf) -> Json {
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    json!({
        "version": gguf.version(),
        "alignment": gguf.alignment(),
        "shards": gguf.shards().iter().map(|s| name(s.path())).collect::<Vec<_>>(),
        "metadata": gguf.keys().map(|(k, v)| json!([k, v.type_name(), plain(v)]))
            .collect::<Vec<_>>(),
        "tensors": gguf.tensors().iter().map(|t| tensor(gguf, t)).collect::<Vec<_>>(),
    })
}

fn compare(file: &str, expected: &str) {
    let gguf = Gguf::open(fixture(file)).unwrap();
    let text = std::fs::read_to_string(fixture(expected)).unwrap();
    let expected: Json = serde_json::from_str(&text).unwrap();
    let found = described(&gguf);
    for part in ["version", "alignment", "shards"] {
        assert_eq!(found[part], expected[part], "{part}");
    }
    for part in ["metadata", "tensors"] {
        let (found, expected) =
            (found[part].as_array().unwrap(), expected[part].as_array().unwrap());
        found.iter().zip(expected).for_each(|(f, e)| assert_eq!(f, e));
        assert_eq!(found.len(), expected.len(), "{part}");
    }
    for t in gguf.tensors() {
        assert_eq!(gguf.tensor(&t.name), Some(t));
        assert_eq!(t.row_bytes() * t.n_rows(), t.n_bytes);
        assert_eq!(Some(t.row_bytes()), t.ty.row_bytes(t.dims[0]));
        assert_eq!(t.n_elements(), t.n_rows() * t.dims[0]);
    }
    for (key, value) in gguf.keys() {
        // By text: NaN is not equal to itself.
        assert_eq!(format!("{:?}", gguf.get(key)), format!("{:?}", Some(value)));
    }
}

#[test]
fn every_kind_of_value() {
    compare("kinds.gguf", "kinds.json");
}

#[test]
fn version_2() {
    compare("version2.gguf", "version2.json");
}

#[test]
fn every_type_of_tensor() {
    compare("types.gguf", "types.json");
}

#[test]
fn a_split_file_by_its_first_shard() {
    compare("split-00001-of-00003.gguf", "split.json");
    let gguf = Gguf::open(fixture("split-00001-of-00003.gguf")).unwrap();
    let sizes = gguf.shards().iter().map(|s| s.path().metadata().unwrap().len());
    assert_eq!(gguf.n_bytes(), sizes.sum::<u64>());
}

#[test]
fn a_file_without_tensors() {
    compare("no_tensors.gguf", "no_tensors.json");
}

#[test]
fn elements_of_arrays_by_index() {
    let gguf = Gguf::open(fixture("kinds.gguf")).unwrap();
    for (_, value) in gguf.keys() {
        let Some(array) = value.as_array() else { continue };
        for (i, element) in array.iter().enumerate() {
            assert_eq!(array.get(i), Some(element));
        }
        assert_eq!(array.get(array.len()), None);
        assert_eq!(array.get(usize::MAX), None);
    }
}

#[test]
fn typed_getters_convert_what_fits() {
    let gguf = Gguf::open(fixture("kinds.gguf")).unwrap();
    assert_eq!(gguf.require_u32("kind.u8").unwrap(), 255);
    assert_eq!(gguf.require_u32("kind.u32").unwrap(), u32::MAX);
    assert_eq!(gguf.require_u64("kind.u64").unwrap(), u64::MAX);
    assert_eq!(gguf.i64("kind.i64").unwrap(), Some(i64::MIN));
    assert_eq!(gguf.require_f32("kind.f32").unwrap(), 0.1);
    assert_eq!(gguf.require_f32("kind.f64").unwrap(), 0.0);
    assert!(gguf.bool("kind.bool.yes").unwrap().unwrap());
    assert_eq!(gguf.require_str("kind.string").unwrap(), "naïve 🦠");
    assert_eq!(gguf.require_u32s("kind.u8s").unwrap(), [0, 7, 255]);
    assert_eq!(gguf.i32s("kind.i16s").unwrap().unwrap(), [-1, 32767]);
    assert_eq!(gguf.f32s("kind.f32s").unwrap().unwrap(), [0.5, -0.0, 3.4e38]);
    assert_eq!(gguf.bools("kind.bools").unwrap(), Some(vec![true, false, true]));
    assert_eq!(gguf.require_strings("kind.strings").unwrap()[2], b"\xe2\x96");
    assert_eq!(gguf.u32("kind.absent").unwrap(), None);
    assert_eq!(gguf.strings("kind.absent").unwrap(), None);
}

/// The parts of a refusal.
fn refusal<X: std::fmt::Debug>(result: moeba::Result<X>) -> [String; 3] {
    match result.unwrap_err() {
        Error::Format { field, expected, got, .. } => [field, expected, got],
        other => panic!("no format error: {other}"),
    }
}

#[test]
fn typed_getters_refuse_the_rest() {
    let gguf = Gguf::open(fixture("kinds.gguf")).unwrap();
    let u32 = "an integer from 0 to 2^32 - 1";
    let cases = [
        (refusal(gguf.u32("kind.i8")), ["kind.i8", u32, "i8 -128"]),
        (refusal(gguf.u32("kind.u64")), ["kind.u64", u32, "u64 18446744073709551615"]),
        (refusal(gguf.u32("kind.u8s")), ["kind.u8s", u32, "an array of 3 u8"]),
        (
            refusal(gguf.u64("kind.i64")),
            ["kind.i64", "an integer from 0", "i64 -9223372036854775808"],
        ),
        (
            refusal(gguf.i64("kind.u64")),
            ["kind.u64", "an integer below 2^63", "u64 18446744073709551615"],
        ),
        (refusal(gguf.f32("kind.u8")), ["kind.u8", "a floating-point number", "u8 255"]),
        (refusal(gguf.bool("kind.u8")), ["kind.u8", "a bool", "u8 255"]),
        (
            refusal(gguf.str("kind.string.bytes")),
            ["kind.string.bytes", "a UTF-8 string", "string \"\u{fffd}\\0\u{fffd}\""],
        ),
        (
            refusal(gguf.strings("kind.f32s")),
            ["kind.f32s", "an array of strings", "an array of 3 f32"],
        ),
        (refusal(gguf.require_u32("absent")), ["absent", "an integer", "nothing"]),
        (
            refusal(gguf.require_tensor("absent").cloned()),
            ["absent", "a tensor", "no tensor of that name"],
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, expected);
    }
}

#[test]
fn one_dimension_to_four_and_the_edges_of_alignment() {
    for alignment in [8, 32, 4096, 1 << 20] {
        let raw = Raw::new(3, 2, 1)
            .key("general.alignment", common::gguf::U32)
            .u32(alignment)
            .tensor("a", &[4, 1, 1, 1], 0, 0)
            .tensor("b", &[1], 24, u64::from(alignment).max(16))
            .data(alignment as usize, (alignment as usize).max(16) + 1);
        let len = raw.0.len() as u64;
        let header = Header::parse(Path::new("a"), &raw.0, len).unwrap();
        assert_eq!(header.alignment, u64::from(alignment));
        assert_eq!(header.tensors[0].file_offset % header.alignment, 0);
        assert_eq!(header.tensors[1].file_offset, len - 1);
    }
}
