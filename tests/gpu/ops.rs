//! The small operations between a layer's products, on the emulated device, against what the model
//! does on the CPU: to the bit.

use crate::support::Bench;
use moeba::backend::cpu::Cpu;
use moeba::backend::gpu::rows::{Columns, Rows};
use moeba::backend::gpu::slots::{HOMES, Lookup, Resolve};
use moeba::backend::gpu::{DeviceBuffer, Event, Stream};
use moeba::backend::ops::{NO_EXPERT, Route};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 33
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        let unit = |bits: u64| bits as f32 / (1u64 << 30) as f32 - 1.0;
        (0..n).map(|_| unit(self.next()) * [1.0, 3.0, 0.01, 40.0][self.below(4)]).collect()
    }
}

fn same(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.to_bits(), expected.to_bits(), "{what}: {got:e} for {expected:e} at {i}");
    }
}

/// Numbers of several blocks, of one, and of a part of one.
const SIZES: &[usize] = &[1, 31, 256, 777, 2048];

/// Runs `op` on the device on a copy of `x`.
fn changed(bench: &Bench, x: &[f32], op: impl Fn(&Rows, &Stream, &DeviceBuffer)) -> Vec<f32> {
    let (rows, x) = (Rows::load(&bench.gpu).unwrap(), bench.up_f32(x));
    op(&rows, &bench.stream, &x);
    bench.down_f32(&x)
}

#[test]
fn numbers_change_as_on_the_cpu() {
    let cpu = Cpu::new(1);
    for (seed, n) in SIZES.iter().enumerate() {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        let (x, y) = (random.floats(*n), random.floats(*n));
        let y_up = bench.up_f32(&y);
        let each = |f: &dyn Fn(f32, f32) -> f32| {
            x.iter().zip(&y).map(|(x, y)| f(*x, *y)).collect::<Vec<f32>>()
        };

        let mut gates = y.clone();
        cpu.kernels.sigmoid(&mut gates);
        let expected: Vec<f32> = x.iter().zip(&gates).map(|(x, gate)| x * gate).collect();
        let got = changed(&bench, &x, |rows, stream, x| {
            rows.mul_sigmoid(stream, x.all(), y_up.all()).unwrap();
        });
        same(&got, &expected, "mul_sigmoid");

        let mut expected = x.clone();
        cpu.add(&mut expected, &y);
        let got = changed(&bench, &x, |rows, stream, x| {
            rows.add(stream, x.all(), y_up.all()).unwrap();
        });
        same(&got, &expected, "add");

        let got = changed(&bench, &x, |rows, stream, x| {
            rows.scale(stream, x.all(), 45.254834).unwrap();
        });
        same(&got, &each(&|x, _| x * 45.254834), "scale");
        let got = changed(&bench, &x, |rows, stream, x| {
            rows.divide(stream, x.all(), 1.7).unwrap();
        });
        same(&got, &each(&|x, _| x / 1.7), "divide");
        let got = changed(&bench, &x, |rows, stream, x| {
            rows.set(stream, x.all(), 1.0).unwrap();
        });
        same(&got, &vec![1.0; *n], "set");
    }
}

#[test]
fn heads_split_and_parts_join() {
    for (seed, (rows, dim)) in [(1, 4), (6, 7), (40, 128)].into_iter().enumerate() {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        let kernels = Rows::load(&bench.gpu).unwrap();
        let copy = |from: Columns, to: Columns, cols| {
            kernels.copy_columns(&bench.stream, from, to, cols, rows).unwrap();
        };
        // [q, gate] a head.
        let both = random.floats(rows * 2 * dim);
        let both_up = bench.up_f32(&both);
        let halves = [0, 1].map(|half| {
            let to = bench.empty(4 * rows * dim);
            let from = Columns::new(both_up.all(), 2 * dim, half * dim);
            copy(from, Columns::new(to.all(), dim, 0), dim);
            to
        });
        for (half, got) in halves.iter().enumerate() {
            let expected = both.chunks_exact(2 * dim).flat_map(|head| &head[half * dim..][..dim]);
            same(&bench.down_f32(got), &expected.copied().collect::<Vec<f32>>(), "a half");
        }
        // Two parts of rows, the second from behind other columns.
        let (rank, skip) = (3, 1);
        let absorbed = random.floats(rows * rank);
        let absorbed_up = bench.up_f32(&absorbed);
        let width = rank + dim - skip;
        let joined = bench.empty(4 * rows * width);
        let to = |first| Columns::new(joined.all(), width, first);
        copy(Columns::new(absorbed_up.all(), rank, 0), to(0), rank);
        copy(Columns::new(halves[1].all(), dim, skip), to(rank), dim - skip);
        let mut expected = Vec::new();
        for (a, head) in absorbed.chunks_exact(rank).zip(both.chunks_exact(2 * dim)) {
            expected.extend_from_slice(a);
            expected.extend_from_slice(&head[dim + skip..]);
        }
        same(&bench.down_f32(&joined), &expected, "joined");
    }
}

#[test]
#[should_panic(expected = "columns of a row")]
fn columns_that_are_none_are_refused() {
    let bench = Bench::new(0);
    let x = bench.up_f32(&[0.0; 8]);
    let (from, to) = (Columns::new(x.all(), 4, 2), Columns::new(x.all(), 4, 0));
    let _ = Rows::load(&bench.gpu).unwrap().copy_columns(&bench.stream, from, to, 3, 1);
}

fn up_u64(bench: &Bench, x: &[u64]) -> DeviceBuffer {
    bench.up(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}

fn down_u32(bench: &Bench, buffer: &DeviceBuffer) -> Vec<u32> {
    let bytes = bench.down(buffer);
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// (granules, missing, go) of the device's look-up where `pass` is 9 and `go` was 8.
fn looked_up(bench: &Bench, chosen: &[u32], table: &[u64], n: usize) -> (Vec<u64>, u32, u32) {
    look_up(bench, chosen, table, n, None)
}

fn look_up(
    bench: &Bench,
    chosen: &[u32],
    table: &[u64],
    n: usize,
    homes: Option<&DeviceBuffer>,
) -> (Vec<u64>, u32, u32) {
    let (chosen_up, table_up) = (bench.up_u32(chosen), up_u64(bench, table));
    let granules = bench.empty(8 * chosen.len() * n);
    let [missing, pass, go] = [77, 9, 8].map(|word| bench.up_u32(&[word]));
    let lookup = Lookup {
        chosen: chosen_up.all(),
        table: table_up.all(),
        n_experts: table.len() / n,
        n_granules: n,
        granules: granules.all(),
        homes: homes.map(DeviceBuffer::all),
        missing: missing.all(),
        pass: pass.all(),
        go: go.all(),
    };
    // SAFETY: the ids are below the number of experts.
    unsafe { Resolve::load(&bench.gpu).unwrap().launch(&bench.stream, &lookup) }.unwrap();
    let granules = bench.down(&granules);
    let granules = granules.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    (granules, down_u32(bench, &missing)[0], down_u32(bench, &go)[0])
}

#[test]
fn granules_are_found_where_an_expert_is_whole() {
    for (seed, (pairs, n_experts, n_granules)) in
        [(1, 1, 1), (8, 4, 3), (33, 60, 2), (64 * 64, 512, 8)].into_iter().enumerate()
    {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        // Of some experts there is everything, of some a part, of some nothing.
        let mut table: Vec<u64> = (1..=(n_experts * n_granules) as u64).map(|i| i << 20).collect();
        for row in table.chunks_exact_mut(n_granules) {
            match random.below(4) {
                0 => row.fill(0),
                1 => row[random.below(n_granules)] = 0,
                _ => {}
            }
        }
        let chosen: Vec<u32> = (0..pairs)
            .map(|_| if random.below(7) == 0 { NO_EXPERT } else { random.below(n_experts) as u32 })
            .collect();
        let row = |expert: u32| &table[expert as usize * n_granules..][..n_granules];
        let mut expected = Vec::new();
        let mut missing = 0;
        for expert in &chosen {
            let whole = *expert != NO_EXPERT && row(*expert).iter().all(|g| *g != 0);
            match whole {
                true => expected.extend_from_slice(row(*expert)),
                false => expected.extend(std::iter::repeat_n(0, n_granules)),
            }
            missing += u32::from(*expert != NO_EXPERT && !whole);
        }
        let got = looked_up(&bench, &chosen, &table, n_granules);
        assert_eq!(got, (expected, missing, if missing == 0 { 9 } else { 8 }), "{pairs} pairs");
        // With all there, the pass goes on by itself.
        let whole: Vec<u64> = (1..=table.len() as u64).collect();
        let (granules, missing, go) = looked_up(&bench, &chosen, &whole, n_granules);
        assert_eq!((missing, go), (0, 9));
        assert_eq!(granules[0] == 0, chosen[0] == NO_EXPERT);
    }
}

/// Experts of other devices are not missing, and their numbers say whose rows to take.
#[test]
fn rows_of_other_devices_go_where_their_pairs_are() {
    for (seed, (pairs, n_experts, n_granules, devices, n_embd)) in
        [(1, 1, 1, 2, 1), (8, 12, 3, 3, 33), (300, 60, 2, 4, 257)].into_iter().enumerate()
    {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        // Here, nowhere, or on one of the other devices.
        let mut table = vec![0u64; n_experts * n_granules];
        for (expert, row) in table.chunks_exact_mut(n_granules).enumerate() {
            match random.below(devices + 1) {
                0 => row.fill((1 + expert as u64) << 20),
                1 => {}
                device => row.fill(device as u64 - 1),
            }
        }
        let chosen: Vec<u32> = (0..pairs)
            .map(|_| if random.below(7) == 0 { NO_EXPERT } else { random.below(n_experts) as u32 })
            .collect();
        let first = |expert: &u32| table.get(*expert as usize * n_granules).copied();
        let home = |expert: &u32| first(expert).filter(|at| *at < HOMES).unwrap_or(0) as u32;
        let homes: Vec<u32> = chosen.iter().map(home).collect();
        let places = chosen.iter().map(|e| first(e).filter(|at| *at >= HOMES).unwrap_or(0));
        let granules: Vec<u64> = places.flat_map(|at| vec![at; n_granules]).collect();
        let missing = chosen.iter().filter(|e| first(e) == Some(0)).count() as u32;

        let homes_up = bench.empty(4 * pairs);
        let got = look_up(&bench, &chosen, &table, n_granules, Some(&homes_up));
        assert_eq!(got, (granules, missing, if missing == 0 { 9 } else { 8 }));
        assert_eq!(down_u32(&bench, &homes_up), homes);

        let n = pairs * n_embd;
        let (rows, own) = (random.floats((devices - 1) * n), random.floats(n));
        let (rows_up, partial) = (bench.up_f32(&rows), bench.up_f32(&own));
        let resolve = Resolve::load(&bench.gpu).unwrap();
        // SAFETY: `homes` are 0 or below `devices`.
        unsafe {
            let (homes, rows) = (homes_up.all(), rows_up.all());
            resolve.place_rows(&bench.stream, homes, rows, n_embd, partial.all()).unwrap();
        }
        let expected: Vec<f32> = (0..n)
            .map(|i| match homes[i / n_embd] as usize {
                0 => own[i],
                home => rows[(home - 1) * n + i],
            })
            .collect();
        assert_eq!(bench.down_f32(&partial), expected);
    }
}

#[test]
fn experts_take_as_many_tokens_as_they_have_room_for() {
    for (seed, (n_experts, tokens, capacity)) in
        [(1, 1, 1), (4, 50, 3), (8, 200, 25), (3, 7, 100), (5, 64, 0)].into_iter().enumerate()
    {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        let chosen = (0..tokens).map(|_| random.below(n_experts) as u32).collect::<Vec<u32>>();
        let up = bench.up_u32(&chosen);
        let resolve = Resolve::load(&bench.gpu).unwrap();
        resolve.limit(&bench.stream, up.all(), n_experts, capacity).unwrap();
        let mut route = Route::default();
        (route.k, route.n_experts, route.chosen) = (1, n_experts, chosen);
        route.limit(&(0..tokens), capacity);
        assert_eq!(down_u32(&bench, &up), route.chosen, "capacity {capacity}");
    }
}

/// The whole way of a layer: the look-up lets the stream go on where nothing is missing, and the
/// host does where something is.
#[test]
fn a_stream_goes_on_by_itself_when_all_is_there() {
    for seed in 0..20 {
        for here in [true, false] {
            let bench = Bench::new(seed);
            let (chosen, table) = (bench.up_u32(&[1, 0]), up_u64(&bench, &[4096, here as u64]));
            let granules = bench.empty(16);
            let [missing, pass, go] = [0, 3, 2].map(|word| bench.up_u32(&[word]));
            let lookup = Lookup {
                chosen: chosen.all(),
                table: table.all(),
                n_experts: 2,
                n_granules: 1,
                granules: granules.all(),
                homes: None,
                missing: missing.all(),
                pass: pass.all(),
                go: go.all(),
            };
            let (stream, routed) = (&bench.stream, Event::new(&bench.gpu).unwrap());
            // SAFETY: both ids are below 2.
            unsafe { Resolve::load(&bench.gpu).unwrap().launch(stream, &lookup) }.unwrap();
            stream.record(&routed).unwrap();
            stream.wait_value(go.all(), 3).unwrap();
            stream.fill(granules.all(), 0).unwrap();
            if !here {
                routed.synchronize().unwrap();
                assert!(stream.synchronize().is_err(), "it waits for the host");
                let host = Stream::new(&bench.gpu).unwrap();
                let mut count = [0; 4];
                host.download_now(&mut count, missing.all()).unwrap();
                assert_eq!(count, [1, 0, 0, 0]);
                host.upload_now(go.all(), &3u32.to_le_bytes()).unwrap();
            }
            stream.synchronize().unwrap();
        }
    }
}
