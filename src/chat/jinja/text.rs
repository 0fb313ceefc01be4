//! Python's classes of characters, and its views of strings.

use regex::Regex;
use std::sync::LazyLock;

/// Python's `isspace` for a character, and `\s` of its patterns.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn has(class: &LazyLock<Regex>, c: char) -> bool {
    class.is_match(c.encode_utf8(&mut [0; 4]))
}

macro_rules! class {
    ($name:ident, $pattern:literal) => {
        pub fn $name(c: char) -> bool {
            static CLASS: LazyLock<Regex> =
                LazyLock::new(|| Regex::new($pattern).expect("a valid pattern"));
            has(&CLASS, c)
        }
    };
}

class!(is_letter, r"^\pL$");
class!(is_decimal, r"^\p{Nd}$");
class!(is_other_number, r"^[\p{Nl}\p{No}]$");
class!(is_superscript, r"^[\u{b2}\u{b3}\u{b9}\u{2070}\u{2074}-\u{2079}\u{2080}-\u{2089}]$");
class!(is_unprintable, r"^[\pC\pZ]$");
class!(is_cased, r"^[\p{Lowercase}\p{Uppercase}\p{Lt}]$");
class!(is_numeral, r"^[〇一二三四五六七八九十百千万億兆零壹贰叁肆伍陆柒捌玖拾]$");

pub fn is_numeric(c: char) -> bool {
    is_decimal(c) || is_other_number(c) || is_numeral(c)
}

/// Python's `isalnum` for a character.
pub fn is_alphanumeric(c: char) -> bool {
    c.is_ascii_alphanumeric() || !c.is_ascii() && (is_letter(c) || is_numeric(c))
}

/// `\w` of Python's patterns.
pub fn is_word(c: char) -> bool {
    c == '_' || is_alphanumeric(c)
}

pub fn is_printable(c: char) -> bool {
    (' '..='~').contains(&c) || !c.is_ascii() && !is_unprintable(c)
}

/// The first letter of a word: Python's title case.
pub fn title_char(c: char, out: &mut String) {
    match c {
        'Ǆ'..='ǆ' => out.push('ǅ'),
        'Ǉ'..='ǉ' => out.push('ǈ'),
        'Ǌ'..='ǌ' => out.push('ǋ'),
        'Ǳ'..='ǳ' => out.push('ǲ'),
        'ა'..='ჿ' => out.push(c),
        'ŉ' => out.push_str("ʼN"),
        _ => {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase));
        }
    }
}

/// `str.title`: a capital behind each character that is no letter.
pub fn title(text: &str) -> String {
    let (mut out, mut is_in_word) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        match is_in_word {
            true => out.extend(c.to_lowercase()),
            false => title_char(c, &mut out),
        }
        is_in_word = c.is_ascii_alphabetic() || !c.is_ascii() && is_cased(c);
    }
    out
}

pub fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let mut out = String::with_capacity(text.len());
    if let Some(first) = chars.next() {
        title_char(first, &mut out);
    }
    out + &chars.as_str().to_lowercase()
}

pub fn swapcase(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match (c.is_uppercase(), c.is_lowercase()) {
            (true, _) => out.extend(c.to_lowercase()),
            (_, true) => out.extend(c.to_uppercase()),
            _ => out.push(c),
        }
    }
    out
}

/// `None` for a character whose folding is not known here.
pub fn casefold(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            'ß' | 'ẞ' => out.push_str("ss"),
            'ς' => out.push('σ'),
            'ſ' => out.push('s'),
            'µ' => out.push('μ'),
            'ﬀ' => out.push_str("ff"),
            'ﬁ' => out.push_str("fi"),
            'ﬂ' => out.push_str("fl"),
            'ﬃ' => out.push_str("ffi"),
            'ﬄ' => out.push_str("ffl"),
            '\u{149}'
            | '\u{1f0}'
            | '\u{345}'
            | '\u{390}'
            | '\u{3b0}'
            | '\u{3d0}'..='\u{3d6}'
            | '\u{3f0}'..='\u{3f5}'
            | '\u{587}'
            | '\u{13a0}'..='\u{13fd}'
            | '\u{1c80}'..='\u{1c8a}'
            | '\u{1e96}'..='\u{1e9b}'
            | '\u{1f50}'..='\u{1ffc}'
            | '\u{ab70}'..='\u{abbf}'
            | '\u{fb05}'..='\u{fb17}' => return None,
            _ => out.extend(c.to_lowercase()),
        }
    }
    Some(out)
}

fn is_line_end(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// `str.splitlines`.
pub fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let (mut lines, mut from) = (Vec::new(), 0);
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if !is_line_end(c) {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && chars.next_if(|next| next.1 == '\n').is_some() {
            end += 1;
        }
        lines.push(&text[from..if keep_ends { end } else { at }]);
        from = end;
    }
    if from < text.len() {
        lines.push(&text[from..]);
    }
    lines
}

/// Characters that HTML escapes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// Rust's `1.5e300` as Python writes it, `1.5e+300`: a sign and two digits at least.
pub fn with_exponent(text: &str, letter: char) -> String {
    let Some((digits, exponent)) = text.split_once('e') else { return text.into() };
    let (sign, size) = match exponent.strip_prefix('-') {
        Some(size) => ('-', size),
        None => ('+', exponent),
    };
    format!("{digits}{letter}{sign}{size:0>2}")
}
