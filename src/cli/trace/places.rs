//! Start positions of requests in a text: spread evenly, each at the beginning of a line or a
//! sentence, with enough text behind it.

use super::super::values::{self, Parsed};
use crate::cli::args;
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Bytes that a token is assumed to have, before it is known.
const BYTES_A_TOKEN: usize = 4;

/// Multiples of it, without the whole part, are spread more evenly than random numbers.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// From the fewest to the most tokens: `N` or `N-N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    pub min: usize,
    pub max: usize,
}

impl Lengths {
    pub fn parse(text: &str) -> Parsed<Lengths> {
        let (min, max) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| values::integer(text, 1, args::MAX_TOKENS);
        match (number(min), number(max)) {
            (Ok(min), Ok(max)) if min <= max => Ok(Lengths { min, max }),
            _ => Err("expected a number of tokens, or a range such as 32-96".into()),
        }
    }

    /// The length of the i-th request.
    pub fn of(&self, i: usize) -> usize {
        let part = ((i + 1) as f64 * GOLDEN).fract();
        self.min + (part * (self.max - self.min + 1) as f64) as usize
    }
}

/// A text to take requests from.
pub struct Source<'a> {
    tokenizer: &'a Tokenizer,
    text: &'a str,
    /// Requests begin before this byte.
    end: usize,
}

impl<'a> Source<'a> {
    /// `Err` with the number of tokens that there are if those are fewer than `n_tokens`, the most
    /// that a request takes.
    pub fn new(tokenizer: &'a Tokenizer, text: &'a str, n_tokens: usize) -> Result<Self, usize> {
        let mut source = Source { tokenizer, text, end: 0 };
        let mut n_bytes = BYTES_A_TOKEN * n_tokens;
        loop {
            let at = boundary(text, text.len().saturating_sub(n_bytes));
            let n = source.encode(at, text.len()).len();
            if n >= n_tokens {
                source.end = at + 1;
                return Ok(source);
            }
            if at == 0 {
                return Err(n);
            }
            n_bytes *= 2;
        }
    }

    /// Tokens of the i-th of `n` requests, at most `n_tokens`. Seeds shift the places.
    pub fn request(&self, i: usize, n: usize, n_tokens: usize, seed: u32) -> Vec<u32> {
        let shift = (f64::from(seed) * GOLDEN).fract();
        let place = |i: usize| ((i as f64 + shift) / n as f64 * self.end as f64) as usize;
        let start = beginning(self.text, place(i), place(i + 1).min(self.end));
        let mut n_bytes = BYTES_A_TOKEN * n_tokens;
        loop {
            let end = boundary(self.text, (start + n_bytes).min(self.text.len()));
            let mut tokens = self.encode(start, end);
            // The last token of a part may be another one in the whole.
            if tokens.len() > n_tokens || end == self.text.len() {
                tokens.truncate(n_tokens);
                return tokens;
            }
            n_bytes *= 2;
        }
    }

    fn encode(&self, start: usize, end: usize) -> Vec<u32> {
        let options = EncodeOptions { add_special: true, parse_special: false };
        self.tokenizer.encode(&self.text[start..end], options)
    }
}

/// The first character boundary at or before a byte.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// The first beginning of a line or a sentence in this part of the text; without one, where it
/// starts.
fn beginning(text: &str, from: usize, to: usize) -> usize {
    let bytes = text.as_bytes();
    let begins = |at: &usize| {
        let line = *at == 0 || bytes[at - 1] == b'\n';
        let sentence = *at >= 2 && bytes[at - 1] == b' ' && b".!?".contains(&bytes[at - 2]);
        (line || sentence) && !bytes[*at].is_ascii_whitespace() && text.is_char_boundary(*at)
    };
    (from..to).find(begins).unwrap_or_else(|| boundary(text, from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_one_number_or_two() {
        assert_eq!(Lengths::parse("7"), Ok(Lengths { min: 7, max: 7 }));
        assert_eq!(Lengths::parse("32-96"), Ok(Lengths { min: 32, max: 96 }));
        for bad in ["", "0", "-3", "9-8", "1-2-3", "a", "1-"] {
            assert!(Lengths::parse(bad).is_err(), "{bad}");
        }
        let lengths = Lengths { min: 3, max: 6 };
        let counts = (0..400).fold([0; 7], |mut counts, i| {
            counts[lengths.of(i)] += 1;
            counts
        });
        assert!(counts[..3] == [0; 3] && counts[3..].iter().all(|n| (95..105).contains(n)));
    }

    #[test]
    fn requests_begin_where_a_line_or_a_sentence_does() {
        let text = "One. Two!  Three\n\n four\nfünf";
        let at = |from, to| &text[beginning(text, from, to)..];
        assert!(at(0, 9).starts_with("One"));
        assert!(at(1, 9).starts_with("Two"));
        // No beginning in reach.
        assert!(at(6, 9).starts_with("wo!"));
        // Neither an empty line nor an indented one.
        assert!(at(11, text.len()).starts_with("fünf"));
        let inside = text.find('ü').unwrap() + 1;
        assert!(at(inside, text.len()).starts_with("ün"));
    }
}
