//! The gate: how many drafts a pass verifies, by measured times.
//!
//! A pass with n drafts gives 1 + p + … + pⁿ tokens on average, where p is the part of such drafts
//! that was accepted so far, and costs c(n) passes of one token. The gate takes the n with the best
//! ratio, and none if that gains less than [`MARGIN`]. The cost has two parts: computing, which
//! grows as measured with the rows of a pass, and waiting for experts. The latter is that of passes
//! of one token, which tells how many experts are resident, times a factor that grows with the
//! union of the rows' experts: where experts come from disk, most drafts cost more than they gain.
//!
//! Trials of what is not known are paid from a credit of some passes: steps without drafts earn a
//! part of a pass, verified drafts earn what they gained or cost what they lost, and a draft is not
//! tried if the credit would not cover it were all of it refused. So the loss is bounded whatever
//! the text and the machine do.

use std::time::Duration;

use super::{DraftKind, DraftSource, Drafted, MAX_DRAFTS};

/// Time that a pass is expected to save, as a part of it, before it is worth a draft.
const MARGIN: f64 = 0.08;

/// Passes of credit: at first, at most, and what a step without drafts earns.
const FIRST_CREDIT: f64 = 1.0;
const MAX_CREDIT: f64 = 3.0;
const EARNED: f64 = 0.012;

/// Steps without drafts before the first draft, and verified drafts between two such steps, so that
/// their time is known.
const MIN_PLAIN: u32 = 3;
const PLAIN_EVERY: u32 = 16;

/// Steps with drafts that were not worth a pass before what speaks against them is forgotten: the
/// text or what is resident may have changed.
const FORGET_EVERY: u32 = 64;

/// Numbers of drafts to choose among: few, so that each is soon measured.
const SIZES: [usize; 7] = [1, 2, 3, 5, 7, 11, MAX_DRAFTS];

/// The cost of a further row before it is measured, in passes of one token.
const ROW_COST: f64 = 0.4;

/// The exponent with which waiting for experts grows with the rows of a pass: consecutive tokens of
/// a text share some.
const UNION_GROWTH: f64 = 0.75;

/// Weight of a new measurement in a mean, at least.
const WEIGHT: f64 = 0.15;

/// A measurement counts as this many times what was expected at most: the machine may do other
/// work.
const MAX_OUTLIER: f64 = 3.0;

/// The part of a pass's time below which waiting is not told apart from computing.
const MIN_STALL: f64 = 0.02;

/// Trials for which a first guess of acceptance counts, and trials that are remembered.
const GUESS_TRIALS: f64 = 3.0;
const MAX_TRIALS: f64 = 32.0;

/// Time of a pass of one text, and the part of it in which computation waited for experts.
#[derive(Clone, Copy, Debug)]
pub struct PassTime {
    pub all: Duration,
    pub stall: Duration,
    /// The part of it in which a model or a layer made the drafts.
    pub drafting: Duration,
}

/// A running mean that follows changes.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    n: u32,
}

impl Mean {
    /// Adds a value, where `expected` was expected.
    fn add(&mut self, value: f64, expected: f64) {
        self.n += 1;
        let weight = (1.0 / f64::from(self.n)).max(WEIGHT);
        self.value += weight * (value.min(MAX_OUTLIER * expected) - self.value);
    }
}

/// How often drafts of a kind were accepted.
#[derive(Clone, Copy, Debug)]
struct Odds {
    accepted: f64,
    trials: f64,
}

impl Odds {
    fn guess(p: f64) -> Odds {
        Odds { accepted: p * GUESS_TRIALS, trials: GUESS_TRIALS }
    }

    /// The first `n_accepted` of `n` drafts were; those behind a refused one tell nothing.
    fn add(&mut self, n: usize, n_accepted: usize) {
        self.accepted += n_accepted as f64;
        self.trials += (n_accepted + usize::from(n_accepted < n)) as f64;
        let keep = (MAX_TRIALS / self.trials).min(1.0);
        self.accepted *= keep;
        self.trials *= keep;
    }

    fn p(&self) -> f64 {
        self.accepted / self.trials
    }
}

/// Matched tokens from which on a draft is of the next kind, and first guesses of acceptance.
const MATCHES: [usize; 3] = [6, 12, 24];
const GUESSES: [f64; 8] = [0.4, 0.6, 0.8, 0.9, 0.8, 0.8, 0.7, 0.7];

/// The time of making a draft before it is measured, in passes of one token.
const DRAFTING: f64 = 0.1;

fn index(kind: DraftKind) -> usize {
    match kind.source {
        DraftSource::Text => MATCHES.iter().filter(|least| kind.n_matched >= **least).count(),
        DraftSource::Prediction => MATCHES.len() + 1,
        DraftSource::Grammar => MATCHES.len() + 2,
        DraftSource::Layer => MATCHES.len() + 3,
        DraftSource::Model => MATCHES.len() + 4,
    }
}

/// Measured costs of passes and odds of drafts. One serves all texts of a scheduler.
#[derive(Clone, Debug)]
pub struct Gate {
    /// Nanoseconds of a step without drafts: computing, and waiting for experts.
    compute: Mean,
    stall: Mean,
    /// The last such step.
    last: f64,
    /// By rows of a pass: how many times as long as in a step without drafts it computes, and
    /// waits.
    compute_ratios: [Mean; MAX_DRAFTS + 2],
    stall_ratios: [Mean; MAX_DRAFTS + 2],
    odds: [Odds; GUESSES.len()],
    /// Nanoseconds of making a draft: a text has one maker.
    drafting: Mean,
    /// In steps without drafts.
    credit: f64,
    /// Verified drafts since the last step without.
    n_verified: u32,
    /// Steps whose drafts were not worth a pass since the last one that was.
    n_refused: u32,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate {
            compute: Mean::default(),
            stall: Mean::default(),
            last: 0.0,
            compute_ratios: Default::default(),
            stall_ratios: Default::default(),
            odds: GUESSES.map(Odds::guess),
            drafting: Mean::default(),
            credit: FIRST_CREDIT,
            n_verified: 0,
            n_refused: 0,
        }
    }
}

impl Gate {
    /// Drafts of a kind that the next pass is to verify, of at most `most`; 0 is a step without.
    pub fn n_drafts(&mut self, kind: DraftKind, most: usize) -> usize {
        if self.compute.n < MIN_PLAIN || self.n_verified >= PLAIN_EVERY || most == 0 {
            return 0;
        }
        let mut best = self.best(kind, most);
        if best.is_none() {
            self.n_refused += 1;
            if self.n_refused == FORGET_EVERY {
                self.forget();
                best = self.best(kind, most);
            }
        }
        if best.is_some() {
            self.n_refused = 0;
        }
        best.unwrap_or(0)
    }

    /// The number that gains most, if it gains enough and the credit covers it.
    fn best(&self, kind: DraftKind, most: usize) -> Option<usize> {
        let p = self.odds[index(kind)].p();
        let sizes = SIZES.into_iter().filter(|n| *n <= most).chain([most.min(MAX_DRAFTS)]);
        let cost = |n: usize| self.cost(n + 1) + n as f64 * self.drafting_cost(kind);
        let affordable = sizes.filter(|n| cost(*n) - 1.0 <= self.credit);
        let gain = |n: usize| expected_tokens(p, n) / cost(n);
        let best = affordable.max_by(|a, b| gain(*a).total_cmp(&gain(*b)));
        best.filter(|n| gain(*n) >= 1.0 + MARGIN)
    }

    /// Goes back to first guesses where what was measured is worse.
    fn forget(&mut self) {
        self.n_refused = 0;
        for (odds, p) in self.odds.iter_mut().zip(GUESSES) {
            if odds.p() < p {
                *odds = Odds::guess(p);
            }
        }
        for (rows, ratio) in self.compute_ratios.iter_mut().enumerate() {
            if ratio.value > 1.0 + ROW_COST * rows.saturating_sub(1) as f64 {
                *ratio = Mean::default();
            }
        }
        for (rows, ratio) in self.stall_ratios.iter_mut().enumerate() {
            if ratio.value > (rows as f64).powf(UNION_GROWTH) {
                *ratio = Mean::default();
            }
        }
        if self.drafting.value > DRAFTING * (self.compute.value + self.stall.value) {
            self.drafting = Mean::default();
        }
    }

    /// The cost of a pass of `rows`, in steps without drafts.
    fn cost(&self, rows: usize) -> f64 {
        let (compute, stall) = (self.compute.value, self.stall.value);
        let step = (compute + stall).max(1.0);
        (self.compute_ratio(rows) * compute + self.stall_ratio(rows) * stall) / step
    }

    /// The cost of making a draft, in steps without drafts.
    fn drafting_cost(&self, kind: DraftKind) -> f64 {
        let step = (self.compute.value + self.stall.value).max(1.0);
        match kind.source {
            DraftSource::Text | DraftSource::Prediction | DraftSource::Grammar => 0.0,
            DraftSource::Layer | DraftSource::Model if self.drafting.n == 0 => DRAFTING,
            DraftSource::Layer | DraftSource::Model => self.drafting.value / step,
        }
    }

    fn compute_ratio(&self, rows: usize) -> f64 {
        between(&self.compute_ratios, rows, |ratio, from| {
            let slope = ((ratio - 1.0) / (from.max(2) - 1) as f64).max(ROW_COST);
            ratio + slope * (rows - from) as f64
        })
    }

    fn stall_ratio(&self, rows: usize) -> f64 {
        between(&self.stall_ratios, rows, |ratio, from| {
            ratio * (rows as f64 / from as f64).powf(UNION_GROWTH)
        })
    }

    /// A step without drafts has been computed.
    pub fn add_plain(&mut self, time: PassTime) {
        let stall = time.stall.min(time.all);
        let is_known = self.compute.n >= MIN_PLAIN;
        let expected = |mean: &Mean| if is_known { mean.value.max(1e3) } else { f64::INFINITY };
        let of_compute = expected(&self.compute);
        self.compute.add((time.all - stall).as_nanos() as f64, of_compute);
        // Waiting comes and goes: what counts is how it is by now.
        self.stall.add(stall.as_nanos() as f64, f64::INFINITY);
        self.last = time.all.as_nanos() as f64;
        self.n_verified = 0;
        self.credit = (self.credit + EARNED).min(MAX_CREDIT);
    }

    /// A pass has verified drafts of a kind.
    pub fn add_verified(&mut self, kind: DraftKind, drafted: Drafted, time: PassTime) {
        let (n, n_accepted) = (drafted.n as usize, drafted.n_accepted as usize);
        self.n_verified += 1;
        self.odds[index(kind)].add(n, n_accepted);
        let (compute, stall) = (self.compute.value, self.stall.value);
        let step = compute + stall;
        if self.compute.n == 0 || step <= 0.0 {
            return;
        }
        let made = time.drafting.min(time.all).as_nanos() as f64;
        let drafting = self.drafting_cost(kind) * step;
        if drafting > 0.0 && n > 0 {
            // The first one has read some of the prompt, too.
            self.drafting.add(made / n as f64, drafting);
        }
        // The verifying pass alone.
        let all = time.all.as_nanos() as f64 - made;
        let waited = (time.stall.as_nanos() as f64).min(all);
        let rows = n + 1;
        let expected = self.cost(rows);
        let (of_compute, of_stall) = (self.compute_ratio(rows), self.stall_ratio(rows));
        if stall > MIN_STALL * step {
            let ratio = ((all - waited) / compute.max(1.0)).max(1.0);
            self.compute_ratios[rows].add(ratio, of_compute);
            self.stall_ratios[rows].add((waited / stall).max(1.0), of_stall);
        } else {
            self.compute_ratios[rows].add((all / step).max(1.0), of_compute);
        }
        // A step may take less by now than on average.
        let spent = (all / self.last.clamp(1.0, step)).min(MAX_OUTLIER * expected)
            + made.min(MAX_OUTLIER * drafting * n as f64) / step;
        let n_tokens = (n_accepted + 1) as f64;
        self.credit = (self.credit + n_tokens - spent).clamp(-MAX_CREDIT, MAX_CREDIT);
    }
}

/// Tokens that a pass with `n` drafts gives if each is right with probability `p`.
fn expected_tokens(p: f64, n: usize) -> f64 {
    (0..=n as i32).map(|i| p.powi(i)).sum()
}

/// The ratio of a pass of `rows`: measured, or between those of fewer and of more rows, or what
/// `beyond` makes of the largest that was measured and its rows. One row has ratio 1.
fn between(ratios: &[Mean], rows: usize, beyond: impl Fn(f64, usize) -> f64) -> f64 {
    let known = |rows: &usize| *rows == 1 || ratios[*rows].n > 0;
    let ratio = |rows: usize| if rows == 1 { 1.0 } else { ratios[rows].value };
    let below = (1..=rows).rev().find(known).unwrap_or(1);
    if below == rows {
        return ratio(rows);
    }
    match (rows + 1..ratios.len()).find(known) {
        Some(above) => {
            let part = (rows - below) as f64 / (above - below) as f64;
            ratio(below) + part * (ratio(above) - ratio(below))
        }
        None => beyond(ratio(below), below),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A machine and a text: a step's time without and with waiting, what a further row adds to
    /// each, and the chance that a draft is right.
    #[derive(Clone, Copy, Debug)]
    struct World {
        compute: f64,
        stall: f64,
        row: f64,
        union: f64,
        p: f64,
        /// Milliseconds of making a pass's drafts, if the model's layer makes them.
        drafting: f64,
        /// The part of steps that find a draft.
        found: f64,
    }

    /// A reproducible number in 0..1.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 33) as f64 / f64::from(1u32 << 31)
        }
    }

    impl World {
        fn time(&self, rows: usize, dice: &mut Dice) -> PassTime {
            let noise = 0.9 + 0.2 * dice.roll();
            let compute = self.compute * (1.0 + self.row * (rows - 1) as f64) * noise;
            let stall = self.stall * (rows as f64).powf(self.union) * noise;
            let time = |ms: f64| Duration::from_nanos((1e6 * ms) as u64);
            let drafting = time(if rows > 1 { self.drafting } else { 0.0 });
            let all = time(compute + stall) + drafting;
            PassTime { all, stall: time(stall), drafting }
        }

        /// Time to generate `n` tokens, divided by the time without drafts.
        fn run(&self, gate: &mut Gate, n: usize, dice: &mut Dice) -> f64 {
            let (mut done, mut time, mut plain) = (0, 0.0, 0.0);
            (0..n).for_each(|_| plain += self.time(1, dice).all.as_secs_f64());
            let is_made = self.drafting > 0.0;
            let source = if is_made { DraftSource::Layer } else { DraftSource::Text };
            let kind = DraftKind { source, n_matched: 9 };
            let most_drafts = if is_made { 3 } else { MAX_DRAFTS };
            while done < n {
                let most = if dice.roll() < self.found { most_drafts } else { 0 };
                let n_drafts = gate.n_drafts(kind, most.min(n - done - 1));
                let pass = self.time(n_drafts + 1, dice);
                time += pass.all.as_secs_f64();
                if n_drafts == 0 {
                    gate.add_plain(pass);
                    done += 1;
                    continue;
                }
                let n_accepted = (0..n_drafts).take_while(|_| dice.roll() < self.p).count();
                let drafted = Drafted { n: n_drafts as u64, n_accepted: n_accepted as u64 };
                gate.add_verified(kind, drafted, pass);
                done += n_accepted + 1;
            }
            time / plain
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn no_text_on_no_machine_loses_more_than_a_twentieth(
            (compute, stall) in (1.0..50.0, prop_oneof![Just(0.0), 0.0..200.0]),
            (row, union) in (0.02..1.2, 0.4..1.0),
            (p, found) in (0.0..1.0, 0.0..1.0),
            made in prop_oneof![Just(0.0), 0.01..1.0],
            seed in any::<u64>(),
        ) {
            let drafting = made * compute;
            let world = World { compute, stall, row, union, p, drafting, found };
            let ratio = world.run(&mut Gate::default(), 300, &mut Dice(seed));
            prop_assert!(ratio <= 1.05, "{ratio}");
        }

        /// Each half of the run has another text and other experts in memory.
        #[test]
        fn nor_does_one_that_changes(
            p in [0.0..1.0, 0.0..1.0f64],
            stall in [0.0..100.0, 0.0..100.0f64],
            seed in any::<u64>(),
        ) {
            let (mut gate, mut dice) = (Gate::default(), Dice(seed));
            for (p, stall) in p.into_iter().zip(stall) {
                let (row, union, drafting) = (0.3, 0.7, 0.0);
                let world = World { compute: 10.0, stall, row, union, p, drafting, found: 0.7 };
                let ratio = world.run(&mut gate, 400, &mut dice);
                prop_assert!(ratio <= 1.05, "{ratio}");
            }
        }
    }

    const RESIDENT: World = World {
        compute: 10.0,
        stall: 0.0,
        row: 0.2,
        union: 0.7,
        p: 0.95,
        drafting: 0.0,
        found: 0.95,
    };

    #[test]
    fn a_copy_is_fast_where_experts_are_resident() {
        let ratio = RESIDENT.run(&mut Gate::default(), 300, &mut Dice(1));
        assert!(ratio < 0.6, "{ratio}");
    }

    #[test]
    fn drafts_of_the_models_layer_pay_where_experts_are_resident() {
        let world = World { p: 0.8, drafting: 1.0, found: 1.0, ..RESIDENT };
        let ratio = world.run(&mut Gate::default(), 300, &mut Dice(1));
        assert!(ratio < 0.8, "{ratio}");
    }

    #[test]
    fn drafts_rest_while_experts_come_from_disk_and_come_back_after_it() {
        let (compute, union, found) = (5.0, 0.8, 1.0);
        let cold = World { compute, stall: 95.0, union, p: 0.6, found, ..RESIDENT };
        let warm = World { stall: 0.0, p: 0.95, ..cold };
        let (mut gate, mut dice) = (Gate::default(), Dice(7));
        let kind = DraftKind { source: DraftSource::Text, n_matched: 9 };
        assert!(cold.run(&mut gate, 200, &mut dice) <= 1.05);
        let n_cold = (0..20).filter(|_| gate.clone().n_drafts(kind, MAX_DRAFTS) > 0).count();
        assert_eq!(n_cold, 0);
        assert!(warm.run(&mut gate, 300, &mut dice) < 0.7);
    }
}
