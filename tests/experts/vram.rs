//! Experts in VRAM, on the emulated device: whatever is asked for, in whatever order streams run,
//! what is at the addresses that are given out are the file's bytes for as long as they are
//! relied on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use moeba::backend::gpu::emulated::{Config, Faults};
use moeba::backend::gpu::{Device, DeviceSlice, Emulated, Stream};
use moeba::experts::disk::IoKind;
use moeba::experts::vram::{
    Dealt, Fence, GranuleLayout, Own, Owners, PinnedTier, SlotTable, VramOptions, VramTier,
    VramTiers,
};
use moeba::experts::{
    Access, Acquisition, ExpertPlace, ExpertStatus, ExpertStore, ExpertTensors, Geometry,
    Hierarchy, LayerExperts, LayerPart, PlacedExpert, PolicyClient, RamTier, ReadyGranule,
    Resident, StreamOptions, needs,
};
use moeba::gguf::Gguf;
use moeba::policy::{Event, Profile, Routed, Wants};
use moeba::{Error, Result};
use proptest::prelude::*;

use crate::vram_file::{K, MOE_LAYERS, N_EXPERTS, SHAPES, parts, write};

struct Model {
    _dir: tempfile::TempDir,
    file: Arc<Gguf>,
    layers: Vec<Option<LayerExperts>>,
}

impl Model {
    fn new() -> Model {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("experts.gguf");
        write(&path);
        let file = Gguf::open(&path).unwrap();
        let layer = |(layer, shape): (usize, (usize, usize, usize, bool))| {
            let [gate, up, down] = parts(shape);
            let index = |part: &str| file.tensor_index(&format!("{layer}.{part}"));
            let tensors = ExpertTensors::Stacked {
                gate: index("gate"),
                up: index("up").unwrap(),
                down: index("down").unwrap(),
            };
            let geometry = Geometry { n_ff: shape.0, granule_rows: shape.1 };
            Some(LayerExperts { n_experts: N_EXPERTS, geometry, gate, up, down, tensors })
        };
        let layers = std::iter::once(None).chain(MOE_LAYERS.zip(SHAPES).map(layer)).collect();
        Model { _dir: dir, file: Arc::new(file), layers }
    }

    fn layer(&self, layer: usize) -> &LayerExperts {
        self.layers[layer].as_ref().unwrap()
    }

    /// The bytes expected at a granule's address in VRAM: its parts by the layout, with their
    /// offsets.
    fn expected(&self, layer: usize, expert: u32, granule: usize) -> [(usize, Vec<u8>); 3] {
        let experts = self.layer(layer);
        let layout = GranuleLayout::new(experts);
        let ReadyGranule { gate, up, down, down_stride, rows, .. } =
            experts.in_place(&self.file, expert, granule);
        let width = experts.down.columns(&rows).len();
        let down = down.chunks(down_stride).flat_map(|row| row[..width].to_vec()).collect();
        [(layout.gate_at, gate.to_vec()), (layout.up_at, up.to_vec()), (layout.down_at, down)]
    }

    /// A budget that lies so far between the least and everything.
    fn budget(&self, share: f64) -> u64 {
        let least = VramTier::minimum_bytes(&self.layers, K);
        least + ((VramTier::all_bytes(&self.layers, K) - least) as f64 * share) as u64
    }

    fn resident(&self) -> Arc<dyn ExpertStore> {
        Arc::new(Resident::new(self.file.clone(), self.layers.clone()))
    }

    fn streamed(&self, share: f64) -> Arc<RamTier> {
        let needs = needs(&self.file, &self.layers, K);
        let least = needs.minimum_bytes();
        let options = StreamOptions {
            budget: least + ((needs.all_bytes() - least) as f64 * share) as u64,
            io: IoKind::Pread,
            policy: "on-demand".parse().unwrap(),
            k: K,
            profile: Profile::default(),
            lockstep: false,
            nodes: Vec::new(),
            peers: None,
            faults: None,
        };
        Arc::new(RamTier::new(&self.file, &self.layers, &options).unwrap())
    }

    fn vram(
        &self,
        gpu: &Device,
        source: Arc<dyn ExpertStore>,
        share: f64,
        policy: &str,
    ) -> Result<VramTier> {
        let options = VramOptions {
            source: pinned(gpu, &source),
            ..VramOptions::new(self.budget(share), policy.parse().unwrap(), K)
        };
        VramTier::new(gpu, &self.layers, source, &options)
    }

    /// A tier that holds what was asked for and nothing else.
    fn lockstep(&self, gpu: &Device, source: Arc<dyn ExpertStore>, share: f64) -> VramTier {
        let policy = "on-demand".parse().unwrap();
        let options = VramOptions {
            lockstep: true,
            source: pinned(gpu, &source),
            ..VramOptions::new(self.budget(share), policy, K)
        };
        VramTier::new(gpu, &self.layers, source, &options).unwrap()
    }
}

/// The memory of the tier below, as much of it as the device pins.
fn pinned(gpu: &Device, source: &Arc<dyn ExpertStore>) -> Option<Arc<PinnedTier>> {
    let mut pinned = PinnedTier::start(gpu, source)?;
    pinned.wait();
    Some(Arc::new(pinned))
}

fn gpu(seed: u64, faults: Faults) -> Device {
    let config = Config { seed, faults, ..Config::default() };
    Emulated::devices(&config).swap_remove(0)
}

// ---- a device that relies on addresses ----

/// A copy of a granule's bytes out of VRAM that may not have run yet.
struct Reading {
    expected: Vec<u8>,
    got: Vec<u8>,
}

/// The compute stream: it reads granules when it comes to it.
struct Compute<'m> {
    model: &'m Model,
    stream: Stream,
    readings: Vec<Reading>,
}

impl<'m> Compute<'m> {
    fn new(model: &'m Model, gpu: &Device) -> Compute<'m> {
        Compute { model, stream: Stream::new(gpu).unwrap(), readings: Vec::new() }
    }

    /// Queues reads of a granule.
    fn read(&mut self, slot: DeviceSlice, layer: usize, expert: u32, granule: usize) {
        for (at, expected) in self.model.expected(layer, expert, granule) {
            if expected.is_empty() {
                continue;
            }
            let mut got = vec![0; expected.len()];
            let from = slot.slice(at..at + expected.len());
            // SAFETY: the bytes on the heap stay where they are until `check` has waited.
            unsafe { self.stream.download(got.as_mut_ptr(), from).unwrap() };
            self.readings.push(Reading { expected, got });
        }
    }

    fn fence(&self) -> Fence {
        Fence::after(&self.stream).unwrap()
    }

    /// Waits for all reads, and that they found the file's bytes.
    fn check(&mut self) {
        self.stream.synchronize().unwrap();
        for Reading { expected, got } in self.readings.drain(..) {
            assert!(expected == got, "other bytes than the file's");
        }
    }
}

impl Drop for Compute<'_> {
    fn drop(&mut self) {
        // What is queued must not outlive its targets.
        let _ = self.stream.synchronize();
    }
}

/// Demands experts and reads all of their granules, waiting for the device or leaving that to a
/// fence.
fn demand(
    vram: &VramTier,
    compute: &mut Compute,
    layer: usize,
    experts: &[u32],
    access: Access,
    fenced: bool,
) -> Result<()> {
    let mut work = Acquisition::default();
    vram.acquire(layer, experts, access, &mut work);
    let mut n = 0;
    let mut end = None;
    let result = loop {
        match vram.next_ready(&mut work, end.as_ref()) {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
        for i in 0..work.n_handed() {
            let placed = vram.ready(&work, i);
            compute.read(placed.slot, layer, placed.expert, placed.granule);
            n += 1;
        }
        end = fenced.then(|| compute.fence());
        if !fenced {
            compute.check();
        }
    };
    vram.release(&mut work, end.as_ref());
    if result.is_ok() {
        assert_eq!(n, experts.len() * vram.layout(layer).n_granules, "each granule once");
    }
    result
}

fn rest(vram: &VramTier) {
    until(|| vram.check_integrity());
}

/// Nothing is pinned or on its way any more.
fn until(is_at_rest: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_at_rest() {
        assert!(since.elapsed() < Duration::from_secs(60), "the experts do not come to rest");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn routed(vram: &VramTier, layer: usize, chosen: &[u32]) {
    let (layer, probs, hidden) = (layer as u32, &[1.0 / N_EXPERTS as f32; N_EXPERTS], &[]);
    vram.observe(&Event::Routed(Routed { request: 0, layer, chosen, probs, hidden, ahead: None }));
}

/// A pinned layer: its table.
struct PinnedLayer {
    layer: usize,
    addresses: Vec<u64>,
}

impl PinnedLayer {
    fn new(vram: &VramTier, layer: usize) -> PinnedLayer {
        let mut table = SlotTable::default();
        assert!(vram.pin_layer(layer, &mut table), "a copy of none");
        PinnedLayer { layer, addresses: table.addresses }
    }

    fn n_granules(&self) -> usize {
        self.addresses.len() / N_EXPERTS
    }

    fn has(&self, expert: u32) -> bool {
        let n = self.n_granules();
        let of_expert = &self.addresses[expert as usize * n..][..n];
        let there = of_expert.iter().filter(|address| **address != 0).count();
        assert!(there == 0 || there == n, "an expert in part");
        there > 0
    }

    /// Reads what of the experts is there, as kernels would.
    fn read(&self, vram: &VramTier, compute: &mut Compute, experts: &[u32]) {
        for expert in experts.iter().filter(|expert| self.has(**expert)) {
            for granule in 0..self.n_granules() {
                let address = self.addresses[*expert as usize * self.n_granules() + granule];
                assert!(address.is_multiple_of(256));
                let slot = vram.slot_at(self.layer, address);
                compute.read(slot, self.layer, *expert, granule);
            }
        }
    }
}

// ---- whatever happens ----

#[derive(Clone, Debug)]
enum Op {
    Demand { layer: usize, experts: Vec<u32>, access: Access, fenced: bool },
    Abandon { layer: usize, experts: Vec<u32>, turns: usize },
    PinLayer { layer: usize },
    UnpinLayer { which: usize, used: Vec<u32>, fenced: bool },
    Routed { layer: usize, chosen: Vec<u32> },
    Admit { layer: usize, experts: Vec<u32> },
    Check,
}

fn op() -> impl Strategy<Value = Op> {
    let experts = |most| proptest::sample::subsequence((0..6).collect::<Vec<u32>>(), 1..=most);
    let prompt = (MOE_LAYERS, experts(6).prop_shuffle(), any::<bool>());
    let decode = (MOE_LAYERS, experts(K).prop_shuffle(), any::<bool>());
    prop_oneof![
        1 => prompt.prop_map(|(layer, experts, fenced)| {
            Op::Demand { layer, experts, access: Access::Prompt, fenced }
        }),
        4 => decode.prop_map(|(layer, experts, fenced)| {
            Op::Demand { layer, experts, access: Access::Decode, fenced }
        }),
        1 => (MOE_LAYERS, experts(K), 0..3usize)
            .prop_map(|(layer, experts, turns)| Op::Abandon { layer, experts, turns }),
        3 => MOE_LAYERS.prop_map(|layer| Op::PinLayer { layer }),
        3 => (0..9usize, experts(K), any::<bool>())
            .prop_map(|(which, used, fenced)| Op::UnpinLayer { which, used, fenced }),
        2 => (MOE_LAYERS, experts(K)).prop_map(|(layer, chosen)| Op::Routed { layer, chosen }),
        2 => (MOE_LAYERS, experts(K)).prop_map(|(layer, experts)| Op::Admit { layer, experts }),
        1 => Just(Op::Check),
    ]
}

fn run(vram: &VramTier, compute: &mut Compute, ops: Vec<Op>) {
    let mut pinned: Vec<PinnedLayer> = Vec::new();
    for op in ops {
        match op {
            Op::Demand { layer, experts, access, fenced } => {
                demand(vram, compute, layer, &experts, access, fenced).unwrap();
            }
            Op::Abandon { layer, experts, turns } => {
                let mut work = Acquisition::default();
                vram.acquire(layer, &experts, Access::Decode, &mut work);
                for _ in 0..turns {
                    vram.next_ready(&mut work, None).unwrap();
                }
                vram.release(&mut work, None);
            }
            Op::PinLayer { layer } if pinned.iter().all(|f| f.layer != layer) => {
                pinned.push(PinnedLayer::new(vram, layer));
            }
            Op::PinLayer { .. } => {}
            Op::UnpinLayer { which, used, fenced } if !pinned.is_empty() => {
                let pinned = pinned.swap_remove(which % pinned.len());
                pinned.read(vram, compute, &used);
                let end = fenced.then(|| compute.fence());
                if !fenced {
                    compute.check();
                }
                vram.unpin_layer(pinned.layer, &used, end.as_ref());
            }
            Op::UnpinLayer { .. } => {}
            Op::Routed { layer, chosen } => routed(vram, layer, &chosen),
            Op::Admit { layer, experts } => vram.admit(layer, &experts),
            Op::Check => compute.check(),
        }
        vram.check_integrity();
    }
    // What has been pinned all along is still there.
    let all: Vec<u32> = (0..N_EXPERTS as u32).collect();
    for pinned in pinned {
        pinned.read(vram, compute, &all);
        compute.check();
        vram.unpin_layer(pinned.layer, &[], None);
    }
    compute.check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn what_is_given_out_is_the_files(
        ops in proptest::collection::vec(op(), 1..40),
        seed in 0..64u64,
        vram_share in proptest::sample::select(vec![0.0, 0.1, 0.5, 1.0]),
        ram_share in proptest::sample::select(vec![None, Some(0.0), Some(0.5), Some(1.0)]),
        policy in proptest::sample::select(vec![
            "on-demand", "deepspeed", "predictor=all-next,eviction=random,split=0.5"
        ]),
    ) {
        let model = Model::new();
        let gpu = gpu(seed, Faults::default());
        let ram = ram_share.map(|share| model.streamed(share));
        let source: Arc<dyn ExpertStore> = match &ram {
            None => model.resident(),
            Some(ram) => ram.clone(),
        };
        let vram = model.vram(&gpu, source, vram_share, policy).unwrap();
        let mut compute = Compute::new(&model, &gpu);
        run(&vram, &mut compute, ops);
        rest(&vram);
        let counters = vram.counters();
        prop_assert!(counters.resident_bytes_max <= model.budget(vram_share));
        drop(vram);
        // Nothing is held below either.
        ram.iter().for_each(|ram| until(|| ram.check_integrity()));
        prop_assert_eq!(gpu.memory().unwrap().free_bytes, gpu.memory().unwrap().total_bytes);
    }
}

// ---- counting ----

const ALL: [u32; N_EXPERTS] = [0, 1, 2, 3, 4, 5];

fn simple(vram_share: f64) -> (Model, Device, VramTier) {
    let model = Model::new();
    let gpu = gpu(3, Faults::default());
    let vram = model.lockstep(&gpu, model.resident(), vram_share);
    (model, gpu, vram)
}

#[test]
fn a_prompt_leaves_what_decode_keeps_and_bytes_are_counted() {
    let (model, gpu, vram) = simple(0.3);
    let mut compute = Compute::new(&model, &gpu);
    let expert_bytes = model.layer(1).expert_bytes() as u64;
    demand(&vram, &mut compute, 1, &[0, 1], Access::Decode, true).unwrap();
    let counters = vram.counters();
    assert_eq!((counters.misses, counters.demand_bytes), (2, 2 * expert_bytes));
    assert_eq!(counters.n_reads as usize, 2 * vram.layout(1).n_granules);
    demand(&vram, &mut compute, 1, &ALL, Access::Prompt, true).unwrap();
    demand(&vram, &mut compute, 3, &ALL, Access::Prompt, true).unwrap();
    let before = vram.counters();
    demand(&vram, &mut compute, 1, &[0, 1], Access::Decode, true).unwrap();
    let since = vram.counters().since(&before);
    assert_eq!((since.hits_whole, since.misses, since.read_bytes), (2, 0, 0));
    compute.check();
    assert!(vram.check_integrity());
    assert!(vram.load_ns(1).unwrap() > 0.0 && vram.delay_ns() == 0.0);
}

#[test]
fn a_pinned_layer_counts_its_hits_when_it_is_unpinned() {
    let (model, gpu, vram) = simple(1.0);
    let mut compute = Compute::new(&model, &gpu);
    let pinned = PinnedLayer::new(&vram, 2);
    assert!(ALL.iter().all(|expert| !pinned.has(*expert)), "nothing is there yet");
    demand(&vram, &mut compute, 2, &[4, 5], Access::Decode, true).unwrap();
    // What came after it was pinned is not in the table, and its use is counted once.
    vram.unpin_layer(2, &[4, 5], None);
    assert_eq!((vram.counters().hits_whole, vram.counters().misses), (0, 2));
    let pinned = PinnedLayer::new(&vram, 2);
    assert_eq!(ALL.map(|expert| pinned.has(expert)), [false, false, false, false, true, true]);
    assert!(vram.is_whole(2, 5) && !vram.is_whole(2, 0) && !vram.check_integrity());
    // 5 on the device, 0 elsewhere.
    vram.unpin_layer(2, &[5, 0], None);
    assert_eq!((vram.counters().hits_whole, vram.counters().misses), (1, 3));
    assert!(vram.check_integrity());
    // A copy of the table is made again if the table has changed.
    let mut copy = SlotTable::default();
    assert_eq!([vram.pin_layer(2, &mut copy), copy.addresses == pinned.addresses], [true; 2]);
    vram.unpin_layer(2, &[], None);
    assert!(!vram.pin_layer(2, &mut copy));
}

#[test]
fn the_tiers_together_say_where_experts_are() {
    let model = Model::new();
    let gpu = gpu(3, Faults::default());
    let resident = Resident::new(model.file.clone(), model.layers.clone());
    let mut hierarchy = Hierarchy::in_place(resident);
    let vram = model.lockstep(&gpu, hierarchy.host().clone(), 1.0);
    let tiers = Arc::new(VramTiers::one(vram));
    hierarchy.set_vram(Some(tiers.clone()));
    let vram = tiers.get(0).unwrap();
    let report = |layer| {
        let mut out = Vec::new();
        hierarchy.report(layer, &mut out);
        out
    };
    let expert = |place, n_hits, n_misses| PlacedExpert { place, n_hits, n_misses };
    assert!(report(0).is_empty());
    assert_eq!(report(2), [expert(ExpertPlace::Ram, 0, 0); N_EXPERTS]);
    let mut compute = Compute::new(&model, &gpu);
    for _ in 0..2 {
        demand(vram, &mut compute, 2, &[4, 5], Access::Decode, true).unwrap();
    }
    compute.check();
    // Each use counts once, whatever the upload asked of the tier below.
    assert_eq!(report(2)[4], expert(ExpertPlace::Vram, 1, 1));
    assert_eq!(report(2)[0], expert(ExpertPlace::Ram, 0, 0));
}

/// With several devices each tier has slots for its own experts, and takes in no others, whatever
/// is predicted or offered.
#[test]
fn a_tier_takes_in_its_own_experts_alone() {
    let model = Model::new();
    let dealt =
        |l: &LayerExperts| Dealt { n_experts: l.n_experts, expert_bytes: l.expert_bytes() as u64 };
    let dealt: Vec<_> = model.layers.iter().map(|l| l.as_ref().map(dealt)).collect();
    let owners = Arc::new(Owners::new(&dealt, &[1, 1]));
    for device in 0..2 {
        let gpu = gpu(device as u64, Faults::default());
        let own = Own { owners: owners.clone(), device };
        let mut options = VramOptions::new(model.budget(1.0), "deepspeed".parse().unwrap(), K);
        (options.own, options.lockstep) = (Some(own.clone()), true);
        let vram = VramTier::new(&gpu, &model.layers, model.resident(), &options).unwrap();
        let memory = gpu.memory().unwrap();
        let taken = (memory.total_bytes - memory.free_bytes) as u64;
        assert!(
            2 * taken <= VramTier::all_bytes(&model.layers, K) + 4096,
            "{taken} bytes for half"
        );
        let mut compute = Compute::new(&model, &gpu);
        for layer in MOE_LAYERS {
            vram.admit(layer, &ALL);
            routed(&vram, layer, &[0, 1]);
            rest(&vram);
            let before = vram.counters();
            let pinned = PinnedLayer::new(&vram, layer);
            assert!(ALL.iter().all(|e| own.has(layer, *e) || !pinned.has(*e)));
            assert!(ALL.iter().any(|e| pinned.has(*e)), "what was offered has come");
            vram.unpin_layer(layer, &ALL, None);
            let since = vram.counters().since(&before);
            assert_eq!((since.hits_whole + since.misses) as usize, own.n_of(layer));
            let its: Vec<u32> = ALL.into_iter().filter(|e| own.has(layer, *e)).collect();
            demand(&vram, &mut compute, layer, &its, Access::Decode, true).unwrap();
            compute.check();
        }
        // With all of them there, nothing is left to move.
        let before = vram.counters();
        for layer in MOE_LAYERS {
            vram.admit(layer, &ALL);
            routed(&vram, layer, &[2, 3]);
        }
        assert_eq!(vram.counters().since(&before).n_reads, 0);
        assert_eq!(vram.wants(), Wants::default());
    }
}

/// Predicted experts are there when the layer is pinned, and used up to a fence.
#[test]
fn predictions_are_pinned_with_their_layer() {
    let model = Model::new();
    let gpu = gpu(5, Faults::default());
    let mut options = VramOptions::new(model.budget(0.5), "deepspeed".parse().unwrap(), K);
    options.lockstep = true;
    let counters = || {
        let vram = VramTier::new(&gpu, &model.layers, model.resident(), &options).unwrap();
        let mut compute = Compute::new(&model, &gpu);
        for step in 0..12u32 {
            for layer in MOE_LAYERS {
                let pinned = PinnedLayer::new(&vram, layer);
                let used = [step % 6, (step + 1 + layer as u32) % 6];
                pinned.read(&vram, &mut compute, &used);
                routed(&vram, layer, &used);
                let missing: Vec<u32> = used.into_iter().filter(|e| !pinned.has(*e)).collect();
                demand(&vram, &mut compute, layer, &missing, Access::Decode, true).unwrap();
                vram.unpin_layer(layer, &used, Some(&compute.fence()));
            }
        }
        compute.check();
        rest(&vram);
        let counters = vram.counters();
        assert_eq!(counters.hits_whole + counters.hits_partial + counters.misses, 12 * 3 * 2);
        counters
    };
    let first = counters();
    assert!(first.prefetch_used_bytes > 0 && first.hits_whole > 0, "{first:?}");
    // In lockstep, hits do not depend on time.
    let second = counters();
    assert_eq!((first.hits_whole, first.misses), (second.hits_whole, second.misses));
    assert_eq!(first.prefetch_used_bytes, second.prefetch_used_bytes);
}

/// Granules of a tier that reads a file go up from its slots, where those could be pinned; what
/// lies in the mapped file does not.
#[test]
fn granules_go_up_from_where_they_are() {
    let model = Model::new();
    let bytes = |register_from, source: Arc<dyn ExpertStore>| {
        let gpu = gpu(3, Faults { register_from, ..Faults::default() });
        let vram = model.vram(&gpu, source, 1.0, "on-demand").unwrap();
        let mut compute = Compute::new(&model, &gpu);
        for layer in MOE_LAYERS {
            demand(&vram, &mut compute, layer, &ALL, Access::Decode, true).unwrap();
        }
        compute.check();
        let counters = vram.counters();
        (vram.in_place_bytes(), counters.read_bytes)
    };
    let (in_place, all) = bytes(None, model.streamed(1.0));
    assert!(all > 0 && in_place == all, "{in_place} of {all}");
    // The first of two size classes alone.
    let (in_place, all) = bytes(Some(1), model.streamed(1.0));
    assert!(0 < in_place && in_place < all, "{in_place} of {all}");
    assert_eq!(bytes(Some(0), model.streamed(1.0)).0, 0);
    assert_eq!(bytes(None, model.resident()).0, 0);
}

// ---- several at once ----

/// Three tiers at once: two that demand, one that pins, a link that prefetches out of a RAM
/// tier that reads a file.
#[test]
fn demands_side_by_side_get_what_they_ask_for() {
    for seed in 0..4 {
        let model = Model::new();
        let gpu = gpu(seed, Faults::default());
        let vram = model.vram(&gpu, model.streamed(0.0), 0.0, "deepspeed").unwrap();
        std::thread::scope(|scope| {
            for thread in 0..2u32 {
                let (model, gpu, vram) = (&model, &gpu, &vram);
                scope.spawn(move || {
                    let mut compute = Compute::new(model, gpu);
                    for step in 0..30u32 {
                        let layer = 1 + (step + thread) as usize % 3;
                        let chosen = [(step * 5 + thread) % 6, (step * 5 + thread + 2) % 6];
                        let access = if step % 5 == 0 { Access::Prompt } else { Access::Decode };
                        routed(vram, layer, &chosen);
                        let fenced = step % 2 == 0;
                        demand(vram, &mut compute, layer, &chosen, access, fenced).unwrap();
                    }
                    compute.check();
                });
            }
            let mut compute = Compute::new(&model, &gpu);
            for step in 0..40 {
                let pinned = PinnedLayer::new(&vram, 1 + step % 3);
                pinned.read(&vram, &mut compute, &ALL);
                vram.unpin_layer(1 + step % 3, &ALL, Some(&compute.fence()));
            }
            compute.check();
        });
        rest(&vram);
    }
}

// ---- faults ----

/// A tier below that fails, or takes its time.
struct Faulty {
    inner: Arc<RamTier>,
    fails: AtomicBool,
    delay_ms: AtomicU64,
}

impl ExpertStore for Faulty {
    fn geometry(&self, layer: usize) -> Option<Geometry> {
        self.inner.geometry(layer)
    }

    fn acquire_part(
        &self,
        layer: usize,
        part: LayerPart<'_>,
        access: Access,
        work: &mut Acquisition,
    ) {
        self.inner.acquire_part(layer, part, access, work);
    }

    fn next_ready(&self, work: &mut Acquisition) -> Result<bool> {
        std::thread::sleep(Duration::from_millis(self.delay_ms.load(SeqCst)));
        if self.fails.load(SeqCst) {
            return Err(Error::Load("expert 7 of layer 9: the disk is on fire".into()));
        }
        self.inner.next_ready(work)
    }

    fn ready<'w>(&'w self, work: &'w Acquisition, i: usize) -> ReadyGranule<'w> {
        self.inner.ready(work, i)
    }

    fn release(&self, work: &mut Acquisition) {
        self.inner.release(work);
    }

    fn report(&self, layer: usize, out: &mut Vec<ExpertStatus>) {
        self.inner.report(layer, out);
    }
}

fn faulty(model: &Model, fails: bool, delay_ms: u64) -> Arc<Faulty> {
    let inner = model.streamed(0.0);
    Arc::new(Faulty { inner, fails: fails.into(), delay_ms: delay_ms.into() })
}

#[track_caller]
fn expect_sentence(error: &Error, words: &[&str]) {
    let sentence = error.to_string();
    for word in words {
        assert!(sentence.contains(word), "no {word:?} in {sentence:?}");
    }
    assert!(!sentence.contains('\n'), "{sentence:?}");
}

#[test]
fn what_the_tier_below_has_not_got_is_a_sentence_and_the_next_request_is_right() {
    let model = Model::new();
    let gpu = gpu(1, Faults::default());
    let source = faulty(&model, true, 0);
    let vram = model.vram(&gpu, source.clone(), 0.3, "on-demand").unwrap();
    let mut compute = Compute::new(&model, &gpu);
    for access in [Access::Decode, Access::Prompt] {
        let error = demand(&vram, &mut compute, 1, &[0, 1], access, true).unwrap_err();
        assert!(matches!(error, Error::Load(_)));
        expect_sentence(&error, &["expert 7 of layer 9: the disk is on fire"]);
        rest(&vram);
    }
    source.fails.store(false, SeqCst);
    demand(&vram, &mut compute, 1, &[0, 1], Access::Decode, true).unwrap();
    compute.check();
    rest(&vram);
    // An idle thread holds nothing of it.
    until(|| source.inner.check_integrity());
}

#[test]
fn no_room_for_slots_is_a_sentence() {
    let model = Model::new();
    let classes = 2;
    for alloc in 0..classes {
        let faults = Faults { alloc_at: Some(alloc), ..Faults::default() };
        let gpu = gpu(0, faults);
        let vram = model.vram(&gpu, model.resident(), 0.5, "on-demand");
        let error = vram.err().expect("an allocation has failed");
        assert!(matches!(error, Error::Device(_)));
        expect_sentence(&error, &["no room for ", " of experts (--vram)", "emulated GPU 0"]);
        assert_eq!(gpu.memory().unwrap().free_bytes, gpu.memory().unwrap().total_bytes);
    }
    let least = VramTier::minimum_bytes(&model.layers, K);
    let options = VramOptions::new(least - 1, "on-demand".parse().unwrap(), K);
    let vram = VramTier::new(&gpu(0, Faults::default()), &model.layers, model.resident(), &options);
    expect_sentence(&vram.err().unwrap(), &["(--vram)", " are needed"]);
}

#[test]
fn what_cannot_be_pinned_goes_through_pageable_memory() {
    let model = Model::new();
    for pin in 0..2 {
        let gpu = gpu(4, Faults { pin_at: Some(pin), ..Faults::default() });
        let vram = model.vram(&gpu, model.resident(), 0.3, "on-demand").unwrap();
        let mut compute = Compute::new(&model, &gpu);
        for layer in MOE_LAYERS {
            demand(&vram, &mut compute, layer, &ALL, Access::Prompt, true).unwrap();
        }
        compute.check();
        rest(&vram);
    }
}

/// The device is lost at each of its first operations: whoever waits hears of it.
#[test]
fn a_lost_device_is_a_sentence() {
    let model = Model::new();
    let mut n_failed = 0;
    for op in 0..40 {
        let gpu = gpu(op % 2, Faults { lost_at_op: Some(op), ..Faults::default() });
        let vram = model.vram(&gpu, model.resident(), 0.3, "on-demand").unwrap();
        let steps = (0..3).map(|step| {
            let mut work = Acquisition::default();
            vram.acquire(1 + step, &[0, 1], Access::Decode, &mut work);
            let result = loop {
                match vram.next_ready(&mut work, None) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            vram.release(&mut work, None);
            result
        });
        let failed = steps.filter_map(Result::err).last();
        rest(&vram);
        if let Some(error) = failed {
            assert!(matches!(error, Error::Device(_)), "{error:?}");
            expect_sentence(&error, &["emulated GPU 0 was lost"]);
            n_failed += 1;
        }
    }
    assert_eq!(n_failed, 40, "three layers are more than forty operations");
}

#[test]
fn dropped_while_it_loads_it_waits_for_its_threads() {
    let model = Model::new();
    let gpu = gpu(2, Faults::default());
    let source = faulty(&model, false, 20);
    for _ in 0..3 {
        let vram = model.vram(&gpu, source.clone(), 0.3, "deepspeed").unwrap();
        routed(&vram, 1, &[0, 1]);
        let mut work = Acquisition::default();
        vram.acquire(3, &[0, 1], Access::Decode, &mut work);
        drop(vram);
        assert_eq!(Arc::strong_count(&source), 1, "a thread is left");
        until(|| source.inner.check_integrity());
        assert_eq!(gpu.memory().unwrap().free_bytes, gpu.memory().unwrap().total_bytes);
    }
}
