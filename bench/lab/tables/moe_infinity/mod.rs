//! MoE-Infinity (Xue et al., 2024), section 7: what its prefetching (7.2), its caching (7.3) and
//! its traces of past requests (7.5) are worth on our routing, and what it rests on (2.3, 3.1). The
//! paper's clients draw prompts from all tasks alike, so requests of all kinds take turns here,
//! unless a table says otherwise.

mod activation;
mod adapting;
mod caching;
mod matches;
mod prefetching;
mod workload;

pub use activation::{figure_4, table_1};
pub use adapting::{figure_13, table_7};
pub use caching::table_5;
pub use matches::matches;
pub use prefetching::{table_4, tables_2_and_3};

use super::{Change, Claim, Inputs, Runs, Table};
use moeba::Result;

/// The paper's (7.1).
const DEVICE: &str = "a5000";

/// About so many requests, of a short trace all.
const N_REQUESTS: usize = 64;

pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let mut tables = vec![table_1(inputs)?, figure_4(inputs)?];
    tables.extend(tables_2_and_3(inputs)?);
    for table in [table_4, table_5, table_7, figure_13, matches] {
        tables.push(table(inputs)?);
    }
    Ok(tables)
}

/// A table with its claims; `rows` makes it with some changes.
fn with_claims(
    inputs: &Inputs,
    rows: fn(&Inputs, &[Change]) -> Result<Table>,
    claims: fn(&Table, &Runs) -> Result<Vec<Claim>>,
) -> Result<Table> {
    let make = |changes: &[Change]| inputs.with(changes, |inputs| rows(inputs, changes));
    let mut table = make(&[])?;
    table.claims = claims(&table, &Runs::new(&make))?;
    Ok(table)
}

#[cfg(test)]
mod tests;
