//! Flags of llama-server that `moeba serve` does not have: those that change nothing, and those
//! that are refused. The tables are written as those of `llama_flags`, and come before them.

/// Flags that change nothing.
pub const SERVER_HARMLESS: &[(&str, &[&str])] = &[
    (
        "texts are always computed together, as they come",
        &["-cb --cont-batching", "-nocb --no-cont-batching"],
    ),
    (
        "sessions keep their texts for the next requests",
        &[
            "-cms --checkpoint-min-step VALUE",
            "-cram --cache-ram VALUE",
            "-ctxcp --ctx-checkpoints --swa-checkpoints VALUE",
            "-sps --slot-prompt-similarity VALUE",
            "--cache-idle-slots",
            "--cache-prompt",
            "--cache-reuse VALUE",
            "--kv-unified-per-slot VALUE",
            "--no-cache-idle-slots",
            "--no-cache-prompt",
        ],
    ),
    ("GET /props is always there, and changes nothing", &["--props"]),
    ("two threads serve HTTP", &["--reuse-port", "--threads-http VALUE"]),
    ("models are loaded when a request names them", &["--models-autoload"]),
    ("models have no tags", &["--tags VALUE"]),
    (
        "embeddings are always served, and so are the scores of models that rank",
        &["--embedding --embeddings", "--rerank --reranking"],
    ),
    ("requests have embd_normalize", &["--embd-normalize {2}"]),
    ("an answer goes on with an assistant's message at the end", &["--prefill-assistant"]),
    ("answers do not depend on what runs beside them", &["--exact"]),
    ("moeba reads tool calls by the chat template", &["--tool-format {auto}"]),
];

/// Flags that are refused, and what to do instead.
pub const SERVER_REFUSED: &[(&str, &[&str])] = &[
    ("moeba speaks plain HTTP: put a reverse proxy in front", &["--ssl-*"]),
    (
        "the server runs no tools: its clients do",
        &["--tools* --mcp-* -ag --agent -no-ag --no-agent"],
    ),
    (
        "the page is in the program",
        &["--path --ui-* --webui-* --no-ui-* --no-webui-* --server-base"],
    ),
    ("flags are for all models: start a server for each set of them", &["--models-preset"]),
    ("models are always loaded when a request names them", &["--no-models-autoload"]),
    (
        "--cors-origins says whose pages may use the server",
        &["--cors-methods --cors-headers --cors-credentials --no-cors-credentials"],
    ),
    (
        "an answer always goes on with an assistant's message at the end",
        &["--no-prefill-assistant"],
    ),
    ("moeba has no infilling", &["--spm-infill"]),
    ("requests say it: see embd_normalize", &["--embd-normalize"]),
    ("keys have weights instead: see --api-key-file", &["--allow-priority"]),
    (
        "requests bring their own text: it is a flag of `moeba run`",
        &[
            "-p --prompt -f --file -sys --system-prompt -sysf --system-prompt-file -e --escape",
            "--no-escape -r --reverse-prompt -cnv --conversation -no-cnv --no-conversation -st",
            "--single-turn -i --interactive -if --interactive-first --display-prompt",
            "--no-display-prompt --ignore-eos",
        ],
    ),
];
