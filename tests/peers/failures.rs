//! Whatever a peer does, the text goes on and has the same bits.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::repo;
use common::stream::{Answer, expect_rest, tokens};
use moeba::engine::Engine;
use moeba::engine::plan::ram::RamBudget;

use crate::middle::{Middle, Mode};
use crate::support::{answer, expected, peer, peer_process, signal, slow_head, wait_for};

fn demo() -> PathBuf {
    repo().join("models/demo/moeba-demo.gguf")
}

/// Decodes, and calls `strike` in the middle.
fn struck(engine: &Arc<Engine>, tokens: &[u32], strike: impl FnOnce()) -> Answer {
    let mut session = engine.new_session().unwrap();
    let mut logits = Vec::new();
    let mut eval = |tokens: &[u32]| {
        session.eval_all(tokens, &mut |_, l| logits.extend(l.iter().map(|l| l.to_bits()))).unwrap();
    };
    let half = tokens.len() / 2;
    eval(&tokens[..8]);
    tokens[8..half].chunks(1).for_each(&mut eval);
    strike();
    tokens[half..].chunks(1).for_each(&mut eval);
    Answer { logits, experts: Vec::new() }
}

#[test]
fn damaged_answers_are_computed_here_and_the_peer_comes_back() {
    let tokens = tokens(32, 2);
    let expected = expected(&demo(), &tokens);
    let peers = [peer(&demo(), "25%".parse().unwrap()), peer(&demo(), RamBudget::Auto)];
    let middle = Middle::to(&peers[0].url);
    let engine = slow_head(&demo(), &[&middle.url, &peers[1].url]);
    for mode in [Mode::Flip, Mode::Cut, Mode::More, Mode::Refuse, Mode::Closed] {
        wait_for(&engine, 2);
        let before = engine.peer_counters().unwrap().lost;
        assert!(struck(&engine, &tokens, || middle.set(mode)) == expected, "{mode:?}");
        let lost = engine.peer_counters().unwrap().lost - before;
        assert!(lost > 0, "{mode:?} has cost nothing");
        // A prompt meets it, too.
        assert!(answer(&engine, &tokens, 4).unwrap() == expected, "{mode:?}");
        middle.set(Mode::Pass);
    }
    wait_for(&engine, 2);
    expect_rest(&engine);
}

#[test]
fn a_peer_that_hangs_is_waited_for_once() {
    let tokens = tokens(32, 4);
    let expected = expected(&demo(), &tokens);
    let of = peer(&demo(), RamBudget::Auto);
    let middle = Middle::to(&of.url);
    let engine = slow_head(&demo(), &[&middle.url]);
    // Its times are known then.
    assert!(answer(&engine, &tokens, 16).unwrap() == expected);
    let lost = || engine.peer_counters().unwrap().lost;
    let start = Instant::now();
    assert!(struck(&engine, &tokens, || middle.set(Mode::Hang)) == expected);
    let (n, time) = (lost(), start.elapsed());
    assert!(n > 0 && engine.n_peers() == Some((0, 1)), "{n}");
    // Far from the time that a connection has.
    assert!(time < Duration::from_secs(20), "{time:?}");
    assert!(answer(&engine, &tokens, 16).unwrap() == expected);
    assert_eq!(lost(), n, "a peer that is late was asked");
    middle.set(Mode::Pass);
    wait_for(&engine, 1);
    assert!(answer(&engine, &tokens, 16).unwrap() == expected);
    assert_eq!(lost(), n);
}

#[test]
fn peers_are_killed_frozen_and_started_again() {
    let tokens = tokens(40, 6);
    let expected = expected(&demo(), &tokens);
    let start = |port: &str| peer_process(&[], &demo(), &["--ram", "50%", "--port", port]);
    let (frozen, mut killed) = (start("0"), start("0"));
    let engine = slow_head(&demo(), &[&frozen.url, &killed.url]);
    assert!(struck(&engine, &tokens, || killed.child.kill().unwrap()) == expected, "killed");
    assert!(engine.peer_counters().unwrap().lost > 0);
    wait_for(&engine, 1);
    let freeze = || signal(&frozen.child, libc::SIGSTOP);
    assert!(struck(&engine, &tokens, freeze) == expected, "frozen");
    wait_for(&engine, 0);
    assert!(answer(&engine, &tokens, 16).unwrap() == expected, "alone");
    signal(&frozen.child, libc::SIGCONT);
    wait_for(&engine, 1);
    let port = killed.url.rsplit(':').next().unwrap().to_owned();
    let _again = start(&port);
    wait_for(&engine, 2);
    let lost = engine.peer_counters().unwrap().lost;
    assert!(answer(&engine, &tokens, 16).unwrap() == expected, "again");
    assert_eq!(engine.peer_counters().unwrap().lost, lost);
}

/// A head that starts before its peers.
#[test]
fn a_peer_may_come_later() {
    let tokens = tokens(24, 8);
    let expected = expected(&demo(), &tokens);
    let of = peer(&demo(), RamBudget::Auto);
    let middle = Middle::to(&of.url);
    middle.set(Mode::Closed);
    let engine = slow_head(&demo(), &[&middle.url]);
    assert_eq!(engine.n_peers(), Some((0, 1)));
    assert!(answer(&engine, &tokens, 8).unwrap() == expected);
    assert_eq!(engine.peer_counters().unwrap().experts, 0);
    middle.set(Mode::Pass);
    wait_for(&engine, 1);
    assert!(answer(&engine, &tokens, 8).unwrap() == expected);
    assert!(engine.peer_counters().unwrap().pairs > 0);
}
