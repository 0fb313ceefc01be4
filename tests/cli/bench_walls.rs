//! `bench`'s arithmetic: bytes and operations a token against counts by hand, rates and shares
//! against the fields that they come from.

use common::cli::{Model, Tiny, on, succeeded, tiny};
use serde_json::Value;
use std::path::Path;
use tempfile::TempDir;

fn rows(model: &Model, args: &[&str]) -> Vec<Value> {
    let args = [args, &["-r", "1", "-t", "1", "-o", "json"]].concat();
    serde_json::from_str(succeeded(&on(model, "bench", &args))).unwrap()
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
}

fn demo() -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    Model { dir: TempDir::new().unwrap(), path }
}

/// Sums for the demo model (`moeba inspect models/demo/moeba-demo.gguf`): 12 layers, 256 wide, 4
/// query heads on 2 of keys and values, 64 elements each; 4 of 32 experts of 128 rows; 8192 tokens.
mod by_hand {
    pub const HEAD: f64 = 256.0 * 8192.0;
    /// Router; gate, up and down of four experts.
    pub const FFN: f64 = 256.0 * 32.0 + 4.0 * 3.0 * 256.0 * 128.0;
    /// q, k, v and output.
    pub const LAYER: f64 = 256.0 * (256.0 + 128.0 + 128.0 + 256.0) + FFN;
    /// Four heads: 64 for the score and 64 for the value.
    pub const SEEN: f64 = 4.0 * (64.0 + 64.0);
    /// Two heads of keys and values in f16.
    pub const CACHE: f64 = 2.0 * (64.0 + 64.0) * 2.0;
    /// Bytes in a block of 256 weights of Q2_K and Q3_K; Q4_0 has 18 in 32.
    const Q2_K: f64 = 84.0 / 256.0;
    const Q3_K: f64 = 110.0 / 256.0;
    /// Gate and up in Q2_K, down in Q4_0.
    pub const EXPERT: f64 = 2.0 * 256.0 * 128.0 * Q2_K + 256.0 * 128.0 / 32.0 * 18.0;
    /// Q2_K in q and k, Q3_K in v and output; f32 in the router, two norms of 256 and two of 64.
    pub const DENSE_LAYER: f64 =
        256.0 * (256.0 + 128.0) * (Q2_K + Q3_K) + 4.0 * (256.0 * 32.0 + 2.0 * 256.0 + 2.0 * 64.0);
    pub const N_LAYERS: f64 = 12.0;
}

#[test]
fn the_demo_model_costs_what_a_count_by_hand_says() {
    use by_hand::*;
    let rows = rows(&demo(), &["-p", "6", "-n", "4", "-d", "3", "--no-machine"]);
    let (prompt, decode) = (&rows[0], &rows[1]);
    // Four tokens after 3: they see 4, 5, 6 and 7 positions.
    let seen = (4.0 + 5.0 + 6.0 + 7.0) / 4.0;
    let macs = N_LAYERS * (LAYER + seen * SEEN) + HEAD;
    assert_eq!(number(decode, "ops_per_token"), 2.0 * macs);
    assert_eq!(number(decode, "cache_bytes_per_decoded_token"), N_LAYERS * seen * CACHE);
    // The head is the token embedding, and there is one more norm.
    let dense = N_LAYERS * DENSE_LAYER + HEAD / 256.0 * 210.0 + 4.0 * 256.0;
    let weights = N_LAYERS * 4.0 * EXPERT + dense;
    assert_eq!(number(decode, "weight_bytes_per_decoded_token"), weights);

    // A prompt of six after 3 sees 4 to 9; only its last token has logits, and the last layer's
    // experts.
    let macs = N_LAYERS * (LAYER + 6.5 * SEEN) - FFN * 5.0 / 6.0 + HEAD / 6.0;
    assert!((number(prompt, "ops_per_token") / (2.0 * macs) - 1.0).abs() < 1e-12, "{prompt}");
    assert!(prompt["cache_bytes_per_decoded_token"].is_null());
    assert!(prompt["read_gb_per_second"].is_null() && prompt["read_share"].is_null());
}

#[test]
fn rates_and_shares_are_those_of_the_fields() {
    let model = tiny(Tiny::default());
    let rows = rows(&model, &["-p", "4", "-n", "3"]);
    for row in &rows {
        let rate = number(row, "ops_per_token") * number(row, "avg_ts") / 1e9;
        assert!((number(row, "giga_ops_per_second") / rate - 1.0).abs() < 1e-9, "{row}");
        let most = number(row, "machine_giga_ops_per_second");
        assert!((number(row, "ops_share") / (rate / most) - 1.0).abs() < 1e-9, "{row}");
        assert!(row["machine_is_steady"].is_boolean());
    }
    let decode = &rows[1];
    let bytes = number(decode, "weight_bytes_per_decoded_token")
        + number(decode, "cache_bytes_per_decoded_token");
    let rate = bytes * number(decode, "avg_ts") / 1e9;
    assert!((number(decode, "read_gb_per_second") / rate - 1.0).abs() < 1e-9, "{decode}");
    let most = number(decode, "machine_read_gb_per_second");
    assert!((number(decode, "read_share") / (rate / most) - 1.0).abs() < 1e-9, "{decode}");
}

#[test]
fn the_machine_is_measured_unless_the_user_declines() {
    let model = tiny(Tiny::default());
    let row = &rows(&model, &["-p", "2", "-n", "0", "--no-machine"])[0];
    for key in ["machine_read_gb_per_second", "machine_giga_ops_per_second", "ops_share"] {
        assert!(row.get(key).is_some_and(Value::is_null), "{key}: {row}");
    }
    assert!(number(row, "giga_ops_per_second") > 0.0);
    let args = ["-p", "2", "-n", "2", "-r", "1", "-t", "1"];
    let table = succeeded(&on(&model, "bench", &args)).to_owned();
    let heads = table.lines().find(|line| line.starts_with('|')).unwrap();
    for head in ["GB/s", "of wall", "GOP/s", "of peak"] {
        assert!(heads.split('|').any(|cell| cell.trim() == head), "{head}: {table}");
    }
    let mut rows = table.lines().filter(|line| line.starts_with('|')).skip(2);
    assert!(rows.all(|line| line.contains(" % |")), "{table}");
}

/// Memory that the measurement of the machine reads does not count in a test's peak.
#[test]
fn the_peak_of_memory_is_the_tests_own() {
    let model = tiny(Tiny::default());
    let peak = |extra: &[&str]| {
        let args = [&["-p", "2", "-n", "0"], extra].concat();
        number(&rows(&model, &args)[0], "peak_rss_bytes")
    };
    let (with, without) = (peak(&[]), peak(&["--no-machine"]));
    let can_forget = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    assert!(!can_forget || with < without + 32e6, "{with} {without}");
}
