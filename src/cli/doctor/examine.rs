//! The findings of `doctor`, in the order of their measurement.

use crate::backend::cuda;
use crate::engine::DeviceChoice;
use crate::engine::device;
use crate::engine::plan::memory;
use crate::experts::numa::{self, Node, SYSFS};
use crate::machine::device::Sizes;
use crate::machine::disk::{self, Disk};
use crate::machine::gpu::Gpu;
use crate::machine::memory::Memory;
use crate::machine::processor::Processor;
use crate::machine::{DeviceRates, Peak, ReadTest, Rounds};
use crate::{Result, interrupt, simd};
use rustix::process::{Resource, getrlimit};
use std::path::{Path, PathBuf};

/// A disk that was measured, or why none was.
pub type DiskFinding = std::result::Result<(PathBuf, Disk), String>;

/// GPUs that were measured, or why none was.
pub type DeviceFinding = std::result::Result<Devices, String>;

pub struct Devices {
    pub rates: Vec<DeviceRates>,
    /// Their rates mean nothing.
    pub are_emulated: bool,
}

pub struct Findings {
    pub processor: Processor,
    pub n_logical_cores: usize,
    pub kernels: &'static str,
    pub gpu: Gpu,
    pub devices: DeviceFinding,
    /// That io_uring works, or why not.
    pub io_uring: std::result::Result<(), String>,
    pub memory: Memory,
    pub nodes: Vec<Node>,
    pub available_bytes: Option<u64>,
    pub group_limit_bytes: Option<u64>,
    /// `ulimit -n`; `None` where there is no limit.
    pub open_files_limit: Option<u64>,
    /// 10⁹ bytes a second by so many threads, or why it was not measured.
    pub read_rates: std::result::Result<Vec<(usize, Rounds)>, String>,
    /// 10⁹ operations a second of a unit by so many threads.
    pub peaks: Vec<(Peak, usize, Rounds)>,
    pub disk: DiskFinding,
}

impl Findings {
    /// Whether the rounds of each measurement of processor and memory agreed.
    pub fn is_steady(&self) -> bool {
        let rates = self.read_rates.iter().flatten().map(|(_, rounds)| rounds);
        let peaks = self.peaks.iter().map(|(.., rounds)| rounds);
        rates.chain(peaks).all(Rounds::is_steady)
    }
}

/// The error is about the path; the inner one is a disk that is left alone.
pub fn disk(path: &Path) -> Result<DiskFinding> {
    let disk = Disk::measure(path)?;
    Ok(Ok((path.canonicalize().unwrap_or_else(|_| path.to_owned()), disk)))
}

/// The error is about devices that were named; the inner one is that there are none.
pub fn devices(choice: &DeviceChoice) -> Result<DeviceFinding> {
    let found = match choice {
        DeviceChoice::Cpu => return Ok(Err("--device cpu".into())),
        DeviceChoice::Auto => match cuda::devices() {
            Ok(found) => found,
            Err(why) => return Ok(Err(why.to_string())),
        },
        _ => device::open(choice)?,
    };
    let are_emulated = choice.is_emulated();
    let sizes = if are_emulated { Sizes::EMULATED } else { Sizes::GPU };
    let mut rates = Vec::new();
    for device in &found {
        interrupt::check()?;
        match DeviceRates::measure(device, sizes) {
            Ok(measured) => rates.push(measured),
            // One that is full must not hide what else there is to say.
            Err(why) if *choice == DeviceChoice::Auto => return Ok(Err(why.to_string())),
            Err(why) => return Err(why),
        }
    }
    Ok(Ok(Devices { rates, are_emulated }))
}

/// Measures with the numbers of threads that are asked for, or with some up to all cores.
pub fn machine(
    threads: Option<Vec<usize>>,
    disk: DiskFinding,
    devices: DeviceFinding,
) -> Result<Findings> {
    let n_logical_cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let available_bytes = memory::available_bytes();
    let for_reads = threads.clone().unwrap_or_else(|| thread_counts(n_logical_cores));
    let mut ends = vec![1, n_logical_cores];
    ends.dedup();
    Ok(Findings {
        processor: Processor::read(),
        n_logical_cores,
        kernels: simd::kernels().name,
        gpu: Gpu::find(),
        devices,
        io_uring: disk::uring().map_err(|e| e.to_string()),
        memory: Memory::read(),
        nodes: numa::nodes(SYSFS.as_ref()),
        available_bytes,
        group_limit_bytes: memory::group_limit_bytes(),
        open_files_limit: getrlimit(Resource::Nofile).current,
        read_rates: read_rates(&for_reads, available_bytes)?,
        // Integers grow with the cores, which share nothing.
        peaks: peaks(&threads.unwrap_or(ends))?,
        disk,
    })
}

fn peaks(thread_counts: &[usize]) -> Result<Vec<(Peak, usize, Rounds)>> {
    let mut out = Vec::new();
    for peak in Peak::all() {
        for &n_threads in thread_counts {
            interrupt::check()?;
            out.push((peak, n_threads, peak.giga_ops_per_second(n_threads)));
        }
    }
    Ok(out)
}

fn read_rates(
    thread_counts: &[usize],
    available: Option<u64>,
) -> Result<std::result::Result<Vec<(usize, Rounds)>, String>> {
    let test = match ReadTest::new(available) {
        Ok(test) => test,
        Err(e) => return Ok(Err(format!("not enough memory to measure: {e}"))),
    };
    let mut out = Vec::new();
    for &n_threads in thread_counts {
        interrupt::check()?;
        out.push((n_threads, test.gb_per_second(n_threads)));
    }
    Ok(Ok(out))
}

/// All numbers of threads on a small machine; powers of two and all cores on a large one.
fn thread_counts(n_cores: usize) -> Vec<usize> {
    if n_cores <= 8 {
        return (1..=n_cores).collect();
    }
    let powers = std::iter::successors(Some(1), |n| Some(2 * n));
    powers.take_while(|n| *n < n_cores).chain([n_cores]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_machines_are_measured_at_powers_of_two() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(3), [1, 2, 3]);
        assert_eq!(thread_counts(16), [1, 2, 4, 8, 16]);
        assert_eq!(thread_counts(24), [1, 2, 4, 8, 16, 24]);
    }
}
