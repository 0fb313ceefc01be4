//! Filters that lay text out or make HTML of it.

use super::text::{self, escape, is_letter, is_space, is_word};
use super::{Fault, Result};
use regex::Regex;
use std::sync::LazyLock;

/// How `wordwrap` breaks lines.
pub struct Wrap {
    pub width: usize,
    pub break_long_words: bool,
    pub break_on_hyphens: bool,
}

fn is_blank(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\u{b}' | '\u{c}' | '\r' | ' ')
}

fn is_ascii_letter(c: Option<&char>) -> bool {
    c.is_some_and(|c| *c == '_' || is_letter(*c))
}

/// Characters of a word, and the marks that may end one.
fn is_wordlike(c: char) -> bool {
    is_word(c) || "!\"'&.,?".contains(c)
}

/// The end of the piece that begins at `from`: a blank, a dash, a part of a hyphenated word.
fn piece_end(chars: &[char], from: usize, hyphens: bool) -> usize {
    let run = |from: usize, fits: &dyn Fn(char) -> bool| {
        from + chars[from..].iter().take_while(|c| fits(**c)).count()
    };
    if is_blank(chars[from]) {
        return run(from, &is_blank);
    }
    if !hyphens {
        return run(from, &|c| !is_blank(c));
    }
    let is_dash = |at: usize| {
        let end = run(at, &|c| c == '-');
        let follows = at > 0 && is_wordlike(chars[at - 1]);
        (follows && end >= at + 2 && chars.get(end).is_some_and(|c| is_word(*c))).then_some(end)
    };
    if let Some(end) = is_dash(from) {
        return end;
    }
    let letter = |at: Option<usize>| is_ascii_letter(at.and_then(|at| chars.get(at)));
    for end in from + 1..chars.len() {
        if is_blank(chars[end]) {
            return end;
        }
        if chars[end] == '-' {
            let before = |n: usize| end.checked_sub(n);
            let two = letter(before(1)) && letter(before(2));
            let short = letter(before(3))
                && before(2).is_some_and(|at| chars[at] == '-')
                && is_wordlike(chars[end - 1]);
            let hyphen = usize::from(chars.get(end + 2) == Some(&'-'));
            let goes_on = letter(Some(end + 1)) && letter(Some(end + 2 + hyphen));
            if (two || short) && goes_on {
                return end + 1;
            }
        }
        if is_dash(end).is_some() {
            return end;
        }
    }
    chars.len()
}

impl Wrap {
    /// The lines of one line.
    pub fn lines(&self, line: &str) -> Result<Vec<String>> {
        if self.width == 0 {
            return Err(Fault::new("`wordwrap`: the width is 0"));
        }
        let chars: Vec<char> = line.chars().collect();
        let (mut pieces, mut from) = (Vec::new(), 0);
        while from < chars.len() {
            let end = piece_end(&chars, from, self.break_on_hyphens);
            pieces.push(&chars[from..end]);
            from = end;
        }
        pieces.reverse();
        let is_space = |piece: &[char]| piece.iter().all(|c| text::is_space(*c));
        let mut lines = Vec::new();
        while let Some(first) = pieces.last() {
            if is_space(first) && !lines.is_empty() {
                pieces.pop();
            }
            let (mut line, mut n): (Vec<&[char]>, usize) = (Vec::new(), 0);
            while let Some(piece) = pieces.pop_if(|piece| n + piece.len() <= self.width) {
                n += piece.len();
                line.push(piece);
            }
            if let Some(long) = pieces.last_mut().filter(|piece| piece.len() > self.width) {
                let room = self.width - n;
                if self.break_long_words {
                    let end = self.break_at(long, room);
                    let (head, tail) = long.split_at(end);
                    line.push(head);
                    *long = tail;
                } else if line.is_empty() {
                    line.extend(pieces.pop());
                }
            }
            if line.last().is_some_and(|piece| is_space(piece)) {
                line.pop();
            }
            if !line.is_empty() {
                lines.push(line.into_iter().flatten().collect());
            }
        }
        Ok(lines)
    }

    /// The place where a word that does not fit is broken: behind its last hyphen, if it has one.
    fn break_at(&self, word: &[char], room: usize) -> usize {
        if self.break_on_hyphens && word.len() > room {
            let hyphen = word[..room].iter().rposition(|c| *c == '-').filter(|at| *at > 0);
            if let Some(at) = hyphen.filter(|at| word[..*at].iter().any(|c| *c != '-')) {
                return at + 1;
            }
        }
        room
    }
}

/// The text without tags and comments, with single spaces.
pub fn without_tags(text: &str) -> Result<String> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(start) = rest.find('<') {
        let tag = &rest[start..];
        let end = match tag.starts_with("<!--") {
            true => tag.get(4..).and_then(|tag| tag.find("-->")).map(|at| at + 7),
            false => tag.find('>').map(|at| at + 1),
        };
        let Some(end) = end else { break };
        out.push_str(&rest[..start]);
        rest = &tag[end..];
    }
    out.push_str(rest);
    let words: Vec<&str> = out.split(is_space).filter(|word| !word.is_empty()).collect();
    unescape(&words.join(" "))
}

/// The characters that HTML's references stand for.
fn unescape(text: &str) -> Result<String> {
    const NAMES: &[(&str, &str)] = &[
        ("amp;", "&"),
        ("lt;", "<"),
        ("gt;", ">"),
        ("quot;", "\""),
        ("apos;", "'"),
        ("nbsp;", "\u{a0}"),
        ("copy;", "©"),
        ("reg;", "®"),
        ("raquo;", "»"),
        ("laquo;", "«"),
        ("hellip;", "…"),
        ("ndash;", "–"),
        ("mdash;", "—"),
        ("lsquo;", "‘"),
        ("rsquo;", "’"),
        ("ldquo;", "“"),
        ("rdquo;", "”"),
        ("bull;", "•"),
        ("euro;", "€"),
        ("trade;", "™"),
        ("middot;", "·"),
        ("times;", "×"),
        ("deg;", "°"),
        ("sect;", "§"),
    ];
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some((name, c)) = NAMES.iter().find(|(name, _)| rest.starts_with(name)) {
            out.push_str(c);
            rest = &rest[name.len()..];
        } else if let Some(number) = rest.strip_prefix('#') {
            let (digits, radix) = match number.strip_prefix(['x', 'X']) {
                Some(digits) => (digits, 16),
                None => (number, 10),
            };
            let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
            let code = u32::from_str_radix(&digits[..end], radix).ok();
            let c = code.filter(|code| *code >= 0x20 && !(0x7f..0xa0).contains(code));
            match c.and_then(char::from_u32) {
                Some(c) => out.push(c),
                None => return Err(Fault::new("`striptags`: a reference that is not supported")),
            }
            rest = &digits[end..];
            rest = rest.strip_prefix(';').unwrap_or(rest);
        } else if rest.starts_with(|c: char| c.is_ascii_alphabetic()) {
            let name: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
            return Err(Fault::new(format!(
                "`striptags`: the reference `&{name}` is not supported"
            )));
        } else {
            out.push('&');
        }
    }
    Ok(out + rest)
}

/// The attributes that `urlize` puts into its links.
pub struct Links<'a> {
    pub limit: Option<usize>,
    pub attributes: String,
    pub schemes: Vec<&'a str>,
}

impl Links<'_> {
    /// The text, escaped, with links around what looks like an address.
    pub fn around(&self, plain: &str) -> String {
        let escaped = escape(plain);
        let (mut out, mut rest) = (String::new(), &escaped[..]);
        while !rest.is_empty() {
            let blank = rest.len() - rest.trim_start_matches(is_space).len();
            let n = if blank > 0 { blank } else { rest.find(is_space).unwrap_or(rest.len()) };
            let (word, after) = rest.split_at(n);
            match blank {
                0 => self.word(word, &mut out),
                _ => out.push_str(word),
            }
            rest = after;
        }
        out
    }

    fn word(&self, word: &str, out: &mut String) {
        const OPEN: [&str; 3] = ["&lt;", "(", "<"];
        const CLOSE: [&str; 6] = ["&gt;", ")", ">", ".", ",", "\n"];
        let mut middle = word;
        while let Some(rest) = OPEN.iter().find_map(|open| middle.strip_prefix(open)) {
            middle = rest;
        }
        let (head, whole) = word.split_at(word.len() - middle.len());
        while let Some(rest) = CLOSE.iter().find_map(|close| middle.strip_suffix(close)) {
            middle = rest;
        }
        let mut end = middle.len();
        for (open, close) in [("(", ")"), ("<", ">"), ("&lt;", "&gt;")] {
            let (n, closed) =
                (whole[..end].matches(open).count(), whole[..end].matches(close).count());
            if n <= closed {
                continue;
            }
            for _ in 0..n.min(whole[end..].matches(close).count()) {
                end += whole[end..].find(close).unwrap_or(0) + close.len();
            }
        }
        let (middle, tail) = whole.split_at(end);
        out.push_str(head);
        out.push_str(&self.link(middle));
        out.push_str(tail);
    }

    fn link(&self, text: &str) -> String {
        static ADDRESS: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new(concat!(
                r"(?i)^((https?://|www\.)(([\w%-]+\.)+)?([a-z]{2,63}|xn--[\w%]{2,59})",
                r"|([\w%-]{2,63}\.)+(com|net|int|edu|gov|org|info|mil)",
                r"|https?://(\d{1,3}(\.\d{1,3}){3}",
                r"|\[([\da-f]{0,4}:){2}([\da-f]{0,4}:?){1,6}\]))",
                r"(:\d{1,5})?([/?#]\S*)?$"
            ))
            .expect("a valid pattern")
        });
        static MAIL: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(r"^\S+@\w[\w.-]*\.\w+$").expect("a valid pattern"));
        let attributes = &self.attributes;
        if ADDRESS.is_match(text) {
            let is_whole = text.starts_with("https://") || text.starts_with("http://");
            let scheme = if is_whole { "" } else { "https://" };
            let shown = match self.limit {
                Some(n) if text.chars().count() > n => {
                    text.chars().take(n).collect::<String>() + "..."
                }
                _ => text.to_string(),
            };
            return format!("<a href=\"{scheme}{text}\"{attributes}>{shown}</a>");
        }
        if let Some(address) = text.strip_prefix("mailto:").filter(|text| MAIL.is_match(text)) {
            return format!("<a href=\"{text}\">{address}</a>");
        }
        let is_other = text.starts_with("www.") || text.starts_with('@') || text.contains(':');
        if text.contains('@') && !is_other && MAIL.is_match(text) {
            return format!("<a href=\"mailto:{text}\">{text}</a>");
        }
        let mut text = text.to_string();
        for scheme in &self.schemes {
            if text != *scheme && text.starts_with(scheme) {
                text = format!("<a href=\"{text}\"{attributes}>{text}</a>");
            }
        }
        text
    }
}
