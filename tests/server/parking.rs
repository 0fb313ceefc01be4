use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Server, start};

fn ask(server: &Server, i: usize) -> Value {
    let prompt = ["A queue is", "The package", "What is a branch?"][i];
    let body = json!({ "prompt": prompt, "n_predict": 20, "ignore_eos": true, "seed": i });
    let answer = server.post("/completion", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["content"].clone()
}

/// The value of a series.
fn series(server: &Server, name: &str) -> f64 {
    let metrics = server.get("/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {metrics}")).parse().unwrap()
}

#[test]
fn texts_share_the_context_and_are_parked_when_it_is_full() {
    let alone = start(&["-c", "48", "--parallel", "1"]);
    let expected: Vec<Value> = (0..3).map(|i| ask(&alone, i)).collect();
    drop(alone);
    let server = start(&["-c", "48", "--parallel", "3", "--kv-unified"]);
    let props = server.get("/props").json();
    let context = (&props["default_generation_settings"]["n_ctx"], &props["n_ctx_all"]);
    assert_eq!(context, (&json!(48), &json!(48)));
    assert_eq!((&props["kv_unified"], &props["n_parked"]), (&json!(true), &json!(0)));
    let has_parked = || {
        let slots = server.get("/slots").json();
        slots.as_array().unwrap().iter().any(|slot| slot["state"] == "parked")
    };
    // Short answers may miss each other, and be over before anybody looks.
    let end = Instant::now() + Duration::from_secs(120);
    let mut is_seen = false;
    while !is_seen {
        assert!(Instant::now() < end, "no text is parked");
        std::thread::scope(|scope| {
            let server = &server;
            let answers: Vec<_> = (0..3).map(|i| scope.spawn(move || ask(server, i))).collect();
            while !answers.iter().all(|answer| answer.is_finished()) {
                is_seen |= has_parked();
            }
            for (answer, expected) in answers.into_iter().zip(&expected) {
                assert_eq!(answer.join().unwrap(), *expected);
            }
        });
    }
    assert!(series(&server, "moeba_parked_total") >= 1.0);
    assert_eq!(series(&server, "moeba_requests_parked"), 0.0);
    assert!(series(&server, "moeba_kv_cache_usage_ratio") <= 1.0);
    // One text may have all, and none may have more.
    let long = vec![7; 44];
    let body = |prompt: &[u32]| json!({ "prompt": prompt, "n_predict": 99, "ignore_eos": true });
    let answer = server.post("/completion", &body(&long)).json();
    assert_eq!((&answer["stop_type"], &answer["tokens_evaluated"]), (&json!("limit"), &json!(44)));
    let error = server.post("/completion", &body(&[7; 48])).error(400);
    assert!(error.contains("48"), "{error}");
}

#[test]
fn the_number_of_texts_decides_whether_they_share() {
    let context = |flags: &[&str]| {
        let server = start(&[&["-c", "512"], flags].concat());
        let props = server.get("/props").json();
        (props["kv_unified"].clone(), props["default_generation_settings"]["n_ctx"].clone())
    };
    let shared = (json!(true), json!(512));
    let even = (json!(false), json!(128));
    assert_eq!(context(&[]), shared);
    assert_eq!(context(&["-no-kvu"]), even);
    assert_eq!(context(&["-np", "4"]), even);
    assert_eq!(context(&["-np", "4", "-kvu"]), shared);
    assert_eq!(context(&["-np", "1", "-kvu"]), (json!(false), json!(512)));
}
