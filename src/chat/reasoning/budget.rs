//! An end to reasoning after so many tokens: the tokens that end it follow in place of those that
//! the model would choose.

use std::collections::VecDeque;

#[derive(Clone, Debug)]
pub struct Budget {
    limit: usize,
    end: Vec<u32>,
    n_used: usize,
    forced: VecDeque<u32>,
    /// Reasoning was ended, and its end was not seen yet: it may be held back.
    is_ended: bool,
}

impl Budget {
    /// `limit` tokens of reasoning, then the tokens of `end`.
    pub fn new(limit: usize, end: Vec<u32>) -> Self {
        Self { limit, end, n_used: 0, forced: VecDeque::new(), is_ended: false }
    }

    /// The token that must come next, if one must. Called before each token, the first one too.
    /// `is_reasoning`: the token would be reasoning. `is_whole`: the last one ended a character.
    pub fn next(&mut self, is_reasoning: bool, is_whole: bool) -> Option<u32> {
        if let Some(id) = self.forced.pop_front() {
            return Some(id);
        }
        if !is_reasoning {
            // Some models think again within an answer.
            (self.n_used, self.is_ended) = (0, false);
            return None;
        }
        if self.n_used >= self.limit && is_whole && !self.is_ended {
            self.is_ended = true;
            self.forced.extend(&self.end);
            return self.forced.pop_front();
        }
        self.n_used += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which tokens are forced, by what the text is in before each.
    fn forced(limit: usize, steps: &[(bool, bool)]) -> Vec<Option<u32>> {
        let mut budget = Budget::new(limit, vec![8, 9]);
        steps.iter().map(|&(reasoning, whole)| budget.next(reasoning, whole)).collect()
    }

    #[test]
    fn reasoning_ends_after_its_budget() {
        let steps = [(false, true), (true, true), (true, true), (true, true), (true, true)];
        assert_eq!(forced(2, &steps), [None, None, None, Some(8), Some(9)]);
        // Not again while the end is on its way.
        assert_eq!(forced(0, &steps[1..4]), [Some(8), Some(9), None]);
    }

    #[test]
    fn a_character_is_not_cut() {
        let steps = [(true, true), (true, false), (true, false), (true, true), (false, true)];
        assert_eq!(forced(1, &steps), [None, None, None, Some(8), Some(9)]);
    }

    #[test]
    fn an_answer_is_not_counted() {
        let steps = [(true, true), (false, true), (true, true), (true, true)];
        assert_eq!(forced(1, &steps), [None, None, None, Some(8)]);
    }
}
