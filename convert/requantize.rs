//! GGUF → GGUF of another type, tensor by tensor.

use std::path::PathBuf;

use super::Written;
use super::imatrix::{self, Imatrix};
use super::layout::{self, Layout, Target};
use super::mix::{self, Mix, ModelFacts};
use super::source::Source;
use super::stream::{self, Job};
use crate::gguf::{Gguf, OwnedValue, TensorType, Writer};
use crate::model::granules;
use crate::quant;
use crate::{Error, Result};

#[derive(Clone, Debug, Default)]
pub struct QuantizeOptions {
    pub input: PathBuf,
    pub output: PathBuf,
    /// Every tensor keeps its type if not given.
    pub mix: Option<Mix>,
    pub layout: Layout,
    /// How much each column of each matrix matters.
    pub imatrix: Option<PathBuf>,
    /// Whether a tensor that is quantised already may be quantised again, with the loss of both.
    pub allow_requantize: bool,
}

/// Keys that mean nothing in a file of its own, or that the writer sets.
const DROPPED: [&str; 4] = ["general.alignment", "split.no", "split.count", "split.tensors.count"];

/// Writes the model with every tensor in the type that the mix gives it.
pub fn quantize(options: &QuantizeOptions) -> Result<Written> {
    let input = Gguf::open(&options.input)?;
    let facts = facts(&input, options.imatrix.is_some())?;
    let sources = Source::all(&input)?;
    let targets =
        sources.iter().map(|source| target(options, &facts, source)).collect::<Result<Vec<_>>>()?;
    let changed = targets.iter().zip(&sources).filter(|(t, s)| t.ty != s.ty).map(|(t, _)| t);
    let imatrix = imatrix::open_for(options.imatrix.as_deref(), options.mix, changed)?;

    let mut writer = Writer::create(&options.output, alignment(&input, options.layout))?;
    copy_metadata(&input, &mut writer, options.mix, imatrix.as_ref())?;
    let job = |i: usize| job(&sources[i], targets[i].ty, imatrix.as_ref());
    let written = layout::write(writer, options.layout, &targets, "quantizing", job)?;
    let bytes_in = input.tensors().iter().map(|t| t.n_bytes).sum();
    Ok(Written { bytes_in: Some(bytes_in), ..written })
}

/// The input's own where it names one, unless that is a need of its layout.
fn alignment(input: &Gguf, layout: Layout) -> Option<u32> {
    let named = input.get("general.alignment").is_some();
    let woven = input.keys().any(|(key, _)| granules::is_layout_key(key));
    let own = u32::try_from(input.alignment()).ok().filter(|_| named && !woven);
    layout.alignment(own)
}

/// All keys in their order, with those that speak of types as they are now.
fn copy_metadata(
    input: &Gguf,
    writer: &mut Writer,
    mix: Option<Mix>,
    imatrix: Option<&Imatrix>,
) -> Result<()> {
    let mut renewed: Vec<(&str, OwnedValue)> = Vec::new();
    if let Some(mix) = mix {
        renewed.push(("general.file_type", mix.file_type().into()));
        renewed.push(("general.quantization_version", mix::QUANTIZATION_VERSION.into()));
    }
    renewed.extend(imatrix.iter().flat_map(|imatrix| imatrix.keys()));
    let dropped = |key: &str| DROPPED.contains(&key) || granules::is_layout_key(key);
    for (key, value) in input.keys().filter(|(key, _)| !dropped(key)) {
        match renewed.iter().find(|(renewed, _)| *renewed == key) {
            Some((key, value)) => writer.set(key, value.clone())?,
            None => writer.set(key, value)?,
        }
    }
    for (key, value) in renewed.iter().filter(|(key, _)| input.get(key).is_none()) {
        writer.set(key, value.clone())?;
    }
    Ok(())
}

fn facts(input: &Gguf, has_imatrix: bool) -> Result<ModelFacts> {
    let architecture = input.require_str("general.architecture")?;
    let key = |rest: &str| format!("{architecture}.{rest}");
    // Some architectures have a number a layer; the rules then go by the first layer's.
    let heads = |rest: &str| match input.get(&key(rest)).and_then(|v| v.as_array()) {
        Some(_) => Ok(input.u32s(&key(rest))?.and_then(|all| all.first().map(|n| (*n).into()))),
        None => input.u64(&key(rest)),
    };
    let n_heads = heads("attention.head_count")?.unwrap_or(0);
    let facts = ModelFacts {
        n_layers: input.u64(&key("block_count"))?.unwrap_or(0),
        n_experts: input.u64(&key("expert_count"))?.unwrap_or(0),
        n_heads,
        n_heads_kv: heads("attention.head_count_kv")?.unwrap_or(n_heads),
        has_imatrix,
        ..Default::default()
    };
    Ok(facts.with_tensors(input.tensors().iter().map(|t| t.name.as_str())))
}

/// A tensor with the type that it gets; what the mix leaves alone keeps its own.
fn target(options: &QuantizeOptions, facts: &ModelFacts, source: &Source<'_>) -> Result<Target> {
    let Source { name, dims, .. } = source;
    let ty = match options.mix {
        // A table of ids.
        _ if source.ty == TensorType::I32 => source.ty,
        Some(mix) if mix::is_matrix(name, dims) => mix::tensor_type(mix, facts, name, dims),
        _ => source.ty,
    };
    let fail = |expected: &str| {
        let field = format!("tensor {name}: type");
        Err(Error::format(source.path(), field, expected, source.ty.name()))
    };
    if ty != source.ty && !quant::is_supported(source.ty) {
        return fail("a type with values to quantize");
    }
    if ty != source.ty && source.ty.block_len() > 1 && !options.allow_requantize {
        return fail("F32, F16 or BF16 (or say --allow-requantize and accept the loss of both)");
    }
    Ok(Target { name: name.clone(), dims: dims.clone(), ty })
}

fn job<'a>(source: &'a Source<'_>, ty: TensorType, imatrix: Option<&Imatrix>) -> Job<'a> {
    let (row_len, row_bytes) = (source.row_len(), source.row_bytes());
    let make: stream::Make<'a> = if ty == source.ty {
        Box::new(|first, out| source.read(first, out).map(|()| 0))
    } else {
        log::debug!("{}: from {}", source.name, source.ty);
        let importance = imatrix.and_then(|m| m.checked(&source.name, &source.dims));
        stream::from_weighted_values(ty, row_len, importance, move |first, out| {
            let mut bytes = vec![0; out.len() / row_len * row_bytes];
            source.read(first, &mut bytes)?;
            quant::dequantize(source.ty, &bytes, out);
            Ok(())
        })
    };
    Job::of_rows(&source.name, &source.dims, ty, make)
}
