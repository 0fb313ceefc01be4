//! Progress bars: on stderr, on a terminal only, none with `-q`.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal};

pub fn bar(label: &'static str, len: u64) -> ProgressBar {
    styled(len, "{prefix} [{bar:40}] {percent}% {eta}").with_prefix(label)
}

/// A bar of so many bytes; its message says of what.
pub fn bytes(len: u64) -> ProgressBar {
    styled(len, "{msg} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
}

fn styled(len: u64, template: &str) -> ProgressBar {
    let shown = io::stderr().is_terminal() && log::max_level() >= log::LevelFilter::Info;
    if !shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr());
    // Plain characters and no colour: the same picture on every terminal.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
