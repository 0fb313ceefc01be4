//! Several texts at once: a pass reads an expert once for all texts that use it.
//!
//!     cargo run --release --example batch -- models/demo/moeba-demo.gguf "Once" "A function"

use std::path::Path;
use std::sync::{Arc, mpsc};

use moeba::cancel::Cancel;
use moeba::engine::scheduler::{AnySink, Job, JobSink, Owner, Scheduler, SchedulerOptions};
use moeba::engine::{Engine, EngineOptions, Generation, Limits, Outcome, Request, TextSink};
use moeba::sample::SamplerOptions;
use moeba::tokenizer::EncodeOptions;
use moeba::{Error, Result};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or_else(|| Error::Usage("usage: batch MODEL PROMPT...".into()))?;
    let prompts: Vec<String> = args.collect();
    for (prompt, text) in prompts.iter().zip(continued(model.as_ref(), &prompts, 32)?) {
        println!("{prompt}{text}\n");
    }
    Ok(())
}

/// The continuation of each prompt.
fn continued(model: &Path, prompts: &[String], n_predict: usize) -> Result<Vec<String>> {
    let n_sessions = prompts.len().clamp(1, 8);
    let options = EngineOptions { n_sessions, n_ctx: Some(1024), ..EngineOptions::default() };
    let engine = Engine::load(model, &options, &mut |_progress| ())?;
    let queue = SchedulerOptions {
        n_parallel: n_sessions,
        n_queue: prompts.len(),
        ..SchedulerOptions::default()
    };
    let scheduler = Scheduler::start(&engine, queue)?;

    let (ended, endings) = mpsc::channel();
    let jobs = (0..).zip(prompts).map(|(i, prompt)| {
        job(&engine, i, prompt, n_predict, Text { i, text: String::new(), ended: ended.clone() })
    });
    let jobs = jobs.collect::<Result<Vec<_>>>()?;
    scheduler.submit(jobs).map_err(|why| Error::Busy(format!("{why:?}")))?;
    drop(ended);

    let mut texts = vec![String::new(); prompts.len()];
    for (i, text) in endings {
        texts[i] = text?;
    }
    Ok(texts)
}

fn job(
    engine: &Arc<Engine>,
    i: usize,
    prompt: &str,
    n_predict: usize,
    sink: Text,
) -> Result<Job<AnySink>> {
    let prompt = engine.tokenizer().encode(prompt, EncodeOptions::PROMPT);
    let limits = Limits { n_predict: Some(n_predict), ..Limits::default() };
    let sampling = SamplerOptions { seed: Some(1), ..SamplerOptions::default() };
    let request = Request { prompt, limits, sampling, ..Request::default() };
    Ok(Job {
        id: i as u64,
        generation: Generation::new(engine, &request)?,
        prompt: request.prompt,
        source: None,
        sink: AnySink::new(sink),
        cancel: Cancel::new(),
        owner: Owner::default(),
        salt: Some(0),
        priority: 0,
        slot: None,
        adapters: None,
    })
}

/// Collects a text on the thread that computes, and sends it once it is whole.
struct Text {
    i: usize,
    text: String,
    ended: mpsc::Sender<(usize, Result<String>)>,
}

impl TextSink for Text {
    fn text(&mut self, text: &str) -> Result<()> {
        self.text.push_str(text);
        Ok(())
    }
}

impl JobSink for Text {
    fn finished(&mut self, result: Result<Outcome>) {
        let text = result.map(|_| std::mem::take(&mut self.text));
        // The receiver is gone if another text has failed.
        let _ = self.ended.send((self.i, text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moeba-demo.gguf");

    #[test]
    fn texts_are_those_that_each_prompt_has_alone() {
        let prompts = ["The file", "A loop", "When a test fails"].map(str::to_owned);
        let together = continued(MODEL.as_ref(), &prompts, 8).unwrap();
        for (prompt, text) in prompts.iter().zip(together) {
            let alone = continued(MODEL.as_ref(), std::slice::from_ref(prompt), 8).unwrap();
            assert_eq!(alone, [text]);
        }
    }

    #[test]
    fn an_empty_prompt_is_refused() {
        assert!(continued(MODEL.as_ref(), &[String::new()], 8).is_err());
    }
}
