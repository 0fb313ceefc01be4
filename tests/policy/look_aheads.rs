//! A look-ahead costs a product with a router, so it is computed while a predictor uses it, and
//! never otherwise.

use common::stream::{self, WIDE_LAYERS};
use moeba::engine::{EngineOptions, ProfileChoice, TestHooks, Want};
use std::path::Path;

/// Tokens of decode.
const N_DECODE: usize = 12;

/// The look-aheads that a prompt costs, and then the continuation.
fn look_aheads(path: &Path, policy: &str, share: f64) -> [u64; 2] {
    let options = EngineOptions {
        ram: stream::budget(path, share),
        policy: policy.parse().unwrap(),
        profile: ProfileChoice::Nowhere,
        test: TestHooks { lockstep: true, ..Default::default() },
        n_threads: Some(1),
        ..EngineOptions::default()
    };
    let engine = stream::load(path, &options);
    let mut session = engine.new_session().unwrap();
    let tokens = stream::tokens(8 + N_DECODE, 1);
    session.eval(&tokens[..8], Want::None).unwrap();
    let of_prompt = engine.model().hierarchy().n_look_aheads();
    for token in &tokens[8..] {
        session.eval(&[*token], Want::None).unwrap();
    }
    [of_prompt, engine.model().hierarchy().n_look_aheads() - of_prompt]
}

#[test]
fn look_aheads_are_computed_for_those_that_want_them_alone() {
    let folder = tempfile::tempdir().unwrap();
    let wide = stream::wide(folder.path());
    let all = (N_DECODE * WIDE_LAYERS) as u64;
    let cases = [
        ("on-demand", 0),
        ("predictor=counts", 0),
        ("predictor=all-next", 0),
        ("moe-infinity", 0),
        ("finemoe", 0),
        ("predictor=next-layer", all),
        ("predictor=trajectory", all),
        ("moepic", all),
    ];
    for (policy, expected) in cases {
        assert_eq!(look_aheads(&wide, policy, 0.3), [0, expected], "{policy}");
    }
}
