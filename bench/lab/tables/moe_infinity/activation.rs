//! The observations behind its design (2.3, 3.1): how few experts a batch uses, Table 1, and how
//! much more unevenly one request uses them than all together, Figure 4.

use super::{Inputs, Table, with_claims};
use crate::tables::{
    Alteration, Change, Claim, Compared, Finding, Paper, Row, Runs, Source, check, columns,
};
use moeba::Result;
use moeba::trace::format::Trace;

const SIZES: [usize; 6] = [1, 2, 4, 8, 16, 32];

const INDEPENDENT: &str = "if tokens were even and independent";

/// Generated tokens of each request.
fn generated(trace: &Trace) -> Vec<std::ops::Range<usize>> {
    let of = |request: &moeba::trace::format::Request| {
        request.tokens.start + request.n_prompt..request.tokens.end
    };
    trace.requests().iter().map(of).collect()
}

/// Table 1: the part of a layer's experts that a batch of requests uses in a step.
pub fn table_1(inputs: &Inputs) -> Result<Table> {
    with_claims(inputs, rows_1, claims_1)
}

fn rows_1(inputs: &Inputs, _: &[Change]) -> Result<Table> {
    let mut rows = Vec::new();
    for source in inputs.sources() {
        let chance = source.trace.header().k as f64 / source.n_experts() as f64;
        rows.push(Row::shares(name(&source), SIZES.map(|size| activated(source.trace, size))));
        let independent = SIZES.map(|size| 1.0 - (1.0 - chance).powi(size as i32));
        rows.push(Row::shares(format!("{}, {INDEPENDENT}", name(&source)), independent));
    }
    let paper = [
        ("Switch-128x0.2B", [0.012, 0.018, 0.027, 0.039, 0.056, 0.078]),
        ("NLLB-128x0.4B", [0.036, 0.053, 0.076, 0.106, 0.147, 0.199]),
        ("Arctic-128x4B", [0.015, 0.027, 0.045, 0.069, 0.102, 0.145]),
        ("Mixtral-8x7B", [0.25, 0.429, 0.66, 0.864, 0.967, 0.993]),
    ];
    Ok(Table {
        id: "moe-infinity-table-1",
        title: "MoE-Infinity, Table 1: expert activation ratio over batch size".into(),
        setting: "Mean over layers and steps of the part of a layer's experts that the tokens of \
                  a batch use, one token of each of as many requests that follow each other."
            .into(),
        columns: columns("routing", SIZES),
        rows,
        paper: Some(Paper {
            columns: columns("model", SIZES),
            rows: paper.map(|(name, values)| Row::shares(name, values)).to_vec(),
            setting: "BIGBench, FLAN and MMLU.".into(),
        }),
        ..Table::default()
    })
}

fn name(source: &Source) -> String {
    let header = source.trace.header();
    format!(
        "{} × {} experts, {} a token",
        header.moe_layers().count(),
        source.n_experts(),
        header.k
    )
}

/// NaN if there are fewer requests.
fn activated(trace: &Trace, size: usize) -> f64 {
    let (mut n, mut sum) = (0_u32, 0.0);
    for batch in generated(trace).chunks_exact(size) {
        let n_steps = batch.iter().map(|tokens| tokens.len()).min().unwrap_or(0);
        for (step, layer) in
            (0..n_steps).flat_map(|s| trace.header().moe_layers().map(move |l| (s, l)))
        {
            let mut used = vec![false; trace.header().layers[layer].n_experts];
            for tokens in batch {
                let chosen = trace.chosen(tokens.start + step, layer);
                chosen.iter().for_each(|expert| used[*expert as usize] = true);
            }
            let n_used = used.iter().filter(|used| **used).count();
            (n, sum) = (n + 1, sum + n_used as f64 / used.len() as f64);
        }
    }
    sum / f64::from(n)
}

/// A batch of more than one token uses less than chance would make it.
fn fewer(table: &Table) -> Finding {
    let ours = table.rows.iter().filter(|row| !row.name.ends_with(INDEPENDENT));
    let margins = ours.flat_map(|row| {
        let chance = format!("{}, {INDEPENDENT}", row.name);
        table.margins(&chance, &row.name, 0.0).into_iter().skip(1)
    });
    Finding::of(margins.collect::<Vec<Compared>>())
}

fn claims_1(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let text =
        "Tokens of a batch share experts: they use fewer than even and independent ones (ours)";
    let fewer = check(text, table, runs, fewer).unless(
        "requests of different kinds come together",
        &[Change::Routing(Alteration::Shuffle)],
    )?;
    Ok(vec![fewer.done()])
}

/// Iterations of a request that are counted: the paper's.
const N_ITERATIONS: usize = 20;

/// Parts of a layer's experts, the most used first.
const PARTS: [f64; 3] = [0.125, 0.25, 0.5];

/// Figure 4: which part of all uses the most used experts have, in one request and in all.
pub fn figure_4(inputs: &Inputs) -> Result<Table> {
    with_claims(inputs, rows_4, claims_4)
}

const ONE: &str = "one request";
const ALL: &str = "all requests";

fn rows_4(inputs: &Inputs, _: &[Change]) -> Result<Table> {
    let mut rows = Vec::new();
    for source in inputs.sources() {
        let [one, all] = reuse(source.trace);
        rows.push(Row::shares(format!("{ONE}, {}", name(&source)), one));
        rows.push(Row::shares(format!("{ALL}, {}", name(&source)), all));
    }
    Ok(Table {
        id: "moe-infinity-fig-4",
        title: "MoE-Infinity, Figure 4: reuse of experts in a request and over requests".into(),
        setting: format!(
            "Part of all uses by {N_ITERATIONS} decode steps that a layer's most used experts \
             have, mean over layers: the most used of the request, or of all requests."
        ),
        columns: columns("uses", PARTS.map(|part| format!("{:.1} % of experts", 100.0 * part))),
        rows,
        paper: Some(Paper {
            columns: columns("finding", ["as stated"]),
            rows: vec![Row::new(
                "Mixtral, NLLB",
                [crate::tables::Cell::Text("skewed in a request, more uniform over 1,000".into())],
            )],
            setting: "a plot of the last layer.".into(),
        }),
        ..Table::default()
    })
}

fn reuse(trace: &Trace) -> [[f64; PARTS.len()]; 2] {
    let (mut one, mut all, mut n_one) = ([0.0; PARTS.len()], [0.0; PARTS.len()], 0.0);
    let layers: Vec<usize> = trace.header().moe_layers().collect();
    for &layer in &layers {
        let n = trace.header().layers[layer].n_experts;
        let mut total = vec![0_u32; n];
        for tokens in generated(trace) {
            let mut counts = vec![0_u32; n];
            for token in tokens.take(N_ITERATIONS) {
                trace.chosen(token, layer).iter().for_each(|e| counts[*e as usize] += 1);
            }
            total.iter_mut().zip(&counts).for_each(|(total, count)| *total += count);
            one.iter_mut().zip(held(counts)).for_each(|(sum, part)| *sum += part);
            n_one += 1.0;
        }
        let n_layers = layers.len() as f64;
        all.iter_mut().zip(held(total)).for_each(|(sum, part)| *sum += part / n_layers);
    }
    [one.map(|sum| sum / n_one), all]
}

/// Which part of the counts the highest of them make up.
fn held(mut counts: Vec<u32>) -> [f64; PARTS.len()] {
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let sum: u32 = counts.iter().sum();
    PARTS.map(|part| {
        let n = (part * counts.len() as f64).round() as usize;
        f64::from(counts[..n].iter().sum::<u32>()) / f64::from(sum.max(1))
    })
}

fn claims_4(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let text = "A request uses its experts more unevenly than all requests together";
    let uneven = check(text, table, runs, |table| {
        let pairs = table.rows.chunks_exact(2);
        let margins = pairs.flat_map(|pair| table.margins(&pair[0].name, &pair[1].name, 0.0));
        Finding::strict(margins.collect::<Vec<Compared>>())
    });
    Ok(vec![uneven.done()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Trace {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/traces/demo.mtrace");
        Trace::open(path.as_ref()).unwrap()
    }

    #[test]
    fn a_token_uses_k_experts_and_a_batch_more() {
        let trace = demo();
        let ratios = [1, 2, 4, 8].map(|size| activated(&trace, size));
        assert!((ratios[0] - 4.0 / 32.0).abs() < 1e-9, "{ratios:?}");
        assert!(ratios.windows(2).all(|pair| pair[0] < pair[1] && pair[1] < 2.0 * pair[0]));
        assert!(activated(&trace, 100).is_nan());
    }

    #[test]
    fn the_most_used_hold_more_than_their_part() {
        assert_eq!(held(vec![1, 5, 0, 2, 0, 0, 0, 0]), [0.625, 0.875, 1.0]);
        assert_eq!(held(vec![3; 8]), PARTS);
        let [one, all] = reuse(&demo());
        assert!(one.iter().zip(PARTS).all(|(held, part)| *held > part));
        assert!(one.iter().zip(all).all(|(one, all)| *one > all));
    }
}
