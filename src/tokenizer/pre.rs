//! The table of pre-tokenizers: every name of `tokenizer.ggml.pre`, and the patterns behind it.
//!
//! The patterns are the originals of the published tokenizer.json files (and of tokenization_*.py
//! where there is none), so the converter finds a checkpoint's name by them. A `Digits` entry
//! counts as `\p{N}` (digits one by one) or `\p{N}+`, a `ByteLevel` entry with its own regular
//! expression as [`GPT2`]; of the notations `[\r\n]` and the two characters themselves the first
//! is written here.

/// One pre-tokenizer under all names that GGUF files use for it.
pub(super) struct Row {
    /// The first is the one that the converter writes.
    pub names: &'static [&'static str],
    /// Applied one after the other, each to the parts that the one before left.
    pub patterns: &'static [&'static str],
    /// The tokenizer normalises to NFC first.
    pub nfc: bool,
    /// A zero-width non-joiner behind `[` or `<` is dropped first: with one, texts spell special
    /// tokens that are none.
    pub drops_joiners: bool,
    /// A word that is in the vocabulary is its token, whatever the merges say.
    pub ignore_merges: bool,
    /// BOS is added when the file does not say.
    pub add_bos: bool,
    /// A special token that only vocabularies of this name have.
    pub marker: Option<&'static str>,
}

/// The pattern of `ByteLevel`.
pub const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// QWEN2 without the English contractions.
const UFAKZEKA: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// QWEN2 whose punctuation takes no line breaks along.
const SEED: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|",
    r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const BAILING: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
);

/// A word is letters with single spaces between them: whole phrases.
const EXAONE_MOE: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
);

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// LLAMA3 after a stage of its own for digits.
const MINICPM5: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Whitespace in powers of two, where other patterns have `\s+(?!\S)|\s+`.
macro_rules! powers_of_two {
    () => {
        concat!(
            r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)",
            r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
        )
    };
}

pub(super) const POWERS_OF_TWO: &str = powers_of_two!();

/// LLAMA3 with that.
const JAIS2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    powers_of_two!()
);

/// LLAMA3 whose words keep their marks and joiners.
const K2_HORIZON: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}|\p{M}|\u200C|\u200D)+|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Words also end where lower case turns into upper case.
const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// O200K without contractions, digits one by one.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Digits in threes from the right.
macro_rules! threes {
    () => {
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{1,2}"
    };
}

pub(super) const THREES: &str = threes!();

/// TEKKEN with that.
const TEKKEN_NUM3: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    threes!(),
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// O200K after stages for digits and for Chinese and kana.
const FLINT: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// O200K with digits one by one, after a stage for East Asian scripts.
const YOUTU: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const YOUTU_SCRIPTS: &str =
    concat!("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|", "[ㄅ-ㄯ]+|[一-龥\u{3040}-ゟ゠-ヿ]+");

/// O200K with Chinese characters apart from the other letters.
const KIMI: &str = concat!(
    r"[\p{Han}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const SPARK: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
);

const CJK_AND_KANA: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";

/// Cased letters, a subset of them that no property gives.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z",
    "µÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ",
    "ὐ-ὗὙὛὝὟ-\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ",
    "\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟",
    "𞤀-𞥃]+"
);

const DEEPSEEK_CJK: &str = "[一-龥\u{800}-一가-\u{d7ff}]+";

/// Groups of 510 digits, counted from the right; the two patterns after it make threes of them.
pub(super) const AFMOE_510: &str = r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}";
pub(super) const AFMOE_LEAD: &str = r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)";
pub(super) const AFMOE_THREES: &str = r"\A\p{Nd}{3}|\G\p{Nd}{3}";

const AFMOE_SCRIPTS: &str = concat!(
    r"(?:[\u4E00-\u9FFF\u3040-\u309F\u30A0-\u30FF\u3400-\u4DBF\uf900-\uFAFF\uFF65-\uFF9F",
    r"\u2F00-\u2FDF]+|[\u0E00-\u0E7F]+|[\u0E80-\u0EFF]+|[\u1780-\u17FF]+|",
    r"[\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF]+|[\uAC00-\uD7AF\u1100-\u11FF]+)"
);

/// A cut before every three digits that end the number.
pub(super) const SUPERBPE_CUTS: &str = r"(?=(\d{3})+(?!\d))";

/// Threes from the right, in numbers that no letter follows.
pub(super) const AYA_THREES: &str = r"\d{1,3}(?=(?:\d{3})*\b)";

/// The patterns that llama.cpp applies to BPE files that name no pre-tokenizer: a format of its
/// own, no tokenizer.json has it.
const DEFAULT: &[&str] = &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];

/// llama.cpp's patterns for Falcon.
const FALCON: &[&str] = &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"];

const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const PLAIN: Row = Row {
    names: &[],
    patterns: &[],
    nfc: false,
    drops_joiners: false,
    ignore_merges: false,
    add_bos: false,
    marker: None,
};

const GLM: Option<&str> = Some("[gMASK]");

#[rustfmt::skip]
pub(super) const TABLE: &[Row] = &[
    Row { names: &["default"], patterns: DEFAULT, ..PLAIN },
    Row {
        names: &[
            "gpt-2", "phi-2", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion",
            "granite-docling", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en",
            "jina-v2-code", "roberta-bpe",
        ],
        patterns: &[GPT2], ..PLAIN
    },
    Row { names: &["olmo", "mpt", "modern-bert"], patterns: &[GPT2], nfc: true, ..PLAIN },
    Row {
        names: &[
            "refact", "starcoder", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2",
        ],
        patterns: &[r"\p{N}", GPT2], ..PLAIN
    },
    Row { names: &["falcon"], patterns: FALCON, ..PLAIN },
    Row { names: &["command-r"], patterns: &[r"\p{N}", GPT2], nfc: true, ..PLAIN },
    Row {
        names: &["superbpe"],
        patterns: &[r"\p{N}+", SUPERBPE_CUTS], ..PLAIN
    },
    Row {
        names: &["qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "hunyuan"],
        patterns: &[QWEN2], nfc: true, ..PLAIN
    },
    Row { names: &["grok-2", "stablelm2", "solar-open"], patterns: &[QWEN2], ..PLAIN },
    Row { names: &["laguna"], patterns: &[r"[^\n]+|[\n]+", QWEN2], ..PLAIN },
    Row { names: &["qwen35"], patterns: &[QWEN35], nfc: true, ..PLAIN },
    Row { names: &["ufakzeka"], patterns: &[UFAKZEKA], ..PLAIN },
    Row { names: &["seed-coder"], patterns: &[SEED], ..PLAIN },
    Row { names: &["bailingmoe2", "bailingmoe", "llada-moe"], patterns: &[BAILING], ..PLAIN },
    Row { names: &["exaone-moe"], patterns: &[EXAONE_MOE], ..PLAIN },
    Row {
        names: &[
            "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
            "lfm2", "jina-v5-nano",
        ],
        patterns: &[LLAMA3], ignore_merges: true, add_bos: true, ..PLAIN
    },
    Row {
        names: &["glm4", "glm5"],
        patterns: &[LLAMA3], ignore_merges: true, marker: GLM, ..PLAIN
    },
    Row { names: &["chatglm-bpe"], patterns: &[LLAMA3], marker: GLM, ..PLAIN },
    Row { names: &["dbrx", "smaug-bpe"], patterns: &[LLAMA3], ..PLAIN },
    Row { names: &["jais-2"], patterns: &[JAIS2], ..PLAIN },
    Row { names: &["k2-horizon"], patterns: &[K2_HORIZON], ..PLAIN },
    Row {
        names: &["minicpm5"],
        patterns: &[r"\p{N}{1,3}", MINICPM5], ignore_merges: true, ..PLAIN
    },
    Row {
        names: &["gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"],
        patterns: &[O200K], ..PLAIN
    },
    Row {
        names: &["granite-embed-multi-97m"],
        patterns: &[O200K], ignore_merges: true, ..PLAIN
    },
    Row { names: &["cohere2moe", "tiny_aya"], patterns: &[AYA_THREES, O200K], ..PLAIN },
    Row {
        names: &["tekken"],
        patterns: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN
    },
    Row {
        names: &["tekken-num3"],
        patterns: &[TEKKEN_NUM3], ignore_merges: true, add_bos: true, ..PLAIN
    },
    Row {
        names: &["nemotron-3.5-embed"],
        patterns: &[TEKKEN], drops_joiners: true, ignore_merges: true, add_bos: true, ..PLAIN
    },
    Row {
        names: &["flint"],
        patterns: &[r"\p{N}{1,3}", CJK_AND_KANA, FLINT], ..PLAIN
    },
    Row { names: &["bloom", "poro-chat", "gpt3-finnish"], patterns: &[BLOOM], ..PLAIN },
    Row { names: &["viking"], patterns: &[BLOOM, r"\p{N}"], ..PLAIN },
    Row {
        names: &["chameleon"],
        patterns: &[
            r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
            r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2,
        ],
        add_bos: true, ..PLAIN
    },
    Row { names: &["kimi-k2"], patterns: &[KIMI], ..PLAIN },
    Row { names: &["youtu"], patterns: &[YOUTU_SCRIPTS, YOUTU], ignore_merges: true, ..PLAIN },
    Row {
        names: &["deepseek-llm"],
        patterns: &[
            r"[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
            DEEPSEEK_CJK, r"\p{N}",
        ],
        ..PLAIN
    },
    Row {
        names: &["deepseek-coder"],
        patterns: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"], ..PLAIN
    },
    Row {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        patterns: &[r"\p{N}{1,3}", CJK_AND_KANA, DEEPSEEK3], ..PLAIN
    },
    Row {
        names: &["spark2_5"],
        patterns: &[r"\p{N}{1,3}", CJK_AND_KANA, SPARK, r"\p{N}"], ..PLAIN
    },
    Row {
        names: &["afmoe"],
        patterns: &[AFMOE_510, AFMOE_LEAD, AFMOE_THREES, AFMOE_SCRIPTS, DEEPSEEK3], ..PLAIN
    },
];

/// Pre-tokenizers of `gpt2` files whose merges join characters instead of bytes.
pub(super) const OF_CHARACTERS: &[&str] =
    &["gemma4", "granite-embed-multi-311m", "sarvam-moe", "domyn-small", "mmbert", "soprano"];

/// The name for a tokenizer with these patterns, for the converter; `has` says whether there is a
/// special token. Of several rows one that treats whole words alike is preferred, then the first:
/// vocabularies in which merges reach every word split alike either way.
pub fn name_of(
    patterns: &[String],
    nfc: bool,
    ignore_merges: bool,
    has: impl Fn(&str) -> bool,
) -> Option<&'static str> {
    let fits = |row: &&Row| row.nfc == nfc && !row.drops_joiners && row.patterns == patterns;
    let rows = || TABLE.iter().filter(fits);
    // `max_by_key` takes the last of equals.
    let best = rows().rev().filter(|row| row.marker.is_none_or(&has));
    best.max_by_key(|row| (row.marker, row.ignore_merges == ignore_merges)).map(|row| row.names[0])
}

/// The first name of every row.
pub fn known_names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|row| row.names[0])
}

/// All names of every row.
pub fn is_known(name: &str) -> bool {
    TABLE.iter().any(|row| row.names.contains(&name)) || OF_CHARACTERS.contains(&name)
}
