//! How many tokens each expert has processed, over all runs: the profile's answer to which experts
//! are worth having before a run has routed anything (PreScope's hot-expert table).

use super::grid::Grid;
use super::{Event, Expert, Profile, PromptRouted, Routed, Shape};

/// Tokens that each expert has processed, of prompts and decode steps.
#[derive(Clone, Debug)]
pub struct HotTable {
    grid: Grid,
    /// [experts of the model]
    tokens: Vec<u64>,
}

impl HotTable {
    /// The profile's section. Layout, little-endian: the model's header (`Grid::header`); then a
    /// u64 an expert, layer after layer.
    pub const SECTION: &str = "hot";

    pub fn new(shape: &Shape) -> Self {
        let grid = Grid::new(shape);
        Self { tokens: vec![0; grid.n_cells()], grid }
    }

    /// Returns the reason as a clause, for use after a colon.
    pub fn restore(shape: &Shape, bytes: &[u8]) -> Result<Self, String> {
        let mut table = HotTable::new(shape);
        let counts = table.grid.strip_header(bytes)?;
        if counts.len() != size_of_val(&table.tokens[..]) {
            return Err(format!("{} bytes are not a count for each expert", counts.len()));
        }
        for (tokens, bytes) in table.tokens.iter_mut().zip(counts.chunks_exact(size_of::<u64>())) {
            *tokens = u64::from_le_bytes(bytes.try_into().expect("chunks are of that size"));
        }
        Ok(table)
    }

    pub fn save(&self, profile: &mut Profile) {
        let mut out = self.grid.header();
        out.extend(self.tokens.iter().flat_map(|tokens| tokens.to_le_bytes()));
        profile.set(Self::SECTION, out);
    }

    pub fn observe(&mut self, event: &Event<'_>) {
        match *event {
            Event::Routed(Routed { layer, chosen, .. }) => {
                chosen.iter().for_each(|&expert| self.add(Expert { layer, expert }, 1));
            }
            Event::PromptRouted(PromptRouted { layer, counts, .. }) => {
                let counts = counts.iter().zip(0..);
                counts.for_each(|(n, expert)| self.add(Expert { layer, expert }, u64::from(*n)));
            }
            _ => {}
        }
    }

    fn add(&mut self, expert: Expert, n: u64) {
        let tokens = &mut self.tokens[self.grid.cell(expert)];
        *tokens = tokens.saturating_add(n);
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.iter().all(|tokens| *tokens == 0)
    }

    pub fn tokens(&self, expert: Expert) -> u64 {
        self.tokens[self.grid.cell(expert)]
    }

    /// The part of a layer's tokens that each expert has processed, layer after layer, times `k`:
    /// the probability that a token uses it. 0 throughout a layer that nothing is known of.
    pub fn rates(&self, k: usize) -> Vec<f32> {
        let mut rates = vec![0.0; self.tokens.len()];
        for layer in self.grid.moe() {
            let row = self.grid.row(*layer);
            let tokens = &self.tokens[row.clone()];
            let sum: f64 = tokens.iter().map(|tokens| *tokens as f64).sum();
            let rate = |tokens: u64| (tokens as f64 * k as f64 / sum.max(1.0)).min(1.0) as f32;
            rates[row].iter_mut().zip(tokens).for_each(|(r, tokens)| *r = rate(*tokens));
        }
        rates
    }

    /// Hottest first; of equals the earlier layer, then the lower id.
    pub fn ranking(&self) -> Vec<Expert> {
        let mut cells: Vec<usize> = (0..self.grid.n_cells()).collect();
        cells.sort_by_key(|cell| std::cmp::Reverse(self.tokens[*cell]));
        cells.into_iter().map(|cell| self.grid.expert(cell)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_parts_of_the_tokens_of_a_layer() {
        let mut table = HotTable::new(&Shape::of_model(vec![3, 0, 2], 2));
        let chosen = [[0, 1], [0, 2], [0, 1], [0, 1]];
        for chosen in &chosen {
            let (probs, hidden) = (&[][..], &[][..]);
            let routed = Routed { request: 0, layer: 0, chosen, probs, hidden, ahead: None };
            table.observe(&Event::Routed(routed));
        }
        assert_eq!(table.rates(2), [1.0, 0.75, 0.25, 0.0, 0.0]);
    }
}
