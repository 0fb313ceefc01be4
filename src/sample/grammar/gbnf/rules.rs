//! Rules of a grammar: alternatives of characters and other rules. Groups and repetitions have
//! become rules of their own.

use crate::{Error, Result};

/// Characters by ranges of code points, both ends included; surrogates are never among them.
#[derive(Clone, Debug, PartialEq)]
pub struct Class(Vec<(u32, u32)>);

const LAST: u32 = char::MAX as u32;

impl Class {
    pub fn one(c: char) -> Class {
        Class(vec![(c as u32, c as u32)])
    }

    pub fn any() -> Class {
        Class::except(&[])
    }

    pub fn of(ranges: &[(u32, u32)]) -> Class {
        let (before, after) = ((0, 0xD7FF), (0xE000, LAST));
        let cut = |(low, high): &(u32, u32)| {
            [before, after].map(|(first, last)| (first.max(*low), last.min(*high)))
        };
        Class(ranges.iter().flat_map(cut).filter(|(low, high)| low <= high).collect())
    }

    /// All but these.
    pub fn except(ranges: &[(u32, u32)]) -> Class {
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable();
        let (mut next, mut out) = (0, Vec::new());
        for (low, high) in sorted {
            if low > next {
                out.push((next, low - 1));
            }
            next = next.max(high.saturating_add(1));
        }
        if next <= LAST {
            out.push((next, LAST));
        }
        Class::of(&out)
    }

    /// Whether a character from `low` to `high` is among them.
    pub fn meets(&self, low: u32, high: u32) -> bool {
        self.0.iter().any(|&(first, last)| first <= high && low <= last)
    }
}

#[derive(Clone, Debug)]
pub enum Symbol {
    Chars(Class),
    /// By its number.
    Rule(usize),
}

pub type Sequence = Vec<Symbol>;

/// Symbols of all rules together, repetitions written out.
const MAX_SYMBOLS: usize = 100_000;

#[derive(Default)]
pub struct Rules {
    /// Each rule's alternatives.
    pub alternatives: Vec<Vec<Sequence>>,
    n_symbols: usize,
}

impl Rules {
    /// A new rule without alternatives: its number.
    pub fn add(&mut self) -> usize {
        self.alternatives.push(Vec::new());
        self.alternatives.len() - 1
    }

    /// Gives a rule its alternatives.
    pub fn set(&mut self, rule: usize, alternatives: Vec<Sequence>) -> Result<()> {
        self.n_symbols += alternatives.iter().map(|sequence| sequence.len() + 1).sum::<usize>();
        if self.n_symbols > MAX_SYMBOLS {
            return Err(Error::invalid(format!(
                "the GBNF grammar has more than {MAX_SYMBOLS} symbols with its repetitions written \
                 out"
            )));
        }
        self.alternatives[rule] = alternatives;
        Ok(())
    }

    /// `sequence` at least `least` times, and at most `most` times if there is a limit.
    pub fn repeat(
        &mut self,
        mut sequence: Sequence,
        least: usize,
        most: Option<usize>,
    ) -> Result<Sequence> {
        if sequence.len() > 1 {
            let rule = self.add();
            self.set(rule, vec![sequence])?;
            sequence = vec![Symbol::Rule(rule)];
        }
        let Some(one) = sequence.pop() else { return Ok(Vec::new()) };
        let mut out = vec![one.clone(); least];
        match most {
            None => {
                let rule = self.add();
                self.set(rule, vec![vec![one, Symbol::Rule(rule)], Vec::new()])?;
                out.push(Symbol::Rule(rule));
            }
            Some(most) => {
                let mut rest = None;
                for _ in least..most {
                    let rule = self.add();
                    let more = std::iter::once(one.clone()).chain(rest).collect();
                    self.set(rule, vec![more, Vec::new()])?;
                    rest = Some(Symbol::Rule(rule));
                }
                out.extend(rest);
            }
        }
        Ok(out)
    }

    /// A rule that can begin with itself, which no stack of finite depth can follow.
    pub fn left_recursive(&self) -> Option<usize> {
        let firsts = self.first_rules();
        // Rules on the way, and rules that lead to no circle.
        let (mut on_way, mut done) = (vec![false; firsts.len()], vec![false; firsts.len()]);
        for root in 0..firsts.len() {
            let mut way = vec![(root, 0)];
            while let Some((rule, at)) = way.pop() {
                if done[rule] {
                    continue;
                }
                on_way[rule] = true;
                match firsts[rule].get(at) {
                    Some(&next) if on_way[next] => return Some(next),
                    Some(&next) => way.extend([(rule, at + 1), (next, 0)]),
                    None => (on_way[rule], done[rule]) = (false, true),
                }
            }
        }
        None
    }

    /// The rules that each rule can begin with.
    fn first_rules(&self) -> Vec<Vec<usize>> {
        let empty = self.can_be_empty();
        let firsts = |alternatives: &Vec<Sequence>| {
            let mut out = Vec::new();
            for symbol in alternatives.iter().flat_map(|sequence| {
                let is_empty = |symbol: &&Symbol| matches!(symbol, Symbol::Rule(r) if empty[*r]);
                let n = sequence.iter().take_while(is_empty).count();
                sequence.iter().take(n + 1)
            }) {
                if let Symbol::Rule(rule) = symbol {
                    out.push(*rule);
                }
            }
            out.sort_unstable();
            out.dedup();
            out
        };
        self.alternatives.iter().map(firsts).collect()
    }

    /// For each rule whether it matches the empty text.
    fn can_be_empty(&self) -> Vec<bool> {
        let n_rules = self.alternatives.len();
        // For each alternative its rule and the symbols that are not known to be empty; for each
        // rule the alternatives that it occurs in.
        let (mut open, mut uses) = (Vec::new(), vec![Vec::new(); n_rules]);
        let (mut empty, mut pending) = (vec![false; n_rules], Vec::new());
        for (rule, alternatives) in self.alternatives.iter().enumerate() {
            for sequence in alternatives {
                for symbol in sequence {
                    if let Symbol::Rule(used) = symbol {
                        uses[*used].push(open.len());
                    }
                }
                open.push((rule, sequence.len()));
                if sequence.is_empty() {
                    pending.push(rule);
                }
            }
        }
        while let Some(rule) = pending.pop() {
            if std::mem::replace(&mut empty[rule], true) {
                continue;
            }
            for &at in &uses[rule] {
                open[at].1 -= 1;
                if open[at].1 == 0 {
                    pending.push(open[at].0);
                }
            }
        }
        empty
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_cut_at_surrogates_and_turned_round() {
        assert_eq!(Class::of(&[(0, LAST)]), Class(vec![(0, 0xD7FF), (0xE000, LAST)]));
        assert_eq!(Class::any(), Class::of(&[(0, LAST)]));
        let vowels = [('e' as u32, 'e' as u32), ('a' as u32, 'b' as u32), (0, 9)];
        let others = Class::except(&vowels);
        for (c, is_in) in [('a', false), ('b', false), ('c', true), ('e', false), ('\t', false)] {
            assert_eq!(others.meets(c as u32, c as u32), is_in, "{c:?}");
        }
        assert!(others.meets(LAST, LAST) && !Class::except(&[(0, LAST)]).meets(0, LAST));
    }
}
