//! `--dry-run`: where a model's bytes would be and what that means for speed, without reading
//! them.

use super::forecast::{self, Rates, line, row};
use super::{out, plan_devices};
use crate::Result;
use crate::engine::MemoryPlan;
use crate::engine::plan::ram::{Place, Sizes};
use crate::units::{at_least, at_most, size};
use std::path::Path;

/// Prints a plan, and the speed that a model's file, or one in a folder, would have here.
pub fn print(plan: &MemoryPlan, path: Option<&Path>) -> Result<()> {
    // A GPU's rates are not measured.
    let path = path.filter(|_| plan.device.is_none());
    let rates = path.map(|path| Rates::measure(plan, path)).transpose();
    let rates = rates.inspect_err(|e| log::warn!("the speed here is not known: {e}"));
    out::line(&text(plan, rates.ok().flatten().as_ref()))
}

fn text(plan: &MemoryPlan, rates: Option<&Rates>) -> String {
    let mut lines = Vec::new();
    plan_devices::lines(plan, &mut lines);
    placement(plan, &mut lines);
    if plan.sizes.expert_bytes > 0 {
        traffic(plan, &mut lines);
    }
    lines.extend(rates.iter().flat_map(|rates| forecast::lines(plan, rates)));
    lines.join("\n")
}

/// The lines about placement.
fn placement(plan: &MemoryPlan, out: &mut Vec<String>) {
    let sizes = &plan.sizes;
    let in_memory = match plan.place {
        Place::InPlace => {
            let place = match plan.is_mapped {
                true => "resident, in place on the mapped file",
                false => "resident, read from the file into memory",
            };
            if sizes.expert_bytes > 0 {
                out.push(line("experts", sizes.expert_bytes, &format!("all {place}")));
            }
            out.push(line("dense weights", sizes.dense_bytes, place));
            sizes.expert_bytes
        }
        Place::Streamed { budget } => {
            let budget = budget.min(sizes.slot_bytes);
            let note = format!("streamed from disk (--io {})", plan.io);
            out.push(line("experts", sizes.expert_bytes, &note));
            let share = 100.0 * plan.resident_share();
            let note = format!("memory, holds {share:.1} % of them{}; {}", why(sizes), plan.policy);
            out.push(line("expert slots", budget, &note));
            out.push(line("dense weights", sizes.dense_bytes, "memory"));
            budget
        }
    };
    let note = match plan.n_sessions {
        1 => format!("memory, for {} tokens of context", plan.n_ctx),
        n if plan.shares_kv() => format!(
            "memory, for {} tokens of context that {n} texts share, each up to {}",
            plan.n_ctx_all, plan.n_ctx
        ),
        n => format!("memory, for {n} texts of {} tokens at a time", plan.n_ctx),
    };
    out.push(line("KV cache", sizes.kv_bytes - plan.page_bytes, &note));
    if plan.page_bytes > 0 {
        out.push(line("earlier texts", plan.page_bytes, "memory, for their beginnings (--kv-ram)"));
    }
    if sizes.body_bytes > 0 {
        let note = "memory, for bodies of requests and what is read of them (--body-ram)";
        out.push(line("requests", sizes.body_bytes, note));
    }
    if sizes.draft_bytes > 0 {
        out.push(line("draft model", sizes.draft_bytes, "memory, with its KV cache (-md)"));
    }
    let note = format!("memory, for {} tokens of a prompt at once (-ub)", sizes.n_ubatch);
    out.push(line("buffers", sizes.buffer_bytes, &note));
    let available = sizes.available.map(|bytes| format!("of {} available", at_most(bytes)));
    let together = in_memory + sizes.lasting_bytes() + sizes.buffer_bytes;
    out.push(line("together", together, &available.unwrap_or_default()));
}

/// Why a budget of half of the experts' bytes does not hold half of them.
fn why(sizes: &Sizes) -> String {
    let padding = sizes.slot_bytes.saturating_sub(sizes.expert_bytes);
    if padding < sizes.expert_bytes / 50 {
        return String::new();
    }
    format!(", as slots are padded to whole pages (all need {})", size(sizes.slot_bytes))
}

/// The lines about the bytes that a token needs, and about the rates of reading them.
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
    let least = at_least(plan.sizes.minimum_bytes);
    out.push(row("least budget", &least, "smallest --ram"));
}

/// The speed at which a disk delivers so many bytes a token.
fn bound(bytes: u64, hit_rate: f64) -> String {
    let hits = format!("at {:.1} % hits", 100.0 * hit_rate);
    match bytes {
        0 => hits,
        bytes => {
            let rate = 1e9 / bytes as f64;
            format!("{hits}: at most {rate:.2} tokens/s per GB/s of disk bandwidth")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::disk::IoKind;
    use crate::gguf::TensorType;

    const MIB: u64 = 1 << 20;

    fn plan(place: Place) -> MemoryPlan {
        let sizes = Sizes {
            expert_bytes: 2560 * MIB,
            slot_bytes: 2600 * MIB,
            dense_bytes: 250 * MIB,
            kv_bytes: 64 * MIB,
            body_bytes: 0,
            draft_bytes: 0,
            buffer_bytes: 36 * MIB,
            n_ubatch: 512,
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
            n_sessions: 1,
            n_ctx_all: 2048,
            page_bytes: 0,
            body_bytes: 0,
            n_ubatch: 512,
            n_moe_layers: 8,
            n_experts: 128,
            k: 8,
            expert_bytes_per_token: 160 * MIB,
            dense_bytes_per_token: 200 * MIB,
            token_types: vec![(TensorType::Q4_K, 360 * MIB)],
            n_threads: 2,
            device: None,
        }
    }

    #[test]
    fn a_streamed_plan_bounds_the_speed() {
        let expected = "\
experts                  2.50 GiB  streamed from disk (--io auto)
expert slots             1.27 GiB  memory, holds 50.0 % of them; mixtral-offloading
dense weights           250.0 MiB  memory
KV cache                 64.0 MiB  memory, for 2048 tokens of context
buffers                  36.0 MiB  memory, for 512 tokens of a prompt at once (-ub)
together                 1.61 GiB  of 2.92 GiB available
a token needs           160.0 MiB  experts, 8 of 128 in each of 8 layers
                        200.0 MiB  dense weights
a token reads           160.0 MiB  at 0.0 % hits: at most 5.96 tokens/s per GB/s of disk \
bandwidth
                         80.0 MiB  at 50.0 % hits: at most 11.92 tokens/s per GB/s of disk \
bandwidth
least budget             21.6 MiB  smallest --ram";
        assert_eq!(text(&plan(Place::Streamed { budget: 1300 * MIB }), None), expected);
    }

    /// 360 MiB at 3.6 GiB/s are a tenth of a second, products nine tenths of it; a fully missed
    /// token reads 160 MiB.
    #[test]
    fn the_speed_here_is_between_chance_and_habit() {
        let gib = f64::from(1 << 30);
        let rates = Rates { products: 3.6 * gib / 1.024, disk: Some(0.8 * gib / 1.024) };
        let text = text(&plan(Place::Streamed { budget: 1300 * MIB }), Some(&rates));
        let expected = "\
decode here           4.7–9.0 t/s  products take weights at 3.77 GB/s, the disk reads 0.84 GB/s, \
just measured
                          9.0 t/s  with 1.27 GiB more memory, for all experts";
        assert!(text.ends_with(expected), "{text}");
        let in_place = self::text(&plan(Place::InPlace), Some(&Rates { disk: None, ..rates }));
        let last = in_place.lines().last().unwrap();
        assert!(last.starts_with("decode here               9.0 t/s  products"), "{last}");
    }

    #[test]
    fn memory_of_requests_is_said() {
        let mut plan = plan(Place::InPlace);
        (plan.sizes.body_bytes, plan.page_bytes) = (512 * MIB, 16 * MIB);
        let text = text(&plan, None);
        let expected = "requests                512.0 MiB  memory, for bodies of requests";
        assert!(text.contains(expected) && text.contains("together                 3.34 GiB"));
        assert!(text.contains("KV cache                 48.0 MiB"), "{text}");
        assert!(text.contains("earlier texts            16.0 MiB"), "{text}");
    }

    /// Half of the bytes are less than half of the slots where these are padded much.
    #[test]
    fn a_share_that_surprises_is_explained() {
        let mut plan = plan(Place::Streamed { budget: 1280 * MIB });
        plan.sizes.slot_bytes = 3012 * MIB;
        let text = text(&plan, None);
        let expected = "holds 42.5 % of them, as slots are padded to whole pages (all need 2.94 \
                        GiB); mixtral-offloading";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_plan_in_place_reads_nothing() {
        let text = self::text(&plan(Place::InPlace), None);
        let expected = "\
experts                  2.50 GiB  all resident, in place on the mapped file
dense weights           250.0 MiB  resident, in place on the mapped file
KV cache                 64.0 MiB  memory, for 2048 tokens of context
buffers                  36.0 MiB  memory, for 512 tokens of a prompt at once (-ub)
together                 2.84 GiB  of 2.92 GiB available
";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("a token reads               0 B    from disk, once"), "{text}");
        let in_memory = MemoryPlan { is_mapped: false, ..plan(Place::InPlace) };
        let lines = self::text(&in_memory, None);
        let lines: Vec<&str> = lines.lines().collect();
        assert!(lines[0].ends_with("  all resident, read from the file into memory"), "{lines:?}");
        assert!(lines[1].ends_with("  resident, read from the file into memory"), "{lines:?}");
    }

    #[test]
    fn texts_that_share_memory_are_said() {
        let mut plan = plan(Place::InPlace);
        (plan.n_sessions, plan.n_ctx_all) = (4, 4096);
        let text = self::text(&plan, None);
        let expected = "memory, for 4096 tokens of context that 4 texts share, each up to 2048";
        assert!(text.contains(expected), "{text}");
        plan.n_ctx_all = 4 * 2048;
        let expected = "memory, for 4 texts of 2048 tokens at a time";
        assert!(self::text(&plan, None).contains(expected), "{text}");
    }

    /// Slots for everything: the first token of all brings what it needs, later ones nothing.
    #[test]
    fn hits_without_misses_have_no_bound() {
        let text = text(&plan(Place::Streamed { budget: 9999 * MIB }), None);
        assert!(text.contains("2.54 GiB  memory, holds 100.0 %"), "{text}");
        assert!(text.contains(" 0 B    at 100.0 % hits\n"), "{text}");
    }

    #[test]
    fn a_dense_model_has_no_experts_to_plan() {
        let mut plan = plan(Place::InPlace);
        plan.sizes.expert_bytes = 0;
        assert_eq!(text(&plan, None).lines().count(), 4);
    }
}
