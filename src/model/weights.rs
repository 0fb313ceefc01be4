//! Binding a file's tensors to the roles of the layer loop: names resolved and shapes checked once,
//! at load. Matrices stay in the mapped file; vectors (norms, biases) are copied as f32.

use super::descriptor::Descriptor;
use super::granules::{GranuleKeys, TypedExperts};
use super::hyper::HyperParams;
use crate::experts::{LayerExperts, Place};
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::quant;
use crate::simd::MatRef;
use crate::{Error, Result};

/// A matrix in the file: `rows` outputs of `cols` inputs.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    tensor: usize,
    pub ty: TensorType,
    pub rows: usize,
    pub cols: usize,
}

impl Matrix {
    pub fn mat<'a>(&self, gguf: &'a Gguf) -> MatRef<'a> {
        let data = gguf.bytes(&gguf.tensors()[self.tensor]);
        MatRef::dense(self.ty, data, self.rows, self.cols)
    }
}

/// A matrix with an optional bias.
#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Matrix,
    pub bias: Option<Vec<f32>>,
}

#[derive(Clone, Debug)]
pub struct AttentionWeights {
    pub norm: Vec<f32>,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    /// RMSNorm over each head of q and k, before RoPE.
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub output: Matrix,
}

/// Types and widths of one expert, routed, shared or dense.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    pub gate: TensorType,
    pub up: TensorType,
    pub down: TensorType,
    pub n_embd: usize,
    pub n_ff: usize,
}

/// How a layer's tokens find their experts.
#[derive(Clone, Debug)]
pub enum Gate {
    /// One expert, weight 1: a dense layer.
    Dense,
    Router(Matrix),
}

#[derive(Clone, Debug)]
pub struct SharedExpert {
    pub shape: ExpertShape,
    /// Its output is multiplied by the sigmoid of this vector times the input.
    pub gate: Option<Matrix>,
}

#[derive(Clone, Debug)]
pub struct FfnWeights {
    pub norm: Vec<f32>,
    pub gate: Gate,
    pub expert: ExpertShape,
    pub shared: Option<SharedExpert>,
}

#[derive(Clone, Debug)]
pub struct Layer {
    pub attention: AttentionWeights,
    pub ffn: FfnWeights,
}

pub struct Weights {
    pub token_embd: Matrix,
    pub output_norm: Vec<f32>,
    pub output: Matrix,
    /// RoPE: what each pair's frequency is divided by.
    pub rope_factors: Option<Vec<f32>>,
    pub layers: Vec<Layer>,
    /// A layer's routed experts are in one of these lists: among the routed ones, or, where the
    /// layer is dense, as its only expert among the dense ones.
    pub routed: Vec<Option<LayerExperts>>,
    pub dense: Vec<Option<LayerExperts>>,
    pub shared: Vec<Option<LayerExperts>>,
}

impl Weights {
    pub fn bind(gguf: &Gguf, descriptor: &Descriptor, hyper: &HyperParams) -> Result<Weights> {
        let b = Binder { gguf, descriptor, hyper, granules: GranuleKeys::read(gguf)? };
        let embd = b.require("token_embd", 0)?;
        let n_vocab = b.tensor(embd).dims.get(1).copied().unwrap_or(0) as usize;
        let token_embd = b.matrix(embd, n_vocab, hyper.n_embd)?;
        let output = match b.find("output", 0)? {
            Some(t) => b.matrix(t, n_vocab, hyper.n_embd)?,
            None => token_embd,
        };
        let rope_factors = match b.find("rope_freqs", 0)? {
            Some(t) => Some(b.vector(t, hyper.n_rot / 2)?),
            None => None,
        };
        let (mut layers, mut shared) = (Vec::new(), Vec::new());
        let (mut routed, mut dense) = (Vec::new(), Vec::new());
        for l in 0..hyper.n_layers {
            let (ffn, experts, shared_experts) = b.ffn(l)?;
            let is_dense = matches!(ffn.gate, Gate::Dense);
            layers.push(Layer { attention: b.attention(l)?, ffn });
            routed.push((!is_dense).then_some(experts));
            dense.push(is_dense.then_some(experts));
            shared.push(shared_experts);
        }
        Ok(Weights {
            token_embd,
            output_norm: b.vector(b.require("output_norm", 0)?, hyper.n_embd)?,
            output,
            rope_factors,
            layers,
            routed,
            dense,
            shared,
        })
    }
}

impl Weights {
    /// Bytes of all routed experts, and of everything else in the file's tensors.
    pub fn expert_and_dense_bytes(&self, gguf: &Gguf) -> (u64, u64) {
        let of_layer = |l: &LayerExperts| l.n_experts as u64 * l.expert_bytes() as u64;
        let experts = self.routed.iter().flatten().map(of_layer).sum();
        let routed = self.routed.iter().flatten().flat_map(LayerExperts::tensors);
        let routed: u64 = routed.map(|tensor| gguf.tensors()[tensor].n_bytes).sum();
        let all: u64 = gguf.tensors().iter().map(|t| t.n_bytes).sum();
        (experts, all - routed)
    }
}

struct Binder<'a> {
    gguf: &'a Gguf,
    descriptor: &'a Descriptor,
    hyper: &'a HyperParams,
    /// Of a granule-major file.
    granules: Option<GranuleKeys>,
}

impl Binder<'_> {
    fn tensor(&self, index: usize) -> &TensorInfo {
        &self.gguf.tensors()[index]
    }

    /// The tensor that plays `role`, if the architecture has the role and the file the tensor.
    fn find(&self, role: &str, layer: usize) -> Result<Option<usize>> {
        let Some((name, optional)) = self.descriptor.tensor_name(role, layer) else {
            return Ok(None);
        };
        match self.gguf.tensor_index(&name) {
            Some(index) => Ok(Some(index)),
            None if optional => Ok(None),
            None => Err(Error::format(self.gguf.path(), name, "a tensor", "nothing of that name")),
        }
    }

    fn require(&self, role: &str, layer: usize) -> Result<usize> {
        self.find(role, layer)?.ok_or_else(|| {
            let name = self.descriptor.tensor_name(role, layer).map_or(role.into(), |n| n.0);
            Error::format(self.gguf.path(), name, "a tensor", "nothing of that name")
        })
    }

    fn wrong(&self, index: usize, expected: String, got: String) -> Error {
        Error::format(self.gguf.path(), self.tensor(index).name.clone(), expected, got)
    }

    /// Checks dimensions (as the file orders them, trailing ones ignored) and that the engine
    /// computes with the type.
    fn check(&self, index: usize, dims: &[usize]) -> Result<()> {
        let t = self.tensor(index);
        self.check_type(index, t.ty)?;
        let given: Vec<usize> = t.dims.iter().map(|d| *d as usize).collect();
        let end = given.iter().rposition(|d| *d != 1).map_or(1, |i| i + 1);
        let wanted = dims.iter().rposition(|d| *d != 1).map_or(1, |i| i + 1);
        if given[..end.min(given.len())] != dims[..wanted] {
            return Err(self.wrong(index, format!("shape {dims:?}"), format!("{given:?}")));
        }
        Ok(())
    }

    fn check_type(&self, index: usize, ty: TensorType) -> Result<()> {
        if quant::is_supported(ty) {
            return Ok(());
        }
        let known: Vec<_> =
            TensorType::all().filter(|t| quant::is_supported(*t)).map(|t| t.name()).collect();
        let expected = format!("one of the types {}", known.join(", "));
        Err(self.wrong(index, expected, ty.to_string()))
    }

    fn matrix(&self, index: usize, rows: usize, cols: usize) -> Result<Matrix> {
        self.check(index, &[cols, rows])?;
        Ok(Matrix { tensor: index, ty: self.tensor(index).ty, rows, cols })
    }

    fn vector(&self, index: usize, n: usize) -> Result<Vec<f32>> {
        self.check(index, &[n])?;
        let mut values = vec![0.0; n];
        quant::dequantize(self.tensor(index).ty, self.gguf.bytes(self.tensor(index)), &mut values);
        Ok(values)
    }

    fn optional_vector(&self, role: &str, layer: usize, n: usize) -> Result<Option<Vec<f32>>> {
        self.find(role, layer)?.map(|t| self.vector(t, n)).transpose()
    }

    fn linear(&self, role: &str, layer: usize, rows: usize, cols: usize) -> Result<Linear> {
        let weight = self.matrix(self.require(role, layer)?, rows, cols)?;
        let bias = self.optional_vector(&format!("{role}_bias"), layer, rows)?;
        Ok(Linear { weight, bias })
    }

    fn attention(&self, l: usize) -> Result<AttentionWeights> {
        let h = self.hyper;
        let norm = self.vector(self.require("attn_norm", l)?, h.n_embd)?;
        Ok(AttentionWeights {
            norm,
            q: self.linear("attn_q", l, h.n_head * h.head_dim, h.n_embd)?,
            k: self.linear("attn_k", l, h.n_head_kv * h.head_dim, h.n_embd)?,
            v: self.linear("attn_v", l, h.n_head_kv * h.head_dim_v, h.n_embd)?,
            q_norm: self.optional_vector("attn_q_norm", l, h.head_dim)?,
            k_norm: self.optional_vector("attn_k_norm", l, h.head_dim)?,
            output: self.matrix(
                self.require("attn_output", l)?,
                h.n_embd,
                h.n_head * h.head_dim_v,
            )?,
        })
    }

    fn ffn(&self, l: usize) -> Result<(FfnWeights, LayerExperts, Option<LayerExperts>)> {
        let h = self.hyper;
        let norm = self.vector(self.require("ffn_norm", l)?, h.n_embd)?;
        let router = if h.n_experts > 0 { self.find("ffn_gate_inp", l)? } else { None };
        let Some(router) = router else {
            let (expert, experts) = self.experts(l, 1, ["ffn_gate", "ffn_up", "ffn_down"])?;
            let ffn = FfnWeights { norm, gate: Gate::Dense, expert, shared: None };
            return Ok((ffn, experts, None));
        };
        let gate = Gate::Router(self.matrix(router, h.n_experts, h.n_embd)?);
        let (expert, experts) = self.routed(l)?;
        let (shared, shared_experts) = match self.find("ffn_gate_shexp", l)? {
            None => (None, None),
            Some(_) => {
                let roles = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
                let (shape, experts) = self.experts(l, 1, roles)?;
                let gate = match self.find("ffn_gate_inp_shexp", l)? {
                    Some(t) => Some(self.matrix(t, 1, h.n_embd)?),
                    None => None,
                };
                (Some(SharedExpert { shape, gate }), Some(experts))
            }
        };
        Ok((FfnWeights { norm, gate, expert, shared }, experts, shared_experts))
    }

    /// The routed experts of a layer, in whichever layout the file has them.
    fn routed(&self, l: usize) -> Result<(ExpertShape, LayerExperts)> {
        let n = self.hyper.n_experts;
        let granules = match &self.granules {
            Some(keys) => keys.layer(self.gguf, l)?,
            None => None,
        };
        let Some(typed) = granules else {
            return self.experts(l, n, ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]);
        };
        let index = typed.experts.tensors().next().expect("the granule-major tensor");
        for ty in typed.types {
            self.check_type(index, ty)?;
        }
        if typed.experts.n_experts != n {
            let expected = format!("{n} experts");
            return Err(self.wrong(index, expected, typed.experts.n_experts.to_string()));
        }
        Ok((ExpertShape::of(&typed), typed.experts))
    }

    /// Three expert tensors of `n` experts: gate and up [n_embd, n_ff, n], down [n_ff, n_embd, n].
    /// The intermediate size is taken from the gate tensor.
    fn experts(
        &self,
        l: usize,
        n: usize,
        [gate, up, down]: [&str; 3],
    ) -> Result<(ExpertShape, LayerExperts)> {
        let n_embd = self.hyper.n_embd;
        let (gate, up, down) =
            (self.require(gate, l)?, self.require(up, l)?, self.require(down, l)?);
        let n_ff = self.tensor(gate).dims.get(1).copied().unwrap_or(0) as usize;
        self.check(gate, &[n_embd, n_ff, n])?;
        self.check(up, &[n_embd, n_ff, n])?;
        self.check(down, &[n_ff, n_embd, n])?;
        let types = [gate, up, down].map(|index| self.tensor(index).ty);
        let sizes = [n_embd, n_ff, n].map(|n| n as u64);
        let place = Place::Stacked { gate, up, down };
        let typed = TypedExperts::cut(types, sizes, place).ok_or_else(|| {
            self.wrong(gate, "a size that can be addressed".into(), format!("{n_ff} rows"))
        })?;
        Ok((ExpertShape::of(&typed), typed.experts))
    }
}

impl ExpertShape {
    fn of(typed: &TypedExperts) -> ExpertShape {
        let [gate, up, down] = typed.types;
        let n_ff = typed.experts.geometry.n_ff;
        ExpertShape { gate, up, down, n_embd: typed.n_embd, n_ff }
    }
}
