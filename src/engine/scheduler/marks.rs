//! The positions at which states of a model with a recurrent state are kept.
//!
//! A text can only go on from positions whose states are kept. They are large, as large as many
//! pages, so there are few: one at the end of a prompt's last whole page, one where texts part from
//! each other, and one every [`EVERY`] tokens. One more follows the job, so that a pass that fails
//! or is cancelled costs that pass.

use std::ops::Range;

use super::pages::PAGE;

/// Tokens from one lasting checkpoint of a long text to the next.
const EVERY: usize = 4096;

/// Generated tokens from one passing checkpoint to the next.
const EVERY_GENERATED: usize = 256;

/// The checkpoints of a job. All are after whole pages.
#[derive(Debug, Default)]
pub struct Marks {
    /// Positions at which other texts part from the job's.
    branches: Vec<usize>,
    /// Positions of the next pass, in their order.
    next: Vec<usize>,
    /// Positions of planned passes that go when there is a later one.
    passing: Vec<usize>,
    /// The passing one that is kept.
    kept: Option<usize>,
}

impl Marks {
    /// A new job begins.
    pub fn clear(&mut self) {
        *self = Marks::default();
    }

    /// Another text parts from the job's after `n` tokens.
    pub fn add_branch(&mut self, n: usize) {
        let n = n / PAGE * PAGE;
        if n > 0 && !self.branches.contains(&n) {
            self.branches.push(n);
        }
    }

    /// The positions at which a pass that appends the tokens of `pass` to a text is to make
    /// checkpoints. The job's text so far has `n_text` tokens, the prompt `n_prompt`.
    pub fn plan(&mut self, pass: Range<usize>, n_prompt: usize, n_text: usize) -> &[usize] {
        let is_inside = |n: &usize| (pass.start + 1..=pass.end).contains(n);
        // The prompt's last token is computed again by whoever has the same prompt.
        let last = (n_prompt - 1) / PAGE * PAGE;
        let regular = (pass.start / EVERY + 1..=pass.end / EVERY).map(|i| i * EVERY);
        self.next.clear();
        self.next.extend(regular.chain([last]).chain(self.branches.iter().copied()));
        self.next.retain(is_inside);
        let passing = match pass.end < n_text || pass.end.is_multiple_of(EVERY_GENERATED) {
            true => pass.end / PAGE * PAGE,
            false => 0,
        };
        if is_inside(&passing) && !self.next.contains(&passing) {
            self.next.push(passing);
            self.passing.push(passing);
        }
        self.next.sort_unstable();
        self.next.dedup();
        &self.next
    }

    /// A checkpoint at `n` is kept; `is_new` says that it was not there before. Returns the one
    /// that it replaces.
    pub fn replace(&mut self, n: usize, is_new: bool) -> Option<usize> {
        let is_passing = self.passing.contains(&n) && is_new;
        self.passing.retain(|passing| *passing > n);
        std::mem::replace(&mut self.kept, is_passing.then_some(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_marked_at_its_last_page_and_now_and_then() {
        let mut marks = Marks::default();
        assert_eq!(marks.plan(0..2048, 9000, 9000), [2048]);
        assert_eq!(marks.plan(2048..4500, 9000, 9000), [4096, 4480]);
        assert_eq!(marks.plan(4500..9000, 9000, 9000), [8192, 8960]);
        assert!(marks.plan(8990..9000, 9000, 9000).is_empty());
        assert_eq!(marks.plan(0..128, 128, 128), [64]);
        marks.add_branch(300);
        marks.add_branch(299);
        assert_eq!(marks.plan(0..500, 500, 500), [256, 448]);
        assert_eq!(marks.plan(256..500, 500, 500), [448]);
        // Steps of decode.
        assert!(marks.plan(500..501, 500, 501).is_empty());
        assert_eq!(marks.plan(511..512, 500, 512), [512]);
    }

    #[test]
    fn a_passing_checkpoint_is_replaced_by_the_next() {
        let mut marks = Marks::default();
        marks.plan(0..100, 500, 500);
        assert_eq!(marks.replace(64, true), None);
        marks.plan(100..200, 500, 500);
        assert_eq!(marks.replace(192, true), Some(64));
        marks.plan(200..500, 500, 500);
        assert_eq!(marks.replace(448, true), Some(192));
        assert_eq!(marks.replace(512, true), None);
    }
}
