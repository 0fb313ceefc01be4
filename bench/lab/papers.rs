//! `moeba-lab papers`: every table of the papers in one command. With a text it first records the
//! demo model's routing of it, trains PreScope's networks on that, and runs the engine live; what
//! it makes is read by `tables`, so no figure passes through anybody's hands.

use crate::command::{self, read_text};
use crate::live::{self, LiveOptions};
use moeba::{Error, Result, interrupt};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folder for POLICIES.md, policies/ and what is made on the way
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Held-out prose, which the models were not trained on, for recordings and live runs; without
    /// it the tables are of the traces alone
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The demo model
    #[arg(long, value_name = "GGUF", default_value = "models/demo/moeba-demo.gguf")]
    demo: PathBuf,
    /// Another model to run live, one with several granules an expert for instance
    #[arg(long, value_name = "NAME=GGUF")]
    model: Vec<String>,
    /// Folder with demo.mtrace and sibling.mtrace
    #[arg(long, value_name = "DIR", default_value = "bench/traces")]
    traces: PathBuf,
    /// Output of `moeba doctor --json` on a machine with a GPU
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
    /// Live requests of each policy that are measured
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Live requests before those, from which policies learn
    #[arg(long, value_name = "N", default_value_t = 1)]
    warm_up: usize,
    /// The live runs alone, and no tables of traces
    #[arg(long, requires = "text")]
    live_only: bool,
    /// Policies to run live, with a semicolon between them [default: all]
    #[arg(long, value_name = "NAME;NAME;…")]
    policies: Option<String>,
}

/// Tokens of the recording, and the percentage of them that PreScope's networks are not trained on.
const RECORDED: [&str; 6] = ["--n-prompt", "32-96", "--n-gen", "64", "--requests", "64"];
const HELD_OUT: &str = "35";

pub fn run(args: &Args) -> Result<()> {
    fs::create_dir_all(&args.output).map_err(|e| Error::io(&args.output, e))?;
    let made = args.text.as_deref().map(|text| make(args, text)).transpose()?;
    if args.live_only {
        let made = made.expect("a text is required");
        print!("{}", live::report(&read_text(&made.live)?)?);
        return Ok(());
    }
    let made = made.unwrap_or_default();
    command::run(&command::Args {
        trace: args.traces.join("demo.mtrace"),
        output: args.output.clone(),
        coarse: Some(args.traces.join("sibling.mtrace")),
        full: made.full,
        llapor: made.llapor,
        networks: made.networks,
        machine: args.machine.clone(),
        live: (!made.live.as_os_str().is_empty()).then_some(made.live),
        warm_up: None,
    })
}

/// Files that `tables` reads.
#[derive(Default)]
struct Made {
    full: Option<PathBuf>,
    llapor: Option<PathBuf>,
    networks: Option<PathBuf>,
    live: PathBuf,
}

fn make(args: &Args, text: &Path) -> Result<Made> {
    let at = |name: &str| args.output.join(name);
    let moeba = engine()?;
    let mut made = Made { live: at("live.csv"), ..Made::default() };
    let text = without_separators(text, &at("text.txt"))?;
    if !args.live_only {
        let (full, llapor, networks) = (at("full.mtrace"), at("llapor.csv"), at("full.moeba"));
        let record = ["trace", "record", "--ahead", "6", "--hidden", "--force"].map(OsStr::new);
        let files = [args.demo.as_os_str(), OsStr::new("-f"), text.as_os_str()];
        let out = [OsStr::new("-o"), full.as_os_str()];
        let parts = [&record[..], &RECORDED.map(OsStr::new), &files, &out];
        call(&moeba, parts.concat())?;
        let train = ["trace", "train", "--held-out", HELD_OUT, "--force"].map(OsStr::new);
        let report = [OsStr::new("--report"), llapor.as_os_str()];
        let out = [full.as_os_str(), OsStr::new("-o"), networks.as_os_str()];
        call(&moeba, [&train[..], &report, &out].concat())?;
        (made.full, made.llapor, made.networks) = (Some(full), Some(llapor), Some(networks));
    }
    let mut models = vec![("demo".to_string(), args.demo.clone())];
    for pair in &args.model {
        let (name, path) = pair
            .split_once('=')
            .ok_or_else(|| Error::Usage(format!("--model {pair}: expected NAME=GGUF")))?;
        models.push((name.into(), path.into()));
    }
    let policies = args.policies.as_deref().map(|names| names.split(';').collect());
    let options = LiveOptions {
        moeba: &moeba,
        text: &read_text(&text)?,
        folder: &args.output,
        n_rounds: args.rounds,
        n_warm_up: args.warm_up,
        policies: policies.unwrap_or_else(live::policies),
    };
    let lines = live::run(&options, &models)?;
    fs::write(&made.live, lines).map_err(|e| Error::io(&made.live, e))?;
    Ok(made)
}

/// The binary that was built beside this one.
fn engine() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(|e| Error::io(Path::new("moeba-lab"), e))?;
    let engine = own.with_file_name(format!("moeba{}", std::env::consts::EXE_SUFFIX));
    match engine.is_file() {
        true => Ok(engine),
        false => Err(Error::Usage(format!(
            "{} is missing: build it with cargo build --release --features lab",
            engine.display()
        ))),
    }
}

/// Separators of documents are tokens, not text.
fn without_separators(text: &Path, to: &Path) -> Result<PathBuf> {
    let plain = read_text(text)?.replace("<|endoftext|>", "\n");
    fs::write(to, plain).map_err(|e| Error::io(to, e))?;
    Ok(to.into())
}

/// Runs the engine; what it prints goes where it goes for a user.
pub fn call(moeba: &Path, args: Vec<&OsStr>) -> Result<()> {
    interrupt::check()?;
    let status = Command::new(moeba).args(&args).status().map_err(|e| Error::io(moeba, e))?;
    if status.success() {
        return Ok(());
    }
    interrupt::check()?;
    let args = args.join(OsStr::new(" "));
    Err(Error::invalid(format!("moeba {} ended with {status}", args.to_string_lossy())))
}
