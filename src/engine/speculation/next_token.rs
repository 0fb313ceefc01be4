//! Drafts by the model's own layer that predicts the token after the next: what it needs of a text.
//!
//! The layer attends to what it was given of the text itself, a [`NextTokenText::WINDOW`] before a
//! prompt's end and what was decoded since, not to all of the text: so it costs a prompt next to
//! nothing, and no pages of it are kept. It computes when a draft is wanted; until then outputs of
//! the model are collected.

use crate::Result;
use crate::forward::NextTokenRows;
use crate::model::kv::{CacheType, KvCache};
use crate::model::next_token::NextTokenHead;

/// Computes rows into a cache; returns the last one's logits and output.
pub(in crate::engine) type NextTokenCompute<'a> =
    &'a mut dyn FnMut(NextTokenRows<'_>, &mut KvCache) -> Result<(Vec<f32>, Vec<f32>)>;

/// Positions of the head's cache.
const N_ROWS: usize = 3 * NextTokenText::WINDOW;

/// The outputs of a text's last positions, and the cache of the layer.
pub(in crate::engine) struct NextTokenText {
    n_embd: usize,
    n_ctx: usize,
    /// [positions, n_embd]
    outputs: Vec<f32>,
    /// The position behind the last of them.
    end: usize,
    cache: KvCache,
    /// The position of the cache's first row, and rows in it.
    first: usize,
    n_rows: usize,
}

impl NextTokenText {
    /// Outputs of a prompt that are kept.
    pub const WINDOW: usize = 256;

    /// Drafts at most: each is made of the one before, and more are seldom right.
    pub const MAX_DRAFTS: usize = 3;

    /// `types` are those of the text's own cache.
    pub fn new(head: &NextTokenHead, n_ctx: usize, types: [CacheType; 2]) -> NextTokenText {
        NextTokenText::with(head.n_embd(), n_ctx, head.new_cache(N_ROWS, types))
    }

    fn with(n_embd: usize, n_ctx: usize, cache: KvCache) -> NextTokenText {
        let outputs = Vec::new();
        NextTokenText { n_embd, n_ctx, outputs, end: 0, cache, first: 0, n_rows: 0 }
    }

    /// Outputs of a pass, of positions from this one on.
    pub fn add(&mut self, position: usize, rows: &[f32]) {
        if position != self.end {
            self.outputs.clear();
        }
        self.outputs.extend_from_slice(rows);
        self.end = position + rows.len() / self.n_embd;
        let most = NextTokenText::WINDOW * self.n_embd;
        if self.outputs.len() > 2 * most {
            self.outputs.drain(..self.outputs.len() - most);
        }
    }

    /// Drops all but the first `n` positions of the text.
    pub fn truncate(&mut self, n: usize) {
        if n < self.end {
            let begin = self.end - self.outputs.len() / self.n_embd;
            self.outputs.truncate(n.saturating_sub(begin) * self.n_embd);
            self.end = n;
        }
        // A row has seen the token behind its position.
        self.n_rows = self.n_rows.min(n.saturating_sub(self.first + 1));
    }

    /// Tokens that may follow `text`, whose last one is not computed yet: `n` at most.
    pub fn draft(
        &mut self,
        text: &[u32],
        n: usize,
        compute: NextTokenCompute<'_>,
    ) -> Result<Vec<u32>> {
        let Some((mut logits, mut output)) = self.follow(text, n, compute)? else {
            return Ok(Vec::new());
        };
        let n_text = self.n_rows;
        let mut drafts = vec![best(&logits)];
        while drafts.len() < n {
            let rows = self.rows(&output, &drafts[drafts.len() - 1..]);
            (logits, output) = compute(rows, &mut self.cache)?;
            self.n_rows += 1;
            drafts.push(best(&logits));
        }
        // Rows of drafts do not stay.
        self.n_rows = n_text;
        Ok(drafts)
    }

    /// Computes what the cache lacks of a text, whose last token is not computed yet, with room for
    /// `n` drafts. Returns the last row's logits and output; `None` where outputs are missing.
    pub fn follow(
        &mut self,
        text: &[u32],
        n: usize,
        compute: NextTokenCompute<'_>,
    ) -> Result<Option<(Vec<f32>, Vec<f32>)>> {
        let begin = self.end - self.outputs.len() / self.n_embd;
        if n == 0 || self.end + 1 != text.len() || begin == self.end {
            return Ok(None);
        }
        // All outputs that are kept, if they do not go on from the cache's rows.
        if self.first + self.n_rows < begin || self.n_rows == 0 {
            (self.first, self.n_rows) = (begin, 0);
        }
        let from = (self.first + self.n_rows).min(self.end - 1);
        self.n_rows = from - self.first;
        let n_new = self.end - from;
        self.make_room(n_new + n);
        let rows = self.rows(&self.outputs[(from - begin) * self.n_embd..], &text[from + 1..]);
        let last = compute(rows, &mut self.cache)?;
        self.n_rows += n_new;
        Ok(Some(last))
    }

    /// Rows behind those in the cache.
    fn rows<'a>(&self, hidden: &'a [f32], tokens: &'a [u32]) -> NextTokenRows<'a> {
        let (row, n_ctx) = (self.n_rows, self.n_ctx);
        NextTokenRows { hidden, tokens, position: self.first + row, row, n_ctx }
    }

    /// Moves the last rows to the cache's beginning if it has no room for `n` more.
    fn make_room(&mut self, n: usize) {
        if self.n_rows + n <= N_ROWS {
            return;
        }
        let kept = NextTokenText::WINDOW.min(self.n_rows).min(N_ROWS - n.min(N_ROWS));
        let bytes = self.cache.save(&(self.n_rows - kept..self.n_rows));
        self.cache.restore(&(0..kept), &bytes);
        (self.first, self.n_rows) = (self.first + self.n_rows - kept, kept);
    }
}

/// The greatest logit's token.
pub(in crate::engine) fn best(logits: &[f32]) -> u32 {
    let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, better) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::kv::LayerShape;
    use proptest::prelude::*;

    /// A text whose outputs say their position, and a cache whose rows say theirs and their token.
    struct World {
        text: Vec<u32>,
        drafter: NextTokenText,
        dice: u32,
    }

    impl World {
        fn new() -> World {
            let shape = LayerShape::Heads { n_head_kv: 1, k_dim: 1, v_dim: 1 };
            let cache = KvCache::new(&[shape], N_ROWS, CacheType::F32, CacheType::F32);
            World { text: vec![7], drafter: NextTokenText::with(1, 9999, cache), dice: 1 }
        }

        fn token(&mut self) -> u32 {
            self.dice = self.dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            self.dice >> 16
        }

        /// A pass over `n` tokens, the last of the text and those behind it.
        fn pass(&mut self, n: usize) {
            let (first, end) = (self.text.len() - 1, self.text.len() - 1 + n);
            for _ in 0..n {
                let token = self.token();
                self.text.push(token);
            }
            let rows: Vec<f32> = (first..end).map(|position| position as f32).collect();
            let kept = rows.len().min(NextTokenText::WINDOW);
            self.drafter.add(end - kept, &rows[rows.len() - kept..]);
        }

        fn truncate(&mut self, n: usize) {
            self.text.truncate(n.max(1));
            self.drafter.truncate(self.text.len() - 1);
            let token = self.token();
            self.text.pop();
            self.text.push(token);
        }

        fn draft(&mut self, n: usize) -> usize {
            let text = self.text.clone();
            let mut position = None;
            let drafted = self.drafter.draft(&text, n, &mut |rows, cache| {
                for (i, token) in rows.tokens.iter().enumerate() {
                    let at = (rows.position + i) as u32;
                    let bytes = [at.to_le_bytes(), token.to_le_bytes()].concat();
                    cache.restore(&(rows.row + i..rows.row + i + 1), &bytes);
                }
                // Rows of the text are its outputs; those of drafts follow.
                let expected = position.map_or(rows.position, |last: usize| last + 1);
                assert_eq!(rows.position, expected);
                if position.is_none() {
                    assert_eq!(rows.hidden[0], rows.position as f32);
                }
                position = Some(rows.position + rows.tokens.len() - 1);
                Ok((vec![0.0, 2.0, 1.0], vec![0.0]))
            });
            let drafted = drafted.unwrap();
            assert!(drafted.iter().all(|id| *id == 1));
            self.check();
            drafted.len()
        }

        /// Every row is of its position, and has seen the token behind that.
        fn check(&self) {
            let NextTokenText { cache, first, n_rows, .. } = &self.drafter;
            let rows = cache.save(&(0..*n_rows));
            let (positions, tokens) = rows.split_at(4 * n_rows);
            for (i, (at, token)) in
                positions.as_chunks::<4>().0.iter().zip(tokens.as_chunks::<4>().0).enumerate()
            {
                assert_eq!(u32::from_le_bytes(*at) as usize, first + i);
                assert_eq!(u32::from_le_bytes(*token), self.text[first + i + 1]);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn rows_are_those_of_the_text(
            steps in proptest::collection::vec((0..4u8, 0..700usize, 1..4usize), 1..15),
        ) {
            let mut world = World::new();
            for (kind, size, n) in steps {
                match kind {
                    0 => world.pass(size.max(1)),
                    1 => world.truncate(world.text.len().saturating_sub(size % 50)),
                    2 => (0..size / 4).for_each(|_| {
                        world.pass(1);
                        assert_eq!(world.draft(n), n);
                    }),
                    _ => drop(world.draft(n)),
                }
            }
            world.pass(1);
            prop_assert_eq!(world.draft(3), 3);
        }
    }
}
