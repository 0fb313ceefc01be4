//! Random LoRA adapters of golden checkpoints: `tests/golden/adapters/*.json` has the checkpoint,
//! peft's config and the shapes, `cards::values` makes the weights.

use crate::{cards, repo};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// A number that factors are multiplied with, so that the base is still seen.
const SCALE: f32 = 0.4;

pub fn folder() -> PathBuf {
    repo().join("tests/golden/adapters")
}

/// The adapters' names, in order.
pub fn names() -> Vec<String> {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().path());
    let adapters = files.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let mut names: Vec<String> =
        adapters.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// An adapter's description.
pub fn card(name: &str) -> Value {
    let text = std::fs::read_to_string(folder().join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn is_factor(tensor: &str) -> bool {
    tensor.contains("lora_") && !tensor.contains("magnitude")
}

/// Writes the folder that peft would save.
pub fn write(name: &str, card: &Value, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    std::fs::write(to.join("adapter_config.json"), card["adapter_config"].to_string()).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (tensor, shape) in card["tensors"].as_object().expect("tensors") {
        let shape: Vec<u64> = shape.as_array().unwrap().iter().flat_map(Value::as_u64).collect();
        let (start, n_inputs) = (data.len(), *shape.last().unwrap());
        let scale = if is_factor(tensor) { SCALE } else { 1.0 };
        let values = cards::values(name, tensor, &shape, n_inputs).map(|x| x * scale);
        data.extend(values.flat_map(f32::to_le_bytes));
        let place = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(tensor.clone(), place);
    }
    let header = Value::Object(header).to_string().into_bytes();
    let length = (header.len() as u64).to_le_bytes().to_vec();
    std::fs::write(to.join("adapter_model.safetensors"), [length, header, data].concat()).unwrap();
}
