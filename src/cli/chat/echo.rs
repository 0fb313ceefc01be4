//! Keys that are typed while an answer is written: the terminal keeps them for the next message,
//! and does not show them within the answer.

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io;

/// A terminal that shows no keys, until it is dropped.
pub struct Silence(Option<Termios>);

impl Silence {
    /// Silences the terminal that stdin is; nothing changes where it is none.
    pub fn begin() -> Silence {
        let Ok(before) = tcgetattr(io::stdin()) else { return Silence(None) };
        let mut silent = before.clone();
        silent.local_modes -= LocalModes::ECHO;
        let is_silent = tcsetattr(io::stdin(), OptionalActions::Now, &silent).is_ok();
        Silence(is_silent.then_some(before))
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // A terminal that is gone shows nothing.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}
