//! The first pass over a command line, before clap. It knows llama.cpp's flags (`llama_flags`): it
//! spells them as clap knows them, leaves out those that change nothing here, and refuses the
//! others by name. `-m FILE` and `-hf REPO` become the positional MODEL; each value is tied to its
//! flag (`--temp=-1`), so that clap never takes a value for a flag; and a command line that names
//! no subcommand but a model is one of `run`.

use super::hub::HUB_PREFIX;
use super::llama_flags::{self, LOADERS, Value};
use super::suggest::{closest, command_meant, flag_meant, instead};
use crate::hub;
use clap::{Arg, ArgAction, Command, Id};
use std::ffi::{OsStr, OsString};
use std::iter::Peekable;
use std::path::Path;

/// A command line as clap shall see it.
#[derive(Debug, Default)]
pub struct Line {
    pub argv: Vec<OsString>,
    /// Notes about flags that change nothing.
    pub notes: Vec<String>,
    /// Flags that were given; the others may come from variables.
    pub given: Vec<Id>,
    /// The subcommand, as a path from the program down.
    pub path: Vec<String>,
}

/// Flags that name the model, and what marks their value as such a name.
const MODEL_FLAGS: &[(&str, &str)] = &[
    ("-m", ""),
    ("--model", ""),
    ("-hf", HUB_PREFIX),
    ("-hfr", HUB_PREFIX),
    ("--hf-repo", HUB_PREFIX),
];

/// Lists of `bench` that grow with each flag, as llama-bench's do.
const JOINED: &[&str] = &["n_prompt", "n_gen", "n_depth", "threads"];

/// The program's arguments (its name first) as clap shall see them; the error is wrong usage.
/// `root` must be built.
pub fn rewrite(root: &Command, argv: impl IntoIterator<Item = OsString>) -> Result<Line, String> {
    let mut rest = argv.into_iter().peekable();
    let argv: Vec<OsString> = rest.next().into_iter().collect();
    let path = vec![root.get_name().to_owned()];
    let line = Line { argv, path, ..Line::default() };
    let mut pass = FirstPass { root, command: root, line, model_at: None, model: None };
    while let Some(arg) = rest.next() {
        if arg == "--" {
            pass.line.argv.push(arg);
            pass.line.argv.extend(rest);
            break;
        }
        match arg.to_str() {
            // A name that is no UTF-8 is a file's.
            None => pass.word(arg, &mut rest)?,
            Some(text) if is_flag(text) => pass.flag(text, &mut rest)?,
            Some(_) => pass.word(arg, &mut rest)?,
        }
    }
    Ok(pass.line)
}

type Rest<'a, I> = &'a mut Peekable<I>;

struct FirstPass<'a> {
    root: &'a Command,
    command: &'a Command,
    line: Line,
    /// The position of MODEL: just behind a subcommand that takes one.
    model_at: Option<usize>,
    /// The flag that gave it.
    model: Option<&'static str>,
}

/// Whether an argument is a flag; `-` is a file and `-1` a number.
fn is_flag(text: &str) -> bool {
    text.starts_with('-') && text != "-" && !is_number(text)
}

fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
}

impl<'a> FirstPass<'a> {
    /// Goes on in a subcommand.
    fn enter(&mut self, command: &'a Command) {
        self.command = command;
        self.line.path.push(command.get_name().to_owned());
        self.line.argv.push(command.get_name().into());
        let takes_model = command.get_arguments().any(|arg| arg.get_id() == "model");
        self.model_at = takes_model.then_some(self.line.argv.len());
    }

    fn is_root(&self) -> bool {
        self.line.path.len() == 1
    }

    /// Goes on in `run`, as the command line names no subcommand.
    fn enter_run(&mut self) {
        let run = self.root.find_subcommand("run").expect("moeba has run");
        self.enter(run);
    }

    fn word(
        &mut self,
        word: OsString,
        rest: Rest<impl Iterator<Item = OsString>>,
    ) -> Result<(), String> {
        if !self.command.has_subcommands() {
            self.line.argv.push(word);
            return Ok(());
        }
        if let Some(command) = self.command.find_subcommand(&word) {
            self.enter(command);
            return Ok(());
        }
        if self.is_root() && word == "help" {
            return self.help(rest);
        }
        if self.is_root() && is_model(&word) {
            self.enter_run();
            self.line.argv.push(word);
            return Ok(());
        }
        Err(self.no_command(&word))
    }

    /// `help CMD [SUB]` is `CMD [SUB] --help`.
    fn help(&mut self, rest: Rest<impl Iterator<Item = OsString>>) -> Result<(), String> {
        for word in rest {
            match self.command.find_subcommand(&word) {
                Some(command) => self.enter(command),
                None => return Err(self.no_command(&word)),
            }
        }
        self.line.argv.push("--help".into());
        Ok(())
    }

    fn no_command(&self, word: &OsStr) -> String {
        let word = word.to_string_lossy();
        let names: Vec<&str> = self.command.get_subcommands().map(Command::get_name).collect();
        let what = match self.is_root() {
            true => format!("{word} is neither a command nor a model file"),
            false => format!("`{}` has no command {word}", self.line.path.join(" ")),
        };
        if let Some(what) = instead(&word).filter(|_| self.is_root()) {
            return format!("moeba has no command {word}: {what}");
        }
        match command_meant(&word, &names) {
            Some(name) => format!("{what}: did you mean `{} {name}`?", self.line.path.join(" ")),
            None => format!("{what}; the commands are {}", names.join(", ")),
        }
    }

    fn flag(
        &mut self,
        text: &str,
        rest: Rest<impl Iterator<Item = OsString>>,
    ) -> Result<(), String> {
        let (name, mut value) = match text.split_once('=') {
            Some((name, value)) => (normalized(name), Some(OsString::from(value))),
            None => (normalized(text), None),
        };
        let name = name.as_str();
        if self.is_root() && self.own(name).is_none() && self.may_run(name) {
            self.enter_run();
        }
        if name == "--version" && self.own(name).is_none() {
            self.line.argv.truncate(1);
            self.line.argv.push(name.into());
            return Ok(());
        }
        if name == "-h" {
            // Not `--help`, which says more.
            self.line.argv.push(name.into());
            return Ok(());
        }
        if self.names_model(name) {
            let value = value.or_else(|| rest.next_if(|next| !self.known(next)));
            return self.set_model(name, value);
        }
        if let Some(spelled) = self.spelling(name, value.as_deref().or(rest.peek().map(|v| &**v))) {
            if value.is_none() {
                rest.next();
            }
            let (flag, value) = spelled;
            self.push(flag, value.map(OsString::from));
            return Ok(());
        }
        if let Some(arg) = self.find(name) {
            let takes = arg.get_action().takes_values();
            if takes && value.is_none() {
                value = rest.next_if(|next| arg.is_allow_hyphen_values_set() || !self.known(next));
            }
            self.push_arg(arg, value);
            return Ok(());
        }
        if self.is_counted(name) {
            self.line.argv.push(name.into());
            return Ok(());
        }
        if let Some((arg, number)) = self.attached(name) {
            self.push_arg(arg, Some(number.into()));
            return Ok(());
        }
        self.foreign(name, value, rest)
    }

    /// A flag of llama.cpp's that the subcommand has not.
    fn foreign(
        &mut self,
        name: &str,
        value: Option<OsString>,
        rest: Rest<impl Iterator<Item = OsString>>,
    ) -> Result<(), String> {
        if !LOADERS.contains(&self.command.get_name()) {
            return Err(self.unknown(name));
        }
        let command = self.command.get_name();
        let refused = llama_flags::refused(command, name).map(|cure| format!("{name}: {cure}"));
        let Some((takes, why)) = llama_flags::harmless(command, name) else {
            return Err(refused.unwrap_or_else(|| self.unknown(name)));
        };
        let chosen = |choices, value: &OsStr| {
            value.to_str().is_some_and(|value| llama_flags::is_choice(choices, value))
        };
        match takes {
            Value::None if value.is_some() => return Err(format!("{name} takes no value")),
            Value::None => {}
            Value::One => {
                let value = value.or_else(|| rest.next());
                value.ok_or_else(|| format!("{name} needs a value"))?;
            }
            Value::Optional(choices) => match value {
                Some(value) if !chosen(choices, &value) => {
                    return Err(format!("{name}: expected {choices}, got {value:?}"));
                }
                Some(_) => {}
                None => drop(rest.next_if(|next| chosen(choices, next))),
            },
            Value::Only(choices) => {
                let value = value.or_else(|| rest.next());
                let value = value.ok_or_else(|| format!("{name} needs a value"))?;
                if !chosen(choices, &value) {
                    let wrong = || format!("{name}: expected {choices}, got {value:?}");
                    return Err(refused.unwrap_or_else(wrong));
                }
            }
        }
        self.line.notes.push(format!("{name} changes nothing: {why}"));
        Ok(())
    }

    /// Whether a flag that the program itself does not know makes sense for `run`.
    fn may_run(&self, name: &str) -> bool {
        let run = self.root.find_subcommand("run").expect("moeba has run");
        let short = MODEL_FLAGS.iter().any(|(flag, _)| *flag == name);
        let known = find(run, name).is_some() || llama_flags::harmless("run", name).is_some();
        short || known || llama_flags::refused("run", name).is_some()
    }

    /// The subcommand's flag of exactly this name.
    fn own(&self, name: &str) -> Option<&'a Arg> {
        own(self.command, name)
    }

    /// An argument of this command, under its own name or one that llama.cpp has for it.
    fn find(&self, name: &str) -> Option<&'a Arg> {
        find(self.command, name)
    }

    /// Whether an argument is a flag that the subcommand or the tables know.
    fn known(&self, arg: &OsStr) -> bool {
        let Some(text) = arg.to_str().filter(|text| is_flag(text)) else { return false };
        let name = normalized(text.split_once('=').map_or(text, |(name, _)| name));
        let here = self.find(&name).is_some() || self.names_model(&name);
        let command = self.command.get_name();
        here || LOADERS.contains(&command) && llama_flags::harmless(command, &name).is_some()
    }

    /// `-vv` and `-vvv`.
    fn is_counted(&self, name: &str) -> bool {
        let letters = name.trim_start_matches('-');
        let first = letters.get(..1).unwrap_or_default();
        let same = !name.starts_with("--") && letters.bytes().all(|b| first.as_bytes() == [b]);
        let counts = |arg: &Arg| matches!(arg.get_action(), ArgAction::Count);
        same && self.own(&format!("-{first}")).is_some_and(counts)
    }

    /// `-n5` is `-n 5`.
    fn attached<'t>(&self, name: &'t str) -> Option<(&'a Arg, &'t str)> {
        let (flag, number) = name.split_at_checked(2)?;
        let arg = self.own(flag).filter(|arg| arg.get_action().takes_values())?;
        is_number(number).then_some((arg, number))
    }

    fn spelling(
        &self,
        name: &str,
        value: Option<&OsStr>,
    ) -> Option<(&'static str, Option<String>)> {
        let spelled = llama_flags::spelling(name, value?.to_str()?);
        spelled.filter(|(flag, _)| self.own(flag).is_some())
    }

    fn names_model(&self, name: &str) -> bool {
        self.model_at.is_some() && MODEL_FLAGS.iter().any(|(flag, _)| *flag == name)
    }

    /// The last of several counts; one of another kind is a second model.
    fn set_model(&mut self, name: &str, value: Option<OsString>) -> Result<(), String> {
        let value = value.ok_or_else(|| format!("{name} needs a value"))?;
        let flag = MODEL_FLAGS.iter().find(|(flag, _)| *flag == name);
        let (at, (_, prefix)) = self.model_at.zip(flag).expect("asked before");
        let mut model = OsString::from(prefix);
        model.push(value);
        let is_bench = self.command.get_name() == "bench";
        match self.model.replace(prefix) {
            Some(before) if before == *prefix && !is_bench => self.line.argv[at] = model,
            Some(before) if before != *prefix => return Err(
                "-m and -hf both name a model; a file of a repository is -hf USER/REPO -hff FILE"
                    .into(),
            ),
            Some(_) => return Err("`moeba bench` times one model: give -m once".into()),
            None => self.line.argv.insert(at, model),
        }
        Ok(())
    }

    fn push(&mut self, flag: &str, value: Option<OsString>) {
        let arg = self.own(flag).expect("asked before");
        self.push_arg(arg, value);
    }

    fn push_arg(&mut self, arg: &Arg, value: Option<OsString>) {
        let mut flag = match (arg.get_long(), arg.get_short()) {
            (Some(long), _) => OsString::from(format!("--{long}")),
            (None, short) => OsString::from(format!("-{}", short.unwrap_or_default())),
        };
        let joined = self.command.get_name() == "bench" && JOINED.contains(&arg.get_id().as_str());
        self.line.given.push(arg.get_id().clone());
        // Without its value clap says what is missing.
        let Some(value) = value else { return self.line.argv.push(flag) };
        flag.push("=");
        let begins =
            |arg: &&mut OsString| arg.as_encoded_bytes().starts_with(flag.as_encoded_bytes());
        if let Some(before) = self.line.argv.iter_mut().find(begins).filter(|_| joined) {
            before.push(",");
            before.push(value);
            return;
        }
        flag.push(value);
        self.line.argv.push(flag);
    }

    fn unknown(&self, name: &str) -> String {
        let here = self.line.path.join(" ");
        let longs = self.command.get_arguments().flat_map(long_names);
        let mut names: Vec<String> = longs.map(|name| format!("--{name}")).collect();
        if LOADERS.contains(&self.command.get_name()) {
            let known = |name: &&str| {
                let is_harmless = llama_flags::harmless("run", name).is_some();
                is_harmless || name.len() > 2 && self.find(name).is_some()
            };
            names.extend(llama_flags::names().filter(known).map(str::to_owned));
        }
        // A long flag with one dash is the likeliest slip.
        let doubled = format!("-{name}");
        if let Some(near) = names.iter().find(|n| **n == doubled).or(closest(name, &names)) {
            return format!("unknown flag {name}: did you mean {near}?");
        }
        if let Some(here) = flag_meant(name).filter(|_| LOADERS.contains(&self.command.get_name()))
        {
            return format!("unknown flag {name}: did you mean {here}?");
        }
        let mut others = Vec::new();
        owners(self.root, name, self.root.get_name(), &mut others);
        let have = match others.len() {
            0 => return format!("unknown flag {name}: `{here} --help` lists the flags"),
            1 => "has",
            _ => "have",
        };
        format!("`{here}` has no flag {name}, but `{}` {have}", others.join("`, `"))
    }
}

/// `--n_predict` is `--n-predict`.
fn normalized(name: &str) -> String {
    match name.starts_with("--") {
        true => name.replace('_', "-"),
        false => name.to_owned(),
    }
}

fn long_names(arg: &Arg) -> impl Iterator<Item = &str> {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    arg.get_long().into_iter().chain(aliases)
}

/// The flag of exactly this name.
pub fn own<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let mut letters = name.chars().skip(1);
    let short = letters.next().filter(|c| *c != '-' && letters.next().is_none());
    command.get_arguments().find(|arg| match name.strip_prefix("--") {
        Some(long) => long_names(arg).any(|name| name == long),
        None => short.is_some() && arg.get_short() == short,
    })
}

/// The argument of this name, which may be one that llama.cpp has for it.
pub fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let mut synonyms = llama_flags::synonyms(name).filter(|name| name.starts_with("--"));
    own(command, name).or_else(|| synonyms.find_map(|name| own(command, name)))
}

/// Subcommands that have a flag.
fn owners(command: &Command, name: &str, path: &str, out: &mut Vec<String>) {
    for sub in command.get_subcommands() {
        let path = format!("{path} {}", sub.get_name());
        owners(sub, name, &path, out);
        if find(sub, name).is_some() {
            out.push(path);
        }
    }
}

/// Whether a word in a subcommand's place can only be a model.
fn is_model(word: &OsStr) -> bool {
    let text = word.to_str().unwrap_or_default();
    let named = text.ends_with(".gguf") || text.contains('/') || hub::is_address(text);
    named || text.starts_with(HUB_PREFIX) || Path::new(word).exists()
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::*;
    use clap::CommandFactory;

    fn root() -> Command {
        let mut root = Cli::command();
        root.build();
        root
    }

    fn line(line: &str) -> Result<Line, String> {
        rewrite(&root(), line.split(' ').map(OsString::from))
    }

    fn rewritten(text: &str) -> String {
        let argv = line(text).unwrap_or_else(|e| panic!("{text}: {e}")).argv;
        argv.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn flags_become_what_clap_knows() {
        let cases = [
            ("moeba run m -ub 8 -ctk=f32", "moeba run m --ubatch-size=8 --cache-type-k=f32"),
            ("moeba run m -no-cnv -n -1", "moeba run m --no-conversation --predict=-1"),
            ("moeba bench m -pg 8,4", "moeba bench m --prompt-gen=8,4"),
            ("moeba run m -ngl=99", "moeba run m --gpu-layers=99"),
            ("moeba run m -dev cpu -ot a=CPU", "moeba run m --device=cpu --override-tensor=a=CPU"),
            ("moeba run m --ctx_size 8 -n5", "moeba run m --ctx-size=8 --predict=5"),
            ("moeba run m -vvv -q", "moeba run m -vvv --quiet"),
            (
                "moeba bench m -p 1 -p 2 -r 3 -r 4",
                "moeba bench m --n-prompt=1,2 --repetitions=3 --repetitions=4",
            ),
            ("moeba bench m -mmp 0", "moeba bench m --no-mmap"),
            ("moeba run m --moe-cache-mib 512", "moeba run m --vram=512M"),
            ("moeba serve m --moe-cache-mib=512", "moeba serve m --vram=512M"),
            ("moeba run m --usage", "moeba run m --help"),
            ("moeba run -h", "moeba run -h"),
            ("moeba -v run m", "moeba --verbose run m"),
            ("moeba run m -f -", "moeba run m --file=-"),
            // clap says what is missing.
            ("moeba run m -n", "moeba run m --predict"),
            ("moeba run m -f -n 5", "moeba run m --file --predict=5"),
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
            ("moeba -v run -p hi -m m.gguf", "moeba --verbose run m.gguf --prompt=hi"),
            ("moeba trace record -m m.gguf -o x", "moeba trace record m.gguf --output=x"),
            ("moeba run -hf a/b:Q8_0 -hff x", "moeba run hf:a/b:Q8_0 --hf-file=x"),
            ("moeba tokenize hello --hf-repo=a/b", "moeba tokenize hf:a/b hello"),
            ("moeba tokenize -hfr a/b hello -hft t", "moeba tokenize hf:a/b hello --hf-token=t"),
            ("moeba run -m a -m b", "moeba run b"),
        ];
        for (line, expected) in cases {
            assert_eq!(rewritten(line), expected);
        }
        for (text, word) in [
            ("moeba run -m", "-m needs a value"),
            ("moeba run -hf", "-hf needs a value"),
            ("moeba run -m a -hf b/c", "both"),
            ("moeba bench -m a -m b", "one model"),
            ("moeba man -m x", "unknown flag -m"),
        ] {
            let why = line(text).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
    }

    #[test]
    fn text_and_what_follows_two_dashes_stay_as_they_are() {
        let cases = [
            ("moeba run m -p -ub", "moeba run m --prompt=-ub"),
            ("moeba run m -sys -m", "moeba run m --system-prompt=-m"),
            ("moeba tokenize -- -m -ub", "moeba tokenize -- -m -ub"),
        ];
        for (line, expected) in cases {
            assert_eq!(rewritten(line), expected);
        }
    }

    #[test]
    fn a_command_line_without_a_command_is_a_run() {
        let cases = [
            ("moeba m.gguf -p hi", "moeba run m.gguf --prompt=hi"),
            ("moeba -m m -p hi", "moeba run m --prompt=hi"),
            ("moeba -hf a/b --jinja", "moeba run hf:a/b"),
            ("moeba --temp 0 -m m", "moeba run m --temp=0"),
            ("moeba hf.co/a/b", "moeba run hf.co/a/b"),
            ("moeba -q -m m", "moeba --quiet run m"),
            ("moeba help", "moeba --help"),
            ("moeba help run", "moeba run --help"),
            ("moeba help trace record", "moeba trace record --help"),
            ("moeba run --version", "moeba --version"),
        ];
        for (line, expected) in cases {
            assert_eq!(rewritten(line), expected);
        }
    }

    #[test]
    fn what_is_unknown_is_told_with_what_is_near() {
        let cases = [
            ("moeba run m --tmep 1", "unknown flag --tmep: did you mean --temp?"),
            ("moeba run m -temp 1", "unknown flag -temp: did you mean --temp?"),
            ("moeba run m -nlg 1", "did you mean -ngl?"),
            ("moeba run m --jinga", "did you mean --jinja?"),
            ("moeba run m -xyz", "unknown flag -xyz: `moeba run --help` lists the flags"),
            (
                "moeba run m --chunks 2",
                "`moeba run` has no flag --chunks, but `moeba perplexity`, `moeba imatrix` have",
            ),
            ("moeba inspect m --jinja", "unknown flag --jinja: `moeba inspect --help`"),
            ("moeba --frobnicate", "unknown flag --frobnicate: `moeba --help` lists the flags"),
            ("moeba frobnicate", "frobnicate is neither a command nor a model file"),
            ("moeba rnu", "did you mean `moeba run`?"),
            ("moeba ps", "moeba has no command ps: only `moeba serve` keeps models"),
            ("moeba run m --gpu 1", "unknown flag --gpu: did you mean --device or -ngl?"),
            ("moeba run m --ctx 100", "unknown flag --ctx: did you mean -c?"),
            ("moeba trace reply", "did you mean `moeba trace replay`?"),
            ("moeba help rnu", "did you mean `moeba run`?"),
            ("moeba run m --port 1", "--port: it is a flag of `moeba serve`"),
            ("moeba serve m --ssl-key-file x", "--ssl-key-file: moeba speaks plain HTTP"),
            ("moeba run m -mg 1", "-mg: use --device cuda:N"),
            ("moeba run m -lm x", "-lm: expected auto|mmap"),
            ("moeba run m --prio", "--prio needs a value"),
            ("moeba run m --mlock=1", "--mlock takes no value"),
        ];
        for (text, word) in cases {
            let why = line(text).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
    }

    #[test]
    fn what_was_given_is_known_by_its_id() {
        let given = line("moeba run m -t 1 --temp 2").unwrap();
        assert_eq!(given.given.iter().map(Id::as_str).collect::<Vec<_>>(), ["threads", "temp"]);
        assert_eq!(given.path, ["moeba", "run"]);
    }
}
