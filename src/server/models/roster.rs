//! Which models are in memory, which wait for it, and which one leaves or comes next. Knows no
//! threads, files and clocks: [`super::Models`] does what [`Roster::next`] says.
//!
//! Loads come one after the other, in the order in which models were asked for. A model comes once
//! it fits beside those that are there. If it does not, idle models leave, the one that was used
//! least recently before others; if they do not suffice, busy ones take no new requests until they
//! are idle, so that whoever waits gets its turn. A model that fits beside none comes alone.

use std::collections::VecDeque;
use std::time::Duration;

/// The time since some moment.
pub type Time = Duration;

/// The memory of a loaded model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Main memory, mapped weights included.
    pub bytes: u64,
    /// The part of it that is for experts.
    pub expert_bytes: u64,
    /// Whether it computes on a GPU, whose memory only one model plans with.
    pub is_on_device: bool,
}

/// The bounds of all models together.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Models at a time.
    pub most: usize,
    /// Main memory; `None` is any.
    pub bytes: Option<u64>,
    /// The part of it that experts have (`--ram`).
    pub expert_bytes: Option<u64>,
    /// Requests that may wait for a model.
    pub n_waiting: usize,
    /// The time after which an idle model leaves, where requests do not say; `None` is never.
    pub keep: Option<Duration>,
}

impl Limits {
    /// The bounds of a single model, which stays.
    pub fn one() -> Limits {
        Limits { most: 1, bytes: None, expert_bytes: None, n_waiting: 0, keep: None }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State<T> {
    Unloaded,
    Loading,
    Loaded(T),
    /// Takes no new requests and goes once it is idle; `for_room`: as another one needs its memory.
    Leaving {
        model: T,
        for_room: bool,
    },
    /// Its memory is being given back.
    Going,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    state: State<T>,
    need: Option<Need>,
    /// Requests that use it, and that wait for it.
    n_users: usize,
    n_waiting: usize,
    /// The end of its last use.
    used: Time,
    keep: Option<Duration>,
    /// Loads that have failed.
    n_failures: u64,
}

/// The next thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act<T> {
    /// Find out what this model needs: [`Roster::planned`] or [`Roster::failed`].
    Plan(usize),
    /// Load it: [`Roster::loaded`] or [`Roster::failed`].
    Load(usize),
    /// Give back what this one has: [`Roster::gone`].
    Unload(usize, T),
    /// Nothing, until something changes or this time has come.
    Wait(Option<Time>),
}

#[derive(Clone, Debug)]
pub struct Roster<T> {
    entries: Vec<Entry<T>>,
    /// Models that requests wait for, in the order of their loads.
    wishes: VecDeque<usize>,
    limits: Limits,
}

impl<T: Clone> Roster<T> {
    pub fn new(limits: Limits) -> Roster<T> {
        Roster { entries: Vec::new(), wishes: VecDeque::new(), limits }
    }

    /// Adds a model that is not loaded: its number.
    pub fn add(&mut self) -> usize {
        self.entries.push(Entry {
            state: State::Unloaded,
            need: None,
            n_users: 0,
            n_waiting: 0,
            used: Time::ZERO,
            keep: self.limits.keep,
            n_failures: 0,
        });
        self.entries.len() - 1
    }

    /// Adds a model that is loaded: its number.
    pub fn add_loaded(&mut self, model: T) -> usize {
        let id = self.add();
        self.entries[id].state = State::Loaded(model);
        id
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub fn state(&self, id: usize) -> &State<T> {
        &self.entries[id].state
    }

    /// Loads of the model that have failed.
    pub fn n_failures(&self, id: usize) -> u64 {
        self.entries[id].n_failures
    }

    /// The time at which an idle model leaves, as far as it is known now; `None` is never.
    pub fn expiry(&self, id: usize, now: Time) -> Option<Time> {
        let entry = &self.entries[id];
        let since = if entry.n_users > 0 { now } else { entry.used };
        entry.keep.map(|keep| since.saturating_add(keep))
    }

    /// The loaded model that was used last.
    pub fn newest(&self) -> Option<usize> {
        let loaded = (0..self.entries.len()).filter(|id| self.is_loaded(*id));
        loaded.max_by_key(|id| (self.entries[*id].n_users > 0, self.entries[*id].used))
    }

    fn is_loaded(&self, id: usize) -> bool {
        matches!(self.entries[id].state, State::Loaded(_))
    }

    /// The model for a request, if it is loaded: to be given back by [`Roster::give`].
    pub fn take(&mut self, id: usize, now: Time) -> Option<T> {
        let keep = self.limits.keep;
        let entry = &mut self.entries[id];
        let State::Loaded(model) = &entry.state else { return None };
        entry.n_users += 1;
        (entry.used, entry.keep) = (now, keep);
        Some(model.clone())
    }

    /// The model for a look at it, which is no use; to be given back as well.
    pub fn look(&mut self, id: usize) -> Option<T> {
        let entry = &mut self.entries[id];
        let (State::Loaded(model) | State::Leaving { model, .. }) = &entry.state else {
            return None;
        };
        entry.n_users += 1;
        Some(model.clone())
    }

    /// The end of a use at `now`, or of a look.
    pub fn give(&mut self, id: usize, used: Option<Time>) {
        let entry = &mut self.entries[id];
        assert!(entry.n_users > 0, "a model is given back as often as it is taken");
        entry.n_users -= 1;
        entry.used = used.unwrap_or(entry.used);
    }

    /// The time that the model stays after its last use.
    pub fn keep(&mut self, id: usize, keep: Option<Duration>) {
        self.entries[id].keep = keep;
    }

    /// A request begins to wait for a model; false if too many do. It ends by
    /// [`Roster::end_wait`].
    pub fn begin_wait(&mut self, id: usize) -> bool {
        let entry = &mut self.entries[id];
        if entry.n_waiting >= self.limits.n_waiting {
            return false;
        }
        entry.n_waiting += 1;
        self.wish(id);
        true
    }

    pub fn end_wait(&mut self, id: usize) {
        let entry = &mut self.entries[id];
        assert!(entry.n_waiting > 0, "a wait ends once");
        entry.n_waiting -= 1;
    }

    fn wish(&mut self, id: usize) {
        let is_coming = matches!(self.entries[id].state, State::Loaded(_) | State::Loading);
        if !is_coming && !self.wishes.contains(&id) {
            self.wishes.push_back(id);
        }
    }

    /// Lets a loaded model go once it is idle; false if it is not loaded.
    pub fn unload(&mut self, id: usize) -> bool {
        self.leave(id, false)
    }

    fn leave(&mut self, id: usize, for_room: bool) -> bool {
        let state = &mut self.entries[id].state;
        match std::mem::replace(state, State::Unloaded) {
            State::Loaded(model) | State::Leaving { model, .. } => {
                *state = State::Leaving { model, for_room };
                true
            }
            other => {
                *state = other;
                false
            }
        }
    }

    /// Notes the need of a model, or that it is not known any more.
    pub fn planned(&mut self, id: usize, need: Option<Need>) {
        self.entries[id].need = need;
    }

    /// The end of a load. Requests that have come meanwhile wait for the model.
    pub fn loaded(&mut self, id: usize, model: T, now: Time) {
        let keep = self.limits.keep;
        let entry = &mut self.entries[id];
        assert!(matches!(entry.state, State::Loading), "only a model that is loaded is there");
        entry.state = State::Loaded(model);
        (entry.used, entry.keep) = (now, keep);
    }

    /// A plan or a load has failed, and so have the requests that wait for the model.
    pub fn failed(&mut self, id: usize) {
        let entry = &mut self.entries[id];
        assert!(matches!(entry.state, State::Loading | State::Unloaded));
        (entry.state, entry.need) = (State::Unloaded, None);
        entry.n_failures += 1;
        self.wishes.retain(|wish| *wish != id);
    }

    pub fn gone(&mut self, id: usize) {
        let entry = &mut self.entries[id];
        assert!(matches!(entry.state, State::Going) && entry.n_users == 0);
        entry.state = State::Unloaded;
        if entry.n_waiting > 0 {
            self.wish(id);
        }
    }

    /// The next thing to do at this time.
    pub fn next(&mut self, now: Time) -> Act<T> {
        if let Some(id) = (0..self.entries.len()).find(|id| self.is_due(*id, now)) {
            return self.go(id);
        }
        let entries = &self.entries;
        self.wishes.retain(|id| {
            let entry = &entries[*id];
            entry.n_waiting > 0 && !matches!(entry.state, State::Loaded(_))
        });
        // One that is still leaving keeps no other one waiting.
        let head = self.wishes.iter().find(|id| matches!(self.state(**id), State::Unloaded));
        let Some(id) = head.copied() else {
            self.stay();
            return Act::Wait(self.next_expiry(now));
        };
        let is_device_free = self.present().all(|id| !self.need(id).is_on_device);
        if self.entries[id].need.is_none() && is_device_free {
            return Act::Plan(id);
        }
        if self.fits(id, |_| false) {
            self.wishes.retain(|wish| *wish != id);
            self.stay();
            self.entries[id].state = State::Loading;
            return Act::Load(id);
        }
        match self.make_room(id) {
            Some(idle) => self.go(idle),
            None => Act::Wait(self.next_expiry(now)),
        }
    }

    /// Whether an idle model is to go: it is leaving, or it was kept for its time.
    fn is_due(&self, id: usize, now: Time) -> bool {
        let entry = &self.entries[id];
        let is_over = |keep| entry.used.saturating_add(keep) <= now;
        entry.n_users == 0
            && match entry.state {
                State::Leaving { .. } => true,
                State::Loaded(_) => entry.n_waiting == 0 && entry.keep.is_some_and(is_over),
                _ => false,
            }
    }

    fn go(&mut self, id: usize) -> Act<T> {
        assert_eq!(self.entries[id].n_users, 0, "a model that is in use stays");
        match std::mem::replace(&mut self.entries[id].state, State::Going) {
            State::Loaded(model) | State::Leaving { model, .. } => Act::Unload(id, model),
            _ => unreachable!("only a loaded model goes"),
        }
    }

    /// The earliest time at which an idle model is to go.
    fn next_expiry(&self, now: Time) -> Option<Time> {
        let idle = (0..self.entries.len()).filter(|id| {
            let entry = &self.entries[*id];
            self.is_loaded(*id) && entry.n_users + entry.n_waiting == 0
        });
        idle.filter_map(|id| self.expiry(id, now)).min()
    }

    /// Models that have memory.
    fn present(&self) -> impl Iterator<Item = usize> {
        let is_present = |entry: &Entry<T>| !matches!(entry.state, State::Unloaded);
        self.entries.iter().enumerate().filter(move |(_, e)| is_present(e)).map(|(id, _)| id)
    }

    fn need(&self, id: usize) -> Need {
        self.entries[id].need.unwrap_or_default()
    }

    /// Whether the model fits beside those that are there, without some of them, or comes alone.
    fn fits(&self, id: usize, is_left_out: impl Fn(usize) -> bool) -> bool {
        let others: Vec<usize> = self.present().filter(|id| !is_left_out(*id)).collect();
        if others.is_empty() {
            return true;
        }
        let all = || others.iter().chain([&id]).map(|id| self.need(*id));
        let sum = |part: fn(Need) -> u64| all().map(part).fold(0, u64::saturating_add);
        let is_within = |most: Option<u64>, n: u64| most.is_none_or(|most| n <= most);
        self.entries[id].need.is_some()
            && others.len() < self.limits.most
            && is_within(self.limits.bytes, sum(|need| need.bytes))
            && is_within(self.limits.expert_bytes, sum(|need| need.expert_bytes))
            && all().all(|need| !need.is_on_device)
    }

    /// An idle model that is to go so that this one fits. Where there is none, busy ones begin to
    /// leave, as many as it takes.
    fn make_room(&mut self, id: usize) -> Option<usize> {
        let can_go = |id: &usize| self.is_loaded(*id) && self.entries[*id].n_waiting == 0;
        let mut all: Vec<usize> = self.present().filter(can_go).collect();
        all.sort_by_key(|id| self.entries[*id].used);
        if let Some(idle) = all.iter().find(|id| self.entries[**id].n_users == 0) {
            return Some(*idle);
        }
        for busy in all {
            let is_leaving = |id| matches!(self.state(id), State::Leaving { .. } | State::Going);
            if self.fits(id, is_leaving) {
                break;
            }
            self.leave(busy, true);
        }
        None
    }

    /// No one needs the memory any more of those that are leaving for it.
    fn stay(&mut self) {
        for entry in &mut self.entries {
            if let State::Leaving { model, for_room: true } = &entry.state {
                entry.state = State::Loaded(model.clone());
            }
        }
    }

    /// Takes out all models, for the end.
    pub fn drain(&mut self) -> Vec<T> {
        let loaded = self.entries.iter().filter_map(|entry| match &entry.state {
            State::Loaded(model) | State::Leaving { model, .. } => Some(model.clone()),
            _ => None,
        });
        loaded.collect()
    }

    /// Fails where a model has users without memory, or models have more memory than there is.
    #[cfg(test)]
    fn check(&self) {
        for (id, entry) in self.entries.iter().enumerate() {
            let has_memory = matches!(entry.state, State::Loaded(_) | State::Leaving { .. });
            assert!(entry.n_users == 0 || has_memory, "{id} has users and no memory");
            assert!(entry.n_waiting <= self.limits.n_waiting);
            let n_wishes = self.wishes.iter().filter(|wish| **wish == id).count();
            assert!(n_wishes <= 1, "{id} is wished for {n_wishes} times");
        }
        let is_in_work = |entry: &&Entry<T>| matches!(entry.state, State::Loading | State::Going);
        assert!(self.entries.iter().filter(is_in_work).count() <= 1, "one thing at a time");
        let present: Vec<Need> = self.present().map(|id| self.need(id)).collect();
        if present.len() > 1 {
            let bytes: u64 = present.iter().map(|need| need.bytes).sum();
            let expert_bytes: u64 = present.iter().map(|need| need.expert_bytes).sum();
            assert!(self.limits.bytes.is_none_or(|most| bytes <= most), "{present:?}");
            assert!(self.limits.expert_bytes.is_none_or(|most| expert_bytes <= most));
            assert!(present.len() <= self.limits.most && present.iter().all(|n| !n.is_on_device));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const N_MODELS: usize = 4;

    fn seconds(n: u64) -> Time {
        Duration::from_secs(n)
    }

    fn limits(most: usize, bytes: u64, keep: Option<u64>) -> Limits {
        let keep = keep.map(Duration::from_secs);
        Limits { most, bytes: Some(bytes), expert_bytes: None, n_waiting: 3, keep }
    }

    fn need(bytes: u64) -> Need {
        Need { bytes, ..Need::default() }
    }

    /// Does what is to be done until there is nothing; models need as many bytes as given.
    fn settle(roster: &mut Roster<u32>, needs: &[u64], now: Time) {
        loop {
            match roster.next(now) {
                Act::Plan(id) => roster.planned(id, Some(need(needs[id]))),
                Act::Load(id) => roster.loaded(id, id as u32, now),
                Act::Unload(id, _) => roster.gone(id),
                Act::Wait(_) => return,
            }
            roster.check();
        }
    }

    fn ask(roster: &mut Roster<u32>, id: usize, needs: &[u64], now: Time) -> Option<u32> {
        roster.take(id, now).or_else(|| {
            assert!(roster.begin_wait(id));
            settle(roster, needs, now);
            let taken = roster.take(id, now);
            roster.end_wait(id);
            taken
        })
    }

    #[test]
    fn the_oldest_idle_model_makes_room() {
        let needs = [4, 4, 4];
        let mut roster = Roster::new(limits(9, 10, None));
        needs.iter().for_each(|_| _ = roster.add());
        for (id, now) in [(0, 1), (1, 2), (0, 3)] {
            assert_eq!(ask(&mut roster, id, &needs, seconds(now)), Some(id as u32));
            roster.give(id, Some(seconds(now)));
        }
        assert_eq!(ask(&mut roster, 2, &needs, seconds(4)), Some(2));
        assert_eq!((roster.state(0), roster.state(1)), (&State::Loaded(0), &State::Unloaded));
        assert_eq!(roster.newest(), Some(2));
    }

    #[test]
    fn a_busy_model_leaves_once_it_is_idle_and_takes_no_more_requests() {
        let needs = [6, 6];
        let mut roster = Roster::new(limits(9, 10, None));
        needs.iter().for_each(|_| _ = roster.add());
        assert!(ask(&mut roster, 0, &needs, seconds(1)).is_some());
        assert!(roster.begin_wait(1));
        settle(&mut roster, &needs, seconds(2));
        assert!(roster.take(0, seconds(2)).is_none(), "others wait for its memory");
        assert!(roster.begin_wait(0));
        settle(&mut roster, &needs, seconds(3));
        assert!(matches!(roster.state(0), State::Leaving { .. }));
        roster.give(0, Some(seconds(4)));
        settle(&mut roster, &needs, seconds(4));
        // The one that has waited longer is served before the other one comes back.
        assert!(roster.take(1, seconds(5)).is_some());
        roster.end_wait(1);
        roster.give(1, Some(seconds(5)));
        settle(&mut roster, &needs, seconds(6));
        assert!(roster.take(0, seconds(6)).is_some());
    }

    #[test]
    fn a_model_stays_if_no_one_waits_for_its_memory_any_more() {
        let needs = [6, 6];
        let mut roster = Roster::new(limits(9, 10, None));
        needs.iter().for_each(|_| _ = roster.add());
        assert!(ask(&mut roster, 0, &needs, seconds(1)).is_some());
        assert!(roster.begin_wait(1));
        settle(&mut roster, &needs, seconds(2));
        roster.end_wait(1);
        settle(&mut roster, &needs, seconds(3));
        assert!(roster.take(0, seconds(3)).is_some());
    }

    #[test]
    fn idle_models_leave_by_age() {
        let needs = [1, 1];
        let mut roster = Roster::new(limits(9, 10, Some(60)));
        needs.iter().for_each(|_| _ = roster.add());
        assert!(ask(&mut roster, 0, &needs, seconds(0)).is_some());
        assert!(ask(&mut roster, 1, &needs, seconds(0)).is_some());
        roster.keep(1, None);
        settle(&mut roster, &needs, seconds(500));
        assert_eq!(roster.state(0), &State::Loaded(0), "a model in use does not age");
        roster.give(0, Some(seconds(500)));
        roster.give(1, Some(seconds(500)));
        assert_eq!(roster.next(seconds(559)), Act::Wait(Some(seconds(560))));
        settle(&mut roster, &needs, seconds(560));
        assert_eq!((roster.state(0), roster.state(1)), (&State::Unloaded, &State::Loaded(1)));
        assert_eq!(roster.next(seconds(9999)), Act::Wait(None));
    }

    #[test]
    fn what_fits_beside_none_comes_alone_and_a_device_has_one_model() {
        let needs = [99, 1];
        let mut roster = Roster::new(limits(9, 10, None));
        needs.iter().for_each(|_| _ = roster.add());
        for id in [1, 0, 1] {
            assert!(ask(&mut roster, id, &needs, seconds(1)).is_some());
            roster.give(id, Some(seconds(1)));
            assert_eq!(roster.present().count(), 1);
        }
        let mut roster = Roster::new(limits(9, 10, None));
        let all = [roster.add(), roster.add()];
        for id in all {
            roster.planned(id, Some(Need { is_on_device: true, ..need(1) }));
            assert!(ask(&mut roster, id, &needs, seconds(1)).is_some());
            roster.give(id, Some(seconds(1)));
        }
        assert_eq!(roster.present().collect::<Vec<_>>(), [all[1]]);
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// Asks for a model, and waits for it if it is not there.
        Ask(usize),
        /// A request that waits takes the model if it can; else, it may have had enough.
        Serve(usize, bool),
        Give(usize),
        Look(usize),
        Unload(usize),
        Keep(usize, Option<u64>),
        Pass(u64),
        /// Does the next thing; whether it succeeds.
        Act(bool),
    }

    fn step() -> impl Strategy<Value = Step> {
        let model = 0..N_MODELS;
        prop_oneof![
            4 => model.clone().prop_map(Step::Ask),
            4 => (model.clone(), prop::bool::ANY).prop_map(|(id, ends)| Step::Serve(id, ends)),
            4 => model.clone().prop_map(Step::Give),
            1 => model.clone().prop_map(Step::Look),
            1 => model.clone().prop_map(Step::Unload),
            1 => (model, prop::option::of(0..9u64)).prop_map(|(id, keep)| Step::Keep(id, keep)),
            2 => (0..9u64).prop_map(Step::Pass),
            9 => prop::bool::weighted(0.9).prop_map(Step::Act),
        ]
    }

    /// A roster and what the world has of it.
    struct World {
        roster: Roster<u32>,
        needs: Vec<u64>,
        now: u64,
        /// Uses of each model, and for each request that waits the failures that it has seen.
        n_users: Vec<usize>,
        waiting: Vec<Vec<u64>>,
    }

    impl World {
        fn act(&mut self, succeeds: bool) -> bool {
            let now = seconds(self.now);
            match self.roster.next(now) {
                Act::Plan(id) if succeeds => {
                    let is_on_device = self.needs[id].is_multiple_of(7);
                    let need = Need { is_on_device, ..need(self.needs[id]) };
                    self.roster.planned(id, Some(need));
                }
                Act::Load(id) if succeeds => self.roster.loaded(id, id as u32, now),
                Act::Plan(id) | Act::Load(id) => self.roster.failed(id),
                Act::Unload(id, model) => {
                    assert_eq!((model, self.n_users[id]), (id as u32, 0));
                    self.roster.check();
                    self.roster.gone(id);
                }
                Act::Wait(_) => return false,
            }
            true
        }

        /// The oldest request that waits for a model looks at it.
        fn serve(&mut self, id: usize, ends: bool) {
            let Some(n_failures) = self.waiting[id].first().copied() else { return };
            let is_served = self.roster.take(id, seconds(self.now)).is_some();
            self.n_users[id] += usize::from(is_served);
            if is_served || ends || self.roster.n_failures(id) > n_failures {
                self.waiting[id].remove(0);
                self.roster.end_wait(id);
            }
        }

        fn step(&mut self, step: &Step) {
            let now = seconds(self.now);
            match *step {
                Step::Ask(id) => match self.roster.take(id, now) {
                    Some(_) => self.n_users[id] += 1,
                    None => {
                        let n_failures = self.roster.n_failures(id);
                        if self.roster.begin_wait(id) {
                            self.waiting[id].push(n_failures);
                        }
                    }
                },
                Step::Serve(id, ends) => self.serve(id, ends),
                Step::Give(id) if self.n_users[id] > 0 => {
                    self.n_users[id] -= 1;
                    self.roster.give(id, Some(now));
                }
                Step::Give(_) => {}
                Step::Look(id) => {
                    if self.roster.look(id).is_some() {
                        self.roster.give(id, None);
                    }
                }
                Step::Unload(id) => drop(self.roster.unload(id)),
                Step::Keep(id, keep) => self.roster.keep(id, keep.map(Duration::from_secs)),
                Step::Pass(n) => self.now += n,
                Step::Act(succeeds) => drop(self.act(succeeds)),
            }
        }
    }

    proptest! {
        /// No model loses its memory in use, memory is never exceeded, and whoever waits is served
        /// once others have ended.
        #[test]
        fn models_come_and_go(
            steps in prop::collection::vec(step(), 1..120),
            needs in prop::collection::vec(1..12u64, N_MODELS),
            most in 1..4usize,
            keep in prop::option::of(0..9u64),
        ) {
            let mut roster = Roster::new(limits(most, 12, keep));
            for _ in 0..N_MODELS {
                roster.add();
            }
            let (n_users, waiting) = (vec![0; N_MODELS], vec![Vec::new(); N_MODELS]);
            let mut world = World { roster, needs, now: 0, n_users, waiting };
            for step in &steps {
                world.step(step);
                world.roster.check();
            }
            // Every request ends after a while, and no load fails any more.
            for _ in 0..4 * N_MODELS * steps.len() {
                while world.act(true) {
                    world.roster.check();
                }
                for id in 0..N_MODELS {
                    world.step(&Step::Give(id));
                    world.serve(id, false);
                }
            }
            prop_assert!(world.waiting.iter().all(Vec::is_empty), "{:?}", world.roster);
            prop_assert!(world.n_users.iter().all(|n| *n == 0));
        }
    }
}
