//! The scores of a head that ranks, in double precision: there are few of them.

use crate::model::Model;
use crate::model::weights::Linear;
use crate::quant;

impl Model {
    /// The scores of a token's output, `[labels]`; several become probabilities.
    ///
    /// # Panics
    /// If the model has no head that ranks.
    pub fn classify(&self, output: &[f32]) -> Vec<f32> {
        let head = self.weights.classifier.as_ref().expect("a model that ranks");
        let mut scores: Vec<f64> = output.iter().map(|x| f64::from(*x)).collect();
        if let Some(dense) = &head.dense {
            scores = self.product(dense, &scores);
            scores.iter_mut().for_each(|x| *x = x.tanh());
        }
        if let Some(output) = &head.output {
            scores = self.product(output, &scores);
            if scores.len() > 1 {
                softmax(&mut scores);
            }
        }
        scores.iter().map(|x| *x as f32).collect()
    }

    fn product(&self, linear: &Linear, x: &[f64]) -> Vec<f64> {
        let mat = linear.weight.mat(&self.gguf);
        let mut row = vec![0.0; x.len()];
        let of_row = |r: usize| {
            quant::dequantize(mat.ty, mat.row(r), &mut row);
            let sum: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
            let bias = linear.bias.as_ref().map_or(0.0, |bias| f64::from(bias[r]));
            f64::from(linear.scale) * (sum + bias)
        };
        (0..linear.weight.rows).map(of_row).collect()
    }
}

fn softmax(scores: &mut [f64]) {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|x| *x /= sum);
}
