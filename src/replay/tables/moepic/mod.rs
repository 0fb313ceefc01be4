//! The tables and figures of MoEpic, "Accelerating Mixture-of-Expert Inference with Adaptive
//! Expert Split Mechanism": its cache policy (Table 1), the split of experts (Figure 4b), what
//! each of its parts is good for (Table 3), and the memory that it saves (Figure 8).

mod ablation;
mod bench;
mod eviction;
mod memory;
mod split;
mod subset;

use super::{Inputs, Source, Table};
use crate::Result;
use bench::Bench;

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

/// A table of each source: what `of` makes of it and of the name that it has for that source.
fn each<'a>(
    inputs: &Inputs<'a>,
    ids: [&'static str; 2],
    every: usize,
    of: impl Fn(&'static str, &Bench<'a>) -> Result<Table>,
) -> Result<Vec<Table>> {
    let sources = ids.into_iter().zip(inputs.sources());
    sources.map(|(id, source)| of(id, &Bench::new(inputs, source, every))).collect()
}

/// Which of the paper's two models a table is about.
fn stand_in(source: &Source) -> &'static str {
    source.stands_for
}

#[cfg(test)]
mod tests;
