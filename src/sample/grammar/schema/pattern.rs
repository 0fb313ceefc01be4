//! Regular expressions of ECMAScript, which JSON schemas have, in the syntax of the regex crate.
//!
//! A pattern of a schema is found anywhere in a text, so what is written here has anchors only
//! where the pattern has them. What the engine lacks is left out such that more texts fit, never
//! fewer.

use super::charset::{CharSet, DIGIT, LINE_END, SPACE, WORD};
use std::fmt::Write as _;

/// Groups within each other.
const MAX_DEPTH: usize = 60;

/// A translated pattern.
#[derive(Debug, PartialEq, Eq)]
pub struct Pattern {
    /// A text fits if it has each of these somewhere.
    pub found: Vec<String>,
    /// A clause on the part that is left out.
    pub left_out: Option<&'static str>,
}

/// Translates a pattern; fails with a clause for one that has no translation.
pub fn translate(text: &str) -> Result<Pattern, String> {
    let chars: Vec<char> = text.chars().collect();
    let mut parser = Parser { chars: &chars, at: 0, depth: 0, is_dot_all: false };
    let node = parser.alternatives()?;
    if parser.at < chars.len() {
        return Err("a group is closed that is not open".into());
    }
    let mut left_out = None;
    let mut found = Vec::new();
    for node in conjuncts(node) {
        let mut out = String::new();
        Writer { out: &mut out, left_out: &mut left_out }.whole(&node);
        if !out.is_empty() {
            found.push(out);
        }
    }
    Ok(Pattern { found, left_out })
}

#[derive(Debug)]
enum Node {
    Set(CharSet),
    Start,
    End,
    Boundary {
        is_one: bool,
    },
    Look {
        is_positive: bool,
        is_ahead: bool,
        inner: Box<Node>,
    },
    Back,
    /// Inside a group that ignores case.
    NoCase(Box<Node>),
    Repeat {
        inner: Box<Node>,
        min: u32,
        max: Option<u32>,
    },
    Concat(Vec<Node>),
    Either(Vec<Node>),
}

/// `^(?=a)(?=b)c` is `^a`, `^b` and `^c`.
fn conjuncts(node: Node) -> Vec<Node> {
    let Node::Concat(mut items) = node else { return vec![node] };
    if !matches!(items.first(), Some(Node::Start)) {
        return vec![Node::Concat(items)];
    }
    let mut out = Vec::new();
    while let Some(Node::Look { is_positive: true, is_ahead: true, .. }) = items.get(1) {
        if let Node::Look { inner, .. } = items.remove(1) {
            out.push(Node::Concat(vec![Node::Start, *inner]));
        }
    }
    out.push(Node::Concat(items));
    out
}

struct Parser<'a> {
    chars: &'a [char],
    at: usize,
    depth: usize,
    is_dot_all: bool,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += 1;
        Some(c)
    }

    fn eat(&mut self, text: &str) -> bool {
        let fits = text.chars().enumerate().all(|(i, c)| self.chars.get(self.at + i) == Some(&c));
        if fits {
            self.at += text.chars().count();
        }
        fits
    }

    fn alternatives(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("it has more than {MAX_DEPTH} groups within each other"));
        }
        let mut all = vec![self.sequence()?];
        while self.eat("|") {
            all.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Either(all) })
    }

    fn sequence(&mut self) -> Result<Node, String> {
        let mut items = Vec::new();
        while let Some(c) = self.peek() {
            if c == '|' || c == ')' {
                break;
            }
            let atom = self.atom()?;
            let item = self.repeated(atom)?;
            items.push(item);
        }
        Ok(Node::Concat(items))
    }

    fn atom(&mut self) -> Result<Node, String> {
        let c = self.next().ok_or("it ends too early")?;
        Ok(match c {
            '^' => Node::Start,
            '$' => Node::End,
            '.' if self.is_dot_all => Node::Set(CharSet::all()),
            '.' => Node::Set(CharSet::of(LINE_END).negated()),
            '(' => return self.group(),
            '[' => Node::Set(self.class()?),
            '\\' => self.escape()?,
            '*' | '+' | '?' => return Err(format!("`{c}` repeats nothing")),
            other => Node::Set(CharSet::one(other)),
        })
    }

    fn repeated(&mut self, mut atom: Node) -> Result<Node, String> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => match self.bounds() {
                Some((min, max, end)) => {
                    self.at = end - 1;
                    (min, max)
                }
                // A brace that begins no bounds stands for itself.
                None => return Ok(atom),
            },
            _ => return Ok(atom),
        };
        self.at += 1;
        // A lazy repetition fits the same texts.
        self.eat("?");
        if max.is_some_and(|max| max < min) {
            return Err(format!(
                "the bounds {{{min},{}}} are in the wrong order",
                max.unwrap_or(0)
            ));
        }
        if matches!(self.peek(), Some('*' | '+' | '?')) {
            return Err("a repetition is repeated".into());
        }
        if let Node::Start | Node::End = atom {
            atom = Node::Concat(vec![atom]);
        }
        Ok(Node::Repeat { inner: Box::new(atom), min, max })
    }

    /// Bounds at a brace, and the place behind them.
    fn bounds(&self) -> Option<(u32, Option<u32>, usize)> {
        let end = self.chars[self.at..].iter().take(24).position(|c| *c == '}')? + self.at;
        let inner: String = self.chars[self.at + 1..end].iter().collect();
        let number = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            is_number.then(|| text.parse().unwrap_or(u32::MAX))
        };
        let (min, max) = match inner.split_once(',') {
            None => (number(&inner)?, Some(number(&inner)?)),
            Some((min, "")) => (number(min)?, None),
            Some((min, max)) => (number(min)?, Some(number(max)?)),
        };
        Some((min, max, end + 1))
    }

    fn group(&mut self) -> Result<Node, String> {
        let looks = [("?=", true, true), ("?!", false, true)];
        let behind = [("?<=", true, false), ("?<!", false, false)];
        for (mark, is_positive, is_ahead) in looks.into_iter().chain(behind) {
            if self.eat(mark) {
                let inner = Box::new(self.closed()?);
                return Ok(Node::Look { is_positive, is_ahead, inner });
            }
        }
        if self.eat("?:") {
            return self.closed();
        }
        if self.eat("?<") || self.eat("?P<") {
            while self.next().ok_or("the name of a group has no end")? != '>' {}
            return self.closed();
        }
        if self.eat("?") {
            return self.flags();
        }
        self.closed()
    }

    /// The rest of a group.
    fn closed(&mut self) -> Result<Node, String> {
        let was_dot_all = self.is_dot_all;
        let inner = self.alternatives()?;
        self.is_dot_all = was_dot_all;
        match self.eat(")") {
            true => Ok(inner),
            false => Err("a group is not closed".into()),
        }
    }

    /// `(?i:…)`, or `(?i)` at the beginning for all that follows.
    fn flags(&mut self) -> Result<Node, String> {
        let is_first = self.at == 2;
        let (mut ignores_case, was_dot_all, mut is_on) = (false, self.is_dot_all, true);
        loop {
            match self.next() {
                Some('i') => ignores_case = is_on,
                Some('s') => self.is_dot_all = is_on,
                Some('u') => {}
                Some('-') => is_on = false,
                Some(end @ (':' | ')')) => {
                    let inner = match end {
                        ':' => self.closed()?,
                        _ if is_first => self.alternatives()?,
                        _ => return Err("it has flags that are not at its beginning".into()),
                    };
                    if end == ':' {
                        self.is_dot_all = was_dot_all;
                    }
                    let inner = Box::new(inner);
                    return Ok(match ignores_case {
                        true => Node::NoCase(inner),
                        false => Node::Repeat { inner, min: 1, max: Some(1) },
                    });
                }
                _ => return Err("it has a group of an unknown kind".into()),
            }
        }
    }

    fn escape(&mut self) -> Result<Node, String> {
        Ok(match self.peek().ok_or("a backslash ends it")? {
            'b' | 'B' => Node::Boundary { is_one: self.next() == Some('b') },
            // Python's and Perl's words for the ends of a text.
            'A' => self.anchor(Node::Start),
            'z' | 'Z' => self.anchor(Node::End),
            '1'..='9' => {
                while self.peek().is_some_and(|c| c.is_ascii_digit()) {
                    self.at += 1;
                }
                Node::Back
            }
            'k' if self.chars.get(self.at + 1) == Some(&'<') => {
                while self.next().ok_or("the name of a group has no end")? != '>' {}
                Node::Back
            }
            _ => Node::Set(self.escaped_set()?.finished(false)?),
        })
    }

    fn anchor(&mut self, node: Node) -> Node {
        self.at += 1;
        node
    }

    /// The characters that an escape, outside or inside of a class, stands for.
    fn escaped_set(&mut self) -> Result<CharSet, String> {
        let c = self.next().ok_or("a backslash ends it")?;
        let set = match c.to_ascii_lowercase() {
            'd' => CharSet::of(DIGIT),
            'w' => CharSet::of(WORD),
            's' => CharSet::of(SPACE),
            'p' => return self.property(c == 'P'),
            _ => return self.escaped_char(c).map(CharSet::code),
        };
        Ok(if c.is_ascii_uppercase() { set.negated() } else { set })
    }

    /// `\p{…}`, as the regex crate knows it.
    fn property(&mut self, is_negated: bool) -> Result<CharSet, String> {
        let mut name = String::new();
        match self.next() {
            Some('{') => loop {
                match self.next() {
                    Some('}') => break,
                    Some(c)
                        if name.len() < 64 && (c.is_ascii_alphanumeric() || "_=".contains(c)) =>
                    {
                        name.push(c);
                    }
                    _ => return Err("a property of characters has no name".into()),
                }
            },
            Some(c) if c.is_ascii_alphabetic() => name.push(c),
            _ => return Err("a property of characters has no name".into()),
        }
        let sign = if is_negated { 'P' } else { 'p' };
        let text = format!("\\{sign}{{{name}}}");
        match regex::Regex::new(&text) {
            Ok(_) => Ok(CharSet::property(text)),
            Err(_) => Err(format!("there is no property `{name}` of characters")),
        }
    }

    fn escaped_char(&mut self, c: char) -> Result<u32, String> {
        Ok(match c {
            't' => 9,
            'n' => 10,
            'v' => 11,
            'f' => 12,
            'r' => 13,
            '0' => 0,
            'c' if self.peek().is_some_and(|c| c.is_ascii_alphabetic()) => {
                self.next().map_or(0, |c| u32::from(c) % 32)
            }
            'x' => self.hex(2).unwrap_or(u32::from(c)),
            'u' => self.unicode().unwrap_or(u32::from(c)),
            other => other.into(),
        })
    }

    /// The number of so many hexadecimal digits.
    fn hex(&mut self, n: usize) -> Option<u32> {
        let digits: String = self.chars.get(self.at..self.at + n)?.iter().collect();
        let number = digits.bytes().all(|b| b.is_ascii_hexdigit());
        let number = number.then(|| u32::from_str_radix(&digits, 16).ok())??;
        self.at += n;
        Some(number)
    }

    /// Behind `\u`: four digits, two times four of a surrogate pair, or any number in braces.
    fn unicode(&mut self) -> Option<u32> {
        if self.peek() == Some('{') {
            let end = self.chars[self.at..].iter().take(12).position(|c| *c == '}')?;
            let digits: String = self.chars[self.at + 1..self.at + end].iter().collect();
            let number = u32::from_str_radix(&digits, 16).ok().filter(|n| *n <= 0x10ffff)?;
            self.at += end + 1;
            return Some(number);
        }
        let first = self.hex(4)?;
        let back = self.at;
        if (0xd800..0xdc00).contains(&first) && self.eat("\\u") {
            match self.hex(4) {
                Some(second) if (0xdc00..0xe000).contains(&second) => {
                    return Some(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00));
                }
                _ => self.at = back,
            }
        }
        Some(first)
    }

    fn class(&mut self) -> Result<CharSet, String> {
        let is_negated = self.eat("^");
        let mut set = CharSet::default();
        loop {
            let one = match self.next().ok_or("a class of characters is not closed")? {
                ']' => break,
                '\\' => self.class_escape()?,
                c => CharSet::one(c),
            };
            let is_range =
                self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|c| *c != ']');
            let Some(first) = one.single().filter(|_| is_range) else {
                set.add(one);
                continue;
            };
            self.at += 1;
            let other = match self.next() {
                Some('\\') => self.class_escape()?,
                Some(c) => CharSet::one(c),
                None => return Err("a class of characters is not closed".into()),
            };
            match other.single() {
                Some(last) if last < first => {
                    return Err("a range of characters is in the wrong order".into());
                }
                Some(last) => set.add(CharSet::of(&[(first, last)])),
                // `[a-\d]`: the hyphen stands for itself.
                None => [one, CharSet::one('-'), other].into_iter().for_each(|one| set.add(one)),
            }
        }
        set.finished(is_negated)
    }

    fn class_escape(&mut self) -> Result<CharSet, String> {
        match self.peek() {
            Some('b') => {
                self.at += 1;
                Ok(CharSet::code(8))
            }
            _ => self.escaped_set(),
        }
    }
}

struct Writer<'a> {
    out: &'a mut String,
    left_out: &'a mut Option<&'static str>,
}

/// The character beside a place.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Word,
    Other,
    /// The end of the text.
    Edge,
    /// Anything: the pattern ends here, and it is searched for.
    Free,
    Unknown,
}

impl Writer<'_> {
    fn whole(&mut self, node: &Node) {
        match node {
            Node::Either(all) => {
                for (i, node) in all.iter().enumerate() {
                    self.out.push_str(if i == 0 { "" } else { "|" });
                    self.whole(node);
                }
            }
            Node::Concat(items) => self.items(items, Side::Free),
            other => self.node(other),
        }
    }

    fn items(&mut self, items: &[Node], outside: Side) {
        for (i, item) in items.iter().enumerate() {
            let Node::Boundary { is_one } = item else {
                self.node(item);
                continue;
            };
            let left = items[..i].last().map_or(outside, |node| side(node, false));
            let right = items.get(i + 1).map_or(outside, |node| side(node, true));
            self.boundary(*is_one, left, right);
        }
    }

    /// A boundary of words where what stands beside it says what it means.
    fn boundary(&mut self, is_one: bool, left: Side, right: Side) {
        let is_word = |side: Side| match side {
            Side::Word => Some(true),
            Side::Other | Side::Edge => Some(false),
            Side::Free | Side::Unknown => None,
        };
        match (is_word(left), is_word(right)) {
            (Some(left), Some(right)) if (left != right) == is_one => {}
            (Some(_), Some(_)) => CharSet::default().write(self.out),
            (None, Some(right)) if left == Side::Free => self.beside(right != is_one, true),
            (Some(left), None) if right == Side::Free => self.beside(left != is_one, false),
            _ => self.leave_out("`\\b` is not supported here"),
        }
    }

    /// A word's character, or another one or the end of the text.
    fn beside(&mut self, is_word: bool, is_left: bool) {
        let set = CharSet::of(WORD);
        if is_word {
            return set.write(self.out);
        }
        self.out.push_str(if is_left { "(?:^|" } else { "(?:$|" });
        set.negated().write(self.out);
        self.out.push(')');
    }

    fn leave_out(&mut self, why: &'static str) {
        self.left_out.get_or_insert(why);
    }

    fn node(&mut self, node: &Node) {
        match node {
            Node::Set(set) => set.write(self.out),
            Node::Start => self.out.push('^'),
            Node::End => self.out.push('$'),
            Node::Boundary { .. } => self.leave_out("`\\b` is not supported here"),
            Node::Look { is_ahead: true, .. } => self.leave_out("look-ahead is not supported"),
            Node::Look { .. } => self.leave_out("look-behind is not supported"),
            Node::Back => {
                self.leave_out("back references are not supported");
                self.out.push_str("(?s:.)*");
            }
            Node::NoCase(inner) => self.grouped("(?i:", inner),
            Node::Repeat { inner, min, max } => {
                self.grouped("(?:", inner);
                match (min, max) {
                    (0, None) => self.out.push('*'),
                    (1, None) => self.out.push('+'),
                    (0, Some(1)) => self.out.push('?'),
                    (1, Some(1)) => {}
                    (min, None) => self.bounds(format_args!("{{{min},}}")),
                    (min, Some(max)) => self.bounds(format_args!("{{{min},{max}}}")),
                }
            }
            Node::Concat(_) | Node::Either(_) => self.grouped("(?:", node),
        }
    }

    fn bounds(&mut self, bounds: std::fmt::Arguments<'_>) {
        let _ = self.out.write_fmt(bounds);
    }

    fn grouped(&mut self, open: &str, inner: &Node) {
        if let (Node::Set(_), "(?:") = (inner, open) {
            return self.node(inner);
        }
        self.out.push_str(open);
        let all = match inner {
            Node::Either(all) => all.as_slice(),
            one => std::slice::from_ref(one),
        };
        for (i, node) in all.iter().enumerate() {
            self.out.push_str(if i == 0 { "" } else { "|" });
            match node {
                Node::Concat(items) => self.items(items, Side::Unknown),
                other => self.node(other),
            }
        }
        self.out.push(')');
    }
}

/// The first or the last character of a node's texts.
fn side(node: &Node, is_first: bool) -> Side {
    match node {
        Node::Set(set) if set.is_within(WORD) => Side::Word,
        Node::Set(set) if set.is_apart(WORD) => Side::Other,
        Node::Start if !is_first => Side::Edge,
        Node::End if is_first => Side::Edge,
        Node::Repeat { inner, min: 1.., .. } => side(inner, is_first),
        Node::Concat(items) => {
            let item = if is_first { items.first() } else { items.last() };
            item.map_or(Side::Unknown, |item| side(item, is_first))
        }
        Node::Either(all) => {
            let mut sides = all.iter().map(|node| side(node, is_first));
            let first = sides.next().unwrap_or(Side::Unknown);
            if sides.all(|side| side == first) { first } else { Side::Unknown }
        }
        _ => Side::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regex::Regex;

    fn fits(pattern: &str, text: &str) -> bool {
        let Pattern { found, .. } = translate(pattern).unwrap_or_else(|e| panic!("{pattern}: {e}"));
        found.iter().all(|found| {
            Regex::new(found).unwrap_or_else(|e| panic!("{pattern}: {e}")).is_match(text)
        })
    }

    /// Each pattern with texts that it has somewhere and texts that it has not.
    #[test]
    fn patterns_keep_their_meaning() {
        for (pattern, good, bad) in [
            (r"^\d+$", &["7", "12"][..], &["", "٣", "1\n"][..]),
            (r"^\w$", &["a", "_"], &["é", "-"]),
            (r"^\W$", &["é"], &["a"]),
            (r"^\s$", &["\u{feff}", "\u{a0}", "\t"], &["\u{85}", "a"]),
            (r"^\S$", &["\u{85}", "a", "😀"], &["\u{feff}", "\u{a0}"]),
            (r"^.$", &["a", "😀"], &["\n", "\r", "\u{2028}", ""]),
            (r"^\cJ$", &["\n"], &["J", "cJ"]),
            (r"^[^]$", &["\n", "a"], &["", "ab"]),
            (r"^[]$", &[], &["", "a", "]"]),
            (r"a[]|b", &["b"], &["a", "a]"]),
            (r"^\/\-\@$", &["/-@"], &["\\/"]),
            (r"^\u0041\u{1F600}\uD83D\uDE00\x42$", &["A😀😀B"], &["A"]),
            (r"^[\uD83D\uDE00-\uD83D\uDE4F]$", &["😀"], &["a"]),
            (r"^{..}$", &["{ab}"], &["ab"]),
            (r"^a{,2}$", &["a{,2}"], &["aa", ""]),
            (r"^a{2}b{1,}$", &["aab", "aabb"], &["ab", "aa"]),
            (r"^{{[a-z]+}}$", &["{{x}}"], &["x"]),
            (r"^(?<year>\d{4})$", &["1999"], &["199"]),
            (r"^(?P<year>\d{4})$", &["1999"], &["199"]),
            (r"(?i)^abc$", &["aBC"], &["ab"]),
            (r"(?i:a)b", &["Ab", "xab"], &["aB"]),
            (r"^[\w-.]+$", &["a-.", "."], &["a b"]),
            (r"^[a\-z]$", &["-", "z"], &["b"]),
            (r"^[+--]$", &["+", ",", "-"], &["."]),
            (r"^[&&~~\[[:]+$", &["&~[:"], &["a"]),
            (r"^[\b]$", &["\u{8}"], &["b"]),
            (r"^[\D]$", &["a"], &["1"]),
            (r"^[^\d\s]$", &["a"], &["1", " "]),
            (r"^\p{Lu}\P{Lu}$", &["Éa"], &["ÉA"]),
            (r"^[\p{L}\d]+$", &["é1"], &["-"]),
            (r"^[^\p{L}]$", &["1"], &["é"]),
            (r"^[\u0020-\uFFFF]$", &["a", "😀"], &["\n"]),
            (r"^[^\uD800-\uDFFF]$", &["a", "😀"], &["ab"]),
            (r"^(a|b)c|d$", &["acx", "xd"], &["xac", "dx"]),
            (r"\A[ab]+\Z", &["ab"], &["abc"]),
            (r"a+?b??", &["xa"], &["b"]),
            // Boundaries of words.
            (r"\bfoo\b", &["foo", "a foo.", "-foo-"], &["afoo", "foob"]),
            (r"^\bfoo\b$", &["foo"], &["foo."]),
            (r"\w\b\s\b\w", &["a b"], &["ab"]),
            (r"a\bb", &[], &["ab", "a b"]),
            (r"a\Bb", &["ab"], &["a b"]),
            (r"\Bfoo", &["afoo"], &["foo", ".foo"]),
            (r"foo\B", &["food"], &["foo", "foo."]),
            // Look-ahead at the beginning is a second pattern.
            (r"^(?=.*\d)(?=.*[A-Z]).{4,}$", &["aB1c", "1Aaa"], &["ab1c", "aBcd", "aB1"]),
        ] {
            good.iter().for_each(|text| assert!(fits(pattern, text), "{pattern}: {text:?}"));
            bad.iter().for_each(|text| assert!(!fits(pattern, text), "{pattern}: {text:?}"));
            assert_eq!(translate(pattern).unwrap().left_out, None, "{pattern}");
        }
    }

    /// Texts that fit a pattern fit what is left of it.
    #[test]
    fn what_is_left_out_makes_more_texts_fit() {
        for (pattern, good, bad) in [
            (r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$", &["a.b@c"][..], &["a b@c", "@"][..]),
            (r"^(a|b)\1$", &["aa", "bb"], &["c"]),
            (r"^(?<q>['a])x\k<q>$", &["axa"], &["bxa"]),
            (r"^a(?=b)b$", &["ab"], &["a"]),
            (r"^(?<!a)b$", &["b"], &["a"]),
            (r"^.\b.$", &["a-"], &["a"]),
            (r"^(?=.*\bx).+$", &["a x"], &["b"]),
        ] {
            good.iter().for_each(|text| assert!(fits(pattern, text), "{pattern}: {text:?}"));
            bad.iter().for_each(|text| assert!(!fits(pattern, text), "{pattern}: {text:?}"));
            assert!(translate(pattern).unwrap().left_out.is_some(), "{pattern}");
        }
    }

    #[test]
    fn broken_patterns_are_told() {
        for pattern in [
            "(",
            ")",
            "[a",
            "a**",
            "*a",
            "a++",
            "\\",
            "(?<n",
            "(?>a)",
            "(?#a)",
            "[b-a]",
            "a{2,1}",
            "a(?i)b|c",
            "\\p{Foo}",
            "\\p{",
            "[\\uD800-\\uDBFF][\\uDC00-\\uDFFF]",
            "\\uD800",
            &"(".repeat(1000),
        ] {
            let why = translate(pattern).unwrap_err();
            assert!(why.len() > 10 && !why.contains('\n'), "{pattern}: {why}");
        }
    }
}
