//! Semantic embeddings (§4.2.1), compressed to `DIMS` signed bytes: coordinate i is added to place
//! i mod `DIMS` with a sign that is a hash of i (feature hashing, Weinberger et al. 2009). Dot
//! products keep their expectation: the cosine of two embeddings of more than `DIMS` values is off
//! by about (1 − cosine²) / √DIMS, so equal embeddings have cosine 1 whatever their size, and those
//! of up to `DIMS` values lose by the rounding only.

use crate::policy::random::mix;

pub(super) const DIMS: usize = 512;

/// Any: it only must be the same for all embeddings of a store, on disk too.
const SEED: u64 = 0x6d61_702e_7369_676e;

/// An embedding as it is compared with stored ones.
#[derive(Clone, Debug)]
pub(super) struct Sketch {
    /// −127…127, wide enough to be multiplied.
    values: [i16; DIMS],
    norm: f32,
    /// Room to add up.
    sums: [f32; DIMS],
}

impl Default for Sketch {
    /// The sketch of no embedding, similar to none.
    fn default() -> Self {
        Self { values: [0; DIMS], norm: 0.0, sums: [0.0; DIMS] }
    }
}

impl Sketch {
    pub fn set(&mut self, embedding: &[f32]) {
        self.sums.fill(0.0);
        for (start, chunk) in (0u64..).step_by(DIMS).zip(embedding.chunks(DIMS)) {
            for (i, (sum, x)) in (start..).zip(self.sums.iter_mut().zip(chunk)) {
                *sum += if mix(SEED ^ i) & 1 == 0 { *x } else { -*x };
            }
        }
        let max = self.sums.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let scale = if max > 0.0 && max.is_finite() { 127.0 / max } else { 0.0 };
        for (value, sum) in self.values.iter_mut().zip(&self.sums) {
            *value = (sum * scale).round() as i16;
        }
        self.norm = norm(self.values.iter().copied());
    }

    pub fn is_zero(&self) -> bool {
        self.norm == 0.0
    }
}

fn norm(values: impl Iterator<Item = i16>) -> f32 {
    (values.map(|x| i32::from(x) * i32::from(x)).sum::<i32>() as f32).sqrt()
}

/// In lanes, so that the compiler makes vectors of them.
fn dot(a: &[i8; DIMS], b: &[i16; DIMS]) -> i32 {
    const LANES: usize = 8;
    let mut sums = [0; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            sums[lane] += i32::from(a[lane]) * i32::from(b[lane]);
        }
    }
    sums.iter().sum()
}

/// The sketches of all stored iterations.
#[derive(Clone, Debug)]
pub(super) struct Sketches {
    /// [n, DIMS]
    values: Vec<i8>,
    norms: Vec<f32>,
}

impl Sketches {
    pub fn with_capacity(n: usize) -> Self {
        Self { values: Vec::with_capacity(n * DIMS), norms: Vec::with_capacity(n) }
    }

    /// `at` is the place of a stored one, or the next.
    pub fn put(&mut self, at: usize, sketch: &Sketch) {
        if at == self.norms.len() {
            self.values.resize((at + 1) * DIMS, 0);
            self.norms.push(0.0);
        }
        self.norms[at] = sketch.norm;
        let stored = &mut self.values[at * DIMS..][..DIMS];
        stored.iter_mut().zip(&sketch.values).for_each(|(to, from)| *to = *from as i8);
    }

    /// The cosine similarity to a stored embedding (Eq. 4); 0 where either has no direction.
    pub fn score(&self, at: usize, sketch: &Sketch) -> f32 {
        let norms = self.norms[at] * sketch.norm;
        let stored = &self.values.as_chunks().0[at];
        if norms > 0.0 { dot(stored, &sketch.values) as f32 / norms } else { 0.0 }
    }

    /// Replaces `out` by the similarity to each of them.
    pub fn scores(&self, sketch: &Sketch, out: &mut Vec<f32>) {
        out.clear();
        out.extend((0..self.norms.len()).map(|at| self.score(at, sketch)));
    }

    pub fn values(&self) -> &[i8] {
        &self.values
    }

    /// Appends a stored sketch: `DIMS` values as bytes.
    pub fn push_values(&mut self, values: &[u8]) {
        self.values.extend(values.iter().map(|&x| x as i8));
        self.norms.push(norm(values.iter().map(|&x| i16::from(x as i8))));
    }

    /// Allocated.
    pub fn bytes(&self) -> usize {
        self.values.capacity() + self.norms.capacity() * size_of::<f32>()
    }
}
