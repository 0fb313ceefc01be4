//! The tables and figures of MoEpic, "Accelerating Mixture-of-Expert Inference with Adaptive
//! Expert Split Mechanism": its cache policy (Table 1), the split of experts (Figure 4b), what
//! each of its parts is good for (Table 3), and the memory that it saves (Figure 8).

mod ablation;
mod bench;
mod eviction;
mod memory;
mod split;
mod tau;

use super::{Change, Claim, Inputs, Runs, Table};
use bench::Bench;
use moeba::Result;

pub use ablation::table_3;
pub use eviction::table_1;
pub use memory::figure_8;
pub use split::figure_4b;
pub use tau::tau;

/// About so many requests, and for searches, which take many replays, a quarter; all of a trace
/// that has no more.
const N_REQUESTS: usize = 48;
const N_FOR_SEARCHES: usize = 12;

/// In the paper's order.
pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let tables = [table_1, figure_4b, table_3, figure_8, tau];
    let tables: Result<Vec<_>> = tables.into_iter().map(|table| table(inputs)).collect();
    Ok(tables?.into_iter().flatten().collect())
}

/// Tables by their names: of each source, and of the fine one with times as the paper measured
/// them.
struct Ids {
    fine: &'static str,
    as_measured: Option<&'static str>,
    coarse: &'static str,
}

/// A table's rows with some changes, and its claims.
struct Maker {
    rows: fn(&'static str, &Bench, &[Change]) -> Result<Table>,
    claims: fn(&Table, &Runs) -> Result<Vec<Claim>>,
}

/// Makes the table of each bench that has a name, with about so many requests.
fn each(inputs: &Inputs, ids: Ids, n_requests: usize, maker: &Maker) -> Result<Vec<Table>> {
    let fine = [(Some(ids.fine), false), (ids.as_measured, true)];
    let fine = fine.map(|(id, as_measured)| (id, Some(inputs.fine), as_measured));
    let benches = fine.into_iter().chain([(Some(ids.coarse), inputs.coarse, false)]);
    let mut tables = Vec::new();
    for (id, source, as_measured) in benches {
        let (Some(id), Some(source)) = (id, source) else { continue };
        let alone = Inputs { n_warm_up: inputs.n_warm_up, ..Inputs::of(source) };
        let make = |changes: &[Change]| {
            alone.with(changes, |inputs| {
                let mut bench = Bench::new(inputs, inputs.fine, inputs.fine.every(n_requests));
                bench.as_measured = as_measured;
                if changes.contains(&TWICE) {
                    bench.serve_twice();
                }
                (maker.rows)(id, &bench, changes)
            })
        };
        let mut table = make(&[])?;
        table.claims = (maker.claims)(&table, &Runs::new(&make))?;
        tables.push(table);
    }
    Ok(tables)
}

/// Policies learn more.
const TWICE: Change = Change::Own("with all requests served once before");

#[cfg(test)]
mod tests;
