//! Devices on the command line: what is planned for them, which flags change it, and what is
//! refused. The device is the emulated one, which every machine has.

use common::cli::{Model, Tiny, failed, moeba, on, stderr, succeeded, tiny};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

const EMULATED: [&str; 2] = ["--device", "emulated"];

fn model() -> Model {
    tiny(Tiny::default())
}

fn dry_run(model: &Model, args: &[&str]) -> Output {
    // A flag cannot be given twice.
    let [flag, _] = EMULATED;
    let device = if args.contains(&flag) { &[][..] } else { &EMULATED };
    let context = if args.contains(&"-c") { &[][..] } else { &["-c", "64"] };
    on(model, "run", &[&["--dry-run"], device, context, args].concat())
}

/// MiB of a line of the plan, and its note.
fn row(plan: &str, what: &str) -> (f64, String) {
    let found = plan.lines().find(|line| line.starts_with(&format!("{what:<16} ")));
    let line = found.unwrap_or_else(|| panic!("no {what:?} in\n{plan}"));
    let (number, unit) = (&line[16..29], line[30..33].trim());
    let powers = [("B", 0), ("KiB", 1), ("MiB", 2), ("GiB", 3)];
    let power = powers.iter().find(|(name, _)| *name == unit).unwrap_or_else(|| panic!("{line}")).1;
    let number: f64 = number.trim().parse().unwrap();
    (number * 1024f64.powi(power - 2), line[33..].trim().to_owned())
}

#[test]
fn a_dry_run_says_what_is_on_the_device() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    let out = moeba().arg("run").arg(&demo).args(["--dry-run"]).args(EMULATED).output().unwrap();
    let plan = succeeded(&out);
    for flag in ["-ngl", "-c", "-ub", "--vram", "-ot"] {
        assert!(plan.contains(flag), "no {flag} in\n{plan}");
    }
    let parts = ["GPU layers", "GPU output", "GPU KV cache", "GPU buffers"];
    let parts: f64 = parts.iter().map(|part| row(plan, part).0).sum();
    let together = row(plan, "GPU together").0;
    let experts = row(plan, "GPU experts");
    assert!((parts + experts.0 - together).abs() < 0.4, "{plan}");
    assert!(experts.1.contains("100.0 %") && experts.0 > 1.0, "{plan}");
    assert!(row(plan, "GPU layers").1.contains("all "), "{plan}");
    // Of an emulated device's GiB an eighth stays free.
    assert_eq!(row(plan, "GPU head-room").0, 128.0);
    assert!(together <= 1024.0 - 128.0);
    // What the device has, memory need not have.
    assert_eq!(row(plan, "KV cache").0, 0.0);
    // Units and notes stand below each other.
    let is_unit = |line: &str| ["B  ", "KiB", "MiB", "GiB"].contains(&&line[30..33]);
    assert!(plan.lines().all(|line| is_unit(line) && line[33..35] == *"  "), "{plan}");
    assert!(stderr(&out).contains("emulated GPU is for tests"), "{}", stderr(&out));
}

/// The header names the device and what it has, and the figures after the answer call its link by
/// its name: nothing came from a disk.
#[test]
fn a_run_says_what_is_on_the_device_and_over_which_link_it_came() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    let run = |more: &[&str]| {
        let mut command = moeba();
        let stats = tempfile::NamedTempFile::new().unwrap();
        command.arg("run").arg(&demo).args(["-v", "-p", "a", "-no-cnv", "-c", "64", "-s", "1"]);
        command.args(EMULATED).args(more).arg("--stats").arg(stats.path());
        let out = command.output().unwrap();
        succeeded(&out);
        let stats: Value = serde_json::from_slice(&std::fs::read(stats.path()).unwrap()).unwrap();
        (stderr(&out).to_owned(), stats)
    };
    let (said, stats) = run(&["-n", "2"]);
    let header = said.lines().find(|line| line.starts_with("GPU 0 (emulated): ")).unwrap();
    assert!(header.contains("13/13 layers") && header.ends_with(" of experts"), "{header}");
    assert!(said.contains("link: moved ") && said.contains("experts in VRAM: "), "{said}");
    assert!(!said.contains("disk: ") && !said.contains("in place on the mapped file"), "{said}");
    // Whatever has come may have come before the prompt.
    let bytes = |stats: &Value, key: &str| stats[key].as_u64().unwrap();
    assert!(stats["link_bytes"].is_u64(), "{stats}");
    assert!(bytes(&stats, "resident_expert_bytes_max") > 0, "{stats}");
    assert!(stats["disk_read_bytes"].is_null() && stats["io"].is_null(), "{stats}");
    // From a disk, through memory, to the device.
    let (said, stats) = run(&["-n", "12", "--ram", "25%", "-ngl", "8"]);
    assert!(said.contains("GPU 0 (emulated): 8/13 layers"), "{said}");
    assert!(said.contains("link: moved ") && said.contains("disk: read "), "{said}");
    assert!(stats["link_bytes"].is_u64() && stats["disk_read_bytes"].is_u64(), "{stats}");
    assert!(bytes(&stats, "resident_expert_bytes_max") > 0, "{stats}");
    assert!(["uring", "pread"].contains(&stats["io"].as_str().unwrap()), "{stats}");
}

/// The allocation is the planned one, or a little smaller.
#[test]
fn no_more_is_taken_than_planned() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    for path in [&demo, &model().path] {
        for flags in [&["-c", "40"][..], &["-c", "40", "-ub", "7"], &["-c", "40", "-ngl", "2"]] {
            let mut command = moeba();
            command.arg("run").arg(path).args(["-vv", "-p", "a", "-no-cnv", "-n", "1"]);
            let out = command.args(EMULATED).args(flags).output().unwrap();
            succeeded(&out);
            let message = stderr(&out);
            let line = message.lines().find(|line| line.contains("bytes of VRAM taken")).unwrap();
            let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
            let [taken, planned] = numbers[..] else { panic!("{line}") };
            assert!(taken <= planned && taken > planned / 10 * 9, "{flags:?}: {line}");
        }
    }
}

#[test]
fn flags_change_the_plan() {
    let model = model();
    let plan = |args: &[&str]| succeeded(&dry_run(&model, args)).to_owned();
    let all = plan(&[]);
    let (dense, _) = row(&all, "GPU layers");
    let one = plan(&["-ngl", "2"]);
    assert!(row(&one, "GPU layers").1.contains("layers 1 to 1, 1 of 2"), "{one}");
    assert!(row(&one, "GPU experts").1.contains("those of 1 layer are on the CPU"), "{one}");
    assert!(row(&one, "GPU layers").0 <= dense);
    for flags in [&["-cmoe"][..], &["-ncmoe", "2"], &["-ot", "exps=CPU"], &["-ncmoe", "99"]] {
        let plan = plan(flags);
        assert!(row(&plan, "GPU experts").1.starts_with("none; those of 2 layers"), "{plan}");
        assert!(!plan.contains("least --vram"), "{plan}");
    }
    for flags in [&["-ncmoe", "1"][..], &["-ot", "blk.1.ffn_.*_exps=CUDA0", "-cmoe"]] {
        let plan = plan(flags);
        assert!(row(&plan, "GPU experts").1.contains("those of 1 layer "), "{plan}");
    }
    // 196608 bytes of experts in slots of 12 KiB.
    let half = plan(&["--vram", "50%"]);
    assert!(row(&half, "GPU experts").1.starts_with("50.0 %"), "{half}");
    let first = plan(&["-ot", "^blk\\.0\\.=CPU"]);
    assert!(row(&first, "GPU layers").1.contains("layers 1 to 1"), "{first}");
    let two = plan(&["--device", "emulated:2"]);
    assert!(row(&two, "GPU experts").1.contains("on GPU 0 (emulated)"), "{two}");
    assert!(two.contains("(--vram) on GPU 1 (emulated)"), "{two}");
    assert!(two.contains("buffers for experts on GPU 1 (emulated)"), "{two}");
    // Without experts there is nothing for a second one to do.
    let idle = dry_run(&model, &["--device", "emulated:2", "-cmoe", "-v"]);
    assert!(!succeeded(&idle).contains("GPU 1"), "{}", succeeded(&idle));
    assert!(stderr(&idle).contains("GPU 1 (emulated) is not used"), "{}", stderr(&idle));
}

#[test]
fn without_a_layer_on_the_device_everything_is_on_the_cpu() {
    let model = model();
    for flags in [&["-ngl", "0"][..], &["--device", "cpu"], &["--device", "none"]] {
        let out = dry_run(&model, flags);
        assert!(!succeeded(&out).contains("GPU"), "{flags:?}");
        assert!(!stderr(&out).contains("ignored"), "{flags:?}");
    }
    let out = dry_run(&model, &["--device", "cpu", "-ngl", "all", "--vram", "1G", "-cmoe"]);
    succeeded(&out);
    let message = stderr(&out);
    assert!(message.contains("running on the CPU: --vram, -ngl, -cmoe are ignored"), "{message}");
}

/// As the placements of llama.cpp that people pass on: up and down of some layers, say.
#[test]
fn rules_for_parts_move_experts_as_a_whole_and_say_so() {
    let model = model();
    // What the machine has available is another from run to run.
    let plan = |flags: &[&str]| {
        let out = dry_run(&model, flags);
        let (plan, available) = succeeded(&out).split_once(" available").unwrap();
        let needed = plan.rsplit_once(" of ").unwrap().0;
        (format!("{needed}{available}"), stderr(&out).to_owned())
    };
    let (parts, said) = plan(&["-ot", "ffn_(up|down)_exps=CPU"]);
    assert_eq!(parts, plan(&["-cmoe"]).0);
    for word in ["warning: -ot", "experts of layer 0 and of 1 more", "blk.0.ffn_up_exps"] {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
    let (parts, said) = plan(&["-ot", "attn_q=CPU"]);
    assert_eq!(parts, plan(&[]).0);
    assert!(said.contains("dense weights of layer 0") && said.contains("blk.0.attn_q"), "{said}");
}

#[test]
fn what_cannot_be_planned_is_refused_with_the_flag() {
    let model = model();
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["--vram", "1K"], 1, &["--vram", "1.0 KiB", "a token needs", "-cmoe"]),
        (&["-ot", "exps=CUDA1"], 1, &["CUDA1", "CUDA0"]),
        (&["-ot", "token_embd=CUDA0"], 1, &["embedding", "in memory"]),
        (&["-ot", "^blk\\.1\\.=CPU"], 1, &["last ones", "-ot"]),
        (&["-ngl", "1", "-ot", "exps=CUDA0"], 1, &["experts of layer 0", "-ngl"]),
        (&["-c", "16000000"], 1, &["no room for a layer", "KV cache", "lower -c"]),
        (&["-c", "16000000", "-ngl", "99"], 1, &["-ngl 3", "no layer fits"]),
    ];
    for (flags, code, words) in cases {
        failed(&dry_run(&model, flags), *code, words);
    }
}

#[test]
fn wrong_values_are_wrong_usage() {
    let model = model();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--device", "gpu"], &["--device", "cuda:N"]),
        (&["--device", "cuda:0,0"], &["--device", "cuda:0,1"]),
        (&["--vram", "12Q"], &["--vram", "1.5G", "50%"]),
        (&["-ngl", "-7"], &["--gpu-layers", "all or auto"]),
        (&["-ngl", "most"], &["--gpu-layers", "all or auto"]),
        (&["-ncmoe", "-1"], &["--n-cpu-moe", "whole number"]),
        (&["-ot", "exps"], &["--override-tensor", "REGEX=CPU"]),
        (&["-ot", "a=CPU,(=CPU"], &["--override-tensor", "not a valid regular expression"]),
    ];
    for command in ["run", "bench"] {
        for (flags, words) in cases {
            failed(&on(&model, command, flags), 2, words);
        }
    }
}

#[test]
fn llama_cpps_variables_are_read() {
    let model = model();
    let with = |name: &str, value: &str| {
        let mut command = moeba();
        command.arg("run").arg(&model.path).args(["--dry-run", "-c", "64"]).env(name, value);
        if name != "LLAMA_ARG_DEVICE" {
            command.args(EMULATED);
        }
        command.output().unwrap()
    };
    let cases = [
        ("LLAMA_ARG_DEVICE", "emulated", "all 2 layers"),
        ("LLAMA_ARG_N_GPU_LAYERS", "2", "1 of 2"),
        ("LLAMA_ARG_CPU_MOE", "1", "those of 2 layers"),
        ("LLAMA_ARG_N_CPU_MOE", "1", "those of 1 layer "),
        ("LLAMA_ARG_OVERRIDE_TENSOR", "exps=CPU", "those of 2 layers"),
        ("MOEBA_VRAM", "50%", "50.0 %"),
    ];
    for (name, value, word) in cases {
        let out = with(name, value);
        assert!(succeeded(&out).contains(word), "{name}: {}", succeeded(&out));
    }
}

#[test]
fn a_selftest_compares_every_kernel() {
    let selftest = |args: &[&str]| moeba().arg("selftest").args(args).output().unwrap();
    let out = selftest(&["--device", "emulated", "--quick"]);
    let table = succeeded(&out);
    for kernel in [
        "matvec ",
        "matmul ",
        "rms_norm ",
        "expert ",
        "attention ",
        "delta_rule ",
        "route ",
        "top_k ",
    ] {
        let mut rows = table.lines().filter(|line| line.starts_with(kernel)).peekable();
        assert!(rows.peek().is_some(), "no {kernel}in {table}");
        assert!(rows.all(|row| row.contains("equal bits")), "{table}");
    }
    let last = table.lines().last().unwrap();
    let numbers: Vec<&str> = last.split(' ').collect();
    assert!(numbers[0] == numbers[2] && last.ends_with("match the CPU"), "{last}");
    failed(&selftest(&["--device", "cpu"]), 2, &["--device cpu"]);
    failed(&selftest(&["--device", "cuda:63"]), 1, &["--device cuda"]);
}

/// A GPU that is asked for by name and is not there. `auto` does without.
#[test]
fn a_missing_gpu_is_a_sentence() {
    let model = model();
    let out = on(&model, "run", &["--dry-run", "-c", "64", "--device", "cuda:63"]);
    failed(&out, 1, &["--device cuda"]);
    succeeded(&on(&model, "run", &["--dry-run", "-c", "64"]));
}
