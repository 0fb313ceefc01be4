//! The hot loops, in a scalar version that is the specification and a version for each vector
//! unit that agrees with it to the bit. Which one runs is chosen once, from what the processor
//! reports; `MOEBA_SIMD=scalar`, `avx2`, `avx512`, `neon` or `dotprod` overrides it, for tests.

mod acts;
mod aligned;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod exp;
mod mat;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
mod parts;
mod scalar;
pub mod tile;

pub use acts::{ActKind, ActView, ActWriter, Activations, act_kind};
pub use aligned::{FloatBuffer, Floats};
pub use mat::MatRef;

use crate::gguf::TensorType;
use aligned::{AlignedBytes, Line};
use std::ops::Range;
use std::sync::OnceLock;

/// Some rows of a matrix times some tokens, with the destination: `out.at[t·out.stride + r]` is for
/// token t and row r of `mat`. Kernels rely on each of these places being writable and not shared
/// meanwhile, and on columns and kinds that fit.
#[derive(Clone, Copy)]
struct Product<'a> {
    mat: MatRef<'a>,
    first: usize,
    rows: usize,
    /// Columns whose products are a sum of their own, added to the others in order: all of them
    /// where `sums_granules` does not name the matrix's type.
    granule: usize,
    /// Whether the first granule's results are added to what their places hold; of one token only.
    adds: bool,
    acts: ActView<'a>,
    out: Out,
}

/// Bytes of activations in a part of the tokens: 128 of them at 2048 columns.
const PART_BYTES: usize = 256 << 10;

/// The destination of a product: results of token t go to `at + t·stride` and after.
#[derive(Clone, Copy)]
pub struct Out {
    pub at: *mut f32,
    pub stride: usize,
    /// They are not read before as much else was that no cache has them any more. Lines that are
    /// written as a whole then need not be read first: places that begin on a cache line.
    pub past_caches: bool,
}

impl Out {
    /// Results that are read soon.
    pub fn near(at: *mut f32, stride: usize) -> Self {
        Out { at, stride, past_caches: false }
    }
}

impl<'a> Product<'a> {
    /// # Panics
    /// If columns, kinds or ranges do not fit each other.
    fn new(mat: MatRef<'a>, rows: Range<usize>, acts: ActView<'a>, out: Out) -> Self {
        assert_eq!(mat.cols, acts.cols(), "columns of the matrix and of the activations");
        assert_eq!(act_kind(mat.ty), acts.kind(), "activations for {}", mat.ty);
        assert!(rows.start <= rows.end && rows.end <= mat.rows, "{rows:?} of {}", mat.rows);
        let (first, rows, granule) = (rows.start, rows.len(), mat.cols);
        Product { mat, first, rows, granule, adds: false, acts, out }
    }

    /// `n` of the rows, from number `start` of them on.
    fn rows(self, start: usize, n: usize) -> Self {
        assert!(start + n <= self.rows);
        Product { first: self.first + start, rows: n, ..self }
    }

    /// Parts of about as many tokens each, whole tiles but for the last. Their activations stay in
    /// the second cache while they pass over all weights, which are unpacked again for each part.
    fn by_tokens(self, tile: usize) -> impl Iterator<Item = Self> {
        let tokens = self.acts.tokens();
        let most = (PART_BYTES / self.mat.cols.max(1)).max(32);
        let part = tokens.div_ceil(tokens.div_ceil(most).max(1)).next_multiple_of(tile);
        let starts = (0..tokens).step_by(part.max(1));
        starts.map(move |t| self.tokens(t..tokens.min(t + part)))
    }

    /// Some of the tokens.
    fn tokens(self, range: Range<usize>) -> Self {
        let out = Out { at: self.out.at.wrapping_add(range.start * self.out.stride), ..self.out };
        Product { acts: self.acts.token_range(range), out, ..self }
    }

    /// Row `i` of these rows.
    #[inline]
    fn row(&self, i: usize) -> *const u8 {
        self.mat.data.as_ptr().wrapping_add((self.first + i) * self.mat.row_stride)
    }

    /// The destination of the product of row `i` of these rows and token `t`.
    #[inline]
    fn place(&self, t: usize, i: usize) -> *mut f32 {
        self.out.at.wrapping_add(t * self.out.stride + self.first + i)
    }

    /// Whether results may be written as whole cache lines, past the caches.
    #[inline]
    fn streams(&self) -> bool {
        let line = size_of::<Line>();
        let is_aligned = self.place(0, 0).addr().is_multiple_of(line);
        self.out.past_caches && is_aligned && (4 * self.out.stride).is_multiple_of(line)
    }
}

/// Room that a matrix–matrix kernel unpacks weights into; one a thread, reused for every call.
#[derive(Default)]
pub struct Scratch {
    panel: AlignedBytes,
    /// Rows of a format that is written out as another first.
    rows: AlignedBytes,
}

impl Scratch {
    pub fn new() -> Self {
        Self::default()
    }

    /// At least `bytes`, on a cache line; allocates only when it never was this large.
    fn get(&mut self, bytes: usize) -> *mut u8 {
        self.panel.reserve(bytes);
        self.panel.as_mut_ptr()
    }
}

type Matmul = unsafe fn(Product, &mut Scratch);
type QuantizeQ8K = unsafe fn(&[f32], &mut [i8], &mut [f32], &mut [i16], &mut [i16]);

/// One version of every hot loop. The methods check sizes; the pointers behind them trust.
/// Calling one is safe where its vector unit exists, which is why the fields are private.
pub struct Kernels {
    pub name: &'static str,
    matmul: Matmul,
    /// Whether `matmul` heeds `granule` for a matrix of this type.
    sums_granules: fn(TensorType) -> bool,
    quantize_q8_0: unsafe fn(&[f32], &mut [i8], &mut [f32], &mut [i16]),
    quantize_q8_k: QuantizeQ8K,
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    swiglu: unsafe fn(&[f32], &[f32], &mut [f32]),
    exp: unsafe fn(&mut [f32]),
    sigmoid: unsafe fn(&mut [f32]),
    softmax: unsafe fn(&mut [f32]),
    add: unsafe fn(&mut [f32], &[f32]),
    axpy: unsafe fn(&mut [f32], f32, &[f32]),
    scale: unsafe fn(&mut [f32], f32),
    blend: unsafe fn(&mut [f32], f32, &[f32], f32),
    dot_f32: unsafe fn(&[f32], &[f32]) -> f32,
    f32_to_f16: unsafe fn(&[f32], &mut [u16]),
    f16_to_f32: unsafe fn(&[u16], &mut [f32]),
    bf16_to_f32: unsafe fn(&[u16], &mut [f32]),
    dequantize: unsafe fn(TensorType, &[u8], &mut [f32]),
    tile_dot: tile::TileDot,
    tile_axpy: tile::TileAxpy,
    tile_softmax: tile::TileSoftmax,
}

/// The version for this processor.
pub fn kernels() -> &'static Kernels {
    static CHOSEN: OnceLock<&'static Kernels> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let asked = std::env::var("MOEBA_SIMD").ok();
        let chosen = asked.as_deref().and_then(by_name).unwrap_or_else(best);
        if let Some(asked) = asked.filter(|name| name != chosen.name) {
            log::warn!("MOEBA_SIMD={asked}: not known or not on this processor");
        }
        log::debug!("kernels: {}", chosen.name);
        chosen
    })
}

fn best() -> &'static Kernels {
    let names = ["avx512", "avx2", "dotprod", "neon"];
    names.into_iter().find_map(by_name).unwrap_or(&scalar::KERNELS)
}

/// A version by name, if this processor can run it: for tests and benchmarks.
pub fn by_name(name: &str) -> Option<&'static Kernels> {
    match name {
        "scalar" => Some(&scalar::KERNELS),
        #[cfg(target_arch = "x86_64")]
        "avx2" => avx2::kernels(),
        #[cfg(target_arch = "x86_64")]
        "avx512" => avx512::kernels(),
        #[cfg(target_arch = "aarch64")]
        "neon" => neon::neon(),
        #[cfg(target_arch = "aarch64")]
        "dotprod" => neon::dotprod(),
        _ => None,
    }
}

impl Kernels {
    /// `out.at[t·out.stride + r] = dot(row r of mat, token t of acts)` for each r in `rows`. Uses
    /// a matrix–vector loop for few tokens and unpacks weights once for many: the same bits.
    ///
    /// # Panics
    /// If columns, kinds or ranges do not fit each other.
    ///
    /// # Safety
    /// `out.at` is valid for writes at each of those places, and no other thread uses them
    /// meanwhile (several threads may write disjoint rows of one `out`).
    pub unsafe fn matmul(
        &self,
        mat: MatRef,
        rows: Range<usize>,
        acts: ActView,
        out: Out,
        scratch: &mut Scratch,
    ) {
        let product = Product::new(mat, rows, acts, out);
        // SAFETY: sizes are checked there and in `MatRef::new`; `out` is the caller's promise.
        unsafe { (self.matmul)(product, scratch) }
    }

    /// Whether [`Kernels::granule_sums`] takes many tokens at once for matrices of this type.
    pub fn sums_granules(&self, ty: TensorType) -> bool {
        (self.sums_granules)(ty)
    }

    /// [`Kernels::matmul`] where each `granule` columns are a product of their own and these are
    /// added in order, behind what the places hold if it `adds`.
    ///
    /// # Panics
    /// As [`Kernels::matmul`] does, where a granule is no whole number of blocks, or with more than
    /// one token if it `adds` or of a type that [`Kernels::sums_granules`] does not name.
    ///
    /// # Safety
    /// As for [`Kernels::matmul`]; the places are initialised if it `adds`.
    pub unsafe fn granule_sums(
        &self,
        (mat, granule, adds): (MatRef, usize, bool),
        rows: Range<usize>,
        acts: ActView,
        out: Out,
        scratch: &mut Scratch,
    ) {
        assert!(granule > 0 && granule.is_multiple_of(mat.ty.block_len()));
        assert!(!adds || acts.tokens() == 1);
        if self.sums_granules(mat.ty) {
            let product = Product { granule, adds, ..Product::new(mat, rows, acts, out) };
            // SAFETY: as in `matmul`.
            return unsafe { (self.matmul)(product, scratch) };
        }
        assert_eq!(acts.tokens(), 1);
        let mut more = [0.0; 64];
        for start in rows.clone().step_by(more.len()) {
            let rows = start..rows.end.min(start + more.len());
            for first in (0..mat.cols).step_by(granule) {
                let cols = first..mat.cols.min(first + granule);
                let (mat, acts) = (mat.column_range(cols.clone()), acts.column_range(cols));
                if first == 0 && !adds {
                    // SAFETY: the caller's promise.
                    unsafe { self.matmul(mat, rows.clone(), acts, out, scratch) };
                    continue;
                }
                let more = &mut more[..rows.len()];
                self.matmul_all(mat.row_range(rows.clone()), acts, more, scratch);
                // SAFETY: the caller's promise; the first granule wrote them.
                let sums = unsafe { std::slice::from_raw_parts_mut(out.at.add(start), rows.len()) };
                self.add(sums, more);
            }
        }
    }

    /// [`Kernels::matmul`] of all rows to `out[t·rows + r]`.
    pub fn matmul_all(&self, mat: MatRef, acts: ActView, out: &mut [f32], scratch: &mut Scratch) {
        assert_eq!(out.len(), mat.rows * acts.tokens());
        let out = Out::near(out.as_mut_ptr(), mat.rows);
        // SAFETY: `out` is exclusive and has a place for each row and token.
        unsafe { self.matmul(mat, 0..mat.rows, acts, out, scratch) }
    }

    fn quantize_q8_0(&self, x: &[f32], qs: &mut [i8], scales: &mut [f32], sums32: &mut [i16]) {
        assert!(x.len() == qs.len() && x.len() == 32 * scales.len());
        assert_eq!(x.len(), 32 * sums32.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.quantize_q8_0)(x, qs, scales, sums32) }
    }

    fn quantize_q8_k(
        &self,
        x: &[f32],
        qs: &mut [i8],
        scales: &mut [f32],
        sums32: &mut [i16],
        sums16: &mut [i16],
    ) {
        assert!(x.len() == qs.len() && x.len() == 256 * scales.len());
        assert!(x.len() == 32 * sums32.len() && x.len() == 16 * sums16.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.quantize_q8_k)(x, qs, scales, sums32, sums16) }
    }

    /// `out = x · (1/√(mean(x²) + eps)) · weight`, squares summed in eight lanes and a tree.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.rms_norm)(x, weight, eps, out) }
    }

    /// `out = gate/(1 + e^−gate) · up`.
    pub fn swiglu(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == up.len() && gate.len() == out.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.swiglu)(gate, up, out) }
    }

    /// `x = e^x`, see `exp.rs` for the polynomial and its error.
    pub fn exp(&self, x: &mut [f32]) {
        // SAFETY: tables exist only for features that the processor has.
        unsafe { (self.exp)(x) }
    }

    /// `x = 1/(1 + e^−x)`.
    pub fn sigmoid(&self, x: &mut [f32]) {
        // SAFETY: tables exist only for features that the processor has.
        unsafe { (self.sigmoid)(x) }
    }

    /// `x = cap·tanh(x/cap)`, as cap·(2·σ(2·x/cap) − 1) with each operation rounded.
    pub fn soft_cap(&self, x: &mut [f32], cap: f32) {
        x.iter_mut().for_each(|x| *x = 2.0 * *x / cap);
        self.sigmoid(x);
        x.iter_mut().for_each(|x| *x = cap * (2.0 * *x - 1.0));
    }

    /// `x = e^(x − max)/Σ`, the sum in eight lanes and a tree. −∞ gives 0 as long as one value is
    /// finite; a NaN, +∞ or nothing but −∞ gives NaN throughout.
    pub fn softmax(&self, x: &mut [f32]) {
        // SAFETY: tables exist only for features that the processor has.
        unsafe { (self.softmax)(x) }
    }

    /// `acc += x`.
    pub fn add(&self, acc: &mut [f32], x: &[f32]) {
        assert_eq!(acc.len(), x.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.add)(acc, x) }
    }

    /// `acc = fma(a, x, acc)`.
    pub fn axpy(&self, acc: &mut [f32], a: f32, x: &[f32]) {
        assert_eq!(acc.len(), x.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.axpy)(acc, a, x) }
    }

    /// `x *= factor`.
    pub fn scale(&self, x: &mut [f32], factor: f32) {
        // SAFETY: tables exist only for features that the processor has.
        unsafe { (self.scale)(x, factor) }
    }

    /// `acc = acc·a + x·b`, each product rounded.
    pub fn blend(&self, acc: &mut [f32], a: f32, x: &[f32], b: f32) {
        assert_eq!(acc.len(), x.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.blend)(acc, a, x, b) }
    }

    /// The float dot product of "One arithmetic" (`quant`).
    pub fn dot_f32(&self, x: &[f32], y: &[f32]) -> f32 {
        assert_eq!(x.len(), y.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.dot_f32)(x, y) }
    }

    /// Rounds to nearest, ties to even.
    pub fn f32_to_f16(&self, x: &[f32], out: &mut [u16]) {
        assert_eq!(x.len(), out.len());
        // SAFETY: tables exist only for features that the processor has; sizes are checked.
        unsafe { (self.f32_to_f16)(x, out) }
    }
}
