//! A model as a section of the profile: a safetensors file. The tensors of MoE layer 3, all F32,
//! J, I, n_pca and width as in the module's description:
//!
//! ```text
//! layer.3.compress.weight [n_pca, n_embd]            layer.3.compress.bias [n_pca]
//! layer.3.input.weight [width, n_pca + 2 I]          layer.3.input.bias [width]
//! layer.3.block.0.weight, layer.3.block.1.weight [width, width]      .bias [width]
//! layer.3.gate.weight [width, n_pca]                 layer.3.gate.bias [width]
//! layer.3.output.weight [J, width]                   layer.3.output.bias [J]
//! layer.3.loss [2 + J]: λ, γ, w
//! ```
//!
//! with blocks and gate in the middle group only. The networks that look two layers ahead have
//! `second.3` for `layer.3`. The file's metadata names format and version: version 1 has networks
//! of one layer ahead only.

use std::collections::HashMap;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::model::{LayerModel, Linear, LlaporModel, Residual};
use super::{Group, Loss};
use crate::policy::Shape;

const FORMAT: &str = "moeba.llapor";
const VERSIONS: [&str; 2] = ["1", "2"];

/// Name, dimensions and values.
type Tensor<'a> = (String, Vec<usize>, Vec<u8>);

impl LlaporModel {
    pub fn encode(&self) -> Vec<u8> {
        let mut tensors = Vec::new();
        for (kind, layers) in [("layer", &self.layers), ("second", &self.second)] {
            for (at, layer) in layers.iter().enumerate() {
                if let Some(layer) = layer {
                    put_layer(&format!("{kind}.{at}"), layer, &mut tensors);
                }
            }
        }
        let views = tensors.iter().map(|(name, dims, bytes)| {
            let view = TensorView::new(Dtype::F32, dims.clone(), bytes);
            (name, view.expect("as many values as the dimensions say"))
        });
        let version = VERSIONS[usize::from(self.has_second())];
        let metadata = HashMap::from([(FORMAT.to_string(), version.to_string())]);
        safetensors::serialize(views, Some(metadata)).expect("a header of some kilobytes")
    }

    /// Decodes the networks of a model of that shape. Returns the reason as a clause, for use after
    /// a colon.
    pub fn decode(shape: &Shape, bytes: &[u8]) -> Result<LlaporModel, String> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
        let version = header.metadata().as_ref().and_then(|metadata| metadata.get(FORMAT));
        let version = version.and_then(|version| VERSIONS.iter().position(|v| v == version));
        let Some(version) = version else {
            return Err(format!("it is not version {} of {FORMAT}", VERSIONS.join(" or ")));
        };
        let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let take_layers = |kind: &str| -> Result<Vec<Option<LayerModel>>, String> {
            let mut layers = vec![None; shape.n_layers()];
            let n = shape.moe_layers().count();
            for (i, at) in shape.moe_layers().enumerate() {
                layers[at] = Some(take_layer(&file, &format!("{kind}.{at}"), Group::of(i, n))?);
            }
            Ok(layers)
        };
        let second = match version {
            0 => vec![None; shape.n_layers()],
            _ => take_layers("second")?,
        };
        let model = LlaporModel { layers: take_layers("layer")?, second };
        model.check(shape)?;
        Ok(model)
    }
}

fn put_layer(prefix: &str, layer: &LayerModel, out: &mut Vec<Tensor>) {
    let mut put = |name: &str, dims: Vec<usize>, values: &[f32]| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        out.push((format!("{prefix}.{name}"), dims, bytes));
    };
    let mut put_linear = |name: &str, linear: &Linear| {
        let (rows, columns) = (linear.n_out(), linear.n_in());
        put(&format!("{name}.weight"), vec![rows, columns], linear.weight());
        put(&format!("{name}.bias"), vec![rows], linear.bias());
    };
    put_linear("compress", &layer.compress);
    put_linear("input", &layer.input);
    if let Some(Residual { blocks: [first, second], gate }) = &layer.residual {
        put_linear("block.0", first);
        put_linear("block.1", second);
        put_linear("gate", gate);
    }
    put_linear("output", &layer.output);
    let Loss { lambda, gamma, balance } = &layer.loss;
    let loss: Vec<f32> = [lambda, gamma].into_iter().chain(balance).copied().collect();
    put("loss", vec![loss.len()], &loss);
}

fn take_layer(file: &SafeTensors<'_>, prefix: &str, group: Group) -> Result<LayerModel, String> {
    let linear = |name: &str| take_linear(file, &format!("{prefix}.{name}"));
    let residual = match group {
        Group::Outer => None,
        Group::Middle => {
            let blocks = [linear("block.0")?, linear("block.1")?];
            Some(Residual { blocks, gate: linear("gate")? })
        }
    };
    let (dims, values) = take(file, &format!("{prefix}.loss"))?;
    let ([_], [lambda, gamma, balance @ ..]) = (&dims[..], &values[..]) else {
        return Err(format!("{prefix}.loss has dimensions {dims:?}"));
    };
    if !(0.0..=1.0).contains(lambda) || *gamma < 0.0 || balance.iter().any(|w| *w < 0.0) {
        return Err(format!("{prefix}.loss has a value out of range"));
    }
    let loss = Loss { lambda: *lambda, gamma: *gamma, balance: balance.to_vec() };
    let (compress, input, output) = (linear("compress")?, linear("input")?, linear("output")?);
    if input.n_in() < compress.n_out() {
        return Err(format!("{prefix}.input does not fit {prefix}.compress"));
    }
    Ok(LayerModel { compress, input, residual, output, loss })
}

fn take_linear(file: &SafeTensors<'_>, name: &str) -> Result<Linear, String> {
    let (weight_dims, weight) = take(file, &format!("{name}.weight"))?;
    let (bias_dims, bias) = take(file, &format!("{name}.bias"))?;
    match (&weight_dims[..], &bias_dims[..]) {
        (&[rows, columns], &[n]) if n == rows && rows > 0 && columns > 0 => {
            Ok(Linear::new(weight, bias, columns))
        }
        _ => Err(format!("{name} has dimensions {weight_dims:?} and {bias_dims:?}")),
    }
}

/// Dimensions and values. That the bytes are there the file's reader has made sure of.
fn take(file: &SafeTensors<'_>, name: &str) -> Result<(Vec<usize>, Vec<f32>), String> {
    let view = file.tensor(name).map_err(|_| format!("it has no tensor {name}"))?;
    if view.dtype() != Dtype::F32 {
        return Err(format!("{name} is not F32"));
    }
    let values = view.data().chunks_exact(size_of::<f32>());
    let values = values.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("of an f32")));
    let values: Vec<f32> = values.collect();
    if !values.iter().all(|value| value.is_finite()) {
        return Err(format!("{name} has values that are not finite"));
    }
    Ok((view.shape().to_vec(), values))
}
