//! The look-up of chosen experts' granules.

use super::{Bench, Mirror, Random, try_map};
use crate::Result;
use crate::backend::gpu::slots::{HOMES, Lookup, Post, Resolve};
use crate::backend::gpu::{Pinned, PinnedKind};
use crate::backend::ops::{NO_EXPERT, Route};
use bytemuck::cast_slice;

const PASS: u32 = 9;
/// The earlier value of `go`.
const BEFORE: u32 = 8;

pub fn check(bench: &Bench) -> Result<()> {
    let resolve = Resolve::load(&bench.gpu)?;
    // [pairs, experts, granules]
    let shapes = bench.shapes(&[[1, 1, 1], [33, 60, 2]], &[[8, 12, 3]], &[[4096, 512, 8]]);
    bench.each("resolve_slots", "", shapes, |shape| {
        let devices = [(1, false), (2, false), (4, false), (1, true)];
        devices.into_iter().try_for_each(|(devices, is_whole)| {
            Case { shape, devices, is_whole }.compare(bench, &resolve)
        })
    });
    // [words of the route, values of a row]
    let shapes = bench.shapes(&[[48, 32], [16, 0]], &[[1, 257]], &[[512, 7168]]);
    bench.each("resolve_slots", "posted", shapes, |shape| post(bench, &resolve, shape));
    // [pairs, devices, n_embd]
    let shapes = bench.shapes(&[[1, 2, 1], [8, 3, 33]], &[[300, 4, 257]], &[[10, 8, 7168]]);
    bench.each("place_rows", "", shapes, |shape| place(bench, &resolve, shape));
    // (experts, tokens, capacity)
    let (odd, large) = ([(1, 1, 1), (8, 200, 25), (5, 64, 0)], [(128, 2048, 9)]);
    let shapes = bench.shapes(&[(4, 50, 3), (3, 7, 100)], &odd, &large);
    bench.each("limit_experts", "", shapes, |(n, tokens, capacity)| {
        let mut random = Random(n as u64);
        let chosen = (0..tokens).map(|_| random.below(n) as u32);
        let mut chosen = bench.up(chosen)?;
        resolve.limit(&bench.stream, chosen.gpu(), n, capacity)?;
        let mut route = Route { k: 1, n_experts: n, chosen: chosen.to_vec(), ..Route::default() };
        route.limit(&(0..tokens), capacity);
        chosen.host = route.chosen;
        bench.equal(format!("{tokens} of {n}, {capacity} each"), &chosen)
    });
    Ok(())
}

/// A table of experts on one device, or on the first of several.
struct Case {
    /// Pairs, experts, granules.
    shape: [usize; 3],
    devices: usize,
    is_whole: bool,
}

impl Case {
    /// Addresses; of some experts a part is missing, or everything. Experts of other devices have
    /// their device's number instead.
    fn table(&self, random: &mut Random) -> Vec<u64> {
        let [_, n_experts, n_granules] = self.shape;
        let mut table: Vec<u64> = (1..=(n_experts * n_granules) as u64).map(|i| i << 20).collect();
        for row in table.chunks_exact_mut(n_granules).filter(|_| !self.is_whole) {
            match random.below(3 + self.devices) {
                0 => row.fill(0),
                1 => row[random.below(n_granules)] = 0,
                2 | 3 => {}
                device => row.fill(device as u64 - 3),
            }
        }
        table
    }

    fn compare(&self, bench: &Bench, resolve: &Resolve) -> Result<()> {
        let [pairs, n_experts, n_granules] = self.shape;
        let mut random = Random(pairs as u64);
        let table = bench.up(self.table(&mut random))?;
        let choose = |_| match random.below(7) {
            0 => NO_EXPERT,
            _ => random.below(n_experts) as u32,
        };
        let chosen = bench.up((0..pairs).map(choose))?;
        let mut granules = bench.out(pairs * n_granules)?;
        let mut homes = bench.out(pairs)?;
        let [missing, pass, go] = try_map([77, PASS, BEFORE], |word| bench.up([word]))?;
        let lookup = Lookup {
            chosen: chosen.gpu(),
            table: table.gpu(),
            n_experts,
            n_granules,
            granules: granules.gpu(),
            homes: (self.devices > 1).then(|| homes.gpu()),
            missing: missing.gpu(),
            pass: pass.gpu(),
            go: go.gpu(),
        };
        // SAFETY: the ids are below the number of experts, or none.
        unsafe { resolve.launch(&bench.stream, &lookup, None) }?;

        let places = |expert: &u32| -> Option<&[u64]> {
            table.get(*expert as usize * n_granules..)?.get(..n_granules)
        };
        let is_here = |places: &&[u64]| places.iter().all(|place| *place >= HOMES);
        let none = vec![0; n_granules];
        let of = |expert| places(expert).filter(is_here).unwrap_or(&none).to_vec();
        granules.host = chosen.iter().flat_map(of).collect();
        let home = |p: &[u64]| if p[0] < HOMES { p[0] as u32 } else { 0 };
        homes.host = chosen.iter().map(|expert| places(expert).map_or(0, home)).collect();
        let lacks = |expert: &&u32| places(expert).is_some_and(|places| places.contains(&0));
        let n_missing = chosen.iter().filter(lacks).count() as u32;
        let shape = format!("{pairs} of {n_experts}×{n_granules}, {} devices", self.devices);
        bench.equal(&shape, &granules)?;
        let words = [bench.down(&missing.device)?, bench.down::<u32>(&go.device)?].concat();
        let go = if n_missing == 0 { PASS } else { BEFORE };
        bench.equal_values(format!("{shape}: missing, go"), &words, &[n_missing, go])?;
        if self.devices > 1 {
            bench.equal(format!("{shape}: homes"), &homes)?;
        }
        Ok(())
    }
}

/// The host gets a route, two rows and a narrow one without a copy, of a look-up that misses its
/// only pair.
fn post(bench: &Bench, resolve: &Resolve, [words, n]: [usize; 2]) -> Result<()> {
    let mut random = Random(n as u64);
    let mut numbers = |n: usize| -> Vec<u32> { (0..n).map(|_| random.next() as u32).collect() };
    let (mut route, rows) = (bench.up(numbers(words))?, numbers(2 * n + n / 2));
    // No buffer is empty.
    let rows_up = bench.up([&rows[..], &[0]].concat())?;
    let [h, x] = [0..4 * n, 4 * n..8 * n].map(|range| rows_up.device.slice(range));
    let latent = rows_up.device.slice(8 * n..4 * rows.len());
    let at = [words, words + n, words + 2 * n].map(|at| 4 * at);
    let end = 4 * (words + rows.len());
    let down = Pinned::new(&bench.gpu, end, PinnedKind::Mapped)?;
    let (to, missing) = (down.slice(0..end), words - 1);
    let (rows_down, latent) = ((n > 0).then_some([h, x]), (n > 1).then_some(latent));
    let post = Post { route: route.gpu(), rows: rows_down, latent, to, at };
    let (table, granules): (Mirror<u64>, _) = (bench.up([0])?, bench.empty(8)?);
    let [chosen, pass, go] = try_map([0, PASS, BEFORE], |word| bench.up([word]))?;
    let lookup = Lookup {
        chosen: chosen.gpu(),
        table: table.gpu(),
        n_experts: 1,
        n_granules: 1,
        granules: granules.all(),
        homes: None,
        missing: route.device.slice(4 * missing..4 * words),
        pass: pass.gpu(),
        go: go.gpu(),
    };
    // SAFETY: the id is below the number of experts.
    unsafe { resolve.launch(&bench.stream, &lookup, Some(&post)) }?;
    bench.stream.synchronize()?;
    // SAFETY: the kernel is done, and nothing else writes there.
    let got: &[u32] = cast_slice(unsafe { down.bytes(0..end) });
    route[missing] = 1;
    let expected = [route.host, rows].concat();
    bench.equal_values(format!("{words} words, 2 rows of {n}"), got, &expected)?;
    bench.equal(format!("{words} words: go"), &go)
}

/// Rows of several devices are copied to their pairs.
fn place(bench: &Bench, resolve: &Resolve, [pairs, devices, n_embd]: [usize; 3]) -> Result<()> {
    let mut random = Random(n_embd as u64);
    let homes = (0..pairs).map(|_| random.below(devices) as u32);
    let (homes, n) = (bench.up(homes)?, pairs * n_embd);
    let [rows, mut partial] = bench.floats(&mut random, [(devices - 1) * n, n])?;
    // SAFETY: `homes` are below the number of devices.
    unsafe {
        resolve.place_rows(&bench.stream, homes.gpu(), rows.gpu(), n_embd, partial.gpu())?;
    }
    for (i, value) in partial.iter_mut().enumerate() {
        if let Some(home) = (homes[i / n_embd] as usize).checked_sub(1) {
            *value = rows[home * n + i];
        }
    }
    bench.equal(format!("{pairs} of {devices} devices"), &partial)
}
