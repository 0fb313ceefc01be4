//! `moeba trace stats`: how much of a trace's routing a cache can use.

use super::replay::{Format, Percents, percents, write_table};
use crate::Result;
use crate::trace::format::{Trace, UNKNOWN_TOKEN};
use crate::trace::table::{Row, Table, columns};
use crate::trace::{Hits, N_UBATCH, Ordered, Part, Reuse, Traced, Uses};
use std::collections::BTreeSet;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// A trace of `moeba trace record` or `moeba trace import`
    trace: PathBuf,
    /// Memory for experts, in percent of all experts
    #[arg(long, value_name = "N,N,…", default_value = "10,25,50,75")]
    #[arg(value_parser = percents)]
    budget: Percents,
    #[command(flatten)]
    part: PartArg,
    /// Print as md (tables) or csv
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    output: Format,
}

/// Which requests count.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct PartArg {
    /// Requests to take: all, or one of the two halves into which a hash of each divides them:
    /// tuning, to choose constants by, or report, to judge by
    #[arg(long, value_name = "PART", default_value = "all")]
    part: PartName,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum PartName {
    All,
    Tuning,
    Report,
}

impl PartArg {
    fn part(self) -> Part {
        match self.part {
            PartName::All => Part::All,
            PartName::Tuning => Part::Tuning,
            PartName::Report => Part::Report,
        }
    }

    /// For the setting of a table; nothing for all of a trace.
    pub fn describe(self, n_requests: usize) -> String {
        match self.part {
            PartName::All => String::new(),
            PartName::Tuning => format!(", of which {n_requests} requests, those to tune by"),
            PartName::Report => format!(", of which {n_requests} requests, those to report on"),
        }
    }

    /// The numbers of the part's requests, of which there is one at least.
    pub fn requests(self, trace: &Trace) -> Result<Vec<usize>> {
        let requests = self.part().requests(trace);
        if requests.is_empty() {
            let n = trace.requests().len();
            let why = format!("--part: none of the trace's {n} requests is in this part");
            return Err(crate::Error::Usage(why));
        }
        Ok(requests)
    }
}

/// Tokens by which two requests are said to begin alike.
const N_TEMPLATE: usize = 16;

pub fn run(args: Args) -> Result<()> {
    let trace = Trace::open(&args.trace)?;
    let requests = args.part.requests(&trace)?;
    let routing = Traced::new(&trace, N_UBATCH);
    let uses = Uses::of(&Ordered { routing: &routing, order: requests.clone() });
    let room = |share: &f64| (share * n_experts(&trace) as f64) as usize;
    let hits: Vec<Hits> = args.budget.0.iter().map(|share| uses.hits(room(share))).collect();
    let of = |name: &str, value: &dyn Fn(&Hits) -> f64| Row::shares(name, hits.iter().map(value));
    let rows = vec![
        of("least recently used", &|hits| hits.lru),
        of("Belady: the future is known", &|hits| hits.belady),
        of("optimum: and what is used need not be kept", &|hits| hits.optimum),
        of("gained by the future", &Hits::of_future),
        of("gained by bypass", &Hits::of_bypass),
        unions(&trace, &args.budget.0),
        ratios(
            "experts of a request ÷ room",
            of_a_request(&trace, &requests),
            &trace,
            &args.budget.0,
        ),
    ];
    let budgets = args.budget.0.iter().map(|share| format!("{:.0} %", 100.0 * share));
    let table = Table {
        title: "What a cache can use".into(),
        setting: setting(&trace, &requests),
        columns: columns("experts found in memory", budgets),
        rows,
    };
    write_table(args.output, &table)
}

/// The experts that a token uses in all layers, by the number that each budget has room for.
pub fn unions(trace: &Trace, budgets: &[f64]) -> Row {
    let header = trace.header();
    let chosen = header.moe_layers().map(|layer| header.k.min(header.layers[layer].n_experts));
    ratios("experts of a token ÷ room", chosen.sum::<usize>() as f64, trace, budgets)
}

fn ratios(name: &str, n: f64, trace: &Trace, budgets: &[f64]) -> Row {
    Row::numbers(name, 2, budgets.iter().map(|share| n / (share * n_experts(trace) as f64)))
}

/// Experts of all layers.
fn n_experts(trace: &Trace) -> usize {
    trace.header().layers.iter().map(|layer| layer.n_experts).sum()
}

/// The mean number of experts that a request uses in all layers.
fn of_a_request(trace: &Trace, requests: &[usize]) -> f64 {
    let distinct = |request: &usize| {
        let mut used = BTreeSet::new();
        for token in trace.requests()[*request].tokens.clone() {
            for layer in trace.header().moe_layers() {
                used.extend(trace.chosen(token, layer).iter().map(|expert| (layer, *expert)));
            }
        }
        used.len()
    };
    requests.iter().map(distinct).sum::<usize>() as f64 / requests.len() as f64
}

fn setting(trace: &Trace, requests: &[usize]) -> String {
    let header = trace.header();
    let n = |part: Part| part.requests(trace).len();
    let reuse = Reuse::of(trace);
    format!(
        "Routing of {} ({} layers with experts, {} a token); {} of {} requests: by hash {} are for \
         tuning and {} to report on. {}Caches hold whole experts of all layers, begin empty, and \
         see decoded tokens; a layer's experts of a token are one event. Of all uses {:.1} % are \
         of experts that the token before used, too, and {:.1} % of the most used quarter.",
        header.model,
        header.moe_layers().count(),
        header.k,
        requests.len(),
        trace.requests().len(),
        n(Part::Tuning),
        n(Part::Report),
        templates(trace, requests),
        100.0 * reuse.of_last_token,
        100.0 * reuse.of_hottest_quarter,
    )
}

/// How many requests begin as an earlier one does; nothing if ids of tokens are not known.
fn templates(trace: &Trace, requests: &[usize]) -> String {
    let mut starts = BTreeSet::new();
    let mut n_alike = 0;
    for request in requests {
        let tokens = trace.requests()[*request].tokens.clone().take(N_TEMPLATE);
        let start: Vec<u32> = tokens.map(|token| trace.token_id(token)).collect();
        if start.contains(&UNKNOWN_TOKEN) {
            return String::new();
        }
        n_alike += usize::from(!starts.insert(start));
    }
    format!("{n_alike} begin with the {N_TEMPLATE} tokens of an earlier one. ")
}
