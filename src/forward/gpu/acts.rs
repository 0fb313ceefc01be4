//! The input of several matrices on the device, once in each form that they read.

use super::ops::Ops;
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, record_bytes};
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::gguf::TensorType;
use crate::simd::{ActKind, act_kind};

/// Every form that there is.
const KINDS: [ActKind; 3] = [ActKind::F32, ActKind::Q8_0, ActKind::Q8_K];

/// Activations in the forms that were asked for.
#[derive(Clone, Copy, Default)]
pub struct GpuActs<'a>([Option<DeviceActs<'a>>; 3]);

fn index(kind: ActKind) -> usize {
    KINDS.into_iter().position(|k| k == kind).expect("one of them")
}

/// Bytes for `tokens` rows of `cols` in every form that rows so long can have.
pub fn room_bytes(tokens: usize, cols: usize) -> usize {
    let forms = KINDS.into_iter().filter(|kind| cols.is_multiple_of(kind.block_len()));
    forms.map(|kind| (tokens * record_bytes(kind, cols)).next_multiple_of(256)).sum()
}

impl<'a> GpuActs<'a> {
    /// Where `tokens` rows of `cols` lie in `memory`, in the forms that `types` read.
    pub fn at(
        types: impl IntoIterator<Item = TensorType>,
        (tokens, cols): (usize, usize),
        memory: DeviceSlice<'a>,
    ) -> GpuActs<'a> {
        let mut acts = GpuActs::default();
        let mut start = 0;
        for kind in types.into_iter().map(act_kind) {
            if acts.0[index(kind)].is_some() {
                continue;
            }
            let end = start + tokens * record_bytes(kind, cols);
            acts.0[index(kind)] =
                Some(DeviceActs::new(kind, tokens, cols, memory.slice(start..end)));
            start = end.next_multiple_of(256);
        }
        acts
    }

    /// Stores `x`, f32 [tokens, cols], there.
    pub fn fill(
        ops: &Ops,
        stream: &Stream,
        types: impl IntoIterator<Item = TensorType>,
        shape: (usize, usize),
        x: DeviceSlice,
        memory: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let acts = GpuActs::at(types, shape, memory);
        for records in acts.0.into_iter().flatten() {
            ops.quantize.store(stream, x, shape.1, records)?;
        }
        Ok(acts)
    }

    /// What a matrix of this type reads.
    pub fn view(&self, ty: TensorType) -> DeviceActs<'a> {
        self.0[index(act_kind(ty))].unwrap_or_else(|| panic!("no activations for {ty}"))
    }
}
