//! The points that the device must reach before a slot's bytes may change.

use std::sync::{Arc, Mutex};

use crate::Result;
use crate::backend::gpu::{Mark, Stream};
use crate::experts::ClassPlan;

/// A point of a stream, for as many slots as were used before it.
#[derive(Clone)]
pub struct Fence(Arc<Mark>);

impl Fence {
    /// After everything that the stream has queued so far.
    pub fn after(stream: &Stream) -> Result<Fence> {
        Ok(Fence(Arc::new(stream.mark()?)))
    }
}

/// The last use of each slot by each stream that has used it: one stream's use says nothing of
/// another's. A lock of its own: it is held for as long as a few stores take.
pub struct Fences(Mutex<Vec<Vec<Vec<Fence>>>>);

impl Fences {
    pub fn new(classes: &[ClassPlan]) -> Fences {
        Fences(Mutex::new(classes.iter().map(|class| vec![Vec::new(); class.n_slots]).collect()))
    }

    /// Noted before the tier may give the slots to anyone else.
    pub fn note(&self, class: usize, slots: impl Iterator<Item = u32>, fence: &Fence) {
        let mut fences = self.0.lock().expect("no panic under this lock");
        for slot in slots {
            let of_slot = &mut fences[class][slot as usize];
            of_slot.retain(|earlier| earlier.0.stream() != fence.0.stream());
            of_slot.push(fence.clone());
        }
    }

    /// `stream` goes on when the slot's last uses are over.
    pub fn wait(&self, stream: &Stream, class: usize, slot: u32) -> Result<()> {
        let mut fences = self.0.lock().expect("no panic under this lock");
        let of_slot = std::mem::take(&mut fences[class][slot as usize]);
        drop(fences);
        of_slot.iter().try_for_each(|fence| stream.wait_for(&fence.0))
    }
}
