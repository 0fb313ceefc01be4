//! Results of `moeba bench` as a table, JSON or CSV, row by row as they come.

use super::super::args::BatchArgs;
use super::super::{out, report};
use super::{Samples, Test, Work};
use crate::Result;
use crate::engine::Engine;
use crate::machine::{Rounds, Wall};
use crate::units::size;
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Md,
    Json,
    Jsonl,
    Csv,
}

/// One line of the result.
pub struct Row {
    fields: Map<String, Value>,
    test: Test,
}

impl Row {
    /// llama-bench's keys in its order, then ours.
    pub fn new(
        engine: &Engine,
        batch: &BatchArgs,
        test: Test,
        samples: Samples,
        work: &Work,
    ) -> Row {
        let gguf = engine.gguf();
        let n_params: u64 = gguf.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum();
        let size: u64 = gguf.tensors().iter().map(|t| t.n_bytes).sum();
        let n_tokens = (test.n_prompt + test.n_gen) as f64;
        let rates: Vec<f64> = samples.ns.iter().map(|&ns| n_tokens * 1e9 / ns as f64).collect();
        let ns: Vec<f64> = samples.ns.iter().map(|&ns| ns as f64).collect();
        let (avg_ts, stddev_ts) = mean_and_deviation(&rates);
        let (avg_ns, stddev_ns) = mean_and_deviation(&ns);
        let fields = json!({
            "build_commit": option_env!("MOEBA_COMMIT").unwrap_or("unknown"),
            "build_version": env!("CARGO_PKG_VERSION"),
            "cpu_info": cpu_info(),
            "gpu_info": "",
            "backends": "CPU",
            "model_filename": gguf.path().display().to_string(),
            "model_type": model_type(engine),
            "model_size": size,
            "model_n_params": n_params,
            "n_batch": batch.batch_size,
            "n_ubatch": engine.plan().n_ubatch,
            "n_threads": engine.n_threads(),
            "type_k": batch.cache_type_k.to_string(),
            "type_v": batch.cache_type_v.to_string(),
            "n_gpu_layers": 0,
            "n_prompt": test.n_prompt,
            "n_gen": test.n_gen,
            "n_depth": test.n_depth,
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
        let n_tokens = samples.ns.len() * (test.n_prompt + test.n_gen);
        let experts = report::fields(engine.plan(), &samples.experts, n_tokens);
        fields.extend(experts.into_iter().map(|(key, value)| (key.to_owned(), value)));
        for (key, values) in [("samples_ns", json!(samples.ns)), ("samples_ts", json!(rates))] {
            fields.insert(key.into(), values);
        }
        Row { fields, test }
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.fields.get(key).and_then(Value::as_f64)
    }

    fn text(&self, key: &str) -> &str {
        self.fields.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// Columns of the table: those about experts only where any are streamed.
    fn columns(&self) -> impl Iterator<Item = &'static Column> {
        let streamed = self.number("expert_budget_bytes").is_some();
        MD_COLUMNS.iter().chain(MD_EXPERT_COLUMNS.iter().filter(move |_| streamed))
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
    n_rows: usize,
}

impl Report {
    pub fn new(format: Format) -> Self {
        Self { format, n_rows: 0 }
    }

    pub fn add(&mut self, row: &Row) -> Result<()> {
        let first = self.n_rows == 0;
        self.n_rows += 1;
        match self.format {
            Format::Md if first => out::line(&format!("{}\n{}", md_head(row), md_line(row))),
            Format::Md => out::line(&md_line(row)),
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
            _ => Ok(()),
        }
    }
}

/// Head, width, `:` for right-aligned or `-`, and what a row has there.
type Column = (&'static str, usize, &'static str, fn(&Row) -> String);

const MD_COLUMNS: [Column; 12] = [
    ("model", 30, "-", |row| row.text("model_type").to_owned()),
    ("size", 10, ":", |row| size(row.number("model_size").unwrap_or_default() as u64)),
    ("params", 10, ":", |row| params_text(row.number("model_n_params").unwrap_or_default())),
    ("backend", 7, "-", |row| row.text("backends").to_owned()),
    ("threads", 7, ":", |row| row.number("n_threads").unwrap_or_default().to_string()),
    ("test", 15, ":", |row| test_name(row.test)),
    ("t/s", 20, ":", |row| {
        let number = |key| row.number(key).unwrap_or_default();
        format!("{:.2} ± {:.2}", number("avg_ts"), number("stddev_ts"))
    }),
    ("expert MiB/token", 16, ":", |row| {
        optional(row.number("expert_bytes_per_token").map(|b| b / f64::from(1 << 20)))
    }),
    ("GB/s", 6, ":", |row| optional(row.number("read_gb_per_second"))),
    ("of wall", 7, ":", |row| percent(row.number("read_share"))),
    ("GOP/s", 7, ":", |row| optional(row.number("giga_ops_per_second"))),
    ("of peak", 7, ":", |row| percent(row.number("ops_share"))),
];

const MD_EXPERT_COLUMNS: [Column; 4] = [
    ("budget MiB", 10, ":", |row| {
        optional(row.number("expert_budget_bytes").map(|b| b / f64::from(1 << 20)))
    }),
    ("hit %", 6, ":", |row| optional(row.number("hit_rate").map(|rate| 100.0 * rate))),
    ("stall ms/t", 10, ":", |row| optional(row.number("stall_ms_per_token"))),
    ("disk GB/s", 9, ":", |row| optional(row.number("disk_gb_per_second"))),
];

fn optional(value: Option<f64>) -> String {
    value.map_or("-".into(), |v| format!("{v:.2}"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share))
}

fn md_head(row: &Row) -> String {
    let rules = row.columns().map(|(_, width, align, _)| {
        let rule = "-".repeat(width - 1);
        format!(" {rule}{align} ")
    });
    let heads = md_cells(row, |(head, ..)| (*head).to_owned());
    format!("{heads}\n|{}|", rules.collect::<Vec<_>>().join("|"))
}

fn md_line(row: &Row) -> String {
    md_cells(row, |(.., value)| value(row))
}

fn md_cells(row: &Row, text: impl Fn(&Column) -> String) -> String {
    let cells = row.columns().map(|column| match column {
        (_, width, ":", _) => format!(" {:>width$} ", text(column)),
        (_, width, ..) => format!(" {:<width$} ", text(column)),
    });
    format!("|{}|", cells.collect::<Vec<_>>().join("|"))
}

/// `pp512`, `tg128`, `pp512+tg128`, with ` @ d1024` at a depth.
fn test_name(test: Test) -> String {
    let name = match (test.n_prompt, test.n_gen) {
        (p, 0) => format!("pp{p}"),
        (0, n) => format!("tg{n}"),
        (p, n) => format!("pp{p}+tg{n}"),
    };
    if test.n_depth > 0 { format!("{name} @ d{}", test.n_depth) } else { name }
}

fn params_text(n: f64) -> String {
    if n >= 1e9 { format!("{:.2} B", n / 1e9) } else { format!("{:.2} M", n / 1e6) }
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
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a day counted from 1970-01-01. Years are counted from March, so that the
/// leap day comes last; 146,097 days are 400 years.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // 0000-03-01
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + next, month, date)
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

    #[test]
    fn streamed_experts_have_columns() {
        let row = |budget: Value| {
            let fields = json!({"expert_budget_bytes": budget, "hit_rate": 0.5, "avg_ts": 2.0});
            let Value::Object(fields) = fields else { unreachable!() };
            Row { fields, test: Test { n_prompt: 0, n_gen: 8, n_depth: 0 } }
        };
        let (streamed, in_place) = (row(json!(3 << 20)), row(Value::Null));
        for row in [&streamed, &in_place] {
            let table = format!("{}\n{}", md_head(row), md_line(row));
            let mut widths = table.lines().map(|line| line.chars().count());
            let width = widths.next().unwrap();
            assert!(widths.all(|w| w == width), "{table}");
        }
        let cells = md_line(&streamed);
        assert!(cells.ends_with("|       3.00 |  50.00 |          - |         - |"), "{cells}");
        assert!(md_head(&streamed).contains("| disk GB/s |"));
        assert!(!md_head(&in_place).contains("hit %"));
    }

    #[test]
    fn tests_are_named_as_llama_bench_names_them() {
        let name = |n_prompt, n_gen, n_depth| test_name(Test { n_prompt, n_gen, n_depth });
        assert_eq!(name(512, 0, 0), "pp512");
        assert_eq!(name(0, 128, 64), "tg128 @ d64");
        assert_eq!(name(8, 4, 0), "pp8+tg4");
    }
}
