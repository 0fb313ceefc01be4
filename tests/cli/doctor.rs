//! `doctor`: its JSON has what programs read, in ranges that machines have, and its table says the
//! same; and it says what it cannot measure.

use common::cli::{failed, moeba, succeeded};
use serde_json::{Value, json};
use std::path::Path;

fn doctor(args: &[&str]) -> Value {
    let out = moeba().arg("doctor").args(args).arg("--json").output().unwrap();
    serde_json::from_str(succeeded(&out)).unwrap()
}

/// A file of so many bytes, none of them zero.
fn file(folder: &Path, n_bytes: usize) -> String {
    let path = folder.join("model.gguf");
    std::fs::write(&path, vec![7; n_bytes]).unwrap();
    path.to_str().unwrap().to_owned()
}

#[track_caller]
fn in_range(value: &Value, least: f64, most: f64) {
    let number = value.as_f64().unwrap_or_else(|| panic!("no number: {value}"));
    assert!((least..=most).contains(&number), "{number} is not from {least} to {most}");
}

#[test]
fn the_report_has_figures_that_machines_have() {
    let folder = tempfile::tempdir().unwrap();
    let found = doctor(&[&file(folder.path(), 4 << 20)]);
    assert!(found["steady"].is_boolean() && found["moeba_version"].is_string(), "{found}");
    let cores = found["processor"]["logical_cores"].as_u64().unwrap();
    assert_eq!(cores, std::thread::available_parallelism().unwrap().get() as u64);
    let kernels = found["processor"]["kernels"].as_str().unwrap();
    let features = found["processor"]["features"].as_array().unwrap();
    assert!(kernels != "avx2" || features.contains(&"avx2".into()), "{found}");

    let memory = &found["memory"];
    in_range(&memory["total_bytes"], 64e6, 1e15);
    let total = memory["total_bytes"].as_f64().unwrap();
    in_range(&memory["available_bytes"], 0.0, total);
    let limit = &memory["control_group_limit_bytes"];
    assert!(limit.is_null() || limit.as_u64().unwrap() > 0);
    assert!(memory["huge_pages"].is_u64());
    for node in memory["nodes"].as_array().unwrap() {
        assert!(node["number"].is_u64() && node["processors"].is_array(), "{found}");
        in_range(&node["memory_bytes"], 0.0, 1e15);
    }
    let read = memory["read"].as_array().unwrap();
    assert_eq!(read[0]["threads"], 1);
    assert_eq!(read[read.len() - 1]["threads"], cores);
    for row in read {
        in_range(&row["gb_per_second"], 0.01, 20_000.0);
        in_range(&row["spread"], 0.0, f64::MAX);
        let median = row["gb_per_second"].as_f64().unwrap();
        in_range(&row["best"], median, 20_000.0);
    }
    let peaks = found["integer_peak"].as_array().unwrap();
    assert!(peaks.iter().all(|row| row["unit"].is_string() && row["instructions"].is_string()));
    peaks.iter().for_each(|row| in_range(&row["giga_ops_per_second"], 0.01, 1e7));
    assert!(found["io_uring"]["usable"].is_boolean() && found["gpu"].get("libcuda").is_some());
    let open_files = found["limits"].get("open_files");
    assert!(open_files.is_some_and(|n| n.is_null() || n.is_u64()), "{found}");
}

/// People and programs get the same advice.
#[test]
fn advice_comes_after_the_findings() {
    let args = ["doctor", "--no-disk", "-t", "1", "--device", "cpu"];
    let with = |more: &[&str]| {
        let out = moeba().args(args).args(more).env("MOEBA_SIMD", "scalar").output().unwrap();
        succeeded(&out).to_owned()
    };
    let found: Value = serde_json::from_str(&with(&["--json"])).unwrap();
    let advice = found["advice"].as_array().unwrap();
    assert_eq!(advice[0]["about"], "kernels");
    for key in ["about", "why", "command"] {
        assert!(advice.iter().all(|a| a[key].is_string()), "{found}");
    }
    let table = with(&[]);
    let (_, lines) = table.split_once("\n\n").unwrap();
    assert!(lines.starts_with("kernels          the processor"), "{table}");
}

#[test]
fn a_file_is_read_past_the_cache_and_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), (4 << 20) + 1);
    let found = doctor(&[&path, "-t", "1"]);
    let disk = &found["disk"];
    assert_eq!(disk["read_bytes"], 512 << 10);
    assert!(disk["direct"].is_boolean() && disk["path"].as_str().unwrap().ends_with("model.gguf"));
    let usable = found["io_uring"]["usable"].as_bool().unwrap();
    assert_eq!(disk["io"], if usable { "uring" } else { "pread" });
    in_range(&disk["gb_per_second"], 1e-4, 1000.0);
    in_range(&disk["latency_us"], 0.1, 10e6);
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; (4 << 20) + 1]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn only_what_is_asked_for_is_measured() {
    let found = doctor(&["--no-disk", "-t", "2"]);
    assert!(found["disk"]["why_not"].as_str().unwrap().contains("--no-disk"));
    let read = found["memory"]["read"].as_array().unwrap();
    assert!(read.len() == 1 && read[0]["threads"] == 2, "{found}");
    let peaks = found["integer_peak"].as_array().unwrap();
    assert!(!peaks.is_empty() && peaks.iter().all(|row| row["threads"] == 2), "{found}");
}

/// Wide units come after narrow ones and are no slower; each stands alone.
#[test]
fn units_are_reported_apart() {
    let found = doctor(&["--no-disk", "-t", "1"]);
    let peaks = found["integer_peak"].as_array().unwrap();
    let units: Vec<&str> = peaks.iter().map(|row| row["unit"].as_str().unwrap()).collect();
    let expected = ["scalar", "avx2", "avx512bw", "avx512vnni", "neon", "dotprod"];
    let mut known = expected.iter().filter(|unit| units.contains(unit));
    assert!(units.iter().all(|unit| known.next() == Some(unit)), "{units:?}");
    let alone = ["scalar", "avx2", "neon"];
    assert!(units.len() > 1 || units.iter().all(|unit| alone.contains(unit)), "{units:?}");
}

#[test]
fn a_folder_is_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["doctor", "--json", "-t", "1", folder.path().to_str().unwrap()];
    let out = moeba().args(args).output().unwrap();
    if out.status.success() {
        let found: Value = serde_json::from_slice(&out.stdout).unwrap();
        in_range(&found["disk"]["gb_per_second"], 1e-4, 1000.0);
    } else {
        // On a small disk.
        failed(&out, 1, &["of room", "needs 1.00 GiB"]);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_table_has_a_line_for_each_finding() {
    let out = moeba().args(["doctor", "--no-disk", "-t", "1", "--device", "cpu"]).output().unwrap();
    let table = succeeded(&out);
    for what in [
        "processor",
        "kernels",
        "integer peak",
        "memory",
        "cgroup limit",
        "swap",
        "huge pages",
        "memory read",
        "disk",
        "io_uring",
        "GPU driver",
        "GPU",
        "open files",
    ] {
        let findings = table.split("\n\n").next().unwrap();
        let lines = findings.lines().filter(|line| line.starts_with(&format!("{what:<16} ")));
        assert_eq!(lines.count(), 1, "{what}: {table}");
    }
    assert!(table.contains(" GB/s, 1 thread") && table.contains(" GOP/s, 1 thread"), "{table}");
    assert!(table.lines().all(|line| line.trim_end() == line), "{table}");
}

#[test]
fn devices_are_measured_and_emulated_ones_are_not_believed() {
    let args = ["--no-disk", "-t", "1", "--device", "emulated:2"];
    let found = doctor(&args);
    let devices = &found["devices"];
    assert_eq!(devices["emulated"], true);
    let gpus = devices["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 2);
    for (index, gpu) in gpus.iter().enumerate() {
        assert_eq!(gpu["index"], index);
        assert_eq!((&gpu["name"], &gpu["total_bytes"]), (&"emulated".into(), &(1 << 30).into()));
        let experts = [
            "experts_in_place",
            "experts_read",
            "experts_async",
            "experts_whole",
            "experts_pageable",
        ];
        let links = ["up_pinned", "up_write_combined", "down_pinned", "copy", "matvec_q4_k"];
        for rate in links.into_iter().chain(experts) {
            in_range(&gpu[format!("{rate}_gb_per_second")], 1e-9, 1e6);
        }
        in_range(&gpu["matmul_q4_k_tops"], 1e-12, 1e3);
        assert!(gpu["int8_peak_tops"].is_null() && gpu["memory_bytes_per_second"].is_null());
    }
    let out = moeba().arg("doctor").args(args).output().unwrap();
    let table = succeeded(&out);
    let rates = ["GPU memory", "GPU link", "GPU experts", "GPU copy", "GPU matvec", "GPU matmul"];
    for what in rates {
        let findings = table.split("\n\n").next().unwrap();
        let lines = findings.lines().filter(|line| line.starts_with(&format!("{what:<16} ")));
        assert_eq!(lines.count(), 2, "{what}: {table}");
    }
    assert_eq!(table.matches("rates mean nothing").count(), 1, "{table}");
    assert_eq!(doctor(&["--no-disk", "-t", "1", "--device", "cpu"])["devices"]["gpus"], json!([]));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let small = file(folder.path(), 100);
    failed(&moeba().args(["doctor", &small]).output().unwrap(), 1, &["model.gguf", "100 bytes"]);
    let missing = moeba().args(["doctor", "/nonexistent.gguf"]).output().unwrap();
    failed(&missing, 1, &["/nonexistent.gguf"]);
    for args in
        [&["-t", "0"][..], &["-t", "1,"], &["-t", "x"], &["--no-disk", "x"], &["--device", "x"]]
    {
        failed(&moeba().arg("doctor").args(args).output().unwrap(), 2, &[]);
    }
}
