//! Routing that other programs recorded: imported, measured and replayed.

use common::cli::{failed, succeeded};
use common::{moeba, succeed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Requests of two layers of 16 experts, two a token. A token keeps one of the last one's.
fn csv(folder: &Path, n_requests: u64) -> PathBuf {
    let mut text = String::from("turn,phase,step,layer,expert\n");
    for turn in 0..n_requests {
        let mut kept = [0, 5];
        for step in 0..40 {
            for (layer, kept) in kept.iter_mut().enumerate() {
                let drawn = common::stream::mixed(turn * 1000 + step * 10 + layer as u64) % 15;
                let other = (*kept + 1 + drawn) % 16;
                for expert in [*kept, other] {
                    text.push_str(&format!("{turn},decode,{step},{layer},{expert}\n"));
                }
                *kept = other;
            }
        }
    }
    let path = folder.join("routing.csv");
    fs::write(&path, text).unwrap();
    path
}

fn trace(args: &[&str], path: &Path, more: &[&str]) -> Output {
    moeba().arg("trace").args(args).arg(path).args(more).output().unwrap()
}

/// The values of a table's row, by the title of a measure in the order of tables.
fn row(text: &str, name: &str, table: usize, n: usize) -> Vec<f64> {
    let lines = text.lines().filter(|line| line.starts_with(&format!("moeba,{name},")));
    // Without prompts there is no time to the first token.
    let values = lines.map(|line| line.rsplit(',').next().unwrap().parse().unwrap_or(f64::NAN));
    values.skip(table * n).take(n).collect()
}

#[test]
fn routing_of_another_program_is_imported_measured_and_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let file = csv(folder.path(), 12);
    let out = folder.path().join("x.mtrace");
    let imported = trace(&["import"], &file, &["-o", out.to_str().unwrap()]);
    assert!(succeeded(&imported).contains("12 requests, 480 tokens"));
    let notes = String::from_utf8(imported.stderr).unwrap();
    assert!(
        notes.contains("16, as the highest number is 15") && notes.contains("no router weights")
    );

    let budgets = ["--budget", "30,60", "-o", "csv"];
    let stats = succeeded(&trace(&["stats"], &out, &budgets)).to_owned();
    let [lru, belady, optimum, future, bypass, union] = [
        "least recently used",
        "Belady: the future is known",
        "optimum: and what is used need not be kept",
        "gained by the future",
        "gained by bypass",
        "experts of a token ÷ room",
    ]
    .map(|name| row(&stats, name, 0, 2));
    assert_eq!(union, [4.0 / 9.6, 4.0 / 19.2]);
    for i in 0..2 {
        assert!(lru[i] < belady[i] && belady[i] <= optimum[i], "{stats}");
        assert!((lru[i] + future[i] + bypass[i] - optimum[i]).abs() < 1e-9, "{stats}");
    }

    let policies = ["on-demand", "known:0", "known:2", "known:8", "belady"];
    let args: Vec<&str> = policies.iter().flat_map(|policy| ["--policy", policy]).collect();
    let replay = succeeded(&trace(&["replay"], &out, &[&args[..], &budgets].concat())).to_owned();
    let hits = policies.map(|policy| row(&replay, policy, 2, 2));
    for pair in hits.windows(2) {
        assert!(pair[0][0] <= pair[1][0] && pair[0][1] <= pair[1][1], "{hits:?}");
    }
    assert!(hits[4][0] > hits[0][0] + 0.05, "{hits:?}");

    // The halves are all there is, and none is both.
    let tokens = |part: &str| -> String {
        let text = succeeded(&trace(&["stats"], &out, &["--part", part])).to_owned();
        let (before, _) = text.split_once(" of 12 requests").unwrap();
        before.rsplit(' ').next().unwrap().to_owned()
    };
    let halves = [tokens("tuning"), tokens("report")].map(|n| n.parse::<usize>().unwrap());
    assert!(halves[0] + halves[1] == 12 && halves[0] > 0 && halves[1] > 0, "{halves:?}");
}

#[test]
fn what_a_trace_lacks_is_told_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let file = csv(folder.path(), 3);
    let out = folder.path().join("x.mtrace");
    succeeded(&trace(&["import"], &file, &["-o", out.to_str().unwrap()]));
    for (policy, word) in [
        ("finemoe", "the routers' probabilities"),
        ("predictor=none,eviction=map", "the routers' probabilities"),
        ("moepic", "the next layer's router"),
        ("mixtral-offloading", "the next layer's router"),
    ] {
        let refused = trace(&["replay"], &out, &["--policy", policy]);
        failed(&refused, 1, &["x.mtrace: ", policy, word, "moeba trace record"]);
    }
    for policy in ["moe-infinity", "predictor=trajectory", "predictor=none,eviction=lcp"] {
        succeeded(&trace(&["replay"], &out, &["--policy", policy, "--budget", "50"]));
    }
    fs::write(&file, "turn,phase,step,layer,expert\n0,decode,0,0,1\n0,decode,0,0,one\n").unwrap();
    let refused = trace(&["import"], &file, &["-o", out.to_str().unwrap(), "--force"]);
    failed(&refused, 1, &["routing.csv: line 3: expected an expert, got one"]);
}

/// Evictions that know the future cannot be run.
#[test]
fn bounds_are_for_replays() {
    let demo = common::repo().join("models/demo/moeba-demo.gguf");
    for policy in ["belady", "known:4"] {
        let run = moeba().arg("run").arg(&demo).args(["-p", "x", "--policy", policy]).output();
        failed(&run.unwrap(), 2, &[policy, "moeba trace replay"]);
    }
    let trace = common::repo().join("bench/traces/sibling.mtrace");
    let mut command = moeba();
    command.args(["trace", "replay"]).arg(trace);
    succeed(command.args(["--policy", "belady", "--budget", "50", "--replicas", "2"]));
}
