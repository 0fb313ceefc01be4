//! The memory for experts, and their place: the mapped file if everything fits, else slots. Pure:
//! the machine's and the model's sizes are parameters.

use std::str::FromStr;

use crate::experts::disk::IoKind;
use crate::units::{Sum, at_least, at_most};
use crate::{Error, Result};

/// `--ram`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RamBudget {
    /// The available memory less everything else that the model needs.
    #[default]
    Auto,
    Bytes(u64),
    /// A part of the model's expert bytes; more than 100 is 100.
    Percent(f64),
}

/// `--vram`: as `--ram`, of the devices' memory.
pub type VramBudget = RamBudget;

impl RamBudget {
    /// The given budget in bytes; `None` for [`RamBudget::Auto`].
    pub(in crate::engine) fn bytes(self, whole: u64) -> Option<u64> {
        match self {
            RamBudget::Auto => None,
            RamBudget::Bytes(bytes) => Some(bytes),
            RamBudget::Percent(percent) => Some((whole as f64 * percent.min(100.0) / 100.0) as u64),
        }
    }
}

impl FromStr for RamBudget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if text.eq_ignore_ascii_case("auto") {
            return Ok(RamBudget::Auto);
        }
        let budget = match text.strip_suffix('%') {
            Some(percent) => {
                number(percent).filter(|percent| *percent <= 100.0).map(RamBudget::Percent)
            }
            None => size(text).map(RamBudget::Bytes),
        };
        budget.ok_or_else(|| {
            let expected = "expected bytes with K, M, G or T as in 1.5G, a percentage of the \
                            experts as in 50%, at most 100%, or auto";
            Error::Usage(expected.into())
        })
    }
}

/// Bytes: `1.5G`, `1.5GB` and `1.5GiB` are the same, and none is not a size.
fn size(text: &str) -> Option<u64> {
    let text = text.to_ascii_uppercase();
    let text = text.strip_suffix('B').map_or(text.as_str(), |t| t.strip_suffix('I').unwrap_or(t));
    let units = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
    let unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(*unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    let bytes = number(digits)? * (1u64 << shift) as f64;
    // A slip of the finger, and more than f64 counts exactly.
    (1.0..=(1u64 << 53) as f64).contains(&bytes).then_some(bytes as u64)
}

/// A positive decimal number. Rust would also read `inf`, `NaN` and `1e9`.
fn number(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let value: f64 = text.parse().ok().filter(|_| plain)?;
    (value > 0.0 && value.is_finite()).then_some(value)
}

/// Bytes that a plan depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub expert_bytes: u64,
    /// All experts in slots, padding included.
    pub slot_bytes: u64,
    pub dense_bytes: u64,
    pub kv_bytes: u64,
    /// Bodies of a server's requests and what is read of them.
    pub body_bytes: u64,
    /// A model that drafts, with its KV caches and activations.
    pub draft_bytes: u64,
    /// Activations of a micro-batch, while a prompt is computed.
    pub buffer_bytes: u64,
    pub n_ubatch: usize,
    /// The least budget that streaming works with: what one token needs at once.
    pub minimum_bytes: u64,
    /// Available memory; `None` if the system does not say.
    pub available: Option<u64>,
}

impl Sizes {
    /// Dense weights, texts, requests and a model that drafts: all but experts and activations.
    pub fn lasting_bytes(&self) -> u64 {
        self.dense_bytes + self.kv_bytes + self.body_bytes + self.draft_bytes
    }
}

/// The place of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the mapped file: nothing is copied and nothing bounded.
    InPlace,
    /// In slots that together take at most so many bytes.
    Streamed { budget: u64 },
}

/// Kept free in an automatic budget, half of it for buffers, the rest for threads and other
/// programs.
const HEAD_ROOM: u64 = 256 << 20;

/// `HEAD_ROOM` or a twentieth of what is available, whichever is more; but never more than half of
/// it, so that a small model runs in a small container.
fn head_room(available: u64) -> u64 {
    HEAD_ROOM.max(available / 20).min(available / 2)
}

/// The available memory less head-room: what models have together.
pub fn room(available: u64) -> u64 {
    available.saturating_sub(head_room(available))
}

/// The available memory less head-room, dense weights, KV cache and the buffers beyond half of the
/// head-room.
fn left_for_experts(available: u64, sizes: &Sizes) -> u64 {
    let head_room = head_room(available);
    let buffers = sizes.buffer_bytes.saturating_sub(head_room / 2);
    room(available).saturating_sub(sizes.lasting_bytes() + buffers)
}

/// Whether there is room for the buffers in `sizes` where smaller ones have led to `place`: experts
/// that are all in memory stay there, as does a budget given by the user, and an automatic one
/// shrinks by an eighth at most. A prompt gains by larger micro-batches what decode would lose.
pub fn has_room(ram: RamBudget, place: Place, sizes: &Sizes) -> bool {
    let Some(available) = sizes.available else { return true };
    let needed = match place {
        Place::InPlace => sizes.expert_bytes,
        Place::Streamed { budget } if ram == RamBudget::Auto && budget < sizes.slot_bytes => {
            (budget - budget / 8).max(sizes.minimum_bytes)
        }
        Place::Streamed { budget } => budget,
    };
    left_for_experts(available, sizes) >= needed
}

/// The automatic budget is what everything else leaves; if the experts fit that, they stay in
/// place. A budget given by the user is taken at its word.
pub fn plan(ram: RamBudget, io: IoKind, sizes: &Sizes) -> Result<Place> {
    let asked = ram.bytes(sizes.expert_bytes);
    let bounded = asked.is_some_and(|bytes| bytes < sizes.expert_bytes);
    match io {
        _ if sizes.expert_bytes == 0 => Ok(Place::InPlace),
        IoKind::Mmap if bounded => Err(Error::Usage(
            "--io mmap leaves the experts to the page cache, which --ram cannot bound: give one \
             of the two"
                .into(),
        )),
        IoKind::Mmap => Ok(Place::InPlace),
        _ => match asked {
            Some(bytes) if bounded => explicit(bytes, sizes),
            Some(_) => Ok(everything(io, sizes)),
            None => automatic(io, sizes),
        },
    }
}

/// Whether all weights can be in memory of their own.
pub fn check_copy(io: IoKind, sizes: &Sizes) -> Result<()> {
    if io == IoKind::Mmap {
        let why =
            "--io mmap computes on the mapped file, and --no-mmap does not: give one of the two";
        return Err(Error::Usage(why.into()));
    }
    let needed = sizes.expert_bytes + sizes.lasting_bytes();
    match sizes.available.filter(|available| *available < needed) {
        None => Ok(()),
        Some(available) => Err(Error::invalid(format!(
            "--no-mmap needs {} of memory for weights and KV cache, but {} are available: leave it \
             out",
            at_least(needed),
            at_most(available)
        ))),
    }
}

/// An explicit way to read is taken, even if every expert is then read just once.
fn everything(io: IoKind, sizes: &Sizes) -> Place {
    match io {
        IoKind::Auto | IoKind::Mmap => Place::InPlace,
        IoKind::Uring | IoKind::Pread => Place::Streamed { budget: sizes.slot_bytes },
    }
}

fn explicit(budget: u64, sizes: &Sizes) -> Result<Place> {
    if budget < sizes.minimum_bytes {
        return Err(Error::invalid(format!(
            "--ram gives the experts {}, but a token needs {} at once: raise it to that or \
             more{}",
            at_most(budget),
            at_least(sizes.minimum_bytes),
            if budget < 1024 { format!(", as {budget}G") } else { String::new() }
        )));
    }
    Ok(Place::Streamed { budget })
}

fn automatic(io: IoKind, sizes: &Sizes) -> Result<Place> {
    let Some(available) = sizes.available else { return Ok(everything(io, sizes)) };
    let budget = left_for_experts(available, sizes);
    let whole = match everything(io, sizes) {
        Place::InPlace => sizes.expert_bytes,
        Place::Streamed { budget } => budget,
    };
    if budget >= whole {
        return Ok(everything(io, sizes));
    }
    if budget < sizes.minimum_bytes {
        return Err(no_room(available, sizes));
    }
    Ok(Place::Streamed { budget })
}

/// The error that lists the available memory and the least that is needed, part by part.
fn no_room(available: u64, sizes: &Sizes) -> Error {
    let head_room = head_room(available);
    let n = sizes.n_ubatch;
    let tokens = if n == 1 { "token" } else { "tokens" };
    let sum = Sum::of(&[
        ("dense weights".into(), sizes.dense_bytes),
        ("KV cache".into(), sizes.kv_bytes),
        (format!("buffers for {n} {tokens}"), sizes.buffer_bytes),
        ("experts of a token".into(), sizes.minimum_bytes),
        // Half of the head-room is for buffers.
        ("kept free".into(), head_room - sizes.buffer_bytes.min(head_room / 2)),
    ]);
    Error::invalid(format!(
        "not enough memory: {} are available, but {} are needed ({}): lower -c, or set --ram if \
         you know that more is available",
        sum.there_is(available),
        sum.total(),
        sum.parts()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn ram(text: &str) -> RamBudget {
        text.parse().unwrap()
    }

    #[test]
    fn weights_are_copied_where_there_is_room() {
        let sizes = Sizes { expert_bytes: 60 << 20, dense_bytes: 30 << 20, ..sizes(1) };
        let with = |io, available| {
            let sizes = Sizes { kv_bytes: 10 << 20, available, ..sizes };
            check_copy(io, &sizes).map_err(|e| e.to_string())
        };
        assert_eq!(with(IoKind::Auto, None), Ok(()));
        assert_eq!(with(IoKind::Auto, Some(100 << 20)), Ok(()));
        let refused = with(IoKind::Auto, Some(99 << 20)).unwrap_err();
        assert!(refused.contains("100.0 MiB") && refused.contains("99.0 MiB"), "{refused}");
        assert!(with(IoKind::Mmap, None).unwrap_err().contains("--io mmap"));
    }

    #[test]
    fn sizes_are_bytes_with_units_or_percentages() {
        let bytes = |text| match ram(text) {
            RamBudget::Bytes(bytes) => bytes,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(bytes("4096"), 4096);
        assert_eq!(bytes("12B"), 12);
        assert_eq!(bytes("1.5K"), 1536);
        assert_eq!(bytes(" 2m "), 2 * MIB);
        for text in ["1.5G", "1.5g", "1.5GB", "1.5GiB", "1.5gib", "1536M"] {
            assert_eq!(bytes(text), 1536 * MIB, "{text}");
        }
        assert_eq!(bytes("2T"), 2 << 40);
        assert_eq!(ram("50%"), RamBudget::Percent(50.0));
        assert_eq!(ram("0.5%"), RamBudget::Percent(0.5));
        assert_eq!(ram("auto"), RamBudget::Auto);
    }

    #[test]
    fn other_texts_are_no_sizes() {
        let bad = [
            "",
            " ",
            "G",
            "B",
            "iB",
            "%",
            "0",
            "0K",
            "0%",
            "-1",
            "-1%",
            "1e9",
            "inf",
            "NaN",
            "inf%",
            "1 G",
            "1.5.0G",
            ".",
            "1,5G",
            "5P",
            "5KG",
            "5Ki",
            "5i",
            "0.1",
            "99999999T",
            "+1",
            "½G",
            "0x10",
            "50%%",
            "100.1%",
            "300%",
            "fifty",
        ];
        for text in bad {
            let message = text.parse::<RamBudget>().map(|b| format!("{text:?} is {b:?}"));
            assert!(message.as_ref().unwrap_err().to_string().contains("1.5G"), "{message:?}");
        }
    }

    #[test]
    fn ways_to_read_have_names() {
        for name in ["auto", "uring", "pread", "mmap"] {
            assert_eq!(name.parse::<IoKind>().unwrap().to_string(), name);
        }
        assert!("dma".parse::<IoKind>().unwrap_err().to_string().contains("pread"));
    }

    /// 1000 MiB of experts, 100 of dense weights, 300 of KV, 40 a token.
    fn sizes(available_mib: u64) -> Sizes {
        Sizes {
            expert_bytes: 1000 * MIB,
            slot_bytes: 1010 * MIB,
            dense_bytes: 100 * MIB,
            kv_bytes: 300 * MIB,
            body_bytes: 0,
            draft_bytes: 0,
            buffer_bytes: 0,
            n_ubatch: 512,
            minimum_bytes: 40 * MIB,
            available: Some(available_mib * MIB),
        }
    }

    const fn streamed(mib: u64) -> Place {
        Place::Streamed { budget: mib * MIB }
    }

    fn planned(text: &str, io: IoKind, sizes: &Sizes) -> Place {
        plan(ram(text), io, sizes).unwrap()
    }

    #[test]
    fn the_automatic_budget_is_what_is_left() {
        // 1656 = 1000 + 100 + 300 + 256
        assert_eq!(planned("auto", IoKind::Auto, &sizes(1656)), Place::InPlace);
        assert_eq!(planned("auto", IoKind::Auto, &sizes(1655)), streamed(999));
        assert_eq!(planned("auto", IoKind::Auto, &sizes(696)), streamed(40));
        assert_eq!(planned("auto", IoKind::Auto, &sizes(1 << 20)), Place::InPlace);
        assert_eq!(
            planned("auto", IoKind::Auto, &Sizes { available: None, ..sizes(0) }),
            Place::InPlace
        );
        // With everything in slots their padding counts too.
        assert_eq!(planned("auto", IoKind::Uring, &sizes(1666)), streamed(1010));
        assert_eq!(planned("auto", IoKind::Pread, &sizes(1665)), streamed(1009));
        assert_eq!(planned("auto", IoKind::Mmap, &sizes(10)), Place::InPlace);
    }

    #[test]
    fn head_room_grows_with_memory_and_shrinks_in_small_containers() {
        assert_eq!(head_room(100 * MIB), 50 * MIB);
        assert_eq!(head_room(1000 * MIB), 256 * MIB);
        assert_eq!(head_room(20_000 * MIB), 1000 * MIB);
        let small = Sizes {
            expert_bytes: 4 * MIB,
            dense_bytes: MIB,
            kv_bytes: MIB,
            available: Some(200 * MIB),
            ..sizes(0)
        };
        assert_eq!(planned("auto", IoKind::Auto, &small), Place::InPlace);
    }

    #[test]
    fn buffers_count_beyond_half_of_the_head_room() {
        let with = |mib: u64, available| Sizes { buffer_bytes: mib * MIB, ..sizes(available) };
        for (buffers, available) in [(0, 1656), (128, 1656), (129, 1657), (300, 1828)] {
            assert_eq!(
                planned("auto", IoKind::Auto, &with(buffers, available)),
                Place::InPlace,
                "{buffers}"
            );
            assert_eq!(
                planned("auto", IoKind::Auto, &with(buffers, available - 1)),
                streamed(999),
                "{buffers}"
            );
        }
    }

    /// With 328 MiB of buffers, of which 128 are in the head-room.
    #[test]
    fn larger_buffers_leave_experts_where_they_are() {
        let fits = |ram_text: &str, io, available| {
            let large = Sizes { buffer_bytes: 328 * MIB, ..sizes(available) };
            has_room(ram(ram_text), planned(ram_text, io, &sizes(available)), &large)
        };
        assert!(fits("auto", IoKind::Auto, 1856) && !fits("auto", IoKind::Auto, 1855));
        assert!(fits("auto", IoKind::Uring, 1866) && !fits("auto", IoKind::Uring, 1865));
        assert!(!fits("auto", IoKind::Auto, 1655), "would leave 799 of 999");
        let small = |available| {
            let large = Sizes { buffer_bytes: 228 * MIB, ..sizes(available) };
            let place = planned("auto", IoKind::Auto, &sizes(available));
            (has_room(RamBudget::Auto, place, &large), planned("auto", IoKind::Auto, &large))
        };
        // 800 of 900 MiB, and 699 of 799.
        assert_eq!(small(1556), (true, streamed(800)));
        assert_eq!(small(1455), (false, streamed(699)));
        // A given budget is not touched: 500 + 100 + 300 + 256 + 200.
        assert!(fits("500M", IoKind::Auto, 1356) && !fits("500M", IoKind::Auto, 1355));
        // A mapped file that memory does not hold.
        assert!(!fits("auto", IoKind::Mmap, 1000));
        let unknown = Sizes { available: None, ..sizes(0) };
        assert!(has_room(RamBudget::Auto, Place::InPlace, &unknown));
    }

    #[test]
    fn memory_that_no_token_fits_is_an_error_that_adds_up() {
        let message = plan(RamBudget::Auto, IoKind::Auto, &sizes(695)).unwrap_err().to_string();
        let expected = "not enough memory: 695.0 MiB are available, but 696.0 MiB are needed \
                        (dense weights 100.0 MiB, KV cache 300.0 MiB, experts of a token 40.0 MiB, \
                        kept free 256.0 MiB): lower -c, or set --ram if you know that more is \
                        available";
        assert_eq!(message, expected);
        // Of 201.5 MiB of buffers 128 are in the head-room. As a newcomer met it: 687.7 MiB in all.
        let sizes = Sizes {
            dense_bytes: 3562 * MIB / 10,
            kv_bytes: 8 * MIB,
            buffer_bytes: 2015 * MIB / 10,
            minimum_bytes: 239 * MIB / 10,
            available: Some(6877 * MIB / 10 + 1),
            ..sizes(0)
        };
        let message = plan(RamBudget::Auto, IoKind::Auto, &sizes).unwrap_err().to_string();
        for word in ["687.7 MiB are available, but 717.6 MiB are needed", "free 128.0 MiB)"] {
            assert!(message.contains(word), "{message}");
        }
        assert!(message.contains("buffers for 512 tokens 201.5 MiB"), "{message}");
    }

    #[test]
    fn a_given_budget_is_taken_at_its_word() {
        // Whatever is available.
        assert_eq!(planned("500M", IoKind::Auto, &sizes(1)), streamed(500));
        assert_eq!(planned("25%", IoKind::Pread, &sizes(1)), streamed(250));
        assert_eq!(planned("40M", IoKind::Uring, &sizes(1)), streamed(40));
        for text in ["1000M", "2G", "100%"] {
            assert_eq!(planned(text, IoKind::Auto, &sizes(1)), Place::InPlace, "{text}");
            assert_eq!(planned(text, IoKind::Mmap, &sizes(1)), Place::InPlace, "{text}");
            assert_eq!(planned(text, IoKind::Uring, &sizes(1)), streamed(1010), "{text}");
            assert_eq!(planned(text, IoKind::Pread, &sizes(1)), streamed(1010), "{text}");
        }
    }

    #[test]
    fn budgets_below_a_token_are_refused_with_the_minimum() {
        let error = plan(ram("39M"), IoKind::Auto, &sizes(1)).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, Error::Invalid(_)));
        for word in ["--ram", "39.0 MiB", "40.0 MiB"] {
            assert!(message.contains(word), "{message}");
        }
        // What the message names is enough.
        let odd = Sizes { minimum_bytes: 40 * MIB + 1, ..sizes(1) };
        let message = plan(ram("40M"), IoKind::Auto, &odd).unwrap_err().to_string();
        assert!(message.contains("40.1 MiB"), "{message}");
        assert!(plan(ram("40.1M"), IoKind::Auto, &odd).is_ok());
    }

    #[test]
    fn a_mapped_file_has_no_budget() {
        let error = plan(ram("50%"), IoKind::Mmap, &sizes(1)).unwrap_err();
        assert!(matches!(error, Error::Usage(_)));
        let message = error.to_string();
        assert!(message.contains("--io mmap") && message.contains("--ram"), "{message}");
    }

    #[test]
    fn a_model_without_experts_needs_no_budget() {
        let dense = Sizes { expert_bytes: 0, slot_bytes: 0, minimum_bytes: 0, ..sizes(1) };
        for text in ["auto", "1", "50%"] {
            for io in [IoKind::Auto, IoKind::Uring, IoKind::Mmap] {
                assert_eq!(planned(text, io, &dense), Place::InPlace);
            }
        }
    }
}
