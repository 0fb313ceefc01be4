//! An answer, printed while it is generated. Ctrl-C ends it.
//!
//!     cargo run --release --example generate -- models/demo/moeba-demo.gguf "What is a branch?"

use std::io::{self, Write};
use std::path::Path;

use moeba::cancel::Cancel;
use moeba::chat::{ChatTemplate, encode_chat};
use moeba::engine::{Engine, EngineOptions, Generator, Limits, Outcome, Request};
use moeba::{Error, Result};
use serde_json::{Map, json};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(model), Some(question)) = (args.next(), args.next()) else {
        return Err(Error::Usage("usage: generate MODEL QUESTION".into()));
    };
    let cancel = Cancel::new();
    let on_signal = cancel.clone();
    ctrlc::set_handler(move || on_signal.cancel()).map_err(|e| Error::invalid(e.to_string()))?;
    let outcome = answer(model.as_ref(), &question, 256, cancel, &mut io::stdout())?;
    println!("\n{} tokens, {:?}", outcome.n_generated, outcome.finish);
    Ok(())
}

/// Writes the answer to `out` as its characters come.
fn answer(
    model: &Path,
    question: &str,
    n_predict: usize,
    cancel: Cancel,
    out: &mut dyn Write,
) -> Result<Outcome> {
    // Half of the experts in memory: the answer is the same with any part.
    let options = EngineOptions { ram: "50%".parse()?, ..EngineOptions::default() };
    let engine = Engine::load(model, &options, &mut |_progress| ())?;

    let template = ChatTemplate::from_gguf(engine.gguf(), engine.tokenizer(), None)?;
    let messages = json!([{ "role": "user", "content": question }]);
    let prompt = template.render(&messages, None, true, &Map::new())?;
    let request = Request {
        prompt: encode_chat(engine.tokenizer(), &prompt.into()),
        limits: Limits { n_predict: Some(n_predict), ..Limits::default() },
        own_text: true,
        cancel,
        ..Request::default()
    };
    let mut write = |text: &str| {
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(|e| Error::io("the output", e))
    };
    Generator::new(&engine)?.generate(&request, &mut write)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moeba::engine::FinishReason;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moeba-demo.gguf");

    #[test]
    fn it_answers_until_it_is_cancelled() {
        let mut text = Vec::new();
        let cancel = Cancel::new();
        let outcome = answer(MODEL.as_ref(), "Hello", 12, cancel.clone(), &mut text).unwrap();
        assert!(!text.is_empty() && outcome.n_generated <= 12);
        cancel.cancel();
        let outcome = answer(MODEL.as_ref(), "Hello", 12, cancel, &mut text).unwrap();
        assert_eq!(outcome.finish, FinishReason::Cancelled);
    }

    #[test]
    fn a_sink_that_fails_ends_the_answer() {
        let full: &mut [u8] = &mut [0; 2];
        let error = answer(MODEL.as_ref(), "Hello", 12, Cancel::new(), &mut { full }).unwrap_err();
        assert!(error.to_string().starts_with("the output: "), "{error}");
    }
}
