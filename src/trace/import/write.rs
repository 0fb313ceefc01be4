//! Checks what was read and writes it as a trace.

use super::{Choice, Request, Source, Token};
use crate::policy::Phase;
use crate::trace::format::{Header, LayerShape, UNKNOWN_TOKEN, Writer};
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::io::{self, Write};

/// More than any model has.
const MAX_EXPERTS: usize = 1 << 16;

/// The figures of a trace that was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub n_requests: usize,
    pub n_tokens: usize,
    /// Tokens of prompts that lacked the experts of a layer, and are not in the trace.
    pub n_left_out: usize,
    pub n_experts: usize,
    /// Whether no source said so: it is then the highest number that was used, and one.
    pub experts_are_guessed: bool,
    /// Whether the trace has weights.
    pub has_weights: bool,
}

/// The shape that all sources share.
struct Shape {
    /// Layers that have experts.
    moe: Vec<bool>,
    k: usize,
    n_experts: usize,
    has_weights: bool,
}

/// Writes the requests of all sources, in order. `n_experts`: of a layer; otherwise what a source
/// says. Fails for sources of different shapes, and for a token that lacks experts.
pub fn write<W: Write>(
    sources: &[Source],
    n_experts: Option<usize>,
    out: W,
) -> Result<(W, Summary)> {
    let told = n_experts.or(sources.iter().find_map(|source| source.n_experts));
    let shape = shape(sources, told)?;
    let model = sources.iter().find_map(|source| source.model.clone());
    let stem = sources.first().and_then(|source| source.path.file_stem());
    let model = model.unwrap_or_else(|| stem.unwrap_or_default().to_string_lossy().into_owned());
    let header = Header {
        key: Sha256::digest(model.as_bytes()).into(),
        model,
        k: shape.k,
        layers: shape.moe.iter().map(|is_moe| layer(*is_moe, shape.n_experts)).collect(),
        ids_only: !shape.has_weights,
        ..Header::default()
    };
    let failed = |e: io::Error| Error::invalid(format!("the trace cannot be written: {e}"));
    let mut trace = Trace { writer: Writer::new(out, header).map_err(failed)?, shape };
    let mut summary = Summary {
        n_experts: trace.shape.n_experts,
        experts_are_guessed: told.is_none(),
        has_weights: trace.shape.has_weights,
        ..Summary::default()
    };
    for source in sources {
        for request in &source.requests {
            trace.request(source, request, &mut summary)?;
        }
    }
    if summary.n_tokens == 0 {
        return Err(Error::invalid("the sources have no token with experts in every layer"));
    }
    Ok((trace.writer.finish().map_err(failed)?, summary))
}

/// Sizes are unknown.
fn layer(is_moe: bool, n_experts: usize) -> LayerShape {
    match is_moe {
        true => LayerShape { n_experts, n_granules: 1, ..LayerShape::default() },
        false => LayerShape::default(),
    }
}

fn fault(source: &Source, place: usize, expected: String, got: String) -> Error {
    Error::format(&source.path, format!("{} {place}", source.unit), expected, got)
}

fn shape(sources: &[Source], n_experts: Option<usize>) -> Result<Shape> {
    let mut shape = Shape { moe: Vec::new(), k: 0, n_experts: 0, has_weights: true };
    let mut highest = 0;
    for source in sources {
        let mut moe: Vec<bool> = Vec::new();
        for token in source.requests.iter().flat_map(|request| &request.tokens) {
            moe.resize(moe.len().max(token.layers.len()), false);
            for (is_moe, Choice { experts, weights }) in moe.iter_mut().zip(&token.layers) {
                *is_moe |= !experts.is_empty();
                shape.k = if shape.k == 0 { experts.len() } else { shape.k };
                let sound = weights.iter().all(|w| w.is_finite() && *w >= 0.0);
                shape.has_weights &= weights.len() == experts.len() && sound;
                highest = highest.max(experts.iter().copied().max().unwrap_or(0));
            }
        }
        if moe.iter().all(|is_moe| !is_moe) {
            let got = "none";
            return Err(Error::format(&source.path, "the file", "experts of tokens", got));
        }
        if !shape.moe.is_empty() && shape.moe != moe {
            let name = |moe: &[bool]| {
                let n = moe.iter().filter(|is_moe| **is_moe).count();
                format!("{n} layers of {} with experts", moe.len())
            };
            let expected = format!("{} as in the files before", name(&shape.moe));
            return Err(Error::format(&source.path, "the file", expected, name(&moe)));
        }
        shape.moe = moe;
    }
    shape.n_experts = n_experts.unwrap_or(highest as usize + 1);
    match (1..=MAX_EXPERTS).contains(&shape.n_experts) {
        true => Ok(shape),
        false => Err(Error::invalid(format!(
            "a layer has 1 to {MAX_EXPERTS} experts, not {}",
            shape.n_experts
        ))),
    }
}

struct Trace<W: Write> {
    writer: Writer<W>,
    shape: Shape,
}

impl<W: Write> Trace<W> {
    /// A prompt that comes after decoded tokens begins another request.
    fn request(&mut self, source: &Source, request: &Request, summary: &mut Summary) -> Result<()> {
        let mut tokens = Vec::new();
        for token in &request.tokens {
            match self.is_whole(source, token)? {
                true => tokens.push(token),
                false => summary.n_left_out += 1,
            }
        }
        for part in tokens.chunk_by(|a, b| a.is_prompt || !b.is_prompt) {
            self.part(&request.kind, part)
                .map_err(|e| Error::invalid(format!("the trace cannot be written: {e}")))?;
            summary.n_requests += 1;
            summary.n_tokens += part.len();
        }
        Ok(())
    }

    /// Whether a token has experts in every layer, which one of a prompt need not have.
    fn is_whole(&self, source: &Source, token: &Token) -> Result<bool> {
        let Shape { moe, k, n_experts, .. } = &self.shape;
        for (layer, _) in moe.iter().enumerate().filter(|(_, is_moe)| **is_moe) {
            let experts = token.layers.get(layer).map_or(&[][..], |choice| &choice.experts);
            let wrong = |expected: String, got: String| fault(source, token.place, expected, got);
            if experts.is_empty() && token.is_prompt {
                return Ok(false);
            }
            if experts.len() != *k {
                let expected = format!("{k} experts of layer {layer}");
                return Err(wrong(expected, experts.len().to_string()));
            }
            let mut sorted = experts.to_vec();
            sorted.sort_unstable();
            let is_twice = sorted.windows(2).any(|pair| pair[0] == pair[1]);
            if is_twice || sorted.last().is_some_and(|last| *last as usize >= *n_experts) {
                let expected = format!("distinct experts below {n_experts} of layer {layer}");
                return Err(wrong(expected, format!("{experts:?}")));
            }
        }
        Ok(true)
    }

    fn part(&mut self, kind: &str, tokens: &[&Token]) -> io::Result<()> {
        self.writer.begin_request(kind)?;
        let n_prompt = tokens.iter().take_while(|token| token.is_prompt).count();
        let (prompt, decode) = tokens.split_at(n_prompt);
        if !prompt.is_empty() {
            self.pass(Phase::Prompt, prompt)?;
        }
        decode.iter().try_for_each(|token| self.pass(Phase::Decode, &[*token]))
    }

    fn pass(&mut self, phase: Phase, tokens: &[&Token]) -> io::Result<()> {
        let ids: Vec<u32> = tokens.iter().map(|token| token.id.unwrap_or(UNKNOWN_TOKEN)).collect();
        self.writer.begin_pass(phase, &ids, &[])?;
        let Shape { moe, n_experts, has_weights, .. } = &self.shape;
        let (mut chosen, mut probs) = (Vec::new(), Vec::new());
        for (layer, _) in moe.iter().enumerate().filter(|(_, is_moe)| **is_moe) {
            chosen.clear();
            probs.clear();
            for Choice { experts, weights } in tokens.iter().map(|token| &token.layers[layer]) {
                chosen.extend(experts);
                if *has_weights {
                    let start = probs.len();
                    probs.resize(start + n_experts, 0.0);
                    let pairs = experts.iter().zip(weights);
                    pairs.for_each(|(expert, weight)| probs[start + *expert as usize] = *weight);
                }
            }
            self.writer.routed(layer, &chosen, &probs);
        }
        Ok(())
    }
}
