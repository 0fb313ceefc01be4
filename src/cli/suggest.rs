//! Suggestions for unknown names.

/// Commands by the names that other programs give them.
const ELSEWHERE: &[(&str, &str)] = &[
    ("chat", "run"),
    ("cli", "run"),
    ("completion", "completions"),
    ("delete", "rm"),
    ("download", "pull"),
    ("embedding", "embed"),
    ("embeddings", "embed"),
    ("generate", "run"),
    ("info", "inspect"),
    ("ls", "list"),
    ("ppl", "perplexity"),
    ("remove", "rm"),
    ("show", "inspect"),
];

/// Commands of other programs that moeba has no need of, and what to do instead.
const ABSENT: &[(&str, &str)] = &[
    ("cp", "a model is a file: copy the file"),
    (
        "create",
        "a GGUF file runs as it is, and a Modelfile's settings are flags: see `moeba run -h`",
    ),
    ("login", "pulling takes a token by HF_TOKEN or -hft"),
    ("ps", "only `moeba serve` keeps models in memory: ask GET /api/ps of the server"),
    ("push", "moeba downloads models and uploads none"),
    ("stop", "a server ends by Ctrl-C or SIGTERM"),
    ("update", "a newer moeba is built from its source as this one was"),
    ("upgrade", "a newer moeba is built from its source as this one was"),
    ("version", "`moeba --version` prints it"),
];

/// Flags by the names that other programs give them.
const FLAGS_ELSEWHERE: &[(&str, &str)] = &[
    ("--context", "-c"),
    ("--context-length", "-c"),
    ("--ctx", "-c"),
    ("--cuda", "--device cuda"),
    ("--gpu", "--device or -ngl"),
    ("--max-tokens", "-n"),
    ("--memory", "--ram"),
    ("--num-ctx", "-c"),
    ("--num-gpu", "-ngl"),
    ("--num-predict", "-n"),
    ("--system", "--system-prompt"),
];

/// The way to do here what another program's command does.
pub fn instead(word: &str) -> Option<&'static str> {
    ABSENT.iter().find(|(name, _)| *name == word).map(|(_, what)| *what)
}

/// The flag here of another program's flag.
pub fn flag_meant(name: &str) -> Option<&'static str> {
    FLAGS_ELSEWHERE.iter().find(|(other, _)| *other == name).map(|(_, here)| *here)
}

/// The name that is nearest, if it is near.
pub fn closest<'a, T: AsRef<str>>(name: &str, names: &'a [T]) -> Option<&'a T> {
    let letters = name.trim_start_matches('-').chars().count();
    // Two letters have no slip that leaves something to recognise.
    let most = if letters < 3 { 0 } else { (letters / 4).max(1) };
    let distances = names.iter().map(|other| (strsim::osa_distance(name, other.as_ref()), other));
    let (distance, nearest) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= most).then_some(nearest)
}

/// The command that a word was likely meant to be.
pub fn command_meant<'a>(word: &str, names: &'a [&'a str]) -> Option<&'a str> {
    let elsewhere = ELSEWHERE.iter().find(|(other, _)| *other == word).map(|(_, name)| name);
    let known = names.iter().find(|name| elsewhere == Some(name));
    known.or_else(|| closest(word, names)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_near_is_suggested() {
        let flags = ["--temp", "--threads", "--top-k", "-ngl", "--jinja"];
        let cases = [
            ("--tmep", Some("--temp")),
            ("--thread", Some("--threads")),
            ("-nlg", Some("-ngl")),
            ("--jinga", Some("--jinja")),
            ("--mirostat", None),
            ("--ram", None),
            ("-x", None),
            ("-xy", None),
        ];
        for (name, meant) in cases {
            assert_eq!(closest(name, &flags).copied(), meant, "{name}");
        }
    }

    #[test]
    fn commands_have_names_elsewhere() {
        let names = ["run", "inspect", "list", "completions"];
        for (word, meant) in [
            ("chat", Some("run")),
            ("show", Some("inspect")),
            ("ls", Some("list")),
            ("lsit", Some("list")),
            ("completion", Some("completions")),
            ("delete", None),
            ("frobnicate", None),
        ] {
            assert_eq!(command_meant(word, &names), meant, "{word}");
        }
    }
}
