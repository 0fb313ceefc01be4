//! Flags of all subcommands, and the version that `--version` and logs show.

use super::values;
use std::path::PathBuf;
use std::sync::LazyLock;

/// Flags that every subcommand takes.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Messages")]
pub struct Global {
    /// Say more on stderr: -v what is loaded and all figures, -vv and -vvv what happens inside
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Show errors only, and no progress bars
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Write messages to this file as well, at least those of -v
    #[arg(long, global = true, value_name = "FILE", env = "MOEBA_LOG_FILE")]
    pub log_file: Option<PathBuf>,
    /// Form of messages: text, or json for an object a line with time, level, target and message
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text")]
    #[arg(env = "MOEBA_LOG_FORMAT", hide_short_help = true)]
    pub log_format: LogFormat,
    /// Begin messages of text with the time
    #[arg(long, global = true, env = "MOEBA_LOG_TIMESTAMPS", hide_short_help = true)]
    #[arg(value_parser = values::boolean)]
    pub log_timestamps: bool,
    /// Replace an existing output file whatever is in it; inputs of the command always stay
    #[arg(long, global = true, help_heading = "Files")]
    pub force: bool,
}

/// The form of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// The commit of a release: the clone's (build.rs), or the value of MOEBA_COMMIT.
pub const COMMIT: Option<&str> = option_env!("MOEBA_COMMIT");

/// The version, the commit of a release, and the system.
pub static VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = COMMIT.map(|commit| format!(" ({commit})")).unwrap_or_default();
    let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
    format!("{}{commit} {arch}-{os}", env!("CARGO_PKG_VERSION"))
});
