//! The input of several matrices on the device, stored once in each form that they read.

use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, record_bytes};
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::forward::gpu::ops::Ops;
use crate::gguf::TensorType;
use crate::simd::{ActKind, act_kind};

/// All forms.
const KINDS: [ActKind; 3] = [ActKind::F32, ActKind::Q8_0, ActKind::Q8_K];

/// The shape of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// The number of rows.
    pub n: usize,
    pub cols: usize,
}

/// Rows and their RMSNorm.
pub struct NormedRows<'a> {
    pub shape: RowShape,
    pub x: DeviceSlice<'a>,
    /// f32 [cols]
    pub weight: DeviceSlice<'a>,
    pub eps: f32,
    pub h: DeviceSlice<'a>,
}

/// Activations in the forms that were asked for.
#[derive(Clone, Copy, Default)]
pub struct GpuActs<'a>([Option<DeviceActs<'a>>; 3]);

fn index(kind: ActKind) -> usize {
    KINDS.into_iter().position(|k| k == kind).expect("one of them")
}

/// Bytes of activations in all forms that rows of this length can have.
pub fn acts_bytes(n: usize, cols: usize) -> usize {
    let forms = KINDS.into_iter().filter(|kind| cols.is_multiple_of(kind.block_len()));
    forms.map(|kind| (n * record_bytes(kind, cols)).next_multiple_of(256)).sum()
}

/// Whether records are f32s that are read in place.
pub fn is_at(records: &DeviceActs, x: DeviceSlice) -> bool {
    records.records.address() == x.address()
}

impl<'a> GpuActs<'a> {
    /// The forms of `x`, f32 of this shape, that matrices of `types` read. They are in `memory`,
    /// but for f32, which is read in place where its rows are whole lines.
    pub fn at(
        types: impl IntoIterator<Item = TensorType>,
        shape: RowShape,
        x: DeviceSlice<'a>,
        memory: DeviceSlice<'a>,
    ) -> GpuActs<'a> {
        let RowShape { n, cols } = shape;
        let mut acts = GpuActs::default();
        let mut start = 0;
        for kind in types.into_iter().map(act_kind) {
            if acts.0[index(kind)].is_some() {
                continue;
            }
            let bytes = n * record_bytes(kind, cols);
            if kind == ActKind::F32 && bytes == 4 * n * cols && x.address().is_multiple_of(64) {
                acts.0[index(kind)] = Some(DeviceActs::new(kind, n, cols, x.slice(0..bytes)));
                continue;
            }
            let end = start + bytes;
            acts.0[index(kind)] = Some(DeviceActs::new(kind, n, cols, memory.slice(start..end)));
            start = end.next_multiple_of(256);
        }
        acts
    }

    /// As `at`, and stores `x` there.
    pub fn fill(
        ops: &Ops,
        stream: &Stream,
        types: impl IntoIterator<Item = TensorType>,
        shape: RowShape,
        x: DeviceSlice<'a>,
        memory: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let acts = GpuActs::at(types, shape, x, memory);
        for records in acts.0.into_iter().flatten().filter(|records| !is_at(records, x)) {
            ops.quantize.store(stream, x, shape.cols, records)?;
        }
        Ok(acts)
    }

    /// As `fill` of the normalised rows of `x`, which are stored in `h` too.
    pub fn fill_normed(
        ops: &Ops,
        stream: &Stream,
        types: impl IntoIterator<Item = TensorType>,
        normed: NormedRows<'a>,
        memory: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let NormedRows { shape, x, weight, eps, h } = normed;
        let acts = GpuActs::at(types, shape, h, memory);
        let [float, q8_0, q8_k] = acts.0;
        match [q8_0, q8_k] {
            [None, None] => ops.norm.rms_norm_rows(stream, x, weight, eps, h)?,
            records => ops.norm.rms_norm_acts(stream, x, weight, eps, h, records)?,
        }
        for records in float.into_iter().filter(|records| !is_at(records, h)) {
            ops.quantize.store(stream, h, shape.cols, records)?;
        }
        Ok(acts)
    }

    /// The form that a matrix of this type reads.
    pub fn view(&self, ty: TensorType) -> DeviceActs<'a> {
        self.0[index(act_kind(ty))].unwrap_or_else(|| panic!("no activations for {ty}"))
    }
}
