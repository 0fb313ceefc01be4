//! The formats: golden bytes made by PyPI's gguf and by ggml, quality of our searches, odd input.

use moeba::gguf::TensorType::{self, *};
use moeba::quant::{self, dequantize, mxfp4, nvfp4, quantize};
use std::path::Path;

/// The block formats that have a quantiser, each with a bound 2 % above the relative RMS error
/// measured on normal values, without importances.
const BLOCK_TYPES: [(TensorType, f64); 19] = [
    (Q1_0, 0.6078),
    (Q2_0, 0.7251),
    (Q4_0, 0.0861),
    (Q4_1, 0.0786),
    (Q5_0, 0.0427),
    (Q5_1, 0.0381),
    (Q8_0, 0.0054),
    (Q8_1, 0.0054),
    (Q2_K, 0.2703),
    (Q3_K, 0.1464),
    (Q4_K, 0.0712),
    (Q5_K, 0.0352),
    (Q6_K, 0.0175),
    (IQ4_NL, 0.0748),
    (IQ4_XS, 0.0755),
    (TQ1_0, 0.8154),
    (TQ2_0, 0.8154),
    (MXFP4, 0.1129),
    (NVFP4, 0.0827),
];

fn block_types() -> impl Iterator<Item = TensorType> {
    BLOCK_TYPES.into_iter().map(|(ty, _)| ty)
}

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quant").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Normal values from a small generator, so that a failure repeats.
fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

#[test]
fn dequantize_gives_the_golden_bits() {
    for ty in block_types().chain([F16, BF16, F8_E4M3]) {
        let want = floats(&fixture(&format!("{ty}.values")));
        let mut got = vec![0.0; want.len()];
        dequantize(ty, &fixture(&format!("{ty}.blocks")), &mut got);
        assert_eq!(bits(&got), bits(&want), "{ty}");
    }
}

#[test]
fn quantize_gives_the_golden_bytes() {
    let source = floats(&fixture("source.f32"));
    let ternary = [Q1_0, Q2_0, TQ1_0, TQ2_0];
    for ty in ternary.into_iter().chain([Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, F16, BF16, F8_E4M3]) {
        let want = fixture(&format!("{ty}.quantized"));
        let mut got = vec![0; want.len()];
        assert_eq!(quantize(ty, &source, &mut got), 0);
        assert!(got == want, "{ty}");
    }
}

#[test]
fn scales_are_the_numbers_that_the_standards_name() {
    for e in 0..=255 {
        assert_eq!(mxfp4::half_power(e) as f64, 2f64.powi(e as i32 - 128), "{e}");
    }
    for x in 0..=255u8 {
        let (exponent, mantissa) = ((x >> 3 & 15) as i32, (x & 7) as f64);
        let want = match exponent {
            _ if x == 0x7f => 0.0,
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        assert_eq!(nvfp4::half_e4m3(x) as f64, want / 2.0, "{x}");
    }
}

fn round_trip(ty: TensorType, x: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; ty.row_bytes(x.len() as u64).unwrap() as usize];
    quantize(ty, x, &mut bytes);
    let mut back = vec![0.0; x.len()];
    dequantize(ty, &bytes, &mut back);
    back
}

/// Root mean square error relative to the root mean square of the values.
fn relative_error(ty: TensorType, x: &[f32]) -> f64 {
    let square = |v: f32| (v as f64) * (v as f64);
    let error: f64 = round_trip(ty, x).iter().zip(x).map(|(b, x)| square(b - x)).sum();
    (error / x.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

#[test]
fn errors_on_normal_values_stay_within_the_measured_bounds() {
    let x = normal(1, 256 * 256);
    for (ty, bound) in BLOCK_TYPES {
        let error = relative_error(ty, &x);
        println!("{ty}: relative RMS error {error:.5}");
        assert!(error < bound, "{ty}: relative RMS error {error}");
    }
}

#[test]
fn offsets_are_used_by_the_formats_that_have_them() {
    // Values around −3: a format with mins keeps the precision that the spread asks for.
    let x: Vec<f32> = normal(2, 256 * 16).iter().map(|x| x * 0.1 - 3.0).collect();
    for (with, without) in [(Q4_K, Q4_0), (Q4_1, Q4_0), (Q5_1, Q5_0), (Q2_K, Q3_K)] {
        let (with, without) = (relative_error(with, &x), relative_error(without, &x));
        assert!(with < 0.5 * without, "{with} {without}");
    }
}

#[test]
fn zeros_stay_zeros() {
    for ty in block_types() {
        assert!(round_trip(ty, &[0.0; 512]).iter().all(|x| *x == 0.0), "{ty}");
        assert!(round_trip(ty, &[-0.0; 512]).iter().all(|x| *x == 0.0), "{ty}");
    }
}

#[test]
fn nan_and_infinity_count_as_zero_and_are_reported() {
    let mut x = normal(3, 512);
    x[7] = f32::NAN;
    x[100] = f32::INFINITY;
    x[400] = f32::NEG_INFINITY;
    let mut zeroed = x.clone();
    for i in [7, 100, 400] {
        zeroed[i] = 0.0;
    }
    for ty in block_types() {
        let size = ty.row_bytes(512).unwrap() as usize;
        let (mut odd, mut even) = (vec![0; size], vec![0; size]);
        assert_eq!(quantize(ty, &x, &mut odd), 3, "{ty}");
        assert_eq!(quantize(ty, &zeroed, &mut even), 0, "{ty}");
        assert!(odd == even, "{ty}");
    }
    let mut halves = vec![0; 1024];
    assert_eq!(quantize(F16, &x, &mut halves), 3);
    let mut back = vec![0.0; 512];
    dequantize(F16, &halves, &mut back);
    assert!(back[7].is_nan() && back[100] == f32::INFINITY && back[400] == f32::NEG_INFINITY);
}

#[test]
fn extreme_values_neither_panic_nor_hang() {
    let extremes = [f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, -1e-45, 1e30, -1e-30, 65504.0];
    for ty in block_types() {
        for (i, a) in extremes.iter().enumerate() {
            for b in &extremes[i..] {
                let x: Vec<f32> = (0..256).map(|k| if k % 3 == 0 { *a } else { *b }).collect();
                round_trip(ty, &x);
            }
        }
    }
}

#[test]
fn supported_types_are_those_with_code() {
    for ty in TensorType::all() {
        if quant::is_supported(ty) {
            let n = ty.block_len();
            dequantize(ty, &vec![0; ty.block_bytes()], &mut vec![1.0; n]);
        }
    }
    assert!(quant::is_supported(IQ1_S) && !quant::is_supported(I32));
}
