//! The cut of a product of many tokens: a piece is some rows times one part of the tokens. Pieces
//! of all tokens would have few rows if there are many threads, and each of them interleaves its
//! tokens' activations again (`simd`), which costs as much as some 25 rows do.

use std::ops::Range;

/// Tokens of a part, more or less: as many as pass over a panel of weights at once.
const PART: usize = 128;

/// Tokens that matrix–matrix kernels take at once: no part but the last leaves a remainder.
const TILE: usize = 12;

/// The tokens of a product, in parts of about the same size.
#[derive(Clone, Copy, Debug)]
pub struct TokenParts {
    tokens: usize,
    size: usize,
}

impl TokenParts {
    pub fn new(tokens: usize) -> Self {
        let parts = ((tokens + PART / 2) / PART).max(1);
        let size = match parts {
            1 => tokens.max(1),
            _ => tokens.div_ceil(parts).next_multiple_of(TILE),
        };
        TokenParts { tokens, size }
    }

    /// The number of tokens.
    pub fn all(&self) -> usize {
        self.tokens
    }

    /// At least 1.
    pub fn count(&self) -> usize {
        self.tokens.div_ceil(self.size).max(1)
    }

    pub fn part(&self, i: usize) -> Range<usize> {
        self.tokens.min(i * self.size)..self.tokens.min((i + 1) * self.size)
    }

    /// The pieces in a range of `0..rows·count`, which numbers the rows of the first part, then
    /// those of the next: each piece's rows and tokens.
    pub fn pieces(
        self,
        rows: usize,
        range: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let part = (at < range.end).then(|| at / rows)?;
            let end = range.end.min((part + 1) * rows);
            let piece = (at - part * rows..end - part * rows, self.part(part));
            at = end;
            Some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_have_each_row_and_token_once(
            tokens in 0usize..700,
            rows in 1usize..40,
            cuts in prop::collection::vec(0usize..400, 0..6),
        ) {
            let parts = TokenParts::new(tokens);
            let total = rows * parts.count();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(total)).collect();
            cuts.extend([0, total]);
            cuts.sort_unstable();
            let mut seen = vec![0; rows * tokens];
            for cut in cuts.windows(2) {
                for (rows_of_piece, tokens_of_piece) in parts.pieces(rows, cut[0]..cut[1]) {
                    prop_assert!(tokens_of_piece.len() <= 2 * PART && !rows_of_piece.is_empty());
                    for t in tokens_of_piece {
                        rows_of_piece.clone().for_each(|r| seen[t * rows + r] += 1);
                    }
                }
            }
            prop_assert!(seen.iter().all(|n| *n == 1));
        }
    }
}
