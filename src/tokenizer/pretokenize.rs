//! Pre-tokenizers: the regular expressions that cut a text into words before BPE merges.
//!
//! `pre.rs` has the patterns as the models' own tokenizer.json has them. Some look around, and the
//! regex crate does not (which is why it is linear in the text, always); so [`Stage::of`] reads
//! them as one of three things that it can do:
//!
//! - Most end in `\s+(?!\S)|\s+`, "whitespace, without its last character if a word follows". Ours
//!   end in `\s+`, and `split` gives the last character of such a match back to what follows.
//! - Whitespace in powers of two is such a match, cut once more.
//! - The few that count digits from the right are [`Digits`].
//! - Possessive quantifiers (`?+`, `++`) stand only where backtracking could change nothing.

use super::pre::{self, Row};
use crate::Result;
use crate::error::Error;
use regex::Regex;
use std::borrow::Cow;
use std::path::Path;
use std::sync::OnceLock;
use unicode_normalization::{UnicodeNormalization, is_nfc};

/// One pattern, ready to split by.
enum Stage {
    Pattern(Pattern),
    Digits(Digits),
}

struct Pattern {
    regex: Regex,
    /// The pattern ends in the whitespace rule, so matches may have to give a character back.
    gives_back: bool,
    /// `\s*[\r\n]+` stands before it: whitespace that ends in a line break is no match of the rule.
    /// (`\s*[\r\n]` matches the same: both end at the last line break of the whitespace.)
    keeps_line_breaks: bool,
    /// The whitespace rule's matches are cut in powers of two.
    in_powers: bool,
    /// Matches are cut further where they have digits.
    digits: Option<Digits>,
}

/// Numbers, which are runs of decimal digits (`\p{Nd}`) unless stated otherwise, in groups of three
/// from the right.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Digits {
    /// Each group is a part.
    Groups,
    /// Each group is a part, unless the number is part of a longer word.
    GroupsOutsideWords,
    /// A cut before each whole group; what stands before the first cut keeps its digits.
    Cuts,
    /// Each group is a part, of digits of any kind (`\p{N}`).
    GroupsOfAnyKind,
}

impl Stage {
    /// None for a pattern whose work the one before it has already done.
    fn of(original: &str) -> Option<Self> {
        match original {
            pre::AFMOE_510 => Some(Self::Digits(Digits::Groups)),
            // 510 is a multiple of three, so groups of three of groups of 510 are just that.
            pre::AFMOE_LEAD | pre::AFMOE_THREES => None,
            pre::AYA_THREES => Some(Self::Digits(Digits::GroupsOutsideWords)),
            pre::SUPERBPE_CUTS => Some(Self::Digits(Digits::Cuts)),
            _ => Some(Self::Pattern(Pattern::new(original))),
        }
    }

    /// Calls `each` with the parts of `text`, in order.
    fn split<'a>(&self, text: &'a str, each: &mut impl FnMut(&'a str)) {
        match self {
            Self::Pattern(pattern) => pattern.split(text, each),
            Self::Digits(digits) => digits.split(text, each),
        }
    }
}

impl Pattern {
    fn new(original: &str) -> Self {
        let in_powers = original.ends_with(pre::POWERS_OF_TWO);
        let rule = if in_powers { pre::POWERS_OF_TWO } else { r"|\s+(?!\S)|\s+" };
        let (head, gives_back) = match original.strip_suffix(rule) {
            Some(head) => (format!(r"{head}|\s+"), true),
            None => (original.to_owned(), false),
        };
        let digits = head.contains(pre::THREES).then_some(Digits::GroupsOfAnyKind);
        let greedy = head.replace(pre::THREES, r"\p{N}+").replace("?+", "?").replace("++", "+");
        Self {
            regex: Regex::new(&greedy).expect("the table's patterns are valid"),
            gives_back,
            keeps_line_breaks: greedy.contains(r"\s*[\r\n]"),
            in_powers,
            digits,
        }
    }

    /// Calls `each` with the matches and the gaps between them, in order.
    fn split<'a>(&self, text: &'a str, each: &mut impl FnMut(&'a str)) {
        let mut at = 0;
        while let Some(found) = self.regex.find_at(text, at) {
            let end = found.end() - self.given_back(text, found.start(), found.end());
            if at < found.start() {
                each(&text[at..found.start()]);
            }
            self.refine(&text[found.start()..end], each);
            at = end;
        }
        if at < text.len() {
            each(&text[at..]);
        }
    }

    /// Calls `each` with the parts of a match, in order.
    fn refine<'a>(&self, found: &'a str, each: &mut impl FnMut(&'a str)) {
        match self.digits {
            Some(digits) => digits.split(found, each),
            None if self.in_powers && !found.ends_with(['\r', '\n']) && is_space(found) => {
                in_powers_of_two(found, each);
            }
            None => each(found),
        }
    }

    /// Bytes at the end of the match that belong to what follows: with these patterns only the
    /// whitespace rule's matches end in whitespace (and, where line breaks have a rule of their
    /// own before it, in none). The rule is greedy, so what follows is no whitespace.
    fn given_back(&self, text: &str, start: usize, end: usize) -> usize {
        if !self.gives_back || end == text.len() {
            return 0;
        }
        match text[start..end].chars().next_back() {
            Some('\r' | '\n') if self.keeps_line_breaks => 0,
            Some(c) if c.is_whitespace() && c.len_utf8() < end - start => c.len_utf8(),
            _ => 0,
        }
    }
}

fn is_space(text: &str) -> bool {
    text.chars().all(char::is_whitespace)
}

/// The largest power of two up to 512 that is left, again and again.
fn in_powers_of_two<'a>(mut spaces: &'a str, each: &mut impl FnMut(&'a str)) {
    while let n @ 1.. = spaces.chars().take(512).count() {
        let power = 1 << n.ilog2();
        let end = spaces.char_indices().nth(power).map_or(spaces.len(), |(end, _)| end);
        each(&spaces[..end]);
        spaces = &spaces[end..];
    }
}

impl Digits {
    fn split<'a>(self, text: &'a str, each: &mut impl FnMut(&'a str)) {
        static DECIMAL: OnceLock<Regex> = OnceLock::new();
        static ANY: OnceLock<Regex> = OnceLock::new();
        let (number, pattern) = match self {
            Self::GroupsOfAnyKind => (&ANY, r"\p{N}+"),
            _ => (&DECIMAL, r"\p{Nd}+"),
        };
        let number = number.get_or_init(|| Regex::new(pattern).expect("a constant pattern"));
        // Where the part begins that has not been handed out yet.
        let mut part = 0;
        let mut cut = |at: usize| {
            if part < at {
                each(&text[part..at]);
                part = at;
            }
        };
        for found in number.find_iter(text) {
            if self == Self::GroupsOutsideWords && starts_with_word(&text[found.end()..]) {
                continue;
            }
            if self != Self::Cuts {
                cut(found.start());
            }
            let n = found.as_str().chars().count();
            for (i, (offset, _)) in found.as_str().char_indices().enumerate() {
                if (n - i) % 3 == 0 {
                    cut(found.start() + offset);
                }
            }
            if self != Self::Cuts {
                cut(found.end());
            }
        }
        cut(text.len());
    }
}

/// Whether `text` starts with what `\w` means to the engine that these patterns are written for.
fn starts_with_word(text: &str) -> bool {
    static WORD: OnceLock<Regex> = OnceLock::new();
    let word = || Regex::new(r"^[\p{L}\p{M}\p{Nd}\p{Pc}]").expect("a constant pattern");
    WORD.get_or_init(word).is_match(text)
}

pub struct PreTokenizer {
    stages: Vec<Stage>,
    nfc: bool,
    drops_joiners: bool,
    pub ignore_merges: bool,
    pub add_bos: bool,
}

impl PreTokenizer {
    /// By the value of `tokenizer.ggml.pre`. An unknown one is refused: a guess would cut words in
    /// the wrong places, which makes the model's answers worse without any sign of it.
    ///
    /// `nfc` is the file's own word on normalisation, if it says anything.
    pub fn named(name: Option<&str>, nfc: Option<bool>, path: &Path) -> Result<Self> {
        let wanted = name.unwrap_or_else(|| {
            log::warn!("the file names no pre-tokenizer (tokenizer.ggml.pre): using `default`");
            "default"
        });
        let row = pre::TABLE.iter().find(|row| row.names.contains(&wanted)).ok_or_else(|| {
            let known: Vec<&str> = pre::known_names().collect();
            Error::format(
                path,
                "tokenizer.ggml.pre",
                format!("a known pre-tokenizer ({})", known.join(", ")),
                format!(
                    "`{wanted}`; if you know which of these it splits words as, say \
                     `--override-kv tokenizer.ggml.pre=str:NAME`"
                ),
            )
        })?;
        Ok(Self::of(row, nfc.unwrap_or(row.nfc)))
    }

    fn of(row: &Row, nfc: bool) -> Self {
        Self {
            stages: row.patterns.iter().filter_map(|original| Stage::of(original)).collect(),
            nfc,
            drops_joiners: row.drops_joiners,
            ignore_merges: row.ignore_merges,
            add_bos: row.add_bos,
        }
    }

    /// Calls `each` with the words of `text`, in order.
    pub fn words(&self, text: &str, mut each: impl FnMut(&str)) {
        let mut text = Cow::Borrowed(text);
        if self.nfc && !is_nfc(&text) {
            text = text.nfc().collect();
        }
        if self.drops_joiners && text.contains('\u{200c}') {
            text = text.replace("[\u{200c}", "[").replace("<\u{200c}", "<").into();
        }
        self.words_from(0, &text, &mut each)
    }

    fn words_from(&self, stage: usize, text: &str, each: &mut dyn FnMut(&str)) {
        match self.stages.get(stage) {
            Some(splitter) => {
                splitter.split(text, &mut |part| self.words_from(stage + 1, part, each));
            }
            None => each(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(pre: &str, text: &str) -> Vec<String> {
        let mut out = Vec::new();
        let pre = PreTokenizer::named(Some(pre), None, Path::new("")).unwrap();
        pre.words(text, |word| out.push(word.to_string()));
        out
    }

    #[test]
    fn whitespace_gives_its_last_character_back() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a\t\tb"), ["a", "\t", "\t", "b"]);
        assert_eq!(words("gpt-2", "a \n\n b"), ["a", " \n\n", " b"]);
        assert_eq!(words("gpt-2", "a  "), ["a", "  "]);
        assert_eq!(words("qwen2", "a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(words("qwen2", "\u{a0}\u{3000}b"), ["\u{a0}", "\u{3000}b"]);
    }

    #[test]
    fn numbers_and_contractions() {
        assert_eq!(words("qwen2", "It'S 1234"), ["It", "'S", " ", "1", "2", "3", "4"]);
        assert_eq!(words("llama-bpe", "It's 1234"), ["It", "'s", " ", "123", "4"]);
        assert_eq!(words("gpt-2", "It'S 1234"), ["It", "'", "S", " 1234"]);
        assert_eq!(words("default", "a 1234."), ["a", " ", "123", "4", "."]);
    }

    #[test]
    fn qwen2_normalises_to_nfc() {
        assert_eq!(words("qwen2", "e\u{301}"), ["\u{e9}"]);
        assert_eq!(words("gpt-2", "e\u{301}"), ["e", "\u{301}"]);
    }

    #[test]
    fn every_row_compiles_and_loses_nothing() {
        let text = "It's 12345 x\u{301}\r\n\t\t漢字 ひらがな 🙂!?\u{85}  end  ";
        for row in pre::TABLE {
            let expected: String = if row.nfc { text.nfc().collect() } else { text.into() };
            for name in row.names {
                assert_eq!(words(name, text).concat(), expected, "{name}");
            }
        }
    }

    #[test]
    fn numbers_in_threes_from_the_right() {
        assert_eq!(words("afmoe", "a12345½b123"), ["a", "12", "345", "½b", "123"]);
        assert_eq!(words("superbpe", "a12345 123½1"), ["a", "12", "345", " ", "123½1"]);
        assert_eq!(words("tiny_aya", "1234567 1234x"), ["1", "234", "567", " ", "123", "4", "x"]);
        let long = "7".repeat(1537);
        let groups = words("afmoe", &long);
        assert_eq!((groups.len(), groups[0].as_str()), (513, "7"));
    }

    #[test]
    fn digits_of_any_kind_in_threes_and_whitespace_in_powers_of_two() {
        assert_eq!(words("tekken-num3", "a  1234567½"), ["a", " ", " ", "12", "345", "67½"]);
        assert_eq!(words("tekken-num3", "12 1"), ["12", " ", "1"]);
        let sizes = |text: &str| {
            let words = words("jais-2", text);
            words.iter().map(|word| word.chars().count()).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&" ".repeat(1031)), [512, 512, 4, 2, 1]);
        assert_eq!(sizes(&format!("a{}b", " ".repeat(8))), [1, 4, 2, 1, 2]);
        assert_eq!(sizes(&format!("a \n{}1", "\u{3000}".repeat(3))), [1, 2, 2, 1, 1]);
    }

    #[test]
    fn a_joiner_behind_a_bracket_is_dropped() {
        let text = "<\u{200c}s>[\u{200c}\u{200c}x]a\u{200c}b";
        assert_eq!(words("nemotron-3.5-embed", text).concat(), "<s>[\u{200c}x]a\u{200c}b");
        assert_eq!(words("tekken", text).concat(), text);
    }

    #[test]
    fn chinese_stands_apart_for_kimi() {
        assert_eq!(words("kimi-k2", "漢字かなKana漢"), ["漢字", "かなKana", "漢"]);
        assert_eq!(words("gpt-4o", "漢字かなKana漢"), ["漢字かなKana漢"]);
    }

    #[test]
    fn no_name_stands_twice_and_the_first_ones_are_found_by_their_patterns() {
        let mut seen = std::collections::BTreeSet::new();
        for row in pre::TABLE {
            row.names.iter().for_each(|name| assert!(seen.insert(name), "{name}"));
            let patterns: Vec<String> = row.patterns.iter().map(|p| p.to_string()).collect();
            let has = |token: &str| row.marker == Some(token);
            let found = pre::name_of(&patterns, row.nfc, row.ignore_merges, has);
            // What a normaliser does beside is not in the patterns.
            let expected = if row.drops_joiners { "tekken" } else { row.names[0] };
            assert_eq!(found, Some(expected));
        }
        let none = |_: &str| false;
        assert_eq!(pre::name_of(&["x".into()], false, false, none), None);
        let gpt2 = [pre::GPT2.to_string()];
        assert_eq!(pre::name_of(&gpt2, false, true, none), Some("gpt-2"));
        assert_eq!(pre::name_of(&gpt2, true, false, none), Some("olmo"));
    }

    #[test]
    fn unknown_name_is_refused_with_the_way_out() {
        let error = PreTokenizer::named(Some("nonsense"), None, Path::new("m.gguf")).err().unwrap();
        let text = error.to_string();
        assert!(text.contains("`nonsense`"), "{text}");
        assert!(text.contains("`--override-kv tokenizer.ggml.pre=str:NAME`"), "{text}");
    }
}
