use super::bytes::{Bytes, Fault};
use super::quantise::{dequantised, quantised};
use super::*;
use crate::policy::Phase;
use proptest::prelude::*;
use std::path::Path;

/// A pass as the writer is told of it: values of all tokens, layer by layer.
#[derive(Clone, Debug)]
struct Pass {
    phase: Phase,
    ids: Vec<u32>,
    layers: Vec<Routed>,
}

#[derive(Clone, Debug, Default)]
struct Routed {
    chosen: Vec<u32>,
    probs: Vec<f32>,
    hidden: Vec<f32>,
    ahead: Vec<Vec<f32>>,
}

#[derive(Clone, Debug)]
struct Example {
    header: Header,
    requests: Vec<(String, Vec<Pass>)>,
}

/// A small generator of numbers, so that an example is a function of its seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }

    fn value(&mut self) -> f32 {
        self.below(20001) as f32 / 1000.0 - 10.0
    }

    /// Not negative, of sum 1.
    fn probs(&mut self, n: usize) -> Vec<f32> {
        let logits: Vec<f32> = (0..n).map(|_| (self.value() / 2.0).exp()).collect();
        let sum: f32 = logits.iter().sum();
        logits.into_iter().map(|p| p / sum).collect()
    }
}

/// An embedding is a function of the token's id.
fn embedding(id: u32, n_embd: usize) -> Vec<f32> {
    let mut numbers = Numbers(u64::from(id) + 1);
    (0..n_embd).map(|_| numbers.value()).collect()
}

fn best(probs: &[f32], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..probs.len() as u32).collect();
    order.sort_by(|a, b| probs[*b as usize].total_cmp(&probs[*a as usize]));
    order.truncate(k);
    order
}

/// The layer that comes `distance` MoE layers later, as the format's documentation says it.
fn target(header: &Header, layer: usize, distance: usize) -> Option<usize> {
    let moe: Vec<usize> = header.moe_layers().collect();
    let at = moe.iter().position(|l| *l == layer)? + distance;
    if at < moe.len() { Some(moe[at]) } else { (distance == 1).then(|| moe[0]) }
}

fn pass(header: &Header, phase: Phase, n: usize, numbers: &mut Numbers) -> Pass {
    let ids = (0..n).map(|_| numbers.below(40) as u32).collect();
    let layer = |(layer, shape): (usize, &LayerShape)| {
        let mut routed = Routed::default();
        if shape.n_experts == 0 {
            return routed;
        }
        for _ in 0..n {
            let probs = numbers.probs(shape.n_experts);
            routed.chosen.extend(best(&probs, header.k));
            routed.probs.extend(probs.into_iter().filter(|_| !header.ids_only));
        }
        if phase == Phase::Decode {
            let n_hidden = if header.hidden { header.n_embd } else { 0 };
            routed.hidden = (0..n_hidden).map(|_| numbers.value()).collect();
            let targets = (1..=header.ahead).map_while(|d| target(header, layer, d));
            let n_experts = |target: usize| header.layers[target].n_experts;
            routed.ahead = targets.map(|t| numbers.probs(n_experts(t))).collect();
        }
        routed
    };
    let layers = header.layers.iter().enumerate().map(layer).collect();
    Pass { phase, ids, layers }
}

fn example(header: Header, n_requests: usize, seed: u64) -> Example {
    let mut numbers = Numbers(seed);
    let request = |i: usize| {
        let prompts = (0..numbers.below(3)).map(|_| numbers.below(5) + 1).collect::<Vec<_>>();
        let n_decode = numbers.below(4);
        let prompts = prompts.into_iter().map(|n| (Phase::Prompt, n));
        let passes = prompts.chain(std::iter::repeat_n((Phase::Decode, 1), n_decode));
        let passes = passes.map(|(phase, n)| pass(&header, phase, n, &mut numbers)).collect();
        (["prose", "code", "Dörfer"][i % 3].to_string(), passes)
    };
    let requests = (0..n_requests).map(request).collect();
    Example { header, requests }
}

impl Example {
    fn write(&self) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new(), self.header.clone()).unwrap();
        for (kind, passes) in &self.requests {
            writer.begin_request(kind).unwrap();
            for pass in passes {
                let embeddings: Vec<Vec<f32>> =
                    pass.ids.iter().map(|id| embedding(*id, self.header.n_embd)).collect();
                writer.begin_pass(pass.phase, &pass.ids, &embeddings.concat()).unwrap();
                for layer in self.header.moe_layers() {
                    let routed = &pass.layers[layer];
                    writer.routed(layer, &routed.chosen, &routed.probs);
                    writer.hidden(layer, &routed.hidden);
                    for (i, probs) in routed.ahead.iter().enumerate() {
                        writer.ahead(layer, i + 1, probs);
                    }
                }
            }
        }
        writer.finish().unwrap()
    }

    /// Compares with a trace: exactly, or as close as a compact trace is.
    fn check(&self, trace: &Trace) {
        assert_eq!(trace.header(), &self.header);
        assert_eq!(trace.requests().len(), self.requests.len());
        let mut token = 0;
        for ((kind, passes), request) in self.requests.iter().zip(trace.requests()) {
            assert_eq!(&request.kind, kind);
            assert_eq!(request.tokens.start, token);
            for pass in passes {
                for (i, &id) in pass.ids.iter().enumerate() {
                    assert_eq!((trace.token_id(token), trace.phase(token)), (id, pass.phase));
                    let wanted = embedding(id, self.header.n_embd);
                    let half_a_step = 10.0 / 254.0 + 1e-5;
                    self.alike(trace.embedding(token), &wanted, half_a_step);
                    (0..self.header.layers.len())
                        .for_each(|layer| self.check_layer(trace, token, layer, pass, i));
                    token += 1;
                }
            }
            assert_eq!(request.tokens.end, token);
            let prompt = passes.iter().filter(|p| p.phase == Phase::Prompt);
            assert_eq!(request.n_prompt, prompt.map(|p| p.ids.len()).sum::<usize>());
        }
        assert_eq!(trace.n_tokens(), token);
    }

    fn check_layer(&self, trace: &Trace, token: usize, layer: usize, pass: &Pass, i: usize) {
        let (routed, n) = (&pass.layers[layer], self.header.layers[layer].n_experts);
        let mut got = vec![f32::NAN];
        let k = self.header.k.min(n);
        assert_eq!(trace.chosen(token, layer), &routed.chosen[i * k..][..k]);
        trace.probs(token, layer, &mut got);
        let n = if self.header.ids_only { 0 } else { n };
        self.alike(&got, &routed.probs[i * n..][..n], 0.01);
        trace.hidden(token, layer, &mut got);
        self.alike(&got, &routed.hidden, 1e-3 * 10.0);
        for distance in 0..=MAX_AHEAD + 1 {
            let found = trace.ahead(token, layer, distance, &mut got);
            let wanted = distance.checked_sub(1).and_then(|d| routed.ahead.get(d));
            assert_eq!(found, wanted.and_then(|_| target(&self.header, layer, distance)));
            self.alike(&got, wanted.map_or(&[], |probs| probs), 0.01);
        }
    }

    fn alike(&self, got: &[f32], wanted: &[f32], tolerance: f32) {
        let tolerance = if self.header.precision == Precision::Exact { 0.0 } else { tolerance };
        assert_eq!(got.len(), wanted.len());
        for (got, wanted) in got.iter().zip(wanted) {
            assert!((got - wanted).abs() <= tolerance, "{got}, wanted {wanted}");
        }
    }
}

fn decode(bytes: &[u8]) -> crate::Result<Trace> {
    Trace::decode(bytes, Path::new("some.mtrace"))
}

prop_compose! {
    fn any_layer()(n_experts in prop_oneof![Just(0), 1..9usize, Just(300)]) -> LayerShape {
        let moe = LayerShape { n_experts, expert_bytes: 1 << 33, n_granules: 3, slot_bytes: 4096 };
        if n_experts == 0 { LayerShape::default() } else { moe }
    }
}

prop_compose! {
    fn any_header()(
        layers in prop::collection::vec(any_layer(), 0..5),
        (n_embd, k, ahead) in (0..5usize, 1..4usize, 0..=MAX_AHEAD),
        (exact, hidden, ids_only, key) in any::<(bool, bool, bool, [u8; 32])>(),
    ) -> Header {
        let precision = if exact { Precision::Exact } else { Precision::Compact };
        let model = "a model".into();
        Header { model, key, n_embd, k, layers, precision, ids_only, hidden, ahead }
    }
}

proptest! {
    #[test]
    fn what_was_written_comes_back(header in any_header(), n in 0..4usize, seed: u64) {
        let example = example(header, n, seed);
        let bytes = example.write();
        example.check(&decode(&bytes).unwrap());
    }

    #[test]
    fn damage_is_refused(
        header in any_header(),
        seed: u64,
        at in any::<prop::sample::Index>(),
        bit in 0..8u8,
    ) {
        let mut bytes = example(header, 2, seed).write();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let error = decode(&bytes).unwrap_err().to_string();
        prop_assert!(error.starts_with("some.mtrace: "), "{}", error);
    }

    /// A level is at most half a step of the square root away.
    #[test]
    fn a_probability_is_off_by_little(p in 0.0..=1.0f32) {
        let off = (dequantised(quantised(p)).sqrt() - p.sqrt()).abs();
        prop_assert!(off <= 0.5 / 255.0 + 1e-6, "{}", off);
    }

    #[test]
    fn compact_probabilities_keep_their_order_and_sum(seed: u64, n in 1..300usize) {
        let probs = Numbers(seed).probs(n);
        let mut bytes = vec![0; n];
        Precision::Compact.put_probs(&probs, &mut bytes);
        let mut got = Vec::new();
        Precision::Compact.get_probs(&bytes, &mut got);
        prop_assert!((got.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        for (i, j) in (0..n).zip(1..n) {
            prop_assert!((probs[i] - probs[j]) * (got[i] - got[j]) >= 0.0);
        }
    }

    #[test]
    fn values_are_off_by_little(values in prop::collection::vec(-1e4..1e4f32, 1..20)) {
        let (row, width) = Precision::Compact.embedding_row(values.len());
        let (mut bytes, mut got) = (vec![0; row * width], Vec::new());
        Precision::Compact.put_embedding(&values, &mut bytes);
        Precision::Compact.extend_embeddings(&bytes, values.len(), &mut got);
        let largest = values.iter().fold(0f32, |max, v| max.max(v.abs()));
        for (got, value) in got.iter().zip(&values) {
            prop_assert!((got - value).abs() <= largest / 254.0 * 1.001);
        }
        let (mut bytes, mut got) = (vec![0; 2 * values.len()], Vec::new());
        Precision::Compact.put_values(&values, &mut bytes);
        Precision::Compact.extend_values(&bytes, &mut got);
        for (got, value) in got.iter().zip(&values) {
            prop_assert!((got - value).abs() <= value.abs() / 2048.0 + 1e-7);
        }
    }

    /// Whatever a block says, it is refused in a sentence or understood.
    #[test]
    fn any_contents_of_a_block_are_survived(header in any_header(), raw in any::<Vec<u8>>()) {
        let mut bytes = Writer::new(Vec::new(), header.clone()).unwrap().finish().unwrap();
        bytes.truncate(bytes.len() - END_BYTES);
        bytes.extend(block::packed(&raw));
        let _ = decode(&bytes);
        let _ = Header::decode(&raw);
    }
}

/// The end marker: zero, counts, CRC.
const END_BYTES: usize = 4 + 24 + 4;

fn two_layers(precision: Precision) -> Header {
    let moe = LayerShape { n_experts: 4, expert_bytes: 8, n_granules: 1, slot_bytes: 8 };
    let layers = vec![LayerShape::default(), moe, moe];
    let model = "m".to_string();
    let (key, n_embd, k, hidden, ahead) = ([3; 32], 2, 2, true, 2);
    Header { model, key, n_embd, k, layers, precision, ids_only: false, hidden, ahead }
}

#[test]
fn every_truncation_is_refused_and_named() {
    let bytes = example(two_layers(Precision::Compact), 3, 5).write();
    for n in 0..bytes.len() {
        let error = decode(&bytes[..n]).unwrap_err().to_string();
        assert!(error.starts_with("some.mtrace: byte "), "{n}: {error}");
        assert!(error.contains("the end after"), "{n}: {error}");
    }
    let error = decode(&[&bytes[..], &[0]].concat()).unwrap_err().to_string();
    assert!(error.contains("1 more bytes"), "{error}");
}

#[test]
fn what_is_no_trace_is_named() {
    let mut bytes = example(two_layers(Precision::Exact), 1, 5).write();
    for (at, word) in [(0, "a routing trace"), (8, "version 1")] {
        bytes[at] ^= 2;
        let error = decode(&bytes).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        bytes[at] ^= 2;
    }
    let error = Trace::open(Path::new("no/such.mtrace")).unwrap_err().to_string();
    assert!(error.contains("no/such.mtrace"), "{error}");
}

#[test]
fn a_trace_may_be_empty() {
    for n_requests in [0, 1] {
        let header = two_layers(Precision::Compact);
        let mut writer = Writer::new(Vec::new(), header).unwrap();
        (0..n_requests).for_each(|_| writer.begin_request("prose").unwrap());
        let trace = decode(&writer.finish().unwrap()).unwrap();
        assert_eq!((trace.requests().len(), trace.n_tokens()), (n_requests, 0));
    }
}

#[test]
fn long_requests_are_several_blocks() {
    let moe = LayerShape { n_experts: 256, expert_bytes: 8, n_granules: 1, slot_bytes: 8 };
    let layers = vec![moe; 16];
    let header = Header { layers, k: 2, n_embd: 1, ahead: 1, ..Header::default() };
    let mut numbers = Numbers(1);
    let mut passes = vec![pass(&header, Phase::Prompt, 200, &mut numbers)];
    passes.extend((0..200).map(|_| pass(&header, Phase::Decode, 1, &mut numbers)));
    let example = Example { header, requests: vec![("prose".into(), passes)] };
    let bytes = example.write();
    assert!(n_blocks(&bytes) > 1);
    example.check(&decode(&bytes).unwrap());
}

fn n_blocks(bytes: &[u8]) -> usize {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let mut at = 16 + word(12) + 4;
    let mut n = 0;
    while word(at) > 0 {
        at += block::HEAD_BYTES + word(at);
        n += 1;
    }
    n
}

#[test]
#[should_panic(expected = "missing")]
fn the_writer_notices_a_layer_left_out() {
    let mut writer = Writer::new(Vec::new(), two_layers(Precision::Compact)).unwrap();
    writer.begin_request("prose").unwrap();
    writer.begin_pass(Phase::Prompt, &[1], &[0.0; 2]).unwrap();
    writer.routed(1, &[0, 1], &[0.25; 4]);
    writer.finish().unwrap();
}

#[test]
fn a_row_of_zeros_stays_one_and_large_values_stay_finite() {
    let (mut bytes, mut got) = (vec![1; 4 + 3], Vec::new());
    Precision::Compact.put_embedding(&[0.0; 3], &mut bytes);
    Precision::Compact.extend_embeddings(&bytes, 3, &mut got);
    assert_eq!(got, [0.0; 3]);
    let (mut bytes, mut got) = (vec![0; 4], Vec::new());
    Precision::Compact.put_values(&[1e6, -1e6], &mut bytes);
    Precision::Compact.extend_values(&bytes, &mut got);
    assert_eq!(got, [65504.0, -65504.0]);
}

#[test]
fn the_writer_refuses_what_the_format_has_no_room_for() {
    let header = Header { ahead: MAX_AHEAD + 1, ..two_layers(Precision::Compact) };
    let Err(error) = Writer::new(Vec::new(), header) else { panic!("it was written") };
    assert!(error.to_string().contains("distances ahead"), "{error}");
}

#[test]
fn a_header_makes_sense_or_is_refused() {
    let good = two_layers(Precision::Exact);
    let bytes = good.encode().unwrap();
    assert_eq!(Header::decode(&bytes).unwrap(), good);
    let wrong = |at_from_end: usize, value: u32| -> Fault {
        let mut bytes = bytes.clone();
        let at = bytes.len() - at_from_end;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        Header::decode(&bytes).unwrap_err()
    };
    // Experts of the last layer; number of layers.
    assert!(wrong(24, 70_000).expected.contains("65536"));
    assert!(wrong(3 * 24 + 4, 1 << 30).expected.contains("at most 3"));
    assert!(wrong(3 * 24 + 5, 0x07).place.starts_with("header"));
    assert!(Bytes::new("", &[1]).u32("x").unwrap_err().got.contains("after 1"));
}
