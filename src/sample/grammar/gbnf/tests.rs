use super::*;
use llguidance::toktrie::TokRxInfo;
use proptest::prelude::*;

const JSON: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Limited, so that a text does not end in spaces only
ws ::= | " " | "\n" [ \t]{0,20}
"#;

const ARITHMETIC: &str = r#"
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"#;

const LIST: &str = r#"
# A list of items
root ::= item+

# Excludes various line break characters
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"#;

/// Whether the whole text matches; `None` if it is the beginning of one that may.
fn matches(grammar: &str, text: impl AsRef<[u8]>) -> Option<bool> {
    let mut matcher = Matcher::new(grammar).unwrap();
    match matcher.accept(text.as_ref()).unwrap() {
        true if matcher.can_end() => Some(true),
        true => None,
        false => Some(false),
    }
}

#[test]
fn json_is_followed() {
    let good = [
        r#"{}"#,
        r#"{"a": [1, -2.5e+3, true, null, "x\n\u00e9\"é"]}"#,
        "{\n  \"a\":\n {\"b\": [[], {}]}}",
    ];
    for text in good {
        assert_eq!(matches(JSON, text), Some(true), "{text}");
    }
    for text in ["[]", "{\"a\" 1}", "{,}", r#"{"a": tru}"#, r#"{"a\x": 1}"#, "{}}"] {
        assert_eq!(matches(JSON, text), Some(false), "{text}");
    }
    assert_eq!(matches(JSON, r#"{"a": [1, "#), None);
}

#[test]
fn a_part_ends_wherever_the_rest_can_follow() {
    // The spaces of the last identifier could take the line break, but the rule needs it.
    for text in ["a=b\n", "x+(1*y)=z\n", "a = 1\n\nb*2 = c\n"] {
        assert!(!matches!(matches(ARITHMETIC, text), Some(false)), "{text:?}");
    }
    assert_eq!(matches(ARITHMETIC, "a=b\n"), Some(true));
    assert_eq!(matches(ARITHMETIC, "a=b"), None);
    assert_eq!(matches(ARITHMETIC, "a=b+"), Some(false));
    assert_eq!(matches(r#"root ::= [a-z]+ "foo""#, "barfoo"), Some(true));
}

#[test]
fn lists_are_followed() {
    assert_eq!(matches(LIST, "- one\n- zwölf\n"), Some(true));
    assert_eq!(matches(LIST, "- a\u{2028}"), Some(false));
    assert_eq!(matches(LIST, "one"), Some(false));
}

#[test]
fn repetitions_have_bounds() {
    let lengths = |grammar: &str| -> Vec<usize> {
        (0..9).filter(|&n| matches(grammar, "ab".repeat(n)) == Some(true)).collect()
    };
    assert_eq!(lengths(r#"root ::= "ab"{2}"#), [2]);
    assert_eq!(lengths(r#"root ::= "ab"{0}"#), [0]);
    assert_eq!(lengths(r#"root ::= ("a" "b"){ 2 , 4 }"#), [2, 3, 4]);
    assert_eq!(lengths(r#"root ::= "ab"{6,}"#), [6, 7, 8]);
    assert_eq!(lengths(r#"root ::= ("ab"{2})? "ab""#), [1, 3]);
    assert_eq!(
        lengths(r#"root ::= x{0,1}{3}\nx ::= "ab""#.replace("\\n", "\n").as_str()),
        [0, 1, 2, 3]
    );
}

#[test]
fn escapes_and_classes_are_code_points() {
    let grammar = r#"root ::= "\x41\u00e9\U0001F600" [\]\[\x2d\u0430-\u044f] [^\n] . [a-]"#;
    assert_eq!(matches(grammar, "Aé😀жé\n-"), Some(true));
    assert_eq!(matches(grammar, "Aé😀]x字a"), Some(true));
    assert_eq!(matches(grammar, "Aé😀z"), Some(false));
    assert_eq!(matches("root ::= . # any", "\u{10FFFF}"), Some(true));
}

#[test]
fn characters_may_come_in_pieces() {
    let grammar = "root ::= [à-ü]+";
    let bytes = "éü".as_bytes();
    assert_eq!(matches(grammar, &bytes[..1]), None);
    assert_eq!(matches(grammar, &bytes[..3]), None);
    assert_eq!(matches(grammar, bytes), Some(true));
    // Too long, a surrogate, too great, not UTF-8; and characters of the right length outside.
    for wrong in [&[0xC1, 0x80][..], &[0xED, 0xA0], &[0xF4, 0x90], &[0xFF], &[0xE0, 0x80], &[0x80]]
    {
        assert_eq!(matches("root ::= .", wrong), Some(false), "{wrong:x?}");
    }
    assert_eq!(matches(grammar, [0xC2]), Some(false));
}

#[test]
fn a_text_that_cannot_go_on_must_end() {
    let mut matcher = Matcher::new(r#"root ::= "ab" "c"?"#).unwrap();
    assert!(!matcher.can_end());
    assert!(matcher.accept(b"ab").unwrap() && matcher.can_end() && !matcher.must_end());
    assert!(!matcher.accept(b"d").unwrap() && matcher.can_end());
    assert!(matcher.accept(b"c").unwrap() && matcher.must_end());
}

/// A vocabulary of all bytes and of pieces of JSON texts.
fn vocabulary() -> TokTrie {
    let bytes = (0..=255).map(|byte| vec![byte]);
    let pieces =
        ["{}", "\": ", "\", \"", "tru", "e}", "x", "xx", "xxx", "\\u00", "1.5", "é", "\n\t", "}]"];
    let words: Vec<_> = bytes.chain(pieces.map(|piece| piece.as_bytes().to_vec())).collect();
    TokTrie::from(&TokRxInfo::new(words.len() as u32, INVALID_TOKEN), &words)
}

#[test]
fn a_mask_that_was_kept_is_the_one_that_a_walk_gives() {
    let trie = vocabulary();
    let text = r#"{"a": [1, -2.5, true, "xxxx xx", {"b": {}}], "é": "xxxxx\u00e9xx", "": []}"#;
    for grammar in [JSON, ARITHMETIC, LIST] {
        let text = if grammar == JSON { text } else { "- a=b\n- x+(1*y)=z\n" };
        let (mut matcher, mut fresh) =
            (Matcher::new(grammar).unwrap(), Matcher::new(grammar).unwrap());
        let mut n_kept = 0;
        for byte in text.bytes() {
            n_kept += usize::from(matcher.masks.get(matcher.state).is_some());
            let expected = fresh.walk(&trie).unwrap();
            assert!(matcher.mask(&trie).unwrap() == expected);
            assert!(matcher.clone().mask(&trie).unwrap() == expected);
            if !matcher.accept(&[byte]).unwrap() {
                break;
            }
            assert!(fresh.accept(&[byte]).unwrap());
        }
        assert!(n_kept > 3 || grammar != JSON, "{n_kept}");
    }
}

#[test]
fn bad_grammars_are_refused_with_their_line() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(65), ")".repeat(65));
    let large = format!("root ::= {}", "\"a\"{0,2000} ".repeat(20));
    let cases = [
        ("", "no rule named root"),
        ("a ::= \"x\"", "no rule named root"),
        ("root ::= \"a\"\n\nb = \"c\"", "line 3 of the GBNF grammar: expected ::="),
        ("root ::= item", "line 1 of the GBNF grammar: the rule item is not defined"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2 of the GBNF grammar: the rule root is defined"),
        ("root ::= \"a", "the text ends within a rule"),
        ("root ::= [a", "the text ends within a rule"),
        ("root ::= (\"a\"", "expected )"),
        ("root ::= \"a\")", "expected the end of the rule root, got ')'"),
        ("root ::= *", "nothing to repeat"),
        ("root ::= \"a\"{3,2}", "less than its first"),
        ("root ::= \"a\"{9999}", "expected a number up to 2000"),
        ("root ::= \"a\"{1", "expected }"),
        ("root ::= \"\\q\"", "there is no escape \\q"),
        ("root ::= \"\\xg0\"", "expected 2 hexadecimal digits"),
        ("root ::= \"\\ud800\"", "U+D800 is no character"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= %", "expected a rule's name, got '%'"),
        ("root ::= <think>", "grammars of tokens"),
        ("root ::= root \"a\"", "the rule root begins with itself"),
        ("root ::= a\na ::= b \"x\" | \"y\"\nb ::= \" \"? a", "begins with itself"),
        ("root ::= (\"a\"?)*", "repeats a part that can be empty"),
        (&deep, "nested more than 64"),
        (&large, "more than 100000 symbols"),
    ];
    for (text, expected) in cases {
        let error = Matcher::new(text).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(expected), "{text:?}: {error:?}");
    }
}

#[test]
fn nesting_without_end_is_an_error() {
    let mut matcher = Matcher::new("root ::= \"[\" root \"]\" | \"x\"").unwrap();
    let n = (0..100_000).find(|_| matcher.accept(b"[").is_err());
    assert!(n.is_some_and(|n| n > 1000), "{n:?}");
}

const WORDS: &[&str] = &[
    "root ::= ",
    "root",
    "a",
    " ::= ",
    "|",
    "(",
    ")",
    "\"x\"",
    "[a-c]",
    "[^a-c]",
    "{1,3}",
    "*",
    "+",
    "?",
    "\n",
    " ",
    "\\",
    "é",
    "#",
];

proptest! {
    /// Whatever the text, a grammar or a sentence comes of it.
    #[test]
    fn no_text_panics(words in prop::collection::vec(prop::sample::select(WORDS), 0..24)) {
        if let Ok(mut matcher) = Matcher::new(&words.concat()) {
            let _ = matcher.accept("xxé".as_bytes());
        }
    }

    /// A class and the bytes of a character agree.
    #[test]
    fn classes_hold_their_characters(low: char, high: char, c: char) {
        let (low, high) = (low.min(high), low.max(high));
        let escape = |c: char| format!("\\U{:08x}", c as u32);
        let range = format!("{}-{}", escape(low), escape(high));
        let is_in = (low..=high).contains(&c);
        let text = c.to_string();
        prop_assert_eq!(matches(&format!("root ::= [{range}]"), &text), Some(is_in));
        prop_assert_eq!(matches(&format!("root ::= [^{range}]"), &text), Some(!is_in));
    }
}
