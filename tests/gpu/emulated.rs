//! The emulated device: that it computes what a GPU would, and that it finds what a GPU would only
//! sometimes show. Everything goes through the types that the engine uses.

use half::f16;
use moeba::backend::gpu::emulated::{Config, Faults, ProbeParams};
use moeba::backend::gpu::norm::RmsNormParams;
use moeba::backend::gpu::{
    Device, DeviceBuffer, DevicePtr, Emulated, Event, Grid, Kernel, Pinned, PinnedKind, Registered,
    Stream, u32_of,
};
use moeba::{Error, Result};
use std::ptr::NonNull;

fn device_of(config: Config) -> Device {
    Emulated::devices(&config).swap_remove(0)
}

fn device(seed: u64) -> Device {
    device_of(Config { seed, ..Config::default() })
}

fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    let at = values.as_ptr().cast::<u8>();
    // SAFETY: numbers have no padding, and any of their bytes is a byte.
    unsafe { std::slice::from_raw_parts(at, size_of_val(values)) }.to_vec()
}

fn values_of<T: Copy, const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|b| from(*b)).collect()
}

fn upload<T: Copy>(stream: &Stream, values: &[T]) -> DeviceBuffer {
    let bytes = bytes_of(values);
    let buffer = DeviceBuffer::new(stream.gpu(), bytes.len()).unwrap();
    stream.upload_now(buffer.all(), &bytes).unwrap();
    buffer
}

fn download(stream: &Stream, buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    stream.download_now(&mut bytes, buffer.all()).unwrap();
    bytes
}

/// Launches a probe.
fn launch(
    stream: &Stream,
    name: &str,
    blocks: u32,
    threads: u32,
    params: ProbeParams,
) -> Result<()> {
    let kernel = Kernel::find(stream.gpu(), name)?;
    let grid = Grid::new([blocks, 1, 1], threads).with_shared(64);
    // SAFETY: the emulated device checks accesses.
    unsafe { stream.launch(kernel, grid, &params) }
}

fn ptr(buffer: &DeviceBuffer) -> DevicePtr {
    buffer.all().into()
}

fn sentence<T>(result: Result<T>) -> String {
    match result {
        Err(Error::Device(sentence)) => sentence,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("no error"),
    }
}

#[test]
fn blocks_sum_through_shuffles_shared_memory_and_atomics() {
    for seed in 0..6 {
        let stream = Stream::new(&device(seed)).unwrap();
        let (n, blocks) = (1000, 5);
        let x: Vec<u32> = (0..n * blocks).map(|i| i * i % 1009).collect();
        let input = upload(&stream, &x);
        let out = DeviceBuffer::new(stream.gpu(), 4 * blocks as usize).unwrap();
        let params = ProbeParams { a: ptr(&input), out: ptr(&out), n, ..Default::default() };
        launch(&stream, "probe_sum", blocks, 96, params).unwrap();
        let sums = values_of(&download(&stream, &out), u32::from_le_bytes);
        let expected: Vec<u32> = x.chunks(n as usize).map(|row| row.iter().sum()).collect();
        assert_eq!(sums, expected);
    }
}

/// Whole pages of words that a stream's kernels may read where they are.
fn registered(gpu: &Device, memory: &mut [[u32; 1024]]) -> Registered {
    let (start, n) = (NonNull::from(&mut *memory).cast(), size_of_val(memory));
    // SAFETY: the tests keep the memory until the result is dropped.
    unsafe { Registered::new(gpu, start, n).unwrap() }
}

/// Kernels read registered memory where it is, at an address of its own, if they were announced.
/// Announced bytes do not change before the kernels are done.
#[test]
fn kernels_read_registered_bytes_that_are_announced() {
    #[repr(align(4096))]
    struct Pages([[u32; 1024]; 2]);
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Way {
        Announced,
        Unannounced,
        Part,
        Changed,
    }
    let run = |seed, way| -> Result<Vec<u32>> {
        let mut pages = Pages([[7; 1024], [9; 1024]]);
        let stream = Stream::new(&device(seed)).unwrap();
        let memory = registered(stream.gpu(), &mut pages.0);
        let out = DeviceBuffer::new(stream.gpu(), 4).unwrap();
        let input = memory.all().expect("the emulated device reads it");
        let params = ProbeParams {
            a: input.slice(4096..8192).into(),
            out: ptr(&out),
            n: 1024,
            ..Default::default()
        };
        let queue = || launch(&stream, "probe_sum", 1, 96, params);
        let start = (&raw mut pages.0).cast::<u8>();
        let n = if way == Way::Part { 4092 } else { 4096 };
        // SAFETY: the second page, which nothing changes while this is borrowed.
        let bytes = unsafe { std::slice::from_raw_parts(start.add(4096), n) };
        // SAFETY: the pages outlive the stream's work; that they do not change is what is tested.
        let queued = unsafe {
            match way {
                Way::Unannounced => queue(),
                _ => stream.reading(&[bytes], queue),
            }
        };
        if way == Way::Changed {
            // SAFETY: in the pages.
            unsafe { start.add(5000).write(1) };
        }
        queued?;
        let mut sum = vec![0; 4];
        stream.download_now(&mut sum, out.all())?;
        drop(memory);
        Ok(values_of(&sum, u32::from_le_bytes))
    };
    for seed in 0..6 {
        assert_eq!(run(seed, Way::Announced).unwrap(), [9 * 1024]);
        let why = sentence(run(seed, Way::Unannounced));
        assert!(why.contains("where there is no memory"), "{why}");
        let why = sentence(run(seed, Way::Part));
        assert!(why.contains("registered bytes that were not announced"), "{why}");
    }
    // An even seed runs nothing before the host waits.
    let why = sentence(run(2, Way::Changed));
    assert!(why.contains("the host changed bytes that a queued kernel reads"), "{why}");
}

#[test]
fn copies_to_shared_memory_arrive_when_they_are_waited_for() {
    for (seed, n) in [(0, 1), (1, 31), (2, 32), (3, 500), (4, 1024)] {
        let stream = Stream::new(&device(seed)).unwrap();
        let x: Vec<f32> = (0..n).map(|i| (i % 17) as f32).collect();
        let input = upload(&stream, &x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>());
        let out = DeviceBuffer::new(stream.gpu(), 4).unwrap();
        let params = ProbeParams { a: ptr(&input), out: ptr(&out), n, ..Default::default() };
        launch(&stream, "probe_copy", 1, 32, params).unwrap();
        let sum = values_of(&download(&stream, &out), f32::from_le_bytes);
        assert_eq!(sum, [x.iter().sum::<f32>()]);
    }
}

#[test]
fn warps_exchange_as_the_manual_says() {
    let stream = Stream::new(&device(1)).unwrap();
    let out = DeviceBuffer::new(stream.gpu(), 4 * 32 * 12).unwrap();
    let params = ProbeParams { out: ptr(&out), ..Default::default() };
    launch(&stream, "probe_warp", 1, 32, params).unwrap();
    let rows = values_of(&download(&stream, &out), u32::from_le_bytes);
    let row = |r: usize| &rows[32 * r..][..32];
    let all = |f: &dyn Fn(u32) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    assert_eq!(row(0), all(&|_| 25));
    assert_eq!(row(1), all(&|l| l / 8 * 8 + (l + 3) % 8));
    assert_eq!(row(2), all(&|l| l ^ 9));
    // A partner in a later segment of eight cannot be read, one in an earlier can.
    assert_eq!(row(3), all(&|l| if l & 8 == 0 { l } else { l ^ 8 }));
    assert_eq!(row(4), all(&|l| if l + 3 < 32 { l + 3 } else { l }));
    assert_eq!(row(5), all(&|l| if l % 16 >= 3 { l - 3 } else { l }));
    assert_eq!(row(6), all(&|_| 0x4924_9249));
    assert_eq!((row(7), row(8)), (&all(&|_| 1)[..], &all(&|_| 0)[..]));
    let permuted = |l: u32| {
        let bytes = [0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77];
        let chosen = 0x5140 + l % 8;
        (0..4).map(|i| bytes[(chosen >> (4 * i) & 7) as usize] << (8 * i)).sum()
    };
    assert_eq!(row(9), all(&permuted));
    // Bytes 1, 127, -1, -128 by 4, 3, 2, 1, and -5.
    assert_eq!(row(10), all(&|_| (4 + 381 - 2 - 128 - 5) as u32));
    let rounded = |l: u32| (l as f32 * 0.5 - 4.0).round_ties_even() as i32 as u32;
    assert_eq!(row(11), all(&rounded));
}

#[test]
fn halves_convert_as_the_half_crate_does() {
    let stream = Stream::new(&device(0)).unwrap();
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let input = upload(&stream, &bits);
    let wide = DeviceBuffer::new(stream.gpu(), 4 << 16).unwrap();
    let back = DeviceBuffer::new(stream.gpu(), 2 << 16).unwrap();
    let (a, out, n) = (ptr(&input), ptr(&wide), 1 << 16);
    let params = ProbeParams { a, out, back: ptr(&back), n, ..Default::default() };
    launch(&stream, "probe_half", 1, 256, params).unwrap();
    let wide = values_of(&download(&stream, &wide), f32::from_le_bytes);
    let back = values_of(&download(&stream, &back), u16::from_le_bytes);
    for ((bits, wide), back) in bits.iter().zip(wide).zip(back) {
        let expected = f16::from_bits(*bits).to_f32();
        if expected.is_nan() {
            assert!(wide.is_nan() && back == 0x7fff);
        } else {
            assert_eq!((wide.to_bits(), back), (expected.to_bits(), *bits));
        }
    }
    // Between halves: ties, neighbours of ties, subnormals and what is too large.
    let mut between = Vec::new();
    for bits in (0..0x7c00u32).step_by(7) {
        let (low, high) = (f16::from_bits(bits as u16).to_f32(), f16::from_bits(bits as u16 + 1));
        let middle = if high.is_finite() { (low + high.to_f32()) / 2.0 } else { 65520.0 };
        between.extend([middle, middle.next_up(), middle.next_down(), -middle]);
    }
    between.extend([1e9, f32::INFINITY, f32::MIN_POSITIVE, 1e-8, 2.98e-8, 2.99e-8, -0.0]);
    let input = upload(&stream, &between);
    let out = DeviceBuffer::new(stream.gpu(), 2 * between.len()).unwrap();
    let (a, n) = (ptr(&input), u32_of(between.len()));
    let params = ProbeParams { a, out: ptr(&out), n, ..Default::default() };
    launch(&stream, "probe_round_half", 1, 256, params).unwrap();
    let rounded = values_of(&download(&stream, &out), u16::from_le_bytes);
    for (x, got) in between.iter().zip(rounded) {
        assert_eq!(got, f16::from_f32(*x).to_bits(), "{x:e}");
    }
}

#[test]
fn matrix_instructions_multiply() {
    let stream = Stream::new(&device(3)).unwrap();
    // Small whole numbers: sums are exact in any order.
    let number = |i: usize, m: usize| (i * 37 % m) as i32 - (m / 2) as i32;
    let half = |v: i32| f16::from_f32(v as f32).to_bits();
    let (a, b): (Vec<i32>, Vec<i32>) =
        ((0..256).map(|i| number(i, 23)).collect(), (0..128).map(|i| number(i, 19)).collect());
    let halves = |v: &[i32]| v.iter().map(|v| half(*v)).collect::<Vec<u16>>();
    let (a_up, b_up) = (upload(&stream, &halves(&a)), upload(&stream, &halves(&b)));
    let out = DeviceBuffer::new(stream.gpu(), 4 * 128).unwrap();
    let (a_ptr, b_ptr) = (ptr(&a_up), ptr(&b_up));
    let params = ProbeParams { a: a_ptr, b: b_ptr, out: ptr(&out), ..Default::default() };
    launch(&stream, "probe_mma_f16", 1, 32, params).unwrap();
    let got = values_of(&download(&stream, &out), f32::from_le_bytes);
    for (i, got) in got.iter().enumerate() {
        let (row, column) = (i / 8, i % 8);
        let sum: i32 = (0..16).map(|k| a[row * 16 + k] * b[k * 8 + column]).sum();
        assert_eq!(*got, sum as f32, "row {row}, column {column}");
    }
    let a: Vec<i8> = (0..512).map(|i| number(i, 255) as i8).collect();
    let b: Vec<i8> = (0..256).map(|i| number(i, 251) as i8).collect();
    let (a_up, b_up) = (upload(&stream, &a), upload(&stream, &b));
    let (a_ptr, b_ptr) = (ptr(&a_up), ptr(&b_up));
    let params = ProbeParams { a: a_ptr, b: b_ptr, out: ptr(&out), ..Default::default() };
    launch(&stream, "probe_mma_s8", 1, 32, params).unwrap();
    let got = values_of(&download(&stream, &out), i32::from_le_bytes);
    for (i, got) in got.iter().enumerate() {
        let (row, column) = (i / 8, i % 8);
        let sum: i32 = (0..32).map(|k| a[row * 32 + k] as i32 * b[column * 32 + k] as i32).sum();
        assert_eq!(*got, sum, "row {row}, column {column}");
    }
}

/// The error of the probe that breaks rule number `what`.
fn fault(what: u32, seed: u64) -> String {
    let stream = Stream::new(&device(seed)).unwrap();
    let out = DeviceBuffer::new(stream.gpu(), 4 * 64).unwrap();
    let input = upload(&stream, &[7u32; 64]);
    let a = ptr(&input);
    let params = ProbeParams { a, out: ptr(&out), n: 64, what, ..Default::default() };
    launch(&stream, "probe_faults", 1, 64, params).unwrap();
    let sentence = sentence(stream.synchronize());
    // The device says it again, as a driver does.
    assert_eq!(self::sentence(DeviceBuffer::new(stream.gpu(), 1)), sentence);
    sentence
}

#[test]
fn kernels_that_break_a_rule_are_told_which() {
    let expected = [
        (0, "of the device memory at 0x10000000000, which has 256"),
        (1, "not aligned"),
        (2, "never written"),
        (3, "writes 4 bytes at byte 256 of shared array tile"),
        (4, "of shared array tile"),
        (5, "with no barrier between"),
        (7, "waits in __syncthreads for ever: of 64 threads 32 are in __syncthreads"),
        (8, "waits in __syncwarp for ever"),
        (9, "not the whole warp"),
        (10, "where there is no memory"),
        (11, "while others of its warp are in"),
        (12, "needs more stack"),
        (13, "shared array tile"),
        (14, "of shared array tile, which is not aligned"),
        (15, "reads 8 bytes at byte "),
        (16, "reads 16 bytes at byte 4"),
        (17, "ends before copies that it has begun"),
        (18, "of shared array tile (address 0x"),
        (19, "with no barrier between"),
        (20, "of shared array tile (address 0x"),
    ];
    for (what, part) in expected {
        for seed in [0, 1, 5] {
            let sentence = fault(what, seed);
            assert!(sentence.contains(part), "{what}: {sentence}");
            assert!(sentence.contains("kernel probe_faults: block (0, 0, 0)"), "{sentence}");
        }
    }
    // The same as number 5, with the barrier.
    let stream = Stream::new(&device(1)).unwrap();
    let out = DeviceBuffer::new(stream.gpu(), 4 * 64).unwrap();
    let params = ProbeParams { out: ptr(&out), n: 64, what: 6, ..Default::default() };
    launch(&stream, "probe_faults", 1, 64, params).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn launches_that_do_not_fit_the_kernel_are_refused() {
    let told = |threads: u32| {
        let stream = Stream::new(&device(0)).unwrap();
        let out = DeviceBuffer::new(stream.gpu(), 256).unwrap();
        let params = ProbeParams { out: ptr(&out), n: 1, what: 99, ..Default::default() };
        launch(&stream, "probe_faults", 1, threads, params).unwrap();
        sentence(stream.synchronize())
    };
    assert!(told(33).contains("no whole number of warps"));
    assert!(told(96).contains("compiled for blocks of 64 threads"));
    let gpu = device(0);
    let no_such = sentence(Kernel::<ProbeParams>::find(&gpu, "no_such"));
    assert_eq!(no_such, "there is no kernel no_such");
    // RmsNormParams has the size of ProbeParams.
    assert_eq!(size_of::<RmsNormParams>(), size_of::<ProbeParams>());
    let other = sentence(Kernel::<RmsNormParams>::find(&gpu, "probe_faults"));
    assert_eq!(other, "kernel probe_faults takes ProbeParams of 48 bytes, not RmsNormParams");
}

/// `out` = factor · x + y, of eight numbers.
fn axpy(factor: f32, x: &DeviceBuffer, y: &DeviceBuffer, out: &DeviceBuffer) -> ProbeParams {
    let (a, b, out) = (ptr(x), ptr(y), ptr(out));
    ProbeParams { a, b, out, factor, n: 8, ..Default::default() }
}

/// x is uploaded on one stream and used on another, with or without an event between.
fn two_streams(seed: u64, with_event: bool) -> Result<Vec<f32>> {
    let gpu = device(seed);
    let (copies, compute) = (Stream::new(&gpu)?, Stream::new(&gpu)?);
    let y = upload(&compute, &[10f32; 8]);
    let x = upload(&compute, &[0f32; 8]);
    let out = DeviceBuffer::new(&gpu, 32)?;
    let pinned = Pinned::new(&gpu, 32, PinnedKind::WriteCombined)?;
    // SAFETY: nothing is queued that uses it.
    unsafe { pinned.bytes_mut(0..32) }.copy_from_slice(&bytes_of(&[2f32; 8]));
    // SAFETY: not changed before the end, where dropping it waits.
    unsafe { copies.upload(x.all(), pinned.bytes(0..32))? };
    if with_event {
        copies.then(&compute)?;
    }
    launch(&compute, "probe_axpy", 1, 32, axpy(3.0, &x, &y, &out))?;
    let mut bytes = vec![0; 32];
    compute.download_now(&mut bytes, out.all())?;
    gpu.synchronize()?;
    Ok(values_of(&bytes, f32::from_le_bytes))
}

#[test]
fn a_missing_wait_is_found_in_every_order() {
    for seed in 0..40 {
        assert_eq!(two_streams(seed, true).unwrap(), [16.0; 8], "seed {seed}");
        let told = sentence(two_streams(seed, false));
        assert!(told.contains("bytes 0..32"), "seed {seed}: {told}");
        assert!(told.contains("with no event between them"), "seed {seed}: {told}");
    }
}

#[test]
fn memory_that_is_for_uploads_alone_takes_nothing_down() {
    let gpu = device(1);
    let stream = Stream::new(&gpu).unwrap();
    let x = upload(&stream, &[1u8; 64]);
    let pinned = Pinned::new(&gpu, 64, PinnedKind::WriteCombined).unwrap();
    // SAFETY: nothing else uses it.
    let queued = unsafe { stream.download(pinned.as_ptr(), x.all()) };
    let told = sentence(queued.and_then(|()| stream.synchronize()));
    assert!(told.contains("copy down into write-combined memory"), "{told}");
}

#[test]
fn the_host_must_wait_as_well() {
    for seed in 0..10 {
        let gpu = device(seed);
        let stream = Stream::new(&gpu).unwrap();
        let x = upload(&stream, &[1u8; 64]);
        let pinned = Pinned::new(&gpu, 64, PinnedKind::Cached).unwrap();
        // SAFETY: the second half, which nothing else uses until then, and only after waiting.
        unsafe { stream.download(pinned.as_ptr().add(32), x.slice(0..32)).unwrap() };
        // SAFETY: nothing is queued that uses this half.
        unsafe { pinned.bytes_mut(0..32) }.fill(7);
        let early = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: wrong, which is what is tried; the emulated device runs nothing meanwhile.
            unsafe { pinned.bytes(32..64) }.to_vec()
        }));
        assert!(early.is_err(), "seed {seed}");
        stream.synchronize().unwrap();
        // SAFETY: waited for.
        assert_eq!(unsafe { pinned.bytes(32..64) }, [1; 32]);
    }
}

#[test]
fn events_order_streams_and_are_done_in_time() {
    for seed in 0..10 {
        let gpu = device(seed);
        let (a, b) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
        let x = DeviceBuffer::new(&gpu, 16).unwrap();
        let (start, end) = (Event::timed(&gpu).unwrap(), Event::timed(&gpu).unwrap());
        assert!(end.is_done().unwrap(), "never recorded");
        a.record(&start).unwrap();
        a.fill(x.all(), 1).unwrap();
        a.record(&end).unwrap();
        b.wait(&end).unwrap();
        b.fill(x.slice(0..8), 2).unwrap();
        while !end.is_done().unwrap() {}
        assert!(end.since(&start).unwrap() >= 0.0);
        let untimed = Event::new(&gpu).unwrap();
        a.record(&untimed).unwrap();
        untimed.synchronize().unwrap();
        assert!(untimed.since(&start).unwrap_err().to_string().contains("not timed"));
        let mut bytes = [0; 16];
        b.download_now(&mut bytes, x.all()).unwrap();
        assert_eq!(bytes, [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert!(a.is_done().unwrap() && b.is_done().unwrap());
    }
}

/// A graph of two branches: out = 2·(2x + y) + (3x + y), captured once and run often.
fn forked(seed: u64, joined: bool) -> Result<Vec<f32>> {
    let gpu = device(seed);
    let (main, side) = (Stream::new(&gpu)?, Stream::new(&gpu)?);
    let (x, y) = (upload(&main, &[1f32; 8]), upload(&main, &[100f32; 8]));
    let [p, q, out] = [(); 3].map(|()| DeviceBuffer::new(&gpu, 32).unwrap());
    let run = |stream: &Stream, params| launch(stream, "probe_axpy", 1, 32, params);
    let graph = main.capture(|| {
        main.then(&side)?;
        run(&main, axpy(2.0, &x, &y, &p))?;
        run(&side, axpy(3.0, &x, &y, &q))?;
        if joined {
            side.then(&main)?;
        }
        run(&main, axpy(2.0, &p, &q, &out))
    })?;
    // Nothing has run yet.
    for value in 0..3 {
        main.upload_now(x.all(), &bytes_of(&[value as f32; 8]))?;
        // SAFETY: the buffers live to the end of this function.
        unsafe { main.run(&graph)? };
    }
    Ok(values_of(&download(&main, &out), f32::from_le_bytes))
}

#[test]
fn graphs_run_their_branches_in_any_order() {
    for seed in 0..20 {
        assert_eq!(forked(seed, true).unwrap(), [2.0 * 104.0 + 106.0; 8], "seed {seed}");
    }
    assert!(sentence(forked(0, false)).contains("was not waited for before the capture ended"));
}

/// A stream that was told to wait for a mark waits for that and no more, whatever the mark's event
/// serves for afterwards.
#[test]
fn marks_are_waited_for_beyond_their_end() {
    for seed in 0..20 {
        let gpu = device(seed);
        let (a, b) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
        let x = DeviceBuffer::new(&gpu, 8).unwrap();
        for turn in 0..3 {
            a.fill(x.all(), 2 * turn).unwrap();
            let mark = a.mark().unwrap();
            b.wait_for(&mark).unwrap();
            drop(mark);
            b.fill(x.all(), 2 * turn + 1).unwrap();
            // Were the event the same to `b` as in the next turn, each would wait for the other.
            b.then(&a).unwrap();
        }
        let mut bytes = [0; 8];
        a.download_now(&mut bytes, x.all()).unwrap();
        assert_eq!(bytes, [5; 8], "seed {seed}");
    }
}

#[test]
fn two_devices_copy_to_each_other() {
    for seed in 0..10 {
        let config = Config { devices: 2, seed, ..Config::default() };
        let gpus = Emulated::devices(&config);
        let (a, b) = (Stream::new(&gpus[0]).unwrap(), Stream::new(&gpus[1]).unwrap());
        let x = upload(&a, &[5u32; 8]);
        let y = DeviceBuffer::new(&gpus[1], 32).unwrap();
        a.copy(y.all(), x.all()).unwrap();
        a.then(&b).unwrap();
        let sum = DeviceBuffer::new(&gpus[1], 4).unwrap();
        let params = ProbeParams { a: ptr(&y), out: ptr(&sum), n: 8, ..Default::default() };
        launch(&b, "probe_sum", 1, 32, params).unwrap();
        assert_eq!(values_of(&download(&b, &sum), u32::from_le_bytes), [40]);
        // A kernel reaches its own device's memory only.
        let params = ProbeParams { a: ptr(&x), out: ptr(&sum), n: 8, ..Default::default() };
        launch(&b, "probe_sum", 1, 32, params).unwrap();
        assert!(sentence(b.synchronize()).contains("where there is no memory"));
        // The other device lives on.
        assert_eq!(values_of(&download(&a, &x), u32::from_le_bytes), [5; 8]);
    }
}

#[test]
fn memory_ends_and_faults_come_when_told() {
    let gpu = device_of(Config { memory_bytes: 4096, ..Config::default() });
    let first = DeviceBuffer::new(&gpu, 3000).unwrap();
    let full = sentence(DeviceBuffer::new(&gpu, 2000));
    assert!(full.contains("no room for 2000 bytes; 1024 of 4096 are free"), "{full}");
    drop(first);
    assert_eq!(gpu.memory().unwrap().free_bytes, 4096);
    DeviceBuffer::new(&gpu, 4096).unwrap();

    let faults = Faults { alloc_at: Some(1), pin_at: Some(0), ..Faults::default() };
    let gpu = device_of(Config { faults, ..Config::default() });
    DeviceBuffer::new(&gpu, 1).unwrap();
    sentence(DeviceBuffer::new(&gpu, 1));
    DeviceBuffer::new(&gpu, 1).unwrap();
    assert!(sentence(Pinned::new(&gpu, 64, PinnedKind::Cached)).contains("could not be pinned"));
    Pinned::new(&gpu, 64, PinnedKind::Cached).unwrap();

    let faults = Faults { lost_at_op: Some(2), ..Faults::default() };
    let gpu = device_of(Config { faults, ..Config::default() });
    let stream = Stream::new(&gpu).unwrap();
    let x = upload(&stream, &[1u8; 4]);
    upload(&stream, &[1u8; 4]);
    stream.fill(x.all(), 0).unwrap();
    for _ in 0..2 {
        assert_eq!(sentence(stream.synchronize()), "emulated GPU 0 was lost");
    }
}

#[test]
fn nothing_waits_for_a_device_that_is_lost() {
    let faults = Faults { lost_at_op: Some(2), ..Faults::default() };
    let gpus = Emulated::devices(&Config { devices: 2, faults, ..Config::default() });
    let [stream, of_lost] = [0, 1].map(|i| Stream::new(&gpus[i]).unwrap());
    let x = upload(&stream, &[7u8; 4]);
    let y = DeviceBuffer::new(&gpus[1], 4).unwrap();
    let pinned = Pinned::new(&gpus[0], 4, PinnedKind::Cached).unwrap();
    // SAFETY: the bytes are not written before the device that reads them is lost.
    unsafe { of_lost.upload(y.all(), pinned.bytes(0..4)).unwrap() };
    of_lost.fill(y.all(), 0).unwrap();
    assert_eq!(sentence(of_lost.synchronize()), "emulated GPU 1 was lost");
    // SAFETY: nothing else uses the bytes before the wait.
    unsafe { stream.download(pinned.as_ptr(), x.all()).unwrap() };
    stream.synchronize().unwrap();
    // SAFETY: nothing is queued that writes them.
    assert_eq!(unsafe { pinned.bytes(0..4) }, [7; 4]);
}

#[test]
fn what_was_never_written_is_not_copied_down() {
    let gpu = device(0);
    let stream = Stream::new(&gpu).unwrap();
    let x = DeviceBuffer::new(&gpu, 8).unwrap();
    stream.fill(x.slice(0..7), 0).unwrap();
    let mut bytes = [0; 8];
    stream.download_now(&mut bytes[..7], x.slice(0..7)).unwrap();
    let told = sentence(stream.download_now(&mut bytes, x.all()));
    assert!(told.contains("never written"), "{told}");
}
