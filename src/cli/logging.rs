//! `log` to stderr, and to a file besides if asked. Reports for people are `info`, shown unless
//! `-q`; RUST_LOG overrides the flags.

use super::Global;
use crate::{Error, Result};
use std::fs::File;
use std::io::{self, Write};

pub fn install(global: &Global) -> Result<()> {
    let level = match (global.quiet, global.verbose) {
        (true, _) => log::LevelFilter::Error,
        (false, 0) => log::LevelFilter::Info,
        (false, 1) => log::LevelFilter::Debug,
        (false, _) => log::LevelFilter::Trace,
    };
    let file = match &global.log_file {
        Some(path) => Some(File::create(path).map_err(|e| Error::io(path, e))?),
        None => None,
    };
    env_logger::Builder::new()
        .filter_module("moeba", level)
        .filter_level(log::LevelFilter::Warn.min(level))
        .parse_default_env()
        // Whatever RUST_LOG asks for: these would show bytes and addresses as they are sent, and
        // with them the token of a hub and signatures that open its files.
        .filter_module("ureq_proto::util", log::LevelFilter::Off)
        .filter_module("ureq::util", log::LevelFilter::Debug)
        .target(env_logger::Target::Pipe(Box::new(Tee { file })))
        .format(|out, record| match record.level() {
            log::Level::Info => writeln!(out, "{}", record.args()),
            log::Level::Warn => writeln!(out, "warning: {}", record.args()),
            log::Level::Error => writeln!(out, "error: {}", record.args()),
            _ => writeln!(out, "[{}] {}", record.target(), record.args()),
        })
        .init();
    Ok(())
}

/// stderr and the log file. A log that cannot be written never stops the work.
struct Tee {
    file: Option<File>,
}

impl Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().lock().write_all(bytes);
        if let Some(file) = &mut self.file {
            let _ = file.write_all(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
