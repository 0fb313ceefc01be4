//! Cards that lack a tensor or a field of their config: `convert` refuses them, or every other
//! command takes what it wrote.

use std::collections::BTreeSet;
use std::path::Path;

use common::cards;
use moeba::convert::{ConvertOptions, Mix, convert};
use moeba::engine::understand;
use moeba::gguf::Gguf;
use serde_json::Value;

/// The name without numbers: tensors of one kind are left out together.
fn kind(name: &str) -> String {
    let plain = |part: &str| if part.parse::<u64>().is_ok() { "*" } else { part }.to_owned();
    name.split('.').map(plain).collect::<Vec<_>>().join(".")
}

/// A safetensors file without the tensors of a kind.
fn without(header: &Value, data: &[u8], left_out: &str) -> Vec<u8> {
    let (mut kept, mut bytes) = (serde_json::Map::new(), Vec::new());
    for (name, place) in header.as_object().unwrap() {
        if kind(name) == left_out {
            continue;
        }
        let [from, to] = [0, 1].map(|i| place["data_offsets"][i].as_u64().unwrap() as usize);
        let start = bytes.len();
        bytes.extend_from_slice(&data[from..to]);
        let mut place = place.clone();
        place["data_offsets"] = serde_json::json!([start, bytes.len()]);
        kept.insert(name.clone(), place);
    }
    let header = Value::Object(kept).to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &bytes].concat()
}

/// The fault, if the folder converts to a file that does not load.
fn fault(folder: &Path, what: &str) -> Option<String> {
    let output = folder.join("out.gguf");
    let options = ConvertOptions {
        folder: folder.to_owned(),
        output: output.clone(),
        mix: Some(Mix::F32),
        ..ConvertOptions::default()
    };
    if convert(&options).is_err() {
        return output.exists().then(|| format!("{what}: refused, and a file is left"));
    }
    let read = Gguf::open(&output).and_then(|gguf| understand(gguf, true));
    std::fs::remove_file(&output).unwrap();
    read.err().map(|e| format!("{what}: converts, and then: {e}"))
}

#[test]
fn what_converts_loads_whatever_is_missing() {
    let mut faults = Vec::new();
    for name in cards::names().iter().filter(|name| cards::is_checkpoint(name)) {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        cards::checkpoint(name, folder);
        let (config, weights) = (folder.join("config.json"), folder.join("model.safetensors"));
        let (text, file) = (std::fs::read(&config).unwrap(), std::fs::read(&weights).unwrap());
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
        let kinds: BTreeSet<String> = header.as_object().unwrap().keys().map(|k| kind(k)).collect();
        for kind in kinds {
            std::fs::write(&weights, without(&header, &file[8 + length..], &kind)).unwrap();
            faults.extend(fault(folder, &format!("{name} without {kind}")));
        }
        std::fs::write(&weights, &file).unwrap();
        let whole: Value = serde_json::from_slice(&text).unwrap();
        for part in ["", "/text_config", "/rope_parameters"] {
            let fields = whole.pointer(part).and_then(Value::as_object);
            for field in fields.into_iter().flat_map(|part| part.keys()) {
                let mut less = whole.clone();
                let part = less.pointer_mut(part).and_then(Value::as_object_mut).unwrap();
                part.remove(field);
                std::fs::write(&config, less.to_string()).unwrap();
                faults.extend(fault(folder, &format!("{name} without {field}")));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
