//! `moeba completions SHELL` and `moeba man [COMMAND]`: generated from the flags themselves.

use super::{help, new_file, out, reasoning};
use crate::policy::PolicySpec;
use crate::trace::{Device, Geometry};
use crate::{Error, Result};
use clap::builder::{PossibleValuesParser, ValueHint};
use clap::{Arg, Command};
use clap_complete::{Generator, Shell};
use clap_mangen::Man;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct CompletionsArgs {
    /// The shell to write the script for
    shell: Shell,
    /// Write the script into this folder, under the name that the shell looks for
    #[arg(long = "dir", value_name = "DIR")]
    script_dir: Option<PathBuf>,
}

pub fn completions(args: CompletionsArgs, command: Command) -> Result<()> {
    let mut command = with_values(command);
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "moeba", &mut script);
    let Some(dir) = &args.script_dir else { return out::write(&script) };
    fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
    let path = dir.join(args.shell.file_name("moeba"));
    let there = fs::read_to_string(&path).unwrap_or_default();
    if !there.is_empty() && !there.contains("moeba") {
        let got = "a file of something else, which stays";
        return Err(Error::format(&path, "file", "a completion script of moeba", got));
    }
    new_file::write_text(&path, &String::from_utf8_lossy(&script))?;
    out::note(&format!("wrote {}", path.display()));
    Ok(())
}

/// Values that shells offer for flags that take others, too. They stand here because a parser that
/// knew them would not say what else a flag takes.
const VALUES: &[(&str, &[&str])] = &[
    ("cache_type_k", CACHE_TYPES),
    ("cache_type_v", CACHE_TYPES),
    ("device", &["auto", "cpu", "cuda"]),
    ("gpu_layers", &["auto", "all"]),
    ("io", &["auto", "uring", "pread", "mmap"]),
    ("reasoning_format", reasoning::FORMATS),
    ("think", &["auto", "on", "off", "low", "medium", "high"]),
];

const CACHE_TYPES: &[&str] =
    &["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"];

/// Flags that take files or folders, though their values are read as other types.
const PATHS: &[(&str, ValueHint)] = &[
    ("chat_template", ValueHint::FilePath),
    ("dir", ValueHint::DirPath),
    ("folder", ValueHint::DirPath),
    ("model", ValueHint::FilePath),
    ("profile", ValueHint::FilePath),
    ("script_dir", ValueHint::DirPath),
];

fn with_values(command: Command) -> Command {
    command.mut_args(offered).mut_subcommands(with_values)
}

fn offered(arg: Arg) -> Arg {
    let id = arg.get_id().as_str().to_owned();
    let path = PATHS.iter().find(|(known, _)| *known == id);
    let values: Vec<&'static str> = match id.as_str() {
        "machine" => Device::names().collect(),
        "sizes" => Geometry::names().collect(),
        "policy" => PolicySpec::names().collect(),
        id => VALUES.iter().find(|(known, _)| *known == id).map_or(&[][..], |(_, v)| v).to_vec(),
    };
    if let Some((_, hint)) = path {
        arg.value_hint(*hint)
    } else if !values.is_empty() {
        arg.value_parser(PossibleValuesParser::new(values))
    } else if arg.get_value_hint() == ValueHint::Unknown && arg.get_action().takes_values() {
        // A number or a name: no file of the folder.
        arg.value_hint(ValueHint::Other)
    } else {
        arg
    }
}

#[derive(clap::Args, Debug)]
pub struct ManArgs {
    /// The command to describe, such as run or trace record; without one, moeba itself
    #[arg(conflicts_with = "dir")]
    command: Vec<String>,
    /// Write the pages of all commands into this folder
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub fn man(args: ManArgs, mut command: Command) -> Result<()> {
    command.build();
    if let Some(dir) = &args.dir {
        fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
        let n_pages = write_all(&command, dir)?;
        out::note(&format!("wrote {n_pages} pages to {}", dir.display()));
        return Ok(());
    }
    let mut command = &command;
    for name in &args.command {
        let unknown = || Error::Usage(format!("{command} has no command {name:?}"));
        command = command.find_subcommand(name).ok_or_else(unknown)?;
    }
    out::write(&page(command)?)
}

/// Writes the command's page and those of its own commands; returns how many.
fn write_all(command: &Command, dir: &Path) -> Result<usize> {
    let name = command.get_display_name().unwrap_or("moeba");
    let path = dir.join(format!("{name}.1"));
    fs::write(&path, page(command)?).map_err(|e| Error::io(&path, e))?;
    let subcommands = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    subcommands.map(|sub| write_all(sub, dir)).sum::<Result<usize>>().map(|n| n + 1)
}

fn page(command: &Command) -> Result<Vec<u8>> {
    let path = command.get_bin_name().unwrap_or("moeba").to_owned();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim().to_owned();
    let has_commands = command.has_subcommands();
    // Examples have a section of their own.
    let command = command.clone().override_usage(usage).after_help("");
    let man = Man::new(command).manual("moeba").source(format!("moeba {}", super::version()));
    let mut out = Vec::new();
    let rendered = (|| {
        man.render_title(&mut out)?;
        man.render_name_section(&mut out)?;
        man.render_synopsis_section(&mut out)?;
        man.render_description_section(&mut out)?;
        man.render_options_section(&mut out)?;
        match has_commands {
            true => man.render_subcommands_section(&mut out),
            false => Ok(()),
        }
    })();
    rendered.map_err(|e| Error::invalid(format!("cannot write the manual page: {e}")))?;
    let mut rest = String::new();
    section(&mut rest, "EXAMPLES", help::examples(&path).iter().map(|(what, line)| (*line, *what)));
    section(&mut rest, "EXIT STATUS", help::EXIT_CODES.iter().copied());
    let _ = writeln!(rest, ".SH ENVIRONMENT\n{}.", escaped(help::PRECEDENCE));
    rows(&mut rest, help::VARIABLES.iter().copied());
    if path != "moeba" {
        let _ = writeln!(rest, ".SH \"SEE ALSO\"\n\\fBmoeba\\fR(1)");
    }
    out.extend(rest.bytes());
    Ok(out)
}

fn section<'a>(out: &mut String, title: &str, all: impl Iterator<Item = (&'a str, &'a str)>) {
    let _ = writeln!(out, ".SH \"{title}\"");
    rows(out, all);
}

fn rows<'a>(out: &mut String, all: impl Iterator<Item = (&'a str, &'a str)>) {
    for (name, what) in all {
        let _ = writeln!(out, ".TP\n\\fB{}\\fR\n{}", escaped(name), escaped(what));
    }
}

/// Text for troff, where a backslash and a hyphen have meanings, and a line's first dot or quote.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::*;
    use clap::CommandFactory;

    /// Every value that a shell completes is accepted.
    #[test]
    fn offered_values_can_be_parsed() {
        let flags = [("replay", "machine"), ("replay", "sizes")];
        let flags = VALUES.iter().map(|(id, _)| ("run", *id)).chain(flags);
        for (name, id) in flags {
            let all = Cli::command();
            let found = match name {
                "replay" => all.find_subcommand("trace").and_then(|c| c.find_subcommand(name)),
                _ => all.find_subcommand(name),
            };
            let arg = found.unwrap().get_arguments().find(|arg| arg.get_id() == id);
            let arg = arg.unwrap_or_else(|| panic!("no {id}"));
            let offered = offered(arg.clone()).get_possible_values();
            assert!(!offered.is_empty(), "{id}");
            for value in offered {
                let line = ["x", &format!("--{}", arg.get_long().unwrap()), value.get_name()];
                let parsed = Command::new("x").arg(arg.clone()).try_get_matches_from(line);
                assert!(parsed.is_ok(), "{id} {}", value.get_name());
            }
        }
    }
}
