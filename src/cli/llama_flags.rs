//! The flags of llama.cpp's programs that no subcommand has: `llama_flags.toml` says what becomes
//! of each.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

/// Subcommands that load a model, and take llama.cpp's flags.
pub const LOADERS: &[&str] =
    &["run", "serve", "embed", "bench", "perplexity", "imatrix", "logits", "record"];

/// The tables of `llama_flags.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    synonyms: Vec<String>,
    spellings: BTreeMap<String, String>,
    harmless: Vec<Row>,
    refused: Vec<Row>,
    serve: ServerTables,
}

/// The rows that `moeba serve` has before the others.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServerTables {
    harmless: Vec<Row>,
    refused: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    why: String,
    flags: Vec<String>,
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    toml::from_str(include_str!("llama_flags.toml")).expect("the program's own tables")
});

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
    let rows = TABLES.synonyms.iter().filter(move |row| row.split(' ').any(|one| one == name));
    rows.flat_map(|row| row.split(' '))
}

/// The flag here that a flag with this value is, and its value.
pub fn spelling(name: &str, value: &str) -> Option<(&'static str, Option<String>)> {
    let row = |value: &str| TABLES.spellings.get(&format!("{name} {value}")).map(String::as_str);
    let is_count = value.bytes().all(|b| b.is_ascii_digit()) && !value.starts_with('0');
    let spelled = row(value).or_else(|| row("N").filter(|_| is_count))?;
    Some(match spelled.split_once(' ') {
        Some((flag, pattern)) => (flag, Some(pattern.replace('N', value))),
        None => (spelled, None),
    })
}

/// The value of a harmless flag, and why it changes nothing for a subcommand.
pub fn harmless(command: &str, name: &str) -> Option<(Value<'static>, &'static str)> {
    let of_server = TABLES.serve.harmless.iter().filter(|_| command == "serve");
    of_server.chain(&TABLES.harmless).find_map(|Row { why, flags }| {
        let mut flags = flags.iter().map(|flag| Value::split(flag));
        let (_, value) = flags.find(|(names, _)| names.split(' ').any(|one| one == name))?;
        Some((value, why.as_str()))
    })
}

/// The alternative to a flag that a subcommand refuses.
pub fn refused(command: &str, name: &str) -> Option<&'static str> {
    let matches = |pattern: &str| match (pattern.strip_suffix('*'), pattern.strip_prefix('*')) {
        (Some(start), _) => name.starts_with(start),
        (_, Some(end)) => name.ends_with(end),
        _ => name == pattern,
    };
    let of_server = TABLES.serve.refused.iter().filter(|_| command == "serve");
    let mut rows = of_server.chain(&TABLES.refused);
    let row = rows.find(|row| row.flags.iter().flat_map(|flags| flags.split(' ')).any(matches))?;
    Some(&row.why)
}

/// Every name of a flag that has several or is harmless, for suggestions.
pub fn names() -> impl Iterator<Item = &'static str> {
    let harmless = TABLES.harmless.iter().flat_map(|row| &row.flags);
    let harmless = harmless.map(|flag| Value::split(flag).0);
    let rows = TABLES.synonyms.iter().map(String::as_str).chain(harmless);
    rows.flat_map(|row| row.split(' '))
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
    const ALL: &str = include_str!("../../tests/fixtures/llama.cpp-flags.txt");

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
        "moeba tokenize m -p x --ids --no-bos --no-parse-special",
        "moeba diffuse m -p x --diffusion-steps 8 --diffusion-block-length 8 \
         --diffusion-cfg-scale 1",
        "moeba diffuse m -p x --diffusion-eps 0.1 --diffusion-algorithm 1",
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
        let rows = TABLES.harmless.iter();
        let rows = rows.flat_map(|row| row.flags.iter().map(|flag| (&row.why, flag)));
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
        let rows: BTreeSet<&str> = TABLES.refused.iter().map(|row| row.why.as_str()).collect();
        cures.extend(
            ["-mg", "--rope-scale", "-embd", "--attention", "--moe-cache-mib"]
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
