//! LoRA adapters: scales of the server and of requests.

use std::path::{Path, PathBuf};

use common::{cards, repo};
use moeba::gguf::{Gguf, TensorType, Writer};
use serde_json::{Value, json};

use crate::support::{Server, start};

/// Writes an adapter of some of the demo model's matrices, with random factors.
fn adapter(folder: &Path) -> PathBuf {
    let model = Gguf::open(repo().join("models/demo/moeba-demo.gguf")).unwrap();
    let path = folder.join("adapter.gguf");
    let mut out = Writer::create(&path, None).unwrap();
    out.set("general.type", "adapter").unwrap();
    out.set("general.architecture", model.require_str("general.architecture").unwrap()).unwrap();
    out.set("adapter.type", "lora").unwrap();
    out.set("adapter.lora.alpha", 4.0f32).unwrap();
    let mut tensors = Vec::new();
    for name in ["attn_q", "attn_output", "ffn_gate_inp", "ffn_up_exps", "ffn_down_exps"] {
        let name = format!("blk.1.{name}.weight");
        let dims = &model.tensor(&name).unwrap().dims;
        let more = dims.get(2).copied();
        let half = |from: u64, to: u64| [from, to].into_iter().chain(more).collect::<Vec<_>>();
        tensors.push((format!("{name}.lora_a"), half(dims[0], 2)));
        tensors.push((format!("{name}.lora_b"), half(2, dims[1])));
    }
    for (name, dims) in &tensors {
        out.declare(name, dims, TensorType::F32).unwrap();
    }
    for (name, dims) in &tensors {
        let values = cards::values("adapter", name, dims, dims[0]);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        out.write_tensor(name, &bytes).unwrap();
    }
    out.finish().unwrap();
    path
}

fn complete(server: &Server, more: Value) -> String {
    let mut body = json!({
        "prompt": "A branch is", "n_predict": 12, "temperature": 0, "ignore_eos": true,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = server.post("/completion", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["content"].as_str().unwrap().to_owned()
}

#[test]
fn scales_are_the_servers_or_a_requests() {
    let folder = tempfile::tempdir().unwrap();
    let path = adapter(folder.path());
    let file = path.to_str().unwrap();
    let scaled = format!("{file}:0.25");
    let server =
        start(&["-c", "512", "--parallel", "2", "--device", "cpu", "--lora-scaled", &scaled]);
    let listed = |scale: f64| json!([{ "id": 0, "path": file, "scale": scale }]);
    assert_eq!(server.get("/lora-adapters").json(), listed(0.25));
    let own = complete(&server, json!({}));
    let strong = complete(&server, json!({ "lora": [{ "id": 0, "scale": 2.0 }] }));
    let without = complete(&server, json!({ "lora": [] }));
    assert!(own != strong && strong != without, "{own:?} {strong:?} {without:?}");
    // The same prompt is in the caches by now, of each of the three.
    assert_eq!(complete(&server, json!({})), own);
    assert_eq!(complete(&server, json!({ "lora": [{ "id": 0, "scale": 2.0 }] })), strong);
    let set = server.post("/lora-adapters", &json!([{ "id": 0, "scale": 2 }]));
    assert_eq!((set.status, set.json()), (200, json!({ "success": true })));
    assert_eq!(server.get("/lora-adapters").json(), listed(2.0));
    assert_eq!(complete(&server, json!({})), strong);
    assert_eq!(server.post("/lora-adapters", &json!([])).status, 200);
    assert_eq!(complete(&server, json!({})), without);
    let plain = start(&["-c", "512", "--device", "cpu"]);
    assert_eq!(plain.get("/lora-adapters").json(), json!([]));
    assert_eq!(complete(&plain, json!({})), without);
}

#[test]
fn wrong_scales_are_told() {
    let server = start(&["-c", "256", "--device", "cpu"]);
    let refused = |lora: Value, words: &str| {
        let answers = [
            server.post("/completion", &json!({ "prompt": "x", "lora": lora })),
            server.post("/lora-adapters", &lora),
        ];
        for answer in answers {
            let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(answer.status == 400 && message.contains(words), "{lora}: {message}");
        }
    };
    refused(json!({ "id": 0 }), "lora: expected an array");
    refused(json!([{ "id": 0, "scale": 1 }]), "there is no adapter 0: start the server with");
    refused(json!([{ "id": 0 }]), "lora[0].scale: the field is missing");
    refused(json!([{ "id": -1, "scale": 1 }]), "lora[0].id: expected a whole number");
    refused(json!([{ "id": 0, "scale": "x" }]), "lora[0].scale: expected a number");
}
