//! Parse the arguments and dispatch: nothing else.

use moeba::meter::CountingAllocator;

/// Keeps chat templates and grammars of unknown origin from taking all memory.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> std::process::ExitCode {
    moeba::sample::grammar::sandbox::serve_if_asked();
    moeba::cli::main()
}
