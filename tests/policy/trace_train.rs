//! `moeba trace train`: a predictor is learned from a trace, kept in the model's profile and used
//! by a run; bad input ends in a sentence and loses nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::cli::{failed, moeba, succeeded};
use moeba::policy::papers::finemoe::{DISTANCE_SECTION, restore_distance, save_distance};
use moeba::policy::papers::prescope::llapor::{HELD_OUT_SECTION, restore_held_out};
use moeba::policy::{LlaPor, Measured, Profile, Shape};
use moeba::trace::format::Trace;
use moeba::train::LlaporReport;

const TEXT: &str = "A branch is a name for a line of work. Naming is cheap, so make many of them.\n\
    Nobody keeps count! When the work is done, the branch is merged; its name may go.\n\n\
    Was it worth it? Ask again in a year. By then the tests will have had their say.\n";

/// Dense and MoE layers in turn: 0, 8, 0 and 8 experts.
const MIXED: &str = "qwen3moe_mixed";

struct Recorded {
    model: PathBuf,
    trace: PathBuf,
    dir: tempfile::TempDir,
}

fn recorded(args: &[&str]) -> Recorded {
    let dir = tempfile::tempdir().unwrap();
    let model = common::convert_golden(MIXED, "f32", dir.path());
    let text = dir.path().join("prose.txt");
    std::fs::write(&text, TEXT).unwrap();
    let trace = dir.path().join("x.mtrace");
    let mut command = moeba();
    command.args(["trace", "record"]).arg(&model).arg("-f").arg(&text).arg("-o").arg(&trace);
    command.args(["--requests", "6", "-p", "4", "-n", "12"]).args(args);
    succeeded(&command.output().unwrap());
    Recorded { model, trace, dir }
}

fn train(trace: &Path, profile: &Path, args: &[&str]) -> Output {
    let mut command = moeba();
    command.args(["trace", "train"]).arg(trace).arg("-o").arg(profile);
    command.args(["--epochs", "2"]).args(args).output().unwrap()
}

#[test]
fn a_predictor_is_learned_kept_and_used() {
    let Recorded { model, trace, dir } = recorded(&["--hidden"]);
    let (profile, csv) = (dir.path().join("x.moeba"), dir.path().join("x.csv"));
    let report = ["--report", csv.to_str().unwrap()];
    let output = train(&trace, &profile, &report);
    let printed = succeeded(&output);
    assert!(
        printed.contains("| layer | LLaPor | LLaPor two ahead | gate | statistics |"),
        "{printed}"
    );
    assert!(["| 1 |", "| 3 |"].iter().all(|row| printed.contains(row)), "{printed}");

    let opened = Trace::open(&trace).unwrap();
    let key = opened.header().key;
    let whole = std::fs::read(&profile).unwrap();
    let shape = Shape::of_model(vec![0, 8, 0, 8], 3);
    LlaPor::from_profile(&shape, &Profile::decode(&whole, &key).unwrap(), false).unwrap();

    let report = LlaporReport::parse(&std::fs::read_to_string(&csv).unwrap()).unwrap();
    assert_eq!((report.layers(), report.k()), (vec![1, 3], Some(3)));
    let llapor = LlaPor::from_profile(&shape, &Profile::decode(&whole, &key).unwrap(), false);
    assert!(llapor.unwrap().model().has_second());
    // Both layers are predicted from themselves, of the token before.
    let second = |layer, measure| report.get(layer, "llapor-2", measure).unwrap();
    assert_eq!((second(1, "samples"), second(3, "samples")), (8.0, 8.0));
    assert!(second(3, "top3") <= 1.0 && second(3, "training_s") > 0.0);
    for predictor in ["llapor", "gate", "statistics"] {
        // Of 72 tokens 9 are held out; the first layer has none to predict a text's first one by.
        assert_eq!(report.get(3, predictor, "samples"), Some(9.0));
        assert_eq!(report.get(1, predictor, "samples"), Some(8.0));
        let hits = report.get(3, predictor, "top3").unwrap();
        assert!(hits > 0.0 && hits <= 1.0, "{predictor}: {hits}");
    }

    for layer in [1, 3] {
        let time = |measure| report.get(layer, "llapor", measure).unwrap();
        assert!(time("training_s") > 0.0 && time("prediction_us") > 0.0);
        assert_eq!(report.get(layer, "gate", "prediction_us"), None);
    }

    // What was in the profile stays, and a seed makes one network.
    let mut other = Profile::default();
    other.set("another policy's", vec![1, 2, 3]);
    std::fs::write(&profile, other.encode(&key)).unwrap();
    succeeded(&train(&trace, &profile, &[]));
    other.merge(&Profile::decode(&whole, &key).unwrap());
    assert_eq!(std::fs::read(&profile).unwrap(), other.encode(&key));

    let mut command = moeba();
    command.arg("run").arg(&model).args(["--raw", "-p", "A branch", "-n", "4", "--ram", "50%"]);
    command.args(["--policy", "prescope", "--profile"]).arg(&profile);
    succeeded(&command.output().unwrap());
}

/// FineMoE's prefetch distance as the run reports it.
fn distance_in_use(model: &Path, profile: &Path) -> usize {
    let mut command = moeba();
    command.arg("run").arg(model).args(["--raw", "-p", "A branch", "-n", "12", "--ram", "50%"]);
    let output =
        command.args(["-v", "--policy", "finemoe", "--profile"]).arg(profile).output().unwrap();
    succeeded(&output);
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(!log.contains("not used"), "{log}");
    let (_, said) =
        log.split_once("FineMoE: prefetch distance ").unwrap_or_else(|| panic!("{log}"));
    said.split_once(',').unwrap().0.parse().unwrap()
}

/// The distance with the least waiting in the printed table.
fn least_waiting(printed: &str) -> usize {
    let (_, table) = printed.split_once("| layers ahead |").unwrap_or_else(|| panic!("{printed}"));
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        (cells[1].parse::<usize>().unwrap(), cells[4].parse::<f64>().unwrap())
    };
    let rows: Vec<_> = rows.map(row).collect();
    assert_eq!(rows.iter().map(|(distance, _)| *distance).collect::<Vec<_>>(), [1, 2]);
    rows.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0
}

#[test]
fn a_prefetch_distance_is_profiled_from_measured_times_and_used() {
    let Recorded { model, trace, dir } = recorded(&["--hidden"]);
    let key = Trace::open(&trace).unwrap().header().key;
    let shape = Shape::of_model(vec![0, 8, 0, 8], 3);
    let profile = dir.path().join("x.moeba");
    let read = || Profile::decode(&std::fs::read(&profile).unwrap(), &key).unwrap();
    let write = |sections: &Profile| std::fs::write(&profile, sections.encode(&key)).unwrap();

    // The paper's three, of which there are two; the run measures what things take.
    assert_eq!(distance_in_use(&model, &profile), 2);
    let cold = read();
    assert_eq!(cold.get(DISTANCE_SECTION), None);
    let measured = Measured::restore(cold.get(Measured::SECTION).unwrap()).unwrap();
    assert!(measured.costs.load_ns > 0.0 && measured.costs.experts_ns > 0.0, "{measured:?}");
    assert!(measured.absent > 0.0, "{measured:?}");

    let best = least_waiting(succeeded(&train(&trace, &profile, &[])));
    let mut warm = read();
    assert_eq!(restore_distance(&shape, warm.get(DISTANCE_SECTION).unwrap()), Ok(best));
    assert_eq!(distance_in_use(&model, &profile), best);
    // The section decides, and the store, which was saved with another distance, goes on.
    save_distance(3 - best, &mut warm);
    write(&warm);
    assert_eq!(distance_in_use(&model, &profile), 3 - best);

    // Times that cannot be are refused; then a machine has to be named.
    warm.set(Measured::SECTION, vec![1, 2, 3]);
    write(&warm);
    let output = train(&trace, &profile, &[]);
    assert!(!succeeded(&output).contains("layers ahead"));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("measured is not used: it has 3 bytes, expected 44"), "{log}");
    let modelled = ["--machine", "rtx3090", "--sizes", "mixtral-8x7b", "--budget", "25"];
    let best = least_waiting(succeeded(&train(&trace, &profile, &modelled)));
    assert_eq!(restore_distance(&shape, read().get(DISTANCE_SECTION).unwrap()), Ok(best));
    failed(&train(&trace, &profile, &["--budget", "25"]), 2, &["--machine"]);
}

/// Without --ahead there is no gate to compare with; few tokens are spread over all requests.
#[test]
fn few_tokens_do() {
    let Recorded { trace, dir, .. } = recorded(&["--hidden", "--ahead", "0"]);
    let output = train(&trace, &dir.path().join("x.moeba"), &["--tokens", "20"]);
    let printed = succeeded(&output);
    assert!(printed.contains("20 tokens") && printed.contains("— |"), "{printed}");
}

#[test]
fn bad_input_is_named_in_one_sentence() {
    let Recorded { model, trace, dir } = recorded(&[]);
    let profile = dir.path().join("x.moeba");
    failed(&train(&trace, &profile, &[]), 1, &["x.mtrace", "--hidden"]);
    failed(&train(&model, &profile, &[]), 1, &["gguf", "trace"]);
    failed(&train(Path::new("/nonexistent"), &profile, &[]), 1, &["/nonexistent"]);
    failed(&train(&trace, &profile, &["--epochs", "0"]), 2, &["--epochs"]);
    failed(&train(&trace, &profile, &["--tokens", "0"]), 2, &["--tokens"]);
    failed(&moeba().args(["trace", "train"]).arg(&trace).output().unwrap(), 2, &["--output"]);

    let Recorded { trace, .. } = &recorded(&["--hidden"]);
    failed(&train(trace, &profile, &["--tokens", "2"]), 1, &["2 sampled tokens are too few"]);
    // A model that was named by mistake is still there.
    let whole = std::fs::read(&model).unwrap();
    failed(&train(trace, &model, &[]), 1, &["not a moeba profile"]);
    assert_eq!(std::fs::read(&model).unwrap(), whole);
    assert!(!profile.exists(), "a failed run left its file");
    let left = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 3, "a failed run left a temporary file");
}

/// Before anything is replayed.
#[test]
fn networks_that_cannot_be_judged_are_named_in_one_sentence() {
    let Recorded { trace, dir, .. } = recorded(&["--hidden"]);
    let profile = dir.path().join("x.moeba");
    let replay = |full: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moeba-lab"));
        command.arg("tables").arg(&trace).arg("-o").arg(dir.path());
        command.arg("--full").arg(full).arg("--networks").arg(&profile).output().unwrap()
    };
    failed(&replay(&trace), 1, &["x.moeba"]);
    let key = Trace::open(&trace).unwrap().header().key;
    std::fs::write(&profile, Profile::default().encode(&key)).unwrap();
    failed(&replay(&trace), 1, &["x.moeba has no networks", "trace train"]);
    failed(
        &train(&trace, &profile, &["--held-out", "100"]),
        2,
        &["--held-out", "between 0 and 100"],
    );
    succeeded(&train(&trace, &profile, &["--held-out", "40"]));
    let whole = Profile::decode(&std::fs::read(&profile).unwrap(), &key).unwrap();
    // Of 72 tokens 29, so that two requests of twelve are new.
    assert_eq!(restore_held_out(whole.get(HELD_OUT_SECTION).unwrap()), Ok(29));
    let mut without = Profile::default();
    without.set(LlaPor::SECTION, whole.get(LlaPor::SECTION).unwrap().to_vec());
    std::fs::write(&profile, without.encode(&key)).unwrap();
    failed(&replay(&trace), 1, &["x.moeba has no networks", "held-out is missing"]);
    let Recorded { trace: blind, .. } = &recorded(&[]);
    failed(&replay(blind), 1, &["--full trace", "--hidden"]);
}
