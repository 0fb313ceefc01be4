//! The part that all texts share: the map, and the rates of use that it corrects.

use super::map::{Map, Outcome};
use super::text::Text;
use crate::policy::grid::Grid;
use crate::policy::rates::Rates;

pub struct Learner {
    pub grid: Grid,
    k: usize,
    pub map: Map,
    rates: Rates,
    /// Marks of a layer's experts: chosen by the token before, and by this one.
    was: Vec<f32>,
    is: Vec<f32>,
}

impl Learner {
    pub fn new(grid: Grid, k: usize, map: Map) -> Learner {
        let rates = Rates::new(grid.n_cells());
        Learner { grid, k, map, rates, was: Vec::new(), is: Vec::new() }
    }

    /// Experts that a token uses in a layer.
    pub fn k(&self) -> usize {
        self.k
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
        if let Some(lesson) = &text.lesson {
            for (cell, (own, next)) in row.clone().zip(self.was.iter().zip(&self.is)) {
                let (usual, rate) = (self.rates.long()[cell], self.rates.rate(cell));
                let outcome = Outcome { own: *own, usual, next: *next, rate };
                self.map.learn(cell, lesson, outcome);
            }
        }
        self.rates.observe(row.clone(), chosen, probs);
        text.put(&self.map, place, row, chosen);
    }

    /// Updates the experts of a layer that the text's next token is expected to use.
    pub fn expect(&self, text: &mut Text, layer: u32) {
        let summary = self.map.centred(text.summary());
        for cell in self.grid.row(layer) {
            text.expected[cell] = self.map.expected(cell, self.rates.rate(cell), &summary);
        }
    }

    /// The text's token has come through all layers.
    pub fn end_token(&mut self, text: &mut Text) {
        text.settle();
        text.lesson = Some(self.map.end_token(text.summary()));
    }

    /// The last tokens of a prompt, one after the other, as if they had been decoded.
    pub fn end_prompt(&mut self, text: &mut Text) {
        let mut prompt = std::mem::take(&mut text.prompt);
        let k = self.k.max(1);
        let n_tokens = prompt.iter().map(|chosen| chosen.len() / k).max().unwrap_or(0);
        for token in 0..n_tokens {
            for place in 0..prompt.len() {
                let layer = self.grid.moe()[place];
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
