//! Hugging Face checkpoint → GGUF, GGUF → GGUF of another type, and random weights in the shapes
//! of published models.
//!
//! A conversion is a plan first (`plan`: which checkpoint tensors make which GGUF tensor, with
//! every name and shape checked) and a stream then (`stream`: rows in, blocks out), so that wrong
//! input is found before a byte is written and memory does not grow with the model. Which tensors
//! an architecture has is data in models/*.toml; which type each of them gets is `mix`.

mod base64;
mod bpe;
mod checkpoint;
mod hparams;
mod json;
mod layout;
mod metaspace;
mod mix;
mod noise;
mod plan;
mod pre;
mod progress;
mod requantize;
mod rope;
mod source;
mod spm;
mod stream;
mod synth;
mod tiktoken;
mod tokenizer;
mod vocab;

pub use layout::Layout;
pub use mix::{Mix, ModelFacts, tensor_type};
pub use requantize::{QuantizeOptions, quantize};
pub use synth::{PRESETS, SynthOptions, preset_architecture, synth, synth_type_names};

use std::path::{Path, PathBuf};

use crate::gguf::{OwnedValue, TensorType, Writer};
use crate::model::descriptor::{Descriptor, Rope};
use crate::{Error, Result};

use checkpoint::{Checkpoint, HfTensor};
use hparams::{Hparams, Sizes};
use json::Json;
use layout::Target;
use plan::{Planned, Planner, Source};
use stream::Job;
use tokenizer::Tokenizer;

/// What `convert` is asked to do.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    pub folder: PathBuf,
    pub output: PathBuf,
    /// The checkpoint's own float type if not given.
    pub mix: Option<Mix>,
    /// Overrides the table of pre-tokenizers.
    pub pre: Option<String>,
    /// `general.name`; the folder's name if not given.
    pub name: Option<String>,
    pub layout: Layout,
}

/// What a command has written.
#[derive(Clone, Debug)]
pub struct Written {
    pub n_tensors: usize,
    /// Of tensor data, before (where there was any) and after.
    pub bytes_in: Option<u64>,
    pub bytes_out: u64,
    pub seconds: f64,
}

/// Converts a checkpoint. The output appears under its name when it is whole.
pub fn convert(options: &ConvertOptions) -> Result<Written> {
    let folder = &options.folder;
    let checkpoint = Checkpoint::open(folder)?;
    let config = Json::open(folder.join("config.json"))?;
    let descriptor = Descriptor::for_hf_class(&hparams::hf_class(&config)?, config.path())?;
    let hparams = Hparams::read(&config, &descriptor)?;
    let sizes = Sizes::read(&config, &descriptor, &hparams)?;
    let scaling = rope::read(&config, &descriptor, sizes.head_dim)?;
    let planner = Planner {
        config: &config,
        descriptor: &descriptor,
        sizes: &sizes,
        checkpoint: &checkpoint,
    };
    let tensors = planner.plan(scaling.factors)?;
    let tokenizer = Tokenizer::read(folder, &config, options.pre.as_deref(), sizes.vocab)?;
    let mix = match options.mix {
        Some(mix) => mix,
        None => own_mix(&checkpoint),
    };

    let mut writer = Writer::create(&options.output, options.layout.alignment(None))?;
    write_general(&mut writer, &descriptor.architecture, &model_name(options))?;
    writer.set("general.size_label", size_label(&tensors, sizes.experts))?;
    for (key, value) in hparams.keys.into_iter().chain(scaling.keys) {
        writer.set(&key, value)?;
    }
    if descriptor.parts.rope == Rope::Norm {
        writer.set(&descriptor.key("rope.dimension_count"), sizes.head_dim as u32)?;
    }
    write_file_type(&mut writer, mix.file_type())?;
    write_sampling(&mut writer, folder)?;
    tokenizer.write(&mut writer)?;

    let facts = ModelFacts {
        architecture: descriptor.architecture.clone(),
        n_layers: sizes.n_layers,
        n_experts: sizes.experts,
        n_heads: sizes.heads,
        n_heads_kv: sizes.heads_kv,
        has_output: tensors.iter().any(|t| t.name == "output.weight"),
    };
    let target = |t: &Planned| {
        let ty = tensor_type(mix, &facts, &t.name, &t.dims);
        Target { name: t.name.clone(), dims: t.dims.clone(), ty }
    };
    let targets: Vec<Target> = tensors.iter().map(target).collect();
    let job = |i: usize| job(&checkpoint, &tensors[i], targets[i].ty);
    layout::write(writer, options.layout, &targets, "converting", job)
}

/// Keeps every weight's value: the widest float type that the checkpoint has.
fn own_mix(checkpoint: &Checkpoint) -> Mix {
    let types: Vec<TensorType> = checkpoint.tensors().filter_map(|t| t.float_type()).collect();
    let has = |ty| types.contains(&ty);
    // Neither of the halves holds the other's values.
    if has(TensorType::F32) || (has(TensorType::F16) && has(TensorType::BF16)) {
        return Mix::F32;
    }
    if has(TensorType::F16) { Mix::F16 } else { Mix::Bf16 }
}

fn model_name(options: &ConvertOptions) -> String {
    if let Some(name) = &options.name {
        return name.clone();
    }
    // `.` and `..` have names too, once resolved.
    let folder = options.folder.canonicalize().unwrap_or_else(|_| options.folder.clone());
    folder.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
}

fn write_general(writer: &mut Writer, architecture: &str, name: &str) -> Result<()> {
    writer.set("general.architecture", architecture)?;
    writer.set("general.type", "model")?;
    writer.set("general.name", name)
}

fn write_file_type(writer: &mut Writer, file_type: u32) -> Result<()> {
    writer.set("general.file_type", file_type)?;
    writer.set("general.quantization_version", mix::QUANTIZATION_VERSION)
}

/// The sampler settings that generation_config.json recommends, if it samples at all.
fn write_sampling(writer: &mut Writer, folder: &Path) -> Result<()> {
    let Some(file) = Json::open_optional(folder.join("generation_config.json"))? else {
        return Ok(());
    };
    if file.bool("do_sample")? == Some(false) {
        return Ok(());
    }
    let numbers = [
        ("top_p", "general.sampling.top_p"),
        ("min_p", "general.sampling.min_p"),
        ("temperature", "general.sampling.temp"),
        ("repetition_penalty", "general.sampling.penalty_repeat"),
    ];
    if let Some(k) = file.count("top_k")? {
        writer.set("general.sampling.top_k", i32::try_from(k).unwrap_or(i32::MAX))?;
    }
    for (field, key) in numbers {
        if let Some(x) = file.number(field)? {
            writer.set(key, OwnedValue::F32(x as f32))?;
        }
    }
    Ok(())
}

/// `8x154K`: experts times what each token would see with one of them; `7.2B` for dense models.
fn size_label(tensors: &[Planned], n_experts: u64) -> String {
    let count = |t: &Planned| t.dims.iter().product::<u64>();
    let is_expert = |t: &&Planned| t.name.contains("_exps.");
    let experts: u64 = tensors.iter().filter(is_expert).map(count).sum();
    let all: u64 = tensors.iter().map(count).sum();
    match n_experts {
        0 => rounded(all),
        n => format!("{n}x{}", rounded(all - experts + experts / n)),
    }
}

/// At least two digits, and a letter for the thousands.
fn rounded(n: u64) -> String {
    let n = n as f64;
    let (scaled, letter) = [(1e12, 'T'), (1e9, 'B'), (1e6, 'M')]
        .into_iter()
        .find(|(unit, _)| n > *unit)
        .map_or((n / 1e3, 'K'), |(unit, letter)| (n / unit, letter));
    let digits = format!("{scaled:.0}").trim_start_matches('0').len();
    format!("{scaled:.*}{letter}", 2usize.saturating_sub(digits))
}

/// How a planned tensor's rows are made.
fn job<'a>(checkpoint: &'a Checkpoint, tensor: &'a Planned, ty: TensorType) -> Job<'a> {
    let Planned { name, dims, source } = tensor;
    let (row_len, n_rows) = (dims[0] as usize, dims[1..].iter().product::<u64>());
    let make = match source {
        Source::Tensors(parts) => {
            let part_rows = n_rows / parts.len() as u64;
            stream::from_values(ty, row_len, move |first, out| {
                read_stack(checkpoint, parts, (first, part_rows, row_len), out)
            })
        }
        Source::RopePairs { tensor: part, head_dim } => {
            return rope_job(checkpoint, name, part, (*head_dim as usize, dims, ty));
        }
        Source::Values(values) => stream::from_values(ty, row_len, move |first, out| {
            let first = first as usize * row_len;
            out.copy_from_slice(&values[first..first + out.len()]);
            Ok(())
        }),
    };
    Job::of_rows(name, dims, ty, make)
}

/// As `job`, head by head.
fn rope_job<'a>(
    checkpoint: &'a Checkpoint,
    name: &'a str,
    part: &'a HfTensor,
    (head_dim, dims, ty): (usize, &[u64], TensorType),
) -> Job<'a> {
    // A bias is a column: rows of one value, so that its heads can be taken apart alike.
    let n_rows = part.shape[0];
    let row_len = (dims.iter().product::<u64>() / n_rows) as usize;
    let make = stream::from_values(ty, row_len, move |first, out| {
        checkpoint.read(part, first * row_len as u64, out)?;
        out.chunks_exact_mut(head_dim * row_len).for_each(|head| interleave_halves(head, row_len));
        Ok(())
    });
    Job { name, ty, row_len, n_rows, unit_rows: head_dim, make }
}

/// Rows from `first` on of tensors that stand one behind the other, `part_rows` each.
fn read_stack(
    checkpoint: &Checkpoint,
    parts: &[HfTensor],
    (mut first, part_rows, row_len): (u64, u64, usize),
    mut out: &mut [f32],
) -> Result<()> {
    while !out.is_empty() {
        let left = (part_rows - first % part_rows) as usize * row_len;
        let (now, rest) = out.split_at_mut(left.min(out.len()));
        let part = &parts[(first / part_rows) as usize];
        checkpoint.read(part, first % part_rows * row_len as u64, now)?;
        first += (now.len() / row_len) as u64;
        out = rest;
    }
    Ok(())
}

/// A head's rows from halves (checkpoints turn row i with row i + d/2) to neighbours (GGUF's
/// "norm" rotation turns row 2i with row 2i + 1).
fn interleave_halves(head: &mut [f32], row_len: usize) {
    let old = head.to_vec();
    let (low, high) = old.split_at(old.len() / 2);
    let pairs = low.chunks_exact(row_len).zip(high.chunks_exact(row_len));
    for (to, (a, b)) in head.chunks_exact_mut(2 * row_len).zip(pairs) {
        to[..row_len].copy_from_slice(a);
        to[row_len..].copy_from_slice(b);
    }
}

/// An output must not be its own input, whatever the spelling of the two paths.
fn check_not_same(input: &Path, output: &Path) -> Result<()> {
    let same = match (input.canonicalize(), output.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    };
    if same {
        let sentence = format!("{}: the output must be another file", output.display());
        return Err(Error::Usage(sentence));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heads_halves_become_neighbours() {
        let mut head: Vec<f32> = vec![0., 0., 1., 1., 2., 2., 3., 3.];
        interleave_halves(&mut head, 2);
        assert_eq!(head, [0., 0., 2., 2., 1., 1., 3., 3.]);
    }

    #[test]
    fn sizes_have_two_digits_at_least() {
        assert_eq!(rounded(142_336), "142K");
        assert_eq!(rounded(7_241_000_000), "7.2B");
        assert_eq!(rounded(46_700_000_000), "47B");
        assert_eq!(rounded(4_900), "4.9K");
    }
}
