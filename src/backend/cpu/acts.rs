//! The input of several matrices, stored once in each of the forms that they pair with.

use super::Cpu;
use crate::gguf::TensorType;
use crate::simd::{ActKind, ActView, ActWriter, Activations, Kernels, act_kind};
use std::ops::Range;

/// Activations in up to three forms.
#[derive(Default)]
pub struct ActSet {
    f32s: Activations,
    q8_0: Activations,
    q8_k: Activations,
    kinds: Kinds,
}

/// The wanted forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    f32s: bool,
    q8_0: bool,
    q8_k: bool,
}

impl Kinds {
    /// The forms that matrices of these types read.
    pub fn of(types: impl IntoIterator<Item = TensorType>) -> Kinds {
        let mut kinds = Kinds::default();
        for ty in types {
            match act_kind(ty) {
                ActKind::F32 => kinds.f32s = true,
                ActKind::Q8_0 => kinds.q8_0 = true,
                ActKind::Q8_K => kinds.q8_k = true,
            }
        }
        kinds
    }

    /// The wanted forms, as they are packed one behind the other.
    fn forms(self) -> impl Iterator<Item = ActKind> {
        let forms =
            [(self.f32s, ActKind::F32), (self.q8_0, ActKind::Q8_0), (self.q8_k, ActKind::Q8_K)];
        forms.into_iter().filter_map(|(is_wanted, kind)| is_wanted.then_some(kind))
    }

    /// Bytes of a row of `cols` in all of them.
    pub fn packed_bytes(self, cols: usize) -> usize {
        self.forms().map(|kind| kind.packed_bytes(cols)).sum()
    }
}

/// See [`ActSet::writers`].
pub struct Writers<'a>([Option<ActWriter<'a>>; 3]);

impl Writers<'_> {
    /// Stores columns `cols` of `tokens`; `src` begins with column 0 of the first of them.
    ///
    /// # Safety
    /// No other thread stores any of these columns of these tokens at the same time.
    pub unsafe fn store(
        &self,
        kernels: &Kernels,
        tokens: Range<usize>,
        cols: Range<usize>,
        src: &[f32],
        src_stride: usize,
    ) {
        for writer in self.0.iter().flatten() {
            let (tokens, cols) = (tokens.clone(), cols.clone());
            // SAFETY: the caller's promise, passed on.
            unsafe { writer.quantize_cols(kernels, tokens, cols, src, src_stride) }
        }
    }
}

impl ActSet {
    /// Makes room for `tokens` rows of `cols` in the forms that `types` read.
    pub fn resize(&mut self, kinds: Kinds, tokens: usize, cols: usize) {
        self.kinds = kinds;
        if kinds.f32s {
            self.f32s.resize(ActKind::F32, tokens, cols);
        }
        if kinds.q8_0 {
            self.q8_0.resize(ActKind::Q8_0, tokens, cols);
        }
        if kinds.q8_k {
            self.q8_k.resize(ActKind::Q8_K, tokens, cols);
        }
    }

    /// Stores `src`: [tokens, cols], in each form.
    pub fn fill(&mut self, cpu: &Cpu, kinds: Kinds, tokens: usize, cols: usize, src: &[f32]) {
        assert_eq!(src.len(), tokens * cols);
        let kinds = Kinds { f32s: kinds.f32s || cpu.keeps_inputs, ..kinds };
        self.resize(kinds, tokens, cols);
        let writers = self.writers();
        cpu.chunks(tokens, cpu.token_chunk(tokens, cols), &|_, range| {
            let rows = &src[range.start * cols..];
            // SAFETY: each token is in one chunk.
            unsafe { writers.store(cpu.kernels, range, 0..cols, rows, cols) }
        });
    }

    fn of(&self, kind: ActKind) -> &Activations {
        match kind {
            ActKind::F32 => &self.f32s,
            ActKind::Q8_0 => &self.q8_0,
            ActKind::Q8_K => &self.q8_k,
        }
    }

    fn of_mut(&mut self, kind: ActKind) -> &mut Activations {
        match kind {
            ActKind::F32 => &mut self.f32s,
            ActKind::Q8_0 => &mut self.q8_0,
            ActKind::Q8_K => &mut self.q8_k,
        }
    }

    /// Appends a row in these forms, which are some of those that it is stored in.
    pub fn pack(&self, kinds: Kinds, row: usize, out: &mut Vec<u8>) {
        kinds.forms().for_each(|kind| self.of(kind).pack(row, out));
    }

    /// Stores `rows` packed rows of `cols`, and nothing else.
    pub fn unpack(&mut self, kinds: Kinds, rows: usize, cols: usize, packed: &[u8]) {
        self.resize(kinds, rows, cols);
        assert_eq!(packed.len(), rows * kinds.packed_bytes(cols), "{rows} packed rows");
        let mut rest = packed;
        for row in 0..rows {
            for kind in kinds.forms() {
                let (own, behind) = rest.split_at(kind.packed_bytes(cols));
                self.of_mut(kind).unpack(row, own);
                rest = behind;
            }
        }
    }

    /// A handle through which threads store parts that do not overlap.
    pub fn writers(&mut self) -> Writers<'_> {
        Writers([
            self.kinds.f32s.then(|| self.f32s.writer()),
            self.kinds.q8_0.then(|| self.q8_0.writer()),
            self.kinds.q8_k.then(|| self.q8_k.writer()),
        ])
    }

    /// The form that a matrix of type `ty` reads.
    pub fn view(&self, ty: TensorType) -> ActView<'_> {
        let kind = act_kind(ty);
        let filled = self.kinds.forms().any(|form| form == kind);
        assert!(filled, "activations for {ty} were not prepared");
        self.of(kind).all()
    }
}
