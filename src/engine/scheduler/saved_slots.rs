//! Texts of free slots to files and back, as llama-server's `/slots/ID?action=…`.

use std::path::Path;
use std::time::{Duration, Instant};

use super::core::Core;
use super::job::JobSink;
use crate::Error;
use crate::engine::SavedText;
use crate::engine::kv_disk::TextReader;

/// Why a slot's text was not moved.
#[derive(Debug)]
pub enum SlotError {
    /// The slot has a job.
    Busy,
    /// The slot's text is another owner's, or it holds none.
    NoText,
    /// Other texts need the memory.
    NoRoom,
    /// The file does not hold a text of this model.
    File(String),
    Other(Error),
}

/// A text that was moved, and the time that it took.
#[derive(Clone, Copy, Debug)]
pub struct MovedText {
    pub text: SavedText,
    pub time: Duration,
}

/// Work on a scheduler between two passes.
pub type BetweenPasses<S> = Box<dyn FnOnce(&mut Core<S>) + Send>;

pub(super) type SlotResult<T> = std::result::Result<T, SlotError>;

impl<S: JobSink> Core<S> {
    /// Writes the text of a slot to a file, if it is of this salt.
    pub fn save_slot(&mut self, id: usize, salt: u64, path: &Path) -> SlotResult<MovedText> {
        let start = Instant::now();
        let identity = self.engine().kv_identity().map_err(SlotError::Other)?;
        let slot = self.free_slot(id)?;
        if slot.salt() != Some(salt) || slot.session.n_past() == 0 {
            return Err(SlotError::NoText);
        }
        let text = slot.session.save_text(path, identity).map_err(SlotError::Other)?;
        Ok(MovedText { text, time: start.elapsed() })
    }

    /// Reads a text of this salt from a file into a slot. The slot's own goes to the pages.
    pub fn restore_slot(&mut self, id: usize, salt: u64, path: &Path) -> SlotResult<MovedText> {
        let start = Instant::now();
        self.free_slot(id)?;
        let mut reader = TextReader::open(path).map_err(SlotError::File)?;
        let identity = self.engine().kv_identity().map_err(SlotError::Other)?;
        let n_tokens = reader.header.n_tokens as usize;
        if reader.header.identity != identity {
            let why = "it was saved with another model, other types of the cache or other layers \
                       on the GPU";
            return Err(SlotError::File(why.into()));
        }
        if n_tokens > self.engine().n_ctx() {
            let n_ctx = self.engine().n_ctx();
            let why = format!("its {n_tokens} tokens do not fit the context of {n_ctx}");
            return Err(SlotError::File(why));
        }
        if !self.make_room(id, n_tokens) {
            return Err(SlotError::NoRoom);
        }
        let text = SavedText { n_tokens, n_bytes: reader.n_bytes() };
        self.fill_slot(id, salt, &mut reader).map_err(SlotError::Other)?;
        Ok(MovedText { text, time: start.elapsed() })
    }

    /// Drops a slot's text, if it is of this salt; returns its tokens.
    pub fn erase_slot(&mut self, id: usize, salt: u64) -> SlotResult<usize> {
        let slot = self.free_slot(id)?;
        if slot.session.n_past() > 0 && slot.salt() != Some(salt) {
            return Err(SlotError::NoText);
        }
        let n = slot.session.n_past();
        slot.erase();
        self.publish();
        Ok(n)
    }
}
