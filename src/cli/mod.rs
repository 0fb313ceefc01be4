//! The command line: one file a subcommand.

pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(2)
}
