//! Additions to clap's help: examples and variables with `--help`; `-h` shows only the flags that
//! people use most.

use super::environment;
use clap::builder::Styles;
use clap::{Arg, Command};
use std::fmt::Write;

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

/// An example: what it does, and the command line.
type Example = (&'static str, &'static str);

/// Two examples for each command, by its name and those of the commands it is in: the lines behind
/// its own in `examples.txt`.
pub fn examples(path: &str) -> Vec<Example> {
    let blocks = include_str!("examples.txt").split("\n\n");
    let of_command =
        blocks.filter_map(|block| block.split_once('\n')).find(|(name, _)| *name == path);
    let lines: Vec<&str> =
        of_command.iter().flat_map(|(_, lines)| lines.lines()).map(str::trim).collect();
    lines.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
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
