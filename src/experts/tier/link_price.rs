//! The price of prefetch: how much longer demand waits for each byte that a link brings ahead of
//! it, in parts of what a byte of demand takes. On a link whose idle time is free it is near 0. On
//! one that may move so many bytes a second and no more (a cloud volume, a control group's limit)
//! what was prefetched is missing later, and it is near 1.
//!
//! It is measured by least squares over the bursts of demand in decode: the time that a burst takes
//! as a constant, and parts for its bytes, for the bytes prefetched and for the time passed since
//! the burst before. A sample is the mean of some bursts, as a limit is kept over many
//! milliseconds: what delays one burst helps the next. The caller brings the clock. The profile
//! keeps the price: a later run would prefetch at a loss until it has measured it again. A price at
//! which little is prefetched is hardly measured again, so it is forgotten slowly, until more is.

use super::queue::Cause;

/// Bursts of a sample. On a disk held to 0.58 GB/s by a control group, with three quarters of the
/// experts in memory, single bursts gave 0.18, means of 8 gave 0.66 and of 32 gave 0.75. Without a
/// limit all gave 0.
const BURSTS: u32 = 8;

/// Samples that count, older ones less; and those that are needed.
const WINDOW: f64 = 64.0;
const LEAST: f64 = 12.0;

/// The price is that of the profile, else 0, until so many samples, with a granule of prefetch a
/// burst, tell otherwise.
const PRIOR: f64 = 1.0;

/// So many samples without prefetch forget what is known to a third.
const FORGOTTEN: f64 = 512.0;

/// A difference from the known price of so many standard errors may be chance. Of a greater one
/// the part (CLEAR · error / difference)² does not count.
const CLEAR: f64 = 1.5;

/// A sample that takes so many times the mean is one that the machine has disturbed: it counts as
/// one that takes this.
const MOST: f64 = 8.0;

/// A constant, bytes of demand and of prefetch (granules), time since the burst before (ms).
const N: usize = 4;
const DEMAND: usize = 1;
const PREFETCH: usize = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Burst {
    since: u64,
    bytes: u64,
    in_flight: usize,
}

#[derive(Clone, Debug)]
pub struct LinkPrice {
    granule_bytes: f64,
    /// The price by the profile.
    known: f64,
    burst: Option<Burst>,
    /// Since the last burst ended.
    prefetched: u64,
    last_end: Option<u64>,
    /// Sums over the bursts of the sample that is not full.
    bursts: u32,
    sum: [f64; N],
    sum_ms: f64,
    /// Sums over samples: their number, their times and the squares of these, and the products of
    /// the normal equations.
    n: f64,
    ms: f64,
    ms_squared: f64,
    squares: [[f64; N]; N],
    products: [f64; N],
    /// By the samples so far.
    price: f64,
}

impl LinkPrice {
    /// `known`: the price that an earlier run has measured, from 0 to 1.
    pub fn new(granule_bytes: u64, known: Option<f64>) -> LinkPrice {
        let known = known.unwrap_or_default();
        LinkPrice {
            granule_bytes: granule_bytes.max(1) as f64,
            known,
            burst: None,
            prefetched: 0,
            last_end: None,
            bursts: 0,
            sum: [0.0; N],
            sum_ms: 0.0,
            n: 0.0,
            ms: 0.0,
            ms_squared: 0.0,
            squares: [[0.0; N]; N],
            products: [0.0; N],
            price: known,
        }
    }

    /// The price in a profile's section. Returns the reason as a clause, for use after a colon.
    pub fn restore(bytes: &[u8]) -> Result<f64, String> {
        let bytes = bytes.try_into().map_err(|_| format!("it has {} bytes", bytes.len()))?;
        let price = f64::from_le_bytes(bytes);
        let is_price = (0.0..=1.0).contains(&price);
        is_price.then_some(price).ok_or_else(|| format!("{price} is not between 0 and 1"))
    }

    /// Writes the section that `decode` reads: little-endian. `None` if nothing is known.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let is_known = self.n >= LEAST || self.known > 0.0;
        is_known.then(|| self.price.to_le_bytes().to_vec())
    }

    /// A read for decode has started at `now`, ns.
    pub fn started(&mut self, now: u64, cause: Cause, bytes: u64) {
        match cause {
            Cause::Prefetch => self.prefetched += bytes,
            Cause::Demand => {
                let burst = self.burst.get_or_insert(Burst { since: now, ..Burst::default() });
                burst.bytes += bytes;
                burst.in_flight += 1;
            }
        }
    }

    /// A read of demand has ended; `is_last`: no demand is queued.
    pub fn ended(&mut self, now: u64, is_last: bool) {
        let Some(burst) = &mut self.burst else { return };
        burst.in_flight = burst.in_flight.saturating_sub(1);
        if burst.in_flight > 0 || !is_last {
            return;
        }
        let Burst { since, bytes, .. } = std::mem::take(burst);
        self.burst = None;
        let prefetched = std::mem::take(&mut self.prefetched);
        let Some(before) = self.last_end.replace(now) else { return };
        let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
        let granules = |bytes: u64| bytes as f64 / self.granule_bytes;
        let x = [1.0, granules(bytes), granules(prefetched), ms(before, since)];
        self.sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        self.sum_ms += ms(since, now);
        self.bursts += 1;
        if self.bursts == BURSTS {
            self.bursts = 0;
            let mean = |sum: f64| sum / f64::from(BURSTS);
            let x = std::mem::take(&mut self.sum).map(mean);
            let took = mean(std::mem::take(&mut self.sum_ms));
            self.add(x, took);
        }
    }

    /// Forgets the burst that is under way: a prompt has come between.
    pub fn interrupt(&mut self) {
        (self.burst, self.prefetched, self.last_end) = (None, 0, None);
    }

    fn add(&mut self, x: [f64; N], took: f64) {
        let keep = 1.0 - 1.0 / WINDOW;
        let took = if self.n > 0.0 { took.min(MOST * self.ms / self.n) } else { took };
        self.n = keep * self.n + 1.0;
        self.ms = keep * self.ms + took;
        self.ms_squared = keep * self.ms_squared + took * took;
        for ((row, product), a) in self.squares.iter_mut().zip(&mut self.products).zip(x) {
            row.iter_mut().zip(x).for_each(|(sum, b)| *sum = keep * *sum + a * b);
            *product = keep * *product + a * took;
        }
        let unmeasured = PRIOR / (PRIOR + self.squares[PREFETCH][PREFETCH]);
        self.known *= 1.0 - unmeasured / FORGOTTEN;
        if self.n >= LEAST {
            self.price = self.fit();
        }
    }

    /// From 0 to 1; that of the profile, else 0, while too little is measured.
    pub fn price(&self) -> f64 {
        self.price
    }

    /// The price by least squares. A byte of prefetch counts as the part of a byte of demand that
    /// is known, so that what is found is the difference to it.
    fn fit(&self) -> f64 {
        let (mut squares, mut products) = (self.squares, self.products);
        products[DEMAND] += self.known * products[PREFETCH];
        for i in 0..N {
            squares[DEMAND][i] += self.known * squares[PREFETCH][i];
        }
        for row in &mut squares {
            row[DEMAND] += self.known * row[PREFETCH];
        }
        for (i, row) in squares.iter_mut().enumerate() {
            row[i] += if i == PREFETCH { PRIOR } else { 1e-6 * self.n };
        }
        let per = solve(squares, products);
        let mut only_prefetch = [0.0; N];
        only_prefetch[PREFETCH] = 1.0;
        let explained: f64 = per.iter().zip(products).map(|(per, product)| per * product).sum();
        let variance = (self.ms_squared - explained).max(0.0) / self.n;
        let error = (variance * solve(squares, only_prefetch)[PREFETCH]).max(0.0).sqrt();
        let chance = (CLEAR * error / per[PREFETCH]).powi(2).min(1.0);
        let price = self.known + (1.0 - chance) * per[PREFETCH] / per[DEMAND];
        if price.is_finite() && per[DEMAND] > 0.0 { price.clamp(0.0, 1.0) } else { self.known }
    }
}

/// x of a · x = b, `a` positive definite.
fn solve(mut a: [[f64; N]; N], mut b: [f64; N]) -> [f64; N] {
    for i in 0..N {
        let (pivot, of_pivot) = (a[i], b[i]);
        for row in i + 1..N {
            let factor = a[row][i] / pivot[i];
            a[row].iter_mut().zip(pivot).for_each(|(value, above)| *value -= factor * above);
            b[row] -= factor * of_pivot;
        }
    }
    for i in (0..N).rev() {
        let known: f64 = (i + 1..N).map(|j| a[i][j] * b[j]).sum();
        b[i] = (b[i] - known) / a[i][i];
    }
    b
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 1 << 20;

    /// Numbers from 0 to n − 1.
    struct Draw(u64);

    impl Draw {
        fn below(&mut self, n: u64) -> u64 {
            self.0 += 1;
            crate::policy::mix(self.0) % n
        }
    }

    /// Moves a byte a nanosecond while there is credit, which grows by `budget` a nanosecond.
    struct Link {
        budget: f64,
        credit: f64,
        at: f64,
    }

    impl Link {
        /// The end of a read that comes at `now`.
        fn read(&mut self, now: u64, bytes: u64) -> u64 {
            const PIECE: f64 = 65536.0;
            let mut now = (now as f64).max(self.at);
            for _ in 0..bytes / PIECE as u64 {
                self.credit = (self.credit + self.budget * (now - self.at)).min(64.0 * PIECE);
                let wait = ((PIECE - self.credit) / self.budget).max(0.0);
                self.credit += self.budget * wait - PIECE;
                self.at = now + wait;
                now += wait + PIECE;
            }
            now as u64
        }
    }

    /// The price after bursts of demand, with computation and prefetch before each.
    fn measured(budget: f64, n: usize, known: Option<f64>) -> f64 {
        let (mut price, mut draw) = (LinkPrice::new(GRANULE, known), Draw(7));
        let (mut link, mut now) = (Link { budget, credit: 0.0, at: 0.0 }, 0);
        for _ in 0..n {
            let (compute, prefetch) = ((2 + draw.below(3)) * GRANULE, draw.below(3) * GRANULE);
            price.started(now, Cause::Prefetch, prefetch);
            link.read(now, prefetch);
            now += compute;
            let demand = (1 + draw.below(6)) * GRANULE;
            price.started(now, Cause::Demand, demand);
            now = link.read(now, demand);
            price.ended(now, true);
        }
        price.price()
    }

    #[test]
    fn idle_time_is_free_unless_the_rate_is_limited() {
        assert_eq!(measured(0.3, 80, None), 0.0, "not known yet");
        for known in [None, Some(0.0), Some(0.5), Some(1.0)] {
            let (free, limited) = (measured(1e3, 800, known), measured(0.3, 800, known));
            // A price that no longer holds has most of its weight lost within a run.
            let most = if known == Some(1.0) { 0.2 } else { 0.1 };
            assert!(free < most && limited > 0.8, "{known:?}: {free}, {limited}");
        }
    }

    #[test]
    fn a_known_price_holds_from_the_start_and_is_kept() {
        assert_eq!(measured(1e3, 80, Some(0.75)), 0.75);
        let saved = LinkPrice::new(GRANULE, Some(0.75)).encode().unwrap();
        assert_eq!(LinkPrice::restore(&saved), Ok(0.75));
        assert_eq!(LinkPrice::new(GRANULE, None).encode(), None);
        for (bad, said) in [(1.5, "1.5 is not"), (-0.5, "-0.5 is not"), (f64::NAN, "NaN is not")] {
            assert!(LinkPrice::restore(&bad.to_le_bytes()).unwrap_err().starts_with(said));
        }
        assert_eq!(LinkPrice::restore(&saved[1..]).unwrap_err(), "it has 7 bytes");
    }

    /// A price at which nothing is prefetched tells nothing about itself.
    #[test]
    fn a_price_is_forgotten_that_is_not_measured_again() {
        let (mut price, mut draw) = (LinkPrice::new(GRANULE, Some(1.0)), Draw(3));
        let mut found = Vec::new();
        for i in 0..2000 {
            let [demand, gap, noise] = [6, 4, 100].map(|n| draw.below(n) as f64);
            price.add([1.0, demand, 0.0, gap], 0.3 + 2.0 * demand + noise / 100.0);
            found.extend((i % 500 == 50).then(|| price.price()));
        }
        assert!(found[0] > 0.9 && found.is_sorted_by(|a, b| a > b) && found[3] < 0.1, "{found:?}");
    }

    /// A machine that others use makes some samples take three times as long.
    #[test]
    fn chance_makes_no_price() {
        let n_dear = (0..200).filter(|seed| {
            let (mut price, mut draw) = (LinkPrice::new(GRANULE, None), Draw(1000 * seed));
            for _ in 0..300 {
                let [demand, prefetch, gap, noise] = [60, 8, 40, 100].map(|n| draw.below(n) as f64);
                let busy = if draw.below(8) == 0 { 3.0 } else { 1.0 };
                let took = busy * (0.3 + 0.2 * demand) + noise / 50.0;
                price.add([1.0, demand / 10.0, prefetch / 10.0, gap / 10.0], took);
            }
            price.price() > 0.5
        });
        let n_dear = n_dear.count();
        assert!(n_dear <= 2, "{n_dear} of 200");
    }

    #[test]
    fn least_squares_find_what_made_the_times() {
        for (per_prefetch, expected) in [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0), (3.0, 1.0)] {
            let (mut price, mut draw) = (LinkPrice::new(GRANULE, None), Draw(1));
            for _ in 0..800 {
                let [demand, prefetch, gap, noise] = [6, 3, 4, 100].map(|n| draw.below(n) as f64);
                let took = 0.3 + 2.0 * demand + per_prefetch * prefetch - 0.2 * gap + noise / 100.0;
                price.add([1.0, demand, prefetch, gap], took.max(0.0));
            }
            let found = price.price();
            assert!((found - expected).abs() < 0.05, "{found} in place of {expected}");
        }
    }

    #[test]
    fn a_prompt_between_ends_what_is_measured() {
        let mut price = LinkPrice::new(GRANULE, None);
        for _ in 0..200 {
            price.started(0, Cause::Demand, GRANULE);
            price.interrupt();
            price.ended(1, true);
        }
        assert_eq!((price.n, price.price()), (0.0, 0.0));
    }
}
