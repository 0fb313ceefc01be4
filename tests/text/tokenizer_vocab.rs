//! The tokenizer's rules outside the reference strings: special tokens, what a generation ends on,
//! streaming, and vocabularies that are broken.

use moeba::gguf::{Gguf, OwnedValue, Writer};
use moeba::tokenizer::{
    Detokenizer, EncodeOptions, SpecialIds, TokenType, Tokenizer, Vocab, VocabModel,
};
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

const TEXT: EncodeOptions = EncodeOptions::TEXT;
const PROMPT: EncodeOptions = EncodeOptions::PROMPT;

fn fixture(name: &str) -> Vocab {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer");
    Vocab::from_gguf(&Gguf::open(dir.join(format!("{name}.gguf"))).unwrap()).unwrap()
}

/// A vocabulary by hand: (text, type, score).
fn vocab(model: VocabModel, tokens: &[(&str, TokenType, f32)]) -> Vocab {
    Vocab {
        types: tokens.iter().map(|t| t.1).collect(),
        scores: tokens.iter().map(|t| t.2).collect(),
        pre: Some("gpt-2".into()),
        ..Vocab::new(model, tokens.iter().map(|t| t.0.as_bytes().to_vec()).collect())
    }
}

use TokenType::{Byte, Control, Normal, Unknown, Unused, UserDefined};

fn small_spm() -> Vocab {
    vocab(
        VocabModel::Spm,
        &[
            ("<unk>", Unknown, 0.0),
            ("<s>", Control, 0.0),
            ("</s>", Control, 0.0),
            ("▁", Normal, -9.0),
            ("a", Normal, -8.0),
            ("▁a", Normal, -1.0),
            ("aa", Normal, -2.0),
            ("<sep>", UserDefined, 0.0),
            ("b", Normal, -8.0),
        ],
    )
}

#[test]
fn spm_prefix_stands_at_the_start_and_after_special_tokens() {
    let tokenizer = Tokenizer::new(small_spm()).unwrap();
    assert_eq!(tokenizer.encode("a", PROMPT), [1, 5]);
    assert_eq!(tokenizer.encode("a", TEXT), [5]);
    assert_eq!(tokenizer.encode("", PROMPT), [1]);
    assert!(tokenizer.encode("", TEXT).is_empty());
    assert_eq!(tokenizer.encode("a<sep>a", TEXT), [5, 7, 5]);
    assert_eq!(tokenizer.encode("a</s>a", PROMPT), [1, 5, 2, 5]);
    assert_eq!(tokenizer.decode(&[1, 5, 7, 5], true).unwrap(), b"a<sep>a");
    assert_eq!(tokenizer.decode(&[1, 5, 3, 4], true).unwrap(), b"a a");
    let none = Vocab { add_space_prefix: Some(false), ..small_spm() };
    let none = Tokenizer::new(none).unwrap();
    assert_eq!(none.encode("a", TEXT), [4]);
    assert_eq!(none.decode(&[5], true).unwrap(), b" a");
}

#[test]
fn spm_merges_the_best_score_first_and_of_equals_the_leftmost() {
    let tokenizer = Tokenizer::new(small_spm()).unwrap();
    // ▁aaa: ▁a scores higher than aa.
    assert_eq!(tokenizer.encode("aaa", TEXT), [5, 6]);
    let none = Vocab { add_space_prefix: Some(false), ..small_spm() };
    assert_eq!(Tokenizer::new(none).unwrap().encode("aaa", TEXT), [6, 4]);
}

#[test]
fn spm_without_byte_tokens_says_unknown_once_for_neighbours() {
    let tokenizer = Tokenizer::new(small_spm()).unwrap();
    assert_eq!(tokenizer.encode("axyza", TEXT), [5, 0, 4]);
    let mut with_bytes = small_spm();
    with_bytes.tokens.push(b"<0x78>".to_vec());
    with_bytes.types.push(Byte);
    with_bytes.scores.push(0.0);
    let tokenizer = Tokenizer::new(with_bytes).unwrap();
    assert_eq!(tokenizer.encode("axa", TEXT), [5, 9, 4]);
    assert_eq!(tokenizer.encode("<0x78>", TEXT).last(), Some(&0), "its name is no byte");
    assert_eq!(tokenizer.decode(&[9], true).unwrap(), b"x");
}

/// Four ways to write `▁aab`: the sum of the scores decides, not the length of the pieces.
#[test]
fn unigram_takes_the_pieces_with_the_best_sum() {
    let tokens = [
        ("<pad>", Control, 0.0),
        ("</s>", Control, 0.0),
        ("<unk>", Unknown, 0.0),
        ("▁", Normal, -1.0),
        ("a", Normal, -2.0),
        ("▁a", Normal, -4.0),
        ("aa", Normal, -3.5),
        ("ab", Normal, -1.0),
        ("<sep>", UserDefined, 0.0),
        ("b", Unused, 0.0),
    ];
    let vocab = Vocab { add_space_prefix: Some(true), ..vocab(VocabModel::Ugm, &tokens) };
    let tokenizer = Tokenizer::new(vocab.clone()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, Some(1)));
    assert_eq!((tokenizer.add_bos(), tokenizer.add_eos()), (false, true));
    assert_eq!(tokenizer.encode("aab", PROMPT), [3, 4, 7, 1]);
    assert_eq!(tokenizer.encode("aaa", TEXT), [3, 4, 6]);
    assert_eq!(tokenizer.encode("a", TEXT), [3, 4]);
    assert_eq!(tokenizer.encode("xbya", TEXT), [3, 2, 4], "neighbours, one of them unused");
    assert_eq!(tokenizer.encode("a<sep>a</s>", PROMPT), [3, 4, 8, 3, 4, 1, 1]);
    assert_eq!(tokenizer.decode(&[5, 3, 4, 1], true).unwrap(), b"a a");
    assert!(tokenizer.encode("", TEXT).is_empty());
    // As llama.cpp reads files that say nothing.
    let silent = Tokenizer::new(Vocab { add_space_prefix: None, ..vocab }).unwrap();
    assert_eq!(silent.encode("aa", TEXT), [6]);
}

#[test]
fn a_source_text_starts_with_its_language() {
    let tokenizer = Tokenizer::new(fixture("nllb")).unwrap();
    let codes: Vec<&str> = tokenizer.languages().map(|(code, _)| code).collect();
    assert_eq!(codes, ["deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans"]);
    let (english, french) =
        (tokenizer.language("eng_Latn").unwrap(), tokenizer.language("fra_Latn").unwrap());
    assert_eq!(tokenizer.source_language(), Some(english));
    let dog = tokenizer.encode("dog", TEXT);
    assert_eq!(tokenizer.encode("dog", PROMPT), [&[english][..], &dog, &[2]].concat());
    assert_eq!(tokenizer.encode_in("dog", Some(french), PROMPT)[0], french);
    assert_eq!(tokenizer.encode_in("dog", Some(french), TEXT), dog);
    assert_eq!(tokenizer.decode_lossy(&tokenizer.encode("dog", PROMPT), true).unwrap(), "dog");
    let error = |tokenizer: &Tokenizer, code| tokenizer.language(code).unwrap_err().to_string();
    assert_eq!(
        error(&tokenizer, "French"),
        "the model has no language `French`, only deu_Latn, eng_Latn, fra_Latn, zho_Hans"
    );
    assert_eq!(
        error(&tokenizer, "spa_Latn").split(',').next(),
        Some("the model has no language `spa_Latn`")
    );
    let none = Tokenizer::new(fixture("gpt2")).unwrap();
    assert_eq!(none.source_language(), None);
    assert!(error(&none, "eng_Latn").contains("has no languages"));
}

#[test]
fn control_tokens_in_text_are_tokens_only_when_asked() {
    let tokenizer = Tokenizer::new(fixture("qwen2")).unwrap();
    let end = tokenizer.special_id("<|im_end|>").unwrap();
    assert_eq!(tokenizer.encode("<|im_end|>", PROMPT), [end]);
    assert!(!tokenizer.encode("<|im_end|>", TEXT).contains(&end));
    let call = tokenizer.special_id("<tool_call>").unwrap();
    assert_eq!(tokenizer.encode("<tool_call>", TEXT), [call]);
    assert_eq!(tokenizer.special_id("the"), None);
    assert_eq!(tokenizer.decode_lossy(&[end, call], true).unwrap(), "<tool_call>");
    assert_eq!(tokenizer.decode_lossy(&[end, call], false).unwrap(), "<|im_end|><tool_call>");
    assert_eq!(tokenizer.special_text(Some(end)), "<|im_end|>");
    assert_eq!(tokenizer.special_text(None), "");
}

#[test]
fn bos_and_eos_as_the_file_or_the_kind_says() {
    let llama = Tokenizer::new(fixture("llama3")).unwrap();
    let bos = llama.bos().unwrap();
    assert!(llama.add_bos() && !llama.add_eos());
    assert_eq!(llama.encode("", PROMPT), [bos]);
    let qwen = Tokenizer::new(fixture("qwen2")).unwrap();
    assert!(!qwen.add_bos());
    let both = Vocab { add_bos: Some(true), add_eos: Some(true), ..fixture("llama3") };
    let both = Tokenizer::new(both).unwrap();
    assert_eq!(both.encode("", PROMPT), [bos, both.eos().unwrap()]);
    // Qwen has no BOS: asking for one adds nothing.
    let asked = Tokenizer::new(Vocab { add_bos: Some(true), ..fixture("qwen2") }).unwrap();
    assert!(asked.encode("", PROMPT).is_empty());
}

#[test]
fn a_generation_ends_on_the_usual_tokens() {
    let names = |tokenizer: &Tokenizer| -> Vec<String> {
        tokenizer.eog_ids().map(|id| tokenizer.special_text(Some(id))).collect()
    };
    let qwen = Tokenizer::new(fixture("qwen2")).unwrap();
    assert_eq!(names(&qwen), ["<|endoftext|>", "<|im_end|>"]);
    assert_eq!(qwen.eot(), qwen.special_id("<|im_end|>"));
    let harmony = ["<|return|>", "<|end|>", "<|call|>", "x"].map(|t| (t, Normal, 0.0));
    let harmony = Tokenizer::new(vocab(VocabModel::Bpe, &harmony)).unwrap();
    assert_eq!(names(&harmony), ["<|return|>", "<|call|>"]);
    assert_eq!(harmony.token_type(0).unwrap(), Control);
    assert!(!harmony.is_eog(3) && !harmony.is_eog(99));
    // Made by merges, `</s>` is an ordinary word, as in Qwen2's vocabulary.
    let mut html = vocab(VocabModel::Bpe, &["<", "/", "s", ">", "</s>"].map(|t| (t, Normal, 0.0)));
    html.merges = vec![b"</ s>".to_vec()];
    let html = Tokenizer::new(html).unwrap();
    assert_eq!(html.token_type(4).unwrap(), Normal);
    assert_eq!(html.encode("</s>", PROMPT), [0, 1, 2, 3]);
    assert!(html.is_eog(4));
    let mut named = vocab(VocabModel::Bpe, &[("x", Normal, 0.0), ("y", Normal, 0.0)]);
    named.ids = SpecialIds { eos: Some(1), pad: Some(u32::MAX), ..SpecialIds::default() };
    let named = Tokenizer::new(named).unwrap();
    assert_eq!(names(&named), ["y"]);
    assert_eq!(named.special().pad, None);
    assert!(named.suppressed().is_empty());
    let turns = ["<|user|>", "<|observation|>", "<|eot|>", "<|ifm|im_end|>"];
    let turns = vocab(VocabModel::Bpe, &turns.map(|t| (t, Control, 0.0)));
    assert_eq!(names(&Tokenizer::new(turns.clone()).unwrap()), ["<|eot|>", "<|ifm|im_end|>"]);
    let flint = Tokenizer::new(Vocab { pre: Some("flint".into()), ..turns }).unwrap();
    assert_eq!(flint.eog_ids().count(), 4);
    let beam = ["<eos>", "</s>", "<rfl:parameter name=\""].map(|t| (t, Control, 0.0));
    let beam = Tokenizer::new(vocab(VocabModel::Bpe, &beam)).unwrap();
    assert_eq!((names(&beam), beam.token_type(1).unwrap()), (vec!["<eos>".into()], Normal));
    let few = vocab(VocabModel::Bpe, &[("x", Normal, 0.0), ("y", Normal, 0.0)]);
    let few = Tokenizer::new(Vocab { suppressed: vec![1, 7], ..few }).unwrap();
    assert_eq!(few.suppressed(), [1]);
}

#[test]
fn a_whole_word_wins_where_merges_are_ignored() {
    let llama = Tokenizer::new(fixture("llama3")).unwrap();
    let ids = llama.encode(" International", TEXT);
    assert_eq!(ids.len(), 1);
    assert_eq!(llama.text(ids[0]).unwrap(), "ĠInternational".as_bytes());
    let by_merges = Vocab { pre: Some("dbrx".into()), ..fixture("llama3") };
    assert!(Tokenizer::new(by_merges).unwrap().encode(" International", TEXT).len() > 1);
}

#[test]
fn ids_outside_the_vocabulary_are_an_error() {
    let tokenizer = Tokenizer::new(small_spm()).unwrap();
    let expected = "token id 9 is out of range: the vocabulary has 9 tokens";
    assert_eq!(tokenizer.piece(9).unwrap_err().to_string(), expected);
    assert_eq!(tokenizer.decode(&[1, 9], true).unwrap_err().to_string(), expected);
    assert_eq!(Detokenizer::new(&tokenizer, true).push(9).unwrap_err().to_string(), expected);
}

#[test]
fn the_stream_gives_whole_characters_only() {
    let tokenizer = Arc::new(Tokenizer::new(fixture("gpt2")).unwrap());
    // The dinosaur's bytes are tokens, the character is none.
    let text = "a🦕é漢";
    let ids = tokenizer.encode(text, TEXT);
    let mut stream = Detokenizer::new(tokenizer.clone(), true);
    let parts: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap().to_string()).collect();
    assert_eq!(parts.concat(), text);
    assert!(parts.iter().any(String::is_empty), "no character was split: the test shows nothing");
    assert_eq!(stream.finish(), "");
    let mut cut = Detokenizer::new(tokenizer.clone(), true);
    let first: String = ids[..2].iter().map(|&id| cut.push(id).unwrap().to_string()).collect();
    assert_eq!((first.as_str(), cut.finish()), ("a", "\u{fffd}"));
}

#[test]
fn a_continued_text_keeps_its_leading_space() {
    let tokenizer = Tokenizer::new(small_spm()).unwrap();
    assert_eq!(Detokenizer::new(&tokenizer, true).push(5).unwrap(), "a");
    assert_eq!(Detokenizer::continuing(&tokenizer, true).push(5).unwrap(), " a");
}

#[test]
fn broken_vocabularies_are_refused_with_the_field() {
    let n = |text| (text, Normal, 0.0);
    let bpe = || vocab(VocabModel::Bpe, &[n("a"), n("b"), n("ab")]);
    let merges = |merge: &str| Vocab { merges: vec![b"a b".to_vec(), merge.into()], ..bpe() };
    let eos = SpecialIds { eos: Some(3), ..SpecialIds::default() };
    let short_types = Vocab { types: vec![Normal], ..bpe() };
    let short_scores = Vocab { scores: vec![0.0], ..small_spm() };
    let nan = vocab(VocabModel::Spm, &[("a", Normal, f32::NAN)]);
    for (broken, expected) in [
        (Vocab::new(VocabModel::Bpe, vec![]), "tokens: expected at least one token, got none"),
        (merges("ab"), "merges: expected two parts with a space between them, got \"ab\""),
        (merges(""), "merges: expected two parts"),
        (merges("a "), "merges: expected two parts"),
        (Vocab { ids: eos, ..bpe() }, "eos_token_id: expected a token id below 3, got 3"),
        (short_types, "token_type: expected 3 types, one a token, got 1"),
        (short_scores, "scores: expected 9 scores, one a token, got 1"),
        (nan, "scores: expected numbers, got NaN for token 0"),
        (Vocab { charsmap: vec![1], ..small_spm() }, "precompiled_charsmap: expected at least 4"),
        (Vocab { source_language: Some(9), ..small_spm() }, "source_language_token_id: expected a"),
        (vocab(VocabModel::Ugm, &[("a", Normal, f32::NAN)]), "scores: expected numbers, got NaN"),
        (vocab(VocabModel::Spm, &[("x", Byte, 0.0)]), "expected byte tokens like <0x0A>, got x"),
        (Vocab { pre: Some("new".into()), ..bpe() }, "`--override-kv tokenizer.ggml.pre=str:NAME`"),
    ] {
        let error = Tokenizer::new(broken).unwrap_err().to_string();
        assert!(error.contains("tokenizer.ggml."), "{error}");
        assert!(error.contains(expected), "{error}\n{expected}");
    }
}

#[test]
fn duplicates_and_missing_bytes_are_tolerated() {
    let n = |text| (text, Normal, 0.0);
    let mut odd = vocab(VocabModel::Bpe, &[n("a"), n("b"), n("ab"), n("ab"), n("")]);
    odd.merges = vec![b"a b".to_vec(), b"a b".to_vec(), b"ab c".to_vec()];
    let odd = Tokenizer::new(odd).unwrap();
    assert_eq!(odd.encode("ab", TEXT), [3], "of tokens spelt alike the last");
    assert_eq!(odd.encode("abzab", TEXT), [3, 3], "z is not in the vocabulary");
    assert_eq!(odd.encode("abc", TEXT), [0, 1], "merged into what is no token: its bytes");
}

/// `metaspace.prepend_scheme` = `first`.
#[test]
fn a_space_before_the_start_alone() {
    let ranked = |pre: &str, model| Vocab {
        pre: Some(pre.into()),
        prepends_first: true,
        merges: vec!["▁ a".into()],
        ..vocab(
            model,
            &[("</s>", Control, 0.0), ("▁", Normal, 0.0), ("a", Normal, 0.0), ("▁a", Normal, 0.0)],
        )
    };
    let tokenizer = Tokenizer::new(ranked("domyn-small", VocabModel::SpmMerges)).unwrap();
    assert_eq!(tokenizer.encode("a</s>a", PROMPT), [3, 0, 2]);
    assert_eq!(tokenizer.encode(" a", PROMPT), [3]);
    assert_eq!(tokenizer.encode("</s>a", PROMPT), [0, 2]);
    assert!(tokenizer.encode("", PROMPT).is_empty());
    // The first that is shown loses its space, whatever is hidden before it.
    assert_eq!(tokenizer.decode(&[0, 3, 3], true).unwrap(), b"a a");
    assert_eq!(tokenizer.decode(&[0, 3], false).unwrap(), b"</s> a");
    assert_eq!(tokenizer.decode(&[3, 0, 3], true).unwrap(), b"a a");
    let bytes = ["â", "ĸ", "ģ", "a", "Ġ"].map(|token| (token, Normal, 0.0));
    let bytes = Vocab { merges: Vec::new(), ..vocab(VocabModel::Bpe, &bytes) };
    let tokenizer = Tokenizer::new(Vocab { prepends_first: true, ..bytes }).unwrap();
    assert_eq!(tokenizer.encode(" a", PROMPT), [0, 1, 2, 4, 3], "U+2581 as its three bytes");
}

#[test]
fn a_file_says_how_texts_are_normalised() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, pairs: &[(&str, OwnedValue)]| {
        let path = dir.path().join(name);
        let mut writer = Writer::create(&path, None).unwrap();
        for (key, value) in pairs {
            writer.set(&format!("tokenizer.ggml.{key}"), value.clone()).unwrap();
        }
        let tokens = ["é", "e", "▁", "x"].map(str::to_owned).to_vec();
        writer.set("tokenizer.ggml.tokens", tokens).unwrap();
        writer.set("tokenizer.ggml.merges", vec!["e x".to_owned()]).unwrap();
        writer.finish().unwrap();
        path
    };
    let text = |text: &str| OwnedValue::String(text.into());
    // Token 2 is `unk` in these.
    for (name, nfc, expected) in [("nfc", true, vec![0]), ("raw", false, vec![1, 2])] {
        let pairs = [("model", text("t5")), ("normalizer.nfc", OwnedValue::Bool(nfc))];
        let vocab = Vocab::from_gguf(&Gguf::open(write(name, &pairs)).unwrap()).unwrap();
        assert_eq!(Tokenizer::new(vocab).unwrap().encode("e\u{301}", TEXT), expected);
    }
    let pairs = [("model", text("whitespace")), ("normalizer.lowercase", OwnedValue::Bool(true))];
    let vocab = Vocab::from_gguf(&Gguf::open(write("lower", &pairs)).unwrap()).unwrap();
    assert_eq!(Tokenizer::new(vocab).unwrap().encode(" É\u{3000}X\n", TEXT), [0, 3]);
    let scheme = |name: &str, model: &str, scheme: &str| {
        let key = "metaspace.prepend_scheme";
        let pairs = [("model", text(model)), ("pre", text("gpt-2")), (key, text(scheme))];
        write(name, &pairs)
    };
    let is_first = |path: &Path| Vocab::from_gguf(&Gguf::open(path).unwrap()).unwrap();
    assert!(is_first(&scheme("first", "gpt2", "first")).prepends_first);
    assert!(!is_first(&scheme("never", "gemma4", "never")).prepends_first);
    assert!(!is_first(&scheme("scored", "llama", "first")).prepends_first);
    assert!(!is_first(&scheme("each", "t5", "always")).prepends_first);
    let always = refusal(&scheme("always", "gpt2", "always"));
    assert!(always.contains("prepend_scheme: expected `never` or `first`"), "{always}");
    let other = refusal(&scheme("other", "llama", "sometimes"));
    assert!(other.contains("got `sometimes`"), "{other}");
}

#[test]
fn metadata_of_the_wrong_kind_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, fill: &dyn Fn(&mut Writer)| {
        let path = dir.path().join(name);
        let mut writer = Writer::create(&path, None).unwrap();
        fill(&mut writer);
        writer.finish().unwrap();
        refusal(&path)
    };
    assert!(write("none", &|_| ()).contains("tokenizer.ggml.model"));
    let other = write("other", &|w| w.set("tokenizer.ggml.model", "bert").unwrap());
    assert!(other.contains("got `bert`"), "{other}");
    let no_tokens = write("tokens", &|w| w.set("tokenizer.ggml.model", "llama").unwrap());
    assert!(no_tokens.contains("tokenizer.ggml.tokens"), "{no_tokens}");
    let number = write("number", &|w| w.set("tokenizer.ggml.model", 7u32).unwrap());
    assert!(number.contains("tokenizer.ggml.model"), "{number}");
}

fn refusal(path: &Path) -> String {
    let error = Tokenizer::from_gguf(&Gguf::open(path).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with(path.to_str().unwrap()), "{error}");
    error
}

fn loaded(names: &[&str]) -> Vec<Tokenizer> {
    names.iter().map(|name| Tokenizer::new(fixture(name)).unwrap()).collect()
}

static PLAIN: LazyLock<Vocab> = LazyLock::new(|| fixture("t5-plain"));

/// Those that give every text back.
static LOSSLESS: LazyLock<Vec<Tokenizer>> =
    LazyLock::new(|| loaded(&["llama3", "gpt2", "spm", "t5-plain"]));

/// Those whose charsmap does not.
static NORMALISING: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| loaded(&["t5", "nllb"]));

proptest! {
    /// Any text comes back, but for U+2581, which SentencePiece takes for a space.
    #[test]
    fn any_text_comes_back(text: String, spaces in "[ \t\n<|>a-c]{0,20}") {
        let text = (text + &spaces).replace('\u{2581}', "_");
        for tokenizer in LOSSLESS.iter() {
            for options in [TEXT, PROMPT] {
                let ids = tokenizer.encode(&text, options);
                prop_assert_eq!(&tokenizer.decode_lossy(&ids, true).unwrap(), &text);
            }
        }
    }

    /// Whatever a charsmap holds, it is refused or does no harm.
    #[test]
    fn hostile_charsmaps_do_no_harm(
        units in prop::collection::vec(any::<u32>(), 256..520),
        places in prop::collection::vec((0usize..256, any::<u16>()), 0..200),
        tail: Vec<u8>,
        text: String,
    ) {
        let mut units = units;
        // Units that look like children of small bases, so that some are reached.
        units[0] &= 0x3FFF;
        for (at, bits) in places {
            units[at] = u32::from(bits) << 10 | (at as u32 & 0xFF) | u32::from(bits & 1) << 8;
        }
        let mut charsmap = (units.len() as u32 * 4).to_le_bytes().to_vec();
        units.iter().for_each(|unit| charsmap.extend(unit.to_le_bytes()));
        charsmap.extend(&tail);
        let vocab = Vocab { charsmap, ..Vocab::clone(&PLAIN) };
        if let Ok(tokenizer) = Tokenizer::new(vocab) {
            tokenizer.encode(&text, TEXT);
        }
    }

    /// The stream and the whole agree on any ids, also those that spell no text.
    #[test]
    fn stream_and_whole_agree(ids in prop::collection::vec(0..1200u32, 0..40), skip: bool) {
        for tokenizer in LOSSLESS.iter().chain(NORMALISING.iter()) {
            let mut stream = Detokenizer::new(tokenizer, skip);
            let mut joined = String::new();
            for &id in &ids {
                joined.push_str(stream.push(id).unwrap());
            }
            joined.push_str(stream.finish());
            prop_assert_eq!(joined, tokenizer.decode_lossy(&ids, skip).unwrap());
        }
    }
}
