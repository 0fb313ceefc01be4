//! `log` to stderr, and to a file besides if asked, as text or as JSON. stderr has warnings, and
//! more with -v; the file has at least what -v shows. RUST_LOG overrides the flags.

use super::global::{Global, LogFormat, VERSION};
use super::new_file::is_stream;
use super::out;
use super::outputs::kind::LOG_MAGIC;
use crate::chat::Clock;
use crate::terminal::{self, Detail};
use crate::{Error, Result};
use env_logger::Logger;
use log::{Level, LevelFilter, Record};
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

pub fn install(global: &Global) -> Result<()> {
    let (detail, level) = match (global.quiet, global.verbose) {
        (true, _) => (Detail::Quiet, LevelFilter::Error),
        (false, 0) => (Detail::Normal, LevelFilter::Warn),
        (false, 1) => (Detail::Verbose, LevelFilter::Info),
        (false, 2) => (Detail::Verbose, LevelFilter::Debug),
        (false, _) => (Detail::Verbose, LevelFilter::Trace),
    };
    terminal::set_detail(detail);
    let file = match &global.log_file {
        Some(path) => {
            let file = log_file(path)?;
            Some((filter(level.max(LevelFilter::Info)), file))
        }
        None => None,
    };
    let form = match global.log_format {
        LogFormat::Text => Form::Text { has_time: global.log_timestamps },
        LogFormat::Json => Form::Json,
    };
    let messages = Messages { stderr: filter(level), file, form };
    log::set_max_level(messages.max_level());
    let installed = log::set_boxed_logger(Box::new(messages));
    installed.map_err(|e| Error::invalid(format!("cannot set up messages: {e}")))
}

fn filter(level: LevelFilter) -> Logger {
    env_logger::Builder::new()
        .filter_level(LevelFilter::Warn.min(level))
        .filter_module("moeba", level)
        .parse_default_env()
        // Whatever RUST_LOG asks for: these would show bytes and addresses as they are sent, and
        // with them the token of a hub and signatures that open its files.
        .filter_module("ureq_proto::util", LevelFilter::Off)
        .filter_module("ureq::util", LevelFilter::Warn)
        .build()
}

/// A new log. Its first line says which moeba writes it, and that it is a log.
fn log_file(path: &Path) -> Result<File> {
    let open = match is_stream(path) {
        true => OpenOptions::new().append(true).open(path),
        false => File::create(path),
    };
    let mut file = open.map_err(|e| Error::io(path, e))?;
    let _ = writeln!(file, "{LOG_MAGIC}{}", *VERSION);
    Ok(file)
}

/// The destinations of messages, with their levels.
struct Messages {
    stderr: Logger,
    file: Option<(Logger, File)>,
    form: Form,
}

#[derive(Clone, Copy)]
enum Form {
    Text { has_time: bool },
    Json,
}

impl Messages {
    fn max_level(&self) -> LevelFilter {
        let file = self.file.as_ref().map_or(LevelFilter::Off, |(filter, _)| filter.filter());
        self.stderr.filter().max(file)
    }
}

impl log::Log for Messages {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        let in_file = self.file.as_ref().is_some_and(|(filter, _)| filter.enabled(metadata));
        self.stderr.enabled(metadata) || in_file
    }

    fn log(&self, record: &Record<'_>) {
        if self.stderr.matches(record) {
            terminal::line(&self.form.line(record, terminal::has_colours()));
        }
        if let Some((filter, file)) = &self.file
            && filter.matches(record)
        {
            // A log that cannot be written never stops the work.
            let _ = (&*file).write_all(format!("{}\n", self.form.line(record, false)).as_bytes());
        }
    }

    fn flush(&self) {}
}

impl Form {
    fn line(self, record: &Record<'_>, has_colours: bool) -> String {
        let text = record.args().to_string();
        match self {
            Form::Json => json!({
                "time": now(),
                "level": record.level().as_str().to_ascii_lowercase(),
                "target": record.target(),
                "message": text,
            })
            .to_string(),
            Form::Text { has_time: true } => {
                format!("{} {}", now(), of_text(record, &text, has_colours))
            }
            Form::Text { has_time: false } => of_text(record, &text, has_colours),
        }
    }
}

fn of_text(record: &Record<'_>, text: &str, has_colours: bool) -> String {
    let text = one_line(text.to_owned());
    match record.level() {
        level @ (Level::Error | Level::Warn | Level::Info) => {
            format!("{}{text}", out::kind(level, has_colours))
        }
        _ => format!("[{}] {text}", record.target()),
    }
}

/// The time, as `2026-11-29T07:15:45.123Z`.
fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = Clock::Second(since.as_secs() as i64).format("%FT%T");
    format!("{seconds}.{:03}Z", since.subsec_millis())
}

/// A message on one line. Clients and files put their texts into messages: a line's end of theirs
/// would begin a line that looks like ours, and an escape would reach the terminal.
fn one_line(text: String) -> String {
    let is_control =
        |c: char| (c.is_control() && c != '\t') || ['\u{2028}', '\u{2029}'].contains(&c);
    if !text.contains(is_control) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_control(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_have_what_programs_look_for() {
        let line = |form: Form| {
            let args = format_args!("a\n\"b\"");
            let mut record = Record::builder();
            record.level(Level::Warn).target("moeba::server").args(args);
            form.line(&record.build(), false)
        };
        let json: serde_json::Value = serde_json::from_str(&line(Form::Json)).unwrap();
        let [time, level, message] = ["time", "level", "message"].map(|key| &json[key]);
        assert_eq!((level, message), (&json!("warn"), &json!("a\n\"b\"")));
        let time = time.as_str().unwrap();
        assert!(time.len() == 24 && time.ends_with('Z') && &time[10..11] == "T", "{time}");
        assert_eq!(line(Form::Text { has_time: false }), "warning: a\\n\"b\"");
        assert_eq!(line(Form::Text { has_time: true })[24..], *" warning: a\\n\"b\"");
    }

    #[test]
    fn messages_stay_on_their_line() {
        let of = |text: &str| one_line(text.into());
        assert_eq!(of("a\tb äöü \u{1f600}"), "a\tb äöü \u{1f600}");
        assert_eq!(of("a\nINFO b\r\x1b[31m\0"), "a\\nINFO b\\r\\u{1b}[31m\\u{0}");
        assert_eq!(of("\u{85}\u{2028}x"), "\\u{85}\\u{2028}x");
    }
}
