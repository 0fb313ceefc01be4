//! The arguments of a launch, by value and in order.

use super::DeviceSlice;

/// Words that arguments are kept in: each begins in one of its own.
const WORDS: usize = 64;
const ARGS: usize = 32;

/// Built anew for each launch, on the stack.
#[derive(Clone)]
pub struct Args {
    words: [u64; WORDS],
    n_words: usize,
    /// (first word, bytes)
    places: [(u8, u8); ARGS],
    n: usize,
}

impl Default for Args {
    fn default() -> Self {
        Self::new()
    }
}

impl Args {
    pub fn new() -> Args {
        Args { words: [0; WORDS], n_words: 0, places: [(0, 0); ARGS], n: 0 }
    }

    /// # Panics
    /// If there are more arguments than any kernel has.
    fn push(mut self, words: &[u64], bytes: usize) -> Args {
        self.words[self.n_words..][..words.len()].copy_from_slice(words);
        self.places[self.n] = (self.n_words as u8, bytes as u8);
        self.n_words += words.len();
        self.n += 1;
        self
    }

    pub fn u32(self, value: u32) -> Args {
        self.push(&[u64::from(value)], 4)
    }

    /// # Panics
    /// If it does not fit a u32: sizes that kernels count with do.
    pub fn size(self, value: usize) -> Args {
        self.u32(u32::try_from(value).expect("a size that kernels can count"))
    }

    pub fn i32(self, value: i32) -> Args {
        self.u32(value as u32)
    }

    pub fn f32(self, value: f32) -> Args {
        self.u32(value.to_bits())
    }

    pub fn u64(self, value: u64) -> Args {
        self.push(&[value], 8)
    }

    pub fn slice(self, slice: DeviceSlice) -> Args {
        self.u64(slice.address())
    }

    /// Null where there is none.
    pub fn optional(self, slice: Option<DeviceSlice>) -> Args {
        self.u64(slice.map_or(0, |slice| slice.address()))
    }

    pub fn len(&self) -> usize {
        self.n
    }

    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Where argument i lies and how many bytes it has.
    pub fn get(&self, i: usize) -> (*const u8, usize) {
        assert!(i < self.n);
        let (word, bytes) = self.places[i];
        (self.words[word as usize..].as_ptr().cast(), bytes as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_order_value_and_size() {
        let args = Args::new().u32(7).u64(1 << 40).f32(1.5).i32(-1).size(9);
        let value = |i: usize| {
            let (at, bytes) = args.get(i);
            // SAFETY: an argument lies in whole words of `args`, which lives.
            (unsafe { at.cast::<u64>().read() }, bytes)
        };
        assert_eq!(value(0), (7, 4));
        assert_eq!(value(1), (1 << 40, 8));
        assert_eq!(value(2), (0x3fc0_0000, 4));
        assert_eq!(value(3), (0xffff_ffff, 4));
        assert_eq!((value(4), args.len()), ((9, 4), 5));
    }
}
