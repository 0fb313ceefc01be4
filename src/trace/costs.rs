//! Costs on the simulated machine. All times of a simulation come from here; hits and bytes depend
//! on it only through what is loaded in time.
//!
//! Presets are derived, not fitted. A kernel takes its launch plus the longer of reading its
//! weights and computing with them, at the shares of the data sheet's rates that tuned kernels
//! reach (`MEMORY_SHARE`, `FLOPS_SHARE`). A PCIe link delivers the 79 % that PreScope measured
//! (2.3).

use super::geometry::Geometry;
use crate::policy::Costs;

const MEMORY_SHARE: f64 = 0.8;
const FLOPS_SHARE: f64 = 0.5;
const PCIE_SHARE: f64 = 0.79;
/// A multiplication and an addition.
const FLOPS_PER_WEIGHT: f64 = 2.0;
/// Kernels of a layer's attention: norm, projections, rope, cache, scores, output, residual.
const N_ATTENTION_KERNELS: f64 = 10.0;

/// A kernel over some weights for n tokens at once takes launch + max(memory, n · token), ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Roofline {
    pub launch_ns: f64,
    /// Reading the weights.
    pub memory_ns: f64,
    /// Arithmetic of a token.
    pub token_ns: f64,
}

impl Roofline {
    pub fn of(&self, n_tokens: usize) -> f64 {
        self.launch_ns + self.work(n_tokens)
    }

    /// Without the launch.
    pub fn work(&self, n_tokens: usize) -> f64 {
        self.memory_ns.max(n_tokens as f64 * self.token_ns)
    }
}

/// An expert with n tokens on the CPU takes a·n + b (PreScope, Eq. 3), ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuExpert {
    /// a
    pub token_ns: f64,
    /// b
    pub start_ns: f64,
}

impl CpuExpert {
    pub fn of(&self, n_tokens: f64) -> f64 {
        self.token_ns * n_tokens + self.start_ns
    }
}

/// The link that brings experts. A read's latency passes beside the transfers of other reads in
/// flight; its bytes then go one read after another (PreScope, Premise 4): it ends at
/// max(start + latency, end of the read before it) + bytes ÷ rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCosts {
    pub bytes_per_second: f64,
    pub latency_ns: u64,
    /// Reads in flight at most.
    pub depth: usize,
    /// Latency grows by up to this much, drawn for each read from `seed`.
    pub jitter_ns: u64,
    pub seed: u64,
}

impl LinkCosts {
    pub fn new(bytes_per_second: f64, latency_ns: u64, depth: usize) -> LinkCosts {
        LinkCosts { bytes_per_second, latency_ns, depth, jitter_ns: 0, seed: 0 }
    }

    pub fn transfer_ns(&self, bytes: usize) -> u64 {
        (bytes as f64 / self.bytes_per_second * 1e9).round() as u64
    }
}

/// A machine as a simulation sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    pub link: LinkCosts,
    /// One whole routed expert; a granule takes its part, without the launch.
    pub expert: Roofline,
    /// A layer's attention and router.
    pub attention: Roofline,
    /// A layer's shared experts.
    pub shared: Roofline,
    /// Output norm and head.
    pub head: Roofline,
    pub cpu_expert: CpuExpert,
    /// One search of a slow predictor.
    pub search_ns: u64,
}

/// Figures of a data sheet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    pub name: &'static str,
    pub memory_bytes_per_second: f64,
    /// 16-bit tensor cores with 32-bit sums, dense.
    pub flops: f64,
    pub launch_ns: f64,
    /// Rate of its bus, one way.
    pub bus_bytes_per_second: f64,
}

const PCIE3_X16: f64 = 15.75e9;
const PCIE4_X16: f64 = 31.5e9;
const PCIE5_X16: f64 = 63.0e9;

const fn device(name: &'static str, memory: f64, flops: f64, bus: f64) -> Device {
    Device {
        name,
        memory_bytes_per_second: memory,
        flops,
        launch_ns: 4e3,
        bus_bytes_per_second: bus,
    }
}

const DEVICES: &[Device] = &[
    device("rtx3090", 936e9, 71e12, PCIE4_X16),
    device("a6000", 768e9, 155e12, PCIE4_X16),
    device("a5000", 768e9, 111e12, PCIE4_X16),
    device("v100", 900e9, 125e12, PCIE3_X16),
    device("a100", 1555e9, 312e12, PCIE4_X16),
    device("h100", 3350e9, 989e12, PCIE5_X16),
];

impl Device {
    /// Names that `by_name` knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        DEVICES.iter().map(|device| device.name)
    }

    pub fn by_name(name: &str) -> Option<Device> {
        DEVICES.iter().find(|device| device.name == name).copied()
    }

    fn roofline(&self, bytes: usize, weight_bytes: f64, n_kernels: f64) -> Roofline {
        if bytes == 0 {
            return Roofline::default();
        }
        let flops = FLOPS_PER_WEIGHT * bytes as f64 / weight_bytes;
        Roofline {
            launch_ns: n_kernels * self.launch_ns,
            memory_ns: 1e9 * bytes as f64 / (MEMORY_SHARE * self.memory_bytes_per_second),
            token_ns: 1e9 * flops / (FLOPS_SHARE * self.flops),
        }
    }
}

/// The processor beside the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Host {
    pub memory_bytes_per_second: f64,
    /// 32-bit, all cores.
    pub flops: f64,
    /// Waking the threads.
    pub dispatch_ns: f64,
}

impl Host {
    /// PreScope's: 26 cores with two 512-bit multiply-adds a cycle at 2 GHz, six channels of
    /// DDR4-2933.
    pub const XEON_6230R: Host =
        Host { memory_bytes_per_second: 141e9, flops: 3.3e12, dispatch_ns: 1e4 };
}

/// Measured rates of a machine that computes on its CPU (`moeba doctor`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredMachine {
    /// From disk.
    pub link: LinkCosts,
    /// By all cores.
    pub memory_bytes_per_second: f64,
    /// Integer multiplications and additions, by all cores.
    pub ops_per_second: f64,
}

impl CostModel {
    /// Deep enough to hide a copy's start, no deeper: what has started cannot be pre-empted.
    const DEVICE_DEPTH: usize = 2;
    const COPY_LATENCY_NS: u64 = 10_000;

    pub fn derive(device: &Device, host: &Host, geometry: &Geometry) -> CostModel {
        let g = geometry;
        let roofline = |bytes, n_kernels| device.roofline(bytes, g.weight_bytes, n_kernels);
        let rate = PCIE_SHARE * device.bus_bytes_per_second;
        let flops = FLOPS_PER_WEIGHT * g.expert_bytes as f64 / g.weight_bytes;
        let host_bytes_per_second = MEMORY_SHARE * host.memory_bytes_per_second;
        CostModel {
            link: LinkCosts::new(rate, Self::COPY_LATENCY_NS, Self::DEVICE_DEPTH),
            expert: roofline(g.expert_bytes, 1.0),
            attention: roofline(g.attention_bytes, N_ATTENTION_KERNELS),
            shared: roofline(g.shared_bytes, 1.0),
            head: roofline(g.head_bytes, 2.0),
            cpu_expert: CpuExpert {
                token_ns: 1e9 * flops / (FLOPS_SHARE * host.flops),
                start_ns: host.dispatch_ns + 1e9 * g.expert_bytes as f64 / host_bytes_per_second,
            },
            search_ns: 0,
        }
    }

    /// A machine that was measured: a decode step by the engine's Timer, with `k` experts a token;
    /// `prompt_share` is what one more token of a prompt takes, in parts of a decode step. Shared
    /// experts are in the attention's time. The CPU is the only processor.
    pub fn measured(link: LinkCosts, timer: &Costs, k: usize, prompt_share: f64) -> CostModel {
        let kernel =
            |ns: f64| Roofline { launch_ns: 0.0, memory_ns: ns, token_ns: prompt_share * ns };
        let expert_ns = timer.experts_ns / k as f64;
        CostModel {
            link,
            expert: kernel(expert_ns),
            attention: kernel(timer.attention_ns),
            shared: Roofline::default(),
            head: kernel(timer.head_ns),
            cpu_expert: CpuExpert {
                token_ns: prompt_share * expert_ns,
                start_ns: (1.0 - prompt_share) * expert_ns,
            },
            search_ns: 0,
        }
    }

    /// A decode step reads its weights at the machine's rate (README, "Measured": kernels do); one
    /// more token of a prompt computes with them at `FLOPS_SHARE` of the peak.
    pub fn of_machine(machine: &MeasuredMachine, geometry: &Geometry, k: usize) -> CostModel {
        let g = geometry;
        let byte_ns = 1e9 / machine.memory_bytes_per_second;
        let arithmetic_ns = 1e9 * FLOPS_PER_WEIGHT / (FLOPS_SHARE * machine.ops_per_second);
        let timer = Costs {
            attention_ns: byte_ns * (g.attention_bytes + g.shared_bytes) as f64,
            experts_ns: byte_ns * (k * g.expert_bytes) as f64,
            head_ns: byte_ns * g.head_bytes as f64,
            // The link says it.
            load_ns: 0.0,
        };
        let prompt_share = arithmetic_ns / (byte_ns * g.weight_bytes);
        CostModel::measured(machine.link, &timer, k, prompt_share.min(1.0))
    }

    /// The costs for policies that plan by them; a token uses `k` experts.
    pub fn timer(&self, geometry: &Geometry, k: usize) -> Costs {
        let load_ns = self.link.latency_ns + self.link.transfer_ns(geometry.expert_bytes);
        Costs {
            attention_ns: self.attention.of(1) + self.shared.of(1),
            experts_ns: k as f64 * self.expert.of(1),
            head_ns: self.head.of(1),
            load_ns: load_ns as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_bound_by_memory_and_then_by_arithmetic() {
        let kernel = Roofline { launch_ns: 5.0, memory_ns: 100.0, token_ns: 10.0 };
        assert_eq!([1, 10, 20].map(|n| kernel.of(n)), [105.0, 105.0, 205.0]);
    }

    /// PreScope 6.5: one prefetch of a Mixtral expert takes about 14 ms on the A100.
    #[test]
    fn a_load_takes_what_was_published() {
        let geometry = Geometry::published("mixtral-8x7b").unwrap();
        let device = Device::by_name("a100").unwrap();
        let costs = CostModel::derive(&device, &Host::XEON_6230R, &geometry);
        let load_ms = costs.timer(&geometry, 2).load_ns / 1e6;
        assert!((13.5..14.5).contains(&load_ms), "{load_ms}");
    }

    #[test]
    fn what_was_measured_comes_back() {
        let geometry = Geometry::published("qwen3-30b-a3b").unwrap();
        let link = LinkCosts::new(2e9, 80_000, 32);
        let load_ns = 80_000.0 + geometry.expert_bytes as f64 / 2.0;
        let timer = Costs { attention_ns: 3e5, experts_ns: 8e5, head_ns: 2e6, load_ns };
        let costs = CostModel::measured(link, &timer, 8, 0.1);
        assert_eq!(costs.timer(&geometry, 8), timer);
        assert!((costs.cpu_expert.of(1.0) - 1e5).abs() < 1e-6);
        // Twenty tokens of a prompt take as long as two steps.
        assert_eq!(costs.attention.of(20), 6e5);
    }

    /// Two operations at half of 400 GOP/s are 0.01 ns a weight; a byte is 0.05 ns.
    #[test]
    fn a_measured_machine_reads_at_its_rate_and_computes_at_half_its_peak() {
        let geometry = Geometry::published("mixtral-8x7b").unwrap();
        let (link, memory) = (LinkCosts::new(2e9, 80_000, 32), 20e9);
        let machine =
            MeasuredMachine { link, memory_bytes_per_second: memory, ops_per_second: 400e9 };
        let costs = CostModel::of_machine(&machine, &geometry, 2);
        assert!((costs.expert.memory_ns - geometry.expert_bytes as f64 / 20.0).abs() < 1e-3);
        let share = costs.expert.token_ns / costs.expert.memory_ns;
        assert!((share - 0.01 / (geometry.weight_bytes / 20.0)).abs() < 1e-9, "{share}");
        assert_eq!(costs.link, link);
    }

    /// PreScope, Premise 5 and 6.2.1: loading an expert takes longer than computing it on the GPU,
    /// and a small batch is computed on the CPU before it could be loaded.
    #[test]
    fn loads_take_longer_than_what_they_are_for() {
        for name in Geometry::names() {
            let geometry = Geometry::published(name).unwrap();
            for device in Device::names() {
                let device = Device::by_name(device).unwrap();
                let costs = CostModel::derive(&device, &Host::XEON_6230R, &geometry);
                let load_ns = costs.timer(&geometry, 2).load_ns;
                assert!(costs.expert.of(64) < load_ns);
                assert!(costs.cpu_expert.of(1.0) < load_ns);
                assert!(costs.cpu_expert.of(256.0) > load_ns);
            }
        }
    }
}
