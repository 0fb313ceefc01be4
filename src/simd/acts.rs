//! Activations as the dot products take them: rows of f32, Q8_0 or Q8_K in separate arrays of
//! values, scales and block sums. Separate arrays let a kernel load eight scales or sums at once;
//! ggml's block structs would scatter them.

use super::Kernels;
use super::aligned::AlignedBytes;
use crate::gguf::TensorType;
use std::marker::PhantomData;
use std::ops::Range;

/// The kind of activations that a weight type is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // the names are the format's own
pub enum ActKind {
    F32,
    Q8_0,
    Q8_K,
}

impl ActKind {
    /// Elements that share a scale (1 where there is none).
    pub fn block_len(self) -> usize {
        match self {
            ActKind::F32 => 1,
            ActKind::Q8_0 => 32,
            ActKind::Q8_K => 256,
        }
    }
}

/// The activations that weights of `ty` pair with.
///
/// # Panics
/// If the type is not computed with.
pub fn act_kind(ty: TensorType) -> ActKind {
    assert!(crate::quant::is_supported(ty), "{ty} is not computed with");
    match ty.block_len() {
        1 => ActKind::F32,
        256 => ActKind::Q8_K,
        _ => ActKind::Q8_0,
    }
}

/// Byte sizes of one token's row in each of the three arrays, each a whole number of lines.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Strides {
    values: usize,
    scales: usize,
    sums: usize,
}

impl Strides {
    fn new(kind: ActKind, cols: usize) -> Self {
        let line = |bytes: usize| bytes.next_multiple_of(64);
        match kind {
            ActKind::F32 => Strides { values: line(4 * cols), scales: 0, sums: 0 },
            ActKind::Q8_0 => Strides {
                values: line(cols),
                scales: line(4 * (cols / 32)),
                sums: line(2 * (cols / 32)),
            },
            // Sums by 32 and, from the next line on, sums by 16.
            ActKind::Q8_K => Strides {
                values: line(cols),
                scales: line(4 * (cols / 256)),
                sums: line(2 * (cols / 32)) + line(2 * (cols / 16)),
            },
        }
    }
}

/// A reusable buffer for the activations of some tokens.
pub struct Activations {
    kind: ActKind,
    tokens: usize,
    cols: usize,
    strides: Strides,
    values: AlignedBytes,
    scales: AlignedBytes,
    sums: AlignedBytes,
}

impl Default for Activations {
    fn default() -> Self {
        Self::new()
    }
}

impl Activations {
    pub fn new() -> Self {
        Activations {
            kind: ActKind::F32,
            tokens: 0,
            cols: 0,
            strides: Strides::new(ActKind::F32, 0),
            values: AlignedBytes::default(),
            scales: AlignedBytes::default(),
            sums: AlignedBytes::default(),
        }
    }

    /// Makes room; what was there is lost. Allocates only when the buffer was never this large.
    ///
    /// # Panics
    /// If `cols` is no whole number of blocks.
    pub fn resize(&mut self, kind: ActKind, tokens: usize, cols: usize) {
        assert_eq!(cols % kind.block_len(), 0, "{cols} columns as {kind:?}");
        (self.kind, self.tokens, self.cols) = (kind, tokens, cols);
        self.strides = Strides::new(kind, cols);
        self.values.reserve(tokens * self.strides.values);
        self.scales.reserve(tokens * self.strides.scales);
        self.sums.reserve(tokens * self.strides.sums);
    }

    pub fn kind(&self) -> ActKind {
        self.kind
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The bytes of a token's values, and those of its scales, with the room behind them.
    pub(super) fn values_of(&self, token: usize) -> &[u8] {
        row(self.values.bytes(), token, self.strides.values)
    }

    pub(super) fn scales_of(&self, token: usize) -> &[u8] {
        row(self.scales.bytes(), token, self.strides.scales)
    }

    pub(super) fn values_of_mut(&mut self, token: usize) -> &mut [u8] {
        row_mut(self.values.bytes_mut(), token, self.strides.values)
    }

    pub(super) fn scales_of_mut(&mut self, token: usize) -> &mut [u8] {
        row_mut(self.scales.bytes_mut(), token, self.strides.scales)
    }

    /// The bytes of a token's sums by 32 and, from the next line on, by 16.
    pub(super) fn sums_of_mut(&mut self, token: usize) -> &mut [u8] {
        row_mut(self.sums.bytes_mut(), token, self.strides.sums)
    }

    /// Stores tokens `tokens`; row i of `src` starts at `i · src_stride` and is for token
    /// `tokens.start + i`.
    pub fn quantize_rows(
        &mut self,
        kernels: &Kernels,
        tokens: Range<usize>,
        src: &[f32],
        src_stride: usize,
    ) {
        let writer = self.writer();
        // SAFETY: `&mut self` excludes any other writer.
        unsafe { writer.quantize_cols(kernels, tokens, 0..writer.cols, src, src_stride) }
    }

    /// A handle through which several threads fill disjoint tokens.
    pub fn writer(&mut self) -> ActWriter<'_> {
        ActWriter {
            kind: self.kind,
            tokens: self.tokens,
            cols: self.cols,
            strides: self.strides,
            values: self.values.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            owner: PhantomData,
        }
    }

    /// All tokens and columns.
    pub fn all(&self) -> ActView<'_> {
        ActView {
            acts: self,
            first: 0,
            tokens: self.tokens,
            index: None,
            col_start: 0,
            cols: self.cols,
        }
    }

    pub fn view(&self, tokens: Range<usize>, cols: Range<usize>) -> ActView<'_> {
        self.all().token_range(tokens).column_range(cols)
    }
}

fn row(bytes: &[u8], token: usize, stride: usize) -> &[u8] {
    &bytes[token * stride..][..stride]
}

fn row_mut(bytes: &mut [u8], token: usize, stride: usize) -> &mut [u8] {
    &mut bytes[token * stride..][..stride]
}

/// See [`Activations::writer`].
pub struct ActWriter<'a> {
    kind: ActKind,
    tokens: usize,
    cols: usize,
    strides: Strides,
    values: *mut u8,
    scales: *mut u8,
    sums: *mut u8,
    owner: PhantomData<&'a mut Activations>,
}

// SAFETY: the pointers are to plain bytes that `owner` keeps borrowed; who writes what at a time
// is the contract of `quantize_cols`.
unsafe impl Send for ActWriter<'_> {}
// SAFETY: as above.
unsafe impl Sync for ActWriter<'_> {}

impl ActWriter<'_> {
    /// Stores columns `cols` (both ends on block boundaries) of `tokens`; row i of `src` starts at
    /// `i · src_stride` and begins with column 0.
    ///
    /// # Safety
    /// No other thread writes one of these columns of one of `tokens` at the same time.
    pub unsafe fn quantize_cols(
        &self,
        kernels: &Kernels,
        tokens: Range<usize>,
        cols: Range<usize>,
        src: &[f32],
        src_stride: usize,
    ) {
        let len = self.kind.block_len();
        assert!(tokens.end <= self.tokens, "{tokens:?} of {}", self.tokens);
        assert!(cols.end <= self.cols, "{cols:?} of {}", self.cols);
        assert!(
            cols.start.is_multiple_of(len) && cols.end.is_multiple_of(len),
            "{cols:?} cuts a block of {len}"
        );
        for (i, token) in tokens.enumerate() {
            let x = &src[i * src_stride + cols.start..][..cols.len()];
            // SAFETY: token and columns are within what the arrays were sized for, and this
            // thread's alone (the contract of this function).
            unsafe { self.quantize_row(kernels, token, cols.start, x) };
        }
    }

    /// Stores `x` from column `start` on.
    ///
    /// # Safety
    /// Token and columns are in range, on block boundaries, and no other thread touches them.
    unsafe fn quantize_row(&self, kernels: &Kernels, token: usize, start: usize, x: &[f32]) {
        // SAFETY: the row of a token in range lies within each array.
        let (values, scales, sums) = unsafe {
            (
                self.values.add(token * self.strides.values),
                self.scales.add(token * self.strides.scales).cast::<f32>(),
                self.sums.add(token * self.strides.sums),
            )
        };
        let n = x.len();
        // SAFETY: `Strides` gave each row this much room, on cache lines, which align any number;
        // the caller owns these columns.
        unsafe {
            match self.kind {
                ActKind::F32 => {
                    let to = values.cast::<f32>().add(start);
                    std::slice::from_raw_parts_mut(to, n).copy_from_slice(x)
                }
                ActKind::Q8_0 => kernels.quantize_q8_0(
                    x,
                    std::slice::from_raw_parts_mut(values.cast::<i8>().add(start), n),
                    std::slice::from_raw_parts_mut(scales.add(start / 32), n / 32),
                    std::slice::from_raw_parts_mut(sums.cast::<i16>().add(start / 32), n / 32),
                ),
                ActKind::Q8_K => {
                    let sums16 = sums.add((2 * (self.cols / 32)).next_multiple_of(64));
                    kernels.quantize_q8_k(
                        x,
                        std::slice::from_raw_parts_mut(values.cast::<i8>().add(start), n),
                        std::slice::from_raw_parts_mut(scales.add(start / 256), n / 256),
                        std::slice::from_raw_parts_mut(sums.cast::<i16>().add(start / 32), n / 32),
                        std::slice::from_raw_parts_mut(
                            sums16.cast::<i16>().add(start / 16),
                            n / 16,
                        ),
                    )
                }
            }
        }
    }
}

/// Some tokens (a run, or any list of them) and columns of [`Activations`]. An expert reads its
/// tokens through [`ActView::select`], so rows need no gathering.
#[derive(Clone, Copy)]
pub struct ActView<'a> {
    acts: &'a Activations,
    first: usize,
    tokens: usize,
    index: Option<&'a [u32]>,
    col_start: usize,
    cols: usize,
}

impl<'a> ActView<'a> {
    pub fn kind(&self) -> ActKind {
        self.acts.kind
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn token_range(self, tokens: Range<usize>) -> Self {
        assert!(tokens.start <= tokens.end && tokens.end <= self.tokens);
        let n = tokens.len();
        match self.index {
            Some(index) => ActView { tokens: n, index: Some(&index[tokens]), ..self },
            None => ActView { first: self.first + tokens.start, tokens: n, ..self },
        }
    }

    /// Token i of the result is token `index[i]` of this view, which must be a run.
    ///
    /// # Panics
    /// If an index is out of range or this view is a selection already.
    pub fn select(self, index: &'a [u32]) -> Self {
        assert!(self.index.is_none(), "a selection of a selection");
        assert!(index.iter().all(|i| (*i as usize) < self.tokens), "a token out of range");
        ActView { tokens: index.len(), index: Some(index), ..self }
    }

    /// Both ends on block boundaries.
    pub fn column_range(self, cols: Range<usize>) -> Self {
        let len = self.kind().block_len();
        assert!(cols.start <= cols.end && cols.end <= self.cols, "{cols:?} of {}", self.cols);
        assert!(
            cols.start.is_multiple_of(len) && cols.end.is_multiple_of(len),
            "{cols:?} cuts a block of {len}"
        );
        ActView { col_start: self.col_start + cols.start, cols: cols.len(), ..self }
    }

    #[inline]
    fn token(&self, t: usize) -> usize {
        assert!(t < self.tokens);
        self.first + self.index.map_or(t, |index| index[t] as usize)
    }

    /// `n` numbers from the `start`-th of the row that begins at byte `row` of `array`.
    #[inline]
    fn slice<T: Copy>(array: &'a AlignedBytes, row: usize, start: usize, n: usize) -> &'a [T] {
        let size = size_of::<T>();
        assert!(row.is_multiple_of(64) && row + (start + n) * size <= array.len());
        // SAFETY: within the array by the assertion; rows begin on cache lines, so T is aligned;
        // the bytes are initialised and T is one of f32, i16 and i8 (private function).
        unsafe { std::slice::from_raw_parts(array.as_ptr().add(row).cast::<T>().add(start), n) }
    }

    /// Token t as f32 (kind F32).
    #[inline]
    pub fn f32s(&self, t: usize) -> &'a [f32] {
        debug_assert_eq!(self.kind(), ActKind::F32);
        let row = self.token(t) * self.acts.strides.values;
        Self::slice(&self.acts.values, row, self.col_start, self.cols)
    }

    /// Token t as i8 (kinds Q8_0 and Q8_K).
    #[inline]
    pub fn qs(&self, t: usize) -> &'a [i8] {
        debug_assert_ne!(self.kind(), ActKind::F32);
        let row = self.token(t) * self.acts.strides.values;
        Self::slice(&self.acts.values, row, self.col_start, self.cols)
    }

    /// The scales of token t, one a block.
    #[inline]
    pub fn scales(&self, t: usize) -> &'a [f32] {
        let row = self.token(t) * self.acts.strides.scales;
        let len = self.kind().block_len();
        Self::slice(&self.acts.scales, row, self.col_start / len, self.cols / len)
    }

    /// The sums of token t by 32.
    #[inline]
    pub fn sums32(&self, t: usize) -> &'a [i16] {
        let row = self.token(t) * self.acts.strides.sums;
        Self::slice(&self.acts.sums, row, self.col_start / 32, self.cols / 32)
    }

    /// The sums of token t by 16 (kind Q8_K).
    #[inline]
    pub fn sums16(&self, t: usize) -> &'a [i16] {
        debug_assert_eq!(self.kind(), ActKind::Q8_K);
        let after = (2 * (self.acts.cols / 32)).next_multiple_of(64);
        let row = self.token(t) * self.acts.strides.sums + after;
        Self::slice(&self.acts.sums, row, self.col_start / 16, self.cols / 16)
    }
}
