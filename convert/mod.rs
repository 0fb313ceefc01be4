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
mod config;
mod encoding;
mod expr;
mod hparams;
mod imatrix;
mod json;
mod keep;
mod layout;
mod left_out;
mod lora;
mod metaspace;
mod mix;
mod names;
mod noise;
mod plan;
mod pre;
mod requantize;
mod rope;
mod routing;
mod rows;
mod shards;
mod source;
mod spm;
mod steps;
mod stream;
mod synth;
mod tiktoken;
mod tokenizer;
mod view;
mod vocab;

pub use imatrix::{Imatrix, ImatrixFacts, write as write_imatrix};
pub use layout::Layout;
pub use mix::{Mix, ModelFacts, READ_ONLY, file_type_name, needs_imatrix, tensor_type};
pub use requantize::{QuantizeOptions, TypeRule, TypeRules, block_type, quantize};
pub use routing::Routing;
pub use shards::{Cut, SplitOptions, merge, path as shard_path, plan as split_plan, split};
pub use synth::{
    PRESETS, SynthOptions, preset_architecture, preset_header, synth, synth_type_names,
};

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::gguf::{OwnedValue, TensorType, Writer};
use crate::model::Bound;
use crate::model::descriptor::Descriptor;
use crate::{Error, Result};

use checkpoint::Checkpoint;
use hparams::Sizes;
use json::Json;
use layout::Target;
use plan::{Planned, Planner, Source};
use tokenizer::Tokenizer;

/// Options of `convert`.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    pub folder: PathBuf,
    pub output: PathBuf,
    /// The checkpoint's own types if not given: its float type, and its floats of 4 and 8 bits.
    pub mix: Option<Mix>,
    /// Overrides the table of pre-tokenizers.
    pub pre: Option<String>,
    /// `general.name`; the folder's name if not given.
    pub name: Option<String>,
    /// Leaves out the layers that predict further tokens.
    pub no_mtp: bool,
    pub layout: Layout,
    /// Folders of adapters that are merged into the weights, in order.
    pub lora: Vec<PathBuf>,
    /// Writes the one adapter of `lora` as a file of its own instead.
    pub lora_only: bool,
}

/// The result of a command.
#[derive(Clone, Debug)]
pub struct Written {
    pub n_tensors: usize,
    /// Bytes of tensor data, before (if there was any) and after.
    pub bytes_in: Option<u64>,
    pub bytes_out: u64,
    pub seconds: f64,
}

/// Converts a checkpoint. The output appears under its name when it is whole.
pub fn convert(options: &ConvertOptions) -> Result<Written> {
    let folder = &options.folder;
    let mut checkpoint = Checkpoint::open(folder)?;
    let config = Json::open(folder.join("config.json"))?;
    let (class, text_model) = (hparams::hf_class(&config)?, hparams::text_model(&config));
    let descriptor = Descriptor::for_hf_class(&class, text_model, config.path())?;
    let config = config::standard(config, &descriptor, &class)?;
    encoding::join(&mut checkpoint, &config)?;
    let adapters = lora::Adapters::open(&options.lora, &mut checkpoint)?;
    let checkpoint = checkpoint;
    let mut keys = hparams::keys(&config, &descriptor)?;
    let sizes = Sizes::read(&config, &descriptor)?;
    sizes.check_experts_used(&config, &descriptor)?;
    let scaling = rope::read(&config, &descriptor, &sizes)?;
    let mut planner = Planner {
        config: &config,
        descriptor: &descriptor,
        sizes: &sizes,
        checkpoint: &checkpoint,
        n_extra: 0,
    };
    if !options.no_mtp {
        planner.n_extra = planner.count_extra();
        count_extra_layers(&mut keys, &descriptor, planner.n_extra);
    }
    let mut tensors = planner.plan(scaling.tensors)?;
    if options.lora_only {
        return write_adapter(options, &adapters, &planner, tensors);
    }
    let changes = adapters.plan(&planner, &mut tensors)?;
    let vocabulary = tokenizer::Asked {
        pre: options.pre.as_deref(),
        vocabulary: descriptor.convert.vocabulary.as_ref(),
        n_rows: sizes.vocab,
    };
    let tokenizer = Tokenizer::read(folder, &config, &vocabulary)?;
    let mix = options.mix.unwrap_or_else(|| own_mix(&tensors));
    let kept = keep_small(&mut tensors, &planner, options.mix, &changes)?;
    let targets = targets(&tensors, &sizes, mix, &kept);

    let set_all = |writer: &mut Writer| -> Result<()> {
        write_general(writer, &descriptor.architecture, &model_name(options))?;
        writer.set("general.size_label", size_label(&tensors, sizes.experts))?;
        for (key, value) in keys.iter().chain(&scaling.keys) {
            writer.set(key, value.clone())?;
        }
        write_file_type(writer, file_type(&targets, mix))?;
        write_sampling(writer, folder)?;
        tokenizer.write(writer)
    };
    // Whatever a reader would refuse is refused before any weights are written.
    let mut header = Writer::of_header(&options.output, options.layout.alignment(None))?;
    set_all(&mut header)?;
    let header = layout::without_data(header, options.layout, &targets)?;
    if options.pre.is_none() {
        crate::tokenizer::Tokenizer::from_gguf(&header)?;
    }
    Bound::new(header).map_err(|e| of_config(e, &config, &descriptor))?;

    let mut writer = Writer::create(&options.output, options.layout.alignment(None))?;
    set_all(&mut writer)?;
    let job = |i: usize| rows::job(&checkpoint, &tensors[i], targets[i].ty, &changes);
    layout::write(writer, options.layout, &targets, "converting", job)
}

/// A reader's complaint about a key, as one about the fields of the config that the key comes from.
fn of_config(error: Error, config: &Json, descriptor: &Descriptor) -> Error {
    let Error::Format { field, expected, got, .. } = &error else { return error };
    let prefix = descriptor.key("");
    let Some(key) = field.strip_prefix(&prefix) else { return error };
    let rows = descriptor.convert.metadata().filter(|(name, _)| *name == key);
    let fields = rows.flat_map(|(_, row)| &row.from).map(String::as_str);
    let fields: Vec<&str> = fields.filter(|text| expr::lone_name(text).is_some()).collect();
    let field = match fields.iter().find(|name| config.at(name).is_some()).or(fields.first()) {
        Some(name) => format!("{name} (in files {field})"),
        None => field.clone(),
    };
    config.fail(&field, expected.clone(), got.clone())
}

/// Writes an adapter beside its model: 32 bits a weight unless another float type is asked for.
fn write_adapter(
    options: &ConvertOptions,
    adapters: &lora::Adapters,
    planner: &Planner<'_>,
    tensors: Vec<Planned>,
) -> Result<Written> {
    let start = Instant::now();
    let ty = match options.mix {
        None | Some(Mix::F32) => TensorType::F32,
        Some(Mix::F16) => TensorType::F16,
        Some(Mix::Bf16) => TensorType::BF16,
        Some(_) => {
            let types = "--lora-only writes --outtype f32, f16 or bf16";
            return Err(Error::Usage(types.into()));
        }
    };
    let mut writer = Writer::create(&options.output, None)?;
    writer.set("general.architecture", planner.descriptor.architecture.as_str())?;
    writer.set("general.name", model_name(options))?;
    let (n_tensors, bytes_out) = adapters.write(&mut writer, planner, tensors, ty)?;
    writer.finish()?;
    Ok(Written { n_tensors, bytes_in: None, bytes_out, seconds: start.elapsed().as_secs_f64() })
}

/// Tells of layers that predict further tokens: blocks of the file count them.
fn count_extra_layers(keys: &mut Vec<(String, OwnedValue)>, descriptor: &Descriptor, n: u64) {
    let n = n as u32;
    if n == 0 {
        return;
    }
    let blocks = descriptor.key("block_count");
    for (_, value) in keys.iter_mut().filter(|(key, _)| *key == blocks) {
        if let OwnedValue::U32(n_blocks) = value {
            *n_blocks += n;
        }
    }
    keys.push((descriptor.key("nextn_predict_layers"), OwnedValue::U32(n)));
}

/// `general.file_type` of experts in MXFP4 among other types.
const MOSTLY_MXFP4_MOE: u32 = 38;

/// `general.file_type` of matrices in NVFP4 among other types.
const MOSTLY_NVFP4: u32 = 39;

/// `general.file_type` of matrices in F8_E4M3 among other types.
const MOSTLY_F8_E4M3: u32 = 42;

/// The type of each tensor: that of its blocks if they are kept, or the mix's choice.
fn targets(
    tensors: &[Planned],
    sizes: &Sizes,
    mix: Mix,
    kept: &HashMap<String, TensorType>,
) -> Vec<Target> {
    let facts = ModelFacts {
        n_layers: sizes.n_layers,
        n_experts: sizes.experts,
        n_heads: sizes.heads,
        n_heads_kv: sizes.heads_kv,
        ..Default::default()
    };
    let facts = facts.with_tensors(tensors.iter().map(|t| t.name.as_str()));
    let target = |t: &Planned| {
        let ty = match kept.get(&t.name) {
            _ if t.is_integers() => TensorType::I32,
            Some(ty) => *ty,
            None => tensor_type(mix, &facts, &t.name, &t.dims),
        };
        Target { name: t.name.clone(), dims: t.dims.clone(), ty }
    };
    tensors.iter().map(target).collect()
}

fn file_type(targets: &[Target], mix: Mix) -> u32 {
    let has = |ty| targets.iter().any(|t| t.ty == ty);
    match () {
        () if has(TensorType::NVFP4) => MOSTLY_NVFP4,
        () if has(TensorType::MXFP4) => MOSTLY_MXFP4_MOE,
        () if has(TensorType::F8_E4M3) => MOSTLY_F8_E4M3,
        () => mix.file_type(),
    }
}

/// The tensors whose small floats stay what they are, with their types: all, unless another type is
/// asked for or an adapter changes them. MXFP4 stays among BF16 too. Puts tensors of factors behind
/// those that have some.
fn keep_small(
    tensors: &mut Vec<Planned>,
    planner: &Planner,
    asked: Option<Mix>,
    changes: &lora::Changes,
) -> Result<HashMap<String, TensorType>> {
    let names: HashSet<String> = tensors.iter().map(|t| t.name.clone()).collect();
    let mut kept = HashMap::new();
    let mut at = 0;
    while at < tensors.len() {
        let tensor = &tensors[at];
        at += 1;
        let kept_as = tensor.kept(planner.checkpoint, planner.descriptor)?;
        let Some(blocks) = kept_as else { continue };
        let is_asked = match blocks.ty {
            TensorType::MXFP4 => asked.is_none_or(|mix| mix == Mix::Bf16),
            _ => asked.is_none(),
        };
        // A model may have factors of its own there.
        let is_taken = blocks.factors.as_ref().is_some_and(|(name, _)| names.contains(name));
        if !is_asked || is_taken || !changes.of(&tensor.name).is_empty() {
            continue;
        }
        kept.insert(tensor.name.clone(), blocks.ty);
        if let Some((name, values)) = blocks.factors {
            let (dims, source) = (vec![values.len() as u64], Source::Values(values));
            tensors.insert(at, Planned { name, dims, source });
            at += 1;
        }
    }
    Ok(kept)
}

/// Keeps every weight's value: the widest float type that the matrices have; all else is F32.
fn own_mix(tensors: &[Planned]) -> Mix {
    let matrices = tensors.iter().filter(|t| mix::is_matrix(&t.name, &t.dims) && !t.is_integers());
    let types: Vec<TensorType> = matrices.flat_map(Planned::float_types).collect();
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
    let is_expert = |t: &&Planned| t.name.contains("_exps.") && t.dims.len() > 2;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_two_digits_at_least() {
        assert_eq!(rounded(142_336), "142K");
        assert_eq!(rounded(7_241_000_000), "7.2B");
        assert_eq!(rounded(46_700_000_000), "47B");
        assert_eq!(rounded(4_900), "4.9K");
    }
}
