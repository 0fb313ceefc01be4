//! Counts that may only fall, room by room, and lists that may only get shorter. Where a count has
//! fallen the test asks on stderr for a lower number and passes.

use super::lexer::split;
use super::signatures::{Signature, signatures};
use super::{Source, ask, report, rust_sources, sources};
use regex::Regex;
use std::collections::BTreeMap;

/// Lines of comments in the old dialect, room by room; see `dialect`. A room that is not listed has
/// none.
const DIALECT: &[(&str, usize)] = &[("src/forward", 2), ("src/sample", 5), ("tests", 1)];

/// Parameters that are tuples, room by room. A room that is not listed has none.
const TUPLES: &[(&str, usize)] = &[
    ("bench", 2),
    ("convert", 3),
    ("src/backend", 4),
    ("src/cli", 3),
    ("src/engine", 1),
    ("src/forward", 2),
    ("src/model", 1),
    ("src/policy", 1),
    ("src/sample", 1),
    ("src/simd", 15),
    ("src/train", 1),
    ("tests", 4),
];

const MAX_PARAMETERS: usize = 6;

/// Functions with more parameters than that, without `self`.
const MANY_PARAMETERS: &[(&str, usize)] = &[("delta_step", 7)];

/// `src/experts` for a file in it, `src` for src/lib.rs, `tests` for any test.
fn room(path: &str) -> &str {
    let depth = if path.starts_with("src/") { 2 } else { 1 };
    let ends = path.match_indices('/').map(|(at, _)| at);
    &path[..ends.take(depth).last().unwrap_or(path.len())]
}

/// Holds findings, each with its room, against a table.
fn hold(what: &str, table: &[(&str, usize)], found: Vec<(String, String)>) {
    let mut rooms = BTreeMap::<&str, Vec<&str>>::new();
    for (room, _) in table {
        rooms.entry(room).or_default();
    }
    for (room, place) in &found {
        rooms.entry(room).or_default().push(place);
    }
    let mut faults = Vec::new();
    for (room, places) in rooms {
        let allowed = table.iter().find(|(name, _)| *name == room).map_or(0, |(_, n)| *n);
        let n = places.len();
        if n > allowed {
            faults.push(format!("{room}: {n} {what}, at most {allowed}:"));
            faults.extend(places.iter().map(|place| format!("    {place}")));
        } else if n < allowed {
            ask(&format!("{room}: {what}: lower the number in tests/tidy from {allowed} to {n}"));
        }
    }
    report(faults);
}

/// The phrases, and the comments that open without a subject. Strings of the program are messages;
/// those of tests are data.
fn dialect(source: &Source) -> Vec<String> {
    let opening = Regex::new(r#"^\s*(///|//!|//|#|""") ?(Of|What|Who|Where)\b"#).unwrap();
    let documents = Regex::new(r"^\s*(///|//!)").unwrap();
    // In halves, so that this file passes its own test.
    let words =
        ["a".to_owned() + "new", "no".to_owned() + "body", "half a ".to_owned() + "sentence"];
    let word = format!(r"(?i)(?:\b|_)(?:{})(?:\b|_|')", words.join("|"));
    let word = Regex::new(&format!("{word}|(?i:fore{})", "see")).unwrap();
    let parts = split(&source.text, source.extension());
    let mut out = Vec::new();
    let lines = parts.comments.lines().zip(parts.code.lines()).zip(parts.strings.lines());
    for (at, ((comment, code), string)) in lines.enumerate() {
        let may_open = !source.is_rust() || documents.is_match(comment);
        let message = if source.in_program() { string } else { "" };
        let spoken = [comment, code, message].iter().any(|text| word.is_match(text));
        if spoken || may_open && opening.is_match(comment) {
            let line = source.text.lines().nth(at).unwrap_or_default();
            out.push(format!("{}:{}: {}", source.path, at + 1, line.trim()));
        }
    }
    out
}

#[test]
fn comments_are_plain() {
    let mut found = Vec::new();
    for source in sources() {
        let places = dialect(&source).into_iter();
        found.extend(places.map(|place| (room(&source.path).to_owned(), place)));
    }
    hold("lines in the old dialect", DIALECT, found);
}

#[test]
fn the_dialect_is_found() {
    let text = "/// Of each the first.\n//! What it does.\n// What follows is code.\n/// Somewhat \
                off.\n/// a renewal\nfn fore\u{73}een() {} // begins a\u{6e}ew\n/// Nobody's.\n";
    let source = Source { path: "src/x.rs".into(), text: text.into() };
    let lines: Vec<String> = dialect(&source);
    let numbers: Vec<&str> = lines.iter().map(|l| l.split(':').nth(1).unwrap()).collect();
    assert_eq!(numbers, ["1", "2", "6", "7"]);
}

fn all_signatures() -> Vec<(String, Signature)> {
    let of = |source: Source| {
        let found = signatures(&split(&source.text, "rs").code);
        found.into_iter().map(move |signature| (source.path.clone(), signature))
    };
    rust_sources().flat_map(of).collect()
}

#[test]
fn parameters_are_no_tuples() {
    let mut found = Vec::new();
    for (path, signature) in all_signatures() {
        for tuple in signature.tuples() {
            let place = format!("{path}:{}: {}: {tuple}", signature.line, signature.name);
            found.push((room(&path).to_owned(), place));
        }
    }
    hold("parameters that are tuples", TUPLES, found);
}

#[test]
fn parameters_are_few() {
    let mut listed: Vec<_> = MANY_PARAMETERS.to_vec();
    let mut faults = Vec::new();
    for (path, signature) in all_signatures() {
        let n = signature.parameters.len();
        if n <= MAX_PARAMETERS {
            continue;
        }
        match listed.iter().position(|(name, most)| *name == signature.name && n <= *most) {
            Some(at) => {
                let (name, most) = listed.swap_remove(at);
                if n < most {
                    ask(&format!("{path}: {name}: lower the number in tests/tidy to {n}"));
                }
            }
            None => faults.push(format!(
                "{path}:{}: {}: {n} parameters, at most {MAX_PARAMETERS}",
                signature.line, signature.name
            )),
        }
    }
    for (name, most) in listed {
        ask(&format!(
            "{name}: no function of {most} parameters: take it off the list in tests/tidy"
        ));
    }
    report(faults);
}
