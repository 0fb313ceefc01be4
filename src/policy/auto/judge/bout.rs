//! Windows of a challenger and of the kept candidate by turns, until it is clear who is faster.

use super::CLEAR;
use super::window::{LONG, SHORT, Window};

/// Windows of the challenger at least.
const PAIRS_MIN: u32 = 3;

/// How much faster than the kept candidate another must be to be worth a change.
const MARGIN: f64 = 0.02;

/// How many standard errors the result of a challenger that is faster must be away from the margin,
/// and at the end of a bout.
const FASTER: f64 = 1.5;
const AT_END: f64 = 0.5;

/// The noise of a pair of windows before any is measured: its standard deviation, and the number of
/// pairs that this counts for.
const NOISE: f64 = 0.05;
const NOISE_PAIRS: f64 = 2.0;

/// No window of the kept candidate counts as longer than the other one beside the challenger's by
/// more than this part: a busy disk or machine has disturbed it.
const DISTURBED: f64 = 0.25;

/// How closely a challenger is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Short windows: a candidate that is much slower costs little.
    First,
    /// Long windows, more of them at the end: those that are near each other cost little.
    Close,
}

impl Look {
    /// Steps of a window.
    fn n_steps(self) -> u32 {
        match self {
            Look::First => SHORT,
            Look::Close => LONG,
        }
    }

    /// Windows of the challenger at most.
    fn pairs_max(self) -> u32 {
        match self {
            Look::First => 12,
            Look::Close => 9,
        }
    }

    /// How many standard errors the result of a challenger that is slower must be away.
    fn slower(self) -> f64 {
        match self {
            Look::First => 1.5,
            Look::Close => 3.0,
        }
    }
}

/// The pairs of windows of a bout: what the next run needs to go on with it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BoutSoFar {
    pub n: u32,
    /// Logarithms of the challenger's windows, each divided by those of the kept candidate beside
    /// it, and their squares.
    pub sum: f64,
    pub squares: f64,
}

impl BoutSoFar {
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    fn mean(&self) -> f64 {
        self.sum / f64::from(self.n)
    }

    /// The times as long that a token takes with the challenger.
    pub fn ratio(&self) -> f64 {
        self.mean().exp()
    }

    fn add(&mut self, ratio: f64) {
        self.n += 1;
        self.sum += ratio;
        self.squares += ratio * ratio;
    }

    /// Whether the challenger is faster by the margin, once that is clear.
    fn outcome(&self, look: Look) -> Option<bool> {
        if self.n < PAIRS_MIN {
            return None;
        }
        let (n, mean) = (f64::from(self.n), self.mean());
        let squares = (self.squares - n * mean * mean).max(0.0) + NOISE_PAIRS * NOISE * NOISE;
        let error = (squares / (n - 1.0 + NOISE_PAIRS) / n).sqrt();
        let below = (1.0 - MARGIN).ln() - mean;
        if self.n >= look.pairs_max() {
            return Some(below > AT_END * error);
        }
        let is_slower = below < -look.slower() * error;
        (is_slower || below > FASTER * error).then_some(!is_slower)
    }
}

/// A bout that is under way.
#[derive(Clone, Copy, Debug)]
pub struct Bout {
    look: Look,
    /// The kept candidate's last window, and the challenger's since: ns a step.
    pub before: f64,
    pub tried: f64,
    pub so_far: BoutSoFar,
}

impl Bout {
    pub fn new(look: Look, before: f64, so_far: BoutSoFar) -> Bout {
        Bout { look, before, tried: 0.0, so_far }
    }

    /// The next window of either.
    pub fn window(&self) -> Window {
        Window::new(self.look.n_steps())
    }

    /// The kept candidate's window that follows one of the challenger.
    pub fn add(&mut self, after: f64) {
        let most = CLEAR.ln();
        let least = self.before.min(after);
        let other = self.before.max(after).min((1.0 + DISTURBED) * least);
        let ratio = self.tried / (least * other).sqrt();
        self.before = after;
        self.so_far.add(ratio.ln().clamp(-most, most));
    }

    pub fn outcome(&self) -> Option<bool> {
        self.so_far.outcome(self.look)
    }
}
