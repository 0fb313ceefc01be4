//! Figure 3: how predictable experts are by one iteration and by a request's iterations together.

use super::split::steps;
use super::{routing_of, stated};
use crate::tables::{
    Alteration, Axes, Change, Claim, Compared, Finding, Inputs, Row, Runs, Source, Table, check,
    columns,
};
use moeba::Result;
use moeba::trace::Routing;

/// Iterations that are added up; 1 is the fine-grained pattern.
const ITERATIONS: [usize; 6] = [1, 2, 4, 8, 16, 30];

pub fn figure_3(inputs: &Inputs) -> Result<Vec<Table>> {
    let make = |changes: &[Change]| inputs.with(changes, |inputs| Ok(rows(inputs)));
    let mut table = make(&[])?;
    table.claims = claims(&table, &Runs::new(&make))?;
    Ok(vec![table])
}

fn rows(inputs: &Inputs) -> Table {
    let row = |source: Source| {
        let name = source.trace.header().model.clone();
        Row::numbers(name, 2, ITERATIONS.map(|n| entropy(&source, n)))
    };
    let settings: Vec<String> = inputs.sources().map(|source| routing_of(source.trace)).collect();
    Table {
        id: "finemoe-fig-3",
        title: "FineMoE, Figure 3: entropy of expert patterns by iterations added up".into(),
        setting: format!(
            "{}. Bits of a layer's router probabilities, added up over the first iterations of a \
             request; mean over layers and requests.",
            settings.join(". Also ")
        ),
        columns: columns("model", ITERATIONS),
        rows: inputs.sources().map(row).collect(),
        paper: Some(stated(
            "plots, of which the text states",
            &[
                (
                    "request-level patterns",
                    "significantly higher entropy than those of an iteration",
                ),
                ("through iterations", "increasingly unpredictable"),
            ],
        )),
        plot: Some(Axes { x: "iterations".into(), y: "entropy, bits".into() }),
        ..Table::default()
    }
}

/// NaN if no request has as many iterations.
fn entropy(source: &Source, n_iterations: usize) -> f64 {
    let routing = source.routing();
    let (mut n, mut sum, mut probs) = (0_u32, 0.0, Vec::new());
    for request in 0..routing.n_requests() {
        let steps = steps(&routing, &[request]);
        let Some(steps) = steps.get(..n_iterations) else { continue };
        for layer in source.trace.header().moe_layers() {
            let mut pattern = vec![0.0; routing.n_experts()[layer]];
            for step in steps {
                routing.probs(*step, layer, &mut probs);
                pattern.iter_mut().zip(&probs).for_each(|(sum, p)| *sum += f64::from(*p));
            }
            (n, sum) = (n + 1, sum + bits(&pattern));
        }
    }
    sum / f64::from(n)
}

/// The entropy of a pattern that need not add up to 1.
fn bits(pattern: &[f64]) -> f64 {
    let sum: f64 = pattern.iter().sum();
    let parts = pattern.iter().map(|x| x / sum).filter(|p| *p > 0.0);
    -parts.map(|p| p * p.log2()).sum::<f64>()
}

fn claims(table: &Table, runs: &Runs) -> Result<Vec<Claim>> {
    let rises = |table: &Table| {
        let steps = table.rows.iter().flat_map(|row| {
            let values = table.values(&row.name);
            let steps = (1..values.len()).map(|at| Compared {
                margin: values[at] - values[at - 1],
                figures: format!(
                    "{:.2} bits and then {:.2} of {}",
                    values[at - 1],
                    values[at],
                    row.name
                ),
            });
            steps.collect::<Vec<_>>()
        });
        Finding::strict(steps)
    };
    let text = "Entropy rises with the iterations that are added up";
    let rises = check(text, table, runs, rises)
        .unless("iterations of a request are alike", &[Change::Routing(Alteration::Shuffle)])?;
    Ok(vec![rises.done()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_known_patterns() {
        assert!((bits(&[2.0; 8]) - 3.0).abs() < 1e-12);
        assert!(bits(&[0.0, 5.0]).abs() < 1e-12);
        assert!((bits(&[0.5, 0.25, 0.25]) - 1.5).abs() < 1e-12);
    }
}
