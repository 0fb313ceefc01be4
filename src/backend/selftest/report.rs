//! The comparisons and their results.

use crate::Result;

/// A kernel in one format.
#[derive(Clone, Debug)]
pub struct Row {
    pub kernel: String,
    pub format: String,
    pub shapes: Vec<String>,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All bits equal the twin's.
    Equal,
    /// The largest error, as a part of the largest value, and its bound.
    Within { error: f64, bound: f64 },
    /// The first difference.
    Differs(String),
    /// The device's error message.
    Failed(String),
    /// Why it does not apply to the device.
    LeftOut(String),
}

impl Outcome {
    pub fn is_good(&self) -> bool {
        matches!(self, Outcome::Equal | Outcome::Within { .. } | Outcome::LeftOut(_))
    }
}

#[derive(Debug, Default)]
pub struct Report {
    pub rows: Vec<Row>,
}

impl Report {
    /// Whether all kernels are right, and there is at least one.
    pub fn is_clean(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.outcome.is_good())
    }

    /// A row that `compare` fills, one shape after another. If the device fails, the row fails.
    pub fn row(
        &mut self,
        kernel: &str,
        format: impl ToString,
        compare: impl FnOnce(&mut Row) -> Result<()>,
    ) {
        self.begin(kernel, format);
        let result = compare(self.open());
        self.end(result);
    }

    pub(super) fn begin(&mut self, kernel: &str, format: impl ToString) {
        let (kernel, format) = (kernel.to_owned(), format.to_string());
        self.rows.push(Row { kernel, format, shapes: Vec::new(), outcome: Outcome::Equal });
    }

    /// The row that was begun last.
    pub(super) fn open(&mut self) -> &mut Row {
        self.rows.last_mut().expect("a row was begun")
    }

    pub(super) fn end(&mut self, result: Result<()>) {
        let row = self.open();
        if let Err(error) = result {
            row.outcome = Outcome::Failed(error.to_string());
        } else if row.shapes.is_empty() && row.outcome == Outcome::Equal {
            row.outcome = Outcome::Failed("nothing was compared".into());
        }
    }
}

impl Row {
    /// Numbers that must equal the twin's to the bit. All NaNs are equal: which one an operation
    /// gives depends on the processor.
    pub fn bits(&mut self, shape: impl ToString, got: &[f32], expected: &[f32]) {
        let bits = |x: &[f32]| -> Vec<u32> {
            x.iter().map(|x| if x.is_nan() { f32::NAN } else { *x }.to_bits()).collect()
        };
        let (got, expected) = (bits(got), bits(expected));
        self.equal(shape, &got, &expected, |bits| format!("{:e}", f32::from_bits(*bits)));
    }

    /// Integers that must equal the twin's.
    pub fn words<T: PartialEq + ToString>(
        &mut self,
        shape: impl ToString,
        got: &[T],
        expected: &[T],
    ) {
        self.equal(shape, got, expected, T::to_string);
    }

    fn equal<T: PartialEq>(
        &mut self,
        shape: impl ToString,
        got: &[T],
        expected: &[T],
        text: impl Fn(&T) -> String,
    ) {
        let shape = self.begin(shape);
        if got.len() != expected.len() {
            let (got, expected) = (got.len(), expected.len());
            return self.differs(format!("{shape}: {got} values for {expected}"));
        }
        let wrong: Vec<usize> = (0..got.len()).filter(|i| got[*i] != expected[*i]).collect();
        if let Some(&i) = wrong.first() {
            let (n, of) = (wrong.len(), got.len());
            let (got, expected) = (text(&got[i]), text(&expected[i]));
            self.differs(format!("{shape}: {n} of {of}, first {got} for {expected} at {i}"));
        }
    }

    /// Numbers that may differ by `bound` times the largest expected one.
    pub fn near(&mut self, shape: impl ToString, got: &[f32], expected: &[f32], bound: f64) {
        let shape = self.begin(shape);
        let largest = expected.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
        let scale = largest.max(f64::MIN_POSITIVE);
        let errors = got.iter().zip(expected).map(|(g, e)| f64::from((g - e).abs()) / scale);
        // Not `f64::max`, which ignores NaN.
        let worst = errors.fold(0.0f64, |max, x| if x > max || x.is_nan() { x } else { max });
        let good = got.len() == expected.len() && worst <= bound;
        match self.outcome {
            _ if !good => self.differs(format!("{shape}: off by {worst:.1e} of {bound:.1e}")),
            Outcome::Equal => self.outcome = Outcome::Within { error: worst, bound },
            Outcome::Within { error, .. } => {
                self.outcome = Outcome::Within { error: error.max(worst), bound };
            }
            _ => {}
        }
    }

    /// Nothing is compared.
    pub fn leave_out(&mut self, why: &str) {
        self.outcome = Outcome::LeftOut(why.to_owned());
    }

    fn begin(&mut self, shape: impl ToString) -> String {
        self.shapes.push(shape.to_string());
        shape.to_string()
    }

    /// The first difference counts.
    fn differs(&mut self, what: String) {
        if self.outcome.is_good() {
            self.outcome = Outcome::Differs(what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn outcome(compare: impl FnOnce(&mut Row)) -> Outcome {
        let mut report = Report::default();
        report.row("k", "f32", |row| {
            compare(row);
            Ok(())
        });
        assert_eq!(report.is_clean(), report.rows[0].outcome.is_good());
        report.rows.swap_remove(0).outcome
    }

    fn text(outcome: Outcome) -> String {
        match outcome {
            Outcome::Differs(text) | Outcome::Failed(text) => text,
            good => panic!("{good:?}"),
        }
    }

    #[test]
    fn bits_are_equal_or_the_first_difference_is_told() {
        assert_eq!(outcome(|row| row.bits("2", &[1.0, -0.0], &[1.0, -0.0])), Outcome::Equal);
        let nan = f32::from_bits(0xffc0_0001);
        assert_eq!(outcome(|row| row.bits("1", &[nan], &[f32::NAN])), Outcome::Equal);
        let zeros = text(outcome(|row| row.bits("3", &[0.0, -0.0, 2.0], &[0.0, 0.0, 1.5])));
        assert_eq!(zeros, "3: 2 of 3, first -0e0 for 0e0 at 1");
        assert!(text(outcome(|row| row.bits("2", &[1.0], &[1.0, 2.0]))).contains("1 values for 2"));
        let both = outcome(|row| {
            row.words("a", &[1u32], &[2]);
            row.words("b", &[1u32], &[1]);
        });
        assert!(text(both).starts_with("a: "));
    }

    #[test]
    fn errors_are_parts_of_the_largest_value() {
        let near = |got: &[f32], bound| outcome(|row| row.near("s", got, &[4.0, 1.0], bound));
        assert_eq!(near(&[4.0, 1.5], 0.125), Outcome::Within { error: 0.125, bound: 0.125 });
        assert!(text(near(&[4.0, 1.5], 0.1)).contains("1.2e-1 of 1.0e-1"));
        assert!(!near(&[4.0, f32::NAN], 0.1).is_good());
        assert!(!near(&[4.0], 0.1).is_good());
    }

    #[test]
    fn nothing_compared_is_nothing_shown() {
        assert!(text(outcome(|_| ())).contains("nothing"));
        assert!(!Report::default().is_clean());
        let mut report = Report::default();
        report.row("norm", "", |_| Err(Error::Device("lost".into())));
        assert_eq!(report.rows[0].outcome, Outcome::Failed("lost".into()));
    }
}
