//! The section "auto" of the profile: the judge's record, with candidates by name. Layout,
//! little-endian: version (u32); numbers of the kept candidate and of the next challenger, and the
//! challengers that are left (u8 each); short windows until its bout and between bouts (u32 each);
//! the bout that is not over: pairs of windows (u8, 0 without one), sums of their logarithms and of
//! the squares (f64 each); for each candidate its name (u8 length, UTF-8) and how many times as
//! long as with the kept one a token takes with it (f64), 0 where that is not known.

use super::judge::{BoutSoFar, Record};

const VERSION: u32 = 4;

pub fn encode(record: &Record, names: &[&str]) -> Vec<u8> {
    let Record { kept, ratios, next, bout, wait, interval, left } = record;
    let mut bytes = VERSION.to_le_bytes().to_vec();
    bytes.extend([*kept as u8, *next as u8, *left as u8]);
    bytes.extend(wait.to_le_bytes());
    bytes.extend(interval.to_le_bytes());
    bytes.push(bout.n as u8);
    bytes.extend(bout.sum.to_le_bytes());
    bytes.extend(bout.squares.to_le_bytes());
    for (name, ratio) in names.iter().zip(ratios) {
        bytes.push(name.len() as u8);
        bytes.extend(name.as_bytes());
        bytes.extend(ratio.unwrap_or_default().to_le_bytes());
    }
    bytes
}

/// The record of the candidates `names`: those that are gone are forgotten, and new ones have not
/// been tried. `None` if the bytes are damaged or of another version, or if the kept candidate is
/// gone.
pub fn decode(bytes: &[u8], names: &[&str]) -> Option<Record> {
    let (version, bytes) = bytes.split_first_chunk()?;
    if u32::from_le_bytes(*version) != VERSION {
        return None;
    }
    let ([kept, next, left], bytes) = bytes.split_first_chunk()?;
    let (wait, bytes) = bytes.split_first_chunk()?;
    let (interval, bytes) = bytes.split_first_chunk()?;
    let (n, bytes) = bytes.split_first()?;
    let (sum, bytes) = bytes.split_first_chunk()?;
    let (squares, bytes) = bytes.split_first_chunk()?;
    let known = candidates(bytes)?;
    let place = |i: u8| {
        let (name, _) = known.get(usize::from(i))?;
        names.iter().position(|new| new.as_bytes() == *name)
    };
    let ratio = |name: &&str| known.iter().find(|(old, _)| *old == name.as_bytes())?.1;
    let bout = BoutSoFar {
        n: u32::from(*n),
        sum: f64::from_le_bytes(*sum),
        squares: f64::from_le_bytes(*squares),
    };
    let fresh = Record::new(names.len());
    let mut record = Record {
        kept: place(*kept)?,
        ratios: names.iter().map(ratio).collect(),
        wait: u32::from_le_bytes(*wait),
        interval: u32::from_le_bytes(*interval),
        left: usize::from(*left).clamp(fresh.left.min(1), fresh.left),
        ..fresh
    };
    record.next = (record.kept + 1) % names.len();
    if let Some(next) = place(*next).filter(|next| *next != record.kept) {
        (record.next, record.bout) = (next, bout);
    }
    record.is_sound().then_some(record)
}

/// The candidates' names and ratios.
fn candidates(mut bytes: &[u8]) -> Option<Vec<(&[u8], Option<f64>)>> {
    let mut candidates = Vec::new();
    while let Some((n, rest)) = bytes.split_first() {
        let (name, rest) = rest.split_at_checked((*n).into())?;
        let (ratio, rest) = rest.split_first_chunk()?;
        let ratio = f64::from_le_bytes(*ratio);
        candidates.push((name, (ratio != 0.0).then_some(ratio)));
        bytes = rest;
    }
    Some(candidates)
}
