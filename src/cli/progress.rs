//! Progress bars: on stderr, on a terminal only, none with `-q`.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal};

pub fn bar(label: &'static str, len: u64) -> ProgressBar {
    let shown = io::stderr().is_terminal() && log::max_level() >= log::LevelFilter::Info;
    if !shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr());
    // Plain characters and no colour: the same picture on every terminal.
    let style = ProgressStyle::with_template("{prefix} [{bar:40}] {percent}% {eta}");
    if let Ok(style) = style {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.with_prefix(label)
}
