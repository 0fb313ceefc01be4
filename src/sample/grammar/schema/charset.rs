//! Sets of characters, as classes of regular expressions have them.

use std::fmt::Write as _;

/// Ranges of code points, first and last.
type Ranges = [(u32, u32)];

pub const DIGIT: &Ranges = &[(0x30, 0x39)];
pub const WORD: &Ranges = &[(0x30, 0x39), (0x41, 0x5a), (0x5f, 0x5f), (0x61, 0x7a)];
/// ECMAScript's white space and ends of lines.
pub const SPACE: &Ranges = &[
    (0x09, 0x0d),
    (0x20, 0x20),
    (0xa0, 0xa0),
    (0x1680, 0x1680),
    (0x2000, 0x200a),
    (0x2028, 0x2029),
    (0x202f, 0x202f),
    (0x205f, 0x205f),
    (0x3000, 0x3000),
    (0xfeff, 0xfeff),
];
pub const LINE_END: &Ranges = &[(0x0a, 0x0a), (0x0d, 0x0d), (0x2028, 0x2029)];

const LAST: u32 = 0x10ffff;
const SURROGATES: (u32, u32) = (0xd800, 0xdfff);

/// The first character that takes a surrogate pair.
const ASTRAL: u32 = 0x10000;

/// A set of characters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CharSet {
    ranges: Vec<(u32, u32)>,
    /// Classes of the regex crate that belong to it.
    properties: Vec<String>,
    /// Whether the set is all other characters. Only one with properties is.
    is_negated: bool,
}

impl CharSet {
    pub fn of(ranges: &Ranges) -> CharSet {
        CharSet { ranges: ranges.to_vec(), ..CharSet::default() }
    }

    pub fn all() -> CharSet {
        CharSet::of(&[(0, LAST)])
    }

    pub fn code(code: u32) -> CharSet {
        CharSet::of(&[(code, code)])
    }

    pub fn one(c: char) -> CharSet {
        CharSet::code(c.into())
    }

    /// A class as the regex crate writes it.
    pub fn property(text: String) -> CharSet {
        CharSet { properties: vec![text], ..CharSet::default() }
    }

    pub fn add(&mut self, other: CharSet) {
        self.ranges.extend(other.ranges);
        self.properties.extend(other.properties);
    }

    /// The set's only character.
    pub fn single(&self) -> Option<u32> {
        match (self.ranges.as_slice(), self.properties.is_empty()) {
            ([(first, last)], true) if first == last => Some(*first),
            _ => None,
        }
    }

    /// The set of a class that is read to its end. Halves of surrogate pairs are in no text: a
    /// class of all of them is meant to have what the pairs stand for; one of some has no meaning.
    pub fn finished(mut self, is_negated: bool) -> Result<CharSet, String> {
        self.merge();
        let (first, last) = SURROGATES;
        let has_all = self.ranges.iter().any(|range| range.0 <= first && last <= range.1);
        let has_some = self.ranges.iter().any(|range| range.0 <= last && first <= range.1);
        match (is_negated, has_some, has_all) {
            (false, true, false) => return Err(LONE_SURROGATE.into()),
            (false, true, true) if self.ranges != [SURROGATES] => {
                self.ranges.push((ASTRAL, LAST));
                self.merge();
            }
            (false, true, true) => return Err(LONE_SURROGATE.into()),
            _ => {}
        }
        Ok(if is_negated { self.negated() } else { self })
    }

    fn merge(&mut self) {
        self.ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::new();
        for &(first, last) in &self.ranges {
            match merged.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => {
                    before.1 = before.1.max(last)
                }
                _ => merged.push((first, last)),
            }
        }
        self.ranges = merged;
    }

    pub fn negated(mut self) -> CharSet {
        if !self.properties.is_empty() {
            self.is_negated = !self.is_negated;
            return self;
        }
        self.merge();
        let mut ranges = Vec::new();
        let mut next = 0;
        for (first, last) in self.ranges {
            if next < first {
                ranges.push((next, first - 1));
            }
            next = last + 1;
        }
        if next <= LAST {
            ranges.push((next, LAST));
        }
        CharSet::of(&ranges)
    }

    fn has_text(&self) -> bool {
        self.properties.is_empty() && !self.ranges.is_empty()
    }

    /// Whether all its characters are among these.
    pub fn is_within(&self, ranges: &Ranges) -> bool {
        let within = |one: &(u32, u32)| ranges.iter().any(|r| r.0 <= one.0 && one.1 <= r.1);
        self.has_text() && self.ranges.iter().all(within)
    }

    /// Whether none of its characters is among these.
    pub fn is_apart(&self, ranges: &Ranges) -> bool {
        let apart = |one: &(u32, u32)| ranges.iter().all(|r| one.1 < r.0 || r.1 < one.0);
        self.has_text() && self.ranges.iter().all(apart)
    }

    /// Writes it in the regex crate's syntax.
    pub fn write(&self, out: &mut String) {
        if let Some(code) = self.single() {
            return write_char(code, out);
        }
        let (first, last) = SURROGATES;
        let halves = self.ranges.iter().flat_map(|&range| {
            [(range.0, range.1.min(first - 1)), (range.0.max(last + 1), range.1)]
        });
        let ranges: Vec<_> = halves.filter(|(first, last)| first <= last).collect();
        if ranges.is_empty() && self.properties.is_empty() {
            return out.push_str("[^\\x{0}-\\x{10ffff}]");
        }
        out.push_str(if self.is_negated { "[^" } else { "[" });
        for (first, last) in ranges {
            write_char(first, out);
            if first < last {
                out.push('-');
                write_char(last, out);
            }
        }
        self.properties.iter().for_each(|property| out.push_str(property));
        out.push(']');
    }
}

pub const LONE_SURROGATE: &str = "half of a surrogate pair is no character";

fn write_char(code: u32, out: &mut String) {
    match char::from_u32(code) {
        Some(c)
            if c.is_ascii_alphanumeric() || c == '_' || (c.is_alphanumeric() && code > 0xff) =>
        {
            out.push(c);
        }
        _ => {
            let _ = write!(out, "\\x{{{code:x}}}");
        }
    }
}
