//! The tokenizer against the reference implementations: for each vocabulary of
//! `tests/fixtures/tokenizer/` (made by `generate.py` there) the ids of 1,000 strings, and back.

use moeba::gguf::Gguf;
use moeba::tokenizer::{Detokenizer, EncodeOptions, Tokenizer, Vocab, pre};
use std::collections::BTreeMap;
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
    let bytes = common::gunzip(&fixture(&format!("{name}.ids.gz")));
    let mut numbers =
        bytes.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])));
    let mut rows = Vec::new();
    while let Some(n) = numbers.next() {
        rows.push(numbers.by_ref().take(n as usize).collect());
    }
    rows
}

/// Each of the 1,000 strings has the expected ids; returns the strings with them.
fn check(tokenizer: &Tokenizer, ids: &str, parse_special: bool) -> Vec<(String, Vec<u32>)> {
    let strings = strings();
    assert_eq!(strings.len(), 1000);
    check_strings(tokenizer, strings, ids, parse_special)
}

fn check_strings(
    tokenizer: &Tokenizer,
    strings: Vec<String>,
    ids: &str,
    parse_special: bool,
) -> Vec<(String, Vec<u32>)> {
    let expected = expected(ids);
    assert_eq!(strings.len(), expected.len());
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
    assert_eq!(wrong, 0, "of {} strings with {ids}", strings.len());
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

/// families.json: the published pre-tokenizers by name, and strings that tell them apart.
#[derive(serde::Deserialize)]
struct Families {
    strings: Vec<String>,
    families: BTreeMap<String, Family>,
}

#[derive(serde::Deserialize)]
struct Family {
    normalizer: Option<serde_json::Value>,
}

/// llama.cpp's own, and two that others have the ids of; then those of `llama.cpp/names.json`.
const UNPUBLISHED: [&str; 13] = [
    "default",
    "falcon",
    "laguna",
    "glm4",
    "chatglm-bpe",
    "jais-2",
    "k2-horizon",
    "tekken-num3",
    "nemotron-3.5-embed",
    "flint",
    "bloom",
    "viking",
    "chameleon",
];

#[test]
fn each_family_gives_the_ids_of_hf_tokenizers() {
    let published: Families =
        serde_json::from_slice(&std::fs::read(fixture("families.json")).unwrap()).unwrap();
    let texts = [strings(), published.strings].concat();
    let shared = vocab("families");
    for (name, family) in &published.families {
        let pre = Some(name.clone());
        let tokenizer = Tokenizer::new(Vocab { pre, ..shared.clone() }).unwrap();
        let ids = format!("families/{name}");
        let rows = check_strings(&tokenizer, texts.clone(), &ids, true);
        match family.normalizer {
            None => check_back(&tokenizer, &rows, as_it_is),
            Some(_) => check_back(&tokenizer, &rows, |text| text.nfc().collect()),
        }
    }
    // No other row of the table is left out.
    let known = pre::known_names();
    let missing: Vec<&str> = known.filter(|n| !published.families.contains_key(*n)).collect();
    assert_eq!(missing, UNPUBLISHED);
}

/// The shared vocabulary shows a difference between any two families, but for pairs of patterns
/// that match the same.
#[test]
fn families_differ_in_their_ids() {
    let mut alike: BTreeMap<Vec<Vec<u32>>, Vec<&str>> = BTreeMap::new();
    for name in pre::known_names().filter(|name| !UNPUBLISHED.contains(name)) {
        alike.entry(expected(&format!("families/{name}"))).or_default().push(name);
    }
    let alike: Vec<_> = alike.into_values().filter(|names| names.len() > 1).collect();
    assert_eq!(alike, [["grok-2", "bailingmoe2"]]);
}

#[test]
fn spm_gives_the_ids_of_sentencepiece() {
    let tokenizer = tokenizer("spm");
    let rows = check(&tokenizer, "spm", false);
    check_back(&tokenizer, &rows, as_it_is);
}

/// Ids that SentencePiece gives, with its charsmap and without.
#[test]
fn unigram_gives_the_ids_of_sentencepiece() {
    check(&tokenizer("t5"), "t5", false);
    let plain = tokenizer("t5-plain");
    let rows = check(&plain, "t5-plain", false);
    // Nothing is normalised away and every byte is a token.
    check_back(&plain, &rows, as_it_is);
}

#[test]
fn nllb_gives_the_ids_of_sentencepiece_moved_to_fairseqs_order() {
    check(&tokenizer("nllb"), "nllb", false);
}

/// llama.cpp's vocabularies, cut down to its test strings, which `llama_cpp.py` there does.
#[test]
fn llama_cpps_vocabularies_give_their_ids() {
    for name in ["gemma-4", "falcon"] {
        let tokenizer = tokenizer(&format!("llama.cpp/{name}"));
        let rows = std::fs::read(fixture(&format!("llama.cpp/{name}.json"))).unwrap();
        let rows: Vec<(String, Vec<u32>)> = serde_json::from_slice(&rows).unwrap();
        assert_eq!(rows.len(), 46);
        for (text, expected) in &rows {
            let got = tokenizer.encode(text, EncodeOptions::TEXT);
            assert_eq!(got, *expected, "{name}: {text:?}");
        }
        check_back(&tokenizer, &rows, as_it_is);
    }
}

/// Ids of llama.cpp 0.8.0, which `llama_cpp_names.py` there asks for.
#[derive(serde::Deserialize)]
struct Names {
    strings: Vec<String>,
    ids: BTreeMap<String, Vec<Vec<u32>>>,
}

#[test]
fn names_without_a_published_tokenizer_give_the_ids_of_llama_cpp() {
    let names: Names =
        serde_json::from_slice(&std::fs::read(fixture("llama.cpp/names.json")).unwrap()).unwrap();
    assert_eq!((names.strings.len(), names.ids.len()), (66, 15));
    for (name, rows) in &names.ids {
        let file = match name.as_str() {
            "gemma4" | "sarvam-moe" | "domyn-small" | "mmbert" => "llama.cpp/metaspace",
            "soprano" | "whitespace" => "llama.cpp/plain",
            _ => "families",
        };
        let tokenizer = Tokenizer::new(Vocab { pre: Some(name.clone()), ..vocab(file) }).unwrap();
        for (text, expected) in names.strings.iter().zip(rows) {
            let got = tokenizer.encode(text, EncodeOptions::TEXT);
            assert_eq!(got, *expected, "{name}: {text:?}");
        }
    }
    // No two of them cut all strings alike but sarvam-moe and domyn-small.
    let mut distinct: Vec<_> = names.ids.values().collect();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), names.ids.len() - 1);
}

/// A run of one letter is where merging by rescanning takes minutes and where recursive regular
/// expressions overflow the stack.
#[test]
fn a_run_of_131072_letters_takes_less_than_two_seconds() {
    let fixtures = ["qwen2", "llama3", "gpt2", "spm", "t5-plain"].map(tokenizer);
    let named = |pre: &str| Vocab { pre: Some(pre.into()), ..vocab("families") };
    let families =
        ["superbpe", "exaone-moe", "kimi-k2", "afmoe", "deepseek-llm", "jais-2", "tekken-num3"]
            .map(|name| Tokenizer::new(named(name)).unwrap());
    for (name, tokenizer) in fixtures.iter().chain(&families).enumerate() {
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
