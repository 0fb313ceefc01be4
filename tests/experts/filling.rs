//! Free room is filled while the engine waits for a user: with the experts that the profile knows
//! to be used, so that a second start is warm.

use common::stream::*;
use moeba::engine::{EngineOptions, ProfileChoice};
use moeba::experts::Counters;
use moeba::tokenizer::EncodeOptions;

const STORY: &str = include_str!("../fixtures/demo/story.txt");
const CHAT: &str = include_str!("../fixtures/demo/chat.txt");

/// The cost of the first tokens of a text to an engine that has come to rest before them.
fn first_tokens(profile: ProfileChoice, text: &str) -> Counters {
    let demo = common::repo().join("models/demo/moeba-demo.gguf");
    let ram = budget(&demo, 0.15);
    // Without predictions, hits depend on what is there at first and not on time.
    let policy = "predictor=none,eviction=scan-resistant".parse().unwrap();
    let engine = load(&demo, &EngineOptions { ram, policy, profile, ..EngineOptions::default() });
    expect_rest(&engine);
    let filled = engine.disk_counters().unwrap();
    let tokens = engine.tokenizer().encode(text, EncodeOptions::PROMPT);
    ask(&engine, &tokens[..8], 1).unwrap();
    expect_rest(&engine);
    let after = engine.disk_counters().unwrap();
    // Without what was on its way to be used once.
    assert!(filled.resident_bytes * 4 > after.resident_bytes_max * 3, "room was left");
    after.since(&filled)
}

#[test]
fn a_second_start_is_warm() {
    let folder = tempfile::tempdir().unwrap();
    let profile = ProfileChoice::At(folder.path().join("demo.moeba"));
    first_tokens(profile.clone(), STORY);
    let warm = first_tokens(profile, CHAT);
    let cold = first_tokens(ProfileChoice::Nowhere, CHAT);
    let share = |counters: &Counters| {
        let all = counters.hits_whole + counters.hits_partial + counters.misses;
        counters.hits_whole as f64 / all as f64
    };
    eprintln!("hits of the first tokens: {:.3}, {:.3} cold", share(&warm), share(&cold));
    assert!(share(&warm) > share(&cold));
}
