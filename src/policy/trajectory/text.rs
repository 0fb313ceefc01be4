//! The trajectory of one text: what its latest token has chosen in each layer. While a token goes
//! through the layers, those it has not come to yet still hold the choices of the token before.

use super::map::{Lesson, Map};
use super::vector::{RANK, Vector, add_scaled, difference};
use crate::policy::rates::tail;
use std::ops::Range;

#[derive(Clone, Debug)]
pub struct Text {
    /// The latest choice in each MoE layer.
    chosen: Vec<Vec<u32>>, // [places][k]
    /// The parts of the summary that these make, and their sum.
    parts: Vec<Vector>, // [places]
    summary: Vector,
    /// The last complete token, to learn from; `None` if the text has none, or is not known to go
    /// on from it.
    pub lesson: Option<Lesson>,
    /// Probabilities that the text's next token uses each expert. Valid once there is a lesson.
    pub expected: Vec<f32>, // [cells]
    /// The choices of the last tokens of the prompt that is being computed.
    pub prompt: Vec<Vec<u32>>, // [places][tokens, k]
    /// When it last took part in a pass.
    pub last_pass: u64,
}

impl Text {
    /// No token has come yet.
    pub fn new(n_places: usize, n_cells: usize) -> Text {
        Text {
            chosen: vec![Vec::new(); n_places],
            parts: vec![[0.0; RANK]; n_places],
            summary: [0.0; RANK],
            lesson: None,
            expected: vec![0.0; n_cells],
            prompt: vec![Vec::new(); n_places],
            last_pass: 0,
        }
    }

    pub fn chosen(&self, place: usize) -> &[u32] {
        &self.chosen[place]
    }

    pub fn summary(&self) -> &Vector {
        &self.summary
    }

    /// Its token has chosen experts of a layer that has the cells `row`.
    pub fn put(&mut self, map: &Map, place: usize, row: Range<usize>, chosen: &[u32]) {
        let latest = &mut self.chosen[place];
        latest.clear();
        latest.extend(chosen.iter().filter(|expert| (**expert as usize) < row.len()));
        let part = map.part(row.start, latest);
        let change = difference(&part, &self.parts[place]);
        add_scaled(&mut self.summary, 1.0, &change);
        self.parts[place] = part;
    }

    /// Adds the parts up again: changes leave rounding errors behind.
    pub fn settle(&mut self) {
        self.summary = [0.0; RANK];
        self.parts.iter().for_each(|part| add_scaled(&mut self.summary, 1.0, part));
    }

    /// Takes down a layer's choices for a prompt's last tokens. A prompt that is longer does not
    /// go on from the token that was last.
    pub fn put_prompt(&mut self, place: usize, chosen: &[u32], k: usize) {
        let rows = tail(chosen, k);
        if rows.len() * k.max(1) < chosen.len() {
            self.lesson = None;
        }
        self.prompt[place].clear();
        rows.for_each(|row| self.prompt[place].extend(row));
    }
}
