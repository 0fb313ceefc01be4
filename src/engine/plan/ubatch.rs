//! The number of a prompt's tokens that are computed at once (`-ub`). Pure: a function gives the
//! plan for each number.

use crate::engine::EngineOptions;
use crate::engine::plan::ram;
use crate::engine::plan::ram::{Place, Sizes};
use crate::{Error, Result};

/// Used without `-ub`, as in llama.cpp.
const USUAL: usize = 512;
const LARGEST: usize = 2048;

/// Below this a prompt on the CPU, or through a disk, is several times as slow as with `USUAL`.
const SLOW: usize = 128;

/// The value of `-ub`, or the usual number.
pub fn usual(options: &EngineOptions) -> usize {
    options.n_ubatch.unwrap_or(USUAL).min(options.n_batch)
}

/// Plans for `n` tokens at once. If there is no room for that: for the largest smaller number that
/// there is room for, unless the user gave `n`; the error then names it.
pub fn with_room<T>(
    n: usize,
    is_given: bool,
    plan: &dyn Fn(usize) -> Result<T>,
) -> Result<(usize, T)> {
    let why = match plan(n) {
        Ok(plan) => return Ok((n, plan)),
        Err(why) => why,
    };
    match smaller(n).find_map(|n| Some((n, plan(n).ok()?))) {
        Some((fits, _)) if is_given => Err(Error::invalid(format!("{why}; -ub {fits} would fit"))),
        Some(fits) => Ok(fits),
        None if is_given => Err(why),
        // The sum of the least that was tried.
        None => plan(1).map(|plan| (1, plan)),
    }
}

/// Powers of two below `n`, the largest first.
fn smaller(n: usize) -> impl Iterator<Item = usize> {
    let largest = n.saturating_sub(1).checked_ilog2().map(|shift| 1 << shift);
    std::iter::successors(largest, |n| Some(n / 2).filter(|n| *n > 0))
}

/// The number of tokens, with the sizes and the place that follow from it. `first` is tried first;
/// if the flags leave the number open and it `may_grow`, it becomes as large as memory allows.
pub fn choose(
    options: &EngineOptions,
    first: usize,
    may_grow: bool,
    sizes: &dyn Fn(usize) -> Sizes,
) -> Result<(usize, Sizes, Place)> {
    let place = |n: usize| ram::plan(options.ram, options.io, &sizes(n));
    let is_given = options.n_ubatch.is_some();
    let (n, first_place) = with_room(first, is_given, &place)?;
    if is_given || !may_grow || n < first {
        return Ok((n, sizes(n), first_place));
    }
    let larger = [LARGEST, LARGEST / 2].map(|n| n.min(options.n_batch));
    let fits = |n: &usize| *n > first && ram::has_room(options.ram, first_place, &sizes(*n));
    let n = larger.into_iter().find(fits).unwrap_or(first);
    Ok((n, sizes(n), place(n)?))
}

/// Says that a prompt is computed in smaller parts than usual, and why.
pub fn log_reduction(options: &EngineOptions, n: usize) {
    let usual = usual(options);
    if n >= usual {
        return;
    }
    let level = if n < SLOW { log::Level::Warn } else { log::Level::Info };
    let slower = if n < SLOW { ", which makes prompts slower" } else { "" };
    log::log!(
        level,
        "memory is tight: {n} tokens of a prompt are computed at once instead of {usual} (-ub \
         {n}){slower}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::ram::RamBudget;

    const MIB: u64 = 1 << 20;

    /// 1000 MiB of experts, 100 of dense weights, 300 of KV cache, 40 for a token's experts, and a
    /// MiB of buffers for each token of a prompt.
    fn sizes(available: u64) -> impl Fn(usize) -> Sizes {
        move |n| Sizes {
            expert_bytes: 1000 * MIB,
            slot_bytes: 1010 * MIB,
            dense_bytes: 100 * MIB,
            kv_bytes: 300 * MIB,
            body_bytes: 0,
            draft_bytes: 0,
            buffer_bytes: n as u64 * MIB,
            n_ubatch: n,
            minimum_bytes: 40 * MIB,
            available: Some(available * MIB),
        }
    }

    fn chosen(options: &EngineOptions, available: u64) -> Result<(usize, Place)> {
        let (n, chosen, place) = choose(options, usual(options), true, &sizes(available))?;
        assert_eq!(chosen, sizes(available)(n));
        Ok((n, place))
    }

    fn given(n: usize) -> EngineOptions {
        EngineOptions { n_ubatch: Some(n), ..EngineOptions::default() }
    }

    #[test]
    fn numbers_to_try_are_powers_of_two_down_to_one() {
        let all = |n| smaller(n).collect::<Vec<_>>();
        assert_eq!(all(512), [256, 128, 64, 32, 16, 8, 4, 2, 1]);
        assert_eq!(all(100), [64, 32, 16, 8, 4, 2, 1]);
        assert_eq!(all(2), [1]);
        assert!(all(1).is_empty() && all(0).is_empty());
    }

    /// 100 + 300 + 40 and 256 that stay free are 696 MiB, in which 128 MiB of buffers have room.
    #[test]
    fn small_memory_gets_smaller_micro_batches_before_it_is_refused() {
        let auto = EngineOptions::default();
        let n = |available| chosen(&auto, available).unwrap().0;
        assert_eq!(n(1080), 512);
        assert_eq!(n(1079), 256);
        assert_eq!(n(824), 256);
        assert_eq!((n(823), n(696)), (128, 128));
        // What is left goes to the experts.
        let (n, place) = chosen(&auto, 823).unwrap();
        assert_eq!((n, place), (128, Place::Streamed { budget: 167 * MIB }));
        // Half of the head-room is never for buffers, however few there are.
        let message = chosen(&auto, 695).unwrap_err().to_string();
        assert!(message.contains("buffers for 1 token 1.0 MiB"), "{message}");
        assert!(!message.contains("-ub"), "{message}");
    }

    #[test]
    fn a_given_number_is_kept_or_refused_with_one_that_fits() {
        assert_eq!(chosen(&given(512), 1080).unwrap().0, 512);
        let message = chosen(&given(512), 1079).unwrap_err().to_string();
        assert!(message.contains("buffers for 512 tokens 0.50 GiB"), "{message}");
        assert!(message.ends_with("; -ub 256 would fit"), "{message}");
        let message = chosen(&given(300), 823).unwrap_err().to_string();
        assert!(message.ends_with("; -ub 128 would fit"), "{message}");
        let message = chosen(&given(300), 600).unwrap_err().to_string();
        assert!(!message.contains("would fit"), "{message}");
    }

    #[test]
    fn what_more_room_does_not_help_is_refused_as_it_is() {
        let ram = RamBudget::Bytes(MIB);
        for options in [EngineOptions { ram, ..given(64) }, EngineOptions { ram, ..given(1) }] {
            let message = chosen(&options, 5000).unwrap_err().to_string();
            assert!(message.contains("--ram") && !message.contains("-ub"), "{message}");
        }
    }

    #[test]
    fn large_memory_gets_larger_ones() {
        let auto = EngineOptions::default();
        assert_eq!(chosen(&auto, 9000).unwrap(), (2048, Place::InPlace));
        let small = EngineOptions { n_batch: 700, ..EngineOptions::default() };
        assert_eq!(chosen(&small, 9000).unwrap(), (700, Place::InPlace));
        assert_eq!(choose(&auto, 512, false, &sizes(9000)).unwrap().0, 512);
    }
}
