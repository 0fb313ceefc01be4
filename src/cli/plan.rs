//! `--dry-run`: where a model's bytes would be and what that means for speed, without reading
//! them.

use super::stats::mib;
use super::{out, plan_devices};
use crate::Result;
use crate::engine::budget::{Place, ceil_mib};
use crate::engine::{Engine, EngineOptions, MemoryPlan};
use std::path::Path;

pub fn print(path: &Path, options: &EngineOptions) -> Result<()> {
    out::line(&text(&Engine::plan_of(path, options)?))
}

fn text(plan: &MemoryPlan) -> String {
    let mut lines = Vec::new();
    plan_devices::lines(plan, &mut lines);
    placement(plan, &mut lines);
    if plan.sizes.expert_bytes > 0 {
        traffic(plan, &mut lines);
    }
    lines.join("\n")
}

pub fn line(what: &str, bytes: u64, note: &str) -> String {
    line_of_mib(what, mib(bytes), note)
}

fn line_of_mib(what: &str, mib: f64, note: &str) -> String {
    format!("{what:<16} {mib:>12.1} MiB  {note}").trim_end().to_owned()
}

/// What is where.
fn placement(plan: &MemoryPlan, out: &mut Vec<String>) {
    let sizes = &plan.sizes;
    let in_memory = match plan.place {
        Place::InPlace => {
            let place = match plan.is_mapped {
                true => "resident, in place on the mapped file",
                false => "resident, read from the file to memory",
            };
            out.push(line("experts", sizes.expert_bytes, &format!("all {place}")));
            out.push(line("dense weights", sizes.dense_bytes, place));
            sizes.expert_bytes
        }
        Place::Streamed { budget } => {
            let budget = budget.min(sizes.slot_bytes);
            let note = format!("streamed from disk (--io {})", plan.io);
            out.push(line("experts", sizes.expert_bytes, &note));
            let share = 100.0 * plan.resident_share();
            let note = format!("memory, holds {share:.1} % of them; {}", plan.policy);
            out.push(line("expert slots", budget, &note));
            out.push(line("dense weights", sizes.dense_bytes, "memory"));
            budget
        }
    };
    let note = format!("memory, for {} tokens of context", plan.n_ctx);
    out.push(line("KV cache", sizes.kv_bytes, &note));
    let note = format!("memory, for {} tokens of a prompt at once", plan.n_ubatch.min(plan.n_ctx));
    out.push(line("buffers", sizes.buffer_bytes, &note));
    let available = sizes.available.map(|bytes| format!("of {:.1} MiB available", mib(bytes)));
    let together = in_memory + sizes.dense_bytes + sizes.kv_bytes + sizes.buffer_bytes;
    out.push(line("together", together, &available.unwrap_or_default()));
}

/// What a token needs, and how fast it can be had.
fn traffic(plan: &MemoryPlan, out: &mut Vec<String>) {
    let needed = plan.expert_bytes_per_token;
    let note = format!(
        "experts, {} of {} in each of {} layers",
        plan.k, plan.n_experts, plan.n_moe_layers
    );
    out.push(line("a token needs", needed, &note));
    out.push(line("", plan.dense_bytes_per_token, "dense weights"));
    match plan.place {
        Place::InPlace => out.push(line("a token reads", 0, "from disk, once the file is cached")),
        Place::Streamed { .. } => {
            let share = plan.resident_share();
            out.push(line("a token reads", needed, &bound(needed, 0.0)));
            let missed = (needed as f64 * (1.0 - share)).round() as u64;
            out.push(line("", missed, &bound(missed, share)));
        }
    }
    let least = ceil_mib(plan.sizes.minimum_bytes);
    out.push(line_of_mib("least budget", least, "the least that --ram may give"));
}

/// The speed at which a disk delivers so many bytes a token.
fn bound(bytes: u64, hit_rate: f64) -> String {
    let hits = format!("at {:.1} % hits", 100.0 * hit_rate);
    match bytes {
        0 => hits,
        bytes => format!("{hits}: at most {:.2} tokens/s a GB/s of the disk", 1e9 / bytes as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::budget::Sizes;
    use crate::experts::link::IoKind;

    const MIB: u64 = 1 << 20;

    fn plan(place: Place) -> MemoryPlan {
        let sizes = Sizes {
            expert_bytes: 2560 * MIB,
            slot_bytes: 2600 * MIB,
            dense_bytes: 250 * MIB,
            kv_bytes: 64 * MIB,
            buffer_bytes: 36 * MIB,
            minimum_bytes: 21 * MIB + MIB / 2 + 1,
            available: Some(3000 * MIB),
        };
        MemoryPlan {
            sizes,
            place,
            is_mapped: true,
            io: IoKind::Auto,
            policy: "mixtral-offloading".parse().expect("a policy"),
            n_ctx: 2048,
            n_ubatch: 512,
            n_moe_layers: 8,
            n_experts: 128,
            k: 8,
            expert_bytes_per_token: 160 * MIB,
            dense_bytes_per_token: 200 * MIB,
            device: None,
        }
    }

    #[test]
    fn a_streamed_plan_bounds_the_speed() {
        let expected = "\
experts                2560.0 MiB  streamed from disk (--io auto)
expert slots           1300.0 MiB  memory, holds 50.0 % of them; mixtral-offloading
dense weights           250.0 MiB  memory
KV cache                 64.0 MiB  memory, for 2048 tokens of context
buffers                  36.0 MiB  memory, for 512 tokens of a prompt at once
together               1650.0 MiB  of 3000.0 MiB available
a token needs           160.0 MiB  experts, 8 of 128 in each of 8 layers
                        200.0 MiB  dense weights
a token reads           160.0 MiB  at 0.0 % hits: at most 5.96 tokens/s a GB/s of the disk
                         80.0 MiB  at 50.0 % hits: at most 11.92 tokens/s a GB/s of the disk
least budget             21.6 MiB  the least that --ram may give";
        assert_eq!(text(&plan(Place::Streamed { budget: 1300 * MIB })), expected);
    }

    #[test]
    fn a_plan_in_place_reads_nothing() {
        let text = self::text(&plan(Place::InPlace));
        let expected = "\
experts                2560.0 MiB  all resident, in place on the mapped file
dense weights           250.0 MiB  resident, in place on the mapped file
KV cache                 64.0 MiB  memory, for 2048 tokens of context
buffers                  36.0 MiB  memory, for 512 tokens of a prompt at once
together               2910.0 MiB  of 3000.0 MiB available
";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("a token reads             0.0 MiB  from disk, once"), "{text}");
        let in_memory = MemoryPlan { is_mapped: false, ..plan(Place::InPlace) };
        let lines = self::text(&in_memory);
        let lines: Vec<&str> = lines.lines().collect();
        assert!(lines[0].ends_with("  all resident, read from the file to memory"), "{lines:?}");
        assert!(lines[1].ends_with("  resident, read from the file to memory"), "{lines:?}");
    }

    /// Slots for everything: the first token of all brings what it needs, later ones nothing.
    #[test]
    fn hits_without_misses_have_no_bound() {
        let text = text(&plan(Place::Streamed { budget: 9999 * MIB }));
        assert!(text.contains("2600.0 MiB  memory, holds 100.0 %"), "{text}");
        assert!(text.contains(" 0.0 MiB  at 100.0 % hits\n"), "{text}");
    }

    #[test]
    fn a_dense_model_has_no_experts_to_plan() {
        let mut plan = plan(Place::InPlace);
        plan.sizes.expert_bytes = 0;
        assert_eq!(text(&plan).lines().count(), 5);
    }
}
