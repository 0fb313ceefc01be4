//! Parse the arguments and dispatch: nothing else.

fn main() -> std::process::ExitCode {
    moeba::cli::main()
}
