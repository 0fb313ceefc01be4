//! The float operations: scalar and vector agree to the bit, and both with f64.

use moeba::simd::{self, Kernels};

fn both() -> impl Iterator<Item = (&'static Kernels, &'static Kernels)> {
    let scalar = simd::by_name("scalar").unwrap();
    ["avx2", "avx512", "neon", "dotprod"]
        .into_iter()
        .filter_map(simd::by_name)
        .map(move |k| (scalar, k))
}

/// Values of both signs and many sizes.
fn values(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..n)
        .map(|_| {
            let unit = next() as f32 / u32::MAX as f32 - 0.5;
            unit * [0.1, 1.0, 8.0, 40.0][next() as usize % 4]
        })
        .collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

const LENGTHS: [usize; 12] = [1, 2, 7, 8, 9, 15, 16, 31, 64, 100, 257, 2048];

/// `f` on each version, for each length; the results must be the same bits.
fn agree(f: impl Fn(&Kernels, &[f32], &[f32]) -> Vec<f32>) {
    for (a, b) in both() {
        for n in LENGTHS {
            let (mut x, y) = (values(n as u32, n), values(n as u32 + 1, n));
            assert_eq!(bits(&f(a, &x, &y)), bits(&f(b, &x, &y)), "{} of {n}", b.name);
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0, 1e-42] {
                x[n / 2] = odd;
                assert_eq!(bits(&f(a, &x, &y)), bits(&f(b, &x, &y)), "{} {n} {odd}", b.name);
            }
        }
    }
}

fn in_place(x: &[f32], f: impl FnOnce(&mut [f32])) -> Vec<f32> {
    let mut x = x.to_vec();
    f(&mut x);
    x
}

fn to_f16(k: &Kernels, x: &[f32]) -> Vec<u16> {
    let mut out = vec![0; x.len()];
    k.f32_to_f16(x, &mut out);
    out
}

#[test]
fn operations_agree_to_the_bit() {
    agree(|k, x, y| in_place(x, |out| k.rms_norm(x, y, 1e-6, out)));
    agree(|k, x, y| in_place(x, |out| k.swiglu(x, y, out)));
    agree(|k, x, _| in_place(x, |x| k.exp(x)));
    agree(|k, x, _| in_place(x, |x| k.sigmoid(x)));
    agree(|k, x, _| in_place(x, |x| k.softmax(x)));
    agree(|k, x, y| in_place(x, |x| k.add(x, y)));
    agree(|k, x, y| in_place(x, |x| k.axpy(x, 0.37, y)));
    agree(|k, x, y| vec![k.dot_f32(x, y)]);
    agree(|k, x, _| to_f16(k, x).iter().map(|h| *h as f32).collect());
}

/// From where the result is 0, over subnormal ones, to where it is infinite.
#[test]
fn exponentials_agree_from_end_to_end() {
    let x: Vec<f32> = (-12_000..10_000).map(|i| i as f32 * 0.01).collect();
    let ends = [f32::NEG_INFINITY, f32::MIN, -104.0, -0.0, 89.0, f32::MAX, f32::INFINITY, f32::NAN];
    for (a, b) in both() {
        for x in [&x[..], &ends] {
            let exp = |k: &Kernels| bits(&in_place(x, |x| k.exp(x)));
            assert!(exp(a) == exp(b), "{}", b.name);
        }
    }
}

#[test]
fn dot_products_cancel_and_underflow_alike() {
    for (a, b) in both() {
        let tiny = [1e-30f32, -1e-30, 1e-40, -1e-40, 0.0, -0.0, 1e-38, -1e-38, -1e-30, 1e-30];
        for n in 1..=tiny.len() {
            let minus: Vec<f32> = tiny.iter().map(|x| -x).collect();
            let (x, y) = (&tiny[..n], &minus[..n]);
            assert_eq!(a.dot_f32(x, y).to_bits(), b.dot_f32(x, y).to_bits(), "{n}");
        }
    }
}

/// Distance in units of the last place of the exact value.
fn ulps(got: f32, exact: f64) -> f64 {
    let rounded = exact as f32;
    let ulp = if rounded < f32::MIN_POSITIVE {
        2f64.powi(-149)
    } else {
        2f64.powi((rounded.to_bits() >> 23) as i32 - 127 - 23)
    };
    (got as f64 - exact).abs() / ulp
}

#[test]
fn exp_is_within_its_bound() {
    let scalar = simd::by_name("scalar").unwrap();
    let (mut normal, mut subnormal) = (0f64, 0f64);
    let mut x = -103.9f32;
    while x < 88.72 {
        let mut y = [x];
        scalar.exp(&mut y);
        let error = ulps(y[0], (x as f64).exp());
        if x > -87.3 {
            normal = normal.max(error)
        } else {
            subnormal = subnormal.max(error)
        }
        x += 0.000_713;
    }
    println!("exp: {normal:.3} ulp, subnormal results {subnormal:.3} ulp");
    assert!(normal < 1.05 && subnormal < 1.05);
    let mut ends = [f32::NEG_INFINITY, -200.0, 0.0, 89.0, f32::INFINITY, f32::NAN];
    scalar.exp(&mut ends);
    assert_eq!(ends[..5], [0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY]);
    assert!(ends[5].is_nan());
}

#[test]
fn swiglu_and_sigmoid_are_close_to_f64() {
    let scalar = simd::by_name("scalar").unwrap();
    let (g, u) = (values(3, 5000), values(4, 5000));
    let mut out = vec![0.0; g.len()];
    scalar.swiglu(&g, &u, &mut out);
    for i in 0..g.len() {
        let exact = g[i] as f64 / (1.0 + (-g[i] as f64).exp()) * u[i] as f64;
        assert!((out[i] as f64 - exact).abs() <= 3e-7 * exact.abs() + 1e-37, "{} {}", g[i], u[i]);
    }
    let mut s = g.clone();
    scalar.sigmoid(&mut s);
    for (s, g) in s.iter().zip(&g) {
        let exact = 1.0 / (1.0 + (-*g as f64).exp());
        assert!((*s as f64 - exact).abs() <= 3e-7 * exact);
    }
}

#[test]
fn softmax_sums_to_one_and_masks() {
    let scalar = simd::by_name("scalar").unwrap();
    let mut x = values(8, 333);
    x[5] = f32::NEG_INFINITY;
    scalar.softmax(&mut x);
    assert_eq!(x[5], 0.0);
    assert!((x.iter().map(|x| *x as f64).sum::<f64>() - 1.0).abs() < 1e-6);
    let mut masked = [f32::NEG_INFINITY; 9];
    scalar.softmax(&mut masked);
    assert!(masked.iter().all(|x| x.is_nan()));
}
