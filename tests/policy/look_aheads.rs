//! A look-ahead costs a product with a router, so it is computed while a predictor uses it, and
//! never otherwise.

use common::stream::{self, WIDE_LAYERS};
use moeba::engine::{EngineOptions, ProfileChoice, TestHooks, Want};
use moeba::gguf::Gguf;
use moeba::policy::Profile;
use std::path::Path;

/// Tokens of decode.
const N_DECODE: usize = 12;

/// The look-aheads that a prompt costs, and then the continuation. `auto` keeps `kept` at first.
fn look_aheads(path: &Path, policy: &str, kept: Option<&str>, share: f64) -> [u64; 2] {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.moeba");
    let mut profile = Profile::default();
    if let Some(kept) = kept {
        profile.set("auto", super::auto_choice(kept));
    }
    std::fs::write(&file, profile.encode(&Gguf::open(path).unwrap().key())).unwrap();
    let options = EngineOptions {
        ram: stream::budget(path, share),
        policy: policy.parse().unwrap(),
        profile: ProfileChoice::At(file),
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
        ("on-demand", None, 0),
        ("predictor=counts", None, 0),
        ("predictor=all-next", None, 0),
        ("moe-infinity", None, 0),
        ("finemoe", None, 0),
        ("predictor=next-layer", None, all),
        ("predictor=trajectory", None, all),
        ("moepic", None, all),
        ("auto", Some("no prefetch"), 0),
        ("auto", Some("eamc"), 0),
        ("auto", Some("map"), 0),
        ("auto", Some("next-layer"), all),
        ("auto", None, all),
    ];
    for (policy, kept, expected) in cases {
        let found = look_aheads(&wide, policy, kept, 0.3);
        assert_eq!(found, [0, expected], "{policy}, {kept:?}");
    }
}
