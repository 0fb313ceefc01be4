//! Pre-tokenizers: the regular expressions that cut a text into words before BPE merges.
//!
//! The patterns are those of the models' own tokenizer.json, but for one thing. They all end in
//! `\s+(?!\S)|\s+`, "whitespace, without its last character if a word follows", and the regex crate
//! has no look-ahead (which is why it is linear in the text, always). So ours end in `\s+`, and
//! `split` gives the last character of such a match back to what follows.

use crate::Result;
use crate::error::Error;
use regex::Regex;
use std::path::Path;
use unicode_normalization::{UnicodeNormalization, is_nfc};

/// One pre-tokenizer under all names that GGUF files use for it.
struct Row {
    names: &'static [&'static str],
    /// Applied one after the other, each to the parts that the one before left.
    patterns: &'static [&'static str],
    /// The tokenizer normalises to NFC first.
    nfc: bool,
    /// A word that is in the vocabulary is its token, whatever the merges say.
    ignore_merges: bool,
    /// BOS is added when the file does not say.
    add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);

const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"
);

/// What llama.cpp applies to BPE files that name no pre-tokenizer: a format of its own, no
/// tokenizer.json has it.
const DEFAULT: &[&str] = &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];

const PLAIN: Row =
    Row { names: &[], patterns: &[], nfc: false, ignore_merges: false, add_bos: false };

const TABLE: &[Row] = &[
    Row { names: &["default"], patterns: DEFAULT, ..PLAIN },
    Row {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat"],
        patterns: &[GPT2],
        ..PLAIN
    },
    Row { names: &["qwen2", "deepseek-r1-qwen", "megrez"], patterns: &[QWEN2], nfc: true, ..PLAIN },
    Row { names: &["qwen35"], patterns: &[QWEN35], nfc: true, ..PLAIN },
    Row {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"],
        patterns: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    Row { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], patterns: &[LLAMA3], ..PLAIN },
    Row { names: &["glm4"], patterns: &[LLAMA3], ignore_merges: true, ..PLAIN },
    Row { names: &["gpt-4o", "llama4"], patterns: &[O200K], ..PLAIN },
    Row {
        names: &["deepseek-v3"],
        patterns: &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        ..PLAIN
    },
    Row {
        names: &["starcoder", "refact", "smollm", "codeshell", "exaone"],
        patterns: &[r"\p{N}", GPT2],
        ..PLAIN
    },
    Row { names: &["command-r"], patterns: &[r"\p{N}", GPT2], nfc: true, ..PLAIN },
];

struct Pattern {
    regex: Regex,
    /// The pattern ends in the whitespace rule, so matches may have to give a character back.
    gives_back: bool,
    /// `\s*[\r\n]+` stands before it: whitespace that ends in a line break is no match of the rule.
    keeps_line_breaks: bool,
}

impl Pattern {
    fn new(source: &'static str) -> Self {
        Self {
            regex: Regex::new(source).expect("the table's patterns are valid"),
            gives_back: source.ends_with(r"|\s+"),
            keeps_line_breaks: source.contains(r"\s*[\r\n]+"),
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
            each(&text[found.start()..end]);
            at = end;
        }
        if at < text.len() {
            each(&text[at..]);
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

pub struct PreTokenizer {
    patterns: Vec<Pattern>,
    nfc: bool,
    pub ignore_merges: bool,
    pub add_bos: bool,
}

impl PreTokenizer {
    /// By the value of `tokenizer.ggml.pre`. An unknown one is refused: guessing would cut words
    /// in the wrong places, which makes the model's answers worse and tells nobody.
    pub fn named(name: Option<&str>, path: &Path) -> Result<Self> {
        let wanted = name.unwrap_or_else(|| {
            log::warn!("the file names no pre-tokenizer (tokenizer.ggml.pre): using `default`");
            "default"
        });
        let row = TABLE.iter().find(|row| row.names.contains(&wanted)).ok_or_else(|| {
            let known: Vec<&str> = TABLE.iter().filter_map(|r| r.names.first().copied()).collect();
            Error::format(
                path,
                "tokenizer.ggml.pre",
                format!("a known pre-tokenizer ({})", known.join(", ")),
                format!(
                    "`{wanted}`; if you know which of these it splits words as, convert the \
                     checkpoint with `moeba convert --pre NAME`"
                ),
            )
        })?;
        Ok(Self {
            patterns: row.patterns.iter().map(|p| Pattern::new(p)).collect(),
            nfc: row.nfc,
            ignore_merges: row.ignore_merges,
            add_bos: row.add_bos,
        })
    }

    /// Calls `each` with the words of `text`, in order.
    pub fn words(&self, text: &str, mut each: impl FnMut(&str)) {
        if self.nfc && !is_nfc(text) {
            let normal: String = text.nfc().collect();
            return self.words_from(0, &normal, &mut each);
        }
        self.words_from(0, text, &mut each)
    }

    fn words_from(&self, stage: usize, text: &str, each: &mut dyn FnMut(&str)) {
        match self.patterns.get(stage) {
            Some(pattern) => {
                pattern.split(text, &mut |part| self.words_from(stage + 1, part, each));
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
        let pre = PreTokenizer::named(Some(pre), Path::new("")).unwrap();
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
        for name in TABLE.iter().flat_map(|row| row.names) {
            let expected: String = match TABLE.iter().any(|r| r.nfc && r.names.contains(name)) {
                true => text.nfc().collect(),
                false => text.into(),
            };
            assert_eq!(words(name, text).concat(), expected, "{name}");
        }
    }

    #[test]
    fn unknown_name_is_refused_with_the_way_out() {
        let error = PreTokenizer::named(Some("nonsense"), Path::new("m.gguf")).err().unwrap();
        let text = error.to_string();
        assert!(text.contains("`nonsense`"), "{text}");
        assert!(text.contains("`moeba convert --pre NAME`"), "{text}");
    }
}
