//! Cancelling one request's work. Passes look at the token before a prompt's layers and while they
//! wait for experts; other requests of the same engine go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, Result};

/// Tells a request's work to end early. Clones share one flag. The default is never cancelled.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Source);

#[derive(Clone, Debug, Default)]
enum Source {
    #[default]
    Never,
    One {
        flag: Arc<AtomicBool>,
        /// The process-wide interrupt, where the request ends with it.
        process: Option<&'static AtomicBool>,
    },
    All(Arc<[Cancel]>),
}

impl Cancel {
    /// A token that [`Cancel::cancel`] sets.
    pub fn new() -> Cancel {
        Cancel(Source::One { flag: Arc::default(), process: None })
    }

    /// A token that `process` sets as well.
    pub(crate) fn with_process(process: &'static AtomicBool) -> Cancel {
        Cancel(Source::One { flag: Arc::default(), process: Some(process) })
    }

    /// The token of a pass that several requests share: cancelled when all of them are.
    pub fn all(tokens: impl IntoIterator<Item = Cancel>) -> Cancel {
        Cancel(Source::All(tokens.into_iter().collect()))
    }

    /// Cancels the request; a token that is never cancelled ignores this.
    pub fn cancel(&self) {
        match &self.0 {
            Source::Never => {}
            Source::One { flag, .. } => flag.store(true, Ordering::SeqCst),
            Source::All(tokens) => tokens.iter().for_each(Cancel::cancel),
        }
    }

    pub fn is_cancelled(&self) -> bool {
        // Relaxed: the flag publishes nothing but itself.
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        match &self.0 {
            Source::Never => false,
            Source::One { flag, process } => is_set(flag) || process.is_some_and(is_set),
            Source::All(tokens) => tokens.iter().all(Cancel::is_cancelled),
        }
    }

    /// `Err(Interrupted)` once the request is cancelled.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Interrupted) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_a_flag_and_tokens_do_not() {
        let (one, other) = (Cancel::new(), Cancel::new());
        let clone = one.clone();
        clone.cancel();
        assert!(one.is_cancelled() && one.check().is_err());
        assert!(!other.is_cancelled() && other.check().is_ok());
        let never = Cancel::default();
        never.cancel();
        assert!(!never.is_cancelled());
    }

    #[test]
    fn a_process_flag_cancels_the_tokens_that_have_it() {
        static STOP: AtomicBool = AtomicBool::new(false);
        let (with, without) = (Cancel::with_process(&STOP), Cancel::new());
        STOP.store(true, Ordering::SeqCst);
        assert!(with.is_cancelled() && !without.is_cancelled());
        STOP.store(false, Ordering::SeqCst);
        assert!(!with.is_cancelled());
    }

    #[test]
    fn a_shared_pass_ends_with_the_last_of_its_requests() {
        let tokens = [Cancel::new(), Cancel::new()];
        let pass = Cancel::all(tokens.iter().cloned());
        tokens[0].cancel();
        assert!(!pass.is_cancelled());
        tokens[1].cancel();
        assert!(pass.is_cancelled());
    }
}
