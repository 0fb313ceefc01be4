//! `moeba serve --ray`: refusals without Ray, and three Ray nodes on this machine. The latter need
//! `MOEBA_RAY_PYTHON`, a Python with `requirements.txt`; the test says so where there is none.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{moeba, repo};

fn model() -> PathBuf {
    repo().join("models/demo/moeba-demo.gguf")
}

/// A program that answers as a Python with these packages does.
fn python_that_says(folder: &Path, lines: &str) -> PathBuf {
    let path = folder.join("python");
    std::fs::write(&path, format!("#!/bin/sh\nprintf '{lines}'\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The exit code and what stderr says.
fn refused(python: &Path, args: &[&str]) -> (Option<i32>, String) {
    let mut command = moeba();
    command.arg("serve").arg(model()).args(["--ray", "-c", "128"]).args(args);
    let output = command.env("MOEBA_PYTHON", python).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn without_ray_a_sentence_says_what_helps() {
    let folder = tempfile::tempdir().unwrap();
    let says = |lines| python_that_says(folder.path(), lines);
    let (code, why) = refused(Path::new("/nonexistent/python"), &[]);
    assert_eq!(code, Some(1), "{why}");
    assert!(why.contains("MOEBA_PYTHON") && why.contains("/nonexistent/python"), "{why}");
    let install = "-m pip install \"ray[serve]";
    for (lines, said) in [
        ("\\n\\n", "has no Ray"),
        ("2.40.0\\n\\n", "Ray 2.40.0 is too old"),
        ("2.60.0\\naiohttp\\n", "has Ray but not aiohttp"),
    ] {
        let (code, why) = refused(&says(lines), &[]);
        assert_eq!(code, Some(1), "{why}");
        assert!(why.contains(said) && why.contains(install), "{why}");
    }
}

#[test]
fn wrong_usage_is_refused_before_ray_is_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let python = python_that_says(folder.path(), "\\n\\n");
    for (args, said) in [
        (&["--host", "0.0.0.0"][..], "--api-key"),
        (&["--host", "x.sock"], "--host"),
        (&["--replicas", "8..1"], "1..8"),
        (&["--parallel", "100"], "at most 56"),
    ] {
        let (code, why) = refused(&python, args);
        assert!(code == Some(2) && why.contains(said), "{code:?} {why}");
    }
}

/// Runs a script of this folder with the Python that has Ray; says so where there is none.
fn run(script: &str) {
    let Ok(python) = std::env::var("MOEBA_RAY_PYTHON") else {
        return println!("{script} is skipped: MOEBA_RAY_PYTHON names no Python with Ray");
    };
    // Sockets have short paths.
    let folder = tempfile::Builder::new().prefix("mr").tempdir_in("/tmp").unwrap();
    let mut command = Command::new(python);
    command.arg(repo().join("tests/ray").join(script)).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("MOEBA", env!("CARGO_BIN_EXE_moeba")).env("MOEBA_DEMO", model());
    command.env("MOEBA_RAY_TEMP", folder.path()).stdin(Stdio::null());
    command.env("MOEBA_RAY_PROGRAMS", repo().join("src/server/ray"));
    let output = command.output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn parts_without_a_cluster() {
    run("units.py");
}

/// Two clusters at once: most of the time is spent in waiting for Ray.
#[test]
fn three_machines_give_one_answer() {
    std::thread::scope(|scope| {
        scope.spawn(|| run("network.py"));
        run("scenario.py");
    });
}
