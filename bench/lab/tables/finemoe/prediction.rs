//! Figure 14a: how often different ways to predict are right, by how far ahead they must.

use super::split::{Split, chosen, iterations, shape, steps};
use super::{DEVICE, routing_of, stated};
use crate::tables::{
    Axes, Cell, Change, Claim, Compared, Finding, Inputs, N_UBATCH, Row, Runs, Source, Table,
    check, columns,
};
use moeba::Result;
use moeba::policy::papers::finemoe::{Iteration, best_distance, profile_distances, top_k};
use moeba::policy::{Costs, FineMoeOptions};
use moeba::trace::format::{MAX_AHEAD, Trace};
use moeba::trace::{Routing, Traced};

const SPECULATE: &str = "Speculate";
const COUNT: &str = "Hit count";
const T: &str = "Map (T)";
const TS: &str = "Map (T+S)";
const FULL: &str = "Map (T+S+δ)";
const LATE: &str = "later layers";

const N_KNOWN: usize = 60;
const N_NEW: usize = 24;

/// Part of the experts that has room where waiting is estimated.
const SHARE: f64 = 0.5;

pub fn figure_14a(inputs: &Inputs) -> Result<Vec<Table>> {
    let trace = inputs.full.unwrap_or(inputs.fine.trace);
    let alone = Inputs::of(Source { trace, ..inputs.fine });
    let make = |changes: &[Change]| {
        alone.with(changes, |inputs| Ok(changed(rows(inputs.fine, changes), changes)))
    };
    let mut table = make(&[])?;
    table.claims = claims(&table, &Runs::new(&make))?;
    Ok(vec![table])
}

fn rows(source: Source, changes: &[Change]) -> Table {
    let trace = source.trace;
    let mut split = Split::of(trace).at_most(N_KNOWN, N_NEW);
    if changes.contains(&FEW) {
        split.known.truncate(split.known.len() / 2);
    }
    let routing = Traced::new(trace, N_UBATCH);
    let n_layers = trace.header().moe_layers().count();
    let distances = 1..=MAX_AHEAD.min(n_layers);
    let speculate: Vec<f64> =
        distances.clone().map(|d| speculation(trace, &routing, &split.new, d)).collect();
    let count = request_counts(&routing, &split.new);
    let costs = source.options(DEVICE, "finemoe", SHARE).costs;
    let costs = costs.timer(&source.geometry(), trace.header().k);
    let maps = [(false, false), (true, false), (true, true)].map(|(semantic, delta)| {
        let default = FineMoeOptions::default();
        let options = FineMoeOptions { use_semantic: semantic, use_delta: delta, ..default };
        by_map(&routing, &split, options, *distances.end(), &costs)
    });
    let rates = |map: &ByMap| map.found.iter().map(|found| found.hit_rate).collect::<Vec<_>>();
    // Nothing was predicted for the first d layers, so all hits are the others'.
    let later = |rates: &[f64]| {
        let share = |d: usize| n_layers as f64 / n_layers.saturating_sub(d) as f64;
        rates.iter().zip(distances.clone()).map(|(rate, d)| rate * share(d)).collect::<Vec<_>>()
    };
    Table {
        id: "finemoe-fig-14a",
        title: "FineMoE, Figure 14a: expert hit rate of ways to predict, by prefetch distance"
            .into(),
        setting: setting(&source, &split, &maps[2]),
        columns: columns("prediction", distances.clone()),
        rows: vec![
            Row::shares(SPECULATE, speculate.iter().copied()),
            Row::shares(COUNT, distances.clone().map(|_| count)),
            Row::shares(T, rates(&maps[0])),
            Row::shares(TS, rates(&maps[1])),
            Row::shares(FULL, rates(&maps[2])),
            Row::shares(format!("{SPECULATE}, {LATE}"), later(&speculate)),
            Row::shares(format!("{T}, {LATE}"), later(&rates(&maps[0]))),
        ],
        paper: Some(paper()),
        claims: Vec::new(),
        plot: Some(Axes { x: "prefetch distance, layers".into(), y: "hit rate, %".into() }),
    }
}

fn setting(source: &Source, split: &Split, full: &ByMap) -> String {
    let predicted: Vec<String> =
        full.found.iter().map(|found| format!("{:.1}", found.n_predicted)).collect();
    format!(
        "{}; {} requests are learned from, {} others counted. Of the experts that decode steps \
         used (the most probable ones, as the trace stores probabilities), the part that had been \
         predicted the given number of layers before. Who predicts from the same token's earlier \
         layers has nothing for the first d of them, which counts as misses; \"{LATE}\" leaves \
         them out. Hit counts are of the request so far, its prompt included, and do not depend on \
         the distance. All predict as many experts as a token uses but the last, with δ, which \
         predicts {} a layer at these distances. With the times of experts sized as {}'s on \
         {DEVICE} and room for {:.0} % of them the least waiting is to be expected at a distance \
         of {}.",
        routing_of(source.trace),
        split.known.len(),
        split.new.len(),
        predicted.join(", "),
        source.stands_for,
        100.0 * SHARE,
        full.best,
    )
}

fn paper() -> crate::tables::Paper {
    stated(
        "Mixtral-8×7B, Qwen1.5-MoE and Phi-3.5-MoE; a plot, of which the text states",
        &[
            ("Speculate", "effective, but decreases drastically as the distance increases"),
            ("Hit count", "the worst, as it is coarse"),
            ("Map", "gradually increases with T, S and δ"),
            (
                "profiled distance",
                "3 for Mixtral-8×7B, 6 for Qwen1.5-MoE, 4 for Phi-3.5-MoE (§6.7)",
            ),
        ],
    )
}

const FEW: Change = Change::Own("with half of the known requests");
const LATER: Change = Change::Own("with the layers alone that a distance leaves to predict");
const FAR: Change = Change::Own("with distances from 3, the least that the paper chooses, alone");

/// The rows without what a change leaves out.
fn changed(mut table: Table, changes: &[Change]) -> Table {
    let later = format!("{T}, {LATE}");
    let ratios: Vec<f64> =
        table.values(&later).iter().zip(table.values(T)).map(|(later, all)| later / all).collect();
    for row in &mut table.rows {
        let is_of_token = [SPECULATE, T].contains(&row.name.as_str());
        for (at, cell) in row.cells.iter_mut().enumerate() {
            match cell {
                _ if changes.contains(&FAR) && at < 2 => *cell = Cell::Missing,
                Cell::Share(rate) if is_of_token && changes.contains(&LATER) => *rate *= ratios[at],
                _ => {}
            }
        }
    }
    table
}

/// Speculation by distance; a trace may hold one distance alone.
fn speculated(table: &Table) -> Vec<f64> {
    table.values(SPECULATE).into_iter().filter(|rate| rate.is_finite()).collect()
}

fn falls(table: &Table) -> Finding {
    let known = speculated(table);
    let (Some(first), Some(last)) = (known.first(), known.last().filter(|_| known.len() > 1))
    else {
        return Finding::default();
    };
    let steps = known.windows(2).map(|pair| Compared {
        margin: pair[0] - pair[1],
        figures: format!("{:.1} % and then {:.1} %", pair[0], pair[1]),
    });
    let figures = format!("{first:.1} % and at last {last:.1} %");
    Finding::of(steps).and(Finding::one(first * 2.0 / 3.0 - last, figures))
}

/// Whether doubling the known requests adds as much to the full map as it is behind.
fn second_half(table: &Table, few: &Table) -> Finding {
    let maps = table.values(FULL).into_iter().zip(few.values(FULL));
    Finding::of(maps.zip(table.values(SPECULATE)).map(|((map, before), speculated)| Compared {
        margin: (map - before) - (speculated - map).max(0.0),
        figures: format!("{:+.1} points, {:.1} behind", map - before, speculated - map),
    }))
}

fn counts_are_worst(table: &Table) -> Finding {
    let others = [SPECULATE, T, TS, FULL];
    Finding::of(others.iter().flat_map(|other| table.margins(other, COUNT, 0.0)))
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let text = "The hit rate of speculation falls with the distance, by more than a third (ours)";
    let falls = check(text, table, runs, falls)
        .unless("a third counts the first layers as missed as well", &[LATER])?;
    let worst = "Request-level hit counts are the worst at every distance";
    let worst = check(worst, table, runs, counts_are_worst).unless(
        "the first layers, of which who looks from the token's own layers knows nothing, are a \
         large part of few layers",
        &[LATER],
    )?;
    let adds = "Trajectory, semantics and δ each add to the hit rate";
    let adds = check(adds, table, runs, |table| {
        table.compare(TS, T, 0.0).and(table.compare(FULL, TS, 0.0))
    });
    let better = "The full map is better than speculation at every distance";
    let better = check(better, table, runs, |table| table.compare(FULL, SPECULATE, 0.0))
        .unless("a router knows most of a layer close by", &[FAR])?
        .shown(
            "few requests are known",
            "what the second half of the known requests adds to the map, against what it lacks,",
            || Ok(second_half(table, &*runs.with(&[FEW])?)),
        )?;
    Ok(vec![falls.done(), worst.done(), adds.done(), better.done()])
}

/// Results of map searches for the new requests at one distance.
struct Found {
    hit_rate: f64,
    n_predicted: f64,
}

struct ByMap {
    /// By distance, from 1.
    found: Vec<Found>,
    /// The distance with the least waiting to expect.
    best: usize,
}

/// Results for the new requests only: those for all requests minus those for the known ones.
fn by_map(
    routing: &dyn Routing,
    split: &Split,
    options: FineMoeOptions,
    max_distance: usize,
    costs: &Costs,
) -> ByMap {
    let shape = shape(routing);
    let mut all = iterations(routing, &split.known);
    let n_known = all.len() as f64;
    let run = |iterations: &[Iteration]| {
        profile_distances(&shape, options, iterations, costs, 1.0 - SHARE, max_distance)
    };
    let known = run(&all);
    all.extend(iterations(routing, &split.new));
    let n_all = all.len() as f64;
    let of_new = |all: f64, known: f64| (all * n_all - known * n_known) / (n_all - n_known);
    let all = run(&all);
    let found = all.iter().zip(known).map(|(all, known)| Found {
        hit_rate: of_new(all.hit_rate, known.hit_rate),
        n_predicted: of_new(all.n_predicted, known.n_predicted),
    });
    ByMap { found: found.collect(), best: best_distance(&all).unwrap_or(1) }
}

#[derive(Default)]
struct Tally {
    n_hits: usize,
    n_used: usize,
}

impl Tally {
    fn add(&mut self, predicted: &[u32], used: &[u32]) {
        self.n_used += used.len();
        self.n_hits += used.iter().filter(|expert| predicted.contains(expert)).count();
    }

    fn rate(&self) -> f64 {
        self.n_hits as f64 / self.n_used as f64
    }
}

/// The target layer's router on the activation `distance` layers before it.
fn speculation(trace: &Trace, routing: &Traced, requests: &[usize], distance: usize) -> f64 {
    let (k, mut probs) = (routing.k(), Vec::new());
    let mut tally = Tally::default();
    for step in steps(routing, requests) {
        let moe: Vec<usize> = trace.header().moe_layers().collect();
        for (ordinal, &layer) in moe.iter().enumerate() {
            let from = ordinal.checked_sub(distance).map(|from| moe[from]);
            let target = from.and_then(|from| trace.ahead(step, from, distance, &mut probs));
            let is_there = target.is_some_and(|target| target == layer);
            let predicted = if is_there { top_k(&probs, k) } else { Vec::new() };
            trace.probs(step, layer, &mut probs);
            tally.add(&predicted, &top_k(&probs, k));
        }
    }
    // A trace that does not hold this distance says nothing of it.
    if distance <= trace.header().ahead { tally.rate() } else { f64::NAN }
}

/// The experts that the request has used the most so far.
fn request_counts(routing: &Traced, requests: &[usize]) -> f64 {
    let (shape, mut probs) = (shape(routing), Vec::new());
    let mut tally = Tally::default();
    for &request in requests {
        let mut counts: Vec<Vec<f32>> = shape.n_experts.iter().map(|n| vec![0.0; *n]).collect();
        for pass in routing.passes(request) {
            for layer in shape.moe_layers() {
                let counts = &mut counts[layer];
                if !pass.is_prompt {
                    let mut predicted = top_k(counts, shape.k);
                    predicted.retain(|expert| counts[*expert as usize] > 0.0);
                    routing.probs(pass.tokens.start, layer, &mut probs);
                    tally.add(&predicted, &top_k(&probs, shape.k));
                }
                let chosen = chosen(routing, &pass, layer);
                chosen.iter().for_each(|expert| counts[*expert as usize] += 1.0);
            }
        }
    }
    tally.rate()
}
