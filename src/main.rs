//! Parse the arguments and dispatch: nothing else.

/// Keeps chat templates, which are programs of unknown origin, from taking all memory.
#[global_allocator]
static ALLOCATOR: moeba::chat::BoundedAllocator = moeba::chat::BoundedAllocator;

fn main() -> std::process::ExitCode {
    moeba::cli::main()
}
