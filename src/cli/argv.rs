//! What users of llama.cpp type, turned into what clap can parse: multi-letter short flags become
//! their long form (clap would read `-ub 8` as `-u -b 8`), and `-m FILE` and `-hf REPO` become the
//! positional MODEL, so that `tokenize -m FILE TEXT` finds both where it expects them.

use super::model::HUB_PREFIX;
use std::ffi::{OsStr, OsString};

/// Multi-letter shorts, without the dash, and their long flags. A flag that the subcommand does
/// not have is rewritten all the same: clap then names it in full in its error.
const SHORTS: &[(&str, &str)] = &[
    ("cmoe", "--cpu-moe"),
    ("cnv", "--conversation"),
    ("ctk", "--cache-type-k"),
    ("ctv", "--cache-type-v"),
    ("dev", "--device"),
    ("hf", "--hf-repo"),
    ("hff", "--hf-file"),
    ("hfr", "--hf-repo"),
    ("hft", "--hf-token"),
    ("ncmoe", "--n-cpu-moe"),
    ("ngl", "--gpu-layers"),
    ("no-cnv", "--no-conversation"),
    ("ot", "--override-tensor"),
    ("pg", "--prompt-gen"),
    ("st", "--single-turn"),
    ("sys", "--system-prompt"),
    ("sysf", "--system-prompt-file"),
    ("tb", "--threads-batch"),
    ("ub", "--ubatch-size"),
];

/// Flags whose next argument is free text, taken as it is even if it looks like a flag.
const TEXT_FLAGS: &[&str] = &[
    "-p",
    "--prompt",
    "-r",
    "--reverse-prompt",
    "--stop",
    "-sys",
    "--system-prompt",
    "-o",
    "--output",
];

/// Subcommands that take MODEL as their first positional argument.
const WITH_MODEL: &[&str] = &[
    "run",
    "inspect",
    "tokenize",
    "detokenize",
    "render",
    "logits",
    "perplexity",
    "bench",
    "record",
];

/// Subcommands that have subcommands of their own.
const GROUPS: &[&str] = &["trace"];

/// The program's arguments (its name first) as clap shall see them.
pub fn rewrite(argv: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut argv = argv.into_iter();
    let mut out: Vec<OsString> = argv.next().into_iter().collect();
    // Where MODEL belongs: just behind a subcommand that takes one.
    let mut model_at = None;
    let mut command_seen = false;
    while let Some(arg) = argv.next() {
        if arg == "--" {
            out.push(arg);
            break;
        }
        if let (Some(at), Some(model)) = (model_at, model_value(&arg, &mut argv)) {
            match model {
                Some(model) => out.insert(at, model),
                // It came last: clap has no such flag, or one that takes a value, and says so.
                None => out.push(long_form(&arg).unwrap_or(arg)),
            }
            continue;
        }
        if !command_seen && arg.to_str().is_some_and(|a| !a.starts_with('-')) {
            command_seen = GROUPS.iter().all(|name| arg != *name);
            out.push(arg.clone());
            if WITH_MODEL.iter().any(|name| arg == *name) {
                model_at = Some(out.len());
            }
            continue;
        }
        let verbatim = TEXT_FLAGS.iter().any(|flag| arg == *flag);
        out.push(long_form(&arg).unwrap_or(arg));
        if verbatim {
            out.extend(argv.next());
        }
    }
    out.extend(argv);
    out
}

/// Flags that name the model, and what marks their value as such a name.
const MODEL_FLAGS: &[(&str, &str)] = &[
    ("-m", ""),
    ("--model", ""),
    ("-hf", HUB_PREFIX),
    ("-hfr", HUB_PREFIX),
    ("--hf-repo", HUB_PREFIX),
];

/// What a flag that names the model makes MODEL: `None` for any other argument, `Some(None)` if
/// the value is missing.
fn model_value(arg: &OsStr, rest: &mut impl Iterator<Item = OsString>) -> Option<Option<OsString>> {
    let marked = |prefix: &str, value: OsString| {
        let mut model = OsString::from(prefix);
        model.push(value);
        model
    };
    for (flag, prefix) in MODEL_FLAGS {
        if arg == *flag {
            return Some(rest.next().map(|value| marked(prefix, value)));
        }
        let value = arg.to_str().and_then(|text| text.strip_prefix(flag)?.strip_prefix('='));
        if let Some(value) = value {
            return Some(Some(marked(prefix, value.into())));
        }
    }
    None
}

/// `-ub` → `--ubatch-size`, `-ub=8` → `--ubatch-size=8`.
fn long_form(arg: &OsStr) -> Option<OsString> {
    let name = arg.to_str()?.strip_prefix('-')?;
    let (name, value) = match name.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (name, None),
    };
    let (_, long) = SHORTS.iter().find(|(short, _)| *short == name)?;
    Some(match value {
        Some(value) => format!("{long}={value}").into(),
        None => (*long).into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> String {
        let out = rewrite(line.split(' ').map(OsString::from));
        out.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn multi_letter_shorts_become_long_flags() {
        let cases = [
            ("moeba run m -ub 8 -ctk=f32", "moeba run m --ubatch-size 8 --cache-type-k=f32"),
            ("moeba run m -no-cnv -st -n -1", "moeba run m --no-conversation --single-turn -n -1"),
            ("moeba bench m -pg 8,4", "moeba bench m --prompt-gen 8,4"),
            ("moeba run m -ngl=99", "moeba run m --gpu-layers=99"),
            ("moeba run m -dev cpu -ot a=CPU", "moeba run m --device cpu --override-tensor a=CPU"),
            ("moeba run m --ubatch-size 8 -c 64", "moeba run m --ubatch-size 8 -c 64"),
        ];
        for (line, expected) in cases {
            assert_eq!(rewritten(line), expected);
        }
    }

    #[test]
    fn the_model_flag_becomes_the_positional() {
        let cases = [
            ("moeba tokenize -m m.gguf hello", "moeba tokenize m.gguf hello"),
            ("moeba tokenize hello --model=m.gguf", "moeba tokenize m.gguf hello"),
            ("moeba -v run -p hi -m m.gguf", "moeba -v run m.gguf -p hi"),
            ("moeba trace record -m m.gguf -o x", "moeba trace record m.gguf -o x"),
            ("moeba run -hf a/b:Q8_0 -hff x", "moeba run hf:a/b:Q8_0 --hf-file x"),
            ("moeba tokenize hello --hf-repo=a/b", "moeba tokenize hf:a/b hello"),
            ("moeba tokenize -hfr a/b hello -hft t", "moeba tokenize hf:a/b hello --hf-token t"),
            ("moeba run -hf", "moeba run --hf-repo"),
            ("moeba run -m", "moeba run -m"),
            ("moeba man -m", "moeba man -m"),
        ];
        for (line, expected) in cases {
            assert_eq!(rewritten(line), expected);
        }
    }

    #[test]
    fn text_and_what_follows_two_dashes_stay_as_they_are() {
        let cases = [
            ("moeba run m -p -ub", "moeba run m -p -ub"),
            ("moeba run m -sys -m", "moeba run m --system-prompt -m"),
            ("moeba tokenize -- -m -ub", "moeba tokenize -- -m -ub"),
        ];
        for (line, expected) in cases {
            assert_eq!(rewritten(line), expected);
        }
    }
}
