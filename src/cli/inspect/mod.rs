//! `moeba inspect`: what is in a model file. A summary and tables for people, one JSON object for
//! programs; with `--check` whether it can run, with a reading of every weight.

mod architectures;
mod experts;
mod summary;

use super::conversation::has_template;
use super::model::ModelArg;
use super::{out, plan};
use crate::chat::ChatTemplate;
use crate::engine::{self, Engine, EngineOptions};
use crate::gguf::{Gguf, TensorInfo, Value};
use crate::model::granules;
use crate::tokenizer::Vocab;
use crate::units::size;
use crate::{Error, Result};
use serde_json::{Map, Value as Json, json};
use std::fmt::Write as _;

use experts::LayerExperts;
use summary::{Summary, counted, harmless, type_totals};

#[derive(clap::Args, Debug)]
pub struct InspectArgs {
    #[command(flatten)]
    model: ModelArg,
    /// Print everything as one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Fail unless run accepts the file and every weight is a number; no tables
    #[arg(long)]
    check: bool,
    /// Measure memory and disk for a second, and print where weights would be and how fast the
    /// model would be here, as run --dry-run does
    #[arg(long, conflicts_with_all = ["json", "check"])]
    speed: bool,
    /// Print the architectures that run, as a table: no model is needed
    #[arg(long, exclusive = true)]
    architectures: bool,
}

pub fn run(args: InspectArgs) -> Result<()> {
    if args.architectures {
        return out::write(architectures::table().as_bytes());
    }
    let mut gguf = args.model.open()?;
    // Before any output: what is printed after a check has passed it.
    if args.check {
        gguf = check(gguf)?;
    }
    let opinion = if args.check { opinion(&gguf)? } else { String::new() };
    let experts = experts::all(&gguf)?;
    let summary = Summary::of(&gguf);
    let text = match (args.json, args.check) {
        (true, checked) => json_text(&gguf, &summary, &experts, checked)?,
        (false, true) => checked_text(&gguf, &summary)? + &opinion,
        (false, false) => table_text(&gguf, &summary, &experts),
    };
    out::write(text.as_bytes())?;
    if args.speed {
        let path = gguf.path().to_owned();
        drop(gguf);
        out::line("")?;
        plan::print(&Engine::plan_of(&path, &EngineOptions::default())?, Some(&path))?;
    }
    Ok(())
}

/// Everything that `run` would refuse, then the weights. A file without a vocabulary passes: it
/// serves other commands.
fn check(gguf: Gguf) -> Result<Gguf> {
    let (bound, tokenizer) = engine::understand(gguf, true)?;
    let gguf = bound.into_gguf();
    if has_template(&gguf) {
        ChatTemplate::from_gguf(&gguf, &tokenizer, None)?;
    }
    gguf.check_all_finite(|_| {})?;
    granules::check_all_finite(&gguf)?;
    Ok(gguf)
}

/// A line with gguf-rs's reading of the file.
#[cfg(feature = "gguf-rs")]
fn opinion(gguf: &Gguf) -> Result<String> {
    crate::gguf::second_opinion(gguf).map(|said| said + "\n")
}

/// Without the feature `gguf-rs` there is no second opinion.
#[cfg(not(feature = "gguf-rs"))]
fn opinion(_: &Gguf) -> Result<String> {
    Ok(String::new())
}

fn json_text(
    gguf: &Gguf,
    summary: &Summary,
    experts: &[LayerExperts],
    checked: bool,
) -> Result<String> {
    let shards: Vec<Json> = gguf
        .shards()
        .iter()
        .map(|s| json!({"path": s.path().to_string_lossy(), "n_bytes": s.n_bytes()}))
        .collect();
    let metadata: Map<String, Json> =
        gguf.keys().map(|(key, value)| (key.to_owned(), value.json())).collect();
    let tensors: Vec<Json> = gguf.tensors().iter().map(json_tensor).collect();
    let types: Vec<Json> = type_totals(gguf)
        .iter()
        .map(|(ty, total)| {
            json!({
                "type": ty.name(), "n_tensors": total.n_tensors,
                "n_elements": total.n_elements, "n_bytes": total.n_bytes,
            })
        })
        .collect();
    let whole = json!({
        "path": gguf.path().to_string_lossy(),
        "version": gguf.version(),
        "alignment": gguf.alignment(),
        "n_bytes": gguf.n_bytes(),
        "checked": checked,
        "summary": summary.json(),
        "shards": shards,
        "metadata": metadata,
        "tensors": tensors,
        "types": types,
        "layout": if gguf.get(granules::LAYOUT_KEY).is_some() { "granule" } else { "standard" },
        "experts": experts.iter().map(LayerExperts::json).collect::<Vec<Json>>(),
    });
    let text = serde_json::to_string(&whole);
    text.map(|t| t + "\n").map_err(|e| Error::invalid(format!("cannot write JSON: {e}")))
}

fn json_tensor(t: &TensorInfo) -> Json {
    json!({
        "name": t.name, "type": t.ty.name(), "dims": t.dims, "n_bytes": t.n_bytes,
        "shard": t.shard, "file_offset": t.file_offset,
    })
}

/// Elements of an array that the table shows.
const SHOWN_ELEMENTS: usize = 6;

fn shown(value: Value<'_>) -> String {
    let Value::Array(array) = value else { return value.to_string() };
    let mut items: Vec<String> = array.iter().take(SHOWN_ELEMENTS).map(|v| v.to_string()).collect();
    if array.len() > SHOWN_ELEMENTS {
        items.push(format!("… {} in all", array.len()));
    }
    format!("[{}]", items.join(", "))
}

/// The file, and what people ask of it first.
fn lead(gguf: &Gguf, summary: &Summary) -> String {
    let mut out = format!(
        "{}: GGUF {}, {} in {}, alignment {}\n",
        gguf.path().display(),
        gguf.version(),
        size(gguf.n_bytes()),
        counted(gguf.shards().len(), "file"),
        gguf.alignment(),
    );
    summary.write(&mut out);
    out
}

fn checked_text(gguf: &Gguf, summary: &Summary) -> Result<String> {
    let n = counted(gguf.tensors().len(), "tensor");
    let verdict = match Vocab::is_in(gguf)? {
        true => "run accepts the file",
        false => "no vocabulary: only logits, bench and inspect work",
    };
    Ok(lead(gguf, summary) + &format!("OK: {n}, all weights finite; {verdict}\n"))
}

fn table_text(gguf: &Gguf, summary: &Summary, experts: &[LayerExperts]) -> String {
    let mut out = lead(gguf, summary);
    // Writing to a String cannot fail, here and below.
    metadata_table(gguf, &mut out);
    tensor_table(gguf, &mut out);
    total_table(gguf, &mut out);
    experts::table(experts, &mut out);
    out
}

fn metadata_table(gguf: &Gguf, out: &mut String) {
    let _ = writeln!(out, "\nMetadata ({} keys)", gguf.keys().count());
    let width = gguf.keys().map(|(key, _)| key.chars().count()).max().unwrap_or(0).min(50);
    for (key, value) in gguf.keys() {
        let (key, text) = (harmless(key), harmless(&shown(value)));
        let _ = writeln!(out, "  {key:width$}  {:15}  {text}", value.type_name());
    }
}

fn tensor_table(gguf: &Gguf, out: &mut String) {
    let _ = writeln!(out, "\nTensors ({})", gguf.tensors().len());
    let width = gguf.tensors().iter().map(|t| t.name.chars().count()).max().unwrap_or(0);
    for t in gguf.tensors() {
        let dims: Vec<String> = t.dims.iter().map(u64::to_string).collect();
        let (name, dims) = (harmless(&t.name), dims.join(" × "));
        let _ =
            writeln!(out, "  {name:width$}  {:7}  {dims:24}  {:>12}", t.ty.name(), size(t.n_bytes));
    }
}

fn total_table(gguf: &Gguf, out: &mut String) {
    let _ = writeln!(out, "\nTypes");
    for (ty, total) in type_totals(gguf) {
        let bits = total.n_bytes as f64 * 8.0 / total.n_elements as f64;
        let _ = writeln!(
            out,
            "  {:7}  {:5} tensors  {:14} weights  {:>12}  {bits:.2} bits each",
            ty.name(),
            total.n_tensors,
            total.n_elements,
            size(total.n_bytes),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{TensorType, Writer};
    use std::path::Path;

    /// Two MoE layers of 4 experts, 64 → 96 → 64, gate and up in Q4_0, down in Q8_0.
    fn moe(dir: &Path) -> Gguf {
        let path = dir.join("moe.gguf");
        let mut writer = Writer::create(&path, None).unwrap();
        writer.set("general.name", "a\x1b[2Jb").unwrap();
        writer.set("tokens", (0..20u32).collect::<Vec<_>>()).unwrap();
        for layer in 1..3 {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            writer.declare(&name("attn_q"), &[64, 64], TensorType::F32).unwrap();
            writer.declare(&name("ffn_gate_exps"), &[64, 96, 4], TensorType::Q4_0).unwrap();
            writer.declare(&name("ffn_up_exps"), &[64, 96, 4], TensorType::Q4_0).unwrap();
            writer.declare(&name("ffn_down_exps"), &[96, 64, 4], TensorType::Q8_0).unwrap();
        }
        for t in writer.tensors().to_vec() {
            writer.write_tensor(&t.name, &vec![0; t.n_bytes as usize]).unwrap();
        }
        writer.finish().unwrap();
        Gguf::open(path).unwrap()
    }

    /// 96 rows of two blocks of 18 bytes, twice; 64 rows of three blocks of 34 bytes.
    const EXPERT_BYTES: u64 = 2 * 96 * 2 * 18 + 64 * 3 * 34;

    #[test]
    fn json_has_everything() {
        let dir = tempfile::tempdir().unwrap();
        let gguf = moe(dir.path());
        let text =
            json_text(&gguf, &Summary::of(&gguf), &experts::all(&gguf).unwrap(), true).unwrap();
        assert_eq!(text.matches('\n').count(), 1);
        let json: Json = serde_json::from_str(&text).unwrap();
        assert_eq!(json["checked"], true);
        assert_eq!(json["version"], 3);
        assert_eq!(json["metadata"]["general.name"], "a\x1b[2Jb");
        assert_eq!(json["metadata"]["tokens"].as_array().unwrap().len(), 20);
        assert_eq!(json["tensors"].as_array().unwrap().len(), 8);
        assert_eq!(json["tensors"][3]["name"], "blk.1.ffn_down_exps.weight");
        assert_eq!(json["tensors"][3]["dims"], json!([96, 64, 4]));
        assert_eq!(
            json["types"][0],
            json!({
                "type": "Q4_0", "n_tensors": 4, "n_elements": 4 * 64 * 96 * 4,
                "n_bytes": 4 * 4 * 96 * 2 * 18,
            })
        );
        let expert = |layer: u64| {
            json!({
                "layer": layer, "n_experts": 4, "expert_bytes": EXPERT_BYTES,
                "n_granules": 1, "granule_bytes": EXPERT_BYTES,
            })
        };
        assert_eq!(json["experts"], json!([expert(1), expert(2)]));
    }

    #[test]
    fn tables_are_short_and_harmless() {
        let dir = tempfile::tempdir().unwrap();
        let gguf = moe(dir.path());
        let text = table_text(&gguf, &Summary::of(&gguf), &experts::all(&gguf).unwrap());
        assert!(!text.contains('\x1b'));
        assert!(text.contains("[0, 1, 2, 3, 4, 5, … 20 in all]"), "{text}");
        assert!(text.contains("64 × 96 × 4"));
        let experts = "layers 1 to 2: 4 experts a layer, 13.1 KiB each, 1 granule of up to";
        assert!(text.contains(experts), "{text}");
    }
}
