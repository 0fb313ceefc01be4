//! A checkpoint's tokenizer: which files it has, which tokens are special and how a chat is laid
//! out. What transformers would load is what is written.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::bpe::{self, token_id};
use super::json::{Json, shown};
use super::spm;
use super::vocab::{AddedToken, Vocab};
use crate::gguf::Writer;
use crate::{Error, Result};

const SENTENCEPIECE: &str = "tokenizer.model";
const FAST: &str = "tokenizer.json";

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
    /// (key, value)
    adds: Vec<(&'static str, bool)>,
    templates: Vec<Template>,
}

/// A chat template; the one without a name is the one to use unless told otherwise.
#[derive(Debug, PartialEq, Eq)]
struct Template {
    name: Option<String>,
    text: String,
}

impl Tokenizer {
    /// Reads the tokenizer of the checkpoint in `folder`, whose embedding has `n_rows` rows.
    pub fn read(folder: &Path, config: &Json, pre: Option<&str>, n_rows: u64) -> Result<Tokenizer> {
        let open = |name: &str| Json::open_optional(folder.join(name));
        let files = Files {
            folder,
            config,
            tokenizer: open(FAST)?,
            tokenizer_config: open("tokenizer_config.json")?,
            generation: open("generation_config.json")?,
        };
        let mut vocab = files.vocab(pre)?;
        vocab.fit(n_rows, folder)?;
        let ids = files.special_ids(&vocab)?;
        let adds = files.adds(&vocab, &ids)?;
        let templates = files.templates()?;
        Ok(Tokenizer { vocab, ids, adds, templates })
    }

    pub fn write(self, writer: &mut Writer) -> Result<()> {
        self.vocab.write(writer)?;
        for (key, id) in self.ids {
            writer.set(key, id)?;
        }
        for (key, value) in self.adds {
            writer.set(key, value)?;
        }
        write_templates(writer, self.templates)
    }
}

impl Files<'_> {
    fn vocab(&self, pre: Option<&str>) -> Result<Vocab> {
        let added = self.added_tokens()?;
        let sentencepiece = self.folder.join(SENTENCEPIECE);
        if sentencepiece.exists() {
            match (
                spm::read(&sentencepiece, self.tokenizer_config.as_ref(), &added),
                &self.tokenizer,
            ) {
                // Some families keep a file of another format under that name.
                (Err(e @ Error::Format { .. }), Some(_)) => log::warn!("not used: {e}"),
                (read, _) => return read,
            }
        }
        match &self.tokenizer {
            Some(tokenizer) => bpe::read(tokenizer, pre, &added),
            None => {
                let expected = format!("{FAST} or {SENTENCEPIECE}");
                Err(Error::format(self.folder, "tokenizer", expected, "neither"))
            }
        }
    }

    /// Added tokens of all files; what a later one says of an id counts.
    fn added_tokens(&self) -> Result<Vec<AddedToken>> {
        let mut added = Vec::new();
        if let Some(file) = Json::open_optional(self.folder.join("added_tokens.json"))? {
            for (content, id) in file.fields() {
                let id = token_id(id).ok_or_else(|| file.fail(content, "a token id", shown(id)))?;
                added.push(AddedToken { id, content: content.to_owned(), special: false });
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
    fn special_ids(&self, vocab: &Vocab) -> Result<Vec<(&'static str, u32)>> {
        const KINDS: [(&str, &str); 4] = [
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        ];
        let mut ids = Vec::new();
        for (kind, key) in KINDS {
            if let Some(id) = self.special_id(vocab, kind)? {
                ids.push((key, id));
            }
        }
        Ok(ids)
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
    /// the post-processor does it; SentencePiece tokenizers add a beginning unless told not to.
    fn adds(
        &self,
        vocab: &Vocab,
        ids: &[(&'static str, u32)],
    ) -> Result<Vec<(&'static str, bool)>> {
        let token = |key: &str| {
            let id = ids.iter().find(|(k, _)| *k == key).map(|(_, id)| *id as usize);
            id.map(|id| vocab.tokens[id].as_str())
        };
        let bos = token("tokenizer.ggml.bos_token_id");
        let eos = token("tokenizer.ggml.eos_token_id");
        let (first, last) = self.template_ends();
        let is_spm = vocab.model == "llama";
        let seen = |end: Option<&str>, token| end.map(|end| Some(end) == token);
        let kinds = [
            ("add_bos_token", "tokenizer.ggml.add_bos_token", seen(first, bos), is_spm),
            ("add_eos_token", "tokenizer.ggml.add_eos_token", seen(last, eos), false),
        ];
        let mut adds = Vec::new();
        for (field, key, seen, default) in kinds {
            let said = match &self.tokenizer_config {
                Some(config) => config.bool(field)?,
                None => None,
            };
            adds.push((key, said.or(seen).unwrap_or(default)));
        }
        Ok(adds)
    }

    /// The special tokens with which the post-processor's template for one text begins and ends.
    fn template_ends(&self) -> (Option<&str>, Option<&str>) {
        let Some(post) = self.tokenizer.as_ref().and_then(|t| t.at("post_processor")) else {
            return (None, None);
        };
        let parts = post.get("processors").and_then(Value::as_array);
        let parts = parts.map_or(std::slice::from_ref(post), Vec::as_slice);
        let is_template =
            |p: &&Value| p.get("type").and_then(Value::as_str) == Some("TemplateProcessing");
        let single = parts.iter().find(is_template).and_then(|p| p.get("single"));
        let Some(single) = single.and_then(Value::as_array) else { return (None, None) };
        (special_of(single.first()), special_of(single.last()))
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

fn special_of(part: Option<&Value>) -> Option<&str> {
    part?.get("SpecialToken")?.get("id")?.as_str()
}

fn added_token(file: &Json, field: &str, id: Option<usize>, token: &Value) -> Result<AddedToken> {
    let content = token.get("content").and_then(Value::as_str);
    let (Some(id), Some(content)) = (id, content) else {
        return Err(file.fail(field, "an id and a content", shown(token)));
    };
    let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
    Ok(AddedToken { id, content: content.to_owned(), special })
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
fn write_templates(writer: &mut Writer, templates: Vec<Template>) -> Result<()> {
    let mut names: Vec<String> = Vec::new();
    for template in templates {
        match template.name {
            None => writer.set("tokenizer.chat_template", template.text)?,
            Some(name) => {
                let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
                let name: String = name.chars().map(plain).collect();
                writer.set(&format!("tokenizer.chat_template.{name}"), template.text)?;
                names.push(name);
            }
        }
    }
    if !names.is_empty() {
        writer.set("tokenizer.chat_templates", names)?;
    }
    Ok(())
}
