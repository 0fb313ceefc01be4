//! The tier, the policy and the link on one clock. The tier is the engine's own state machine and
//! is moved as the engine moves it: by a layer's demands, by predictions, and by a link that
//! starts a read whenever the tier lets it. Only time is made up.

use super::costs::LinkCosts;
use super::link::Link;
use super::predictor::TimedPredictor;
use crate::experts::{Acquisition, Counters, LinkMeter, Progress, State};
use crate::policy::{Costs, Event, PrefetchPlanner, Splitter, Wants, is_time_to_split};

/// How the link gets on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// By the link's costs.
    #[default]
    Timed,
    /// Whatever is queued is there as soon as an event has been published, before the next demand:
    /// no race is left, so an engine whose link is held to the same must do exactly the same.
    Lockstep,
}

pub struct Machine {
    state: State,
    predictor: Option<TimedPredictor>,
    splitter: Option<Box<dyn Splitter>>,
    /// None in lockstep, as in the engine.
    planner: Option<PrefetchPlanner>,
    /// Whether the last step was a prompt's.
    is_prompt: bool,
    /// Costs for splitter and planner.
    timer: Costs,
    link: Link,
    /// The measures of the link, the engine's own.
    meter: LinkMeter,
    mode: Mode,
    /// ns since the start.
    now: u64,
}

impl Machine {
    pub fn new(
        mut state: State,
        predictor: Option<TimedPredictor>,
        link: LinkCosts,
        mode: Mode,
    ) -> Machine {
        let (splitter, planner, timer) = (None, None, Costs::default());
        let (link, is_prompt, now) = (Link::new(link), false, 0);
        let mut meter = LinkMeter::new(&state);
        // As in the engine. Free room is not filled, as traces begin with requests that do.
        if mode == Mode::Timed {
            state.swap_when_idle();
            meter.measure_price(&mut state, None);
        }
        Machine { state, predictor, splitter, planner, is_prompt, timer, link, meter, mode, now }
    }

    pub fn with_planner(self, planner: Option<PrefetchPlanner>) -> Machine {
        Machine { planner: planner.filter(|_| self.mode == Mode::Timed), ..self }
    }

    /// The splitter takes no time.
    pub fn with_splitter(self, splitter: Option<Box<dyn Splitter>>, timer: Costs) -> Machine {
        Machine { splitter, timer, ..self }
    }

    pub fn now(&self) -> u64 {
        self.now
    }

    /// The optional inputs that the predictor wants now.
    pub fn wants(&self) -> Wants {
        let wants = self.predictor.as_ref().map(TimedPredictor::wants).unwrap_or_default();
        // With everything in memory there is nothing to look ahead for, and the engine does not.
        Wants { ahead: wants.ahead && !self.state.has_everything(), ..wants }
    }

    /// Tells the policy, and the tier what it says.
    pub fn observe(&mut self, event: &Event) {
        self.observe_by_eviction(event);
        self.observe_by_predictor(event);
    }

    /// The eviction alone.
    pub fn observe_by_eviction(&mut self, event: &Event) {
        self.state.observe(event);
    }

    /// All of the policy but the eviction.
    pub fn observe_by_predictor(&mut self, event: &Event) {
        // With nothing left to bring, the engine asks no policy either.
        if self.state.has_everything() {
            return;
        }
        let event = match self.mode {
            Mode::Timed => *event,
            Mode::Lockstep => event.in_lockstep(),
        };
        if let Some(planner) = &mut self.planner {
            planner.observe(&event, &|expert| self.state.is_demanded(expert));
        }
        if event.is_step() || event.is_prompt_step() {
            self.is_prompt = event.is_prompt_step();
        }
        if let Some(predictor) = &mut self.predictor {
            predictor.observe(&event, self.now, self.state.step());
        }
        self.take_answers();
        self.split(&event);
        match self.mode {
            Mode::Timed => self.start_reads(),
            Mode::Lockstep => self.complete_all(),
        }
    }

    fn take_answers(&mut self) {
        let Some(predictor) = &mut self.predictor else { return };
        let Some(mut answer) = predictor.take(self.now, self.state.step()) else { return };
        answer.estimates.iter().for_each(|estimate| self.state.observe(&estimate.event()));
        if let Some(predictions) = &mut answer.predictions {
            // Prompts are not planned.
            if let Some(planner) = self.planner.as_mut().filter(|_| !self.is_prompt) {
                planner.set_latest(predictions);
                planner.plan(predictions, &self.timer, &|expert| self.state.lacks(expert));
            }
            self.state.prefetch(predictions, answer.step);
        }
    }

    /// Lets the splitter plan, when the engine does.
    fn split(&mut self, event: &Event) {
        let Some(splitter) = &mut self.splitter else { return };
        splitter.observe(event);
        if is_time_to_split(event)
            && splitter.is_due()
            && let Some(shares) = splitter.plan(&self.timer)
        {
            self.state.set_shares(&shares);
        }
    }

    pub fn acquire(&mut self, work: &mut Acquisition) {
        if self.mode == Mode::Lockstep {
            // The layer prefetch has landed.
            self.complete_all();
        }
        self.state.acquire(work);
        self.start_reads();
    }

    /// Queues all experts of the layer that a prompt uses next; `None`: of no layer.
    pub fn prefetch_layer(&mut self, layer: Option<usize>) {
        match layer {
            Some(layer) => self.state.prefetch_layer(layer, &|_| true),
            None => self.state.cancel_layer_prefetch(),
        }
        self.start_reads();
    }

    /// Hands out granules that are in memory, waiting if there are none; `None`: all have been.
    /// Otherwise the time waited, ns.
    pub fn next_ready(&mut self, work: &mut Acquisition) -> Option<u64> {
        let since = self.now;
        if self.mode == Mode::Lockstep {
            self.complete_all();
        }
        loop {
            let progress = self.state.advance(work);
            self.start_reads();
            match progress {
                Progress::Ready => break,
                Progress::Waiting => self.wait(),
                Progress::Done => return None,
                Progress::Failed(fault) => panic!("no simulated read fails: {fault:?}"),
            }
        }
        let stall_ns = self.now - since;
        self.state.counters.stall_ns += stall_ns;
        Some(stall_ns)
    }

    pub fn release(&mut self, work: &mut Acquisition) {
        self.state.release(work);
        self.start_reads();
    }

    /// Time passes for computation, and for the link beside it.
    pub fn compute(&mut self, ns: f64) {
        let end = self.now + ns.round() as u64;
        while let Some(at) = self.next_happening().filter(|at| *at <= end) {
            self.happen(at);
        }
        self.now = end;
    }

    /// To the next moment at which something changes.
    fn wait(&mut self) {
        if self.mode == Mode::Lockstep {
            let n_reads = self.state.counters.n_reads;
            self.complete_all();
            assert!(self.state.counters.n_reads > n_reads, "a work waits for nothing");
            return;
        }
        let at = self.next_happening().expect("a read or a search to wait for");
        self.happen(at);
    }

    fn next_happening(&self) -> Option<u64> {
        let answer = self.predictor.as_ref().and_then(TimedPredictor::due);
        [self.link.next_end(), answer].into_iter().flatten().min()
    }

    /// A read ends, or else a search.
    fn happen(&mut self, at: u64) {
        self.now = at;
        if self.link.next_end() == Some(at) {
            let number = self.link.end();
            self.meter.ended(at, number, &mut self.state);
            self.state.end_read(number, Ok(()));
        } else {
            self.take_answers();
        }
        self.start_reads();
    }

    fn start_reads(&mut self) {
        while self.mode == Mode::Timed && self.link.has_room() {
            let Some(number) = self.state.start_read() else { return };
            let bytes = self.state.ticket(number).piece.len;
            self.meter.started(self.now, number, &self.state);
            self.link.start(number, bytes, self.now);
        }
    }

    /// Every read that can start has ended.
    fn complete_all(&mut self) {
        while let Some(number) = self.state.start_read() {
            self.state.end_read(number, Ok(()));
        }
    }

    /// Lets the link bring what is queued, and looks whether all is as it should be.
    pub fn finish(&mut self) {
        self.complete_all_in_time();
        self.state.check_integrity();
        assert!(self.state.is_idle(), "something is pinned, queued or on its way at the end");
    }

    fn complete_all_in_time(&mut self) {
        self.start_reads();
        while let Some(at) = self.next_happening() {
            self.happen(at);
        }
    }

    pub fn counters(&self) -> Counters {
        Counters { busy_ns: self.link.busy_ns(self.now), ..self.state.counters() }
    }
}
