//! Drafts change no bit of a text: tokens, probabilities and ends are those without.

use common::jobs::{Sink, compare_drafts as compare, core, job_of, run_in};
use common::{convert_golden, golden_options, load, repo};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{
    DraftCounts, DraftSource, Engine, EngineOptions, Limits, Request, SpecMode, Speculation,
};
use moeba::sample::grammar::Grammar;
use moeba::sample::{SamplerOptions, XtcOptions};
use moeba::tokenizer::EncodeOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn demo_path() -> PathBuf {
    repo().join("models/demo/moeba-demo.gguf")
}

fn demo(options: EngineOptions) -> Arc<Engine> {
    load(&demo_path(), &EngineOptions { n_threads: Some(2), n_ctx: Some(256), ..options })
}

fn request(engine: &Engine, prompt: &str, n_predict: usize) -> Request {
    Request {
        prompt: engine.tokenizer().encode(prompt, EncodeOptions::PROMPT),
        limits: Limits { n_predict: Some(n_predict), ignore_eos: true, ..Limits::default() },
        sampling: SamplerOptions { temp: 0.0, seed: Some(11), ..SamplerOptions::default() },
        ..Request::default()
    }
}

const REPEATED: &str = "A queue is a list. A stack is a list. A queue is a list. A stack is a \
                        list. A queue is a list. A stack is";

#[test]
fn every_way_of_choosing_gives_the_same_tokens() {
    let engine = demo(EngineOptions::default());
    let base = request(&engine, REPEATED, 48);
    let sampling = |change: fn(&mut SamplerOptions)| {
        let mut request = base.clone();
        change(&mut request.sampling);
        request
    };
    let requests = [
        ("greedy", base.clone()),
        ("sampled", sampling(|o| o.temp = 0.7)),
        ("hot", sampling(|o| o.temp = 1.5)),
        ("few", sampling(|o| (o.temp, o.top_k) = (0.9, 5))),
        ("penalties", sampling(|o| (o.repeat_penalty, o.presence_penalty) = (1.2, 0.5))),
        (
            "xtc",
            sampling(|o| {
                o.temp = 0.8;
                o.xtc = XtcOptions { probability: 0.5, threshold: 0.05 };
            }),
        ),
        ("dry", sampling(|o| o.dry.multiplier = 0.8)),
        ("mirostat", sampling(|o| (o.temp, o.mirostat.version) = (0.8, 2))),
    ];
    let mut n = DraftCounts::default().all();
    for (name, request) in &requests {
        let of_one = compare(&engine, name, request, &[]).all();
        (n.n, n.n_accepted) = (n.n + of_one.n, n.n_accepted + of_one.n_accepted);
    }
    // Some are right, and some are not.
    assert!(n.n_accepted > 20 && n.n > n.n_accepted, "{n:?}");
}

#[test]
fn texts_end_where_they_end_without_drafts() {
    let engine = demo(EngineOptions::default());
    for n_predict in [0, 1, 2, 3, 5, 17] {
        compare(&engine, "length", &request(&engine, REPEATED, n_predict), &[]);
    }
    let mut stopped = request(&engine, REPEATED, 60);
    stopped.limits.stops = vec!["list. A".into()];
    let drafts = compare(&engine, "stop", &stopped, &[]);
    assert!(drafts.all().n > 0);
    // The context is full before the answer's limit.
    let full = request(&engine, &REPEATED.repeat(4), 999);
    assert!(compare(&engine, "context", &full, &[]).all().n_accepted > 0);
}

#[test]
fn a_prediction_is_followed_as_far_as_it_is_right() {
    let engine = demo(EngineOptions::default());
    let base = request(&engine, "Explain how a program reads a file.", 40);
    let (text, _) = run_in(&mut core(&engine, 1, 0), &engine, &base);
    let mut prediction: Vec<u32> = text.tokens.iter().map(|(id, _)| *id).collect();
    let of = |counts: DraftCounts| counts.of(DraftSource::Prediction);
    let right = of(compare(&engine, "right", &base, &prediction));
    assert!(right.n_accepted >= 30 && right.n == right.n_accepted, "{right:?}");
    // One token is another: the rest is found again.
    prediction[12] = prediction[12].wrapping_add(1) % 200;
    let edited = of(compare(&engine, "edited", &base, &prediction));
    assert!(edited.n_accepted >= 20 && edited.n > edited.n_accepted, "{edited:?}");
    let sampled = SamplerOptions { temp: 0.8, ..base.sampling.clone() };
    compare(&engine, "sampled", &Request { sampling: sampled, ..base }, &prediction);
}

#[test]
fn text_that_a_grammar_forces_is_drafted() {
    let engine = demo(EngineOptions::default());
    let schema = serde_json::json!({
        "type": "object",
        "properties": { "description": { "type": "integer" }, "alternatives": { "enum": ["one"] } },
        "required": ["description", "alternatives"],
        "additionalProperties": false,
    });
    let grammars = [
        Grammar::Gbnf("root ::= \"the answer is \" [0-9] [0-9] \" of one hundred\"".into()),
        Grammar::Regex("(yes|no), because (it|this) is what the documentation says".into()),
        Grammar::JsonSchema(schema),
    ];
    for grammar in grammars {
        let constraint = engine.grammars().unwrap().constraint(&grammar).unwrap();
        for temp in [0.0, 1.2] {
            let mut request = request(&engine, "Is it?", 60);
            request.sampling.temp = temp;
            request.constraint = Some(constraint.clone());
            let drafts = compare(&engine, &format!("{grammar:?}"), &request, &[]);
            let forced = drafts.of(DraftSource::Grammar);
            assert!(forced.n_accepted > 0, "{grammar:?}: {drafts:?}");
        }
    }
}

/// With room for some of the experts, whose eviction sees the rows of drafts, too.
#[test]
fn streamed_experts_and_their_policies_change_nothing() {
    for policy in ["moepic", "finemoe", "moe-infinity"] {
        let engine = demo(EngineOptions {
            ram: RamBudget::Percent(40.0),
            policy: policy.parse().unwrap(),
            ..EngineOptions::default()
        });
        let drafts = compare(&engine, policy, &request(&engine, REPEATED, 40), &[]);
        assert!(drafts.all().n_accepted > 0, "{policy}");
        assert!(engine.model().hierarchy().check_integrity() || engine.disk_counters().is_some());
    }
}

/// Texts that share a pass have no drafts; one that is alone again has.
#[test]
fn texts_of_one_scheduler_are_those_that_they_are_alone() {
    let engine = demo(EngineOptions { n_sessions: 3, ..EngineOptions::default() });
    let request = |i: usize, mode| {
        let prompt = &REPEATED[3 * i..];
        let speculation = Speculation { mode, ..Speculation::default() };
        Request { speculation, ..request(&engine, prompt, 10 + 25 * i) }
    };
    let alone = |i| run_in(&mut core(&engine, 1, 0), &engine, &request(i, SpecMode::Off)).0;
    let mut core = core(&engine, 3, 8 << 20);
    for round in 0..2 {
        let sinks: Vec<Sink> = (0..3).map(|_| Sink::default()).collect();
        for (i, sink) in sinks.iter().enumerate() {
            core.submit(job_of(&engine, request(i, SpecMode::Always), sink.clone()));
        }
        while core.step() {}
        for (i, sink) in sinks.iter().enumerate() {
            let text = sink.text.lock().unwrap().clone();
            assert!(text == alone(i), "round {round}, text {i}");
        }
    }
    let counts = core.board().read().counts;
    assert!(counts.drafts.all().n_accepted > 0 && counts.n_verified < counts.n_steps);
}

/// No position can be taken from a state: refused drafts are taken back by copies of it.
#[test]
fn models_with_a_state_go_back_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3next", "f32", folder.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(128), ..golden_options() });
    let request = Request {
        prompt: (0..40).map(|i| i % 5 + 3).collect(),
        limits: Limits { n_predict: Some(12), ignore_eos: true, ..Limits::default() },
        ..Request::default()
    };
    let request =
        Request { sampling: SamplerOptions { temp: 0.0, ..SamplerOptions::default() }, ..request };
    let (text, _) = run_in(&mut core(&engine, 1, 0), &engine, &request);
    let mut prediction: Vec<u32> = text.tokens.iter().map(|(id, _)| *id).collect();
    let right = compare(&engine, "right", &request, &prediction).all();
    assert!(right.n_accepted >= 8 && right.n == right.n_accepted, "{right:?}");
    prediction.iter_mut().skip(2).step_by(3).for_each(|id| *id = (*id + 1) % 300);
    let wrong = compare(&engine, "wrong", &request, &prediction).all();
    assert!(wrong.n_accepted > 0 && wrong.n > wrong.n_accepted, "{wrong:?}");
    // Beside the states that pages keep.
    let speculation = Speculation { mode: SpecMode::Always, prediction };
    let (again, drafts) =
        run_in(&mut core(&engine, 1, 8 << 20), &engine, &Request { speculation, ..request });
    assert!(again == text && drafts.all().n > drafts.all().n_accepted);
}

/// A model that drafts for itself foretells greedy texts, and few of hot ones.
#[test]
fn another_model_drafts() {
    for ram in [RamBudget::Auto, RamBudget::Percent(40.0)] {
        let draft_model = Some(demo_path());
        let engine = demo(EngineOptions { draft_model, ram, ..EngineOptions::default() });
        let alone = Engine::plan_of(&demo_path(), engine.options()).unwrap().sizes;
        assert!(alone.draft_bytes > alone.dense_bytes);
        let mut request = request(&engine, "Explain how a program reads a file.", 40);
        let greedy = compare(&engine, "greedy", &request, &[]).of(DraftSource::Model);
        assert!(greedy.n_accepted >= 10 && greedy.n == greedy.n_accepted, "{greedy:?}");
        request.sampling.temp = 1.5;
        let hot = compare(&engine, "hot", &request, &[]).of(DraftSource::Model);
        assert!(hot.n_accepted < hot.n, "{hot:?}");
        // Prompts that begin as the last text, and a text that fills the context.
        request.prompt.truncate(4);
        compare(&engine, "shorter", &request, &[]);
        request.limits.n_predict = None;
        compare(&engine, "context", &request, &[]);
    }
}

#[test]
fn models_that_cannot_draft_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let with = |path: &Path, draft: &Path| {
        let draft_model = Some(draft.to_owned());
        let options = EngineOptions { n_ctx: Some(128), draft_model, ..golden_options() };
        let error = Engine::load(path, &options, &mut |_| ()).err().unwrap().to_string();
        assert!(error.starts_with(&draft.display().to_string()), "{error}");
        error
    };
    let state = convert_golden("qwen3next", "f32", folder.path());
    assert!(with(&state, &state).ends_with("which a refused draft cannot be taken out of"));
    let other = convert_golden("llama", "f32", folder.path());
    let error = with(&demo_path(), &other);
    assert!(error.ends_with("is another one than the model's"), "{error}");
    let none = folder.path().join("none.gguf");
    assert!(with(&demo_path(), &none).contains("No such file"));
}
