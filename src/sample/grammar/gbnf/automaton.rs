//! The states that texts lead to, made as they are needed.
//!
//! A stack says where a text is in a rule and where each rule that is not finished goes on. A
//! grammar may allow several stacks for one text: a state is the set of them, and what is known of
//! a character that is not whole. States and steps are kept, so each is computed once for a text.

use super::rules::{Class, Rules, Symbol};
use crate::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// States of one text: each takes 1 KiB.
const MAX_STATES: usize = 10_000;

/// Stacks of one state, and those on the way to it.
const MAX_STACKS: usize = 10_000;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A character of the class with this number.
    Chars(u32),
    Rule(u32),
    /// The rule is finished.
    End,
}

/// The grammar as steps: each alternative is a run of them.
struct Program {
    steps: Vec<Step>,
    classes: Vec<Class>,
    /// For each rule the first steps of its alternatives.
    starts: Vec<Vec<u32>>,
}

/// A stack by its top frame: a number in `Stacks::frames`, or `FINISHED`.
type Stack = u32;

/// The stack of a text that has come to the grammar's end.
const FINISHED: Stack = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Frame {
    /// The next step.
    at: u32,
    /// Goes on after the rule's end.
    below: Stack,
}

/// The beginning of a character in UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Partial {
    /// The bits so far.
    bits: u32,
    /// Bytes that are missing, at least one.
    n_missing: u8,
    /// The least code point that is written in so many bytes.
    least: u32,
}

/// A state by its number.
pub type State = u32;

const DEAD: State = u32::MAX;
const UNKNOWN: State = u32::MAX - 1;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Contents {
    /// Ascending. Each but `FINISHED` is before a character.
    stacks: Vec<Stack>,
    partial: Option<Partial>,
}

#[derive(Clone)]
pub struct Automaton {
    program: Arc<Program>,
    frames: Vec<Frame>,
    stacks: HashMap<Frame, Stack>,
    states: Vec<Arc<Contents>>,
    numbers: HashMap<Arc<Contents>, State>,
    /// For each state the next one by byte. Boxes, so that the list grows by moving pointers.
    #[allow(clippy::vec_box)]
    next: Vec<Box<[State; 256]>>,
}

impl Program {
    fn new(rules: Rules) -> Program {
        let (mut steps, mut classes, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for alternatives in rules.alternatives {
            let mut firsts = Vec::new();
            for sequence in alternatives {
                firsts.push(steps.len() as u32);
                for symbol in sequence {
                    steps.push(match symbol {
                        Symbol::Rule(rule) => Step::Rule(rule as u32),
                        Symbol::Chars(class) => {
                            classes.push(class);
                            Step::Chars(classes.len() as u32 - 1)
                        }
                    });
                }
                steps.push(Step::End);
            }
            starts.push(firsts);
        }
        Program { steps, classes, starts }
    }
}

impl Automaton {
    /// With the state of the empty text; rule 0 is the whole text.
    pub fn new(rules: Rules) -> Result<(Automaton, State)> {
        let mut automaton = Automaton {
            program: Arc::new(Program::new(rules)),
            frames: Vec::new(),
            stacks: HashMap::new(),
            states: Vec::new(),
            numbers: HashMap::new(),
            next: Vec::new(),
        };
        let starts = automaton.program.starts[0].clone();
        let first = starts.iter().map(|&at| automaton.stack(at, FINISHED)).collect();
        let stacks = automaton.settle(first)?;
        let state = automaton.state(Contents { stacks, partial: None })?;
        Ok((automaton, state))
    }

    /// The state after one more byte; `None` if it cannot follow.
    pub fn step(&mut self, state: State, byte: u8) -> Result<Option<State>> {
        let mut next = self.next[state as usize][usize::from(byte)];
        if next == UNKNOWN {
            next = self.compute(state, byte)?.unwrap_or(DEAD);
            self.next[state as usize][usize::from(byte)] = next;
        }
        Ok((next != DEAD).then_some(next))
    }

    /// The only byte that can follow, and the state after it; `None` if several can, or none.
    pub fn only_step(&mut self, state: State) -> Result<Option<(u8, State)>> {
        let mut only = None;
        for byte in 0..=255 {
            match (self.step(state, byte)?, only) {
                (Some(next), None) => only = Some((byte, next)),
                (Some(_), Some(_)) => return Ok(None),
                (None, _) => {}
            }
        }
        Ok(only)
    }

    pub fn can_end(&self, state: State) -> bool {
        let contents = &self.states[state as usize];
        contents.stacks.contains(&FINISHED) && contents.partial.is_none()
    }

    pub fn must_end(&self, state: State) -> bool {
        self.can_end(state) && self.states[state as usize].stacks.len() == 1
    }

    fn compute(&mut self, state: State, byte: u8) -> Result<Option<State>> {
        let contents = self.states[state as usize].clone();
        let Some((bits, n_missing, least)) = more(contents.partial, byte) else { return Ok(None) };
        let shift = 6 * u32::from(n_missing);
        let (low, high) = ((bits << shift).max(least), ((bits + 1) << shift) - 1);
        let mut fitting = Vec::new();
        for &stack in &contents.stacks {
            let Some(frame) = self.frames.get(stack as usize) else { continue };
            let Step::Chars(class) = self.program.steps[frame.at as usize] else { continue };
            if self.program.classes[class as usize].meets(low, high) {
                fitting.push(stack);
            }
        }
        if low > high || fitting.is_empty() {
            return Ok(None);
        }
        if n_missing > 0 {
            let partial = Some(Partial { bits, n_missing, least });
            return self.state(Contents { stacks: fitting, partial }).map(Some);
        }
        for stack in &mut fitting {
            let Frame { at, below } = self.frames[*stack as usize];
            *stack = self.stack(at + 1, below);
        }
        let stacks = self.settle(fitting)?;
        self.state(Contents { stacks, partial: None }).map(Some)
    }

    /// The stack that takes step `at` next. A rule that is finished is left at once, so a rule
    /// that ends with itself does not make its stack deeper.
    fn stack(&mut self, at: u32, below: Stack) -> Stack {
        if matches!(self.program.steps[at as usize], Step::End) {
            return below;
        }
        let (frame, new) = (Frame { at, below }, self.frames.len() as Stack);
        let stack = *self.stacks.entry(frame).or_insert(new);
        if stack == new {
            self.frames.push(frame);
        }
        stack
    }

    /// Enters rules until each stack is before a character or finished.
    fn settle(&mut self, mut pending: Vec<Stack>) -> Result<Vec<Stack>> {
        let (mut seen, mut out) = (HashSet::new(), Vec::new());
        let program = self.program.clone();
        while let Some(stack) = pending.pop() {
            if !seen.insert(stack) {
                continue;
            }
            if seen.len() > MAX_STACKS {
                return Err(Error::invalid("the GBNF grammar is too ambiguous to follow"));
            }
            let Some(&Frame { at, below }) = self.frames.get(stack as usize) else {
                out.push(FINISHED);
                continue;
            };
            if let Step::Rule(rule) = program.steps[at as usize] {
                let after = self.stack(at + 1, below);
                for &start in &program.starts[rule as usize] {
                    let entered = self.stack(start, after);
                    pending.push(entered);
                }
            } else {
                out.push(stack);
            }
        }
        out.sort_unstable();
        Ok(out)
    }

    fn state(&mut self, contents: Contents) -> Result<State> {
        if let Some(&state) = self.numbers.get(&contents) {
            return Ok(state);
        }
        if self.states.len() == MAX_STATES {
            return Err(Error::invalid("the text is too complex for its GBNF grammar to follow"));
        }
        let (state, contents) = (self.states.len() as State, Arc::new(contents));
        self.states.push(contents.clone());
        self.numbers.insert(contents, state);
        self.next.push(Box::new([UNKNOWN; 256]));
        Ok(state)
    }
}

/// One more byte of a character: its bits so far, the bytes that are missing, and the least code
/// point that is written like this. `None` if this is not UTF-8.
fn more(partial: Option<Partial>, byte: u8) -> Option<(u32, u8, u32)> {
    let bits = u32::from(byte);
    match (partial, byte) {
        (Some(p), 0x80..=0xBF) => Some((p.bits << 6 | bits & 0x3F, p.n_missing - 1, p.least)),
        (None, 0..=0x7F) => Some((bits, 0, 0)),
        (None, 0xC2..=0xDF) => Some((bits & 0x1F, 1, 0x80)),
        (None, 0xE0..=0xEF) => Some((bits & 0x0F, 2, 0x800)),
        (None, 0xF0..=0xF4) => Some((bits & 0x07, 3, 0x1_0000)),
        _ => None,
    }
}
