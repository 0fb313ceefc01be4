//! How many positions each session may fill where all share the memory of their KV caches.
//!
//! A job gets room for its prompt and some of its answer when it starts, and more in steps as its
//! text grows. What is missing is taken from idle sessions, the one that was used least recently
//! first, and for a text that cannot go on without it from the youngest job, which is parked: it
//! waits without memory until there is room for its text again. No job starts while one is parked,
//! and the oldest one always has all that it needs: every job ends.

/// Tokens of an answer that there is room for when its job starts.
const AHEAD: usize = 1024;

/// Tokens by which a text's room grows.
const STEP: usize = 256;

#[derive(Clone, Copy, Debug)]
pub struct KvBudget {
    /// Positions of all sessions together, and of one.
    most: usize,
    n_ctx: usize,
    ahead: usize,
    step: usize,
}

/// A session as the budget sees it.
#[derive(Clone, Copy, Debug)]
pub struct Holder {
    pub id: usize,
    /// Positions that it may fill.
    pub room: usize,
    /// Whether it has no job.
    pub is_idle: bool,
    /// The number of its last job: lower ones are older.
    pub number: u64,
}

/// More room for a session.
#[derive(Debug, PartialEq, Eq)]
pub struct Grant {
    /// Positions that the session may fill from now on.
    pub room: usize,
    /// Sessions that give all of theirs, in this order: those with a job are parked. If the session
    /// itself is one of them it gets no room.
    pub emptied: Vec<usize>,
}

impl KvBudget {
    /// For `n_sessions` sessions of up to `n_ctx` positions, `most` together. An answer's part of
    /// what a job starts with is small enough for all sessions to have jobs with short prompts, and
    /// all of it where nothing is shared.
    pub fn new(most: usize, n_ctx: usize, n_sessions: usize) -> KvBudget {
        let even = most / n_sessions.max(1);
        let ahead = if even < n_ctx { AHEAD.min(even / 2) } else { n_ctx };
        KvBudget { most: most.max(n_ctx), n_ctx, ahead, step: STEP.min(even / 4).max(1) }
    }

    /// Positions that a session may fill at most.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Positions that no session has room for.
    pub fn free(&self, holders: &[Holder]) -> usize {
        self.most.saturating_sub(holders.iter().map(|holder| holder.room).sum())
    }

    /// Room for a job that starts or goes on: its text has `n_text` tokens and may get `n_left`
    /// more. `None`: there is none as long as all other jobs go on.
    pub fn start(
        &self,
        holders: &[Holder],
        id: usize,
        n_text: usize,
        n_left: Option<usize>,
    ) -> Option<Grant> {
        let ahead = n_left.map_or(self.ahead, |n| n.min(self.ahead));
        let room = (n_text + ahead).min(self.n_ctx);
        let (emptied, n) = self.empty(idle(holders, id), held(holders, id, |_| true) + room);
        (n <= self.most).then_some(Grant { room, emptied })
    }

    /// More room for a job in decode whose text has `n_past` positions, if it needs any soon, and
    /// `n_to_come` at most.
    pub fn grow(
        &self,
        holders: &[Holder],
        id: usize,
        n_past: usize,
        n_to_come: Option<usize>,
    ) -> Option<Grant> {
        let own = holders.iter().find(|holder| holder.id == id)?;
        let most = n_to_come.map_or(self.n_ctx, |n| self.n_ctx.min(n_past + n));
        if own.room >= most || own.room > n_past + self.step / 2 {
            return None;
        }
        let wanted = (n_past + self.step).min(most);
        let by_others = held(holders, id, |holder| !holder.is_idle);
        let room = wanted.min(self.most.saturating_sub(by_others));
        let others = held(holders, id, |_| true);
        if room > own.room {
            let (emptied, _) = self.empty(idle(holders, id), others + room);
            return Some(Grant { room, emptied });
        }
        if own.room > n_past {
            return None;
        }
        let mut younger: Vec<&Holder> = holders.iter().collect();
        younger.retain(|holder| !holder.is_idle && holder.number >= own.number);
        younger.sort_by_key(|holder| std::cmp::Reverse(holder.number));
        let from = idle(holders, id).into_iter().chain(younger).collect();
        let (emptied, _) = self.empty(from, others + wanted);
        Some(Grant { room: wanted, emptied })
    }

    /// The first of these sessions that have to be emptied for `n` positions to become few enough,
    /// and what becomes of `n`.
    fn empty(&self, from: Vec<&Holder>, mut n: usize) -> (Vec<usize>, usize) {
        let mut emptied = Vec::new();
        for holder in from.into_iter().filter(|holder| holder.room > 0) {
            if n <= self.most {
                break;
            }
            emptied.push(holder.id);
            n = n.saturating_sub(holder.room);
        }
        (emptied, n)
    }
}

/// Idle sessions but one, the least recently used first.
fn idle(holders: &[Holder], but: usize) -> Vec<&Holder> {
    let mut idle: Vec<&Holder> = holders.iter().filter(|h| h.is_idle && h.id != but).collect();
    idle.sort_by_key(|holder| holder.number);
    idle
}

/// Positions of some sessions, without one.
fn held(holders: &[Holder], but: usize, which: impl Fn(&Holder) -> bool) -> usize {
    holders.iter().filter(|h| h.id != but && which(h)).map(|holder| holder.room).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn holder(id: usize, room: usize, is_idle: bool, number: u64) -> Holder {
        Holder { id, room, is_idle, number }
    }

    fn grant(room: usize, emptied: &[usize]) -> Option<Grant> {
        Some(Grant { room, emptied: emptied.to_vec() })
    }

    #[test]
    fn a_job_gets_room_for_its_prompt_and_some_of_its_answer() {
        let budget = KvBudget::new(100_000, 50_000, 4);
        let free = [holder(0, 0, true, 0)];
        assert_eq!(budget.start(&free, 0, 3000, None), grant(4024, &[]));
        assert_eq!(budget.start(&free, 0, 3000, Some(7)), grant(3007, &[]));
        assert_eq!(budget.start(&free, 0, 49_999, None), grant(50_000, &[]));
        // Four texts without a bound have room at once in a small context.
        assert_eq!(KvBudget::new(400, 400, 4).start(&free, 0, 10, None), grant(60, &[]));
        // Nothing is shared.
        assert_eq!(KvBudget::new(400, 100, 4).start(&free, 0, 10, None), grant(100, &[]));
        assert_eq!(budget.free(&[holder(0, 70_000, true, 0), holder(1, 9, false, 0)]), 29_991);
    }

    #[test]
    fn idle_sessions_are_emptied_by_age_and_only_if_that_helps() {
        let budget = KvBudget::new(1000, 1000, 4);
        let holders = [
            holder(0, 300, true, 7),
            holder(1, 200, true, 5),
            holder(2, 400, false, 6),
            holder(3, 100, true, 9),
        ];
        // What the session itself holds is its own.
        assert_eq!(budget.start(&holders, 3, 100, Some(0)), grant(100, &[]));
        assert_eq!(budget.start(&holders, 3, 101, Some(0)), grant(101, &[1]));
        assert_eq!(budget.start(&holders, 3, 600, Some(0)), grant(600, &[1, 0]));
        assert_eq!(budget.start(&holders, 3, 601, Some(0)), None);
    }

    #[test]
    fn a_text_grows_in_steps_and_then_parks_the_youngest_jobs() {
        let budget = KvBudget::new(4000, 4000, 2);
        let with = |own: usize, other: usize, younger: u64| {
            [holder(0, own, false, 5), holder(1, other, false, younger), holder(2, 500, true, 1)]
        };
        assert_eq!(budget.grow(&with(1129, 1000, 6), 0, 1000, None), None);
        assert_eq!(budget.grow(&with(1128, 1000, 6), 0, 1000, None), grant(1256, &[]));
        assert_eq!(budget.grow(&with(1128, 2500, 6), 0, 1000, None), grant(1256, &[2]));
        // The rest of the memory, before it comes to parking.
        assert_eq!(budget.grow(&with(1000, 2900, 6), 0, 1000, None), grant(1100, &[2]));
        assert_eq!(budget.grow(&with(1100, 2900, 6), 0, 1000, None), None);
        assert_eq!(budget.grow(&with(1100, 2900, 6), 0, 1100, None), grant(1356, &[2, 1]));
        assert_eq!(budget.grow(&with(1100, 2900, 4), 0, 1100, None), grant(1356, &[2, 0]));
        assert_eq!(budget.grow(&with(4000, 0, 6), 0, 3999, None), None);
        // No more than the text may get.
        assert_eq!(budget.grow(&with(1000, 1000, 6), 0, 1000, Some(7)), grant(1007, &[]));
        assert_eq!(budget.grow(&with(1007, 1000, 6), 0, 1000, Some(7)), None);
    }

    /// A session and its job as numbers of tokens.
    #[derive(Clone, Debug, Default)]
    struct Seat {
        room: usize,
        number: u64,
        /// Tokens that the session holds.
        n_past: usize,
        /// Tokens that are to be computed next, and all that there will be.
        job: Option<(usize, usize)>,
        is_parked: bool,
    }

    /// Jobs that share a budget as a scheduler lets them.
    struct Scene {
        budget: KvBudget,
        seats: Vec<Seat>,
        n_started: u64,
        n_parked: usize,
    }

    impl Scene {
        fn holders(&self) -> Vec<Holder> {
            let holder = |(id, s): (usize, &Seat)| holder(id, s.room, s.job.is_none(), s.number);
            self.seats.iter().enumerate().map(holder).collect()
        }

        fn apply(&mut self, id: usize, grant: &Grant) {
            for other in &grant.emptied {
                let seat = &mut self.seats[*other];
                (seat.room, seat.n_past) = (0, 0);
                seat.is_parked = seat.job.is_some();
                self.n_parked += usize::from(seat.is_parked);
            }
            if !grant.emptied.contains(&id) {
                self.seats[id].room = grant.room;
            }
        }

        /// Indices of jobs, the oldest first.
        fn jobs(&self, is_parked: bool) -> Vec<usize> {
            let wanted = |id: &usize| {
                self.seats[*id].job.is_some() && self.seats[*id].is_parked == is_parked
            };
            let mut jobs: Vec<usize> = (0..self.seats.len()).filter(wanted).collect();
            jobs.sort_by_key(|id| self.seats[*id].number);
            jobs
        }

        fn step(&mut self, queue: &mut Vec<(usize, usize)>) {
            for id in self.jobs(false) {
                let seat = &self.seats[id];
                let grant = match seat.job {
                    Some((next, all)) if seat.n_past + 1 == next && !seat.is_parked => {
                        let n_to_come = Some(all - seat.n_past);
                        self.budget.grow(&self.holders(), id, seat.n_past, n_to_come)
                    }
                    _ => None,
                };
                grant.iter().for_each(|grant| self.apply(id, grant));
            }
            for id in self.jobs(true) {
                let (next, all) = self.seats[id].job.unwrap();
                match self.budget.start(&self.holders(), id, next, Some(all - next)) {
                    Some(grant) => self.apply(id, &grant),
                    None => break,
                }
                self.seats[id].is_parked = false;
            }
            let idle = self.holders().into_iter().filter(|holder| holder.is_idle);
            let oldest = idle.min_by_key(|holder| holder.number);
            if let Some(Holder { id, .. }) = oldest.filter(|_| self.jobs(true).is_empty())
                && let Some((n_prompt, n_answer)) = queue.last().copied()
                && let Some(grant) =
                    self.budget.start(&self.holders(), id, n_prompt, Some(n_answer))
            {
                queue.pop();
                self.apply(id, &grant);
                self.n_started += 1;
                let seat = &mut self.seats[id];
                (seat.number, seat.n_past) = (self.n_started, 0);
                seat.job = Some((n_prompt, n_prompt + n_answer));
            }
            for seat in self.seats.iter_mut().filter(|seat| !seat.is_parked) {
                let Some((next, all)) = seat.job else { continue };
                if next > seat.room {
                    continue;
                }
                seat.n_past = next;
                seat.job = (next < all && next < self.budget.n_ctx).then_some((next + 1, all));
                if seat.job.is_none() {
                    seat.room = seat.n_past;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_job_ends_and_the_oldest_is_never_parked(
            n_sessions in 1usize..6,
            most in 8usize..3000,
            mut queue in prop::collection::vec((1usize..2000, 0usize..2000), 1..12),
        ) {
            let budget = KvBudget::new(most, most, n_sessions);
            queue.iter_mut().for_each(|(n_prompt, _)| *n_prompt = (*n_prompt).min(most));
            let total: usize = queue.iter().map(|(n_prompt, n)| n_prompt + n).sum();
            let (n_jobs, seats) = (queue.len(), vec![Seat::default(); n_sessions]);
            let mut scene = Scene { budget, seats, n_started: 0, n_parked: 0 };
            let mut n_steps = 0;
            while !queue.is_empty() || scene.seats.iter().any(|seat| seat.job.is_some()) {
                let oldest = scene.jobs(false).first().copied();
                scene.step(&mut queue);
                let rooms: usize = scene.seats.iter().map(|seat| seat.room).sum();
                prop_assert!(rooms <= most, "{:?}", scene.seats);
                prop_assert!(scene.seats.iter().all(|seat| seat.n_past <= seat.room));
                prop_assert!(!oldest.is_some_and(|id| scene.seats[id].is_parked));
                // Parked jobs are younger than all that run.
                let youngest = scene.jobs(false).last().map(|id| scene.seats[*id].number);
                let parked = scene.jobs(true).first().map(|id| scene.seats[*id].number);
                prop_assert!(youngest.zip(parked).is_none_or(|(run, parked)| run < parked));
                n_steps += 1;
                prop_assert!(n_steps <= total + 2 * n_jobs, "no end");
            }
            // Jobs wait once for each that has made room, and not for each step of it.
            prop_assert!(scene.n_parked <= n_jobs * (n_sessions + 1), "{}", scene.n_parked);
        }
    }
}
