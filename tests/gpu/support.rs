//! The device that tests run on: an emulated one, or the first real one where MOEBA_TEST_DEVICE is
//! `cuda`.

use moeba::backend::cuda;
use moeba::backend::gpu::emulated::Config;
use moeba::backend::gpu::{Device, DeviceBuffer, Emulated, Stream};
use moeba::engine::device::Gpus;
use moeba::engine::plan::vram::DevicePlan;
use moeba::engine::{DeviceChoice, Engine, EngineOptions};
use moeba::forward::gpu::{GpuOptions, InPlace};
use moeba::policy::Profile;
use std::time::{Duration, Instant};

fn is_real() -> bool {
    match std::env::var("MOEBA_TEST_DEVICE") {
        Err(_) => false,
        Ok(device) if device == "cuda" => true,
        Ok(other) => panic!("MOEBA_TEST_DEVICE is cuda or nothing, not {other}"),
    }
}

/// The device of a whole model. Several devices are always emulated.
pub fn choice(config: Config) -> DeviceChoice {
    match is_real() && config.devices == 1 {
        true => DeviceChoice::Cuda(Gpus::These(vec![0])),
        false => DeviceChoice::Emulated(config),
    }
}

/// Waits, no longer than `most`, until no expert is pinned: what was foretold may still be on its
/// way.
pub fn at_rest(engine: &Engine, most: Duration) {
    let start = Instant::now();
    while !engine.model().hierarchy().check_integrity() {
        assert!(start.elapsed() < most, "experts are still pinned");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// These words in memory of the stream's device.
pub fn words(stream: &Stream, values: &[u32]) -> DeviceBuffer {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffer = DeviceBuffer::new(stream.gpu(), bytes.len()).unwrap();
    stream.upload_now(buffer.all(), &bytes).unwrap();
    buffer
}

/// A device, a stream and what goes up and down.
pub struct Bench {
    pub gpu: Device,
    pub stream: Stream,
}

impl Bench {
    pub fn new(seed: u64) -> Bench {
        let gpu = match is_real() {
            true => cuda::devices().unwrap_or_else(|why| panic!("{why}")).swap_remove(0),
            false => Emulated::devices(&Config { seed, ..Config::default() }).swap_remove(0),
        };
        let stream = Stream::new(&gpu).unwrap();
        Bench { gpu, stream }
    }

    pub fn empty(&self, bytes: usize) -> DeviceBuffer {
        DeviceBuffer::new(&self.gpu, bytes).unwrap()
    }

    pub fn up(&self, bytes: &[u8]) -> DeviceBuffer {
        let buffer = self.empty(bytes.len());
        self.stream.upload_now(buffer.all(), bytes).unwrap();
        buffer
    }

    pub fn up_f32(&self, x: &[f32]) -> DeviceBuffer {
        self.up(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn up_u32(&self, x: &[u32]) -> DeviceBuffer {
        self.up(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn up_u64(&self, x: &[u64]) -> DeviceBuffer {
        self.up(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn down(&self, buffer: &DeviceBuffer) -> Vec<u8> {
        let mut bytes = vec![0; buffer.len()];
        self.stream.download_now(&mut bytes, buffer.all()).unwrap();
        bytes
    }

    pub fn down_f32(&self, buffer: &DeviceBuffer) -> Vec<f32> {
        self.down(buffer).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

/// The options for `plan`'s layers on devices, for texts of `n_ctx` tokens computed at once.
pub fn gpu_options(plan: &DevicePlan, n_ctx: usize) -> GpuOptions {
    GpuOptions {
        layers: plan.gpu_layers.clone(),
        head: plan.head_on_device,
        experts: plan.experts_on_cpu.iter().map(|on_cpu| !on_cpu).collect(),
        expert_budgets: vec![plan.expert_budget_bytes()],
        policy: EngineOptions::default().policy,
        profile: Profile::default(),
        lockstep: false,
        n_ubatch: n_ctx,
        n_ctx,
        is_exact: false,
        cpu_share: None,
        in_place: InPlace::IfFaster,
        by_layer: false,
    }
}
