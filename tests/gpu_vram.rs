//! Experts in VRAM, on the emulated device: whatever is asked for, in whatever order streams run,
//! what is at the addresses that are given out are the file's bytes for as long as they are
//! relied on.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moeba::Result;
use moeba::backend::gpu::emulated::{Config, Faults};
use moeba::backend::gpu::{Device, DeviceSlice, Emulated, Stream};
use moeba::experts::link::IoKind;
use moeba::experts::{
    Access, ExpertStore, Geometry, LayerExperts, Part, Place, ReadyGranule, Resident,
    StreamOptions, Streamed, Work, needs,
};
use moeba::gguf::{Gguf, TensorType, Writer};
use moeba::model::gpu::vram::{Fence, GranuleLayout, Vram, VramOptions};
use moeba::policy::{Event, Profile, Routed};
use proptest::prelude::*;

const N_EMBD: usize = 64;
const N_EXPERTS: usize = 6;
/// Experts a token.
const K: usize = 2;
/// Layers with experts; the first has none.
const MOE_LAYERS: Range<usize> = 1..4;

// ---- a file ----

/// (intermediate rows, rows a granule, block bytes, whether there is a gate) of layers with
/// experts: the last granule is shorter than the others; one size class holds two layers.
const SHAPES: [(usize, usize, usize, bool); 3] =
    [(160, 64, 34, true), (96, 32, 18, false), (160, 64, 34, true)];

fn byte(seed: u64) -> u8 {
    (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as u8
}

struct Model {
    _dir: tempfile::TempDir,
    file: Arc<Gguf>,
    layers: Vec<Option<LayerExperts>>,
}

fn parts((n_ff, _, block_bytes, gated): (usize, usize, usize, bool)) -> [Part; 3] {
    let part = |rows: usize, cols: usize| {
        let row_bytes = cols / 32 * block_bytes;
        Part { rows, row_bytes, block_len: 32, block_bytes }
    };
    let up = part(n_ff, N_EMBD);
    [if gated { up } else { Part::absent(n_ff) }, up, part(N_EMBD, n_ff)]
}

fn write(path: &Path) {
    let mut out = Writer::create(path, None).unwrap();
    let each = |write: &mut dyn FnMut(String, [u64; 3], TensorType)| {
        for (layer, shape) in MOE_LAYERS.zip(SHAPES) {
            let (n_embd, n_ff, n) = (N_EMBD as u64, shape.0 as u64, N_EXPERTS as u64);
            let ty = if shape.2 == 34 { TensorType::Q8_0 } else { TensorType::Q4_0 };
            if shape.3 {
                write(format!("{layer}.gate"), [n_embd, n_ff, n], ty);
            }
            write(format!("{layer}.up"), [n_embd, n_ff, n], ty);
            write(format!("{layer}.down"), [n_ff, n_embd, n], ty);
        }
    };
    each(&mut |name, dims, ty| {
        out.declare(&name, &dims, ty).unwrap();
    });
    let mut seed = 0;
    each(&mut |name, dims, ty| {
        let n = dims.iter().product::<u64>() / 32 * ty.block_bytes() as u64;
        seed += 1 << 32;
        let bytes: Vec<u8> = (seed..seed + n).map(byte).collect();
        out.write_tensor(&name, &bytes).unwrap();
    });
    out.finish().unwrap();
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
            let place = Place::Stacked {
                gate: index("gate"),
                up: index("up").unwrap(),
                down: index("down").unwrap(),
            };
            let geometry = Geometry { n_ff: shape.0, granule_rows: shape.1 };
            Some(LayerExperts { n_experts: N_EXPERTS, geometry, gate, up, down, place })
        };
        let layers = std::iter::once(None).chain(MOE_LAYERS.zip(SHAPES).map(layer)).collect();
        Model { _dir: dir, file: Arc::new(file), layers }
    }

    fn layer(&self, layer: usize) -> &LayerExperts {
        self.layers[layer].as_ref().unwrap()
    }

    /// What VRAM must have at a granule's address: its parts by the layout, and where they are.
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
        let least = Vram::minimum_bytes(&self.layers, K);
        least + ((Vram::all_bytes(&self.layers, K) - least) as f64 * share) as u64
    }

    fn resident(&self) -> Arc<dyn ExpertStore> {
        Arc::new(Resident::new(self.file.clone(), self.layers.clone()))
    }

    fn streamed(&self, share: f64) -> Arc<dyn ExpertStore> {
        let needs = needs(&self.file, &self.layers, K);
        let least = needs.minimum_bytes();
        let options = StreamOptions {
            budget: least + ((needs.all_bytes() - least) as f64 * share) as u64,
            io: IoKind::Pread,
            policy: "on-demand".parse().unwrap(),
            k: K,
            profile: Profile::default(),
            lockstep: false,
            faults: None,
        };
        Arc::new(Streamed::new(&self.file, &self.layers, &options).unwrap())
    }

    fn vram(
        &self,
        gpu: &Device,
        source: Arc<dyn ExpertStore>,
        share: f64,
        policy: &str,
    ) -> Result<Vram> {
        let options = VramOptions::new(self.budget(share), policy.parse().unwrap(), K);
        Vram::new(gpu, &self.layers, source, &options)
    }
}

fn gpu(seed: u64, faults: Faults) -> Device {
    let config = Config { seed, faults, ..Config::default() };
    Emulated::devices(&config).unwrap().swap_remove(0)
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
    vram: &Vram,
    compute: &mut Compute,
    layer: usize,
    experts: &[u32],
    access: Access,
    fenced: bool,
) -> Result<()> {
    let mut work = Work::default();
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

fn rest(vram: &Vram) {
    let since = Instant::now();
    while !vram.check_integrity() {
        assert!(since.elapsed() < Duration::from_secs(60), "the experts do not come to rest");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn routed(vram: &Vram, layer: usize, chosen: &[u32]) {
    let (layer, probs, hidden) = (layer as u32, &[1.0 / N_EXPERTS as f32; N_EXPERTS], &[]);
    vram.observe(&Event::Routed(Routed { request: 0, layer, chosen, probs, hidden, ahead: None }));
}

/// A frozen layer: its table.
struct Frozen {
    layer: usize,
    addresses: Vec<u64>,
}

impl Frozen {
    fn new(vram: &Vram, layer: usize) -> Frozen {
        let mut addresses = vec![1; N_EXPERTS * vram.layout(layer).n_granules];
        vram.freeze(layer, &mut addresses);
        Frozen { layer, addresses }
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
    fn read(&self, vram: &Vram, compute: &mut Compute, experts: &[u32]) {
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
    Freeze { layer: usize },
    Thaw { which: usize, used: Vec<u32>, fenced: bool },
    Routed { layer: usize, chosen: Vec<u32> },
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
        3 => MOE_LAYERS.prop_map(|layer| Op::Freeze { layer }),
        3 => (0..9usize, experts(K), any::<bool>())
            .prop_map(|(which, used, fenced)| Op::Thaw { which, used, fenced }),
        2 => (MOE_LAYERS, experts(K)).prop_map(|(layer, chosen)| Op::Routed { layer, chosen }),
        1 => Just(Op::Check),
    ]
}

fn run(vram: &Vram, compute: &mut Compute, ops: Vec<Op>) {
    let mut frozen: Vec<Frozen> = Vec::new();
    for op in ops {
        match op {
            Op::Demand { layer, experts, access, fenced } => {
                demand(vram, compute, layer, &experts, access, fenced).unwrap();
            }
            Op::Abandon { layer, experts, turns } => {
                let mut work = Work::default();
                vram.acquire(layer, &experts, Access::Decode, &mut work);
                for _ in 0..turns {
                    vram.next_ready(&mut work, None).unwrap();
                }
                vram.release(&mut work, None);
            }
            Op::Freeze { layer } if frozen.iter().all(|f| f.layer != layer) => {
                frozen.push(Frozen::new(vram, layer));
            }
            Op::Freeze { .. } => {}
            Op::Thaw { which, used, fenced } if !frozen.is_empty() => {
                let frozen = frozen.swap_remove(which % frozen.len());
                frozen.read(vram, compute, &used);
                let end = fenced.then(|| compute.fence());
                if !fenced {
                    compute.check();
                }
                vram.thaw(frozen.layer, &used, end.as_ref());
            }
            Op::Thaw { .. } => {}
            Op::Routed { layer, chosen } => routed(vram, layer, &chosen),
            Op::Check => compute.check(),
        }
        vram.check_integrity();
    }
    // What has been frozen all along is still there.
    let all: Vec<u32> = (0..N_EXPERTS as u32).collect();
    for frozen in frozen {
        frozen.read(vram, compute, &all);
        compute.check();
        vram.thaw(frozen.layer, &[], None);
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
        let source = match ram_share {
            None => model.resident(),
            Some(share) => model.streamed(share),
        };
        let vram = model.vram(&gpu, source.clone(), vram_share, policy).unwrap();
        let mut compute = Compute::new(&model, &gpu);
        run(&vram, &mut compute, ops);
        rest(&vram);
        let counters = vram.counters();
        prop_assert!(counters.resident_bytes_max <= model.budget(vram_share));
        drop(vram);
        // Nothing is held below either.
        let since = Instant::now();
        while !source.check_integrity() {
            prop_assert!(since.elapsed() < Duration::from_secs(60));
        }
        prop_assert_eq!(gpu.memory().unwrap().free_bytes, gpu.memory().unwrap().total_bytes);
    }
}
