//! A weight matrix on the device, and families of kernels with one kernel for each type.

use super::{Device, DeviceSlice, Kernel, KernelParams};
use crate::Result;
use crate::gguf::TensorType;
use crate::quant;

/// `simd::MatRef` on a device: `rows` rows of `cols` values of `ty`, `row_stride` bytes apart.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMat<'a> {
    pub ty: TensorType,
    pub data: DeviceSlice<'a>,
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
}

impl<'a> DeviceMat<'a> {
    /// # Panics
    /// If the type is not computed with, `cols` is no whole number of blocks, rows overlap, `data`
    /// is too short or lies where the kernels cannot read it as words ([`alignment`]).
    pub fn new(
        ty: TensorType,
        data: DeviceSlice<'a>,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Self {
        assert!(quant::is_supported(ty), "{ty} is not computed with");
        let row = ty.row_bytes(cols as u64).expect("whole blocks") as usize;
        assert!(row <= row_stride, "rows of {row} bytes, stride of {row_stride}");
        if rows > 0 {
            let last = (rows - 1).checked_mul(row_stride).and_then(|x| x.checked_add(row));
            assert!(last.expect("a size") <= data.len(), "{rows} rows in {} bytes", data.len());
        }
        let align = alignment(ty);
        assert!(
            data.address().is_multiple_of(align as u64) && row_stride.is_multiple_of(align),
            "rows of {ty} lie on multiples of {align} bytes"
        );
        DeviceMat { ty, data, rows, cols, row_stride }
    }

    /// Rows without gaps.
    pub fn dense(ty: TensorType, data: DeviceSlice<'a>, rows: usize, cols: usize) -> Self {
        let row = ty.row_bytes(cols as u64).expect("whole blocks") as usize;
        DeviceMat::new(ty, data, rows, cols, row)
    }

    pub fn is_dense(&self) -> bool {
        self.ty.row_bytes(self.cols as u64) == Some(self.row_stride as u64)
    }
}

/// The address of a block has to be a multiple of this: the power of two in its size, up to the 16
/// bytes of a thread's widest load.
pub fn alignment(ty: TensorType) -> usize {
    1 << ty.block_bytes().trailing_zeros().min(4)
}

/// Values of a unit of the type (`kernels/quant/part.cuh`).
pub fn unit_len(ty: TensorType) -> usize {
    match ty.block_len() {
        64 if ty == TensorType::NVFP4 => 16,
        64 | 128 => 32,
        len => len,
    }
}

/// The kernels of one family, by type.
pub struct TypeKernels<P>(Vec<Option<Kernel<P>>>);

impl<P: KernelParams> TypeKernels<P> {
    /// Finds `family_q4_k` and so on, for these types.
    pub fn load(gpu: &Device, family: &str, types: &[TensorType]) -> Result<TypeKernels<P>> {
        let mut kernels = Vec::new();
        for ty in types {
            let at = ty.id() as usize;
            kernels.resize(kernels.len().max(at + 1), None);
            let name = format!("{family}_{}", ty.name().to_lowercase());
            kernels[at] = Some(Kernel::find(gpu, &name)?);
        }
        Ok(TypeKernels(kernels))
    }

    /// # Panics
    /// If the type was not among those of `load`.
    pub fn get(&self, ty: TensorType) -> Kernel<P> {
        let kernel = self.0.get(ty.id() as usize).copied().flatten();
        kernel.unwrap_or_else(|| panic!("kernels for {ty} were not loaded"))
    }
}

/// The types that are computed with.
pub fn types() -> impl Iterator<Item = TensorType> {
    TensorType::all().filter(|ty| quant::is_supported(*ty))
}

/// All of them.
pub fn all_types() -> Vec<TensorType> {
    types().collect()
}
