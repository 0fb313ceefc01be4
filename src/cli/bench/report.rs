//! Results of `moeba bench` as a table, JSON or CSV, row by row as they come.

use super::super::args::SizeArgs;
use super::super::{global, out, report};
use super::table::Table;
use super::{Samples, Test, Work};
use crate::Result;
use crate::chat::Clock;
use crate::engine::Engine;
use crate::machine::{Rounds, Wall};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

const COMMIT: &str = match global::COMMIT {
    Some(commit) => commit,
    None => "unknown",
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Md,
    Json,
    Jsonl,
    Csv,
}

/// One line of the result.
pub struct Row {
    pub fields: Map<String, Value>,
    pub test: Test,
}

impl Row {
    /// llama-bench's keys in its order, then ours.
    pub fn new(
        engine: &Engine,
        sizes: &SizeArgs,
        test: Test,
        samples: Samples,
        work: &Work,
    ) -> Row {
        let gguf = engine.gguf();
        let n_params: u64 = gguf.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum();
        let size: u64 = gguf.tensors().iter().map(|t| t.n_bytes).sum();
        let n_tokens = test.n_tokens() as f64;
        let rates: Vec<f64> = samples.ns.iter().map(|&ns| n_tokens * 1e9 / ns as f64).collect();
        let ns: Vec<f64> = samples.ns.iter().map(|&ns| ns as f64).collect();
        let (avg_ts, stddev_ts) = mean_and_deviation(&rates);
        let (avg_ns, stddev_ns) = mean_and_deviation(&ns);
        let fields = json!({
            "build_commit": COMMIT,
            "build_version": env!("CARGO_PKG_VERSION"),
            "cpu_info": cpu_info(),
            "gpu_info": "",
            "backends": "CPU",
            "model_filename": gguf.path().display().to_string(),
            "model_type": model_type(engine),
            "model_size": size,
            "model_n_params": n_params,
            "n_batch": sizes.batch_size,
            "n_ubatch": engine.plan().n_ubatch,
            "n_threads": engine.n_threads(),
            "type_k": sizes.cache_type_k.to_string(),
            "type_v": sizes.cache_type_v.to_string(),
            "n_gpu_layers": 0,
            "n_prompt": test.n_prompt,
            "n_gen": test.n_gen,
            "n_depth": test.n_depth,
            "n_parallel": test.n_texts,
            "test_time": iso_time(samples.started),
            "avg_ns": avg_ns.round() as u64,
            "stddev_ns": stddev_ns.round() as u64,
            "avg_ts": avg_ts,
            "stddev_ts": stddev_ts,
            "expert_bytes_per_token": samples.traffic.expert_bytes,
            "weight_bytes_per_decoded_token": samples.traffic.decode_bytes,
            "cache_bytes_per_decoded_token": work.cache_bytes,
            "ops_per_token": work.ops,
            "peak_rss_bytes": samples.peak_rss_bytes,
        });
        let Value::Object(mut fields) = fields else { unreachable!("a map was written down") };
        let read = samples.traffic.decode_bytes.zip(work.cache_bytes);
        let read = read.map(|(weights, cache)| weights + cache);
        fields.extend(beside_walls((read, work.ops), (avg_ts, &rates), &samples.walls));
        let n_tokens = samples.ns.len() * test.n_tokens();
        let experts = report::fields(engine.plan(), &samples.experts, n_tokens);
        fields.extend(experts.into_iter().map(|(key, value)| (key.to_owned(), value)));
        for (key, values) in [("samples_ns", json!(samples.ns)), ("samples_ts", json!(rates))] {
            fields.insert(key.into(), values);
        }
        Row { fields, test }
    }

    pub fn number(&self, key: &str) -> Option<f64> {
        self.fields.get(key).and_then(Value::as_f64)
    }

    pub fn text(&self, key: &str) -> &str {
        self.fields.get(key).and_then(Value::as_str).unwrap_or_default()
    }
}

/// Rates of a test, of bytes read and of operations a token, the machine's, and the former as
/// shares of the latter: the median of each run's share in what the machine gave right before it.
fn beside_walls(
    (read, ops): (Option<f64>, f64),
    (avg_ts, rates): (f64, &[f64]),
    walls: &[Wall],
) -> Map<String, Value> {
    let reads = medians(walls, |wall| &wall.read_gb_per_second);
    let peaks = medians(walls, |wall| &wall.giga_ops_per_second);
    let share = |a_token: f64, most: &[f64]| {
        let of_runs = rates.iter().zip(most).map(|(rate, most)| a_token * rate / 1e9 / most);
        median(&of_runs.collect::<Vec<_>>())
    };
    let fields = json!({
        "read_gb_per_second": read.map(|read| read * avg_ts / 1e9),
        "giga_ops_per_second": ops * avg_ts / 1e9,
        "machine_read_gb_per_second": median(&reads),
        "machine_giga_ops_per_second": median(&peaks),
        "machine_is_steady": (!walls.is_empty()).then(|| walls.iter().all(Wall::is_steady)),
        "read_share": read.and_then(|read| share(read, &reads)),
        "ops_share": share(ops, &peaks),
    });
    let Value::Object(fields) = fields else { unreachable!("a map was written down") };
    fields
}

/// One of the walls as it was each time; nothing where it could not be measured.
fn medians(walls: &[Wall], of: impl Fn(&Wall) -> &Option<Rounds>) -> Vec<f64> {
    let of_each = walls.iter().map(|wall| of(wall).as_ref().map(Rounds::median));
    of_each.collect::<Option<_>>().unwrap_or_default()
}

fn median(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| Rounds::sorted(values.to_vec()).median())
}

/// Prints rows as they come.
pub struct Report {
    format: Format,
    table: Table,
    n_rows: usize,
}

impl Report {
    pub fn new(format: Format, tests: &[Test], sizes: &[SizeArgs]) -> Self {
        Self { format, table: Table::new(tests, sizes), n_rows: 0 }
    }

    pub fn add(&mut self, row: &Row) -> Result<()> {
        let first = self.n_rows == 0;
        self.n_rows += 1;
        match self.format {
            Format::Md if first => {
                out::line(&format!("{}\n{}", self.table.head(row), self.table.line(row)))
            }
            Format::Md => out::line(&self.table.line(row)),
            Format::Json => {
                let lead = if first { "[\n" } else { ",\n" };
                let text = format!("{:#}", Value::Object(row.fields.clone()));
                out::write(format!("{lead}  {}", text.replace('\n', "\n  ")).as_bytes())
            }
            Format::Jsonl => out::line(&Value::Object(row.fields.clone()).to_string()),
            Format::Csv => {
                let head = row.fields.keys().filter(|key| !key.starts_with("samples_"));
                let head = head.cloned().collect::<Vec<_>>().join(",");
                let lead = if first { format!("{head}\n") } else { String::new() };
                out::line(&format!("{lead}{}", csv_line(row)))
            }
        }
    }

    pub fn finish(self) -> Result<()> {
        match self.format {
            Format::Json if self.n_rows == 0 => out::line("[]"),
            Format::Json => out::line("\n]"),
            Format::Md => out::line(&format!("\nbuild: {} ({COMMIT})", env!("CARGO_PKG_VERSION"))),
            _ => Ok(()),
        }
    }
}

/// Every field but the samples, quoted as llama-bench does.
fn csv_line(row: &Row) -> String {
    let fields = row.fields.iter().filter(|(key, _)| !key.starts_with("samples_"));
    let quoted = fields.map(|(_, value)| match value {
        Value::String(text) => format!("\"{}\"", text.replace('"', "\"\"")),
        Value::Null => "\"\"".into(),
        // A comma would be one even in quotes to many a reader.
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(Value::to_string).collect();
            format!("\"{}\"", items.join(" "))
        }
        other => format!("\"{other}\""),
    });
    quoted.collect::<Vec<_>>().join(",")
}

/// Mean and sample standard deviation, 0 for a single value.
fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    if values.len() < 2 {
        return (mean, 0.0);
    }
    let squares: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    (mean, (squares / (n - 1.0)).sqrt())
}

/// Architecture, size label and quantisation, as far as the file says.
fn model_type(engine: &Engine) -> String {
    let gguf = engine.gguf();
    let text = |key: &str| gguf.get(key).and_then(|v| v.as_bytes()).map(String::from_utf8_lossy);
    let parts = [text("general.architecture"), text("general.size_label")];
    let mut out = parts.into_iter().flatten().collect::<Vec<_>>();
    let file_type = gguf.get("general.file_type").and_then(|v| v.as_u64());
    out.extend(file_type.and_then(file_type_name).map(Into::into));
    out.join(" ")
}

/// llama.cpp's numbers of the usual mixes.
fn file_type_name(number: u64) -> Option<&'static str> {
    Some(match number {
        0 => "all F32",
        1 => "F16",
        2 => "Q4_0",
        7 => "Q8_0",
        14 => "Q4_K - Small",
        15 => "Q4_K - Medium",
        16 => "Q5_K - Small",
        17 => "Q5_K - Medium",
        18 => "Q6_K",
        32 => "BF16",
        _ => return None,
    })
}

fn cpu_info() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name"));
    name.map(|n| n.trim_start_matches([' ', '\t', ':']).to_owned()).unwrap_or_default()
}

/// `2026-11-21T02:00:00Z`
fn iso_time(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Clock::Second(seconds as i64).format("%FT%TZ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        let at = |s| iso_time(UNIX_EPOCH + std::time::Duration::from_secs(s));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_795_220_096 + 7200), "2026-11-21T02:14:56Z");
    }

    #[test]
    fn a_single_sample_has_no_deviation() {
        assert_eq!(mean_and_deviation(&[3.0]), (3.0, 0.0));
        assert_eq!(mean_and_deviation(&[1.0, 3.0]), (2.0, 2f64.sqrt()));
    }
}
