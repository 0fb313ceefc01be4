//! Rows as a table that fits a terminal of 120 columns: what is the same in all of them stands
//! above it. Programs read the other formats, which have everything.

use super::super::args::SizeArgs;
use super::Test;
use super::report::Row;
use crate::units::size;

/// Head, least width, and what a row has there.
type Column = (&'static str, usize, fn(&Row) -> String);

const COLUMNS: [Column; 3] = [
    ("threads", 7, |row| row.number("n_threads").unwrap_or_default().to_string()),
    ("t/s", 18, |row| {
        let number = |key| row.number(key).unwrap_or_default();
        format!("{:.2} ± {:.2}", number("avg_ts"), number("stddev_ts"))
    }),
    ("MiB/token", 9, |row| optional(row.number("expert_bytes_per_token").map(mib))),
];

/// Columns for sizes of which there are several.
const SIZES: [Column; 4] = [
    ("n_batch", 7, |row| row.number("n_batch").unwrap_or_default().to_string()),
    ("n_ubatch", 8, |row| row.number("n_ubatch").unwrap_or_default().to_string()),
    ("type_k", 6, |row| row.text("type_k").to_owned()),
    ("type_v", 6, |row| row.text("type_v").to_owned()),
];

/// Columns for experts in place: the rates as shares of the machine's limits.
const WALLS: [Column; 4] = [
    ("GB/s", 6, |row| optional(row.number("read_gb_per_second"))),
    ("of wall", 7, |row| percent(row.number("read_share"))),
    ("GOP/s", 8, |row| optional(row.number("giga_ops_per_second"))),
    ("of peak", 7, |row| percent(row.number("ops_share"))),
];

/// Columns for streamed experts: the cost of streaming.
const EXPERTS: [Column; 4] = [
    ("budget MiB", 10, |row| optional(row.number("expert_budget_bytes").map(mib))),
    ("hit %", 6, |row| optional(row.number("hit_rate").map(|rate| 100.0 * rate))),
    ("stall ms/t", 10, |row| optional(row.number("stall_ms_per_token"))),
    ("disk GB/s", 9, |row| optional(row.number("disk_gb_per_second"))),
];

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

fn optional(value: Option<f64>) -> String {
    value.map_or("-".into(), |v| format!("{v:.2}"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share))
}

pub struct Table {
    /// The longest test's name.
    name_width: usize,
    /// Whether each of [`SIZES`] has a column.
    has_sizes: [bool; 4],
}

impl Table {
    pub fn new(tests: &[Test], sizes: &[SizeArgs]) -> Table {
        let widths = tests.iter().map(|test| name(*test).len());
        let first = sizes.first();
        let differ = |is_same: fn(&SizeArgs, &SizeArgs) -> bool| {
            sizes.iter().any(|other| first.is_some_and(|first| !is_same(first, other)))
        };
        let has_sizes = [
            differ(|a, b| a.batch_size == b.batch_size),
            differ(|a, b| a.ubatch_size == b.ubatch_size),
            differ(|a, b| a.cache_type_k == b.cache_type_k),
            differ(|a, b| a.cache_type_v == b.cache_type_v),
        ];
        Table { name_width: widths.max().unwrap_or(0).max("test".len()), has_sizes }
    }

    fn columns(&self, row: &Row) -> impl Iterator<Item = &'static Column> {
        let streamed = row.number("expert_budget_bytes").is_some();
        let sizes = SIZES.iter().zip(self.has_sizes).filter(|(_, is_shown)| *is_shown);
        let others = COLUMNS.iter().chain(if streamed { &EXPERTS } else { &WALLS });
        sizes.map(|(column, _)| column).chain(others)
    }

    /// The lines above the first row: the model with its backends, and the columns' heads.
    pub fn head(&self, row: &Row) -> String {
        let bytes = size(row.number("model_size").unwrap_or_default() as u64);
        let params = params(row.number("model_n_params").unwrap_or_default());
        let model = [row.text("model_type"), &bytes, &params, row.text("backends")];
        let model: Vec<&str> = model.into_iter().filter(|text| !text.is_empty()).collect();
        let rules = self.cells(row, "", |_| String::new()).replace(' ', "-");
        // The first column is text, the others are numbers: `:` aligns them to the right.
        let mut rules: Vec<String> = rules.split('|').map(str::to_owned).collect();
        let n = rules.len();
        for rule in &mut rules[2..n - 1] {
            rule.replace_range(rule.len() - 1.., ":");
        }
        let heads = self.cells(row, "test", |(head, ..)| (*head).to_owned());
        format!("{}\n\n{heads}\n{}", model.join(", "), rules.join("|"))
    }

    pub fn line(&self, row: &Row) -> String {
        self.cells(row, &name(row.test), |(.., value)| value(row))
    }

    fn cells(&self, row: &Row, first: &str, text: impl Fn(&Column) -> String) -> String {
        let cell = |column: &Column| format!(" {:>1$} |", text(column), column.1);
        let cells: String = self.columns(row).map(cell).collect();
        format!("| {first:<0$} |{cells}", self.name_width)
    }
}

/// `pp512`, `tg128`, `pp512+tg128`, with ` x4` for four texts at once and ` @ d1024` at a depth.
fn name(test: Test) -> String {
    let mut name = match (test.n_prompt, test.n_gen) {
        (p, 0) => format!("pp{p}"),
        (0, n) => format!("tg{n}"),
        (p, n) => format!("pp{p}+tg{n}"),
    };
    if test.n_texts > 1 {
        name += &format!(" x{}", test.n_texts);
    }
    if test.n_depth > 0 {
        name += &format!(" @ d{}", test.n_depth);
    }
    name
}

fn params(n: f64) -> String {
    if n >= 1e9 {
        format!("{:.2} B parameters", n / 1e9)
    } else {
        format!("{:.2} M parameters", n / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn row(budget: Value) -> Row {
        let fields = json!({
            "model_type": "qwen3moe 30B.A3B Q4_K - Medium",
            "model_size": 17u64 << 30,
            "model_n_params": 30.53e9,
            "backends": "CPU",
            "n_threads": 128,
            "avg_ts": 12345.67,
            "stddev_ts": 123.45,
            "expert_bytes_per_token": 1234.5 * 1048576.0,
            "read_gb_per_second": 123.45,
            "read_share": 1.02,
            "giga_ops_per_second": 12345.67,
            "ops_share": 0.5,
            "expert_budget_bytes": budget,
            "hit_rate": 0.5,
            "stall_ms_per_token": 1234.5,
        });
        let Value::Object(fields) = fields else { unreachable!("a map was written down") };
        Row { fields, test: Test { n_prompt: 16384, n_gen: 1024, n_depth: 16384, n_texts: 1 } }
    }

    #[test]
    fn tables_fit_a_terminal_and_have_straight_columns() {
        for row in [row(json!(300u64 << 30)), row(Value::Null)] {
            let table = Table::new(&[row.test], &[]);
            let text = format!("{}\n{}", table.head(&row), table.line(&row));
            let lines: Vec<&str> = text.lines().collect();
            let model = "qwen3moe 30B.A3B Q4_K - Medium, 17.00 GiB, 30.53 B parameters, CPU";
            assert_eq!(lines[..2], [model, ""]);
            let bars = |line: &str| -> Vec<usize> {
                line.chars().enumerate().filter(|(_, c)| *c == '|').map(|(at, _)| at).collect()
            };
            for line in &lines[2..] {
                assert_eq!(bars(line), bars(lines[2]), "{text}");
                assert!(line.chars().count() <= 120, "{text}");
            }
            assert!(lines[3].starts_with("|--------") && lines[3].ends_with("-:|"), "{text}");
        }
    }

    #[test]
    fn streamed_experts_have_columns_of_their_own() {
        let (streamed, in_place) = (row(json!(3 << 20)), row(Value::Null));
        let table = Table::new(&[streamed.test], &[]);
        let cells = table.line(&streamed);
        assert!(cells.ends_with("|       3.00 |  50.00 |    1234.50 |         - |"), "{cells}");
        assert!(table.head(&streamed).contains("| disk GB/s |"));
        assert!(table.head(&in_place).contains("| of wall |"));
        assert!(!table.head(&in_place).contains("hit %"));
    }

    #[test]
    fn tests_are_named_as_llama_bench_names_them() {
        let name = |n_prompt, n_gen, n_depth, n_texts| {
            super::name(Test { n_prompt, n_gen, n_depth, n_texts })
        };
        assert_eq!(name(512, 0, 0, 1), "pp512");
        assert_eq!(name(0, 128, 64, 1), "tg128 @ d64");
        assert_eq!(name(8, 4, 0, 1), "pp8+tg4");
        assert_eq!(name(0, 128, 64, 4), "tg128 x4 @ d64");
    }
}
