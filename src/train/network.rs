//! The networks of `policy::papers::prescope::llapor::model` in training: batches of examples, the
//! loss's gradient in every weight, and AdamW steps.

use super::adamw::{AdamW, Parameter};
use super::augment::Noise;
use super::matrix::{View, product};
use crate::policy::papers::prescope::llapor::{Group, LayerModel, Linear, Loss, Residual, sigmoid};
use crate::policy::papers::prescope::llapor::{gelu, gelu_slope};

/// W x + b, in training.
struct Layer {
    n_in: usize,
    /// [n_out, n_in]
    weight: Parameter,
    /// [n_out]
    bias: Parameter,
}

impl Layer {
    /// Uniform in ±1/√n_in.
    fn new(n_out: usize, n_in: usize, noise: &mut Noise) -> Layer {
        let bound = 1.0 / (n_in as f32).sqrt();
        let mut draw = |n| (0..n).map(|_| bound * (2.0 * noise.uniform() - 1.0)).collect();
        Layer {
            n_in,
            weight: Parameter::new(draw(n_out * n_in)),
            bias: Parameter::new(draw(n_out)),
        }
    }

    fn n_out(&self) -> usize {
        self.bias.value.len()
    }

    /// x: [n, n_in] → [n, n_out].
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let weight = View::new(&self.weight.value, self.n_in).transposed();
        let mut y = product(View::new(x, self.n_in), weight);
        for row in y.chunks_exact_mut(self.n_out()) {
            row.iter_mut().zip(&self.bias.value).for_each(|(y, bias)| *y += bias);
        }
        y
    }

    /// Sets the gradients of weight and bias from x: [n, n_in] and dy: [n, n_out].
    fn set_gradient(&mut self, x: &[f32], dy: &[f32]) {
        let n_out = self.n_out();
        let dy_by_output = View::new(dy, n_out).transposed();
        self.weight.gradient = product(dy_by_output, View::new(x, self.n_in));
        self.bias.gradient = vec![0.0; n_out];
        for row in dy.chunks_exact(n_out) {
            self.bias.gradient.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy);
        }
    }

    /// dy: [n, n_out] → dx: [n, n_in].
    fn backward(&self, dy: &[f32]) -> Vec<f32> {
        product(View::new(dy, self.n_out()), View::new(&self.weight.value, self.n_in))
    }

    fn export(&self) -> Linear {
        Linear::new(self.weight.value.clone(), self.bias.value.clone(), self.n_in)
    }
}

/// Values of this part are left out.
pub struct Dropout<'a> {
    pub part: f32,
    pub noise: &'a mut Noise,
}

/// gelu(u) times a mask, and what its gradient needs.
struct Activated {
    u: Vec<f32>,
    mask: Option<Vec<f32>>,
    y: Vec<f32>,
}

impl Activated {
    fn new(u: Vec<f32>, dropout: &mut Dropout<'_>) -> Activated {
        let mut y: Vec<f32> = u.iter().map(|u| gelu(*u)).collect();
        let mask = (dropout.part > 0.0).then(|| dropout.noise.mask(u.len(), dropout.part));
        if let Some(mask) = &mask {
            multiply(&mut y, mask);
        }
        Activated { u, mask, y }
    }

    /// dy → du, in place.
    fn backward(&self, dy: &mut [f32]) {
        if let Some(mask) = &self.mask {
            multiply(dy, mask);
        }
        dy.iter_mut().zip(&self.u).for_each(|(dy, u)| *dy *= gelu_slope(*u));
    }
}

fn multiply(values: &mut [f32], factors: &[f32]) {
    values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
}

/// The residual part: r₁, r₂, the gate's input and σ of its output.
struct Gated {
    first: Activated,
    second: Activated,
    z: Vec<f32>,
    open: Vec<f32>,
}

/// A forward pass: what the backward pass needs of it.
struct ForwardPass {
    hidden: Activated,
    gated: Option<Gated>,
    /// [n, width], the output layer's input.
    y: Vec<f32>,
    /// [n, n_experts]
    logits: Vec<f32>,
}

/// Everything but the compression, which is given.
pub struct Network {
    n_pca: usize,
    input: Layer,
    /// B₀, B₁ and G of the middle group.
    residual: Option<[Layer; 3]>,
    output: Layer,
    loss: Loss,
}

impl Network {
    pub fn new(
        group: Group,
        [n_pca, n_inputs, width]: [usize; 3],
        loss: Loss,
        noise: &mut Noise,
    ) -> Network {
        let input = Layer::new(width, n_inputs, noise);
        let residual = match group {
            Group::Outer => None,
            Group::Middle => {
                let (first, second) =
                    (Layer::new(width, width, noise), Layer::new(width, width, noise));
                Some([first, second, Layer::new(width, n_pca, noise)])
            }
        };
        let output = Layer::new(loss.balance.len(), width, noise);
        Network { n_pca, input, residual, output, loss }
    }

    /// x: [n, n_inputs], `chosen`: [n, n_experts]. Descends the slope of the mean loss over
    /// examples and experts, and returns that mean from before the step.
    pub fn step(
        &mut self,
        x: &[f32],
        chosen: &[bool],
        dropout: &mut Dropout<'_>,
        adamw: &mut AdamW,
    ) -> f32 {
        let pass = self.forward(x, dropout);
        let mean = self.mean_loss(&pass.logits, chosen);
        self.set_gradients(x, chosen, &pass);
        adamw.begin_step();
        for layer in self.layers_mut() {
            adamw.update(&mut layer.weight);
            adamw.update(&mut layer.bias);
        }
        mean
    }

    fn forward(&self, x: &[f32], dropout: &mut Dropout<'_>) -> ForwardPass {
        let hidden = Activated::new(self.input.forward(x), dropout);
        let mut y = hidden.y.clone();
        let gated = self.residual.as_ref().map(|[first, second, gate]| {
            let first = Activated::new(first.forward(&hidden.y), dropout);
            let second = Activated::new(second.forward(&first.y), dropout);
            let examples = x.chunks_exact(self.input.n_in);
            let z: Vec<f32> = examples.flat_map(|x| &x[..self.n_pca]).copied().collect();
            let mut open = gate.forward(&z);
            open.iter_mut().for_each(|g| *g = sigmoid(*g));
            for (y, (r, open)) in y.iter_mut().zip(second.y.iter().zip(&open)) {
                *y += open * r;
            }
            Gated { first, second, z, open }
        });
        let logits = self.output.forward(&y);
        ForwardPass { hidden, gated, y, logits }
    }

    /// The mean of L (see `Loss`) over examples and experts.
    fn mean_loss(&self, logits: &[f32], chosen: &[bool]) -> f32 {
        let n_experts = self.output.n_out();
        let value = |(at, (logit, chosen)): (usize, (&f32, &bool))| {
            f64::from(self.loss.value(at % n_experts, *logit, *chosen))
        };
        let sum: f64 = logits.iter().zip(chosen).enumerate().map(value).sum();
        (sum / logits.len() as f64) as f32
    }

    fn set_gradients(&mut self, x: &[f32], chosen: &[bool], pass: &ForwardPass) {
        let (n_experts, n) = (self.output.n_out(), pass.logits.len() as f32);
        let slope = |(at, (logit, chosen)): (usize, (&f32, &bool))| {
            self.loss.gradient(at % n_experts, *logit, *chosen) / n
        };
        let d_logits: Vec<f32> = pass.logits.iter().zip(chosen).enumerate().map(slope).collect();
        self.output.set_gradient(&pass.y, &d_logits);
        let mut d_hidden = self.output.backward(&d_logits);
        if let (Some([first, second, gate]), Some(gated)) = (&mut self.residual, &pass.gated) {
            let parts = d_hidden.iter().zip(&gated.second.y).zip(&gated.open);
            let d_gate: Vec<f32> = parts.map(|((dy, r), s)| dy * r * s * (1.0 - s)).collect();
            gate.set_gradient(&gated.z, &d_gate);
            let mut d_second = d_hidden.clone();
            multiply(&mut d_second, &gated.open);
            gated.second.backward(&mut d_second);
            second.set_gradient(&gated.first.y, &d_second);
            let mut d_first = second.backward(&d_second);
            gated.first.backward(&mut d_first);
            first.set_gradient(&pass.hidden.y, &d_first);
            let through = first.backward(&d_first);
            d_hidden.iter_mut().zip(through).for_each(|(dy, through)| *dy += through);
        }
        pass.hidden.backward(&mut d_hidden);
        self.input.set_gradient(x, &d_hidden);
    }

    fn layers_mut(&mut self) -> impl Iterator<Item = &mut Layer> {
        let residual = self.residual.iter_mut().flatten();
        [&mut self.input, &mut self.output].into_iter().chain(residual)
    }

    pub fn export(&self, compress: Linear) -> LayerModel {
        let residual = self.residual.as_ref().map(|[first, second, gate]| Residual {
            blocks: [first.export(), second.export()],
            gate: gate.export(),
        });
        let (input, output) = (self.input.export(), self.output.export());
        LayerModel { compress, input, residual, output, loss: self.loss.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::papers::prescope::llapor::{Workspace, push_choice};

    const N_PCA: usize = 5;
    const N_SOURCE: usize = 6;
    const N_INPUTS: usize = N_PCA + 2 * N_SOURCE;
    const N_EXPERTS: usize = 4;

    fn loss() -> Loss {
        Loss { lambda: 0.3, gamma: 1.5, balance: vec![0.5, 1.5, 0.8, 1.2] }
    }

    fn network(group: Group, width: usize, noise: &mut Noise) -> Network {
        Network::new(group, [N_PCA, N_INPUTS, width], loss(), noise)
    }

    #[test]
    fn inference_computes_what_was_trained() {
        let mut noise = Noise::new(5, 0);
        for group in [Group::Outer, Group::Middle] {
            let network = network(group, 37, &mut noise);
            let mut hidden = vec![0.0; 9];
            let mut probs = vec![0.3; N_SOURCE];
            noise.blur(&mut hidden, 1.0);
            noise.blur(&mut probs, 0.1);
            let compress = Layer::new(N_PCA, 9, &mut noise).export();
            let model = network.export(compress.clone());
            model.check().unwrap();
            let mut work = Workspace::default();
            model.forward(&hidden, &[4, 1], &probs, &mut work);

            let mut x = Vec::new();
            compress.apply(&hidden, &mut x);
            push_choice(&[4, 1], &probs, N_SOURCE, &mut x);
            let mut dropout = Dropout { part: 0.0, noise: &mut noise };
            for (a, b) in network.forward(&x, &mut dropout).logits.iter().zip(&work.logits) {
                assert!((a - b).abs() < 1e-4, "{group:?}: {a} {b}");
            }
        }
    }

    /// Every parameter's gradient against the difference of two losses, with the same values left
    /// out.
    #[test]
    fn gradients_are_the_slopes_of_the_loss() {
        const STEP: f32 = 1e-2;
        for group in [Group::Outer, Group::Middle] {
            let mut noise = Noise::new(6, 0);
            let mut network = network(group, 7, &mut noise);
            let mut x = vec![0.0; 3 * N_INPUTS];
            noise.blur(&mut x, 1.0);
            let chosen: Vec<bool> = (0..3 * N_EXPERTS).map(|i| i % 3 == 0).collect();
            let loss = |network: &Network| {
                let mut dropout = Dropout { part: 0.2, noise: &mut Noise::new(8, 0) };
                network.mean_loss(&network.forward(&x, &mut dropout).logits, &chosen)
            };
            let pass =
                network.forward(&x, &mut Dropout { part: 0.2, noise: &mut Noise::new(8, 0) });
            network.set_gradients(&x, &chosen, &pass);
            let n_layers = network.layers_mut().count();
            for at in 0..n_layers {
                let layer = network.layers_mut().nth(at).unwrap();
                let gradients =
                    [layer.weight.gradient.clone(), layer.bias.gradient.clone()].concat();
                let n_weights = layer.weight.value.len();
                for (i, gradient) in gradients.into_iter().enumerate() {
                    let mut moved = |by: f32| {
                        let layer = network.layers_mut().nth(at).unwrap();
                        match i.checked_sub(n_weights) {
                            None => layer.weight.value[i] += by,
                            Some(i) => layer.bias.value[i] += by,
                        }
                        loss(&network)
                    };
                    let (after, before) = (moved(STEP), moved(-2.0 * STEP));
                    moved(STEP);
                    let slope = (after - before) / (2.0 * STEP);
                    let far = (slope - gradient).abs();
                    assert!(
                        far < 2e-4 + 0.02 * gradient.abs(),
                        "{group:?} {at} {i}: {gradient} {slope}"
                    );
                }
            }
        }
    }
}
