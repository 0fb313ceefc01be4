//! The papers' tables on our routing: what each says, beside the paper's own figures, and whether
//! what the paper claims holds here. A claim is checked on the rows, so that the text beside a
//! table cannot outlive the figures it was written about.

use moeba::Result;

mod altered;
mod change;
mod chosen;
mod claim;
pub mod finemoe;
mod inputs;
mod markdown;
pub mod moe_infinity;
pub mod moepic;
pub mod prescope;
pub mod side_by_side;
pub mod side_by_side_live;

pub use altered::Alteration;
pub use change::Change;
pub use claim::{Checked, Claim, Compared, Finding, Runs, check};
pub use inputs::{Inputs, Source};
pub use markdown::{csv, markdown};
pub use moeba::trace::N_UBATCH;
pub use moeba::trace::table::{Cell, Row, columns};

/// Tables that belong together: a paper's.
pub struct Section {
    pub title: &'static str,
    pub tables: fn(&Inputs) -> Result<Vec<Table>>,
}

/// In the order of the document.
pub const SECTIONS: &[Section] = &[
    Section { title: "MoEpic", tables: moepic::all },
    Section { title: "FineMoE", tables: finemoe::all },
    Section { title: "MoE-Infinity", tables: moe_infinity::all },
    Section { title: "PreScope", tables: prescope::all },
    Section { title: "All policies side by side", tables: side_by_side::all },
];

/// How the document begins.
pub fn introduction(inputs: &Inputs) -> String {
    let mut text = format!("{HEADING}{INTRODUCTION}");
    for source in inputs.sources() {
        let header = source.trace.header();
        text.push_str(&format!(
            "- {}: {} requests, {} tokens; stands for {}\n",
            header.model,
            source.trace.requests().len(),
            source.trace.n_tokens(),
            source.stands_for,
        ));
    }
    text.push('\n');
    text
}

/// The first line of the document.
pub const HEADING: &str = "# Policies on the routing of trained models";

const INTRODUCTION: &str = "\n\n\
    Made by `moeba-lab papers`; do not edit. Routing is that of the small models that come with \
    moeba, on text they were not trained on; sizes of experts and speeds of machines are those \
    of the published models and machines that the papers used. Hits, misses and bytes are those \
    of the engine's own tier and policies; time is modelled (`src/trace/costs.rs`). Whether a \
    claim of a paper holds is computed from the rows. Where it does not, runs follow that take \
    away one suspected cause each; one is called the cause only if the claim holds without it.\n\n";

/// Figures of ours, of the paper's, and what they are to show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// A file's name: `moepic-table-1`.
    pub id: &'static str,
    /// Which table or figure of which paper.
    pub title: String,
    /// On which routing, sizes and machine, and what is counted.
    pub setting: String,
    /// The first is that of the rows' names.
    pub columns: Vec<String>,
    pub rows: Vec<Row>,
    /// The paper's rows, with columns of their own.
    pub paper: Option<Paper>,
    pub claims: Vec<Claim>,
    pub plot: Option<Axes>,
}

/// The paper's own table, or values read from its plot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Paper {
    pub columns: Vec<String>,
    pub rows: Vec<Row>,
    /// On what it was measured.
    pub setting: String,
}

/// A plot of the rows, a line each, over the columns, whose names must be numbers (a unit may
/// follow).
#[derive(Clone, Debug, PartialEq)]
pub struct Axes {
    pub x: String,
    pub y: String,
}

impl Table {
    /// The row of that name; it is there.
    pub fn row(&self, name: &str) -> &Row {
        let row = self.rows.iter().find(|row| row.name == name);
        row.unwrap_or_else(|| panic!("{} has no row {name}", self.id))
    }

    /// The values of a row, NaN where there is none.
    pub fn values(&self, name: &str) -> Vec<f64> {
        self.row(name).cells.iter().map(|cell| cell.value().unwrap_or(f64::NAN)).collect()
    }

    #[cfg(test)]
    pub fn at_least(&self, upper: &str, lower: &str, slack: f64) -> bool {
        self.compare(upper, lower, slack).holds()
    }
}

#[cfg(test)]
mod claim_tests;
