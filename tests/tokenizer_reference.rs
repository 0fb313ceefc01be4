//! The tokenizer against the reference implementations: for each vocabulary of
//! `tests/fixtures/tokenizer/` (made by `generate.py` there) the ids of 1,000 strings, and back.

use moeba::gguf::Gguf;
use moeba::tokenizer::{Detokenizer, EncodeOptions, Tokenizer, Vocab};
use std::path::PathBuf;
use unicode_normalization::UnicodeNormalization;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(name)
}

fn vocab(name: &str) -> Vocab {
    let gguf = Gguf::open(fixture(&format!("{name}.gguf"))).unwrap();
    Vocab::from_gguf(&gguf).unwrap()
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::new(vocab(name)).unwrap()
}

fn strings() -> Vec<String> {
    serde_json::from_slice(&std::fs::read(fixture("strings.json")).unwrap()).unwrap()
}

/// Per string a little-endian u16 count, then that many u16 ids.
fn expected(name: &str) -> Vec<Vec<u32>> {
    let bytes = std::fs::read(fixture(&format!("{name}.ids"))).unwrap();
    let mut numbers =
        bytes.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])));
    let mut rows = Vec::new();
    while let Some(n) = numbers.next() {
        rows.push(numbers.by_ref().take(n as usize).collect());
    }
    rows
}

/// Every string has the expected ids; returns the strings with them.
fn check(tokenizer: &Tokenizer, ids: &str, parse_special: bool) -> Vec<(String, Vec<u32>)> {
    let (strings, expected) = (strings(), expected(ids));
    assert_eq!((strings.len(), expected.len()), (1000, 1000));
    let options = EncodeOptions { add_special: false, parse_special };
    let mut wrong = 0;
    for (text, expected) in strings.iter().zip(&expected) {
        let got = tokenizer.encode(text, options);
        if got != *expected {
            wrong += 1;
            let shown = tokenizer.decode_lossy(expected, false).unwrap();
            eprintln!("{ids}: {text:?}\n  got      {got:?}\n  expected {expected:?} {shown:?}");
        }
    }
    assert_eq!(wrong, 0, "of 1,000 strings with {ids}");
    strings.into_iter().zip(expected).collect()
}

/// Back to the text, at once and token by token.
fn check_back(tokenizer: &Tokenizer, rows: &[(String, Vec<u32>)], original: fn(&str) -> String) {
    for (text, ids) in rows {
        let text = original(text);
        assert_eq!(tokenizer.decode_lossy(ids, false).unwrap(), text);
        let mut stream = Detokenizer::new(tokenizer, false);
        let mut joined: String =
            ids.iter().map(|&id| stream.push(id).unwrap().to_owned()).collect();
        joined.push_str(stream.finish());
        assert_eq!(joined, text);
    }
}

fn as_it_is(text: &str) -> String {
    text.to_string()
}

#[test]
fn qwen2_gives_the_ids_of_hf_tokenizers() {
    let tokenizer = tokenizer("qwen2");
    let rows = check(&tokenizer, "qwen2", true);
    check_back(&tokenizer, &rows, |text| text.nfc().collect());
    let rows = check(&tokenizer, "qwen2-as-text", false);
    check_back(&tokenizer, &rows, |text| text.nfc().collect());
}

#[test]
fn llama3_gives_the_ids_of_hf_tokenizers() {
    let tokenizer = tokenizer("llama3");
    let rows = check(&tokenizer, "llama3", true);
    check_back(&tokenizer, &rows, as_it_is);
}

#[test]
fn gpt2_gives_the_ids_of_hf_tokenizers() {
    let tokenizer = tokenizer("gpt2");
    let rows = check(&tokenizer, "gpt2", true);
    check_back(&tokenizer, &rows, as_it_is);
}

#[test]
fn default_gives_the_ids_of_hf_tokenizers_with_llama_cpps_patterns() {
    for pre in [Some("default".to_string()), None] {
        let tokenizer = Tokenizer::new(Vocab { pre, ..vocab("gpt2") }).unwrap();
        let rows = check(&tokenizer, "gpt2-default", true);
        check_back(&tokenizer, &rows, as_it_is);
    }
}

#[test]
fn spm_gives_the_ids_of_sentencepiece() {
    let tokenizer = tokenizer("spm");
    let rows = check(&tokenizer, "spm", false);
    check_back(&tokenizer, &rows, as_it_is);
}

/// A run of one letter is where merging by rescanning takes minutes and where recursive regular
/// expressions overflow the stack.
#[test]
fn a_run_of_131072_letters_takes_less_than_two_seconds() {
    for name in ["qwen2", "llama3", "gpt2", "spm"] {
        let tokenizer = tokenizer(name);
        for letter in ["a", "x", " ", "\n", "7", "!", "é", "漢", "\u{301}", "<"] {
            let text = letter.repeat(131_072);
            let start = std::time::Instant::now();
            let ids = tokenizer.encode(&text, EncodeOptions::PROMPT);
            let seconds = start.elapsed().as_secs_f64();
            assert!(seconds < 2.0, "{name}: {letter:?} took {seconds:.2} s");
            assert_eq!(tokenizer.decode_lossy(&ids, true).unwrap(), text, "{name}: {letter:?}");
        }
    }
}
