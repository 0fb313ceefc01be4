use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn experts(n_experts: usize, slot_mib: usize) -> Option<LayerNeeds> {
    let slot_bytes = slot_mib * MIB as usize;
    Some(LayerNeeds { n_experts, n_granules: 2, k: 2, slot_bytes, staging_bytes: 0 })
}

/// Ten layers of 20 MiB and 10 of KV, all but the first with 16 experts of 2 × 1 MiB (a token and
/// one expert more: 6 MiB), an output of 30, activations and buffers of 15.
fn needs() -> DeviceNeeds {
    let layer = |l: usize| LayerBytes {
        dense_bytes: 20 * MIB,
        kv_bytes: 10 * MIB,
        experts: if l == 0 { None } else { experts(16, 1) },
        is_cpu_only: false,
        leader: None,
    };
    DeviceNeeds {
        layers: (0..10).map(layer).collect(),
        head_bytes: 30 * MIB,
        activation_bytes: 10 * MIB,
        n_tokens: 512,
        work_bytes: 5 * MIB,
        peer_bytes: 2 * MIB,
        expert_bytes: 9 * 32 * MIB,
    }
}

/// The free bytes that leave so much to use (below 4 GiB).
fn free(usable_mib: u64) -> u64 {
    let bytes = usable_mib * MIB;
    [(bytes * 8).div_ceil(7), bytes + HEAD_ROOM]
        .into_iter()
        .find(|free| free - head_room(*free) >= bytes)
        .expect("one of the two")
}

fn wanted(vram: &str, gpu_layers: Option<usize>) -> Wanted {
    Wanted { vram: vram.parse().unwrap(), gpu_layers, ..Wanted::default() }
}

fn planned(usable_mib: u64, wanted: &Wanted) -> DevicePlan {
    plan(&needs(), &[free(usable_mib)], wanted).unwrap()
}

fn refused(usable_mib: u64, wanted: &Wanted) -> String {
    plan(&needs(), &[free(usable_mib)], wanted).unwrap_err().to_string()
}

#[test]
fn head_room_is_half_a_gib_or_a_part() {
    assert_eq!(head_room(800 * MIB), 100 * MIB);
    assert_eq!(head_room(8192 * MIB), 512 * MIB);
    assert_eq!(head_room(50_000 * MIB), 2000 * MIB);
    // More memory is never less to use.
    let usable = |mib: u64| mib * MIB - head_room(mib * MIB);
    assert!((1..60_000).all(|mib| usable(mib) > usable(mib - 1)));
}

#[test]
fn everything_is_there_where_it_fits() {
    // 10 × (20 + 10) + 30 + 15 + 9 × 32 = 633
    let all = planned(633, &Wanted::default());
    assert_eq!((all.gpu_layers.clone(), all.head_on_device), (0..10, true));
    assert!(all.holds_all_experts());
    assert_eq!(all.experts_on_cpu, [false; 10]);
    assert_eq!(all.expert_budget_bytes(), 288 * MIB);
    assert_eq!(all.planned_bytes(0), 633 * MIB);
    assert!(!planned(632, &Wanted::default()).holds_all_experts());
    // Slots are longer than experts are in the file.
    let needs = DeviceNeeds { expert_bytes: 287 * MIB, ..needs() };
    for (vram, holds_all) in [("100%", true), ("99.9%", false)] {
        let plan = plan(&needs, &[free(633)], &wanted(vram, None)).unwrap();
        assert_eq!(plan.holds_all_experts(), holds_all, "{vram}");
    }
}

#[test]
fn experts_get_what_is_left_and_layers_go_when_a_tokens_do_not_fit() {
    // 345 beside the experts.
    let some = planned(400, &Wanted::default());
    assert_eq!(some.gpu_layers, 0..10);
    assert!((55 * MIB..56 * MIB).contains(&some.expert_budget_bytes()), "{some:?}");
    assert_eq!(planned(351, &Wanted::default()).gpu_layers, 0..10);
    let fewer = planned(350, &Wanted::default());
    assert_eq!(fewer.gpu_layers, 1..10);
    assert!(fewer.experts_on_cpu.iter().all(|on_cpu| !on_cpu), "the first layer has none");
    let one = planned(82, &Wanted::default());
    assert_eq!((one.gpu_layers.clone(), one.head_on_device), (9..10, true));
    assert_eq!(one.experts_on_cpu[1..], [vec![true; 8], vec![false]].concat());
    let none = refused(80, &Wanted::default());
    let expected = "the GPU has no room for a layer: 91.4 MiB are free, but 92.5 MiB are needed (1 \
                    of 10 layers 20.0 MiB, output 30.0 MiB, KV cache 10.0 MiB, buffers for 512 \
                    tokens 15.0 MiB, experts 6.0 MiB, kept free 11.5 MiB): lower -c, or leave \
                    experts to the CPU with -cmoe";
    assert_eq!(none, expected);
}

#[test]
fn ngl_counts_from_the_end_and_the_output_first() {
    let layers = |n| {
        let plan = planned(1000, &wanted("auto", Some(n)));
        (plan.gpu_layers, plan.head_on_device)
    };
    assert_eq!(layers(0), (10..10, false));
    assert_eq!(layers(1), (10..10, true));
    assert_eq!(layers(2), (9..10, true));
    assert_eq!(layers(10), (1..10, true));
    for all in [11, 99, usize::MAX] {
        assert_eq!(layers(all), (0..10, true));
    }
    let nothing = planned(1000, &wanted("auto", Some(0)));
    assert!(nothing.is_empty() && nothing.planned_bytes(0) == 0);
}

#[test]
fn more_layers_than_fit_are_refused_with_what_fits() {
    let message = refused(200, &wanted("auto", Some(99)));
    // 30 + 15 + 30 n + 6 ≤ 200
    assert!(message.contains("-ngl 11 is more") && message.ends_with("-ngl 5 fits"), "{message}");
    assert_eq!(planned(200, &wanted("auto", Some(5))).gpu_layers, 6..10);
    assert!(refused(70, &wanted("auto", Some(2))).ends_with("no layer fits"));
}

#[test]
fn a_given_budget_is_kept_and_makes_room_for_itself() {
    let plan = planned(663, &wanted("100M", None));
    assert_eq!((plan.expert_budget_bytes(), plan.gpu_layers), (100 * MIB, 0..10));
    // 345 + 100 do not fit: layers make room.
    let plan = planned(400, &wanted("100M", None));
    assert_eq!((plan.expert_budget_bytes(), plan.gpu_layers), (100 * MIB, 2..10));
    let half = planned(663, &wanted("50%", None));
    assert_eq!(half.expert_budget_bytes(), 144 * MIB);
    // No more than there are.
    assert_eq!(planned(700, &wanted("9G", None)).expert_budget_bytes(), 288 * MIB);
    let message = refused(100, &wanted("40M", None));
    assert!(message.contains("lower --vram") && message.contains("experts 32.0 MiB"), "{message}");
}

#[test]
fn budgets_below_a_token_are_refused_with_the_minimum() {
    let message = refused(663, &wanted("5M", None));
    for word in ["--vram", "5.0 MiB", "6.0 MiB", "-cmoe"] {
        assert!(message.contains(word), "{message}");
    }
    assert_eq!(planned(663, &wanted("6M", None)).expert_budget_bytes(), 6 * MIB);
}

#[test]
fn experts_that_stay_on_the_cpu_take_no_vram() {
    let all = Wanted { cpu_moe: CpuMoe::All, ..Wanted::default() };
    let plan = planned(345, &all);
    assert_eq!((plan.gpu_layers.clone(), plan.expert_budget_bytes()), (0..10, 0));
    assert_eq!(plan.experts_on_cpu[..3], [false, true, true]);
    let first = Wanted { cpu_moe: CpuMoe::First(8), ..Wanted::default() };
    let plan = planned(663, &first);
    assert_eq!(plan.experts_on_cpu, [vec![false], vec![true; 7], vec![false; 2]].concat());
    assert_eq!(plan.expert_budget_bytes(), 64 * MIB);
}

#[test]
fn rules_come_before_other_flags() {
    let mut layers = vec![None; 10];
    let mut experts = vec![None; 10];
    experts[5] = Some(true);
    let placed = Placed { experts: experts.clone(), ..Placed::default() };
    let wanted = Wanted { cpu_moe: CpuMoe::All, placed, ..Wanted::default() };
    let plan = planned(663, &wanted);
    assert_eq!(plan.expert_budget_bytes(), 32 * MIB);
    assert!(!plan.experts_on_cpu[5] && plan.experts_on_cpu[6]);
    // Where the layer is not on the GPU, its experts are not either.
    let message = refused(663, &Wanted { gpu_layers: Some(3), ..wanted });
    assert!(message.contains("experts of layer 5"), "{message}");

    layers[2] = Some(false);
    let of = |layers: &[Option<bool>]| {
        let placed = Placed { layers: layers.to_vec(), ..Placed::default() };
        Wanted { placed, ..Wanted::default() }
    };
    let message = refused(663, &Wanted { gpu_layers: Some(99), ..of(&layers) });
    assert!(message.contains("layer 0") && message.contains("layer 2"), "{message}");
    // Without -ngl the plan is one that the rule allows.
    assert_eq!(planned(663, &of(&layers)).gpu_layers, 3..10);
    layers[..2].fill(Some(false));
    assert_eq!(planned(663, &of(&layers)).gpu_layers, 3..10);
    layers[9] = Some(true);
    let wanted = Wanted { gpu_layers: Some(1), ..of(&layers) };
    assert_eq!(planned(663, &wanted).gpu_layers, 9..10);
    let none = of(&[Some(false); 10]);
    assert!(refused(663, &none).contains("--device cpu"), "{}", refused(663, &none));

    let head = Placed { head: Some(false), embedding: Some(false), ..Placed::default() };
    let plan = planned(663, &Wanted { placed: head, ..Wanted::default() });
    assert_eq!((plan.head_on_device, plan.head_bytes), (false, 0));
    let embedding = Placed { embedding: Some(true), ..Placed::default() };
    let message = refused(663, &Wanted { placed: embedding, ..Wanted::default() });
    assert!(message.contains("embedding") && message.contains("in memory"), "{message}");
}

#[test]
fn several_devices_share_the_experts() {
    let two = |mib: [u64; 2], wanted: &Wanted| {
        let plan = plan(&needs(), &mib.map(free), wanted).unwrap();
        let shares = [0, 1].map(|i| plan.devices[i].expert_budget_bytes / MIB);
        (plan.gpu_layers, shares)
    };
    let auto = Wanted::default();
    // Half of 288 each, and of the slots of a token more.
    assert_eq!(two([700, 700], &auto), (0..10, [147, 147]));
    // The second holds what the first cannot.
    assert_eq!(two([400, 700], &auto), (0..10, [55, 238]));
    assert_eq!(two([345, 100], &auto), (0..10, [0, 93]));
    assert_eq!(two([345, 10], &Wanted { cpu_moe: CpuMoe::All, ..auto }), (0..10, [0, 0]));
    assert_eq!(two([700, 700], &wanted("100M", None)), (0..10, [50, 50]));
    assert_eq!(two([365, 700], &wanted("100M", None)), (0..10, [20, 79]));
    // A token's experts at least, or none.
    assert_eq!(two([700, 700], &wanted("10M", None)), (0..10, [10, 0]));
}

#[test]
fn a_dense_model_needs_no_slots() {
    let mut dense = needs();
    dense.layers.iter_mut().for_each(|layer| layer.experts = None);
    dense.expert_bytes = 0;
    for vram in ["auto", "1M", "50%"] {
        let plan = plan(&dense, &[free(345)], &wanted(vram, None)).unwrap();
        assert_eq!((plan.gpu_layers, plan.head_on_device), (0..10, true));
        assert_eq!(plan.expert_all_bytes, 0);
    }
}

#[test]
fn spills_are_what_was_allocated_and_is_not_there() {
    let gib = 1 << 30;
    assert_eq!(spilled_bytes(8 * gib, 2 * gib, 6 * gib), 0);
    // Rounded up by the driver; a little given back by someone else.
    assert_eq!(spilled_bytes(8 * gib, 2 * gib - 50 * MIB, 6 * gib), 0);
    assert_eq!(spilled_bytes(8 * gib, 2 * gib + 50 * MIB, 6 * gib), 0);
    assert_eq!(spilled_bytes(4 * gib, 0, 6 * gib), 2 * gib);
    assert_eq!(spilled_bytes(8 * gib, 5 * gib, 6 * gib), 3 * gib);
    // A little more than there was is too much, too.
    assert_eq!(spilled_bytes(gib, 0, gib + MIB), MIB);
    assert!(spill_warning(2 * gib).contains("2.00 GiB"));
}

fn any_needs() -> impl Strategy<Value = DeviceNeeds> {
    let slots =
        (1usize..9, 1usize..4, 1usize..9, prop_oneof![Just(4096usize), 100usize..9_000_000]);
    let slots = slots.prop_map(|(n_experts, n_granules, k, slot_bytes)| {
        let k = k.min(n_experts);
        LayerNeeds { n_experts, n_granules, k, slot_bytes, staging_bytes: 0 }
    });
    let is_cpu_only = proptest::bool::weighted(0.2);
    let leader = proptest::option::weighted(0.2, 0..12usize);
    let layer = (0..80 * MIB, 0..40 * MIB, proptest::option::of(slots), is_cpu_only, leader);
    let layer = layer.prop_map(|(dense_bytes, kv_bytes, experts, is_cpu_only, leader)| {
        LayerBytes { dense_bytes, kv_bytes, experts, is_cpu_only, leader }
    });
    let layers = proptest::collection::vec(layer, 1..12);
    let rest = (0..99 * MIB, 0..50 * MIB, 0..50 * MIB);
    (layers, rest).prop_map(|(layers, (head, activation, work))| {
        let bytes = |l: &LayerNeeds| (l.n_experts * l.n_granules * l.slot_bytes) as u64;
        DeviceNeeds {
            expert_bytes: layers.iter().filter_map(|l| l.experts.as_ref()).map(bytes).sum(),
            layers,
            head_bytes: head,
            activation_bytes: activation,
            n_tokens: 512,
            work_bytes: work,
            peer_bytes: work / 3,
        }
    })
}

fn any_wanted() -> impl Strategy<Value = Wanted> {
    let vram = prop_oneof![
        Just(VramBudget::Auto),
        (1..900 * MIB).prop_map(VramBudget::Bytes),
        (0.1f64..120.0).prop_map(VramBudget::Percent),
    ];
    let moe =
        prop_oneof![Just(CpuMoe::None), Just(CpuMoe::All), (0..12usize).prop_map(CpuMoe::First)];
    (vram, proptest::option::of(0..14usize), moe).prop_map(|(vram, gpu_layers, cpu_moe)| Wanted {
        vram,
        gpu_layers,
        cpu_moe,
        placed: Placed::default(),
    })
}

/// The size that follows `word`, as a flag takes it: "1.5M" of "1.5 MiB".
fn size_after(message: &str, word: &str) -> String {
    let rest = message.split(word).nth(1).unwrap_or_else(|| panic!("no {word:?} in {message}"));
    let mut words = rest.split_whitespace();
    let (number, unit) = (words.next().unwrap(), words.next().unwrap());
    format!("{number}{}", &unit[..1])
}

proptest! {
    #[test]
    fn no_plan_exceeds_what_may_be_used(
        needs in any_needs(),
        free in proptest::collection::vec(0..3000 * MIB, 1..4),
        wanted in any_wanted(),
    ) {
        let Ok(plan) = plan(&needs, &free, &wanted) else { return Ok(()) };
        for (i, free) in free.iter().enumerate() {
            prop_assert!(plan.planned_bytes(i) + head_room(*free) <= *free, "{plan:?}");
        }
        let budget = plan.expert_budget_bytes();
        if plan.expert_all_bytes > 0 {
            prop_assert!(budget >= plan.expert_min_bytes, "{plan:?}");
        } else {
            prop_assert_eq!(budget, 0);
        }
        if let Some(asked) = wanted.vram.bytes(needs.expert_bytes) {
            prop_assert!(budget <= asked, "{plan:?}");
        }
        prop_assert_eq!(plan.gpu_layers.end, needs.layers.len());
        if let Some(n) = wanted.gpu_layers {
            prop_assert_eq!(plan.gpu_layers.len(), n.saturating_sub(1).min(needs.layers.len()));
            prop_assert_eq!(plan.head_on_device, n > 0);
        }
        for (l, on_cpu) in plan.experts_on_cpu.iter().enumerate() {
            let is_cpu_only =
                !needs.layers[l].is_on_device(&plan.gpu_layers) || !plan.has_layer(l);
            let kept = wanted.cpu_moe.has(l) || is_cpu_only;
            prop_assert_eq!(*on_cpu, needs.layers[l].experts.is_some() && kept);
        }
    }

    #[test]
    fn more_vram_is_never_less(
        needs in any_needs(),
        free in 0..3000 * MIB,
        more in 1..500 * MIB,
        wanted in any_wanted(),
    ) {
        let Ok(before) = plan(&needs, &[free], &wanted) else { return Ok(()) };
        let after = plan(&needs, &[free + more], &wanted);
        // What a layer more brings may want larger slots than --vram has room for.
        let Ok(after) = after else {
            prop_assert!(wanted.vram != VramBudget::Auto, "{after:?}");
            return Ok(());
        };
        prop_assert!(after.gpu_layers.len() >= before.gpu_layers.len());
        if after.gpu_layers == before.gpu_layers {
            prop_assert!(after.expert_budget_bytes() >= before.expert_budget_bytes());
        }
    }

    #[test]
    fn the_least_budget_that_an_error_names_will_do(
        needs in any_needs(),
        bytes in 1..40 * MIB,
        gpu_layers in proptest::option::of(0..14usize),
    ) {
        let with = |vram| {
            let wanted = Wanted { vram, gpu_layers, ..Wanted::default() };
            plan(&needs, &[64 << 30], &wanted)
        };
        if let Err(error) = with(VramBudget::Bytes(bytes)) {
            let least = size_after(&error.to_string(), "needs");
            let budget: VramBudget = least.parse().unwrap();
            prop_assert!(with(budget).is_ok(), "{error}");
        }
    }

    #[test]
    fn shares_are_even_and_use_what_there_is(
        caps in proptest::collection::vec(prop_oneof![Just(0u64), 10..1000u64], 1..5),
        total in 10..3000u64,
    ) {
        let shares = shared_out(&caps, total, 10);
        prop_assert!(shares.iter().zip(&caps).all(|(s, c)| s <= c && (*s == 0 || *s >= 10)));
        let there: u64 = caps.iter().sum();
        prop_assert!(shares.iter().sum::<u64>() <= total.min(there));
        if total >= 10 * caps.len() as u64 {
            prop_assert_eq!(shares.iter().sum::<u64>(), total.min(there));
        }
    }
}
