//! The commands of a chat: their table, which is what /help prints, and completion by Tab.

use super::{reasoning, sampling};
use crate::sample::SamplerOptions;
use rustyline::completion::Completer;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};
use std::fs;

/// (what is typed, what it does)
const COMMANDS: &[(&str, &str)] = &[
    ("/help", "list the commands"),
    ("/clear", "forget the conversation"),
    ("/regen", "answer the last message again"),
    ("/read FILE", "put the text of a file before the next message"),
    ("/save FILE", "write the conversation to a file, as JSON"),
    ("/load FILE", "go on with the conversation of such a file"),
    ("/system TEXT", "replace the system prompt; without TEXT, remove it"),
    ("/set NAME VALUE", "change a sampling option; without both, list them"),
    ("/think LEVEL", "on, off, low, medium, high or auto: how the model thinks"),
    ("/stats", "show the figures of the last answer"),
    ("/exit", "end the chat (also /quit, /bye and Ctrl-D)"),
];

const KEYS: &[(&str, &str)] = &[
    ("\"\"\"", "begins and ends a message of several lines"),
    ("\\", "at the end of a line: the message goes on in the next"),
    ("Enter", "sends the line; lines typed during an answer wait their turn"),
    ("(space)", "before a slash: the line is a message, not a command"),
    ("Tab", "completes a command, an option of /set or the name of a file"),
    ("Ctrl-C", "stops the answer; twice at the prompt ends the chat"),
];

/// The text of /help.
pub fn help() -> String {
    let row = |(left, right): &(&str, &str)| format!("{left:<16}  {right}");
    COMMANDS.iter().chain(KEYS).map(row).collect::<Vec<_>>().join("\n")
}

/// The name and the rest of a line that is a command. One that has more slashes in its first word
/// is a message: a path or a comment.
pub fn split(line: &str) -> Option<(&str, &str)> {
    let command = line.strip_prefix('/')?;
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    (!name.contains('/')).then_some((name, rest.trim()))
}

/// Completes commands; other lines are left alone.
pub struct Completion;

impl Completion {
    /// The start of the completed word, and its completions.
    fn candidates(line: &str) -> (usize, Vec<String>) {
        let with_file = ["/read ", "/save ", "/load "];
        if let Some(file) = with_file.iter().find_map(|command| line.strip_prefix(command)) {
            return (line.len() - file.len(), files(file));
        }
        let (start, names): (usize, Vec<String>) = match line.strip_prefix("/set ") {
            Some(option) => {
                let options = sampling::settings(&SamplerOptions::default());
                let names =
                    options.iter().map(|(name, _)| *name).chain(["n"]).chain(reasoning::OPTIONS);
                (line.len() - option.len(), names.map(|name| format!("{name} ")).collect())
            }
            None => (0, COMMANDS.iter().map(|(usage, _)| typed(usage)).collect()),
        };
        let word = &line[start..];
        let fits = |name: &String| !line.is_empty() && name.starts_with(word);
        (start, names.into_iter().filter(fits).collect())
    }
}

/// "/set NAME VALUE" begins with "/set ".
fn typed(usage: &str) -> String {
    usage.split_inclusive(' ').next().unwrap_or_default().to_owned()
}

/// Files and folders whose names begin like this.
fn files(begun: &str) -> Vec<String> {
    let (folder, name) = begun.rsplit_once('/').map_or(("", begun), |(folder, name)| {
        let folder = &begun[..=folder.len()];
        (folder, name)
    });
    let Ok(entries) = fs::read_dir(if folder.is_empty() { "." } else { folder }) else {
        return Vec::new();
    };
    let full = |entry: fs::DirEntry| {
        let found = entry.file_name().into_string().ok()?;
        let is_hidden = found.starts_with('.') && !name.starts_with('.');
        let slash = if entry.path().is_dir() { "/" } else { "" };
        (found.starts_with(name) && !is_hidden).then(|| format!("{folder}{found}{slash}"))
    };
    let mut found: Vec<String> = entries.filter_map(|entry| full(entry.ok()?)).collect();
    found.sort();
    found
}

impl Completer for Completion {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(Completion::candidates(&line[..pos]))
    }
}

impl Hinter for Completion {
    type Hint = String;
}

impl Highlighter for Completion {}

impl Validator for Completion {}

impl Helper for Completion {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_a_slash_and_a_word() {
        assert_eq!(split("/set  temp 0.5 "), Some(("set", "temp 0.5")));
        assert_eq!(split("/help"), Some(("help", "")));
        for message in ["/etc/passwd is what?", "// a comment", "hello", ""] {
            assert_eq!(split(message), None, "{message}");
        }
    }

    #[test]
    fn commands_options_and_files_are_completed() {
        let completed = |line: &str| Completion::candidates(line);
        assert_eq!(
            completed("/s"),
            (0, vec!["/save ".into(), "/system ".into(), "/set ".into(), "/stats".into()])
        );
        let top = ["top-k ", "top-p ", "top-nsigma "].map(String::from).to_vec();
        assert_eq!(completed("/set top-"), (5, top));
        assert_eq!(completed("hello"), (0, vec![]));
        assert_eq!(completed(""), (0, vec![]));
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("ab")).unwrap();
        fs::write(dir.path().join("ac"), "").unwrap();
        fs::write(dir.path().join(".a"), "").unwrap();
        let begun = |name: &str| format!("/read {}/{name}", dir.path().display());
        let (start, found) = completed(&begun("a"));
        let names: Vec<_> = found.iter().map(|f| f.rsplit_once("/a").unwrap().1).collect();
        assert_eq!((start, names), (6, vec!["b/", "c"]));
        assert_eq!(completed(&begun("x")).1, Vec::<String>::new());
    }

    #[test]
    fn help_is_a_table() {
        let help = help();
        assert!(help.lines().all(|line| line.len() <= 80), "{help}");
        assert!(help.contains("/system TEXT      replace"), "{help}");
    }
}
