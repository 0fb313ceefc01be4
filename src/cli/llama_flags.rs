//! The flags of llama.cpp's llama-cli, llama-completion, llama-bench, llama-perplexity,
//! llama-embedding and llama-server, so that a command line made for them runs here, or says by
//! name why it cannot.
//! A subcommand's own flags come first; these tables are for all others.

use super::llama_server_flags::{SERVER_HARMLESS, SERVER_REFUSED};

/// Subcommands that load a model, and take llama.cpp's flags.
pub const LOADERS: &[&str] =
    &["run", "serve", "embed", "bench", "perplexity", "imatrix", "logits", "record"];

/// Names of one flag; a subcommand has it under at least one of them.
pub const SYNONYMS: &[&str] = &[
    "-a --alias",
    "-b --batch-size",
    "-c --ctx-size",
    "-cmoe --cpu-moe",
    "-cnv --conversation",
    "-ctk --cache-type-k",
    "-ctv --cache-type-v",
    "-d --n-depth",
    "-dev --device",
    "-e --escape",
    "-f -bf --file --binary-file",
    "-h --help --usage",
    "-hff --hf-file",
    "-hft --hf-token",
    "-i -if --interactive --interactive-first",
    "-j --json-schema",
    "-jf --json-schema-file",
    "-kvu --kv-unified",
    "-l --logit-bias",
    "-n --predict --n-predict",
    "-n --n-gen",
    "-ncmoe --n-cpu-moe",
    "-ngl --gpu-layers --n-gpu-layers",
    "-no-cnv --no-conversation",
    "-no-kvu --no-kv-unified",
    "-np --parallel",
    "-ot --override-tensor",
    "-p --n-prompt",
    "-p --prompt",
    "-pg --prompt-gen",
    "-r --repetitions",
    "-r --reverse-prompt",
    "-rea --reasoning --think",
    "-s --seed",
    "-st --single-turn",
    "-sys --system-prompt",
    "-sysf --system-prompt-file",
    "-t --threads",
    "-to --timeout",
    "-ub --ubatch-size",
    "-v --verbose --log-verbose",
    "--chat-template --chat-template-file",
    "--sampler-seq --sampling-seq",
    "--temp --temperature",
    "--top-nsigma --top-n-sigma",
    "--typical --typical-p",
];

/// A flag and its value, and how it is spelled here; nothing if it is the default.
pub const SPELLINGS: &[(&str, &[&str])] = &[
    ("-lm none", &["--no-mmap"]),
    ("--load-mode none", &["--no-mmap"]),
    ("-mmp 0", &["--no-mmap"]),
    ("-mmp 1", &["--mmap"]),
    ("--mmap 0", &["--no-mmap"]),
    ("--mmap 1", &["--mmap"]),
];

/// Flags that change nothing here: why, and each flag with its value. `[a|b]` may be left out, and
/// `{a|b}` is the only value that changes nothing.
pub const HARMLESS: &[(&str, &[&str])] = &[
    (
        "attention is always computed in blocks, as flash attention does",
        &["-fa --flash-attn [on|off|auto]"],
    ),
    ("chat templates are always rendered with Jinja", &["--jinja", "--no-jinja"]),
    (
        "an answer is shown as the model writes it",
        &["--skip-chat-parsing", "--no-skip-chat-parsing"],
    ),
    ("a model is ready when it is loaded", &["--warmup", "--no-warmup"]),
    (
        "--ram and --io say how weights are read and what stays in memory",
        &[
            "--mlock",
            "-dio --direct-io [0|1]",
            "-ndio --no-direct-io",
            "-lm --load-mode {auto|mmap|mlock|mmap+mlock|dio}",
            "-lzm --lazy-mode VALUE",
        ],
    ),
    ("colours follow the terminal", &["-co --color [on|off|auto]", "--log-colors [on|off|auto]"]),
    (
        "-v shows more, -q less",
        &[
            "-lv --verbosity --log-verbosity VALUE",
            "--log-disable",
            "--log-prefix",
            "--no-log-prefix",
            "--no-log-timestamps",
            "--no-log-jsonl",
            "--perf",
            "--no-perf",
            "--show-timings",
            "--no-show-timings",
            "--simple-io",
            "--progress",
        ],
    ),
    ("a chat takes a message of several lines between \"\"\"", &["-mli --multiline-input"]),
    (
        "a text ends where the context is full",
        &["--no-context-shift", "--context-shift", "--keep VALUE"],
    ),
    ("prompts and decode share the threads of -t", &["-tb --threads-batch VALUE"]),
    (
        "the system schedules threads: see nice, taskset and numactl",
        &[
            "--cpu-strict VALUE",
            "--cpu-strict-batch VALUE",
            "--poll VALUE",
            "--poll-batch VALUE",
            "--prio VALUE",
            "--prio-batch VALUE",
            "--numa [distribute|isolate|numactl|disabled]",
        ],
    ),
    (
        "weights, cache and work are placed so that they fit: see --device, -ngl, -cmoe and -ot",
        &[
            "-bs --backend-sampling",
            "-fit --fit [on|off]",
            "-fitc --fit-ctx VALUE",
            "-fitt --fit-target VALUE",
            "-kvo --kv-offload",
            "-mg --main-gpu {0}",
            "-ncffn --n-cpu-ffn VALUE",
            "-nkvo --no-kv-offload [0|1]",
            "-nopo --no-op-offload [0|1]",
            "-nr --no-repack",
            "--no-host [0|1]",
            "--op-offload",
            "--repack [0|1]",
            "-sm --split-mode VALUE",
            "-ts --tensor-split VALUE",
        ],
    ),
    (
        "one context serves one conversation",
        &[
            "-cram --cache-ram VALUE",
            "-ctxcp --ctx-checkpoints --swa-checkpoints VALUE",
            "-dt --defrag-thold VALUE",
            "-kvu --kv-unified",
            "-no-kvu --no-kv-unified",
            "-np --parallel VALUE",
            "--swa-full",
        ],
    ),
    (
        "the chat template says what stands around a message",
        &["--in-prefix VALUE", "--in-suffix VALUE", "--in-prefix-bos"],
    ),
    ("nothing is sampled", &["-s --seed VALUE"]),
    (
        "RoPE is as the file says",
        &[
            "--rope-scaling {none}",
            "--rope-freq-base {0}",
            "--rope-freq-scale {0}",
            "--rope-scale {0}",
            "--yarn-orig-ctx {0}",
            "--yarn-ext-factor {-1}",
            "--yarn-attn-factor {-1}",
            "--yarn-beta-slow {-1}",
            "--yarn-beta-fast {-1}",
        ],
    ),
    ("nothing is drafted by another model", &["--spec-type {none}"]),
    ("each token sees what the model lets it see", &["--attention {causal}"]),
    ("only text is read", &["--no-mmproj", "--no-mmproj-auto", "--no-mmproj-offload", "-embd {0}"]),
];

/// Flags that are refused: what to do instead, and the names; `*` stands for anything.
pub const REFUSED: &[(&str, &[&str])] = &[
    (
        "moeba drafts from the text itself, without a draft model: see --spec",
        &[
            "-md -td -tbd -Cd -Crd -Cbd -Crbd -ngld -devd -ctkd -ctvd -otd -cmoed -ncmoed",
            "-hfd -hfrd -lcs -lcd --lookup-cache-* --spec-* --no-spec-* --draft* *-draft",
        ],
    ),
    (
        "moeba applies adapters from the start: POST /lora-adapters sets their scales to 0",
        &["--lora-init-without-apply"],
    ),
    ("moeba has no control vectors", &["--control-vector*"]),
    (
        "moeba reads text only, no images, sound or video",
        &[
            "-mm -mmu -mmdev --mmproj* --image* --audio* --video* --mtmd-* --media-path",
            "--vision-*",
        ],
    ),
    (
        "only the answers of `moeba run` have a form",
        &["--grammar --grammar-file -j --json-schema -jf --json-schema-file"],
    ),
    (
        "moeba takes RoPE from the file; change it there, as in --override-kv \
         ARCH.rope.scaling.type=str:yarn,ARCH.rope.scaling.factor=float:4,\
         ARCH.rope.scaling.original_context_length=int:32768 or ARCH.rope.freq_base=float:1e6, \
         where ARCH is the model's architecture",
        &["--rope-* --yarn-*"],
    ),
    ("moeba has no grouped attention: raise -c", &["-gan -gaw --grp-attn-*"]),
    ("moeba does not save the state of a prompt", &["--prompt-cache*"]),
    ("`moeba list` shows downloaded models", &["-cl --cache-list"]),
    ("`moeba doctor` shows the devices", &["--list-devices"]),
    ("`moeba completions SHELL` prints a completion script", &["--completion-bash"]),
    ("`moeba inspect MODEL --check` checks the weights", &["--check-tensors"]),
    (
        "`moeba run --verbose-prompt` shows the prompt's tokens, `moeba render` its text",
        &["--verbose-prompt -ptc --print-token-count"],
    ),
    (
        "give the model's path, or -hf USER/REPO for one on Hugging Face",
        &["-mu --model-url -dr --docker-repo --fim-* --embd-gemma-default"],
    ),
    ("use -hf ggml-org/gpt-oss-20b-GGUF", &["--gpt-oss-20b-default"]),
    ("use -hf ggml-org/gpt-oss-120b-GGUF", &["--gpt-oss-120b-default"]),
    (
        "use taskset, as in `taskset -c 0-7 moeba run MODEL`",
        &["-C -Cr -Cb -Crb --cpu-mask* --cpu-range*"],
    ),
    ("use --device cuda:N, where N is the GPU's number", &["-mg --main-gpu"]),
    ("moeba leaves control tokens out of answers", &["-sp --special"]),
    ("the result goes to standard output: use > FILE", &["-o --output --output-file"]),
    ("the result goes to standard output only", &["-oe --output-err"]),
    ("tests follow each other without a delay", &["--delay"]),
    ("use --log-format json", &["--log-jsonl"]),
    ("`moeba serve --log-requests full` logs requests with their bodies", &["--log-prompts-dir"]),
    (
        "it is a flag of `moeba perplexity`",
        &["--hellaswag* --winogrande* --multiple-choice* --kl-divergence* --save-all-logits"],
    ),
    ("windows follow each other, and --stats has the figures", &["--ppl-*"]),
    ("each token sees what the model lets it see", &["--attention"]),
    ("it is a flag of `moeba embed`", &["--embd-* --cls-separator"]),
    ("only prompts and decode are measured", &["-embd"]),
    ("it is a flag of `moeba embed` and `moeba serve`", &["--pooling"]),
    (
        "other machines that run `moeba serve` compute experts for this one: see --peers",
        &["-rpc --rpc"],
    ),
    (
        "it is a flag of `moeba serve`",
        &[
            "--host --port --reuse-port --path --cors-* --no-cors-* --api-* --ui* --no-ui*",
            "--webui* --no-webui* --tools* --mcp-* -ag --agent -no-ag --no-agent --ssl-*",
            "-to --timeout",
            "--sse-* --threads-http --cache-prompt --no-cache-prompt --cache-reuse --metrics",
            "--props --slots --no-slots --slot-* -sps --models-* --no-models-* -a --alias --tags",
            "--prefill-assistant --no-prefill-assistant --sleep-idle-seconds --server-base -cms",
            "--embedding --embeddings --rerank --reranking",
            "--checkpoint-min-step --cache-idle-slots --no-cache-idle-slots -cb --cont-batching",
            "-nocb --no-cont-batching --kv-unified-per-slot --spm-infill",
        ],
    ),
];

/// The value of a harmless flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    None,
    /// Any next argument.
    One,
    /// The next argument if it is one of these.
    Optional(&'a str),
    /// One of these; with any other value the flag is not harmless.
    Only(&'a str),
}

impl<'a> Value<'a> {
    /// The names and the value of a flag as the table writes it.
    fn split(flag: &'a str) -> (&'a str, Value<'a>) {
        let (names, last) = flag.rsplit_once(' ').unwrap_or(("", flag));
        let inner = |open, close| last.strip_prefix(open)?.strip_suffix(close);
        match (inner('[', ']'), inner('{', '}')) {
            (Some(choices), _) => (names, Value::Optional(choices)),
            (_, Some(choices)) => (names, Value::Only(choices)),
            _ if last == "VALUE" => (names, Value::One),
            _ => (flag, Value::None),
        }
    }
}

/// Whether `text` is one of `on|off|auto`, or a list of such; on and off have llama.cpp's other
/// names, too.
pub fn is_choice(choices: &str, text: &str) -> bool {
    let has = |name: &str| choices.split('|').any(|choice| choice == name);
    let one = |text: &str| {
        let same = match text {
            "1" | "true" | "enabled" => "on",
            "0" | "false" | "disabled" => "off",
            "-1" => "auto",
            other => other,
        };
        has(text) || has(same)
    };
    text.split(',').all(one)
}

/// The other names of a flag.
pub fn synonyms(name: &str) -> impl Iterator<Item = &'static str> {
    let rows = SYNONYMS.iter().filter(move |row| row.split(' ').any(|one| one == name));
    rows.flat_map(|row| row.split(' '))
}

/// The spelling of a flag with this value here.
pub fn spelling(name: &str, value: &str) -> Option<&'static [&'static str]> {
    let spelled = |flag: &str| flag.split_once(' ') == Some((name, value));
    SPELLINGS.iter().find(|(flag, _)| spelled(flag)).map(|(_, here)| *here)
}

/// The value of a harmless flag, and why it changes nothing for a subcommand.
pub fn harmless(command: &str, name: &str) -> Option<(Value<'static>, &'static str)> {
    let of_server: &[_] = if command == "serve" { SERVER_HARMLESS } else { &[] };
    of_server.iter().chain(HARMLESS).find_map(|(why, flags)| {
        let mut flags = flags.iter().map(|flag| Value::split(flag));
        let (_, value) = flags.find(|(names, _)| names.split(' ').any(|one| one == name))?;
        Some((value, *why))
    })
}

/// The alternative to a flag that a subcommand refuses.
pub fn refused(command: &str, name: &str) -> Option<&'static str> {
    let matches = |pattern: &str| match (pattern.strip_suffix('*'), pattern.strip_prefix('*')) {
        (Some(start), _) => name.starts_with(start),
        (_, Some(end)) => name.ends_with(end),
        _ => name == pattern,
    };
    let listed = |flags: &[&str]| flags.iter().flat_map(|row| row.split(' ')).any(matches);
    let of_server: &[_] = if command == "serve" { SERVER_REFUSED } else { &[] };
    let mut rows = of_server.iter().chain(REFUSED);
    rows.find(|(_, flags)| listed(flags)).map(|(cure, _)| *cure)
}

/// The names of all harmless flags, for suggestions.
pub fn harmless_names() -> impl Iterator<Item = &'static str> {
    let flags = HARMLESS.iter().flat_map(|(_, flags)| flags.iter());
    flags.flat_map(|flag| Value::split(flag).0.split(' '))
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::super::argv::{Line, rewrite};
    use super::*;
    use clap::{Command, CommandFactory};
    use std::collections::BTreeSet;
    use std::ffi::OsString;

    /// Every flag that the programs' sources name, and those of releases of the last year.
    const ALL: &str = "\
         -h --help --usage --version -cl --cache-list --completion-bash --server-base \
         --verbose-prompt --display-prompt --no-display-prompt -co --color -t --threads -tb \
         --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb \
         --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch \
         -lcs --lookup-cache-static -lcd --lookup-cache-dynamic -c --ctx-size \
         --kv-unified-per-slot -n --predict --n-predict -b --batch-size -ub --ubatch-size --keep \
         --swa-full -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -cram \
         --cache-ram -kvu --kv-unified -no-kvu --no-kv-unified --cache-idle-slots \
         --no-cache-idle-slots --context-shift --no-context-shift --chunks -fa --flash-attn -p \
         --prompt -sys --system-prompt --perf --no-perf --show-timings --no-show-timings -f \
         --file -sysf --system-prompt-file -bf --binary-file -e --escape --no-escape -ptc \
         --print-token-count --prompt-cache --prompt-cache-all --prompt-cache-ro -r \
         --reverse-prompt -sp --special -cnv --conversation -no-cnv --no-conversation -st \
         --single-turn -i --interactive -if --interactive-first -mli --multiline-input \
         --in-prefix-bos --in-prefix --in-suffix --warmup --no-warmup --spm-infill --samplers -s \
         --seed --sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k --top-p \
         --min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical \
         --typical-p --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty \
         --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n \
         --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range \
         --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar \
         --grammar-file -j --json-schema -jf --json-schema-file -bs --backend-sampling --pooling \
         --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx \
         --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -gan --grp-attn-n \
         -gaw --grp-attn-w -kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack \
         --no-host -ctk --cache-type-k -ctv --cache-type-v --hellaswag --hellaswag-tasks \
         --winogrande --winogrande-tasks --multiple-choice --multiple-choice-tasks \
         --kl-divergence --save-all-logits --kl-divergence-base --ppl-stride --ppl-output-type \
         -dt --defrag-thold -np --parallel -cb --cont-batching -nocb --no-cont-batching -mm \
         --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload \
         --no-mmproj-offload -mmdev --mmproj-device --image --audio --video --image-min-tokens \
         --image-max-tokens --mtmd-batch-max-tokens --video-fps --video-timestamp-interval \
         --video-ffmpeg-dir --rpc -lm --load-mode -lzm --lazy-mode --numa -dev --device \
         --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn \
         --n-cpu-ffn -ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg \
         --main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx --check-tensors --override-kv \
         --op-offload --no-op-offload --lora --lora-scaled --control-vector \
         --control-vector-scaled --control-vector-layer-range -a --alias --tags -m --model -mu \
         --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token -o \
         --output --output-file --embd-normalize --embd-output-format --embd-separator \
         --cls-separator --attention --host --port --reuse-port --path --cors-origins \
         --cors-methods --cors-headers --cors-credentials --no-cors-credentials --api-prefix \
         --ui-config --webui-config --ui-config-file --webui-config-file --ui-mcp-proxy \
         --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime \
         --mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui --webui \
         --no-ui --no-webui --embedding --embeddings --rerank --reranking --api-key \
         --api-key-file --ssl-key-file --ssl-cert-file --chat-template-kwargs -to --timeout \
         --sse-ping-interval --threads-http --cache-prompt --no-cache-prompt --cache-reuse \
         --metrics --props --slots --no-slots --slot-save-path --media-path --models-dir \
         --models-preset --models-max --models-autoload --no-models-autoload --jinja --no-jinja \
         --reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget \
         --reasoning-budget-message --reasoning-preserve --no-reasoning-preserve --chat-template \
         --chat-template-file --skip-chat-parsing --no-skip-chat-parsing --prefill-assistant \
         --no-prefill-assistant -sps --slot-prompt-similarity --lora-init-without-apply \
         --sleep-idle-seconds --simple-io --log-disable --log-file --log-jsonl --no-log-jsonl \
         --log-prompts-dir --log-colors -v --verbose --log-verbose --offline -lv --verbosity \
         --log-verbosity --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps \
         --spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads -td --threads-draft \
         --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd \
         --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict \
         --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft \
         --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-strict-batch \
         --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft \
         --spec-draft-poll-batch --poll-batch-draft --spec-draft-type-k -ctkd \
         --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft \
         --spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-cpu-moe -cmoed \
         --cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft \
         --spec-draft-n-max --spec-draft-n-min --spec-synth-len --spec-synth-rates \
         --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min \
         --spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-device -devd \
         --device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft \
         --spec-draft-model -md --model-draft --spec-type --spec-ngram-mod-n-min \
         --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n \
         --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n \
         --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n \
         --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft --draft-n --draft-max \
         --draft-min --draft-n-min --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits \
         --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default \
         --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default \
         --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default \
         --spec-default --n-prompt --n-gen -pg -d --n-depth -rpc -embd -nopo --repetitions \
         --delay -oe --output-err --progress --mlock --mmap --no-mmap -mmp -dio --direct-io -ndio \
         --no-direct-io";

    /// Command lines with all flags that moeba has, under each name.
    const DONE: &[&str] = &[
        "moeba run -m m -p x -t 2 --threads 2 -c 64 --ctx-size 64 -n 4 --predict 4 --n-predict 4 \
         --prompt x -sys x --system-prompt x -f x --file x -e --escape --no-escape \
         -r x --reverse-prompt x -cnv --conversation -st --single-turn --display-prompt \
         --no-display-prompt -i --interactive -if --interactive-first -s 1 --seed 1 --ignore-eos \
         --temp 0.5 --temperature 0.5 --top-k 4 --top-p 0.5 --min-p 0.1 --repeat-last-n 4 \
         --repeat-penalty 1.1 --presence-penalty 0.1 --frequency-penalty 0.1",
        "moeba run -hf a/b -hff x --hf-file x -hft x --hf-token x --chat-template x \
         --chat-template-file x --override-kv a=int:1 --offline --log-file x --log-timestamps -v \
         --verbose --log-verbose -sysf x --system-prompt-file x",
        "moeba run m -p x --chat-template-kwargs {\"a\":1} --reasoning-format none -rea on \
         --reasoning off --think low --reasoning-effort high --reasoning-budget 5 \
         --reasoning-budget-message -x --reasoning-preserve --no-reasoning-preserve",
        "moeba run m -p x --grammar x --grammar-file x -j {} --json-schema {} -jf x \
         --json-schema-file x",
        "moeba run --model m -no-cnv --no-conversation",
        "moeba serve m --host 0.0.0.0 --port 0 -np 2 --parallel auto -a x --alias y --api-key k \
         --api-key-file f --cors-origins http://a --metrics --slots --no-slots --ui --webui \
         --no-ui --no-webui -to 5 --timeout 5 --sse-ping-interval 5 -c 64 --ctx-size 64 \
         --temp 0.5 -kvu --kv-unified -no-kvu --no-kv-unified",
        "moeba run m --samplers top_k;temperature --sampler-seq kt --sampling-seq kt \
         --top-nsigma 1 --top-n-sigma -1 --xtc-probability 0.1 --xtc-threshold 0.1 --typical 0.9 \
         --typical-p 0.9 --dry-multiplier 0.8 --dry-base 1.75 --dry-allowed-length 2 \
         --dry-penalty-last-n -1 --dry-sequence-breaker x --dynatemp-range 0.1 --dynatemp-exp 1 \
         --mirostat 2 --mirostat-lr 0.1 --mirostat-ent 5 --adaptive-target 0.5 \
         --adaptive-decay 0.9 -l 1+1 --logit-bias 1-inf",
        "moeba run -hfr a/b -h",
        "moeba run --hf-repo a/b --help",
        "moeba run m --usage",
        "moeba perplexity m -f x --version",
        "moeba bench m -p 8 --n-prompt 8 -n 4 --n-gen 4 -pg 8,4 -d 4 --n-depth 4 -r 2 \
         --repetitions 2 -o md --output md --no-warmup -t 1,2 --threads 1",
        "moeba embed m -p x -e --no-escape --pooling mean --embd-normalize 2 -c 64 -t 2 \
         --embd-output-format json --embd-separator x --cls-separator y",
        "moeba embed m -f x --file x",
        "moeba serve m --pooling mean",
        "moeba perplexity m -bf x --binary-file x --hellaswag --hellaswag-tasks 2",
        "moeba perplexity m --winogrande --winogrande-tasks 2 -f x --save-all-logits y",
        "moeba perplexity m --multiple-choice --multiple-choice-tasks 2 -f x",
        "moeba perplexity m --kl-divergence --kl-divergence-base y",
        "moeba imatrix m -f x -o y --output-file y --in-file z --process-output --no-ppl",
        "moeba perplexity m -f x --file x -c 64 --ctx-size 64 --chunks 2 -t 2 --threads 2",
    ];

    /// The flags of every subcommand that loads a model.
    const ENGINE: &str = "-b 8 --batch-size 8 -ub 8 --ubatch-size 8 -ctk f16 --cache-type-k f16 \
         -ctv f16 --cache-type-v f16 -dev cpu --device cpu -ot a=CPU --override-tensor a=CPU \
         -cmoe --cpu-moe -ncmoe 1 --n-cpu-moe 1 -ngl 1 --gpu-layers 1 --n-gpu-layers 1 --mmap \
         --no-mmap -lm none --load-mode none -mmp 0 -t 1 --lora a --lora-scaled a:1";

    fn root() -> Command {
        let mut root = Cli::command().args_override_self(true);
        root = root.mut_subcommands(|command| command.args_override_self(true));
        root.build();
        root
    }

    fn line(root: &Command, text: &str) -> Result<Line, String> {
        rewrite(root, text.split_whitespace().map(OsString::from))
    }

    fn flags(text: &str) -> impl Iterator<Item = &str> {
        text.split_whitespace().filter(|word| word.starts_with('-'))
    }

    #[test]
    fn no_flag_is_missing() {
        let done = DONE.iter().copied().chain([ENGINE]);
        let done: BTreeSet<&str> = done.flat_map(flags).collect();
        for name in flags(ALL) {
            for command in ["run", "serve"] {
                let here = done.contains(name) || harmless(command, name).is_some();
                assert!(here || refused(command, name).is_some(), "{command} {name}");
            }
        }
    }

    #[test]
    fn what_is_done_parses() {
        let mut root = root();
        let loaders = [
            "run m",
            "serve m",
            "embed m",
            "bench m",
            "perplexity m -f x",
            "logits m --tokens 1 -o x",
        ];
        let engine = loaders.map(|command| format!("moeba {command} {ENGINE}"));
        for text in DONE.iter().copied().chain(engine.iter().map(String::as_str)) {
            let line = line(&root, text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert!(line.notes.is_empty(), "{text}: {:?}", line.notes);
            let parsed = root.try_get_matches_from_mut(line.argv);
            let wrong = parsed.err().filter(clap::Error::use_stderr);
            assert!(wrong.is_none(), "{text}: {}", wrong.unwrap());
        }
    }

    #[test]
    fn what_is_harmless_leaves_a_note_and_nothing_else() {
        let root = root();
        let rows = HARMLESS.iter().flat_map(|(why, flags)| flags.iter().map(move |f| (why, f)));
        for (why, row) in rows {
            let (names, value) = Value::split(row);
            let values: Vec<&str> = match value {
                Value::None => vec![""],
                Value::One => vec!["1"],
                Value::Optional(choices) => choices.split('|').chain([""]).collect(),
                Value::Only(choices) => choices.split('|').collect(),
            };
            for name in names.split(' ') {
                let own = super::super::argv::own(root.find_subcommand("run").unwrap(), name);
                if own.is_some() {
                    continue;
                }
                for value in &values {
                    let line = line(&root, &format!("moeba run m {name} {value} -n 4")).unwrap();
                    assert_eq!(line.argv, ["moeba", "run", "m", "--predict=4"], "{name} {value}");
                    assert_eq!(line.notes, [format!("{name} changes nothing: {why}")]);
                }
            }
        }
    }

    #[test]
    fn what_is_refused_says_what_to_do() {
        let root = root();
        let listed =
            |name: &&str| refused("run", name).is_some() && harmless("run", name).is_none();
        let mut cures = BTreeSet::new();
        for name in flags(ALL).filter(listed) {
            for command in ["run m", "bench m", "perplexity m -f x"] {
                let own = command.split(' ').next().and_then(|name| root.find_subcommand(name));
                if super::super::argv::find(own.unwrap(), name).is_some() {
                    continue;
                }
                let why = line(&root, &format!("moeba {command} {name} 1")).unwrap_err();
                let cure = refused("run", name).unwrap();
                assert_eq!(why, format!("{name}: {cure}"));
                cures.insert(cure);
            }
        }
        // Each row is there for a flag; some are the other half of a harmless one.
        let rows: BTreeSet<&str> = REFUSED.iter().map(|(cure, _)| *cure).collect();
        cures.extend(
            ["-mg", "--rope-scale", "-embd", "--attention"]
                .map(|name| refused("run", name).unwrap()),
        );
        assert_eq!(cures, rows);
    }

    #[test]
    fn values_have_several_names() {
        for text in ["on", "off", "auto", "1", "0", "true", "disabled", "-1", "0,1"] {
            assert!(is_choice("on|off|auto", text), "{text}");
        }
        for text in ["", "2", "onn", "on,", "hello"] {
            assert!(!is_choice("on|off|auto", text), "{text}");
        }
        assert!(is_choice("0", "0") && !is_choice("0", "1"));
    }
}
