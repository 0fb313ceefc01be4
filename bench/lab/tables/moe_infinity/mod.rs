//! MoE-Infinity (Xue et al., 2024), section 7: what its prefetching (7.2), its caching (7.3) and
//! its traces of past requests (7.5) are worth on our routing. The paper's clients draw prompts
//! from all tasks alike, so requests of all kinds take turns here, unless a table says otherwise.

mod adapting;
mod caching;
mod prefetching;
mod workload;

pub use adapting::{figure_13, table_7};
pub use caching::table_5;
pub use prefetching::{table_4, tables_2_and_3};

use super::{Inputs, Table};
use moeba::Result;

/// The paper's (7.1).
const DEVICE: &str = "a5000";

pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let mut tables = tables_2_and_3(inputs)?;
    tables.push(table_4(inputs)?);
    tables.push(table_5(inputs)?);
    tables.push(table_7(inputs)?);
    tables.push(figure_13(inputs)?);
    Ok(tables)
}

#[cfg(test)]
mod tests;
