//! Roles to tensors of the file: found, of the right shape and of a type that is computed with.

use super::super::descriptor::{self, Descriptor};
use super::super::granules::GranuleKeys;
use super::super::hyper::HyperParams;
use super::{Linear, Matrix, Norm};
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::quant;
use crate::{Error, Result};
use std::cell::RefCell;
use std::collections::HashSet;

pub(crate) struct Binder<'a> {
    pub gguf: &'a Gguf,
    pub descriptor: &'a Descriptor,
    pub hyper: &'a HyperParams,
    /// `Some` in a granule-major file.
    pub granules: Option<GranuleKeys>,
    /// Tensors that play a role.
    used: RefCell<HashSet<usize>>,
}

impl<'a> Binder<'a> {
    pub fn new(gguf: &'a Gguf, descriptor: &'a Descriptor, hyper: &'a HyperParams) -> Result<Self> {
        let (granules, used) = (GranuleKeys::read(gguf)?, RefCell::default());
        Ok(Binder { gguf, descriptor, hyper, granules, used })
    }

    pub fn tensor(&self, index: usize) -> &TensorInfo {
        &self.gguf.tensors()[index]
    }

    /// The file's name for a role and whether it may be absent. Roles of an encoder's layers and
    /// of its decoder's have names of their own, and numbers from 0.
    pub fn name(&self, role: &str, layer: usize) -> Option<(String, bool)> {
        let n = self.hyper.n_encoder_layers();
        let (stack, within) = if layer < n { ("enc", layer) } else { ("dec", layer - n) };
        let of_stack = || self.descriptor.tensor_name(&format!("{stack}_{role}"), within);
        self.descriptor.tensor_name(role, layer).or_else(of_stack)
    }

    /// The tensor that plays `role`, if the architecture has the role and the file the tensor.
    pub fn find(&self, role: &str, layer: usize) -> Result<Option<usize>> {
        let Some((name, optional)) = self.name(role, layer) else {
            return Ok(None);
        };
        match self.gguf.tensor_index(&name) {
            Some(index) => {
                self.mark_used(index);
                Ok(Some(index))
            }
            None if optional => Ok(None),
            None => Err(Error::format(self.gguf.path(), name, "a tensor", "nothing of that name")),
        }
    }

    pub fn mark_used(&self, index: usize) {
        self.used.borrow_mut().insert(index);
    }

    /// Fails if the file has layers behind those that it counts.
    pub fn check_layers(&self) -> Result<()> {
        let Some(counted) = self.gguf.u32(&self.descriptor.key("block_count"))? else {
            return Ok(());
        };
        let layer = |t: &TensorInfo| t.name.strip_prefix("blk.")?.split('.').next()?.parse().ok();
        let beyond = |t: &&TensorInfo| layer(t).is_some_and(|layer: u64| layer >= counted.into());
        match self.gguf.tensors().iter().find(beyond) {
            None => Ok(()),
            Some(tensor) => {
                let expected =
                    format!("a layer below {}, {counted}", self.descriptor.key("block_count"));
                Err(Error::format(
                    self.gguf.path(),
                    &tensor.name,
                    expected,
                    "a tensor of one beyond",
                ))
            }
        }
    }

    /// Tells of tensors that play no role in the layers that are computed: factors of matrices, or
    /// biases, that the architecture does not have elsewhere.
    pub fn warn_of_unused(&self) {
        let used = self.used.borrow();
        let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse().ok();
        let is_computed = |name: &str| layer(name).is_none_or(|l: usize| l < self.hyper.n_layers);
        let tensors = self.gguf.tensors().iter().enumerate();
        // The factors of inputs are for processors that multiply in four bits.
        let says = |name: &str| is_computed(name) && !name.ends_with(".input_scale");
        let unused: Vec<_> = tensors.filter(|(i, t)| !used.contains(i) && says(&t.name)).collect();
        if let Some((_, first)) = unused.first() {
            log::warn!(
                "{}: {} of {} tensors are not used, such as {}: programs that compute with them \
                 give other answers",
                self.gguf.path().display(),
                unused.len(),
                self.gguf.tensors().len(),
                first.name
            );
        }
    }

    pub fn require(&self, role: &str, layer: usize) -> Result<usize> {
        self.find(role, layer)?.ok_or_else(|| {
            let name = self.name(role, layer).map_or(role.into(), |n| n.0);
            Error::format(self.gguf.path(), name, "a tensor", "nothing of that name")
        })
    }

    /// Tensors that a model has all of or none, as far as the architecture has the roles; answers
    /// which.
    pub fn together(&self, roles: &[&str], layer: usize) -> Result<bool> {
        let is_there = |role: &&str| Ok(self.find(role, layer)?.is_some());
        let found: Vec<bool> = roles.iter().map(is_there).collect::<Result<_>>()?;
        if found.contains(&true) {
            for role in roles.iter().filter(|role| self.name(role, layer).is_some()) {
                self.require(role, layer)?;
            }
        }
        Ok(found.contains(&true))
    }

    /// A key of the architecture that a file with this tensor must have; 0 is none given.
    pub fn require_key(&self, key: &str, because: usize) -> Result<()> {
        let key = self.descriptor.key(key);
        let found = self.gguf.get(&key);
        if found.is_some_and(|value| value.as_u64() != Some(0)) {
            return Ok(());
        }
        let expected = format!("a value beside {}", self.tensor(because).name);
        let got = found.map_or("nothing".into(), |value| value.to_string());
        Err(Error::format(self.gguf.path(), key, expected, got))
    }

    pub fn wrong(&self, index: usize, expected: String, got: String) -> Error {
        Error::format(self.gguf.path(), self.tensor(index).name.clone(), expected, got)
    }

    /// Checks dimensions (as the file orders them, trailing ones ignored) and that the engine
    /// computes with the type.
    pub fn check(&self, index: usize, dims: &[usize]) -> Result<()> {
        let t = self.tensor(index);
        self.check_type(index, t.ty)?;
        let given: Vec<usize> = t.dims.iter().map(|d| *d as usize).collect();
        let end = given.iter().rposition(|d| *d != 1).map_or(1, |i| i + 1);
        let wanted = dims.iter().rposition(|d| *d != 1).map_or(1, |i| i + 1);
        if given[..end.min(given.len())] != dims[..wanted] {
            let wanted = &dims[..wanted.max(given.len().min(dims.len()))];
            return Err(self.wrong(index, format!("shape {wanted:?}"), format!("{given:?}")));
        }
        Ok(())
    }

    pub fn check_type(&self, index: usize, ty: TensorType) -> Result<()> {
        if quant::is_supported(ty) {
            return Ok(());
        }
        let known: Vec<_> =
            TensorType::all().filter(|t| quant::is_supported(*t)).map(|t| t.name()).collect();
        let expected = format!("one of the types {}", known.join(", "));
        Err(self.wrong(index, expected, ty.to_string()))
    }

    pub fn matrix(&self, index: usize, rows: usize, cols: usize) -> Result<Matrix> {
        self.stack(index, rows, cols, 1)
    }

    /// `n` matrices of `rows` × `cols`, one behind the other.
    pub fn stack(&self, index: usize, rows: usize, cols: usize, n: usize) -> Result<Matrix> {
        self.check(index, &[cols, rows, n])?;
        Ok(Matrix::of_tensor(index, self.tensor(index).ty, rows * n, cols))
    }

    /// All values of a tensor of these dimensions.
    pub fn values(&self, index: usize, dims: &[usize]) -> Result<Vec<f32>> {
        self.check(index, dims)?;
        let mut values = vec![0.0; dims.iter().product()];
        quant::dequantize(self.tensor(index).ty, self.gguf.bytes(self.tensor(index)), &mut values);
        Ok(values)
    }

    pub fn vector(&self, index: usize, n: usize) -> Result<Vec<f32>> {
        self.values(index, &[n])
    }

    pub fn optional_vector(&self, role: &str, layer: usize, n: usize) -> Result<Option<Vec<f32>>> {
        self.find(role, layer)?.map(|t| self.vector(t, n)).transpose()
    }

    pub fn linear(&self, role: &str, layer: usize, rows: usize, cols: usize) -> Result<Linear> {
        let weight = self.matrix(self.require(role, layer)?, rows, cols)?;
        let bias = self.optional_vector(&format!("{role}_bias"), layer, rows)?;
        let scale = self.scales(role, layer, 1)?.map_or(1.0, |scale| scale[0]);
        Ok(Linear::scaled(weight, bias, scale))
    }

    /// Matrices of these numbers of rows that lie one behind the other in one tensor, and so do
    /// their biases, if there are any.
    pub fn rows_apart<const N: usize>(
        &self,
        role: &str,
        l: usize,
        index: usize,
        rows: [usize; N],
        cols: usize,
    ) -> Result<[Linear; N]> {
        let n_all = rows.iter().sum();
        let all = self.matrix(index, n_all, cols)?;
        let biases = self.optional_vector(&format!("{role}_bias"), l, n_all)?;
        let scale = self.scales(role, l, 1)?.map_or(1.0, |scale| scale[0]);
        let mut first = 0;
        Ok(rows.map(|n| {
            first += n;
            let bias = biases.as_ref().map(|all| all[first - n..first].to_vec());
            Linear::scaled(all.clone().rows_of(first - n, n), bias, scale)
        }))
    }

    /// Two matrices of one input, in one tensor that plays `both` if the file has it.
    pub fn pair(
        &self,
        both: &str,
        roles: [&str; 2],
        l: usize,
        rows: [usize; 2],
        cols: usize,
    ) -> Result<[Linear; 2]> {
        match self.find(both, l)? {
            Some(index) => self.rows_apart(both, l, index, rows, cols),
            None => Ok([
                self.linear(roles[0], l, rows[0], cols)?,
                self.linear(roles[1], l, rows[1], cols)?,
            ]),
        }
    }

    /// Factors on the products of `n` matrices, where the file has them beside the matrices and the
    /// architecture computes with them. NVFP4 and F8_E4M3 files do.
    pub fn scales(&self, role: &str, layer: usize, n: usize) -> Result<Option<Vec<f32>>> {
        let Some(index) = self.find(&format!("{role}_scale"), layer)? else { return Ok(None) };
        let scales = self.vector(index, n)?;
        if self.gguf.is_header() {
            return Ok(Some(vec![1.0; n]));
        }
        match scales.iter().find(|scale| !scale.is_finite() || **scale == 0.0) {
            None => Ok(Some(scales)),
            Some(bad) => {
                let expected = "finite numbers other than 0".to_owned();
                Err(self.wrong(index, expected, bad.to_string()))
            }
        }
    }

    /// A normalisation that not every architecture has.
    pub fn optional_norm(&self, role: &str, layer: usize) -> Result<Option<Norm>> {
        self.find(role, layer)?.map(|_| self.norm(role, layer)).transpose()
    }

    /// A normalisation behind a part, if the architecture has one.
    pub fn post_norm(&self, role: &str, layer: usize) -> Result<Option<Norm>> {
        if self.descriptor.parts.residual != descriptor::Residual::Weighed {
            return self.optional_norm(role, layer);
        }
        let n = self.hyper.n_embd;
        Ok(Some(match self.find(role, layer)? {
            None => {
                let (kind, eps) = (descriptor::Norm::Rms, self.post_norm_eps()?);
                Norm { kind, weight: vec![1.0; n], bias: Vec::new(), eps }
            }
            Some(index) => self.scaled_norm(index, n)?,
        }))
    }

    /// A normalisation whose weights, `n` of them, come before it.
    pub fn scaled_norm(&self, index: usize, n: usize) -> Result<Norm> {
        let (weight, eps) = (self.vector(index, n)?, self.post_norm_eps()?);
        Ok(Norm { kind: descriptor::Norm::ScaledRms, weight, bias: Vec::new(), eps })
    }

    fn post_norm_eps(&self) -> Result<f32> {
        let key = self.descriptor.key("post_norm_epsilon");
        match self.gguf.f32(&key)? {
            Some(eps) if eps.is_finite() && eps > 0.0 => Ok(eps),
            other => {
                let got = other.map_or("nothing".into(), |eps| eps.to_string());
                Err(Error::format(self.gguf.path(), key, "a positive number", got))
            }
        }
    }

    /// A normalisation of the stream.
    pub fn norm(&self, role: &str, layer: usize) -> Result<Norm> {
        let (n, kind, eps) = (self.hyper.n_embd, self.hyper.norm, self.hyper.norm_eps);
        // Norms behind parts take the place of those before them.
        let is_post = self.descriptor.parts.residual == descriptor::Residual::Post;
        let kind = match is_post && self.name(role, layer).is_none() {
            true => descriptor::Norm::None,
            false => kind,
        };
        if kind == descriptor::Norm::None {
            return Ok(Norm { kind, weight: Vec::new(), bias: Vec::new(), eps });
        }
        let weight = self.vector(self.require(role, layer)?, n)?;
        let bias = match kind {
            descriptor::Norm::Layer => self
                .optional_vector(&format!("{role}_bias"), layer, n)?
                .unwrap_or_else(|| vec![0.0; n]),
            _ => vec![0.0; n],
        };
        Ok(Norm { kind, weight, bias, eps })
    }
}
