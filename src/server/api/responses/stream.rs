//! The events of a response: created, in progress, its items, and how it has ended.

use serde_json::{Value, json};

use super::Head;
use super::output::{Items, WireEvent};
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
}

impl ResponseStream {
    pub fn new(head: Head, items: Items) -> ResponseStream {
        ResponseStream { head, items, sequence: 0, ready: Vec::new() }
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
        self.items.push(event, &mut self.ready);
        for (name, fields) in std::mem::take(&mut self.ready) {
            self.write(name, fields, out);
        }
    }

    fn end(&mut self, finishes: &[Finish], out: &mut Frames) {
        let Some(finish) = finishes.first() else { return };
        let response = self.head.ended(self.items.done(), finish);
        self.response(super::end_name(finish), response, out);
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
