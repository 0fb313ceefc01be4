//! The part that all texts share: the map, and the rates of use that it corrects.

use super::map::Map;
use super::text::Text;
use crate::policy::grid::Grid;
use crate::policy::rates::Rates;
use std::ops::Range;

pub struct Learner {
    pub grid: Grid,
    pub map: Map,
    rates: Rates,
    /// Marks of a layer's experts: chosen by the token before, and by this one.
    was: Vec<f32>,
    is: Vec<f32>,
}

impl Learner {
    pub fn new(grid: Grid, map: Map) -> Learner {
        let rates = Rates::new(grid.n_cells());
        Learner { grid, map, rates, was: Vec::new(), is: Vec::new() }
    }

    /// A text of which no token has come yet.
    pub fn text(&self) -> Text {
        Text::new(self.grid.moe().len(), self.grid.n_cells())
    }

    /// A text's token has come to a layer: what the token before had said of it is compared with
    /// what it chose.
    pub fn routed(&mut self, text: &mut Text, layer: u32, chosen: &[u32], probs: &[f32]) {
        let (row, place) = (self.grid.row(layer), self.grid.place(layer));
        mark(&mut self.was, row.len(), text.chosen(place));
        mark(&mut self.is, row.len(), chosen);
        for (cell, (was, is)) in row.clone().zip(self.was.iter().zip(&self.is)) {
            if let Some(lesson) = &text.next {
                self.map.learn_next(cell, lesson, *is, self.rates.rate(cell));
            }
            if let Some(lesson) = &text.last {
                self.map.learn_own(cell, lesson, *was, self.rates.long()[cell]);
            }
        }
        self.rates.observe(row.clone(), chosen, probs);
        text.put(&self.map, place, row, chosen);
    }

    /// A text's token begins; `token`: its number, where it is known.
    pub fn begin_token(&mut self, text: &mut Text, token: Option<u32>) {
        text.token = token;
        text.next = text.last.is_some().then(|| {
            let input = self.map.input(text.summary(), token);
            self.map.begin_token(input)
        });
    }

    /// Updates the experts of all layers that the token which has begun is expected to use, if the
    /// text has a token to expect it from; whether it has.
    pub fn expect_next(&self, text: &mut Text) -> bool {
        if let Some(lesson) = &text.next {
            for (cell, expected) in text.expected.iter_mut().enumerate() {
                *expected = self.map.expected(cell, self.rates.rate(cell), &lesson.input);
            }
        }
        text.next.is_some()
    }

    /// Updates the experts of some places that the text's token behind the one on its way is
    /// expected to use.
    pub fn expect_behind(&self, text: &mut Text, places: Range<usize>) {
        let summary = self.map.centred(text.summary());
        for place in places {
            for cell in self.grid.row(self.grid.moe()[place]) {
                let rate = self.rates.rate(cell);
                text.expected[cell] = self.map.expected_of_any(cell, rate, &summary);
            }
        }
    }

    /// The text's token has come through all layers.
    pub fn end_token(&mut self, text: &mut Text) {
        text.settle();
        let token = text.token.take();
        let last = self.map.end_token(text.summary(), token);
        let chosen = text.cells(|place| self.grid.row(self.grid.moe()[place]).start);
        let rate = |cell| self.rates.rate(cell);
        text.horizon.end_token(&mut self.map, &last.input, chosen, rate);
        (text.last, text.next) = (Some(last), None);
    }

    /// The last tokens of a prompt, one after the other, as if they had been decoded.
    pub fn end_prompt(&mut self, text: &mut Text) {
        let mut prompt = std::mem::take(&mut text.prompt);
        let n_tokens = std::mem::take(&mut text.n_prompt);
        for token in 0..n_tokens {
            self.begin_token(text, None);
            for place in 0..prompt.len() {
                let layer = self.grid.moe()[place];
                let k = (prompt[place].len() / n_tokens).max(1);
                if let Some(chosen) = prompt[place].chunks_exact(k).nth(token) {
                    self.routed(text, layer, chosen, &[]);
                }
            }
            self.end_token(text);
        }
        prompt.iter_mut().for_each(Vec::clear);
        text.prompt = prompt;
    }
}

/// 1 at the chosen ones, 0 elsewhere. An id that is none of the layer's is no choice.
fn mark(marks: &mut Vec<f32>, n: usize, chosen: &[u32]) {
    marks.clear();
    marks.resize(n, 0.0);
    for expert in chosen {
        if let Some(mark) = marks.get_mut(*expert as usize) {
            *mark = 1.0;
        }
    }
}
