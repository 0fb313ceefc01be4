//! Advice for this machine, from the findings alone.

use super::examine::Findings;
use crate::units::size;

/// A line for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// Which finding it is about.
    pub about: &'static str,
    /// The problem and its cost.
    pub why: String,
    /// The remedy: a command, or a thing to look at.
    pub command: String,
}

/// A disk below this rate is the bottleneck of every model that is bigger than memory.
const SLOW_DISK_GB_PER_SECOND: f64 = 1.0;

/// All advice for these findings, the most valuable first.
pub fn of(found: &Findings) -> Vec<Advice> {
    let all = [
        processor(found),
        busy(found),
        disk(found),
        group(found),
        swap(found),
        uring(found),
        huge_pages(found),
        gpu(found),
    ];
    all.into_iter().flatten().collect()
}

fn advice(about: &'static str, why: impl Into<String>, command: impl Into<String>) -> Advice {
    Advice { about, why: why.into(), command: command.into() }
}

fn processor(found: &Findings) -> Option<Advice> {
    if found.kernels != "scalar" {
        return None;
    }
    let has_unit = found.processor.features.iter().any(|f| ["avx2", "asimd"].contains(&f.as_str()));
    Some(match has_unit {
        true => advice(
            "kernels",
            "the processor's vector unit is not used, which makes everything much slower",
            "unset MOEBA_SIMD",
        ),
        false => advice(
            "kernels",
            "the processor has no AVX2, or a virtual machine hides it: much slower",
            "grep -c avx2 /proc/cpuinfo (on the host; then give the machine the CPU type `host`)",
        ),
    })
}

fn busy(found: &Findings) -> Option<Advice> {
    if found.is_steady() {
        return None;
    }
    let n = found.n_logical_cores.saturating_sub(1).max(1);
    let why = "other programs use the processor; threads wait for the slowest of them";
    Some(advice("busy machine", why, format!("top (lists them), or leave them a core: -t {n}")))
}

fn disk(found: &Findings) -> Option<Advice> {
    let (_, disk) = found.disk.as_ref().ok()?;
    if !disk.is_direct {
        let why = "no disk was measured: this file system keeps files in memory";
        return Some(advice("disk", why, "moeba doctor MODEL (a file on the disk in question)"));
    }
    let rate = disk.gb_per_second.median();
    let why = format!("{rate:.2} GB/s is slow for experts that do not fit in memory");
    let command = "moeba run MODEL --dry-run (shows the speed); keep such models on NVMe";
    (rate < SLOW_DISK_GB_PER_SECOND).then(|| advice("disk", why, command))
}

fn group(found: &Findings) -> Option<Advice> {
    let (limit, total) = (found.group_limit_bytes?, found.memory.total_bytes?);
    let why = format!(
        "this process may use {} of the machine's {}, and --ram auto keeps to it",
        size(limit),
        size(total)
    );
    let command = "docker run --memory SIZE, or systemctl set-property UNIT MemoryMax=SIZE";
    (limit < total).then(|| advice("cgroup limit", why, command))
}

fn swap(found: &Findings) -> Option<Advice> {
    let total = found.memory.swap_bytes.filter(|bytes| *bytes > 0)?;
    let free = found.memory.swap_free_bytes.unwrap_or(total);
    let used = size(total.saturating_sub(free));
    let why = format!("{used} of {} of swap are in use, perhaps by experts", size(total));
    (free < total).then(|| advice("swap", why, "sudo swapoff -a (or sudo sysctl vm.swappiness=1)"))
}

fn uring(found: &Findings) -> Option<Advice> {
    found.io_uring.is_err().then(|| {
        let why = "without it, reading experts needs 32 threads instead of one";
        let command = "sudo sysctl kernel.io_uring_disabled=0 (in Docker: --security-opt \
                       seccomp=unconfined)";
        advice("io_uring", why, command)
    })
}

fn huge_pages(found: &Findings) -> Option<Advice> {
    let transparent = found.memory.transparent_huge_pages.as_deref()?;
    (transparent == "never").then(|| {
        let why = "weights are in pages of 4 KiB, which makes reading them a tenth slower";
        let file = "/sys/kernel/mm/transparent_hugepage/enabled";
        advice("huge pages", why, format!("echo madvise | sudo tee {file}"))
    })
}

fn gpu(found: &Findings) -> Option<Advice> {
    match (&found.gpu.driver, &found.gpu.libcuda) {
        (Some(_), None) => {
            let why = "the driver is loaded, but its library libcuda.so.1 is not there";
            Some(advice("GPU driver", why, "sudo apt install libcuda1 (in Docker: --gpus all)"))
        }
        (None, Some(_)) => {
            let why = "libcuda.so.1 is there, but the driver is not loaded";
            Some(advice("GPU driver", why, "sudo modprobe nvidia (then nvidia-smi)"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::disk::IoKind;
    use crate::machine::disk::Disk;
    use crate::machine::gpu::Gpu;
    use crate::machine::memory::Memory;
    use crate::machine::processor::Processor;
    use crate::machine::{Peak, Rounds};
    use std::path::PathBuf;

    fn rounds(values: [f64; 3]) -> Rounds {
        Rounds::sorted(values.to_vec())
    }

    fn disk_of(gb_per_second: f64, is_direct: bool) -> (PathBuf, Disk) {
        let gb_per_second = rounds([gb_per_second; 3]);
        let (io, read_bytes) = (IoKind::Uring, 1 << 19);
        let disk = Disk { is_direct, io, read_bytes, depth: 32, gb_per_second, latency_us: 80.0 };
        (PathBuf::from("/models"), disk)
    }

    /// A machine on which nothing is to be changed.
    fn good() -> Findings {
        Findings {
            processor: Processor { name: "x".into(), features: vec!["avx2".into()] },
            n_logical_cores: 8,
            kernels: "avx2",
            gpu: Gpu::default(),
            devices: Err("there is no NVIDIA driver".into()),
            io_uring: Ok(()),
            memory: Memory {
                total_bytes: Some(64 << 30),
                transparent_huge_pages: Some("madvise".into()),
                swap_bytes: Some(8 << 30),
                swap_free_bytes: Some(8 << 30),
                ..Memory::default()
            },
            nodes: Vec::new(),
            available_bytes: Some(60 << 30),
            group_limit_bytes: None,
            open_files_limit: Some(1024),
            read_rates: Ok(vec![(8, rounds([20.0, 20.1, 20.2]))]),
            peaks: vec![(Peak::all()[0], 8, rounds([100.0, 101.0, 102.0]))],
            disk: Ok(disk_of(3.0, true)),
        }
    }

    /// The one piece of advice that a change of the good machine calls for.
    fn one(change: impl FnOnce(&mut Findings)) -> Advice {
        let mut found = good();
        change(&mut found);
        let all = of(&found);
        assert_eq!(all.len(), 1, "{all:?}");
        all[0].clone()
    }

    #[test]
    fn a_good_machine_needs_no_advice() {
        assert_eq!(of(&good()), []);
        // What was not measured or is not there is no fault.
        let unknown = Findings {
            memory: Memory::default(),
            disk: Err("not asked for (--no-disk)".into()),
            read_rates: Err("no memory".into()),
            peaks: Vec::new(),
            ..good()
        };
        assert_eq!(of(&unknown), []);
    }

    #[test]
    fn each_fault_has_a_line_with_a_command() {
        type Change = fn(&mut Findings);
        let cases: &[(&str, &str, Change)] = &[
            ("kernels", "unset MOEBA_SIMD", |f| f.kernels = "scalar"),
            ("kernels", "CPU type `host`", |f| {
                (f.kernels, f.processor.features) = ("scalar", Vec::new());
            }),
            ("busy machine", "-t 7", |f| f.read_rates = Ok(vec![(8, rounds([9.0, 10.0, 20.0]))])),
            ("disk", "NVMe", |f| f.disk = Ok(disk_of(0.58, true))),
            ("disk", "moeba doctor MODEL", |f| f.disk = Ok(disk_of(9.0, false))),
            ("cgroup limit", "--memory", |f| f.group_limit_bytes = Some(2 << 30)),
            ("swap", "swapoff", |f| f.memory.swap_free_bytes = Some(5 << 30)),
            ("io_uring", "sysctl kernel.io_uring_disabled=0", |f| {
                f.io_uring = Err("Operation not permitted".into());
            }),
            ("huge pages", "echo madvise", |f| {
                f.memory.transparent_huge_pages = Some("never".into());
            }),
            ("GPU driver", "--gpus all", |f| f.gpu.driver = Some("550.54".into())),
            ("GPU driver", "modprobe nvidia", |f| f.gpu.libcuda = Some("/libcuda.so.1".into())),
        ];
        for (about, command, change) in cases {
            let advice = one(change);
            assert_eq!(advice.about, *about);
            assert!(advice.command.contains(command), "{advice:?}");
            assert!(!advice.why.contains('\n') && !advice.command.contains('\n'), "{advice:?}");
        }
    }

    #[test]
    fn advice_says_the_figures_it_is_about() {
        let swap = one(|found| found.memory.swap_free_bytes = Some(5 << 30));
        assert!(swap.why.starts_with("3.00 GiB of 8.00 GiB of swap are in use"), "{}", swap.why);
        let group = one(|found| found.group_limit_bytes = Some(2 << 30));
        assert!(group.why.contains("2.00 GiB of the machine's 64.00 GiB"), "{}", group.why);
    }
}
