//! The command line: one file a subcommand. `main` rewrites llama.cpp's spellings, parses, sets up
//! logging, runs the command and turns its end into an exit code.

mod answer;
mod args;
mod argv;
mod bench;
mod bundled;
mod chat;
mod commands;
mod consent;
mod conversation;
mod convert;
mod device_args;
mod diffuse;
mod doctor;
mod embed;
mod environment;
mod experts;
mod figures;
mod forecast;
mod global;
mod grammar;
mod help;
mod hub;
mod imatrix;
mod inspect;
mod launch;
mod library;
mod llama_flags;
mod logging;
mod logits;
mod manual;
mod model;
mod new_file;
mod npy;
mod out;
mod outcome;
mod outputs;
mod overview;
mod perplexity;
mod plan;
mod plan_devices;
mod preset;
mod prompt;
mod quantize;
mod reasoning;
mod render;
mod report;
mod run;
mod sampling;
mod selftest;
mod serve;
mod serve_ray;
mod split;
mod stats;
mod stdin;
mod suggest;
mod synth;
mod tokenize;
mod trace;
mod translate;
mod values;
mod wrap;

use crate::{Error, Result, interrupt};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use global::{Global, VERSION};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

/// Runs Mixture-of-Experts language models that are bigger than the memory they run in.
#[derive(Parser, Debug)]
#[command(name = "moeba", version = version(), subcommand_required = true)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Answer a prompt, or chat
    Run(run::Args),
    /// Answer with a model that fills in masked tokens (diffusion)
    Diffuse(diffuse::Args),
    /// Serve a model over HTTP, with the APIs of OpenAI, Anthropic, Ollama and llama-server
    Serve(serve::Args),
    /// Compute experts for other machines, which name this one with --peers
    Experts(experts::Args),
    /// Print the settings with which a client uses a server
    Launch(launch::Args),
    /// Convert a Hugging Face checkpoint to GGUF
    Convert(convert::ConvertArgs),
    /// Convert a GGUF file to another type or layout
    Quantize(quantize::QuantizeArgs),
    /// Cut a GGUF file into several, as llama-gguf-split does
    Split(split::Args),
    /// Put the files of a split model together
    Merge(split::MergeArgs),
    /// Show what a model file contains, or check it
    Inspect(inspect::InspectArgs),
    /// Convert text to token ids
    Tokenize(tokenize::Args),
    /// Convert token ids to text
    Detokenize(tokenize::DetokenizeArgs),
    /// Print the prompt that the chat template makes of messages
    Render(render::Args),
    /// Print vectors of texts, or scores of documents, as llama-embedding does
    Embed(embed::Args),
    /// Write a model's logits for given tokens to a NumPy file
    Logits(logits::Args),
    /// Measure how well a model predicts a text, as llama.cpp defines it
    Perplexity(perplexity::Args),
    /// Measure which columns of a model's matrices matter, for quantize --imatrix
    Imatrix(imatrix::Args),
    /// Measure prompt and decode speed, as llama-bench does
    Bench(bench::Args),
    /// Show what this machine has and how fast it is
    Doctor(doctor::Args),
    /// Check every kernel of a GPU against the CPU
    Selftest(selftest::Args),
    /// Record, replay and learn from expert routing
    Trace(trace::Args),
    /// Write random weights in the shapes of a published model, to measure with
    Synth(synth::SynthArgs),
    /// Download a model from Hugging Face and print its path
    Pull(hub::PullArgs),
    /// List downloaded models
    List(hub::ListArgs),
    /// Remove downloaded models
    Rm(hub::RmArgs),
    /// Print a shell completion script
    Completions(manual::CompletionsArgs),
    /// Print a manual page, or write all of them
    Man(manual::ManArgs),
}

/// All flags, with the variables that the environment may set them by; the help is long if `--help`
/// asks for it. An empty variable counts as not set.
fn command_line(full_help: bool) -> clap::Command {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    environment::with_fallbacks(help::with_help(Cli::command(), full_help), is_set)
}

/// Everything `src/main.rs` does.
pub fn main() -> ExitCode {
    if std::env::args_os().len() <= 1 && std::io::stdout().is_terminal() {
        return ExitCode::from(end_code(&overview::show()));
    }
    let asks = |arg: OsString| ["--help", "--usage", "help"].iter().any(|word| arg == *word);
    let full_help = std::env::args_os().skip(1).any(asks);
    let mut root = command_line(full_help);
    root.build();
    let line = match argv::rewrite(&root, std::env::args_os()) {
        Ok(line) => line,
        Err(why) => return ExitCode::from(end_code(&Err(Error::Usage(why)))),
    };
    let matches = root.try_get_matches_from_mut(&line.argv);
    let parsed = matches.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(e) => return parse_end(&e, &root, &line),
    };
    let checked = outputs::check(&root, &matches, cli.global.force);
    ExitCode::from(end_code(&checked.and_then(|()| run(cli, &line.notes))))
}

fn run(cli: Cli, notes: &[String]) -> Result<()> {
    logging::install(&cli.global)?;
    notes.iter().for_each(|note| log::info!("{note}"));
    interrupt::install()?;
    #[cfg(unix)]
    if let Err(why) = crate::gguf::report_lost_pages() {
        log::debug!("files that are cut short will not be named: {why}");
    }
    dispatch(cli.command)
}

fn dispatch(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Diffuse(args) => diffuse::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Experts(args) => experts::run(args),
        Command::Launch(args) => launch::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Split(args) => split::run(args),
        Command::Merge(args) => split::run_merge(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Tokenize(args) => tokenize::run(args),
        Command::Detokenize(args) => tokenize::detokenize(args),
        Command::Render(args) => render::run(args),
        Command::Embed(args) => embed::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Perplexity(args) => perplexity::run(args),
        Command::Imatrix(args) => imatrix::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Selftest(args) => selftest::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Synth(args) => synth::run(args),
        Command::Pull(args) => hub::pull(args),
        Command::List(args) => hub::list(args),
        Command::Rm(args) => hub::rm(args),
        Command::Completions(args) => manual::completions(args, command_line(true)),
        Command::Man(args) => manual::man(args, command_line(true)),
    }
}

/// `--help` and `--version` are ends of parsing too: those go to stdout and are no error.
fn parse_end(e: &clap::Error, root: &clap::Command, line: &argv::Line) -> ExitCode {
    if let Some(why) = environment::wrong_value(e, root, line) {
        return ExitCode::from(end_code(&Err(Error::Usage(why))));
    }
    // A reader that has gone away needs no help text.
    let _ = e.print();
    ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2))
}

/// The exit code of a command's end; says on stderr what went wrong.
fn end_code(result: &Result<()>) -> u8 {
    let Err(e) = result else { return 0 };
    if out::is_broken_pipe(e) {
        return 0;
    }
    match e {
        Error::Interrupted => {
            out::say("interrupted");
            interrupt::exit_code() as u8
        }
        Error::Usage(sentence) => {
            out::complain(sentence);
            2
        }
        _ => {
            out::complain(&e.to_string());
            1
        }
    }
}

fn version() -> &'static str {
    &VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    /// clap's own checks, which are in debug builds alone.
    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "clap checks in debug builds alone")]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn ends_have_the_documented_codes() {
        let code = |e| end_code(&Err(e));
        assert_eq!(end_code(&Ok(())), 0);
        assert_eq!(code(Error::invalid("x")), 1);
        assert_eq!(code(Error::Usage("x".into())), 2);
        assert_eq!(code(Error::Interrupted), 130);
        let gone = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert_eq!(code(Error::io("stdout", gone())), 0);
        assert_eq!(code(Error::io("out.gguf", gone())), 1);
    }
}
