//! Our quantisers against ggml's on the same values (`fixtures/quant/make_peer_fixtures.py`), and
//! what importances do.

use moeba::gguf::TensorType::{self, *};
use moeba::quant::{dequantize, quantize, quantize_weighted};
use std::path::Path;

const COLS: usize = 256;

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quant").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn floats(name: &str) -> Vec<f32> {
    fixture(name).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn quantized(ty: TensorType, x: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut bytes = vec![0; ty.row_bytes(x.len() as u64).unwrap() as usize];
    quantize_weighted(ty, x, importance, COLS, &mut bytes);
    bytes
}

/// Root of the weighted squared error relative to the weighted squares, each row for itself.
fn error(ty: TensorType, x: &[f32], bytes: &[u8], weights: &[f32]) -> f64 {
    let mut back = vec![0.0; x.len()];
    dequantize(ty, bytes, &mut back);
    let rows = x.chunks(COLS).zip(back.chunks(COLS)).map(|(x, back)| {
        let (mut error, mut square) = (0f64, 0f64);
        for ((x, back), w) in x.iter().zip(back).zip(weights) {
            error += *w as f64 * (*x as f64 - *back as f64).powi(2);
            square += *w as f64 * (*x as f64).powi(2);
        }
        error / square
    });
    (rows.sum::<f64>() / (x.len() / COLS) as f64).sqrt()
}

#[test]
fn errors_are_no_larger_than_those_of_ggml() {
    let x = floats("weights.f32");
    let formats = [Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS];
    for ty in formats.into_iter().chain([MXFP4, NVFP4]) {
        let ours = error(ty, &x, &quantized(ty, &x, None), &[1.0; COLS]);
        let peer = error(ty, &x, &fixture(&format!("{ty}.peer")), &[1.0; COLS]);
        println!("{ty}: {ours:.5}, ggml {peer:.5}");
        assert!(ours <= peer, "{ty}: {ours}, ggml {peer}");
    }
}

#[test]
fn weighted_errors_are_no_larger_than_those_of_ggml() {
    let (x, q) = (floats("weights.f32"), floats("importance.f32"));
    let formats = [Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS];
    let grids = [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S];
    for ty in formats.into_iter().chain(grids) {
        let ours = error(ty, &x, &quantized(ty, &x, Some(&q)), &q);
        let peer = error(ty, &x, &fixture(&format!("{ty}.peer_weighted")), &q);
        println!("{ty}: {ours:.5}, ggml {peer:.5}");
        assert!(ours <= peer, "{ty}: {ours}, ggml {peer}");
    }
}

#[test]
fn importances_move_the_error_to_where_it_counts_less() {
    let (x, q) = (floats("weights.f32"), floats("importance.f32"));
    for ty in [Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4] {
        let with = error(ty, &x, &quantized(ty, &x, Some(&q)), &q);
        let without = error(ty, &x, &quantized(ty, &x, None), &q);
        assert!(with < 0.99 * without, "{ty}: {with} and {without}");
    }
}

#[test]
fn each_row_has_the_same_importances() {
    let (x, q) = (floats("weights.f32"), floats("importance.f32"));
    for ty in [Q4_1, Q3_K, IQ4_NL, NVFP4] {
        let all = quantized(ty, &x, Some(&q));
        let rows: Vec<u8> = x.chunks(COLS).flat_map(|x| quantized(ty, x, Some(&q))).collect();
        assert!(all == rows, "{ty}");
    }
}

#[test]
fn importances_that_say_nothing_are_none() {
    let x = floats("weights.f32");
    for ty in [Q2_K, Q4_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4] {
        let none = quantized(ty, &x, None);
        assert!(quantized(ty, &x, Some(&[0.0; COLS])) == none, "{ty}");
        assert!(quantized(ty, &x, Some(&[f32::NAN; COLS])) == none, "{ty}");
        assert!(quantized(ty, &x, Some(&[-1.0; COLS])) == none, "{ty}");
    }
    // Unweighted and odd importances side by side: no panic, and nothing but numbers.
    let odd = [0.0, 1.0, f32::NAN, f32::INFINITY, f32::MAX, 1e-45, -3.0, 2.0].repeat(COLS / 8);
    for ty in TensorType::all().filter(|ty| moeba::quant::is_supported(*ty)) {
        let mut back = vec![0.0; x.len()];
        dequantize(ty, &quantized(ty, &x, Some(&odd)), &mut back);
        assert!(back.iter().all(|v| v.is_finite()), "{ty}");
    }
}

#[test]
fn mxfp4_blocks_err_no_more_than_with_the_usual_scale() {
    let x = floats("source.f32");
    let mut ours = vec![0; 17 * x.len() / 32];
    quantize(MXFP4, &x, &mut ours);
    let theirs = fixture("MXFP4.quantized");
    let error = |x: &[f32], block: &[u8]| {
        let mut back = [0.0; 32];
        dequantize(MXFP4, block, &mut back);
        x.iter().zip(back).map(|(x, b)| (*x as f64 - b as f64).powi(2)).sum::<f64>()
    };
    for ((x, a), b) in x.chunks(32).zip(ours.chunks(17)).zip(theirs.chunks(17)) {
        assert!(error(x, a) <= error(x, b) * (1.0 + 1e-6), "{a:?} {b:?}");
    }
}
