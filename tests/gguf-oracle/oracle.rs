//! Prints the values that gguf-rs reads from GGUF files, as JSON: a line a file, `null` where
//! gguf-rs panics.

use gguf_rs::{GGUFModel, Tensor, get_gguf_container_array_size};
use serde_json::{Value, json};
use std::panic::catch_unwind;

fn tensor(t: &Tensor) -> Value {
    json!({"name": t.name, "type": t.kind, "dims": t.shape, "offset": t.offset, "n_bytes": t.size})
}

fn read(path: &str) -> Value {
    let container = get_gguf_container_array_size(path, u64::MAX);
    let model: GGUFModel = container.unwrap().decode().unwrap();
    json!({
        "version": model.get_version(),
        "alignment": model.alignment(),
        "data_offset": model.data_offset(),
        "n_keys": model.num_kv(),
        "metadata": model.metadata(),
        "tensors": model.tensors().iter().map(tensor).collect::<Vec<_>>(),
    })
}

fn main() {
    for path in std::env::args().skip(1) {
        println!("{}", catch_unwind(|| read(&path)).unwrap_or(Value::Null));
    }
}
