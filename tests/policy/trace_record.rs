//! `moeba trace record`: what a trace holds is what the model computed, wherever its experts were;
//! bad input ends in a sentence.

use std::path::{Path, PathBuf};

use common::Npy;
use common::cli::{Model, Tiny, failed, moeba, succeeded, tiny};
use moeba::gguf::Gguf;
use moeba::policy::Phase;
use moeba::trace::format::{Header, Precision, Request, Trace};

const TEXT: &str = "A branch is a name for a line of work. Naming is cheap, so make many of them.\n\
    Nobody keeps count! When the work is done, the branch is merged; its name may go.\n\n\
    Was it worth it? Ask again in a year. By then the tests will have had their say.\n";

/// Dense and MoE layers in turn.
const MIXED: &str = "qwen3moe_mixed";

fn record(model: &Path, text: &Path, name: &str, args: &[&str]) -> PathBuf {
    let out = text.with_file_name(name);
    let mut command = moeba();
    command.args(["trace", "record"]).arg(model).arg("-f").arg(text).arg("-o").arg(&out);
    succeeded(&command.args(args).output().unwrap());
    out
}

fn write_text(dir: &Path) -> PathBuf {
    let path = dir.join("prose.txt");
    std::fs::write(&path, TEXT).unwrap();
    path
}

/// A golden model in f32, and a trace of it with everything in it.
struct Recorded {
    model: PathBuf,
    trace: Trace,
    dir: tempfile::TempDir,
}

fn recorded(name: &str, args: &[&str]) -> Recorded {
    let dir = tempfile::tempdir().unwrap();
    let model = common::convert_golden(name, "f32", dir.path());
    let text = write_text(dir.path());
    let all = ["--requests", "3", "-p", "4-9", "-n", "5", "--exact", "--hidden", "--ahead", "2"];
    let path = record(&model, &text, "all.mtrace", &[&all[..], args].concat());
    Recorded { model, trace: Trace::open(&path).unwrap_or_else(|e| panic!("{e}")), dir }
}

impl Recorded {
    fn tensor(&self, gguf: &Gguf, name: &str) -> Vec<f32> {
        let info = gguf.tensor(name).unwrap_or_else(|| panic!("no {name}"));
        let bytes = gguf.bytes(info).chunks_exact(4);
        bytes.map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Chosen experts, [layers, tokens, k], as `logits` says for the same tokens.
    fn chosen(&self, tokens: &[u32]) -> Npy {
        let list = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let experts = self.dir.path().join("experts.npy");
        let mut command = moeba();
        command.arg("logits").arg(&self.model).args(["--tokens", &list]);
        command.arg("-o").arg(self.dir.path().join("logits.npy")).arg("--experts").arg(&experts);
        common::succeed(&mut command);
        Npy::read(&experts)
    }

    fn check_chosen(&self, request: &Request) {
        let trace = &self.trace;
        let ids: Vec<u32> = request.tokens.clone().map(|t| trace.token_id(t)).collect();
        let wanted = self.chosen(&ids);
        for (i, wanted) in wanted.i32s().chunks_exact(wanted.shape[2]).enumerate() {
            let (layer, token) = (i / ids.len(), request.tokens.start + i % ids.len());
            let got: Vec<i32> = trace.chosen(token, layer).iter().map(|e| *e as i32).collect();
            let dense = trace.header().layers[layer].n_experts == 0;
            assert_eq!(got, if dense { &[] } else { wanted }, "token {token}, layer {layer}");
        }
    }
}

#[test]
fn the_header_describes_the_model() {
    let Recorded { trace, .. } = recorded(MIXED, &["--kind", "a kind"]);
    let Header { model, n_embd, k, layers, precision, hidden, ahead, .. } = trace.header();
    assert!(model.contains(MIXED), "{model}");
    assert_eq!((*n_embd, *k, *precision, *hidden, *ahead), (64, 3, Precision::Exact, true, 2));
    let n_experts: Vec<_> = layers.iter().map(|layer| layer.n_experts).collect();
    assert_eq!(n_experts, [0, 8, 0, 8]);
    // Three matrices of 64 by 64 floats; a slot is at least that.
    assert_eq!((layers[1].expert_bytes, layers[1].n_granules), (3 * 64 * 64 * 4, 1));
    assert!(layers[1].slot_bytes >= layers[1].expert_bytes);
    assert_eq!(trace.requests().len(), 3);
    for request in trace.requests() {
        assert_eq!(request.kind, "a kind");
        assert!((4..=9).contains(&request.n_prompt));
        assert_eq!(request.tokens.len(), request.n_prompt + 5);
        let prompt = request.tokens.start..request.tokens.start + request.n_prompt;
        for token in request.tokens.clone() {
            assert_eq!(trace.phase(token) == Phase::Prompt, prompt.contains(&token));
        }
    }
}

/// Prompts and decode steps, though `logits` evaluates all at once.
#[test]
fn chosen_experts_are_those_that_logits_says() {
    let further = ["arctic_mixed", "deepseek_v3", "gpt_oss", "phimoe", "qwen3next"];
    for name in [MIXED, "qwen2moe_mixed", "mixtral"].into_iter().chain(further) {
        let recorded = recorded(name, &[]);
        recorded.trace.requests().iter().for_each(|request| recorded.check_chosen(request));
    }
}

#[test]
fn tokens_are_the_texts() {
    let recorded = recorded(MIXED, &["--seed", "3"]);
    let trace = &recorded.trace;
    for request in trace.requests() {
        let ids = request.tokens.clone().map(|token| trace.token_id(token).to_string());
        let ids = ids.collect::<Vec<_>>().join(",");
        let output = moeba().arg("detokenize").arg(&recorded.model).arg(ids).output().unwrap();
        let text = succeeded(&output);
        let (at, _) = TEXT.match_indices(text.trim_end_matches('\n')).next().expect("in the text");
        let before = &TEXT[..at];
        assert!(at == 0 || before.ends_with('\n') || before.ends_with(' '), "{text}");
    }
}

#[test]
fn embeddings_and_probabilities_are_the_models() {
    let recorded = recorded(MIXED, &[]);
    let (trace, gguf) = (&recorded.trace, Gguf::open(&recorded.model).unwrap());
    let table = recorded.tensor(&gguf, "token_embd.weight");
    let mut probs = Vec::new();
    for token in 0..trace.n_tokens() {
        let id = trace.token_id(token) as usize;
        assert_eq!(trace.embedding(token), &table[id * 64..][..64]);
        for layer in [1, 3] {
            trace.probs(token, layer, &mut probs);
            assert!((probs.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            let mut order: Vec<u32> = (0..8).collect();
            order.sort_by(|a, b| probs[*b as usize].total_cmp(&probs[*a as usize]));
            assert_eq!(trace.chosen(token, layer), &order[..3]);
        }
    }
}

/// softmax(router · h)
fn route(router: &[f32], h: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(h).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    let logits: Vec<f64> = router.chunks_exact(h.len()).map(dot).collect();
    let sum: f64 = logits.iter().map(|l| l.exp()).sum();
    logits.iter().map(|l| (l.exp() / sum) as f32).collect()
}

/// The recorded input of a router gives its probabilities. As it is the normalised activation times
/// the norm's weights, it also gives the input of a later router, and so its look-ahead.
#[test]
fn hidden_states_explain_probabilities_here_and_ahead() {
    let recorded = recorded(MIXED, &[]);
    let (trace, gguf) = (&recorded.trace, Gguf::open(&recorded.model).unwrap());
    let of =
        |layer: usize, part: &str| recorded.tensor(&gguf, &format!("blk.{layer}.{part}.weight"));
    let alike = |got: &[f32], wanted: &[f32]| {
        assert_eq!(got.len(), wanted.len());
        got.iter().zip(wanted).for_each(|(a, b)| assert!((a - b).abs() < 1e-3, "{a}, not {b}"));
    };
    let (mut hidden, mut probs) = (Vec::new(), Vec::new());
    for token in 0..trace.n_tokens() {
        // From the last MoE layer around the end, but no farther.
        for (layer, targets) in [(0, [None, None]), (1, [Some(3), None]), (3, [Some(1), None])] {
            trace.hidden(token, layer, &mut hidden);
            if trace.phase(token) == Phase::Prompt || layer == 0 {
                assert!(hidden.is_empty() && trace.ahead(token, layer, 1, &mut probs).is_none());
                continue;
            }
            trace.probs(token, layer, &mut probs);
            alike(&probs, &route(&of(layer, "ffn_gate_inp"), &hidden));
            for (distance, target) in (1..).zip(targets) {
                assert_eq!(trace.ahead(token, layer, distance, &mut probs), target);
                let Some(target) = target else { continue };
                let (here, there) = (of(layer, "ffn_norm"), of(target, "ffn_norm"));
                let weights = here.iter().zip(&there);
                let seen = hidden.iter().zip(weights).map(|(h, (here, there))| h / here * there);
                let seen: Vec<f32> = seen.collect();
                alike(&probs, &route(&of(target, "ffn_gate_inp"), &seen));
            }
        }
    }
}

/// The traces that tables are made of, against the model that is in the repository.
#[test]
fn the_committed_trace_is_of_the_demo_model() {
    let model = common::repo().join("models/demo/moeba-demo.gguf");
    let open = |name: &str| {
        let path = common::repo().join("bench/traces").join(name);
        Trace::open(&path).unwrap_or_else(|e| panic!("{e}"))
    };
    let (trace, sibling) = (open("demo.mtrace"), open("sibling.mtrace"));
    assert_eq!(trace.header().key, Gguf::open(&model).unwrap().key());
    assert_eq!((trace.header().layers[0].n_experts, sibling.header().layers[0].n_experts), (32, 8));
    for trace in [&trace, &sibling] {
        for kind in ["prose", "reference", "code"] {
            assert_eq!(trace.requests().iter().filter(|r| r.kind == kind).count(), 7);
        }
    }
    let recorded = Recorded { model, trace, dir: tempfile::tempdir().unwrap() };
    recorded.check_chosen(&recorded.trace.requests()[10]);
}

/// Streaming, threads and batches change nothing; what is compact is smaller.
#[test]
fn a_trace_is_a_function_of_model_and_text() {
    let model = tiny(Tiny::default());
    let text = write_text(model.dir.path());
    let args = ["--requests", "4", "-p", "20", "-n", "8"];
    let bytes = |name: &str, more: &[&str]| {
        std::fs::read(record(&model.path, &text, name, &[&args, more].concat())).unwrap()
    };
    let reference = bytes("a", &[]);
    assert_eq!(bytes("b", &["--ram", "50%", "--io", "pread", "-t", "1"]), reference);
    assert_eq!(bytes("c", &["-ub", "7", "-t", "3", "--policy", "mixtral-offloading"]), reference);
    assert_ne!(bytes("d", &["--seed", "1"]), reference);
    assert!(bytes("e", &["--exact"]).len() > 2 * reference.len());
    assert!(bytes("f", &["--ahead", "0"]).len() < reference.len());
}

#[test]
fn what_the_model_makes_of_a_prompt_can_be_recorded() {
    let recorded = recorded(MIXED, &["--generate", "--seed", "5"]);
    let trace = &recorded.trace;
    assert_eq!(trace.requests().len(), 3);
    for request in trace.requests() {
        assert!((4..=9).contains(&request.n_prompt));
        let ids: Vec<u32> = request.tokens.clone().map(|t| trace.token_id(t)).collect();
        // It may say that it is done before.
        assert!(ids.len() <= request.n_prompt + 5);
        assert_eq!(recorded.chosen(&ids).shape[1], ids.len());
    }
}

#[test]
fn bad_input_is_named_in_one_sentence() {
    let model = tiny(Tiny::default());
    let text = write_text(model.dir.path());
    let out = model.file("x.mtrace");
    let run = |model: &Model, args: &[&str]| {
        let mut command = moeba();
        command.args(["trace", "record"]).arg(&model.path).arg("-f").arg(&text);
        command.args(args).output().unwrap()
    };
    let o = ["-o", out.to_str().unwrap()];
    let with = |args: &[&str]| run(&model, &[&o[..], args].concat());
    failed(&with(&["--kind", "a", "--kind", "b"]), 2, &["--kind", "one kind for each file"]);
    failed(&with(&["-p", "999"]), 1, &["prose.txt", "1063"]);
    for (args, word) in [
        (["-p", "0"], "--n-prompt"),
        (["-p", "9-8"], "--n-prompt"),
        (["--ahead", "7"], "0 to 6"),
        (["--requests", "0"], "--requests"),
        (["--seed", "-1"], "--seed"),
    ] {
        failed(&with(&args), 2, &[word]);
    }
    failed(&with(&["-f", "/nonexistent.txt"]), 1, &["/nonexistent.txt"]);
    failed(&run(&model, &["-p", "8", "-n", "1", "-o", "/dev/null"]), 1, &["/dev/null"]);
    failed(&run(&model, &[]), 2, &["--output"]);
    failed(&moeba().args(["trace", "record"]).output().unwrap(), 2, &["MODEL"]);
    let broken = tiny(Tiny { broken: true, ..Tiny::default() });
    let args = [&o[..], &["-p", "8", "-n", "2", "--generate", "--requests", "1"]].concat();
    failed(&run(&broken, &args), 1, &[]);
    assert!(!out.exists(), "a failed run left its file");
    let left = std::fs::read_dir(model.dir.path()).unwrap().count();
    assert_eq!(left, 2, "a failed run left a temporary file");
}

#[test]
fn a_dense_model_has_nothing_to_record() {
    let dir = tempfile::tempdir().unwrap();
    let model = common::convert_golden("llama", "f32", dir.path());
    let text = write_text(dir.path());
    let mut command = moeba();
    command.args(["trace", "record"]).arg(&model).arg("-f").arg(&text).arg("-o");
    let output = command.arg(dir.path().join("x.mtrace")).output().unwrap();
    failed(&output, 1, &["llama", "no layer has routed experts"]);
}
