//! A tensor's elements in another order: what the steps of a descriptor's row make of it. Nothing
//! is moved until the rows are written; a view says where in the source each element is.

/// Elements at `offset + Σ index · stride`, in the order of a row-major walk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    offset: u64,
    /// One a dimension, outermost first. A dimension of several axes is walked in their order.
    dims: Vec<Vec<Axis>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    len: u64,
    stride: u64,
}

impl View {
    /// The elements of a row-major tensor in their own order.
    pub fn of(shape: &[u64]) -> View {
        let mut stride = 1;
        let mut dims = Vec::with_capacity(shape.len());
        for len in shape.iter().rev() {
            dims.push(vec![Axis { len: *len, stride }]);
            stride *= len;
        }
        dims.reverse();
        View { offset: 0, dims }
    }

    /// Outermost first.
    pub fn shape(&self) -> Vec<u64> {
        self.dims.iter().map(|axes| axes.iter().map(|a| a.len).product()).collect()
    }

    pub fn len(&self) -> u64 {
        self.shape().iter().product()
    }

    /// Gives the elements another shape, in the order that they have; `None` if it has another
    /// number of them or cuts an axis where it has no joint.
    pub fn reshape(&mut self, shape: &[u64]) -> Option<()> {
        let mut axes = self.dims.iter().flatten().copied().rev().collect::<Vec<_>>();
        let mut dims = Vec::with_capacity(shape.len());
        for len in shape {
            let (mut need, mut taken) = (*len, Vec::new());
            while need > 1 {
                let axis = axes.pop()?;
                if axis.len != 0 && need.is_multiple_of(axis.len) {
                    need /= axis.len;
                    taken.push(axis);
                } else if axis.len.is_multiple_of(need) {
                    let inner = axis.len / need;
                    taken.push(Axis { len: need, stride: axis.stride * inner });
                    axes.push(Axis { len: inner, stride: axis.stride });
                    need = 1;
                } else {
                    return None;
                }
            }
            dims.push(taken);
        }
        if need_more(&axes) || shape.contains(&0) {
            return None;
        }
        self.dims = dims;
        Some(())
    }

    /// Every `step`th element of a dimension from `from` to before `to`.
    pub fn take(&mut self, dim: usize, from: u64, to: u64, step: u64) -> Option<()> {
        let axis = joined(self.dims.get(dim)?)?;
        if from >= to || to > axis.len || step == 0 {
            return None;
        }
        self.offset += from * axis.stride;
        let len = (to - from).div_ceil(step);
        self.dims[dim] = vec![Axis { len, stride: axis.stride * step }];
        Some(())
    }

    pub fn swap(&mut self, a: usize, b: usize) -> Option<()> {
        (a.max(b) < self.dims.len()).then(|| self.dims.swap(a, b))
    }

    /// Without dimensions of length one.
    pub fn squeeze(&mut self) {
        self.dims.retain(|axes| axes.iter().any(|a| a.len != 1));
    }

    /// Rows of each of `heads` heads (along dimension 0) from halves to neighbours or back.
    pub fn turn_pairs(&mut self, heads: u64, from: Pairs) -> Option<()> {
        let shape = self.shape();
        let rows = shape.first()?.checked_div(heads)?;
        if rows == 0 || rows * heads != shape[0] || !rows.is_multiple_of(2) {
            return None;
        }
        let inner = match from {
            Pairs::Halves => [2, rows / 2],
            Pairs::Neighbours => [rows / 2, 2],
        };
        self.reshape(&[&[heads, inner[0], inner[1]], &shape[1..]].concat())?;
        self.swap(1, 2)?;
        self.reshape(&shape)
    }

    /// The innermost axes that lie together in the source, as elements to walk and elements
    /// between the first and the last: the block that is worth reading at once.
    fn block(&self) -> (usize, u64, u64) {
        let axes: Vec<Axis> = self.dims.iter().flatten().copied().collect();
        let (mut len, mut span) = (1, 1);
        let mut best = (axes.len(), 1, 1);
        for (at, axis) in axes.iter().enumerate().rev() {
            len *= axis.len;
            span += (axis.len - 1) * axis.stride;
            if best.1 < ENOUGH && len * MAX_WASTE >= span {
                best = (at, len, span);
            }
        }
        best
    }

    /// How the view is walked.
    pub fn walk(&self) -> Walk {
        let axes: Vec<Axis> = self.dims.iter().flatten().copied().collect();
        let (at, block, span) = self.block();
        let (outer, inner) = axes.split_at(at);
        Walk { offset: self.offset, outer: outer.to_vec(), inner: inner.to_vec(), block, span }
    }
}

fn need_more(axes: &[Axis]) -> bool {
    axes.iter().any(|a| a.len != 1)
}

/// Axes as one, if they are evenly spaced.
fn joined(axes: &[Axis]) -> Option<Axis> {
    let mut axes = axes.iter().rev().copied();
    let Some(mut one) = axes.next() else { return Some(Axis { len: 1, stride: 1 }) };
    for axis in axes {
        if axis.stride != one.stride * one.len {
            return None;
        }
        one.len *= axis.len;
    }
    Some(one)
}

/// Which rows of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// (i, i + d/2)
    Halves,
    /// (2i, 2i + 1)
    Neighbours,
}

/// Elements that make a read worth its call.
const ENOUGH: u64 = 1 << 14;

/// Elements read for one that is wanted, at most.
const MAX_WASTE: u64 = 4;

/// A view cut into blocks that are read at once.
#[derive(Clone, Debug)]
pub struct Walk {
    offset: u64,
    outer: Vec<Axis>,
    inner: Vec<Axis>,
    block: u64,
    span: u64,
}

impl Walk {
    /// Elements of a block.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// Fills `out` with the view's elements from `first` on. `read` fills a buffer with the
    /// source's elements from a given one on.
    pub fn fill<E>(
        &self,
        mut first: u64,
        mut out: &mut [f32],
        read: impl Fn(u64, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut block, mut ordered) = (Vec::new(), Vec::new());
        while !out.is_empty() {
            let (index, skip) = (first / self.block, (first % self.block) as usize);
            let n = out.len().min(self.block as usize - skip);
            let (now, rest) = out.split_at_mut(n);
            let start = self.start(index);
            if self.is_plain() {
                read(start + skip as u64, now)?;
            } else {
                block.resize(self.span as usize, 0.0);
                read(start, &mut block)?;
                ordered.resize(self.block as usize, 0.0);
                gather(&self.inner, &block, &mut ordered);
                now.copy_from_slice(&ordered[skip..skip + n]);
            }
            first += n as u64;
            out = rest;
        }
        Ok(())
    }

    /// The starts of the runs of `run` elements (the innermost ones, together in the source), from
    /// run `first` on; `None` if elements do not lie together so.
    pub fn runs(&self, run: u64) -> Option<Runs> {
        let all = self.outer.iter().chain(&self.inner).copied();
        let axes: Vec<Axis> = all.filter(|a| a.len != 1).collect();
        let mut within = 1;
        for (at, axis) in axes.iter().enumerate().rev() {
            if axis.stride != within {
                return None;
            }
            within *= axis.len;
            if within >= run {
                let outer = Axis { len: within / run, stride: run };
                let axes = axes[..at].iter().copied().chain([outer]).collect();
                return within.is_multiple_of(run).then_some(Runs { offset: self.offset, axes });
            }
        }
        None
    }

    /// The first element's place in the source, and the axes as lengths and strides, outermost
    /// first.
    pub fn axes(&self) -> (u64, Vec<(u64, u64)>) {
        let axes = self.outer.iter().chain(&self.inner);
        (self.offset, axes.map(|axis| (axis.len, axis.stride)).collect())
    }

    /// Whether a block's elements are wanted as they lie.
    pub fn is_plain(&self) -> bool {
        self.block == self.span && joined(&self.inner).is_some_and(|one| one.stride == 1)
    }

    /// The start in the source of the block with this number.
    fn start(&self, index: u64) -> u64 {
        position(self.offset, &self.outer, index)
    }
}

/// Runs of elements that lie together in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    offset: u64,
    axes: Vec<Axis>,
}

impl Runs {
    /// Whether all runs start at a multiple of `n`.
    pub fn is_aligned(&self, n: u64) -> bool {
        let axes = self.axes.iter().all(|a| a.len == 1 || a.stride.is_multiple_of(n));
        axes && self.offset.is_multiple_of(n)
    }

    /// The start of a run in the source.
    pub fn start(&self, index: u64) -> u64 {
        position(self.offset, &self.axes, index)
    }
}

fn position(offset: u64, axes: &[Axis], mut index: u64) -> u64 {
    let mut at = offset;
    for axis in axes.iter().rev() {
        at += index % axis.len * axis.stride;
        index /= axis.len;
    }
    at
}

/// Copies a block's elements in the order of its axes.
fn gather(axes: &[Axis], from: &[f32], to: &mut [f32]) {
    match axes {
        [] => to[0] = from[0],
        [axis] if axis.stride == 1 => to.copy_from_slice(&from[..to.len()]),
        [axis] => {
            for (to, from) in to.iter_mut().zip(from.iter().step_by(axis.stride as usize)) {
                *to = *from;
            }
        }
        [axis, inner @ ..] => {
            let n = to.len() / axis.len as usize;
            for (i, to) in to.chunks_exact_mut(n).enumerate() {
                gather(inner, &from[i * axis.stride as usize..], to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All elements of a view of 0, 1, 2 …, read in portions of every size.
    fn walked(view: &View, n: u64) -> Vec<f32> {
        let source: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let walk = view.walk();
        let read = |first: u64, out: &mut [f32]| {
            out.copy_from_slice(&source[first as usize..first as usize + out.len()]);
            Ok::<(), ()>(())
        };
        let len = view.len() as usize;
        let mut whole = vec![-1.0; len];
        walk.fill(0, &mut whole, read).unwrap();
        for portion in 1..=len {
            let mut again = vec![-1.0; len];
            for (i, out) in again.chunks_mut(portion).enumerate() {
                walk.fill((i * portion) as u64, out, read).unwrap();
            }
            assert_eq!(again, whole, "{view:?} by {portion}");
        }
        whole
    }

    #[test]
    fn a_heads_halves_become_neighbours_and_halves_again() {
        let mut view = View::of(&[8, 2]);
        view.turn_pairs(2, Pairs::Halves).unwrap();
        let rows = [0, 2, 1, 3, 4, 6, 5, 7].map(|r| [2.0 * r as f32, 2.0 * r as f32 + 1.0]);
        assert_eq!(walked(&view, 16), rows.concat());
        assert_eq!(view.shape(), [8, 2]);
        view.turn_pairs(2, Pairs::Neighbours).unwrap();
        assert_eq!(walked(&view, 16), walked(&View::of(&[16]), 16));
        // A bias is a column.
        let mut view = View::of(&[4]);
        view.turn_pairs(1, Pairs::Halves).unwrap();
        assert_eq!(walked(&view, 4), [0., 2., 1., 3.]);
        assert!(View::of(&[6, 2]).turn_pairs(2, Pairs::Halves).is_none());
        assert!(View::of(&[6, 2]).turn_pairs(0, Pairs::Halves).is_none());
    }

    #[test]
    fn rows_are_taken_and_transposed() {
        // Two heads of three rows; the first two of each, transposed.
        let mut view = View::of(&[6, 4]);
        view.reshape(&[2, 3, 4]).unwrap();
        view.take(1, 0, 2, 1).unwrap();
        view.swap(1, 2).unwrap();
        assert_eq!(view.shape(), [2, 4, 2]);
        let head = |at: f32| [0., 4., 1., 5., 2., 6., 3., 7.].map(|x| x + at);
        assert_eq!(walked(&view, 24), [head(0.), head(12.)].concat());
        // The third of each, as a matrix.
        let mut view = View::of(&[2, 3, 4]);
        view.take(1, 2, 3, 1).unwrap();
        view.reshape(&[2, 4]).unwrap();
        assert_eq!(walked(&view, 24), [8., 9., 10., 11., 20., 21., 22., 23.]);
    }

    #[test]
    fn every_second_of_a_transposed_dimension() {
        // Two experts of two inputs by four interleaved outputs.
        let mut view = View::of(&[2, 2, 4]);
        view.swap(1, 2).unwrap();
        view.take(1, 1, 4, 2).unwrap();
        assert_eq!(view.shape(), [2, 2, 2]);
        assert_eq!(walked(&view, 16), [1., 5., 3., 7., 9., 13., 11., 15.]);
    }

    #[test]
    fn what_does_not_fit_is_none() {
        let view = View::of(&[6, 4]);
        assert!(view.clone().reshape(&[5, 4]).is_none());
        assert!(view.clone().reshape(&[6, 8]).is_none());
        assert!(view.clone().reshape(&[6, 2]).is_none());
        assert!(view.clone().reshape(&[24, 0]).is_none());
        assert!(view.clone().take(0, 2, 7, 1).is_none());
        assert!(view.clone().take(2, 0, 1, 1).is_none());
        assert!(view.clone().take(0, 2, 2, 1).is_none());
        assert!(view.clone().swap(0, 2).is_none());
        let mut turned = view;
        turned.swap(0, 1).unwrap();
        turned.reshape(&[24]).unwrap();
        assert!(turned.take(0, 0, 12, 1).is_none());
    }

    #[test]
    fn large_blocks_are_read_at_once_and_none_is_larger_than_need_be() {
        let rows = View::of(&[64, 1 << 15]);
        assert_eq!(rows.walk().block(), 1 << 15);
        let mut experts = View::of(&[4, 256, 512]);
        experts.swap(1, 2).unwrap();
        assert_eq!(experts.walk().block(), 256 * 512);
        let mut bias = View::of(&[8, 64]);
        bias.take(1, 0, 64, 2).unwrap();
        assert_eq!(walked(&bias, 512)[..3], [0., 2., 4.]);
    }

    #[test]
    fn runs_are_found_where_elements_lie_together() {
        let mut view = View::of(&[2, 6, 64]);
        view.take(1, 1, 6, 2).unwrap();
        let runs = view.walk().runs(32).unwrap();
        let starts: Vec<u64> = (0..12).map(|i| runs.start(i)).collect();
        let rows = [64, 192, 320, 448, 576, 704];
        assert_eq!(starts, rows.iter().flat_map(|r| [*r, r + 32]).collect::<Vec<_>>());
        let whole = View::of(&[4, 32]).walk().runs(32).unwrap();
        assert_eq!((0..4).map(|i| whole.start(i)).collect::<Vec<_>>(), [0, 32, 64, 96]);
        view.swap(1, 2).unwrap();
        assert_eq!(view.walk().runs(32), None);
        assert_eq!(View::of(&[3, 48]).walk().runs(32), None);
    }
}
