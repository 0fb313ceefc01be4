//! Failures that may pass, and how long to wait for that.

use super::Patience;
use crate::{Error, Result, interrupt};
use std::time::{Duration, Instant};

/// Why a request brought nothing.
#[derive(Debug)]
pub enum Failure {
    /// Another try may go through; why is a whole sentence. A server may say when.
    Passing { why: String, after: Option<Duration> },
    /// There is no connection: another try now would not find one either.
    Unreachable(String),
    /// No other try would go through.
    Lasting(Error),
}

/// The result of a request.
pub type Try<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn passing(why: impl Into<String>) -> Self {
        Failure::Passing { why: why.into(), after: None }
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Failure::Lasting(e)
    }
}

/// Tries in a row that brought nothing.
pub struct Tries<'a> {
    patience: &'a Patience,
    failed: u32,
}

impl<'a> Tries<'a> {
    pub fn new(patience: &'a Patience) -> Self {
        Tries { patience, failed: 0 }
    }

    /// Something came.
    pub fn progressed(&mut self) {
        self.failed = 0;
    }

    /// Waits before another try, or answers the failure that was one too many.
    pub fn again(&mut self, failure: Failure) -> Try<()> {
        let (why, after) = match failure {
            Failure::Passing { why, after } => (why, after),
            other => return Err(other),
        };
        self.failed += 1;
        if self.failed >= self.patience.attempts {
            return Err(Failure::Passing { why, after });
        }
        let delay = delay(self.patience, self.failed, after);
        log::warn!("{why}; trying again in {:.1} s", delay.as_secs_f64());
        sleep(delay)?;
        Ok(())
    }
}

/// Doubles with each failure; what the server asked for counts if it is longer. Both are bounded.
fn delay(patience: &Patience, n_failed: u32, after: Option<Duration>) -> Duration {
    let doubled = patience.first_delay.saturating_mul(1 << n_failed.saturating_sub(1).min(20));
    doubled.max(after.unwrap_or_default()).min(patience.max_delay)
}

/// Ends early with Ctrl-C.
fn sleep(time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    loop {
        interrupt::check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patience() -> Patience {
        let (first_delay, max_delay) = (Duration::from_millis(1), Duration::from_millis(5));
        Patience { attempts: 3, first_delay, max_delay, ..Patience::default() }
    }

    #[test]
    fn waits_double_up_to_a_bound() {
        let ms = |n, after: Option<u64>| {
            delay(&patience(), n, after.map(Duration::from_millis)).as_millis()
        };
        let doubled = [1, 2, 3, 4, 40].map(|n| ms(n, None));
        assert_eq!(doubled, [1, 2, 4, 5, 5]);
        assert_eq!((ms(1, Some(3)), ms(3, Some(3)), ms(1, Some(1000))), (3, 4, 5));
    }

    #[test]
    fn only_failures_in_a_row_count() {
        let patience = patience();
        let mut tries = Tries::new(&patience);
        for _ in 0..10 {
            assert!(tries.again(Failure::passing("a")).is_ok());
            assert!(tries.again(Failure::passing("b")).is_ok());
            tries.progressed();
        }
        assert!(tries.again(Failure::passing("a")).is_ok());
        assert!(tries.again(Failure::passing("b")).is_ok());
        let end = tries.again(Failure::passing("the last")).unwrap_err();
        assert!(matches!(end, Failure::Passing { why, .. } if why == "the last"));
        let lasting = Failure::Lasting(Error::invalid("no"));
        assert!(Tries::new(&patience).again(lasting).is_err(), "at once");
    }
}
