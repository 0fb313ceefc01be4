//! Prompts' pairs grouped by expert, with matrices of F16 and BF16 on tensor cores: near the twin,
//! and the same bits whichever granules a launch computes.

use super::Kernels;
use super::grouped::{Call, Grouping};
use super::layer::{Layer, Tokens};
use crate::Result;
use crate::backend::gpu::acts::DeviceActs;
use crate::backend::gpu::halves::{DeviceHalves, halves_bytes};
use crate::backend::gpu::matmul::{GroupBias, Groups};
use crate::backend::gpu::{DeviceBuffer, DeviceSlice};
use crate::backend::selftest::bench::Bench;
use crate::backend::selftest::report::Row;
use crate::gguf::TensorType::{self, BF16};
use crate::simd::ActKind;

/// More tokens of an expert than a tile has.
const N_TOKENS: u32 = 70;

/// The bound, as a part of the largest result: of three products, one behind the other two.
fn bound(ty: TensorType) -> f64 {
    if ty == BF16 { 1e-2 } else { 1.5e-3 }
}

/// Whether a launch computes a granule of an expert.
type IsHere = fn(usize, usize) -> bool;

/// A layer with biases and one type.
pub fn compare(bench: &Bench, kernels: &Kernels, row: &mut Row, layer: &Layer) -> Result<()> {
    if !kernels.halves.take_expert(&layer.shape) {
        row.leave_out("the device's tensor cores do not multiply it");
        return Ok(());
    }
    let chosen = |t: u32| [1, if t.is_multiple_of(9) { 2 } else { 0 }];
    let chosen: Vec<u32> = (0..N_TOKENS).flat_map(chosen).collect();
    let tokens = Tokens::new(bench, layer, &chosen);
    let expected = layer.on_cpu(bench, &tokens);
    let slots = layer.upload(bench)?;
    let grouping = Grouping::new(bench, &layer.shape, &chosen, &slots)?;
    let call = Call { bench, kernels, layer, tokens: &tokens, grouping: &grouping };
    let whole = call.run_halves(&[|_, _| true])?;
    row.near(layer.name(), &whole, &expected, bound(layer.shape.up));
    let parts: [IsHere; 2] = [|e, g| (e, g) == (1, 0), |e, g| (e, g) != (1, 0)];
    row.bits(format!("{}, in parts", layer.name()), &call.run_halves(&parts)?, &whole);
    Ok(())
}

impl Call<'_> {
    /// The tokens' sums, in a launch of each matrix for each of `parts`.
    fn run_halves(&self, parts: &[IsHere]) -> Result<Vec<f32>> {
        let Call { bench, layer, grouping, .. } = *self;
        let (s, n_pairs) = (&layer.shape, grouping.order.len());
        let zeros = vec![0.0; n_pairs * s.n_ff];
        let [gate, up] = [bench.up_f32(&zeros)?, bench.up_f32(&zeros)?];
        let partial = bench.empty(4 * n_pairs * s.n_embd)?;
        for is_here in parts {
            let mut table = bench.down_u64(&grouping.table)?;
            for (i, address) in table.iter_mut().enumerate() {
                let here = is_here(i / s.n_granules(), i % s.n_granules());
                *address *= u64::from(here);
            }
            let table = bench.up_u64(&table)?;
            self.rows_of_halves(table.all(), [&gate, &up])?;
            let (gate, up) = (bench.down_f32(&gate)?, bench.down_f32(&up)?);
            let mut inner = vec![0.0; gate.len()];
            bench.cpu.kernels.swiglu(&gate, &up, &mut inner);
            self.down_of_halves(table.all(), &inner, &partial)?;
        }
        self.sum(&partial)
    }

    /// The products of gate and up, of the granules in the table.
    fn rows_of_halves(&self, table: DeviceSlice, [gate, up]: [&DeviceBuffer; 2]) -> Result<()> {
        let Call { bench, kernels, layer, tokens, grouping } = *self;
        let s = &layer.shape;
        let records = tokens.records(bench, s.up)?;
        let biases = layer.biases.as_ref().expect("a layer with biases");
        let biases = [bench.up_f32(&biases.gate)?, bench.up_f32(&biases.up)?];
        let (x, memory) = self.rounded(s.up, tokens.n, [s.n_embd; 2], &records)?;
        let x = DeviceHalves::at(s.up, x, memory.all());
        let outs = [(s.gate_at, gate), (s.up_at, up)];
        for ((matrix_at, out), bias) in outs.into_iter().zip(&biases) {
            let (experts, values) = (grouping.experts.all(), bias.all());
            let groups = Groups {
                matrix_at,
                matrices: table,
                granule_rows: s.granule_rows,
                tokens: Some(grouping.tokens.all()),
                bias: Some(GroupBias { experts: Some(experts), values, stride: s.n_ff }),
                ..grouping.groups(s.up, 0, [s.n_ff, s.n_embd])
            };
            // SAFETY: the tables are those of the slots, of pairs and of their tokens.
            unsafe { kernels.halves.grouped(&bench.stream, groups, x, 0, out.all(), s.n_ff)? };
        }
        bench.stream.synchronize()
    }

    /// down · inner of every pair, of the granules in the table.
    fn down_of_halves(
        &self,
        table: DeviceSlice,
        inner: &[f32],
        partial: &DeviceBuffer,
    ) -> Result<()> {
        let Call { bench, kernels, layer, grouping, .. } = *self;
        let (s, stream) = (&layer.shape, &bench.stream);
        let inner = bench.up_f32(inner)?;
        let sizes = [s.n_ff, s.granule_rows];
        let (inner, memory) = self.rounded(s.down, grouping.order.len(), sizes, &inner)?;
        let inner = DeviceHalves::at(s.down, inner, memory.all());
        let bias = bench.up_f32(&layer.biases.as_ref().expect("a layer with biases").down)?;
        let groups = Groups {
            matrix_at: s.down_at,
            matrices: table,
            bias: Some(GroupBias { experts: None, values: bias.all(), stride: s.n_embd }),
            ..grouping.groups(s.down, 0, [s.n_embd, s.n_ff])
        };
        // SAFETY: the tables are those of the slots and of pairs.
        unsafe { kernels.halves.grouped(stream, groups, inner, 0, partial.all(), s.n_embd)? };
        stream.synchronize()
    }

    /// Rounds rows of f32, whose columns are scaled `part` by `part`. Returns their sizes and where
    /// they are.
    fn rounded(
        &self,
        ty: TensorType,
        n: usize,
        [cols, part]: [usize; 2],
        rows: &DeviceBuffer,
    ) -> Result<([usize; 3], DeviceBuffer)> {
        let (bench, halves) = (self.bench, &self.kernels.halves);
        let memory = bench.empty(halves_bytes(n, cols, part))?;
        let x = DeviceActs::new(ActKind::F32, n, cols, rows.all());
        let to = DeviceHalves::at(ty, [n, cols, part], memory.all());
        halves.store(&bench.stream, x, to)?;
        bench.stream.synchronize()?;
        Ok(([n, cols, part], memory))
    }
}
