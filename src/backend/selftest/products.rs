//! Matrices times activations of few tokens and of many, in every type.

use super::data::{mix_in_any_bits, scales, weights};
use super::operands::{Acts, Mat};
use super::{Bench, Random};
use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::acts::DeviceActs;
use crate::backend::gpu::mat::{DeviceMat, all_types, types};
use crate::backend::gpu::matmul::{Products, is_few};
use crate::gguf::TensorType;
use crate::simd::{ActView, MatRef, Scratch, act_kind};

/// Rows, columns, tokens.
type Shape = [usize; 3];

pub fn check(bench: &Bench) -> Result<()> {
    let products = Products::load(&bench.gpu, &all_types())?;
    for ty in types() {
        let check = Check { bench, products: &products, ty, many: false };
        bench.row("matvec", ty, || check.all());
    }
    for ty in types().filter(|ty| ty.block_len() > 1) {
        let check = Check { bench, products: &products, ty, many: true };
        bench.row("matmul", ty, || check.all());
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
    fn all(&self) -> Result<()> {
        let block = self.ty.block_len().max(32);
        let wide = |[rows, blocks, tokens]: Shape| [rows, blocks * block, tokens];
        let shapes = match self.many {
            false => {
                let large = [[2048, 8, 1], [768, 17, 7]].map(wide);
                self.bench.shapes(&[[5, 3, 1], [35, 1, 3]].map(wide), &self.odd_shapes(), &large)
            }
            true => {
                let large = [[65, 2, 35], [768, 8, 130], [256, 17, 64]].map(wide);
                self.bench.shapes(&[[33, 1, 9]].map(wide), &self.odd_shapes(), &large)
            }
        };
        shapes.into_iter().try_for_each(|shape| self.product(shape))?;
        self.views()?;
        self.hard_scales()
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
        bias: Option<DeviceSlice>,
        out: DeviceSlice,
        stride: usize,
    ) -> Result<()> {
        match self.many {
            true => self.products.matmul(&self.bench.stream, mat, x, bias, out, stride),
            false => self.products.product(&self.bench.stream, mat, x, bias, out, stride),
        }
    }

    /// Rows of any bits, and any activations.
    fn data(&self, [rows, cols, tokens]: Shape) -> Result<Data> {
        let mut random = Random(rows as u64);
        let mut bytes = weights(self.ty, rows, cols, &mut random);
        mix_in_any_bits(self.ty, &mut bytes, &mut random);
        self.data_of([rows, cols, tokens], &bytes, &random.floats(tokens * cols))
    }

    fn data_of(&self, shape: Shape, bytes: &[u8], x: &[f32]) -> Result<Data> {
        let [rows, cols, _] = shape;
        let mat = Mat::new(self.bench, self.ty, [rows, cols], bytes)?;
        Ok(Data { shape, mat, x: Acts::new(self.bench, act_kind(self.ty), x, cols)? })
    }

    fn expected(&self, mat: MatRef, x: ActView) -> Vec<f32> {
        let mut out = vec![f32::NAN; mat.rows * x.tokens()];
        self.bench.cpu.kernels.matmul_all(mat, x, &mut out, &mut Scratch::new());
        out
    }

    fn product(&self, shape: Shape) -> Result<()> {
        let data = self.data(shape)?;
        let [rows, cols, tokens] = shape;
        let name = format!("{rows}×{cols}×{tokens}");
        let products = self.compare(&name, &data)?;
        if !self.many && is_few(&data.mat.gpu(), tokens) {
            self.added(&name, &data, &products)?;
        }
        Ok(())
    }

    /// The products and a bias, multiplied by a factor and added to what there is.
    fn added(&self, name: &str, data: &Data, products: &[f32]) -> Result<()> {
        const SCALE: f32 = 0.37;
        let (bench, [rows, _, tokens]) = (self.bench, data.shape);
        let [mut out, bias] = bench.seeded(3, [rows * tokens, rows])?;
        let (mat, x, own) = (data.mat.gpu(), data.x.gpu(), Some(bias.gpu()));
        self.products.add_product(&bench.stream, mat, x, own, SCALE, out.gpu())?;
        for (i, x) in out.iter_mut().enumerate() {
            *x = SCALE.mul_add(products[i] + bias[i % rows], *x);
        }
        bench.equal(format!("{name}, added"), &out)
    }

    /// Returns the products.
    fn compare(&self, name: &str, data: &Data) -> Result<Vec<f32>> {
        let rows = data.shape[0];
        let expected = self.expected(data.mat.cpu(), data.x.cpu.all());
        let out = self.bench.empty(4 * expected.len())?;
        self.launch(data.mat.gpu(), data.x.gpu(), None, out.all(), rows)?;
        self.bench.equal_to(name, &out, &expected)?;
        Ok(expected)
    }

    /// Two tokens of five, a range of columns, rows with gaps, a bias, results with room between
    /// them.
    fn views(&self) -> Result<()> {
        const STRIDE: usize = 7;
        let (bench, ty, block) = (self.bench, self.ty, self.ty.block_len().max(32));
        let (rows, cols, range) = (5, 4 * block, block..4 * block);
        let data = self.data([rows, cols, 5])?;
        let part = data.mat.cpu().column_range(range.clone());
        let bias = bench.up(Random(1).floats(rows))?;
        let mut sums = self.expected(part, data.x.cpu.view(2..4, range.clone()));
        let mut expected = vec![0.5; 2 * STRIDE];
        for (to, sums) in expected.chunks_mut(STRIDE).zip(sums.chunks_mut(rows)) {
            bench.cpu.kernels.add(sums, &bias);
            to[..rows].copy_from_slice(sums);
        }
        let x = data.x.gpu().token_range(2..4).column_range(range.clone());
        let copy: Vec<u8> = (0..rows).flat_map(|r| part.row(r).to_vec()).collect();
        let copy = Mat::new(bench, ty, [rows, range.len()], &copy)?;
        let mut ways = vec![copy.gpu()];
        if !self.many {
            // A range of columns starts where only its type's alignment is sure.
            let (stride, bytes) = (part.row_stride, &data.mat.bytes);
            let from = bytes.device.slice(stride - part.row_bytes()..bytes.len());
            ways.push(DeviceMat::new(ty, from, rows, range.len(), stride));
        }
        for mat in ways {
            let out = bench.up([0.5; 2 * STRIDE])?;
            self.launch(mat, x, Some(bias.gpu()), out.gpu(), STRIDE)?;
            let name = format!("{rows}×{} of {cols}×2 of 5, a bias", range.len());
            bench.equal_to(name, &out.device, &expected)?;
        }
        Ok(())
    }

    /// Scales and activations that are infinite or no numbers.
    fn hard_scales(&self) -> Result<()> {
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
        let data = self.data_of(shape, &bytes, &x)?;
        let products = self.compare(&format!("{rows}×{cols}×{tokens}, infinite scales"), &data)?;
        let is_hard = products[2 * rows..].iter().all(|x| x.is_nan());
        assert!(is_hard && products.iter().any(|x| x.is_finite()), "{ty}: the data tests nothing");
        Ok(())
    }
}

/// A matrix, and activations as products read them.
struct Data {
    shape: Shape,
    mat: Mat,
    x: Acts,
}
