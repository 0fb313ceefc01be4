//! Policies as a user meets them: profiles that are kept, damaged and refused; replays of the
//! committed traces.

use common::{moeba, repo, succeed};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const TEXT: &str = "A branch is a line of development. You can create one with a command, and then \
                    switch to it. Files that have changed since are listed by another command.";

/// The demo model through a text, token by token, with half of its experts in memory.
fn command(folder: &Path, policy: &str, profile: &Path) -> Command {
    let text = folder.join("text.txt");
    fs::write(&text, TEXT).unwrap();
    let demo = repo().join("models/demo/moeba-demo.gguf");
    let mut command = moeba();
    command.arg("perplexity").arg(demo).arg("-f").arg(text).args(["-b", "1", "-c", "16"]);
    command.args(["--ram", "50%", "--policy", policy, "--profile"]).arg(profile);
    command
}

fn run(folder: &Path, policy: &str, profile: &Path) -> Output {
    succeed(&mut command(folder, policy, profile))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_profile_is_kept_and_a_damaged_one_is_refused_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("demo.moeba");
    for policy in
        ["finemoe", "moe-infinity", "moepic", "predictor=trajectory", "predictor=none,eviction=hot"]
    {
        let _ = fs::remove_file(&profile);
        let cold = run(folder.path(), policy, &profile);
        let kept = fs::read(&profile).unwrap_or_else(|e| panic!("{policy} keeps nothing: {e}"));
        let warm = run(folder.path(), policy, &profile);
        assert!(!stderr(&warm).contains("not used"), "{policy}: {}", stderr(&warm));
        // What was learned changes no answer.
        let answer = |output: &Output| {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.lines().find(|line| line.contains("PPL")).unwrap().to_owned()
        };
        assert_eq!(answer(&warm), answer(&cold));
        for at in [0, kept.len() / 2, kept.len() - 1] {
            let mut damaged = kept.clone();
            damaged[at] ^= 0x10;
            fs::write(&profile, &damaged).unwrap();
            let refused = command(folder.path(), policy, &profile).output().unwrap();
            let text = stderr(&refused);
            assert_eq!(refused.status.code(), Some(1), "{policy}: {text}");
            assert!(text.contains("demo.moeba: ") && refused.stdout.is_empty(), "{policy}: {text}");
            assert_eq!(fs::read(&profile).unwrap(), damaged);
        }
    }
}

/// A process that is killed has saved what its first tokens taught.
#[test]
fn what_was_learned_outlives_a_process_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("demo.moeba");
    let mut command = command(folder.path(), "predictor=trajectory", &profile);
    fs::write(folder.path().join("text.txt"), TEXT.repeat(200)).unwrap();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let is_running = |child: &mut Child| child.try_wait().unwrap().is_none();
    while !profile.exists() && is_running(&mut child) && start.elapsed().as_secs() < 120 {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(is_running(&mut child), "the text is too short");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(profile.exists(), "nothing is saved");
    let names = || fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names().collect::<BTreeSet<_>>(), ["demo.moeba", "text.txt"].map(Into::into).into());
    let kept = fs::read(&profile).unwrap();
    // Refused if it were damaged.
    run(folder.path(), "predictor=trajectory", &profile);
    assert!(kept.len() > 1000 && fs::read(&profile).unwrap() != kept);
}

#[test]
fn no_profile_is_written_where_none_is_wanted() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), "finemoe", Path::new("none"));
    let names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["text.txt"]);
    assert!(!Path::new("none").exists());
}

#[test]
fn prescope_says_that_it_must_be_trained() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), "prescope", Path::new("none"));
    assert!(stderr(&output).contains("moeba trace train"), "{}", stderr(&output));
}

#[test]
fn committed_traces_are_replayed_the_same_each_time() {
    for name in ["demo", "sibling"] {
        let replay = || {
            let mut command = moeba();
            command
                .args(["trace", "replay"])
                .arg(repo().join(format!("bench/traces/{name}.mtrace")));
            command.args(["--policy", "on-demand", "--budget", "50", "-o", "csv"]);
            String::from_utf8(succeed(&mut command).stdout).unwrap()
        };
        let first = replay();
        assert!(first.contains("moeba,on-demand,50,"), "{first}");
        assert_eq!(replay(), first);
    }
}

/// A report of `moeba doctor`, as far as a replay reads it.
fn machine_with_a_disk_of(gb_per_second: f64) -> String {
    format!(
        r#"{{"processor": {{"kernels": "avx2"}},
            "memory": {{"read": [{{"threads": 2, "gb_per_second": 18.0}}]}},
            "integer_peak": [{{"unit": "avx2", "threads": 2, "giga_ops_per_second": 500.0}}],
            "disk": {{"gb_per_second": {gb_per_second}, "latency_us": 80.0, "depth": 32}}}}"#
    )
}

/// Experts that are read at a tenth of the rate take a tenth of the time, where little else does.
#[test]
fn a_machine_that_was_measured_is_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machine.json");
    let tpot_ms = |gb_per_second: f64| -> f64 {
        std::fs::write(&path, machine_with_a_disk_of(gb_per_second)).unwrap();
        let mut command = moeba();
        command.args(["trace", "replay"]).arg(repo().join("bench/traces/sibling.mtrace"));
        command.args(["--policy", "on-demand", "--budget", "25", "-o", "csv", "--machine"]);
        let text = String::from_utf8(succeed(command.arg(&path)).stdout).unwrap();
        let first = text.lines().find(|line| line.contains("on-demand")).unwrap();
        first.rsplit(',').next().unwrap().trim().parse().unwrap()
    };
    let (slow, fast) = (tpot_ms(0.1), tpot_ms(1.0));
    assert!((7.0..10.0).contains(&(slow / fast)), "{slow} {fast}");
}

#[test]
fn what_cannot_be_replayed_is_told_in_a_sentence() {
    let trace = repo().join("bench/traces/sibling.mtrace");
    let trace = trace.to_str().unwrap();
    let demo = repo().join("models/demo/moeba-demo.gguf");
    let cases: &[(&[&str], &str)] = &[
        (&["no-such.mtrace"], "no-such.mtrace"),
        (&[trace, "--policy", "best"], "there is no policy"),
        (&[trace, "--policy", "auto"], "give on-demand, deepspeed,"),
        (&[trace, "--policy", "known:x"], "known:4"),
        (&[trace, "--machine", "abacus"], "give one of"),
        (&[trace, "--machine", "no-such.json"], "no-such.json"),
        (&[trace, "--sizes", "huge"], "give one of"),
        (&[trace, "--budget", "0"], "percentage"),
        (&[trace, "--warm-up", "100000"], "--warm-up 100000 leaves nothing to measure"),
        (&[trace, "--warm-up", "-1"], "--warm-up"),
        (&[trace, "--gguf", demo.to_str().unwrap()], "not the model of the trace"),
        (&[demo.to_str().unwrap()], "trace"),
    ];
    for (args, word) in cases {
        let output = moeba().args(["trace", "replay"]).args(*args).output().unwrap();
        let text = stderr(&output);
        assert!(!output.status.success() && text.contains(word), "{args:?}: {text}");
        assert!(!text.contains("panicked"), "{args:?}: {text}");
    }
}
