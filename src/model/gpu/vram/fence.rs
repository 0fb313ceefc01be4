//! How far the device must be before a slot's bytes may change.

use std::sync::{Arc, Mutex};

use crate::Result;
use crate::backend::gpu::{Event, Stream};
use crate::experts::ClassPlan;

/// A point of a stream that is recorded once and never again: who waits for it waits for no more
/// than what was queued before it was made.
#[derive(Clone)]
pub struct Fence(Arc<Event>);

impl Fence {
    /// After everything that the stream has queued so far.
    pub fn after(stream: &Stream) -> Result<Fence> {
        let event = Event::new(stream.gpu())?;
        stream.record(&event)?;
        Ok(Fence(Arc::new(event)))
    }
}

/// The last use of each slot. A lock of its own: it is held for as long as a few stores take.
pub struct Fences(Mutex<Vec<Vec<Option<Fence>>>>);

impl Fences {
    pub fn new(classes: &[ClassPlan]) -> Fences {
        Fences(Mutex::new(classes.iter().map(|class| vec![None; class.n_slots]).collect()))
    }

    /// Noted before the tier may give the slots to anyone else.
    pub fn note(&self, class: usize, slots: impl Iterator<Item = u32>, fence: &Fence) {
        let mut fences = self.0.lock().expect("no panic under this lock");
        slots.for_each(|slot| fences[class][slot as usize] = Some(fence.clone()));
    }

    /// `stream` goes on when the slot's last use is over.
    pub fn wait(&self, stream: &Stream, class: usize, slot: u32) -> Result<()> {
        let fence = self.0.lock().expect("no panic under this lock")[class][slot as usize].take();
        fence.map_or(Ok(()), |fence| stream.wait(&fence.0))
    }
}
