//! `moeba-lab`: the experiments of the papers whose policies moeba has, repeated on recorded
//! routing. It uses the library through its public items only.

mod command;
mod future;
mod hybrid;
mod ordered;
mod placement;
mod plot;
mod tables;

use clap::{Parser, Subcommand};
use moeba::{Error, interrupt};
use std::process::ExitCode;

/// Repeats the experiments of papers on expert prefetching and caching with recorded routing.
#[derive(Parser, Debug)]
#[command(name = "moeba-lab", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Write all tables of the papers: POLICIES.md, policies/*.csv and policies/*.svg
    Tables(command::Args),
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let Command::Tables(args) = Cli::parse().command;
    match interrupt::install().and_then(|()| command::run(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(match e {
                Error::Interrupted => interrupt::exit_code() as u8,
                Error::Usage(_) => 2,
                _ => 1,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }
}
