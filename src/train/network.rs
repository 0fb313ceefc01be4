//! The networks of `policy::papers::prescope::llapor::model` once more, as candle wants them to find gradients.

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::ops::sigmoid;

use super::augment::Noise;
use crate::policy::papers::prescope::llapor::{Group, LayerModel, Linear, Loss, Residual};

/// W x + b, in training.
struct Layer {
    /// [n_out, n_in]
    weight: Var,
    /// [n_out]
    bias: Var,
}

impl Layer {
    /// Uniform in ±1/√n_in.
    fn new(n_out: usize, n_in: usize, noise: &mut Noise) -> Result<Layer> {
        let bound = 1.0 / (n_in as f32).sqrt();
        let mut draw = |n| (0..n).map(|_| bound * (2.0 * noise.uniform() - 1.0)).collect();
        let weight = Tensor::from_vec(draw(n_out * n_in), (n_out, n_in), &Device::Cpu)?;
        let bias = Tensor::from_vec(draw(n_out), n_out, &Device::Cpu)?;
        Ok(Layer { weight: Var::from_tensor(&weight)?, bias: Var::from_tensor(&bias)? })
    }

    /// x: [n, n_in].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight.t()?)?.broadcast_add(&self.bias)
    }

    fn export(&self) -> Result<Linear> {
        let weight = self.weight.flatten_all()?.to_vec1()?;
        Ok(Linear::new(weight, self.bias.to_vec1()?, self.weight.dim(1)?))
    }
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

/// Values of this part are left out.
pub struct Dropout<'a> {
    pub part: f32,
    pub noise: &'a mut Noise,
}

impl Dropout<'_> {
    fn forward(&mut self, x: Tensor) -> Result<Tensor> {
        if self.part == 0.0 {
            return Ok(x);
        }
        let mask = self.noise.mask(x.elem_count(), self.part);
        let mask = Tensor::from_vec(mask, x.dims(), &Device::Cpu)?;
        x * mask
    }
}

impl Network {
    pub fn new(
        group: Group,
        [n_pca, n_inputs, width]: [usize; 3],
        loss: Loss,
        noise: &mut Noise,
    ) -> Result<Network> {
        let input = Layer::new(width, n_inputs, noise)?;
        let residual = match group {
            Group::Outer => None,
            Group::Middle => {
                let mut square = || Layer::new(width, width, noise);
                let (first, second) = (square()?, square()?);
                Some([first, second, Layer::new(width, n_pca, noise)?])
            }
        };
        let output = Layer::new(loss.balance.len(), width, noise)?;
        Ok(Network { n_pca, input, residual, output, loss })
    }

    pub fn variables(&self) -> Vec<Var> {
        let layers = [&self.input, &self.output].into_iter().chain(self.residual.iter().flatten());
        layers.flat_map(|layer| [layer.weight.clone(), layer.bias.clone()]).collect()
    }

    /// x: [n, n_inputs] to logits: [n, n_experts].
    pub fn forward(&self, x: &Tensor, dropout: &mut Dropout<'_>) -> Result<Tensor> {
        let mut y = dropout.forward(self.input.forward(x)?.gelu()?)?;
        if let Some([first, second, gate]) = &self.residual {
            let r = dropout.forward(first.forward(&y)?.gelu()?)?;
            let r = dropout.forward(second.forward(&r)?.gelu()?)?;
            let z = x.narrow(1, 0, self.n_pca)?.contiguous()?;
            y = (y + (sigmoid(&gate.forward(&z)?)? * r)?)?;
        }
        self.output.forward(&y)
    }

    /// The mean of L (see `policy::papers::prescope::llapor::Loss`) over examples and experts. `signs`: 1 where an
    /// expert was chosen and −1 where not, [n, n_experts].
    pub fn loss(&self, logits: &Tensor, signs: &Tensor) -> Result<Tensor> {
        let Loss { lambda, gamma, balance } = &self.loss;
        let lambda = f64::from(*lambda);
        let margin = (logits * signs)?;
        // −ln pₜ = ln(1 + e⁻ˣ), without overflow.
        let entropy = (margin.neg()?.relu()? + (margin.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
        let balance = Tensor::new(&balance[..], &Device::Cpu)?;
        let mut loss = (entropy.broadcast_mul(&balance)? * lambda)?;
        if lambda < 1.0 {
            let miss = sigmoid(&margin.neg()?)?;
            let focal = (miss.powf(f64::from(*gamma))? * entropy)?;
            loss = (loss + (focal * (1.0 - lambda))?)?;
        }
        loss.mean_all()
    }

    pub fn export(&self, compress: Linear) -> Result<LayerModel> {
        let residual = match &self.residual {
            None => None,
            Some([first, second, gate]) => {
                let blocks = [first.export()?, second.export()?];
                Some(Residual { blocks, gate: gate.export()? })
            }
        };
        let (input, output) = (self.input.export()?, self.output.export()?);
        Ok(LayerModel { compress, input, residual, output, loss: self.loss.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::papers::prescope::llapor::{Workspace, push_choice};

    const N_PCA: usize = 5;
    const N_SOURCE: usize = 6;
    const N_EXPERTS: usize = 4;

    fn loss() -> Loss {
        Loss { lambda: 0.3, gamma: 1.5, balance: vec![0.5, 1.5, 0.8, 1.2] }
    }

    fn network(group: Group, noise: &mut Noise) -> Network {
        Network::new(group, [N_PCA, N_PCA + 2 * N_SOURCE, 37], loss(), noise).unwrap()
    }

    #[test]
    fn inference_computes_what_was_trained() {
        let mut noise = Noise::new(5, 0);
        for group in [Group::Outer, Group::Middle] {
            let network = network(group, &mut noise);
            let mut hidden = vec![0.0; 9];
            let mut probs = vec![0.3; N_SOURCE];
            noise.blur(&mut hidden, 1.0);
            noise.blur(&mut probs, 0.1);
            let compress = Layer::new(N_PCA, 9, &mut noise).unwrap().export().unwrap();
            let model = network.export(compress.clone()).unwrap();
            model.check().unwrap();
            let mut work = Workspace::default();
            model.forward(&hidden, &[4, 1], &probs, &mut work);

            let mut x = Vec::new();
            compress.apply(&hidden, &mut x);
            push_choice(&[4, 1], &probs, N_SOURCE, &mut x);
            let x = Tensor::from_vec(x, (1, N_PCA + 2 * N_SOURCE), &Device::Cpu).unwrap();
            let mut dropout = Dropout { part: 0.0, noise: &mut noise };
            let logits = network.forward(&x, &mut dropout).unwrap().flatten_all().unwrap();
            for (a, b) in logits.to_vec1::<f32>().unwrap().iter().zip(&work.logits) {
                assert!((a - b).abs() < 1e-4, "{group:?}: {a} {b}");
            }
        }
    }

    /// Training and online updates descend the same slope.
    #[test]
    fn gradients_are_those_of_the_loss() {
        let mut noise = Noise::new(6, 0);
        let network = network(Group::Outer, &mut noise);
        let mut logits = vec![0.0; 2 * N_EXPERTS];
        noise.blur(&mut logits, 2.0);
        let signs = [1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0f32];
        let tensor = |x: &[f32]| Tensor::from_slice(x, (2, N_EXPERTS), &Device::Cpu).unwrap();
        let variable = Var::from_tensor(&tensor(&logits)).unwrap();
        let gradients = network.loss(&variable, &tensor(&signs)).unwrap().backward().unwrap();
        let gradients = gradients.get(&variable).unwrap().flatten_all().unwrap();
        for (at, gradient) in gradients.to_vec1::<f32>().unwrap().into_iter().enumerate() {
            let one = loss().gradient(at % N_EXPERTS, logits[at], signs[at] > 0.0);
            assert!((gradient - one / signs.len() as f32).abs() < 1e-6, "{at}");
        }
    }
}
