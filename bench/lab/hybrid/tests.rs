//! The hybrid machine on made-up batches: what must hold of all, and small cases by hand.

use proptest::prelude::*;

use super::batch::{BatchLayer, BatchStep};
use super::*;
use moeba::trace::{CpuExpert, LinkCosts, Roofline};
use moeba::trace::{Pass, Recorded, Token, TokenLayer};

const SCHEDULERS: [Scheduler; 5] = [
    Scheduler::Static,
    Scheduler::Greedy(Prefetching::Nothing),
    Scheduler::Greedy(Prefetching::WhileIdle),
    Scheduler::Greedy(Prefetching::Fixed(2)),
    Scheduler::PreSched,
];

/// Transfers take so many times as long without AsyncIO.
const SLOWDOWN: f64 = 1.7;

const GEOMETRY: Geometry = Geometry {
    expert_bytes: 100,
    n_granules: 1,
    attention_bytes: 0,
    shared_bytes: 0,
    head_bytes: 0,
    weight_bytes: 2.0,
};

/// A load takes 100 ns, an expert on the CPU 10·n + 20, on the GPU 5, attention 30.
fn options(scheduler: Scheduler, n_resident: usize) -> HybridOptions {
    let kernel = |memory_ns| Roofline { launch_ns: 0.0, memory_ns, token_ns: 0.0 };
    HybridOptions {
        scheduler,
        keep: Keep::Lru,
        n_resident,
        sync_slowdown: None,
        geometry: GEOMETRY,
        costs: CostModel {
            link: LinkCosts::new(1e9, 0, 1),
            expert: kernel(5.0),
            attention: kernel(30.0),
            shared: kernel(0.0),
            head: kernel(0.0),
            cpu_expert: CpuExpert { token_ns: 10.0, start_ns: 20.0 },
            search_ns: 0,
        },
    }
}

/// Requests of a prompt of `n_prompt` tokens and `n_decode` more; layer 1 is dense.
fn routing(seed: u64, n_requests: usize, n_prompt: usize, n_decode: usize) -> Recorded {
    let n_experts = [8, 0, 6, 8];
    let mut state = seed;
    let mut below = move |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
        (state >> 33) as usize % n
    };
    let mut token = || {
        let mut layer = |n: usize| {
            // Some are hotter than others.
            let first = below(n.max(1)) * below(n.max(1)) / n.max(1);
            let chosen = if n == 0 { vec![] } else { vec![first as u32, ((first + 1) % n) as u32] };
            TokenLayer { chosen, ..TokenLayer::default() }
        };
        Token { id: None, embedding: vec![], layers: n_experts.iter().map(|n| layer(*n)).collect() }
    };
    let n = n_prompt + n_decode;
    let request = |r: usize| {
        let start = r * n;
        let prompt = Pass { tokens: start..start + n_prompt, is_prompt: true };
        let decode = start + n_prompt..start + n;
        let decode = decode.map(|t| Pass { tokens: t..t + 1, is_prompt: false });
        std::iter::once(prompt).filter(|_| n_prompt > 0).chain(decode).collect()
    };
    Recorded {
        tokens: (0..n * n_requests).map(|_| token()).collect(),
        requests: (0..n_requests).map(request).collect(),
        n_experts: n_experts.to_vec(),
        k: 2,
    }
}

fn needed(batches: &Batches) -> u64 {
    let layers = batches.steps.iter().flat_map(|step| &step.layers);
    layers.flat_map(|layer| &layer.counts).filter(|n| **n > 0).count() as u64
}

proptest! {
    #[test]
    fn every_needed_expert_is_computed_once(
        seed: u64,
        size in 1usize..6,
        n_resident in 0usize..22,
        scheduler in prop::sample::select(&SCHEDULERS[..]),
        async_io: bool,
        hot: bool,
    ) {
        let routing = routing(seed, 6, 3, 6);
        let batches = Batches::new(&routing, 0..6, size, &Source::Oracle);
        let keep = if hot { Keep::Hot(counts(&routing, 0..6)) } else { Keep::Lru };
        let sync_slowdown = (!async_io).then_some(SLOWDOWN);
        let options = HybridOptions { keep, sync_slowdown, ..options(scheduler, n_resident) };
        let report = simulate_batches(&batches, &options);
        prop_assert_eq!(&report, &simulate_batches(&batches, &options));
        let c = &report.counters;
        let computed = c.n_resident + c.n_prefetched + c.n_uploaded + c.n_on_cpu;
        prop_assert_eq!(computed, needed(&batches));
        prop_assert!(c.n_prefetched <= c.n_prefetches);
        prop_assert!(c.cpu_ns <= report.wall_ns && c.gpu_ns <= report.wall_ns);
        let load_ns = 100.0 * sync_slowdown.unwrap_or(1.0);
        let loads = (c.n_uploaded + c.n_prefetches) as f64;
        prop_assert!((c.link_ns - loads * load_ns).abs() < 1e-6);
        prop_assert!(c.link_ns <= report.wall_ns + load_ns * 1.01);
        // Each layer's CPU and its attention are one after the other.
        let cpu: f64 = report.layers.iter().map(|layer| layer.1).sum();
        prop_assert!(report.wall_ns >= cpu + 30.0 * report.layers.len() as f64 - 1e-6);
        prop_assert_eq!(report.n_generated, 6 / size * size * 7);
    }

    /// Without prediction PreSched's layer is never longer than all of it on the CPU, and with a
    /// fixed set nothing is carried from layer to layer, so neither is the whole.
    #[test]
    fn uploading_never_loses_to_the_cpu_alone(seed: u64, size in 1usize..6, n in 0usize..22) {
        let routing = routing(seed, 6, 4, 4);
        let batches = Batches::new(&routing, 0..6, size, &Source::Nothing);
        let mut free_gpu = options(Scheduler::Static, n);
        (free_gpu.keep, free_gpu.costs.expert) = (Keep::Random(seed), Roofline::default());
        let wall = |scheduler| {
            let options = HybridOptions { scheduler, ..free_gpu.clone() };
            simulate_batches(&batches, &options).wall_ns
        };
        let all_on_cpu = wall(Scheduler::Static);
        prop_assert!(wall(Scheduler::PreSched) <= all_on_cpu + 1e-6);
        prop_assert!(wall(Scheduler::Greedy(Prefetching::Nothing)) <= all_on_cpu + 1e-6);
    }
}

fn layer(counts: &[u32], next: &[f32]) -> BatchLayer {
    BatchLayer { counts: counts.to_vec(), predicted: vec![next.to_vec()] }
}

/// Two layers of two experts, one step.
fn two_layers(first: BatchLayer, second: BatchLayer) -> Batches {
    let step = BatchStep { n_tokens: 30, n_generated: 30, layers: vec![first, second] };
    Batches { n_experts: vec![2, 2], steps: vec![step] }
}

#[test]
fn a_step_by_hand() {
    // Layer 0: 1 token on the CPU, 30; 30 tokens would take 320, so they are uploaded, 100, and
    // computed, 5. Layer 1: 8 tokens on the CPU, 100, which a load does not beat.
    let batches = two_layers(layer(&[1, 30], &[]), layer(&[8, 0], &[]));
    let report = simulate_batches(&batches, &options(Scheduler::PreSched, 0));
    assert_eq!(report.layers, [(105.0, 30.0), (0.0, 100.0)]);
    assert_eq!(report.wall_ns, (30.0 + 105.0) + (30.0 + 100.0));
    assert_eq!((report.counters.n_uploaded, report.counters.n_on_cpu), (1, 2));
    let report = simulate_batches(&batches, &options(Scheduler::Static, 0));
    assert_eq!(report.wall_ns, (30.0 + 30.0 + 320.0) + (30.0 + 100.0));
    // The GPU that has them all.
    let all = HybridOptions { keep: Keep::Random(0), ..options(Scheduler::Static, 4) };
    assert_eq!(simulate_batches(&batches, &all).wall_ns, (30.0 + 10.0) + (30.0 + 5.0));
}

#[test]
fn a_prefetch_runs_beside_the_cpu() {
    // Layer 0 keeps the CPU busy for 30 + 40, which with the attention hides the load of layer 1's
    // heavy expert: it lands as that layer begins, at 30 + 70 + 30.
    let batches = two_layers(layer(&[1, 2], &[0.0, 40.0]), layer(&[0, 40], &[]));
    let report = simulate_batches(&batches, &options(Scheduler::PreSched, 0));
    assert_eq!(report.layers, [(0.0, 70.0), (5.0, 0.0)]);
    assert_eq!((report.counters.n_prefetches, report.counters.n_prefetched), (1, 1));
    // Without AsyncIO it takes 170, and everything waits for it.
    let sync = options(Scheduler::PreSched, 0).without(Part::AsyncIo(SLOWDOWN), 0);
    let report = simulate_batches(&batches, &sync);
    assert_eq!(report.counters.n_prefetched, 1);
    assert_eq!(report.wall_ns, 30.0 + 70.0 + 170.0 + 30.0 + 5.0);
}

#[test]
fn what_is_kept() {
    let n_experts = [2, 3];
    let hot = Keep::Hot(vec![vec![5, 1], vec![2, 9, 2]]);
    let ids = |resident: &Resident| {
        let all = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)];
        all.into_iter().filter(|id| resident.contains(id)).collect::<Vec<_>>()
    };
    assert_eq!(ids(&Resident::new(&hot, &n_experts, 3)), [(0, 0), (1, 0), (1, 1)]);
    let draw = |seed| ids(&Resident::new(&Keep::Random(seed), &n_experts, 2));
    assert!((0..20).all(|seed| draw(seed).len() == 2) && (0..20).any(|seed| draw(seed) != draw(0)));
    let mut lru = Resident::new(&Keep::Lru, &n_experts, 2);
    for id in [(0, 0), (1, 2), (0, 0), (1, 1)] {
        lru.used(&[id].into());
    }
    assert_eq!(ids(&lru), [(0, 0), (1, 1)]);
}

#[test]
fn batches_count_the_tokens_of_all_their_requests() {
    let mut routing = routing(1, 3, 2, 2);
    for (t, token) in routing.tokens.iter_mut().enumerate() {
        token.layers[0].chosen = vec![t as u32 % 8, (t as u32 + 1) % 8];
        token.layers[2].ahead = vec![vec![0.5, 0.1, 0.3, 0.1, 0.0, 0.0, 0.0, 0.0], vec![]];
    }
    let batches = Batches::new(&routing, 0..3, 2, &Source::Gate);
    // The third request is left over.
    let lengths: Vec<_> = batches.steps.iter().map(|s| (s.n_tokens, s.n_generated)).collect();
    assert_eq!(lengths, [(4, 2), (2, 2), (2, 2)]);
    assert_eq!(batches.n_experts, [8, 6, 8]);
    // Prompts are tokens 0, 1, 4 and 5; the first decode step is of tokens 2 and 6.
    assert_eq!(batches.steps[0].layers[0].counts, [1, 2, 1, 0, 1, 2, 1, 0]);
    assert_eq!(batches.steps[1].layers[0].counts, [0, 0, 1, 1, 0, 0, 1, 1]);
    let predicted = &batches.steps[1].layers[1].predicted;
    assert_eq!(predicted[0], [2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert!(predicted[1].is_empty());
    // The oracle sees the next layer, and behind the last one the next step.
    let oracle = Batches::new(&routing, 0..3, 2, &Source::Oracle);
    let of = |s: usize, l: usize| -> Vec<f32> {
        oracle.steps[s].layers[l].counts.iter().map(|c| *c as f32).collect()
    };
    assert_eq!(oracle.steps[0].layers[0].predicted, [of(0, 1), of(0, 2)]);
    assert_eq!(oracle.steps[0].layers[2].predicted, [of(1, 0), of(1, 1)]);
    assert_eq!(oracle.steps[2].layers[2].predicted, [vec![], vec![]] as [Vec<f32>; 2]);
    let tokens = |token: usize, layer: usize, distance: usize, out: &mut Vec<f32>| {
        *out = vec![token as f32, layer as f32, distance as f32];
    };
    let given = Batches::new(&routing, 0..3, 2, &Source::Tokens(&tokens));
    assert_eq!(given.steps[1].layers[1].predicted[1], [8.0, 4.0, 4.0]);
}

/// PreScope's comparison in small: the more it knows the faster it is, on a published geometry.
#[test]
fn prescope_is_faster_than_what_it_is_made_from() {
    use moeba::trace::{Device, Host};
    let routing = routing(3, 16, 16, 16);
    let geometry = Geometry::published("mixtral-8x7b").unwrap();
    let device = Device::by_name("a100").unwrap();
    let options = HybridOptions {
        scheduler: Scheduler::PreSched,
        keep: Keep::Hot(counts(&routing, 0..8)),
        n_resident: 8,
        sync_slowdown: None,
        geometry,
        costs: CostModel::derive(&device, &Host::XEON_6230R, &geometry),
    };
    let batches = Batches::new(&routing, 8..16, 8, &Source::Oracle);
    let rate = |options: &HybridOptions| simulate_batches(&batches, options).tokens_per_second();
    let full = rate(&options);
    assert!(full >= rate(&HybridOptions { scheduler: Scheduler::Static, ..options.clone() }));
    for part in [Part::HotTable, Part::PreSched, Part::Predictor, Part::AsyncIo(SLOWDOWN)] {
        let without = rate(&options.clone().without(part, 7));
        assert!(full >= 0.98 * without, "{part:?}: {without} > {full}");
    }
    assert!(full > 1.1 * rate(&options.clone().without(Part::AsyncIo(SLOWDOWN), 7)));
}
