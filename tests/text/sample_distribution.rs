//! The sampler draws from the distribution that its options describe: exact probabilities computed
//! here in the plainest way, against draws with a fixed seed, by the chi-square test.

use moeba::sample::{
    DryOptions, LogitBias, MirostatOptions, PARAMETERS, Sampler, SamplerKind, SamplerOptions,
    XtcOptions,
};
use proptest::prelude::*;

/// Softmax of `logits / temp` over the tokens in `kept`.
fn softmax(logits: &[f32], kept: &[usize], temp: f64) -> Vec<f64> {
    let mut p = vec![0.0; logits.len()];
    let top = kept.iter().map(|&i| f64::from(logits[i])).fold(f64::MIN, f64::max);
    for &i in kept {
        p[i] = ((f64::from(logits[i]) - top) / temp).exp();
    }
    let total: f64 = p.iter().sum();
    p.iter().map(|x| x / total).collect()
}

/// The definition, sampler by sampler: what is left, and by how much the logits are divided. XTC,
/// if it is in the chain, always acts.
fn exact(logits: &[f32], o: &SamplerOptions) -> Vec<f64> {
    let mut kept: Vec<usize> = (0..logits.len()).collect();
    kept.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    let mut temp = 1.0;
    for sampler in &o.samplers {
        let p = softmax(logits, &kept, temp);
        match sampler {
            SamplerKind::TopK if o.top_k > 0 => kept.truncate(o.top_k as usize),
            SamplerKind::TopP if o.top_p < 1.0 => {
                let mut sum = 0.0;
                let last = kept.iter().position(|&i| {
                    sum += p[i];
                    sum >= f64::from(o.top_p)
                });
                kept.truncate(last.map_or(kept.len(), |n| n + 1));
            }
            SamplerKind::MinP => {
                let least = f64::from(o.min_p) * p[kept[0]];
                kept.retain(|&i| p[i] >= least);
            }
            SamplerKind::TopNSigma if o.top_n_sigma > 0.0 => {
                let of_kept: Vec<f64> = kept.iter().map(|&i| f64::from(logits[i])).collect();
                let mean = of_kept.iter().sum::<f64>() / of_kept.len() as f64;
                let squares: f64 = of_kept.iter().map(|x| (x - mean).powi(2)).sum();
                let sigma = (squares / of_kept.len() as f64).sqrt();
                let least = of_kept[0] - f64::from(o.top_n_sigma) * sigma;
                kept.retain(|&i| f64::from(logits[i]) >= least);
            }
            SamplerKind::TypicalP if o.typical_p < 1.0 => {
                let entropy: f64 = kept.iter().map(|&i| -p[i] * p[i].ln()).sum();
                let mut typical = kept.clone();
                let score = |i: usize| (-p[i].ln() - entropy).abs();
                typical.sort_by(|&a, &b| score(a).partial_cmp(&score(b)).unwrap());
                let mut sum = 0.0;
                let last = typical.iter().position(|&i| {
                    sum += p[i];
                    sum > f64::from(o.typical_p)
                });
                typical.truncate(last.map_or(typical.len(), |n| n + 1));
                kept.retain(|i| typical.contains(i));
            }
            SamplerKind::Xtc if o.xtc.probability > 0.0 => {
                let top = kept.iter().filter(|&&i| p[i] >= f64::from(o.xtc.threshold)).count();
                kept.drain(..top.saturating_sub(1));
            }
            SamplerKind::Temperature => temp *= f64::from(o.temp),
            _ => {}
        }
    }
    softmax(logits, &kept, temp)
}

fn mirostat(version: u8) -> MirostatOptions {
    MirostatOptions { version, ..MirostatOptions::default() }
}

fn counts(logits: &[f32], options: &SamplerOptions, n: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(options.clone()).unwrap();
    let mut counts = vec![0; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(logits).unwrap() as usize] += 1;
    }
    counts
}

fn options() -> SamplerOptions {
    SamplerOptions { temp: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..SamplerOptions::default() }
}

#[test]
fn draws_follow_the_exact_probabilities() {
    let logits = [1.5, 0.3, -2.0, 2.2, 0.3, -0.7, 1.1, -4.0, 0.9, 2.0];
    let seed = Some(42);
    let chain = |names: &str| SamplerKind::from_names(names).unwrap();
    for o in [
        SamplerOptions { seed, ..options() },
        SamplerOptions { seed, typical_p: 0.7, ..options() },
        SamplerOptions { seed, typical_p: 0.7, top_k: 6, temp: 0.7, ..options() },
        SamplerOptions { seed, top_n_sigma: 1.2, ..options() },
        SamplerOptions { seed, xtc: XtcOptions { probability: 1.0, threshold: 0.1 }, ..options() },
        SamplerOptions { seed, samplers: chain(""), temp: 0.1, top_k: 1, ..options() },
        SamplerOptions {
            seed,
            samplers: chain("temperature;top_p;typ_p"),
            top_p: 0.8,
            typical_p: 0.9,
            temp: 1.6,
            ..options()
        },
        SamplerOptions {
            seed,
            samplers: chain("min_p;top_k;temp;temp"),
            min_p: 0.05,
            top_k: 5,
            temp: 0.8,
            ..options()
        },
        SamplerOptions { seed, temp: 0.6, ..options() },
        SamplerOptions { seed, temp: 1.7, ..options() },
        SamplerOptions { seed, top_k: 4, ..options() },
        SamplerOptions { seed, top_p: 0.8, ..options() },
        SamplerOptions { seed, min_p: 0.2, ..options() },
        SamplerOptions { seed, ..SamplerOptions::default() },
        SamplerOptions { seed, top_k: 6, top_p: 0.9, min_p: 0.15, temp: 1.3, ..options() },
    ] {
        const N: usize = 40_000;
        let (counts, p) = (counts(&logits, &o, N), exact(&logits, &o));
        let mut chi_square = 0.0;
        for (&count, &p) in counts.iter().zip(&p) {
            if p == 0.0 {
                assert_eq!(count, 0, "a token was drawn that {o:?} rules out");
                continue;
            }
            chi_square += (count as f64 - p * N as f64).powi(2) / (p * N as f64);
        }
        // 27.9 is the 0.1 % point for 9 degrees of freedom; fewer candidates have a lower one.
        assert!(chi_square < 27.9, "chi-square {chi_square:.1} with {o:?}");
    }
}

#[test]
fn a_seed_gives_these_tokens_everywhere() {
    let logits: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 / 20.0).collect();
    let draw = |seed| {
        let options = SamplerOptions { seed: Some(seed), top_k: 0, ..SamplerOptions::default() };
        let mut sampler = Sampler::new(options).unwrap();
        (0..8).map(|_| sampler.sample(&logits.clone()).unwrap()).collect::<Vec<u32>>()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    assert_eq!(draw(7), SEED_7);
}

/// Written down once: it must not change with the platform or a release.
const SEED_7: [u32; 8] = [434, 685, 393, 966, 857, 452, 999, 554];

#[test]
fn greedy_takes_the_greatest_and_of_equals_the_first() {
    for temp in [0.0, -1.0] {
        let mut sampler = Sampler::new(SamplerOptions { temp, ..options() }).unwrap();
        assert_eq!(sampler.sample(&[0.5, 3.0, -1.0, 3.0]).unwrap(), 1);
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY, -2.0]).unwrap(), 1);
    }
    let one = SamplerOptions { top_k: 1, ..options() };
    assert_eq!(Sampler::new(one).unwrap().sample(&[3.0, 3.0, 3.0]).unwrap(), 0);
}

#[test]
fn broken_logits_are_an_error() {
    for temp in [0.0, 1.0] {
        let mut sampler = Sampler::new(SamplerOptions { temp, ..options() }).unwrap();
        let inf = f32::INFINITY;
        for logits in [&mut [0.0, f32::NAN][..], &mut [inf, 0.0], &mut [-inf, -inf], &mut []] {
            let error = sampler.sample(logits).unwrap_err().to_string();
            assert!(error.contains("logit"), "{error}");
        }
    }
}

#[test]
fn a_random_seed_is_reported_and_repeats() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32).collect();
    let mut first = Sampler::new(options()).unwrap();
    let seed = Some(first.seed());
    let mut again = Sampler::new(SamplerOptions { seed, ..options() }).unwrap();
    for _ in 0..20 {
        assert_eq!(first.sample(&logits).unwrap(), again.sample(&logits).unwrap());
    }
    assert_ne!(first.seed(), Sampler::new(options()).unwrap().seed());
}

#[test]
fn a_penalty_keeps_a_token_from_coming_again() {
    let o = SamplerOptions { repeat_penalty: 2.0, ..SamplerOptions::greedy() };
    let mut sampler = Sampler::new(o).unwrap();
    let logits = [1.5, 2.0, -1.0, 1.2];
    let drawn: Vec<u32> = (0..3)
        .map(|_| {
            let id = sampler.sample(&logits).unwrap();
            sampler.accept(id);
            id
        })
        .collect();
    // Halved, token 1 has 1.0, then token 0 has 0.75.
    assert_eq!(drawn, [1, 0, 3]);
}

#[test]
fn biases_add_up_and_bans_hold() {
    let bias = |id, bias| LogitBias { id, bias };
    let logit_bias = vec![bias(2, 1.5), bias(2, 0.75), bias(1, f32::NEG_INFINITY)];
    let o = SamplerOptions { logit_bias, ..SamplerOptions::greedy() };
    let mut sampler = Sampler::new(o).unwrap();
    assert_eq!(sampler.sample(&[2.0, 9.0, 0.0, -1.0]).unwrap(), 2);
    assert_eq!(sampler.sample(&[2.5, 9.0, 0.0, -1.0]).unwrap(), 0);
    // A ban alone leaves a device its choice among the best.
    let logit_bias = vec![bias(1, f32::NEG_INFINITY)];
    let o = SamplerOptions { logit_bias, ..SamplerOptions::greedy() };
    assert_eq!(Sampler::new(o).unwrap().n_best(), Some(2));
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let infinite = LogitBias { id: 0, bias: f32::INFINITY };
    let d = SamplerOptions::default;
    for (name, o) in [
        ("temp", SamplerOptions { temp: f32::NAN, ..d() }),
        ("temp", SamplerOptions { temp: f32::INFINITY, ..d() }),
        ("top-p", SamplerOptions { top_p: 1.5, ..d() }),
        ("top-p", SamplerOptions { top_p: -0.1, ..d() }),
        ("min-p", SamplerOptions { min_p: f32::NAN, ..d() }),
        ("repeat-penalty", SamplerOptions { repeat_penalty: 0.0, ..d() }),
        ("presence-penalty", SamplerOptions { presence_penalty: f32::NAN, ..d() }),
        ("frequency-penalty", SamplerOptions { frequency_penalty: f32::INFINITY, ..d() }),
        ("repeat-last-n", SamplerOptions { repeat_last_n: -2, ..d() }),
        ("typical", SamplerOptions { typical_p: 2.0, ..d() }),
        ("mirostat", SamplerOptions { mirostat: mirostat(3), ..d() }),
        ("logit-bias", SamplerOptions { logit_bias: vec![infinite], ..d() }),
    ] {
        let error = Sampler::new(o).err().unwrap();
        assert!(matches!(error, moeba::Error::Usage(_)));
        assert!(error.to_string().starts_with(&format!("{name}: expected")), "{error}");
    }
}

proptest! {
    /// Whatever the options, a drawn token is one that the definition allows (or at its edge, where
    /// f32 and f64 sums may differ).
    #[test]
    fn draws_are_within_the_definition(
        logits in prop::collection::vec(-20f32..20.0, 1..300),
        top_k in -1..50i32,
        top_p in 0f32..=1.0,
        min_p in 0f32..=1.0,
        temp in 0.01f32..3.0,
        seed: u64,
    ) {
        let o = SamplerOptions { temp, top_k, top_p, min_p, seed: Some(seed), ..options() };
        let p = exact(&logits, &o);
        let loose = SamplerOptions { top_p: top_p + 1e-6, min_p: min_p - 1e-6, ..o.clone() };
        let p_loose = exact(&logits, &loose);
        let mut sampler = Sampler::new(o).unwrap();
        for _ in 0..20 {
            let id = sampler.sample(&logits.clone()).unwrap() as usize;
            prop_assert!(p[id] > 0.0 || p_loose[id] > 0.0);
        }
    }
}

/// The k best as `sample_best` wants them, by a sort of all.
fn best_of(logits: &[f32], k: usize) -> (Vec<u32>, Vec<f32>) {
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let order = |logit: f32| if logit.is_nan() { f32::INFINITY } else { logit };
    all.sort_by(|a, b| order(b.1).partial_cmp(&order(a.1)).unwrap().then(a.0.cmp(&b.0)));
    all.into_iter().take(k).unzip()
}

/// Few values, so that many are equal; `n` of 40 are `odd` ones. More than are ever the best below.
fn coarse_logits(n: u32, odd: &[f32]) -> impl Strategy<Value = Vec<f32>> + use<> {
    let one = prop_oneof![
        40 - n => (-12i32..12).prop_map(|v| v as f32 / 4.0),
        n => prop::sample::select(odd.to_vec()),
    ];
    prop::collection::vec(one, 65..300)
}

fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let inf = f32::INFINITY;
    prop_oneof![
        coarse_logits(4, &[-0.0, -inf]),
        coarse_logits(39, &[-inf]),
        coarse_logits(1, &[inf, f32::NAN]),
    ]
}

proptest! {
    /// The best of the logits lead to the tokens, or to the sentence, that all of them lead to.
    #[test]
    fn the_best_are_enough(
        logits in any_logits(),
        (temp, top_k) in (prop_oneof![Just(0f32), 0.01f32..3.0], 1..60i32),
        (top_p, min_p) in (prop_oneof![Just(1f32), 0f32..=1.0], prop_oneof![Just(0f32), 0f32..0.3]),
        banned in prop::collection::vec(0u32..420, 0..5),
        seed: u64,
    ) {
        let o = SamplerOptions { temp, top_k, top_p, min_p, seed: Some(seed), ..options() };
        let mut of_all = Sampler::new(o.clone()).unwrap();
        let mut of_best = Sampler::new(o).unwrap();
        of_all.ban(banned.iter().copied());
        of_best.ban(banned);
        let k = of_best.n_best().expect("no penalties");
        let (ids, best) = best_of(&logits, k);
        let told = |result: moeba::Result<u32>| result.map_err(|error| error.to_string());
        for _ in 0..8 {
            let expected = told(of_all.sample(&logits.clone()));
            prop_assert_eq!(told(of_best.sample_best(&ids, &best)), expected);
        }
    }
}

#[test]
fn what_needs_all_logits_says_so() {
    let n_best = |o: SamplerOptions| Sampler::new(o).unwrap().n_best();
    assert_eq!(n_best(SamplerOptions::default()), Some(40));
    assert_eq!(n_best(SamplerOptions { top_k: 1, ..options() }), Some(1));
    assert_eq!(n_best(SamplerOptions::greedy()), Some(1));
    assert_eq!(n_best(options()), None, "no top-k");
    assert_eq!(n_best(SamplerOptions { top_k: -1, ..options() }), None);
    for o in [SamplerOptions::default(), SamplerOptions::greedy()] {
        assert_eq!(n_best(SamplerOptions { repeat_penalty: 1.1, ..o.clone() }), None);
        assert_eq!(n_best(SamplerOptions { presence_penalty: 0.1, ..o.clone() }), None);
        assert_eq!(n_best(SamplerOptions { frequency_penalty: 0.1, ..o.clone() }), None);
        let dry = DryOptions { multiplier: 1.0, ..DryOptions::default() };
        assert_eq!(n_best(SamplerOptions { dry, ..o.clone() }), None);
        let logit_bias = vec![LogitBias { id: 0, bias: 1.0 }];
        assert_eq!(n_best(SamplerOptions { logit_bias, ..o.clone() }), None);
        let typical_p = 0.5;
        assert_eq!(n_best(SamplerOptions { typical_p, top_k: 0, ..o }), None);
    }
    let with = |names: &str| {
        let samplers = SamplerKind::from_names(names).unwrap();
        n_best(SamplerOptions { samplers, repeat_penalty: 1.1, ..SamplerOptions::default() })
    };
    assert_eq!(with("top_k;penalties"), Some(40), "penalties of the best ones");
    assert_eq!(with("temperature;min_p;top_k"), Some(40));
    assert_eq!(with("top_p;top_k"), None);
    assert_eq!(n_best(SamplerOptions { mirostat: mirostat(2), ..options() }), None);
    assert_eq!(
        n_best(SamplerOptions { mirostat: mirostat(2), ..SamplerOptions::greedy() }),
        Some(1)
    );
}

#[test]
fn what_is_banned_is_never_drawn() {
    let o = SamplerOptions { seed: Some(3), top_k: 2, ..options() };
    let mut sampler = Sampler::new(o).unwrap();
    sampler.ban([3, 1, 3]);
    assert_eq!(sampler.n_best(), Some(4));
    for _ in 0..50 {
        let id = sampler.sample(&[1.0, 9.0, 1.0, 8.0, 0.9]).unwrap();
        assert!([0, 2].contains(&id), "{id}");
        let id = sampler.sample_best(&[1, 3, 0, 2], &[9.0, 8.0, 1.0, 1.0]).unwrap();
        assert!([0, 2].contains(&id), "{id}");
    }
    let error = sampler.sample(&[f32::NEG_INFINITY, 9.0]).unwrap_err().to_string();
    assert!(error.contains("no token is left"), "{error}");
}

#[test]
fn samplers_that_draw_by_themselves_leave_the_others_draws_alone() {
    let logits = [1.0, 0.9, 0.8, 0.7];
    let drawn = |o: SamplerOptions| {
        let mut sampler = Sampler::new(SamplerOptions { seed: Some(5), ..o }).unwrap();
        (0..50).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    // XTC that finds no two top choices uses none of the numbers that tokens are drawn with.
    let xtc = XtcOptions { probability: 0.5, threshold: 0.45 };
    assert_eq!(drawn(SamplerOptions { xtc, ..options() }), drawn(options()));
}

/// Numbers of all parameters, from the edges and the inside of their ranges.
fn any_options() -> impl Strategy<Value = SamplerOptions> {
    let kinds = SamplerKind::DEFAULT.into_iter().chain([SamplerKind::AdaptiveP]);
    let chain = prop::collection::vec(prop::sample::select(kinds.collect::<Vec<_>>()), 0..12);
    let chain = prop_oneof![Just(SamplerKind::DEFAULT.to_vec()), chain];
    let edges = [-1e6, -1.0, 0.0, 1e-6, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0, 2.0, 7.0, 1e6];
    let numbers = prop::collection::vec(
        prop::option::weighted(0.3, prop::sample::select(edges.to_vec())),
        PARAMETERS.len(),
    );
    let values = prop::sample::select(vec![-30.0, -0.5, 0.5, 30.0, f32::MAX, f32::NEG_INFINITY]);
    let biases = prop::collection::vec((0u32..40, values), 0..3);
    (chain, numbers, biases).prop_map(|(samplers, numbers, biases)| {
        let mut o = SamplerOptions { samplers, ..SamplerOptions::default() };
        for (parameter, value) in PARAMETERS.iter().zip(numbers) {
            if let Some(value) = value.filter(|value| parameter.takes(*value)) {
                parameter.set(&mut o, value);
            }
        }
        o.logit_bias = biases.into_iter().map(|(id, bias)| LogitBias { id, bias }).collect();
        o
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any chain draws tokens of finite logits, the same for the same seed, and the same from the
    /// best logits where it says that these are enough.
    #[test]
    fn any_chain_draws_a_token_that_there_is(
        o in any_options(),
        logits in prop_oneof![
            coarse_logits(4, &[-0.0, f32::NEG_INFINITY]),
            coarse_logits(20, &[f32::MAX, f32::MIN, f32::NEG_INFINITY, 1e-30]),
            prop::collection::vec(-20f32..20.0, 65..300),
        ],
        seed: u64,
    ) {
        let o = SamplerOptions { seed: Some(seed), ..o };
        let [mut one, mut same, mut of_best] = [(); 3].map(|()| Sampler::new(o.clone()).unwrap());
        let n_best = one.n_best().filter(|k| *k < logits.len());
        let banned = |id| o.logit_bias.iter().any(|b| b.id == id && b.is_ban());
        for _ in 0..12 {
            let id = match one.sample(&logits) {
                Ok(id) => id,
                Err(e) => {
                    prop_assert!(e.to_string().contains("no token is left"), "{}", e);
                    let open = (0..).zip(&logits).find(|(id, l)| l.is_finite() && !banned(*id));
                    prop_assert_eq!(open, None);
                    break;
                }
            };
            prop_assert!(logits[id as usize].is_finite() && !banned(id));
            prop_assert_eq!(same.sample(&logits).unwrap(), id);
            if let Some(k) = n_best {
                let (ids, best) = best_of(&logits, k);
                prop_assert_eq!(of_best.sample_best(&ids, &best).unwrap(), id);
            }
            [&mut one, &mut same, &mut of_best].into_iter().for_each(|s| s.accept(id));
        }
    }
}
