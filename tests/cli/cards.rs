//! Command lines as model cards and guides publish them, with the model's name replaced by MODEL.
//! Each starts, and gives the text that its own settings give without llama.cpp's other flags.
//! Lines of llama-server are left out, as moeba has no server.

use common::cli::{moeba, stderr, succeeded};
use std::path::Path;
use std::process::Output;

struct Card {
    /// The source of the line. Those marked "after" are written from memory of the card.
    origin: &'static str,
    line: &'static str,
    /// The same to moeba.
    plain: &'static str,
}

const RUNS: &[Card] = &[
    Card {
        origin: "unsloth/DeepSeek-V3-GGUF",
        line: "./llama.cpp/llama-cli --model MODEL --cache-type-k q8_0 --threads 16 \
               --prompt '<|User|>What is 1+1?<|Assistant|>'",
        plain: "MODEL -ctk q8_0 -p '<|User|>What is 1+1?<|Assistant|>'",
    },
    Card {
        origin: "unsloth/DeepSeek-R1-bf16",
        line: "./llama.cpp/llama-cli --model MODEL --cache-type-k q8_0 --threads 16 \
               --prompt '<|User|>What is 1+1?<|Assistant|>' -no-cnv",
        plain: "MODEL -ctk q8_0 --raw -p '<|User|>What is 1+1?<|Assistant|>'",
    },
    Card {
        origin: "after unsloth/DeepSeek-R1-0528-GGUF",
        line: "./llama.cpp/llama-cli --model MODEL --cache-type-k q4_0 --threads -1 \
               --n-gpu-layers 99 --prio 3 --temp 0.6 --top_p 0.95 --min_p 0.01 --ctx-size 16384 \
               --seed 3407 -ot '.ffn_.*_exps.=CPU' -no-cnv --prompt '<｜User｜>Hello<｜Assistant｜>'",
        plain: "MODEL -ctk q4_0 --raw --temp 0.6 --top-p 0.95 --min-p 0.01 \
                -p '<｜User｜>Hello<｜Assistant｜>'",
    },
    Card {
        origin: "after unsloth/Qwen3-235B-A22B-GGUF",
        line: "./llama.cpp/llama-cli --model MODEL --threads 32 --ctx-size 16384 --n-gpu-layers 99 \
               -ot '.ffn_.*_exps.=CPU' --seed 3407 --prio 3 --temp 0.6 --min-p 0.0 --top-p 0.95 \
               --top-k 20 -p Hello",
        plain: "MODEL --temp 0.6 --min-p 0 --top-p 0.95 --top-k 20 -p Hello",
    },
    Card {
        origin: "after Qwen/Qwen3-30B-A3B-GGUF",
        line: "./llama-cli -m MODEL --jinja --color -ngl 99 -fa -sm row --temp 0.6 --top-k 20 \
               --top-p 0.95 --min-p 0 --presence-penalty 1.5 -c 40960 -n 32768 --no-context-shift \
               -p Hello",
        plain: "MODEL --temp 0.6 --top-k 20 --top-p 0.95 --min-p 0 --presence-penalty 1.5 \
                -p Hello",
    },
    Card {
        origin: "Qwen/Qwen2-57B-A14B-Instruct-GGUF",
        line: r#"./llama-cli -m MODEL -n 512 -co -i -if -f PROMPT --in-prefix "<|im_start|>user\n"
                 --in-suffix "<|im_end|>\n<|im_start|>assistant\n""#,
        plain: "MODEL -f PROMPT",
    },
    Card {
        origin: "after Qwen/Qwen2.5-7B-Instruct-GGUF",
        line: "./llama-cli -m MODEL -co -cnv -p 'You are a helpful assistant.' -fa -ngl 80 -n 512",
        plain: "MODEL -p 'You are a helpful assistant.'",
    },
    Card {
        origin: "after unsloth/gpt-oss-20b-GGUF",
        line: "./llama.cpp/llama-cli -m MODEL --jinja -ngl 99 --threads -1 --ctx-size 16384 \
               --temp 1.0 --top-p 1.0 --top-k 0.0 -p Hello",
        plain: "MODEL --temp 1 --top-p 1 --top-k 0 -p Hello",
    },
    Card {
        origin: "after ggml-org/gpt-oss-120b-GGUF",
        line: "llama-cli -m MODEL -c 0 -fa --jinja --n-cpu-moe 4 -p Hello",
        plain: "MODEL -p Hello",
    },
    Card {
        origin: "after unsloth/GLM-4.6-GGUF",
        line: "./llama.cpp/llama-cli --model MODEL --jinja --ctx-size 16384 --flash-attn on \
               --temp 1.0 --top-p 0.95 --top-k 40 -ot '.ffn_.*_exps.=CPU' -p Hello",
        plain: "MODEL --temp 1 --top-p 0.95 --top-k 40 -p Hello",
    },
    Card {
        origin: "after unsloth/Kimi-K2-Instruct-GGUF",
        line: "./llama.cpp/llama-cli -m MODEL --threads -1 --n-gpu-layers 99 --temp 0.6 \
               --min_p 0.01 --ctx-size 16384 --seed 3407 -ot '.ffn_.*_exps.=CPU' -p Hello",
        plain: "MODEL --temp 0.6 --min-p 0.01 -p Hello",
    },
    Card {
        origin: "after unsloth/Qwen3-Coder-480B-A35B-Instruct-GGUF",
        line: "./llama.cpp/llama-cli -m MODEL --threads -1 --ctx-size 16384 --n-gpu-layers 99 \
               -ot '.ffn_.*_exps.=CPU' --temp 0.7 --min-p 0.0 --top-p 0.8 --top-k 20 \
               --repeat-penalty 1.05 -p Hello",
        plain: "MODEL --temp 0.7 --min-p 0 --top-p 0.8 --top-k 20 --repeat-penalty 1.05 \
                -p Hello",
    },
    Card {
        origin: "wiki.nixos.org: Llama-cpp, with unsloth/Qwen3-Coder-Next-GGUF",
        line: "llama-cli -m MODEL --temp 1.0 --top-p 0.95 --top-k 40 \
               -p 'briefly explain journalctl in one paragraph'",
        plain: "MODEL --temp 1 --top-p 0.95 --top-k 40 \
                -p 'briefly explain journalctl in one paragraph'",
    },
    Card {
        origin: "TheBloke/Airoboros-L2-70B-2.1-GGUF; Mixtral-8x7B-Instruct-v0.1-GGUF is alike",
        line: r#"./main -t 10 -ngl 32 -m MODEL --color -c 4096 --temp 0.7 --repeat_penalty 1.1 -n -1
                 -p "A chat\nUSER: Write a story about llamas\nASSISTANT:\n""#,
        plain: "MODEL --temp 0.7 --repeat-penalty 1.1 \
                -p 'A chat\nUSER: Write a story about llamas\nASSISTANT:\n'",
    },
    Card {
        origin: "gguf-my-repo, which writes the cards of thousands of repositories",
        line: "llama-cli -m MODEL -p 'The meaning to life and the universe is'",
        plain: "MODEL -p 'The meaning to life and the universe is'",
    },
    Card {
        origin: "MaziyarPanahi/Meta-Llama-3-8B-Instruct-GGUF",
        line: r#"./llama.cpp/main -m MODEL -r '<|eot_id|>'
                 --in-prefix "\n<|start_header_id|>user<|end_header_id|>\n\n"
                 --in-suffix "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
                 -p "You are a helpful, smart, kind, and efficient AI assistant.\n\nHi!" -n 1024"#,
        plain: "MODEL -p 'You are a helpful, smart, kind, and efficient AI assistant.\n\nHi!'",
    },
    Card {
        origin: "unsloth's exports, bartowski, mradermacher and lmstudio-community: \
                 \"Use this model\" on the hub",
        line: "llama-cli -m MODEL --jinja",
        plain: "MODEL",
    },
    Card {
        origin: "llama.cpp's tools/completion/README.md",
        line: "./llama-completion -m MODEL -no-cnv --prompt 'Once upon a time'",
        plain: "MODEL --raw -p 'Once upon a time'",
    },
];

/// The words of a line, with a shell's two sorts of quotes.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

fn demo() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    path.to_str().unwrap().to_owned()
}

/// A line of another program as one of ours.
fn ran(command: &str, line: &str, skip: usize, last: &str, files: &[(&str, &str)]) -> Output {
    let mut args = words(line).split_off(skip);
    for (name, path) in files.iter().copied().chain([("MODEL", &*demo())]) {
        args.iter_mut().filter(|arg| **arg == name).for_each(|arg| *arg = path.to_owned());
    }
    moeba().arg(command).args(args).args(words(last)).output().unwrap()
}

#[test]
fn lines_of_model_cards_run() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = dir.path().join("prompt.txt");
    std::fs::write(&prompt, "What is a branch?\n").unwrap();
    // The last of a flag counts, so that the cards' own sizes can stay in their lines.
    for Card { origin, line, plain } in RUNS {
        let files = [("PROMPT", prompt.to_str().unwrap())];
        let last = match line.contains(" -p ") || line.contains("--prompt") || line.contains(" -f ")
        {
            true => "-n 6 -c 1024 -t 1 --seed 7",
            false => "-n 6 -c 1024 -t 1 --seed 7 -p Hello",
        };
        let card = ran("run", line, 1, last, &files);
        let same = ran("run", plain, 0, last, &files);
        assert_eq!(succeeded(&card), succeeded(&same), "{origin}: {}", stderr(&card));
        assert!(card.stdout.len() > 1, "{origin}");
    }
}

#[test]
fn lines_of_guides_time_and_score() {
    // After llama.cpp's guide to gpt-oss, its tools/llama-bench/README.md, and what owners of
    // Strix Halo machines post; tests are shortened by what stands last.
    for (line, n_rows) in [
        ("llama-bench -m MODEL -fa 1 -b 2048 -ub 2048 -p 8 -n 4 -t 1", 2),
        ("llama-bench -m MODEL -ngl 99 -fa 1 -mmp 0 -p 8 -n 4 -t 1", 2),
        ("./llama-bench -m MODEL -n 0 -n 2 -p 4 -t 1,2", 4),
        ("./llama-bench -m MODEL -d 0,8 -p 4 -n 2 -t 1 -ncmoe 2 -o md", 4),
    ] {
        let out = ran("bench", line, 1, "-r 1 --no-warmup --no-machine", &[]);
        let rows = succeeded(&out).lines().filter(|row| row.contains("±")).count();
        assert_eq!(rows, n_rows, "{line}: {}", stderr(&out));
    }
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("wiki.test.raw");
    std::fs::write(&text, "The package manager installs software. ".repeat(60)).unwrap();
    // After the cards of ubergarm's quants, without the flags of its fork.
    let line = "./build/bin/llama-perplexity -m MODEL -f TEXT --seed 1337 -fa -ctk f16 \
                --ctx-size 512 -ngl 99 -ot exps=CPU --threads 24";
    let files = [("TEXT", text.to_str().unwrap())];
    let card = ran("perplexity", line, 1, "-c 64 -t 1 --chunks 2", &files);
    let same = ran("perplexity", "MODEL -f TEXT", 0, "-c 64 -t 1 --chunks 2", &files);
    let score = |out: &Output| succeeded(out).lines().nth(1).map(str::to_owned);
    assert!(score(&card).is_some_and(|line| line.contains("PPL")));
    assert_eq!(score(&card), score(&same));
}
