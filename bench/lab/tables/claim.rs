//! Claims of the papers: what a table's rows say of each and, where they say otherwise, runs that
//! take away one suspected cause. The claim is judged again by the rows of such a run, so a cause
//! is named as one only where its absence changes the verdict.

use super::change::{Change, run_of};
use super::{Cell, Table};
use moeba::Result;
use std::cell::RefCell;
use std::rc::Rc;

/// How a claim fares on the rows of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finding {
    /// Comparisons that the claim makes, and those of them that come out as it says.
    pub n: usize,
    pub n_held: usize,
    /// The comparison that speaks against it the most, or for it the least.
    pub figures: String,
}

/// One comparison.
pub struct Compared {
    /// How far the figures are on the claim's side; negative on the other.
    pub margin: f64,
    pub figures: String,
}

impl Finding {
    /// A comparison holds from a margin of 0, and is left out where a figure is missing.
    pub fn of(compared: impl IntoIterator<Item = Compared>) -> Finding {
        Finding::judged(compared, |margin| margin >= 0.0)
    }

    /// The same where equal figures do not bear the claim out.
    pub fn strict(compared: impl IntoIterator<Item = Compared>) -> Finding {
        Finding::judged(compared, |margin| margin > 0.0)
    }

    fn judged(compared: impl IntoIterator<Item = Compared>, holds: fn(f64) -> bool) -> Finding {
        let known: Vec<_> = compared.into_iter().filter(|one| one.margin.is_finite()).collect();
        let worst = known.iter().min_by(|a, b| a.margin.total_cmp(&b.margin));
        Finding {
            n: known.len(),
            n_held: known.iter().filter(|one| holds(one.margin)).count(),
            figures: worst.map_or_else(String::new, |worst| worst.figures.clone()),
        }
    }

    /// A claim of a single comparison.
    pub fn one(margin: f64, figures: impl Into<String>) -> Finding {
        Finding::of([Compared { margin, figures: figures.into() }])
    }

    pub fn holds(&self) -> bool {
        self.n > 0 && self.n_held == self.n
    }

    /// Both claims at once.
    pub fn and(self, other: Finding) -> Finding {
        let figures = match (self.holds(), other.holds()) {
            (true, false) => other.figures,
            _ => self.figures,
        };
        Finding { n: self.n + other.n, n_held: self.n_held + other.n_held, figures }
    }

    /// `3 of 4 (at worst …)`
    fn describe(&self) -> String {
        match (self.n, self.n_held) {
            (0, _) => "there are no figures".into(),
            (1, _) => self.figures.clone(),
            (n, held) => format!("{held} of {n}, at worst {}", self.figures),
        }
    }
}

/// A suspected cause, and the claim in a run without it.
#[derive(Clone, Debug, PartialEq)]
pub struct Cause {
    /// A clause.
    pub name: String,
    /// A description of the run's changes.
    pub run: String,
    pub found: Finding,
}

/// Something that the paper says and that the rows can confirm or not.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    pub text: String,
    pub found: Finding,
    /// In the order in which they were looked into; the last one may explain the difference, and
    /// none was looked into after that.
    pub causes: Vec<Cause>,
}

impl Claim {
    pub fn holds(&self) -> bool {
        self.found.holds()
    }

    fn is_explained(&self) -> bool {
        self.causes.iter().any(|cause| cause.found.holds())
    }

    fn differs(&self) -> bool {
        self.found.n > 0 && !self.holds()
    }

    /// The verdict, and a line for each suspected cause.
    pub fn markdown(&self) -> String {
        if self.found.n == 0 {
            return format!("- {} — not judged: {}\n", self.text, self.found.describe());
        }
        if self.holds() {
            return format!("- {} — agrees\n", self.text);
        }
        let mut out = format!("- {} — **differs**: {}\n", self.text, self.found.describe());
        for Cause { name, run, found } in &self.causes {
            let (verdict, outcome) = if found.n == 0 {
                ("unknown whether because", "nothing can be said")
            } else if found.holds() {
                ("because", "the claim holds")
            } else if found.n_held * self.found.n > self.found.n_held * found.n {
                ("in part because", "more of it holds")
            } else {
                ("not because", "it differs as well")
            };
            let found = found.describe();
            out.push_str(&format!("  - {verdict} {name}: {run} {outcome} ({found})\n"));
        }
        if !self.is_explained() {
            out.push_str("  - the whole of the difference is explained by none of these runs\n");
        }
        out
    }
}

/// A table's runs with changes, each made once, when it is first asked for.
pub struct Runs<'r> {
    make: &'r dyn Fn(&[Change]) -> Result<Table>,
    made: RefCell<Vec<(Vec<Change>, Rc<Table>)>>,
}

impl<'r> Runs<'r> {
    pub fn new(make: &'r dyn Fn(&[Change]) -> Result<Table>) -> Runs<'r> {
        Runs { make, made: RefCell::default() }
    }

    pub fn with(&self, changes: &[Change]) -> Result<Rc<Table>> {
        let known = self.made.borrow().iter().find(|(of, _)| of == changes).map(|(_, t)| t.clone());
        if let Some(table) = known {
            return Ok(table);
        }
        let table = Rc::new((self.make)(changes)?);
        self.made.borrow_mut().push((changes.to_vec(), table.clone()));
        Ok(table)
    }
}

/// A claim while its causes are looked for.
pub struct Checked<'r, J> {
    claim: Claim,
    judge: J,
    runs: &'r Runs<'r>,
}

/// Judges a claim by a table.
pub fn check<'r, J: Fn(&Table) -> Finding>(
    text: impl Into<String>,
    table: &Table,
    runs: &'r Runs<'r>,
    judge: J,
) -> Checked<'r, J> {
    let claim = Claim { text: text.into(), found: judge(table), causes: Vec::new() };
    Checked { claim, judge, runs }
}

impl<J: Fn(&Table) -> Finding> Checked<'_, J> {
    /// A suspected cause, and the changes that take it away. Nothing is run for a claim that holds
    /// or is explained.
    pub fn unless(mut self, name: &str, changes: &[Change]) -> Result<Self> {
        if self.claim.differs() && !self.claim.is_explained() {
            let found = (self.judge)(&*self.runs.with(changes)?);
            self.claim.causes.push(Cause { name: name.into(), run: run_of(changes), found });
        }
        Ok(self)
    }

    /// A suspected cause that figures show by themselves: what they are of, and what they say.
    pub fn shown(
        mut self,
        name: &str,
        run: &str,
        found: impl FnOnce() -> Result<Finding>,
    ) -> Result<Self> {
        if self.claim.differs() && !self.claim.is_explained() {
            let found = found()?;
            self.claim.causes.push(Cause { name: name.into(), run: run.into(), found });
        }
        Ok(self)
    }

    pub fn done(self) -> Claim {
        self.claim
    }
}

impl Table {
    /// One row against another in all columns: nowhere below it by more than `slack` (in what is
    /// printed: points of percent, or the unit of the numbers).
    pub fn compare(&self, upper: &str, lower: &str, slack: f64) -> Finding {
        Finding::of(self.margins(upper, lower, slack))
    }

    /// The same, cell by cell.
    pub fn margins(&self, upper: &str, lower: &str, slack: f64) -> Vec<Compared> {
        let pairs = self.row(upper).cells.iter().zip(&self.row(lower).cells);
        let columns = self.columns[1..].iter();
        let margin = |(column, (a, b)): (&String, (&Cell, &Cell))| Compared {
            margin: a.value().zip(b.value()).map_or(f64::NAN, |(a, b)| a - b + slack),
            figures: format!("{upper} {a} and {lower} {b} at {column}"),
        };
        columns.zip(pairs).map(margin).collect()
    }

    /// One column against another in the rows whose names have a part.
    pub fn rows_compare(&self, part: &str, upper: usize, lower: usize, factor: f64) -> Finding {
        let rows = self.rows.iter().filter(|row| row.name.contains(part));
        Finding::of(rows.map(|row| {
            let (a, b) = (&row.cells[upper], &row.cells[lower]);
            let (of_a, of_b) = (&self.columns[upper + 1], &self.columns[lower + 1]);
            Compared {
                margin: a.value().zip(b.value()).map_or(f64::NAN, |(a, b)| a * factor - b),
                figures: format!("{of_a} {a} and {of_b} {b} of {}", row.name),
            }
        }))
    }
}
