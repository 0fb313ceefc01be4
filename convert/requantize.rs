//! GGUF → GGUF of another type, tensor by tensor.

use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

use regex::Regex;

use super::Written;
use super::imatrix::{self, Imatrix};
use super::layout::{self, Layout, Target};
use super::mix::{self, Mix, ModelFacts};
use super::shards;
use super::source::Source;
use super::stream::{self, TensorJob};
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
    /// Rules that come before the mix's.
    pub types: TypeRules,
    /// Writes as many files as the input has; `output` is what their names begin with.
    pub keep_split: bool,
}

/// Types that are asked for beside a mix.
#[derive(Clone, Debug, Default)]
pub struct TypeRules {
    /// The first whose pattern is found in a tensor's name counts.
    pub tensors: Vec<TypeRule>,
    /// The type of `output.weight`, and of an embedding that stands in for it.
    pub output: Option<TensorType>,
    /// The type of `token_embd.weight`.
    pub embedding: Option<TensorType>,
    /// All matrices get the mix's ordinary type.
    pub pure: bool,
    /// `output.weight` keeps its type.
    pub leave_output: bool,
}

/// `PATTERN=TYPE`, the pattern a regular expression.
#[derive(Clone, Debug)]
pub struct TypeRule {
    pattern: Regex,
    ty: TensorType,
}

impl FromStr for TypeRule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |why: String| Error::Usage(format!("{why}: expected PATTERN=TYPE"));
        let Some((pattern, ty)) = text.rsplit_once('=').filter(|(name, _)| !name.is_empty()) else {
            return Err(wrong(format!("{text:?}")));
        };
        // As llama.cpp does; names are in lower case.
        let pattern = Regex::new(&pattern.to_lowercase());
        let pattern = pattern.map_err(|_| wrong(format!("{text:?} has no regular expression")))?;
        Ok(TypeRule { pattern, ty: block_type(ty).map_err(wrong)? })
    }
}

/// The type of a name, in either case, if weights can be quantised to it.
pub fn block_type(name: &str) -> std::result::Result<TensorType, String> {
    let found = TensorType::from_name(name.trim()).filter(|ty| quant::is_supported(*ty));
    found.ok_or_else(|| format!("{name:?} is not a type of weights"))
}

impl TypeRules {
    /// The type of a matrix; `None` if it keeps its own.
    fn of(&self, mix: Mix, facts: &ModelFacts, name: &str, dims: &[u64]) -> Option<TensorType> {
        let is_output = name == "output.weight";
        let is_embedding = name == "token_embd.weight";
        let is_tied = is_embedding && !facts.has_output;
        let rule = || self.tensors.iter().find(|rule| rule.pattern.is_match(name));
        let wanted = match (self.output, self.embedding) {
            _ if is_output && self.leave_output => return None,
            (_, Some(ty)) if is_embedding => ty,
            (Some(ty), _) if is_output => ty,
            _ if mix.is_float() => return Some(mix::tensor_type(mix, facts, name, dims)),
            (output, _) => match (rule(), output) {
                (Some(rule), _) => rule.ty,
                (None, _) if self.pure => mix.base(),
                (None, Some(ty)) if is_tied => ty,
                (None, _) => return Some(mix::tensor_type(mix, facts, name, dims)),
            },
        };
        Some(mix::fitting(wanted, dims[0]))
    }
}

/// Writes the model with every tensor in the type that the mix gives it.
pub fn quantize(options: &QuantizeOptions) -> Result<Written> {
    let input = Gguf::open(&options.input)?;
    let facts = facts(&input, options.imatrix.is_some())?;
    let sources = Source::all(&input)?;
    let targets =
        sources.iter().map(|source| target(options, &facts, source)).collect::<Result<Vec<_>>>()?;
    let changed = targets.iter().zip(&sources).filter(|(t, s)| t.ty != s.ty).map(|(t, _)| t);
    let imatrix = imatrix::open_for(options.imatrix.as_deref(), options.mix, changed)?;

    let parts = parts(options, &input, &sources)?;
    let shard = |no: usize| shards::path(&options.output, no, parts.len());
    let paths = match options.keep_split {
        true => (0..parts.len()).map(shard).collect(),
        false => vec![options.output.clone()],
    };
    let written = shards::write(&paths, |no, path| {
        let mut writer = Writer::create(path, alignment(&input, options.layout))?;
        if no == 0 {
            copy_metadata(&input, &mut writer, options.mix, imatrix.as_ref())?;
        }
        if parts.len() > 1 {
            shards::set_keys(&mut writer, [no, parts.len(), targets.len()])?;
        }
        let part = parts[no].clone();
        let job = |i: usize| {
            let i = part.start + i;
            job(&sources[i], targets[i].ty, imatrix.as_ref())
        };
        layout::write(writer, options.layout, &targets[part.clone()], "quantizing", job)
    })?;
    let bytes_in = input.tensors().iter().map(|t| t.n_bytes).sum();
    Ok(Written { bytes_in: Some(bytes_in), ..written })
}

/// Tensors of each file that is written.
fn parts(
    options: &QuantizeOptions,
    input: &Gguf,
    sources: &[Source<'_>],
) -> Result<Vec<Range<usize>>> {
    if !options.keep_split {
        return Ok(vec![0..sources.len()]);
    }
    let is_woven = input.keys().any(|(key, _)| granules::is_layout_key(key));
    if is_woven || options.layout != Layout::Standard {
        let why = "--keep-split: files in the layout granule are not split";
        return Err(Error::Usage(why.into()));
    }
    let of_shard = |shard: usize| input.tensors().partition_point(|t| t.shard < shard);
    Ok((0..input.shards().len()).map(|shard| of_shard(shard)..of_shard(shard + 1)).collect())
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
    let dropped = |key: &str| {
        key == "general.alignment" || shards::KEYS.contains(&key) || granules::is_layout_key(key)
    };
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
        Some(mix) if mix::is_matrix(name, dims) => {
            options.types.of(mix, facts, name, dims).unwrap_or(source.ty)
        }
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

fn job<'a>(source: &'a Source<'_>, ty: TensorType, imatrix: Option<&Imatrix>) -> TensorJob<'a> {
    if ty == source.ty {
        return source.job();
    }
    let (row_len, row_bytes) = (source.row_len(), source.row_bytes());
    log::debug!("{}: from {}", source.name, source.ty);
    let importance = imatrix.and_then(|m| m.checked(&source.name, &source.dims));
    let make = stream::from_weighted_values(ty, row_len, importance, move |first, out| {
        let mut bytes = vec![0; out.len() / row_len * row_bytes];
        source.read(first, &mut bytes)?;
        quant::dequantize(source.ty, &bytes, out);
        Ok(())
    });
    TensorJob::of_rows(&source.name, &source.dims, ty, make)
}
