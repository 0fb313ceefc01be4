//! LoRA adapters beside a model: GGUF files of pairs of factors, as llama.cpp's converter and
//! `moeba convert --lora-only` write them.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::Model;
use super::weights::{Gate, Layer, Matrix};
use crate::backend::ops::{Adapted, AdaptedExperts, LowRank};
use crate::experts::{ExpertTensors, LayerExperts};
use crate::gguf::{Gguf, TensorInfo};
use crate::quant;
use crate::{Error, Result};

/// A file, and how much of it texts take that do not say.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterFile {
    pub path: PathBuf,
    pub scale: f32,
}

/// Adapters by the tensors that they stand beside.
#[derive(Debug)]
pub struct Adapters {
    pairs: HashMap<usize, Vec<LowRank>>,
    /// How much of each adapter texts take that do not say.
    pub defaults: Arc<[f32]>,
    /// A digest of the files.
    pub identity: [u8; 32],
}

/// The names of a pair's halves in a file.
type Halves<'a> = [Option<&'a TensorInfo>; 2];

impl Adapters {
    /// Reads adapters of this model; `None` if there are no files.
    ///
    /// # Errors
    ///
    /// A file of another kind or another architecture, factors that do not fit their tensor, and
    /// tensors that are computed without adapters.
    pub fn read(files: &[AdapterFile], model: &Model) -> Result<Option<Adapters>> {
        if files.is_empty() {
            return Ok(None);
        }
        let places = places(model);
        let (mut pairs, mut hash) = (HashMap::<usize, Vec<_>>::new(), Sha256::new());
        for (number, file) in files.iter().enumerate() {
            let gguf = Gguf::open(&file.path)?;
            hash.update(gguf.identity()?);
            check(&gguf, model)?;
            let alpha = gguf.f32("adapter.lora.alpha")?.unwrap_or(0.0);
            for (name, halves) in halves(&gguf)? {
                let (tensor, pair) = pair(&gguf, name, halves, model, &places, alpha)?;
                pairs.entry(tensor).or_default().push(LowRank { adapter: number, ..pair });
            }
        }
        let defaults = files.iter().map(|file| file.scale).collect();
        Ok(Some(Adapters { pairs, defaults, identity: hash.finalize().into() }))
    }

    pub fn n_adapters(&self) -> usize {
        self.defaults.len()
    }

    /// The pairs beside a tensor, for rows of these factors.
    pub fn of<'a>(&'a self, tensor: usize, factors: &'a [f32]) -> Adapted<'a> {
        let pairs = self.pairs.get(&tensor).map_or(&[][..], Vec::as_slice);
        Adapted { pairs, factors, n_adapters: self.n_adapters() }
    }

    /// The pairs beside a layer's experts; `None` where there are none.
    pub fn of_experts<'a>(
        &'a self,
        experts: &LayerExperts,
        factors: &'a [f32],
    ) -> Option<AdaptedExperts<'a>> {
        let ExpertTensors::Stacked { gate, up, down } = experts.tensors else { return None };
        let none = Adapted { pairs: &[], factors, n_adapters: self.n_adapters() };
        let all = AdaptedExperts {
            gate: gate.map_or(none, |gate| self.of(gate, factors)),
            up: self.of(up, factors),
            down: self.of(down, factors),
        };
        let has_any = [&all.gate, &all.up, &all.down].iter().any(|a| !a.pairs.is_empty());
        has_any.then_some(all)
    }
}

/// Whether a file is an adapter of the model's architecture.
fn check(gguf: &Gguf, model: &Model) -> Result<()> {
    let wanted = [
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        ("general.architecture", model.descriptor.architecture.as_str()),
    ];
    for (key, expected) in wanted {
        let got = gguf.str(key)?.unwrap_or("none");
        if got != expected {
            return Err(Error::format(gguf.path(), key, expected, got));
        }
    }
    let activated = "adapter.alora.invocation_tokens";
    match gguf.get(activated) {
        None => Ok(()),
        Some(_) => {
            let expected = "an adapter that is there for the whole text";
            Err(Error::format(gguf.path(), activated, expected, "some tokens"))
        }
    }
}

/// The halves of each pair, by the name of its tensor.
fn halves(gguf: &Gguf) -> Result<BTreeMap<&str, Halves<'_>>> {
    let mut all: BTreeMap<&str, Halves<'_>> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let ends = [".lora_a", ".lora_b"];
        let found =
            ends.iter().enumerate().find_map(|(i, end)| Some((i, tensor.name.strip_suffix(end)?)));
        let Some((i, name)) = found else {
            let expected = "a name that ends with .lora_a or .lora_b";
            return Err(Error::format(gguf.path(), tensor.name.clone(), expected, "another"));
        };
        all.entry(name).or_default()[i] = Some(tensor);
    }
    Ok(all)
}

/// A pair, and the number of the model's tensor that it stands beside.
fn pair(
    gguf: &Gguf,
    name: &str,
    halves: Halves<'_>,
    model: &Model,
    places: &HashMap<usize, Place>,
    alpha: f32,
) -> Result<(usize, LowRank)> {
    let fail = |expected: String, got: String| Error::format(gguf.path(), name, expected, got);
    let [Some(a), Some(b)] = halves else {
        return Err(fail("lora_a and lora_b".into(), "one of the two".into()));
    };
    let Some(tensor) = model.gguf.tensor_index(name) else {
        return Err(fail("a tensor of the model".into(), "one that it lacks".into()));
    };
    let scale_name = name.replace(".weight", ".scale");
    let has_scale = scale_name != name && model.gguf.tensor_index(&scale_name).is_some();
    let Some(place) = places.get(&tensor).filter(|_| !has_scale) else {
        let expected = "a tensor that adapters are computed beside: merge the adapter with \
                        moeba convert --lora";
        return Err(fail(expected.into(), "another".into()));
    };
    let dims = &model.gguf.tensors()[tensor].dims;
    let size = |i: usize| dims.get(i).copied().unwrap_or(1);
    let (n, m, e) = (size(0), size(1), size(2));
    let rank = if *place == Place::Table { a.dims[0] } else { a.dims.get(1).copied().unwrap_or(1) };
    let stack = |mut dims: Vec<u64>| {
        if e > 1 {
            dims.push(e);
        }
        dims
    };
    let (wanted_a, wanted_b) = match place {
        Place::Table => (vec![rank, m], vec![rank, n]),
        Place::Matrix => (stack(vec![n, rank]), stack(vec![rank, m])),
    };
    let is = |got: &[u64], wanted: &[u64]| {
        let n = got.len().max(wanted.len());
        let at = |dims: &[u64], i: usize| dims.get(i).copied().unwrap_or(1);
        (0..n).all(|i| at(got, i) == at(wanted, i))
    };
    if rank == 0 || !is(&a.dims, &wanted_a) || !is(&b.dims, &wanted_b) {
        let got = format!("{:?} and {:?}", a.dims, b.dims);
        return Err(fail(format!("{wanted_a:?} and {wanted_b:?}"), got));
    }
    let [n, m, e, rank] = [n, m, e, rank].map(|n| n as usize);
    let (a, b) = (values(gguf, a)?, values(gguf, b)?);
    let (a, b, n_inputs, n_outputs) = match place {
        Place::Matrix => (a, turned(&b, m, rank), n, m),
        Place::Table => (turned(&a, m, rank), turned(&b, n, rank), m, n),
    };
    let scale = if alpha == 0.0 { 1.0 } else { alpha / rank as f32 };
    Ok((tensor, LowRank { adapter: 0, n_matrices: e, rank, n_inputs, n_outputs, a, b, scale }))
}

/// Matrices [rows, rank] as [rank, rows].
fn turned(values: &[f32], rows: usize, rank: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for matrix in values.chunks_exact(rows * rank) {
        for k in 0..rank {
            out.extend(matrix.iter().skip(k).step_by(rank));
        }
    }
    out
}

fn values(gguf: &Gguf, tensor: &TensorInfo) -> Result<Vec<f32>> {
    if !quant::is_supported(tensor.ty) {
        let (expected, got) = ("a type that moeba reads", tensor.ty.to_string());
        return Err(Error::format(gguf.path(), tensor.name.clone(), expected, got));
    }
    let mut out = vec![0.0; tensor.dims.iter().product::<u64>() as usize];
    quant::dequantize(tensor.ty, gguf.bytes(tensor), &mut out);
    Ok(out)
}

/// How a tensor is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Matrix,
    /// By row, as the embedding is.
    Table,
}

/// The tensors that adapters can stand beside.
fn places(model: &Model) -> HashMap<usize, Place> {
    let weights = &model.weights;
    let mut places = HashMap::new();
    if model.hyper.encoder.is_some() {
        return places;
    }
    let mut experts: Vec<usize> = Vec::new();
    let mut add = |matrix: &Matrix| {
        if let Some((tensor, _)) = matrix.place() {
            places.insert(tensor, Place::Matrix);
        }
    };
    add(&weights.output.weight);
    for (l, layer) in weights.layers.iter().enumerate() {
        mixer(layer, &mut add);
        let Some(ffn) = &layer.ffn else { continue };
        if let Gate::Router(router) = &ffn.gate {
            add(&router.logits.weight);
        }
        if let Some(gate) = ffn.shared.as_ref().and_then(|shared| shared.gate.as_ref()) {
            add(gate);
        }
        // Adjugate experts read what experts have made.
        let dense = weights.dense[l].as_ref().filter(|_| ffn.adjugate.is_none());
        for of_layer in [weights.routed[l].as_ref(), dense, weights.shared[l].as_ref()] {
            if let Some(ExpertTensors::Stacked { gate, up, down }) = of_layer.map(|e| &e.tensors) {
                experts.extend(gate.iter().chain([up, down]).copied());
            }
        }
    }
    places.extend(experts.into_iter().map(|tensor| (tensor, Place::Matrix)));
    if let Some((tensor, _)) = weights.token_embd.place() {
        places.insert(tensor, Place::Table);
    }
    places
}

fn mixer(layer: &Layer, add: &mut impl FnMut(&Matrix)) {
    let mixer = layer.mixer.weights().filter(|mixer| mixer.takes_adapters());
    mixer.iter().flat_map(|mixer| mixer.linears()).for_each(|linear| add(&linear.weight));
}
