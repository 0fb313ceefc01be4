//! The batches of both figures: the same requests, of all kinds in turn, in batches of each size,
//! on a GPU that keeps a part of the experts.

use super::networks::{Networks, Trained, n_new};
use crate::hybrid::{
    self, Batches, HybridOptions, HybridReport, Keep, Scheduler, simulate_batches,
};
use crate::placement::Prefetching;
use crate::tables::{Cell, Change, Claim, Inputs, Runs, Source, Table, columns};
use moeba::trace::Ordered;
use moeba::trace::{CostModel, Device, Host, by_turns};
use moeba::{Error, Result};
use std::ops::Range;

pub const SIZES: [usize; 5] = [4, 8, 16, 32, 64];

/// The paper's, the faster link first.
pub const DEVICES: [&str; 2] = ["a100", "v100"];

/// Part of all experts that the GPU keeps. The paper does not give it; of Fiddler, which fills the
/// same GPU, it says that 70 % of the hot experts stay on the CPU (6.5).
const SHARE: f64 = 0.3;

/// Requests that are served: the largest batch. Before them come half as many that fill the table
/// of hot experts.
const N_SERVED: usize = 64;
const N_PAST: usize = N_SERVED / 2;

pub struct Bench<'a> {
    source: Source<'a>,
    /// Batches of each size, predicted by routers on the activation of the layer before.
    gate: Vec<Batches>,
    /// The same with what trained networks predict.
    llapor: Option<Vec<Batches>>,
    /// Tokens of each expert, [MoE layers][experts], of requests that came before.
    past: Vec<Vec<u32>>,
    n_served: usize,
}

/// The two of the paper's models whose figures its text gives, on the nearest of our routings.
pub fn sources<'a>(inputs: &Inputs<'a>) -> Vec<Source<'a>> {
    let fine = inputs.full.unwrap_or(inputs.fine.trace);
    let fine = Source { trace: fine, stands_for: FINE, ..inputs.fine };
    [Some(fine), inputs.coarse].into_iter().flatten().collect()
}

const FINE: &str = "deepseek-v2-lite";

/// A table of a source with its claims. Networks predict as long as the routing is that which they
/// were trained for.
pub fn with_claims(
    inputs: &Inputs,
    source: Source,
    rows: &dyn Fn(&Bench, &[Change]) -> Table,
    claims: &dyn Fn(&Table, &Runs) -> Result<Vec<Claim>>,
) -> Result<Table> {
    let alone = Inputs::of(source);
    let trained = inputs.networks.as_ref().filter(|_| source.stands_for == FINE);
    let make = |changes: &[Change]| {
        alone.with(changes, |changed| {
            let is_same = std::ptr::eq(changed.fine.trace, source.trace);
            Ok(rows(&Bench::new(changed.fine, trained.filter(|_| is_same))?, changes))
        })
    };
    let mut table = make(&[])?;
    table.claims = claims(&table, &Runs::new(&make))?;
    Ok(table)
}

/// Which of so many requests are served.
fn served(n_requests: usize) -> Range<usize> {
    let n_past = N_SERVED.min(n_requests * 2 / 3) / 2;
    n_past..n_requests.min(n_past + N_SERVED)
}

/// Which are if networks were not trained on the last `n_new`.
fn served_by_networks(n_requests: usize, n_new: usize) -> Result<Range<usize>> {
    let [least, ..] = SIZES;
    if n_new < least {
        return Err(Error::invalid(format!(
            "the networks were trained on all requests of the trace but {n_new}, which makes no \
             batch of {least} to judge them by: train with --held-out"
        )));
    }
    Ok(n_requests - n_new.min(N_SERVED)..n_requests)
}

impl<'a> Bench<'a> {
    pub fn new(source: Source<'a>, trained: Option<&Trained>) -> Result<Bench<'a>> {
        let routing = source.routing();
        let order = by_turns(source.trace, 1);
        let n_new = trained.map(|trained| n_new(source.trace, &order, trained.n_held_out));
        let served = match n_new {
            None => served(order.len()),
            Some(n_new) => served_by_networks(order.len(), n_new)?,
        };
        let past = served.start.saturating_sub(N_PAST)..served.start;
        let routing = Ordered { routing: &routing, order };
        let batches = |predict: &hybrid::Source| -> Vec<Batches> {
            let of_size = |size: &usize| Batches::new(&routing, served.clone(), *size, predict);
            SIZES.iter().map(of_size).collect()
        };
        let llapor = trained.map(|trained| {
            let networks = Networks::new(source.trace, trained);
            batches(&hybrid::Source::Tokens(&|token, layer, distance, out| {
                networks.predict(token, layer, distance, out);
            }))
        });
        let (gate, past) = (batches(&hybrid::Source::Gate), hybrid::counts(&routing, past));
        Ok(Bench { source, gate, llapor, past, n_served: served.len() })
    }

    /// Whether PreScope has its own predictor.
    pub fn has_networks(&self) -> bool {
        self.llapor.is_some()
    }

    pub fn is_fine(&self) -> bool {
        self.source.stands_for == FINE
    }

    pub fn model(&self) -> &'static str {
        self.source.stands_for
    }

    /// PreScope as it is, on a machine.
    pub fn prescope(&self, device: &str) -> HybridOptions {
        let geometry = self.source.geometry();
        let device = Device::by_name(device).expect("a machine that is known");
        let n_experts: usize = self.gate[0].n_experts.iter().sum();
        let mut costs = CostModel::derive(&device, &Host::XEON_6230R, &geometry);
        self.source.speeds.apply(&mut costs);
        HybridOptions {
            scheduler: Scheduler::PreSched,
            keep: Keep::Hot(self.past.clone()),
            n_resident: (SHARE * n_experts as f64) as usize,
            sync_slowdown: None,
            geometry,
            costs,
        }
    }

    /// Batches of each size, as PreScope predicts them; none where there are too few requests.
    pub fn run(&self, options: &HybridOptions) -> Vec<Option<HybridReport>> {
        run(self.llapor.as_ref().unwrap_or(&self.gate), options)
    }

    /// As the next routers predict them.
    pub fn run_by_gate(&self, options: &HybridOptions) -> Vec<Option<HybridReport>> {
        run(&self.gate, options)
    }

    pub fn setting(&self, counted: &str) -> String {
        format!(
            "{counted} by batch size; {} and the processor beside it, {:.0} % of all experts on \
             the GPU, the most used of requests before; {} requests of all kinds, whose prompts \
             are shorter than the paper's 512 tokens. {} Nothing is predicted in prompts.",
            self.source.describe(&DEVICES.join(" or ")),
            100.0 * SHARE,
            self.n_served,
            if self.has_networks() { BY_NETWORKS } else { BY_GATE },
        )
    }
}

const BY_GATE: &str =
    "Predictions are the next two layers' routers', on the present layer's activation.";

const BY_NETWORKS: &str = "Predictions are LLaPor's for PreScope, whose networks were not trained \
                           on these requests and know the next two layers, and for the others \
                           the next two layers' routers', on the present layer's activation.";

fn run(batches: &[Batches], options: &HybridOptions) -> Vec<Option<HybridReport>> {
    let run =
        |batches: &Batches| (!batches.steps.is_empty()).then(|| simulate_batches(batches, options));
    batches.iter().map(run).collect()
}

/// Schedulers by the paper's names.
pub const SCHEDULERS: [(&str, Scheduler); 3] = [
    ("PreScope", Scheduler::PreSched),
    ("HybriMoE", Scheduler::Greedy(Prefetching::WhileIdle)),
    ("Fiddler", Scheduler::Static),
];

pub fn by_size(first: &str) -> Vec<String> {
    columns(first, SIZES)
}

pub fn on(name: &str, device: &str) -> String {
    format!("{name}, {device}")
}

/// Tokens generated in a second, prompts included in the time.
pub fn throughput(report: &Option<HybridReport>) -> Cell {
    report.as_ref().map_or(Cell::Missing, |report| Cell::Number(report.tokens_per_second(), 1))
}

/// Share of needed experts that were resident.
pub fn resident_share(report: &HybridReport) -> f64 {
    let c = &report.counters;
    let all = c.n_resident + c.n_prefetched + c.n_uploaded + c.n_on_cpu;
    c.n_resident as f64 / all.max(1) as f64
}

/// Share of prefetches that were needed.
pub fn needed_share(reports: &[HybridReport]) -> f64 {
    let sum = |of: fn(&HybridReport) -> u64| reports.iter().map(of).sum::<u64>();
    let n_needed = sum(|report| report.counters.n_prefetched);
    n_needed as f64 / sum(|report| report.counters.n_prefetches).max(1) as f64
}
