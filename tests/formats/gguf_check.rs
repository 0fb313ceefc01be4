//! Reading all weights: a NaN or an infinity in any floating-point field is found and named.

use moeba::Error;
use moeba::gguf::{Gguf, TensorType as T, Writer};
use std::path::{Path, PathBuf};

/// The positions of each type's floating-point numbers: (type, position in the block, bits of a
/// NaN, bits of an infinity).
const FIELDS: &[(T, usize, &[u8], &[u8])] = &[
    (T::F32, 0, &[0, 0, 0xc0, 0x7f], &[0, 0, 0x80, 0xff]),
    (T::F64, 0, &[0, 0, 0, 0, 0, 0, 0xf8, 0x7f], &[0, 0, 0, 0, 0, 0, 0xf0, 0x7f]),
    (T::F16, 0, &[0, 0x7e], &[0, 0x7c]),
    (T::BF16, 0, &[0xc0, 0x7f], &[0x80, 0x7f]),
    (T::Q8_0, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::Q4_0, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::Q4_1, 2, &[0, 0x7e], &[0, 0xfc]),
    (T::Q5_0, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::Q5_1, 2, &[0, 0x7e], &[0, 0xfc]),
    (T::Q2_K, 80, &[0, 0x7e], &[0, 0xfc]),
    (T::Q2_K, 82, &[0, 0x7e], &[0, 0xfc]),
    (T::Q3_K, 108, &[0, 0x7e], &[0, 0xfc]),
    (T::Q4_K, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::Q4_K, 2, &[0, 0x7e], &[0, 0xfc]),
    (T::Q5_K, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::Q5_K, 2, &[0, 0x7e], &[0, 0xfc]),
    (T::Q6_K, 208, &[0, 0x7e], &[0, 0xfc]),
    (T::Q8_K, 0, &[0, 0, 0xc0, 0x7f], &[0, 0, 0x80, 0x7f]),
    (T::IQ4_XS, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::IQ1_M, 48, &[0, 0, 0, 0, 0, 0xe0, 0, 0x70], &[0, 0, 0, 0, 0, 0xc0, 0, 0x70]),
    (T::TQ1_0, 52, &[0, 0x7e], &[0, 0xfc]),
    (T::TQ2_0, 64, &[0, 0x7e], &[0, 0xfc]),
    (T::MXFP4, 0, &[255], &[255]),
    (T::Q1_0, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::Q2_0, 0, &[0, 0x7e], &[0, 0xfc]),
    (T::F8_E4M3, 0, &[0x7f], &[0xff]),
];

/// A file with tensor `fine` (all zeros) and tensor `w` of three rows with `data`.
fn write(dir: &Path, ty: T, row: u64, data: &[u8]) -> PathBuf {
    let path = dir.join("model.gguf");
    let mut writer = Writer::create(&path, None).unwrap();
    writer.declare("fine", &[32], T::F32).unwrap();
    writer.declare("w", &[row, 3], ty).unwrap();
    writer.write_tensor("fine", &[0; 128]).unwrap();
    writer.write_tensor("w", data).unwrap();
    writer.finish().unwrap();
    path
}

#[test]
fn every_field_of_every_type() {
    let dir = tempfile::tempdir().unwrap();
    for &(ty, at, nan, infinity) in FIELDS {
        let row = 2 * ty.block_len();
        // 0x12 everywhere is finite in each of these formats.
        let clean = vec![0x12; 6 * ty.block_bytes()];
        let gguf = Gguf::open(write(dir.path(), ty, row as u64, &clean)).unwrap();
        gguf.check_all_finite(|_| {}).unwrap();
        for bits in [nan, infinity] {
            let mut data = clean.clone();
            let start = 4 * ty.block_bytes() + at;
            data[start..start + bits.len()].copy_from_slice(bits);
            let gguf = Gguf::open(write(dir.path(), ty, row as u64, &data)).unwrap();
            let error = gguf.check_all_finite(|_| {}).unwrap_err();
            let element = 4 * ty.block_len();
            let expected = match ty.block_len() {
                1 => format!("tensor w: element {element}"),
                n => format!("tensor w: elements {element} to {}", element + n - 1),
            };
            let sentence = error.to_string();
            let Error::Format { field, got, .. } = error else { panic!("{sentence}") };
            assert_eq!(field, expected, "{ty}");
            assert!(["NaN", "inf", "-inf"].contains(&got.as_str()), "{sentence}");
        }
    }
}

#[test]
fn integers_hold_no_numbers_to_refuse() {
    let dir = tempfile::tempdir().unwrap();
    for ty in [T::I8, T::I16, T::I32, T::I64, T::NVFP4] {
        let data = vec![0xff; 3 * ty.block_bytes()];
        let gguf = Gguf::open(write(dir.path(), ty, ty.block_len() as u64, &data)).unwrap();
        gguf.check_all_finite(|_| {}).unwrap();
    }
}

#[test]
fn the_first_of_several_far_apart() {
    let dir = tempfile::tempdir().unwrap();
    let n = 300_000;
    let mut data = vec![0u8; 3 * n * 4];
    for element in [250_001, 250_002, 899_999] {
        data[4 * element..4 * element + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    }
    let gguf = Gguf::open(write(dir.path(), T::F32, n as u64, &data)).unwrap();
    let error = gguf.check_all_finite(|_| {}).unwrap_err().to_string();
    let expected = "model.gguf: tensor w: element 250001: expected a finite number, got inf";
    assert!(error.ends_with(expected), "{error}");
}
