//! Budgets under the limits of control groups: the program lives where its plan says that it fits,
//! and chooses a budget that fits where it is given none. Skipped where no group can be made.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use common::{moeba, succeed};
use moeba::engine::{Engine, EngineOptions, MemoryPlan};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// For everything that is neither weights nor KV cache.
const REST: u64 = 200 * MIB;
const N_CTX: &str = "128";
const TEXT: &str = "A budget is kept when nobody looks, too. Whoever counts bytes finds it so.";

/// A group with a limit on memory. Goes when this is dropped.
struct Group {
    folder: PathBuf,
    limit: &'static str,
    peak: &'static str,
}

impl Group {
    /// A group of version 1 or 2, below our own group or elsewhere if the system allows it.
    fn new() -> Option<Group> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = |is_mine: &dyn Fn(&str) -> bool| {
            let mut lines = groups.lines().filter_map(|l| l.split_once(':')?.1.split_once(':'));
            lines.find(|(controllers, _)| is_mine(controllers)).map(|(_, path)| path)
        };
        let v1 = path(&|controllers| controllers.split(',').any(|c| c == "memory"));
        let (root, mine, limit, peak) = match v1 {
            Some(mine) => {
                let (limit, peak) = ("memory.limit_in_bytes", "memory.max_usage_in_bytes");
                ("/sys/fs/cgroup/memory", mine, limit, peak)
            }
            None => ("/sys/fs/cgroup", path(&str::is_empty)?, "memory.max", "memory.peak"),
        };
        let root = Path::new(root);
        let mine = root.join(mine.trim_start_matches('/'));
        // A group of version 2 that has processes hands memory to none below it.
        let places = [Some(mine.as_path()), mine.parent(), Some(root)];
        let name = format!("moeba-test-{}", std::process::id());
        for place in places.into_iter().flatten().filter(|place| place.starts_with(root)) {
            let folder = place.join(&name);
            if std::fs::create_dir(&folder).is_err() {
                continue;
            }
            let group = Group { folder, limit, peak };
            if group.set_limit(1 << 40) && group.admits() {
                return Some(group);
            }
        }
        None
    }

    fn set_limit(&self, bytes: u64) -> bool {
        std::fs::write(self.folder.join(self.limit), bytes.to_string()).is_ok()
    }

    /// Runs a command inside.
    fn run(&self, command: &Command) -> Output {
        let mut inside = Command::new("sh");
        let enter = "echo $$ > \"$0\" && exec \"$@\"";
        inside.args(["-c", enter]).arg(self.folder.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args());
        inside.output().unwrap()
    }

    fn admits(&self) -> bool {
        self.run(&Command::new("true")).status.success()
    }

    /// The most that was used since the last call; `None` on older systems.
    fn take_peak(&self) -> Option<u64> {
        let path = self.folder.join(self.peak);
        let peak = std::fs::read_to_string(&path).ok()?.trim().parse().ok();
        let _ = std::fs::write(path, "0");
        peak
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel may need a moment to see that the last process has left.
        for _ in 0..100 {
            match std::fs::remove_dir(&self.folder) {
                Ok(()) => return,
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        eprintln!("{} could not be removed", self.folder.display());
    }
}

struct Model {
    dir: tempfile::TempDir,
    path: PathBuf,
    plan: MemoryPlan,
}

/// A layer of Qwen3-30B-A3B: 324 MiB of experts and 345 MiB of other weights.
fn model() -> Model {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layer.gguf");
    let mut command = moeba();
    command.args(["synth", "qwen3-30b-a3b", "--layers", "1", "--type", "q4_k", "-o"]);
    succeed(command.arg(&path));
    let n_ctx = N_CTX.parse().ok();
    let plan = Engine::plan_of(&path, &EngineOptions { n_ctx, ..Default::default() }).unwrap();
    std::fs::write(dir.path().join("text"), TEXT.repeat(4)).unwrap();
    Model { dir, path, plan }
}

impl Model {
    /// Decodes a text token by token, or answers a prompt, inside the group; what `--stats` says.
    fn stats(&self, group: &Group, subcommand: &str, ram: &[&str]) -> Value {
        let stats = self.dir.path().join("stats.json");
        let _ = std::fs::remove_file(&stats);
        let mut command = moeba();
        command.arg(subcommand).arg(&self.path).args(ram).args(["-c", N_CTX, "-t", "2"]);
        command.arg("--stats").arg(&stats);
        match subcommand {
            "perplexity" => {
                command.args(["-b", "1", "--chunks", "1", "-f"]).arg(self.dir.path().join("text"))
            }
            _ => command.args(["-n", "32", "--temp", "0", "-p", TEXT]),
        };
        let output = group.run(&command);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{ram:?}: {}\n{stderr}", output.status);
        serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap()
    }

    fn others(&self) -> u64 {
        self.plan.sizes.dense_bytes + self.plan.sizes.kv_bytes
    }
}

/// The budget in `stats`, which was kept.
#[track_caller]
fn kept_budget(stats: &Value) -> u64 {
    let number = |key: &str| stats[key].as_u64().unwrap_or_else(|| panic!("{key}: {stats:#}"));
    let budget = number("expert_budget_bytes");
    let most = number("resident_expert_bytes_max");
    assert!(most <= budget, "{most} of {budget}: {stats:#}");
    assert!(most > budget / 4, "{most} of {budget}: {stats:#}");
    assert!(number("demand_bytes") > 0, "{stats:#}");
    budget
}

#[test]
fn budgets_are_kept_under_a_limit() {
    let Some(group) = Group::new() else {
        eprintln!("skipped: no control group with a memory limit can be made here");
        return;
    };
    let model = model();
    let sizes = model.plan.sizes;
    for (ram, percent) in [("25%", 25), ("50%", 50), ("75%", 75)] {
        let limit = model.others() + sizes.expert_bytes * percent / 100 + REST;
        assert!(group.set_limit(limit));
        for subcommand in ["perplexity", "run"] {
            group.take_peak();
            let stats = model.stats(&group, subcommand, &["--ram", ram]);
            let budget = kept_budget(&stats);
            assert!(budget <= sizes.expert_bytes * percent / 100, "{ram}: {budget}");
            // It did run inside.
            let peak = group.take_peak();
            assert!(peak.is_none_or(|p| (sizes.dense_bytes..=limit).contains(&p)), "{peak:?}");
        }
    }
    // By itself: what the limit leaves, less 256 MiB of head-room.
    let limit = model.others() + sizes.expert_bytes / 2 + 256 * MIB;
    assert!(group.set_limit(limit));
    for subcommand in ["perplexity", "run"] {
        let budget = kept_budget(&model.stats(&group, subcommand, &[]));
        let chosen = budget as f64 / sizes.expert_bytes as f64;
        assert!((0.4..=0.5).contains(&chosen), "{subcommand}: {chosen} of the experts");
    }
    // Not even the experts of a token: a sentence, not the end of the process by the kernel.
    assert!(group.set_limit(model.others() + 200 * MIB));
    let output = group.run(moeba().arg("run").arg(&model.path).args(["-p", "a", "-c", N_CTX]));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("available") && stderr.contains("--ram"), "{stderr}");
    dry_runs(&model);
    micro_batches_shrink(&model, &group);
}

/// If there is no room for the buffers of 512 tokens of a prompt at once, there are fewer; if 512
/// were asked for, the refusal says how many fit, and its sum adds up.
fn micro_batches_shrink(model: &Model, group: &Group) {
    let needed = |n: usize| {
        let options = EngineOptions { n_ctx: Some(2048), n_ubatch: Some(n), ..Default::default() };
        let sizes = Engine::plan_of(&model.path, &options).unwrap().sizes;
        let others = sizes.dense_bytes + sizes.kv_bytes + sizes.minimum_bytes;
        // Half of 256 MiB of head-room is for buffers.
        others + sizes.buffer_bytes.max(128 * MIB) + 128 * MIB
    };
    let limit = (needed(512) + needed(64)) / 2;
    assert!(limit > needed(64) + 20 * MIB, "buffers are too small for this test");
    assert!(group.set_limit(limit));
    let run = |more: &[&str]| {
        let mut command = moeba();
        command.arg("run").arg(&model.path).args(["-p", "a", "-n", "2", "-c", "2048", "-v"]);
        group.run(command.args(more))
    };
    let output = run(&[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("computed at once instead of 512 (-ub "), "{stderr}");
    let output = run(&["-ub", "512"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.trim_end().ends_with(" would fit") && stderr.contains("; -ub "), "{stderr}");
    let error = stderr.lines().find(|line| line.starts_with("error: not enough memory")).unwrap();
    let numbers =
        |text: &str| -> Vec<f64> { text.split(' ').filter_map(|word| word.parse().ok()).collect() };
    let (before, parts) = error.split_once('(').unwrap();
    let parts = parts.split(')').next().unwrap();
    assert!(parts.contains("buffers for 512 tokens"), "{error}");
    // The last number of each part: one names the tokens.
    let sum: f64 = parts.split(", ").map(|part| *numbers(part).last().unwrap()).sum();
    let [available, needed] = numbers(before)[..] else { panic!("{error}") };
    assert!((sum - needed).abs() < 1e-6 && available < needed, "{error}");
}

/// The output of `--dry-run` for the same file.
fn dry_runs(model: &Model) {
    let dry_run = |args: &[&str]| {
        let mut command = moeba();
        let output = succeed(command.arg("run").arg(&model.path).arg("--dry-run").args(args));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = dry_run(&["--ram", "50%", "-c", N_CTX]);
    let words = ["324.0 MiB  streamed", "162.0 MiB  memory", "8 of 128 in each of 1 layers"];
    let more =
        ["345.0 MiB  memory", "20.3 MiB", "256.0 KiB  memory, for 128 tokens", "least budget"];
    for word in words.iter().chain(&more) {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    let text = dry_run(&["--ram", "100%", "-c", N_CTX]);
    assert!(text.contains("all resident, in place"), "{text}");
}
