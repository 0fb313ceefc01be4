//! PreScope's tables: throughput of batches by who schedules (Figure 12), what each part is worth
//! (Figure 15), and the accuracy of its predictor (Figure 16, Table 3).

mod ablation;
mod accuracy;
mod bench;
mod networks;
mod throughput;

pub use networks::Trained;

use super::{Inputs, Table};
use moeba::Result;

pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let benches = bench::benches(inputs)?;
    let mut tables: Vec<Table> = benches.iter().map(throughput::figure_12).collect();
    let figure_15 = |bench| ablation::figure_15(bench, inputs.sync_slowdown);
    tables.extend(benches.iter().map(figure_15));
    if let Some(report) = &inputs.llapor {
        tables.push(accuracy::figure_16(inputs, report));
        tables.push(accuracy::table_3(inputs, report));
    }
    Ok(tables)
}

#[cfg(test)]
mod tests;
