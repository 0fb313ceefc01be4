//! Streams that wait for values in memory, on the emulated device: what such a wait orders and what
//! it does not, whatever the seed; and that a host that polls comes to an end.

use crate::support::words;
use moeba::backend::gpu::emulated::{Config, ProbeParams, Queues};
use moeba::backend::gpu::{
    Device, DeviceBuffer, Emulated, Event, Grid, Kernel, Pinned, PinnedKind, Stream, u32_of,
};
use moeba::{Error, Result};

fn device(seed: u64) -> Device {
    let queues = Queues::OfStreams;
    Emulated::devices(&Config { seed, queues, ..Config::default() }).swap_remove(0)
}

fn down(stream: &Stream, buffer: &DeviceBuffer) -> Result<Vec<u32>> {
    let mut bytes = vec![0; buffer.len()];
    stream.download_now(&mut bytes, buffer.all())?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
}

/// `to` = the sum of the words of `from`, by a kernel.
fn sum(stream: &Stream, from: &DeviceBuffer, to: &DeviceBuffer) -> Result<()> {
    let kernel = Kernel::find(stream.gpu(), "probe_sum")?;
    let (a, out, n) = (from.all().into(), to.all().into(), u32_of(from.len() / 4));
    let params = ProbeParams { a, out, n, ..Default::default() };
    // SAFETY: the emulated device checks accesses.
    unsafe { stream.launch(kernel, Grid::new([1; 3], 32).with_shared(64), &params) }
}

fn sentence<T>(result: Result<T>) -> String {
    match result {
        Err(Error::Device(sentence)) => sentence,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("no error"),
    }
}

fn pinned_words(gpu: &Device, values: &[u32]) -> Pinned {
    let pinned = Pinned::new(gpu, 4 * values.len(), PinnedKind::Cached).unwrap();
    // SAFETY: nothing is queued that uses it.
    let bytes = unsafe { pinned.bytes_mut(0..4 * values.len()) };
    values.iter().zip(bytes.as_chunks_mut::<4>().0).for_each(|(v, b)| *b = v.to_le_bytes());
    pinned
}

/// How one stream tells another that x is there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// A copy or a kernel writes the word after x.
    ByCopy,
    ByKernel,
    /// The word comes before x.
    TooEarly,
    /// There is no wait.
    NotAtAll,
}

/// One stream uploads x, another sums it: 4 · 3.
fn two_streams(seed: u64, told: Told) -> Result<Vec<u32>> {
    let gpu = device(seed);
    let [copies, compute, third] = [(); 3].map(|()| Stream::new(&gpu).unwrap());
    let (x, go) = (words(&compute, &[0; 4]), words(&compute, &[6]));
    let (out, parts) = (words(&compute, &[0]), words(&compute, &[3, 4]));
    let up = pinned_words(&gpu, &[3, 3, 3, 3, 7]);
    // The wait comes first: it is no matter of the order in which things are queued.
    if told != Told::NotAtAll {
        drop(compute.wait_value(go.all(), 7)?);
    }
    sum(&compute, &x, &out)?;
    // SAFETY: not changed before the waits below.
    let (data, word) = unsafe { (up.bytes(0..16), up.bytes(16..20)) };
    // SAFETY: as above.
    let copy = |to: &DeviceBuffer, from: &[u8]| unsafe { copies.upload(to.all(), from) };
    match told {
        Told::ByCopy | Told::NotAtAll => {
            copy(&x, data)?;
            copy(&go, word)?;
        }
        Told::ByKernel => {
            copy(&x, data)?;
            sum(&copies, &parts, &go)?;
        }
        Told::TooEarly => {
            copy(&go, word)?;
            copy(&x, data)?;
        }
    }
    // Whoever comes after the one that waited is after the copies as well: another stream...
    compute.then(&third)?;
    sum(&third, &x, &parts)?;
    // ... and the host, which uses the memory that was copied from.
    third.synchronize()?;
    if matches!(told, Told::ByCopy | Told::ByKernel) {
        // SAFETY: waited for.
        unsafe { up.bytes_mut(0..16) }.fill(0);
    }
    gpu.synchronize()?;
    assert_eq!(down(&third, &parts)?[0], 12, "seed {seed}");
    down(&compute, &out)
}

#[test]
fn a_value_orders_two_streams() {
    for seed in 0..40 {
        for told in [Told::ByCopy, Told::ByKernel] {
            assert_eq!(two_streams(seed, told).unwrap(), [12], "seed {seed}, {told:?}");
        }
    }
}

#[test]
fn what_a_value_does_not_order_is_found_in_every_order() {
    for seed in 0..40 {
        for told in [Told::TooEarly, Told::NotAtAll] {
            let why = sentence(two_streams(seed, told));
            assert!(why.contains("with no event between them"), "seed {seed}, {told:?}: {why}");
        }
    }
}

#[test]
fn a_wait_lasts_until_the_value_is_reached() {
    for seed in 0..20 {
        let gpu = device(seed);
        let (a, b) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
        let (go, log) = (words(&a, &[u32::MAX - 1]), words(&a, &[0]));
        drop(b.wait_value(go.all(), 1).unwrap());
        // The log is what the word is when the wait is over.
        b.copy(log.all(), go.all()).unwrap();
        let up = pinned_words(&gpu, &[u32::MAX, 0, 1]);
        for i in 0..3 {
            // SAFETY: not changed until the device is done.
            unsafe { a.upload(go.all(), up.bytes(4 * i..4 * i + 4)).unwrap() };
        }
        assert_eq!(down(&b, &log).unwrap(), [1], "seed {seed}");
        // Further on, and after a turn of the counter, it is reached already.
        drop(b.wait_value(go.all(), u32::MAX - 5).unwrap());
        b.synchronize().unwrap();
    }
}

#[test]
fn a_wait_that_never_ends_is_told_and_can_still_end() {
    for seed in 0..10 {
        let gpu = device(seed);
        let (a, b) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
        let (go, routed) = (words(&a, &[2]), Event::new(&gpu).unwrap());
        a.record(&routed).unwrap();
        drop(a.wait_value(go.all(), 3).unwrap());
        a.then(&b).unwrap();
        // What comes before the wait does not need its end.
        routed.synchronize().unwrap();
        for stream in [&a, &b] {
            let why = sentence(stream.synchronize());
            assert!(why.contains("to be 3; it is 2"), "{why}");
        }
        assert!(sentence(gpu.synchronize()).contains("nothing that is queued can change it"));
        assert!(!a.is_done().unwrap());
        let c = Stream::new(&gpu).unwrap();
        c.upload_now(go.all(), &3u32.to_le_bytes()).unwrap();
        b.synchronize().unwrap();
    }
}

#[test]
fn waits_for_what_is_no_word_end_in_a_sentence() {
    let gpu = device(0);
    let stream = Stream::new(&gpu).unwrap();
    let go = words(&stream, &[1]);
    let captured = stream.capture(|| stream.wait_value(go.all(), 1).map(drop));
    assert!(sentence(captured.map(drop)).contains("captured"));
    let fresh = DeviceBuffer::new(&gpu, 4).unwrap();
    drop(stream.wait_value(fresh.all(), 0).unwrap());
    assert!(sentence(stream.synchronize()).contains("was never written"));
}

/// The host only polls, and feeds another stream meanwhile.
#[test]
fn polling_comes_to_an_end() {
    for seed in 0..40 {
        let gpu = device(seed);
        let (a, b, c) =
            (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
        let (x, y, go) = (words(&a, &[0]), words(&a, &[0]), words(&a, &[0]));
        let done = Event::new(&gpu).unwrap();
        let up = pinned_words(&gpu, &[1]);
        drop(b.wait_value(go.all(), 1).unwrap());
        (0..20).for_each(|_| b.fill(x.all(), 1).unwrap());
        b.then(&a).unwrap();
        a.record(&done).unwrap();
        // SAFETY: not changed until the device is done.
        unsafe { a.wait(&done).and(c.upload(go.all(), up.bytes(0..4))).unwrap() };
        let mut polls = 0;
        while !done.is_done().unwrap() {
            c.fill(y.all(), 2).unwrap();
            polls += 1;
            assert!(polls < 10_000, "seed {seed}");
        }
        while !c.is_done().unwrap() {}
        assert!(a.is_done().unwrap() && b.is_done().unwrap());
        assert_eq!(down(&a, &x).unwrap(), [0x0101_0101]);
    }
}
