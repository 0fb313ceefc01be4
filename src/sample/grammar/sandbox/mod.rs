//! Grammars are tried out by another process before this one compiles them (`process`), on Linux.

#[cfg(not(target_os = "linux"))]
mod absent;
#[cfg(target_os = "linux")]
mod process;

#[cfg(not(target_os = "linux"))]
pub use absent::{Sandbox, lower_priority, serve_if_asked, use_program};
#[cfg(target_os = "linux")]
pub use process::{Sandbox, lower_priority, serve_if_asked, use_program};
