//! The trajectory of one text: what its latest token has chosen in each layer. While a token goes
//! through the layers, those it has not come to yet still hold the choices of the token before.

use super::horizon::Horizon;
use super::map::{Lesson, Map};
use super::vector::{RANK, Vector, WIDTH, add_scaled, difference};
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
    pub last: Option<Lesson<RANK>>,
    /// The number of the token that is on its way, and what it was expected from.
    pub token: Option<u32>,
    pub next: Option<Lesson<WIDTH>>,
    pub horizon: Horizon,
    /// Probabilities that the text's next token uses each expert. Valid once there is a last token.
    pub expected: Vec<f32>, // [cells]
    /// The choices of the last tokens of the prompt that is being computed.
    pub prompt: Vec<Vec<u32>>, // [places][tokens, k]
    /// How many tokens these are.
    pub n_prompt: usize,
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
            last: None,
            token: None,
            next: None,
            horizon: Horizon::new(n_cells),
            expected: vec![0.0; n_cells],
            prompt: vec![Vec::new(); n_places],
            n_prompt: 0,
            last_pass: 0,
        }
    }

    /// Whether it was part of a pass since, so that it is of the next one, and it is known what it
    /// will use there.
    pub fn is_expected(&self, since: u64) -> bool {
        self.last.is_some() && self.last_pass >= since
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

    /// The cells that its token has chosen; `first`: the first cell of each place.
    pub fn cells(&self, first: impl Fn(usize) -> usize) -> Vec<u32> {
        let cells = |(place, chosen): (usize, &Vec<u32>)| {
            let first = first(place) as u32;
            chosen.iter().map(move |expert| first + expert).collect::<Vec<_>>()
        };
        self.chosen.iter().enumerate().flat_map(cells).collect()
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
            (self.last, self.next) = (None, None);
            self.horizon.forget();
        }
        self.n_prompt = rows.len();
        self.prompt[place].clear();
        rows.for_each(|row| self.prompt[place].extend(row));
    }
}
