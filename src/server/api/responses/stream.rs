//! The events of a response: created, in progress, its items, and how it has ended.

use serde_json::{Value, json};

use super::Head;
use super::output::{Items, WireEvent};
use crate::server::api::usage::{Live, timings};
use crate::server::errors::ApiError;
use crate::server::events::{Event, Finish};
use crate::server::sse::{Encoder, Frames};

pub struct ResponseStream {
    head: Head,
    items: Items,
    /// The number of the next event.
    sequence: u64,
    /// Events that are not written yet.
    ready: Vec<WireEvent>,
    has_timings: bool,
    has_progress: bool,
    live: Live,
}

impl ResponseStream {
    pub fn new(
        head: Head,
        items: Items,
        has_timings: bool,
        has_progress: bool,
        n_prompt: usize,
    ) -> ResponseStream {
        let live = Live::new(n_prompt);
        ResponseStream { head, items, sequence: 0, ready: vec![], has_timings, has_progress, live }
    }

    fn write(&mut self, name: &'static str, fields: Value, out: &mut Frames) {
        let mut event = json!({ "type": name, "sequence_number": self.sequence });
        self.sequence += 1;
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        out.event(name, &event);
    }

    /// An event with the whole response.
    fn response(&mut self, name: &'static str, response: Value, out: &mut Frames) {
        self.write(name, json!({ "response": response }), out);
    }
}

impl Encoder for ResponseStream {
    fn begin(&mut self, out: &mut Frames) {
        self.response("response.created", self.head.begun(), out);
        self.response("response.in_progress", self.head.begun(), out);
    }

    fn event(&mut self, _choice: usize, event: &Event, out: &mut Frames) {
        let progress = self.live.see(event);
        if let Some(progress) = progress.filter(|_| self.has_progress) {
            let mut fields = json!({ "response": self.head.begun(), "prompt_progress": progress });
            if self.has_timings {
                fields["timings"] = self.live.timings();
            }
            self.write("response.in_progress", fields, out);
        }
        self.items.push(event, &mut self.ready);
        for (name, mut fields) in std::mem::take(&mut self.ready) {
            if self.has_timings && name.ends_with(".delta") {
                fields["timings"] = self.live.timings();
            }
            self.write(name, fields, out);
        }
    }

    fn end(&mut self, finishes: &[Finish], out: &mut Frames) {
        let Some(finish) = finishes.first() else { return };
        let response = self.head.ended(self.items.done(), finish);
        let mut fields = json!({ "response": response });
        if self.has_timings {
            fields["timings"] = timings(finish);
        }
        self.write(super::end_name(finish), fields, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        let response = self.head.failed(self.items.done(), error);
        self.response("response.failed", response, out);
    }

    /// Clients count events, not comments.
    fn ping(&mut self, out: &mut Frames) {
        self.response("response.in_progress", self.head.begun(), out);
    }
}
