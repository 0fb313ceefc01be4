//! Scalar and vector, matrix–vector and matrix–matrix: the same bits, for every format and shape.

use common::quant::{Random, bits, scales, types, weights};
use moeba::gguf::TensorType;
use moeba::quant::dequantize;
use moeba::simd::{
    self, ActKind, ActView, Activations, Floats, Kernels, MatRef, Out, Scratch, act_kind,
};
use proptest::prelude::*;

fn scalar() -> &'static Kernels {
    simd::by_name("scalar").unwrap()
}

/// The vector versions that this processor can run.
fn vectors() -> impl Iterator<Item = &'static Kernels> {
    ["avx2", "avx512", "neon", "dotprod"].into_iter().filter_map(simd::by_name)
}

fn activations(k: &Kernels, kind: ActKind, tokens: usize, cols: usize, x: &[f32]) -> Activations {
    let mut acts = Activations::new();
    acts.resize(kind, tokens, cols);
    acts.quantize_rows(k, 0..tokens, x, cols);
    acts
}

fn product(k: &Kernels, mat: MatRef, acts: ActView) -> Vec<f32> {
    let mut out = vec![f32::NAN; mat.rows * acts.tokens()];
    k.matmul_all(mat, acts, &mut out, &mut Scratch::new());
    out
}

/// Results that begin on cache lines, with a gap behind each token's.
struct Results {
    rows: usize,
    stride: usize,
    floats: Floats,
}

impl Results {
    fn new(rows: usize, tokens: usize) -> Self {
        let stride = (rows + 1).next_multiple_of(16);
        let mut floats = Floats::default();
        floats.resize(stride * tokens);
        floats.fill(f32::NAN);
        Results { rows, stride, floats }
    }

    fn places(&mut self) -> Out {
        Out { at: self.floats.as_mut_ptr(), stride: self.stride, past_caches: true }
    }

    /// Without the gaps, which must not have been written.
    fn dense(&self) -> Vec<f32> {
        let tokens = self.floats.chunks_exact(self.stride).map(|row| row.split_at(self.rows));
        let (values, gaps): (Vec<_>, Vec<_>) = tokens.unzip();
        assert!(gaps.concat().iter().all(|x| x.is_nan()));
        values.concat()
    }
}

/// All versions and all ways to cut the work, against scalar one token at a time.
fn check(ty: TensorType, rows: usize, cols: usize, tokens: usize, gap: usize, seed: u64) {
    let mut random = Random(seed);
    let bytes = weights(ty, rows, cols, gap, &mut random);
    let stride = ty.row_bytes(cols as u64).unwrap() as usize + gap;
    let mat = MatRef::new(ty, &bytes, rows, cols, stride);
    let x = random.floats(tokens * cols);
    let acts = activations(scalar(), act_kind(ty), tokens, cols, &x);
    let want = product(scalar(), mat, acts.all());
    let case = format!("{ty} {rows}×{cols}, {tokens} tokens, gap {gap}, seed {seed}");
    for k in vectors() {
        let acts = activations(k, act_kind(ty), tokens, cols, &x);
        assert_eq!(bits(&product(k, mat, acts.all())), bits(&want), "{}: {case}", k.name);
        // One token at a time: the matrix–vector path.
        for t in 0..tokens {
            let got = product(k, mat, acts.view(t..t + 1, 0..cols));
            assert_eq!(bits(&got), bits(&want[t * rows..][..rows]), "{} at {t}: {case}", k.name);
        }
        // Rows in two parts, as two threads would, and past the caches.
        let mut out = Results::new(rows, tokens);
        let cut = random.next() as usize % (rows + 1);
        for part in [0..cut, cut..rows] {
            // SAFETY: `out` has a place for each row and token and is ours alone.
            unsafe { k.matmul(mat, part, acts.all(), out.places(), &mut Scratch::new()) };
        }
        assert_eq!(bits(&out.dense()), bits(&want), "{} cut at {cut}: {case}", k.name);
        // Tokens by a list.
        let list: Vec<u32> =
            (0..tokens + 3).map(|_| random.next() as u32 % tokens as u32).collect();
        let got = product(k, mat, acts.all().select(&list));
        for (i, t) in list.iter().enumerate() {
            let want = &want[*t as usize * rows..][..rows];
            assert_eq!(bits(&got[i * rows..][..rows]), bits(want), "{} list: {case}", k.name);
        }
    }
}

#[test]
fn fixed_shapes_agree_to_the_bit() {
    for ty in types() {
        let block = ty.block_len().max(8);
        for (rows, blocks) in [(1, 1), (3, 2), (8, 3), (9, 7), (17, 8), (5, 9), (16, 16), (11, 19)]
        {
            for tokens in [1, 2, 3, 4, 5, 8, 13] {
                check(ty, rows, blocks * block, tokens, 0, 7);
            }
        }
        check(ty, 24, 768, 33, 0, 1);
        check(ty, 10, 2048, 6, 64, 2);
        // More tokens and rows than a kernel takes at a time.
        check(ty, 41, 8192, 37, 0, 3);
    }
}

#[test]
fn float_rows_of_any_length_agree_to_the_bit() {
    use TensorType::{BF16, F8_E4M3, F16, F32};
    for ty in [F32, F16, BF16, F8_E4M3] {
        for cols in [1, 2, 7, 8, 9, 15, 63, 100, 257] {
            for (rows, tokens) in [(1, 1), (4, 3), (7, 5), (6, 9)] {
                check(ty, rows, cols, tokens, 2, cols as u64);
            }
        }
    }
}

/// Each of the 256 bytes, times 1 and some zeros.
#[test]
fn every_e4m3_number_is_widened_alike() {
    let (ty, cols) = (TensorType::F8_E4M3, 16);
    let bytes: Vec<u8> = (0..=255).flat_map(|byte| [byte; 16]).collect();
    let mat = MatRef::dense(ty, &bytes, 256, cols);
    let mut want = vec![0.0; bytes.len()];
    dequantize(ty, &bytes, &mut want);
    for tokens in [1, 4, 24] {
        let mut x = vec![0.0; tokens * cols];
        x.iter_mut().skip(3).step_by(cols).for_each(|x| *x = 1.0);
        for k in vectors().chain([scalar()]) {
            let got = product(k, mat, activations(k, ActKind::F32, tokens, cols, &x).all());
            for (got, want) in got.iter().zip(want.iter().step_by(cols).cycle()) {
                assert!(got == want || got.is_nan() && want.is_nan(), "{}: {got} {want}", k.name);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn any_shape_agrees_to_the_bit(
        ty in 0..types().len(),
        rows in 1usize..40,
        blocks in 1usize..20,
        tokens in 1usize..24,
        gap in 0usize..40,
        seed in any::<u64>(),
    ) {
        let ty = types()[ty];
        check(ty, rows, blocks * ty.block_len(), tokens, gap, seed);
    }
}

#[test]
fn column_ranges_are_dot_products_of_their_own() {
    for ty in types() {
        let block = ty.block_len().max(32);
        let (rows, cols, tokens) = (9, 8 * block, 3);
        let mut random = Random(11);
        let bytes = weights(ty, rows, cols, 0, &mut random);
        let mat = MatRef::dense(ty, &bytes, rows, cols);
        let acts = activations(scalar(), act_kind(ty), tokens, cols, &random.floats(tokens * cols));
        for range in [0..block, block..4 * block, 3 * block..8 * block] {
            // The same columns copied out.
            let part = mat.column_range(range.clone());
            let copy: Vec<u8> = (0..rows).flat_map(|r| part.row(r).to_vec()).collect();
            let copy = MatRef::dense(ty, &copy, rows, range.len());
            let view = acts.all().column_range(range.clone());
            let want = product(scalar(), copy, view);
            for k in vectors().chain([scalar()]) {
                assert_eq!(bits(&product(k, part, view)), bits(&want), "{ty} {range:?}");
            }
        }
        let below = mat.row_range(2..7);
        assert_eq!(below.row(0), mat.row(2));
    }
}

#[test]
fn granules_of_a_row_are_added_in_order() {
    // Rows of plain floats also of columns that are no whole vectors.
    let odd = types().into_iter().filter(|ty| ty.block_len() == 1).map(|ty| (ty, 3));
    for (ty, block) in types().into_iter().map(|ty| (ty, ty.block_len().max(8))).chain(odd) {
        // Rows, blocks, blocks of a granule, bytes between rows.
        let shapes = [
            (21, 7, 1, 0),
            (70, 5, 2, 0),
            (19, 3, 4, 32),
            (9, 19, 8, 0),
            (11, 27, 9, 64),
            // Of more blocks than the loops of eight rows take at once, or sort by permutations.
            (26, 133, 1, 0),
            (17, 56, 3, 0),
            (18, 37, 5, 48),
            // Whole rows, with one to four blocks behind their last eight.
            (26, 9, 9, 0),
            (19, 18, 18, 48),
            (13, 11, 11, 32),
            (9, 20, 20, 0),
        ];
        for (rows, blocks, width, gap) in shapes {
            let (cols, width) = (blocks * block, width * block);
            let mut random = Random(width as u64);
            let bytes = weights(ty, rows, cols, gap, &mut random);
            let stride = ty.row_bytes(cols as u64).unwrap() as usize + gap;
            let mat = MatRef::new(ty, &bytes, rows, cols, stride);
            for tokens in [1, 2, 7, 37] {
                let x = random.floats(tokens * cols);
                check_granules(mat, width, tokens, &x);
                if tokens == 1 {
                    check_added_granules(mat, width, &x);
                }
            }
        }
    }
}

/// The granules' products, added to `sums` in order.
fn add_granules(mat: MatRef, width: usize, tokens: usize, x: &[f32], sums: &mut Vec<f32>) {
    let acts = activations(scalar(), act_kind(mat.ty), tokens, mat.cols, x);
    for first in (0..mat.cols).step_by(width) {
        let range = first..mat.cols.min(first + width);
        let part = mat.column_range(range.clone());
        let part = product(scalar(), part, acts.view(0..tokens, range));
        if sums.is_empty() {
            *sums = part;
        } else {
            sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
    }
}

fn check_granules(mat: MatRef, width: usize, tokens: usize, x: &[f32]) {
    let MatRef { ty, rows, cols, .. } = mat;
    let mut want = Vec::new();
    add_granules(mat, width, tokens, x, &mut want);
    let versions = vectors().chain([scalar()]);
    for k in versions.filter(|k| tokens == 1 || k.sums_granules(ty)) {
        let acts = activations(k, act_kind(ty), tokens, cols, x);
        let mut out = Results::new(rows, tokens);
        for part in [0..rows / 3, rows / 3..rows] {
            let (acts, scratch) = (acts.all(), &mut Scratch::new());
            let out = out.places();
            // SAFETY: `out` has a place for each row and token and is ours alone.
            unsafe { k.granule_sums((mat, width, false), part, acts, out, scratch) };
        }
        let case = format!("{ty} {rows}×{cols}, {tokens} tokens, granules of {width}");
        assert_eq!(bits(&out.dense()), bits(&want), "{}: {case}", k.name);
    }
}

/// One token's, added to what is there: 1 in each place.
fn check_added_granules(mat: MatRef, width: usize, x: &[f32]) {
    let MatRef { ty, rows, cols, .. } = mat;
    let mut want = vec![1.0; rows];
    add_granules(mat, width, 1, x, &mut want);
    for k in vectors().chain([scalar()]) {
        let mut sums = vec![1.0; rows];
        let acts = activations(k, act_kind(ty), 1, cols, x);
        let (out, scratch) = (Out::near(sums.as_mut_ptr(), rows), &mut Scratch::new());
        // SAFETY: `sums` has a place for each row and is ours alone.
        unsafe { k.granule_sums((mat, width, true), 0..rows, acts.all(), out, scratch) };
        assert_eq!(bits(&sums), bits(&want), "{}: {ty}, added", k.name);
    }
}

#[test]
fn columns_that_lie_side_by_side_are_joined() {
    let (ty, rows, cols) = (TensorType::Q8_0, 3, 160);
    let bytes = weights(ty, rows, cols, 0, &mut Random(1));
    let mat = MatRef::dense(ty, &bytes, rows, cols);
    let part = |cols: std::ops::Range<usize>| mat.column_range(cols);
    let joined = |parts: &[MatRef]| {
        let (mat, width) = MatRef::joined(parts.iter().copied())?;
        Some((mat.data.as_ptr(), mat.cols, width))
    };
    let all = [part(0..64), part(64..128), part(128..160)];
    assert_eq!(joined(&all), Some((bytes.as_ptr(), cols, 64)));
    assert_eq!(joined(&all[1..2]), Some((part(64..128).data.as_ptr(), 64, 64)));
    // Not side by side, not in order, narrower than those that follow, of other rows or types.
    assert_eq!(joined(&[part(0..64), part(96..160)]), None);
    assert_eq!(joined(&[part(64..128), part(0..64)]), None);
    assert_eq!(joined(&[part(0..32), part(32..96)]), None);
    assert_eq!(joined(&[part(0..64), part(64..128).row_range(0..2)]), None);
    let other = MatRef { ty: TensorType::Q5_0, ..part(64..128) };
    assert_eq!(joined(&[part(0..64), other]), None);
    // The first part's bytes end before the joined matrix's.
    let short = MatRef { data: &part(0..64).data[..2 * mat.row_stride + 68], ..part(0..64) };
    assert_eq!(joined(&[short, part(64..128)]), None);
    assert_eq!(joined(&[]), None);
}

#[test]
fn dot_products_stay_within_the_bound_of_the_float_product() {
    // Error of a quantised activation is at most half a step (and 2⁻¹¹ of the scale where it is
    // rounded to f16); the sum of n products in f32 adds at most n·2⁻²⁴ of Σ|w·x|.
    for ty in types() {
        let cols = 1024;
        let mut random = Random(5);
        let bytes = weights(ty, 16, cols, 0, &mut random);
        let mat = MatRef::dense(ty, &bytes, 16, cols);
        let x = random.floats(cols);
        let acts = activations(scalar(), act_kind(ty), 1, cols, &x);
        let got = product(scalar(), mat, acts.all());
        for (r, got) in got.iter().enumerate() {
            let mut w = vec![0.0; cols];
            dequantize(ty, mat.row(r), &mut w);
            let block = act_kind(ty).block_len();
            let (mut exact, mut bound) = (0f64, 0f64);
            for (w, x) in w.chunks(block).zip(x.chunks(block)) {
                let largest = x.iter().fold(0f32, |m, x| m.max(x.abs())) as f64;
                let step = if block == 1 { 0.0 } else { largest / 127.0 };
                for (w, x) in w.iter().zip(x) {
                    let (w, x) = (*w as f64, *x as f64);
                    exact += w * x;
                    bound += w.abs() * (0.501 * step + x.abs() * (2f64.powi(-11) + 1e-4));
                }
            }
            let error = (*got as f64 - exact).abs();
            assert!(error <= bound, "{ty} row {r}: {got} and {exact}, {error} over {bound}");
        }
    }
}

#[test]
fn activations_with_nan_or_infinity_give_nan() {
    for ty in types() {
        let (rows, cols) = (9, 1024);
        let mut random = Random(9);
        let bytes = weights(ty, rows, cols, 0, &mut random);
        let mat = MatRef::dense(ty, &bytes, rows, cols);
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random.floats(2 * cols);
            x[700] = odd;
            for k in vectors().chain([scalar()]) {
                let acts = activations(k, act_kind(ty), 2, cols, &x);
                let got = product(k, mat, acts.all());
                assert!(got[..rows].iter().all(|x| !x.is_finite()), "{} {ty} {odd}", k.name);
                assert!(got[rows..].iter().all(|x| x.is_finite()), "{} {ty} {odd}", k.name);
            }
        }
    }
}

#[test]
fn infinite_and_nan_scales_agree_to_the_bit() {
    for ty in types().into_iter().filter(|ty| !scales(*ty).is_empty()) {
        let (rows, cols, tokens) = (17, 9 * ty.block_len(), 5);
        let mut random = Random(13);
        let mut bytes = weights(ty, rows, cols, 0, &mut random);
        for (i, block) in bytes.chunks_exact_mut(ty.block_bytes()).enumerate() {
            let odd = [0x7c00u16, 0xfc00, 0x7e00];
            if let Some(odd) = odd.get(i % 40) {
                let at = scales(ty)[i % scales(ty).len()];
                block[at..at + 2].copy_from_slice(&odd.to_le_bytes());
            }
        }
        let mat = MatRef::dense(ty, &bytes, rows, cols);
        let acts = activations(scalar(), act_kind(ty), tokens, cols, &random.floats(tokens * cols));
        let want = product(scalar(), mat, acts.all());
        assert!(want.iter().any(|x| x.is_finite()) && want.iter().any(|x| !x.is_finite()), "{ty}");
        for k in vectors() {
            assert_eq!(bits(&product(k, mat, acts.all())), bits(&want), "{} {ty}", k.name);
            let one = product(k, mat, acts.view(0..1, 0..cols));
            assert_eq!(bits(&one), bits(&want[..rows]), "{} {ty}", k.name);
        }
    }
}

#[test]
fn activations_quantise_alike() {
    let mut random = Random(21);
    let mut x = random.floats(4 * 1024);
    x[0..256].fill(0.0);
    x[256..512].fill(1e-40);
    x[512..768].iter_mut().for_each(|x| *x *= 1e20);
    (0..256).for_each(|i| x[768 + i] = i as f32 - 127.0); // ties at every odd half
    x[1024] = 254.0;
    (1..256).for_each(|i| x[1024 + i] = i as f32);
    x[1300] = f32::NAN;
    for kind in [ActKind::Q8_0, ActKind::Q8_K] {
        let a = activations(scalar(), kind, 4, 1024, &x);
        for k in vectors() {
            let b = activations(k, kind, 4, 1024, &x);
            for t in 0..4 {
                assert_eq!(a.all().qs(t), b.all().qs(t));
                assert_eq!(bits(a.all().scales(t)), bits(b.all().scales(t)));
                assert_eq!(a.all().sums32(t), b.all().sums32(t));
                if kind == ActKind::Q8_K {
                    assert_eq!(a.all().sums16(t), b.all().sums16(t));
                }
            }
        }
        // Sums are sums.
        for t in 0..4 {
            for (sum, qs) in a.all().sums32(t).iter().zip(a.all().qs(t).chunks(32)) {
                assert_eq!(*sum as i32, qs.iter().map(|q| *q as i32).sum::<i32>());
            }
        }
    }
}
