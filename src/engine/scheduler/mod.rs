//! Many texts at a time with one engine.
//!
//! [`Scheduler`] has a thread that computes: jobs come in by [`Scheduler::submit`], wait in a
//! bounded queue for a session, and give their text to a [`JobSink`]. [`Core`] is the same without
//! the thread: whoever has one text at a time calls its steps.

mod core;
mod histogram;
mod inbox;
mod job;
mod kv_budget;
mod ledger;
mod marks;
mod pages;
mod parking;
mod passes;
mod queue;
mod resting;
mod rows;
mod running;
mod saved_slots;
mod share;
mod slot;
mod status;
mod thread;

pub use self::core::Core;
pub use histogram::{Histogram, SECONDS};
pub use job::{AnySink, Job, JobSink, Owner};
pub(super) use pages::{Load, PAGE, Pages, Restored};
pub use saved_slots::{BetweenPasses, MovedText, SlotError};
pub use status::{Board, Counts, JobStatus, PageCounts, SlotStatus, Status};
pub use thread::{Refused, Scheduler, SchedulerOptions};
