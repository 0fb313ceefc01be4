//! Sums of squares of what matrices are multiplied by, of which importance matrices are made.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Sums by tensor. Matrices that read the same rows share one entry.
#[derive(Debug, Default)]
pub struct InputSums(Mutex<BTreeMap<String, Sums>>);

/// The sums of one tensor.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    /// [matrices, columns]: sums of x².
    pub squares: Vec<f32>,
    /// Rows that were summed: one number for each matrix of a stack of experts, or one for all.
    pub counts: Vec<u64>,
    /// Another tensor of the same inputs.
    pub twin: Option<String>,
}

impl InputSums {
    /// Adds rows to the sums of a tensor; each comes with the number of its matrix, of `n_matrices`
    /// of `n_cols` columns.
    pub fn add<'x>(
        &self,
        name: &str,
        n_matrices: usize,
        n_cols: usize,
        rows: impl Iterator<Item = (usize, &'x [f32])>,
    ) {
        self.with(name, |sums| {
            sums.squares.resize(n_matrices * n_cols, 0.0);
            sums.counts.resize(n_matrices, 0);
            for (matrix, row) in rows {
                sums.counts[matrix] += 1;
                let sums = &mut sums.squares[matrix * n_cols..][..n_cols];
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
            }
        });
    }

    /// Says that a tensor reads what another one does.
    pub fn set_twin(&self, name: &str, twin: &str) {
        self.with(name, |sums| {
            if sums.twin.is_none() {
                sums.twin = Some(twin.to_owned());
            }
        });
    }

    fn with(&self, name: &str, change: impl FnOnce(&mut Sums)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.get_mut(name) {
            Some(sums) => change(sums),
            None => change(all.entry(name.to_owned()).or_default()),
        }
    }

    /// All sums so far, by the tensors' names.
    pub fn all(&self) -> BTreeMap<String, Sums> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let twins: Vec<_> =
            all.values().filter_map(|s| Some((s.twin.clone()?, s.clone()))).collect();
        all.extend(twins);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_summed_by_matrix_and_twins_have_the_same() {
        let sums = InputSums::default();
        let rows = [[1.0, 2.0], [3.0, 0.0], [0.5, 1.0]];
        sums.add("up", 3, 2, [2, 0, 2].into_iter().zip(rows.iter().map(|row| &row[..])));
        sums.set_twin("up", "gate");
        let all = sums.all();
        assert_eq!(all.keys().collect::<Vec<_>>(), ["gate", "up"]);
        for sums in all.values() {
            assert_eq!(sums.squares, [9.0, 0.0, 0.0, 0.0, 1.25, 5.0]);
            assert_eq!(sums.counts, [1, 0, 2]);
        }
    }
}
