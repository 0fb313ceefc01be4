//! Grammars of calls, in the Lark dialect of llguidance: the calls of a format, with arguments that
//! match the schemas of the tools.

use super::choose::ToolSupport;
use super::declared::{Custom, INPUT, Tool, Tools};
use super::embedded::lark_in_json;
use super::json::{STRING, kinds};
use super::table::{Arguments, Call, Ids, Tags, ToolFormat, Value as Kind};
use crate::chat::lark::{literal, quoted, slashed, text_rule};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Value, json};

/// A grammar for sampling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolGrammar {
    pub lark: String,
    /// The grammar begins behind this text, and until then all is allowed. `None`: it begins with
    /// the answer.
    pub trigger: Option<String>,
    /// The grammar has the reasoning in it: it begins with the model's first token. Otherwise, if
    /// there is no trigger, it begins behind the reasoning.
    pub has_reasoning: bool,
}

/// Whether a model may call tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    #[default]
    Auto,
    None,
    Required,
}

/// A request's `tool_choice`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolChoice {
    pub mode: Mode,
    /// The tools that may be called, if not all of them.
    pub only: Option<Vec<String>>,
}

impl ToolChoice {
    /// `auto`, `none`, `required`, the name of one tool, or a list of allowed ones.
    pub fn parse(choice: &Value, tools: &Tools) -> Result<Self> {
        let mode = |name: Option<&str>| match name {
            None | Some("auto") => Ok(Mode::Auto),
            Some("none") => Ok(Mode::None),
            Some("required" | "any") => Ok(Mode::Required),
            Some(other) => Err(Error::Invalid(format!(
                "tool_choice: expected `auto`, `none`, `required` or an object, got `{other}`"
            ))),
        };
        let parsed = match choice {
            Value::Null => Self::default(),
            Value::String(name) => Self { mode: mode(Some(name))?, only: None },
            // Anthropic's way.
            Value::Object(_)
                if ["auto", "any", "none", "required"]
                    .iter()
                    .any(|name| choice["type"] == *name) =>
            {
                Self { mode: mode(choice["type"].as_str())?, only: None }
            }
            Value::Object(_) if choice["type"] == "allowed_tools" => {
                let fields = choice.get("allowed_tools").unwrap_or(choice);
                let listed = fields["tools"].as_array().map_or(&[][..], Vec::as_slice);
                let only = listed.iter().map(tool_name).collect::<Option<Vec<_>>>();
                Self { mode: mode(fields["mode"].as_str())?, only: Some(only.unwrap_or_default()) }
            }
            _ => Self { mode: Mode::Required, only: Some(tool_name(choice).into_iter().collect()) },
        };
        let unknown = parsed.only.iter().flatten().find(|name| tools.get(name).is_none());
        if let Some(name) = unknown {
            return Err(Error::Invalid(format!("tool_choice: `{name}` is not among the tools")));
        }
        if parsed.only.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::invalid("tool_choice: expected the name of a tool"));
        }
        if parsed.mode == Mode::Required && tools.is_empty() {
            return Err(Error::invalid("tool_choice: a call is required, but there are no tools"));
        }
        Ok(parsed)
    }
}

impl ToolChoice {
    /// The tools that may be called.
    pub fn among(&self, tools: &Tools) -> Tools {
        match &self.only {
            Some(names) => tools.only(names),
            None => tools.clone(),
        }
    }
}

/// The name in `{"type": "function", "function": {"name": …}}` or `{"type": …, "name": …}`.
fn tool_name(value: &Value) -> Option<String> {
    let kind = value["type"].as_str().unwrap_or("function");
    let name = value.get(kind).unwrap_or(value)["name"].as_str();
    name.map(str::to_owned)
}

impl ToolSupport {
    /// The grammar of the calls that `choice` allows; one call at most unless `parallel`. `None`:
    /// all that the model may write is allowed, as where calls have no marker that begins them.
    pub fn grammar(
        &self,
        tools: &Tools,
        choice: &ToolChoice,
        parallel: bool,
        tokenizer: &Tokenizer,
    ) -> Option<ToolGrammar> {
        let tools = choice.among(tools);
        let trigger = match (choice.mode, &self.format.call) {
            _ if tools.is_empty() => return None,
            (Mode::None, _) => return None,
            (Mode::Required, _) => None,
            (Mode::Auto, _) if self.format.is_bare() => return None,
            (Mode::Auto, Call::Header { to, .. }) => Some(format!("{HEADER}{to}")),
            (Mode::Auto, _) => Some(self.format.openers().first()?.to_string()),
        };
        let parallel = parallel && self.is_parallel;
        let mut lark = Lark { format: self.format, tokenizer, rules: Vec::new() };
        lark.start(&tools, trigger.as_deref(), parallel);
        let has_reasoning = trigger.is_none() && self.has_headers();
        Some(ToolGrammar { lark: lark.rules.join("\n") + "\n", trigger, has_reasoning })
    }

    /// The grammar of an answer that is either calls or JSON of this schema. `None`: the two could
    /// not be told apart, as where calls have no marker that begins them.
    pub fn grammar_or_json(
        &self,
        tools: &Tools,
        choice: &ToolChoice,
        parallel: bool,
        schema: &Value,
        tokenizer: &Tokenizer,
    ) -> Option<ToolGrammar> {
        let tools = choice.among(tools);
        if tools.is_empty() || self.format.is_bare() {
            return None;
        }
        let mut lark = Lark { format: self.format, tokenizer, rules: Vec::new() };
        lark.start(&tools, None, parallel && self.is_parallel);
        let has_reasoning = self.has_headers();
        let before = match has_reasoning {
            true => format!("thought* {}", lark.literal(FINAL)),
            false => format!("{SPACE}?"),
        };
        let calls = lark.rules.iter_mut().find_map(|rule| rule.strip_prefix("start: "));
        let calls = calls.map(str::to_owned)?;
        lark.rules.retain(|rule| !rule.starts_with("start: "));
        lark.rule("calls", &calls);
        lark.rule("json", &inline(schema));
        lark.rule("start", &format!("calls | {before} json"));
        Some(ToolGrammar { lark: lark.rules.join("\n") + "\n", trigger: None, has_reasoning })
    }

    fn has_headers(&self) -> bool {
        matches!(self.format.call, Call::Header { .. })
    }
}

/// A message's header up to the function, in gpt-oss.
const HEADER: &str = "<|channel|>commentary ";

/// The header of its reasoning.
const ANALYSIS: &str = "<|channel|>analysis<|message|>";

/// The header of its answer.
const FINAL: &str = "<|channel|>final<|message|>";

/// White space where models write more or less of it.
const SPACE: &str = "/[ \\n]{1,8}/";

impl ToolFormat {
    /// Tokens that a model needs to begin a call. Banned, they keep it from calling.
    pub fn opening_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.openers().iter().filter_map(|opener| tokenizer.special_id(opener)).collect()
    }
}

/// The grammar in the making.
struct Lark<'a> {
    format: &'static ToolFormat,
    tokenizer: &'a Tokenizer,
    rules: Vec<String>,
}

impl Lark<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        self.rules.push(format!("{name}: {body}"));
    }

    /// A text as it is written, with control tokens as such.
    fn literal(&self, text: &str) -> String {
        literal(text, self.tokenizer)
    }

    fn start(&mut self, tools: &Tools, trigger: Option<&str>, parallel: bool) {
        let format = self.format;
        let (open, close) = match &format.call {
            _ if format.is_bare() => ("", ""),
            Call::Object { list: true, .. } => ("[", "]"),
            _ => ("", ""),
        };
        let section = if format.is_bare() { "" } else { format.section.begin };
        let begin = match &format.call {
            Call::Named { begin, .. } => begin,
            Call::Header { .. } | Call::Object { .. } => "",
        };
        let first = format!("{section}{open}{begin}");
        let (first, lead) = match trigger {
            // The calls go on behind the trigger.
            Some(trigger) => (first.strip_prefix(trigger).unwrap_or_default().to_owned(), None),
            None => (first, Some(SPACE)),
        };
        let lead = lead.map(|space| format!("{space}?"));
        let rest = first.trim_start();
        // A model may leave out the line break behind the trigger.
        let space = (rest.len() < first.len()).then(|| format!("{SPACE}?"));
        let mut body: Vec<String> = lead.into_iter().chain(space).collect();
        body.push(self.literal(rest));
        if let (Call::Header { to, .. }, None) = (&format.call, trigger) {
            let thought = self.literal(ANALYSIS);
            self.text_rule("thought_text", "<|end|><|start|>assistant");
            self.rule("thought", &format!("{thought} thought_text"));
            body.push(format!("thought* {}", self.literal(&format!("{HEADER}{to}"))));
        }
        body.push("call".into());
        if parallel {
            let between = self.literal(&format!("{}{begin}", format.between));
            body.push(format!("({between} call)*"));
        }
        body.push(self.literal(&format!("{close}{}", format.section.end)));
        body.retain(|part| !part.is_empty());
        self.rule("start", &body.join(" "));
        let calls: Vec<String> = (0..tools.iter().count()).map(|n| format!("call_{n}")).collect();
        self.rule("call", &calls.join(" | "));
        for (n, tool) in tools.iter().enumerate() {
            self.call(n, tool);
        }
    }

    /// A call from its name on.
    fn call(&mut self, n: usize, tool: &Tool) {
        let (name, arguments) = (&tool.name, format!("arguments_{n}"));
        let body = match &self.format.call {
            Call::Object { arguments: key, .. } => {
                let head = format!("{{\"name\": \"{name}\", \"{key}\": ");
                format!("{} {arguments} \"}}\"", self.literal(&head))
            }
            Call::Named { name_end, ends, arguments: kind, .. } => {
                let head = match self.format.ids {
                    Ids::Kimi => {
                        let head = self.literal(&format!("functions.{name}:"));
                        format!("{head} /[0-9]{{1,6}}/ {}", self.literal(name_end))
                    }
                    Ids::Long | Ids::Nine => self.literal(&format!("{name}{name_end}")),
                };
                let end = self.literal(&ends.concat());
                let arguments = match kind {
                    Arguments::Json => arguments.clone(),
                    Arguments::Tagged(tags) => self.tagged(n, tool, tags),
                };
                format!("{head} {arguments} {end}")
            }
            Call::Header { message, .. } => {
                let constrain = self.literal("<|constrain|>");
                let message = self.literal(message);
                format!("\"{name}\" (\" \"? ({constrain})? \"json\")? {message} {arguments}")
            }
        };
        self.rule(&format!("call_{n}"), body.trim());
        let is_tagged =
            matches!(self.format.call, Call::Named { arguments: Arguments::Tagged(_), .. });
        if !is_tagged {
            self.rule(&arguments, &json_arguments(tool, &arguments));
        }
    }

    /// Arguments between markers, in the order of the schema: the rules of their values, and what
    /// puts them together.
    fn tagged(&mut self, n: usize, tool: &Tool, tags: &Tags) -> String {
        let schema = &tool.parameters;
        let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
        let mut parts = Vec::new();
        for (m, (key, property)) in
            schema["properties"].as_object().into_iter().flatten().enumerate()
        {
            let value = format!("value_{n}_{m}");
            let kinds = kinds(property, schema);
            let is_text = kinds & STRING != 0;
            let kind = if is_text { Kind::Text } else { Kind::Json };
            let fits = |end: &&(&str, Kind)| end.1 == kind || end.1 == Kind::BySchema;
            let key_end = tags.key_ends.iter().find(fits).map_or("", |(end, _)| end);
            let head = format!("{}{key}{key_end}{}", tags.key_begin, tags.value_begin);
            let part = format!("{} {value}", self.literal(&head));
            let is_required = required.iter().any(|name| name == key);
            parts.push(if is_required { part } else { format!("({part})?") });
            self.value(&value, tool, property, is_text, tags);
        }
        parts.join(" ")
    }

    /// The rule of a value with the marker behind it.
    fn value(&mut self, name: &str, tool: &Tool, property: &Value, is_text: bool, tags: &Tags) {
        let end = self.literal(tags.value_end);
        let choices = property["enum"].as_array().filter(|_| is_text);
        let body = match (&tool.custom, choices) {
            (Some(Custom::Lark(definition)), _) => {
                format!("{name}_text {end}\n{name}_text: %lark {{\n{definition}\n}}")
            }
            (Some(Custom::Regex(pattern)), _) => format!("{} {end}", slashed(pattern)),
            (_, Some(choices)) => {
                let texts = choices.iter().map(|choice| match choice.as_str() {
                    Some(text) => text.to_owned(),
                    None => choice.to_string(),
                });
                let texts: Vec<String> = texts.filter_map(|text| quoted(&text)).collect();
                format!("({}) {end}", texts.join(" | "))
            }
            _ if is_text => {
                self.text_rule("text", tags.value_end);
                "text".into()
            }
            _ => format!("{name}_json {end}\n{name}_json: {}", inline_part(property, tool)),
        };
        self.rule(name, &body);
    }

    /// Any text up to the marker, the marker too. Line breaks before the marker are part of the
    /// text.
    fn text_rule(&mut self, name: &str, end: &str) {
        if self.rules.iter().any(|rule| rule.starts_with(name)) {
            return;
        }
        let (marker, space) = end.trim_start().split_at(end.trim().len());
        let body = format!("{name}_body");
        self.rules.push(text_rule(&body, marker, self.tokenizer));
        self.rule(name, &format!("{body} {}", quoted(space).unwrap_or_default()));
    }
}

/// Arguments as JSON. `name` is the rule's.
fn json_arguments(tool: &Tool, name: &str) -> String {
    match &tool.custom {
        Some(Custom::Regex(pattern)) => {
            let mut schema = tool.parameters.clone();
            schema["properties"][INPUT]["pattern"] = format!("^(?:{pattern})$").into();
            inline(&schema)
        }
        Some(Custom::Lark(definition)) => match lark_in_json(definition) {
            Some(lark) => {
                let open = Value::from(format!("{{\"{INPUT}\": \""));
                format!("{open} {name}_text \"\\\"}}\"\n{name}_text: %lark {{\n{lark}\n}}")
            }
            None => {
                log::info!("the grammar of the tool `{}` is not enforced inside JSON", tool.name);
                inline(&tool.parameters)
            }
        },
        Some(Custom::Text) | None => inline(&tool.parameters),
    }
}

/// The white space between the parts of JSON, bounded as in a form that is JSON.
const GAP: &str = r"[ \t]|(\r?\n){1,2}[ \t]{0,20}";

/// A schema within the grammar.
fn inline(schema: &Value) -> String {
    let mut schema = schema.clone();
    if let Some(fields) = schema.as_object_mut() {
        fields.entry("x-guidance").or_insert_with(|| json!({ "whitespace_pattern": GAP }));
    }
    format!("%json {schema}")
}

/// The schema of a property, with the definitions that it may refer to.
fn inline_part(property: &Value, tool: &Tool) -> String {
    let mut schema = property.clone();
    if let Some(fields) = schema.as_object_mut() {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = tool.parameters.get(key) {
                fields.insert(key.into(), definitions.clone());
            }
        }
    }
    inline(&schema)
}

#[cfg(test)]
mod tests {
    use super::super::table::{formats, generic};
    use super::super::write::ToWrite;
    use super::*;
    use crate::chat::ChatTemplate;
    use crate::sample::grammar::{Constraint, Grammar, Grammars};
    use crate::tokenizer::{TokenType, Vocab, VocabModel};
    use std::sync::LazyLock;

    const CONTROLS: &[&str] = &[
        "<end>",
        "<|start|>",
        "<|end|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "｜DSML｜",
        "[TOOL_CALLS]",
        "[ARGS]",
    ];

    /// All bytes, and control tokens.
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        let byte_level = crate::tokenizer::byte_level_text;
        let mut tokens: Vec<Vec<u8>> = (0..=255u8).map(|byte| byte_level(&[byte]).into()).collect();
        let mut types = vec![TokenType::Normal; tokens.len()];
        tokens.extend(CONTROLS.iter().map(|name| name.as_bytes().to_vec()));
        types.resize(tokens.len(), TokenType::Control);
        let mut vocab = Vocab::new(VocabModel::Bpe, tokens);
        vocab.ids.eos = Some(256);
        (vocab.types, vocab.pre) = (types, Some("gpt-2".into()));
        Tokenizer::new(vocab).unwrap()
    });
    static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| Grammars::new(&TOKENIZER).unwrap());

    fn ids(text: &str) -> Vec<u32> {
        let (mut out, mut rest) = (Vec::new(), text);
        while let Some(c) = rest.chars().next() {
            let token = CONTROLS.iter().find(|name| rest.starts_with(**name));
            match token {
                Some(name) => {
                    out.extend(TOKENIZER.special_id(name));
                    rest = &rest[name.len()..];
                }
                None => {
                    out.extend(rest[..c.len_utf8()].bytes().map(u32::from));
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        out
    }

    /// How many bytes of the text, or tokens, are allowed, and whether it may end there.
    fn follow(mut constraint: Constraint, text: &str) -> (usize, bool) {
        let ids = ids(text);
        for (n, &id) in ids.iter().enumerate() {
            let allowed = !constraint.is_complete()
                && constraint.mask().unwrap().is_none_or(|mask| mask.allows(id));
            if !allowed {
                return (n, false);
            }
            constraint.accept(id).unwrap();
        }
        (ids.len(), constraint.can_end().unwrap())
    }

    fn tools() -> Tools {
        let schema = json!({ "type": "object", "required": ["text", "n"], "properties": {
            "text": { "type": "string" }, "n": { "$ref": "#/$defs/number" },
            "list": { "type": "array" }, "way": { "enum": ["up", "down"] } },
            "$defs": { "number": { "type": "integer", "unheard": 1 } } });
        let tool = |name: &str| json!({ "type": "function", "name": name, "parameters": schema });
        Tools::parse(&json!([tool("edit"), tool("edit_all")])).unwrap()
    }

    fn support(format: &'static ToolFormat) -> ToolSupport {
        let template = ChatTemplate::new("{{ messages[0].content }}", "", "").unwrap();
        let support = template.tool_support_as(format.name).unwrap();
        ToolSupport { is_parallel: !matches!(format.call, Call::Header { .. }), ..support }
    }

    fn constraint(format: &'static ToolFormat, choice: &Value, parallel: bool) -> Constraint {
        let tools = tools();
        let choice = ToolChoice::parse(choice, &tools).unwrap();
        let grammar = support(format).grammar(&tools, &choice, parallel, &TOKENIZER).unwrap();
        let constraint = GRAMMARS.constraint(&Grammar::Lark(grammar.lark.clone()));
        let constraint = constraint.unwrap_or_else(|e| panic!("{e}: {}", grammar.lark));
        constraint.after(grammar.trigger.map(String::into_bytes)).resuming()
    }

    fn written(format: &ToolFormat, calls: &[(&str, Value)]) -> String {
        let calls = calls.iter().enumerate().map(|(index, (name, arguments))| ToWrite {
            index,
            name,
            arguments: arguments.as_object().unwrap(),
        });
        format.write(&calls.collect::<Vec<_>>())
    }

    fn all_formats() -> impl Iterator<Item = &'static ToolFormat> {
        formats().iter().chain([generic()])
    }

    fn check(constraint: Constraint, text: &str, expected: bool) {
        let (n, may_end) = follow(constraint, text);
        let n_ids = ids(text).len();
        let stopped: String = text.chars().take(n).collect();
        assert_eq!(may_end && n == n_ids, expected, "{text}\nstopped near {stopped}");
    }

    #[test]
    fn grammars_allow_the_calls_that_the_formats_write() {
        let text = "fn a() {\n  \"<b>\\ é\"; }";
        let first = ("edit", json!({ "text": text, "n": -3, "list": [1, { "a": "]}" }, null] }));
        let second = ("edit_all", json!({ "text": "", "n": 12, "way": "down" }));
        for format in all_formats() {
            let all = constraint(format, &json!("required"), true);
            check(all.clone(), &written(format, std::slice::from_ref(&first)), true);
            check(
                all.clone(),
                &format!("\n\n{}", written(format, std::slice::from_ref(&second))),
                true,
            );
            let two = written(format, &[first.clone(), second.clone()]);
            if support(format).is_parallel {
                check(all.clone(), &two, true);
                check(constraint(format, &json!("required"), false), &two, false);
            }
            let named = json!({ "type": "function", "function": { "name": "edit" } });
            check(
                constraint(format, &named, true),
                &written(format, std::slice::from_ref(&first)),
                true,
            );
            check(
                constraint(format, &named, true),
                &written(format, std::slice::from_ref(&second)),
                false,
            );
            for arguments in [
                json!({ "text": "a", "n": "b" }),
                json!({ "text": "a" }),
                json!({ "text": "a", "n": 1, "way": "left" }),
            ] {
                check(all.clone(), &written(format, &[("edit", arguments)]), false);
            }
            check(all.clone(), &written(format, &[("other", first.1.clone())]), false);
            check(all, "Hello", false);
        }
    }

    /// gpt-oss's reasoning is a message of its own, and the grammar goes through it.
    #[test]
    fn a_message_with_reasoning_may_stand_before_a_required_call() {
        let format = formats().iter().find(|format| format.name == "harmony").unwrap();
        let call = written(format, &[("edit", json!({ "text": "a", "n": 1 }))]);
        let thought = "<|channel|>analysis<|message|>hm <b>\n<|end|><|start|>assistant";
        let required = || constraint(format, &json!("required"), false);
        check(required(), &format!("{thought}{call}"), true);
        check(required(), &format!("{thought}<|channel|>final<|message|>Hi"), false);
        let tools = tools();
        let choice = ToolChoice { mode: Mode::Required, only: None };
        let has_reasoning = |format: &'static ToolFormat| {
            support(format).grammar(&tools, &choice, true, &TOKENIZER).unwrap().has_reasoning
        };
        assert!(has_reasoning(format) && !has_reasoning(generic()));
    }

    #[test]
    fn an_answer_is_calls_or_json() {
        let (tools, auto) = (tools(), ToolChoice::default());
        let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } },
            "required": ["ok"], "additionalProperties": false });
        for format in all_formats() {
            let grammar = support(format).grammar_or_json(&tools, &auto, true, &schema, &TOKENIZER);
            assert_eq!(grammar.is_none(), format.is_bare(), "{}", format.name);
            let Some(ToolGrammar { lark, has_reasoning, .. }) = grammar else { continue };
            let start = GRAMMARS.constraint(&Grammar::Lark(lark.clone()));
            let start = start.unwrap_or_else(|e| panic!("{e}: {lark}"));
            let header = if has_reasoning { FINAL } else { "" };
            let call = written(format, &[("edit", json!({ "text": "a", "n": 1 }))]);
            check(start.clone(), &call, true);
            check(start.clone(), &format!("{header}{{\"ok\": true}}"), true);
            check(start.clone(), &format!("{header}{{\"ok\": 1}}"), false);
            check(start.clone(), &format!("{header}Hello"), false);
            check(start, &format!("{header}{{\"ok\": true}}{call}"), false);
        }
    }

    #[test]
    fn text_is_free_up_to_a_call() {
        for format in all_formats() {
            let (tools, auto) = (tools(), ToolChoice::default());
            let grammar = support(format).grammar(&tools, &auto, true, &TOKENIZER);
            assert_eq!(grammar.is_none(), format.is_bare(), "{}", format.name);
            if grammar.is_none() {
                continue;
            }
            let auto = || constraint(format, &Value::Null, true);
            check(auto(), "Hello {\"n\": 1}", true);
            let good = written(format, &[("edit", json!({ "text": "a", "n": 1 }))]);
            check(auto(), &format!("So:\n{good}"), true);
            let bad = written(format, &[("edit", json!({ "text": "a", "n": [] }))]);
            check(auto(), &format!("So:\n{bad}"), false);
        }
    }

    #[test]
    fn grammars_of_custom_tools_hold_for_their_texts() {
        let format = |name: &str| formats().iter().find(|format| format.name == name).unwrap();
        let lark = "start: \"*** Begin\" LF line+ \"*** End\" LF?\n\
                    line: (\"+\" | \"-\") /(.*)/ LF -> line\n%import common.LF";
        let tools = Tools::parse(&json!([
            { "type": "custom", "name": "patch", "format":
                { "type": "grammar", "syntax": "lark", "definition": lark } },
            { "type": "custom", "name": "date", "format":
                { "type": "grammar", "syntax": "regex", "definition": "[0-9]{4}/[0-9]{2}" } },
        ]))
        .unwrap();
        let required = ToolChoice { mode: Mode::Required, only: None };
        let check = |name: &str, tool: &str, input: &str, expected: bool| {
            let grammar = support(format(name)).grammar(&tools, &required, false, &TOKENIZER);
            let grammar = Grammar::Lark(grammar.unwrap().lark);
            let text = written(format(name), &[(tool, json!({ "input": input }))]);
            check(GRAMMARS.constraint(&grammar).unwrap(), &text, expected);
        };
        let patch = "*** Begin\n+a \"b\"\n-c\n*** End";
        for name in
            ["qwen-xml", "glm", "deepseek-v3.2", "minimax-m2", "hermes", "kimi-k2", "harmony"]
        {
            check(name, "patch", &format!("{patch}\n"), true);
            check(name, "patch", "*** Begin\na", false);
        }
        for name in ["qwen-xml", "hermes", "kimi-k2"] {
            check(name, "date", "2026/11", true);
            check(name, "date", "2026-11", false);
        }
    }

    /// A text fits the expression as the same text in JSON fits its translation.
    #[test]
    fn expressions_mean_the_same_inside_json() {
        use crate::chat::tools::json::escaped;
        let texts =
            ["", "a", "ab", "a\"b", "\\", "\"", "\n", "a\n", "c/\té", "]a", "aaa", " \\\"", "abc"];
        for pattern in [
            "(.*)",
            ".+",
            "[^\\n]+",
            "a\"*b?c?",
            "\\\\*",
            "[\"\\\\]{1,3}",
            "\\s?\\S+",
            "[]a]*",
            "(?s:.+)",
            "[^a-c]|\\n",
            "(a|b\\t)+",
            "[[a-b]\\n]*",
            "c/[\\s\\w]*",
        ] {
            let lark = lark_in_json(&format!("start: X\nX: {}", slashed(pattern))).unwrap();
            let lark = format!("start: text \"\\\"\"\ntext: %lark {{\n{lark}\n}}");
            let start = GRAMMARS.constraint(&Grammar::Lark(lark.clone()));
            let start = start.unwrap_or_else(|e| panic!("{e}: {lark}"));
            let whole = regex::Regex::new(&format!("^(?:{pattern})$")).unwrap();
            for text in texts {
                let json = format!("{}\"", escaped(text));
                let (n, may_end) = follow(start.clone(), &json);
                let fits = may_end && n == ids(&json).len();
                assert_eq!(fits, whole.is_match(text), "{pattern} {text:?} {lark}");
            }
        }
    }

    #[test]
    fn choices_are_read() {
        let tools = tools();
        let parse = |choice: Value| ToolChoice::parse(&choice, &tools);
        let only = |name: &str| Some(vec![name.to_owned()]);
        assert_eq!(parse(Value::Null).unwrap(), ToolChoice::default());
        assert_eq!(parse(json!("none")).unwrap().mode, Mode::None);
        let named = ToolChoice { mode: Mode::Required, only: only("edit") };
        assert_eq!(parse(json!({ "type": "function", "name": "edit" })).unwrap(), named);
        let allowed = json!({ "type": "allowed_tools", "allowed_tools": { "mode": "auto",
            "tools": [{ "type": "function", "function": { "name": "edit" } }] } });
        assert_eq!(parse(allowed).unwrap(), ToolChoice { mode: Mode::Auto, only: only("edit") });
        let any = ToolChoice { mode: Mode::Required, only: None };
        for choice in [json!("any"), json!({ "type": "any" }), json!("required")] {
            assert_eq!(parse(choice).unwrap(), any);
        }
        for bad in [json!("some"), json!({ "type": "function", "name": "x" }), json!({}), json!(3)]
        {
            assert!(parse(bad).unwrap_err().to_string().starts_with("tool_choice: "));
        }
        let none = ToolChoice { mode: Mode::None, only: None };
        assert!(support(generic()).grammar(&tools, &none, true, &TOKENIZER).is_none());
        let kimi = formats().iter().find(|format| format.name == "kimi-k2").unwrap();
        assert_eq!(kimi.opening_tokens(&TOKENIZER).len(), 2);
        assert!(ToolChoice::parse(&json!("required"), &Tools::default()).is_err());
    }
}
