//! The grid formats (IQ1, IQ2, IQ3): golden values made by PyPI's gguf, and exact integers.

use moeba::gguf::TensorType::{self, *};
use moeba::quant::{self, IntBlock, blocks_of, grids};
use std::path::Path;

/// (type, values are multiples of d over this)
const TYPES: [(TensorType, f32); 7] = [
    (IQ1_S, 8.0),
    (IQ1_M, 8.0),
    (IQ2_XXS, 8.0),
    (IQ2_XS, 8.0),
    (IQ2_S, 8.0),
    (IQ3_XXS, 4.0),
    (IQ3_S, 1.0),
];

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quant").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn golden_values(ty: TensorType) -> Vec<f32> {
    let bytes = fixture(&format!("{ty}.values"));
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn dequantize_gives_the_golden_bits() {
    for (ty, _) in TYPES {
        let want = golden_values(ty);
        let mut got = vec![0.0; want.len()];
        quant::dequantize(ty, &fixture(&format!("{ty}.blocks")), &mut got);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{ty}, value {i}");
        }
    }
}

#[test]
fn every_point_of_the_grids_is_golden() {
    let lists: [(&str, &[i8]); 6] = [
        ("IQ1_S", grids::IQ1.as_flattened()),
        ("IQ2_XXS", grids::IQ2_XXS.as_flattened()),
        ("IQ2_XS", grids::IQ2_XS.as_flattened()),
        ("IQ2_S", grids::IQ2_S.as_flattened()),
        ("IQ3_XXS", grids::IQ3_XXS.as_flattened()),
        ("IQ3_S", grids::IQ3_S.as_flattened()),
    ];
    let golden = String::from_utf8(fixture("grids.crc32")).unwrap();
    for ((name, points), line) in lists.iter().zip(golden.lines()) {
        let bytes: Vec<u8> = points.iter().map(|v| *v as u8).collect();
        assert_eq!(format!("{name} {:08x}", crc32fast::hash(&bytes)), line);
    }
    assert_eq!(golden.lines().count(), lists.len());
}

/// The integers of a block are its values over `d·2⁻ᵏ`, and their product with activations is
/// exact: small and large activations of both signs.
fn integers_are_those_of_the_values<B: IntBlock>(divisor: f32) {
    let bytes = fixture(&format!("{}.blocks", B::TYPE));
    let values = golden_values(B::TYPE);
    for (b, (block, values)) in blocks_of::<B>(&bytes).iter().zip(values.chunks(256)).enumerate() {
        let (unit, dmin) = block.scales();
        assert_eq!(dmin, 0.0);
        // d itself is an f16.
        assert_eq!(half::f16::from_f32(unit * divisor).to_f32(), unit * divisor);
        let integers: Vec<i32> = values.iter().map(|v| (v / unit) as i32).collect();
        for (integer, value) in integers.iter().zip(values) {
            assert_eq!(*integer as f32 * unit, *value, "{} block {b}", B::TYPE);
        }
        let activations: [fn(usize) -> i8; 4] = [
            |_| 1,
            |i| if i % 3 == 0 { -127 } else { 127 },
            |i| (i * 37 % 255) as u8 as i8,
            |i| (i % 32) as i8 - 16,
        ];
        for at in activations {
            let a: Vec<i8> = (0..256).map(at).collect();
            let want: i64 = integers.iter().zip(&a).map(|(w, a)| *w as i64 * *a as i64).sum();
            assert_eq!(block.int_dot(&a), (want as i32, 0), "{} block {b}", B::TYPE);
        }
    }
}

#[test]
fn integer_dots_are_exact() {
    for (ty, divisor) in TYPES {
        moeba::with_int_block!(ty, integers_are_those_of_the_values(divisor));
    }
}

#[test]
fn any_values_are_quantised() {
    let extremes = [0.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, 1e30, -1e-30, 65504.0, -3.0];
    for (ty, _) in TYPES {
        let mut back = vec![1.0; 256];
        let mut bytes = vec![0; ty.row_bytes(256).unwrap() as usize];
        quant::quantize(ty, &[0.0; 256], &mut bytes);
        quant::dequantize(ty, &bytes, &mut back);
        assert!(back.iter().all(|x| *x == 0.0), "{ty}");
        for a in extremes {
            let x: Vec<f32> =
                (0..256).map(|k| if k % 3 == 0 { a } else { 0.01 * k as f32 }).collect();
            quant::quantize(ty, &x, &mut bytes);
            quant::dequantize(ty, &bytes, &mut back);
            assert!(back.iter().all(|x| x.is_finite()), "{ty}: {a}");
        }
    }
}

#[test]
fn blocks_of_values_that_a_format_has_are_found_again() {
    // Scales that are alike, and values whose signs are even.
    for (ty, _) in TYPES {
        let values = golden_values(ty);
        let (mut error, mut square) = (0f64, 0f64);
        for x in values.chunks_exact(256).take(8).filter(|x| x.iter().all(|x| x.is_finite())) {
            let (mut bytes, mut back) = (vec![0; ty.block_bytes()], vec![0.0; 256]);
            quant::quantize(ty, x, &mut bytes);
            quant::dequantize(ty, &bytes, &mut back);
            error += x.iter().zip(&back).map(|(x, b)| f64::from(x - b).powi(2)).sum::<f64>();
            square += x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        }
        println!("{ty}: {}", (error / square).sqrt());
        assert!(error < 0.09 * square, "{ty}: {error} {square}");
    }
}
