//! The hardware queues of a device. A driver maps streams to a limited number of them, and an
//! operation that cannot run yet holds up those behind it in its queue, of whatever stream they
//! are. An order of operations that needs more queues than there are hangs for ever; so it does
//! here, where it ends in a sentence.

use super::machine::Work;
use std::collections::VecDeque;

/// The queues that the streams of a device share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queues {
    /// Each stream has its own.
    #[default]
    OfStreams,
    /// One for the copies in each direction; kernels have their streams' own.
    Copies,
    /// The queues of `Copies`, and one for all kernels and graphs.
    One,
}

impl Queues {
    pub const ALL: [Queues; 3] = [Queues::OfStreams, Queues::Copies, Queues::One];

    /// The queues that the environment asks for: `MOEBA_EMULATED_QUEUES` is `copies` or `one`.
    pub fn of_environment() -> Queues {
        match std::env::var("MOEBA_EMULATED_QUEUES").as_deref() {
            Ok("copies") => Queues::Copies,
            Ok("one") => Queues::One,
            _ => Queues::OfStreams,
        }
    }
}

const UP: usize = 0;
const DOWN: usize = 1;
const COMPUTE: usize = 2;
const N: usize = 3;

/// An operation's number in each queue that it goes through.
pub type Turns = [Option<u64>; N];

/// The operations that are in the queues of a device.
#[derive(Clone)]
pub struct DeviceQueues {
    kind: Queues,
    next: u64,
    /// Ascending.
    waiting: [VecDeque<u64>; N],
}

impl DeviceQueues {
    pub fn new(kind: Queues) -> DeviceQueues {
        DeviceQueues { kind, next: 0, waiting: Default::default() }
    }

    /// Puts an operation at the end of its queues. A graph is in those of all its nodes at once.
    pub fn enter(&mut self, work: &Work) -> Turns {
        let mut used = [false; N];
        self.mark(work, &mut used);
        let turn = self.next;
        self.next += 1;
        std::array::from_fn(|queue| {
            used[queue].then(|| {
                self.waiting[queue].push_back(turn);
                turn
            })
        })
    }

    fn mark(&self, work: &Work, used: &mut [bool; N]) {
        let queue = match work {
            Work::Up { .. } => UP,
            Work::Down { .. } => DOWN,
            Work::On { .. } | Work::Fill { .. } | Work::Launch(_) => COMPUTE,
            Work::Graph(nodes) => {
                return nodes.iter().for_each(|node| self.mark(&node.work, used));
            }
            Work::Record(_)
            | Work::Wait(_)
            | Work::WaitValue(..)
            | Work::WriteValue(..)
            | Work::BeginReads(_)
            | Work::EndReads => return,
        };
        used[queue] |= match self.kind {
            Queues::OfStreams => false,
            Queues::Copies => queue != COMPUTE,
            Queues::One => true,
        };
    }

    /// Whether an operation is the first in each of its queues.
    pub fn are_first(&self, turns: &Turns) -> bool {
        let first = |queue: usize| self.waiting[queue].front().copied();
        (0..N).all(|queue| turns[queue].is_none() || turns[queue] == first(queue))
    }

    /// Takes an operation out of its queues, of which it is the first.
    pub fn leave(&mut self, turns: &Turns) {
        for (queue, turn) in turns.iter().enumerate() {
            if turn.is_some() {
                let first = self.waiting[queue].pop_front();
                debug_assert_eq!(first, *turn, "an operation out of turn");
            }
        }
    }

    /// Forgets everything: the device is lost.
    pub fn clear(&mut self) {
        self.waiting.iter_mut().for_each(VecDeque::clear);
    }
}
