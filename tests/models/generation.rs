//! `Generation`, driven as a scheduler drives it: one token after the other.

use common::cli::{Model, Tiny, tiny};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{
    Engine, EngineOptions, FinishReason, Generation, Limits, LoadPhase, Logits, Request, Step, Want,
};
use moeba::sample::grammar::{Constraint, Grammar};
use moeba::sample::{SamplerOptions, TokenLogprob};
use std::path::Path;
use std::sync::Arc;

/// A request's result.
#[derive(Debug, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    text: String,
    finish: FinishReason,
    logprobs: Vec<TokenLogprob>,
    /// For each choice whether it needed all logits.
    wanted_all: Vec<bool>,
}

fn engine() -> (Model, Arc<Engine>) {
    let model = tiny(Tiny { chat: true, ..Tiny::default() });
    let engine = Engine::load(&model.path, &EngineOptions::default(), &mut |_| ()).unwrap();
    (model, engine)
}

fn request(n_predict: usize) -> Request {
    let sampling = SamplerOptions { seed: Some(5), ..SamplerOptions::default() };
    let limits = Limits { n_predict: Some(n_predict), ..Limits::default() };
    Request { prompt: b"Hello".map(u32::from).to_vec(), sampling, limits, ..Request::default() }
}

/// Runs a request to its end; `set` sees the generation before its first token.
fn tell(engine: &Arc<Engine>, request: &Request, set: impl Fn(&mut Generation)) -> Told {
    let mut generation = Generation::new(engine, request).unwrap();
    set(&mut generation);
    let mut session = engine.new_session().unwrap();
    let (mut tokens, mut text) = (Vec::new(), String::new());
    let (mut logprobs, mut wanted_all) = (Vec::new(), Vec::new());
    let mut sink = |more: &str| {
        text.push_str(more);
        Ok(())
    };
    let mut next = request.prompt.clone();
    let finish = loop {
        generation.prepare_mask().unwrap();
        wanted_all.push(generation.want() == Want::Last);
        let logits = session.eval(&next, generation.want()).unwrap();
        let token = generation.choose(logits, &mut sink).unwrap();
        tokens.push(token);
        logprobs.extend(generation.last_logprob().cloned());
        match generation.accept(token, session.n_past(), &mut sink).unwrap() {
            Step::Next(token) => next = vec![token],
            Step::Finished(why) => break why,
        }
    };
    generation.finish(&mut sink).unwrap();
    Told { tokens, text, finish, logprobs, wanted_all }
}

fn constraint(engine: &Engine, grammar: &str) -> Constraint {
    engine.grammars().unwrap().constraint(&Grammar::Gbnf(grammar.into())).unwrap()
}

#[test]
fn log_probabilities_change_no_token_and_are_those_of_all_logits() {
    let (_model, engine) = engine();
    let request = request(12);
    let plain = tell(&engine, &request, |_| ());
    let told = tell(&engine, &request, |generation| generation.report_logprobs(20));
    assert_eq!((&told.tokens, &told.text), (&plain.tokens, &plain.text));
    assert!(plain.logprobs.is_empty() && told.wanted_all.iter().all(|all| *all));
    assert_eq!(told.logprobs.len(), told.tokens.len());
    let mut session = engine.new_session().unwrap();
    let mut next = request.prompt.clone();
    for (found, &token) in told.logprobs.iter().zip(&told.tokens) {
        let Logits::All(logits) = session.eval(&next, Want::Last).unwrap() else { panic!("all") };
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = |id: u32| f64::from(logits[id as usize]) - total.ln();
        assert_eq!((found.id, found.top.len()), (token, 20));
        assert!((f64::from(found.logprob) - expected(token)).abs() < 1e-4, "{found:?}");
        for pair in found.top.windows(2) {
            assert!((f64::from(pair[1].logprob) - expected(pair[1].id)).abs() < 1e-4);
            assert!(pair[0].logprob >= pair[1].logprob, "{found:?}");
        }
        next = vec![token];
    }
    // The report is about the model, whatever a grammar allows.
    let told = tell(&engine, &request, |generation| {
        generation.constrain(constraint(&engine, "root ::= \"ab\""));
        generation.report_logprobs(0);
    });
    assert_eq!(told.text, "ab");
    assert!(told.logprobs.iter().all(|found| found.logprob < 0.0 && found.top.is_empty()));
}

#[test]
fn a_text_in_its_grammar_ends_where_the_grammar_does() {
    let (_model, engine) = engine();
    let told = |grammar: &str| {
        let constraint = Some(constraint(&engine, grammar));
        tell(&engine, &Request { constraint, ..request(40) }, |_| ())
    };
    let whole = told("root ::= \"a\" [bc] \"dé\"");
    assert!(["abdé", "acdé"].contains(&whole.text.as_str()), "{whole:?}");
    assert_eq!((whole.finish, whole.tokens.len()), (FinishReason::StopToken, 5));
    assert!(whole.wanted_all.iter().all(|all| *all));
    let open = told("root ::= [xyz]{3,}");
    assert!(open.text.chars().all(|c| "xyz".contains(c)) && open.text.len() >= 3, "{open:?}");
    assert_eq!(told("root ::= [xyz]{3,}"), open);
}

#[test]
fn a_free_text_that_may_end_wants_few_logits_until_its_trigger() {
    let (_model, engine) = engine();
    let free = tell(&engine, &request(30), |_| ());
    // The third token of the free text is the trigger.
    let trigger = engine.tokenizer().piece(free.tokens[2]).unwrap().to_vec();
    let started = |resuming: bool| {
        let constraint = constraint(&engine, "root ::= \"<call>\"").after([trigger.clone()]);
        let constraint = if resuming { constraint.resuming() } else { constraint };
        tell(&engine, &request(30), |generation| generation.constrain(constraint.clone()))
    };
    let told = started(false);
    let n_free = 1 + told.tokens.iter().position(|&id| id == free.tokens[2]).unwrap();
    assert_eq!(told.tokens[..n_free], free.tokens[..n_free]);
    assert!(told.text.ends_with("<call>") && told.finish == FinishReason::StopToken, "{told:?}");
    // A text that must come to its grammar may not end before: that takes all logits.
    assert!(told.wanted_all.iter().all(|all| *all), "{:?}", told.wanted_all);
    let resumed = started(true);
    let n_called = told.tokens.len();
    assert!(resumed.wanted_all[..n_free].iter().all(|all| !all), "{:?}", resumed.wanted_all);
    assert!(resumed.wanted_all[n_free..n_called].iter().all(|all| *all), "{resumed:?}");
    assert!(resumed.tokens.len() > told.tokens.len(), "{resumed:?}");
    assert_eq!(resumed.tokens[..told.tokens.len()], told.tokens);
}

/// However a model is brought in, the part that is done grows from 0 to 1, and works follow each
/// other.
#[test]
fn loading_tells_how_far_it_is() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    let ram = |percent| EngineOptions { ram: RamBudget::Percent(percent), ..Default::default() };
    let mapped = EngineOptions::default();
    let copied = EngineOptions { mmap: false, ..Default::default() };
    for (name, options, work) in [
        ("mapped", mapped, LoadPhase::Pages),
        ("copied", copied, LoadPhase::Weights),
        ("half", ram(50.0), LoadPhase::DenseWeights),
        ("all streamed", ram(5.0), LoadPhase::DenseWeights),
    ] {
        let mut told = Vec::new();
        drop(Engine::load(&demo, &options, &mut |now| told.push(now)).unwrap());
        assert_eq!(told[0], LoadPhase::Plan.at(0.0), "{name}");
        assert_eq!(told.last(), Some(&LoadPhase::Texts.at(1.0)), "{name}");
        let parts: Vec<f32> = told.iter().map(|now| now.part).collect();
        assert!(parts.is_sorted() && parts.len() > 2, "{name}: {parts:?}");
        assert!(told.is_sorted_by_key(|now| now.phase), "{name}: {told:?}");
        assert!(told.iter().any(|now| now.phase == work), "{name}: {told:?}");
        // The reads are counted, and the last of them completes it.
        assert_eq!(parts[parts.len() - 2], 1.0, "{name}: {parts:?}");
    }
}
