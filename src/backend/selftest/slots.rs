//! The look-up of chosen experts' granules.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::slots::{HOMES, Lookup, Post, Resolve};
use crate::backend::gpu::{DeviceBuffer, Pinned, PinnedKind};
use crate::backend::ops::{NO_EXPERT, Route};

const PASS: u32 = 9;
/// The earlier value of `go`.
const BEFORE: u32 = 8;

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let resolve = Resolve::load(&bench.gpu)?;
    report.row("resolve_slots", "", |row| {
        // [pairs, experts, granules]
        for shape in bench.shapes(&[[1, 1, 1], [33, 60, 2]], &[[8, 12, 3]], &[[4096, 512, 8]]) {
            for devices in [1, 2, 4] {
                compare(bench, &resolve, row, &Case { shape, devices, is_whole: false })?;
            }
            compare(bench, &resolve, row, &Case { shape, devices: 1, is_whole: true })?;
        }
        Ok(())
    });
    report.row("resolve_slots", "posted", |row| {
        // [words of the route, values of a row]
        for shape in bench.shapes(&[[48, 32], [16, 0]], &[[1, 257]], &[[512, 7168]]) {
            post(bench, &resolve, row, shape)?;
        }
        Ok(())
    });
    report.row("place_rows", "", |row| {
        // [pairs, devices, n_embd]
        for shape in bench.shapes(&[[1, 2, 1], [8, 3, 33]], &[[300, 4, 257]], &[[10, 8, 7168]]) {
            place(bench, &resolve, row, shape)?;
        }
        Ok(())
    });
    report.row("limit_experts", "", |row| {
        // (experts, tokens, capacity)
        let (odd, large) = ([(1, 1, 1), (8, 200, 25), (5, 64, 0)], [(128, 2048, 9)]);
        for (n, tokens, capacity) in bench.shapes(&[(4, 50, 3), (3, 7, 100)], &odd, &large) {
            let mut random = Random(n as u64);
            let chosen: Vec<u32> = (0..tokens).map(|_| random.below(n) as u32).collect();
            let up = bench.up_u32(&chosen)?;
            resolve.limit(&bench.stream, up.all(), n, capacity)?;
            let mut route = Route::default();
            (route.k, route.n_experts, route.chosen) = (1, n, chosen);
            route.limit(&(0..tokens), capacity);
            let shape = format!("{tokens} of {n}, {capacity} each");
            row.words(shape, &bench.down_u32(&up)?, &route.chosen);
        }
        Ok(())
    });
    Ok(())
}

/// A table of experts on one device or on several.
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
}

/// A look-up on one device, or on the first of several.
fn compare(bench: &Bench, resolve: &Resolve, row: &mut Row, case: &Case) -> Result<()> {
    let [pairs, n_experts, n_granules] = case.shape;
    let mut random = Random(pairs as u64);
    let table = case.table(&mut random);
    let choose = |random: &mut Random| match random.below(7) {
        0 => NO_EXPERT,
        _ => random.below(n_experts) as u32,
    };
    let chosen: Vec<u32> = (0..pairs).map(|_| choose(&mut random)).collect();
    let places = |expert: &u32| -> Option<&[u64]> {
        table.get(*expert as usize * n_granules..)?.get(..n_granules)
    };
    let is_here = |places: &&[u64]| places.iter().all(|place| *place >= HOMES);
    let none = vec![0; n_granules];
    let of = |expert| places(expert).filter(is_here).unwrap_or(&none).to_vec();
    let expected: Vec<u64> = chosen.iter().flat_map(of).collect();
    let home = |expert| places(expert).map_or(0, |p| if p[0] < HOMES { p[0] as u32 } else { 0 });
    let homes: Vec<u32> = chosen.iter().map(home).collect();
    let lacks = |expert: &&u32| places(expert).is_some_and(|places| places.contains(&0));
    let n_missing = chosen.iter().filter(lacks).count() as u32;

    let (chosen, table_up) = (bench.up_u32(&chosen)?, bench.up_u64(&table)?);
    let granules = bench.empty(8 * pairs * n_granules)?;
    let homes_up = (case.devices > 1).then(|| bench.empty(4 * pairs)).transpose()?;
    let [missing, pass, go] = [77, PASS, BEFORE].map(|word| bench.up_u32(&[word]));
    let (missing, pass, go) = (missing?, pass?, go?);
    let lookup = Lookup {
        chosen: chosen.all(),
        table: table_up.all(),
        n_experts,
        n_granules,
        granules: granules.all(),
        homes: homes_up.as_ref().map(DeviceBuffer::all),
        missing: missing.all(),
        pass: pass.all(),
        go: go.all(),
    };
    // SAFETY: the ids are below the number of experts, or none.
    unsafe { resolve.launch(&bench.stream, &lookup, None) }?;
    let shape = format!("{pairs} of {n_experts}×{n_granules}, {} devices", case.devices);
    row.words(&shape, &bench.down_u64(&granules)?, &expected);
    let words = [bench.down_u32(&missing)?, bench.down_u32(&go)?].concat();
    let go = if n_missing == 0 { PASS } else { BEFORE };
    row.words(format!("{shape}: missing, go"), &words, &[n_missing, go]);
    if let Some(homes_up) = homes_up {
        row.words(format!("{shape}: homes"), &bench.down_u32(&homes_up)?, &homes);
    }
    Ok(())
}

/// The host gets a route, two rows and a narrow one without a copy, of a look-up that misses its
/// only pair.
fn post(bench: &Bench, resolve: &Resolve, row: &mut Row, [words, n]: [usize; 2]) -> Result<()> {
    let mut random = Random(n as u64);
    let mut route: Vec<u32> = (0..words).map(|_| random.next() as u32).collect();
    let rows: Vec<u32> = (0..2 * n + n / 2).map(|_| random.next() as u32).collect();
    let (route_up, rows_up) = (bench.up_u32(&route)?, bench.up_u32(&[&rows[..], &[0]].concat())?);
    let [h, x] = [0..4 * n, 4 * n..8 * n].map(|range| rows_up.slice(range));
    let latent = rows_up.slice(8 * n..4 * rows.len());
    let at = [words, words + n, words + 2 * n].map(|at| 4 * at);
    let end = 4 * (words + rows.len());
    let down = Pinned::new(&bench.gpu, end, PinnedKind::Mapped)?;
    let (to, missing) = (down.slice(0..end), words - 1);
    let (rows_down, latent) = ((n > 0).then_some([h, x]), (n > 1).then_some(latent));
    let post = Post { route: route_up.all(), rows: rows_down, latent, to, at };
    let (chosen, table, granules) = (bench.up_u32(&[0])?, bench.up_u64(&[0])?, bench.empty(8)?);
    let (pass, go) = (bench.up_u32(&[PASS])?, bench.up_u32(&[BEFORE])?);
    let lookup = Lookup {
        chosen: chosen.all(),
        table: table.all(),
        n_experts: 1,
        n_granules: 1,
        granules: granules.all(),
        homes: None,
        missing: route_up.slice(4 * missing..4 * words),
        pass: pass.all(),
        go: go.all(),
    };
    // SAFETY: the id is below the number of experts.
    unsafe { resolve.launch(&bench.stream, &lookup, Some(&post)) }?;
    bench.stream.synchronize()?;
    // SAFETY: the kernel is done, and nothing else writes there.
    let bytes = unsafe { down.bytes(0..end) };
    let got: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    route[missing] = 1;
    row.words(format!("{words} words, 2 rows of {n}"), &got, &[route, rows].concat());
    row.words(format!("{words} words: go"), &bench.down_u32(&go)?, &[BEFORE]);
    Ok(())
}

/// Rows of several devices are copied to their pairs.
fn place(
    bench: &Bench,
    resolve: &Resolve,
    row: &mut Row,
    [pairs, devices, n_embd]: [usize; 3],
) -> Result<()> {
    let mut random = Random(n_embd as u64);
    let homes: Vec<u32> = (0..pairs).map(|_| random.below(devices) as u32).collect();
    let n = pairs * n_embd;
    let (rows, own) = (random.floats((devices - 1) * n), random.floats(n));
    let expected = |i: usize| match homes[i / n_embd] as usize {
        0 => own[i],
        home => rows[(home - 1) * n + i],
    };
    let expected: Vec<f32> = (0..n).map(expected).collect();
    let (homes, rows, partial) = (bench.up_u32(&homes)?, bench.up_f32(&rows)?, bench.up_f32(&own)?);
    // SAFETY: `homes` are below the number of devices.
    unsafe {
        resolve.place_rows(&bench.stream, homes.all(), rows.all(), n_embd, partial.all())?;
    }
    row.bits(format!("{pairs} of {devices} devices"), &bench.down_f32(&partial)?, &expected);
    Ok(())
}
