//! GGUF files taken apart, changed and put together again.

use std::path::Path;

use moeba::gguf::{Gguf, OwnedValue, TensorType, Writer};

pub struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub ty: TensorType,
    pub bytes: Vec<u8>,
}

/// A file's contents.
pub struct File {
    pub keys: Vec<(String, OwnedValue)>,
    pub tensors: Vec<Tensor>,
}

impl File {
    pub fn read(path: &Path) -> File {
        let gguf = Gguf::open(path).unwrap();
        let keys = gguf.keys().map(|(key, value)| (key.to_owned(), value.into())).collect();
        let tensor = |t: &moeba::gguf::TensorInfo| Tensor {
            name: t.name.clone(),
            dims: t.dims.clone(),
            ty: t.ty,
            bytes: gguf.bytes(t).to_vec(),
        };
        File { keys, tensors: gguf.tensors().iter().map(tensor).collect() }
    }

    pub fn write(&self, path: &Path) {
        let mut out = Writer::create(path, None).unwrap();
        for (key, value) in &self.keys {
            out.set(key, value.clone()).unwrap();
        }
        for t in &self.tensors {
            out.declare(&t.name, &t.dims, t.ty).unwrap();
        }
        for t in &self.tensors {
            out.write_tensor(&t.name, &t.bytes).unwrap();
        }
        out.finish().unwrap();
    }

    pub fn tensor(&self, name: &str) -> &Tensor {
        self.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    /// Takes a tensor out.
    pub fn take(&mut self, name: &str) -> Tensor {
        let index = self.tensors.iter().position(|t| t.name == name);
        self.tensors.remove(index.unwrap_or_else(|| panic!("no {name}")))
    }

    /// Puts another value in the place of a key's, or adds the key.
    pub fn set(&mut self, key: &str, value: impl Into<OwnedValue>) {
        self.drop_key(key);
        self.keys.push((key.into(), value.into()));
    }

    pub fn drop_key(&mut self, key: &str) {
        self.keys.retain(|(k, _)| k != key);
    }
}

impl Tensor {
    /// A tensor of float32.
    pub fn of(name: &str, dims: &[u64], values: &[f32]) -> Tensor {
        assert_eq!(dims.iter().product::<u64>(), values.len() as u64);
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor { name: name.into(), dims: dims.into(), ty: TensorType::F32, bytes }
    }

    pub fn f32s(&self) -> Vec<f32> {
        assert_eq!(self.ty, TensorType::F32);
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Shorter by the last element of its outermost dimension that is longer than one; `None`
    /// where it has no two elements.
    pub fn cut(&self) -> Option<Tensor> {
        let outermost = self.dims.iter().rposition(|d| *d > 1)?;
        let mut dims = self.dims.clone();
        let n = self.bytes.len() as u64 / dims[outermost] * (dims[outermost] - 1);
        dims[outermost] -= 1;
        let bytes = self.bytes[..n as usize].to_vec();
        Some(Tensor { name: self.name.clone(), dims, ty: self.ty, bytes })
    }

    /// The same elements under dimensions in the opposite order, or in two dimensions if there is
    /// only one.
    pub fn turned(&self) -> Tensor {
        let dims = match self.dims[..] {
            [n] if n % 2 == 0 => vec![2, n / 2],
            _ => self.dims.iter().rev().copied().collect(),
        };
        Tensor { name: self.name.clone(), dims, ty: self.ty, bytes: self.bytes.clone() }
    }
}
