//! An answer while it comes, in no wire's format, and the bounded channel that takes it from the
//! thread that computes to the client's task.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::errors::ApiError;
use crate::engine::{Embedding, FinishReason, Outcome};
use crate::sample::TokenLogprob;

/// Something new of an answer.
#[derive(Clone, Debug)]
pub enum Event {
    /// The job has a session, which holds the first `n_reused` tokens of the prompt.
    Started {
        slot: usize,
        n_reused: usize,
    },
    /// `n_done` tokens of the prompt are computed or were there.
    Progress {
        n_done: usize,
        time: Duration,
    },
    /// Text before the answer itself.
    Reasoning(Piece),
    Content(Piece),
    /// A call of a tool begins; its arguments follow.
    CallBegin {
        index: usize,
        id: String,
        name: String,
    },
    /// More of a call's arguments, which are JSON once the call has ended.
    Arguments {
        index: usize,
        text: String,
    },
    /// The embedding of a text.
    Embedded(Embedding),
    /// The end of a choice.
    Finished(Box<Finish>),
    /// The end of a choice that has failed.
    Failed(ApiError),
}

/// Some text, and the tokens that were chosen since the last piece.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    pub text: String,
    pub tokens: Vec<Token>,
}

/// A token of an answer.
#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    /// There if the request asks for it.
    pub logprob: Option<TokenLogprob>,
}

/// How a choice has ended.
#[derive(Clone, Debug)]
pub struct Finish {
    pub reason: FinishReason,
    /// Tokens that no piece had: an end token, or what a stop string took away.
    pub tokens: Vec<Token>,
    pub outcome: Outcome,
    /// The stop string that has ended the text.
    pub stop: Option<String>,
    /// Tokens of the whole prompt.
    pub n_prompt: usize,
    /// Generated tokens that were reasoning.
    pub n_reasoning: usize,
    /// Calls of tools.
    pub n_calls: usize,
    pub seed: u64,
    /// The number of the session that it had.
    pub slot: usize,
    /// Time in the queue.
    pub queue_time: Duration,
}

impl Finish {
    /// Whether the context was too small for the text.
    pub fn is_truncated(&self) -> bool {
        self.reason == FinishReason::ContextFull || self.outcome.n_shifted > 0
    }
}

/// Events that wait for their reader before the answer's job rests.
const CAPACITY: usize = 16;

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    events: VecDeque<(usize, Event)>,
    is_reader_gone: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A queue is whole at every moment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The writing end of one choice.
pub struct Sender {
    choice: usize,
    shared: Arc<Shared>,
}

/// The reading end of all choices.
pub struct Receiver(Arc<Shared>);

/// Ends of a channel for `n_choices`.
pub fn channel(n_choices: usize) -> (Vec<Sender>, Receiver) {
    let shared = Arc::new(Shared::default());
    let senders = (0..n_choices).map(|choice| Sender { choice, shared: shared.clone() });
    (senders.collect(), Receiver(shared))
}

impl Sender {
    /// Never waits: who sends looks at `is_full` before it computes more.
    pub fn send(&self, event: Event) {
        let mut state = self.shared.lock();
        if state.is_reader_gone {
            return;
        }
        match (state.events.back_mut(), &event) {
            (Some((choice, last @ Event::Progress { .. })), Event::Progress { .. })
                if *choice == self.choice =>
            {
                *last = event;
            }
            _ => state.events.push_back((self.choice, event)),
        }
        drop(state);
        self.shared.changed.notify_one();
    }

    /// Whether the reader is behind.
    pub fn is_full(&self) -> bool {
        self.shared.lock().events.len() >= CAPACITY
    }
}

impl Receiver {
    /// The next event with its choice, and whether the channel was full until now.
    pub async fn next(&mut self) -> (usize, Event, bool) {
        loop {
            {
                let mut state = self.0.lock();
                let was_full = state.events.len() == CAPACITY;
                if let Some((choice, event)) = state.events.pop_front() {
                    return (choice, event, was_full);
                }
            }
            self.0.changed.notified().await;
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_reader_gone = true;
        state.events.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(text: &str) -> Event {
        Event::Content(Piece { text: text.into(), tokens: Vec::new() })
    }

    fn progress(n_done: usize) -> Event {
        Event::Progress { n_done, time: Duration::ZERO }
    }

    #[test]
    fn a_channel_tells_when_it_is_full_and_when_it_has_room_again() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (senders, mut receiver) = channel(1);
        for _ in 0..CAPACITY {
            assert!(!senders[0].is_full());
            senders[0].send(content("x"));
        }
        assert!(senders[0].is_full());
        let was_full: Vec<bool> =
            (0..CAPACITY).map(|_| runtime.block_on(receiver.next()).2).collect();
        assert_eq!(was_full.iter().filter(|full| **full).count(), 1);
        assert!(was_full[0] && !senders[0].is_full());
        drop(receiver);
        senders[0].send(content("y"));
        assert!(senders[0].shared.lock().events.is_empty());
    }

    #[test]
    fn progress_takes_the_place_of_progress() {
        let (senders, receiver) = channel(2);
        senders[0].send(progress(1));
        senders[0].send(progress(2));
        senders[1].send(progress(3));
        senders[0].send(content("x"));
        senders[0].send(progress(4));
        assert_eq!(receiver.0.lock().events.len(), 4);
    }
}
