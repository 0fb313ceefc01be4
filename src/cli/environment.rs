//! Variables of llama.cpp, for those who have set them: a flag that has a variable of ours may have
//! one of llama.cpp's besides. A flag counts first, then ours, then llama.cpp's.

use super::argv::Line;
use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};
use std::error::Error as _;

/// (ours, llama.cpp's)
const FALLBACKS: &[(&str, &str)] = &[
    ("MOEBA_ALIAS", "LLAMA_ARG_ALIAS"),
    ("MOEBA_API_KEY", "LLAMA_API_KEY"),
    ("MOEBA_BATCH_SIZE", "LLAMA_ARG_BATCH"),
    ("MOEBA_CACHE_TYPE_K", "LLAMA_ARG_CACHE_TYPE_K"),
    ("MOEBA_CACHE_TYPE_V", "LLAMA_ARG_CACHE_TYPE_V"),
    ("MOEBA_CHAT_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE"),
    ("MOEBA_CHAT_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    ("MOEBA_CHAT_TEMPLATE_KWARGS", "LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    ("MOEBA_CPU_MOE", "LLAMA_ARG_CPU_MOE"),
    ("MOEBA_CTX_SIZE", "LLAMA_ARG_CTX_SIZE"),
    ("MOEBA_DEVICE", "LLAMA_ARG_DEVICE"),
    ("MOEBA_FREQUENCY_PENALTY", "LLAMA_ARG_FREQUENCY_PENALTY"),
    ("MOEBA_GPU_LAYERS", "LLAMA_ARG_N_GPU_LAYERS"),
    ("MOEBA_HF_FILE", "LLAMA_ARG_HF_FILE"),
    ("MOEBA_HF_REPO", "LLAMA_ARG_HF_REPO"),
    ("MOEBA_HOST", "LLAMA_ARG_HOST"),
    ("MOEBA_KV_UNIFIED", "LLAMA_ARG_KV_UNIFIED"),
    ("MOEBA_LOG_FILE", "LLAMA_ARG_LOG_FILE"),
    ("MOEBA_METRICS", "LLAMA_ARG_ENDPOINT_METRICS"),
    ("MOEBA_MIN_P", "LLAMA_ARG_MIN_P"),
    ("MOEBA_MODEL", "LLAMA_ARG_MODEL"),
    ("MOEBA_MODELS_DIR", "LLAMA_ARG_MODELS_DIR"),
    ("MOEBA_MODELS_MAX", "LLAMA_ARG_MODELS_MAX"),
    ("MOEBA_N_CPU_MOE", "LLAMA_ARG_N_CPU_MOE"),
    ("MOEBA_NO_MMAP", "LLAMA_ARG_NO_MMAP"),
    ("MOEBA_N_PREDICT", "LLAMA_ARG_N_PREDICT"),
    ("MOEBA_OFFLINE", "LLAMA_ARG_OFFLINE"),
    ("MOEBA_OVERRIDE_TENSOR", "LLAMA_ARG_OVERRIDE_TENSOR"),
    ("MOEBA_PARALLEL", "LLAMA_ARG_N_PARALLEL"),
    ("MOEBA_POOLING", "LLAMA_ARG_POOLING"),
    ("MOEBA_PORT", "LLAMA_ARG_PORT"),
    ("MOEBA_PRESENCE_PENALTY", "LLAMA_ARG_PRESENCE_PENALTY"),
    ("MOEBA_REASONING", "LLAMA_ARG_REASONING"),
    ("MOEBA_REASONING_BUDGET", "LLAMA_ARG_THINK_BUDGET"),
    ("MOEBA_REASONING_BUDGET_MESSAGE", "LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    ("MOEBA_REASONING_EFFORT", "LLAMA_ARG_REASONING_EFFORT"),
    ("MOEBA_REASONING_FORMAT", "LLAMA_ARG_THINK"),
    ("MOEBA_REPEAT_PENALTY", "LLAMA_ARG_REPEAT_PENALTY"),
    ("MOEBA_TEMP", "LLAMA_ARG_TEMPERATURE"),
    ("MOEBA_THREADS", "LLAMA_ARG_THREADS"),
    ("MOEBA_TIMEOUT", "LLAMA_ARG_TIMEOUT"),
    ("MOEBA_TOP_K", "LLAMA_ARG_TOP_K"),
    ("MOEBA_TOP_P", "LLAMA_ARG_TOP_P"),
    ("MOEBA_UBATCH_SIZE", "LLAMA_ARG_UBATCH"),
];

/// Makes the command line read llama.cpp's variable where it is set and ours is not, so that both
/// are checked alike; the help names both. When a flag is repeated, the last one counts.
pub fn with_fallbacks(command: Command, is_set: impl Fn(&str) -> bool + Copy) -> Command {
    let command = command.args_override_self(true).mut_args(|arg| with_fallback(arg, is_set));
    command.mut_subcommands(|command| with_fallbacks(command, is_set))
}

/// llama.cpp's variables for one of ours.
pub fn fallbacks(ours: &str) -> impl Iterator<Item = &'static str> {
    FALLBACKS.iter().filter(move |(name, _)| *name == ours).map(|(_, theirs)| *theirs)
}

fn with_fallback(arg: Arg, is_set: impl Fn(&str) -> bool) -> Arg {
    let Some(ours) = arg.get_env().and_then(|name| name.to_str()).map(str::to_owned) else {
        return arg;
    };
    match fallbacks(&ours).find(|theirs| is_set(theirs)) {
        _ if is_set(&ours) => arg,
        Some(theirs) => arg.env(theirs),
        None if std::env::var_os(&ours).is_some() => arg.env(Resettable::Reset),
        None => arg,
    }
}

/// The sentence for a wrong value that a variable gave, as clap speaks of flags only.
pub fn wrong_value(error: &clap::Error, root: &Command, line: &Line) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    };
    let (shown, value) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    let mut names = line.path.iter().skip(1);
    let command = names.try_fold(root, |command, name| command.find_subcommand(name))?;
    let arg = command.get_arguments().find(|arg| arg.to_string() == *shown)?;
    if line.given.contains(arg.get_id()) {
        return None;
    }
    let name = arg.get_env()?.to_str()?;
    let why = error.source().map_or("invalid value".into(), ToString::to_string);
    Some(format!("{name}: {why}, got {value:?}"))
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::*;
    use clap::CommandFactory;
    use std::collections::BTreeSet;

    /// Names of all variables that a command line reads.
    fn variables(command: &Command, out: &mut BTreeSet<String>) {
        let names = command.get_arguments().filter_map(|arg| arg.get_env()?.to_str());
        out.extend(names.map(Into::into));
        command.get_subcommands().for_each(|command| variables(command, out));
    }

    #[test]
    fn every_variable_of_the_table_is_a_flags() {
        let mut ours = BTreeSet::new();
        variables(&Cli::command(), &mut ours);
        for (name, _) in FALLBACKS {
            assert!(ours.contains(*name), "{name}");
        }
    }

    #[test]
    fn llama_cpps_variable_is_read_only_where_ours_is_not_set() {
        let read = |set: &[&str]| {
            let mut names = BTreeSet::new();
            let command = with_fallbacks(Cli::command(), |name| set.contains(&name));
            variables(&command, &mut names);
            (names.contains("MOEBA_THREADS"), names.contains("LLAMA_ARG_THREADS"))
        };
        assert_eq!(read(&[]), (true, false));
        assert_eq!(read(&["LLAMA_ARG_THREADS"]), (false, true));
        assert_eq!(read(&["LLAMA_ARG_THREADS", "MOEBA_THREADS"]), (true, false));
    }
}
