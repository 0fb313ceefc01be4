//! The rate of 8-bit multiply-adds of the vector units, from registers: the limit of prompts. A
//! multiplication and an addition are two operations.
//!
//! The loops are in assembly, so that no compiler changes the loops that are measured.

use super::{Rounds, team};
use std::time::Duration;

/// One way of multiplying integers and adding up the products.
#[derive(Clone, Copy)]
pub struct Peak {
    /// The processor feature that it needs; `scalar` for none.
    pub unit: &'static str,
    pub instructions: &'static str,
    /// Operations of one turn of the loop.
    ops: u64,
    /// Goes round so many times. Safe to call where the unit exists.
    turns: unsafe fn(u64),
}

/// Turns between two looks at the clock: some 10 µs.
const TURNS: u64 = 2000;
/// Chains of sums that do not wait for each other: more than a multiply-add's latency times the
/// instructions a cycle.
const CHAINS: u64 = 12;

const SCALAR: Peak =
    Peak { unit: "scalar", instructions: "multiply, add", ops: 2 * CHAINS, turns: scalar };

impl Peak {
    /// The units that this processor has; the AVX2 kernels use the first.
    pub fn all() -> Vec<Peak> {
        let mut out = vector_units();
        if out.is_empty() {
            out.push(SCALAR);
        }
        out
    }

    /// The limit of kernels of this name (`simd::kernels`): the best rate of the units that they
    /// may use.
    pub fn of_kernels(name: &str) -> Peak {
        match name {
            "scalar" => SCALAR,
            "avx2" | "neon" => Peak::all()[0],
            // Wider kernels take whatever is widest.
            _ => Peak::all().pop().unwrap_or(SCALAR),
        }
    }

    /// 10⁹ operations a second by so many threads.
    pub fn giga_ops_per_second(&self, n_threads: usize) -> Rounds {
        Rounds::of(|| self.round(n_threads, Rounds::TIME / 2))
    }

    fn round(&self, n_threads: usize, time: Duration) -> f64 {
        let some_turns = || {
            // SAFETY: `all` gives out only what the processor has.
            unsafe { (self.turns)(TURNS) };
            TURNS * self.ops
        };
        team::rate(n_threads, time, &some_turns) / 1e9
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn vector_units() -> Vec<Peak> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
fn vector_units() -> Vec<Peak> {
    let mut out = Vec::new();
    let mut add = |unit, instructions, lanes: u64, turns| {
        out.push(Peak { unit, instructions, ops: CHAINS * 2 * lanes, turns });
    };
    if is_x86_feature_detected!("avx2") {
        add("avx2", "vpmaddubsw, vpaddw", 32, x86::maddubs_256);
    }
    if is_x86_feature_detected!("avx512bw") {
        add("avx512bw", "vpmaddubsw, vpaddw", 64, x86::maddubs_512);
    }
    if is_x86_feature_detected!("avx512vnni") {
        add("avx512vnni", "vpdpbusd", 64, x86::dpbusd_512);
    }
    out
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    /// `turns` times: products of registers 14 and 15, whatever is in them, added to each of
    /// registers 0 to 11.
    macro_rules! turns {
        ($name:ident, $($instruction:literal),+) => {
            /// # Safety
            /// The processor has the instructions.
            pub unsafe fn $name(turns: u64) {
                // SAFETY: it uses no memory, and all vector registers are clobbered by the
                // convention that is named.
                unsafe {
                    asm!(
                        "2:",
                        ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11",
                        $($instruction,)+
                        ".endr",
                        "dec rcx",
                        "jnz 2b",
                        "vzeroupper",
                        inout("rcx") turns => _,
                        clobber_abi("sysv64"),
                        options(nostack, nomem),
                    );
                }
            }
        };
    }

    turns!(maddubs_256, "vpmaddubsw ymm13, ymm14, ymm15", "vpaddw ymm\\i, ymm\\i, ymm13");
    turns!(maddubs_512, "vpmaddubsw zmm13, zmm14, zmm15", "vpaddw zmm\\i, zmm\\i, zmm13");
    turns!(dpbusd_512, "vpdpbusd zmm\\i, zmm14, zmm15");
}

#[cfg(target_arch = "aarch64")]
fn vector_units() -> Vec<Peak> {
    let peak = |unit, instructions, turns| Peak { unit, instructions, ops: CHAINS * 2 * 16, turns };
    let mut out = vec![peak("neon", "smull, smlal2, sadalp", arm::smlal_128)];
    if std::arch::is_aarch64_feature_detected!("dotprod") {
        out.push(peak("dotprod", "sdot", arm::sdot_128));
    }
    out
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::asm;

    /// `turns` times: products of registers 30 and 31, whatever is in them, added to each of
    /// registers 0 to 11.
    macro_rules! turns {
        ($name:ident, $($instruction:literal),+) => {
            /// # Safety
            /// The processor has the instructions.
            pub unsafe fn $name(turns: u64) {
                // SAFETY: it uses no memory, and all vector registers are clobbered by the
                // convention that is named.
                unsafe {
                    asm!(
                        ".arch_extension dotprod",
                        "2:",
                        ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11",
                        $($instruction,)+
                        ".endr",
                        "subs x9, x9, #1",
                        "b.ne 2b",
                        inout("x9") turns => _,
                        clobber_abi("C"),
                        options(nostack, nomem),
                    );
                }
            }
        };
    }

    turns!(
        smlal_128,
        "smull v29.8h, v30.8b, v31.8b",
        "smlal2 v29.8h, v30.16b, v31.16b",
        "sadalp v\\i\\().4s, v29.8h"
    );
    turns!(sdot_128, "sdot v\\i\\().4s, v30.16b, v31.16b");
}

/// Chains of multiply-adds as the compiler makes them.
fn scalar(turns: u64) {
    let (a, b) = std::hint::black_box((3u32, 5u32));
    let mut chains = [1u32; CHAINS as usize];
    for _ in 0..turns {
        chains.iter_mut().for_each(|x| *x = x.wrapping_mul(a).wrapping_add(b));
    }
    std::hint::black_box(chains);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_does_more_than_nothing() {
        for peak in Peak::all().into_iter().chain([SCALAR]) {
            let rate = peak.round(1, Duration::from_millis(2));
            assert!((0.01..100_000.0).contains(&rate), "{}: {rate}", peak.unit);
        }
    }

    /// On x86-64 the loop of n instructions takes at least n/3 cycles (three vector ports), and no
    /// processor has more than 6 GHz: a count of operations that is too high shows here.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn no_unit_does_more_than_its_ports_allow() {
        for peak in Peak::all().iter().filter(|peak| peak.unit != "scalar") {
            let pairs = if peak.unit == "avx512vnni" { 1.0 } else { 2.0 };
            let ops_a_cycle = peak.ops as f64 / (CHAINS as f64 * pairs) * 4.0;
            let rate = peak.round(1, Duration::from_millis(2));
            assert!(rate < 6.0 * ops_a_cycle, "{}: {rate}", peak.unit);
        }
    }

    #[test]
    fn kernels_have_a_peak_of_their_own_unit() {
        assert_eq!(Peak::of_kernels("scalar").unit, "scalar");
        let (first, widest) = (Peak::all()[0].unit, Peak::all().pop().unwrap().unit);
        assert_eq!(Peak::of_kernels("avx2").unit, first);
        assert_eq!(Peak::of_kernels("avx512").unit, widest);
    }
}
