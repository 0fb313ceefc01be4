//! Which tensors of a quantised checkpoint are one weight: by the names that each library writes
//! and by what config.json or hf_quant_config.json says.

use std::sync::Arc;

use safetensors::Dtype;

use super::floats::{Table, of_e2m1, of_e2m1_with_one_zero, of_fp8, of_i8};
use super::scaled::{Codes, Factors, Grid, Scaled, Then, Zeros};
use super::{Encoding, bitsandbytes, grid, integers};
use crate::convert::checkpoint::{Checkpoint, HfTensor};
use crate::convert::json::{Json, shown};
use crate::gguf::TensorType;
use crate::{Error, Result};

/// The field of config.json that describes how a checkpoint is quantised.
pub(super) const CONFIG: &str = "quantization_config";

/// Modelopt's own file, where config.json does not say it.
const MODELOPT_FILE: &str = "hf_quant_config.json";

/// Files of old AutoGPTQ and AutoAWQ, where config.json does not say it: their fields are those of
/// `quantization_config`, some under other names.
const OLD_FILES: [(&str, &str); 2] =
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq")];
const OLD_NAMES: [(&str, &str); 2] = [("w_bit", "bits"), ("q_group_size", "group_size")];

/// Last parts of names of what activations, keys and values are divided by: these stay floats here.
const OF_ACTIVATIONS: [&str; 14] = [
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "prob_scale",
    "k_zero_point",
    "v_zero_point",
];

/// Libraries whose scales lie beside the weights, under names that begin alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Library {
    FineGrained,
    CompressedTensors,
    Modelopt,
    Fbgemm,
}

/// A checkpoint whose weights are being joined.
pub(super) struct Joiner<'a> {
    pub checkpoint: &'a mut Checkpoint,
    /// The file that says how it is quantised.
    pub config: &'a Json,
}

/// Joins the parts of each quantised weight of a checkpoint to one tensor, under the weight's name.
pub fn join(checkpoint: &mut Checkpoint, config: &Json) -> Result<()> {
    if config.at(CONFIG).is_none() {
        for (name, method) in OLD_FILES {
            if let Some(mut file) = Json::open_optional(checkpoint.folder().join(name))? {
                file.rename(&OLD_NAMES);
                file.set_default("quant_method", method);
                let config = &file.within(CONFIG);
                return Joiner { checkpoint, config }.join();
            }
        }
        let file = Json::open_optional(checkpoint.folder().join(MODELOPT_FILE))?;
        let Some(file) = file else { return Ok(()) };
        let mut joiner = Joiner { checkpoint, config: &file };
        joiner.check_modelopt("quantization")?;
        return joiner.join_scaled(Library::Modelopt);
    }
    Joiner { checkpoint, config }.join()
}

impl Joiner<'_> {
    fn join(&mut self) -> Result<()> {
        let mut method = self.config.str(&field("quant_method"))?;
        for name in ["load_in_4bit", "load_in_8bit"] {
            if self.config.bool(&field(name))? == Some(true) {
                method = Some("bitsandbytes");
            }
        }
        match method {
            Some("fp8" | "mxfp8") => self.join_scaled(Library::FineGrained),
            Some("mxfp4") => self.join_mxfp4(),
            Some("compressed-tensors" | "compressed_tensors") => {
                self.check_compressed()?;
                self.join_scaled(Library::CompressedTensors)
            }
            Some("modelopt" | "modelopt_fp4" | "modelopt_mixed") => {
                self.check_modelopt(CONFIG)?;
                self.join_scaled(Library::Modelopt)
            }
            Some("fbgemm_fp8") => self.join_scaled(Library::Fbgemm),
            Some("gptq") => integers::join_gptq(self),
            Some("awq") => integers::join_awq(self),
            Some("auto-round" | "auto_round" | "intel/auto-round") => self.join_auto_round(),
            Some("bitsandbytes") => bitsandbytes::join(self),
            Some("torchao") => self.join_torchao(),
            _ => {
                let value = self.config.at(CONFIG).map(shown).unwrap_or_default();
                let got = method.map_or(value, |m| format!("{m} weights"));
                let expected = "weights in F32, F16, BF16, fp8, mxfp8, mxfp4, fbgemm_fp8, gptq, \
                                awq, auto-round, bitsandbytes, torchao, modelopt or \
                                compressed-tensors";
                Err(self.config.fail(CONFIG, expected, got))
            }
        }
    }

    pub fn names(&self) -> Vec<String> {
        self.checkpoint.tensors().map(|t| t.name.clone()).collect()
    }

    /// The names that end so, without the ending.
    pub fn stems(&self, end: &str) -> Vec<String> {
        let names = self.checkpoint.tensors().map(|t| t.name.as_str());
        names.filter_map(|name| name.strip_suffix(end)).map(str::to_owned).collect()
    }

    pub fn fail(
        &self,
        tensor: &HfTensor,
        part: &str,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Error {
        let field = format!("tensor {}{part}", tensor.name);
        Error::format(self.checkpoint.path_of(tensor), field, expected, got)
    }

    pub fn bad_shape(&self, tensor: &HfTensor, expected: impl Into<String>) -> Error {
        self.fail(tensor, ": shape", expected, format!("{:?}", tensor.shape))
    }

    pub fn check_shape(&self, tensor: &HfTensor, expected: &[u64]) -> Result<()> {
        match tensor.shape == expected {
            true => Ok(()),
            false => Err(self.bad_shape(tensor, format!("{expected:?}"))),
        }
    }

    pub fn check_dtype(&self, tensor: &HfTensor, allowed: &[Dtype], words: &str) -> Result<()> {
        match allowed.contains(&tensor.dtype) {
            true => Ok(()),
            false => Err(self.checkpoint.bad_dtype(tensor, words)),
        }
    }

    /// Takes a part of a weight, which there must be.
    pub fn part(&mut self, weight: &HfTensor, name: &str) -> Result<HfTensor> {
        let part = self.checkpoint.remove(name);
        part.ok_or_else(|| self.fail(weight, "", format!("{name} too"), "none of that name"))
    }

    pub fn is_float(tensor: &HfTensor) -> bool {
        matches!(tensor.encoding, Some(Encoding::Float(_)))
    }

    /// Puts the weight that `parts` make in the place of its codes.
    pub fn put(&mut self, mut codes: HfTensor, name: String, shape: Vec<u64>, parts: Scaled) {
        self.checkpoint.remove(&codes.name);
        codes.encoding = Some(Encoding::Scaled(Arc::new(parts)));
        (codes.name, codes.shape) = (name, shape);
        self.checkpoint.insert(codes);
    }

    /// Refuses the other things that compressed-tensors can do to weights.
    fn check_compressed(&self) -> Result<()> {
        let sparsity = field("sparsity_config.format");
        if let Some(format) = self.config.str(&sparsity)?.filter(|format| *format != "dense") {
            return Err(self.config.fail(&sparsity, "dense", format));
        }
        let transforms = field("transform_config.config_groups");
        match self.config.entries(&transforms)?.first() {
            None => Ok(()),
            Some((name, _)) => Err(self.config.fail(&transforms, "no transforms", *name)),
        }
    }

    /// Refuses modelopt's other formats, be they of all layers or of one.
    fn check_modelopt(&self, at: &str) -> Result<()> {
        const ALGORITHMS: [&str; 10] = [
            "FP8",
            "FP8_PER_CHANNEL_PER_TOKEN",
            "FP8_PB_WO",
            "FP8_PB_REAL",
            "NVFP4",
            "W4A16_NVFP4",
            "MXFP4",
            "MXFP8",
            "W4A8_MXFP4_FP8",
            "W8A16",
        ];
        let check = |field: &str| match self.config.str(field)? {
            Some(name) if !ALGORITHMS.contains(&name.to_uppercase().as_str()) => {
                let expected = format!("one of {}", ALGORITHMS.join(", "));
                Err(self.config.fail(field, expected, name))
            }
            _ => Ok(()),
        };
        let all = format!("{at}.quant_algo");
        if self.config.str(&all)? != Some("MIXED_PRECISION") {
            return check(&all);
        }
        // Names of layers have dots, which are no path of fields.
        let layers = format!("{at}.quantized_layers");
        for (layer, of) in self.config.entries(&layers)? {
            let name = of.get("quant_algo").and_then(|v| v.as_str()).unwrap_or("nothing");
            if !ALGORITHMS.contains(&name.to_uppercase().as_str()) {
                let expected = format!("one of {} for {layer}", ALGORITHMS.join(", "));
                return Err(self.config.fail(&layers, expected, name));
            }
        }
        Ok(())
    }

    /// Auto-round packs as other libraries do and says as which.
    fn join_auto_round(&mut self) -> Result<()> {
        let at = field("packing_format");
        let format = self.config.str(&at)?;
        match format.map_or("", |f| f.strip_prefix("auto_round:").unwrap_or(f)) {
            "auto_gptq" | "gptq" => integers::join_codes(self, integers::Kind::GPTQ_V1),
            "auto_round" | "gptqmodel" => integers::join_codes(self, integers::Kind::GPTQ_V2),
            "auto_awq" | "awq" => integers::join_codes(self, integers::Kind::AWQ),
            "llm_compressor" => self.join_scaled(Library::CompressedTensors),
            _ => {
                let expected = "auto_round, with :auto_gptq, :gptqmodel, :auto_awq or \
                                :llm_compressor behind it";
                Err(self.config.fail(&at, expected, format.unwrap_or("nothing")))
            }
        }
    }

    fn join_torchao(&mut self) -> Result<()> {
        for stem in self.stems("_qdata") {
            let codes = self.part_of(&stem, "_qdata");
            self.check_dtype(&codes, &FP8, "F8_E4M3 or F8_E5M2 of a Float8Tensor")?;
            let scale = self.part(&codes, &format!("{stem}_scale"))?;
            // `a._weight` is the parameter `a.weight`.
            let name = match stem.rsplit_once("._") {
                Some((module, parameter)) => format!("{module}.{parameter}"),
                None => stem.trim_start_matches('_').to_owned(),
            };
            let parts = self.scaled_bytes(&codes, scale, None, TensorType::F32, &[])?;
            let shape = codes.shape.clone();
            self.put(codes, name, shape, parts);
        }
        self.check_scaled()
    }

    /// A tensor that `stems` named.
    pub fn part_of(&self, stem: &str, end: &str) -> HfTensor {
        self.checkpoint.get(&format!("{stem}{end}")).expect("a name that was listed").clone()
    }

    /// Weights in 8-bit or 4-bit floats or in integers whose scales have their names and an ending.
    fn join_scaled(&mut self, library: Library) -> Result<()> {
        let blocks = self.block_sizes(library)?;
        for name in self.names() {
            let last = name.rsplit('.').next().unwrap_or_default();
            let of_stack = ["_input_scale", "_activation_scale"].iter().any(|e| name.ends_with(e));
            if of_stack || OF_ACTIVATIONS.contains(&last) {
                self.checkpoint.remove(&name);
                continue;
            }
            let Some((base, weight)) = self.scaled_by(&name, library) else { continue };
            let Some(scale) = self.checkpoint.remove(&name) else { continue };
            let stem = name.strip_suffix("_scale").unwrap_or(&base).to_owned();
            if weight.dtype == Dtype::I32 {
                integers::join_packed(self, weight, scale, base)?;
                continue;
            }
            let is_nibbles = match library {
                Library::FineGrained => matches!(weight.dtype, Dtype::I8 | Dtype::U8),
                _ => weight.dtype == Dtype::U8,
            };
            if is_nibbles {
                self.join_nibbles(weight, scale, base, &stem)?;
                continue;
            }
            let result = match (library, &scale.encoding) {
                (Library::CompressedTensors, Some(Encoding::Float(ty))) => *ty,
                _ => TensorType::F32,
            };
            let zeros = self.checkpoint.remove(&format!("{stem}_zero_point"));
            let mut parts = match self.fbgemm_columns(library, &weight, &scale) {
                Some(grid) => {
                    let codes = self.bytes(&weight)?;
                    plain(codes, grid, Factors::of(scale), result)
                }
                None => self.scaled_bytes(&weight, scale, zeros, result, &blocks)?,
            };
            if let Some(order) = self.checkpoint.remove(&format!("{stem}_g_idx")) {
                integers::set_order(self, &mut parts, order)?;
            }
            let shape = weight.shape.clone();
            self.put(weight, base, shape, parts);
        }
        self.check_scaled()
    }

    /// The weight that a scale of this name is of, with the name that it will have.
    fn scaled_by(&self, name: &str, library: Library) -> Option<(String, HfTensor)> {
        let mut bases = Vec::new();
        for end in ["_scale_inv", "_scale", "_weight_scale"] {
            bases.extend(name.strip_suffix(end).map(str::to_owned));
        }
        if library == Library::FineGrained {
            for end in [".scale", ".qscale_weight"] {
                bases.extend(name.strip_suffix(end).map(|module| format!("{module}.weight")));
            }
        }
        let coded = [Dtype::I8, Dtype::U8, Dtype::I32, Dtype::F8_E4M3, Dtype::F8_E5M2];
        for base in bases {
            for end in ["", "_packed"] {
                let weight = self.checkpoint.get(&format!("{base}{end}"));
                if let Some(weight) = weight.filter(|w| coded.contains(&w.dtype)) {
                    return Some((base, weight.clone()));
                }
            }
        }
        None
    }

    /// The blocks that a config knows of: rows and columns. Fine-grained ones have a default.
    fn block_sizes(&self, library: Library) -> Result<Vec<[u64; 2]>> {
        let pair = |list: &[serde_json::Value]| match list {
            [h, w] => Some([h.as_u64().filter(|n| *n > 0)?, w.as_u64().filter(|n| *n > 0)?]),
            _ => None,
        };
        if library == Library::FineGrained {
            const SIZE: &str = "weight_block_size";
            let is_absent = self.config.at(CONFIG).is_some_and(|of| of.get(SIZE).is_none());
            let told = pair(self.config.elements(&field(SIZE))?);
            return Ok(told.or(is_absent.then_some([128, 128])).into_iter().collect());
        }
        let groups = self.config.entries(&field("config_groups"))?;
        let of_group = |group: &serde_json::Value| {
            let blocks = group.get("weights")?.get("block_structure")?;
            pair(blocks.as_array()?)
        };
        Ok(groups.into_iter().filter_map(|(_, group)| of_group(group)).collect())
    }

    /// Llama 4's experts are [experts, in, out] and each output has a scale, of whatever shape.
    fn fbgemm_columns(
        &self,
        library: Library,
        weight: &HfTensor,
        scale: &HfTensor,
    ) -> Option<Grid> {
        let [experts, rows, columns] = weight.shape[..] else { return None };
        let fits = scale.shape == [experts, 1, columns] || scale.shape == [experts, columns, 1];
        let is_one = library == Library::Fbgemm && fits && Self::is_float(scale);
        is_one.then_some(Grid { rows, columns, height: rows, width: 1 })
    }

    fn bytes(&self, weight: &HfTensor) -> Result<Codes> {
        match weight.encoding {
            Some(Encoding::Fp8(kind)) => Ok(Codes::Bytes(of_fp8(kind))),
            _ if weight.dtype == Dtype::I8 => Ok(Codes::Bytes(of_i8())),
            _ => Err(self.checkpoint.bad_dtype(weight, "F8_E4M3, F8_E5M2 or I8 beside a scale")),
        }
    }

    /// A weight of one byte an element.
    fn scaled_bytes(
        &self,
        weight: &HfTensor,
        mut scale: HfTensor,
        zeros: Option<HfTensor>,
        result: TensorType,
        blocks: &[[u64; 2]],
    ) -> Result<Scaled> {
        let codes = self.bytes(weight)?;
        as_exponents(&mut scale);
        let grid = self.grid(&weight.shape, &scale, blocks)?;
        let zeros = zeros.map(|zeros| self.plain_zeros(zeros, &scale)).transpose()?;
        let mut parts = plain(codes, grid, Factors::of(scale), result);
        parts.zeros = zeros;
        Ok(parts)
    }

    /// The blocks that a scale has numbers for.
    pub fn grid(&self, shape: &[u64], scale: &HfTensor, blocks: &[[u64; 2]]) -> Result<Grid> {
        let encoding = scale.encoding.as_ref();
        if !encoding.is_some_and(|e| !matches!(e, Encoding::Integer { .. })) {
            return Err(self.checkpoint.bad_dtype(scale, "F32, F16, BF16 or F8_E8M0 of a scale"));
        }
        // Whoever has exponents has blocks of the format's own size.
        let is_told = !blocks.is_empty() && !matches!(encoding, Some(Encoding::Exponents));
        let found = grid::of(shape, &scale.shape, if is_told { blocks } else { &[] });
        found.map_err(|expected| self.bad_shape(scale, expected))
    }

    /// Zeros that lie as the factors do.
    pub fn plain_zeros(&self, mut zeros: HfTensor, scale: &HfTensor) -> Result<Zeros> {
        self.check_shape(&zeros, &scale.shape)?;
        match zeros.dtype {
            Dtype::I8 => zeros.encoding = Some(Encoding::Integer { bytes: 1 }),
            _ if zeros.encoding.is_some() => {}
            _ => return Err(self.checkpoint.bad_dtype(&zeros, "I8 of zero points")),
        }
        Ok(Zeros::Plain(Box::new(zeros)))
    }

    /// 4-bit floats, two a byte.
    fn join_nibbles(
        &mut self,
        weight: HfTensor,
        mut scale: HfTensor,
        name: String,
        stem: &str,
    ) -> Result<()> {
        as_exponents(&mut scale);
        let width = match scale.dtype {
            Dtype::F8_E8M0 | Dtype::U8 => 32,
            Dtype::F8_E4M3 => 16,
            _ => {
                let expected = "F8_E8M0, U8 or F8_E4M3 beside 4-bit floats";
                return Err(self.checkpoint.bad_dtype(&scale, expected));
            }
        };
        let of_all = self.checkpoint.remove(&format!("{stem}_global_scale"));
        // The library's own result has this type, whatever its scales have.
        let divide = of_all.is_some();
        let result = if divide { TensorType::BF16 } else { TensorType::F32 };
        let of_all = of_all.or_else(|| self.checkpoint.remove(&format!("{stem}_scale_2")));
        if of_all.is_none() && width == 16 {
            let expected = format!("{stem}_scale_2 or {stem}_global_scale too");
            return Err(self.fail(&weight, "", expected, "none of that name"));
        }
        // Modelopt has one zero.
        let values = if of_all.is_some() && !divide { of_e2m1_with_one_zero() } else { of_e2m1() };
        let (shape, grid, codes) = self.nibbles(&weight, &scale, width, values)?;
        let of_matrix = of_all.map(|of| self.matrix_factors(&of, &shape)).transpose()?;
        let factors = Factors { of_matrix, divide, ..Factors::of(scale) };
        self.put(weight, name, shape, plain(codes, grid, factors, result));
        Ok(())
    }

    /// The shape, blocks and codes of 4-bit floats with a scale for each `width` of an input axis:
    /// the last one, or the one before it in experts that lie as [experts, in, out].
    fn nibbles(
        &self,
        weight: &HfTensor,
        scale: &HfTensor,
        width: u64,
        values: Table,
    ) -> Result<(Vec<u64>, Grid, Codes)> {
        let mut shape = weight.shape.clone();
        let mut expected = scale.shape.clone();
        if let ([_, rows, _], [_, down, _]) = (&mut shape[..], &mut expected[..]) {
            *down *= width / 2;
            if expected == weight.shape {
                *rows *= 2;
                let grid = Grid { rows: *rows, columns: shape[2], height: width, width: 1 };
                return Ok((shape, grid, Codes::RowPairs(values)));
            }
            expected.clone_from(&scale.shape);
        }
        let (Some(columns), Some(bytes)) = (shape.last_mut(), expected.last_mut()) else {
            return Err(self.bad_shape(weight, "rows of bytes"));
        };
        (*columns, *bytes) = (*columns * 2, *bytes * width / 2);
        self.check_shape(weight, &expected)?;
        let (columns, rows) = (*columns, weight.shape.iter().rev().nth(1).copied().unwrap_or(1));
        let grid = Grid { rows, columns, height: 1, width };
        Ok((shape, grid, Codes::Nibbles { values, high_first: false }))
    }

    /// Factors of whole matrices, of a weight of `shape`.
    fn matrix_factors(&self, tensor: &HfTensor, shape: &[u64]) -> Result<Arc<[f32]>> {
        let n = tensor.shape.iter().product::<u64>();
        let matrices = shape.iter().rev().skip(2).product::<u64>();
        if n != 1 && n != matrices {
            return Err(self.bad_shape(tensor, format!("one number, or {matrices}")));
        }
        Ok(self.checkpoint.read_whole(tensor)?.into())
    }

    /// gpt-oss has an axis of blocks and another of their bytes.
    fn join_mxfp4(&mut self) -> Result<()> {
        for stem in self.stems("_blocks") {
            let mut blocks = self.part_of(&stem, "_blocks");
            let scales = self.part(&blocks, &format!("{stem}_scales"))?;
            for part in [&blocks, &scales] {
                self.check_dtype(part, &[Dtype::U8], "U8")?;
            }
            let mut expected = scales.shape.clone();
            expected.push(16);
            self.check_shape(&blocks, &expected)?;
            self.checkpoint.remove(&blocks.name);
            blocks.shape.pop();
            if let Some(bytes) = blocks.shape.last_mut() {
                *bytes *= 16;
            }
            // The weight keeps its name, which says that it lies as [out, in].
            let name = blocks.name.clone();
            self.join_nibbles(blocks, scales, name, &stem)?;
        }
        Ok(())
    }

    /// An 8-bit float without a scale would be taken for the weight itself.
    fn check_scaled(&self) -> Result<()> {
        let is_bare = |t: &&HfTensor| matches!(t.encoding, Some(Encoding::Fp8(_)));
        match self.checkpoint.tensors().find(is_bare) {
            None => Ok(()),
            Some(bare) => Err(self.fail(bare, "", "a scale beside 8-bit floats", "none")),
        }
    }
}

const FP8: [Dtype; 2] = [Dtype::F8_E4M3, Dtype::F8_E5M2];

/// A field of `quantization_config`.
pub(super) fn field(name: &str) -> String {
    format!("{CONFIG}.{name}")
}

/// Bytes beside 8-bit or 4-bit floats are exponents.
fn as_exponents(scale: &mut HfTensor) {
    if scale.dtype == Dtype::U8 {
        scale.encoding = Some(Encoding::Exponents);
    }
}

pub(super) fn plain(codes: Codes, grid: Grid, factors: Factors, result: TensorType) -> Scaled {
    Scaled { codes, grid, factors, zeros: None, then: Then::Nothing, result }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Opens a checkpoint of tensors (name, type, shape, bytes) and joins it.
    fn joined(quantization: Value, tensors: &[(&str, &str, &[u64], &[u8])]) -> Result<Checkpoint> {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"quantization_config": quantization});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let (mut header, mut data) = (json!({}), Vec::new());
        for (name, dtype, shape, bytes) in tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            header[name] = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
            data.extend_from_slice(bytes);
        }
        let header = header.to_string().into_bytes();
        let whole = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        std::fs::write(dir.path().join("model.safetensors"), whole).unwrap();
        let mut checkpoint = Checkpoint::open(dir.path())?;
        join(&mut checkpoint, &Json::open(dir.path().join("config.json"))?)?;
        Ok(checkpoint)
    }

    fn read(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
        checkpoint.read_whole(checkpoint.get(name).unwrap()).unwrap()
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    /// DeepSeek-V4's names and types.
    #[test]
    fn weights_beside_exponents() {
        let config = json!({"quant_method": "fp8", "weight_block_size": [2, 2]});
        let codes = [&[0x72u8][..], &[0; 30], &[0xf9]].concat();
        let checkpoint = joined(
            config,
            &[
                ("a.weight", "I8", &[1, 32], &codes),
                ("a.scale", "F8_E8M0", &[1, 2], &[129, 126]),
                ("b.weight", "F8_E4M3", &[2, 4], &[0x38, 0x38, 0x38, 0xc5, 0x38, 0, 0, 1]),
                ("b.scale", "F8_E8M0", &[1, 2], &[128, 126]),
            ],
        );
        let checkpoint = checkpoint.unwrap();
        let a = read(&checkpoint, "a.weight");
        assert_eq!((a[0], a[1], a[2]), (4.0, 24.0, 0.0));
        assert_eq!((a[62], a[63]), (-0.25, -3.0));
        assert_eq!(checkpoint.get("a.weight").unwrap().shape, [1, 64]);
        let b = [2.0, 2.0, 0.5, -1.625, 2.0, 0.0, 0.0, 0.000_976_562_5];
        assert_eq!(read(&checkpoint, "b.weight"), b);
        assert_eq!(checkpoint.tensors().count(), 2);
    }

    /// A scale for each expert; one for each output of experts that lie as [experts, in, out].
    #[test]
    fn stacked_experts_in_eight_bits() {
        let ones = [0x38; 12];
        let scales = bytes(&[1.0, 2.0]);
        let stack = ("e.up", "F8_E4M3", &[2, 2, 3][..], &ones[..]);
        let static_ = json!({"quant_method": "fp8", "weight_block_size": null});
        for shape in [&[2][..], &[2, 1, 1]] {
            let scale = ("e.up_scale_inv", "F32", shape, &scales[..]);
            let activation = ("e.up_activation_scale", "F32", &[2][..], &scales[..]);
            let checkpoint = joined(static_.clone(), &[stack, scale, activation]).unwrap();
            let want = [[1.0; 6], [2.0; 6]].concat();
            assert_eq!(read(&checkpoint, "e.up"), want);
        }
        let scales = bytes(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        for shape in [[2, 1, 3], [2, 3, 1]] {
            let scale = ("e.up_scale", "F32", &shape[..], &scales[..]);
            let checkpoint = joined(json!({"quant_method": "fbgemm_fp8"}), &[stack, scale]);
            let want = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 4.0, 5.0, 6.0];
            assert_eq!(read(&checkpoint.unwrap(), "e.up"), want, "{shape:?}");
        }
        let odd = ("e.up_scale_inv", "F32", &[3][..], &scales[..12]);
        let e = joined(static_, &[stack, odd]).unwrap_err().to_string();
        assert!(e.contains("e.up_scale_inv: shape"), "{e}");
    }

    /// Modelopt packs experts that lie as [experts, in, out] along their inputs.
    #[test]
    fn stacked_experts_in_four_bits() {
        // Two experts of 16 inputs, of codes 1 and -6 in turn, and two outputs.
        let (codes, scales) = ([0xf2; 32], [0x38, 0x40, 0x38, 0x38]);
        let of_all = bytes(&[1.0, 0.5]);
        let checkpoint = joined(
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            &[
                ("e.up", "U8", &[2, 8, 2], &codes),
                ("e.up_weight_scale", "F8_E4M3", &[2, 1, 2], &scales),
                ("e.up_weight_scale_2", "F32", &[2], &of_all),
                ("e.up_input_scale", "F32", &[], &of_all[..4]),
            ],
        );
        let checkpoint = checkpoint.unwrap();
        assert_eq!(checkpoint.get("e.up").unwrap().shape, [2, 16, 2]);
        let values = read(&checkpoint, "e.up");
        assert_eq!(values[..4], [1.0, 2.0, -6.0, -12.0]);
        assert_eq!(values[32..36], [0.5, 0.5, -3.0, -3.0]);
        let mut part = [0.0; 3];
        checkpoint.read(checkpoint.get("e.up").unwrap(), 33, &mut part).unwrap();
        assert_eq!(part, [0.5, -3.0, -3.0]);
        assert_eq!(checkpoint.tensors().count(), 1);
    }
}
