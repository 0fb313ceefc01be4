//! Disks that fail, files that shrink, users who interrupt: the request fails with a sentence or
//! finishes, the engine lives on, and the next request is right.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::convert_golden;
use common::stream::*;
use moeba::cancel::Cancel;
use moeba::engine::{Engine, EngineOptions, EvalHooks, TestHooks, Want};
use moeba::experts::disk::IoKind;
use moeba::{Error, interrupt};

struct Model {
    /// The model's folder, for as long as this lives.
    _dir: tempfile::TempDir,
    path: PathBuf,
    tokens: Vec<u32>,
    expected: Answer,
}

fn model(file: impl FnOnce(&Path) -> PathBuf, n_tokens: usize) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let (path, tokens) = (file(dir.path()), tokens(n_tokens, 1));
    Model { expected: in_place(&path, &tokens), _dir: dir, path, tokens }
}

impl Model {
    fn engine(&self, share: f64, io: IoKind, disk: &Arc<Disk>) -> Arc<Engine> {
        let options = EngineOptions {
            n_threads: Some(2),
            ram: budget(&self.path, share),
            policy: "mixtral-offloading".parse().unwrap(),
            io,
            test: TestHooks { faults: Some(disk.clone()), ..Default::default() },
            ..EngineOptions::default()
        };
        load(&self.path, &options)
    }

    /// The next request is right, and nothing is left of those before.
    #[track_caller]
    fn expect_right(&self, engine: &Arc<Engine>) {
        for part in [usize::MAX, 1] {
            let answer = ask(engine, &self.tokens, part).unwrap();
            assert!(answer == self.expected, "{part}: another answer");
            expect_rest(engine);
        }
    }

    fn name(&self) -> &str {
        self.path.file_name().unwrap().to_str().unwrap()
    }
}

fn kinds() -> [IoKind; 2] {
    [uring(), IoKind::Pread]
}

#[track_caller]
fn expect_words(error: &Error, words: &[&str]) {
    let sentence = error.to_string();
    for word in words {
        assert!(sentence.contains(word), "no {word:?} in {sentence:?}");
    }
    assert!(!sentence.contains('\n'), "{sentence:?}");
}

#[test]
fn a_bad_place_of_the_disk_fails_requests_until_it_is_mended() {
    let _alone = crate::turn();
    let wide = model(wide, 10);
    let golden = model(|dir| granule_major(&convert_golden("qwen2moe", "q8_0", dir)), 10);
    for (i, share) in [0.0, 0.3, 1.0].into_iter().enumerate() {
        for (j, io) in kinds().into_iter().enumerate() {
            for (model, one_in) in [(&wide, 40), (&golden, 10)] {
                let seed = (10 * i + j) as u64;
                let disk = Disk::bad(seed, one_in, u64::MAX);
                let engine = model.engine(share, io, &disk);
                for part in [1, usize::MAX] {
                    let error = ask(&engine, &model.tokens, part).unwrap_err();
                    assert!(matches!(error, Error::Load(_)), "{error:?}");
                    let place = ["expert ", " of layer ", "offset ", "os error 5", model.name()];
                    expect_words(&error, &place);
                    expect_rest(&engine);
                }
                assert!(disk.n_failed() > 0);
                disk.mend();
                model.expect_right(&engine);
            }
        }
    }
}

/// The session that has met an error goes on where it was.
#[test]
fn a_session_survives_its_errors() {
    let _alone = crate::turn();
    let model = model(wide, 12);
    let disk = Disk::bad(3, 30, u64::MAX);
    let engine = model.engine(0.2, uring(), &disk);
    let mut session = engine.new_session().unwrap();
    let mut logits = Vec::new();
    let mut n_errors = 0;
    for token in &model.tokens {
        loop {
            let n_past = session.n_past();
            match session.eval(&[*token], Want::Last) {
                Ok(last) => {
                    logits.extend(last.all().iter().map(|v| v.to_bits()));
                    break;
                }
                Err(error) => {
                    assert!(matches!(error, Error::Load(_)), "{error:?}");
                    assert_eq!(session.n_past(), n_past);
                    n_errors += 1;
                    disk.bad_one_in.store(0, SeqCst);
                }
            }
        }
        disk.bad_one_in.store(30, SeqCst);
    }
    assert!(n_errors > 0);
    assert!(logits == model.expected.logits);
    expect_rest(&engine);
}

/// A pass that fails in the middle has advanced the state of some layers: the session is empty or
/// where it was, and what is fed to it from there on is computed as if nothing had happened.
#[test]
fn a_state_is_never_left_half_advanced() {
    let _alone = crate::turn();
    for (name, has_state) in [("qwen3next", true), ("qwen35moe", true), ("gpt_oss", false)] {
        let model = model(|dir| convert_golden(name, "f32", dir), 14);
        let n_vocab = model.expected.logits.len() / model.tokens.len();
        let disk = Disk::bad(5, 12, u64::MAX);
        let engine = model.engine(0.0, IoKind::Pread, &disk);
        let mut session = engine.new_session().unwrap();
        let (mut n_errors, mut n_empty) = (0, 0);
        for end in 1..=model.tokens.len() {
            let mut last = Vec::new();
            while session.n_past() < end {
                let before = session.n_past();
                let result = session.eval(&model.tokens[before..end], Want::Last);
                let result = result.map(|l| last = l.all().iter().map(|v| v.to_bits()).collect());
                if result.is_err() {
                    assert_eq!(session.n_past(), if has_state { 0 } else { before });
                    n_errors += 1;
                    n_empty += usize::from(before > 0 && session.n_past() == 0);
                    disk.bad_one_in.store(0, SeqCst);
                }
            }
            assert!(last == model.expected.logits[(end - 1) * n_vocab..end * n_vocab], "{name}");
            disk.bad_one_in.store(12, SeqCst);
        }
        assert!(n_errors > 3 && (n_empty > 0) == has_state, "{name}: {n_errors}, {n_empty}");
        expect_rest(&engine);
    }
}

#[test]
fn a_bad_place_that_is_read_after_all_is_no_error() {
    let _alone = crate::turn();
    let model = model(wide, 8);
    for io in kinds() {
        for times in [1, 2] {
            let disk = Disk::bad(times, 10, times);
            let engine = model.engine(0.1, io, &disk);
            model.expect_right(&engine);
            assert!(disk.n_failed() > 0);
        }
    }
}

#[test]
fn a_file_that_shrinks_fails_requests_until_it_is_loaded_again() {
    let _alone = crate::turn();
    for granule in [false, true] {
        let layout = |path: PathBuf| if granule { granule_major(&path) } else { path };
        let model = model(|dir| layout(wide(dir)), 10);
        let whole = std::fs::read(&model.path).unwrap();
        for io in kinds() {
            for n_left in [whole.len() / 2, 5000, 0] {
                let engine = model.engine(0.1, io, &Arc::default());
                model.expect_right(&engine);
                let mut file = File::options().write(true).open(&model.path).unwrap();
                file.set_len(n_left as u64).unwrap();
                for part in [usize::MAX, 1] {
                    let error = ask(&engine, &model.tokens, part).unwrap_err();
                    assert!(matches!(error, Error::Load(_)), "{error:?}");
                    expect_words(&error, &["expert ", "offset ", "truncated", model.name()]);
                    expect_rest(&engine);
                }
                file.write_all(&whole).unwrap();
                // Nothing says that what was read in between were the model's bytes.
                let error = ask(&engine, &model.tokens, 1).unwrap_err();
                expect_words(&error, &["has changed since it was loaded"]);
                model.expect_right(&model.engine(0.1, io, &Arc::default()));
            }
        }
    }
}

#[test]
fn a_slow_disk_is_waited_for() {
    let _alone = crate::turn();
    let model = model(|dir| convert_golden("mixtral", "q8_0", dir), 4);
    for io in kinds() {
        let disk = Disk::slow(100);
        let engine = model.engine(0.0, io, &disk);
        for part in [usize::MAX, 1] {
            assert!(ask(&engine, &model.tokens, part).unwrap() == model.expected);
        }
        assert!(engine.expert_counters().unwrap().stall_ns > 300_000_000);
        disk.mend();
        model.expect_right(&engine);
    }
}

/// The request ends promptly whenever the user wishes, and leaves nothing behind.
fn interrupted(model: &Model, engine: &Arc<Engine>, disk: &Disk, part: usize, after: Duration) {
    disk.slow_ms.store(100, SeqCst);
    let (error, late) = std::thread::scope(|scope| {
        let user = scope.spawn(|| {
            std::thread::sleep(after);
            interrupt::set();
            Instant::now()
        });
        let error = ask(engine, &model.tokens, part).unwrap_err();
        let ended = Instant::now();
        (error, ended.duration_since(user.join().unwrap()))
    });
    assert!(matches!(error, Error::Interrupted), "{error:?}");
    assert!(late < Duration::from_secs(3), "{late:?} after it was asked to end");
    interrupt::clear();
    disk.mend();
    expect_rest(engine);
    model.expect_right(engine);
}

#[test]
fn requests_are_interrupted_in_every_phase() {
    let _alone = crate::turn();
    let model = model(wide, 12);
    for (share, io) in [0.0, 0.4].into_iter().zip(kinds()) {
        let disk = Arc::<Disk>::default();
        let engine = model.engine(share, io, &disk);
        // Of a prompt: before its first wave, in later ones and in later layers; of decode: while
        // demand is waited for and while prefetches are queued or on their way.
        for part in [usize::MAX, 1] {
            for ms in [0, 1, 30, 110, 250, 430] {
                interrupted(&model, &engine, &disk, part, Duration::from_millis(ms));
            }
        }
    }
}

/// Two requests of one engine on a slow disk: the one that is cancelled ends promptly, the other
/// one is answered as if it were alone, whether its passes wait for the same experts or not.
#[test]
fn a_cancelled_request_leaves_the_others_alone() {
    let _alone = crate::turn();
    let model = model(wide, 12);
    for (share, io) in [0.0, 0.4].into_iter().zip(kinds()) {
        for part in [usize::MAX, 1] {
            for ms in [20, 130] {
                let disk = Disk::slow(30);
                let engine = model.engine(share, io, &disk);
                let cancel = Cancel::new();
                let mut session = engine.new_session().unwrap();
                session.set_cancel(cancel.clone());
                let (cancelled, late, other) = std::thread::scope(|scope| {
                    let cancelled = scope.spawn(|| {
                        // Longer than the others take.
                        let again = model.tokens.iter().cycle().take(240).copied();
                        let all: Vec<u32> = again.collect();
                        let mut parts = all.chunks(part.min(48));
                        let why = parts.find_map(|part| session.eval(part, Want::None).err());
                        (why, Instant::now())
                    });
                    let other = scope.spawn(|| ask(&engine, &model.tokens, part));
                    std::thread::sleep(Duration::from_millis(ms));
                    let since = Instant::now();
                    cancel.cancel();
                    let (why, ended) = cancelled.join().unwrap();
                    (why, ended.duration_since(since), other.join().unwrap())
                });
                assert!(matches!(cancelled, Some(Error::Interrupted)), "{cancelled:?}");
                assert!(late < Duration::from_secs(3), "{late:?} after it was cancelled");
                assert!(other.unwrap() == model.expected, "{part}, {ms} ms: another answer");
                expect_rest(&engine);
                // Its token stays set, a new one lets the session go on.
                assert!(matches!(session.eval(&[5], Want::None), Err(Error::Interrupted)));
                session.set_cancel(Cancel::new());
                session.truncate(0);
                session.eval(&[5], Want::None).unwrap();
                disk.mend();
                model.expect_right(&engine);
            }
        }
    }
}

/// A prompt that takes long hears the user before each layer and keeps its whole micro-batches.
#[test]
fn a_prompt_is_interrupted_between_layers() {
    let _alone = crate::turn();
    let model = model(wide, 12);
    let options = EngineOptions { n_ubatch: Some(8), io: IoKind::Mmap, ..Default::default() };
    let engine = Engine::load(&model.path, &options, &mut |_| ()).unwrap();
    let mut session = engine.new_session().unwrap();
    let mut heard = Vec::new();
    let mut progress = |n: usize| {
        heard.push(n);
        if n == 10 {
            interrupt::set();
        }
    };
    let hooks = EvalHooks { progress: Some(&mut progress), ..EvalHooks::default() };
    let error = session.eval_with(&model.tokens, Want::Last, hooks).unwrap_err();
    interrupt::clear();
    assert!(matches!(error, Error::Interrupted) && session.n_past() == 8, "{error:?}");
    // Three layers of eight tokens, and the first two of four.
    assert_eq!(heard, [0, 2, 5, 8, 9, 10]);
    let last = session.eval(&model.tokens[8..], Want::Last).unwrap().all();
    let last: Vec<u32> = last.iter().map(|v| v.to_bits()).collect();
    assert!(model.expected.logits.ends_with(&last));
}

/// Prefetches that no demand has asked for yet, on a disk that does not answer for a while.
#[test]
fn queued_prefetches_do_not_delay_an_interruption() {
    let _alone = crate::turn();
    let model = model(wide, 16);
    for io in kinds() {
        let disk = Arc::<Disk>::default();
        let engine = model.engine(0.5, io, &disk);
        let mut session = engine.new_session().unwrap();
        for token in &model.tokens {
            session.eval(&[*token], Want::None).unwrap();
        }
        disk.slow_ms.store(100, SeqCst);
        // Until a token leaves prefetches behind.
        let mut n = 0;
        while engine.model().hierarchy().check_integrity() {
            session.eval(&tokens(1, 50 + n), Want::None).unwrap();
            n += 1;
            assert!(n < 50, "no prefetch is ever queued");
        }
        interrupt::set();
        let since = Instant::now();
        let error = session.eval(&[5], Want::Last).unwrap_err();
        assert!(matches!(error, Error::Interrupted) && since.elapsed() < Duration::from_secs(3));
        interrupt::clear();
        disk.mend();
        session.truncate(0);
        drop(session);
        model.expect_right(&engine);
    }
}

/// With reads on their way, an engine ends when they do and not later.
#[test]
fn an_engine_ends_with_reads_on_their_way() {
    let _alone = crate::turn();
    let model = model(wide, 16);
    for io in kinds() {
        let disk = Disk::slow(100);
        let engine = model.engine(0.0, io, &disk);
        let error = std::thread::scope(|scope| {
            let asking = scope.spawn(|| ask(&engine, &model.tokens, 1).unwrap_err());
            std::thread::sleep(Duration::from_millis(150));
            interrupt::set();
            asking.join().unwrap()
        });
        assert!(matches!(error, Error::Interrupted));
        interrupt::clear();
        let since = Instant::now();
        drop(engine);
        assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
    }
}
