//! The bounds of a template. It runs in a thread of its own with a stack of its own and ends by
//! itself: fuel (steps), nesting, bytes written, time, and, where `CountingAllocator` is the
//! program's allocator, memory.

use super::jinja::Limits;
use crate::Result;
use crate::meter::{self, Bounds};
use std::time::Duration;

/// The longest published template is 17 kB.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;

/// The limits of a rendering. A message takes some hundred steps in the longest templates; Python
/// ends a recursion near this depth too; a prompt of this size is tens of millions of tokens.
pub const LIMITS: Limits = Limits { steps: 10_000_000, depth: 200, output_bytes: 64 << 20 };

/// Dropping a value takes stack by its nesting: the 2.5 million levels that the fuel allows fit
/// into this one (a test builds them). It is address space, not memory, until it is used.
const BOUNDS: Bounds =
    Bounds { bytes: 256 << 20, time: Duration::from_secs(10), stack_bytes: 512 << 20 };

/// Runs `work` within the bounds of a template.
pub fn bounded<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    meter::run("the chat template", BOUNDS, work)
}
