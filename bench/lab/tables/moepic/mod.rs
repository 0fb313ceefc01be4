//! The tables and figures of MoEpic, "Accelerating Mixture-of-Expert Inference with Adaptive
//! Expert Split Mechanism": its cache policy (Table 1), the split of experts (Figure 4b), what
//! each of its parts is good for (Table 3), and the memory that it saves (Figure 8).

mod ablation;
mod bench;
mod eviction;
mod memory;
mod split;

use super::{Inputs, Table};
use bench::Bench;
use moeba::Result;

pub use ablation::table_3;
pub use eviction::table_1;
pub use memory::figure_8;
pub use split::figure_4b;

/// Every fourth request; for searches, which take many replays, every eighth.
const EVERY: usize = 4;
const EVERY_FOR_SEARCHES: usize = 8;

/// In the paper's order.
pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let tables = [table_1, figure_4b, table_3, figure_8];
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

/// Applies `of` to each bench that has a name, with every n-th request.
fn each<'a>(
    inputs: &Inputs<'a>,
    ids: Ids,
    every: usize,
    of: impl Fn(&'static str, &Bench<'a>) -> Result<Table>,
) -> Result<Vec<Table>> {
    let fine = || Bench::new(inputs, inputs.fine, every);
    let mut tables = vec![of(ids.fine, &fine())?];
    if let Some(id) = ids.as_measured {
        tables.push(of(id, &fine().as_measured())?);
    }
    if let Some(coarse) = inputs.coarse {
        tables.push(of(ids.coarse, &Bench::new(inputs, coarse, every))?);
    }
    Ok(tables)
}

#[cfg(test)]
mod tests;
