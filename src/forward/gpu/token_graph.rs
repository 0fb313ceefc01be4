//! A decoded token as one graph. Where one device computes all of its layers and has all of their
//! experts, the layers, the look-ups between them and the head are captured together. Each look-up
//! posts its layer's routing to a place of its own in mapped memory. The host pins all layers
//! before the launch and waits once. Then it tells policies of the layers and unpins them, in their
//! order.

use crate::Result;
use crate::backend::gpu::switch;
use crate::forward::gpu::cache::{TokenGraph, TokenHead};
use crate::forward::gpu::layer::whole_layer;
use crate::forward::gpu::layers::GpuLayer;
use crate::forward::gpu::logits::best_on_device;
use crate::forward::gpu::pass::GpuPass;

/// Tokens are queued layer by layer if it is 0, for measurements.
const SWITCH: &str = "MOEBA_GPU_TOKEN_GRAPH";

pub fn is_off() -> bool {
    switch(SWITCH) == Some(false)
}

impl GpuPass<'_> {
    /// Pins the token's layers and captures its graph, unless there is one that serves it. Returns
    /// what that has behind the layers; `None` if the token is computed layer by layer.
    pub fn begin_token(&mut self) -> Result<Option<TokenHead>> {
        if !self.may_be_one_graph() || !self.pin_all() {
            return Ok(None);
        }
        let (cache, key, head) = (self.decoded().cache, self.graph_key(), self.wanted_head());
        let mut kept = cache.token_graph();
        if let Some(own) = kept.as_ref().filter(|own| own.key == key && own.head.covers(head)) {
            return Ok(Some(own.head));
        }
        let graph = self.stream().capture(|| self.queue_token(head))?;
        let counts = &mut self.state.graph_counts;
        counts.n_token_nodes = graph.n_nodes();
        counts.n_tokens_captured += 1;
        *kept = Some(TokenGraph { key, head, graph });
        // Nodes take memory of the driver.
        cache.drop_layer_graphs();
        Ok(Some(head))
    }

    /// Whether the device computes all of the token, and no policy or recorder needs more of a
    /// layer than its route.
    fn may_be_one_graph(&mut self) -> bool {
        let is_seen = self.b.events.want_activation() || self.is_recorded();
        let is_here = |l: usize| match &self.dev.layers[l] {
            None => false,
            Some(GpuLayer { ffn: Some(ffn), .. }) => ffn.dense.is_some() || self.tiers(l).is_some(),
            Some(GpuLayer { ffn: None, .. }) => true,
        };
        let is_alone = self.state.peers.is_empty() && self.layers().all(is_here);
        self.is_decode() && is_alone && !is_seen && !self.dev.by_layer
    }

    /// Pins all layers. False, and none is pinned, if an expert of them is absent.
    fn pin_all(&mut self) -> bool {
        let Some(tiers) = self.dev.tiers.as_deref() else { return true };
        if !tiers.has_everything() {
            return false;
        }
        for l in self.layers() {
            if tiers.has(l) && !self.pin_table(l, tiers) {
                self.state.pipeline.release_all(tiers);
                return false;
            }
        }
        true
    }

    /// The part behind the layers that the token needs.
    fn wanted_head(&self) -> TokenHead {
        let row = self.batch.logit_rows().next().filter(|_| self.dev.head.is_some());
        let best = |best| best_on_device(best, self.n_products());
        row.map_or(TokenHead::None, |row| {
            best(row.best).map_or(TokenHead::Products, TokenHead::Best)
        })
    }

    /// x → x, and the logits in the device's memory
    fn queue_token(&mut self, head: TokenHead) -> Result<()> {
        self.layers().try_for_each(|l| whole_layer(self, l))?;
        if head == TokenHead::None {
            return Ok(());
        }
        let rows: Vec<_> = self.batch.logit_rows().collect();
        let products = self.logit_products(&rows)?;
        match head {
            TokenHead::Best(top) => self.choose_best(products, top),
            TokenHead::None | TokenHead::Products => Ok(()),
        }
    }

    /// Uploads slot tables that have changed and launches the graph.
    pub fn launch_token(&mut self) -> Result<()> {
        let (tiers, mut n_routed) = (self.dev.tiers.as_deref(), 0);
        for l in self.layers().filter(|l| tiers.is_some_and(|tiers| tiers.has(*l))) {
            n_routed += 1;
            if self.upload_table(l)? {
                // The next table may go through the same memory.
                self.state.pipeline.table_stream.synchronize_watched()?;
            }
        }
        assert_eq!(self.state.pipeline.pinned.len(), n_routed, "a layer is not pinned");
        self.state.pipeline.keep_number();
        let kept = self.decoded().cache.token_graph();
        let TokenGraph { key, graph, .. } = kept.as_ref().expect("captured before");
        assert_eq!(*key, self.graph_key());
        // SAFETY: as in `replay`. The tables have the addresses of granules of their layers, which
        // are pinned.
        unsafe { self.stream().run(graph)? };
        let counts = &mut self.state.graph_counts;
        counts.n_token_runs += 1;
        counts.n_launches += 1;
        Ok(())
    }

    /// Gives the logits that a graph with `head` has made on.
    pub fn give_token_logits(&mut self, head: TokenHead) -> Result<()> {
        let Some(row) = self.batch.logit_rows().next() else { return Ok(()) };
        match (best_on_device(row.best, self.n_products()), head) {
            (None, _) => self.all_logits(self.logit_room(1), &[row]),
            (Some(top), TokenHead::Best(chosen)) => self.give_best(chosen.k, top, row),
            (Some(_), _) => unreachable!("the graph serves the token"),
        }
    }

    /// Waits for the token, tells policies of its layers and unpins them.
    pub fn finish_token(&mut self) -> Result<()> {
        self.state.staging.wait(&self.dev.stream)?;
        let Some(tiers) = self.dev.tiers.as_deref() else { return Ok(()) };
        let parts = self.route_parts();
        for l in self.layers().filter(|l| tiers.has(*l)) {
            let route = self.state.pipeline.routes.route(l);
            assert_eq!(parts.n_missing(route), 0, "layer {l} is whole");
            parts.read(route, &mut self.b.ffn.route);
            // Evictions hear of it before its hits.
            self.model.publish_choice(self.batch, l, &mut self.b.routing());
            self.unpin_layer(l, tiers, None);
            self.publish_answered(Some(l));
        }
        Ok(())
    }
}
