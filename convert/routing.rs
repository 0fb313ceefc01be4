//! How the routers of a file with random weights choose experts, which weights alone decide.
//!
//! The first elements of every embedding are the same number, so a row that begins with equal
//! weights adds a constant to what it computes. Constants in a router's rows make experts hot.
//! Equal constants in the rows of queries and keys make attention depend on the distance, by the
//! rotation of positions, and fall with a power of it; the output of the first layer's attention
//! is then the part of the routers' input that changes slowly.

use std::ops::Range;

use rand_chacha::rand_core::Rng;

use super::noise::RESIDUAL_SHARE;
use crate::gguf::TensorType;
use crate::quant;

/// How routers choose experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// By the token: each has experts of its own, and all experts are used as often.
    #[default]
    Uniform,
    /// By the token, but some experts of each layer are hot.
    Skewed,
    /// By the last tokens: the next token is likely to use the experts of this one.
    Sticky,
}

const NAMES: [(Routing, &str); 3] =
    [(Routing::Uniform, "uniform"), (Routing::Skewed, "skewed"), (Routing::Sticky, "sticky")];

/// Standard deviation of what a skewed router adds to the experts' logits, whatever the token; that
/// of the rest is about 1. With 8 of 128 experts a token, a cache of a quarter
/// (half) of them under LRU then finds what it finds on the trained demo model.
const HOT: f32 = 0.4;

/// The size of the first layer's attention in sticky files, relative to the embedding. It gives the
/// hits of the trained demo model as well.
const FIRST_ATTENTION: f32 = 1.8;

/// In sticky files a token at distance d has a weight of about d to minus this power.
const NEARNESS: f32 = 1.2;

impl Routing {
    /// By name, in either case.
    pub fn from_name(name: &str) -> Option<Routing> {
        NAMES.into_iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// All names, for messages and help.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.into_iter().map(|row| row.1)
    }
}

/// The facts about a model's attention that the constants depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// Rows of a head of queries, and those of them that get constants.
    pub rows: u64,
    pub rotated: Range<u64>,
    /// Elements of a head that rotate.
    pub n_rotated: u64,
    /// Rows of the latent vector that are the rotated key, where keys come from one.
    pub latent: Option<Range<u64>>,
    /// The factor of the dot product of a query and a key.
    pub scale: f32,
    pub rope_base: f32,
    /// Whether queries and keys are normalised.
    pub is_normed: bool,
    /// The factor of the embedding, relative to that of the parts that are added to it.
    pub embedding_scale: f32,
}

/// A tensor's differences from how it would be drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// Factor of the standard deviation, or of all of a norm's weights.
    pub factor: Option<f32>,
    pub start: Option<RowStart>,
}

/// The first elements of some rows of a matrix: the same number in each of them.
#[derive(Clone, Debug, PartialEq)]
pub struct RowStart {
    /// Numbers of the rows, counted from the start of each `period`.
    pub rows: Range<u64>,
    pub period: u64,
    pub value: Value,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A number that all rows share.
    Same(f32),
    /// Another one for each row, of this standard deviation.
    Random(f32),
}

/// Elements at the start of a row: a block of the narrowest formats.
const N_START: usize = 32;

/// The number that embeddings begin with. In 2,048 elements it is 3 % of the energy.
const COMMON: f32 = 1.5;

/// The factor of the part of a query or key that depends on the token, where another does not.
const CONTENT: f32 = 0.3;

impl Routing {
    /// The changes to a tensor.
    pub fn change(self, heads: &Heads, name: &str) -> Change {
        match (self, layer_of(name)) {
            (Routing::Uniform, _) => Change::default(),
            (_, None) if name == "token_embd.weight" => Change::start(0..1, 1, Value::Same(COMMON)),
            (_, None) => Change::default(),
            (Routing::Skewed, Some((layer, part))) => skewed(heads, layer, part),
            (Routing::Sticky, Some((layer, part))) => sticky(heads, layer, part),
        }
    }
}

/// The weight at the start of a row that adds 1 to its product with a normalised vector of this
/// length.
fn unit(length: f32) -> f32 {
    length / (COMMON * N_START as f32)
}

impl Heads {
    /// The length of the residual stream before a layer, relative to the embedding, if the first
    /// layer's attention has this size.
    fn length(&self, layer: usize, first: f32) -> f32 {
        let part = RESIDUAL_SHARE / self.embedding_scale;
        let parts = 2.0 * layer as f32 * part.powi(2);
        if layer == 0 { 1.0 } else { (1.0 + first.powi(2) + parts).sqrt() }
    }

    /// The size of elements of queries and keys that gives a token at distance d a weight of about
    /// d to minus `NEARNESS`. A pair of elements adds a cosine of the distance to the score, and
    /// the pairs' frequencies fall evenly on a logarithmic scale, so the score falls by the
    /// logarithm of the distance.
    fn size(&self) -> f32 {
        (NEARNESS * self.rope_base.ln() / (self.scale * self.n_rotated as f32)).sqrt()
    }

    /// The constant part of elements of queries and keys. Those that are normalised get their size
    /// from the norm's weights.
    fn constant(&self) -> f32 {
        if self.is_normed { 2.0 } else { self.size() }
    }
}

fn skewed(heads: &Heads, layer: usize, part: &str) -> Change {
    match part {
        "ffn_gate_inp.weight" => {
            let first = RESIDUAL_SHARE / heads.embedding_scale;
            Change::start(0..1, 1, Value::Random(HOT * unit(heads.length(layer, first))))
        }
        _ => Change::default(),
    }
}

fn sticky(heads: &Heads, layer: usize, part: &str) -> Change {
    let unit_here = unit(heads.length(layer, FIRST_ATTENTION));
    let constant = heads.constant();
    let of_heads = |value| Change {
        factor: Some(CONTENT),
        ..Change::start(heads.rotated.clone(), heads.rows, Value::Same(value))
    };
    match part {
        "attn_q.weight" | "attn_k.weight" => of_heads(constant * unit_here),
        // The low rank hands the common elements on.
        "attn_q_a.weight" => {
            Change::start(0..N_START as u64, u64::MAX, Value::Same(COMMON * unit_here))
        }
        "attn_q_b.weight" => of_heads(constant * unit(1.0)),
        "attn_kv_a_mqa.weight" => {
            let rows = heads.latent.clone().unwrap_or_default();
            Change::start(rows, u64::MAX, Value::Same(constant * unit_here))
        }
        "attn_q_norm.weight" | "attn_k_norm.weight" => Change::factor(heads.size()),
        "attn_output.weight" if layer == 0 => {
            Change::factor(FIRST_ATTENTION / RESIDUAL_SHARE * heads.embedding_scale)
        }
        _ => Change::default(),
    }
}

impl Change {
    fn factor(factor: f32) -> Change {
        Change { factor: Some(factor), start: None }
    }

    fn start(rows: Range<u64>, period: u64, value: Value) -> Change {
        Change { factor: None, start: Some(RowStart { rows, period, value }) }
    }
}

/// The layer and the rest of a tensor's name.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

impl RowStart {
    /// Changes rows of a tensor as stored; `first` is the number of the first one.
    pub fn set(
        &self,
        first: u64,
        ty: TensorType,
        row_len: usize,
        rng: &mut impl Rng,
        rows: &mut [u8],
    ) {
        let row_bytes = ty.row_bytes(row_len as u64).expect("whole blocks in a row") as usize;
        let n_blocks = N_START.div_ceil(ty.block_len());
        let n_bytes = n_blocks * ty.block_bytes();
        let mut values = vec![0.0; n_blocks * ty.block_len()];
        for (row, bytes) in (first..).zip(rows.chunks_exact_mut(row_bytes)) {
            if !self.rows.contains(&(row % self.period)) {
                continue;
            }
            let bytes = &mut bytes[..n_bytes];
            quant::dequantize(ty, bytes, &mut values);
            values[..N_START].fill(self.value.draw(rng));
            quant::quantize(ty, &values, bytes);
        }
    }
}

impl Value {
    fn draw(self, rng: &mut impl Rng) -> f32 {
        match self {
            Value::Same(x) => x,
            Value::Random(std) => {
                let unit = f64::from(rng.next_u32()) / f64::from(u32::MAX);
                3f32.sqrt() * std * (2.0 * unit - 1.0) as f32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    /// The heads of DeepSeek-V3.
    fn latent() -> Heads {
        Heads {
            rows: 192,
            rotated: 128..192,
            n_rotated: 64,
            latent: Some(512..576),
            scale: 192f32.sqrt().recip(),
            rope_base: 10_000.0,
            is_normed: false,
            embedding_scale: 1.0,
        }
    }

    #[test]
    fn uniform_files_are_as_they_are_drawn() {
        for name in ["token_embd.weight", "blk.0.attn_q.weight", "blk.3.ffn_gate_inp.weight"] {
            assert_eq!(Routing::Uniform.change(&latent(), name), Change::default());
        }
    }

    #[test]
    fn sticky_heads_see_the_distance_by_the_rows_that_rotate() {
        let rows = |name| Routing::Sticky.change(&latent(), name).start.map(|s| (s.rows, s.period));
        assert_eq!(rows("blk.5.attn_q_b.weight"), Some((128..192, 192)));
        assert_eq!(rows("blk.5.attn_kv_a_mqa.weight"), Some((512..576, u64::MAX)));
        assert_eq!(rows("blk.5.attn_q_a.weight"), Some((0..32, u64::MAX)));
        assert_eq!(rows("blk.5.attn_v_b.weight"), None);
        let factor = |name| Routing::Sticky.change(&latent(), name).factor;
        assert!(factor("blk.0.attn_output.weight").is_some_and(|x| x > 1.0));
        assert_eq!(factor("blk.1.attn_output.weight"), None);
    }

    /// The constant of a row is the product of its first elements and the embeddings'.
    #[test]
    fn a_constant_survives_every_format() {
        use TensorType::*;
        for ty in [F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K] {
            let (row_len, n_rows) = (512, 6);
            let start = RowStart { rows: 1..3, period: 4, value: Value::Same(0.25) };
            let n_bytes = ty.row_bytes(row_len as u64).unwrap() as usize * n_rows;
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let mut bytes = vec![0; n_bytes];
            let drawn = vec![-0.5; row_len * n_rows];
            quant::quantize(ty, &drawn, &mut bytes);
            // Rows 4 to 9 of the tensor.
            start.set(4, ty, row_len, &mut rng, &mut bytes);
            let mut values = vec![0.0; row_len * n_rows];
            quant::dequantize(ty, &bytes, &mut values);
            for (row, values) in (4..).zip(values.chunks_exact(row_len)) {
                let first = if [5, 6, 9].contains(&row) { 0.25 } else { -0.5 };
                let near = |x: &f32, y: f32| (x - y).abs() < 0.05;
                assert!(values[..N_START].iter().all(|x| near(x, first)), "{ty} {row}");
                assert!(values[N_START..].iter().all(|x| near(x, -0.5)), "{ty} {row}");
            }
        }
    }

    #[test]
    fn random_constants_differ_from_row_to_row() {
        let (value, mut rng) = (Value::Random(2.0), ChaCha8Rng::seed_from_u64(1));
        let drawn: Vec<f32> = (0..4096).map(|_| value.draw(&mut rng)).collect();
        let square = drawn.iter().map(|x| x * x).sum::<f32>() / 4096.0;
        assert!((1.9..2.1).contains(&square.sqrt()), "{square}");
    }
}
