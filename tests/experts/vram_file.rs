//! A file with experts of several shapes.

use std::ops::Range;
use std::path::Path;

use moeba::experts::MatrixRows;
use moeba::gguf::{TensorType, Writer};

pub const N_EMBD: usize = 64;
pub const N_EXPERTS: usize = 6;
/// Experts a token.
pub const K: usize = 2;
/// Layers with experts; the first has none.
pub const MOE_LAYERS: Range<usize> = 1..4;

/// (intermediate rows, rows a granule, block bytes, whether there is a gate) of layers with
/// experts: the last granule is shorter than the others; one size class holds two layers.
pub const SHAPES: [(usize, usize, usize, bool); 3] =
    [(160, 64, 34, true), (96, 32, 18, false), (160, 64, 34, true)];

pub fn byte(seed: u64) -> u8 {
    (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as u8
}

pub fn parts((n_ff, _, block_bytes, gated): (usize, usize, usize, bool)) -> [MatrixRows; 3] {
    let part = |rows: usize, cols: usize| {
        let row_bytes = cols / 32 * block_bytes;
        MatrixRows { rows, row_bytes, block_len: 32, block_bytes }
    };
    let up = part(n_ff, N_EMBD);
    [if gated { up } else { MatrixRows::absent(n_ff) }, up, part(N_EMBD, n_ff)]
}

pub fn write(path: &Path) {
    let mut out = Writer::create(path, None).unwrap();
    let each = |write: &mut dyn FnMut(String, [u64; 3], TensorType)| {
        for (layer, shape) in MOE_LAYERS.zip(SHAPES) {
            let (n_embd, n_ff, n) = (N_EMBD as u64, shape.0 as u64, N_EXPERTS as u64);
            let ty = if shape.2 == 34 { TensorType::Q8_0 } else { TensorType::Q4_0 };
            if shape.3 {
                write(format!("{layer}.gate"), [n_embd, n_ff, n], ty);
            }
            write(format!("{layer}.up"), [n_embd, n_ff, n], ty);
            write(format!("{layer}.down"), [n_ff, n_embd, n], ty);
        }
    };
    each(&mut |name, dims, ty| {
        out.declare(&name, &dims, ty).unwrap();
    });
    let mut seed = 0;
    each(&mut |name, dims, ty| {
        let n = dims.iter().product::<u64>() / 32 * ty.block_bytes() as u64;
        seed += 1 << 32;
        let bytes: Vec<u8> = (seed..seed + n).map(byte).collect();
        out.write_tensor(&name, &bytes).unwrap();
    });
    out.finish().unwrap();
}
