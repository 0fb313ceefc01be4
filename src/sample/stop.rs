//! Stop strings over a stream of text: what could be the beginning of one is held back until it is
//! clear, because printed text cannot be taken back.

/// Text to pass on, and whether the generation is over.
#[derive(Debug, PartialEq, Eq)]
pub struct Stopped<'a> {
    pub text: &'a str,
    /// The stop string that was found. Neither it nor what follows it is in `text`.
    pub by: Option<&'a str>,
}

#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    ready: String,
    stopped: bool,
}

impl StopMatcher {
    /// Empty strings are left out: they would stop everything.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|s| !s.is_empty()).collect();
        Self { stops, ..Self::default() }
    }

    /// Takes the next part of the text. However the text is cut into parts, the stop string whose
    /// end comes first counts. Once stopped, nothing more is passed on.
    pub fn push(&mut self, text: &str) -> Stopped<'_> {
        self.ready.clear();
        if self.stopped {
            return Stopped { text: "", by: None };
        }
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(i, stop)| Some((self.held.find(stop)?, stop.len(), i)))
            .min_by_key(|&(start, len, _)| (start + len, start));
        if let Some((start, _, i)) = found {
            self.stopped = true;
            self.ready.push_str(&self.held[..start]);
            self.held.clear();
            return Stopped { text: &self.ready, by: Some(&self.stops[i]) };
        }
        let passed = self.held.len() - self.undecided();
        self.ready.extend(self.held.drain(..passed));
        Stopped { text: &self.ready, by: None }
    }

    /// Length of the longest end of the held text that begins a stop string.
    fn undecided(&self) -> usize {
        let longest = self.stops.iter().map(|s| s.len() - 1).max().unwrap_or(0);
        let first = self.held.len().saturating_sub(longest);
        (first..self.held.len())
            .filter(|&at| self.held.is_char_boundary(at))
            .find(|&at| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..])))
            .map_or(0, |at| self.held.len() - at)
    }

    /// The text that is still held when the text ends without a stop string.
    pub fn finish(&mut self) -> &str {
        self.ready = std::mem::take(&mut self.held);
        &self.ready
    }
}
