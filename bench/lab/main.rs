//! `moeba-lab`: the experiments of the papers whose policies moeba has, repeated on recorded
//! routing. It uses the library through its public items only.

mod command;
mod hybrid;
mod live;
mod papers;
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
    /// Make everything that the tables need and write them: record, train, run live, simulate
    Papers(papers::Args),
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let command = Cli::parse().command;
    let run = || match &command {
        Command::Tables(args) => command::run(args),
        Command::Papers(args) => papers::run(args),
    };
    match interrupt::install().and_then(|()| run()) {
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
