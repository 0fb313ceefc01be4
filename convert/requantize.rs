//! GGUF → GGUF of another type, tensor by tensor.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::mix::{self, Mix, ModelFacts};
use super::progress::Progress;
use super::stream::{self, Job};
use super::{Written, check_not_same};
use crate::gguf::{Gguf, TensorInfo, TensorType, Writer};
use crate::quant;
use crate::{Error, Result};

#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    pub input: PathBuf,
    pub output: PathBuf,
    pub mix: Mix,
    /// Whether a tensor that is quantised already may be quantised again, with the loss of both.
    pub allow_requantize: bool,
}

/// Keys that mean nothing in a file of its own, or that the writer sets.
const DROPPED: [&str; 4] = ["general.alignment", "split.no", "split.count", "split.tensors.count"];

/// Writes the model with every tensor in the type that the mix gives it.
pub fn quantize(options: &QuantizeOptions) -> Result<Written> {
    check_not_same(&options.input, &options.output)?;
    let input = Gguf::open(&options.input)?;
    let facts = facts(&input)?;
    let types = input
        .tensors()
        .iter()
        .map(|tensor| target(options, &input, &facts, tensor))
        .collect::<Result<Vec<_>>>()?;

    let alignment = u32::try_from(input.alignment()).ok();
    let alignment = alignment.filter(|_| input.get("general.alignment").is_some());
    let mut writer = Writer::create(&options.output, alignment)?;
    copy_metadata(&input, &mut writer, options.mix)?;
    for (tensor, ty) in input.tensors().iter().zip(&types) {
        writer.declare(&tensor.name, &tensor.dims, *ty)?;
    }
    let bytes_out = writer.tensors().iter().map(|t| t.n_bytes).sum();
    let progress = Progress::new("quantising", bytes_out);
    for (tensor, ty) in input.tensors().iter().zip(types) {
        write_tensor(&mut writer, &input, tensor, ty, &progress)?;
    }
    writer.finish()?;
    Ok(Written {
        n_tensors: input.tensors().len(),
        bytes_in: Some(input.tensors().iter().map(|t| t.n_bytes).sum()),
        bytes_out,
        seconds: progress.finish().as_secs_f64(),
    })
}

/// All keys in their order, with those that speak of types as they are now.
fn copy_metadata(input: &Gguf, writer: &mut Writer, mix: Mix) -> Result<()> {
    let renewed = [
        ("general.file_type", mix.file_type()),
        ("general.quantization_version", mix::QUANTIZATION_VERSION),
    ];
    for (key, value) in input.keys().filter(|(key, _)| !DROPPED.contains(key)) {
        match renewed.iter().find(|(renewed, _)| *renewed == key) {
            Some((key, value)) => writer.set(key, *value)?,
            None => writer.set(key, value)?,
        }
    }
    for (key, value) in renewed.iter().filter(|(key, _)| input.get(key).is_none()) {
        writer.set(key, *value)?;
    }
    Ok(())
}

fn facts(input: &Gguf) -> Result<ModelFacts> {
    let architecture = input.require_str("general.architecture")?.to_owned();
    let key = |rest: &str| format!("{architecture}.{rest}");
    // Some architectures have a number a layer; the rules then go by the most heads.
    let heads = |rest: &str| match input.get(&key(rest)).and_then(|v| v.as_array()) {
        Some(_) => Ok(input.u32s(&key(rest))?.into_iter().flatten().max().map(u64::from)),
        None => input.u64(&key(rest)),
    };
    let n_heads = heads("attention.head_count")?.unwrap_or(0);
    Ok(ModelFacts {
        n_layers: input.u64(&key("block_count"))?.unwrap_or(0),
        n_experts: input.u64(&key("expert_count"))?.unwrap_or(0),
        n_heads,
        n_heads_kv: heads("attention.head_count_kv")?.unwrap_or(n_heads),
        has_output: input.tensor("output.weight").is_some(),
        architecture,
    })
}

/// The type that a tensor gets; what the mix leaves alone keeps its own.
fn target(
    options: &QuantizeOptions,
    input: &Gguf,
    facts: &ModelFacts,
    tensor: &TensorInfo,
) -> Result<TensorType> {
    let ty = match mix::is_matrix(&tensor.name, &tensor.dims) {
        true => mix::tensor_type(options.mix, facts, &tensor.name, &tensor.dims),
        false => tensor.ty,
    };
    if ty == tensor.ty {
        return Ok(ty);
    }
    let fail = |expected: &str| {
        let field = format!("tensor {}: type", tensor.name);
        let path = input.shards()[tensor.shard].path();
        Err(Error::format(path, field, expected, tensor.ty.name()))
    };
    if !quant::is_supported(tensor.ty) {
        return fail("one of F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K");
    }
    if tensor.ty.block_len() > 1 && !options.allow_requantize {
        return fail("F32, F16 or BF16 (or say --allow-requantize and accept the loss of both)");
    }
    Ok(ty)
}

fn write_tensor(
    writer: &mut Writer,
    input: &Gguf,
    tensor: &TensorInfo,
    ty: TensorType,
    progress: &Progress,
) -> Result<()> {
    let name = &tensor.name;
    let shard = &input.shards()[tensor.shard];
    // By reads and not through the map: memory then holds what is worked on and nothing else.
    let read = |from: u64, out: &mut [u8]| {
        let at = tensor.file_offset + from;
        shard.file().read_exact_at(out, at).map_err(|e| Error::io(shard.path(), e))
    };
    let (row_len, row_bytes) = (tensor.dims[0] as usize, tensor.row_bytes());
    let copy = |first: u64, out: &mut [u8]| read(first * row_bytes, out).map(|()| 0);
    let fill = |first: u64, out: &mut [f32]| {
        let mut bytes = vec![0; out.len() / row_len * row_bytes as usize];
        read(first * row_bytes, &mut bytes)?;
        quant::dequantize(tensor.ty, &bytes, out);
        Ok(())
    };
    let convert = stream::from_values(ty, row_len, fill);
    let is_copy = ty == tensor.ty;
    let done = if is_copy { "copied".to_owned() } else { format!("from {}", tensor.ty) };
    log::debug!("{name}: {:?} {ty}, {done}", tensor.dims);
    let make: &(dyn Fn(u64, &mut [u8]) -> Result<usize> + Sync) =
        if is_copy { &copy } else { &convert };
    let n_rows = tensor.n_rows();
    stream::stream(writer, &Job { name, ty, row_len, n_rows, unit_rows: 1, make }, progress)
}
