//! IQ4_XS: 256 values in eight sub-blocks of 32 with the values of IQ4_NL and 6-bit scales around
//! 32; 4.25 bits a weight. `x = d·(sc_j − 32)·q`. The low four bits of scale j are half j mod 2 of
//! `scales_l[j / 2]`, its top two are bits 2j and 2j + 1 of `scales_h`. Sub-block j has bytes 16j
//! to 16j + 15 of the codes, laid out as in IQ4_NL.

use super::iq4_nl::{VALUES, codes, values};
use super::table;
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::search;
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ4XS {
    pub d: Half,
    pub scales_h: [u8; 2],
    pub scales_l: [u8; 4],
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockIQ4XS>() == 136);

impl BlockIQ4XS {
    /// The eight scales, −32 to 31.
    fn sub_scales(&self) -> [i32; 8] {
        let high = u16::from_le_bytes(self.scales_h);
        std::array::from_fn(|j| {
            let low = self.scales_l[j / 2] >> (4 * (j % 2)) & 15;
            (low as i32 | ((high >> (2 * j) & 3) << 4) as i32) - 32
        })
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ4XS {
    const TYPE: TensorType = TensorType::IQ4_XS;
    const LEN: usize = 256;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let (mut scales, mut weights) = ([0f32; 8], [0f32; 32]);
        for (j, (x, scale)) in x.as_chunks::<32>().0.iter().zip(&mut scales).enumerate() {
            search::weights(x, importance.map(|v| &v[32 * j..][..32]), &mut weights);
            *scale = table::scale(&VALUES, x, &weights);
        }
        // The scale of largest magnitude becomes −32, the end of the range that has no twin.
        let d = search::extreme(&scales) / -32.0;
        let inverse = crate::quant::finite_inverse(d);
        let d = Half::new(d);
        let (mut high, mut scales_l, mut qs) = (0u16, [0; 4], [0; 128]);
        for (j, x) in x.as_chunks::<32>().0.iter().enumerate() {
            let scale = search::nearest(scales[j] * inverse).clamp(-32.0, 31.0);
            qs[16 * j..][..16].copy_from_slice(&codes(x, d.get() * scale));
            let scale = (scale + 32.0) as u8;
            scales_l[j / 2] |= (scale & 15) << (4 * (j % 2));
            high |= ((scale >> 4) as u16) << (2 * j);
        }
        BlockIQ4XS { d, scales_h: high.to_le_bytes(), scales_l, qs }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        let blocks = out.chunks_exact_mut(32).zip(self.qs.chunks_exact(16));
        for ((out, qs), scale) in blocks.zip(self.sub_scales()) {
            let scale = d * scale as f32;
            for (o, q) in out.iter_mut().zip(values(qs)) {
                *o = scale * q as f32;
            }
        }
    }
}

impl IntBlock for BlockIQ4XS {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 127;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        let mut isum = 0;
        let blocks = a.chunks_exact(32).zip(self.qs.chunks_exact(16));
        for ((a, qs), scale) in blocks.zip(self.sub_scales()) {
            let dot: i32 = values(qs).zip(a).map(|(q, a)| q as i32 * *a as i32).sum();
            isum += scale * dot;
        }
        (isum, 0)
    }
}
