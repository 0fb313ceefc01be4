//! How model families write tool calls: the rows of `models/chat/tools.toml`, which says what the
//! fields mean.

use std::sync::LazyLock;

use serde::{Deserialize, Deserializer};

use crate::chat::data::{Text, Texts, table, text, texts};

/// One family's way.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolFormat {
    #[serde(deserialize_with = "text")]
    pub name: Text,
    /// All of these are in the source of a template of this family.
    #[serde(deserialize_with = "texts")]
    pub(super) signs: Texts,
    /// Encloses calls; empty texts where there is none.
    #[serde(default)]
    pub(super) section: Section,
    pub(super) call: Call,
    /// Stands between two calls.
    #[serde(default, deserialize_with = "text")]
    pub(super) between: Text,
    #[serde(default)]
    pub(super) ids: Ids,
    /// A call within a block of reasoning ends the block: its markers are control tokens.
    #[serde(default)]
    pub(super) ends_reasoning: bool,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    #[serde(deserialize_with = "text")]
    pub begin: Text,
    #[serde(deserialize_with = "text")]
    pub end: Text,
}

/// The form of one call.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum Call {
    /// `{"name": …, "arguments": …}`.
    Object {
        /// The key of the arguments.
        #[serde(deserialize_with = "text")]
        arguments: Text,
        /// Calls are the items of a JSON array.
        #[serde(default)]
        list: bool,
        /// The answer begins with the object, without a marker.
        #[serde(default)]
        bare: bool,
    },
    /// The name, then the arguments, each between markers.
    Named {
        #[serde(deserialize_with = "text")]
        begin: Text,
        #[serde(deserialize_with = "text")]
        name_end: Text,
        arguments: Arguments,
        #[serde(deserialize_with = "texts")]
        ends: Texts,
    },
    /// A message whose header names the function.
    Header {
        #[serde(deserialize_with = "text")]
        to: Text,
        #[serde(deserialize_with = "text")]
        message: Text,
    },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Arguments {
    Json,
    Tagged(Tags),
}

/// Arguments as keys and values between markers. A line break at an end of a marker is no part of
/// the value beside it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tags {
    #[serde(deserialize_with = "text")]
    pub key_begin: Text,
    #[serde(deserialize_with = "key_ends")]
    pub key_ends: &'static [(Text, Value)],
    #[serde(default, deserialize_with = "text")]
    pub value_begin: Text,
    #[serde(deserialize_with = "text")]
    pub value_end: Text,
}

fn key_ends<'de, D: Deserializer<'de>>(from: D) -> Result<&'static [(Text, Value)], D::Error> {
    let ends = Vec::<(String, Value)>::deserialize(from)?.into_iter();
    Ok(ends.map(|(end, value)| (&*end.leak(), value)).collect::<Vec<_>>().leak())
}

/// The meaning of a value between markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Value {
    Text,
    Json,
    /// Text or JSON, as the function's schema says.
    BySchema,
}

/// The style of the ids of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ids {
    /// `call_` and 24 characters.
    #[default]
    Long,
    /// `functions.name:0`, which the model writes in the place of the name.
    Kimi,
    /// Nine letters and digits, in the style of Mistral.
    Nine,
}

/// Separates a name from the id that some models write behind it.
pub(super) const CALL_ID: &str = "[CALL_ID]";

/// The tables of `models/chat/tools.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    format: Vec<ToolFormat>,
    generic: ToolFormat,
}

static TABLES: LazyLock<Tables> =
    LazyLock::new(|| table(include_str!("../../../models/chat/tools.toml")));

/// All families' formats; the more particular ones come first.
pub(super) fn formats() -> &'static [ToolFormat] {
    &TABLES.format
}

/// The format for models whose template knows nothing of tools: a system note asks for it.
pub(super) fn generic() -> &'static ToolFormat {
    &TABLES.generic
}

impl ToolFormat {
    /// Texts that begin a call, or a section of calls: none of them is passed on as content, and
    /// banning them keeps a model from calling. Empty where a call begins without a marker.
    pub fn openers(&self) -> Vec<&'static str> {
        let call = match &self.call {
            Call::Named { begin, .. } => begin.trim(),
            Call::Object { .. } => "",
            Call::Header { to, .. } => to,
        };
        [self.section.begin.trim(), call].into_iter().filter(|text| !text.is_empty()).collect()
    }

    /// Texts that end a call, or a section of calls.
    pub(super) fn closers(&self) -> Vec<&'static str> {
        let ends = match &self.call {
            Call::Named { ends, .. } => ends,
            Call::Object { .. } | Call::Header { .. } => &[][..],
        };
        let texts = ends.iter().chain([&self.section.end]).map(|text| text.trim());
        texts.filter(|text| !text.is_empty()).collect()
    }

    /// All texts that are no part of a call's name and arguments.
    pub(super) fn markers(&self) -> Vec<&'static str> {
        let mut markers = self.openers();
        markers.extend(self.closers());
        if let Call::Named { name_end, arguments, .. } = &self.call {
            markers.push(name_end.trim());
            if let Arguments::Tagged(tags) = arguments {
                markers.extend([tags.key_begin, tags.value_begin, tags.value_end].map(str::trim));
                markers.extend(tags.key_ends.iter().map(|(end, _)| end.trim()));
            } else if self.ids == Ids::Nine {
                markers.push(CALL_ID);
            }
        }
        markers.retain(|text| !text.is_empty());
        markers
    }

    pub(super) fn is_bare(&self) -> bool {
        matches!(self.call, Call::Object { bare: true, .. })
    }
}
