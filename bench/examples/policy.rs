//! A policy of one's own: it prefetches, for the next layer, the experts that the text's last token
//! used there.
//!
//!     cargo run --release --example policy -- models/demo/moeba-demo.gguf

use std::path::Path;

use moeba::engine::{Counters, Engine, EngineOptions, Generator, Limits, Request};
use moeba::policy::{
    Event, Expert, Names, PolicySpec, Prediction, Predictor, PredictorEntry, Shape, register,
};
use moeba::tokenizer::EncodeOptions;
use moeba::{Error, Result};

/// The names that `--policy` knows besides moeba's, once they are registered.
const NAMES: &Names = &Names {
    predictors: &[PredictorEntry {
        name: "same-again",
        build: |builder| Some(Box::new(SameAgain::new(builder.shape))),
    }],
    evictions: &[],
    policies: &[("same-again", PolicySpec::whole("same-again", "lru"))],
};

struct SameAgain {
    /// The experts of each layer's last token.
    used: Vec<Vec<u32>>,
    /// The layer that computes now.
    layer: Option<usize>,
}

impl SameAgain {
    fn new(shape: &Shape) -> SameAgain {
        SameAgain { used: vec![Vec::new(); shape.n_layers()], layer: None }
    }
}

impl Predictor for SameAgain {
    fn observe(&mut self, event: &Event<'_>) {
        match event {
            Event::RequestStart { .. } => self.used.iter_mut().for_each(Vec::clear),
            Event::Routed(routed) => {
                let layer = routed.layer as usize;
                self.used[layer] = routed.chosen.to_vec();
                self.layer = Some(layer);
            }
            _ => {}
        }
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        let Some(layer) = self.layer else { return };
        let next = (layer + 1) % self.used.len();
        out.extend(self.used[next].iter().map(|&expert| Prediction {
            expert: Expert { layer: next as u32, expert },
            priority: 0.5,
        }));
    }
}

fn main() -> Result<()> {
    let model = std::env::args().nth(1);
    let model = model.ok_or_else(|| Error::Usage("usage: policy MODEL".into()))?;
    register(NAMES)?;
    for policy in ["on-demand", "same-again"] {
        let counters = run(model.as_ref(), policy, 64)?;
        let n_uses = counters.hits_whole + counters.hits_partial + counters.misses;
        println!("{policy}: {:.1} % hits", 100.0 * counters.hits_whole as f64 / n_uses as f64);
    }
    Ok(())
}

/// Counts hits and misses of a text that is generated with half of the experts in memory.
fn run(model: &Path, policy: &str, n_predict: usize) -> Result<Counters> {
    let options =
        EngineOptions { ram: "50%".parse()?, policy: policy.parse()?, ..EngineOptions::default() };
    let engine = Engine::load(model, &options, &mut |_progress| ())?;
    let request = Request {
        prompt: engine.tokenizer().encode("A good name", EncodeOptions::PROMPT),
        limits: Limits { n_predict: Some(n_predict), ..Limits::default() },
        ..Request::default()
    };
    Generator::new(&engine)?.generate(&request, &mut |_: &str| Ok(()))?;
    engine.expert_counters().ok_or_else(|| Error::invalid("all experts are in memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moeba-demo.gguf");

    #[test]
    fn its_experts_are_prefetched() {
        let run = || run(MODEL.as_ref(), "same-again", 24);
        assert!(run().is_err(), "the name is not registered yet");
        register(NAMES).unwrap();
        assert!(register(NAMES).is_err(), "the names are taken");
        let counters = run().unwrap();
        assert!(counters.prefetch_used_bytes + counters.prefetch_wasted_bytes > 0);
    }
}
