//! Models that fill in masked tokens: the server continues texts, so it refuses them.

use common::convert_golden;
use moeba::engine::{Engine, EngineOptions};
use moeba::server::Server;
use serde_json::json;

use crate::support;

#[test]
fn a_request_for_a_diffusion_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("llada-moe", "f32", dir.path());
    let server = Server::bind(support::options()).unwrap();
    let options = EngineOptions {
        n_ctx: Some(128),
        n_sessions: 1,
        n_threads: Some(1),
        ..EngineOptions::default()
    };
    let engine = Engine::load(&path, &options, &mut |_| ()).unwrap();
    server.open(support::loaded(engine, options)).unwrap();
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 1});
    for stream in [false, true] {
        let body = support::merged(body.clone(), &json!({"stream": stream}));
        let error = support::post_to(server.url(), "/v1/completions", &body).error(400);
        assert!(error.contains("diffusion"), "{error}");
    }
    server.stop();
}

#[test]
fn the_server_does_not_start_with_a_diffusion_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("llada-moe", "f32", dir.path());
    let serve = common::moeba().arg("serve").arg(&path).args(["--port", "0"]).output().unwrap();
    assert!(!serve.status.success());
    let said = String::from_utf8(serve.stderr).unwrap();
    assert!(said.contains("diffusion") && said.contains("moeba diffuse"), "{said}");
}
