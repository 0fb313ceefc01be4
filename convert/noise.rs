//! Random blocks of every type, as `synth` needs them: mean zero, a standard deviation that is
//! asked for, integers over the format's whole range. The formats that models are mostly made of
//! are drawn as they are stored, which is fast; others are quantised.

use half::{bf16, f16};
use rand_chacha::rand_core::Rng;

use crate::gguf::TensorType;
use crate::quant::{self, Half, blocks_of_mut, k_scales};
use crate::quant::{BlockQ4_0, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0};

/// How a tensor is drawn.
pub struct Draw {
    ty: TensorType,
    /// Norms and factors are all ones, so that they change nothing; rates of decay are −1.
    constant: Option<f32>,
    std: f32,
}

/// Small, so that routing and attention hang on the input.
const BIAS_STD: f32 = 0.02;

/// The size of the parts that attention and experts add to the residual stream, relative to the
/// embedding. With equal shares the first layer's attention drowns the embedding, all tokens look
/// alike and 99.9 % of experts are found in a cache of half of them. So small, a cache of a quarter
/// (half, three quarters) of the experts under LRU finds 39 % (81 %, 97 %) on 512 tokens of prose,
/// and the next layer's router guesses two thirds of the experts right: on the trained demo model
/// it is 37 % (66 %, 88 %).
pub const RESIDUAL_SHARE: f32 = 0.3;

fn writes_residual(name: &str) -> bool {
    name.contains(".attn_output.") || name.contains(".ffn_down")
}

impl Draw {
    pub fn new(name: &str, ty: TensorType, row_len: usize) -> Draw {
        let is_one = name.ends_with("scale")
            || name.ends_with("scale.weight")
            || name.starts_with("rope_f")
            || name.contains("norm") && name.ends_with(".weight");
        let constant = match name.ends_with("ssm_a") {
            true => Some(-1.0),
            false => is_one.then_some(1.0),
        };
        let is_bias = name.ends_with(".bias");
        let std = match name {
            _ if is_bias => BIAS_STD,
            "token_embd.weight" => 1.0,
            _ if writes_residual(name) => RESIDUAL_SHARE / (row_len as f32).sqrt(),
            _ => (row_len as f32).sqrt().recip(),
        };
        Draw { ty, constant, std }
    }

    /// Multiplies the values by this factor.
    pub fn times(self, factor: f32) -> Draw {
        let constant = self.constant.map(|x| x * factor);
        Draw { constant, std: self.std * factor, ..self }
    }

    /// Fills whole blocks.
    pub fn fill(&self, rng: &mut impl Rng, bytes: &mut [u8]) {
        if let Some(x) = self.constant {
            let n = bytes.len() / self.ty.block_bytes() * self.ty.block_len();
            quant::quantize(self.ty, &vec![x; n], bytes);
            return;
        }
        rng.fill_bytes(bytes);
        match self.ty {
            TensorType::F32 => self.floats(bytes, |x| x.to_le_bytes()),
            TensorType::F16 => self.floats(bytes, |x| f16::from_f32(x).to_le_bytes()),
            TensorType::BF16 => self.floats(bytes, |x| bf16::from_f32(x).to_le_bytes()),
            TensorType::Q8_0 => self.q8_0(bytes),
            TensorType::Q4_0 => self.q4_0(bytes),
            TensorType::Q4_K => self.q4_k(bytes),
            TensorType::Q5_K => self.q5_k(bytes),
            TensorType::Q6_K => self.q6_k(bytes),
            // Rare in a preset: drawn as floats and quantised, which may bend the deviation.
            other => {
                let n = bytes.len() / other.block_bytes() * other.block_len();
                let mut floats = vec![0; 4 * n];
                rng.fill_bytes(&mut floats);
                self.floats(&mut floats, |x| x.to_le_bytes());
                let mut values = vec![0.0; n];
                quant::dequantize(TensorType::F32, &floats, &mut values);
                quant::quantize(other, &values, bytes);
            }
        }
    }

    /// Uniform over ±√3·std, from the low 16 bits that are there.
    fn floats<const N: usize>(&self, bytes: &mut [u8], encode: impl Fn(f32) -> [u8; N]) {
        let unit = 2.0 * 3f32.sqrt() * self.std / 65_535.0;
        for value in bytes.as_chunks_mut::<N>().0 {
            let n = f32::from(u16::from_le_bytes([value[0], value[1]]));
            *value = encode((n - 32_767.5) * unit);
        }
    }

    /// q from −127 to 127: a standard deviation of 73.3.
    fn q8_0(&self, bytes: &mut [u8]) {
        let d = Half::new(self.std / 73.3);
        for block in blocks_of_mut::<BlockQ8_0>(bytes) {
            block.d = d;
            // The format's quantiser never says −128.
            block.qs.iter_mut().for_each(|q| *q = (*q).max(-127));
        }
    }

    /// q from −8 to 7: a mean of −1/2, which the scale's sign takes away, and √(21.5) about zero.
    fn q4_0(&self, bytes: &mut [u8]) {
        let scales = signed(self.std / 4.637);
        for block in blocks_of_mut::<BlockQ4_0>(bytes) {
            block.d = scales[usize::from(block.qs[0] & 1)];
        }
    }

    /// d·sc·(q − 7.5): the minimum is half the range below zero. Standard deviation of q 4.61.
    fn q4_k(&self, bytes: &mut [u8]) {
        let d = self.std / (4.61 * SCALE_RMS);
        let (d, dmin) = (Half::new(d), Half::new(7.5 * d));
        for block in blocks_of_mut::<BlockQ4K>(bytes) {
            block.d = d;
            block.dmin = dmin;
            block.scales = equal_scales(&block.scales);
        }
    }

    /// Like Q4_K, with five bits: d·sc·(q − 15.5), a standard deviation of q of 9.23.
    fn q5_k(&self, bytes: &mut [u8]) {
        let d = self.std / (9.23 * SCALE_RMS);
        let (d, dmin) = (Half::new(d), Half::new(15.5 * d));
        for block in blocks_of_mut::<BlockQ5K>(bytes) {
            block.d = d;
            block.dmin = dmin;
            block.scales = equal_scales(&block.scales);
        }
    }

    /// q from −32 to 31 under scales of both signs from 64 to 127 (root mean square 97.2).
    fn q6_k(&self, bytes: &mut [u8]) {
        let d = Half::new(self.std / (18.48 * 97.2));
        for block in blocks_of_mut::<BlockQ6K>(bytes) {
            block.d = d;
            for scale in &mut block.scales {
                let size = (*scale & 63) + 64;
                *scale = if *scale < 0 { -size } else { size };
            }
        }
    }
}

fn signed(d: f32) -> [Half; 2] {
    [Half::new(d), Half::new(-d)]
}

/// Root mean square of 32 to 63.
const SCALE_RMS: f32 = 48.4;

/// Scales from 32 to 63 with a minimum of the same number each, from random bytes.
fn equal_scales(random: &[u8; 12]) -> [u8; 12] {
    let mut scales = [0; 8];
    for (scale, byte) in scales.iter_mut().zip(random) {
        *scale = 32 + (byte & 31);
    }
    k_scales::pack(&scales, &scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    /// The promise in the module's head, for every type.
    #[test]
    fn weights_have_the_mean_and_the_deviation_asked_for() {
        use TensorType::*;
        for ty in [F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K] {
            for row_len in [256, 2048, 14_336] {
                let n = 1 << 18;
                let mut bytes = vec![0; ty.row_bytes(n).expect("whole blocks") as usize];
                let draw = Draw::new("blk.0.ffn_up.weight", ty, row_len);
                draw.fill(&mut ChaCha8Rng::seed_from_u64(1), &mut bytes);
                let mut values = vec![0.0; n as usize];
                quant::dequantize(ty, &bytes, &mut values);
                let n = n as f64;
                let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
                let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n;
                let std = (row_len as f64).sqrt().recip();
                assert!(mean.abs() < 0.02 * std, "{ty} {row_len}: mean {}", mean / std);
                let ratio = square.sqrt() / std;
                assert!((0.98..1.02).contains(&ratio), "{ty} {row_len}: deviation {ratio}");
            }
        }
    }

    #[test]
    fn norms_are_ones() {
        let mut bytes = vec![0; 64];
        let draw = Draw::new("blk.0.attn_norm.weight", TensorType::F32, 16);
        draw.fill(&mut ChaCha8Rng::seed_from_u64(1), &mut bytes);
        assert!(bytes.as_chunks::<4>().0.iter().all(|b| f32::from_le_bytes(*b) == 1.0));
    }
}
