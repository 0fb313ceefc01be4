//! The start-up report: what was loaded and where it is.

use super::{DevicePart, Engine, MemoryPlan};
use crate::engine::plan::ram::Place;
use crate::simd;
use crate::units::size;

impl Engine {
    pub fn describe(&self) -> String {
        let hyper = self.model.hyper();
        let layers = match hyper.n_encoder_layers() {
            0 => format!("{} layers", hyper.n_layers),
            n => format!("{n} encoder and {} decoder layers", hyper.n_layers - n),
        };
        let moe = match hyper.routing.n_experts {
            0 => "dense".to_string(),
            n => format!("{n} experts a layer, {} used a token", hyper.routing.k),
        };
        let path = self.model.path().display();
        let mut lines = vec![format!("{path}: {layers}, {moe}")];
        lines.extend(self.plan.device.iter().flat_map(on_devices));
        lines.push(format!(
            "{}; KV cache {} for {}; {} threads, {} kernels",
            in_memory(&self.plan),
            match self.plan.shares_kv() {
                true => size(self.plan.sizes.kv_bytes - self.plan.page_bytes),
                false => size(self.kv_bytes() * self.plan.n_sessions as u64),
            },
            match self.plan.n_sessions {
                1 => format!("{} tokens", self.n_ctx),
                n if self.plan.shares_kv() => format!(
                    "{n} texts of up to {} tokens, {} together",
                    self.n_ctx, self.plan.n_ctx_all
                ),
                n => format!("{n} texts of {} tokens", self.n_ctx),
            },
            self.n_threads(),
            simd::kernels().name,
        ));
        lines.join("\n")
    }
}

/// A line for each device. Layers are counted as `-ngl` counts them: the output is one.
fn on_devices(part: &DevicePart) -> Vec<String> {
    let plan = &part.plan;
    let layers = plan.gpu_layers.len() - plan.n_cpu_only + usize::from(plan.head_on_device);
    let first = format!("{layers}/{} layers, {} of dense weights, ", plan.n_layers + 1, {
        size(plan.weight_bytes())
    });
    let of_device =
        |(i, (name, room)): (usize, (&String, &crate::engine::plan::vram::DeviceRoom))| {
            let dense = if i == 0 { first.as_str() } else { "" };
            format!("{name}: {dense}{} of experts", size(room.expert_budget_bytes))
        };
    part.names.iter().zip(&plan.devices).enumerate().map(of_device).collect()
}

/// The line for memory: experts and dense weights, including those that devices have a copy of.
fn in_memory(plan: &MemoryPlan) -> String {
    let (experts, dense) = (size(plan.sizes.expert_bytes), size(plan.sizes.dense_bytes));
    match plan.place {
        Place::InPlace => {
            let place = match (plan.is_mapped, &plan.device) {
                (true, None) => "in place on the mapped file",
                (true, Some(_)) => "mapped from the file",
                (false, _) => "in memory",
            };
            format!("experts {experts} and dense weights {dense} {place}")
        }
        Place::Streamed { budget } => format!(
            "experts {experts} streamed through {} of memory, policy {}; dense weights {dense} in \
             memory",
            size(budget),
            plan.policy,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::vram::{DevicePlan, DeviceRoom};

    #[test]
    fn devices_say_what_they_have() {
        let room = |mib: u64| DeviceRoom { expert_budget_bytes: mib << 20, ..Default::default() };
        let plan = DevicePlan {
            n_layers: 12,
            gpu_layers: 0..12,
            head_on_device: true,
            dense_bytes: 3 << 20,
            head_bytes: 1 << 20,
            devices: vec![room(2560), room(16)],
            ..DevicePlan::default()
        };
        let names = vec!["GPU 0 (NVIDIA L4)".into(), "GPU 1 (NVIDIA T4)".into()];
        let mut part = DevicePart { plan, names, n_ubatch: 512 };
        let lines = on_devices(&part);
        assert_eq!(
            lines,
            [
                "GPU 0 (NVIDIA L4): 13/13 layers, 4.0 MiB of dense weights, 2.50 GiB of experts",
                "GPU 1 (NVIDIA T4): 16.0 MiB of experts"
            ]
        );
        (part.plan.gpu_layers, part.plan.head_on_device) = (8..12, false);
        assert!(on_devices(&part)[0].starts_with("GPU 0 (NVIDIA L4): 4/13 layers, "));
    }
}
