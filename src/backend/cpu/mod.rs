//! The CPU backend: the specification of every operation. An operation splits its work over the
//! pool's threads such that no split, thread count or order of pieces can change a bit of it.

pub mod acts;
pub mod attention;
pub mod compress;
pub mod delta;
pub mod expert;
mod grid;
pub mod linear;
mod low_rank;
pub mod norm;
pub mod pool;
pub mod rope;
pub mod router;
pub mod scan;
pub mod streams;

use std::cell::{RefCell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::{self, Kernels, Out, Scratch};
use pool::Pool;

/// One thread's scratch memory; grows to the largest operation and stays.
#[derive(Default)]
pub struct ThreadScratch {
    pub kernels: Scratch,
    pub floats: Vec<f32>,
    /// Numbers of tokens.
    pub ids: Vec<u32>,
}

impl ThreadScratch {
    /// `n` floats of any value, with the kernels' scratch beside them.
    pub fn split(&mut self, n: usize) -> (&mut Scratch, &mut [f32]) {
        if self.floats.len() < n {
            self.floats.resize(n, 0.0);
        }
        (&mut self.kernels, &mut self.floats[..n])
    }
}

/// A cache line of its own, so that threads do not share one.
#[repr(align(128))]
struct PerThread(UnsafeCell<ThreadScratch>);

// SAFETY: `Cpu::chunks` hands each element to one thread at a time: the pool runs one region at a
// time, and within one each thread index belongs to one thread.
unsafe impl Sync for PerThread {}

/// Threads, kernels and scratch memory. Not `Sync`: one thread owns it, so operations take no
/// lock.
pub struct Cpu {
    pool: Pool,
    pub kernels: &'static Kernels,
    scratch: Vec<PerThread>,
    /// Attention's partial results, which one thread writes and another reads.
    partials: RefCell<Vec<f32>>,
    /// Inputs of products are kept as f32 too: adapters read them.
    pub keeps_inputs: bool,
}

impl Cpu {
    pub fn new(n_threads: usize) -> Cpu {
        let scratch = (0..n_threads).map(|_| PerThread(UnsafeCell::default())).collect();
        let pool = Pool::new(n_threads);
        Cpu {
            pool,
            kernels: simd::kernels(),
            scratch,
            partials: RefCell::default(),
            keeps_inputs: false,
        }
    }

    pub fn n_threads(&self) -> usize {
        self.pool.n_threads()
    }

    /// Runs `f` over `0..n` in pieces of `chunk`, each by whichever thread is free.
    pub fn chunks(
        &self,
        n: usize,
        chunk: usize,
        f: &(dyn Fn(&mut ThreadScratch, Range<usize>) + Sync),
    ) {
        let scratch = &self.scratch[..];
        self.pool.for_each_chunk(n, chunk, &|thread, range| {
            // SAFETY: see `PerThread`.
            f(unsafe { &mut *scratch[thread].0.get() }, range)
        });
    }

    /// Rows a piece for an operation of `n` rows with `work` multiply-adds in all: several pieces
    /// a thread, so that a thread that is held up does not hold up the others, in multiples of
    /// what the kernels take at once; one piece when a second thread would cost more than it
    /// saves.
    pub fn row_chunk(&self, n: usize, work: usize) -> usize {
        if work <= SERIAL_WORK {
            return n.max(1);
        }
        n.div_ceil(self.n_threads() * 4).next_multiple_of(16).min(n.max(1))
    }

    /// `row_chunk` for light work on `n` rows of `dim` elements, where rows are tokens.
    pub fn token_chunk(&self, n: usize, dim: usize) -> usize {
        if n * dim <= SERIAL_WORK { n.max(1) } else { n.div_ceil(self.n_threads() * 4) }
    }
}

/// Elements or multiply-adds that one thread does in the microsecond or two that it takes to wake
/// another and wait for it.
const SERIAL_WORK: usize = 16 * 1024;

/// Bytes of which a cache has no more than a part when the last of them are written.
const CACHES: usize = 16 << 20;

/// A buffer that several threads write in places that do not overlap.
pub struct SharedOut<'a, T = f32> {
    ptr: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is to a borrowed slice; every write goes through `slice`, whose contract is
// that places of different threads do not overlap.
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    pub fn new(out: &'a mut [T]) -> Self {
        SharedOut { ptr: out.as_mut_ptr(), len: out.len(), owner: PhantomData }
    }

    /// # Safety
    /// No other thread uses a part of this range at the same time.
    #[allow(clippy::mut_from_ref)] // that is the point of it; the contract replaces the checker
    pub unsafe fn slice(&self, start: usize, n: usize) -> &mut [T] {
        assert!(start + n <= self.len);
        // SAFETY: in range by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), n) }
    }

    /// A pointer to `start`, of which the caller uses only places below `self.len` that are its
    /// own.
    pub fn at(&self, start: usize) -> *mut T {
        assert!(start <= self.len);
        // SAFETY: within the buffer or one past its end.
        unsafe { self.ptr.add(start) }
    }
}

impl SharedOut<'_> {
    /// Output for kernels that write rows at a stride, from `start` on. No row is read before all
    /// are written. The caller uses only its own places below `self.len`.
    pub fn rows(&self, start: usize, stride: usize) -> Out {
        let past_caches = size_of::<f32>() * self.len >= CACHES;
        Out { at: self.at(start), stride, past_caches }
    }
}
