//! Findings as one JSON object. What is not there, not limited or not measured is null.

use super::advice;
use super::examine::{DeviceFinding, DiskFinding, Findings};
use crate::machine::{DeviceRates, Rounds};
use serde_json::{Value, json};

pub fn of(found: &Findings) -> Value {
    let rates = found.read_rates.iter().flatten();
    let rates = rates.map(|(n, rounds)| measured("gb_per_second", *n, rounds));
    let peaks = found.peaks.iter().map(|(peak, n, rounds)| {
        let mut value = measured("giga_ops_per_second", *n, rounds);
        value["unit"] = peak.unit.into();
        value["instructions"] = peak.instructions.into();
        value
    });
    let nodes = found.nodes.iter().map(|node| {
        json!({
            "number": node.number,
            "processors": node.processors,
            "memory_bytes": node.memory_bytes,
        })
    });
    let advice = advice::of(found).into_iter();
    let advice = advice.map(|a| json!({ "about": a.about, "why": a.why, "command": a.command }));
    json!({
        "moeba_version": env!("CARGO_PKG_VERSION"),
        "steady": found.is_steady(),
        "processor": {
            "name": found.processor.name,
            "logical_cores": found.n_logical_cores,
            "features": found.processor.features,
            "kernels": found.kernels,
        },
        "gpu": {
            "driver": found.gpu.driver,
            "libcuda": found.gpu.libcuda.as_ref().map(|path| path.display().to_string()),
        },
        "devices": devices(&found.devices),
        "io_uring": {
            "usable": found.io_uring.is_ok(),
            "why_not": found.io_uring.as_ref().err(),
        },
        "memory": {
            "total_bytes": found.memory.total_bytes,
            "available_bytes": found.available_bytes,
            "control_group_limit_bytes": found.group_limit_bytes,
            "swap_bytes": found.memory.swap_bytes,
            "swap_free_bytes": found.memory.swap_free_bytes,
            "huge_page_bytes": found.memory.huge_page_bytes,
            "huge_pages": found.memory.n_huge_pages,
            "transparent_huge_pages": found.memory.transparent_huge_pages,
            "nodes": nodes.collect::<Vec<_>>(),
            "read": rates.collect::<Vec<_>>(),
        },
        "integer_peak": peaks.collect::<Vec<_>>(),
        "disk": disk(&found.disk),
        "limits": { "open_files": found.open_files_limit },
        "advice": advice.collect::<Vec<_>>(),
    })
}

fn measured(key: &str, n_threads: usize, rounds: &Rounds) -> Value {
    json!({
        "threads": n_threads,
        key: rounds.median(),
        "best": rounds.best(),
        "spread": rounds.spread(),
    })
}

fn devices(devices: &DeviceFinding) -> Value {
    match devices {
        Err(why) => json!({ "why_not": why, "gpus": [] }),
        Ok(found) => json!({
            "emulated": found.are_emulated,
            "gpus": found.rates.iter().map(device).collect::<Vec<_>>(),
        }),
    }
}

fn device(rates: &DeviceRates) -> Value {
    let known = |n: u64| (n > 0).then_some(n);
    let (info, memory) = (&rates.info, &rates.memory);
    let matvec = rates.matvec.median();
    json!({
        "index": info.index,
        "name": info.name,
        "compute_capability": info.compute.to_string(),
        "driver_cuda": info.driver.to_string(),
        "multiprocessors": info.multiprocessors,
        "clock_hz": known(info.clock_hz),
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "memory_bytes_per_second": known(info.memory_bytes_per_second),
        "up_pinned_gb_per_second": rates.up.median(),
        "up_write_combined_gb_per_second": rates.up_write_combined.median(),
        "down_pinned_gb_per_second": rates.down.median(),
        "experts_in_place_gb_per_second": rates.experts.in_place.as_ref().map(Rounds::median),
        "experts_read_gb_per_second": rates.experts.read.as_ref().map(Rounds::median),
        "experts_async_gb_per_second": rates.experts.chunked.median(),
        "experts_whole_gb_per_second": rates.experts.whole.median(),
        "experts_pageable_gb_per_second": rates.experts.pageable.median(),
        "copy_gb_per_second": rates.copy.median(),
        "matvec_q4_k_gb_per_second": matvec,
        "matvec_of_copy": matvec / rates.copy.median(),
        "matvec_of_memory": rates.of_memory(matvec),
        "matmul_q4_k_tops": rates.matmul_tops.median(),
        "int8_peak_tops": rates.int8_peak_tops(),
    })
}

fn disk(disk: &DiskFinding) -> Value {
    match disk {
        Err(why) => json!({ "why_not": why }),
        Ok((path, disk)) => json!({
            "path": path.display().to_string(),
            "direct": disk.is_direct,
            "io": disk.io.to_string(),
            "read_bytes": disk.read_bytes,
            "depth": disk.depth,
            "gb_per_second": disk.gb_per_second.median(),
            "spread": disk.gb_per_second.spread(),
            "latency_us": disk.latency_us,
        }),
    }
}
