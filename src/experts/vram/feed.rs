//! Granules out of the tier below, one at a time and in any order.

use std::sync::Arc;

use crate::Result;
use crate::experts::{Access, Acquisition, ExpertStore, ReadyGranule};
use crate::policy::Expert;

/// An expert of the tier below, pinned there.
struct Open {
    id: Expert,
    work: Acquisition,
    number: u64,
    /// Copies under way out of its memory.
    n_copies: usize,
}

/// One worker's way to the tier below. It keeps the expert of its last granule open, as the next
/// is mostly of the same one, and experts that are copied from where they are until the copies are
/// done.
pub struct Feed {
    source: Arc<dyn ExpertStore>,
    open: Option<Open>,
    copied: Vec<Open>,
    spare: Vec<Acquisition>,
    next_number: u64,
}

/// A copy out of an expert's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold(u64);

impl Feed {
    pub fn new(source: Arc<dyn ExpertStore>) -> Feed {
        Feed { source, open: None, copied: Vec::new(), spare: Vec::new(), next_number: 0 }
    }

    /// Opens the expert of a granule that is wanted next. Returns whether all of it is in memory,
    /// so that `granule` does not wait. `keep`: the tier below may make room to keep the expert.
    pub fn open(&mut self, id: Expert, index: usize, keep: bool) -> bool {
        let first = |open: &Open| open.work.handed.first().map_or(0, |handed| handed.granule);
        // An expert's granules come in order: one that has gone by comes again from the start.
        if self.open.as_ref().is_none_or(|open| open.id != id || index < first(open)) {
            self.close();
            let mut work = self.spare.pop().unwrap_or_default();
            let (layer, access) = (id.layer as usize, Access::Upload { keep });
            self.source.acquire(layer, &[id.expert], access, &mut work);
            self.next_number += 1;
            self.open = Some(Open { id, work, number: self.next_number, n_copies: 0 });
        }
        // What is whole behind the acquisition stays so.
        self.source.is_whole(id)
    }

    /// A granule of the open expert, once it is in memory; it stays there for as long as it is
    /// borrowed.
    pub fn granule(&mut self, index: usize) -> Result<ReadyGranule<'_>> {
        let Feed { source, open, .. } = self;
        let Open { id, work, .. } = open.as_mut().expect("an open expert");
        let ready = loop {
            if let Some(at) = work.handed.iter().position(|handed| handed.granule == index) {
                break Ok(at);
            }
            match source.next_ready(work) {
                Ok(more) => assert!(more, "granule {index} of {id:?} was not handed out"),
                Err(error) => break Err(error),
            }
        };
        match ready {
            Ok(at) => {
                let open = self.open.as_ref().expect("an open expert");
                Ok(self.source.ready(&open.work, at))
            }
            Err(error) => {
                self.close();
                Err(error)
            }
        }
    }

    /// The open expert stays where it is until `let_go`.
    pub fn hold(&mut self) -> Hold {
        let open = self.open.as_mut().expect("an open expert");
        open.n_copies += 1;
        Hold(open.number)
    }

    pub fn let_go(&mut self, Hold(number): Hold) {
        if let Some(open) = self.open.as_mut().filter(|open| open.number == number) {
            open.n_copies -= 1;
            return;
        }
        let at = self.copied.iter().position(|open| open.number == number);
        let at = at.expect("a hold that was not let go of");
        self.copied[at].n_copies -= 1;
        if self.copied[at].n_copies == 0 {
            let open = self.copied.swap_remove(at);
            self.give_back(open);
        }
    }

    /// Gives back what is open. One that waits for something else must not hold it: who waits for
    /// its room may be whom the waiter waits for. What is being copied is given back by `let_go`.
    pub fn close(&mut self) {
        match self.open.take() {
            Some(open) if open.n_copies > 0 => self.copied.push(open),
            Some(open) => self.give_back(open),
            None => {}
        }
    }

    fn give_back(&mut self, mut open: Open) {
        self.source.release(&mut open.work);
        self.spare.push(open.work);
    }
}

impl Drop for Feed {
    /// No copy is under way.
    fn drop(&mut self) {
        self.close();
        while let Some(open) = self.copied.pop() {
            self.give_back(open);
        }
    }
}
