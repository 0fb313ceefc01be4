//! A constant that a paper leaves open is chosen here on one half of the requests and judged on
//! the other: rows of both halves, a column for each value that was tried.

use super::{Change, Claim, Compared, Finding, Runs, Table, check};
use moeba::Result;
use moeba::trace::format::Trace;
use moeba::trace::{by_turns, kinds};

/// Every other request of each kind.
#[derive(Clone, Copy)]
pub enum Half {
    ToChoose,
    ToJudge,
}

pub const HALVES: [Half; 2] = [Half::ToChoose, Half::ToJudge];

impl Half {
    /// The name of a row begins with it.
    pub fn name(self) -> &'static str {
        match self {
            Half::ToChoose => "to choose by",
            Half::ToJudge => "to judge by",
        }
    }

    /// The requests, the kinds by turns.
    pub fn of(self, trace: &Trace) -> Vec<usize> {
        let all = by_turns(trace, 1);
        let turns = all.chunks(kinds(trace).len().max(1));
        turns.skip(self as usize).step_by(2).flatten().copied().collect()
    }
}

/// The time with the default against the least, in the rows of a half.
fn near_the_least(table: &Table, half: Half, default: &str) -> Finding {
    let column = table.columns.iter().position(|name| name == default);
    // The first column has the rows' names.
    let at = column.expect("the default is among them") - 1;
    let rows = table.rows.iter().filter(|row| row.name.starts_with(half.name()));
    Finding::of(rows.map(|row| {
        let values = table.values(&row.name);
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let figures =
            format!("{:.2} ms with {default}, {least:.2} at best, {}", values[at], row.name);
        Compared { margin: 1.02 * least - values[at], figures }
    }))
}

/// The default is within 2 % of the best in both halves. `causes`: suspected causes of the
/// opposite, and the changes that take each away.
pub fn claims(
    table: &Table,
    runs: &Runs,
    default: &str,
    causes: &[(&str, &[Change])],
) -> Result<Vec<Claim>> {
    let texts = [
        "The default is within 2 % of the best on the requests that it was chosen by (ours)",
        "So it is on those that nothing was chosen by (ours)",
    ];
    let claim = |(half, text)| {
        let near = check(text, table, runs, |table: &Table| near_the_least(table, half, default));
        let mut causes = causes.iter();
        let near = causes.try_fold(near, |near, (cause, changes)| near.unless(cause, changes))?;
        Ok(near.done())
    };
    HALVES.into_iter().zip(texts).map(claim).collect()
}
