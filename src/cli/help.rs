//! Additions to clap's help: examples and variables with `--help`; `-h` shows only the flags that
//! people use most.

use super::environment;
use clap::builder::Styles;
use clap::{Arg, Command};
use std::fmt::Write;

/// (what it does, the command line)
type Example = (&'static str, &'static str);

/// Two examples for each command, by its name and those of the commands it is in.
const EXAMPLES: &[(&str, [Example; 2])] = &[
    (
        "moeba",
        [
            ("Answer one question", "moeba run model.gguf -p \"What is a branch?\""),
            ("Download a model and chat", "moeba run -hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M"),
        ],
    ),
    (
        "moeba run",
        [
            (
                "Answer one question with a model of Hugging Face",
                "moeba run -hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M -p \"What is a branch?\"",
            ),
            (
                "Chat within 8 GiB for experts; the others come from disk",
                "moeba run model.gguf --ram 8G -c 8192",
            ),
        ],
    ),
    (
        "moeba serve",
        [
            (
                "Serve all models of a folder; those that are idle for 10 minutes leave memory",
                "moeba serve --models-dir ~/models --sleep-idle-seconds 600",
            ),
            (
                "Serve a model to other machines, to four clients at a time",
                "moeba serve model.gguf --host 0.0.0.0 --api-key SECRET --parallel 4 -c 32768",
            ),
        ],
    ),
    (
        "moeba experts",
        [
            (
                "Compute experts for another machine, with 24 GiB of them in memory",
                "moeba experts model.gguf --host 0.0.0.0 --api-key SECRET --ram 24G",
            ),
            (
                "Have two machines compute experts for this one",
                "moeba run model.gguf --peers http://10.0.0.2:8090,http://10.0.0.3:8090",
            ),
        ],
    ),
    (
        "moeba launch",
        [
            ("Set up a shell for Claude Code", "moeba launch claude --ctx-size 65536"),
            (
                "Write a profile for Codex and a server elsewhere, whose key is in MOEBA_KEY",
                "moeba launch codex --url https://gpu.example --api-key-env MOEBA_KEY > moeba.toml",
            ),
        ],
    ),
    (
        "moeba convert",
        [
            ("Keep the checkpoint's types", "moeba convert Qwen3-30B-A3B -o model.gguf"),
            (
                "Quantize and lay out experts for streaming",
                "moeba convert Qwen3-30B-A3B -o model.gguf --outtype q4_k_m --layout granule",
            ),
        ],
    ),
    (
        "moeba quantize",
        [
            ("Make a file of about 4.8 bits per weight", "moeba quantize f16.gguf q4.gguf q4_k_m"),
            (
                "Merge a split file, and keep its types",
                "moeba quantize model-00001-of-00003.gguf model.gguf copy",
            ),
        ],
    ),
    (
        "moeba split",
        [
            ("Cut a model for an upload", "moeba split --split-max-size 45G model.gguf model"),
            ("See the files that it would be", "moeba split --dry-run model.gguf model"),
        ],
    ),
    (
        "moeba merge",
        [
            ("Put a downloaded model together", "moeba merge model-00001-of-00003.gguf model.gguf"),
            ("The same as llama-gguf-split", "moeba split --merge m-00001-of-00003.gguf m.gguf"),
        ],
    ),
    (
        "moeba inspect",
        [
            ("Show metadata, tensors and experts", "moeba inspect model.gguf"),
            ("Check that the file is whole and can be run", "moeba inspect model.gguf --check"),
        ],
    ),
    (
        "moeba tokenize",
        [
            ("Print the ids of a text", "moeba tokenize model.gguf \"Hello world\""),
            ("Show each token of a file", "moeba tokenize model.gguf --pieces < text.txt"),
        ],
    ),
    (
        "moeba detokenize",
        [
            ("Print the text of some ids", "moeba detokenize model.gguf 9707,1879"),
            (
                "Read the ids from a pipe",
                "moeba tokenize model.gguf hi | moeba detokenize model.gguf",
            ),
        ],
    ),
    (
        "moeba render",
        [
            ("Show the prompt of a conversation", "moeba render model.gguf chat.json"),
            (
                "Use another template, and let the assistant begin",
                "moeba render model.gguf chat.json --chat-template chatml --add-generation-prompt",
            ),
        ],
    ),
    (
        "moeba diffuse",
        [
            ("Answer in blocks", "moeba diffuse llada-moe.gguf -p \"Why?\" --block-length 32"),
            (
                "Fill in all tokens by a schedule, the surest first",
                "moeba diffuse rnd1.gguf -p \"Why?\" --eps 0.001 --algorithm entropy",
            ),
        ],
    ),
    (
        "moeba embed",
        [
            ("Compare two texts", "moeba embed model.gguf \"a cat on a mat\" \"a dog on a log\""),
            (
                "Embed the lines of a file, as JSON",
                "moeba embed model.gguf -f lines.txt --embd-output-format json > lines.json",
            ),
        ],
    ),
    (
        "moeba logits",
        [
            (
                "Write the logits of three tokens",
                "moeba logits model.gguf --tokens 9707,1879,13 -o logits.npy",
            ),
            (
                "Write the experts that they chose as well",
                "moeba logits model.gguf --tokens 9707,1879 -o logits.npy --experts experts.npy",
            ),
        ],
    ),
    (
        "moeba perplexity",
        [
            ("Score a text", "moeba perplexity model.gguf -f wiki.test.raw"),
            (
                "Compare a quantized model with one whose probabilities were kept",
                "moeba perplexity q4.gguf --kl-divergence --kl-divergence-base f16.kld",
            ),
        ],
    ),
    (
        "moeba imatrix",
        [
            ("Measure on a text", "moeba imatrix model.gguf -f calibration.txt -o imatrix.gguf"),
            (
                "Go on with another text",
                "moeba imatrix model.gguf -f more.txt --in-file imatrix.gguf -o both.gguf",
            ),
        ],
    ),
    (
        "moeba bench",
        [
            ("Time a prompt of 512 tokens and 128 tokens of decode", "moeba bench model.gguf"),
            (
                "Compare thread counts, as JSON",
                "moeba bench model.gguf -t 4,8,16 -p 0 -n 64 -o json",
            ),
        ],
    ),
    (
        "moeba doctor",
        [
            ("Measure this machine and the disk of a folder", "moeba doctor ~/models"),
            ("Write what was found for trace replay", "moeba doctor --json > machine.json"),
        ],
    ),
    (
        "moeba selftest",
        [
            ("Test every GPU", "moeba selftest"),
            ("Test the first one quickly", "moeba selftest --device cuda:0 --quick --deep"),
        ],
    ),
    (
        "moeba trace",
        [
            (
                "Record a model's routing on a text",
                "moeba trace record model.gguf -f text.txt -o routing.mtrace",
            ),
            (
                "Compare two policies on it",
                "moeba trace replay routing.mtrace --policy on-demand --policy finemoe",
            ),
        ],
    ),
    (
        "moeba trace record",
        [
            (
                "Record 64 requests of a text",
                "moeba trace record model.gguf -f text.txt -o routing.mtrace",
            ),
            (
                "Record what trace train needs",
                "moeba trace record model.gguf -f text.txt --hidden -o routing.mtrace",
            ),
        ],
    ),
    (
        "moeba trace replay",
        [
            (
                "Compare two policies with room for 25 % of the experts",
                "moeba trace replay routing.mtrace --policy on-demand --policy finemoe --budget 25",
            ),
            (
                "Simulate the machine that doctor measured",
                "moeba trace replay routing.mtrace --machine machine.json -o csv",
            ),
        ],
    ),
    (
        "moeba trace train",
        [
            (
                "Train the predictor that --policy prescope uses",
                "moeba trace train routing.mtrace -o model.gguf.moeba",
            ),
            (
                "Choose FineMoE's prefetch distance for a data sheet's machine",
                "moeba trace train routing.mtrace -o model.gguf.moeba --machine rtx3090",
            ),
        ],
    ),
    (
        "moeba synth",
        [
            (
                "Write four layers of a model's shapes, with as much reuse as trained routers have",
                "moeba synth qwen3-30b-a3b --layers 4 --routing sticky -o synth.gguf",
            ),
            (
                "Write all layers, laid out for streaming",
                "moeba synth mixtral-8x7b --type q5_k --layout granule -o synth.gguf",
            ),
        ],
    ),
    (
        "moeba pull",
        [
            ("Download one quantization", "moeba pull unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M"),
            (
                "Download a file by its name",
                "moeba pull ggml-org/gpt-oss-20b-GGUF --hf-file gpt-oss-20b-mxfp4.gguf",
            ),
        ],
    ),
    (
        "moeba list",
        [
            ("List downloaded models with their sizes", "moeba list"),
            ("Look in another cache", "HF_HUB_CACHE=/data/hub moeba list"),
        ],
    ),
    (
        "moeba rm",
        [
            ("Remove one quantization", "moeba rm unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M"),
            ("Remove all files of a repository", "moeba rm unsloth/Qwen3-30B-A3B-GGUF"),
        ],
    ),
    (
        "moeba completions",
        [
            (
                "Set up bash",
                "moeba completions bash > ~/.local/share/bash-completion/completions/moeba",
            ),
            ("Set up fish", "moeba completions fish > ~/.config/fish/completions/moeba.fish"),
        ],
    ),
    (
        "moeba man",
        [
            ("Read a page", "moeba man run | man -l -"),
            ("Install all pages", "moeba man --dir ~/.local/share/man/man1"),
        ],
    ),
];

/// Exit codes, by which scripts tell one end from another.
pub const EXIT_CODES: &[(&str, &str)] = &[
    ("0", "success"),
    ("1", "an error, named on stderr"),
    ("2", "wrong usage"),
    ("130", "ended by Ctrl-C (143 by SIGTERM, 129 by SIGHUP)"),
];

/// Variables that are no flag's.
pub const VARIABLES: &[(&str, &str)] = &[
    (
        "MOEBA_HISTORY",
        "file for the history of chats; empty: none [default: ~/.local/state/moeba/history]",
    ),
    ("MOEBA_SIMD", "CPU kernels: scalar, avx2, avx512, neon or dotprod [default: the fastest]"),
    ("MOEBA_PYTHON", "Python that has Ray, for serve --ray [default: python3]"),
    (
        "MOEBA_PROGRAM",
        "with serve --ray: moeba on a machine that has it elsewhere than the first one",
    ),
    (
        "MOEBA_GPU_WAITS",
        "0: GPUs never wait for the CPU in a layer, 1: always [default: unless a profiler is \
         attached, or on WSL]",
    ),
    (
        "MOEBA_GPU_PIN",
        "0: experts in RAM are not pinned where they are, and go to GPUs through buffers",
    ),
    (
        "MOEBA_GPU_IN_PLACE",
        "0: GPUs never read missing experts in RAM, 1: wherever they can [default: where it is \
         measured to be faster]",
    ),
    ("MOEBA_NOW", "date that chat templates see, as YYYY-MM-DD [default: today]"),
    ("HF_TOKEN", "token for private repositories"),
    ("HF_HUB_CACHE, HF_HOME", "where downloaded models are kept"),
    ("HF_ENDPOINT", "server to download from"),
    ("NO_COLOR", "if set, messages have no colours"),
    ("RUST_LOG", "which log messages to show, by module; overrides -v and -q"),
];

/// Says how flags and variables relate.
pub const PRECEDENCE: &str = "A flag overrides its variable, and a MOEBA_… variable llama.cpp's";

/// Headings of flags that many commands share; -h shows those of them that are in `COMMON`.
const SHARED: &[&str] = &["Model", "Engine", "Experts", "GPU", "Sampling", "Reasoning", "Messages"];

const COMMON: &[&str] = &[
    "model",
    "hf_repo",
    "threads",
    "ctx_size",
    "ram",
    "policy",
    "device",
    "gpu_layers",
    "n_cpu_moe",
    "temp",
    "think",
    "top-k",
    "top-p",
    "seed",
    "verbose",
    "quiet",
];

pub fn examples(path: &str) -> &'static [Example] {
    EXAMPLES.iter().find(|(name, _)| *name == path).map_or(&[], |(_, examples)| examples)
}

/// The command line with its help: in `full`, or in short for `-h`.
pub fn with_help(command: Command, full: bool) -> Command {
    let path = command.get_name().to_owned();
    dressed(command, &path, full)
}

fn dressed(command: Command, path: &str, full: bool) -> Command {
    let command = match full {
        true => command.mut_args(with_variables).after_help(footer(path)),
        false => {
            let more = format!("`{path} --help` shows all flags, their variables and examples.");
            command.mut_args(in_short).after_help(more)
        }
    };
    command.mut_subcommands(|sub| {
        let path = format!("{path} {}", sub.get_name());
        dressed(sub, &path, full)
    })
}

/// Hides what few people need, and the names of variables.
fn in_short(arg: Arg) -> Arg {
    let is_shared = arg.get_help_heading().is_some_and(|heading| SHARED.contains(&heading));
    let is_rare = is_shared && !COMMON.contains(&arg.get_id().as_str());
    let is_hidden = is_rare || arg.is_hide_short_help_set();
    arg.hide_env(true).hide_short_help(is_hidden)
}

/// Names a flag's variables behind its help, ours first.
fn with_variables(arg: Arg) -> Arg {
    let Some(ours) = arg.get_env().and_then(|name| name.to_str()).map(str::to_owned) else {
        return arg;
    };
    let theirs = environment::fallbacks(&ours).map(|name| format!(", {name}")).collect::<String>();
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.help(format!("{help} [env: {ours}{theirs}]")).hide_env(true)
}

/// The text of `--help` behind the flags.
fn footer(path: &str) -> String {
    let heading = *Styles::styled().get_header();
    let mut out = format!("{heading}Examples:{heading:#}\n");
    for (what, line) in examples(path) {
        let _ = writeln!(out, "  {what}:\n      {line}");
    }
    if !path.contains(' ') {
        let mut table = |title: &str, rows: &[(&str, &str)]| {
            let _ = writeln!(out, "\n{heading}{title}:{heading:#}");
            let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
            for (name, what) in rows {
                let _ = writeln!(out, "  {name:<width$}  {what}");
            }
        };
        table("Exit codes", EXIT_CODES);
        table("Variables besides those of the flags", VARIABLES);
        let _ = writeln!(out, "\n{PRECEDENCE}.");
    }
    out.truncate(out.trim_end().len());
    out
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, argv};
    use super::*;
    use clap::CommandFactory;
    use std::ffi::OsString;

    /// The words of a line as a shell splits it: double quotes hold spaces.
    fn words(line: &str) -> Vec<OsString> {
        let parts = line.split('"').enumerate();
        let split = |(i, part): (usize, &str)| match i % 2 {
            0 => part.split_whitespace().map(OsString::from).collect::<Vec<_>>(),
            _ => vec![part.into()],
        };
        parts.flat_map(split).collect()
    }

    fn check(command: &Command, path: &str) {
        assert_eq!(examples(path).len(), 2, "{path}");
        for (_, line) in examples(path) {
            for program in line.split(" | ").filter_map(|part| part.split_once("moeba ")) {
                let program = program.1.split([' ']).take_while(|word| !"<>".contains(word));
                let words = words(&format!("moeba {}", program.collect::<Vec<_>>().join(" ")));
                let mut root = Cli::command();
                root.build();
                let words = argv::rewrite(&root, words).unwrap_or_else(|e| panic!("{line}: {e}"));
                let parsed = root.try_get_matches_from_mut(&words.argv);
                parsed.unwrap_or_else(|e| panic!("{line}: {e}"));
            }
        }
        for sub in command.get_subcommands() {
            check(sub, &format!("{path} {}", sub.get_name()));
        }
    }

    #[test]
    fn every_command_has_two_examples_that_can_be_run() {
        check(&Cli::command(), "moeba");
    }

    #[test]
    fn what_is_common_exists() {
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let ids = command.get_arguments().chain(run.get_arguments());
        let ids: Vec<&str> = ids.map(|arg| arg.get_id().as_str()).collect();
        COMMON.iter().for_each(|id| assert!(ids.contains(id), "{id}"));
    }
}
