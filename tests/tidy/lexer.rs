//! Splits source text into code, comments and strings. Each part keeps its place: whatever belongs
//! to another part is blank, so that lines and columns stay those of the file.

/// The three parts of a source text. All have its length.
pub struct Parts {
    /// Without comments and without the contents of strings.
    pub code: String,
    /// Comments with their marks.
    pub comments: String,
    /// Contents of string literals.
    pub strings: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Text,
}

/// Reads Rust, C++ (`.cu`, `.cuh`), Python and TOML. The extension says which.
pub fn split(text: &str, extension: &str) -> Parts {
    let chars: Vec<char> = text.chars().collect();
    let kinds = match extension {
        "py" | "toml" => hash_comments(&chars),
        _ => slash_comments(&chars, extension == "rs"),
    };
    let part = |kind: Kind| {
        let keep = |(c, k): (&char, &Kind)| if *k == kind || *c == '\n' { *c } else { ' ' };
        chars.iter().zip(&kinds).map(keep).collect()
    };
    Parts { code: part(Kind::Code), comments: part(Kind::Comment), strings: part(Kind::Text) }
}

fn starts(chars: &[char], at: usize, text: &str) -> bool {
    text.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c))
}

/// The position after `end`, or the end of the text. `escapes`: a backslash hides what follows it.
fn after(chars: &[char], from: usize, end: &str, escapes: bool) -> usize {
    let mut at = from;
    while at < chars.len() {
        if escapes && chars[at] == '\\' {
            at += 2;
        } else if starts(chars, at, end) {
            return at + end.chars().count();
        } else {
            at += 1;
        }
    }
    chars.len()
}

fn line_end(chars: &[char], from: usize) -> usize {
    chars[from..].iter().position(|c| *c == '\n').map_or(chars.len(), |n| from + n)
}

/// Marks the contents of a string; its quotes, of `open` and `close` characters, are code.
fn mark_text(kinds: &mut [Kind], open: usize, end: usize, close: usize) {
    let inner = open..end.saturating_sub(close).max(open);
    kinds[inner].fill(Kind::Text);
}

fn hash_comments(chars: &[char]) -> Vec<Kind> {
    let mut kinds = vec![Kind::Code; chars.len()];
    let mut at = 0;
    while at < chars.len() {
        let triple = ["\"\"\"", "'''"].into_iter().find(|q| starts(chars, at, q));
        let end = if chars[at] == '#' {
            let end = line_end(chars, at);
            kinds[at..end].fill(Kind::Comment);
            end
        } else if let Some(quotes) = triple {
            // A docstring.
            let end = after(chars, at + 3, quotes, true);
            kinds[at..end].fill(Kind::Comment);
            end
        } else if matches!(chars[at], '"' | '\'') {
            let end = after(chars, at + 1, &chars[at].to_string(), true).min(chars.len());
            mark_text(&mut kinds, at + 1, end, 1);
            end
        } else {
            at + 1
        };
        at = end;
    }
    kinds
}

fn slash_comments(chars: &[char], is_rust: bool) -> Vec<Kind> {
    let mut kinds = vec![Kind::Code; chars.len()];
    let mut at = 0;
    while at < chars.len() {
        let word_before = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
        let raw = (is_rust && !word_before).then(|| raw_string(chars, at)).flatten();
        at = if starts(chars, at, "//") {
            let end = line_end(chars, at);
            kinds[at..end].fill(Kind::Comment);
            end
        } else if starts(chars, at, "/*") {
            let end = block_end(chars, at, is_rust);
            kinds[at..end].fill(Kind::Comment);
            end
        } else if let Some((open, hashes)) = raw {
            let end = after(chars, open, &format!("\"{}", "#".repeat(hashes)), false);
            mark_text(&mut kinds, open, end, hashes + 1);
            end
        } else if chars[at] == '"' {
            let end = after(chars, at + 1, "\"", true);
            mark_text(&mut kinds, at + 1, end, 1);
            end
        } else if chars[at] == '\'' {
            match char_end(chars, at) {
                Some(end) => {
                    mark_text(&mut kinds, at + 1, end, 1);
                    end
                }
                None => at + 1,
            }
        } else {
            at + 1
        };
    }
    kinds
}

/// The end of a block comment; they nest in Rust.
fn block_end(chars: &[char], from: usize, nests: bool) -> usize {
    let (mut at, mut depth) = (from + 2, 1);
    while at < chars.len() && depth > 0 {
        if starts(chars, at, "*/") {
            (at, depth) = (at + 2, depth - 1);
        } else if nests && starts(chars, at, "/*") {
            (at, depth) = (at + 2, depth + 1);
        } else {
            at += 1;
        }
    }
    at
}

/// The start of the contents of a raw string that starts at `at`, and its number of hashes.
fn raw_string(chars: &[char], at: usize) -> Option<(usize, usize)> {
    let prefix = ["br", "cr", "r"].into_iter().find(|p| starts(chars, at, p))?;
    let from = at + prefix.len();
    let hashes = chars[from..].iter().take_while(|c| **c == '#').count();
    (chars.get(from + hashes) == Some(&'"')).then_some((from + hashes + 1, hashes))
}

/// The end of a character literal; `None` for a lifetime.
fn char_end(chars: &[char], at: usize) -> Option<usize> {
    if chars.get(at + 1) == Some(&'\\') {
        return Some(after(chars, at + 1, "'", true));
    }
    (chars.get(at + 2) == Some(&'\'')).then_some(at + 3)
}

#[test]
fn parts_are_told_apart() {
    let rust = "fn f<'a>(x: &'a str) { // one \"two\"\n    g(\"// no\\\" comment\", 'x', '\\'', \
                r#\"a \"b\" /* \"#, b\"c\"); /* d /* e */ f */ h()\n}\n";
    let parts = split(rust, "rs");
    assert!(parts.code.contains("fn f<'a>(x: &'a str) {") && parts.code.contains(" h()\n}"));
    for absent in ["one", "comment", "/*", "d", "e"] {
        assert!(!parts.code.contains(absent), "{absent}: {}", parts.code);
    }
    assert!(
        parts.comments.contains("// one \"two\"") && parts.comments.contains("/* d /* e */ f */")
    );
    assert!(parts.strings.contains("// no\\\" comment") && parts.strings.contains("a \"b\" /* "));
    assert_eq!(parts.code.len(), rust.len());
    let python = split("x = '# no' # yes\n\"\"\"Doc 'it'.\"\"\"\ny = \"a\\\"# no\"\n", "py");
    assert_eq!(
        python.comments.split_whitespace().collect::<Vec<_>>().join(" "),
        "# yes \"\"\"Doc 'it'.\"\"\""
    );
    let cuda = split("a('\"'); /* b /* c */ d(\"//\"); // e\n", "cu");
    assert_eq!(cuda.code.trim_end(), "a(' ');              d(\"  \");");
}
