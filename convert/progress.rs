//! How far a long write has come: a bar on a terminal, a line at every tenth elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    total: u64,
    done: AtomicU64,
    start: Instant,
    /// When the last line was printed, in milliseconds from the start.
    last_line: AtomicU64,
    bar: Option<ProgressBar>,
}

/// Lines come no faster than this, so that small files stay quiet.
const LINE_INTERVAL: Duration = Duration::from_millis(500);

const TEMPLATE: &str = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";

impl Progress {
    /// `what` is done to `total` bytes. Silent where `info` messages are.
    pub fn new(what: &'static str, total: u64) -> Progress {
        let shown = log::log_enabled!(log::Level::Info) && std::io::stderr().is_terminal();
        let bar = shown.then(|| {
            let style = ProgressStyle::with_template(TEMPLATE);
            let bar = ProgressBar::new(total).with_message(what);
            match style {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        let (done, last_line) = (AtomicU64::new(0), AtomicU64::new(0));
        Progress { what, total, done, start: Instant::now(), last_line, bar }
    }

    pub fn add(&self, n_bytes: u64) {
        let before = self.done.fetch_add(n_bytes, Ordering::Relaxed);
        match &self.bar {
            Some(bar) => bar.inc(n_bytes),
            None => self.line(before, before + n_bytes),
        }
    }

    fn line(&self, before: u64, after: u64) {
        let tenth = |n: u64| u128::from(n) * 10 / u128::from(self.total.max(1));
        let now = self.start.elapsed().as_millis() as u64;
        let due = now - self.last_line.load(Ordering::Relaxed) >= LINE_INTERVAL.as_millis() as u64;
        if tenth(after) > tenth(before) && due {
            self.last_line.store(now, Ordering::Relaxed);
            let percent = tenth(after) * 10;
            let (done, total) = (HumanBytes(after), HumanBytes(self.total));
            log::info!("{} {percent} %: {done} of {total}", self.what);
        }
    }

    /// Takes the bar away and answers how long it took.
    pub fn finish(self) -> Duration {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.start.elapsed()
    }
}
