//! One layer on a device: the stages of `forward::Model::layer`, in the same order.

use crate::Result;
use crate::experts::vram::VramTiers;
use crate::forward::gpu::layers::{GpuFfn, GpuOnly};
use crate::forward::gpu::mixer::on_device;
use crate::forward::gpu::pass::GpuPass;
use crate::model::weights::SubLayer;

/// How the experts of a layer are computed.
enum ExpertPath<'a> {
    /// The layer has none.
    None,
    /// A dense layer's one expert, which is always resident.
    Dense(&'a GpuOnly),
    /// By a look-up among pinned slots. The host computes or loads misses later.
    Pipeline(&'a VramTiers),
    /// Grouped by the first device, which has all of them. The host reads the route later.
    Device(&'a VramTiers),
    /// Divided by the host among the devices and the CPU, once the host has read the route.
    Host,
}

impl<'a> ExpertPath<'a> {
    fn choose(cx: &mut GpuPass<'a>, l: usize) -> ExpertPath<'a> {
        let Some(ffn) = &cx.layer(l).ffn else { return ExpertPath::None };
        if let Some(expert) = &ffn.dense {
            return ExpertPath::Dense(expert);
        }
        // A recorder reads the routing of a layer before the next layer is queued.
        let is_recorded = cx.is_recorded();
        match cx.tiers(l).filter(|_| !is_recorded) {
            Some(tiers) if cx.looks_up(l) => ExpertPath::Pipeline(tiers),
            Some(tiers) if cx.groups_on_device(l) => ExpertPath::Device(tiers),
            _ => ExpertPath::Host,
        }
    }
}

/// x → x
pub fn layer(cx: &mut GpuPass, l: usize) -> Result<()> {
    let path = ExpertPath::choose(cx, l);

    // norm, attention, residual; dense branch; norm, router; shared expert
    if !cx.is_captured() || !cx.replay(l)? {
        before_experts(cx, l)?;
    }

    // routed experts, residual
    match path {
        ExpertPath::None => cx.end_layer(l)?,
        ExpertPath::Dense(expert) => {
            cx.record_dense(l)?;
            cx.dense_expert(l, expert)?;
        }
        ExpertPath::Pipeline(tiers) => cx.pipelined_experts(l, tiers)?,
        ExpertPath::Device(tiers) if cx.device_routed_experts(l, tiers)? => {}
        ExpertPath::Device(_) | ExpertPath::Host => {
            cx.download_route(l)?;
            cx.host_routed_experts(l)?;
        }
    }
    cx.end_streams(l)
}

/// x → x, of a layer that the device computes without the host.
pub fn whole_layer(cx: &mut GpuPass, l: usize) -> Result<()> {
    before_experts(cx, l)?;
    match &cx.layer(l).ffn {
        None => cx.end_layer(l)?,
        Some(GpuFfn { dense: Some(expert), .. }) => cx.dense_expert(l, expert)?,
        Some(_) => cx.whole_experts(l)?,
    }
    cx.end_streams(l)
}

/// x → x, h and the forms of it that experts read, the route, and y: the shared expert's output, if
/// there is one. Those of a step of decode are captured as graphs.
pub fn before_experts(cx: &mut GpuPass, l: usize) -> Result<()> {
    let layer = cx.layer(l);
    // router, if it reads the stream
    let routes_stream = layer.ffn.as_ref().filter(|ffn| ffn.routes_stream);
    if let Some(router) = routes_stream.and_then(|ffn| ffn.router.as_ref()) {
        let acts = cx.acts_of([router.logits.weight.ty], cx.n(), cx.x())?;
        cx.route(router, &acts)?;
    }

    // norm, attention, residual
    let mixer = on_device(&layer.mixer);
    if let Some(mixer) = mixer {
        cx.begin_streams(l)?;
        if let Some(ngrams) = &layer.ngrams {
            cx.add_ngrams(l, ngrams)?;
        }
        cx.read_streams(l, SubLayer::Mixer)?;
        mixer.mix(cx, l)?;
    }
    layer.ffn.as_ref().map_or(Ok(()), |ffn| cx.keep_before(ffn))?;
    if mixer.is_some() && cx.mixer_residual(l).is_none() {
        cx.feed_streams(l, SubLayer::Mixer, layer.post_norm.as_ref(), 1.0)?;
    }

    // norm, attention to the source text, residual
    if let Some(cross) = &layer.cross {
        cx.norm(&cross.norm, cx.x(), cx.h())?;
        cx.cross_attention(l, cross)?;
        cx.add_residual(None, 1.0)?;
    }

    // dense branch, residual
    let Some(ffn) = &layer.ffn else { return Ok(()) };
    cx.read_streams(l, SubLayer::FeedForward)?;
    if let Some(branch) = &ffn.branch {
        cx.dense_branch(branch)?;
    }

    // norm, router
    let router = ffn.router.as_ref().filter(|_| !ffn.routes_stream);
    if let Some((router, norm)) = router.and_then(|router| Some((router, router.norm.as_ref()?))) {
        let acts = cx.normed_acts(norm, cx.x(), [router.logits.weight.ty])?;
        cx.route(router, &acts)?;
    }
    let seen = if ffn.sees_before { cx.before() } else { cx.x() };
    let acts = cx.ffn_input(l, &ffn.norm, seen)?;
    if let Some(router) = router.filter(|router| router.norm.is_none()) {
        cx.route(router, &acts)?;
    }

    // shared expert
    cx.shared_expert(ffn, &acts)?;
    if ffn.weights_input {
        cx.weigh_input(l)?;
    }
    // narrow experts' input
    ffn.latent.as_ref().map_or(Ok(()), |latent| cx.narrow(l, latent, &acts))
}
