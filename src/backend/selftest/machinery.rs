//! The work of a driver and a device besides computing: graphs, streams that wait for each other
//! and for the host, copies beside kernels. The order of operations is that of decode
//! (`forward::gpu::decode_pipeline`); a device that does not finish is told, not waited for.

use super::Bench;
use crate::Result;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::{DeviceBuffer, Event, Graph, Pinned, PinnedKind, Stream};

/// Values of a buffer.
const N: usize = 1024;
/// Bytes that each stream of the link copies a round.
const PIECE: usize = 1 << 20;

pub fn check(bench: &Bench) -> Result<()> {
    let norm = Norm::load(&bench.gpu)?;
    let rounds = bench.rounds();
    bench.row("graphs", "", || graphs(bench, &norm, rounds));
    bench.row("streams", "", || streams(bench, &norm, rounds));
    bench.row("waits", "", || match &bench.gpu.info().no_waits {
        Some(why) => {
            bench.leave_out(why);
            Ok(())
        }
        None => waits(bench, &norm, rounds),
    });
    Ok(())
}

/// f32 [N], all of one value
fn filled(bench: &Bench, value: f32) -> Result<DeviceBuffer> {
    Ok(bench.up([value; N])?.device)
}

/// A graph of three additions, again and again.
fn graphs(bench: &Bench, norm: &Norm, rounds: usize) -> Result<()> {
    let (stream, sum, one) = (&bench.stream, filled(bench, 0.0)?, filled(bench, 1.0)?);
    let graph = add_graph(norm, stream, &sum, &one)?;
    for _ in 0..rounds {
        // SAFETY: the buffers live until the wait below.
        unsafe { stream.run(&graph)? };
    }
    stream.synchronize_watched()?;
    bench.equal_to(format!("{rounds} rounds"), &sum, &[3.0 * rounds as f32; N])
}

/// sum += 3 · one
fn add_graph(
    norm: &Norm,
    stream: &Stream,
    sum: &DeviceBuffer,
    one: &DeviceBuffer,
) -> Result<Graph> {
    stream.capture(|| (0..3).try_for_each(|_| norm.add_scaled(stream, sum.all(), 1.0, one.all())))
}

/// A stream uploads what another adds up; each waits for the other, the host for neither.
fn streams(bench: &Bench, norm: &Norm, rounds: usize) -> Result<()> {
    let (up, compute) = (Stream::new(&bench.gpu)?, Stream::urgent(&bench.gpu)?);
    let (sum, part) = (filled(bench, 0.0)?, filled(bench, 0.0)?);
    let numbers = pinned_floats(bench, rounds)?;
    for round in 0..rounds {
        // SAFETY: not changed before the wait below.
        unsafe { up.upload(part.all(), numbers.bytes(4 * N * round..4 * N * (round + 1)))? };
        up.then(&compute)?;
        norm.add_scaled(&compute, sum.all(), 1.0, part.all())?;
        compute.then(&up)?;
    }
    compute.synchronize_watched()?;
    let expected = (rounds * (rounds + 1) / 2) as f32;
    bench.equal_to(format!("{rounds} rounds"), &sum, &[expected; N])
}

/// f32 [rounds, N]: the number of each round, from 1
fn pinned_floats(bench: &Bench, rounds: usize) -> Result<Pinned> {
    let pinned = Pinned::new(&bench.gpu, 4 * N * rounds, PinnedKind::Cached)?;
    // SAFETY: nothing is queued that uses it.
    let bytes = unsafe { pinned.bytes_mut(0..4 * N * rounds) };
    for (i, bytes) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *bytes = ((i / N + 1) as f32).to_le_bytes();
    }
    Ok(pinned)
}

/// Rounds of a layer with misses: its graph; a wait for the host; what comes behind the wait, and
/// the next graph; then what was missing, on another stream, which ends the wait. Two streams copy
/// meanwhile, as the link does.
fn waits(bench: &Bench, norm: &Norm, rounds: usize) -> Result<()> {
    let gpu = &bench.gpu;
    let (main, miss) = (Stream::urgent(gpu)?, Stream::urgent(gpu)?);
    let links = [Stream::new(gpu)?, Stream::new(gpu)?];
    let (sum, one, part) = (filled(bench, 0.0)?, filled(bench, 1.0)?, filled(bench, 0.0)?);
    let numbers = pinned_floats(bench, rounds)?;
    let pieces = Pinned::new(gpu, 2 * PIECE, PinnedKind::WriteCombined)?;
    let slots = bench.empty(2 * PIECE)?;
    // SAFETY: nothing is queued that uses it.
    unsafe { pieces.bytes_mut(0..2 * PIECE) }.fill(0);
    let go = Pinned::new(gpu, 4, PinnedKind::Mapped)?;
    go.store_word(0, 0);
    let graph = add_graph(norm, &main, &sum, &one)?;
    let routed = Event::new(gpu)?;
    let mut queue = |round: usize| -> Result<()> {
        for (i, link) in links.iter().enumerate() {
            let range = PIECE * i..PIECE * (i + 1);
            let to = slots.slice(range.clone());
            // SAFETY: not changed before the waits below.
            unsafe { link.upload(to, pieces.bytes(range))? };
        }
        // SAFETY: the buffers live until the waits below.
        unsafe { main.run(&graph)? };
        main.record(&routed)?;
        let number = round as u32 + 1;
        let waiting = main.wait_value(go.slice(0..4), number)?;
        norm.add_scaled(&main, sum.all(), 1.0, part.all())?;
        // SAFETY: as above.
        unsafe { main.run(&graph)? };
        routed.synchronize_watched()?;
        // SAFETY: as above.
        unsafe { miss.upload(part.all(), numbers.bytes(4 * N * round..4 * N * (round + 1)))? };
        miss.write_value(go.slice(0..4), number)?;
        miss.is_done()?;
        drop(waiting);
        // The next round's upload comes after what reads this one's.
        main.synchronize_watched()
    };
    let done = (0..rounds).try_for_each(&mut queue);
    if done.is_err() {
        // Releases the device, so that its memory can be freed.
        go.store_word(0, rounds as u32);
    }
    done?;
    links.iter().try_for_each(Stream::synchronize)?;
    let expected = (6 * rounds + rounds * (rounds + 1) / 2) as f32;
    bench.equal_to(format!("{rounds} rounds"), &sum, &[expected; N])
}
