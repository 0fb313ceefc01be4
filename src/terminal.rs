//! Output to stderr: lines, and at most one progress bar. A line is never written into the bar, and
//! the bar vanishes when its work ends, whether it was done or failed.

use crate::units::size;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How much is said besides errors and what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Detail {
    /// Nothing: `-q`.
    Quiet,
    /// Warnings, bars and a line of figures.
    Normal,
    /// `-v`: what is said in short otherwise is said in full.
    Verbose,
}

/// The command line sets it; as a library moeba is quiet.
static DETAIL: AtomicU8 = AtomicU8::new(Detail::Quiet as u8);

/// The bar that is on the screen.
static DRAWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// A bar appears after this time only, so that short work draws nothing.
const DELAY: Duration = Duration::from_millis(300);

/// If no bar can be drawn, lines about progress come no faster than this.
const LINE_INTERVAL: Duration = Duration::from_millis(500);

pub fn set_detail(detail: Detail) {
    DETAIL.store(detail as u8, Ordering::Relaxed);
}

pub fn detail() -> Detail {
    match DETAIL.load(Ordering::Relaxed) {
        0 => Detail::Quiet,
        1 => Detail::Normal,
        _ => Detail::Verbose,
    }
}

pub fn is_quiet() -> bool {
    detail() == Detail::Quiet
}

/// Whether stderr takes colours: a terminal, and NO_COLOR (no-color.org) is not set.
pub fn has_colours() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    io::stderr().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// Runs `f`, which writes to the terminal, with no bar in its way.
pub fn without_bar<T>(f: impl FnOnce() -> T) -> T {
    let bar = drawn().clone();
    match bar {
        Some(bar) => bar.suspend(f),
        None => f(),
    }
}

/// A line on stderr. Nothing can be done for one that cannot be shown.
pub fn line(text: &str) {
    without_bar(|| {
        let _ = io::stderr().lock().write_all(format!("{text}\n").as_bytes());
    });
}

/// Takes the bar off the screen right before the process ends. It waits for no lock, which a
/// thread that is stuck might hold.
pub fn erase_bar() {
    let is_drawn = match DRAWN.try_lock() {
        Ok(bar) => bar.is_some(),
        Err(TryLockError::Poisoned(bar)) => bar.into_inner().is_some(),
        Err(TryLockError::WouldBlock) => false,
    };
    if is_drawn {
        let _ = io::stderr().write_all(b"\r\x1b[2K");
    }
}

fn drawn() -> MutexGuard<'static, Option<ProgressBar>> {
    // An option is whole at every moment.
    DRAWN.lock().unwrap_or_else(PoisonError::into_inner)
}

const TEMPLATE: &str = "{msg} [{bar:40}] {percent}% {eta}";

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shown {
    Nothing,
    /// A bar on a terminal.
    Bar,
    /// A line at every tenth.
    Lines,
}

impl Shown {
    fn on_stderr() -> Shown {
        if !is_quiet() && io::stderr().is_terminal() { Shown::Bar } else { Shown::Nothing }
    }
}

/// A progress bar, which goes when its last clone is dropped.
#[derive(Clone, Debug)]
pub struct Bar(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    bar: ProgressBar,
    shown: Shown,
    start: Instant,
    is_drawn: AtomicBool,
    /// When the last line was written, in milliseconds from the start.
    last_line: AtomicU64,
}

/// A bar for `len` units of work.
pub fn bar(label: &'static str, len: u64) -> Bar {
    Bar::new(label, len, TEMPLATE, Shown::on_stderr())
}

/// A bar for work that writes to stdout meanwhile: none if that is the same terminal, because a bar
/// has a line of its own.
pub fn bar_beside_output(label: &'static str, len: u64) -> Bar {
    let mut shown = Shown::on_stderr();
    if io::stdout().is_terminal() {
        shown = Shown::Nothing;
    }
    Bar::new(label, len, TEMPLATE, shown)
}

/// A bar for `len` bytes, of which `done` are there already. Where stderr is no terminal, a line
/// says how far it is at every tenth.
pub fn bytes(label: &'static str, len: u64, done: u64) -> Bar {
    let template = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let shown = match Shown::on_stderr() {
        Shown::Nothing if !is_quiet() => Shown::Lines,
        shown => shown,
    };
    let bar = Bar::new(label, len, template, shown);
    // The rate is that of what is still to come.
    bar.0.bar.set_position(done);
    bar.0.bar.tick();
    bar.0.bar.reset_eta();
    bar
}

impl Bar {
    fn new(label: &'static str, len: u64, template: &str, shown: Shown) -> Bar {
        let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::hidden());
        // Plain characters and no colour: the same picture on every terminal.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(label);
        let (is_drawn, last_line) = (AtomicBool::new(false), AtomicU64::new(0));
        Bar(Arc::new(Inner { bar, shown, start: Instant::now(), is_drawn, last_line }))
    }

    pub fn set_position(&self, done: u64) {
        self.advance(|bar| bar.set_position(done));
    }

    pub fn inc(&self, n: u64) {
        self.advance(|bar| bar.inc(n));
    }

    pub fn set_message(&self, label: &str) {
        self.0.bar.set_message(label.to_owned());
    }

    /// Takes the bar away and returns how long its work took.
    pub fn finish(self) -> Duration {
        self.0.start.elapsed()
    }

    fn advance(&self, change: impl FnOnce(&ProgressBar)) {
        let Inner { bar, shown, start, is_drawn, .. } = &*self.0;
        match shown {
            Shown::Nothing => {}
            Shown::Bar => {
                if start.elapsed() >= DELAY && !is_drawn.swap(true, Ordering::Relaxed) {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                    *drawn() = Some(bar.clone());
                }
                change(bar);
            }
            Shown::Lines => {
                let before = bar.position();
                change(bar);
                self.0.line(before, bar.position());
            }
        }
    }
}

impl Inner {
    fn line(&self, before: u64, after: u64) {
        let total = self.bar.length().unwrap_or_default().max(1);
        let tenth = |n: u64| u128::from(n) * 10 / u128::from(total);
        let now = self.start.elapsed().as_millis() as u64;
        let due = now - self.last_line.load(Ordering::Relaxed) >= LINE_INTERVAL.as_millis() as u64;
        if tenth(after) > tenth(before) && due {
            self.last_line.store(now, Ordering::Relaxed);
            let (percent, label) = (tenth(after) * 10, self.bar.message());
            line(&format!("{label} {percent} %: {} of {}", size(after), size(total)));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if *self.is_drawn.get_mut() {
            self.bar.finish_and_clear();
            *drawn() = None;
        }
    }
}
