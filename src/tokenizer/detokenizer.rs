//! Text from tokens one at a time, never a part of a character: a byte-level token may end within
//! one, and what is printed or sent cannot be taken back.

use super::Tokenizer;
use crate::Result;
use std::ops::Deref;

/// One text in the making. `T` is `&Tokenizer` or `Arc<Tokenizer>`.
pub struct Detokenizer<T: Deref<Target = Tokenizer>> {
    tokenizer: T,
    skip_special: bool,
    /// Control tokens that are text all the same.
    shown: Vec<u32>,
    after_special: bool,
    /// The start of a character whose other bytes have not come yet: at most 3 bytes.
    pending: Vec<u8>,
    ready: String,
}

impl<T: Deref<Target = Tokenizer>> Detokenizer<T> {
    /// For a text of its own: SentencePiece's leading space is taken off.
    pub fn new(tokenizer: T, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            shown: Vec::new(),
            after_special: true,
            pending: Vec::new(),
            ready: String::new(),
        }
    }

    /// For the continuation of a prompt that ended in ordinary text: a leading space is the
    /// model's own.
    pub fn continuing(tokenizer: T, skip_special: bool) -> Self {
        Self { after_special: false, ..Self::new(tokenizer, skip_special) }
    }

    /// With these control tokens in the text, whatever becomes of others.
    pub fn showing(self, ids: &[u32]) -> Self {
        Self { shown: ids.to_vec(), ..self }
    }

    /// Whether all bytes so far are whole characters.
    pub fn is_whole(&self) -> bool {
        self.pending.is_empty()
    }

    /// The text that `id` completes: often a word, nothing while a character is incomplete. Bytes
    /// that cannot become a character are U+FFFD.
    pub fn push(&mut self, id: u32) -> Result<&str> {
        self.ready.clear();
        let Self { tokenizer, pending, ready, .. } = self;
        let skip_special = self.skip_special && !self.shown.contains(&id);
        let piece = tokenizer.piece_in_context(id, skip_special, &mut self.after_special)?;
        pending.extend_from_slice(piece);
        let kept = incomplete_tail(pending);
        let complete = pending.len() - kept;
        ready.push_str(&String::from_utf8_lossy(&pending[..complete]));
        pending.drain(..complete);
        Ok(ready)
    }

    /// The rest when no token follows: U+FFFD for an incomplete character.
    pub fn finish(&mut self) -> &str {
        self.ready = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        &self.ready
    }
}

/// How many bytes at the end of `bytes` could become a character with more bytes to come.
fn incomplete_tail(bytes: &[u8]) -> usize {
    for len in 1..=bytes.len().min(3) {
        let tail = &bytes[bytes.len() - len..];
        if tail[0] & 0xC0 != 0x80 {
            // The first byte of a character, or an ASCII byte.
            return match std::str::from_utf8(tail) {
                Err(e) if e.valid_up_to() == 0 && e.error_len().is_none() => len,
                _ => 0,
            };
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::incomplete_tail;

    #[test]
    fn tails() {
        for (bytes, expected) in [
            (&b""[..], 0),
            (b"abc", 0),
            (b"a\xE2", 1),
            (b"a\xE2\x96", 2),
            (b"a\xE2\x96\x81", 0),
            (b"\xF0\x9F\x98", 3),
            (b"\xF0\x9F\x98\x80", 0),
            (b"\x80\x80\x80\x80", 0),
            (b"\xFF", 0),
            (b"\xE2\x28", 0),
            (b"\xC0", 0),
            (b"\xED\xA0", 0), // a surrogate can never be completed
        ] {
            assert_eq!(incomplete_tail(bytes), expected, "{bytes:?}");
        }
    }
}
