//! `run --preset NAME --dry-run`: the plan of the file that `synth` would write.

use common::cli::{failed, moeba, stderr, succeeded};

/// A plan without what is free and how fast it is at the moment.
fn plan(args: &[&str]) -> String {
    let out = moeba().args(["run", "--dry-run", "--device", "cpu"]).args(args).output().unwrap();
    let lines = succeeded(&out).lines().filter(|line| !line.contains(" t/s "));
    let lines = lines.map(|line| match line.split_once("  of ") {
        Some((taken, _)) if line.starts_with("together") => taken.to_owned(),
        _ => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_plan_of_a_preset_is_that_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("synth.gguf");
    let file = path.to_str().unwrap();
    let preset = ["--preset", "granite-3.0-1b-a400m", "--layers", "1"];
    for ty in ["q4_k", "q8_0"] {
        let mut synth = moeba();
        synth.args(["synth", "granite-3.0-1b-a400m", "--layers", "1", "--force", "--type", ty]);
        succeeded(&synth.args(["-o", file]).output().unwrap());
        for more in [&["-c", "512"][..], &["-c", "64", "--ram", "50%", "-ub", "32"], &["-ngl", "0"]]
        {
            let of_preset = plan(&[&preset[..], &["--type", ty], more].concat());
            assert_eq!(of_preset, plan(&[&[file][..], more].concat()));
        }
    }
}

/// A model that no test could write.
#[test]
fn a_large_model_is_planned_without_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = moeba();
    run.args(["run", "--preset", "kimi-k2", "--dry-run", "--ram", "4G", "-c", "64", "--device"]);
    let out = run.arg("cpu").current_dir(folder.path()).output().unwrap();
    let text = succeeded(&out);
    assert!(text.contains("8 of 384 in each of 60 layers"), "{text}");
    assert!(text.starts_with("experts") && text.contains("GiB  streamed from disk"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn shapes_alone_are_not_run() {
    let run = |args: &[&str]| moeba().arg("run").args(args).output().unwrap();
    let out = run(&["--preset", "mixtral-8x7b", "-p", "Hello"]);
    failed(&out, 2, &["--dry-run", "moeba synth mixtral-8x7b"]);
    for (args, word) in [
        (&["--preset", "gpt", "--dry-run"][..], "kimi-k2"),
        (&["--preset", "mixtral-8x7b", "--layers", "33", "--dry-run"], "1 to 32"),
        (&["--preset", "mixtral-8x7b", "--type", "iq9_s", "--dry-run"], "iq9_s"),
        (&["--preset", "mixtral-8x7b", "x.gguf", "--dry-run"], "--preset"),
        (&["x.gguf", "--layers", "2", "--dry-run"], "--preset"),
        (&["x.gguf", "--type", "q8_0", "--dry-run"], "--preset"),
    ] {
        let out = run(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains(word), "{args:?}: {}", stderr(&out));
    }
}
