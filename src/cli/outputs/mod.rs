//! One guard for every file that a command writes, asked before the command does anything else.
//! An output never replaces a file that the command reads, by whatever name, nor another output of
//! the same command, nor, without `--force`, a file of another kind.
//!
//! Inputs need no list: each value on the command line that names an existing file is one, unless
//! `OUTPUTS` says that the command writes it.

pub mod kind;

use super::new_file;
use crate::hub::Config;
use crate::{Error, Result};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use kind::Kind;
use rustix::fs::{Access, access, fstat};
use std::any::TypeId;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Arguments that name a file to write: a subcommand's path (empty: any), the argument, the kind.
const OUTPUTS: &[(&str, &str, Kind)] = &[
    ("", "log_file", Kind::Log),
    ("", "stats", Kind::Stats),
    ("", "profile", Kind::Profile),
    ("convert", "output", Kind::Gguf),
    ("quantize", "output", Kind::Gguf),
    ("synth", "output", Kind::Gguf),
    ("imatrix", "output", Kind::Gguf),
    ("perplexity", "kl_divergence_base", Kind::Probabilities),
    ("split", "output", Kind::Shards),
    ("merge", "output", Kind::New),
    ("logits", "output", Kind::Npy),
    ("logits", "experts", Kind::Npy),
    ("trace record", "output", Kind::Trace),
    ("trace import", "output", Kind::Trace),
    ("trace train", "output", Kind::Profile),
    ("trace train", "report", Kind::Accuracies),
    ("man", "dir", Kind::Manual),
    ("experts", "ready_file", Kind::Url),
    ("serve", "ready_file", Kind::Url),
];

/// Bytes of "-00001-of-00003.gguf".
const SHARD_END: usize = 20;

/// Values of `--profile` that are no file.
const NO_PROFILE: [&str; 2] = ["none", "auto"];

/// The kind of file that an argument names to be written.
fn kind_of(command: &str, arg: &str) -> Option<Kind> {
    let listed = |(of, name, _): &&(&str, &str, _)| *name == arg && [command, ""].contains(of);
    OUTPUTS.iter().find(listed).map(|(_, _, kind)| *kind)
}

/// Refuses a command line whose outputs would replace what must stay. `command` is built.
pub fn check(command: &Command, matches: &ArgMatches, force: bool) -> Result<()> {
    let Files { inputs, outputs } = Files::of(command, matches);
    let mut files: Vec<&Output> = Vec::new();
    for output in &outputs {
        if !output.is_stream()? {
            inputs.iter().try_for_each(|input| output.check_not(input))?;
            files.iter().try_for_each(|other| output.check_other(other))?;
            files.push(output);
        }
    }
    for file in &files {
        match file.kind {
            Kind::Manual => file.check_manual(force)?,
            Kind::Shards => file.check_shards(&inputs, force)?,
            kind => file.check_file(kind, &file.path, force)?,
        }
    }
    Ok(())
}

/// The files that a command line reads and writes.
struct Files {
    inputs: Vec<Input>,
    outputs: Vec<Output>,
}

impl Files {
    fn of(command: &Command, matches: &ArgMatches) -> Files {
        let mut files = Files { inputs: standard_streams(), outputs: Vec::new() };
        files.add(command, matches, "");
        files
    }

    /// Adds a subcommand's arguments; `path` has the names of the commands above.
    fn add(&mut self, command: &Command, matches: &ArgMatches, path: &str) {
        if let Some((name, sub)) = matches.subcommand() {
            let command = command.find_subcommand(name).expect("clap has found it");
            // Global flags are among the subcommand's.
            return self.add(command, sub, format!("{path} {name}").trim_start());
        }
        for arg in command.get_arguments() {
            let id = arg.get_id().as_str();
            let given = !matches!(matches.value_source(id), None | Some(ValueSource::DefaultValue));
            let values = matches.try_get_raw(id).ok().flatten().filter(|_| given);
            let has = |flag: &str| matches.try_get_one(flag).ok().flatten() == Some(&true);
            let kind = match kind_of(path, id) {
                Some(Kind::Gguf) if has("keep_split") => Some(Kind::Shards),
                Some(Kind::Shards) if has("merge") => Some(Kind::New),
                Some(Kind::Shards) if has("dry_run") => continue,
                Some(Kind::Probabilities) if has("kl_divergence") => None,
                kind => kind,
            };
            for value in values.into_iter().flatten() {
                match kind {
                    Some(Kind::Profile) if NO_PROFILE.iter().any(|name| *name == value) => {}
                    Some(kind) => self.outputs.push(Output::new(label(arg), value, kind)),
                    None => self.inputs.extend(Input::new(arg, value)),
                }
            }
        }
    }
}

/// The name of an argument in messages: `--stats`, `MODEL`.
fn label(arg: &Arg) -> String {
    let name = arg.get_value_names().and_then(|names| names.first());
    match (arg.get_long(), name) {
        (Some(long), _) => format!("--{long}"),
        (None, Some(name)) => name.to_string(),
        (None, None) => arg.get_id().to_string(),
    }
}

/// Which file a name leads to, whatever the name.
type FileId = (u64, u64);

fn id(path: &Path) -> Option<FileId> {
    fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// The path of a file that may not exist yet, with its folder resolved.
fn place(path: &Path) -> Option<PathBuf> {
    let folder = new_file::folder(path).canonicalize().ok()?;
    Some(folder.join(path.file_name()?))
}

/// A file or a folder that the command reads.
struct Input {
    label: String,
    path: PathBuf,
    /// The file itself, the other shards of a split model, the files in a folder.
    files: Vec<FileId>,
    /// The folder's own name, if it is one. All files in it count as read, but those of the kind
    /// that is written.
    folder: Option<PathBuf>,
}

impl Input {
    /// The value of an argument, if that is the name of something.
    fn new(arg: &Arg, value: &OsStr) -> Option<Input> {
        let (label, path) = (label(arg), PathBuf::from(value));
        let is_path = arg.get_value_parser().type_id() == TypeId::of::<PathBuf>();
        let is_hub = label == "--hf-repo" || value.to_str().is_some_and(|v| v.starts_with("hf:"));
        if is_hub {
            // The file's name is known when it is there, which may be after a download.
            let cache = Config::from_env().ok()?.cache;
            let folder = Some(cache.canonicalize().ok()?);
            return Some(Input { label, path: cache, files: Vec::new(), folder });
        }
        let meta = fs::metadata(&path).ok()?;
        let (mut files, mut folder) = (vec![(meta.dev(), meta.ino())], None);
        if meta.is_dir() {
            let entries = fs::read_dir(&path).into_iter().flatten().flatten();
            files.extend(entries.filter_map(|entry| id(&entry.path())));
            folder = path.canonicalize().ok();
        } else {
            files.extend(other_shards(&path).iter().filter_map(|shard| id(shard)));
        }
        // A prompt of "." is no folder.
        (is_path || folder.is_none()).then_some(Input { label, path, files, folder })
    }
}

/// The files that a split model's file stands for; none if its name is not a shard's.
fn other_shards(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let parts = || {
        let (stem, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = stem.rsplit_once('-')?;
        let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        (is_number(number) && is_number(count)).then_some((stem, count))
    };
    let Some((stem, count)) = parts() else { return Vec::new() };
    let n: usize = count.parse().unwrap_or(0);
    (1..=n).map(|i| path.with_file_name(format!("{stem}-{i:05}-of-{count}.gguf"))).collect()
}

/// Files that the shell has opened for the program: `moeba … < in > out`.
fn standard_streams() -> Vec<Input> {
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let streams = [
        ("standard input", stdin.as_fd()),
        ("standard output", stdout.as_fd()),
        ("standard error", stderr.as_fd()),
    ];
    let input = |(label, fd): &(&str, _)| {
        let stat = fstat(fd).ok()?;
        let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        let files = vec![(stat.st_dev, stat.st_ino)];
        let path = PathBuf::from(label);
        is_file.then(|| Input { label: (*label).into(), path, files, folder: None })
    };
    streams.iter().filter_map(input).collect()
}

/// A file that the command writes.
struct Output {
    label: String,
    path: PathBuf,
    kind: Kind,
}

impl Output {
    fn new(label: String, value: &OsStr, kind: Kind) -> Output {
        Output { label, path: value.into(), kind }
    }

    fn refuse<T>(&self, why: &str) -> Result<T> {
        Err(Error::invalid(format!("{}: {why}", self.path.display())))
    }

    /// Whether it goes to a pipe, a terminal or another device, where nothing is replaced.
    fn is_stream(&self) -> Result<bool> {
        let Output { label, kind, .. } = self;
        let streams = new_file::is_stream(&self.path);
        if streams && !kind.may_stream(&self.path) {
            if self.path.as_os_str() == "-" {
                let why = format!("{label} needs a file, not standard output (./- is a file)");
                return Err(Error::Usage(why));
            }
            return self.refuse(&format!("{label} needs a regular file"));
        }
        Ok(streams)
    }

    /// An input stays, with `--force` as well.
    fn check_not(&self, input: &Input) -> Result<()> {
        let Some(own) = id(&self.path).filter(|_| !self.path.is_dir()) else { return Ok(()) };
        let inside = input.folder.as_ref().is_some_and(|folder| {
            let whole = self.path.canonicalize();
            whole.is_ok_and(|path| path.starts_with(folder))
        });
        let Some(first) = input.files.first() else {
            return if inside && !self.kind.fits(&self.path) {
                self.replaces(input)
            } else {
                Ok(())
            };
        };
        let same = own == *first;
        let part = inside || input.files.contains(&own);
        // A GGUF file in a checkpoint's folder is no part of the checkpoint.
        let rewritten = input.folder.is_some() && self.kind.fits(&self.path);
        if same || part && !rewritten { self.replaces(input) } else { Ok(()) }
    }

    fn replaces(&self, input: &Input) -> Result<()> {
        let (path, label) = (self.path.display(), &self.label);
        let whose = match id(&self.path) == input.files.first().copied() {
            true => input.label.clone(),
            false => format!("a part of {} ({})", input.label, input.path.display()),
        };
        Err(Error::Usage(format!(
            "{path}: {label} would replace {whose}, which this command uses; name another file"
        )))
    }

    /// Two outputs are two files.
    fn check_other(&self, other: &Output) -> Result<()> {
        let (own, others) = (id(&self.path), id(&other.path));
        let same = match own.is_some() || others.is_some() {
            true => own == others,
            false => place(&self.path).is_some_and(|own| Some(own) == place(&other.path)),
        };
        if same { self.names_the_same(other) } else { Ok(()) }
    }

    fn names_the_same(&self, other: &Output) -> Result<()> {
        let (path, a, b) = (self.path.display(), &other.label, &self.label);
        Err(Error::Usage(format!("{path}: {a} and {b} name the same file; give each its own")))
    }

    /// The place can be written, and what is there may go.
    fn check_file(&self, kind: Kind, path: &Path, force: bool) -> Result<()> {
        if path.is_dir() {
            return self.refuse("this is a folder; name a file");
        }
        self.check_folder(new_file::folder(path))?;
        if !path.exists() {
            return Ok(());
        }
        if !kind.fits(path) && (!force || kind == Kind::Profile) {
            let cure = if kind == Kind::Profile { "" } else { ", or --force to replace it" };
            let path = path.display();
            let name = kind.name();
            let why = format!("{path}: not replaced, as it is not {name}; name another file{cure}");
            return Err(Error::invalid(why));
        }
        if !force && kind != Kind::Profile && access(path, Access::WRITE_OK).is_err() {
            return self.refuse("write-protected; name another file, or --force to replace it");
        }
        Ok(())
    }

    fn check_folder(&self, folder: &Path) -> Result<()> {
        let shown = folder.display();
        if !folder.exists() {
            return self.refuse(&format!("there is no folder {shown}"));
        }
        if !folder.is_dir() {
            return self.refuse(&format!("{shown} is not a folder"));
        }
        // A profile may be one that is only read.
        if self.kind == Kind::Profile && self.label == "--profile" {
            return Ok(());
        }
        match tempfile::tempfile_in(folder) {
            Ok(_) => Ok(()),
            Err(e) => Err(Error::io(folder, e)),
        }
    }

    /// Files of a split model that may be there already, under names that begin like this.
    fn check_shards(&self, inputs: &[Input], force: bool) -> Result<()> {
        self.check_folder(new_file::folder(&self.path))?;
        let name = self.path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let prefix = name.strip_suffix(".gguf").unwrap_or(name);
        for entry in fs::read_dir(new_file::folder(&self.path)).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            let is_shard = !other_shards(&path).is_empty();
            let is_own = name.strip_prefix(prefix).is_some_and(|rest| rest.len() == SHARD_END);
            if is_shard && is_own {
                let shard = Output { label: self.label.clone(), path, kind: Kind::New };
                inputs.iter().try_for_each(|input| shard.check_not(input))?;
                shard.check_file(shard.kind, &shard.path, force)?;
            }
        }
        Ok(())
    }

    /// The folder of `man --dir`, which may have pages already.
    fn check_manual(&self, force: bool) -> Result<()> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            if name.starts_with("moeba") && name.ends_with(".1") {
                let page = Output { label: self.label.clone(), path, kind: Kind::ManualPage };
                page.check_file(page.kind, &page.path, force)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::*;
    use clap::CommandFactory;

    /// Arguments that name a file to read.
    const INPUTS: &[&str] = &[
        "model",
        "model_draft",
        "file",
        "folder",
        "input",
        "imatrix",
        "in_file",
        "lora",
        "messages",
        "trace",
        "gguf",
        "path",
        "api_key_file",
        "system_prompt_file",
        "grammar_file",
        "json_schema_file",
        "slot_save_path",
        "models_dir",
        // Of completions, which looks itself at what is there.
        "script_dir",
    ];

    fn arguments(command: &Command, path: &str, out: &mut Vec<(String, Arg)>) {
        out.extend(command.get_arguments().map(|arg| (path.to_owned(), arg.clone())));
        for sub in command.get_subcommands() {
            let path = format!("{path} {}", sub.get_name());
            arguments(sub, path.trim_start(), out);
        }
    }

    #[test]
    fn every_argument_that_is_a_path_is_read_or_written() {
        let mut all = Vec::new();
        arguments(&Cli::command(), "", &mut all);
        for (path, arg) in &all {
            let is_path = arg.get_value_parser().type_id() == TypeId::of::<PathBuf>();
            let id = arg.get_id().as_str();
            let (read, written) = (INPUTS.contains(&id), kind_of(path, id).is_some());
            let missing = format!("{path}: {id}: list it in OUTPUTS or, if it is read, in INPUTS");
            assert!(!is_path || read != written, "{missing}");
        }
        for (path, name, _) in OUTPUTS {
            let there = |(of, arg): &(String, Arg)| {
                *arg.get_id() == *name && (path.is_empty() || of == path)
            };
            assert!(all.iter().any(there), "there is no argument {name} of {path}");
        }
    }

    #[test]
    fn shards_are_found_by_their_names() {
        let names = |path: &str| -> Vec<String> {
            let shards = other_shards(Path::new(path));
            shards.iter().map(|path| path.display().to_string()).collect()
        };
        let two = ["a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf"];
        assert_eq!(names("a/m-00001-of-00002.gguf"), two);
        for single in ["a/m.gguf", "m-1-of-2.gguf", "m-00001-of-00002.bin", "-of-.gguf", ""] {
            assert!(names(single).is_empty(), "{single}");
        }
    }
}
