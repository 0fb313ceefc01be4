//! FineMoE (Yu et al., EuroSys 2026): its figures on our routing. The paper's text states findings
//! and few numbers; its plots are not reproduced here.
//!
//! Stores and collections are filled beforehand, as in the paper's offline setting (§6.2): with the
//! first 70 % of the requests of each kind of text. What is shown is of the others, during which
//! they go on learning.

mod caching;
mod entropy;
mod limits;
mod memory;
mod overheads;
mod prediction;
mod similarity;
mod split;
mod store;

pub use caching::figure_14b;
pub use entropy::figure_3;
pub use limits::figure_12;
pub use memory::figure_18;
pub use overheads::figure_17;
pub use prediction::figure_14a;
pub use similarity::figures_8_and_9;
pub use store::figure_16a;

use super::{Cell, Inputs, Paper, Row, Table};
use moeba::Result;
use moeba::trace::format::Trace;
use split::Split;

/// Paper, Section 6.1.
const DEVICE: &str = "rtx3090";

/// All of them, in the order of the paper.
pub fn all(inputs: &Inputs) -> Result<Vec<Table>> {
    let mut tables = figure_3(inputs)?;
    tables.extend(figures_8_and_9(inputs)?);
    tables.extend(figure_12(inputs)?);
    tables.extend(figure_14a(inputs)?);
    tables.extend(figure_14b(inputs)?);
    tables.extend(figure_16a(inputs)?);
    tables.extend(figure_17(inputs)?);
    tables.extend(figure_18(inputs)?);
    Ok(tables)
}

/// The paper's statements on a figure that is a plot.
fn stated(setting: &str, findings: &[(&str, &str)]) -> Paper {
    let row = |(of, finding): &(&str, &str)| Row::new(*of, [Cell::Text(finding.to_string())]);
    Paper {
        columns: super::columns("of", ["stated"]),
        rows: findings.iter().map(row).collect(),
        setting: setting.into(),
    }
}

/// Names the routing in the setting of a table where nothing is loaded and sizes do not matter.
fn routing_of(trace: &Trace) -> String {
    let header = trace.header();
    let n_experts = header.layers.iter().map(|layer| layer.n_experts).max().unwrap_or(0);
    let n_layers = header.moe_layers().count();
    format!(
        "routing of {} ({n_layers} layers of {n_experts} experts, {} a token)",
        header.model, header.k
    )
}

/// Says in a setting how many requests are learned from and counted.
fn learned(split: &Split) -> String {
    let (known, new, n_warm_up) = (split.known.len(), split.new.len(), split.n_warm_up());
    let counted = new - n_warm_up;
    format!("{known} requests are learned from, {n_warm_up} fill the cache, {counted} are counted")
}

#[cfg(test)]
mod tests;
