//! How a checkpoint stores values: floats, 8-bit floats under scales (fine-grained FP8, as
//! DeepSeek-V3 is published), and 4-bit floats in blocks of 32 (OCP MX, as gpt-oss is published).
//!
//! The last two are each a pair of tensors. They appear as one here, in elements: `X` of
//! `X` and `X_scale_inv`; `X_blocks` of `X_blocks` and `X_scales`.

use safetensors::Dtype;

use super::checkpoint::{Checkpoint, HfTensor};
use super::json::{Json, shown};
use crate::gguf::TensorType;
use crate::quant;
use crate::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoding {
    Float(TensorType),
    /// Powers of two: E8M0, of scales.
    Exponents,
    /// Signed, of so many bytes, in tables: no weight is an integer.
    Integer {
        bytes: usize,
    },
    Fp8 {
        kind: Fp8,
        scale: Option<Scale>,
    },
    Mxfp4 {
        scales: Box<HfTensor>,
    },
}

/// The bit layouts of 8-bit floats (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8 {
    /// Bias 7, no infinities; a magnitude of all ones is NaN.
    E4M3,
    /// Bias 15, the upper half of an F16.
    E5M2,
}

/// The factors of 8-bit floats: one number a block of rows × columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scale {
    tensor: Box<HfTensor>,
    rows: u64,
    columns: u64,
}

/// Elements of an MX block, and bytes of their codes: two a byte.
pub const MX_BLOCK: u64 = 32;
const MX_CODE_BYTES: u64 = MX_BLOCK / 2;

/// The magnitudes of a 4-bit float (E2M1); the fourth bit is the sign.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

impl Encoding {
    /// The encoding of an ordinary tensor; `None` for types that weights do not have.
    pub fn of(dtype: Dtype) -> Option<Encoding> {
        match dtype {
            Dtype::F8_E8M0 => Some(Encoding::Exponents),
            Dtype::I32 => Some(Encoding::Integer { bytes: 4 }),
            Dtype::I64 => Some(Encoding::Integer { bytes: 8 }),
            Dtype::F32 => Some(Encoding::Float(TensorType::F32)),
            Dtype::F16 => Some(Encoding::Float(TensorType::F16)),
            Dtype::BF16 => Some(Encoding::Float(TensorType::BF16)),
            Dtype::F8_E4M3 => Some(Encoding::Fp8 { kind: Fp8::E4M3, scale: None }),
            Dtype::F8_E5M2 => Some(Encoding::Fp8 { kind: Fp8::E5M2, scale: None }),
            _ => None,
        }
    }

    /// The smallest GGUF float type that has all values, but for scaled ones: those are products
    /// rounded once.
    pub fn float_type(&self) -> TensorType {
        match self {
            Encoding::Float(ty) => *ty,
            Encoding::Integer { .. } => TensorType::I32,
            Encoding::Fp8 { .. } | Encoding::Mxfp4 { .. } | Encoding::Exponents => TensorType::BF16,
        }
    }
}

/// Joins the pairs of a quantised checkpoint to one tensor each, as its config says they are.
pub fn join_pairs(checkpoint: &mut Checkpoint, config: &Json) -> Result<()> {
    let Some(quantization) = config.at("quantization_config") else { return Ok(()) };
    let method = config.str("quantization_config.quant_method")?;
    match method {
        Some("fp8") => join_fp8(checkpoint, config),
        Some("mxfp4") => join_mxfp4(checkpoint),
        _ => {
            let got = method.map_or_else(|| shown(quantization), |m| format!("{m} weights"));
            let expected = "weights in F32, F16, BF16, fp8 or mxfp4";
            Err(config.fail("quantization_config", expected, got))
        }
    }
}

fn join_fp8(checkpoint: &mut Checkpoint, config: &Json) -> Result<()> {
    const FIELD: &str = "quantization_config.weight_block_size";
    let block = config.elements(FIELD)?;
    let block: Vec<u64> = block.iter().filter_map(|v| v.as_u64().filter(|n| *n > 0)).collect();
    let names: Vec<String> = checkpoint.tensors().map(|t| t.name.clone()).collect();
    for name in names {
        // What activations were divided by when the model was calibrated.
        if name.ends_with("activation_scale") || name.ends_with("input_scale") {
            checkpoint.remove(&name);
        }
        let base = name.strip_suffix("_scale_inv").or_else(|| name.strip_suffix("_scale"));
        let base = base.map(str::to_owned);
        let base = base.or_else(|| Some(format!("{}.weight", name.strip_suffix(".scale")?)));
        let Some(weight) = base.and_then(|base| checkpoint.get(&base).cloned()) else { continue };
        let is_coded = matches!(weight.dtype, Dtype::I8 | Dtype::U8)
            || matches!(weight.encoding, Some(Encoding::Fp8 { .. }));
        if name.ends_with(".scale") && !is_coded {
            continue; // a factor of its own
        }
        let Some(scale) = checkpoint.remove(&name) else { continue };
        let mut weight = weight;
        if matches!(weight.dtype, Dtype::I8 | Dtype::U8) {
            join_fp4(checkpoint, weight, scale)?;
            continue;
        }
        let Some(Encoding::Fp8 { kind, .. }) = weight.encoding else {
            return Err(checkpoint.bad_dtype(&weight, "F8_E4M3 or F8_E5M2 beside a scale"));
        };
        let scale = scale_of(&weight, scale, &block).map_err(|(expected, scale)| {
            let field = format!("tensor {}: shape", scale.name);
            let got = format!("{:?}", scale.shape);
            Error::format(checkpoint.path_of(&scale), field, expected, got)
        })?;
        weight.encoding = Some(Encoding::Fp8 { kind, scale: Some(scale) });
        checkpoint.insert(weight);
    }
    Ok(())
}

/// 4-bit floats, two a byte, and a power of two for each 32 of a row (DeepSeek-V4's experts).
fn join_fp4(checkpoint: &mut Checkpoint, mut weight: HfTensor, scales: HfTensor) -> Result<()> {
    if !matches!(scales.dtype, Dtype::F8_E8M0 | Dtype::U8) {
        return Err(checkpoint.bad_dtype(&scales, "F8_E8M0 or U8 beside 4-bit floats"));
    }
    let mut expected = scales.shape.clone();
    if let Some(columns) = expected.last_mut() {
        *columns *= MX_CODE_BYTES;
    }
    if weight.shape != expected {
        let field = format!("tensor {}: shape", weight.name);
        let (expected, got) = (format!("{expected:?}"), format!("{:?}", weight.shape));
        return Err(Error::format(checkpoint.path_of(&weight), field, expected, got));
    }
    if let Some(columns) = weight.shape.last_mut() {
        *columns *= 2;
    }
    weight.encoding = Some(Encoding::Mxfp4 { scales: Box::new(scales) });
    checkpoint.insert(weight);
    Ok(())
}

/// How a scale covers its weight: one number, one a row, or one a block.
fn scale_of(
    weight: &HfTensor,
    scale: HfTensor,
    block: &[u64],
) -> std::result::Result<Scale, (String, HfTensor)> {
    let all: u64 = weight.shape.iter().product();
    let columns = weight.shape.last().copied().unwrap_or(1).max(1);
    let rows = all / columns;
    let n: u64 = scale.shape.iter().product();
    let is_scale = |e: &Encoding| matches!(e, Encoding::Float(_) | Encoding::Exponents);
    if !scale.encoding.as_ref().is_some_and(is_scale) {
        return Err(("a scale in F32, F16, BF16 or F8_E8M0".into(), scale));
    }
    if n == 1 {
        return Ok(Scale { tensor: Box::new(scale), rows: rows.max(1), columns });
    }
    if let ([height, width], [.., weight_rows, _]) = (block, &weight.shape[..]) {
        let mut expected = weight.shape.clone();
        let last = expected.len() - 1;
        expected[last - 1] = weight_rows.div_ceil(*height);
        expected[last] = columns.div_ceil(*width);
        return match scale.shape == expected {
            true => Ok(Scale { tensor: Box::new(scale), rows: *height, columns: *width }),
            false => Err((format!("{expected:?}, one for each {height} × {width}"), scale)),
        };
    }
    match n == rows {
        true => Ok(Scale { tensor: Box::new(scale), rows: 1, columns }),
        false => Err((format!("one number, or one for each of {rows} rows"), scale)),
    }
}

fn join_mxfp4(checkpoint: &mut Checkpoint) -> Result<()> {
    let blocks = checkpoint.tensors().filter(|t| t.name.ends_with("_blocks")).cloned();
    for mut blocks in blocks.collect::<Vec<_>>() {
        let name = format!("{}scales", blocks.name.trim_end_matches("blocks"));
        let Some(scales) = checkpoint.remove(&name) else {
            let got = "none of that name";
            let field = format!("tensor {}", blocks.name);
            return Err(Error::format(
                checkpoint.path_of(&blocks),
                field,
                format!("{name} too"),
                got,
            ));
        };
        for part in [&blocks, &scales] {
            if part.dtype != Dtype::U8 {
                return Err(checkpoint.bad_dtype(part, "U8"));
            }
        }
        let mut expected = scales.shape.clone();
        expected.push(MX_CODE_BYTES);
        if blocks.shape != expected {
            let (field, got) = (format!("tensor {}: shape", blocks.name), &blocks.shape);
            let (expected, got) = (format!("{expected:?}"), format!("{got:?}"));
            return Err(Error::format(checkpoint.path_of(&blocks), field, expected, got));
        }
        blocks.shape.pop();
        if let Some(columns) = blocks.shape.last_mut() {
            *columns *= MX_BLOCK;
        }
        blocks.encoding = Some(Encoding::Mxfp4 { scales: Box::new(scales) });
        checkpoint.insert(blocks);
    }
    Ok(())
}

impl Checkpoint {
    /// Reads `out.len()` elements from the tensor's element `first` on, as f32.
    pub fn read(&self, tensor: &HfTensor, first: u64, out: &mut [f32]) -> Result<()> {
        match &tensor.encoding {
            None => Err(self.bad_type(tensor)),
            Some(Encoding::Float(ty)) => {
                let width = ty.block_bytes();
                let mut bytes = vec![0; out.len() * width];
                self.read_bytes(tensor, first * width as u64, &mut bytes)?;
                quant::dequantize(*ty, &bytes, out);
                Ok(())
            }
            Some(Encoding::Exponents) => {
                let mut bytes = vec![0; out.len()];
                self.read_bytes(tensor, first, &mut bytes)?;
                out.iter_mut().zip(bytes).for_each(|(x, byte)| *x = e8m0(byte));
                Ok(())
            }
            // Ids of experts: a float has them all.
            Some(Encoding::Integer { bytes: width }) => {
                let mut bytes = vec![0; out.len() * width];
                self.read_bytes(tensor, first * *width as u64, &mut bytes)?;
                for (x, bytes) in out.iter_mut().zip(bytes.chunks_exact(*width)) {
                    let mut wide = [if bytes[width - 1] & 0x80 == 0 { 0 } else { 0xff }; 8];
                    wide[..*width].copy_from_slice(bytes);
                    *x = i64::from_le_bytes(wide) as f32;
                }
                Ok(())
            }
            Some(Encoding::Fp8 { kind, scale }) => {
                let mut bytes = vec![0; out.len()];
                self.read_bytes(tensor, first, &mut bytes)?;
                let table = fp8_table(*kind);
                for (x, byte) in out.iter_mut().zip(bytes) {
                    *x = table[usize::from(byte)];
                }
                match scale {
                    Some(scale) => self.apply_scale(tensor, scale, first, out),
                    None => Ok(()),
                }
            }
            Some(Encoding::Mxfp4 { .. }) => {
                let (start, skip) = (first / MX_BLOCK, (first % MX_BLOCK) as usize);
                let n_blocks = (first + out.len() as u64).div_ceil(MX_BLOCK) - start;
                let mut values = vec![0.0; (n_blocks * MX_BLOCK) as usize];
                let (codes, scales) = self.mx_blocks(tensor, start, n_blocks)?;
                decode_mx(&codes, &scales, &mut values);
                out.copy_from_slice(&values[skip..skip + out.len()]);
                Ok(())
            }
        }
    }

    /// As GGUF stores them: a scale, then 16 bytes whose low halves hold elements 0 to 15 and
    /// whose high halves elements 16 to 31. Bits move, no value changes.
    pub fn read_mxfp4(&self, tensor: &HfTensor, first_block: u64, out: &mut [u8]) -> Result<()> {
        let bytes = TensorType::MXFP4.block_bytes();
        let n = (out.len() / bytes) as u64;
        let (codes, scales) = self.mx_blocks(tensor, first_block, n)?;
        let codes = codes.chunks_exact(MX_CODE_BYTES as usize);
        for ((out, codes), scale) in out.chunks_exact_mut(bytes).zip(codes).zip(scales) {
            out[0] = scale;
            // The checkpoint has elements 2i and 2i + 1 in byte i, low half first.
            let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 0xf;
            for (j, byte) in out[1..].iter_mut().enumerate() {
                *byte = code(j) | code(j + 16) << 4;
            }
        }
        Ok(())
    }

    fn mx_blocks(&self, tensor: &HfTensor, first: u64, n: u64) -> Result<(Vec<u8>, Vec<u8>)> {
        let Some(Encoding::Mxfp4 { scales: of }) = &tensor.encoding else {
            return Err(self.bad_type(tensor));
        };
        let (mut codes, mut scales) = (vec![0; (n * MX_CODE_BYTES) as usize], vec![0; n as usize]);
        self.read_bytes(tensor, first * MX_CODE_BYTES, &mut codes)?;
        self.read_bytes(of, first, &mut scales)?;
        Ok((codes, scales))
    }

    fn apply_scale(
        &self,
        weight: &HfTensor,
        scale: &Scale,
        first: u64,
        out: &mut [f32],
    ) -> Result<()> {
        let columns = weight.shape.last().copied().unwrap_or(1).max(1);
        let rows = weight.shape.iter().rev().nth(1).copied().unwrap_or(1).max(1);
        let (per_matrix, per_row) = match scale.tensor.shape.iter().product::<u64>() {
            1 => (0, 1),
            _ => (rows.div_ceil(scale.rows), columns.div_ceil(scale.columns)),
        };
        let scale_row = |row: u64| match per_matrix {
            0 => 0,
            _ => row / rows * per_matrix + row % rows / scale.rows,
        };
        let end = first + out.len() as u64;
        let (low, high) = (scale_row(first / columns), scale_row((end - 1) / columns));
        let mut factors = vec![0.0; ((high - low + 1) * per_row) as usize];
        self.read(&scale.tensor, low * per_row, &mut factors)?;
        for (i, x) in (first..end).zip(out) {
            let (row, column) = (i / columns, i % columns);
            let at = (scale_row(row) - low) * per_row + (column / scale.columns).min(per_row - 1);
            *x *= factors[at as usize];
        }
        Ok(())
    }
}

fn decode_mx(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let blocks = codes.chunks_exact(MX_CODE_BYTES as usize).zip(scales);
    for (out, (codes, scale)) in out.chunks_exact_mut(MX_BLOCK as usize).zip(blocks) {
        let scale = e8m0(*scale);
        for (pair, byte) in out.chunks_exact_mut(2).zip(codes) {
            pair[0] = scale * e2m1(byte & 0xf);
            pair[1] = scale * e2m1(byte >> 4);
        }
    }
}

/// A power of two with bias 127; the smallest is a subnormal f32.
fn e8m0(bits: u8) -> f32 {
    match bits {
        0 => f32::from_bits(1 << 22),
        n => f32::from_bits(u32::from(n) << 23),
    }
}

fn e2m1(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn fp8_table(kind: Fp8) -> [f32; 256] {
    std::array::from_fn(|byte| {
        let byte = byte as u8;
        let magnitude = match kind {
            Fp8::E4M3 => e4m3(byte & 0x7f),
            Fp8::E5M2 => e5m2(byte & 0x7f),
        };
        if byte & 0x80 == 0 { magnitude } else { -magnitude }
    })
}

fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3), f32::from(bits & 7));
    match (exponent, bits) {
        (_, 0x7f) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

fn e5m2(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 2), f32::from(bits & 3));
    match (exponent, bits & 3) {
        (31, 0) => f32::INFINITY,
        (31, _) => f32::NAN,
        (0, _) => mantissa / 65536.0,
        _ => (1.0 + mantissa / 4.0) * 2f32.powi(exponent - 15),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that torch gives for `torch.tensor([…], dtype=torch.uint8).view(dtype).float()`.
    #[test]
    fn eight_bit_floats_are_those_of_torch() {
        let e4m3 = fp8_table(Fp8::E4M3);
        let known = [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x3f, 1.875),
            (0x7e, 448.0),
            (0x81, -0.001953125),
            (0xc5, -3.25),
            (0xfe, -448.0),
        ];
        for (bits, value) in known {
            assert_eq!(e4m3[bits], value, "{bits:#x}");
        }
        assert!(e4m3[0x7f].is_nan() && e4m3[0xff].is_nan());
        let e5m2 = fp8_table(Fp8::E5M2);
        // It is the upper half of an F16.
        for (bits, value) in e5m2.iter().enumerate() {
            let mut half = [0.0];
            quant::dequantize(TensorType::F16, &[0, bits as u8], &mut half);
            assert!(half[0] == *value || (half[0].is_nan() && value.is_nan()), "{bits:#x}");
        }
    }

    /// DeepSeek-V4's names and types.
    #[test]
    fn weights_beside_exponents() {
        use serde_json::json;
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"quantization_config": {
            "quant_method": "fp8", "weight_block_size": [2, 2],
        }});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let place = |dtype: &str, shape: [u64; 2], from: u64, to: u64| {
            let offsets = [from, to];
            json!({"dtype": dtype, "shape": shape, "data_offsets": offsets})
        };
        let header = json!({
            "a.weight": place("I8", [1, 32], 0, 32),
            "a.scale": place("F8_E8M0", [1, 2], 32, 34),
            "b.weight": place("F8_E4M3", [2, 4], 34, 42),
            "b.scale": place("F8_E8M0", [1, 2], 42, 44),
        });
        let header = header.to_string().into_bytes();
        let mut data = [&[0x72u8][..], &[0; 30], &[0xf9], &[129, 126]].concat();
        data.extend([0x38, 0x38, 0x38, 0xc5, 0x38, 0, 0, 0x01, 128, 126]);
        let whole = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        std::fs::write(dir.path().join("model.safetensors"), whole).unwrap();
        let mut checkpoint = Checkpoint::open(dir.path()).unwrap();
        let config = Json::open(dir.path().join("config.json")).unwrap();
        join_pairs(&mut checkpoint, &config).unwrap();
        let read = |name: &str, n: usize| {
            let mut out = vec![0.0; n];
            checkpoint.read(checkpoint.get(name).unwrap(), 0, &mut out).unwrap();
            out
        };
        let a = read("a.weight", 64);
        assert_eq!((a[0], a[1], a[2]), (4.0, 24.0, 0.0));
        assert_eq!((a[62], a[63]), (-0.25, -3.0));
        assert_eq!(checkpoint.get("a.weight").unwrap().shape, [1, 64]);
        let b = [2.0, 2.0, 0.5, -1.625, 2.0, 0.0, 0.0, 0.000_976_562_5];
        assert_eq!(read("b.weight", 8), b);
        assert_eq!(checkpoint.tensors().count(), 2);
    }

    #[test]
    fn four_bit_floats_under_powers_of_two() {
        let mut codes = [0; 16];
        codes[0] = 0x72;
        codes[15] = 0xf9;
        let mut out = [9.0; 32];
        decode_mx(&codes, &[129], &mut out);
        assert_eq!((out[0], out[1], out[2]), (4.0, 24.0, 0.0));
        assert_eq!((out[30], out[31]), (-2.0, -24.0));
        assert_eq!(e8m0(127), 1.0);
        assert_eq!(e8m0(0), 2f32.powi(-127));
        assert_eq!(e8m0(254), 2f32.powi(127));
    }
}
