//! The order not chosen, for `kernels.rs` to measure: a float lane is a position within the block
//! (int32 lane i of each block's products is converted and added to float lane i), so that a
//! block needs no sum across lanes, but a matrix–matrix kernel needs one int32 vector for each
//! row and token. Q4_K and Q8_0 only.

use super::Variant;
use moeba::gguf::TensorType;
use moeba::quant::{BlockQ4K, BlockQ8_0, blocks_of, k_scales};
use moeba::simd::{ActView, MatRef};
use std::arch::x86_64::*;
use std::hint::black_box;

/// One row of Q4_K as bytes in natural order, for many tokens.
pub struct Unpacked {
    codes: Vec<u8>,
    scales: Vec<[i16; 8]>,
    mins: Vec<[i16; 8]>,
}

impl Unpacked {
    pub fn new(cols: usize) -> Self {
        let blocks = cols.div_ceil(256);
        Unpacked { codes: vec![0; cols], scales: vec![[0; 8]; blocks], mins: vec![[0; 8]; blocks] }
    }
}

pub fn matmul(mat: MatRef, acts: ActView, out: &mut [f32], unpacked: &mut Unpacked) {
    assert!(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"));
    assert!(mat.cols == acts.cols() && out.len() == mat.rows * acts.tokens());
    // SAFETY: the features are there, the sizes fit.
    unsafe {
        match (mat.ty, acts.tokens()) {
            (TensorType::Q4_K, 1) => q4_k_vector(mat, acts, out),
            (TensorType::Q4_K, _) => q4_k_many(mat, acts, out, unpacked),
            (TensorType::Q8_0, _) => q8_0(mat, acts, out),
            (other, _) => panic!("{other}"),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum_of_lanes(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// # Safety
/// 32 bytes at `p` are readable; the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load<T>(p: *const T) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn spread(scales: __m256i, j: usize) -> __m256i {
    _mm256_shuffle_epi8(scales, _mm256_set1_epi16((2 * j + 256 * (2 * j + 1)) as i16))
}

/// The packed scales and mins as 16 i16.
#[inline]
#[target_feature(enable = "avx2")]
fn scales_and_mins(packed: &[u8; 12]) -> __m256i {
    let word = |i: usize| u32::from_le_bytes(packed[i..i + 4].try_into().unwrap());
    let (a, b, c) = (word(0), word(4), word(8));
    let scales = c & 0x0f0f_0f0f | (a >> 6 & 0x0303_0303) << 4;
    let mins = c >> 4 & 0x0f0f_0f0f | (b >> 6 & 0x0303_0303) << 4;
    let low = 0x3f3f_3f3f;
    let bytes = _mm_set_epi32(mins as i32, (b & low) as i32, scales as i32, (a & low) as i32);
    _mm256_cvtepu8_epi16(bytes)
}

/// # Safety
/// The processor has AVX2 and FMA; sizes fit.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q4_k_vector(mat: MatRef, acts: ActView, out: &mut [f32]) {
    let (qs, scales, sums) = (acts.qs(0), acts.scales(0), acts.sums32(0));
    let nibble = _mm256_set1_epi8(15);
    for (r, out) in out.iter_mut().enumerate() {
        let mut lanes = _mm256_setzero_ps();
        let mut min_lanes = _mm_setzero_ps();
        for (b, w) in blocks_of::<BlockQ4K>(mat.row(r)).iter().enumerate() {
            let both = scales_and_mins(&w.scales);
            let sc = _mm256_permute2x128_si256::<0>(both, both);
            let mut sum = _mm256_setzero_si256();
            // SAFETY: 256 activations and 128 bytes of codes a block, 8 sums.
            unsafe {
                let a = qs.as_ptr().add(256 * b);
                for c in 0..4 {
                    let codes = load(w.qs.as_ptr().add(32 * c));
                    let low = _mm256_and_si256(codes, nibble);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
                    let low = _mm256_maddubs_epi16(low, load(a.add(64 * c)));
                    let high = _mm256_maddubs_epi16(high, load(a.add(64 * c + 32)));
                    let low = _mm256_madd_epi16(low, spread(sc, 2 * c));
                    let high = _mm256_madd_epi16(high, spread(sc, 2 * c + 1));
                    sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
                }
                let sums = _mm_loadu_si128(sums.as_ptr().add(8 * b).cast());
                let mins = _mm_madd_epi16(_mm256_extracti128_si256::<1>(both), sums);
                let d = _mm256_set1_ps(w.d.get() * scales[b]);
                let dmin = _mm_set1_ps(w.dmin.get() * scales[b]);
                lanes = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sum), lanes);
                min_lanes = _mm_fnmadd_ps(dmin, _mm_cvtepi32_ps(mins), min_lanes);
            }
        }
        *out = sum_of_lanes(_mm256_add_ps(lanes, _mm256_zextps128_ps256(min_lanes)));
    }
}

/// A row unpacked once, then four tokens at a time over it.
///
/// # Safety
/// The processor has AVX2 and FMA; sizes fit; the number of tokens is a multiple of 4.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q4_k_many(mat: MatRef, acts: ActView, out: &mut [f32], unpacked: &mut Unpacked) {
    let nibble = _mm256_set1_epi8(15);
    for r in 0..mat.rows {
        let row = blocks_of::<BlockQ4K>(mat.row(r));
        for (b, w) in row.iter().enumerate() {
            let (scales, mins) = k_scales::unpack(&w.scales);
            unpacked.scales[b] = scales.map(|s| s as i16);
            unpacked.mins[b] = mins.map(|s| s as i16);
            for c in 0..4 {
                // SAFETY: 64 codes from 64c on in this block.
                unsafe {
                    let codes = load(w.qs.as_ptr().add(32 * c));
                    let to = unpacked.codes.as_mut_ptr().add(256 * b + 64 * c);
                    _mm256_storeu_si256(to.cast(), _mm256_and_si256(codes, nibble));
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
                    _mm256_storeu_si256(to.add(32).cast(), high);
                }
            }
        }
        for t in (0..acts.tokens()).step_by(4) {
            let qs: [_; 4] = std::array::from_fn(|k| acts.qs(t + k).as_ptr());
            let scales: [_; 4] = std::array::from_fn(|k| acts.scales(t + k));
            let sums: [_; 4] = std::array::from_fn(|k| acts.sums32(t + k).as_ptr());
            let mut lanes = [_mm256_setzero_ps(); 4];
            let mut min_lanes = [_mm_setzero_ps(); 4];
            for (b, w) in row.iter().enumerate() {
                let mut sum = [_mm256_setzero_si256(); 4];
                for j in 0..8 {
                    let at = 256 * b + 32 * j;
                    let scale = _mm256_set1_epi16(unpacked.scales[b][j]);
                    for k in 0..4 {
                        // SAFETY: 32 codes and activations from `at` on.
                        unsafe {
                            let codes = load(unpacked.codes.as_ptr().add(at));
                            let pairs = _mm256_maddubs_epi16(codes, load(qs[k].add(at)));
                            let products = _mm256_madd_epi16(pairs, scale);
                            sum[k] = _mm256_add_epi32(sum[k], products);
                        }
                    }
                }
                let (d, dmin) = (w.d.get(), w.dmin.get());
                for k in 0..4 {
                    // SAFETY: eight sums and mins a block.
                    unsafe {
                        let sums = _mm_loadu_si128(sums[k].add(8 * b).cast());
                        let mins = _mm_loadu_si128(unpacked.mins[b].as_ptr().cast());
                        let mins = _mm_cvtepi32_ps(_mm_madd_epi16(mins, sums));
                        let scale = _mm256_set1_ps(d * scales[k][b]);
                        lanes[k] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum[k]), lanes[k]);
                        let scale = _mm_set1_ps(dmin * scales[k][b]);
                        min_lanes[k] = _mm_fnmadd_ps(scale, mins, min_lanes[k]);
                    }
                }
            }
            for k in 0..4 {
                let all = _mm256_add_ps(lanes[k], _mm256_zextps128_ps256(min_lanes[k]));
                out[(t + k) * mat.rows + r] = sum_of_lanes(all);
            }
        }
    }
}

/// # Safety
/// The processor has AVX2 and FMA; sizes fit; the number of tokens is 1 or a multiple of 4.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q8_0(mat: MatRef, acts: ActView, out: &mut [f32]) {
    for t in (0..acts.tokens()).step_by(4) {
        // SAFETY: the caller's promises.
        unsafe {
            match acts.tokens() {
                1 => q8_0_tile::<1>(mat, acts, t, out),
                _ => q8_0_tile::<4>(mat, acts, t, out),
            }
        }
    }
}

/// # Safety
/// As `q8_0`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q8_0_tile<const T: usize>(mat: MatRef, acts: ActView, t: usize, out: &mut [f32]) {
    let qs: [_; T] = std::array::from_fn(|k| acts.qs(t + k).as_ptr());
    let scales: [_; T] = std::array::from_fn(|k| acts.scales(t + k));
    let ones = _mm256_set1_epi16(1);
    for r in 0..mat.rows {
        let mut lanes = [_mm256_setzero_ps(); T];
        for (b, w) in blocks_of::<BlockQ8_0>(mat.row(r)).iter().enumerate() {
            let d = w.d.get();
            // SAFETY: 32 codes and activations a block.
            unsafe {
                let codes = load(w.qs.as_ptr());
                let magnitudes = _mm256_abs_epi8(codes);
                for k in 0..T {
                    let a = _mm256_sign_epi8(load(qs[k].add(32 * b)), codes);
                    let sum = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, a), ones);
                    let scale = _mm256_set1_ps(d * scales[k][b]);
                    lanes[k] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum), lanes[k]);
                }
            }
        }
        for k in 0..T {
            out[(t + k) * mat.rows + r] = sum_of_lanes(lanes[k]);
        }
    }
}

/// Asks for a cache line and its neighbour.
pub fn prefetch(p: *const u8) {
    // SAFETY: hints, which read nothing.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(64).cast());
    }
}

/// Operations a second of `maddubs` with an i16 addition, operands in registers: what an integer
/// kernel on AVX2 cannot exceed.
pub fn integer_peak(seconds: fn(&mut [Variant]) -> Vec<f64>) -> f64 {
    const STEPS: usize = 100_000;
    assert!(is_x86_feature_detected!("avx2"));
    // SAFETY: the processor has AVX2.
    let seconds = seconds(&mut [Box::new(|_| unsafe { peak_loop(STEPS) })]);
    (STEPS * 10 * 32 * 2) as f64 / seconds[0]
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn peak_loop(steps: usize) {
    let mut sums = [_mm256_setzero_si256(); 10];
    let (mut w, a) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(5)));
    for _ in 0..steps {
        for sum in &mut sums {
            // SAFETY: an empty instruction that claims to change w, so that every product is
            // computed and none is hoisted out of the loop.
            unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) w, options(nomem, nostack)) };
            *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(w, a));
        }
    }
    black_box(sums);
}
