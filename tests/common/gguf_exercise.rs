//! Everything that can be done with bytes that claim to be a GGUF file. Shared by the fuzz target
//! and by the replay of its corpus.

use moeba::gguf::{Header, OwnedValue, Value};
use std::path::Path;

/// Parses, and where that works uses all that was parsed: nothing may panic, and the promises of
/// an accepted header must hold. Answers whether it was accepted.
pub fn exercise(bytes: &[u8]) -> bool {
    let file_len = bytes.len() as u64;
    let header = match Header::parse(Path::new("fuzz.gguf"), bytes, file_len) {
        Ok(header) => header,
        Err(error) => {
            let sentence = error.to_string();
            assert!(sentence.starts_with("fuzz.gguf: ") && !sentence.contains('\n'), "{sentence}");
            assert!(sentence.len() < 1000, "{sentence}");
            return false;
        }
    };
    for (key, value) in header.metadata.iter(bytes) {
        assert!(header.metadata.get(bytes, key).is_some());
        use_value(value);
    }
    let mut end = header.data_offset;
    for tensor in &header.tensors {
        assert_eq!(tensor.file_offset % header.alignment, 0);
        assert!(tensor.file_offset >= end && tensor.file_offset - end < header.alignment);
        end = tensor.file_offset + tensor.n_bytes;
        assert!(end <= file_len);
        assert_eq!(tensor.row_bytes() * tensor.n_rows(), tensor.n_bytes);
        assert!(tensor.n_elements() > 0 && (1..64).contains(&tensor.name.len()));
    }
    true
}

fn use_value(value: Value<'_>) {
    assert!(value.to_string().chars().count() < 700);
    if let Value::Array(array) = value {
        assert_eq!(array.iter().count(), array.len());
        assert_eq!(array.get(array.len()), None);
        let last = array.len().checked_sub(1);
        assert!(last.is_none_or(|i| array.get(i).is_some()));
    }
    let owned = OwnedValue::from(value);
    assert_eq!(owned.value_type(), value.value_type());
}
