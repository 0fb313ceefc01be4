//! The bounds of a template. It runs in a thread of its own with a stack of its own, and
//! ends by itself or is given up: fuel (steps), nesting, bytes written, time, and, where
//! `BoundedAllocator` is the program's allocator, memory.

use super::jinja::Limits;
use crate::Result;
use crate::guard::{self, Budget};
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// The longest published template is 17 kB.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;

/// The limits of a rendering. A message takes some hundred steps in the longest templates; Python
/// ends a recursion near this depth too; a prompt of this size is tens of millions of tokens.
pub const LIMITS: Limits = Limits { steps: 10_000_000, depth: 200, output_bytes: 64 << 20 };

/// Dropping a value takes stack by its nesting: the 2.5 million levels that the fuel allows fit
/// into this one (a test builds them). It is address space, not memory, until it is used.
const BUDGET: Budget =
    Budget { bytes: 256 << 20, time: TIME, end: TIME, stack_bytes: 512 << 20, n_lost: &N_LOST };

/// Templates come with models, so none is refused because others were lost.
static N_LOST: AtomicUsize = AtomicUsize::new(0);

const TIME: Duration = Duration::from_secs(10);

/// Runs `work` within the bounds of a template.
pub fn guarded<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    guard::run("the chat template", BUDGET, work)
}
