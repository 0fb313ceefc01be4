//! Parse the arguments and dispatch: nothing else.

/// Keeps chat templates and grammars of unknown origin from taking all memory.
#[global_allocator]
static ALLOCATOR: moeba::guard::BoundedAllocator = moeba::guard::BoundedAllocator;

fn main() -> std::process::ExitCode {
    moeba::cli::main()
}
