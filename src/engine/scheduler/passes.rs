//! The two kinds of passes: steps of decode, and parts of prompts.

use std::time::{Duration, Instant};

use super::job::JobSink;
use super::ledger::Ledger;
use super::running::Given;
use super::slot::{PassError, Slot};
use crate::engine::speculation::PassTime;
use crate::engine::{BatchRow, Drafted, Engine, ExpertTraffic, Rest};
use crate::{Error, Result};

/// Computes one token of every text that is ready, with `eval_batch`, or of the only one also
/// drafts; false if none is.
pub fn decode<S: JobSink>(
    engine: &Engine,
    slots: &mut [Slot<S>],
    ledger: &mut Ledger,
    eval_batch: &mut dyn FnMut(&mut [BatchRow<'_>]) -> Result<()>,
) -> bool {
    let start = Instant::now();
    slots.iter_mut().filter(|slot| !slot.can_decode()).for_each(Slot::forget_step);
    let mut ready: Vec<_> = slots.iter_mut().filter(|slot| slot.can_decode()).collect();
    if let Some(i) = ready.iter().position(|slot| slot.is_alone()) {
        ready = vec![ready.swap_remove(i)];
    }
    if ready.is_empty() {
        return false;
    }
    ready.iter().for_each(|slot| slot.count_stall(start, &mut ledger.counts));
    // Texts that share a pass have no drafts: the others would wait for their rows.
    let (is_only, is_gated) = (ready.len() == 1, ready[0].is_gated());
    ready.iter_mut().for_each(|slot| slot.plan_step(is_only, engine, ledger));
    let clock = (is_only && is_gated).then(|| StallClock::start(engine));
    let (mut rows, mut owners) = (Vec::new(), Vec::new());
    for part in ready.iter_mut().filter_map(|slot| slot.part()) {
        rows.push(part.row);
        owners.push((part.owner, 1));
    }
    let result = eval_batch(&mut rows);
    if let (Ok(()), [first, ..]) = (&result, &rows[..]) {
        let unions = first.session.n_experts().iter();
        unions.for_each(|n| ledger.counts.expert_union.add(f64::from(*n)));
    }
    drop(rows);
    let traffic = ledger.traffic.take(engine).part(1, ready.len());
    ready.iter_mut().for_each(|slot| slot.add_traffic(&traffic));
    settle(engine, &mut ready, result);
    ready.iter_mut().for_each(|slot| slot.count_step(&mut ledger.counts));
    let time = start.elapsed();
    let n_tokens = ready.iter().map(|slot| slot.given.n_tokens).sum();
    if is_only {
        let given = ready[0].given;
        let time = clock.map(|clock| clock.stop(engine, time, given.drafting));
        count_drafts(given, time, ledger);
    }
    ledger.share.add_decode(time);
    ledger.counts.add_decode(time, owners.len(), n_tokens);
    ledger.charge_all(&owners, time);
    true
}

/// Counts the drafts of a step; the gate hears of its `time`, if it was measured.
fn count_drafts(given: Given, time: Option<PassTime>, ledger: &mut Ledger) {
    let Given { n_tokens, drafts, .. } = given;
    match (drafts, time) {
        _ if n_tokens == 0 => {}
        (None, time) => time.into_iter().for_each(|time| ledger.gate.add_plain(time)),
        (Some((kind, n)), time) => {
            let drafted = Drafted { n: n as u64, n_accepted: n_tokens as u64 - 1 };
            ledger.counts.n_verified += 1;
            ledger.counts.drafts.add(kind.source, n, n_tokens - 1);
            if let Some(time) = time {
                ledger.gate.add_verified(kind, drafted, time);
            }
        }
    }
}

/// Measures how long a pass waits for experts.
struct StallClock(u64);

impl StallClock {
    fn start(engine: &Engine) -> StallClock {
        StallClock(StallClock::now(engine))
    }

    fn stop(self, engine: &Engine, all: Duration, drafting: Duration) -> PassTime {
        let ns = StallClock::now(engine).saturating_sub(self.0);
        PassTime { all, stall: Duration::from_nanos(ns), drafting }
    }

    fn now(engine: &Engine) -> u64 {
        engine.expert_counters().map_or(0, |counters| counters.stall_ns)
    }
}

/// Computes the planned parts of `prompts`, and in its rests steps of decode of the `others`.
pub fn compute_prompts<S: JobSink>(
    engine: &Engine,
    prompts: &mut [Slot<S>],
    others: &mut [Slot<S>],
    ledger: &mut Ledger,
) {
    for slot in &mut *prompts {
        if let Err(why) = slot.encode() {
            return slot.settle(engine, Err(PassError::Own(why)));
        }
    }
    let n_layers = engine.n_layers();
    let (mut rows, mut jobs, mut owners) = (Vec::new(), Vec::new(), Vec::new());
    for part in prompts.iter_mut().filter_map(Slot::part) {
        let n = part.row.tokens.len();
        owners.push((part.owner, n));
        jobs.push((part.job, part.n_past, n));
        rows.push(part.row);
    }
    let (mut start, mut time) = (Instant::now(), Duration::ZERO);
    let mut traffic: Option<ExpertTraffic> = None;
    let mut add_traffic = |new: ExpertTraffic| {
        traffic = Some(traffic.map_or(new, |before| new.plus(&before)));
    };
    let has_others = others.iter().any(|slot| slot.job.is_some());
    let result = engine.eval_batch_with(&mut rows, has_others, &mut |rest, interlude| {
        if let Rest::Layer(l) = rest {
            ledger.counts.n_prompt_layers += 1;
            for (job, n_past, n) in &mut jobs {
                job.progress(*n_past, *n, l, n_layers);
            }
        }
        if let Some(mut interlude) = interlude {
            time += start.elapsed();
            ledger.share.add_prompt(start.elapsed());
            add_traffic(ledger.traffic.take(engine));
            decode_while_due(engine, others, ledger, &mut |rows| {
                interlude.eval_batch(engine, rows)
            });
            start = Instant::now();
        }
        Ok(())
    });
    add_traffic(ledger.traffic.take(engine));
    let n_all: usize = owners.iter().map(|(_, n)| n).sum();
    for (job, _, n) in &mut jobs {
        traffic.iter().for_each(|traffic| job.add_traffic(&traffic.part(*n, n_all)));
    }
    drop((rows, jobs));
    settle(engine, &mut prompts.iter_mut().collect::<Vec<_>>(), result);
    time += start.elapsed();
    ledger.share.add_prompt(start.elapsed());
    ledger.counts.add_prompt(time, n_all);
    ledger.charge_all(&owners, time);
}

fn decode_while_due<S: JobSink>(
    engine: &Engine,
    slots: &mut [Slot<S>],
    ledger: &mut Ledger,
    eval_batch: &mut dyn FnMut(&mut [BatchRow<'_>]) -> Result<()>,
) {
    while ledger.share.is_decode_due() {
        slots.iter_mut().for_each(|slot| slot.end_if_cancelled(engine));
        if !decode(engine, slots, ledger, eval_batch) {
            ledger.share.reset();
            return;
        }
    }
}

/// Hands a pass's result to its slots. A failure of a pass that several texts shared may be due to
/// any of them: each then has a pass of its own.
fn settle<S: JobSink>(engine: &Engine, slots: &mut [&mut Slot<S>], result: Result<()>) {
    let mut each = |result: &dyn Fn() -> std::result::Result<(), PassError>| {
        slots.iter_mut().for_each(|slot| slot.settle(engine, result()));
    };
    match result {
        Ok(()) => each(&|| Ok(())),
        Err(Error::Interrupted) => each(&|| Err(PassError::Own(Error::Interrupted))),
        Err(why) => match slots {
            [slot] => slot.settle(engine, Err(PassError::Own(why))),
            slots => {
                log::warn!("{why}; the {} texts of the pass go on one by one", slots.len());
                slots.iter_mut().for_each(|slot| slot.settle(engine, Err(PassError::Shared)));
            }
        },
    }
}
