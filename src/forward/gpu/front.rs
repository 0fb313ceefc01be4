//! What of a layer is the same for every token but for numbers in device memory: all before the
//! experts, and the look-up of where they are. For a decoded token it is one graph, so that queuing
//! it costs the host one call.

use super::layers::GpuLayer;
use super::pass::Pass;
use crate::Result;
use crate::forward::gpu::layer::Tools;

/// Positions that a graph is made for at least.
const GRAPH_POSITIONS: usize = 512;

/// For how many positions a token's operations are queued that sees `n`: a graph serves until the
/// text has twice as many.
pub fn graph_positions(n: usize, n_ctx: usize) -> usize {
    n.next_power_of_two().max(GRAPH_POSITIONS).min(n_ctx)
}

impl Pass<'_> {
    /// Makes the graphs that this token lacks. Not once layers are queued: a driver may wait for
    /// the device to make one, and the device may wait for the host.
    pub fn make_graphs(&self, tools: &mut Tools) -> Result<()> {
        if self.n > 1 || self.is_prompt {
            return Ok(());
        }
        let positions = [self.max_seen, self.max_source()];
        for l in self.layers() {
            let Some(layer) = &self.dev.layers[l] else { continue };
            let mut graph = self.cache.graph(self.slots(l).own);
            if graph.as_ref().is_none_or(|(made_for, _)| *made_for != positions) {
                let made = self.stream().capture(|| self.queue(tools, l, layer))?;
                *graph = Some((positions, made));
            }
            if self.looks_up(l) {
                self.make_rest(tools.pipeline, l)?;
            }
        }
        Ok(())
    }

    /// Attention and everything else before the experts: x → x, h, its forms (`acts_at`), the route
    /// and y, which is the shared expert's output or 0.
    pub fn before_experts(&self, tools: &mut Tools, l: usize, layer: &GpuLayer) -> Result<()> {
        if self.n > 1 || self.is_prompt {
            return self.queue(tools, l, layer);
        }
        let graph = self.cache.graph(self.slots(l).own);
        let (_, graph) = graph.as_ref().expect("made before the first layer");
        // SAFETY: the graph's memory is that of this cache, which has the graph, and of the model's
        // part on the device and its lanes, which the session that has the cache keeps alive.
        unsafe { self.stream().run(graph) }
    }

    fn queue(&self, tools: &mut Tools, l: usize, layer: &GpuLayer) -> Result<()> {
        let Tools { staging, pipeline, .. } = tools;
        // norm, attention, residual
        self.norm(&layer.norm, self.x(), self.h())?;
        self.mix(l, &layer.mixer)?;
        self.keep_before(&layer.ffn)?;
        self.add_residual()?;

        // norm, attention to the encoder's text, residual
        if let Some(cross) = &layer.cross {
            self.norm(&cross.norm, self.x(), self.h())?;
            self.cross_attention(l, &cross.attention)?;
            self.add_residual()?;
        }

        // dense branch, residual
        if self.dense_branch(staging, &layer.ffn)? {
            self.add_residual()?;
        }

        // norm, router, shared expert
        let (w, ffn) = (self.weights(l), &layer.ffn);
        let acts = self.ffn_input(w, ffn)?;
        if let Some(router) = &ffn.router {
            self.choose(router, &self.hyper().routing.choice, &acts)?;
        }
        self.shared_expert(staging, ffn, &acts)?;
        if self.looks_up(l) { self.look_up(pipeline, l) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::graph_positions;

    #[test]
    fn a_graph_serves_a_text_that_grows() {
        assert_eq!([1, 512, 513, 1025].map(|n| graph_positions(n, 1500)), [512, 512, 1024, 1500]);
        assert_eq!(graph_positions(3, 32), 32);
    }
}
