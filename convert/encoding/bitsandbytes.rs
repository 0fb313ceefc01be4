//! bitsandbytes: 4-bit codes by a table (nf4, fp4), whose factors may be coded too, and 8-bit
//! integers.

use std::sync::Arc;

use safetensors::Dtype;
use serde_json::Value;

use super::Encoding;
use super::floats::{Table, of_i8};
use super::join::{Joiner, plain};
use super::scaled::{Codes, Factors, Grid, Then};
use crate::Result;
use crate::convert::checkpoint::HfTensor;
use crate::gguf::TensorType;

/// Behind a weight's name, before its kind: JSON in bytes.
const STATE: &str = ".quant_state.bitsandbytes__";

/// No state comes near.
const MAX_STATE_BYTES: u64 = 1 << 16;

/// The factor of bitsandbytes for 1/127.
const INVERSE_127: f32 = 1.0 / 127.0;

pub(super) fn join(joiner: &mut Joiner<'_>) -> Result<()> {
    for kind in ["nf4", "fp4"] {
        for name in joiner.stems(&format!("{STATE}{kind}")) {
            let state = joiner.part_of(&name, &format!("{STATE}{kind}"));
            joiner.checkpoint.remove(&state.name);
            join_4bit(joiner, name, &state)?;
        }
    }
    for module in joiner.stems(".SCB") {
        let factors = joiner.part_of(&module, ".SCB");
        let weight = joiner.part(&factors, &format!("{module}.weight"))?;
        joiner.check_dtype(&weight, &[Dtype::I8], "I8")?;
        joiner.check_dtype(&factors, &[Dtype::F32], "F32")?;
        joiner.checkpoint.remove(&factors.name);
        if let Some(format) = joiner.checkpoint.remove(&format!("{module}.weight_format")) {
            check_rows(joiner, &format)?;
        }
        let grid = joiner.grid(&weight.shape, &factors, &[])?;
        let mut parts = plain(Codes::Bytes(of_i8()), grid, Factors::of(factors), TensorType::F32);
        parts.then = Then::Times(INVERSE_127);
        let (name, shape) = (weight.name.clone(), weight.shape.clone());
        joiner.put(weight, name, shape, parts);
    }
    Ok(())
}

/// Rows one behind the other are number 0; the others were for single kinds of GPU.
fn check_rows(joiner: &Joiner<'_>, format: &HfTensor) -> Result<()> {
    joiner.check_dtype(format, &[Dtype::U8], "U8")?;
    let mut bytes = vec![0; format.shape.iter().product::<u64>().min(1) as usize];
    joiner.checkpoint.read_bytes(format, 0, &mut bytes)?;
    match bytes.first() {
        None | Some(0) => Ok(()),
        Some(other) => Err(joiner.fail(format, "", "0 (row)", other.to_string())),
    }
}

/// The description of a weight in 4 bits.
struct State {
    block: u64,
    shape: Vec<u64>,
    result: TensorType,
    /// Factors of a block of factors, and what is added to them.
    nested: Option<(u64, f32)>,
}

fn join_4bit(joiner: &mut Joiner<'_>, name: String, state: &HfTensor) -> Result<()> {
    let State { block, shape, result, nested } = read_state(joiner, state)?;
    let weight = joiner.part(state, &name)?;
    let mut factors = joiner.part(state, &format!("{name}.absmax"))?;
    let values = joiner.part(state, &format!("{name}.quant_map"))?;
    let values = table(joiner, &values, 16)?;
    let n: u64 = shape.iter().product();
    let n_bytes = weight.shape.iter().product::<u64>() * weight.dtype.bitsize() as u64 / 8;
    if n_bytes != n.div_ceil(2) {
        return Err(joiner.bad_shape(&weight, format!("bytes of {shape:?}, two codes each")));
    }
    joiner.check_shape(&factors, &[n.div_ceil(block)])?;
    if let Some((block, offset)) = nested {
        joiner.check_dtype(&factors, &[Dtype::U8], "U8")?;
        let columns = factors.shape[0];
        let of = joiner.part(state, &format!("{name}.nested_absmax"))?;
        let values = joiner.part(state, &format!("{name}.nested_quant_map"))?;
        let values = table(joiner, &values, 256)?;
        joiner.check_shape(&of, &[columns.div_ceil(block)])?;
        joiner.check_dtype(&of, &[Dtype::F32], "F32")?;
        let grid = Grid { rows: 1, columns, height: 1, width: block };
        let mut parts = plain(Codes::Bytes(values), grid, Factors::of(of), TensorType::F32);
        parts.then = Then::Plus(offset);
        factors.encoding = Some(Encoding::Scaled(Arc::new(parts)));
    } else {
        joiner.check_dtype(&factors, &[Dtype::F32], "F32")?;
    }
    // Blocks go on from row to row.
    let grid = Grid { rows: 1, columns: n, height: 1, width: block };
    let codes = Codes::Nibbles { values, high_first: true };
    let parts = plain(codes, grid, Factors::of(factors), result);
    joiner.put(weight, name, shape, parts);
    Ok(())
}

fn table(joiner: &Joiner<'_>, values: &HfTensor, n: u64) -> Result<Table> {
    joiner.check_shape(values, &[n])?;
    joiner.check_dtype(values, &[Dtype::F32], "F32")?;
    Ok(joiner.checkpoint.read_whole(values)?.into())
}

fn read_state(joiner: &Joiner<'_>, state: &HfTensor) -> Result<State> {
    joiner.check_dtype(state, &[Dtype::U8], "U8")?;
    let n: u64 = state.shape.iter().product();
    if n > MAX_STATE_BYTES {
        return Err(joiner.bad_shape(state, format!("at most {MAX_STATE_BYTES} bytes")));
    }
    let mut bytes = vec![0; n as usize];
    joiner.checkpoint.read_bytes(state, 0, &mut bytes)?;
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|e| joiner.fail(state, "", "JSON", e.to_string()))?;
    let lacks = |field: &str, expected: &str| {
        let got = value.get(field).map_or("nothing".into(), crate::convert::json::shown);
        joiner.fail(state, &format!(": {field}"), expected, got)
    };
    let count = |field: &str| value.get(field).and_then(Value::as_u64).filter(|n| *n > 0);
    let block = |field: &str| count(field).ok_or_else(|| lacks(field, "a number of elements"));
    let shape = value.get("shape").and_then(Value::as_array);
    let shape: Option<Vec<u64>> =
        shape.and_then(|dims| dims.iter().map(|d| d.as_u64().filter(|n| *n > 0)).collect());
    // The product must be one that the codes can have.
    let shape = shape.filter(|dims| dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).is_some());
    let result = match value.get("dtype").and_then(Value::as_str) {
        Some("float32") => TensorType::F32,
        Some("float16") => TensorType::F16,
        Some("bfloat16") => TensorType::BF16,
        _ => return Err(lacks("dtype", "float32, float16 or bfloat16")),
    };
    let nested = match value.get("nested_blocksize") {
        None => None,
        Some(_) => {
            let offset = value.get("nested_offset").and_then(Value::as_f64);
            let offset = offset.ok_or_else(|| lacks("nested_offset", "a number"))?;
            Some((block("nested_blocksize")?, offset as f32))
        }
    };
    let shape = shape.ok_or_else(|| lacks("shape", "a list of sizes"))?;
    Ok(State { block: block("blocksize")?, shape, result, nested })
}
