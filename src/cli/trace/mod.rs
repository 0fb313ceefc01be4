//! `moeba trace`: routing traces, one file a subcommand.

mod places;
mod record;

use crate::Result;

#[derive(clap::Args, Debug)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Write down which experts a model chooses for texts
    Record(record::Args),
}

pub fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Record(args) => record::run(args),
    }
}
