//! Figures 8 and 9: whether iterations that look alike use the same experts.

use super::split::{iteration, steps};
use super::{routing_of, stated};
use crate::tables::{
    Alteration, Axes, Cell, Change, Compared, Finding, Inputs, Row, Runs, Source, Table, check,
    columns,
};
use moeba::Result;
use moeba::policy::mix;
use moeba::policy::papers::finemoe::{
    Iteration, semantic_similarity, top_k_overlap, trajectory_similarity,
};
use moeba::trace::Routing;

const N_ITERATIONS: usize = 3000;
const N_PAIRS: u64 = 100_000;

/// Bins of similarities from 0 to 1; values below 0 are in the first.
const N_BINS: usize = 10;
/// Fewer say nothing of a bin: hit rates within one deviate by 4 to 18 points, so that the mean of
/// a hundred is off by less than `NOISE`.
const MIN_PAIRS: usize = 100;

/// Points of percent by which means of bins may differ for nothing.
const NOISE: f64 = 2.0;

const SEMANTIC: &str = "semantic";
const TRAJECTORY: &str = "trajectory";

pub fn figures_8_and_9(inputs: &Inputs) -> Result<Vec<Table>> {
    let make_8 = |changes: &[Change]| inputs.with(changes, |inputs| Ok(figure_8(inputs)));
    let make_9 = |changes: &[Change]| inputs.with(changes, |inputs| Ok(figure_9(inputs)));
    let (mut table_8, mut table_9) = (make_8(&[])?, make_9(&[])?);
    let (runs_8, runs_9) = (Runs::new(&make_8), Runs::new(&make_9));
    let even = [Change::Routing(Alteration::Even)];
    let text = "The more alike, semantically or by trajectory, the higher the hit rate (to two \
                points, which are ours)";
    table_8.claims = vec![
        check(text, &table_8, &runs_8, rises).unless("some experts are used by all", &even)?.done(),
    ];
    for (column, name) in [(0, "Semantic"), (1, "Trajectory")] {
        let text =
            format!("{name} similarity and hit rate are correlated (above 0.3, which is ours)");
        let correlated = |table: &Table| {
            Finding::strict(table.rows.iter().map(|row| Compared {
                margin: row.cells[column].value().unwrap_or(f64::NAN) - CORRELATED,
                figures: format!("{} of {}", row.cells[column], row.name),
            }))
        };
        let claim = check(text, &table_9, &runs_9, correlated);
        table_9.claims.push(claim.unless("some experts are used by all", &even)?.done());
    }
    Ok(vec![table_8, table_9])
}

/// Our reading of "correlated".
const CORRELATED: f64 = 0.3;

/// By embedding and by trajectory, of each source.
fn all_pairs(inputs: &Inputs) -> Vec<(String, [Points; 2])> {
    let model = |source: &Source| source.trace.header().model.clone();
    inputs.sources().map(|source| (model(&source), pairs(&source))).collect()
}

/// No bin has a lower hit rate than the one before it.
fn rises(table: &Table) -> Finding {
    Finding::of(table.rows.iter().flat_map(|row| {
        let values: Vec<f64> = row.cells.iter().filter_map(Cell::value).collect();
        let steps: Vec<(f64, f64)> = values.windows(2).map(|pair| (pair[0], pair[1])).collect();
        steps.into_iter().map(|(before, after)| Compared {
            margin: after - before + NOISE,
            figures: format!("{before:.1} % and then {after:.1} %, {}", row.name),
        })
    }))
}

/// Similarity and hit rate of pairs.
type Points = Vec<(f64, f64)>;

/// By embedding, and by trajectory. The sample is the same in every run.
fn pairs(source: &Source) -> [Points; 2] {
    let routing = source.routing();
    let requests: Vec<usize> = (0..routing.n_requests()).collect();
    let steps = steps(&routing, &requests);
    let step_by = steps.len().div_ceil(N_ITERATIONS).max(1);
    let sample = steps.iter().step_by(step_by);
    let iterations: Vec<Iteration> = sample.map(|step| iteration(&routing, *step)).collect();
    let mut points = [Points::new(), Points::new()];
    for pair in 0..N_PAIRS {
        let [a, b] = [2 * pair, 2 * pair + 1].map(|n| mix(n) as usize % iterations.len().max(1));
        if a == b || iterations.is_empty() {
            continue;
        }
        let (a, b) = (&iterations[a], &iterations[b]);
        let hit_rate = top_k_overlap(a, b, routing.k());
        points[0].push((semantic_similarity(a, b), hit_rate));
        points[1].push((trajectory_similarity(a, b, a.map.len()), hit_rate));
    }
    points
}

/// Mean hit rate of each bin.
fn binned(points: &Points) -> Vec<Cell> {
    let mut bins = [(0, 0.0); N_BINS];
    for (score, hit_rate) in points {
        let bin = &mut bins[((score * N_BINS as f64) as usize).min(N_BINS - 1)];
        *bin = (bin.0 + 1, bin.1 + hit_rate);
    }
    let cell = |(n, sum): (usize, f64)| {
        if n < MIN_PAIRS { Cell::Missing } else { Cell::Share(sum / n as f64) }
    };
    bins.map(cell).to_vec()
}

/// Pearson's correlation coefficient.
fn pearson(points: &Points) -> f64 {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for point in points {
        let (dx, dy) = (point.0 - x, point.1 - y);
        (xy, xx, yy) = (xy + dx * dy, xx + dx * dx, yy + dy * dy);
    }
    xy / (xx * yy).sqrt()
}

fn setting(inputs: &Inputs) -> String {
    let sources: Vec<String> = inputs.sources().map(|source| routing_of(source.trace)).collect();
    format!(
        "{}. {N_PAIRS} pairs drawn from up to {N_ITERATIONS} decode steps of all requests, all \
         layers. \
         Hit rate: of the experts that one uses, those that the other uses.",
        sources.join(". Also ")
    )
}

fn figure_8(inputs: &Inputs) -> Table {
    let rows = all_pairs(inputs).into_iter().flat_map(|(model, [semantic, trajectory])| {
        [(SEMANTIC, semantic), (TRAJECTORY, trajectory)]
            .map(|(name, points)| Row::new(format!("{name}, {model}"), binned(&points)))
    });
    let middles = (0..N_BINS).map(|bin| format!("{:.2}", (bin as f64 + 0.5) / N_BINS as f64));
    Table {
        id: "finemoe-fig-8",
        title: "FineMoE, Figure 8: mean expert hit rate by similarity score".into(),
        setting: format!("{} By the middle of a tenth of similarities.", setting(inputs)),
        columns: columns("similarity", middles),
        rows: rows.collect(),
        paper: Some(stated(
            "a plot, of which the text states",
            &[("semantic, trajectory", "both can effectively indicate the accuracy")],
        )),
        plot: Some(Axes { x: "similarity score".into(), y: "hit rate, %".into() }),
        ..Table::default()
    }
}

fn figure_9(inputs: &Inputs) -> Table {
    let rows = all_pairs(inputs).into_iter().map(|(model, [semantic, trajectory])| {
        Row::numbers(model, 3, [pearson(&semantic), pearson(&trajectory)])
    });
    Table {
        id: "finemoe-fig-9",
        title: "FineMoE, Figure 9: Pearson correlation of similarity score and expert hit rate"
            .into(),
        setting: setting(inputs),
        columns: columns("model", [SEMANTIC, TRAJECTORY]),
        rows: rows.collect(),
        paper: Some(stated(
            "a plot, of which the text states",
            &[("all models and datasets", "high scores potentially relate to high hit rates")],
        )),
        ..Table::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coefficients_of_known_points() {
        let points = |f: fn(f64) -> f64| (0..5).map(|x| (f64::from(x), f(f64::from(x)))).collect();
        assert!((pearson(&points(|x| 3.0 * x - 1.0)) - 1.0).abs() < 1e-12);
        assert!((pearson(&points(|x| -x)) + 1.0).abs() < 1e-12);
        assert!(pearson(&points(|x| (x - 2.0).powi(2))).abs() < 1e-12);
    }

    #[test]
    fn bins_are_of_a_tenth_and_not_of_a_few() {
        let points: Points = [(-0.5, 0.1), (0.05, 0.3), (0.95, 1.0), (1.0, 0.5)]
            .iter()
            .flat_map(|point| [*point; MIN_PAIRS / 2])
            .chain([(0.5, 0.5); MIN_PAIRS - 1])
            .collect();
        let cells = binned(&points);
        assert!((cells[0].value().unwrap() - 20.0).abs() < 1e-9);
        assert!((cells[N_BINS - 1].value().unwrap() - 75.0).abs() < 1e-9);
        assert!(cells[1..N_BINS - 1].iter().all(|cell| *cell == Cell::Missing));
    }
}
