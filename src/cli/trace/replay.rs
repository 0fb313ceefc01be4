//! `moeba trace replay`: compares policies on recorded routing.

use super::super::args;
use super::super::out;
use super::super::values::{self, Parsed};
use super::asked::Asked;
use super::machine::{MachineArg, known, machine_or_file};
use super::stats::{PartArg, unions};
use crate::engine::plan::ram::RamBudget;
use crate::engine::{Engine, EngineOptions};
use crate::experts::Counters;
use crate::policy::PolicySpec;
use crate::trace::format::{Header, Trace};
use crate::trace::table::{Cell, Row, Table, columns};
use crate::trace::{
    Device, Geometry, Ordered, Report, Reuse, Router, Routing, SimOptions, Source, Tiers, by_turns,
    deal, future, simulate_policy,
};
use crate::{Error, Result, terminal};
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// A trace of `moeba trace record` or `moeba trace import`
    trace: PathBuf,
    /// Policies to compare (see run --policy), or what knows the future and no policy can beat:
    /// belady knows all of it, known:N the next N tokens; may be repeated
    #[arg(long, value_name = "NAME", default_values_t = [Asked::default()])]
    policy: Vec<Asked>,
    /// Memory for experts, in percent of all experts
    #[arg(long, value_name = "N,N,…", default_value = "10,25,50,75")]
    #[arg(value_parser = percents)]
    budget: Percents,
    /// Machine to simulate: a5000, a6000, a100, h100, rtx3090 or v100; or the one that a file of
    /// `moeba doctor --json` describes
    #[arg(long, value_name = "NAME|FILE.json", default_value = "rtx3090")]
    #[arg(value_parser = machine_or_file)]
    machine: MachineArg,
    /// Published model to take expert sizes from: mixtral-8x7b, qwen1.5-moe, qwen3-30b-a3b,
    /// deepseek-v2-lite or moonlight-16b-a3b
    #[arg(long, value_name = "NAME", default_value = "qwen1.5-moe", value_parser = sizes)]
    sizes: String,
    /// The traced model's file, to take slots and reads from instead
    #[arg(long, value_name = "FILE")]
    gguf: Option<PathBuf>,
    #[command(flatten)]
    part: PartArg,
    /// Requests at the start that only fill caches [default: 8, or half of a short trace]
    #[arg(long, value_name = "N", value_parser = args::tokens_or_zero)]
    warm_up: Option<usize>,
    /// Deal the requests over N machines, each with its own memory, and compare the rules by which
    /// a router can choose a request's machine
    #[arg(long, value_name = "N", value_parser = machines)]
    replicas: Option<usize>,
    /// Print as md (tables) or csv
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    output: Format,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Format {
    Md,
    Csv,
}

/// Parts of 1.
#[derive(Clone, Debug)]
pub struct Percents(pub Vec<f64>);

pub fn percents(text: &str) -> Parsed<Percents> {
    values::list(text, percent).map(Percents)
}

/// A part of 1.
pub fn percent(text: &str) -> std::result::Result<f64, &'static str> {
    match text.trim().trim_end_matches('%').parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent / 100.0),
        _ => Err("expected a percentage above 0, at most 100"),
    }
}

fn machines(text: &str) -> Parsed<usize> {
    values::integer(text, 1, 1000)
}

pub fn machine(text: &str) -> Parsed<String> {
    known(text, Device::names())
}

pub fn sizes(text: &str) -> Parsed<String> {
    known(text, Geometry::names())
}

const HIT_RATE: &str = "Hit rate of decode";

/// The default of `--warm-up`.
const USUAL_WARM_UP: usize = 8;

pub fn run(args: Args) -> Result<()> {
    let trace = Trace::open(&args.trace)?;
    for policy in &args.policy {
        if let Some(what) = lacks(*policy, trace.header()) {
            let path = args.trace.display();
            return Err(Error::invalid(format!("{path}: {policy} needs {what}")));
        }
    }
    let requests = args.part.requests(&trace)?;
    match args.replicas {
        Some(n) => routers(&args, &trace, &requests, n),
        None => compare(&args, &trace, &requests),
    }
}

/// An input of a policy that the trace does not have.
fn lacks(policy: Asked, header: &Header) -> Option<&'static str> {
    let Asked::Policy(PolicySpec { predictor, eviction, .. }) = policy else { return None };
    if header.ids_only && (predictor == "map" || eviction == "map") {
        return Some(
            "the routers' probabilities, and this trace has the numbers of the chosen experts \
             alone: record one with moeba trace record, or import one with weights",
        );
    }
    let looks_ahead = predictor == "next-layer" && header.ahead == 0;
    looks_ahead.then_some(
        "what the next layer's router makes of an activation, which this trace does not have: \
         record one with moeba trace record",
    )
}

/// The rules of a router, by budget, with the first policy.
fn routers(args: &Args, trace: &Trace, requests: &[usize], n: usize) -> Result<()> {
    let mut order = by_turns(trace, 1);
    order.retain(|request| requests.contains(request));
    if order.len() < n {
        let why = format!("--replicas {n}: the trace has {} requests", order.len());
        return Err(Error::Usage(why));
    }
    let stands_for = Geometry::names().find(|name| *name == args.sizes).expect("it was checked");
    let source = Source { trace, stands_for };
    let machine = args.machine.read()?;
    let policy = args.policy.first().copied().unwrap_or_default();
    let bar = terminal::bar("replaying", (Router::ALL.len() * args.budget.0.len()) as u64);
    let (mut hits, mut bytes) = (Vec::new(), Vec::new());
    for router in Router::ALL {
        let dealt = deal(trace, &order, n, router);
        let (mut hit_cells, mut byte_cells) = (Vec::new(), Vec::new());
        for &share in &args.budget.0 {
            let mut counters = Counters::default();
            let mut n_tokens = 0;
            for requests in &dealt.requests {
                crate::interrupt::check()?;
                let mut options = machine.options(&source, &policy.spec().to_string(), share);
                options.n_warm_up = warm_up_of(args.warm_up, requests.len());
                let routing = source.routing();
                let routing = Ordered { routing: &routing, order: requests.clone() };
                let decode = one(args, trace, &routing, policy, share, &options)?.decode;
                counters = counters.plus(&decode.counters);
                n_tokens += decode.n_tokens;
            }
            hit_cells.push(Cell::Share(counters.hit_rate()));
            let mib = counters.read_bytes as f64 / n_tokens as f64 / f64::from(1 << 20);
            byte_cells.push(Cell::Number(mib, 2));
            bar.inc(1);
        }
        let most = dealt.n_tokens.iter().max().copied().unwrap_or_default() as f64;
        let mean = dealt.n_tokens.iter().sum::<usize>() as f64 / n as f64;
        hit_cells.push(Cell::Number(most / mean, 2));
        hits.push(Row::new(router.name(), hit_cells));
        bytes.push(Row::new(router.name(), byte_cells));
    }
    drop(bar);
    let setting = format!(
        "By memory for experts, {n} machines with the policy {policy}; {}.",
        source.describe(&machine.name())
    );
    let budgets: Vec<String> =
        args.budget.0.iter().map(|share| format!("{:.0} %", 100.0 * share)).collect();
    let with_load = budgets.iter().cloned().chain(["most tokens / mean".to_owned()]);
    let tables = [
        (HIT_RATE, columns("router", with_load), hits),
        ("MiB read for a token", columns("router", budgets.clone()), bytes),
    ];
    for (title, columns, rows) in tables {
        let table = Table { title: title.into(), setting: setting.clone(), columns, rows };
        write_table(args.output, &table)?;
    }
    Ok(())
}

/// Each machine begins with empty caches: half of a few requests, and a few of many, fill them.
fn warm_up_of(asked: Option<usize>, n_requests: usize) -> usize {
    asked.unwrap_or(USUAL_WARM_UP).min(n_requests / 2)
}

pub fn write_table(format: Format, table: &Table) -> Result<()> {
    match format {
        Format::Md => out::write(table.markdown().as_bytes()),
        Format::Csv => out::write(table.csv().as_bytes()),
    }
}

/// The number of requests that only fill caches. At least one request is left to measure.
fn warm_up(asked: Option<usize>, n_requests: usize) -> Result<usize> {
    let most = n_requests.saturating_sub(1);
    match asked {
        Some(n) if n > most => Err(Error::Usage(format!(
            "--warm-up {n} leaves nothing to measure: the trace has {n_requests} requests, so give \
             at most {most}"
        ))),
        Some(n) => Ok(n),
        None if most < USUAL_WARM_UP => {
            let n = n_requests / 2;
            log::warn!(
                "the trace has {n_requests} requests: {n} of them fill caches (--warm-up), the \
                 others are measured"
            );
            Ok(n)
        }
        None => Ok(USUAL_WARM_UP),
    }
}

/// The policies that were asked for, by budget.
fn compare(args: &Args, trace: &Trace, requests: &[usize]) -> Result<()> {
    let n_warm_up = warm_up(args.warm_up, requests.len())?;
    // Names live as long as the program: they are a handful.
    let stands_for = Geometry::names().find(|name| *name == args.sizes).expect("it was checked");
    let source = Source { trace, stands_for };
    let machine = args.machine.read()?;
    let bar = terminal::bar("replaying", (args.policy.len() * args.budget.0.len()) as u64);
    let mut runs = Vec::new();
    for policy in &args.policy {
        let mut reports = Vec::new();
        for &share in &args.budget.0 {
            crate::interrupt::check()?;
            let mut options = machine.options(&source, &policy.spec().to_string(), share);
            options.n_warm_up = n_warm_up;
            let routing = source.routing();
            let routing = Ordered { routing: &routing, order: requests.to_vec() };
            reports.push(one(args, trace, &routing, *policy, share, &options)?);
            bar.inc(1);
        }
        runs.push((policy.to_string(), reports));
    }
    drop(bar);
    let reuse = Reuse::of(trace);
    let setting = format!(
        "{}{}. Of all uses of experts {:.1} % are of experts that the token before used as well, \
         and {:.1} % of the most used quarter",
        source.describe(&machine.name()),
        args.part.describe(requests.len()),
        100.0 * reuse.of_last_token,
        100.0 * reuse.of_hottest_quarter
    );
    let values: [(&str, fn(&Report) -> Cell); 4] = [
        ("TPOT, ms", |r| Cell::Number(r.tpot.mean / 1e6, 3)),
        ("TTFT, ms", |r| Cell::Number(r.ttft.mean / 1e6, 3)),
        (HIT_RATE, |r| Cell::Share(r.decode.counters.hit_rate())),
        ("MiB read for a token", |r| {
            Cell::Number(r.decode.read_bytes_per_token() / f64::from(1 << 20), 2)
        }),
    ];
    let budgets = || args.budget.0.iter().map(|share| format!("{:.0} %", 100.0 * share));
    for (title, value) in values {
        let rows = runs.iter().map(|(name, reports)| Row::new(name, reports.iter().map(value)));
        let unions = (title == HIT_RATE).then(|| unions(trace, &args.budget.0));
        let table = Table {
            title: title.into(),
            setting: format!("By memory for experts; {setting}."),
            columns: columns("policy", budgets()),
            rows: rows.chain(unions).collect(),
        };
        write_table(args.output, &table)?;
    }
    Ok(())
}

/// Simulates one policy with one budget.
fn one(
    args: &Args,
    trace: &Trace,
    routing: &dyn Routing,
    policy: Asked,
    share: f64,
    options: &SimOptions,
) -> Result<Report> {
    let tiers = match &args.gguf {
        Some(model) => own_tier(model, trace, share)?,
        None => Tiers::of(routing, options)?,
    };
    simulate_policy(routing, options, tiers, |shape| match policy {
        Asked::Policy(spec) => {
            let policy = spec.build(shape, &options.profile);
            // Once, not for each budget.
            let notes = policy.notes.iter().filter(|_| share == args.budget.0[0]);
            notes.for_each(|note| log::warn!("{note}"));
            policy
        }
        Asked::Bound(bound) => bound.policy(future(routing), shape),
    })
}

/// Slots and reads of the traced model itself.
fn own_tier(model: &Path, trace: &Trace, share: f64) -> Result<Tiers> {
    let sizes = Engine::plan_of(model, &EngineOptions::default())?.sizes;
    let budget = (share * sizes.slot_bytes as f64) as u64;
    let ram = RamBudget::Bytes(budget.max(sizes.minimum_bytes));
    let options = EngineOptions { ram, ..EngineOptions::default() };
    let Some((plan, layout)) = Engine::tier_of(model, &options)? else {
        return Err(Error::Usage(format!(
            "all experts of {} fit into this budget: there is nothing to replay",
            model.display()
        )));
    };
    let shape = plan.layers.iter().map(|layer| layer.n_experts);
    if !shape.eq(trace.header().layers.iter().map(|layer| layer.n_experts)) {
        return Err(Error::Usage(format!(
            "{} is not the model of the trace: its layers or experts differ",
            model.display()
        )));
    }
    Ok(Tiers { plan, layout })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_requests_are_left_to_be_measured() {
        let asked = |n, of| warm_up(Some(n), of).map_err(|e| e.to_string());
        assert_eq!((asked(0, 12), asked(11, 12)), (Ok(0), Ok(11)));
        let why = asked(20, 12).unwrap_err();
        for word in ["--warm-up 20", "12 requests", "at most 11"] {
            assert!(why.contains(word), "{why}");
        }
        assert!(asked(1, 1).is_err() && asked(0, 1).is_ok());
        let usual = |of| warm_up(None, of).unwrap();
        assert_eq!([0, 1, 2, 8, 9, 100].map(usual), [0, 0, 1, 4, 8, 8]);
    }
}
