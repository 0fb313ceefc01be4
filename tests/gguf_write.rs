//! The writer: what it writes the reader reads back, and what goes wrong leaves no file behind.

use moeba::gguf::{Gguf, OwnedValue, TensorType, Writer};

#[test]
fn a_file_comes_back_as_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    let mut writer = Writer::create(&path, None).unwrap();
    writer.set("general.architecture", "llama").unwrap();
    writer.set("llama.block_count", 2u32).unwrap();
    writer.set("tokens", vec![b"a".to_vec(), b"\xff\xfe".to_vec(), vec![]]).unwrap();
    writer.declare("x", &[32, 3], TensorType::Q8_0).unwrap();
    writer.declare("y", &[5], TensorType::F32).unwrap();
    writer.write_tensor("x", &[7; 102]).unwrap();
    assert!(!path.exists());
    writer.write_tensor("y", &[8; 20]).unwrap();
    writer.finish().unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.require_u32("llama.block_count").unwrap(), 2);
    assert_eq!(gguf.require_strings("tokens").unwrap(), [&b"a"[..], b"\xff\xfe", b""]);
    assert_eq!(gguf.bytes(gguf.tensor("x").unwrap()), [7; 102]);
    assert_eq!(gguf.bytes(gguf.tensor("y").unwrap()), [8; 20]);
    assert_eq!(OwnedValue::from(gguf.get("tokens").unwrap()).value_type().name(), "array");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
