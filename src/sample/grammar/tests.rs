use super::matcher::Matcher;
use super::*;
use crate::tokenizer::{TokenType, Vocab, VocabModel};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::json;
use std::sync::OnceLock;

const END: &str = "<end>";
const CALL: &str = "<call>";

/// All bytes below 128, some words, and control tokens.
fn tokenizer() -> Tokenizer {
    let byte_level = crate::tokenizer::byte_level_text;
    let mut tokens: Vec<Vec<u8>> = (0..128u8).map(|byte| byte_level(&[byte]).into()).collect();
    for word in ["true", "{\"", "\":", " \"", "}\n", "é", "[go]{", "]\n\n", "]\n\""] {
        tokens.push(byte_level(word.as_bytes()).into());
    }
    let mut types = vec![TokenType::Normal; tokens.len()];
    tokens.extend([END, CALL].map(|name| name.as_bytes().to_vec()));
    types.resize(tokens.len(), TokenType::Control);
    let mut vocab = Vocab::new(VocabModel::Bpe, tokens);
    vocab.ids.eos = Some(types.len() as u32 - 2);
    (vocab.types, vocab.pre) = (types, Some("gpt-2".into()));
    Tokenizer::new(vocab).unwrap()
}

fn id(text: &str) -> u32 {
    let tokenizer = tokenizer();
    let ids = 0..tokenizer.n_vocab() as u32;
    ids.into_iter().find(|&id| tokenizer.piece(id).unwrap() == text.as_bytes()).unwrap()
}

fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| Grammars::new(&tokenizer()).unwrap())
}

fn constraint(grammar: Grammar) -> Constraint {
    grammars().constraint(&grammar).unwrap()
}

fn refusal(grammar: Grammar) -> String {
    let error = grammars().constraint(&grammar).unwrap_err().to_string();
    assert!(!error.contains('\n') && !error.contains('<') && error.len() < 400, "{error}");
    error
}

/// Whether the constraint allows a text byte by byte, and allows its end.
fn allows(constraint: &Constraint, text: &str) -> bool {
    let mut constraint = constraint.clone();
    for byte in text.bytes() {
        let id = u32::from(byte);
        if constraint.is_complete() || !constraint.mask().unwrap().unwrap().allows(id) {
            return false;
        }
        constraint.accept(id).unwrap();
    }
    let may_end = constraint.can_end().unwrap();
    let mask = constraint.mask().unwrap();
    assert_eq!(mask.is_none_or(|mask| mask.allows(id(END))), may_end);
    may_end
}

/// Every kind of grammar for the same texts.
fn yes_or_no() -> [Grammar; 4] {
    [
        Grammar::JsonSchema(json!({ "enum": ["yes", "no"] })),
        Grammar::Regex("\"(yes|no)\"".into()),
        Grammar::Lark("start: \"\\\"\" (\"yes\" | \"no\") \"\\\"\"".into()),
        Grammar::Gbnf("root ::= \"\\\"\" (\"yes\" | \"no\") \"\\\"\"".into()),
    ]
}

#[test]
fn a_text_ends_where_its_grammar_does() {
    for grammar in yes_or_no() {
        let kind = grammar.kind();
        let constraint = constraint(grammar);
        for good in ["\"yes\"", "\"no\""] {
            assert!(allows(&constraint, good), "{kind}: {good}");
        }
        for bad in ["", "yes", "\"maybe\"", "\"yes", "\"yes\"\""] {
            assert!(!allows(&constraint, bad), "{kind}: {bad}");
        }
    }
}

#[test]
fn a_mask_has_the_tokens_that_fit_whole() {
    let schema = json!({ "type": "object", "properties": { "a": { "type": "boolean" } },
                         "required": ["a"], "additionalProperties": false });
    let mut constraint = constraint(Grammar::JsonSchema(schema));
    assert!(!constraint.mask().unwrap().unwrap().allows(u32::MAX));
    for token in ["{\"", "a", "\":", "true"] {
        let mask = constraint.mask().unwrap().unwrap();
        assert!(mask.allows(id(token)), "{token}");
        assert!(!mask.allows(id("é")) && !mask.allows(id(END)) && !mask.allows(id(CALL)));
        constraint.accept(id(token)).unwrap();
    }
    assert!(!constraint.mask().unwrap().unwrap().allows(id("}\n")));
    constraint.accept(id("}")).unwrap();
    assert!(constraint.is_complete());
}

#[test]
fn white_space_in_json_has_an_end() {
    let constraint = constraint(Grammar::JsonObject);
    let text = |space: &str| format!("{{{space}\"a\":{space}1}}");
    for good in ["", " ", "\n", "\n\t\t", "\r\n    "] {
        assert!(allows(&constraint, &text(good)), "{good:?}");
    }
    for bad in ["   ", "\n\n\n", &format!("\n{}", " ".repeat(41))] {
        assert!(!allows(&constraint, &text(bad)), "{bad:?}");
    }
}

#[test]
fn json_objects_are_objects() {
    let constraint = constraint(Grammar::JsonObject);
    assert!(allows(&constraint, r#"{"a": [1, null, {"b": "c"}]}"#));
    for bad in ["1", "[]", "\"a\"", "{\"a\"}"] {
        assert!(!allows(&constraint, bad), "{bad}");
    }
}

#[test]
fn a_grammar_begins_after_its_trigger() {
    for grammar in yes_or_no() {
        let start = constraint(grammar).after([CALL, "[go]"].map(|text| text.as_bytes().to_vec()));
        for trigger in [&[id(CALL)][..], &["[", "g", "o", "]"].map(id)] {
            let mut constraint = start.clone();
            for token in ["true", "é", "[", "g"].map(id).iter().chain(trigger) {
                // The text is free, but it does not end before the grammar.
                let mask = constraint.mask().unwrap().unwrap();
                assert!(mask.allows(*token) && !mask.allows(id(END)));
                assert!(!constraint.can_end().unwrap());
                let mut resuming = constraint.clone().resuming();
                assert!(!resuming.is_active() && resuming.mask().unwrap().is_none());
                constraint.accept(*token).unwrap();
            }
            assert!(constraint.is_active() && allows(&constraint, "\"no\""));
            let mut resuming = constraint.clone().resuming();
            for byte in b"\"no\"" {
                constraint.accept(u32::from(*byte)).unwrap();
                resuming.accept(u32::from(*byte)).unwrap();
            }
            assert!(constraint.is_complete());
            assert!(!resuming.is_active() && resuming.can_end().unwrap());
            trigger.iter().for_each(|&token| resuming.accept(token).unwrap());
            assert!(resuming.is_active() && allows(&resuming, "\"yes\""));
        }
    }
}

#[test]
fn a_trigger_may_end_within_a_token() {
    let after = |grammar: Grammar| constraint(grammar).after([b"[go]".to_vec()]);
    let gbnf = Grammar::Gbnf("root ::= \"{\" [a-z] \"}\"".into());
    let lark = Grammar::Lark("start: \"{\" /[a-z]/ \"}\"".into());
    for mut constraint in [after(gbnf), after(lark)] {
        constraint.accept(id("[go]{")).unwrap();
        assert!(constraint.is_active() && allows(&constraint, "a}"));
    }
    let mut constraint = after(yes_or_no()[0].clone()).resuming();
    constraint.accept(id("[go]{")).unwrap();
    assert!(!constraint.is_active(), "the brace does not fit");
    let constraint = after(yes_or_no()[0].clone()).after([Vec::new()]);
    assert!(allows(&constraint, "\"no\""), "there is no trigger");
    // White space behind the trigger is no part of the grammar.
    for (end, rest) in [("]\n\n", "\"no\""), ("]\n\"", "no\"")] {
        let mut constraint = after(yes_or_no()[0].clone());
        ["[", "g", "o", end].map(id).iter().for_each(|&id| constraint.accept(id).unwrap());
        assert!(constraint.is_active() && allows(&constraint, rest), "{end:?}");
    }
}

#[test]
fn a_text_may_begin_with_a_free_block() {
    for grammar in yes_or_no() {
        let start = constraint(grammar).or_after(vec![id(CALL), id("true")], b"[go]".to_vec());
        assert!(start.is_active() && allows(&start, "\"no\""));
        let mut constraint = start.clone();
        assert!(!constraint.can_end().unwrap());
        for token in [CALL, "true"].map(id) {
            assert!(constraint.mask().unwrap().unwrap().allows(token));
            constraint.accept(token).unwrap();
        }
        let mask = constraint.mask().unwrap().unwrap();
        assert!(mask.allows(id("é")) && !mask.allows(id(END)));
        ["é", "[", "g", "o", "]"].map(id).iter().for_each(|&id| constraint.accept(id).unwrap());
        // What forces the end of a block may add spaces.
        constraint.accept(id("\n")).unwrap();
        assert!(allows(&constraint, "\"yes\""));
        constraint.accept(id("\"")).unwrap();
        assert!(constraint.accept(id("\n")).is_err());
        let mut broken = start.clone();
        broken.accept(id(CALL)).unwrap();
        assert!(!broken.mask().unwrap().unwrap().allows(id("\"")));
        assert!(broken.accept(id("\"")).is_err());
        assert!(start.or_after(vec![id("\"")], b"x".to_vec()).accept(id("\"")).is_ok());
    }
}

#[test]
fn grammars_are_checked_without_a_model() {
    for grammar in yes_or_no() {
        grammar.check().unwrap();
    }
    for bad in [Grammar::JsonSchema(json!({ "type": 1 })), Grammar::Gbnf("root ::= x".into())] {
        assert!(bad.check().is_err());
    }
}

#[test]
fn tokens_that_do_not_fit_are_an_error() {
    for grammar in yes_or_no() {
        assert!(constraint(grammar.clone()).accept(id("x")).is_err());
        assert!(constraint(grammar).accept(u32::MAX).is_err());
    }
}

#[test]
fn bad_grammars_are_refused_in_a_sentence() {
    let schema = |schema| refusal(Grammar::JsonSchema(schema));
    assert!(schema(json!({ "type": "strin" })).starts_with("the JSON schema cannot be used: "));
    schema(json!({ "$ref": "#/nowhere" }));
    schema(json!({ "$ref": "http://127.0.0.1/schema.json" }));
    schema(json!({ "type": "string", "pattern": "(" }));
    schema(json!({ "not": {} }));
    refusal(Grammar::Regex("(a".into()));
    assert!(schema(json!({ "type": "string", "pattern": "(?=a)" })).contains("look-around"));
    assert!(schema(json!({ "$ref": "#" })).contains("no text that the model can write"));
    refusal(Grammar::Lark("start: nothing".into()));
    refusal(Grammar::Lark(format!(
        "start: {}\"a\"{}",
        "%lark { start: ".repeat(99),
        "}".repeat(99)
    )));
    let terms = |n| Grammar::Lark(format!("start: A\nA: {}", vec!["/a*/"; n].join(" & ")));
    assert!(refusal(terms(18)).contains("more than 16"));
    constraint(terms(17));
    refusal(Grammar::Lark("start: \"a".into()));
    refusal(Grammar::Gbnf("root ::= nothing".into()));
    // No token of this vocabulary can begin it.
    refusal(Grammar::Gbnf("root ::= \"ü\"".into()));
    refusal(Grammar::Regex("[字]".into()));
}

/// Within a string of JSON and within a text between tags the mask comes from tables.
#[test]
fn masks_of_free_text_take_no_walk_through_all_tokens() {
    let string = Grammar::JsonSchema(json!({ "type": "string" }));
    let tagged = Grammar::Lark("start: /(?:[^<]|<<*[^<>])*<<*>/".into());
    for (grammar, text) in [(string, "\"a"), (tagged, "a<b\n")] {
        let kind = grammar.kind();
        let compiled = compile(grammars().factory.clone(), &grammar).unwrap();
        let Matcher::Llguidance(mut matcher) = compiled.matcher else { panic!("{kind}") };
        text.bytes().for_each(|byte| matcher.consume_token(u32::from(byte)).unwrap());
        assert!(matcher.compute_mask().unwrap().is_allowed(id("true")));
        assert!(matcher.last_step_stats().unwrap().slices_applied > 0, "{kind}");
    }
}

#[test]
fn local_references_are_followed() {
    let schema = json!({
        "$defs": { "node": { "type": "object", "properties": {
            "next": { "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] } },
            "required": ["next"], "additionalProperties": false } },
        "$ref": "#/$defs/node",
    });
    let constraint = constraint(Grammar::JsonSchema(schema));
    assert!(allows(&constraint, r#"{"next":{"next":null}}"#));
    assert!(!allows(&constraint, r#"{"next":1}"#));
}

#[test]
fn long_chains_of_rules_do_not_overflow_the_stack() {
    let chain = |rule: &dyn Fn(usize) -> String, last: &str| {
        (0..30_000).map(rule).chain([last.to_owned()]).collect::<Vec<_>>().join("\n")
    };
    let lark = chain(&|n| format!("r{n}: r{}", n + 1), "r30000: \"a\"\nstart: r0");
    let terminals = chain(&|n| format!("R{n}: R{}", n + 1), "R30000: \"a\"\nstart: R0");
    let gbnf = chain(&|n| format!("r{n} ::= r{}", n + 1), "r30000 ::= \"a\"\nroot ::= r0");
    for grammar in [Grammar::Lark(lark), Grammar::Lark(terminals), Grammar::Gbnf(gbnf)] {
        // A sentence is as good as a constraint.
        let _ = grammars().constraint(&grammar);
    }
    let next = |n: usize| (format!("d{n}"), json!({ "$ref": format!("#/$defs/d{}", n + 1) }));
    let mut defs: serde_json::Map<_, _> = (0..12_000).map(next).collect();
    defs.insert("d12000".into(), json!({ "type": "null" }));
    let schema = json!({ "$defs": defs, "$ref": "#/$defs/d0" });
    let _ = grammars().constraint(&Grammar::JsonSchema(schema));
}

#[test]
fn the_latest_grammars_are_kept() {
    let grammars = Grammars::new(&tokenizer()).unwrap();
    let grammar = |n: usize| Grammar::Gbnf(format!("root ::= \"a\"{{{n}}}"));
    for n in 1..=N_CACHED + 1 {
        grammars.constraint(&grammar(n)).unwrap();
        grammars.constraint(&grammar(1)).unwrap();
    }
    assert_eq!(grammars.cache.lock().unwrap().len(), N_CACHED);
    assert!(grammars.cached(&grammar(1).key()).is_some());
    assert!(grammars.cached(&grammar(2).key()).is_none());
    assert_ne!(Grammar::Lark("a".into()).key(), Grammar::Regex("a".into()).key());
}

#[test]
fn a_model_without_an_end_token_has_grammars() {
    let mut vocab = Vocab::new(VocabModel::Bpe, (b'a'..=b'z').map(|byte| vec![byte]).collect());
    (vocab.pre, vocab.ids.eos) = (Some("gpt-2".into()), None);
    let tokenizer = Tokenizer::new(vocab).unwrap();
    let grammars = Grammars::new(&tokenizer).unwrap();
    for grammar in [Grammar::Regex("ab".into()), Grammar::Gbnf("root ::= \"ab\"".into())] {
        let mut constraint = grammars.constraint(&grammar).unwrap();
        for id in [0, 1] {
            assert!(constraint.mask().unwrap().unwrap().allows(id));
            constraint.accept(id).unwrap();
        }
        assert!(constraint.is_complete());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// A text that is drawn from the masks parses.
    #[test]
    fn drawn_texts_fit_the_schema(draws in prop::collection::vec(any::<Index>(), 80)) {
        let schema = json!({ "type": "object", "properties": {
            "a": { "type": "array", "items": { "enum": [1, 22, true] }, "maxItems": 3 },
            "b": { "enum": ["x", "y"] } }, "required": ["b"], "additionalProperties": false });
        let mut constraint = constraint(Grammar::JsonSchema(schema));
        let (tokenizer, mut text) = (tokenizer(), Vec::new());
        for draw in draws {
            let mask = constraint.mask().unwrap().unwrap();
            let allowed = |id: &u32| mask.allows(*id) && !matches!(id, 9 | 10 | 13 | 32);
            let ids: Vec<u32> = (0..tokenizer.n_vocab() as u32).filter(allowed).collect();
            let id = ids[draw.index(ids.len())];
            constraint.accept(id).unwrap();
            text.extend_from_slice(tokenizer.piece(id).unwrap());
            if constraint.is_complete() {
                break;
            }
        }
        prop_assert!(constraint.is_complete(), "{}", String::from_utf8_lossy(&text));
        let value: Value = serde_json::from_slice(&text).unwrap();
        prop_assert!(value["b"] == "x" || value["b"] == "y");
    }
}
