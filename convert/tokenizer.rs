//! A checkpoint's tokenizer: which files it has, which tokens are special and how a chat is laid
//! out. What transformers would load is what is written.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::bpe::{self, token_id};
use super::json::{Json, shown};
use super::spm::{self, Order};
use super::vocab::{AddedToken, Vocab};
use super::{left_out, metaspace, tiktoken};
use crate::gguf::Writer;
use crate::model::descriptor::{Vocabulary, VocabularyModel};
use crate::tokenizer::{ends_by_name, is_doubtful, is_language};
use crate::{Error, Result};

const FAST: &str = "tokenizer.json";
/// SentencePiece models, in the order in which they are looked for.
const SENTENCEPIECE: [&str; 2] = ["tokenizer.model", "spiece.model"];
/// A SentencePiece model in another order than the checkpoint's ids.
const FAIRSEQ: &str = "sentencepiece.bpe.model";
const TIKTOKEN: &str = "tiktoken.model";

/// The files beside the weights that speak about tokens.
struct Files<'a> {
    folder: &'a Path,
    config: &'a Json,
    tokenizer: Option<Json>,
    tokenizer_config: Option<Json>,
    generation: Option<Json>,
}

/// Everything a GGUF file says about tokens.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    /// (key, id)
    ids: Vec<(&'static str, u32)>,
    /// All ends of a generation, where the ids above and the tokens' names do not tell them.
    ends: Vec<u32>,
    /// (key, value)
    adds: Vec<(&'static str, bool)>,
    /// The language of texts to translate unless the user says otherwise.
    source_language: Option<u32>,
    templates: Vec<Template>,
}

/// A chat template; the one without a name is the one to use unless told otherwise.
#[derive(Debug, PartialEq, Eq)]
struct Template {
    name: Option<String>,
    text: String,
}

/// The facts about a vocabulary that its files lack.
pub struct Asked<'a> {
    /// The user's `--pre`.
    pub pre: Option<&'a str>,
    /// The architecture's own.
    pub vocabulary: Option<&'a Vocabulary>,
    /// Rows of the embedding.
    pub n_rows: u64,
}

impl Tokenizer {
    /// Reads the tokenizer of the checkpoint in `folder`.
    pub fn read(folder: &Path, config: &Json, asked: &Asked) -> Result<Tokenizer> {
        let open = |name: &str| Json::open_optional(folder.join(name));
        let files = Files {
            folder,
            config,
            tokenizer: open(FAST)?,
            tokenizer_config: open("tokenizer_config.json")?,
            generation: open("generation_config.json")?,
        };
        let mut vocab = files.vocab(asked)?;
        vocab.fit(asked.n_rows, folder)?;
        let visible = asked.vocabulary.map_or(&[][..], |own| &own.visible);
        visible.iter().for_each(|token| vocab.show(token));
        let (ids, ends) = files.special_ids(&vocab)?;
        let source_language = files.source_language(&vocab)?;
        let adds = files.adds(&vocab, &ids, source_language.is_some())?;
        let templates = files.templates()?;
        if let (Some(tokenizer), None) = (&files.tokenizer, source_language) {
            let ends = BOUNDS.map(|key| named_token(&vocab, &ids, key));
            left_out::check(tokenizer, ends, &files.added_tokens()?)?;
        }
        Ok(Tokenizer { vocab, ids, ends, adds, source_language, templates })
    }

    pub fn write(&self, writer: &mut Writer) -> Result<()> {
        self.vocab.write(writer)?;
        for (key, id) in &self.ids {
            writer.set(key, *id)?;
        }
        if !self.ends.is_empty() {
            writer.set("tokenizer.ggml.eog_token_ids", self.ends.clone())?;
        }
        for (key, value) in &self.adds {
            writer.set(key, *value)?;
        }
        if let Some(id) = self.source_language {
            writer.set("tokenizer.ggml.source_language_token_id", id)?;
        }
        write_templates(writer, &self.templates)
    }
}

impl Files<'_> {
    fn vocab(&self, asked: &Asked) -> Result<Vocab> {
        let mut added = self.added_tokens()?;
        if let Some(VocabularyModel::Gemma4) = asked.vocabulary.map(|own| own.model)
            && let Some(tokenizer) = &self.tokenizer
            && metaspace::has_merges(tokenizer)?
        {
            return metaspace::read_ranked(tokenizer, &added);
        }
        let models = SENTENCEPIECE.iter().map(|name| self.folder.join(name));
        if let Some(path) = models.into_iter().find(|path| path.exists()) {
            match (self.pieces(&path, Order::Own, &added), &self.tokenizer) {
                // Some families keep a file of another format under that name.
                (Err(e @ Error::Format { .. }), Some(_)) => log::warn!("not used: {e}"),
                (Ok(vocab), None) if vocab.model == "t5" => {
                    self.add_sentinels(vocab.tokens.len(), &mut added)?;
                    return self.pieces(&path, Order::Own, &added);
                }
                (read, _) => return read,
            }
        }
        if let Some(tokenizer) = &self.tokenizer {
            return match tokenizer.str("model.type")?.unwrap_or("BPE") {
                _ if metaspace::is_sentencepiece(tokenizer)? => metaspace::read(tokenizer, &added),
                "BPE" => bpe::read(tokenizer, asked.pre, &added),
                other => Err(tokenizer.fail("model.type", "BPE or Unigram", other)),
            };
        }
        let fairseq = self.folder.join(FAIRSEQ);
        if added.iter().any(|token| is_language(&token.content)) && fairseq.exists() {
            return self.pieces(&fairseq, Order::Fairseq, &added);
        }
        let ranks = self.folder.join(TIKTOKEN);
        if ranks.exists() {
            return tiktoken::read(&ranks, asked.pre, asked.n_rows, &added);
        }
        let got = match fairseq.exists() {
            true => format!("only {FAIRSEQ}, which lacks the languages"),
            false => "none of them".to_owned(),
        };
        let expected = format!("{FAST} or {} or {TIKTOKEN}", SENTENCEPIECE.join(" or "));
        Err(Error::format(self.folder, "tokenizer", expected, got))
    }

    fn pieces(&self, path: &Path, order: Order, added: &[AddedToken]) -> Result<Vocab> {
        spm::read(path, order, self.tokenizer_config.as_ref(), added)
    }

    /// T5's `<extra_id_0>`, the highest id, and so on downwards: files without tokenizer.json only
    /// count them.
    fn add_sentinels(&self, n_pieces: usize, added: &mut Vec<AddedToken>) -> Result<()> {
        const COUNT: &str = "extra_ids";
        let Some(config) = &self.tokenizer_config else { return Ok(()) };
        let n = config.count(COUNT)?.unwrap_or(0) as usize;
        if n > bpe::MAX_TOKENS {
            return Err(config.fail(COUNT, format!("at most {}", bpe::MAX_TOKENS), n.to_string()));
        }
        if added.iter().all(|token| token.content != "<extra_id_0>") {
            added.extend((0..n).map(|i| AddedToken {
                special: true,
                ..AddedToken::plain(n_pieces + n - 1 - i, &format!("<extra_id_{i}>"))
            }));
        }
        Ok(())
    }

    /// Added tokens of all files; what a later one says of an id counts.
    fn added_tokens(&self) -> Result<Vec<AddedToken>> {
        let mut added = Vec::new();
        if let Some(file) = Json::open_optional(self.folder.join("added_tokens.json"))? {
            for (content, id) in file.fields() {
                let id = token_id(id).ok_or_else(|| file.fail(content, "a token id", shown(id)))?;
                added.push(AddedToken::plain(id, content));
            }
        }
        if let Some(file) = &self.tokenizer {
            for (i, token) in file.elements("added_tokens")?.iter().enumerate() {
                let id = token.get("id").and_then(token_id);
                let field = format!("added_tokens[{i}]");
                added.push(added_token(file, &field, id, token)?);
            }
        }
        if let Some(file) = &self.tokenizer_config {
            for (id, token) in file.entries("added_tokens_decoder")? {
                let field = format!("added_tokens_decoder: {id}");
                let id = id.parse::<u64>().ok().and_then(|id| token_id(&Value::from(id)));
                added.push(added_token(file, &field, id, token)?);
            }
        }
        Ok(added)
    }

    /// The ids of the special tokens that a GGUF file names. tokenizer_config.json says them by
    /// text; config.json and generation_config.json by number, and know less of chats.
    /// Also all ends of a generation, where a reader would not know them otherwise.
    fn special_ids(&self, vocab: &Vocab) -> Result<(Vec<(&'static str, u32)>, Vec<u32>)> {
        const KINDS: [(&str, &str); 7] = [
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("sep", "tokenizer.ggml.seperator_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
            ("cls", "tokenizer.ggml.cls_token_id"),
            ("mask", "tokenizer.ggml.mask_token_id"),
        ];
        let mut ids = Vec::new();
        for (kind, key) in KINDS {
            if let Some(id) = self.special_id(vocab, kind)? {
                ids.push((key, id));
            }
        }
        let eos = ids.iter().find(|(key, _)| *key == KINDS[1].1).map(|(_, id)| *id);
        let ends = self.ends(vocab, eos)?;
        let name = |id: u32| vocab.tokens[id as usize].as_str();
        let others = || ends.iter().copied().filter(|id| Some(*id) != eos);
        let unknown = || others().filter(|id| !ends_by_name(name(*id)));
        let named = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
        ids.extend(named.into_iter().zip(unknown()));
        // Two names end a generation in some vocabularies only.
        let told = unknown().nth(2).is_none() && !others().any(|id| is_doubtful(name(id)));
        Ok((ids, if told { Vec::new() } else { ends }))
    }

    /// Every id that ends a generation by config.json, generation_config.json or the tokenizer's
    /// own `eos`: in order, each once.
    fn ends(&self, vocab: &Vocab, eos: Option<u32>) -> Result<Vec<u32>> {
        const FIELD: &str = "eos_token_id";
        let mut ends: Vec<u32> = eos.into_iter().collect();
        let files = [self.generation.as_ref(), Some(self.config)].into_iter().flatten();
        for file in files {
            let ids = match file.at(FIELD) {
                None => continue,
                Some(Value::Array(ids)) => ids.as_slice(),
                Some(id) => std::slice::from_ref(id),
            };
            for value in ids.iter().filter(|v| v.as_i64() != Some(-1)) {
                let n = vocab.tokens.len();
                let id = token_id(value).filter(|id| *id < n).ok_or_else(|| {
                    file.fail(FIELD, format!("token ids below {n}"), shown(value))
                })?;
                if !ends.contains(&(id as u32)) {
                    ends.push(id as u32);
                }
            }
        }
        Ok(ends)
    }

    fn special_id(&self, vocab: &Vocab, kind: &str) -> Result<Option<u32>> {
        if let Some(config) = &self.tokenizer_config
            && let Some(text) = token_text(config.at(&format!("{kind}_token")))
            && let Some(id) = vocab.id(text)
        {
            return Ok(Some(id));
        }
        let field = format!("{kind}_token_id");
        for file in [Some(self.config), self.generation.as_ref()].into_iter().flatten() {
            let value = match file.at(&field) {
                // The first of several ends is the text's; the others are found by name.
                Some(Value::Array(several)) => several.first(),
                value => value,
            };
            let Some(value) = value.filter(|v| v.as_i64() != Some(-1)) else { continue };
            let n = vocab.tokens.len();
            let id = token_id(value).filter(|id| *id < n);
            let id =
                id.ok_or_else(|| file.fail(&field, format!("a token id below {n}"), shown(value)))?;
            return Ok(Some(id as u32));
        }
        Ok(None)
    }

    /// Whether a beginning and an end are added to a text: as tokenizer_config.json says, else as
    /// the post-processor does it; SentencePiece BPE tokenizers add a beginning unless told not
    /// to, unigram ones an end, translation models the language and an end.
    fn adds(
        &self,
        vocab: &Vocab,
        ids: &[(&'static str, u32)],
        translates: bool,
    ) -> Result<Vec<(&'static str, bool)>> {
        let [bos, eos] = BOUNDS.map(|key| named_token(vocab, ids, key));
        let single = self.template();
        let seen = |end: Option<&Value>, token| special_of(end).map(|end| Some(end) == token);
        let (first, last) = (seen(single.first(), bos), seen(single.last(), eos));
        let (first, last) = if translates { (Some(false), Some(true)) } else { (first, last) };
        let starts = matches!(vocab.model, "llama" | "gemma4");
        let kinds = [
            ("add_bos_token", "tokenizer.ggml.add_bos_token", first, starts),
            ("add_eos_token", "tokenizer.ggml.add_eos_token", last, vocab.model == "t5"),
        ];
        let mut adds = Vec::new();
        for (field, key, seen, default) in kinds {
            let said = match &self.tokenizer_config {
                // Some of Gemma 4's files say that it has none.
                _ if vocab.model == "gemma4" && default => Some(true),
                Some(config) => config.bool(field)?,
                None => None,
            };
            adds.push((key, said.or(seen).unwrap_or(default)));
        }
        Ok(adds)
    }

    /// The post-processor's template for one text: special tokens and the text itself.
    fn template(&self) -> &[Value] {
        let Some(post) = self.tokenizer.as_ref().and_then(|t| t.at("post_processor")) else {
            return &[];
        };
        let parts = post.get("processors").and_then(Value::as_array);
        let parts = parts.map_or(std::slice::from_ref(post), Vec::as_slice);
        let is_template =
            |p: &&Value| p.get("type").and_then(Value::as_str) == Some("TemplateProcessing");
        let single = parts.iter().find(is_template).and_then(|p| p.get("single"));
        single.and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// `src_lang`, or the language in the post-processor's template, wherever it stands there:
    /// older files have it behind the text, and transformers puts it before.
    fn source_language(&self, vocab: &Vocab) -> Result<Option<u32>> {
        let stated = match &self.tokenizer_config {
            Some(config) => config.str("src_lang")?,
            None => None,
        };
        let in_template = self.template().iter().filter_map(|part| special_of(Some(part)));
        let language = stated.or_else(|| in_template.into_iter().find(|token| is_language(token)));
        Ok(language.and_then(|code| vocab.id(code)))
    }

    /// A template file goes before tokenizer_config.json, as in transformers.
    fn templates(&self) -> Result<Vec<Template>> {
        let mut templates = self.template_files()?;
        if templates.is_empty()
            && let Some(file) = Json::open_optional(self.folder.join("chat_template.json"))?
        {
            templates = templates_of(&file)?;
        }
        match &self.tokenizer_config {
            Some(file) if templates.is_empty() => templates_of(file),
            _ => Ok(templates),
        }
    }

    /// chat_template.jinja and the named ones of additional_chat_templates/.
    fn template_files(&self) -> Result<Vec<Template>> {
        let read = |path: &Path| fs::read_to_string(path).map_err(|e| Error::io(path, e));
        let main = self.folder.join("chat_template.jinja");
        if !main.exists() {
            return Ok(Vec::new());
        }
        let mut templates = vec![Template { name: None, text: read(&main)? }];
        let more = self.folder.join("additional_chat_templates");
        if more.is_dir() {
            let entries = fs::read_dir(&more).map_err(|e| Error::io(&more, e))?;
            let mut paths: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
            paths.sort();
            for path in paths.iter().filter(|p| p.extension().is_some_and(|e| e == "jinja")) {
                let name = path.file_stem().map(|s| s.to_string_lossy().into_owned());
                templates.push(Template { name, text: read(path)? });
            }
        }
        Ok(templates)
    }
}

/// Keys of the tokens that a text may begin and end with.
const BOUNDS: [&str; 2] = ["tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"];

/// The token whose id has a key.
fn named_token<'a>(vocab: &'a Vocab, ids: &[(&'static str, u32)], key: &str) -> Option<&'a str> {
    let id = ids.iter().find(|(k, _)| *k == key).map(|(_, id)| *id as usize);
    id.map(|id| vocab.tokens[id].as_str())
}

fn special_of(part: Option<&Value>) -> Option<&str> {
    part?.get("SpecialToken")?.get("id")?.as_str()
}

fn added_token(file: &Json, field: &str, id: Option<usize>, token: &Value) -> Result<AddedToken> {
    let content = token.get("content").and_then(Value::as_str);
    let (Some(id), Some(content)) = (id, content) else {
        return Err(file.fail(field, "an id and a content", shown(token)));
    };
    let flag = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
    let (special, lstrip, rstrip) = (flag("special"), flag("lstrip"), flag("rstrip"));
    let single_word = flag("single_word");
    Ok(AddedToken { special, lstrip, rstrip, single_word, ..AddedToken::plain(id, content) })
}

/// "text" or {"content": "text", …}
fn token_text(value: Option<&Value>) -> Option<&str> {
    let value = value?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// `chat_template`: a text, or a list of named ones.
fn templates_of(file: &Json) -> Result<Vec<Template>> {
    const FIELD: &str = "chat_template";
    match file.at(FIELD) {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![Template { name: None, text: text.clone() }]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|entry| {
                let part = |field| entry.get(field).and_then(Value::as_str);
                let (Some(name), Some(text)) = (part("name"), part("template")) else {
                    return Err(file.fail(FIELD, "a name and a template each", shown(entry)));
                };
                let name = (name != "default").then(|| name.to_owned());
                Ok(Template { name, text: text.to_owned() })
            })
            .collect(),
        Some(other) => Err(file.fail(FIELD, "a text or a list of named texts", shown(other))),
    }
}

/// Named templates get a key each and a list of their names.
fn write_templates(writer: &mut Writer, templates: &[Template]) -> Result<()> {
    let mut names: Vec<String> = Vec::new();
    for template in templates {
        match &template.name {
            None => writer.set("tokenizer.chat_template", template.text.clone())?,
            Some(name) => {
                let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
                let name: String = name.chars().map(plain).collect();
                writer.set(&format!("tokenizer.chat_template.{name}"), template.text.clone())?;
                names.push(name);
            }
        }
    }
    if !names.is_empty() {
        writer.set("tokenizer.chat_templates", names)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Gguf;
    use crate::tokenizer::{EncodeOptions, Tokenizer as Runs, pre};
    use serde_json::json;
    use std::io::Read;
    use std::path::PathBuf;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(name)
    }

    fn json_fixture(name: &str) -> Value {
        serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
    }

    /// A checkpoint's folder with these files of `from`.
    fn folder(from: &str, files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            fs::copy(fixture(from).join(file), dir.path().join(file)).unwrap();
        }
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        dir
    }

    fn read(folder: &Path, n_rows: u64) -> Result<Tokenizer> {
        read_as(None, folder, n_rows)
    }

    fn read_as(vocabulary: Option<&Vocabulary>, folder: &Path, n_rows: u64) -> Result<Tokenizer> {
        let config = Json::open(folder.join("config.json"))?;
        Tokenizer::read(folder, &config, &Asked { pre: None, vocabulary, n_rows })
    }

    /// Written to a GGUF file and opened by the program's tokenizer.
    fn through_gguf(tokenizer: Tokenizer, folder: &Path) -> Runs {
        let path = folder.join("m.gguf");
        let mut writer = Writer::create(&path, None).unwrap();
        tokenizer.write(&mut writer).unwrap();
        writer.finish().unwrap();
        Runs::from_gguf(&Gguf::open(&path).unwrap()).unwrap()
    }

    /// The ids of the 1,000 strings, as the reference has them.
    fn check_ids(tokenizer: &Runs, name: &str) {
        let strings = json_fixture("strings.json");
        let file = fs::File::open(fixture(&format!("{name}.ids.gz"))).unwrap();
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
        let mut numbers =
            bytes.as_chunks::<2>().0.iter().map(|b| u32::from(u16::from_le_bytes(*b)));
        for text in strings.as_array().unwrap() {
            let n = numbers.next().unwrap() as usize;
            let expected: Vec<u32> = numbers.by_ref().take(n).collect();
            let text = text.as_str().unwrap();
            assert_eq!(tokenizer.encode(text, EncodeOptions::TEXT), expected, "{text:?}");
        }
    }

    #[test]
    fn every_published_pre_tokenizer_has_its_name() {
        let published = json_fixture("families.json");
        let mut found = Vec::new();
        for (name, family) in published["families"].as_object().unwrap() {
            let dir = folder("hf/t5", &[]);
            let model = json!({
                "type": "BPE", "vocab": {"a": 0}, "merges": [],
                "ignore_merges": family["ignore_merges"],
            });
            let file = json!({
                "model": model, "normalizer": family["normalizer"],
                "pre_tokenizer": family["pre_tokenizer"],
            });
            fs::write(dir.path().join(FAST), file.to_string()).unwrap();
            let vocab = read(dir.path(), 1).unwrap().vocab;
            // Two names for what matches the same: the pattern says which.
            assert_eq!(vocab.pre, *name);
            found.push(name.clone());
        }
        let known: Vec<&str> =
            pre::known_names().filter(|n| !found.iter().any(|f| f == n)).collect();
        // GLM's are Llama's patterns, told apart by a special token. The fixture has no family for
        // the others.
        let without_family = [
            ["default", "falcon", "laguna", "glm4", "chatglm-bpe"].as_slice(),
            &["jais-2", "k2-horizon", "tekken-num3", "nemotron-3.5-embed"],
            &["flint", "bloom", "viking", "chameleon"],
        ];
        assert_eq!(known, without_family.concat());
    }

    /// Compares with the prompts that transformers gives to the model: [text, ids] each.
    fn check_prompts(tokenizer: &Runs, name: &str) {
        for prompt in json_fixture(&format!("hf/{name}/prompts.json")).as_array().unwrap() {
            let text = prompt[0].as_str().unwrap();
            let ids: Vec<u32> = serde_json::from_value(prompt[1].clone()).unwrap();
            assert_eq!(tokenizer.encode(text, EncodeOptions::PROMPT), ids, "{name}: {text:?}");
        }
    }

    #[test]
    fn unigram_models_convert_from_either_file() {
        let config = "tokenizer_config.json";
        let eos = |tokenizer: &Runs| (tokenizer.eos(), tokenizer.add_bos(), tokenizer.add_eos());
        for files in
            [&[FAST, config, "spiece.model"][..], &[FAST, config], &["spiece.model", config]]
        {
            let dir = folder("hf/t5", files);
            let tokenizer = through_gguf(read(dir.path(), 1220).unwrap(), dir.path());
            assert_eq!(eos(&tokenizer), (Some(1), false, true), "{files:?}");
            check_ids(&tokenizer, "t5");
            check_prompts(&tokenizer, "t5");
            // Sentinels count downwards from the last token.
            assert_eq!(tokenizer.special_id("<extra_id_0>"), Some(1209), "{files:?}");
            assert_eq!(tokenizer.special_id("<extra_id_9>"), Some(1200), "{files:?}");
            let ids = tokenizer.encode("<extra_id_1>", EncodeOptions::PROMPT);
            assert_eq!(ids, [1208, 1], "{files:?}");
        }
    }

    #[test]
    fn sentencepiece_bpe_converts_without_its_model() {
        let dir = folder("hf/spm", &[FAST]);
        fs::write(dir.path().join("tokenizer_config.json"), r#"{"bos_token": "<s>"}"#).unwrap();
        let tokenizer = through_gguf(read(dir.path(), 1810).unwrap(), dir.path());
        check_ids(&tokenizer, "spm");
        check_prompts(&tokenizer, "spm");
        assert_eq!((tokenizer.add_bos(), tokenizer.add_eos()), (true, false));
    }

    /// Merges instead of scores, no space before a text, and special tokens that answers show.
    #[test]
    fn gemma_4s_merges_stay_merges() {
        let dir = folder("hf/spm", &[FAST]);
        let path = dir.path().join(FAST);
        let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        file["normalizer"] = file["normalizer"]["normalizers"][1].take();
        file["pre_tokenizer"] = json!({
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
            "invert": false,
        });
        fs::write(&path, file.to_string()).unwrap();
        let config = r#"{"bos_token": "<s>", "add_bos_token": false}"#;
        fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        let visible = vec!["<|user|>".to_owned(), "<|none|>".to_owned()];
        let own = Vocabulary { model: VocabularyModel::Gemma4, visible };
        let read = read_as(Some(&own), dir.path(), 1810).unwrap();
        let tokenizer = through_gguf(read, dir.path());
        check_ids(&tokenizer, "gemma4");
        assert!(tokenizer.add_bos());
        let kind = |token: &str| tokenizer.token_type(tokenizer.special_id(token).unwrap());
        assert_eq!(kind("<|user|>").unwrap(), crate::tokenizer::TokenType::UserDefined);
        assert_eq!(kind("<|end|>").unwrap(), crate::tokenizer::TokenType::Control);
        let gguf = Gguf::open(dir.path().join("m.gguf")).unwrap();
        assert_eq!(gguf.str("tokenizer.ggml.model").unwrap(), Some("gemma4"));
        assert_eq!(gguf.str("tokenizer.ggml.pre").unwrap(), None);
    }

    #[test]
    fn translation_models_convert_with_their_languages() {
        let dir = folder("hf/nllb", &[FAST, "tokenizer_config.json"]);
        let tokenizer = through_gguf(read(dir.path(), 1510).unwrap(), dir.path());
        check_ids(&tokenizer, "nllb");
        check_prompts(&tokenizer, "nllb");
        let english = tokenizer.language("eng_Latn").unwrap();
        assert_eq!(tokenizer.source_language(), Some(english));
        let words = tokenizer.encode("lazy dog", EncodeOptions::TEXT);
        let sentence = [&[english][..], &words, &[2]].concat();
        assert_eq!(tokenizer.encode("lazy dog", EncodeOptions::PROMPT), sentence);
        // Older files have the language behind the text.
        let path = dir.path().join(FAST);
        let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let single = file["post_processor"]["single"].as_array_mut().unwrap();
        single.rotate_left(1);
        fs::write(&path, file.to_string()).unwrap();
        let tokenizer = through_gguf(read(dir.path(), 1510).unwrap(), dir.path());
        assert_eq!(tokenizer.encode("lazy dog", EncodeOptions::PROMPT), sentence);
    }

    #[test]
    fn broken_sentencepiece_files_are_refused() {
        let spoil = |name: &str, change: &dyn Fn(&mut Value), words: &str| {
            let dir = folder(name, &[FAST]);
            let path = dir.path().join(FAST);
            let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            change(&mut file);
            fs::write(&path, file.to_string()).unwrap();
            let error = read(dir.path(), 1 << 20).unwrap_err().to_string();
            assert!(error.contains(FAST) && error.contains(words), "{error}");
        };
        let vocab: &dyn Fn(&mut Value) = &|f| f["model"]["vocab"][3] = json!(["x"]);
        spoil("hf/t5", vocab, "model.vocab[3]: expected a piece and its score");
        spoil(
            "hf/t5",
            &|f| f["model"]["unk_id"] = json!(5000),
            "model.unk_id: expected an id below",
        );
        spoil(
            "hf/t5",
            &|f| f["normalizer"] = json!({"type": "Lowercase"}),
            "a step that SentencePiece has",
        );
        let charsmap = |f: &mut Value| f["normalizer"]["precompiled_charsmap"] = json!("!");
        spoil("hf/t5", &charsmap, "precompiled_charsmap: expected base64");
        spoil("hf/nllb", &|f| f["model"]["merges"][0] = json!(["a"]), "model.merges[0]");
        let dir = folder("hf/t5", &[]);
        fs::write(dir.path().join(FAIRSEQ), "x").unwrap();
        let error = read(dir.path(), 1).unwrap_err().to_string();
        assert!(error.contains("only sentencepiece.bpe.model"), "{error}");
    }
}
