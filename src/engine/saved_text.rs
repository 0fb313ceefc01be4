//! A session's text to a file, and back into a session.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::Session;
use super::kv_disk::{Key, TextHeader, TextReader, TextWriter};
use super::scheduler::PAGE;
use crate::{Error, Result};

/// Pages that are copied at once: those of a device go faster together.
const PAGES_AT_ONCE: usize = 16;

/// A text in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedText {
    pub n_tokens: usize,
    /// Bytes of the file.
    pub n_bytes: u64,
}

/// Whole pages of the first `n` positions, and the rest.
fn parts(n: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let whole = n / PAGE * PAGE;
    let at_once = PAGES_AT_ONCE * PAGE;
    let pages = (0..whole).step_by(at_once).map(move |start| start..whole.min(start + at_once));
    let rest = (whole < n).then_some((whole..n, n - whole));
    pages.map(|positions| (positions, PAGE)).chain(rest)
}

impl Session {
    /// Writes the text to a file; with a state in the model, the part before the last checkpoint.
    pub(super) fn save_text(&self, path: &Path, identity: Key) -> Result<SavedText> {
        let checkpoint = self.last_checkpoint();
        let (n, states) = match self.has_state() {
            true => checkpoint.map_or((0, None), |(n, states)| (n, Some(states))),
            false => (self.n_past(), None),
        };
        if n == 0 {
            return Err(Error::invalid("the slot holds no text that could be saved"));
        }
        let failed = |e| Error::io(path, e);
        let header = TextHeader {
            n_tokens: n as u32,
            n_bytes: self.cache.bytes_of(n) as u64,
            n_states: states.as_ref().map_or(0, |states| states.len() as u64),
            identity,
        };
        let mut writer = TextWriter::create(path, header).map_err(failed)?;
        for id in &self.tokens()[..n] {
            writer.write(&id.to_le_bytes()).map_err(failed)?;
        }
        for (positions, page) in parts(n) {
            for bytes in self.cache.save(&positions, page)? {
                writer.write(&bytes).map_err(failed)?;
            }
        }
        for value in states.iter().flat_map(|states| states.iter()) {
            writer.write(&value.to_le_bytes()).map_err(failed)?;
        }
        Ok(SavedText { n_tokens: n, n_bytes: writer.finish().map_err(failed)? })
    }

    /// Takes the text of a file, whose sizes must be this model's. Returns its states, if it has
    /// any. After an error the session is empty.
    pub(super) fn load_text(&mut self, reader: &mut TextReader) -> Result<Option<Arc<Vec<f32>>>> {
        self.truncate(0);
        let result = self.read_text(reader).map_err(Error::invalid);
        if result.is_err() {
            self.truncate(0);
        }
        result
    }

    fn read_text(
        &mut self,
        reader: &mut TextReader,
    ) -> std::result::Result<Option<Arc<Vec<f32>>>, String> {
        let header = reader.header;
        let n = header.n_tokens as usize;
        let n_states = self.cache.n_state_values() as u64;
        let is_ours =
            header.n_bytes == self.cache.bytes_of(n) as u64 && header.n_states == n_states;
        if !is_ours || n > self.engine.n_ctx() {
            return Err("the text has another size than this model's".into());
        }
        let words = |bytes: Vec<u8>| bytes.as_chunks::<4>().0.to_vec();
        let ids: Vec<u32> =
            words(reader.read(4 * n)?).into_iter().map(u32::from_le_bytes).collect();
        self.check_ids(&ids).map_err(|e| e.to_string())?;
        for (positions, page) in parts(n) {
            let n_bytes = self.cache.bytes_of(page);
            let pages = (0..positions.len() / page).map(|_| reader.read(n_bytes));
            let pages = pages.collect::<std::result::Result<Vec<_>, _>>()?;
            let pages: Vec<&[u8]> = pages.iter().map(|page| &page[..]).collect();
            self.cache.restore(&positions, &pages);
        }
        let states = match n_states {
            0 => None,
            n => {
                let values = words(reader.read(4 * n as usize)?).into_iter();
                let states: Vec<f32> = values.map(f32::from_le_bytes).collect();
                self.cache.restore_states(&states);
                Some(Arc::new(states))
            }
        };
        self.set_tokens(&ids);
        Ok(states)
    }
}
