//! `moeba completions SHELL` and `moeba man [COMMAND]`: generated from the flags themselves.

use super::out;
use crate::{Error, Result};
use clap_complete::Shell;

#[derive(clap::Args, Debug)]
pub struct CompletionsArgs {
    /// The shell that shall complete `moeba`
    shell: Shell,
}

pub fn completions(args: CompletionsArgs, mut command: clap::Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "moeba", &mut script);
    out::write(&script)
}

#[derive(clap::Args, Debug)]
pub struct ManArgs {
    /// The subcommand to describe; without one, moeba itself
    command: Option<String>,
}

pub fn man(args: ManArgs, mut command: clap::Command) -> Result<()> {
    command.build();
    if let Some(name) = args.command {
        let unknown = || Error::Usage(format!("moeba has no subcommand {name:?}"));
        command = command.find_subcommand(&name).cloned().ok_or_else(unknown)?;
    }
    let mut page = Vec::new();
    let rendered = clap_mangen::Man::new(command).render(&mut page);
    rendered.map_err(|e| Error::invalid(format!("cannot write the manual page: {e}")))?;
    out::write(&page)
}
