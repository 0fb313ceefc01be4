//! How the tensors of an output lie in its file: one by one as every GGUF reader expects, or with
//! each layer's routed experts granule-major (`model::granules` says what that is).
//!
//! The commands say what they would write to a standard file and how each tensor's rows are made.
//! A granule-major tensor is woven from the rows of its gate, its up and its down, an expert at a
//! time, so that both layouts hold the same bits and memory holds an expert or two.

use rayon::prelude::*;
use std::path::Path;

use super::Written;
use super::stream::{self, Feed, TensorJob};
use crate::experts::{DIRECT_ALIGN, ExpertTensors, LayerExperts};
use crate::gguf::{DEFAULT_ALIGNMENT, Gguf, TensorType, Writer};
use crate::model::granules::{self, TypedExperts};
use crate::terminal::{self, Bar};
use crate::{Error, Result, interrupt};

/// A layout as users name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    #[default]
    Standard,
    Granule,
}

const TABLE: [(Layout, &str); 2] = [(Layout::Standard, "standard"), (Layout::Granule, "granule")];

impl Layout {
    /// By name, in either case.
    pub fn from_name(name: &str) -> Option<Layout> {
        TABLE.into_iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// All names, for messages and help.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.into_iter().map(|row| row.1)
    }

    /// The alignment of a file in this layout, if another than the format's default: at least
    /// `own`, where that is given.
    pub fn alignment(self, own: Option<u32>) -> Option<u32> {
        match self {
            Layout::Standard => own,
            Layout::Granule => Some(own.unwrap_or(DEFAULT_ALIGNMENT).max(DIRECT_ALIGN as u32)),
        }
    }
}

/// A tensor as a standard file would have it.
#[derive(Clone, Debug)]
pub struct Target {
    pub name: String,
    pub dims: Vec<u64>,
    pub ty: TensorType,
}

/// A tensor of the output; numbers are those of targets.
enum Output {
    Alone(usize),
    Granules { layer: usize, typed: TypedExperts, parts: [usize; 3] },
}

/// Writes all targets, in order; `job` says how the rows of one are made. The metadata must have
/// been set. `verb` is what the progress bar says is done.
pub fn write<'a>(
    mut writer: Writer,
    layout: Layout,
    targets: &[Target],
    verb: &'static str,
    job: impl Fn(usize) -> TensorJob<'a>,
) -> Result<Written> {
    let outputs = outline(&mut writer, layout, targets)?;
    let bytes_out = writer.tensors().iter().map(|t| t.n_bytes).sum();
    let progress = terminal::bytes(verb, bytes_out, 0);
    for output in &outputs {
        match output {
            Output::Alone(i) => {
                let Target { name, dims, ty } = &targets[*i];
                log::debug!("{name}: {dims:?} {ty}");
                stream::stream(&mut writer, &job(*i), &progress)?;
            }
            Output::Granules { layer, typed, parts } => {
                let name = granules::tensor_name(*layer);
                log::debug!("{name}: {} experts of {:?}", typed.experts.n_experts, typed.types);
                weave(&mut writer, &name, &typed.experts, parts.map(&job), &progress)?;
            }
        }
    }
    writer.finish()?;
    let seconds = progress.finish().as_secs_f64();
    Ok(Written { n_tensors: outputs.len(), bytes_in: None, bytes_out, seconds })
}

/// A file without data whose tensors are these; the metadata must have been set.
pub fn without_data(mut writer: Writer, layout: Layout, targets: &[Target]) -> Result<Gguf> {
    outline(&mut writer, layout, targets)?;
    writer.into_gguf()
}

/// Declares the tensors of the output and sets the keys that describe them.
fn outline(writer: &mut Writer, layout: Layout, targets: &[Target]) -> Result<Vec<Output>> {
    let outputs = match layout {
        Layout::Standard => (0..targets.len()).map(Output::Alone).collect(),
        Layout::Granule => grouped(targets, writer.path())?,
    };
    set_keys(writer, &outputs)?;
    outputs.iter().try_for_each(|output| declare(writer, output, targets))?;
    Ok(outputs)
}

fn set_keys(writer: &mut Writer, outputs: &[Output]) -> Result<()> {
    let mut layers: Vec<Option<TypedExperts>> = Vec::new();
    for output in outputs {
        if let Output::Granules { layer, typed, .. } = output {
            layers.resize(layers.len().max(layer + 1), None);
            layers[*layer] = Some(*typed);
        }
    }
    if layers.is_empty() {
        return Ok(());
    }
    granules::keys(&layers).into_iter().try_for_each(|(key, value)| writer.set(key, value))
}

fn declare(writer: &mut Writer, output: &Output, targets: &[Target]) -> Result<()> {
    match output {
        Output::Alone(i) => {
            let Target { name, dims, ty } = &targets[*i];
            writer.declare(name, dims, *ty)?;
        }
        Output::Granules { layer, typed, .. } => {
            let experts = &typed.experts;
            let dims = [experts.expert_stride() as u64, experts.n_experts as u64];
            writer.declare(&granules::tensor_name(*layer), &dims, TensorType::I8)?;
        }
    }
    Ok(())
}

/// The outputs of a granule-major file: in the place of the first of a layer's gate, up and down
/// stand all three.
fn grouped(targets: &[Target], path: &Path) -> Result<Vec<Output>> {
    let mut outputs = Vec::new();
    let mut any = false;
    for (i, target) in targets.iter().enumerate() {
        let Some((layer, parts)) = stacked(targets, &target.name) else {
            outputs.push(Output::Alone(i));
            continue;
        };
        any = true;
        if parts.iter().min() == Some(&i) {
            let typed = typed(targets, parts, path)?;
            outputs.push(Output::Granules { layer, typed, parts });
        }
    }
    if !any {
        log::warn!("{}: no routed experts to lay out in granules", path.display());
    }
    Ok(outputs)
}

/// The layer whose gate, up or down a tensor is, and where all three are.
fn stacked(targets: &[Target], name: &str) -> Option<(usize, [usize; 3])> {
    let layer = name.strip_prefix("blk.")?.split('.').next()?.parse().ok()?;
    let names = granules::stacked_names(layer);
    if !names.iter().any(|of| of == name) {
        return None;
    }
    let find = |name: &String| targets.iter().position(|t| t.name == *name);
    let [gate, up, down] = &names;
    Some((layer, [find(gate)?, find(up)?, find(down)?]))
}

fn typed(targets: &[Target], parts: [usize; 3], path: &Path) -> Result<TypedExperts> {
    let [gate, up, down] = parts.map(|i| &targets[i]);
    let sizes: Result<[u64; 3]> = gate.dims[..].try_into().map_err(|_| {
        let got = format!("{:?}", gate.dims);
        Error::format(path, gate.name.clone(), "shape [inputs, outputs, experts]", got)
    });
    let [n_embd, n_ff, n] = sizes?;
    for (target, shape) in [(up, [n_embd, n_ff, n]), (down, [n_ff, n_embd, n])] {
        if target.dims != shape {
            let (expected, got) = (format!("shape {shape:?}"), format!("{:?}", target.dims));
            return Err(Error::format(path, target.name.clone(), expected, got));
        }
    }
    // The tensor's number in the output is of no use here.
    let tensors = ExpertTensors::GranuleMajor { tensor: 0 };
    TypedExperts::cut([gate.ty, up.ty, down.ty], [n_embd, n_ff, n], tensors).ok_or_else(|| {
        let expected = format!("rows of whole blocks of {}, {} and {}", gate.ty, up.ty, down.ty);
        Error::format(path, gate.name.clone(), expected, format!("{:?}", gate.dims))
    })
}

/// Writes a declared granule-major tensor: while an expert is written the next is made.
fn weave(
    writer: &mut Writer,
    name: &str,
    experts: &LayerExperts,
    jobs: [TensorJob<'_>; 3],
    progress: &Bar,
) -> Result<()> {
    writer.begin_tensor(name)?;
    let mut feeds = jobs.map(Feed::new);
    let mut ready = expert(experts, &mut feeds)?;
    for next in 1..=experts.n_experts {
        interrupt::check()?;
        let more = next < experts.n_experts;
        let make = || if more { expert(experts, &mut feeds).map(Some) } else { Ok(None) };
        let (written, made) = rayon::join(|| writer.write(&ready), make);
        written?;
        progress.inc(ready.len() as u64);
        ready = made?.unwrap_or_default();
    }
    feeds.iter().for_each(Feed::warn_of_odd_values);
    writer.end_tensor()
}

/// The next expert, granule by granule.
fn expert(experts: &LayerExperts, feeds: &mut [Feed<'_>; 3]) -> Result<Vec<u8>> {
    let [gate, up, down] = feeds;
    let (gate, up) = (gate.take(experts.gate.n_bytes())?, up.take(experts.up.n_bytes())?);
    let down = down.take(experts.down.n_bytes())?;
    let mut out = vec![0; experts.expert_stride()];
    out.par_chunks_mut(experts.granule_stride()).enumerate().for_each(|(index, out)| {
        let rows = experts.geometry.rows(index);
        let [_, up_at, down_at] = experts.offsets(index);
        let of_rows = |n: usize| rows.start * n..rows.end * n;
        out[..up_at].copy_from_slice(&gate[of_rows(experts.gate.row_bytes)]);
        out[up_at..down_at].copy_from_slice(&up[of_rows(experts.up.row_bytes)]);
        let columns = experts.down.columns(&rows);
        let strips = out[down_at..].chunks_exact_mut(columns.len());
        for (strip, row) in strips.zip(down.chunks_exact(experts.down.row_bytes)) {
            strip.copy_from_slice(&row[columns.clone()]);
        }
    });
    Ok(out)
}
