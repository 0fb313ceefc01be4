//! Weights in integers of few bits: GPTQ, AWQ and compressed-tensors' `pack-quantized`.

use safetensors::Dtype;

use super::Encoding;
use super::join::{Joiner, field, plain};
use super::packed::{Order, Packed};
use super::scaled::{Codes, Factors, Grid, Scaled, Zeros};
use crate::Result;
use crate::convert::checkpoint::HfTensor;
use crate::gguf::TensorType;

/// How `qweight` and `qzeros` are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    is_awq: bool,
    /// Added to what `qzeros` has.
    zero_offset: u32,
}

impl Kind {
    /// The first format of GPTQ stores zeros less one.
    pub const GPTQ_V1: Kind = Kind { is_awq: false, zero_offset: 1 };
    pub const GPTQ_V2: Kind = Kind { is_awq: false, zero_offset: 0 };
    pub const AWQ: Kind = Kind { is_awq: true, zero_offset: 0 };
}

pub(super) fn join_gptq(joiner: &mut Joiner<'_>) -> Result<()> {
    refuse_rotation(joiner)?;
    let (at, format) = format_of(joiner)?;
    match format.as_deref() {
        None | Some("gptq") => join_codes(joiner, Kind::GPTQ_V1),
        Some("gptq_v2") => join_codes(joiner, Kind::GPTQ_V2),
        Some(other) => Err(joiner.config.fail(&at, "gptq or gptq_v2", other)),
    }
}

pub(super) fn join_awq(joiner: &mut Joiner<'_>) -> Result<()> {
    refuse_rotation(joiner)?;
    let version = field("version");
    let (at, format) = match joiner.config.str(&version)? {
        Some(name) => (version, Some(name.to_lowercase())),
        None => format_of(joiner)?,
    };
    match format.as_deref() {
        None | Some("gemm") => join_codes(joiner, Kind::AWQ),
        Some(other) => Err(joiner.config.fail(&at, "gemm", other)),
    }
}

/// The name of a layout, by the field that GPTQ's libraries write.
fn format_of(joiner: &Joiner<'_>) -> Result<(String, Option<String>)> {
    for name in ["checkpoint_format", "format"] {
        let at = field(name);
        if let Some(format) = joiner.config.str(&at)? {
            return Ok((at, Some(format.to_lowercase())));
        }
    }
    let at = field("is_marlin_format");
    let is_marlin = joiner.config.bool(&at)? == Some(true);
    Ok((at, is_marlin.then(|| "marlin".into())))
}

/// A rotation is not undone in the weights: the model would have to turn its activations.
fn refuse_rotation(joiner: &Joiner<'_>) -> Result<()> {
    let at = field("rotation");
    match joiner.config.str(&at)? {
        Some(name) => Err(joiner.config.fail(&at, "no rotation", name)),
        None => Ok(()),
    }
}

/// Joins each `qweight` with its `scales`, `qzeros` and `g_idx`.
pub(super) fn join_codes(joiner: &mut Joiner<'_>, kind: Kind) -> Result<()> {
    for module in joiner.stems(".qweight") {
        let codes = joiner.part_of(&module, ".qweight");
        let scales = joiner.part(&codes, &format!("{module}.scales"))?;
        let zeros = joiner.part(&codes, &format!("{module}.qzeros"))?;
        let order = joiner.checkpoint.remove(&format!("{module}.g_idx"));
        for part in [&codes, &zeros] {
            joiner.check_dtype(part, &[Dtype::I32], "I32")?;
        }
        if !Joiner::is_float(&scales) {
            return Err(joiner.checkpoint.bad_dtype(&scales, "F32, F16 or BF16"));
        }
        let ([groups, out], [_, n_words]) = (&scales.shape[..], &zeros.shape[..]) else {
            return Err(joiner.bad_shape(&scales, "two axes, and two of qzeros"));
        };
        let (groups, out) = (*groups, *out);
        // Few outputs take as many words at one width as at another.
        let told = joiner.config.count(&field("bits"))?.filter(|bits| [2, 3, 4, 8].contains(bits));
        let mut widths = told.map(|bits| bits as u32).into_iter().chain([2, 3, 4, 8]);
        let bits = widths.find(|bits| super::packed::words(out, *bits) == *n_words);
        let Some(bits) = bits.filter(|_| groups > 0 && out > 0) else {
            let expected = format!("words of 2, 3, 4 or 8 bits for {out} outputs");
            return Err(joiner.bad_shape(&zeros, expected));
        };
        let packed = Packed { bits, order: kind.order(bits), plus: 0, minus: 0 };
        let mut of_zeros = packed.clone();
        of_zeros.plus = kind.zero_offset;
        if !kind.is_awq {
            of_zeros.order = Order::ColumnsApart;
        }
        joiner.check_shape(&zeros, &of_zeros.shape(out, groups))?;
        let n_in = match kind.is_awq {
            true => codes.shape.first().copied().unwrap_or(0),
            false => {
                let whole = codes.shape.first().map_or(0, |n| n * 32 / u64::from(bits));
                let told = order.as_ref().map_or(whole, |o| o.shape.iter().product());
                told.min(whole)
            }
        };
        joiner.check_shape(&codes, &packed.shape(out, n_in))?;
        let width = group_size(joiner, &scales, n_in)?;
        let grid = Grid { rows: out, columns: n_in, height: 1, width };
        let mut factors = Factors::of(scales);
        factors.transposed = true;
        let mut parts = plain(Codes::Packed(packed), grid, factors, TensorType::F32);
        parts.zeros = Some(Zeros::Packed(Box::new(zeros), of_zeros));
        if let Some(order) = order.filter(|_| !kind.is_awq) {
            set_order(joiner, &mut parts, order)?;
        }
        joiner.put(codes, format!("{module}.weight"), vec![out, n_in], parts);
    }
    Ok(())
}

impl Kind {
    fn order(self, bits: u32) -> Order {
        match (self.is_awq, bits) {
            (false, _) => Order::RowsApart,
            (true, 4) => Order::Awq,
            (true, _) => Order::ColumnsApart,
        }
    }
}

/// Columns of a group: all have as many, but for the last if the config says so.
fn group_size(joiner: &Joiner<'_>, scales: &HfTensor, n_in: u64) -> Result<u64> {
    let groups = scales.shape[0];
    if n_in > 0 && n_in.is_multiple_of(groups) {
        return Ok(n_in / groups);
    }
    let at = joiner.config.at(&field("group_size")).and_then(|v| v.as_u64()).filter(|n| *n > 0);
    match at.filter(|size| n_in.div_ceil(*size) == groups) {
        Some(size) => Ok(size),
        None => Err(joiner.bad_shape(scales, format!("groups of {n_in} inputs"))),
    }
}

/// Takes the group of each column from a tensor, unless columns of a group lie together.
pub(super) fn set_order(joiner: &Joiner<'_>, parts: &mut Scaled, order: HfTensor) -> Result<()> {
    joiner.check_dtype(&order, &[Dtype::I32, Dtype::I64], "I32 or I64")?;
    joiner.check_shape(&order, &[parts.grid.columns])?;
    let groups = joiner.checkpoint.read_whole(&order)?;
    let n = parts.grid.across();
    if let Some(odd) = groups.iter().find(|g| !(0.0..n as f32).contains(*g)) {
        let expected = format!("groups 0 to {}", n - 1);
        return Err(joiner.fail(&order, "", expected, odd.to_string()));
    }
    let width = parts.grid.width;
    let is_plain = (0..).zip(&groups).all(|(i, g): (u64, _)| i / width == *g as u64);
    parts.factors.order = (!is_plain).then(|| Box::new(order));
    Ok(())
}

/// compressed-tensors' `weight_packed`, whose codes are signed.
pub(super) fn join_packed(
    joiner: &mut Joiner<'_>,
    codes: HfTensor,
    scale: HfTensor,
    name: String,
) -> Result<()> {
    let result = match scale.encoding {
        Some(Encoding::Float(ty)) => ty,
        _ => return Err(joiner.checkpoint.bad_dtype(&scale, "F32, F16 or BF16")),
    };
    let shape = match joiner.checkpoint.remove(&format!("{name}_shape")) {
        Some(told) => {
            let told = joiner.checkpoint.read_whole(&told)?;
            told.into_iter().map(|n| n as u64).collect()
        }
        None => codes.shape.clone(),
    };
    let ([outer @ .., columns], [outer_of_codes @ .., n_words]) = (&shape[..], &codes.shape[..])
    else {
        return Err(joiner.bad_shape(&codes, "rows of words"));
    };
    let told = bits_of(joiner)?;
    let bits = told.iter().find(|bits| super::packed::words(*columns, **bits) == *n_words);
    let Some(bits) = bits.copied().filter(|_| outer == outer_of_codes) else {
        let expected = format!("{shape:?} in words of {told:?} bits");
        return Err(joiner.bad_shape(&codes, expected));
    };
    let minus = 1 << (bits - 1);
    let packed = Packed { bits, order: Order::Rows, plus: 0, minus };
    let grid = joiner.grid(&shape, &scale, &[])?;
    let zeros = match joiner.checkpoint.remove(&format!("{name}_zero_point")) {
        Some(zeros) if zeros.dtype == Dtype::I32 && zeros.shape != scale.shape => {
            let packed = Packed { bits, order: Order::Columns, plus: 0, minus };
            joiner.check_shape(&zeros, &packed.shape(grid.rows, grid.across()))?;
            Some(Zeros::Packed(Box::new(zeros), packed))
        }
        Some(zeros) => Some(joiner.plain_zeros(zeros, &scale)?),
        None => None,
    };
    let order = joiner.checkpoint.remove(&format!("{name}_g_idx"));
    let mut parts = plain(Codes::Packed(packed), grid, Factors::of(scale), result);
    parts.zeros = zeros;
    if let Some(order) = order {
        set_order(joiner, &mut parts, order)?;
    }
    joiner.put(codes, name, shape, parts);
    Ok(())
}

/// The numbers of bits of the groups of a config.
fn bits_of(joiner: &Joiner<'_>) -> Result<Vec<u32>> {
    let groups = joiner.config.entries(&field("config_groups"))?;
    let of_group = |group: &serde_json::Value| group.get("weights")?.get("num_bits")?.as_u64();
    let bits = groups.into_iter().filter_map(|(_, group)| of_group(group));
    Ok(bits.filter(|bits| (1..=8).contains(bits)).map(|bits| bits as u32).collect())
}
