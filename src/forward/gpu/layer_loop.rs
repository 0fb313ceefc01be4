//! The layer loop on a device. Layers that are not on the device run on the CPU; the residual
//! stream, or all of several, moves between the two.

use crate::Result;
use crate::forward::CpuPass;
use crate::forward::encoder_decoder::set_sources;
use crate::forward::events::nanos_since;
use crate::forward::gpu::devices::Devices;
use crate::forward::gpu::layer::{before_experts, layer};
use crate::forward::gpu::pass::{GpuPass, Role};
use crate::forward::gpu::steps::StepGraphs;
use std::time::Instant;

/// Computes a pass. Whether it succeeds or fails, no work of it is left when this returns.
pub fn run(cx: &mut GpuPass) -> Result<()> {
    begin(cx);
    cx.state.hybrid.placer.attention.reset();
    let result = match cx.role {
        Role::Source => encode(cx),
        Role::Only | Role::Answer => decode(cx),
    };
    end(cx, result)?;
    cx.model.publish_end(cx.batch, &mut cx.b.events);
    Ok(())
}

/// Embeddings and positions, in `b`.
fn begin(cx: &mut GpuPass) {
    let GpuPass { model, cpu, batch, caches, b, outputs, rests, .. } = cx;
    CpuPass { model, cpu, batch, caches: caches.host, outputs: *outputs, rests: *rests }.begin(b);
}

/// The layers, the output norm and the head.
fn decode(cx: &mut GpuPass) -> Result<()> {
    let token = cx.begin_token()?;
    match token {
        Some(_) => run_token(cx)?,
        None => run_layers(cx)?,
    }
    let start = Instant::now();
    move_stream(cx, cx.hyper().n_layers, cx.dev.head.is_some())?;
    cx.finish_pending()?;
    if cx.on_device {
        cx.outputs()?;
        match token {
            Some(head) => cx.give_token_logits(head)?,
            None => cx.logits()?,
        }
    } else {
        let GpuPass { model, cpu, batch, caches, b, outputs, rests, .. } = cx;
        let (outputs, rests) = (&mut **outputs, &mut **rests);
        let mut pass = CpuPass { model, cpu, batch, caches: caches.host, outputs, rests };
        pass.outputs(&b.x, &mut b.h);
        pass.logits(&b.logit_rows, &b.x, &mut b.h, &mut b.ffn.acts, &mut b.logits);
    }
    match token {
        // The time of its head is not known.
        Some(_) => cx.finish_token()?,
        None => cx.b.events.timing.head_ns = nanos_since(start),
    }
    cx.note_last_states()
}

/// The encoder's layers, its output norm, and the keys and values of its output for the decoder.
fn encode(cx: &mut GpuPass) -> Result<()> {
    run_layers(cx)?;
    let start = Instant::now();
    let layers = cx.hyper().decoder_layers();
    // The decoder's layers on the CPU come before those on the device.
    let is_on_device = |l: &usize| cx.dev.layers[*l].is_some();
    let first = layers.clone().find(is_on_device).unwrap_or(layers.end);
    if first > layers.start {
        move_stream(cx, cx.hyper().n_layers, false)?;
        cx.model.encoder_output(cx.cpu, &cx.b.x, &mut cx.b.h);
        let GpuPass { model, cpu, batch, caches, b, outputs, rests, .. } = &mut *cx;
        let (outputs, rests) = (&mut **outputs, &mut **rests);
        let pass = CpuPass { model, cpu, batch, caches: &mut [], outputs, rests };
        pass.cross_keys(layers.start..first, caches.host, &b.h, &mut b.mixer);
        let (stream, h) = (cx.stream(), cx.h());
        cx.state.staging.upload(stream, h, &cx.b.h, f32::to_le_bytes)?;
    } else {
        move_stream(cx, cx.hyper().n_layers, true)?;
        cx.norm(&cx.encoder().output_norm, cx.x(), cx.h())?;
    }
    cx.cross_keys(first..layers.end)?;
    cx.finish_pending()?;
    set_sources(cx.batch, cx.caches.host);
    cx.b.events.timing.head_ns = nanos_since(start);
    Ok(())
}

/// A token as one graph, which is captured and whose layers are pinned.
fn run_token(cx: &mut GpuPass) -> Result<()> {
    upload_inputs(cx)?;
    cx.layers().try_for_each(|l| cx.rests.layer(l))?;
    move_stream(cx, cx.layers().start, true)?;
    cx.launch_token()
}

fn run_layers(cx: &mut GpuPass) -> Result<()> {
    capture_graphs(cx)?;
    upload_inputs(cx)?;
    for l in cx.layers() {
        before_layer(cx, l)?;
        let is_on_device = cx.dev.layers[l].is_some();
        move_stream(cx, l, is_on_device)?;
        if is_on_device {
            layer(cx, l)?;
        } else {
            layer_on_cpu(cx, l)?;
        }
    }
    Ok(())
}

/// Uploads what layers read besides the stream.
fn upload_inputs(cx: &mut GpuPass) -> Result<()> {
    cx.upload_ngrams()?;
    upload_positions(cx)?;
    cx.upload_blocks()?;
    cx.upload_layer_inputs()
}

/// Lets other passes run, unless this one is a step: a layer of a step is queued while the one
/// before it runs.
fn before_layer(cx: &mut GpuPass, l: usize) -> Result<()> {
    if cx.is_step() {
        return cx.rests.layer(l);
    }
    if cx.rests.lends_devices() {
        cx.finish_pending()?;
    }
    cx.rests.layer_on(l, Devices { dev: cx.dev, state: cx.state })
}

fn layer_on_cpu(cx: &mut GpuPass, l: usize) -> Result<()> {
    let GpuPass { model, cpu, batch, role, caches, encoder_caches, b, outputs, rests, .. } = cx;
    let (outputs, rests) = (&mut **outputs, &mut **rests);
    if *role == Role::Source {
        let caches = &mut encoder_caches.iter_mut().collect::<Vec<_>>()[..];
        return CpuPass { model, cpu, batch, caches, outputs, rests }.encoder_layer(b, l);
    }
    let mut pass = CpuPass { model, cpu, batch, caches: caches.host, outputs, rests };
    if *role == Role::Only { pass.layer(b, l) } else { pass.decoder_layer(b, l) }
}

/// Captures the graphs that a step of decode needs and that there are not. This is done before any
/// layer is queued: to make a graph a driver may wait for the device, which may wait for the host.
fn capture_graphs(cx: &mut GpuPass) -> Result<()> {
    if !cx.is_captured() {
        return Ok(());
    }
    match cx.n() {
        1 => capture_row(cx)?,
        _ => capture_step(cx)?,
    }
    let mut layers = device_layers(cx).into_iter();
    layers.try_for_each(|l| if cx.looks_up(l) { cx.capture_experts(l) } else { Ok(()) })
}

fn device_layers(cx: &GpuPass) -> Vec<usize> {
    cx.layers().filter(|l| cx.dev.layers[*l].is_some()).collect()
}

fn capture_row(cx: &mut GpuPass) -> Result<()> {
    let (cache, key) = (cx.decoded().cache, cx.graph_key());
    cx.state.graph_counts.nodes.resize(cx.dev.layers.len(), [0; 2]);
    for l in device_layers(cx) {
        let mut graph = cache.graph(cx.cache_slots(l).own);
        if graph.as_ref().is_none_or(|(captured_for, _)| *captured_for != key) {
            let captured = cx.stream().capture(|| before_experts(cx, l))?;
            cx.state.graph_counts.nodes[l][0] = captured.n_nodes();
            *graph = Some((key, captured));
        }
    }
    Ok(())
}

fn capture_step(cx: &mut GpuPass) -> Result<()> {
    let texts = cx.step_texts();
    if cx.state.steps.use_again(&texts) {
        return Ok(());
    }
    let mut layers: Vec<_> = cx.dev.layers.iter().map(|_| None).collect();
    for l in device_layers(cx) {
        layers[l] = Some(cx.stream().capture(|| before_experts(cx, l))?);
        cx.state.graph_counts.n_captured += 1;
    }
    cx.state.steps.push(StepGraphs { texts, layers });
    Ok(())
}

fn upload_positions(cx: &mut GpuPass) -> Result<()> {
    let (kept, stream) = (cx.kept(), cx.stream());
    if cx.role == Role::Only {
        let ropes = &cx.b.mixer.ropes;
        let tables = [
            (&ropes.main, &kept.cos_sin),
            (&ropes.sliding, &kept.sliding_cos_sin),
            (&ropes.blocks, &kept.means_cos_sin),
            (&ropes.temperature, &kept.temperature),
        ];
        for (table, range) in tables {
            let values = table.turns().as_flattened();
            if !values.is_empty() {
                let to = cx.words(range, values.len());
                cx.state.staging.upload(stream, to, values, f32::to_le_bytes)?;
            }
        }
    }
    if !kept.tokens.is_empty() {
        let to = cx.words(&kept.tokens, cx.n());
        cx.state.staging.upload(stream, to, cx.batch.tokens(), u32::to_le_bytes)?;
    }
    if cx.role == Role::Answer && cx.is_decode() {
        let last = [cx.n_source(&cx.decoded()) as u32 - 1];
        let to = cx.words(&kept.source, 1);
        cx.state.staging.upload(stream, to, &last, u32::to_le_bytes)?;
    }
    let past: Vec<u32> = cx.segments().map(|segment| segment.segment.past as u32).collect();
    let to = cx.words(&kept.past, past.len());
    cx.state.staging.upload(stream, to, &past, u32::to_le_bytes)
}

/// Moves what layer `l` or, behind the last layer, the head reads to the device or to the CPU, if
/// it is not there.
fn move_stream(cx: &mut GpuPass, l: usize, to_device: bool) -> Result<()> {
    if std::mem::replace(&mut cx.on_device, to_device) == to_device {
        return Ok(());
    }
    cx.finish_pending()?;
    if to_device {
        return cx.upload_streams(l);
    }
    cx.download_streams(l)?;
    cx.wait_for_peers()
}

/// Waits for all that was queued. If the pass has failed, releases what it had acquired.
fn end(cx: &mut GpuPass, result: Result<()>) -> Result<()> {
    if result.is_err() {
        // A lost device waits for nothing. The first error is the one to report.
        let _ = cx.abandon();
    }
    // After an error too: queued work may use what is released below.
    let waited = cx.state.staging.wait(cx.stream());
    let waited = waited.and(cx.wait_for_peers());
    // Steps of decode, which may run while a prompt's pass rests, leave its prefetch alone.
    if result.is_err() && cx.batch.decode_rows().len() < cx.n() {
        cx.model.hierarchy.cancel_layer_prefetch();
    }
    if let (Err(_), Some(tiers)) = (&result, &cx.dev.tiers) {
        cx.state.route.pending = None;
        cx.state.hybrid.release_all(tiers);
        cx.state.pipeline.release_all(tiers);
    }
    result.and(waited)
}
