//! NVIDIA drivers that cannot serve: none, one that is too old, one that is not whole, and drivers
//! whose GPUs cannot be used. Who asked for the GPU gets a sentence; who asked for nothing gets
//! the CPU, and hears why. The drivers are compiled here from tests/fixtures/cuda/driver.c.
#![cfg(target_os = "linux")]

use common::cli::{Model, Tiny, failed, moeba, stderr, succeeded, tiny};
use moeba::backend::cuda;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A folder with the driver, compiled with these `-D`s. None, which is said, where there is no C
/// compiler.
fn driver(defines: &[&str]) -> Option<TempDir> {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/cuda/driver.c");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    // The first name that is looked for, so that a real driver is not found before it.
    cc.args(["-shared", "-fPIC", "-o"]).arg(dir.path().join("libcuda.so")).arg(source);
    cc.args(defines.iter().map(|define| format!("-D{define}")));
    match cc.output() {
        Ok(out) => assert!(out.status.success(), "{}", stderr(&out)),
        Err(why) => {
            eprintln!("skipped: there is no C compiler: {why}");
            return None;
        }
    }
    Some(dir)
}

/// `moeba run` with this driver.
fn run(model: &Model, driver: &TempDir, args: &[&str]) -> Output {
    let mut command = moeba();
    command.arg("run").arg(&model.path).env("LD_LIBRARY_PATH", driver.path());
    command.args(["-c", "64", "-v"]).args(args).output().unwrap()
}

const ANSWER: [&str; 7] = ["-p", "a", "-no-cnv", "-n", "2", "--temp", "0"];

/// `--device cuda` ends with a sentence of these words; `auto` computes on the CPU, and says them.
fn expect_cpu(defines: &[&str], words: &[&str]) {
    let Some(driver) = driver(defines) else { return };
    let model = tiny(Tiny::default());
    let on = |device: &[&str]| run(&model, &driver, &[&ANSWER, device].concat());
    for device in ["cuda", "cuda:0"] {
        failed(&on(&["--device", device]), 1, words);
    }
    let expected = on(&["--device", "cpu"]);
    for device in [&["--device", "auto"][..], &[]] {
        let out = on(device);
        assert_eq!(succeeded(&out), succeeded(&expected));
        let said: Vec<&str> =
            stderr(&out).lines().filter(|l| l.contains("running on the CPU: ")).collect();
        assert_eq!(said.len(), 1, "{}", stderr(&out));
        assert!(words.iter().all(|word| said[0].contains(word)), "{words:?}: {}", said[0]);
    }
    assert!(!stderr(&expected).contains("running on the CPU: "), "it was asked for");
}

#[test]
fn a_driver_that_is_too_old() {
    let words = ["too old", "CUDA 11.8", "12.0", "525"];
    expect_cpu(&["VERSION=11080"], &words);
    // Its age says more than what it lacks.
    expect_cpu(&["VERSION=11080", "cuStreamWaitValue32_v2=gone"], &words);
    expect_cpu(&["VERSION=9020", "cuInit=gone"], &["too old", "CUDA 9.2", "12.0"]);
}

#[test]
fn a_driver_that_is_not_whole() {
    expect_cpu(&["cuGraphLaunch=gone"], &["NVIDIA driver", "CUDA 12.0", "cuGraphLaunch"]);
    expect_cpu(&["cuDriverGetVersion=gone"], &["NVIDIA driver", "cuDriverGetVersion"]);
}

#[test]
fn a_driver_without_a_gpu() {
    let words = ["NVIDIA driver is installed, but it finds no GPU"];
    expect_cpu(&["INIT=100"], &words);
    expect_cpu(&["DEVICES=0"], &words);
    expect_cpu(&["INIT=999"], &["driver does not start", "unknown error", "CUDA_ERROR_UNKNOWN"]);
}

#[test]
fn gpus_that_cannot_be_used() {
    let words = ["compute capability 7.5", "stub 0 (compute capability 6.1)"];
    expect_cpu(&["COMPUTE=61"], &words);
    expect_cpu(&["COMPUTE=61", "DEVICES=2"], &["stub 0", "stub 1 (compute capability 6.1)"]);
    expect_cpu(&["OPEN=999"], &["opening", "GPU 0 (stub 0)", "unknown error"]);
    // One that says yes to every question and then does nothing.
    expect_cpu(&[], &["GPU 0 (stub 0)", "unknown error (CUDA_ERROR_UNKNOWN)"]);
}

/// One that is not used is not opened: that would take some of its memory, and may fail.
#[test]
fn only_gpus_that_are_used_are_opened() {
    let Some(driver) = driver(&["DEVICES=4"]) else { return };
    let model = tiny(Tiny::default());
    for (device, used) in [("cuda:2", 2..3), ("auto", 0..4), ("cpu", 0..0)] {
        let out = run(&model, &driver, &["--dry-run", "--device", device]);
        let plan = succeeded(&out);
        let mut touched: Vec<&str> =
            stderr(&out).lines().filter(|line| line.starts_with("stub ")).collect();
        touched.sort_unstable();
        let each = |i| [format!("stub {i} is closed"), format!("stub {i} is opened")];
        assert_eq!(touched, used.clone().flat_map(each).collect::<Vec<_>>());
        match used.clone().next() {
            Some(first) => assert!(plan.contains(&format!("GPU {first} (stub {first})")), "{plan}"),
            None => assert!(!plan.contains("GPU"), "{plan}"),
        }
    }
}

#[test]
fn no_driver_at_all() {
    if cuda::has_driver() {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    let nothing = tempfile::tempdir().unwrap();
    let model = tiny(Tiny::default());
    let words = ["there is no NVIDIA driver", "libcuda"];
    let asked = [&ANSWER[..], &["--device", "cuda"]].concat();
    failed(&run(&model, &nothing, &asked), 1, &words);
    let out = run(&model, &nothing, &ANSWER);
    succeeded(&out);
    assert!(stderr(&out).contains("running on the CPU: there is no NVIDIA driver"));
}
