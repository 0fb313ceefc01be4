//! Models from a Hugging Face hub: finds the file of a repository that a name stands for, brings it
//! into the cache that all of the hub's programs share, and checks it.
//!
//! The decisions (`repo`, `choice`, `names`, `paths`, `range`, `url`, `listing`) know neither
//! network nor disk; `http` and `api` send requests, `download` writes one file, `snapshot` reads
//! and changes the cache's folders, and `fetch` puts them together.

mod api;
mod choice;
mod config;
mod download;
mod fetch;
mod http;
mod listing;
mod lock;
mod names;
mod paths;
mod range;
mod repo;
mod retry;
mod snapshot;
mod url;

pub use choice::{files_of, models_of};
pub use config::{Config, Patience, Token};
pub use fetch::{Ahead, Hub, Step};
pub use repo::{RepoId, Wanted, is_address};
pub use snapshot::Cached;
