//! Invariants under random events.

use super::*;

proptest! {
    /// Anything in any order, of more requests than are followed.
    #[test]
    fn predictions_are_sound(
        events in prop::collection::vec((0u32..100, 0u32..8, 0u64..400, 0u32..7), 0..200),
        use_delta in any::<bool>(),
    ) {
        let shape = shape();
        let options = FineMoeOptions { capacity: 5, use_delta, ..FineMoeOptions::default() };
        let mut predictor = FineMoe::new(&shape, options);
        for seed in 0..4 {
            run(&mut predictor, 0, &iteration(&shape, 100 * seed, 2.0));
        }
        let mut eviction = MapEviction::new(&shape);
        let mut out = Vec::new();
        for (request, kind, seed, layer) in events {
            let embedding = embedding(seed, (seed % 70) as usize);
            let n_experts = N_EXPERTS.get(layer as usize).map_or(3, |n| *n);
            let probs = softmax(seed, layer as usize, n_experts, 3.0);
            let event = match kind {
                0 => Event::RequestStart { request },
                1 => Event::RequestEnd { request },
                2 => end(request),
                3 => start(request, &embedding),
                4 => Event::PromptRouted(PromptRouted {
                    request,
                    layer,
                    n_tokens: 1,
                    counts: &[],
                    probs: &probs,
                    chosen: &[],
                }),
                _ => routed(request, layer, &probs),
            };
            predictor.observe(&event);
            predictor.predict(&mut out);
            predictor.emit(&mut |event| eviction.observe(event));
            for prediction in &out {
                prop_assert!(prediction.priority.is_finite() && prediction.priority >= 0.0);
            }
            prop_assert!(out.is_sorted_by(|a, b| a.priority >= b.priority));
            let mut experts: Vec<Expert> = out.iter().map(|p| p.expert).collect();
            experts.sort();
            prop_assert!(experts.is_sorted_by(|a, b| a < b));
            for (layer, n_experts) in (0..).zip(N_EXPERTS) {
                let n = experts.iter().filter(|e| e.layer == layer).count();
                prop_assert!(n == 0 || (K..=n_experts).contains(&n));
            }
        }
    }

    /// A layer is used, which makes its prediction past, or predicted. Some routers tell no
    /// probabilities.
    #[test]
    fn eviction_is_by_probability_and_frequency(
        acts in prop::collection::vec((0usize..3, 0u32..6, prop::option::of(0u64..400)), 0..60),
    ) {
        let mut eviction = MapEviction::new(&shape());
        let n_experts = MOE_LAYERS.map(|layer| N_EXPERTS[layer as usize]);
        let none = n_experts.map(|n| vec![1.0 / n as f32; n]);
        let mut p = none.clone();
        let mut freq = [[0u64; 40]; 3];
        for &(ordinal, expert, predicted) in &acts {
            let layer = MOE_LAYERS[ordinal];
            if let Some(seed) = predicted {
                p[ordinal] = softmax(seed, layer as usize, n_experts[ordinal], 3.0);
                p[ordinal][0] = 0.0;
                eviction.observe(&Event::Predicted { layer, probs: &p[ordinal] });
                continue;
            }
            freq[ordinal][expert as usize] += 1;
            p[ordinal] = softmax(u64::from(expert) + 7, layer as usize, n_experts[ordinal], 2.0);
            let (chosen, hidden) = (&[expert][..], &[][..]);
            // On another scale.
            let probs = &p[ordinal].iter().map(|p| 2.0 * p).collect::<Vec<f32>>()[..];
            let routed = Routed { request: 0, layer, chosen, probs, hidden, ahead: None };
            eviction.observe(&Event::Routed(routed));
            // A prompt's uses are not the decode cache's, but its layers are past, too.
            let (n_tokens, counts) = (9, &[9; 6][..]);
            let past = MOE_LAYERS[(ordinal + 1) % 3];
            eviction.observe(&Event::PromptRouted(PromptRouted {
                request: 0,
                layer: past,
                n_tokens,
                counts,
                probs: &[],
                chosen: &[],
            }));
            p[(ordinal + 1) % 3].clone_from(&none[(ordinal + 1) % 3]);
        }
        let mut all = Vec::new();
        for (ordinal, &layer) in MOE_LAYERS.iter().enumerate() {
            for (expert, &p) in p[ordinal].iter().enumerate() {
                let priority = eviction.priority(Expert { layer, expert: expert as u32 });
                prop_assert!(!priority.is_nan());
                all.push((priority, freq[ordinal][expert], f64::from(p)));
            }
        }
        for &(a, freq_a, p_a) in &all {
            for &(b, freq_b, p_b) in &all {
                let (product_a, product_b) = (p_a * freq_a as f64, p_b * freq_b as f64);
                if freq_a > 0 && freq_b > 0 && p_a.min(p_b) > 1e-8 && product_a < product_b {
                    prop_assert!(a < b);
                }
                // Unused before used; then by what else there is.
                prop_assert!(freq_a > 0 || freq_b == 0 || a < b);
                prop_assert!(freq_a + freq_b > 0 || p_a >= p_b || a < b);
                prop_assert!(p_a + p_b > 0.0 || freq_a >= freq_b || a < b);
            }
        }
    }
}

/// The state of requests that never end is bounded.
#[test]
fn silent_requests_make_room() {
    let shape = shape();
    let mut predictor = FineMoe::new(&shape, FineMoeOptions::default());
    let known = iteration(&shape, 1, 2.0);
    run(&mut predictor, 0, &known);
    let mut out = Vec::new();
    for request in 0..1000 {
        predictor.observe(&start(request, &known.embedding));
        predictor.observe(&routed(request, 1, &known.map[0]));
    }
    predictor.predict(&mut out);
    let urgent = out[0].priority;
    // Those that were silent the longest are gone; others go on.
    for (request, n_stored) in [(940, 2), (5, 2), (999, 3)] {
        for (layer, probs) in MOE_LAYERS.into_iter().zip(&known.map).skip(1) {
            predictor.observe(&routed(request, layer, probs));
        }
        predictor.observe(&end(request));
        assert_eq!(predictor.store().len(), n_stored, "{request}");
    }
    predictor.predict(&mut out);
    assert_eq!(out[0].priority, urgent);
}

#[test]
fn what_has_ended_is_not_wanted() {
    let shape = shape();
    let mut predictor = FineMoe::new(&shape, FineMoeOptions::default());
    let known = iteration(&shape, 1, 2.0);
    run(&mut predictor, 0, &known);
    let mut out = Vec::new();
    for ending in [Event::RequestEnd { request: 3 }, Event::RequestStart { request: 3 }, end(3)] {
        predictor.observe(&start(3, &known.embedding));
        predictor.predict(&mut out);
        assert!(!out.is_empty());
        predictor.observe(&ending);
        predictor.predict(&mut out);
        assert!(out.is_empty(), "{ending:?}");
    }
}
