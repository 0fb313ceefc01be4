//! `moeba trace`: routing traces, one file a subcommand.

mod asked;
mod distance;
mod import;
mod machine;
mod places;
mod record;
mod replay;
mod samples;
mod stats;
mod train;

use crate::Result;

#[derive(clap::Args, Debug)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Record which experts a model chooses
    Record(record::Args),
    /// Turn what other programs recorded into a trace
    Import(import::Args),
    /// Say how much of recorded routing a cache can use
    Stats(stats::Args),
    /// Simulate policies on recorded routing
    Replay(replay::Args),
    /// Train PreScope's predictor and choose FineMoE's prefetch distance from a trace
    Train(train::Args),
}

pub fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Record(args) => record::run(args),
        Command::Import(args) => import::run(args),
        Command::Stats(args) => stats::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Train(args) => train::run(args),
    }
}
