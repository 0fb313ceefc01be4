//! `moeba trace train`: trains PreScope's predictor on the inputs and choices of a model's routers,
//! and finds FineMoE's prefetch distance. Both go into the model's profile, beside its other
//! sections.

use super::super::args;
use super::super::new_file::{NewFile, write_text};
use super::super::out;
use super::replay::percent;
use super::{distance, samples};
use crate::policy::papers::prescope::llapor::save_held_out;
use crate::policy::{LlaPor, ModelKey, Predictor, Profile, Shape};
use crate::trace::format::Trace;
use crate::trace::table::{Cell, Row, Table, columns};
use crate::train::report::{LlaporReport, PREDICTION, TRAINING, Value};
use crate::train::{Accuracy, LayerReport, Report, TrainOptions, train};
use crate::{Error, Result, interrupt, terminal};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// Trace that `moeba trace record --hidden` wrote
    trace: PathBuf,
    /// Profile to put the predictor into (see run --profile)
    #[arg(short, long, value_name = "PROFILE")]
    output: PathBuf,
    /// Decoded tokens to train and to evaluate on, over all requests
    #[arg(long, value_name = "N", default_value = "20000", value_parser = args::tokens)]
    tokens: usize,
    /// Passes over these tokens
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().epochs)]
    #[arg(value_parser = epochs)]
    epochs: usize,
    /// Percentage of these tokens that is held out for evaluation
    #[arg(long, value_name = "N", default_value = "12.5", value_parser = held_out)]
    held_out: f64,
    /// Seed for training
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u32,
    /// File for accuracy and times as CSV: layer;predictor;measure;value
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    #[command(flatten)]
    distance: distance::Args,
}

const MAX_EPOCHS: i64 = 100_000;

/// No profile is larger; a part of one is none.
const PROFILE_BYTES_MAX: u64 = 1 << 30;

fn epochs(text: &str) -> super::super::values::Parsed<usize> {
    super::super::values::integer(text, 1, MAX_EPOCHS)
}

fn held_out(text: &str) -> super::super::values::Parsed<f64> {
    let part = percent(text).ok().filter(|part| *part < 1.0);
    part.ok_or_else(|| "expected a percentage between 0 and 100".into())
}

pub fn run(args: Args) -> Result<()> {
    let trace = Trace::open(&args.trace)?;
    let (header, path) = (trace.header(), args.trace.display());
    if !header.hidden {
        return Err(Error::invalid(format!(
            "{path}: the trace has no router inputs: record it with --hidden"
        )));
    }
    // Before the long work: a profile that must not be replaced.
    let mut profile = existing(&args.output, &header.key)?;
    let output = NewFile::create(&args.output)?;

    let shape = Shape::of_model(header.layers.iter().map(|l| l.n_experts).collect(), header.k);
    let samples = samples::of_trace(&trace, args.tokens)
        .map_err(|why| Error::invalid(format!("{path}: {why}")))?;
    let options = TrainOptions {
        epochs: args.epochs,
        seed: args.seed.into(),
        held_out: args.held_out,
        ..TrainOptions::default()
    };
    let bar = terminal::bar("train", (shape.moe_layers().count() * args.epochs) as u64);
    let trained = train(&shape, &samples, &options, &mut |_| {
        bar.inc(1);
        interrupt::check()
    })?;
    drop(bar);

    let bytes = trained.model.layers.iter().flatten().map(|layer| 4 * layer.n_products());
    let measured = measured(&trained.report, &bytes.collect::<Vec<_>>());
    let llapor = LlaPor::new(&shape, trained.model, false).map_err(Error::invalid)?;
    llapor.save(&mut profile);
    save_held_out(trained.report.n_held_out, &mut profile);
    let distances = args.distance.profile(&trace, &shape, args.tokens, &mut profile)?;
    write(output, &profile.encode(&header.key))?;
    if let Some(report) = &args.report {
        write_text(report, &measured.encode())?;
    }
    let setting = format!("{}, {} tokens", header.model, samples.n_tokens());
    let accuracy = accuracy(&trained.report, setting);
    let tables = [Some(accuracy), distances].into_iter().flatten();
    out::write(tables.map(|table| table.markdown()).collect::<String>().as_bytes())
}

/// A profile's bytes, or as many of another file's as a profile may have.
fn read_profile(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(PROFILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The present profile; an empty one if there is no file.
fn existing(path: &Path, key: &ModelKey) -> Result<Profile> {
    match read_profile(path) {
        Ok(bytes) if bytes.is_empty() => Ok(Profile::default()),
        Ok(bytes) => Profile::decode(&bytes, key).map_err(|why| {
            Error::invalid(format!("{}: {why}; it is not overwritten", path.display()))
        }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Profile::default()),
        Err(e) => Err(Error::io(path, e)),
    }
}

fn write(mut file: NewFile, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).map_err(|e| Error::io(file.path(), e))?;
    file.finish()
}

/// The predictors of a layer that were judged.
fn judged(layer: &LayerReport) -> [(&'static str, Option<&Accuracy>); 3] {
    let LayerReport { llapor, gate, statistics, .. } = layer;
    [("llapor", Some(llapor)), ("gate", gate.as_ref()), ("statistics", Some(statistics))]
}

/// `bytes`: of each MoE layer's network.
fn measured(report: &Report, bytes: &[usize]) -> LlaporReport {
    let mut out = LlaporReport::default();
    for (layer, bytes) in report.layers.iter().zip(bytes) {
        let mut push = |predictor: &str, measure: String, value: f64| {
            let (layer, predictor) = (layer.layer, predictor.to_string());
            out.push(Value { layer, predictor, measure, value });
        };
        push("llapor", "bytes".into(), *bytes as f64);
        push("llapor", TRAINING.into(), layer.times.training.as_secs_f64());
        push("llapor", PREDICTION.into(), 1e6 * layer.times.prediction.as_secs_f64());
        for (predictor, accuracy) in judged(layer) {
            let Some(Accuracy { top, hot }) = accuracy else { continue };
            push(predictor, "samples".into(), layer.n_tokens as f64);
            for (n, value) in (1..).zip(top) {
                push(predictor, format!("top{n}"), *value);
            }
            for (n, value) in (2..).zip(hot.top) {
                push(predictor, format!("hot{n}"), value);
            }
            push(predictor, "coverage".into(), hot.tokens);
        }
    }
    out
}

/// The hit rate of all k experts, by layer.
fn accuracy(report: &Report, setting: String) -> Table {
    let k = report.layers.first().map_or(0, |layer| layer.llapor.top.len());
    let row = |layer: &LayerReport| {
        let cells = judged(layer).map(|(_, accuracy)| {
            accuracy.and_then(|a| a.top.last()).map_or(Cell::Missing, |share| Cell::Share(*share))
        });
        Row::new(layer.layer.to_string(), cells)
    };
    Table {
        title: format!("Accuracy of the top {k} by layer"),
        setting: format!("{setting}; the last of them are held out for this table."),
        columns: columns("layer", ["LLaPor", "gate", "statistics"]),
        rows: report.layers.iter().map(row).collect(),
    }
}
