//! Matrices times activations of few tokens and of many, in every type.

use super::bench::Bench;
use super::data::{Random, mix_in_any_bits, scales, weights};
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::{DeviceActs, records_of};
use crate::backend::gpu::mat::{DeviceMat, all_types, types};
use crate::backend::gpu::matmul::{Products, is_few};
use crate::gguf::TensorType;
use crate::simd::{ActView, Activations, MatRef, Scratch, act_kind};

/// Rows, columns, tokens.
type Shape = [usize; 3];

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let products = Products::load(&bench.gpu, &all_types())?;
    for ty in types() {
        let check = Check { bench, products: &products, ty, many: false };
        report.row("matvec", ty, |row| check.all(row));
    }
    for ty in types().filter(|ty| ty.block_len() > 1) {
        let check = Check { bench, products: &products, ty, many: true };
        report.row("matmul", ty, |row| check.all(row));
    }
    Ok(())
}

/// The kernels of few tokens or of `many`, in one type.
struct Check<'a> {
    bench: &'a Bench,
    products: &'a Products,
    ty: TensorType,
    many: bool,
}

impl Check<'_> {
    fn all(&self, row: &mut Row) -> Result<()> {
        let block = self.ty.block_len().max(32);
        let wide = |shapes: &[Shape]| -> Vec<Shape> {
            shapes.iter().map(|[rows, blocks, tokens]| [*rows, blocks * block, *tokens]).collect()
        };
        let (small, large) = match self.many {
            false => (wide(&[[5, 3, 1], [35, 1, 3]]), wide(&[[2048, 8, 1], [768, 17, 7]])),
            true => {
                let large = wide(&[[65, 2, 35], [768, 8, 130], [256, 17, 64]]);
                (wide(&[[33, 1, 9]]), large)
            }
        };
        for shape in self.bench.shapes(&small, &self.odd_shapes(), &large) {
            self.product(row, shape)?;
        }
        self.views(row)?;
        self.hard_scales(row)
    }

    /// Units that make one, some and many rounds of a warp's groups, and no multiples of eight.
    fn odd_shapes(&self) -> Vec<Shape> {
        let block = self.ty.block_len();
        let rounds = match block {
            1 => [1, 7, 64, 203],
            256 => [1, 3, 8, 11],
            64 => [1, 3, 8, 19],
            _ => [1, 5, 32, 67],
        };
        let [one, some, round, many] = rounds.map(|n| n * block);
        if self.many {
            return vec![[1, one, 1], [65, some, 9], [3, round, 33], [2, many, 3], [7, one, 66]];
        }
        let matrices = [[1, one], [5, some], [3, round], [2, many], [35, one]];
        let one_and_more =
            |(i, [rows, cols]): (usize, [usize; 2])| [[rows, cols, 1], [rows, cols, 2 + i]];
        let tokens = (3..10).map(|tokens| [3, 2 * block, tokens]);
        matrices.into_iter().enumerate().flat_map(one_and_more).chain(tokens).collect()
    }

    fn launch(
        &self,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<&DeviceBuffer>,
        out: &DeviceBuffer,
        stride: usize,
    ) -> Result<()> {
        let (stream, bias) = (&self.bench.stream, bias.map(DeviceBuffer::all));
        match self.many {
            true => self.products.matmul(stream, mat, x, bias, out.all(), stride),
            false => self.products.product(stream, mat, x, bias, out.all(), stride),
        }
    }

    fn expected(&self, mat: MatRef, x: ActView) -> Vec<f32> {
        let mut out = vec![f32::NAN; mat.rows * x.tokens()];
        self.bench.cpu.kernels.matmul_all(mat, x, &mut out, &mut Scratch::new());
        out
    }

    fn product(&self, row: &mut Row, shape: Shape) -> Result<()> {
        let data = Data::new(self, shape);
        let [rows, cols, tokens] = shape;
        let expected = self.expected(data.mat(), data.acts.all());
        let name = format!("{rows}×{cols}×{tokens}");
        self.compare(row, &name, &data, &expected)?;
        if self.many { Ok(()) } else { self.added(row, &name, &data, &expected) }
    }

    /// The products and a bias, multiplied by a factor and added to what there is.
    fn added(&self, row: &mut Row, name: &str, data: &Data, products: &[f32]) -> Result<()> {
        const SCALE: f32 = 0.37;
        let (bench, [rows, cols, tokens]) = (self.bench, data.shape);
        let mut random = Random(3);
        let (mut expected, bias) = (random.floats(rows * tokens), random.floats(rows));
        let out = bench.up_f32(&expected)?;
        for (x, product) in expected.chunks_mut(rows).zip(products.chunks(rows)) {
            for ((x, product), bias) in x.iter_mut().zip(product).zip(&bias) {
                *x = SCALE.mul_add(product + bias, *x);
            }
        }
        let (mat, records) = (bench.up(&data.bytes)?, bench.up(&records_of(data.acts.all()))?);
        let mat = DeviceMat::dense(self.ty, mat.all(), rows, cols);
        let x = DeviceActs::new(act_kind(self.ty), tokens, cols, records.all());
        let bias = bench.up_f32(&bias)?;
        if is_few(&mat, tokens) {
            let (stream, bias) = (&bench.stream, Some(bias.all()));
            self.products.add_product(stream, mat, x, bias, SCALE, out.all())?;
            row.bits(format!("{name}, added"), &bench.down_f32(&out)?, &expected);
        }
        Ok(())
    }

    fn compare(&self, row: &mut Row, name: &str, data: &Data, expected: &[f32]) -> Result<()> {
        let bench = self.bench;
        let [rows, cols, tokens] = data.shape;
        let (mat, records) = (bench.up(&data.bytes)?, bench.up(&records_of(data.acts.all()))?);
        let out = bench.empty(4 * rows * tokens)?;
        let mat = DeviceMat::dense(self.ty, mat.all(), rows, cols);
        let x = DeviceActs::new(act_kind(self.ty), tokens, cols, records.all());
        self.launch(mat, x, None, &out, rows)?;
        row.bits(name, &bench.down_f32(&out)?, expected);
        Ok(())
    }

    /// Two tokens of five, a range of columns, rows with gaps, a bias, results with room between
    /// them.
    fn views(&self, row: &mut Row) -> Result<()> {
        const STRIDE: usize = 7;
        let (bench, block) = (self.bench, self.ty.block_len().max(32));
        let (rows, cols, range) = (5, 4 * block, block..4 * block);
        let data = Data::new(self, [rows, cols, 5]);
        let part = data.mat().column_range(range.clone());
        let bias = Random(1).floats(rows);
        let mut sums = self.expected(part, data.acts.view(2..4, range.clone()));
        let mut expected = vec![0.5; 2 * STRIDE];
        for (to, sums) in expected.chunks_mut(STRIDE).zip(sums.chunks_mut(rows)) {
            bench.cpu.kernels.add(sums, &bias);
            to[..rows].copy_from_slice(sums);
        }
        let (whole, records) = (bench.up(&data.bytes)?, bench.up(&records_of(data.acts.all()))?);
        let x = DeviceActs::new(act_kind(self.ty), 5, cols, records.all());
        let x = x.token_range(2..4).column_range(range.clone());
        let copy: Vec<u8> = (0..rows).flat_map(|r| part.row(r).to_vec()).collect();
        let (copy, bias) = (bench.up(&copy)?, bench.up_f32(&bias)?);
        let mut ways = vec![DeviceMat::dense(self.ty, copy.all(), rows, range.len())];
        if !self.many {
            // A range of columns starts where only its type's alignment is sure.
            let stride = part.row_stride;
            let from = whole.slice(stride - part.row_bytes()..data.bytes.len());
            ways.push(DeviceMat::new(self.ty, from, rows, range.len(), stride));
        }
        for mat in ways {
            let out = bench.up_f32(&[0.5; 2 * STRIDE])?;
            self.launch(mat, x, Some(&bias), &out, STRIDE)?;
            let name = format!("{rows}×{} of {cols}×2 of 5, a bias", range.len());
            row.bits(name, &bench.down_f32(&out)?, &expected);
        }
        Ok(())
    }

    /// Scales and activations that are infinite or no numbers.
    fn hard_scales(&self, row: &mut Row) -> Result<()> {
        let (ty, at) = (self.ty, scales(self.ty));
        if at.is_empty() {
            return Ok(());
        }
        let shape @ [rows, cols, tokens] = [4, 9 * ty.block_len(), 3];
        let mut random = Random(13);
        let mut bytes = weights(ty, rows, cols, &mut random);
        for (i, block) in bytes.chunks_exact_mut(ty.block_bytes()).enumerate() {
            if let Some(hard) = [0x7c00u16, 0xfc00, 0x7e00].get(i % 12) {
                let at = at[i % at.len()];
                block[at..at + 2].copy_from_slice(&hard.to_le_bytes());
            }
        }
        let mut x = random.floats(tokens * cols);
        x[2 * cols + 5] = f32::NAN;
        let data = Data::with(self, shape, bytes, &x);
        let expected = self.expected(data.mat(), data.acts.all());
        let is_hard = expected[2 * rows..].iter().all(|x| x.is_nan());
        assert!(is_hard && expected.iter().any(|x| x.is_finite()), "{ty}: the data tests nothing");
        self.compare(row, &format!("{rows}×{cols}×{tokens}, infinite scales"), &data, &expected)
    }
}

/// A matrix, and activations as products read them.
struct Data {
    ty: TensorType,
    shape: Shape,
    bytes: Vec<u8>,
    acts: Activations,
}

impl Data {
    fn new(check: &Check, shape: Shape) -> Data {
        let [rows, cols, tokens] = shape;
        let mut random = Random(rows as u64);
        let mut bytes = weights(check.ty, rows, cols, &mut random);
        mix_in_any_bits(check.ty, &mut bytes, &mut random);
        let x = random.floats(tokens * cols);
        Data::with(check, shape, bytes, &x)
    }

    fn with(check: &Check, shape: Shape, bytes: Vec<u8>, x: &[f32]) -> Data {
        let [_, cols, tokens] = shape;
        let mut acts = Activations::new();
        acts.resize(act_kind(check.ty), tokens, cols);
        acts.quantize_rows(check.bench.cpu.kernels, 0..tokens, x, cols);
        Data { ty: check.ty, shape, bytes, acts }
    }

    fn mat(&self) -> MatRef<'_> {
        MatRef::dense(self.ty, &self.bytes, self.shape[0], self.shape[1])
    }
}
