//! The hot-expert table (PreScope): all experts of a model by how many tokens they have processed,
//! in a profile. It is static: the hottest experts are resident, whatever a run does.

use super::grid::Grid;
use super::{Event, Eviction, Expert, Profile, PromptRouted, Routed, Shape};

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
    pub const SECTION: &str = "prescope.hot";

    pub fn new(shape: &Shape) -> Self {
        let grid = Grid::new(shape);
        Self { tokens: vec![0; grid.n_cells()], grid }
    }

    /// The error is half a sentence.
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

    /// Hottest first; of equals the earlier layer, then the lower id.
    pub fn ranking(&self) -> Vec<Expert> {
        let mut cells: Vec<usize> = (0..self.grid.n_cells()).collect();
        cells.sort_by_key(|cell| std::cmp::Reverse(self.tokens[*cell]));
        cells.into_iter().map(|cell| self.grid.expert(cell)).collect()
    }
}

/// Drops the coldest expert of the profile's table. Without a profile the counts so far serve.
#[derive(Clone, Debug)]
pub struct Hot {
    profile: Option<HotTable>,
    /// Of all runs, this one included: the next run's profile.
    all: HotTable,
}

impl Hot {
    pub fn new(shape: &Shape) -> Self {
        Self::with(HotTable::new(shape))
    }

    /// With the table of earlier runs; one without any counts is none.
    pub fn with(table: HotTable) -> Self {
        let profile = (!table.is_empty()).then(|| table.clone());
        Self { profile, all: table }
    }
}

impl Eviction for Hot {
    fn observe(&mut self, event: &Event<'_>) {
        self.all.observe(event);
    }

    fn priority(&self, expert: Expert) -> f64 {
        self.profile.as_ref().unwrap_or(&self.all).tokens(expert) as f64
    }

    fn save(&self, profile: &mut Profile) {
        self.all.save(profile);
    }
}
