//! Prompts' pairs grouped by expert, with matrices of F16 and BF16 on tensor cores: near the twin,
//! and the same bits whichever granules a launch computes.

use super::Kernels;
use super::grouped::Grouped;
use super::layer::Layer;
use crate::Result;
use crate::backend::gpu::acts::DeviceActs;
use crate::backend::gpu::halves::{DeviceHalves, halves_bytes};
use crate::backend::gpu::matmul::Groups;
use crate::backend::gpu::{DeviceBuffer, DeviceSlice};
use crate::backend::selftest::{Bench, try_map};
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
pub fn compare(bench: &Bench, kernels: &Kernels, layer: &Layer) -> Result<()> {
    if !kernels.halves.take_expert(&layer.shape) {
        bench.leave_out("the device's tensor cores do not multiply it");
        return Ok(());
    }
    let grouped = Grouped::new(bench, kernels, layer, N_TOKENS)?;
    let expected = layer.on_cpu(bench, &grouped.tokens);
    let whole = grouped.run_halves(&[|_, _| true])?;
    bench.near(layer.name(), &whole, &expected, bound(layer.shape.up))?;
    let parts: [IsHere; 2] = [|e, g| (e, g) == (1, 0), |e, g| (e, g) != (1, 0)];
    let name = format!("{}, in parts", layer.name());
    bench.equal_values(name, &grouped.run_halves(&parts)?, &whole)
}

impl Grouped<'_> {
    /// The tokens' sums, in a launch of each matrix for each of `parts`.
    fn run_halves(&self, parts: &[IsHere]) -> Result<Vec<f32>> {
        let Grouped { bench, kernels, layer, tokens, n_pairs, .. } = self;
        let (s, stream) = (&layer.shape, &bench.stream);
        let sums = try_map([n_pairs * s.n_ff; 2], |n| bench.up(vec![0f32; n]))?;
        let partial = bench.empty(4 * n_pairs * s.n_embd)?;
        let records = tokens.records(bench, s.up)?;
        for is_here in parts {
            let mut table = self.table.to_vec();
            for (i, address) in table.iter_mut().enumerate() {
                *address *= u64::from(is_here(i / s.n_granules(), i % s.n_granules()));
            }
            let table = bench.up(table)?;
            let matrices = table.gpu();
            let sizes = [tokens.n, s.n_embd, s.n_embd];
            let rounded = self.rounded(s.up, sizes, records.gpu())?;
            let x = DeviceHalves::at(s.up, sizes, rounded.all());
            for (groups, out) in self.gate_and_up().into_iter().zip(&sums) {
                let groups = Groups { matrices, ..groups };
                // SAFETY: the tables are those of the slots, of pairs and of their tokens.
                unsafe { kernels.halves.grouped(stream, groups, x, 0, out.gpu(), s.n_ff)? };
            }
            let inner = self.activated(sums.each_ref().map(|sums| &sums.device))?;
            let sizes = [*n_pairs, s.n_ff, s.granule_rows];
            let rounded = self.rounded(s.down, sizes, inner.gpu())?;
            let inner = DeviceHalves::at(s.down, sizes, rounded.all());
            let groups = Groups { matrices, ..self.down_from(0, s.n_ff) };
            // SAFETY: the tables are those of the slots and of pairs.
            unsafe { kernels.halves.grouped(stream, groups, inner, 0, partial.all(), s.n_embd)? };
            stream.synchronize()?;
        }
        self.sum(&partial)
    }

    /// Rounds rows of f32, whose columns are scaled `part` by `part`.
    fn rounded(
        &self,
        ty: TensorType,
        [n, cols, part]: [usize; 3],
        rows: DeviceSlice,
    ) -> Result<DeviceBuffer> {
        let memory = self.bench.empty(halves_bytes(n, cols, part))?;
        let x = DeviceActs::new(ActKind::F32, n, cols, rows);
        let to = DeviceHalves::at(ty, [n, cols, part], memory.all());
        self.kernels.halves.store(&self.bench.stream, x, to)?;
        Ok(memory)
    }
}
