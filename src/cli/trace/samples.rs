//! Training samples from a trace: its decode steps, the same number from each request.

use crate::policy::Phase;
use crate::trace::by_turns;
use crate::trace::format::Trace;
use crate::train::{LayerSamples, Samples};

/// Samples may take this much memory. While a layer is trained, its own examples, which are about
/// as large as its samples, come to that.
const BYTES_MAX: usize = 4 << 30;

/// At most `n_max` tokens. Returns the reason as a clause, for use after a colon.
pub fn of_trace(trace: &Trace, n_max: usize) -> Result<Samples, String> {
    let tokens = choose(trace, n_max);
    let token_bytes = token_bytes(trace);
    if tokens.len().saturating_mul(token_bytes) > BYTES_MAX {
        let fit = BYTES_MAX / token_bytes;
        return Err(format!(
            "{} tokens do not fit in memory for training: use --tokens {fit}",
            tokens.len()
        ));
    }
    let follows = |i: usize| i > 0 && tokens[i].text == tokens[i - 1].text;
    Ok(Samples {
        n_embd: trace.header().n_embd,
        follows: (0..tokens.len()).map(follows).collect(),
        layers: trace.header().moe_layers().map(|layer| samples(trace, layer, &tokens)).collect(),
    })
}

/// The numbers of the tokens that `of_trace` takes.
pub fn decoded(trace: &Trace, n_max: usize) -> Vec<usize> {
    choose(trace, n_max).into_iter().map(|token| token.number).collect()
}

struct Token {
    number: usize,
    /// Which request it is of.
    text: usize,
}

/// The first decode steps of each request. Kinds take turns, so that the last ones, which networks
/// are judged by, are of all kinds.
fn choose(trace: &Trace, n_max: usize) -> Vec<Token> {
    let order = by_turns(trace, 1);
    let part = |i: usize| i * n_max / order.len();
    let mut tokens = Vec::new();
    for (i, &text) in order.iter().enumerate() {
        let request = &trace.requests()[text];
        let decode = request.tokens.clone().filter(|t| trace.phase(*t) == Phase::Decode);
        let decode = decode.take(part(i + 1) - part(i));
        tokens.extend(decode.map(|number| Token { number, text }));
    }
    tokens
}

/// Bytes of a token's samples.
fn token_bytes(trace: &Trace) -> usize {
    let header = trace.header();
    let layer = |layer: usize| header.n_embd + header.k + 2 * header.layers[layer].n_experts;
    let numbers: usize = header.moe_layers().map(layer).sum();
    (numbers * size_of::<f32>()).max(1)
}

fn samples(trace: &Trace, layer: usize, tokens: &[Token]) -> LayerSamples {
    let mut samples = LayerSamples::default();
    let mut ahead = (trace.header().ahead > 0).then(Vec::new);
    let mut values = Vec::new();
    for &Token { number, .. } in tokens {
        trace.hidden(number, layer, &mut values);
        samples.hidden.extend_from_slice(&values);
        trace.probs(number, layer, &mut values);
        samples.probs.extend_from_slice(&values);
        samples.chosen.extend_from_slice(trace.chosen(number, layer));
        if let Some(ahead) = &mut ahead {
            trace.ahead(number, layer, 1, &mut values);
            ahead.extend_from_slice(&values);
        }
    }
    samples.ahead = ahead;
    samples
}
