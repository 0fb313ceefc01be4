//! The part of `--dry-run` that devices have: what is there, how much of it, and which flag changes
//! it.

use super::forecast::line;
use crate::engine::MemoryPlan;
use crate::engine::plan::vram::DevicePlan;
use crate::units::{at_most, size};

pub fn lines(plan: &MemoryPlan, out: &mut Vec<String>) {
    let Some(part) = &plan.device else { return };
    let (n_ctx, n_sessions) = (plan.n_ctx, plan.n_sessions);
    let (names, plan) = (&part.names, &part.plan);
    let first = &names[0];
    out.push(line("GPU layers", plan.dense_bytes, &format!("{first}: {}", layers(plan))));
    let output = if plan.head_on_device { "on it" } else { "in memory, not on the GPU" };
    out.push(line("GPU output", plan.head_bytes, &format!("{output} (-ngl, -ot)")));
    let note = match n_sessions {
        1 => format!("for {n_ctx} tokens of context (-c, -ctk, -ctv)"),
        n => format!("for {n} texts of {n_ctx} tokens at a time (-c, -ctk, -ctv)"),
    };
    out.push(line("GPU KV cache", plan.kv_bytes, &note));
    let bytes = plan.activation_bytes + plan.work_bytes;
    out.push(line("GPU buffers", bytes, "activations (-ub, -c) and tables"));
    for name in &names[1..] {
        out.push(line("", plan.peer_bytes, &format!("buffers for experts on {name} (-ub)")));
    }
    experts(names, plan, out);
    for (i, (name, room)) in names.iter().zip(&plan.devices).enumerate() {
        let note = format!("kept free on {name}");
        out.push(line(if i == 0 { "GPU head-room" } else { "" }, room.head_room_bytes, &note));
    }
    for (i, (name, room)) in names.iter().zip(&plan.devices).enumerate() {
        let note = format!("of {} free on {name}", at_most(room.free_bytes));
        out.push(line(if i == 0 { "GPU together" } else { "" }, plan.planned_bytes(i), &note));
    }
}

/// "dense weights of layers 4 to 47, 44 of 48 (-ngl 45)"
fn layers(plan: &DevicePlan) -> String {
    let n = plan.gpu_layers.len();
    let flag = n + usize::from(plan.head_on_device);
    let (start, last) = (plan.gpu_layers.start, plan.n_layers - 1);
    let which = match n == plan.n_layers {
        true => format!("all {n} layers"),
        false => format!("layers {start} to {last}, {n} of {}", plan.n_layers),
    };
    let rest = match plan.n_cpu_only {
        0 => String::new(),
        n => format!("; {n} of them stay on the CPU, as devices have no kernels for them"),
    };
    format!("dense weights of {which} (-ngl {flag}){rest}")
}

fn experts(names: &[String], plan: &DevicePlan, out: &mut Vec<String>) {
    let on_cpu = plan.experts_on_cpu.iter().filter(|on_cpu| **on_cpu).count();
    let rest = match on_cpu {
        0 => String::new(),
        1 => "; those of 1 layer are on the CPU (-ngl, -cmoe, -ncmoe, -ot)".into(),
        n => format!("; those of {n} layers are on the CPU (-ngl, -cmoe, -ncmoe, -ot)"),
    };
    let all = plan.expert_all_bytes;
    for (i, (name, room)) in names.iter().zip(&plan.devices).enumerate() {
        let budget = room.expert_budget_bytes;
        let share = match all {
            0 => "none".into(),
            all => {
                let percent = 100.0 * budget as f64 / all as f64;
                format!("{percent:.1} % of {} (--vram) on {name}", size(all))
            }
        };
        match i {
            0 => out.push(line("GPU experts", budget, &format!("{share}{rest}"))),
            _ => out.push(line("", budget, &share)),
        }
    }
    if all > 0 {
        let note = "smallest --vram: the experts of a token and one more";
        out.push(line("least --vram", plan.expert_min_bytes, note));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::vram::DeviceRoom;

    const MIB: u64 = 1 << 20;

    fn plan() -> DevicePlan {
        DevicePlan {
            n_layers: 4,
            gpu_layers: 1..4,
            n_cpu_only: 0,
            head_on_device: true,
            experts_on_cpu: vec![true, true, false, false],
            dense_bytes: 300 * MIB,
            kv_bytes: 30 * MIB,
            head_bytes: 50 * MIB,
            activation_bytes: 20 * MIB,
            work_bytes: 10 * MIB,
            peer_bytes: 0,
            expert_all_bytes: 800 * MIB,
            expert_min_bytes: 9 * MIB,
            devices: vec![DeviceRoom {
                free_bytes: 800 * MIB,
                head_room_bytes: 100 * MIB,
                expert_budget_bytes: 290 * MIB,
            }],
        }
    }

    #[test]
    fn a_plan_says_what_is_where_and_which_flag_changes_it() {
        let mut out = Vec::new();
        let plan = plan();
        out.push(layers(&plan));
        experts(&["GPU 0 (x)".into()], &plan, &mut out);
        let expected = "\
dense weights of layers 1 to 3, 3 of 4 (-ngl 4)
GPU experts             290.0 MiB  36.2 % of 800.0 MiB (--vram) on GPU 0 (x); those of 2 layers \
are on the CPU (-ngl, -cmoe, -ncmoe, -ot)
least --vram              9.0 MiB  smallest --vram: the experts of a token and one more";
        assert_eq!(out.join("\n"), expected);
        let all = DevicePlan { gpu_layers: 0..4, n_cpu_only: 3, ..plan };
        let expected = "dense weights of all 4 layers (-ngl 5); 3 of them stay on the CPU, as \
                        devices have no kernels for them";
        assert_eq!(layers(&all), expected);
    }
}
