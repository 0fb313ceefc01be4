//! `moeba-lab tables`.

use crate::plot;
use crate::tables::prescope::Trained;
use crate::tables::side_by_side_live::Live;
use crate::tables::{self, Inputs};
use moeba::policy::papers::prescope::llapor::{HELD_OUT_SECTION, restore_held_out};
use moeba::policy::{LlaPor, Profile, Shape};
use moeba::trace::format::Trace;
use moeba::train::LlaporReport;
use moeba::{Error, Result, interrupt, terminal};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// A trace of `moeba trace record`
    pub trace: PathBuf,
    /// Folder for POLICIES.md and policies/
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// A trace of a model with few large experts
    #[arg(long, value_name = "TRACE")]
    pub coarse: Option<PathBuf>,
    /// A trace of the first model with --ahead 6 --hidden
    #[arg(long, value_name = "TRACE")]
    pub full: Option<PathBuf>,
    /// Accuracies that moeba trace train --report wrote
    #[arg(long, value_name = "FILE")]
    pub llapor: Option<PathBuf>,
    /// A profile with a predictor that moeba trace train trained on the --full trace with
    /// --held-out 35 or more
    #[arg(long, value_name = "PROFILE", requires = "full")]
    pub networks: Option<PathBuf>,
    /// Output of `moeba doctor --json` on a machine with a GPU: how fast experts are transferred
    /// with AsyncIO and without
    #[arg(long, value_name = "FILE")]
    pub machine: Option<PathBuf>,
    /// Figures of live runs that `moeba-lab papers` wrote
    #[arg(long, value_name = "FILE")]
    pub live: Option<PathBuf>,
    /// Requests at the start that only fill caches [default: 8, or half of a short trace]
    #[arg(long, value_name = "N")]
    pub warm_up: Option<usize>,
}

const DOCUMENT: &str = "POLICIES.md";

pub fn run(args: &Args) -> Result<()> {
    let trace = Trace::open(&args.trace)?;
    let coarse = args.coarse.as_deref().map(Trace::open).transpose()?;
    let full = args.full.as_deref().map(Trace::open).transpose()?;
    let mut inputs = Inputs::new(&trace, coarse.as_ref(), full.as_ref());
    let all = inputs.sources().map(|source| source.trace).chain(full.as_ref());
    let shortest = all.map(|trace| trace.requests().len()).min().unwrap_or(0);
    inputs.n_warm_up = warm_up(args.warm_up, shortest)?;
    inputs.llapor = args.llapor.as_deref().map(accuracies).transpose()?;
    if let (Some(path), Some(full)) = (&args.networks, &full) {
        inputs.networks = Some(networks(path, full)?);
    }
    inputs.sync_slowdown = args.machine.as_deref().map(sync_slowdown).transpose()?;
    inputs.live = args.live.as_deref().map(live).transpose()?.unwrap_or_default();
    write(&inputs, &args.output)
}

/// Writes the document, and each table and plot as a file.
fn write(inputs: &Inputs, folder: &Path) -> Result<()> {
    let document = folder.join(DOCUMENT);
    check_is_ours(&document)?;
    let plots = folder.join("policies");
    fs::create_dir_all(&plots).map_err(|e| Error::io(&plots, e))?;
    let bar = terminal::bar("replaying", tables::SECTIONS.len() as u64);
    let (mut n_tables, mut n_plots) = (0, 0);
    let mut text = tables::introduction(inputs);
    for section in tables::SECTIONS {
        interrupt::check()?;
        text.push_str(&format!("## {}\n\n", section.title));
        for table in (section.tables)(inputs)? {
            text.push_str(&tables::markdown(&table, "policies"));
            write_text(&plots.join(format!("{}.csv", table.id)), &tables::csv(&table))?;
            n_tables += 1;
            if let Some(svg) = plot::svg(&table) {
                write_text(&plots.join(format!("{}.svg", table.id)), &svg)?;
                n_plots += 1;
            }
        }
        bar.inc(1);
    }
    drop(bar);
    write_text(&document, &format!("{}\n", text.trim_end()))?;
    let (document, plots) = (document.display(), plots.display());
    println!("{document}: {n_tables} tables and {n_plots} plots; as files in {plots}");
    Ok(())
}

/// Refuses to replace a document that `write` did not write.
fn check_is_ours(document: &Path) -> Result<()> {
    match fs::read_to_string(document) {
        Ok(text) if !text.starts_with(tables::HEADING) => Err(Error::invalid(format!(
            "{} exists and is not a report of moeba-lab; it is not replaced",
            document.display()
        ))),
        _ => Ok(()),
    }
}

fn write_text(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| Error::io(path, e))
}

pub fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| Error::io(path, e))
}

/// The number of requests that only fill caches: at least one request is left to be measured.
fn warm_up(asked: Option<usize>, n_requests: usize) -> Result<usize> {
    const USUAL: usize = 8;
    let most = n_requests.saturating_sub(1);
    match asked {
        Some(n) if n > most => Err(Error::Usage(format!(
            "--warm-up {n} leaves nothing to measure: the shortest trace has {n_requests} \
             requests, so give at most {most}"
        ))),
        Some(n) => Ok(n),
        None => Ok(if most < USUAL { n_requests / 2 } else { USUAL }),
    }
}

fn accuracies(path: &Path) -> Result<LlaporReport> {
    let bad = |why| Error::invalid(format!("{}: not a report of accuracy: {why}", path.display()));
    LlaporReport::parse(&read_text(path)?).map_err(bad)
}

/// The predictor in a profile, for a model whose router inputs are in the trace.
fn networks(path: &Path, full: &Trace) -> Result<Trained> {
    let header = full.header();
    let bad = |why: String| {
        Error::invalid(format!("{} has no networks for the --full trace: {why}", path.display()))
    };
    if !header.hidden {
        return Err(bad("the trace has no router inputs: record it with --hidden".into()));
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    let profile = Profile::decode(&bytes, &header.key).map_err(bad)?;
    let shape = Shape::of_model(header.layers.iter().map(|l| l.n_experts).collect(), header.k);
    let model = LlaPor::from_profile(&shape, &profile, false).map_err(bad)?.model().clone();
    if model.n_embd() != header.n_embd {
        let (n_embd, n) = (header.n_embd, model.n_embd());
        return Err(bad(format!("they take {n} values of an activation, there are {n_embd}")));
    }
    let held_out = profile.get(HELD_OUT_SECTION);
    let held_out = held_out.ok_or(format!("{HELD_OUT_SECTION} is missing")).map_err(bad)?;
    let n_held_out = restore_held_out(held_out)
        .map_err(|why| bad(format!("{HELD_OUT_SECTION} cannot be used, as {why}")))?;
    Ok(Trained { model, n_held_out })
}

/// How many times as long an expert's transfer takes as one whole from pageable memory.
fn sync_slowdown(path: &Path) -> Result<f64> {
    let bad =
        |why: &str| Error::invalid(format!("{} is no measurement of a GPU: {why}", path.display()));
    let found: serde_json::Value =
        serde_json::from_str(&read_text(path)?).map_err(|e| bad(&e.to_string()))?;
    let devices = &found["devices"];
    if devices["emulated"] == true {
        return Err(bad("the device is emulated, so its rates mean nothing"));
    }
    let rate = |name: &str| {
        let rate = devices["gpus"][0][name].as_f64().filter(|rate| *rate > 0.0);
        rate.ok_or_else(|| bad(&format!("{name} is missing; moeba doctor --json writes it")))
    };
    Ok(rate("experts_async_gb_per_second")? / rate("experts_pageable_gb_per_second")?)
}

fn live(path: &Path) -> Result<Vec<Live>> {
    let text = read_text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parse = |(i, line): (usize, &str)| {
        let bad = |why| Error::invalid(format!("{}, line {}: {why}", path.display(), i + 1));
        Live::parse(line).map_err(bad)
    };
    lines.map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_requests_are_left_to_be_measured() {
        let asked = |n, of| warm_up(Some(n), of).map_err(|e| e.to_string());
        assert_eq!((asked(0, 12), asked(11, 12)), (Ok(0), Ok(11)));
        assert!(asked(20, 12).unwrap_err().contains("at most 11"));
        let usual = |of| warm_up(None, of).unwrap();
        assert_eq!([0, 1, 2, 8, 9, 100].map(usual), [0, 0, 1, 4, 8, 8]);
    }

    #[test]
    fn a_machines_transfers_are_read_and_emulated_ones_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            sync_slowdown(&path).map_err(|e| e.to_string())
        };
        let gpu = |emulated: bool| {
            format!(
                r#"{{"devices": {{"emulated": {emulated}, "gpus": [
                    {{"experts_async_gb_per_second": 24.0, "experts_pageable_gb_per_second": 8.0}}
                ]}}}}"#
            )
        };
        assert_eq!(read(&gpu(false)), Ok(3.0));
        assert!(read(&gpu(true)).unwrap_err().contains("emulated"));
        assert!(read(r#"{"devices": {"gpus": []}}"#).unwrap_err().contains("is missing"));
        assert!(read("no json").unwrap_err().contains("no measurement of a GPU"));
    }

    #[test]
    fn only_a_report_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let document = folder.path().join(DOCUMENT);
        assert!(check_is_ours(&document).is_ok());
        fs::write(&document, "# My own\n").unwrap();
        assert!(check_is_ours(&document).unwrap_err().to_string().contains("not replaced"));
        fs::write(&document, format!("{}\n", tables::HEADING)).unwrap();
        assert!(check_is_ours(&document).is_ok());
    }
}
