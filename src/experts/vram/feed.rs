//! Granules out of the tier below, one at a time and in any order.

use std::sync::Arc;

use crate::Result;
use crate::experts::{Access, Acquisition, ExpertStore, ReadyGranule};
use crate::policy::Expert;

/// One worker's way to the tier below. It keeps the expert of its last granule open, as the next
/// is mostly of the same one.
pub struct Feed {
    source: Arc<dyn ExpertStore>,
    work: Acquisition,
    open: Option<Expert>,
}

impl Feed {
    pub fn new(source: Arc<dyn ExpertStore>) -> Feed {
        Feed { source, work: Acquisition::default(), open: None }
    }

    /// A granule, once it is in memory; it stays there for as long as it is borrowed. `keep`: the
    /// tier below may make room to keep the expert.
    pub fn granule(&mut self, id: Expert, index: usize, keep: bool) -> Result<ReadyGranule<'_>> {
        let first = self.work.handed.first().map_or(0, |handed| handed.granule);
        // An expert's granules come in order: one that has gone by comes again from the start.
        if self.open != Some(id) || index < first {
            self.close();
            let (layer, access) = (id.layer as usize, Access::Upload { keep });
            self.source.acquire(layer, &[id.expert], access, &mut self.work);
            self.open = Some(id);
        }
        let at = loop {
            let mut handed = self.work.handed.iter();
            if let Some(at) = handed.position(|handed| handed.granule == index) {
                break at;
            }
            match self.source.next_ready(&mut self.work) {
                Ok(more) => assert!(more, "granule {index} of {id:?} was not handed out"),
                Err(error) => {
                    self.close();
                    return Err(error);
                }
            }
        };
        Ok(self.source.ready(&self.work, at))
    }

    /// Gives back what is open. One that waits for something else must not hold it: who waits for
    /// its room may be whom the waiter waits for.
    pub fn close(&mut self) {
        if self.open.take().is_some() {
            self.source.release(&mut self.work);
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.close();
    }
}
