//! What keeps a template in bounds. It runs in a thread of its own with a stack of its own, and
//! ends by itself or is given up: fuel (instructions), nesting, bytes written, time, and, where
//! `BoundedAllocator` is the program's allocator, memory.

use super::environment::{NAME, describe};
use crate::guard::{self, Budget};
use crate::{Error, Result};
use minijinja::{Environment, Value};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// The longest published template is 17 kB.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;

/// Instructions of minijinja's machine. A message takes some hundred in the longest templates.
pub const FUEL: u64 = 20_000_000;

/// minijinja's depth of calls, loops and conditions; a macro call counts for several.
pub const RECURSION: usize = 300;

/// A prompt of this size is tens of millions of tokens.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// Dropping a value takes stack by its nesting: the 2.5 million levels that the fuel allows fit
/// into this one (a test builds them). It is address space, not memory, until it is used.
const BUDGET: Budget =
    Budget { bytes: 256 << 20, time: TIME, end: TIME, stack_bytes: 512 << 20, n_lost: &N_LOST };

/// Templates come with models, so none is refused because others were lost.
static N_LOST: AtomicUsize = AtomicUsize::new(0);

const TIME: Duration = Duration::from_secs(10);

/// Renders the environment's template.
pub fn render(environment: Arc<Environment<'static>>, context: Value) -> Result<String> {
    guarded(move || {
        let mut out = Capped(Vec::new());
        let template = environment.get_template(NAME).map_err(describe)?;
        template.render_captured_to(context, &mut out).map_err(describe)?;
        String::from_utf8(out.0)
            .map_err(|_| Error::invalid("the chat template's output is not UTF-8"))
    })
}

struct Capped(Vec<u8>);

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other(format!("more than {MAX_OUTPUT_BYTES} bytes of text")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs `work` within the bounds of a template.
pub fn guarded<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    guard::run("the chat template", BUDGET, work)
}
