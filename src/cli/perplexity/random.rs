//! The choice of some of a file's tasks, as llama.cpp makes it, so that scores of both are of the
//! same tasks.

/// The Mersenne Twister MT19937 (Matsumoto and Nishimura, 1998), seeded with 1.
pub struct Random {
    state: [u32; 624],
    next: usize,
}

impl Random {
    pub fn new() -> Random {
        let mut state = [1u32; 624];
        for i in 1..state.len() {
            let last = state[i - 1];
            state[i] = (last ^ last >> 30).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Random { state, next: state.len() }
    }

    pub fn next(&mut self) -> u32 {
        if self.next == self.state.len() {
            self.turn();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c_5680;
        y ^= y << 15 & 0xefc6_0000;
        y ^ y >> 18
    }

    fn turn(&mut self) {
        let n = self.state.len();
        for i in 0..n {
            let y = self.state[i] & 1 << 31 | self.state[(i + 1) % n] & !(1 << 31);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + 397) % n] ^ y >> 1 ^ odd;
        }
        self.next = 0;
    }

    /// A number below `n`, as libstdc++'s uniform distribution draws it (Lemire's method).
    pub fn below(&mut self, n: u32) -> usize {
        let mut product = u64::from(self.next()) * u64::from(n);
        if (product as u32) < n {
            let threshold = n.wrapping_neg() % n;
            while (product as u32) < threshold {
                product = u64::from(self.next()) * u64::from(n);
            }
        }
        (product >> 32) as usize
    }

    /// A number below `n`, by a product of single precision.
    pub fn scaled_below(&mut self, n: usize) -> usize {
        let share = 1.0 / (1u64 << 32) as f32 * self.next() as f32;
        ((share * n as f32) as usize).min(n - 1)
    }

    /// `n` of the items; the last one left takes the place of one that is chosen.
    pub fn choose<T>(&mut self, mut items: Vec<T>, n: usize) -> Vec<T> {
        let n = n.min(items.len());
        (0..n).map(|_| items.swap_remove(self.scaled_below(items.len()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_reference() {
        let mut random = Random::new();
        // The first of the generator that the C++ standard names, for the seed 1.
        let first: Vec<u32> = (0..5).map(|_| random.next()).collect();
        assert_eq!(first, [1791095845, 4282876139, 3093770124, 4005303368, 491263]);
        let left: Vec<u32> = (5..9995).map(|_| random.next()).collect();
        assert_eq!(left.len(), 9990);
        assert!((0..1000).all(|_| random.below(7) < 7 && random.scaled_below(3) < 3));
    }
}
