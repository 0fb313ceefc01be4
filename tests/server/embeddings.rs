//! Embeddings and scores of documents, on the routes of OpenAI, llama-server, Ollama and Jina.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::edits::{File, Tensor};
use serde_json::{Value, json};

use crate::support::{Server, model, start, start_of};

const ARGS: &[&str] = &["-c", "512", "--parallel", "2", "--alias", "demo"];

fn row(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{e}: {value}"))
}

fn embed(server: &Server, body: Value) -> Value {
    server.post("/v1/embeddings", &body).json()
}

fn size(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum::<f32>().sqrt()
}

#[test]
fn texts_and_tokens_have_embeddings() {
    let server = start(ARGS);
    let one = embed(&server, json!({"input": "The package", "model": "demo"}));
    assert_eq!((&one["object"], &one["model"]), (&json!("list"), &json!("demo")));
    assert_eq!(one["data"][0]["object"], "embedding");
    let vector = row(&one["data"][0]["embedding"]);
    assert!((size(&vector) - 1.0).abs() < 1e-5);
    let ids = server.post("/tokenize", &json!({"content": "The package", "add_special": true}));
    let ids = ids.json()["tokens"].clone();
    let n = ids.as_array().unwrap().len();
    assert_eq!(one["usage"], json!({"prompt_tokens": n, "total_tokens": n}));
    // Given as tokens, and among more texts than there are slots.
    let by_ids = embed(&server, json!({"input": ids}));
    assert_eq!(by_ids["data"], one["data"]);
    let texts: Vec<String> = (0..7).map(|i| format!("Text {i} of several")).collect();
    let all = embed(&server, json!({"input": texts}));
    let all = all["data"].as_array().unwrap();
    assert_eq!(all.len(), 7);
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(all[i]["index"], i);
        let alone = embed(&server, json!({"input": [text]}));
        assert_eq!(alone["data"][0]["embedding"], all[i]["embedding"], "{text}");
    }
    let lists = embed(&server, json!({"input": [ids, ids]}));
    assert_eq!(row(&lists["data"][1]["embedding"]), vector);
    // The bytes of the numbers.
    let body = json!({"input": "The package", "encoding_format": "base64"});
    let bytes = embed(&server, body)["data"][0]["embedding"].as_str().unwrap().to_owned();
    let bytes = BASE64_STANDARD.decode(bytes).unwrap();
    let numbers = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    assert_eq!(numbers.collect::<Vec<_>>(), vector);
    // The beginning, with a norm of its own.
    let short = embed(&server, json!({"input": "The package", "dimensions": 8}));
    let short = row(&short["data"][0]["embedding"]);
    let scale = size(&vector[..8]);
    assert!(short.iter().zip(&vector).all(|(a, b)| (a - b / scale).abs() < 1e-6), "{short:?}");
    assert_eq!(short.len(), 8);
}

#[test]
fn llama_server_and_ollama_have_routes_of_their_own() {
    let server = start(ARGS);
    let vector = row(&embed(&server, json!({"input": "Hello"}))["data"][0]["embedding"]);
    for (path, name) in [("/embedding", "content"), ("/embeddings", "input")] {
        let native = server.post(path, &json!({name: "Hello"})).json();
        assert_eq!((&native[0]["index"], native.as_array().unwrap().len()), (&json!(0), 1));
        assert_eq!(row(&native[0]["embedding"][0]), vector);
    }
    let raw = server.post("/embedding", &json!({"content": "Hello", "embd_normalize": -1})).json();
    let raw = row(&raw[0]["embedding"][0]);
    let scale = size(&raw);
    assert!(raw.iter().zip(&vector).all(|(a, b)| (a / scale - b).abs() < 1e-6));
    let both = server.post("/api/embed", &json!({"model": "demo", "input": ["Hello", "Hi"]}));
    let both = both.json();
    assert_eq!(row(&both["embeddings"][0]), vector);
    assert_eq!(both["embeddings"].as_array().unwrap().len(), 2);
    assert!(both["prompt_eval_count"].as_u64() > Some(1), "{both}");
    let older = server.post("/api/embeddings", &json!({"model": "demo", "prompt": "Hello"}));
    assert_eq!(row(&older.json()["embedding"]), raw);
    let empty = server.post("/api/embed", &json!({"input": []})).json();
    assert_eq!(empty["embeddings"], json!([]));
    let empty = server.post("/api/embeddings", &json!({"prompt": ""})).json();
    assert_eq!(empty["embedding"], json!([]));
    // Ollama cuts texts that are too long, unless it is told not to.
    let long = "word ".repeat(2000);
    let cut = server.post("/api/embed", &json!({"input": long})).json();
    assert_eq!(cut["embeddings"].as_array().unwrap().len(), 1, "{cut}");
    let body = json!({"input": long, "truncate": false});
    let refused = server.post("/api/embed", &body);
    assert!(refused.status == 400 && refused.body.contains("context"), "{refused:?}");
    // Requests are counted by route, and their tokens with those of prompts.
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("route=\"/api/embed\",status=\"200\"} 3"), "{metrics}");
}

#[test]
fn the_pooling_is_the_servers() {
    let server = start(&[ARGS, &["--pooling", "none", "--embeddings"]].concat());
    let native = server.post("/embedding", &json!({"content": "Hello there"})).json();
    let rows = native[0]["embedding"].as_array().unwrap().len();
    let ids = server.post("/tokenize", &json!({"content": "Hello there", "add_special": true}));
    assert_eq!(rows, ids.json()["tokens"].as_array().unwrap().len());
    let why = server.post("/v1/embeddings", &json!({"input": "Hello"})).error(400);
    assert!(why.contains("--pooling mean"), "{why}");
    let server = start(&[ARGS, &["--pooling", "mean"]].concat());
    let mean = server.post("/embedding", &json!({"content": "Hello there", "embd_normalize": -1}));
    let mean = row(&mean.json()[0]["embedding"][0]);
    let sum: f32 = native[0]["embedding"].as_array().unwrap().iter().map(|r| row(r)[5]).sum();
    assert!((sum / rows as f32 - mean[5]).abs() < 1e-4, "{sum} {}", mean[5]);
}

#[test]
fn what_cannot_be_embedded_is_refused_in_a_sentence() {
    let server = start(ARGS);
    let long = "word ".repeat(2000);
    let many: Vec<&str> = vec!["a"; 2049];
    for (body, word) in [
        (json!({}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [[]]}), "input"),
        (json!({"input": [{"text": "x"}]}), "input"),
        (json!({"input": [1, 99_999_999]}), "input: token id 99999999"),
        (json!({"input": ["a", long]}), "context"),
        (json!({"input": many}), "at most 2048"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "dimensions": 1_000_000}), "dimensions"),
    ] {
        let why = server.post("/v1/embeddings", &body).error(400);
        assert!(why.contains(word), "{word}: {why}");
    }
    let both = json!({"content": "a", "input": "b"});
    assert!(server.post("/embedding", &both).error(400).contains("either"));
    for path in ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"] {
        let why = server.post(path, &json!({"query": "a", "documents": ["b"]})).error(501);
        assert!(why.contains("no head that ranks"), "{why}");
    }
    for (body, word) in [
        (json!({"documents": ["a"]}), "query"),
        (json!({"query": "a"}), "documents"),
        (json!({"query": "a", "documents": []}), "documents"),
        (json!({"query": "a", "documents": [5]}), "documents"),
        (json!({"query": "a", "documents": ["b"], "top_n": 0}), "top_n"),
    ] {
        let why = server.post("/v1/rerank", &body).error(400);
        assert!(why.contains(word), "{word}: {why}");
    }
    server.get("/v1/embeddings").error(405);
}

/// A client that leaves takes its texts along, and a generation goes on beside them.
#[test]
fn texts_end_with_their_client() {
    let server = start(ARGS);
    let texts: Vec<String> = (0..2000).map(|i| "word ".repeat(30) + &i.to_string()).collect();
    let stream = server.begin("/v1/embeddings", &json!({"input": texts}));
    server.wait_busy(2);
    let body = json!({"prompt": "The package", "max_tokens": 3, "temperature": 0});
    let answer = server.post("/v1/completions", &body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
    drop(stream);
    server.wait_busy(0);
}

#[test]
fn a_reranker_orders_documents() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = File::read(&model());
    let norm = file.tensor("output_norm.weight");
    let n = norm.dims[0];
    let values: Vec<f32> = (0..2 * n).map(|i| ((i * 5) % 11) as f32 - 5.0).collect();
    file.tensors.push(Tensor::of("cls.output.weight", &[n, 2], &values));
    file.set("tokenizer.chat_template.rerank", "{query}: {document}<|im_end|>");
    let path = folder.path().join("ranks.gguf");
    file.write(&path);
    let server = start_of(&path, &["-c", "512", "--parallel", "2", "--alias", "ranks"]);
    let documents = json!(["a file", "the package", {"text": "a branch"}]);
    let body = json!({"query": "what is it", "documents": documents, "return_documents": true});
    let answer = server.post("/v1/rerank", &body).json();
    let results = answer["results"].as_array().unwrap();
    assert_eq!((results.len(), &answer["model"]), (3, &json!("ranks")));
    let score = |i: usize| results[i]["relevance_score"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&score(0)) && score(0) >= score(1) && score(1) >= score(2));
    for result in results {
        let text = &documents[result["index"].as_u64().unwrap() as usize];
        let text = text.as_str().or(text["text"].as_str()).unwrap();
        assert_eq!(result["document"]["text"], text);
    }
    assert!(answer["usage"]["total_tokens"].as_u64() > Some(6), "{answer}");
    let body = json!({"query": "what is it", "documents": documents, "top_n": 1});
    let best = server.post("/reranking", &body).json();
    assert_eq!(best["results"].as_array().unwrap().len(), 1);
    assert_eq!(best["results"][0]["relevance_score"], results[0]["relevance_score"]);
    assert!(best["results"][0]["document"].is_null());
    let body = json!({"query": "what is it", "texts": ["a file"], "return_text": true});
    let bare = server.post("/rerank", &body).json();
    assert_eq!(bare[0]["text"], "a file", "{bare}");
    assert!(bare[0]["score"].is_f64(), "{bare}");
    // A document writes no control tokens.
    let n_of = |document: &str| {
        let body = json!({"query": "a", "documents": [document]});
        server.post("/v1/rerank", &body).json()["usage"]["total_tokens"].as_u64().unwrap()
    };
    assert!(n_of("<|im_end|>") > n_of("") + 1);
    // The model has embeddings besides.
    let vector = embed(&server, json!({"input": "a"}))["data"][0]["embedding"].clone();
    assert_eq!(row(&vector).len() as u64, n);
}
