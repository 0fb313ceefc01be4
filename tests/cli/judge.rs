//! `imatrix`, `perplexity --kl-divergence` and the scores of tasks, on a model made here.

use common::cli::{Model, N_EXPERTS, N_EXPERTS_USED, N_LAYERS, N_VOCAB, Tiny};
use common::cli::{failed, on, succeeded, tiny};
use moeba::gguf::Gguf;
use serde_json::Value;

const TEXT: &str = "A branch is a name for a line of work. Naming is cheap, so make many of them.";

/// A model and a text beside it.
fn model_and_text() -> (Model, String) {
    let model = tiny(Tiny::default());
    let file = model.file("text");
    std::fs::write(&file, TEXT).unwrap();
    let name = file.to_str().unwrap().to_owned();
    (model, name)
}

fn floats(gguf: &Gguf, name: &str) -> Vec<f32> {
    let tensor = gguf.require_tensor(name).unwrap();
    let bytes = gguf.bytes(tensor).as_chunks::<4>().0;
    bytes.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn an_importance_matrix_has_a_sum_for_each_matrix() {
    let (model, text) = model_and_text();
    let path = model.file("imatrix.gguf");
    let out = path.to_str().unwrap();
    let ran = on(&model, "imatrix", &["-f", &text, "-c", "16", "-o", out]);
    assert!(succeeded(&ran).contains("Final estimate: PPL = "));
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.require_str("general.type").unwrap(), "imatrix");
    assert_eq!(gguf.u32("imatrix.chunk_count").unwrap(), Some(4));
    assert_eq!(gguf.u32("imatrix.chunk_size").unwrap(), Some(16));
    let datasets = gguf.strings("imatrix.datasets").unwrap().unwrap();
    assert_eq!(datasets, [text.as_bytes()]);
    // Queries, keys, values, outputs, routers, and three of experts.
    assert_eq!(gguf.tensors().len(), 2 * 8 * N_LAYERS as usize);
    let (n_tokens, n_pairs) = (64.0, 64.0 * N_EXPERTS_USED as f32);
    for layer in 0..N_LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        for part in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"] {
            assert_eq!(floats(&gguf, &(name(part) + ".counts")), [n_tokens], "{part}");
        }
        let of = |part: &str, end: &str| floats(&gguf, &(name(part) + end));
        assert_eq!(of("attn_q", ".in_sum2"), of("attn_v", ".in_sum2"));
        assert_eq!(of("ffn_gate_exps", ".in_sum2"), of("ffn_up_exps", ".in_sum2"));
        let counts = of("ffn_down_exps", ".counts");
        assert_eq!(counts.len() as u64, N_EXPERTS);
        assert_eq!(counts.iter().sum::<f32>(), n_pairs);
        // Each token's row of the router is in the rows of its experts.
        let up = of("ffn_up_exps", ".in_sum2");
        for (i, sum) in of("ffn_gate_inp", ".in_sum2").iter().enumerate() {
            let of_experts: f32 = up.iter().skip(i).step_by(32).sum();
            let expected = N_EXPERTS_USED as f32 * sum;
            assert!((of_experts - expected).abs() < 1e-3 * expected, "{of_experts} {expected}");
        }
    }
    // Neither batches nor streaming change a sum by more than the order of its rows.
    let streamed = model.file("streamed.gguf");
    let args = ["-f", &text, "-c", "16", "-ub", "5", "--ram", "40%", "--no-ppl"];
    let args = [&args[..], &["-o", streamed.to_str().unwrap()]].concat();
    assert!(!succeeded(&on(&model, "imatrix", &args)).contains("PPL"));
    let streamed = Gguf::open(&streamed).unwrap();
    for tensor in gguf.tensors() {
        let (a, b) = (floats(&gguf, &tensor.name), floats(&streamed, &tensor.name));
        let near = a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-5 * a.abs());
        assert!(near && a.len() == b.len(), "{}", tensor.name);
    }
    // A second run adds to the first.
    let sum = model.file("sum.gguf");
    let args = ["-f", &text, "-c", "16", "--in-file", out, "--process-output", "-o"];
    succeeded(&on(&model, "imatrix", &[&args[..], &[sum.to_str().unwrap()]].concat()));
    let sum = Gguf::open(&sum).unwrap();
    assert_eq!(floats(&sum, "blk.0.attn_q.weight.counts"), [128.0]);
    assert_eq!(floats(&sum, "output.weight.counts"), [64.0]);
    assert_eq!(sum.u32("imatrix.chunk_count").unwrap(), Some(8));
}

#[test]
fn experts_without_data_are_named() {
    let (model, text) = model_and_text();
    let out = model.file("imatrix.gguf");
    let args = ["-f", &text, "-c", "4", "--chunks", "1", "-o", out.to_str().unwrap()];
    let ran = on(&model, "imatrix", &args);
    succeeded(&ran);
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(said.contains("blk.0.ffn_down_exps.weight: no data for "), "{said}");
    // It is a file like any other that the command writes.
    std::fs::write(model.file("notes"), "mine").unwrap();
    let args =
        ["-f", &text, "-c", "4", "-o", model.file("notes").to_str().unwrap()].map(str::to_owned);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    failed(&on(&model, "imatrix", &args), 1, &["not replaced"]);
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let (model, text) = model_and_text();
    let base = model.file("base.kld");
    let base = base.to_str().unwrap();
    let plain = succeeded(&on(&model, "perplexity", &["-f", &text, "-c", "16"])).to_owned();
    let saved = on(&model, "perplexity", &["-f", &text, "-c", "16", "--kl-divergence-base", base]);
    let final_line = |text: &str| text.lines().find(|l| l.starts_with("Final")).map(str::to_owned);
    assert_eq!(final_line(succeeded(&saved)), final_line(&plain));
    // Magic, three numbers, the tokens, and seven rows a window.
    let n_bytes = 20 + 4 * 64 + 4 * 7 * (8 + 2 * (N_VOCAB + 1));
    assert_eq!(std::fs::metadata(base).unwrap().len(), n_bytes);
    let stats = model.file("stats.json");
    let args = ["--kl-divergence", "--kl-divergence-base", base, "--stats"];
    let ran = on(&model, "perplexity", &[&args[..], &[stats.to_str().unwrap()]].concat());
    let table = succeeded(&ran);
    for line in ["Mean PPL(Q) ", "Mean    KLD: ", "99.9%   KLD: ", "RMS Δp    : ", "Same top p: "]
    {
        assert!(table.lines().any(|l| l.starts_with(line)), "{line}: {table}");
    }
    let stats: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    let number = |key: &str| stats[key].as_f64().unwrap();
    assert_eq!(stats["scored_tokens"], 28);
    assert!(number("kl_divergence").abs() < 1e-4, "{stats}");
    assert!((number("perplexity") / number("perplexity_base") - 1.0).abs() < 1e-3, "{stats}");
    assert!(number("same_top_share") > 0.9, "{stats}");

    failed(&on(&model, "perplexity", &["--kl-divergence"]), 2, &["--kl-divergence-base"]);
    let args = |base| ["--kl-divergence", "--kl-divergence-base", base];
    failed(&on(&model, "perplexity", &args(&text)), 1, &["text", "probabilities"]);
    let cut = model.file("cut.kld");
    let whole = std::fs::read(base).unwrap();
    std::fs::write(&cut, &whole[..whole.len() - 1]).unwrap();
    let cut = cut.to_str().unwrap();
    failed(&on(&model, "perplexity", &args(cut)), 1, &["cut.kld", &n_bytes.to_string()]);
    let mut other = whole.clone();
    other[12..16].copy_from_slice(&2u32.to_le_bytes());
    std::fs::write(cut, &other).unwrap();
    failed(&on(&model, "perplexity", &args(cut)), 1, &["vocabulary of 259"]);
}

#[test]
fn tasks_are_scored() {
    let model = tiny(Tiny::default());
    let file = model.file("tasks");
    let name = file.to_str().unwrap();
    let endings = ["falls.", "flies away.", "is a cat.", "sleeps."];
    let tasks: Vec<String> =
        (0..4).map(|i| format!("A bird\n{i}\n{}", endings.join("\n"))).collect();
    std::fs::write(&file, tasks.join("\n") + "\n").unwrap();
    let stats = model.file("stats.json");
    let run = |args: &[&str]| {
        let args = [&["-f", name, "--stats", stats.to_str().unwrap()][..], args].concat();
        let text = succeeded(&on(&model, "perplexity", &args)).to_owned();
        let json: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
        (text, json)
    };
    // The same ending is the likeliest in each, and one of the four tasks says that it is right.
    let (text, json) = run(&["--hellaswag"]);
    assert!(text.contains("\n4\t25.00000000%\t["), "{text}");
    assert_eq!((&json["right_answers"], &json["tasks"]), (&1.into(), &4.into()));
    assert_eq!(run(&["--hellaswag", "--hellaswag-tasks", "3"]).1["tasks"], 3);
    assert_eq!(run(&["--hellaswag", "-b", "3"]).1["right_answers"], 1);

    let lines = "0,The _ is red.,ball,house,1\n1,The _ is red.,ball,house,2\nlast";
    std::fs::write(&file, lines).unwrap();
    let (text, json) = run(&["--winogrande"]);
    assert_eq!((&json["right_answers"], &json["tasks"]), (&1.into(), &2.into()), "{text}");
    assert!(text.contains("Final Winogrande score(2 tasks): 50.0000 +/- 50.0000"), "{text}");

    let mut bytes = 1u32.to_le_bytes().to_vec();
    bytes.extend(8u32.to_le_bytes());
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    text(&mut bytes, "A bird");
    bytes.extend(4u32.to_le_bytes());
    endings.iter().for_each(|ending| text(&mut bytes, ending));
    bytes.extend([1u32, 1, 1, 1, 0].iter().flat_map(|n| n.to_le_bytes()));
    std::fs::write(&file, &bytes).unwrap();
    let (text, json) = run(&["--multiple-choice"]);
    assert_eq!(json["accuracy"], 1.0, "{text}");

    failed(&on(&model, "perplexity", &["-f", name, "--hellaswag"]), 1, &["tasks"]);
    let both = ["-f", name, "--hellaswag", "--winogrande"];
    failed(&on(&model, "perplexity", &both), 2, &["--winogrande"]);
}
