//! The kinds of files that commands write, and how each is told from others.

use std::fs::File;
use std::io::Read;
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Gguf,
    /// The files of a split model, of which the name is the beginning.
    Shards,
    /// A file that is not there yet.
    New,
    /// `perplexity --kl-divergence-base`
    Probabilities,
    Npy,
    Trace,
    Profile,
    /// `--stats`
    Stats,
    Log,
    /// `trace train --report`
    Accuracies,
    /// The folder of `man --dir`, and what is in it.
    Manual,
    ManualPage,
    /// `serve --ready-file`
    Url,
}

/// A line that each file of `--stats` has, and few others.
const STATS_KEY: &str = "peak_rss_bytes";

/// More than any file of `--stats` has.
const STATS_BYTES_MAX: u64 = 1 << 20;

/// The first word of a log.
pub const LOG_MAGIC: &str = "moeba ";

impl Kind {
    /// With an article, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gguf | Kind::Shards => "a GGUF file",
            Kind::New => "a new file",
            Kind::Probabilities => "a file of probabilities",
            Kind::Npy => "a NumPy array",
            Kind::Trace => "a moeba trace",
            Kind::Profile => "a moeba profile",
            Kind::Stats => "a file of --stats",
            Kind::Log => "a log of moeba",
            Kind::Accuracies => "a report of trace train",
            Kind::Manual | Kind::ManualPage => "a manual page",
            Kind::Url => "a URL of a server",
        }
    }

    /// Whether a file of this kind can be written to this pipe or device, or, for `-`, to standard
    /// output. Others get their name when they are whole.
    pub fn may_stream(self, path: &Path) -> bool {
        match self {
            Kind::Stats | Kind::Accuracies => true,
            Kind::Log => path.as_os_str() != "-",
            _ => false,
        }
    }

    /// Whether an existing file is of this kind. An empty one is of any.
    pub fn fits(self, path: &Path) -> bool {
        let start = |n: u64| {
            let mut bytes = Vec::new();
            let read = File::open(path).and_then(|file| file.take(n).read_to_end(&mut bytes));
            read.map(|_| bytes)
        };
        let begins = |magic: &[u8]| start(magic.len() as u64).is_ok_and(|bytes| bytes == magic);
        let is_empty = std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == 0);
        is_empty
            || match self {
                Kind::Gguf | Kind::Shards => begins(b"GGUF"),
                Kind::New => false,
                Kind::Probabilities => begins(b"_logits_"),
                Kind::Npy => begins(b"\x93NUMPY"),
                Kind::Trace => begins(b"MOEBATRC"),
                Kind::Profile => begins(b"MOEBAPRO"),
                Kind::Log => begins(LOG_MAGIC.as_bytes()),
                Kind::Stats => start(STATS_BYTES_MAX).is_ok_and(|bytes| is_stats(&bytes)),
                Kind::Accuracies => begins(b"layer;predictor;measure;value\n"),
                Kind::Manual => false,
                Kind::Url => begins(b"http://") || begins(b"unix:"),
                Kind::ManualPage => begins(b".ie \\n(.g .ds Aq"),
            }
    }
}

fn is_stats(bytes: &[u8]) -> bool {
    let value: serde_json::Result<serde_json::Value> = serde_json::from_slice(bytes);
    value.is_ok_and(|value| value.get(STATS_KEY).is_some())
}
