//! The fields of requests' bodies, a table for each route. Tests hold them to what the routes read.

use serde_json::{Map, Value, json};

use crate::sample::{MAX_TOP_LOGPROBS, PARAMETERS};
use crate::server::api::sampling::{self, WITHOUT_EFFECT};
use crate::server::api::{anthropic, embeddings, ollama, responses};

/// The value that a field has.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Text,
    Flag,
    /// A string or several.
    Texts,
    /// A whole number in this range.
    Whole(i64, i64),
    /// An object with these fields.
    Object(&'static Table),
    /// A value of one of these types.
    Of(&'static [&'static str]),
    /// A value that is refused, whatever it is.
    Refused,
}

use Kind::{Flag, Object, Of, Refused, Text, Texts, Whole};

/// A field's name and value.
type Field = (&'static str, Kind);

/// The fields of a body, or of an object in one.
#[derive(Debug)]
pub struct Table {
    /// Tables of fields.
    pub fields: &'static [&'static [Field]],
    /// Whether the parameters of sampling are fields.
    pub samples: bool,
    /// Tables of fields that are accepted and have no effect.
    pub unused: &'static [&'static [&'static str]],
    pub required: &'static [&'static str],
    /// A request, as JSON.
    pub example: &'static str,
}

impl Table {
    /// The JSON schema.
    pub fn schema(&self) -> Value {
        let mut properties = Map::new();
        for (name, kind) in self.fields.concat() {
            properties.insert(name.into(), kind.schema(self.required.contains(&name)));
        }
        if self.samples {
            for parameter in PARAMETERS {
                let name = sampling::field(parameter);
                let kind = if parameter.is_whole() { "integer" } else { "number" };
                let expected = sampling::expected(name, parameter);
                let text = format!("{}: {expected}", parameter.help);
                let schema = json!({ "type": [kind, "null"], "description": text });
                properties.insert(name.into(), schema);
            }
        }
        for name in self.unused.concat() {
            let schema = || json!({ "description": "accepted, without effect" });
            properties.entry(name).or_insert_with(schema);
        }
        let mut schema = json!({ "type": "object", "properties": properties });
        if !self.required.is_empty() {
            schema["required"] = self.required.into();
        }
        schema
    }
}

impl Kind {
    fn schema(self, is_required: bool) -> Value {
        let of = |name: &str| match is_required {
            true => json!(name),
            false => json!([name, "null"]),
        };
        match self {
            Text => json!({ "type": of("string") }),
            Flag => json!({ "type": of("boolean") }),
            Texts => json!({ "type": ["string", "array", "null"], "items": { "type": "string" } }),
            Whole(from, to) => {
                let mut schema = json!({ "type": of("integer") });
                let ends = [("minimum", from, i64::MIN), ("maximum", to, i64::MAX)];
                for (name, end, _) in ends.into_iter().filter(|(_, end, none)| end != none) {
                    schema[name] = end.into();
                }
                schema
            }
            Object(table) => {
                let mut schema = table.schema();
                schema["type"] = of("object");
                schema
            }
            Of(types) => {
                let none = (!is_required).then_some("null");
                json!({ "type": types.iter().copied().chain(none).collect::<Vec<_>>() })
            }
            Refused => json!({ "type": "null", "description": "refused" }),
        }
    }
}

const MAX: i64 = i64::MAX;

/// A number of tokens, where negative ones are any.
const COUNT: Kind = Whole(i64::MIN, MAX);
/// A number, where −1 is none.
const NUMBER: Kind = Whole(-1, MAX);
const TOP: Kind = Whole(0, MAX_TOP_LOGPROBS as i64);
const OBJECT: Kind = Of(&["object"]);
const LIST: Kind = Of(&["array"]);
const TEXT_OR_LIST: Kind = Of(&["string", "array"]);

const MODEL: &[Field] = &[("model", Text)];

const STREAM: &[Field] = &[("stream", Flag), ("sse_ping_interval", Whole(-1, 86_400))];

const SCHEDULING: &[Field] = &[
    ("cache_salt", Text),
    ("prompt_cache_key", Text),
    ("id_slot", NUMBER),
    ("cache_prompt", Flag),
    ("priority", Whole(i64::MIN, MAX)),
    ("t_max_predict_ms", NUMBER),
    ("spec", Text),
    ("lora", LIST),
    ("prediction", Object(&PREDICTION)),
];

const PREDICTION: Table = Table {
    fields: &[&[("type", Text), ("content", TEXT_OR_LIST)]],
    required: &["content"],
    ..EMPTY
};

/// Beside the parameters of sampling.
const SAMPLING: &[Field] = &[
    ("seed", Of(&["integer"])),
    ("n_keep", NUMBER),
    ("min_keep", Whole(0, MAX)),
    ("n_discard", Whole(0, 0)),
    ("dry_sequence_breakers", Texts),
    ("samplers", Texts),
    ("logit_bias", Of(&["object", "array"])),
    ("ignore_eos", Flag),
];

const STOP: &[Field] = &[("stop", Texts)];

const FORM: &[Field] = &[
    ("response_format", OBJECT),
    ("structural_tag", Of(&["object", "string"])),
    ("json_schema", Of(&["object", "boolean"])),
    ("grammar", Text),
    ("lark", Text),
    ("regex", Text),
];

const EFFORT: Table = Table { fields: &[&[("effort", Text)]], ..EMPTY };

const THINKING: &[Field] = &[
    ("reasoning_effort", Text),
    ("reasoning_budget_tokens", COUNT),
    ("thinking_budget_tokens", COUNT),
    (
        "thinking",
        Object(&Table { fields: &[&[("budget_tokens", COUNT), ("type", Text)]], ..EMPTY }),
    ),
];

const TEMPLATE: &[Field] = &[("chat_template", Refused), ("chat_template_kwargs", OBJECT)];

const EMPTY: Table = Table { fields: &[], samples: false, unused: &[], required: &[], example: "" };

const CONVERSATION: &[Field] = &[
    ("messages", LIST),
    ("add_generation_prompt", Flag),
    ("continue_final_message", Flag),
    ("reasoning", Object(&EFFORT)),
    ("tools", LIST),
    ("tool_choice", Of(&["string", "object"])),
    ("parallel_tool_calls", Flag),
    ("reasoning_format", Text),
];

const HELLO: &str = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}"#;

const STREAM_OPTIONS: Table =
    Table { fields: &[&[("include_usage", Flag), ("continuous_usage_stats", Flag)]], ..EMPTY };

const CHAT_ONLY: &[Field] = &[
    ("max_completion_tokens", COUNT),
    ("max_tokens", COUNT),
    ("n_predict", COUNT),
    ("n", Whole(1, 16)),
    ("stream_options", Object(&STREAM_OPTIONS)),
    ("timings_per_token", Flag),
    ("return_progress", Flag),
    ("logprobs", Flag),
    ("top_logprobs", TOP),
    ("n_probs", TOP),
    ("post_sampling_probs", Flag),
    ("verbose", Flag),
    ("modalities", Texts),
];

pub const CHAT: Table = Table {
    fields: &[
        CONVERSATION,
        THINKING,
        TEMPLATE,
        CHAT_ONLY,
        MODEL,
        STREAM,
        SAMPLING,
        STOP,
        FORM,
        SCHEDULING,
    ],
    samples: true,
    unused: &[WITHOUT_EFFECT],
    required: &["messages"],
    example: HELLO,
};

/// The messages of a chat alone.
pub const PROMPT: Table = Table {
    fields: &[CONVERSATION, THINKING, TEMPLATE],
    required: &["messages"],
    example: r#"{"messages": [{"role": "user", "content": "Hello"}]}"#,
    ..EMPTY
};

pub const COMPLETIONS: Table = Table {
    fields: &[
        &[
            ("prompt", Of(&["string", "array", "object"])),
            ("max_tokens", COUNT),
            ("n_predict", COUNT),
            ("n", Whole(1, 16)),
            ("best_of", Whole(1, 20)),
            ("suffix", Refused),
            ("echo", Flag),
            ("logprobs", Whole(0, 20)),
            ("n_probs", TOP),
            ("post_sampling_probs", Flag),
            ("timings_per_token", Flag),
            ("return_progress", Flag),
            ("verbose", Flag),
            ("stream_options", Object(&Table { fields: &[&[("include_usage", Flag)]], ..EMPTY })),
        ],
        MODEL,
        STREAM,
        SAMPLING,
        STOP,
        FORM,
        SCHEDULING,
    ],
    samples: true,
    unused: &[WITHOUT_EFFECT],
    required: &["prompt"],
    example: r#"{"prompt": "Once upon a time", "max_tokens": 1}"#,
};

pub const NATIVE: Table = Table {
    fields: &[
        &[
            ("prompt", Of(&["string", "array", "object"])),
            ("n_predict", COUNT),
            ("max_tokens", COUNT),
            ("n_cmpl", Whole(1, 16)),
            ("n", Whole(1, 16)),
            ("n_probs", TOP),
            ("verbose", Flag),
            ("post_sampling_probs", Flag),
            ("return_progress", Flag),
            ("return_tokens", Flag),
            ("response_fields", Texts),
            ("timings_per_token", Flag),
        ],
        STREAM,
        SAMPLING,
        STOP,
        FORM,
        SCHEDULING,
    ],
    samples: true,
    unused: &[WITHOUT_EFFECT],
    required: &["prompt"],
    example: r#"{"prompt": "Once upon a time", "n_predict": 1}"#,
};

/// The fields of [`scheduling`](crate::server::api::embeddings::scheduling).
const TURN: &[Field] = &[("priority", Whole(i64::MIN, MAX)), ("lora", LIST)];

const TEXTS: Kind = Of(&["string", "array", "object"]);

pub const EMBEDDINGS: Table = Table {
    fields: &[
        &[("input", TEXTS), ("encoding_format", Text), ("dimensions", Whole(1, MAX))],
        MODEL,
        TURN,
    ],
    unused: &[WITHOUT_EFFECT],
    required: &["input"],
    example: r#"{"input": "Hello"}"#,
    ..EMPTY
};

pub const EMBEDDING: Table = Table {
    fields: &[
        &[
            ("content", TEXTS),
            ("input", TEXTS),
            ("embd_normalize", Whole(-1, embeddings::MAX_NORM)),
        ],
        TURN,
    ],
    unused: &[WITHOUT_EFFECT],
    example: r#"{"content": "Hello"}"#,
    ..EMPTY
};

pub const RERANK: Table = Table {
    fields: &[
        &[
            ("query", Text),
            ("documents", LIST),
            ("texts", LIST),
            ("top_n", Whole(1, MAX)),
            ("return_documents", Flag),
            ("return_text", Flag),
        ],
        MODEL,
        TURN,
    ],
    unused: &[WITHOUT_EFFECT],
    required: &["query"],
    example: r#"{"query": "Hello", "documents": ["Hi", "No"]}"#,
    ..EMPTY
};

pub const SLOT: Table = Table {
    fields: &[&[("filename", Text)]],
    example: r#"{"filename": "conversation.kv"}"#,
    ..EMPTY
};

pub const TOKENIZE: Table = Table {
    fields: &[&[
        ("content", TEXT_OR_LIST),
        ("add_special", Flag),
        ("parse_special", Flag),
        ("with_pieces", Flag),
    ]],
    required: &["content"],
    example: r#"{"content": "Hello"}"#,
    ..EMPTY
};

pub const DETOKENIZE: Table = Table {
    fields: &[&[("tokens", LIST)]],
    required: &["tokens"],
    example: r#"{"tokens": [1, 2]}"#,
    ..EMPTY
};

const REASONING: Table = Table {
    fields: &[&[("effort", Text), ("summary", Text), ("generate_summary", Text)]],
    ..EMPTY
};

const WRITTEN: Table = Table { fields: &[&[("format", OBJECT), ("verbosity", Text)]], ..EMPTY };

pub const RESPONSES: Table = Table {
    fields: &[
        &[
            ("input", TEXT_OR_LIST),
            ("instructions", Text),
            ("max_output_tokens", COUNT),
            ("tools", LIST),
            ("tool_choice", Of(&["string", "object"])),
            ("parallel_tool_calls", Flag),
            ("reasoning", Object(&REASONING)),
            ("text", Object(&WRITTEN)),
            ("include", Texts),
            ("top_logprobs", TOP),
            ("n_probs", TOP),
            ("post_sampling_probs", Flag),
            ("timings_per_token", Flag),
            ("return_progress", Flag),
            ("truncation", Text),
            ("max_tool_calls", Whole(0, MAX)),
            ("metadata", OBJECT),
            ("store", Flag),
            ("background", Flag),
            ("previous_response_id", Refused),
            ("conversation", Refused),
            ("prompt", Refused),
        ],
        THINKING,
        TEMPLATE,
        MODEL,
        STREAM,
        SAMPLING,
        STOP,
        SCHEDULING,
    ],
    samples: true,
    unused: &[WITHOUT_EFFECT, responses::IGNORED],
    required: &["input"],
    example: r#"{"input": "Hello", "max_output_tokens": 1}"#,
};

const GRADE: &[Field] = &[("budget_tokens", COUNT), ("type", Text)];

const MESSAGES_THINKING: Table =
    Table { fields: &[GRADE, &[("display", Text)]], required: &["type"], ..EMPTY };

const OUTPUT: Table = Table { fields: &[&[("effort", Text), ("format", OBJECT)]], ..EMPTY };

const MESSAGES_PROMPT: &[Field] =
    &[("messages", LIST), ("system", TEXT_OR_LIST), ("tools", LIST), ("tool_choice", OBJECT)];

pub const MESSAGES: Table = Table {
    fields: &[
        MESSAGES_PROMPT,
        &[
            ("max_tokens", COUNT),
            ("stop_sequences", Texts),
            ("output_format", OBJECT),
            ("thinking", Object(&MESSAGES_THINKING)),
            ("output_config", Object(&OUTPUT)),
        ],
        TEMPLATE,
        MODEL,
        STREAM,
        SAMPLING,
        SCHEDULING,
    ],
    samples: true,
    unused: &[WITHOUT_EFFECT, anthropic::UNUSED],
    required: &["messages"],
    example: HELLO,
};

pub const MESSAGES_COUNT: Table = Table {
    fields: &[
        MESSAGES_PROMPT,
        &[
            ("thinking", Object(&Table { fields: &[GRADE], required: &["type"], ..EMPTY })),
            ("output_config", Object(&EFFORT)),
        ],
        TEMPLATE,
        MODEL,
    ],
    required: &["messages"],
    example: r#"{"messages": [{"role": "user", "content": "Hello"}]}"#,
    ..EMPTY
};

const OLLAMA_OPTIONS: Table = Table {
    fields: &[&[("num_predict", COUNT)], SAMPLING, STOP],
    samples: true,
    unused: &[ollama::UNUSED_OPTIONS],
    ..EMPTY
};

const OLLAMA: &[Field] = &[
    ("model", Text),
    ("name", Text),
    ("options", Object(&OLLAMA_OPTIONS)),
    ("format", Of(&["string", "object", "boolean"])),
    ("think", Of(&["boolean", "string"])),
    ("keep_alive", Of(&["number", "string"])),
    ("logprobs", Flag),
    ("top_logprobs", TOP),
];

pub const OLLAMA_CHAT: Table = Table {
    fields: &[
        OLLAMA,
        &[
            ("messages", LIST),
            ("tools", LIST),
            ("tool_choice", Of(&["string", "object"])),
            ("parallel_tool_calls", Flag),
        ],
        STREAM,
        SCHEDULING,
    ],
    unused: &[ollama::UNUSED],
    example: concat!(
        r#"{"messages": [{"role": "user", "content": "Hello"}], "#,
        r#""options": {"num_predict": 1}}"#
    ),
    ..EMPTY
};

pub const OLLAMA_GENERATE: Table = Table {
    fields: &[
        OLLAMA,
        &[
            ("prompt", Text),
            ("system", Text),
            ("raw", Flag),
            ("suffix", Text),
            ("template", Text),
            ("context", LIST),
            ("images", LIST),
        ],
        STREAM,
        SCHEDULING,
    ],
    unused: &[ollama::UNUSED],
    example: r#"{"prompt": "Hello", "options": {"num_predict": 1}}"#,
    ..EMPTY
};

const OLLAMA_MODEL: &[Field] =
    &[("model", Text), ("name", Text), ("keep_alive", Of(&["number", "string"]))];

pub const OLLAMA_EMBED: Table = Table {
    fields: &[
        OLLAMA_MODEL,
        &[("input", Texts), ("truncate", Flag), ("dimensions", Whole(1, MAX))],
        TURN,
    ],
    unused: &[ollama::embed::UNUSED],
    example: r#"{"input": "Hello"}"#,
    ..EMPTY
};

pub const OLLAMA_EMBEDDINGS: Table = Table {
    fields: &[OLLAMA_MODEL, &[("prompt", Text)], TURN],
    unused: &[ollama::embed::UNUSED],
    example: r#"{"prompt": "Hello"}"#,
    ..EMPTY
};

pub const OLLAMA_SHOW: Table = Table {
    fields: &[&[("model", Text), ("name", Text), ("verbose", Flag)]],
    unused: &[ollama::models::UNUSED],
    example: "{}",
    ..EMPTY
};

pub const OLLAMA_DOWNLOAD: Table = Table {
    fields: &[&[("model", Text), ("name", Text), ("stream", Flag)]],
    unused: &[ollama::downloads::UNUSED],
    example: r#"{"model": "USER/REPO:Q4_K_M"}"#,
    ..EMPTY
};

pub const MODEL_NAME: Table = Table {
    fields: &[&[("model", Text)]],
    required: &["model"],
    example: r#"{"model": "demo"}"#,
    ..EMPTY
};
