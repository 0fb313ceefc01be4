//! The gate of a pool: the caller opens it for a region, workers go in as they come, and the caller
//! closes it and waits for those inside. A worker that has not come in is not waited for: if the
//! system gives its processor to another program for a time slice, that holds up nothing.
//!
//! One word, `state`: the region's number, whether the gate is open, how many are inside, who
//! sleeps, whether the pool ends. It is only ever changed by atomic changes, which therefore happen
//! in one order, each of which acquires what the ones before it have released.
//!
//! The region's data are written before `open` and read after `enter`, which changes the word that
//! `open` has released. They are written again only after `close`, which has acquired every `leave`
//! and lets no worker in.
//!
//! No wake-up is lost. A worker that is about to sleep says so in the word, and finds by that very
//! change whether a region has begun; `open` finds by its own whether somebody sleeps. Whichever
//! comes second sees the other. If it is `open`, it passes through the lock, which the worker holds
//! until it waits. A caller that is about to sleep and the last worker that leaves are alike.

use super::sync::{AtomicU64, Condvar, Mutex, Ordering};

/// Workers inside: the low bits.
const INSIDE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
/// The caller sleeps until no worker is inside, or is about to.
const WAITED_FOR: u64 = 1 << 17;
/// A worker sleeps until the gate opens, or is about to.
const ASLEEP: u64 = 1 << 18;
const END: u64 = 1 << 19;
/// One region, in the high bits.
const REGION: u64 = 1 << 20;

#[derive(Default)]
pub struct Gate {
    state: AtomicU64,
    lock: Mutex<()>,
    opened: Condvar,
    emptied: Condvar,
}

/// The number of the last region that a worker was in.
#[derive(Default)]
pub struct Seen(u64);

fn is_empty(state: u64) -> bool {
    state & INSIDE == 0
}

impl Seen {
    /// Whether a worker has not seen what `state` says.
    fn is_behind(&self, state: u64) -> bool {
        state & END > 0 || state & OPEN > 0 && state / REGION != self.0
    }
}

impl Gate {
    /// By the caller, while the gate is closed: a new region.
    pub fn open(&self) {
        let before = self.state.fetch_add(REGION | OPEN, Ordering::AcqRel);
        debug_assert_eq!(before & (INSIDE | OPEN | WAITED_FOR), 0);
        self.wake(before);
    }

    /// By the caller: closes the gate and returns when no worker is inside. `spin` waits for a
    /// while for its argument to become true, and says whether it did.
    pub fn close(&self, spin: impl FnOnce(&dyn Fn() -> bool) -> bool) {
        if is_empty(self.state.fetch_and(!OPEN, Ordering::AcqRel))
            || spin(&|| is_empty(self.state.load(Ordering::Acquire)))
        {
            return;
        }
        let mut lock = self.lock.lock().expect("no panic under this lock");
        let mut state = self.state.fetch_or(WAITED_FOR, Ordering::AcqRel);
        while !is_empty(state) {
            lock = self.emptied.wait(lock).expect("no panic under this lock");
            state = self.state.load(Ordering::Acquire);
        }
        self.state.fetch_and(!WAITED_FOR, Ordering::AcqRel);
    }

    /// By the caller, while the gate is closed: every worker's next `enter` says that this is all.
    pub fn end(&self) {
        self.wake(self.state.fetch_or(END, Ordering::AcqRel));
    }

    fn wake(&self, before: u64) {
        if before & ASLEEP > 0 {
            let lock = self.lock.lock();
            self.state.fetch_and(!ASLEEP, Ordering::AcqRel);
            drop(lock);
            self.opened.notify_all();
        }
    }

    /// By a worker: waits for a region that it was not in. False at the pool's end. `spin` is as
    /// for `close`.
    pub fn enter(&self, seen: &mut Seen, spin: impl Fn(&dyn Fn() -> bool) -> bool) -> bool {
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if !seen.is_behind(state) {
                if !spin(&|| seen.is_behind(self.state.load(Ordering::Relaxed))) {
                    self.sleep(seen);
                }
            } else if state & END > 0 {
                return false;
            } else {
                let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
                let enter = self.state.compare_exchange(state, state + 1, success, failure);
                if enter.is_ok() {
                    seen.0 = state / REGION;
                    return true;
                }
            }
        }
    }

    fn sleep(&self, seen: &Seen) {
        let mut lock = self.lock.lock().expect("no panic under this lock");
        while !seen.is_behind(self.state.fetch_or(ASLEEP, Ordering::AcqRel)) {
            lock = self.opened.wait(lock).expect("no panic under this lock");
        }
    }

    /// By a worker that has entered.
    pub fn leave(&self) {
        let before = self.state.fetch_sub(1, Ordering::AcqRel);
        if before & INSIDE == 1 && before & WAITED_FOR > 0 {
            drop(self.lock.lock());
            self.emptied.notify_one();
        }
    }
}
