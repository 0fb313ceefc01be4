//! The sampler draws from the distribution that its options describe: exact probabilities computed
//! here in the plainest way, against draws with a fixed seed, by the chi-square test.

use moeba::sample::{Sampler, SamplerOptions};
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

/// The definition, step by step: top-k, top-p, min-p on renormalised probabilities, temperature.
fn exact(logits: &[f32], o: &SamplerOptions) -> Vec<f64> {
    let mut kept: Vec<usize> = (0..logits.len()).collect();
    kept.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    if o.top_k > 0 {
        kept.truncate(o.top_k as usize);
    }
    let p = softmax(logits, &kept, 1.0);
    if o.top_p < 1.0 {
        let mut sum = 0.0;
        let last = kept.iter().position(|&i| {
            sum += p[i];
            sum >= f64::from(o.top_p)
        });
        kept.truncate(last.map_or(kept.len(), |n| n + 1));
    }
    let p = softmax(logits, &kept, 1.0);
    let least = f64::from(o.min_p) * p[kept[0]];
    kept.retain(|&i| p[i] >= least);
    softmax(logits, &kept, f64::from(o.temp))
}

fn counts(logits: &[f32], options: &SamplerOptions, n: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(options.clone()).unwrap();
    let mut counts = vec![0; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(&mut logits.to_vec()).unwrap() as usize] += 1;
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
    for o in [
        SamplerOptions { seed, ..options() },
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
        (0..8).map(|_| sampler.sample(&mut logits.clone()).unwrap()).collect::<Vec<u32>>()
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
        assert_eq!(sampler.sample(&mut [0.5, 3.0, -1.0, 3.0]).unwrap(), 1);
        assert_eq!(sampler.sample(&mut [f32::NEG_INFINITY, -2.0]).unwrap(), 1);
    }
    let one = SamplerOptions { top_k: 1, ..options() };
    assert_eq!(Sampler::new(one).unwrap().sample(&mut [3.0, 3.0, 3.0]).unwrap(), 0);
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
        let mut copy = logits.clone();
        assert_eq!(first.sample(&mut copy).unwrap(), again.sample(&mut logits.clone()).unwrap());
    }
    assert_ne!(first.seed(), Sampler::new(options()).unwrap().seed());
}

#[test]
fn penalties_count_within_the_window() {
    let o = SamplerOptions {
        repeat_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        repeat_last_n: 3,
        ..SamplerOptions::greedy()
    };
    let after = |options: &SamplerOptions, ids: &[u32]| {
        let mut sampler = Sampler::new(options.clone()).unwrap();
        ids.iter().for_each(|&id| sampler.accept(id));
        let mut logits = [4.0, -4.0, 1.0];
        sampler.sample(&mut logits).unwrap();
        logits
    };
    assert_eq!(after(&o, &[]), [4.0, -4.0, 1.0]);
    assert_eq!(after(&o, &[0, 0, 1]), [2.0 - 1.0 - 0.25, -8.0 - 0.5 - 0.25, 1.0]);
    assert_eq!(after(&o, &[0, 0, 1, 1, 1]), [4.0, -8.0 - 1.5 - 0.25, 1.0]);
    assert_eq!(after(&o, &[0, 77, 77, 77]), [4.0, -4.0, 1.0], "ids past the logits are ignored");
    let all = SamplerOptions { repeat_last_n: -1, ..o.clone() };
    assert_eq!(after(&all, &[0, 0, 1, 1, 1])[0], 2.0 - 1.0 - 0.25);
    let none = SamplerOptions { repeat_last_n: 0, ..o };
    assert_eq!(after(&none, &[0, 1, 2]), [4.0, -4.0, 1.0]);
}

#[test]
fn options_out_of_range_are_refused_by_name() {
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
            let id = sampler.sample(&mut logits.clone()).unwrap() as usize;
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
            let expected = told(of_all.sample(&mut logits.clone()));
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
        assert_eq!(n_best(SamplerOptions { frequency_penalty: 0.1, ..o }), None);
    }
}

#[test]
fn what_is_banned_is_never_drawn() {
    let o = SamplerOptions { seed: Some(3), top_k: 2, ..options() };
    let mut sampler = Sampler::new(o).unwrap();
    sampler.ban([3, 1, 3]);
    assert_eq!(sampler.n_best(), Some(4));
    for _ in 0..50 {
        let id = sampler.sample(&mut [1.0, 9.0, 1.0, 8.0, 0.9]).unwrap();
        assert!([0, 2].contains(&id), "{id}");
        let id = sampler.sample_best(&[1, 3, 0, 2], &[9.0, 8.0, 1.0, 1.0]).unwrap();
        assert!([0, 2].contains(&id), "{id}");
    }
    let error = sampler.sample(&mut [f32::NEG_INFINITY, 9.0]).unwrap_err().to_string();
    assert!(error.contains("no token is left"), "{error}");
}
