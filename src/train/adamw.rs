//! AdamW (Loshchilov and Hutter, 2019, algorithm 2), with the usual constants.

const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.999;
const EPSILON: f32 = 1e-8;

/// Values that are trained.
pub struct Parameter {
    pub value: Vec<f32>,
    /// The latest batch's gradient.
    pub gradient: Vec<f32>,
    /// Running means of the gradient and of its square.
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Parameter {
    pub fn new(value: Vec<f32>) -> Parameter {
        let zeros = vec![0.0; value.len()];
        Parameter { gradient: zeros.clone(), first: zeros.clone(), second: zeros, value }
    }
}

pub struct AdamW {
    pub rate: f64,
    weight_decay: f64,
    n_steps: i32,
}

impl AdamW {
    pub fn new(rate: f64, weight_decay: f64) -> AdamW {
        AdamW { rate, weight_decay, n_steps: 0 }
    }

    /// All updates that follow are of one step.
    pub fn begin_step(&mut self) {
        self.n_steps += 1;
    }

    pub fn update(&self, parameter: &mut Parameter) {
        let rate = self.rate as f32;
        let kept = 1.0 - (self.rate * self.weight_decay) as f32;
        // Both means start at 0: what they lack in the first steps.
        let [scale_1, scale_2] = [BETA_1, BETA_2].map(|beta| 1.0 / (1.0 - beta.powi(self.n_steps)));
        let Parameter { value, gradient, first, second } = parameter;
        for (((x, g), m), v) in value.iter_mut().zip(gradient).zip(first).zip(second) {
            *m = BETA_1 * *m + (1.0 - BETA_1) * *g;
            *v = BETA_2 * *v + (1.0 - BETA_2) * *g * *g;
            *x = *x * kept - rate * (*m * scale_1) / ((*v * scale_2).sqrt() + EPSILON);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two steps by hand.
    #[test]
    fn a_step_is_the_algorithms() {
        let mut adamw = AdamW::new(0.1, 0.5);
        let mut x = Parameter::new(vec![1.0, -2.0]);
        x.gradient = vec![0.3, -4.0];
        adamw.begin_step();
        adamw.update(&mut x);
        // The first step moves by the rate, whatever the gradient's size.
        assert!(
            (x.value[0] - (0.95 - 0.1)).abs() < 1e-6 && (x.value[1] - (-1.9 + 0.1)).abs() < 1e-6
        );
        x.gradient = vec![0.0, 0.0];
        adamw.begin_step();
        adamw.update(&mut x);
        let (m, v) = (0.9 * 0.1 / 0.19f32, (0.999 * 0.001 / 0.001999f32).sqrt());
        let expected = 0.85 * 0.95 - 0.1 * m / v;
        assert!((x.value[0] - expected).abs() < 1e-5, "{} {expected}", x.value[0]);
    }

    #[test]
    fn the_minimum_of_a_bowl_is_found() {
        let mut adamw = AdamW::new(0.05, 0.0);
        let mut x = Parameter::new(vec![3.0, -5.0]);
        for _ in 0..1000 {
            x.gradient = x.value.iter().map(|x| x - 1.0).collect();
            adamw.begin_step();
            adamw.update(&mut x);
        }
        assert!(x.value.iter().all(|x| (x - 1.0).abs() < 1e-2), "{:?}", x.value);
    }
}
