//! The GPU's kernels for quantised products against their twins on the CPU, to the bit: the scalar
//! code is the specification. They run on the emulated device, which also ends a launch that reads
//! or writes where it must not.

use crate::support::Bench;
use common::quant::{Random, bits, halves, types, weights};
use moeba::backend::gpu::DeviceBuffer;
use moeba::backend::gpu::acts::{DeviceActs, Quantize, record_bytes, records_of};
use moeba::backend::gpu::embed::Embed;
use moeba::backend::gpu::mat::DeviceMat;
use moeba::backend::gpu::matmul::Products;
use moeba::gguf::TensorType;
use moeba::quant::{self, grids};
use moeba::simd::{self, ActKind, Activations, Kernels, MatRef, Scratch, act_kind};

fn scalar() -> &'static Kernels {
    simd::by_name("scalar").unwrap()
}

/// A random matrix and activations, quantised on the host, here and on the device.
struct Case {
    ty: TensorType,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    acts: Activations,
    mat_buffer: DeviceBuffer,
    records: DeviceBuffer,
}

impl Case {
    fn new(bench: &Bench, ty: TensorType, [rows, cols, tokens]: [usize; 3], seed: u64) -> Case {
        let mut random = Random(seed);
        let bytes = weights(ty, rows, cols, 0, &mut random);
        Case::with(bench, ty, [rows, cols, tokens], bytes, &random.floats(tokens * cols))
    }

    fn with(
        bench: &Bench,
        ty: TensorType,
        [rows, cols, tokens]: [usize; 3],
        bytes: Vec<u8>,
        x: &[f32],
    ) -> Case {
        let mut acts = Activations::new();
        acts.resize(act_kind(ty), tokens, cols);
        acts.quantize_rows(scalar(), 0..tokens, x, cols);
        let (mat_buffer, records) = (bench.up(&bytes), bench.up(&records_of(acts.all())));
        Case { ty, rows, cols, bytes, acts, mat_buffer, records }
    }

    fn mat(&self) -> MatRef<'_> {
        MatRef::dense(self.ty, &self.bytes, self.rows, self.cols)
    }

    fn device_mat(&self) -> DeviceMat<'_> {
        DeviceMat::dense(self.ty, self.mat_buffer.all(), self.rows, self.cols)
    }

    fn device_acts(&self) -> DeviceActs<'_> {
        let (kind, tokens) = (self.acts.kind(), self.acts.tokens());
        DeviceActs::new(kind, tokens, self.cols, self.records.all())
    }

    fn expected(&self) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.rows * self.acts.tokens()];
        scalar().matmul_all(self.mat(), self.acts.all(), &mut out, &mut Scratch::new());
        out
    }

    fn check(&self, got: &[f32], how: &str) {
        let Case { ty, rows, cols, .. } = self;
        let tokens = self.acts.tokens();
        assert_eq!(bits(got), bits(&self.expected()), "{how}: {ty} {rows}×{cols}, {tokens} tokens");
    }
}

/// Units that make one, some and many rounds of a warp's groups, and no multiples of eight.
fn shapes(ty: TensorType) -> Vec<[usize; 2]> {
    let rounds = match ty.block_len() {
        1 => [1, 7, 64, 203],
        256 => [1, 3, 8, 11],
        64 => [1, 3, 8, 19],
        _ => [1, 5, 32, 67],
    };
    let blocks = rounds.map(|n| n * ty.block_len());
    vec![[1, blocks[0]], [5, blocks[1]], [3, blocks[2]], [2, blocks[3]], [35, blocks[0]]]
}

fn quantised() -> impl Iterator<Item = TensorType> {
    types().into_iter().filter(|ty| ty.block_len() > 1)
}

#[test]
fn products_of_few_tokens_have_the_bits_of_the_cpu() {
    let bench = Bench::new(3);
    let products = Products::load(&bench.gpu).unwrap();
    for ty in types() {
        for (i, [rows, cols]) in shapes(ty).into_iter().enumerate() {
            for tokens in [1, 2 + i] {
                let case = Case::new(&bench, ty, [rows, cols, tokens], 7);
                let out = bench.empty(4 * rows * tokens);
                let (mat, x) = (case.device_mat(), case.device_acts());
                products.product(&bench.stream, mat, x, None, out.all(), rows).unwrap();
                case.check(&bench.down_f32(&out), "few");
            }
        }
        for tokens in 3..10 {
            let case = Case::new(&bench, ty, [3, 2 * ty.block_len(), tokens], 8);
            let out = bench.empty(4 * 3 * tokens);
            let (mat, x) = (case.device_mat(), case.device_acts());
            products.product(&bench.stream, mat, x, None, out.all(), 3).unwrap();
            case.check(&bench.down_f32(&out), "1 to 9");
        }
    }
}

#[test]
fn products_of_many_tokens_have_the_bits_of_the_cpu() {
    let bench = Bench::new(4);
    let products = Products::load(&bench.gpu).unwrap();
    for ty in quantised() {
        for (i, [rows, cols]) in shapes(ty).into_iter().enumerate() {
            let (rows, tokens) = [(1, 1), (65, 9), (rows, 33), (rows, 3), (7, 66)][i];
            let case = Case::new(&bench, ty, [rows, cols, tokens], 9);
            let out = bench.empty(4 * rows * tokens);
            let (mat, x) = (case.device_mat(), case.device_acts());
            products.matmul(&bench.stream, mat, x, None, out.all(), rows).unwrap();
            case.check(&bench.down_f32(&out), "many");
        }
    }
}

/// Two tokens of five, a column range, rows with gaps, a bias, results with room between them.
#[test]
fn views_of_matrices_and_activations_are_what_they_say() {
    let bench = Bench::new(5);
    let products = Products::load(&bench.gpu).unwrap();
    for ty in types() {
        let block = ty.block_len().max(32);
        let (rows, cols, stride) = (5, 4 * block, 7);
        let case = Case::new(&bench, ty, [rows, cols, 5], 10);
        let range = block..4 * block;
        let part = case.mat().column_range(range.clone());
        let view = case.acts.view(2..4, range.clone());
        let bias = Random(1).floats(rows);
        let mut expected = vec![0.0; 2 * rows];
        scalar().matmul_all(part, view, &mut expected, &mut Scratch::new());
        expected.chunks_mut(rows).for_each(|row| scalar().add(row, &bias));

        // A range of columns starts where only its type's alignment is sure.
        let row = part.row_stride;
        let skip = row - part.row_bytes();
        let copy: Vec<u8> = (0..rows).flat_map(|r| part.row(r).to_vec()).collect();
        let (copy, bias) = (bench.up(&copy), bench.up_f32(&bias));
        let x = case.device_acts().token_range(2..4).column_range(range.clone());
        let dense = DeviceMat::dense(ty, copy.all(), rows, range.len());
        let slice = case.mat_buffer.slice(skip..case.bytes.len());
        let gaps = DeviceMat::new(ty, slice, rows, range.len(), row);
        let mut ways = vec![(dense, false), (gaps, false)];
        if ty.block_len() > 1 {
            ways.push((dense, true));
        }
        for (mat, many) in ways {
            let out = bench.up_f32(&vec![0.5; 2 * stride]);
            if many {
                products.matmul(&bench.stream, mat, x, Some(bias.all()), out.all(), stride)
            } else {
                products.product(&bench.stream, mat, x, Some(bias.all()), out.all(), stride)
            }
            .unwrap();
            let got = bench.down_f32(&out);
            for (got, expected) in got.chunks(stride).zip(expected.chunks(rows)) {
                assert_eq!(bits(&got[..rows]), bits(expected), "{ty}, many: {many}");
                assert_eq!(got[rows..], [0.5; 2], "{ty}: nothing else is written");
            }
        }
    }
}

#[test]
fn nan_and_infinite_scales_and_activations_agree() {
    let bench = Bench::new(6);
    let products = Products::load(&bench.gpu).unwrap();
    for ty in quantised().filter(|ty| !halves(*ty).is_empty()) {
        let (rows, cols, tokens) = (4, 9 * ty.block_len(), 3);
        let mut random = Random(13);
        let mut bytes = weights(ty, rows, cols, 0, &mut random);
        for (i, block) in bytes.chunks_exact_mut(ty.block_bytes()).enumerate() {
            if let Some(odd) = [0x7c00u16, 0xfc00, 0x7e00].get(i % 12) {
                let at = halves(ty)[i % halves(ty).len()];
                block[at..at + 2].copy_from_slice(&odd.to_le_bytes());
            }
        }
        let mut x = random.floats(tokens * cols);
        x[2 * cols + 5] = f32::NAN;
        let case = Case::with(&bench, ty, [rows, cols, tokens], bytes, &x);
        assert!(case.expected().iter().any(|x| x.is_finite()));
        assert!(case.expected()[2 * rows..].iter().all(|x| x.is_nan()));
        let (mat, x) = (case.device_mat(), case.device_acts());
        let out = bench.empty(4 * rows * tokens);
        products.product(&bench.stream, mat, x, None, out.all(), rows).unwrap();
        case.check(&bench.down_f32(&out), "odd, few");
        products.matmul(&bench.stream, mat, x, None, out.all(), rows).unwrap();
        case.check(&bench.down_f32(&out), "odd, many");
    }
}

#[test]
fn activations_are_stored_as_the_host_stores_them() {
    let bench = Bench::new(7);
    let quantize = Quantize::load(&bench.gpu).unwrap();
    for kind in [ActKind::F32, ActKind::Q8_0, ActKind::Q8_K] {
        for (cols, tokens) in [(kind.block_len(), 1), (5 * kind.block_len().max(32), 2), (1280, 3)]
        {
            let mut random = Random(21);
            let mut x = random.floats(cols * tokens);
            // Zeros, too small to scale, large, ties at each odd half, NaN, infinity.
            for (i, x) in x.iter_mut().enumerate() {
                match i / 32 {
                    1 => *x = 0.0,
                    2 => *x = 1e-40,
                    3 => *x *= 1e20,
                    4 => *x = if i % 32 == 0 { 127.0 } else { (i % 32) as f32 - 15.5 },
                    50 if i % 32 == 7 => *x = f32::NAN,
                    60 if i % 32 == 9 => *x = f32::NEG_INFINITY,
                    _ => (),
                }
            }
            let mut acts = Activations::new();
            acts.resize(kind, tokens, cols);
            acts.quantize_rows(scalar(), 0..tokens, &x, cols);
            // Gaps between arrays are nobody's.
            let out = bench.up(&vec![0; tokens * record_bytes(kind, cols)]);
            let input = bench.up_f32(&x);
            let records = DeviceActs::new(kind, tokens, cols, out.all());
            quantize.store(&bench.stream, input.all(), cols, records).unwrap();
            let (got, expected) = (bench.down(&out), records_of(acts.all()));
            // A NaN scale is a NaN, of whatever bits.
            let words = |bytes: &[u8]| -> Vec<[u8; 4]> {
                let nan = |w: &[u8; 4]| kind != ActKind::F32 && f32::from_le_bytes(*w).is_nan();
                let words = bytes.as_chunks::<4>().0.iter();
                words.map(|w| if nan(w) { [0xff; 4] } else { *w }).collect()
            };
            assert_eq!(words(&got), words(&expected), "{kind:?} {cols}×{tokens}");
        }
    }
}

#[test]
fn embedding_rows_have_the_bits_of_dequantised_rows() {
    let bench = Bench::new(8);
    let embed = Embed::load(&bench.gpu).unwrap();
    for ty in types() {
        let (rows, cols) = (5, 3 * ty.block_len().max(3));
        let bytes = weights(ty, rows, cols, 0, &mut Random(3));
        let table = bench.up(&bytes);
        let ids = [4u32, 0, 4, 2];
        let id_buffer = bench.up_u32(&ids);
        let out = bench.empty(4 * ids.len() * cols);
        let mat = DeviceMat::dense(ty, table.all(), rows, cols);
        // SAFETY: the ids are rows of the table.
        unsafe { embed.launch(&bench.stream, mat, id_buffer.all(), ids.len(), out.all()) }.unwrap();
        let mut all = vec![0.0; rows * cols];
        quant::dequantize(ty, &bytes, &mut all);
        let expected: Vec<f32> =
            ids.iter().flat_map(|id| all[*id as usize * cols..][..cols].to_vec()).collect();
        // To the sign of zeros: -0 is not 0 here.
        assert_eq!(bits(&bench.down_f32(&out)), bits(&expected), "{ty}");
    }
}

#[test]
fn the_points_of_the_grids_are_those_of_the_cpu() {
    let text = include_str!("../../kernels/quant/grid_points.cuh");
    let list = |name: &str| -> Vec<u32> {
        let start = text.find(&format!("PACKED_{name}[")).unwrap();
        let body = &text[start + text[start..].find('{').unwrap() + 1..];
        let numbers = body[..body.find('}').unwrap()].split(',').map(str::trim);
        numbers
            .filter(|n| !n.is_empty())
            .map(|n| match n.strip_prefix("0x") {
                Some(hex) => u32::from_str_radix(hex, 16).unwrap(),
                None => u32::from_str_radix(n, 8).unwrap(),
            })
            .collect()
    };
    fn unpacked<const W: usize>(packed: &[u32], bits: u32, values: &[i8]) -> Vec<[i8; W]> {
        let value =
            |p: u32, i: usize| values[(p >> (bits * i as u32) & ((1 << bits) - 1)) as usize];
        packed.iter().map(|p| std::array::from_fn(|i| value(*p, i))).collect()
    }
    let (magnitudes, odd) = ([8, 25, 43], [1, 3, 5, 7, 9, 11, 13, 15]);
    let even = [4, 12, 20, 28, 36, 44, 52, 62];
    assert_eq!(unpacked::<8>(&list("IQ1"), 2, &[-1, 0, 1]), grids::IQ1);
    assert_eq!(unpacked::<8>(&list("IQ2_XXS"), 2, &magnitudes), grids::IQ2_XXS);
    assert_eq!(unpacked::<8>(&list("IQ2_XS"), 2, &magnitudes), grids::IQ2_XS);
    assert_eq!(unpacked::<8>(&list("IQ2_S"), 2, &magnitudes), grids::IQ2_S);
    assert_eq!(unpacked::<4>(&list("IQ3_XXS"), 3, &even), grids::IQ3_XXS);
    assert_eq!(unpacked::<4>(&list("IQ3_S"), 3, &odd), grids::IQ3_S);
}
