//! The machine that a replay simulates: one of the data sheets, or one that `moeba doctor --json`
//! has measured.

use super::super::values::Parsed;
use crate::trace::{CostModel, Device, LinkCosts, MeasuredMachine, SimOptions, Source};
use crate::{Error, Result};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// `--machine`
#[derive(Clone, Debug)]
pub enum MachineArg {
    Named(String),
    /// A report of `moeba doctor --json`.
    File(PathBuf),
}

/// A name that is known, or a file whose name ends as doctor's should.
pub fn machine_or_file(text: &str) -> Parsed<MachineArg> {
    if text.ends_with(".json") {
        return Ok(MachineArg::File(text.into()));
    }
    let name = known(text, Device::names());
    name.map(MachineArg::Named)
        .map_err(|e| format!("{e}, or a file of `moeba doctor --json` (….json)"))
}

/// A machine whose file has been read.
pub enum Machine {
    Named(String),
    Measured(PathBuf, MeasuredMachine),
}

/// A name that is one of `names`.
pub fn known<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Parsed<String> {
    let names: Vec<&str> = names.collect();
    if names.contains(&text) {
        Ok(text.into())
    } else {
        Err(format!("give one of {}", names.join(", ")))
    }
}

impl MachineArg {
    pub fn read(&self) -> Result<Machine> {
        Ok(match self {
            MachineArg::Named(name) => Machine::Named(name.clone()),
            MachineArg::File(path) => Machine::Measured(path.clone(), measured(path)?),
        })
    }
}

impl Machine {
    /// A replay on it; see `Source::options`.
    pub fn options(&self, source: &Source, policy: &str, share: f64) -> SimOptions {
        match self {
            Machine::Named(name) => source.options(name, policy, share),
            Machine::Measured(_, machine) => {
                let any = Device::names().next().expect("there are some");
                let options = source.options(any, policy, share);
                let k = source.trace.header().k;
                let costs = CostModel::of_machine(machine, &options.geometry, k);
                SimOptions { costs, ..options }
            }
        }
    }

    /// For the setting of a table.
    pub fn name(&self) -> String {
        match self {
            Machine::Named(name) => name.clone(),
            Machine::Measured(path, _) => format!("the machine of {}", path.display()),
        }
    }
}

fn measured(path: &Path) -> Result<MeasuredMachine> {
    let text = fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    let found: Value = serde_json::from_str(&text).map_err(|e| {
        Error::invalid(format!("{}: not a report of moeba doctor --json: {e}", path.display()))
    })?;
    let positive = |value: Option<&Value>, field: &str| {
        let number = value.and_then(Value::as_f64).filter(|n| *n > 0.0);
        let got = || value.map_or("nothing".into(), Value::to_string);
        number.ok_or_else(|| Error::format(path, field, "a number above 0", got()))
    };
    // Of all measurements the one with most threads, and of those the fastest.
    let most = |list: &Value, rate: &str, fits: &dyn Fn(&Value) -> bool| {
        let rows = list.as_array().into_iter().flatten().filter(|row| fits(row));
        let rate = |row: &Value| row[rate].as_f64().unwrap_or(0.0);
        let key = |row: &&Value| (row["threads"].as_u64(), rate(row));
        let order = |a: &&Value, b: &&Value| {
            let (a, b) = (key(a), key(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        };
        rows.max_by(order).cloned().unwrap_or_default()
    };
    // Kernels of "avx512" use its units "avx512bw" and "avx512vnni", whichever is faster.
    let kernels = found["processor"]["kernels"].as_str().unwrap_or("?");
    let is_own = |row: &Value| row["unit"].as_str().is_some_and(|unit| unit.starts_with(kernels));
    let read = most(&found["memory"]["read"], "gb_per_second", &|_| true);
    let own = most(&found["integer_peak"], "giga_ops_per_second", &is_own);
    let disk = &found["disk"];
    let bytes_per_second = 1e9 * positive(disk.get("gb_per_second"), "disk.gb_per_second")?;
    let latency_ns = 1e3 * positive(disk.get("latency_us"), "disk.latency_us")?;
    let depth = positive(disk.get("depth"), "disk.depth")? as usize;
    let read = positive(read.get("gb_per_second"), "memory.read gb_per_second")?;
    let ops = positive(own.get("giga_ops_per_second"), "integer_peak giga_ops_per_second")?;
    Ok(MeasuredMachine {
        link: LinkCosts::new(bytes_per_second, latency_ns as u64, depth.max(1)),
        memory_bytes_per_second: 1e9 * read,
        ops_per_second: 1e9 * ops,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> std::result::Result<MeasuredMachine, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        measured(file.path()).map_err(|e| e.to_string())
    }

    const FOUND: &str = r#"{"processor": {"kernels": "avx2"},
        "memory": {"read": [{"threads": 1, "gb_per_second": 12.0},
                            {"threads": 2, "gb_per_second": 18.0}]},
        "integer_peak": [{"unit": "avx2", "threads": 1, "giga_ops_per_second": 250.0},
                         {"unit": "avx2", "threads": 2, "giga_ops_per_second": 500.0},
                         {"unit": "avx512vnni", "threads": 2, "giga_ops_per_second": 1400.0}],
        "disk": {"gb_per_second": 2.0, "latency_us": 80.0, "depth": 32}}"#;

    #[test]
    fn all_threads_of_the_kernels_own_unit_count() {
        let wide = FOUND.replace("\"kernels\": \"avx2\"", "\"kernels\": \"avx512\"");
        assert_eq!(read(&wide).unwrap().ops_per_second, 1400e9);
        let machine = read(FOUND).unwrap();
        assert_eq!(machine.link, LinkCosts::new(2e9, 80_000, 32));
        assert_eq!((machine.memory_bytes_per_second, machine.ops_per_second), (18e9, 500e9));
    }

    #[test]
    fn what_was_not_measured_is_named() {
        let without_disk = FOUND.replace("\"gb_per_second\": 2.0", "\"why_not\": \"no\"");
        let cases = [
            (without_disk.as_str(), "disk.gb_per_second: expected a number above 0, got nothing"),
            (&FOUND.replace("18.0", "-1"), "memory.read gb_per_second: expected"),
            (&FOUND.replace("\"kernels\": \"avx2\"", "\"kernels\": \"x\""), "integer_peak"),
            ("[]", "disk"),
            ("no json", "not a report of moeba doctor"),
        ];
        for (text, expected) in cases {
            let why = read(text).unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn a_machine_is_a_name_or_a_file() {
        assert!(matches!(machine_or_file("a100"), Ok(MachineArg::Named(_))));
        assert!(matches!(machine_or_file("x/here.json"), Ok(MachineArg::File(_))));
        assert!(machine_or_file("a1000").unwrap_err().contains("json"));
    }
}
