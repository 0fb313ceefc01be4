//! State of each request in progress.

/// An engine that does not say when requests end must not fill the memory.
const MAX_REQUESTS: usize = 64;

/// Oldest first. Few, so that a search is a scan.
#[derive(Clone, Debug)]
pub struct Requests<T> {
    list: Vec<(u32, T)>,
}

impl<T> Requests<T> {
    pub fn new() -> Self {
        Requests { list: Vec::new() }
    }

    pub fn position(&self, request: u32) -> Option<usize> {
        self.list.iter().position(|known| known.0 == request)
    }

    /// Begins a request that is not known. Returns the oldest request if that has to make room.
    pub fn begin(&mut self, request: u32, state: T) -> Option<T> {
        let oldest = if self.len() == MAX_REQUESTS { self.end_oldest() } else { None };
        self.list.push((request, state));
        oldest
    }

    pub fn end(&mut self, request: u32) -> Option<T> {
        let at = self.position(request)?;
        Some(self.list.remove(at).1)
    }

    pub fn end_oldest(&mut self) -> Option<T> {
        (!self.list.is_empty()).then(|| self.list.remove(0).1)
    }

    pub fn len(&self) -> usize {
        self.list.len()
    }

    pub fn at(&mut self, at: usize) -> &mut T {
        &mut self.list[at].1
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.list.iter().map(|known| &known.1)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.list.iter_mut().map(|known| &mut known.1)
    }
}
