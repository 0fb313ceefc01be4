//! Measured figures: peak memory, rates, and the flat JSON of `--stats`.

use super::new_file::write_text;
use crate::Result;
use serde_json::{Map, Value};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// The most memory this process has had resident, file pages included (VmHWM).
pub fn peak_rss_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

/// From here on the peak is that of what comes; where the system does not do it, it stays.
pub fn forget_peak_rss() {
    // proc_pid_clear_refs(5)
    if let Err(e) = fs::write("/proc/self/clear_refs", "5") {
        log::debug!("the peak of resident memory counts from the start: {e}");
    }
}

/// `n` a second; 0 for none in no time.
pub fn per_second(n: usize, time: Duration) -> f64 {
    if n == 0 { 0.0 } else { n as f64 / time.as_secs_f64().max(1e-9) }
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Keys of one level, in order, with their units in their names.
#[derive(Default)]
pub struct Stats(Map<String, Value>);

impl Stats {
    pub fn new() -> Self {
        Self::default()
    }

    /// Stores null for a number that is not finite, as when nothing was measured.
    pub fn number(&mut self, key: &str, value: f64) {
        self.0.insert(key.into(), value.into());
    }

    pub fn count(&mut self, key: &str, value: u64) {
        self.0.insert(key.into(), value.into());
    }

    pub fn value(&mut self, key: &str, value: Value) {
        self.0.insert(key.into(), value);
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.0.insert(key.into(), value.into());
    }

    /// Stores the values that every process has.
    pub fn process(&mut self) {
        self.0.insert("peak_rss_bytes".into(), peak_rss_bytes().into());
    }

    pub fn write(self, path: &Path) -> Result<()> {
        write_text(path, &format!("{:#}\n", Value::Object(self.0)))
    }
}
