//! The rate at which threads multiply weights of a type with one token's activations: decode can be
//! no faster than that, as each token reads its weights once.

use super::Rounds;
use super::read_rate::wanted;
use crate::backend::cpu::Cpu;
use crate::experts::memory::Region;
use crate::gguf::TensorType;
use crate::simd::{Activations, MatRef, act_kind};
use std::io;
use std::time::Instant;

/// Rows of the products: several experts' together.
const ROWS: usize = 8192;
const COLS: usize = 2048;
/// Each byte of the weights. As f16, bf16 or f32 it is a small normal number.
const FILL: u8 = 0x2c;

/// 10⁹ bytes of weights a second, from more memory than caches hold, but from a quarter of
/// `available` at most.
pub fn gb_per_second(
    ty: TensorType,
    n_threads: usize,
    available: Option<u64>,
) -> io::Result<Rounds> {
    let row_bytes = ty.row_bytes(COLS as u64).expect("whole blocks of any type") as usize;
    let of_product = ROWS * row_bytes;
    let quarter = available.map_or(usize::MAX, |bytes| bytes as usize / 4);
    let n_products = (wanted().min(quarter) / of_product).max(1);
    let memory = Region::new(n_products * of_product)?;
    // SAFETY: the region is as long as this, not shared, and written here only.
    let weights = unsafe {
        memory.ptr().write_bytes(FILL, memory.len());
        std::slice::from_raw_parts(memory.ptr(), memory.len())
    };
    let cpu = Cpu::new(n_threads);
    let mut acts = Activations::new();
    acts.resize(act_kind(ty), 1, COLS);
    acts.quantize_rows(cpu.kernels, 0..1, &[0.5; COLS], COLS);
    let mut out = vec![0.0; ROWS];
    let mut products = weights.chunks_exact(of_product).cycle();
    Ok(Rounds::of(|| {
        let (start, mut n_bytes) = (Instant::now(), 0);
        while start.elapsed() < Rounds::TIME {
            let bytes = products.next().expect("at least one");
            cpu.product(MatRef::dense(ty, bytes, ROWS, COLS), acts.all(), &mut out);
            n_bytes += bytes.len();
        }
        std::hint::black_box(&out);
        n_bytes as f64 / start.elapsed().as_secs_f64() / 1e9
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_each_kind_of_type_are_measured() {
        for ty in [TensorType::Q4_K, TensorType::Q8_0, TensorType::F16, TensorType::MXFP4] {
            let rounds = gb_per_second(ty, 2, Some(64 << 20)).unwrap();
            assert!(rounds.median() > 0.0, "{ty}");
        }
    }
}
