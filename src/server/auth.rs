//! API keys. A key is compared by its hash and in constant time, with every key there is.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::digest::{number_of, sha256};
use super::errors::{ApiError, Kind};
use crate::engine::scheduler::Owner;
use crate::{Error, Result};

/// A key of the server, without the key itself.
#[derive(Debug)]
pub struct Key {
    hash: [u8; 32],
    /// For logs.
    name: Arc<str>,
    weight: u32,
    /// Requests that may run at a time; `None` is any number.
    max_parallel: Option<usize>,
    n_running: Arc<AtomicUsize>,
    /// Whether its requests may have priorities.
    has_priority: bool,
}

/// The keys; with none, everyone may come in.
#[derive(Debug, Default)]
pub struct Keys(Vec<Key>);

/// The sender of a request.
#[derive(Clone, Debug)]
pub struct Client {
    pub owner: Owner,
    /// The key's name, if there are keys.
    pub name: Option<Arc<str>>,
    /// The requests of its key that run, and how many may.
    running: Option<(Arc<AtomicUsize>, usize)>,
    /// Whether its requests may have priorities.
    pub has_priority: bool,
    /// The priority that its headers say.
    pub said_priority: Option<String>,
}

/// A request that counts as running, until this is dropped.
#[derive(Debug, Default)]
pub struct Running(Option<Arc<AtomicUsize>>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(n) = &self.0 {
            n.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Client {
    /// A client without a key; clients at one address share their time.
    pub fn at(address: Option<IpAddr>) -> Client {
        let id = match address {
            None => 0,
            Some(address) => number_of(&sha256(address.to_string().as_bytes())),
        };
        let owner = Owner { id, weight: 1 };
        Client { owner, name: None, running: None, has_priority: false, said_priority: None }
    }

    /// The priority of a request whose body says `of_body`, or else of its headers; 0 if it may
    /// have none.
    pub fn priority(&self, of_body: Option<i64>) -> std::result::Result<i32, ApiError> {
        if !self.has_priority {
            return Ok(0);
        }
        let wrong = |path: &str, got: &str| {
            let message = format!("{path}: expected a whole number from -100 to 100, got {got}");
            ApiError::invalid(path, message)
        };
        let in_range = |n: i64| i32::try_from(n).ok().filter(|n| (-100..=100).contains(n));
        match (of_body, &self.said_priority) {
            (Some(n), _) => in_range(n).ok_or_else(|| wrong("priority", &n.to_string())),
            (None, Some(text)) => {
                let number = text.trim().parse().ok().and_then(in_range);
                number.ok_or_else(|| wrong("X-Priority", &format!("{text:?}")))
            }
            (None, None) => Ok(0),
        }
    }

    /// The salt of the client's texts in caches. Texts of different keys share none: the time of an
    /// answer would tell one what another has asked.
    pub fn salt(&self, of_request: &str) -> u64 {
        let key = if self.name.is_some() { self.owner.id } else { 0 };
        number_of(&sha256(&[&key.to_le_bytes(), of_request.as_bytes()].concat()))
    }

    /// Counts a request; an error if the key has too many.
    pub fn enter(&self) -> std::result::Result<Running, ApiError> {
        let Some((n, most)) = &self.running else { return Ok(Running(None)) };
        let entered =
            n.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| (n < *most).then_some(n + 1));
        if entered.is_err() {
            let message =
                format!("This key may have {most} requests at a time. Please try again in 1 s.");
            let error = ApiError::new(Kind::RateLimit, "rate_limit_exceeded", message);
            return Err(ApiError { retry_after: Some(1), ..error });
        }
        Ok(Running(Some(n.clone())))
    }
}

impl Keys {
    /// Adds a key that was given by itself.
    pub fn add(&mut self, key: &str) -> Result<()> {
        let number = self.0.len() + 1;
        self.push(key, format!("key {number}"), 1, None, false)
    }

    /// Adds the keys of a file: lines of `key [name] [weight=N] [max-parallel=N] [priority]`; `#`
    /// begins a comment.
    pub fn add_file(&mut self, text: &str) -> Result<()> {
        for (at, line) in text.lines().enumerate() {
            let mut words = line.split_whitespace();
            let Some(key) = words.next().filter(|word| !word.starts_with('#')) else { continue };
            let mut name = format!("key {}", self.0.len() + 1);
            let (mut weight, mut most, mut has_priority) = (1, None, false);
            for word in words {
                let wrong = |expected: &str| {
                    let line = at + 1;
                    Error::Usage(format!("line {line} of the key file: {word}: {expected}"))
                };
                let count =
                    |text: &str| text.parse::<u32>().ok().filter(|n| (1..=1000).contains(n));
                let expected = "expected a whole number from 1 to 1000";
                match word.split_once('=') {
                    Some(("weight", n)) => weight = count(n).ok_or_else(|| wrong(expected))?,
                    Some(("max-parallel", n)) => {
                        most = Some(count(n).ok_or_else(|| wrong(expected))? as usize);
                    }
                    Some(_) => return Err(wrong("expected weight=N or max-parallel=N")),
                    None if word == "priority" => has_priority = true,
                    None => name = word.to_owned(),
                }
            }
            self.push(key, name, weight, most, has_priority)?;
        }
        Ok(())
    }

    fn push(
        &mut self,
        key: &str,
        name: String,
        weight: u32,
        most: Option<usize>,
        has_priority: bool,
    ) -> Result<()> {
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::Usage("an API key is made of ASCII characters".into()));
        }
        let hash = sha256(key.as_bytes());
        self.0.push(Key {
            hash,
            name: name.into(),
            weight,
            max_parallel: most,
            n_running: Arc::default(),
            has_priority,
        });
        Ok(())
    }

    /// Lets keys that were there before keep the count of their requests.
    pub fn go_on_from(&mut self, before: &Keys) {
        for key in &mut self.0 {
            if let Some(old) = before.0.iter().find(|old| old.hash == key.hash) {
                key.n_running = old.n_running.clone();
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The client that has this key. The time that it takes does not depend on which key it is,
    /// nor on how much of one is right.
    pub fn find(&self, key: &str) -> Option<Client> {
        let hash = sha256(key.as_bytes());
        let mut found = u32::MAX;
        for (i, key) in (0u32..).zip(&self.0) {
            found.conditional_assign(&i, key.hash.ct_eq(&hash));
        }
        let key = self.0.get(found as usize)?;
        let owner = Owner { id: number_of(&key.hash), weight: key.weight };
        let running = key.max_parallel.map(|most| (key.n_running.clone(), most));
        let (name, has_priority) = (Some(key.name.clone()), key.has_priority);
        Some(Client { owner, name, running, has_priority, said_priority: None })
    }
}

/// Delays of clients that come with wrong keys: each failure of an address costs some time, one
/// after the other.
#[derive(Debug, Default)]
pub struct Failures(Mutex<HashMap<Option<IpAddr>, Instant>>);

const DELAY: Duration = Duration::from_millis(50);
/// Failures that wait at a time.
const MAX_WAITING: u32 = 100;

impl Failures {
    /// Counts a failure: how long its answer waits, or `None` if too many wait already.
    pub fn add(&self, address: Option<IpAddr>) -> Option<Duration> {
        let now = Instant::now();
        let mut next = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        next.retain(|_, at| *at > now);
        let waiting: Duration = next.values().map(|at| *at - now).sum();
        if waiting > DELAY * MAX_WAITING {
            return None;
        }
        let at = next.get(&address).copied().unwrap_or(now) + DELAY;
        next.insert(address, at);
        Some(at - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_what_they_are() {
        let mut keys = Keys::default();
        keys.add("alpha").unwrap();
        keys.add_file("# mine\n\nbeta bob weight=3 max-parallel=1\n").unwrap();
        assert_eq!(keys.len(), 2);
        for wrong in ["", "alph", "alphaa", "gamma", "Alpha"] {
            assert!(keys.find(wrong).is_none(), "{wrong}");
        }
        let alpha = keys.find("alpha").unwrap();
        let beta = keys.find("beta").unwrap();
        assert_ne!(alpha.owner.id, beta.owner.id);
        assert_eq!((beta.owner.weight, beta.name.as_deref()), (3, Some("bob")));
        let first = beta.enter().unwrap();
        let error = keys.find("beta").unwrap().enter().unwrap_err();
        assert_eq!((error.kind, error.retry_after), (Kind::RateLimit, Some(1)));
        drop(first);
        assert!(beta.enter().is_ok());
        for bad in ["k weight=0", "k weight=x", "k color=red", "kä"] {
            assert!(Keys::default().add_file(bad).is_err(), "{bad}");
        }
        assert!(!format!("{keys:?}").contains("alpha"));
    }

    #[test]
    fn failures_wait_one_after_the_other() {
        let failures = Failures::default();
        let first = failures.add(None).unwrap();
        let second = failures.add(None).unwrap();
        assert!(first <= DELAY && second > DELAY && second <= 2 * DELAY);
        let other = failures.add(Some(IpAddr::from([1, 2, 3, 4]))).unwrap();
        assert!(other <= DELAY);
        let refused = (0..200).filter(|_| failures.add(None).is_none()).count();
        assert!(refused > 100);
    }
}
