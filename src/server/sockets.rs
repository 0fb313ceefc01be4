//! Open connections: how many there may be, by address and together, and which of them makes room
//! when there is no place.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Connections beyond the limit that are told so at a time; others are closed.
const MAX_REFUSED: usize = 128;

/// Time for which a connection may be idle, or a head half, while others want its place.
const HEAD_PATIENCE: Duration = Duration::from_secs(1);

/// Time for which a body may be slow while others want its place, and the bytes a second that are.
const BODY_PATIENCE: Duration = Duration::from_secs(2);
const SLOW_BODY: u64 = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Between two requests, or within a request's head.
    Head,
    Body,
    Answer,
}

/// How a connection is going.
#[derive(Debug)]
pub struct Activity {
    /// The phase, its beginning, and the bytes of the body.
    state: Mutex<(Phase, Instant, u64)>,
    is_evicted: AtomicBool,
    evicted: Notify,
}

impl Default for Activity {
    fn default() -> Self {
        let state = Mutex::new((Phase::Head, Instant::now(), 0));
        Activity { state, is_evicted: AtomicBool::default(), evicted: Notify::default() }
    }
}

impl Activity {
    fn begin(&self, phase: Phase) {
        *lock(&self.state) = (phase, Instant::now(), 0);
    }

    /// A request has come: until what is returned is dropped its answer is under way.
    pub fn answer(self: &Arc<Activity>) -> Answering {
        self.begin(Phase::Answer);
        Answering(self.clone())
    }

    /// A body is to be read, until what is returned is dropped.
    pub fn body(self: &Arc<Activity>) -> Reading {
        self.begin(Phase::Body);
        Reading(self.clone())
    }

    /// Something was written to the client.
    pub fn wrote(&self) {
        let mut state = lock(&self.state);
        if state.0 == Phase::Head {
            state.1 = Instant::now();
        }
    }

    /// The time for which it has held its place without need; `None` if it has not.
    fn idle(&self, now: Instant) -> Option<Duration> {
        let (phase, begin, n_bytes) = *lock(&self.state);
        let time = now.saturating_duration_since(begin);
        let is_idle = match phase {
            Phase::Head => time >= HEAD_PATIENCE,
            Phase::Body => time >= BODY_PATIENCE && is_slow(n_bytes, time, SLOW_BODY),
            Phase::Answer => false,
        };
        is_idle.then_some(time)
    }

    /// Whether its place was given to another one.
    pub fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::SeqCst)
    }

    /// Waits until then; true if there is no request whose answer could say so.
    pub async fn evicted(&self) -> bool {
        while !self.is_evicted() {
            self.evicted.notified().await;
        }
        lock(&self.state).0 == Phase::Head
    }
}

/// Whether bytes came at less than a rate.
pub fn is_slow(n_bytes: u64, time: Duration, per_second: u64) -> bool {
    (n_bytes as f64) < time.as_secs_f64() * per_second as f64
}

/// An answer that is under way.
#[derive(Debug)]
pub struct Answering(Arc<Activity>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.begin(Phase::Head);
    }
}

/// A body that is being read.
#[derive(Debug)]
pub struct Reading(Arc<Activity>);

impl Reading {
    /// Counts bytes that have come.
    pub fn add(&self, n_bytes: usize) {
        lock(&self.0.state).2 += n_bytes as u64;
    }

    pub fn is_evicted(&self) -> bool {
        self.0.is_evicted()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.begin(Phase::Answer);
    }
}

/// Open connections and, behind trusted proxies, requests.
#[derive(Clone, Debug)]
pub struct Sockets(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: usize,
    most_per_address: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    open: HashMap<u64, (Option<IpAddr>, Arc<Activity>)>,
    by_address: HashMap<IpAddr, usize>,
    n_refused: usize,
}

impl State {
    fn leave(&mut self, address: Option<IpAddr>) {
        if let Some(address) = address
            && let Some(n) = self.by_address.get_mut(&address)
        {
            *n -= 1;
            if *n == 0 {
                self.by_address.remove(&address);
            }
        }
    }

    fn remove(&mut self, id: u64) -> Option<Arc<Activity>> {
        let (address, activity) = self.open.remove(&id)?;
        self.leave(address);
        Some(activity)
    }

    /// Makes room: the connection that has been idle longest goes, of `address` if that is given.
    fn evict(&mut self, address: Option<IpAddr>) -> bool {
        let now = Instant::now();
        let own = |of: &Option<IpAddr>| address.is_none() || *of == address;
        let open = self.open.iter().filter(|(_, (of, _))| own(of));
        let idle = open.filter_map(|(id, (_, activity))| Some((activity.idle(now)?, *id)));
        let Some((_, id)) = idle.max() else { return false };
        if let Some(activity) = self.remove(id) {
            activity.is_evicted.store(true, Ordering::SeqCst);
            activity.evicted.notify_one();
        }
        true
    }
}

/// An open connection, until this is dropped.
#[derive(Debug)]
pub struct Socket {
    all: Sockets,
    id: u64,
    pub activity: Arc<Activity>,
    /// There is no place: its first request is told so.
    pub is_refused: bool,
}

/// A request of an address, until this is dropped.
#[derive(Debug)]
pub struct Place {
    all: Sockets,
    address: IpAddr,
}

impl Sockets {
    pub fn new(most: usize, most_per_address: usize) -> Sockets {
        Sockets(Arc::new(Shared { most, most_per_address, state: Mutex::default() }))
    }

    /// Open connections.
    pub fn count(&self) -> usize {
        let state = lock(&self.0.state);
        state.open.len() + state.n_refused
    }

    /// Connections and requests of an address at most.
    pub fn most_per_address(&self) -> usize {
        self.0.most_per_address
    }

    /// Takes in a connection. One without an address does not count for any. `None`: there are so
    /// many that it cannot even be told.
    pub fn enter(&self, address: Option<IpAddr>) -> Option<Socket> {
        let mut state = lock(&self.0.state);
        let own = address.and_then(|address| state.by_address.get(&address));
        let has_own = own.is_none_or(|n| *n < self.0.most_per_address);
        let has_place = (has_own || state.evict(address))
            && (state.open.len() < self.0.most || state.evict(None));
        if !has_place && state.n_refused >= MAX_REFUSED {
            return None;
        }
        let (id, activity) = (state.next, Arc::<Activity>::default());
        state.next += 1;
        match has_place {
            true => {
                state.open.insert(id, (address, activity.clone()));
                address.iter().for_each(|at| *state.by_address.entry(*at).or_insert(0) += 1);
            }
            false => state.n_refused += 1,
        }
        Some(Socket { all: self.clone(), id, activity, is_refused: !has_place })
    }

    /// Counts a request of an address behind a proxy; `None` if there are too many.
    pub fn place(&self, address: IpAddr) -> Option<Place> {
        let mut state = lock(&self.0.state);
        let own = state.by_address.entry(address).or_insert(0);
        let has_place = *own < self.0.most_per_address;
        *own += usize::from(has_place);
        has_place.then(|| Place { all: self.clone(), address })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let mut state = lock(&self.all.0.state);
        match self.is_refused {
            true => state.n_refused -= 1,
            false => drop(state.remove(self.id)),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.all.0.state).leave(Some(self.address));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No user of these panics while it holds one.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, n]))
    }

    fn served(sockets: &Sockets, address: Option<IpAddr>) -> Option<Socket> {
        sockets.enter(address).filter(|socket| !socket.is_refused)
    }

    #[test]
    fn an_address_and_all_together_have_a_bound() {
        let sockets = Sockets::new(8, 3);
        let mut held: Vec<Socket> = Vec::new();
        for n in 0..2 {
            held.extend((0..5).filter_map(|_| served(&sockets, address(n))));
        }
        assert_eq!(held.len(), 6);
        // Local ones have no bound of their own.
        held.extend((0..5).filter_map(|_| served(&sockets, None)));
        assert_eq!((held.len(), sockets.count()), (8, 8));
        assert!(served(&sockets, address(9)).is_none() && served(&sockets, None).is_none());
        held.pop();
        assert!(served(&sockets, None).is_some());
        drop(held);
        let state = lock(&sockets.0.state);
        assert!(state.by_address.is_empty() && state.open.is_empty());
    }

    #[test]
    fn so_many_are_told_that_there_is_no_place() {
        let sockets = Sockets::new(0, 1);
        let told: Vec<Socket> = (0..1000).filter_map(|_| sockets.enter(None)).collect();
        assert_eq!(told.len(), MAX_REFUSED);
        assert!(told.iter().all(|socket| socket.is_refused));
        drop(told);
        assert_eq!(sockets.count(), 0);
    }

    #[test]
    fn idle_and_slow_ones_make_room_and_answers_do_not() {
        let sockets = Sockets::new(3, 9);
        let all: Vec<Socket> = (0..3).filter_map(|n| served(&sockets, address(n))).collect();
        let _answer = all[0].activity.answer();
        let reading = all[1].activity.body();
        reading.add(1 << 20);
        assert!(served(&sockets, None).is_none(), "none is idle for long");
        let before = Instant::now() - Duration::from_secs(10);
        all.iter().for_each(|socket| lock(&socket.activity.state).1 = before);
        let first = served(&sockets, None).unwrap();
        assert!(all[2].activity.is_evicted() && !all[1].activity.is_evicted());
        // A tenth of a MiB a second is no slow body.
        let _answer_of_first = first.activity.answer();
        assert!(served(&sockets, None).is_none());
        lock(&all[1].activity.state).2 = 100;
        assert!(served(&sockets, None).is_some() && reading.is_evicted());
        assert!(!all[0].activity.is_evicted());
    }

    #[test]
    fn an_address_makes_room_for_itself() {
        let sockets = Sockets::new(9, 2);
        let all: Vec<Socket> = (0..2).filter_map(|_| served(&sockets, address(1))).collect();
        let before = Instant::now() - Duration::from_secs(10);
        all.iter().for_each(|socket| lock(&socket.activity.state).1 = before);
        assert!(served(&sockets, address(1)).is_some());
        assert_eq!(all.iter().filter(|socket| socket.activity.is_evicted()).count(), 1);
    }

    #[test]
    fn requests_behind_a_proxy_count_for_their_clients() {
        let sockets = Sockets::new(9, 2);
        let [one, other] = [1, 2].map(|n| IpAddr::from([10, 0, 0, n]));
        let held: Vec<Place> = (0..5).filter_map(|_| sockets.place(one)).collect();
        assert_eq!(held.len(), 2);
        assert!(sockets.place(other).is_some());
        assert!(served(&sockets, Some(one)).is_none(), "its own connections count, too");
        drop(held);
        assert!(sockets.place(one).is_some());
    }
}
