//! Granule-major files (`--layout granule`): GGUF files in which a layer's routed experts are one
//! tensor `blk.L.ffn_granule_exps.weight` instead of three, so that an expert, or any run of its
//! granules, is one aligned sequential read. `experts::ExpertTensors` says how the bytes lie; these
//! keys say what they are:
//!
//! | key | value |
//! |---|---|
//! | `moeba.layout` | the string `granule` |
//! | `moeba.granule.gate_types`, `up_types`, `down_types` | u32 a layer: number of the GGUF type |
//! | `moeba.granule.feed_forward_lengths` | u32 a layer: rows of gate; 0: no such tensor |
//! | `moeba.granule.rows` | u32 a layer: intermediate rows of a granule |
//!
//! The number of experts is the tensor's second dimension, the width of the model its
//! `embedding_length`. The cut is part of what a model computes, so a file that is cut in another
//! way than this version would is refused. Experts without a gate stay stacked.

use crate::experts::{DIRECT_ALIGN, ExpertTensors, Geometry, LayerExperts, MatrixRows};
use crate::gguf::{Gguf, OwnedValue, TensorInfo, TensorType, first_non_finite};
use crate::{Error, Result, interrupt};

/// The key that says that a file is granule-major, and its value.
pub const LAYOUT_KEY: &str = "moeba.layout";
const LAYOUT: &str = "granule";
const TYPE_KEYS: [&str; 3] =
    ["moeba.granule.gate_types", "moeba.granule.up_types", "moeba.granule.down_types"];
const N_FF_KEY: &str = "moeba.granule.feed_forward_lengths";
const ROWS_KEY: &str = "moeba.granule.rows";

/// The tensor of a layer in a granule-major file.
pub fn tensor_name(layer: usize) -> String {
    format!("blk.{layer}.ffn_granule_exps.weight")
}

/// The tensors that a standard file has instead: gate, up and down.
pub fn stacked_names(layer: usize) -> [String; 3] {
    ["gate", "up", "down"].map(|part| format!("blk.{layer}.ffn_{part}_exps.weight"))
}

/// The layer of a granule-major tensor.
pub fn layer_of(name: &str) -> Option<usize> {
    let layer = name.strip_prefix("blk.")?.strip_suffix(".ffn_granule_exps.weight")?;
    layer.parse().ok()
}

/// Whether a key speaks of the layout, and so goes when the layout does.
pub fn is_layout_key(key: &str) -> bool {
    key == LAYOUT_KEY || key.starts_with("moeba.granule.")
}

/// Routed experts of a layer with the types of gate, up and down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypedExperts {
    pub types: [TensorType; 3],
    pub n_embd: usize,
    pub experts: LayerExperts,
}

impl TypedExperts {
    /// Cut as this version cuts them. `None` where rows are no whole blocks or sizes do not fit.
    pub fn cut(
        types: [TensorType; 3],
        [n_embd, n_ff, n_experts]: [u64; 3],
        tensors: ExpertTensors,
    ) -> Option<TypedExperts> {
        let [gate, up, down] = types;
        let experts = cut((Some(gate), up, down), [n_embd, n_ff, n_experts], tensors)?;
        Some(TypedExperts { types, n_embd: n_embd.try_into().ok()?, experts })
    }
}

/// Experts of these types of gate (if they have one), up and down, cut as this version cuts them.
/// `None` where rows are no whole blocks or sizes do not fit.
pub fn cut(
    (gate, up, down): (Option<TensorType>, TensorType, TensorType),
    [n_embd, n_ff, n_experts]: [u64; 3],
    tensors: ExpertTensors,
) -> Option<LayerExperts> {
    let gate = match gate {
        Some(gate) => part(gate, n_ff, n_embd)?,
        None => MatrixRows::absent(n_ff.try_into().ok()?),
    };
    let parts = [gate, part(up, n_ff, n_embd)?, part(down, n_embd, n_ff)?];
    // So that no sum or product of an expert's sizes overflows.
    let large = parts.iter().any(|p| p.rows.checked_mul(p.row_bytes).is_none_or(|n| n >> 60 > 0));
    if large || n_ff == 0 || n_embd == 0 {
        return None;
    }
    Some(LayerExperts::cut(n_experts.try_into().ok()?, parts, tensors))
}

/// Experts of one matrix in one tensor, cut as this version cuts them. `None` as of `cut`.
pub fn cut_single(
    ty: TensorType,
    [n_embd, n_rows, n_experts]: [usize; 3],
    tensor: usize,
) -> Option<LayerExperts> {
    let up = part(ty, n_rows as u64, n_embd as u64)?;
    if up.rows.checked_mul(up.row_bytes).is_none_or(|n| n >> 60 > 0) || n_rows == 0 {
        return None;
    }
    let parts = [MatrixRows::absent(n_rows), up, MatrixRows::absent(0)];
    Some(LayerExperts::cut(n_experts, parts, ExpertTensors::Single { tensor }))
}

fn part(ty: TensorType, rows: u64, cols: u64) -> Option<MatrixRows> {
    Some(MatrixRows {
        rows: rows.try_into().ok()?,
        row_bytes: ty.row_bytes(cols)?.try_into().ok()?,
        block_len: ty.block_len(),
        block_bytes: ty.block_bytes(),
    })
}

/// The keys of a granule-major file with these layers; `None` where a layer has no such tensor.
pub fn keys(layers: &[Option<TypedExperts>]) -> Vec<(&'static str, OwnedValue)> {
    let numbers = |of: &dyn Fn(&TypedExperts) -> usize| -> OwnedValue {
        let numbers = layers.iter().map(|layer| layer.as_ref().map_or(0, |l| of(l) as u32));
        numbers.collect::<Vec<u32>>().into()
    };
    let mut keys = vec![(LAYOUT_KEY, LAYOUT.into())];
    for (i, key) in TYPE_KEYS.into_iter().enumerate() {
        keys.push((key, numbers(&|l| l.types[i].id() as usize)));
    }
    keys.push((N_FF_KEY, numbers(&|l| l.experts.geometry.n_ff)));
    keys.push((ROWS_KEY, numbers(&|l| l.experts.geometry.granule_rows)));
    keys
}

/// The keys of a granule-major file.
#[derive(Clone, Debug)]
pub struct GranuleKeys {
    n_embd: u64,
    types: [Vec<u32>; 3],
    n_ff: Vec<u32>,
    rows: Vec<u32>,
}

impl GranuleKeys {
    /// `None` of a standard file.
    pub fn read(gguf: &Gguf) -> Result<Option<GranuleKeys>> {
        let (key, expected) = (LAYOUT_KEY, LAYOUT);
        match gguf.str(key)? {
            Some(layout) if layout == expected => (),
            Some(other) => {
                let expected = format!("{expected:?}, or no such key");
                return Err(Error::format(gguf.path(), key, expected, format!("{other:?}")));
            }
            None => {
                let Some(t) = gguf.tensors().iter().find(|t| layer_of(&t.name).is_some()) else {
                    return Ok(None);
                };
                let expected = format!("{expected:?}, as there is a tensor {}", t.name);
                return Err(Error::format(gguf.path(), key, expected, "nothing"));
            }
        }
        let architecture = gguf.require_str("general.architecture")?;
        let n_embd = gguf.require_u32(&format!("{architecture}.embedding_length"))?.into();
        let n_ff = gguf.require_u32s(N_FF_KEY)?;
        let numbers = |key: &str| {
            let numbers = gguf.require_u32s(key)?;
            if numbers.len() == n_ff.len() {
                return Ok(numbers);
            }
            let expected = format!("{} numbers, as in {N_FF_KEY}", n_ff.len());
            Err(Error::format(gguf.path(), key, expected, numbers.len().to_string()))
        };
        let [gate, up, down] = TYPE_KEYS;
        let types = [numbers(gate)?, numbers(up)?, numbers(down)?];
        let rows = numbers(ROWS_KEY)?;
        Ok(Some(GranuleKeys { n_embd, types, n_ff, rows }))
    }

    /// A layer's experts; `None` where they are not granule-major.
    pub fn layer(&self, gguf: &Gguf, layer: usize) -> Result<Option<TypedExperts>> {
        let Some((found, own)) = self.both_cuts(gguf, layer)? else { return Ok(None) };
        if found == own {
            return Ok(Some(found));
        }
        let expected = format!(
            "{} in layer {layer}, as this version cuts experts (`moeba quantize IN OUT copy \
             --layout granule` cuts them again)",
            own.experts.geometry.granule_rows
        );
        let got = found.experts.geometry.granule_rows.to_string();
        Err(Error::format(gguf.path(), ROWS_KEY, expected, got))
    }

    /// The layer's experts, cut as the file has them, whatever this version would do.
    pub fn layer_as_written(&self, gguf: &Gguf, layer: usize) -> Result<Option<TypedExperts>> {
        Ok(self.both_cuts(gguf, layer)?.map(|(found, _)| found))
    }

    /// A layer as the file has it, and as this version would cut it.
    fn both_cuts(&self, gguf: &Gguf, layer: usize) -> Result<Option<(TypedExperts, TypedExperts)>> {
        let name = tensor_name(layer);
        let n_ff = self.n_ff.get(layer).copied().unwrap_or(0);
        let index = match (gguf.tensor_index(&name), n_ff) {
            (None, 0) => return Ok(None),
            (None, _) => {
                return Err(Error::format(gguf.path(), name, "a tensor", "nothing of that name"));
            }
            (Some(_), 0) => {
                let expected = format!("rows of gate in layer {layer}, as there is {name}");
                return Err(Error::format(gguf.path(), N_FF_KEY, expected, "none"));
            }
            (Some(index), _) => index,
        };
        let tensor = &gguf.tensors()[index];
        let types = self.layer_types(gguf, layer)?;
        let n_experts = tensor.dims.get(1).copied().unwrap_or(1);
        let sizes = [self.n_embd, n_ff.into(), n_experts];
        let tensors = ExpertTensors::GranuleMajor { tensor: index };
        let Some(own) = TypedExperts::cut(types, sizes, tensors) else {
            let [gate, up, down] = types;
            let expected = format!("rows of whole blocks of {gate}, {up} and {down}");
            let got = format!("{n_ff} in layer {layer}, {} wide", self.n_embd);
            return Err(Error::format(gguf.path(), N_FF_KEY, expected, got));
        };
        let mut found = own;
        found.experts.geometry = self.geometry(gguf, layer, &own)?;
        check_tensor(gguf, tensor, &found.experts)?;
        Ok(Some((found, own)))
    }

    fn layer_types(&self, gguf: &Gguf, layer: usize) -> Result<[TensorType; 3]> {
        let ty = |i: usize| {
            let id = self.types[i][layer];
            TensorType::from_id(id).ok_or_else(|| {
                let expected = format!("the number of a tensor type for layer {layer}");
                Error::format(gguf.path(), TYPE_KEYS[i], expected, id.to_string())
            })
        };
        Ok([ty(0)?, ty(1)?, ty(2)?])
    }

    fn geometry(&self, gguf: &Gguf, layer: usize, own: &TypedExperts) -> Result<Geometry> {
        let (rows, n_ff) = (self.rows[layer] as usize, own.experts.geometry.n_ff);
        let block = own.experts.down.block_len;
        if rows == n_ff || (rows > 0 && rows < n_ff && rows.is_multiple_of(block)) {
            return Ok(Geometry { n_ff, granule_rows: rows });
        }
        let expected = format!("a multiple of {block} up to {n_ff} in layer {layer}");
        Err(Error::format(gguf.path(), ROWS_KEY, expected, rows.to_string()))
    }
}

/// That a granule-major tensor has the form, the place and the room that its layer needs.
fn check_tensor(gguf: &Gguf, t: &TensorInfo, experts: &LayerExperts) -> Result<()> {
    let fail = |part: &str, expected: String, got: String| {
        let path = gguf.shards()[t.shard].path();
        Err(Error::format(path, format!("tensor {}{part}", t.name), expected, got))
    };
    if t.ty != TensorType::I8 {
        return fail(": type", "I8".into(), t.ty.to_string());
    }
    let (need, align) = (experts.expert_stride() as u64, DIRECT_ALIGN as u64);
    let fits = t.dims[0] >= need && t.dims[0].is_multiple_of(align);
    if !fits || t.dims.iter().skip(2).any(|d| *d != 1) {
        let expected = format!("[n, experts], n a multiple of {align} and at least {need}");
        return fail(": shape", expected, format!("{:?}", t.dims));
    }
    if !t.file_offset.is_multiple_of(align) {
        let expected = format!("a multiple of {align} (general.alignment)");
        return fail(": position", expected, t.file_offset.to_string());
    }
    Ok(())
}

/// Reads all weights of a granule-major file's routed experts, as `Gguf::check_all_finite` does
/// those of other tensors, to which these are mere bytes.
pub fn check_all_finite(gguf: &Gguf) -> Result<()> {
    let Some(keys) = GranuleKeys::read(gguf)? else { return Ok(()) };
    for layer in 0..keys.n_ff.len() {
        let Some(typed) = keys.layer_as_written(gguf, layer)? else { continue };
        for expert in 0..typed.experts.n_experts {
            interrupt::check()?;
            check_expert_finite(gguf, layer, &typed, expert as u32)?;
        }
    }
    Ok(())
}

fn check_expert_finite(gguf: &Gguf, layer: usize, typed: &TypedExperts, expert: u32) -> Result<()> {
    for index in 0..typed.experts.geometry.n_granules() {
        let granule = typed.experts.in_place(gguf, expert, index);
        let parts = [("gate", granule.gate), ("up", granule.up), ("down", granule.down)];
        for ((part, bytes), ty) in parts.into_iter().zip(typed.types) {
            if let Some((_, value)) = first_non_finite(ty, bytes) {
                let name = tensor_name(layer);
                let field = format!("tensor {name}: {part} of expert {expert}, granule {index}");
                let what = if ty.block_len() == 1 { "finite numbers" } else { "finite scales" };
                return Err(Error::format(gguf.path(), field, what, value.to_string()));
            }
        }
    }
    Ok(())
}
