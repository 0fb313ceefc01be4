//! The networks' weights and what they compute. Plain loops over f32 that the compiler turns into
//! vector instructions: a predictor is some 10⁵ to 10⁶ products, most of them the compression.

use super::loss::{Loss, sigmoid};
use crate::policy::Shape;

/// W x + b.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    n_in: usize,
    /// W: [n_out, n_in], rows in turn.
    weight: Vec<f32>,
    /// b: [n_out].
    bias: Vec<f32>,
}

/// How many sums a dot product is made of: two registers' worth of AVX-512.
const LANES: usize = 32;

impl Linear {
    /// There are as many rows as biases.
    pub fn new(weight: Vec<f32>, bias: Vec<f32>, n_in: usize) -> Linear {
        assert_eq!(weight.len(), bias.len() * n_in, "weights for {} outputs", bias.len());
        Linear { n_in, weight, bias }
    }

    pub fn n_in(&self) -> usize {
        self.n_in
    }

    pub fn n_out(&self) -> usize {
        self.bias.len()
    }

    pub fn weight(&self) -> &[f32] {
        &self.weight
    }

    pub fn bias(&self) -> &[f32] {
        &self.bias
    }

    fn n_products(&self) -> usize {
        self.weight.len()
    }

    /// Overwrites `y`.
    pub fn apply(&self, x: &[f32], y: &mut Vec<f32>) {
        assert_eq!(x.len(), self.n_in);
        y.clear();
        let rows = self.weight.chunks_exact(self.n_in);
        y.extend(rows.zip(&self.bias).map(|(row, bias)| dot(row, x) + bias));
    }

    /// W −= g xᵀ, b −= g.
    fn descend(&mut self, x: &[f32], g: impl Fn(usize) -> f32) {
        let rows = self.weight.chunks_exact_mut(self.n_in);
        for (at, (row, bias)) in rows.zip(&mut self.bias).enumerate() {
            let g = g(at);
            *bias -= g;
            row.iter_mut().zip(x).for_each(|(w, x)| *w -= g * x);
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// The approximation with tanh (Hendrycks and Gimpel, 2016): ½ (1 + tanh u) = σ(2u).
pub fn gelu(x: f32) -> f32 {
    x * sigmoid(SQRT_8_OVER_PI * (x + CUBIC * x * x * x))
}

/// The derivative of `gelu`.
pub fn gelu_slope(x: f32) -> f32 {
    let s = sigmoid(SQRT_8_OVER_PI * (x + CUBIC * x * x * x));
    s + x * s * (1.0 - s) * SQRT_8_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
}

const SQRT_8_OVER_PI: f32 = 1.595_769_1;
const CUBIC: f32 = 0.044_715;

/// A middle layer's second part, and the gate through which it acts.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual {
    /// B₀ and B₁: width to width.
    pub blocks: [Linear; 2],
    /// G: the compressed activation to width.
    pub gate: Linear,
}

/// The predictor of one layer; letters as in the module's description.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerModel {
    /// C
    pub compress: Linear,
    /// A
    pub input: Linear,
    pub residual: Option<Residual>,
    /// O
    pub output: Linear,
    pub loss: Loss,
}

/// Buffers of a forward pass, reused by the next ones.
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// x = (z, a, w)
    features: Vec<f32>,
    /// y
    pub hidden: Vec<f32>,
    blocks: [Vec<f32>; 2],
    gate: Vec<f32>,
    pub logits: Vec<f32>,
}

impl LayerModel {
    /// Activations h that the earlier router saw are so long.
    pub fn n_embd(&self) -> usize {
        self.compress.n_in()
    }

    /// J
    pub fn n_experts(&self) -> usize {
        self.output.n_out()
    }

    /// I, of the layer before.
    pub fn n_source(&self) -> usize {
        (self.input.n_in() - self.compress.n_out()) / 2
    }

    pub fn n_products(&self) -> usize {
        let residual = self.residual.iter().flat_map(|r| r.blocks.iter().chain([&r.gate]));
        let all = [&self.compress, &self.input, &self.output].into_iter().chain(residual);
        all.map(Linear::n_products).sum()
    }

    /// Checks that all matrices fit each other. Returns the reason as a clause, for use after a
    /// colon.
    pub fn check(&self) -> Result<(), String> {
        let (n_pca, width) = (self.compress.n_out(), self.input.n_out());
        let mut fits = self.input.n_in() == n_pca + 2 * self.n_source()
            && self.input.n_in() > n_pca
            && self.output.n_in() == width
            && self.loss.balance.len() == self.n_experts();
        if let Some(Residual { blocks, gate }) = &self.residual {
            let square = |block: &Linear| block.n_in() == width && block.n_out() == width;
            fits &= blocks.iter().all(square) && gate.n_in() == n_pca && gate.n_out() == width;
        }
        if fits { Ok(()) } else { Err("its matrices do not fit each other".into()) }
    }

    /// From the earlier layer's `hidden` `[n_embd]`, what it chose, and its probabilities
    /// `[n_source]`. Fills `work.hidden` and `work.logits`.
    pub fn forward(&self, hidden: &[f32], chosen: &[u32], probs: &[f32], work: &mut Workspace) {
        self.compress.apply(hidden, &mut work.features);
        push_choice(chosen, probs, self.n_source(), &mut work.features);
        self.input.apply(&work.features, &mut work.hidden);
        activate(&mut work.hidden);
        if let Some(Residual { blocks, gate }) = &self.residual {
            let [first, second] = &mut work.blocks;
            blocks[0].apply(&work.hidden, first);
            activate(first);
            blocks[1].apply(first, second);
            activate(second);
            gate.apply(&work.features[..self.compress.n_out()], &mut work.gate);
            for (y, (r, g)) in work.hidden.iter_mut().zip(second.iter().zip(&work.gate)) {
                *y += sigmoid(*g) * r;
            }
        }
        self.output.apply(&work.hidden, &mut work.logits);
    }

    /// A step of stochastic gradient descent in the output layer, for what was predicted from
    /// `work` when `chosen` were right. The rate is in parts of 1 + |y|², by which a unit of it
    /// would move the logits (normalised least mean squares): so it suits networks of any width.
    pub fn learn(&mut self, work: &Workspace, chosen: &[u32], rate: f32) {
        let norm = 1.0 + work.hidden.iter().map(|y| y * y).sum::<f32>();
        let Self { output, loss, .. } = self;
        output.descend(&work.hidden, |expert| {
            let chosen = chosen.contains(&(expert as u32));
            rate / norm * loss.gradient(expert, work.logits[expert], chosen)
        });
    }
}

fn activate(values: &mut [f32]) {
    values.iter_mut().for_each(|x| *x = gelu(*x));
}

/// Appends a and w, I of each: which experts were chosen, and their probabilities in parts of the
/// sum of them.
pub fn push_choice(chosen: &[u32], probs: &[f32], n_experts: usize, features: &mut Vec<f32>) {
    let start = features.len();
    features.resize(start + 2 * n_experts, 0.0);
    let (is_chosen, weights) = features[start..].split_at_mut(n_experts);
    let sum: f32 = chosen.iter().map(|&expert| probs[expert as usize]).sum();
    for expert in chosen.iter().map(|&expert| expert as usize) {
        is_chosen[expert] = 1.0;
        weights[expert] = if sum > 0.0 { probs[expert] / sum } else { 0.0 };
    }
}

/// Predictors for each MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LlaporModel {
    /// From the MoE layer before; none where a layer is dense.
    pub layers: Vec<Option<LayerModel>>,
    /// From the one before that; none at all if they were not trained.
    pub second: Vec<Option<LayerModel>>,
}

impl LlaporModel {
    pub fn has_second(&self) -> bool {
        self.second.iter().any(Option::is_some)
    }

    /// Checks that it fits a model of this shape. Returns the reason as a clause, for use after a
    /// colon.
    pub fn check(&self, shape: &Shape) -> Result<(), String> {
        let mut n_embd = None;
        check_layers(&self.layers, shape, 1, &mut n_embd)?;
        if self.has_second() {
            check_layers(&self.second, shape, 2, &mut n_embd)?;
        }
        Ok(())
    }

    /// Width of the activations; 0 without MoE layers.
    pub fn n_embd(&self) -> usize {
        self.layers.iter().flatten().next().map_or(0, LayerModel::n_embd)
    }
}

/// `n_embd`: the length of activations, once one is known.
fn check_layers(
    layers: &[Option<LayerModel>],
    shape: &Shape,
    distance: usize,
    n_embd: &mut Option<usize>,
) -> Result<(), String> {
    if layers.len() != shape.n_layers() {
        let n = layers.len();
        return Err(format!("it has {n} layers, the model has {}", shape.n_layers()));
    }
    let moe: Vec<usize> = shape.moe_layers().collect();
    if let Some(dense) = (0..layers.len()).find(|at| layers[*at].is_some() && !moe.contains(at)) {
        return Err(format!("it predicts layer {dense}, which has no experts"));
    }
    for (i, &at) in moe.iter().enumerate() {
        let Some(layer) = &layers[at] else { return Err(format!("it has nothing for layer {at}")) };
        layer.check().map_err(|e| format!("layer {at}: {e}"))?;
        let source = moe[(i + distance * moe.len() - distance) % moe.len()];
        let (n_source, n_experts) = (shape.n_experts[source], shape.n_experts[at]);
        if (layer.n_source(), layer.n_experts()) != (n_source, n_experts) {
            let (from, to) = (layer.n_source(), layer.n_experts());
            return Err(format!(
                "layer {at}: it predicts {to} experts from {from}, the model has {n_experts} \
                 after {n_source}"
            ));
        }
        if *n_embd.get_or_insert(layer.n_embd()) != layer.n_embd() {
            return Err(format!("layer {at}: its activations have another length"));
        }
    }
    Ok(())
}
