//! Choices by the vocabulary: a mean of the summaries that tokens of one number had. The number of
//! the next token is known before its first layer.

use super::vector::{RANK, Vector, approach};
use crate::policy::mix;

/// Rows of the table, a power of two: more than a text has different tokens.
const N_ROWS: usize = 1 << 14;

/// So many tokens' worth of doubt in a mean.
const DOUBT: f32 = 1.0;

/// The least weight of a token in a mean.
const LEAST_WEIGHT: f32 = 0.05;

/// A token of the vocabulary that has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    pub token: u32,
    /// How often it has come; 0 in a row that is free.
    pub n: u32,
    /// The mean of its summaries.
    pub mean: Vector,
}

/// A table with one place for each number: a token takes the place of another that shares it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens(Vec<Row>);

impl Tokens {
    pub fn new() -> Tokens {
        Tokens(vec![Row { token: 0, n: 0, mean: [0.0; RANK] }; N_ROWS])
    }

    /// The summary to expect of a token, without the mean of all; zeros if nothing is known.
    pub fn expected(&self, token: u32) -> Vector {
        let row = &self.0[place(token)];
        let n = if row.token == token { row.n as f32 } else { 0.0 };
        row.mean.map(|x| x * (n / (n + DOUBT)))
    }

    /// A token has had this summary, without the mean of all.
    pub fn learn(&mut self, token: u32, summary: &Vector) {
        let row = &mut self.0[place(token)];
        if row.token != token {
            *row = Row { token, n: 0, mean: [0.0; RANK] };
        }
        row.n = row.n.saturating_add(1);
        approach(&mut row.mean, (1.0 / row.n as f32).max(LEAST_WEIGHT), summary);
    }

    /// The rows of tokens that have come.
    pub fn known(&self) -> impl Iterator<Item = &Row> {
        self.0.iter().filter(|row| row.n > 0)
    }

    pub fn put(&mut self, row: Row) {
        self.0[place(row.token)] = row;
    }
}

fn place(token: u32) -> usize {
    mix(u64::from(token)) as usize % N_ROWS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_expected_to_be_what_it_was() {
        let mut tokens = Tokens::new();
        assert_eq!(tokens.expected(0), [0.0; RANK]);
        (0..100).for_each(|_| tokens.learn(0, &[2.0; RANK]));
        assert!(tokens.expected(0).iter().all(|x| (1.9..2.0).contains(x)));
        (0..200).for_each(|_| tokens.learn(0, &[-1.0; RANK]));
        assert!(tokens.expected(0).iter().all(|x| (*x + 1.0).abs() < 0.02));
        assert_eq!(tokens.known().count(), 1);
    }

    #[test]
    fn a_token_that_takes_the_row_of_another_starts_from_nothing() {
        let other = (1..).find(|token| place(*token) == place(0)).unwrap();
        let mut tokens = Tokens::new();
        tokens.learn(0, &[2.0; RANK]);
        tokens.learn(other, &[1.0; RANK]);
        assert_eq!(tokens.expected(0), [0.0; RANK]);
        assert_eq!(tokens.expected(other), [0.5; RANK]);
    }
}
