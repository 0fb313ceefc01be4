//! How model families write tool calls. A row has the texts as a model writes them; the scanner
//! looks for them without the white space at their ends, which models do not always keep to.

/// One family's way.
#[derive(Debug)]
pub struct ToolFormat {
    pub name: &'static str,
    /// All of these are in the source of a template of this family.
    pub(super) signs: &'static [&'static str],
    /// Encloses calls; empty texts where there is none.
    pub(super) section: Section,
    pub(super) call: Call,
    /// Stands between two calls.
    pub(super) between: &'static str,
    pub(super) ids: Ids,
    /// A call within a block of reasoning ends the block: its markers are control tokens.
    pub(super) ends_reasoning: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Section {
    pub begin: &'static str,
    pub end: &'static str,
}

/// The form of one call.
#[derive(Debug)]
pub(super) enum Call {
    /// `{"name": …, "arguments": …}`.
    Object {
        /// The key of the arguments.
        arguments: &'static str,
        /// Calls are the items of a JSON array.
        list: bool,
        /// The answer begins with the object, without a marker.
        bare: bool,
    },
    /// The name, then the arguments, each between markers.
    Named {
        begin: &'static str,
        name_end: &'static str,
        arguments: Arguments,
        ends: &'static [&'static str],
    },
    /// A message whose header names the function.
    Header { to: &'static str, message: &'static str },
}

#[derive(Debug)]
pub(super) enum Arguments {
    Json,
    Tagged(Tags),
}

/// Arguments as keys and values between markers. A line break at an end of a marker is no part of
/// the value beside it.
#[derive(Debug)]
pub(super) struct Tags {
    pub key_begin: &'static str,
    pub key_ends: &'static [(&'static str, Value)],
    pub value_begin: &'static str,
    pub value_end: &'static str,
}

/// The meaning of a value between markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Text,
    Json,
    /// Text or JSON, as the function's schema says.
    BySchema,
}

/// The style of the ids of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// `call_` and 24 characters.
    Long,
    /// `functions.name:0`, which the model writes in the place of the name.
    Kimi,
    /// Nine letters and digits, in the style of Mistral.
    Nine,
}

/// Separates a name from the id that some models write behind it.
pub(super) const CALL_ID: &str = "[CALL_ID]";

const NO_SECTION: Section = Section { begin: "", end: "" };

const fn object(list: bool) -> Call {
    Call::Object { arguments: "arguments", list, bare: false }
}

const fn format(
    name: &'static str,
    signs: &'static [&'static str],
    section: Section,
    call: Call,
    between: &'static str,
) -> ToolFormat {
    ToolFormat { name, signs, section, call, between, ids: Ids::Long, ends_reasoning: false }
}

/// DeepSeek's markup, of which the section's name has changed.
const fn dsml(name: &'static str, signs: &'static [&'static str], section: Section) -> ToolFormat {
    let tags = Tags {
        key_begin: "<｜DSML｜parameter name=\"",
        key_ends: &[("\" string=\"true\">", Value::Text), ("\" string=\"false\">", Value::Json)],
        value_begin: "",
        value_end: "</｜DSML｜parameter>\n",
    };
    let call = Call::Named {
        begin: "<｜DSML｜invoke name=\"",
        name_end: "\">\n",
        arguments: Arguments::Tagged(tags),
        ends: &["</｜DSML｜invoke>"],
    };
    ToolFormat { ends_reasoning: true, ..format(name, signs, section, call, "\n") }
}

const fn deepseek(
    name: &'static str,
    signs: &'static [&'static str],
    call: Call,
    between: &'static str,
) -> ToolFormat {
    let section =
        Section { begin: "<｜tool▁calls▁begin｜>", end: "<｜tool▁calls▁end｜>" };
    ToolFormat { ends_reasoning: true, ..format(name, signs, section, call, between) }
}

/// GLM's, with line breaks between the markers or without.
const fn glm(name: &'static str, call: Call, between: &'static str) -> ToolFormat {
    format(name, &["<tool_call>", "<arg_key>"], NO_SECTION, call, between)
}

/// The more particular ones come first.
pub(super) const FORMATS: &[ToolFormat] = &[
    // gpt-oss
    format(
        "harmony",
        &["<|start|>assistant", "to=", "functions."],
        NO_SECTION,
        Call::Header { to: "to=functions.", message: "<|message|>" },
        "",
    ),
    dsml(
        "deepseek-v3.2",
        &["DSML", "function_calls"],
        Section { begin: "<｜DSML｜function_calls>\n", end: "\n</｜DSML｜function_calls>" },
    ),
    dsml(
        "deepseek-v4",
        &["DSML", "tool_calls"],
        Section { begin: "<｜DSML｜tool_calls>\n", end: "\n</｜DSML｜tool_calls>" },
    ),
    // DeepSeek V3 and R1
    deepseek(
        "deepseek-v3",
        &["<｜tool▁calls▁begin｜>", "```json"],
        Call::Named {
            begin: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            name_end: "\n```json\n",
            arguments: Arguments::Json,
            ends: &["\n```", "<｜tool▁call▁end｜>"],
        },
        "\n",
    ),
    deepseek(
        "deepseek-v3.1",
        &["<｜tool▁calls▁begin｜>"],
        Call::Named {
            begin: "<｜tool▁call▁begin｜>",
            name_end: "<｜tool▁sep｜>",
            arguments: Arguments::Json,
            ends: &["<｜tool▁call▁end｜>"],
        },
        "",
    ),
    ToolFormat {
        ids: Ids::Kimi,
        ends_reasoning: true,
        ..format(
            "kimi-k2",
            &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
            Section { begin: "<|tool_calls_section_begin|>", end: "<|tool_calls_section_end|>" },
            Call::Named {
                begin: "<|tool_call_begin|>",
                name_end: "<|tool_call_argument_begin|>",
                arguments: Arguments::Json,
                ends: &["<|tool_call_end|>"],
            },
            "",
        )
    },
    format(
        "minimax-m2",
        &["minimax:tool_call>", "<invoke name="],
        Section { begin: "<minimax:tool_call>\n", end: "\n</minimax:tool_call>" },
        Call::Named {
            begin: "<invoke name=\"",
            name_end: "\">\n",
            arguments: Arguments::Tagged(Tags {
                key_begin: "<parameter name=\"",
                key_ends: &[("\">", Value::BySchema)],
                value_begin: "",
                value_end: "</parameter>\n",
            }),
            ends: &["</invoke>"],
        },
        "\n",
    ),
    // Magistral, Ministral, Devstral, Mistral Small from 3.2
    ToolFormat {
        ids: Ids::Nine,
        ..format(
            "mistral",
            &["[TOOL_CALLS]", "[ARGS]"],
            NO_SECTION,
            Call::Named {
                begin: "[TOOL_CALLS]",
                name_end: "[ARGS]",
                arguments: Arguments::Json,
                ends: &[],
            },
            "",
        )
    },
    // Mistral 7B, Mixtral, Nemo
    ToolFormat {
        ids: Ids::Nine,
        ..format(
            "mistral-list",
            &["[TOOL_CALLS]"],
            Section { begin: "[TOOL_CALLS]", end: "" },
            object(true),
            ", ",
        )
    },
    // Qwen3-Coder, Qwen3.5
    format(
        "qwen-xml",
        &["<function=", "<parameter="],
        Section { begin: "<tool_call>\n", end: "\n</tool_call>" },
        Call::Named {
            begin: "<function=",
            name_end: ">\n",
            arguments: Arguments::Tagged(Tags {
                key_begin: "<parameter=",
                key_ends: &[(">\n", Value::BySchema)],
                value_begin: "",
                value_end: "\n</parameter>\n",
            }),
            ends: &["</function>"],
        },
        "\n</tool_call>\n<tool_call>\n",
    ),
    // GLM 4.5, 4.6
    glm(
        "glm",
        Call::Named {
            begin: "<tool_call>",
            name_end: "\n",
            arguments: Arguments::Tagged(Tags {
                key_begin: "<arg_key>",
                key_ends: &[("</arg_key>\n", Value::BySchema)],
                value_begin: "<arg_value>",
                value_end: "</arg_value>\n",
            }),
            ends: &["</tool_call>"],
        },
        "\n",
    ),
    // GLM 4.7
    glm(
        "glm-compact",
        Call::Named {
            begin: "<tool_call>",
            name_end: "",
            arguments: Arguments::Tagged(Tags {
                key_begin: "<arg_key>",
                key_ends: &[("</arg_key>", Value::BySchema)],
                value_begin: "<arg_value>",
                value_end: "</arg_value>",
            }),
            ends: &["</tool_call>"],
        },
        "",
    ),
    // Granite 3
    format(
        "granite-list",
        &["<|tool_call|>"],
        Section { begin: "<|tool_call|>", end: "" },
        object(true),
        ", ",
    ),
    // Hermes, Qwen 2.5 and 3, Granite 4
    format(
        "hermes",
        &["<tool_call>"],
        Section { begin: "<tool_call>\n", end: "\n</tool_call>" },
        object(false),
        "\n</tool_call>\n<tool_call>\n",
    ),
    // Llama 3
    format(
        "bare-json",
        &["\"parameters\": "],
        Section { begin: "<|python_tag|>", end: "" },
        Call::Object { arguments: "parameters", list: false, bare: true },
        "; ",
    ),
];

/// For models whose template knows nothing of tools: a system note asks for it.
pub(super) const GENERIC: &ToolFormat = &format(
    "generic",
    &[],
    Section { begin: "<tool_call>\n", end: "\n</tool_call>" },
    object(false),
    "\n</tool_call>\n<tool_call>\n",
);

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
