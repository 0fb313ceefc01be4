//! PreScope's tables: throughput of batches by who schedules (Figure 12), what each part is worth
//! (Figure 15), the accuracy of its predictor (Figure 16, Table 3), and how evenly GPU and CPU work
//! (Figure 17).

mod ablation;
mod accuracy;
mod alike;
mod balance;
mod bench;
mod networks;
mod throughput;

pub use networks::Trained;

use super::{Inputs, Table};
use moeba::Result;

pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    for source in bench::sources(inputs) {
        tables.push(throughput::figure_12(inputs, source)?);
    }
    for source in bench::sources(inputs) {
        tables.push(ablation::figure_15(inputs, source)?);
    }
    if let Some(report) = &inputs.llapor {
        tables.push(accuracy::figure_16(inputs, report)?);
        tables.push(accuracy::table_3(inputs, report)?);
    }
    for source in bench::sources(inputs) {
        tables.push(balance::figure_17(inputs, source)?);
    }
    Ok(tables)
}

#[cfg(test)]
mod tests;
