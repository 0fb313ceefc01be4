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
use crate::train::report::{
    GATE, LLAPOR, LLAPOR_SECOND, LlaporReport, PREDICTION, STATISTICS, TRAINING, Value,
};
use crate::train::{Accuracy, LayerReport, Report, TrainOptions, Trained, n_networks, train};
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
    let bar = terminal::bar("train", (n_networks(&shape) * args.epochs) as u64);
    let trained = train(&shape, &samples, &options, &mut |_| {
        bar.inc(1);
        interrupt::check()
    })?;
    drop(bar);

    let measured = measured(&trained);
    let Trained { model, report } = trained;
    let llapor = LlaPor::new(&shape, model, false).map_err(Error::invalid)?;
    llapor.save(&mut profile);
    save_held_out(report.n_held_out, &mut profile);
    let distances = args.distance.profile(&trace, &shape, args.tokens, &mut profile)?;
    write(output, &profile.encode(&header.key))?;
    if let Some(path) = &args.report {
        write_text(path, &measured.encode())?;
    }
    let setting = format!("{}, {} tokens", header.model, samples.n_tokens());
    let accuracy = accuracy(&report, setting);
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

fn measured(trained: &Trained) -> LlaporReport {
    let mut out = LlaporReport::default();
    let Trained { model, report } = trained;
    for (networks, layers, name) in
        [(&model.layers, &report.layers, LLAPOR), (&model.second, &report.second, LLAPOR_SECOND)]
    {
        for (network, layer) in networks.iter().flatten().zip(layers) {
            push(&mut out, layer, name, "bytes", (4 * network.n_products()) as f64);
            push(&mut out, layer, name, TRAINING, layer.times.training.as_secs_f64());
            push(&mut out, layer, name, PREDICTION, 1e6 * layer.times.prediction.as_secs_f64());
            push_accuracy(&mut out, layer, name, &layer.llapor);
        }
    }
    for layer in &report.layers {
        layer.gate.iter().for_each(|gate| push_accuracy(&mut out, layer, GATE, gate));
        push_accuracy(&mut out, layer, STATISTICS, &layer.statistics);
    }
    out
}

fn push(out: &mut LlaporReport, layer: &LayerReport, predictor: &str, measure: &str, value: f64) {
    let (predictor, measure) = (predictor.to_string(), measure.to_string());
    out.push(Value { layer: layer.layer, predictor, measure, value });
}

fn push_accuracy(out: &mut LlaporReport, layer: &LayerReport, predictor: &str, of: &Accuracy) {
    push(out, layer, predictor, "samples", layer.n_tokens as f64);
    for (n, value) in (1..).zip(&of.top) {
        push(out, layer, predictor, &format!("top{n}"), *value);
    }
    for (n, value) in (2..).zip(of.hot.top) {
        push(out, layer, predictor, &format!("hot{n}"), value);
    }
    push(out, layer, predictor, "coverage", of.hot.tokens);
}

/// The hit rate of all k experts, by layer.
fn accuracy(report: &Report, setting: String) -> Table {
    let k = report.layers.first().map_or(0, |layer| layer.llapor.top.len());
    let cell = |accuracy: Option<&Accuracy>| {
        accuracy.and_then(|a| a.top.last()).map_or(Cell::Missing, |share| Cell::Share(*share))
    };
    let row = |(at, layer): (usize, &LayerReport)| {
        let LayerReport { llapor, gate, statistics, .. } = layer;
        let second = report.second.get(at).map(|layer| &layer.llapor);
        let cells = [Some(llapor), second, gate.as_ref(), Some(statistics)].map(cell);
        Row::new(layer.layer.to_string(), cells)
    };
    Table {
        title: format!("Accuracy of the top {k} by layer"),
        setting: format!("{setting}; the last of them are held out for this table."),
        columns: columns("layer", ["LLaPor", "LLaPor two ahead", "gate", "statistics"]),
        rows: report.layers.iter().enumerate().map(row).collect(),
    }
}
