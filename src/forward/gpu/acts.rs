//! The input of several matrices on the device, stored once in each form that they read.

use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, record_bytes};
use crate::backend::gpu::halves::{DeviceHalves, halves_bytes};
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

/// Types whose matrices tensor cores multiply with activations that are rounded to the type.
const HALVES: [TensorType; 2] = [TensorType::F16, TensorType::BF16];

/// Some of `HALVES`.
pub type HalfTypes = [bool; 2];

/// Activations in the forms that were asked for.
#[derive(Clone, Copy, Default)]
pub struct GpuActs<'a> {
    /// By `KINDS`.
    forms: [Option<DeviceActs<'a>>; 3],
    /// By `HALVES`.
    halves: [Option<DeviceHalves<'a>>; 2],
    /// Bytes of the memory that have been taken.
    end: usize,
}

fn index(kind: ActKind) -> usize {
    KINDS.into_iter().position(|k| k == kind).expect("one of them")
}

/// Bytes of activations in all forms that rows of this length can have.
pub fn acts_bytes(n: usize, cols: usize) -> usize {
    let forms = KINDS.into_iter().filter(|kind| cols.is_multiple_of(kind.block_len()));
    let forms: usize = forms.map(|kind| (n * record_bytes(kind, cols)).next_multiple_of(256)).sum();
    // Halves of both types have the place of f32s that are read in place, but for their scales.
    forms + 2 * (4 * n + 256)
}

/// Whether records are f32s that are read in place.
pub fn is_at(records: &DeviceActs, x: DeviceSlice) -> bool {
    records.records.address() == x.address()
}

/// The types of `HALVES` among these.
pub fn note_half(types: &mut HalfTypes, ty: TensorType) {
    HALVES.iter().zip(types).for_each(|(half, has)| *has |= *half == ty);
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
            if acts.forms[index(kind)].is_some() {
                continue;
            }
            let bytes = n * record_bytes(kind, cols);
            if kind == ActKind::F32 && bytes == 4 * n * cols && x.address().is_multiple_of(64) {
                acts.forms[index(kind)] = Some(DeviceActs::new(kind, n, cols, x.slice(0..bytes)));
                continue;
            }
            let end = start + bytes;
            let records = memory.slice(start..end);
            acts.forms[index(kind)] = Some(DeviceActs::new(kind, n, cols, records));
            start = end.next_multiple_of(256);
        }
        acts.end = start;
        acts
    }

    /// Makes the forms of `x` at a place of their own, and stores them there.
    pub fn fill(
        ops: &Ops,
        stream: &Stream,
        types: impl IntoIterator<Item = TensorType>,
        shape: RowShape,
        x: DeviceSlice<'a>,
        memory: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let acts = GpuActs::at(types, shape, x, memory);
        for records in acts.forms.into_iter().flatten().filter(|records| !is_at(records, x)) {
            ops.quantize.store(stream, x, shape.cols, records)?;
        }
        Ok(acts)
    }

    /// `fill` of the normalised rows of `x`, which are stored in `h` too.
    pub fn fill_normed(
        ops: &Ops,
        stream: &Stream,
        types: impl IntoIterator<Item = TensorType>,
        normed: NormedRows<'a>,
        memory: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let NormedRows { shape, x, weight, eps, h } = normed;
        let acts = GpuActs::at(types, shape, h, memory);
        let [float, q8_0, q8_k] = acts.forms;
        match [q8_0, q8_k] {
            [None, None] => ops.norm.rms_norm_rows(stream, x, weight, eps, h)?,
            records => ops.norm.rms_norm_acts(stream, x, weight, eps, h, records)?,
        }
        for records in float.into_iter().filter(|records| !is_at(records, h)) {
            ops.quantize.store(stream, h, shape.cols, records)?;
        }
        Ok(acts)
    }

    /// Adds the rows rounded to each of `types` whose matrices tensor cores multiply, if `x`, the
    /// f32 form, lies in place and not in `memory`.
    pub fn halves_at(
        mut self,
        ops: &Ops,
        types: HalfTypes,
        x: DeviceSlice<'a>,
        memory: DeviceSlice<'a>,
    ) -> GpuActs<'a> {
        let Some(DeviceActs { tokens, cols, .. }) = self.float_at(x) else { return self };
        for (i, ty) in HALVES.into_iter().enumerate() {
            if types[i] && ops.halves.take(ty, cols) {
                let end = self.end + halves_bytes(tokens, cols, cols);
                let place = memory.slice(self.end..end);
                self.halves[i] = Some(DeviceHalves::at(ty, [tokens, cols, cols], place));
                self.end = end.next_multiple_of(256);
            }
        }
        self
    }

    /// Rounds as `halves_at` says, and stores the rounded rows.
    pub fn with_halves(
        self,
        ops: &Ops,
        stream: &Stream,
        types: HalfTypes,
        x: DeviceSlice<'a>,
        memory: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let acts = self.halves_at(ops, types, x, memory);
        for halves in acts.halves.into_iter().flatten() {
            let records = acts.float_at(x).expect("as their place is");
            ops.halves.store(stream, records, halves)?;
        }
        Ok(acts)
    }

    /// The f32 form, if it lies in place.
    fn float_at(&self, x: DeviceSlice) -> Option<DeviceActs<'a>> {
        self.forms[0].filter(|records| is_at(records, x))
    }

    /// Without what tensor cores multiply.
    pub fn exact(self) -> GpuActs<'a> {
        GpuActs { halves: [None; 2], ..self }
    }

    /// The activations rounded to the matrix's type, if tensor cores multiply it.
    pub fn halves(&self, ty: TensorType) -> Option<DeviceHalves<'a>> {
        self.halves[HALVES.iter().position(|half| *half == ty)?]
    }

    /// The form that a matrix of this type reads.
    pub fn view(&self, ty: TensorType) -> DeviceActs<'a> {
        self.forms[index(act_kind(ty))].unwrap_or_else(|| panic!("no activations for {ty}"))
    }
}
