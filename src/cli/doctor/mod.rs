//! `moeba doctor`: what this machine has and how fast it is, in a few seconds. A table for people,
//! one JSON object for programs; `moeba trace replay --machine` reads the latter.

mod advice;
mod examine;
mod json;
mod text;

use super::args::MAX_THREADS;
use super::out;
use super::values::{self, Parsed};
use crate::Result;
use crate::engine::DeviceChoice;
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Model file to read, or a folder, in which a file of 256 MiB is made and removed again
    /// [default: the current folder]
    path: Option<PathBuf>,
    /// Threads to measure memory and integer arithmetic with, separated by commas [default: from
    /// one to all cores]
    #[arg(short, long, value_name = "N,…", value_parser = threads)]
    threads: Option<Threads>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Skip the disk
    #[arg(long, conflicts_with = "path")]
    no_disk: bool,
    /// GPUs to measure: auto for all, cuda:N or cuda:0,1, or cpu for none
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "MOEBA_DEVICE")]
    device: DeviceChoice,
}

/// A list is one value of the flag, so it needs a type of its own: clap reads `Vec` as "repeated".
#[derive(Clone, Debug)]
struct Threads(Vec<usize>);

fn threads(text: &str) -> Parsed<Threads> {
    values::list(text, |item| values::integer(item, 1, MAX_THREADS)).map(Threads)
}

pub fn run(args: Args) -> Result<()> {
    let disk = match (&args.path, args.no_disk) {
        // Who names a path wants it measured, or to know why it cannot be.
        (Some(path), _) => examine::disk(path)?,
        (None, true) => Err("not asked for (--no-disk)".into()),
        (None, false) => examine::disk(Path::new(".")).unwrap_or_else(|e| Err(e.to_string())),
    };
    let devices = examine::devices(&args.device)?;
    let findings = examine::machine(args.threads.map(|list| list.0), disk, devices)?;
    if !findings.is_steady() {
        log::warn!("other programs keep this machine busy: its figures vary from round to round");
    }
    match args.json {
        true => out::line(&format!("{:#}", json::of(&findings))),
        false => out::line(&text::of(&findings)),
    }
}
