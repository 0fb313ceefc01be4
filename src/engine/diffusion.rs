//! Masked tokens of a text filled in, a few a step (diffusion language models: LLaDA, arXiv
//! 2502.09992; Dream). Each step computes the whole text, draws a token for every masked position,
//! and keeps those of which the model is surest.

use super::{Engine, Session};
use crate::simd::kernels;
use crate::{Error, Result};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How many tokens a step keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    /// Blocks of this many positions, one after the other. A block's tokens are spread evenly over
    /// its steps, the earlier ones getting what is left over.
    Blocks(usize),
    /// A step keeps the part 1 − s/t of the masked positions, t falling from 1 to this ε in equal
    /// steps, s being the next one; the last step keeps all.
    Time(f32),
}

/// How sure the model is of a token that was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confidence {
    /// Positions are kept at random, whatever the model says.
    Origin,
    /// Minus the entropy of the candidates, the less the surer.
    Entropy,
    /// The best candidate's probability minus the second's.
    Margin,
    /// A random number.
    Random,
    /// The token's probability.
    Confidence,
}

impl std::str::FromStr for Confidence {
    type Err = String;

    /// By llama.cpp's name or number.
    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "origin" | "0" => Ok(Confidence::Origin),
            "entropy" | "1" => Ok(Confidence::Entropy),
            "margin" | "2" => Ok(Confidence::Margin),
            "random" | "3" => Ok(Confidence::Random),
            "confidence" | "4" => Ok(Confidence::Confidence),
            _ => Err("expected origin, entropy, margin, random or confidence".into()),
        }
    }
}

#[derive(Clone, Debug)]
pub struct DiffusionOptions {
    /// Positions behind the prompt.
    pub n_predict: usize,
    /// Steps in all.
    pub steps: usize,
    pub schedule: Schedule,
    pub confidence: Confidence,
    /// 0 takes the best candidate.
    pub temperature: f32,
    /// Candidates, the best; 0 is all of them.
    pub top_k: usize,
    /// Candidates, the best that together have this probability.
    pub top_p: f32,
    /// Logits are moved away from those of the text without its prompt, by this factor; 0 does not.
    pub guidance: f32,
    pub seed: u64,
    /// The token that stands for one that is not known.
    pub mask: u32,
    /// A position's logits are those of the position before it.
    pub is_shifted: bool,
}

impl DiffusionOptions {
    /// Fails if numbers do not fit each other.
    pub fn check(&self) -> Result<()> {
        let wrong = |why: String| Err(Error::Usage(why));
        let Schedule::Blocks(length) = self.schedule else { return Ok(()) };
        if length == 0 || !self.n_predict.is_multiple_of(length) {
            return wrong(format!(
                "blocks of {length}: expected a divisor of the {} tokens to fill in",
                self.n_predict
            ));
        }
        let n_blocks = self.n_predict / length;
        if !self.steps.is_multiple_of(n_blocks) {
            return wrong(format!(
                "{} steps: expected a multiple of the {n_blocks} blocks",
                self.steps
            ));
        }
        Ok(())
    }

    /// Tokens that step `step` of `n` keeps of a block's `n_masked`, of which `n_left` are masked.
    fn n_kept(&self, step: usize, n: usize, n_masked: usize, n_left: usize) -> usize {
        match self.schedule {
            Schedule::Blocks(_) => n_masked / n + usize::from(step < n_masked % n),
            Schedule::Time(_) if step + 1 == n => n_left,
            Schedule::Time(eps) => {
                let time = |step: usize| 1.0 - step as f32 / n as f32 * (1.0 - eps);
                (n_left as f32 * (1.0 - time(step + 1) / time(step))) as usize
            }
        }
    }
}

impl Engine {
    /// Fails if the model does not fill in masked tokens.
    pub fn check_fills_in(&self) -> Result<()> {
        self.check_has_logits()?;
        if self.model().hyper().sees_all {
            return Ok(());
        }
        let file = self.gguf().path().display();
        Err(Error::invalid(format!(
            "{file}: the model continues texts and does not fill in masked tokens: use moeba run"
        )))
    }

    /// Whether logits are those of the position before, by the file's `diffusion.shift_logits`.
    pub fn shifts_logits(&self) -> Result<bool> {
        Ok(self.gguf().bool("diffusion.shift_logits")?.unwrap_or(true))
    }
}

/// A token drawn for a masked position, and its merit.
#[derive(Clone, Copy)]
struct Drawn {
    position: usize,
    token: u32,
    confidence: f32,
}

/// Fills in `n_predict` tokens behind `prompt`; answers them. `on_step` is told of the number of
/// steps done and of the whole text before each step.
pub fn diffuse(
    session: &mut Session,
    prompt: &[u32],
    options: &DiffusionOptions,
    on_step: &mut dyn FnMut(usize, &[u32]) -> Result<()>,
) -> Result<Vec<u32>> {
    options.check()?;
    let mut text = prompt.to_vec();
    text.resize(prompt.len() + options.n_predict, options.mask);
    let block = match options.schedule {
        Schedule::Blocks(length) => length,
        Schedule::Time(_) => options.n_predict,
    };
    let n_blocks = options.n_predict / block;
    let n_steps = options.steps / n_blocks;
    let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
    let mut sampler = Drawer { options, rng: &mut rng, candidates: Vec::new() };
    for b in 0..n_blocks {
        let positions = prompt.len() + b * block..prompt.len() + (b + 1) * block;
        let n_masked = text[positions.clone()].iter().filter(|t| **t == options.mask).count();
        for step in 0..n_steps {
            on_step(b * n_steps + step, &text)?;
            let is_masked = |at: &usize| text[*at] == options.mask;
            let masked: Vec<usize> = positions.clone().filter(is_masked).collect();
            if masked.is_empty() {
                break;
            }
            let mut drawn = sampler.draw_all(session, &text, prompt.len(), &masked)?;
            let n = options.n_kept(step, n_steps, n_masked, masked.len());
            match options.confidence {
                Confidence::Origin => {
                    let part = n as f64 / masked.len() as f64;
                    drawn.retain(|_| uniform(sampler.rng) < part);
                }
                _ => {
                    drawn.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
                    drawn.truncate(n);
                }
            }
            drawn.iter().for_each(|drawn| text[drawn.position] = drawn.token);
        }
    }
    on_step(options.steps, &text)?;
    Ok(text.split_off(prompt.len()))
}

/// Draws tokens by logits.
struct Drawer<'a> {
    options: &'a DiffusionOptions,
    rng: &'a mut ChaCha12Rng,
    candidates: Vec<(u32, f32)>,
}

impl Drawer<'_> {
    /// A token for each of `masked`, positions in ascending order.
    fn draw_all(
        &mut self,
        session: &mut Session,
        text: &[u32],
        n_prompt: usize,
        masked: &[usize],
    ) -> Result<Vec<Drawn>> {
        let before = usize::from(self.options.is_shifted);
        let rows: Vec<usize> = masked.iter().map(|at| at.saturating_sub(before)).collect();
        let mut logits = logits_of(session, text, &rows)?;
        let n_vocab = logits.len() / rows.len();
        if self.options.guidance > 0.0 {
            let mut blind = text.to_vec();
            blind[..n_prompt].fill(self.options.mask);
            let blind = logits_of(session, &blind, &rows)?;
            for (logit, blind) in logits.iter_mut().zip(blind) {
                *logit = blind + (self.options.guidance + 1.0) * (*logit - blind);
            }
        }
        let each = masked.iter().zip(logits.chunks_exact(n_vocab));
        Ok(each
            .map(|(position, logits)| {
                let (token, confidence) = self.draw(logits);
                Drawn { position: *position, token, confidence }
            })
            .collect())
    }

    /// A token and how sure the model is of it.
    fn draw(&mut self, logits: &[f32]) -> (u32, f32) {
        let DiffusionOptions { temperature, top_k, top_p, .. } = *self.options;
        let all = &mut self.candidates;
        all.clear();
        all.extend(logits.iter().enumerate().map(|(id, logit)| (id as u32, *logit)));
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        if top_k > 0 {
            all.truncate(top_k);
        }
        let mut p: Vec<f32> = all.iter().map(|(_, logit)| *logit).collect();
        if top_p < 1.0 {
            kernels().softmax(&mut p);
            let mut sum = 0.0;
            let enough = |p: &f32| {
                sum += p;
                sum >= top_p
            };
            let n = p.iter().position(enough).map_or(p.len(), |last| last + 1);
            all.truncate(n);
            p = all.iter().map(|(_, logit)| *logit).collect();
        }
        if temperature > 0.0 {
            p.iter_mut().for_each(|p| *p /= temperature);
        }
        kernels().softmax(&mut p);
        let mut chosen = 0;
        if temperature > 0.0 {
            let mut left = uniform(self.rng) * p.iter().map(|p| f64::from(*p)).sum::<f64>();
            let is_it = |p: &f32| {
                left -= f64::from(*p);
                left < 0.0
            };
            chosen = p.iter().position(is_it).unwrap_or(p.len() - 1);
        }
        let confidence = match self.options.confidence {
            Confidence::Confidence | Confidence::Origin => p[chosen],
            Confidence::Margin => p[0] - p.get(1).copied().unwrap_or(0.0),
            Confidence::Entropy => p.iter().map(|p| p * (p + 1e-10).ln()).sum(),
            Confidence::Random => uniform(self.rng) as f32,
        };
        (all[chosen].0, confidence)
    }
}

/// Logits of some positions of a text, [positions, n_vocab]. Several positions may be one.
fn logits_of(session: &mut Session, text: &[u32], positions: &[usize]) -> Result<Vec<f32>> {
    session.truncate(0);
    let (mut logits, mut next) = (Vec::new(), 0);
    session.eval_all(text, &mut |at, row| {
        while positions.get(next) == Some(&at) {
            logits.extend_from_slice(row);
            next += 1;
        }
    })?;
    Ok(logits)
}

/// From 0 to below 1.
fn uniform(rng: &mut ChaCha12Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(schedule: Schedule) -> DiffusionOptions {
        DiffusionOptions {
            n_predict: 24,
            steps: 9,
            schedule,
            confidence: Confidence::Confidence,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            guidance: 0.0,
            seed: 0,
            mask: 1,
            is_shifted: false,
        }
    }

    #[test]
    fn steps_of_a_block_keep_all_of_it() {
        let options = options(Schedule::Blocks(8));
        options.check().unwrap();
        let kept: Vec<usize> = (0..3).map(|step| options.n_kept(step, 3, 8, 8)).collect();
        assert_eq!(kept, [3, 3, 2]);
        for (length, steps, why) in [(0, 9, "divisor"), (7, 9, "divisor"), (8, 10, "multiple")] {
            let wrong =
                DiffusionOptions { schedule: Schedule::Blocks(length), steps, ..options.clone() };
            assert!(wrong.check().unwrap_err().to_string().contains(why));
        }
    }

    #[test]
    fn steps_of_time_keep_equal_parts_and_then_the_rest() {
        let options = options(Schedule::Time(1e-3));
        let (mut left, mut kept) = (100, Vec::new());
        for step in 0..5 {
            kept.push(options.n_kept(step, 5, 100, left));
            left -= kept[step];
        }
        assert_eq!((left, kept), (0, vec![19, 20, 20, 20, 21]));
    }

    #[test]
    fn candidates_are_cut_and_drawn_by_the_seed() {
        let logits = [0.5f32, 3.0, -1.0, 2.0];
        let mut options = options(Schedule::Blocks(8));
        let draw = |options: &DiffusionOptions| {
            let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
            Drawer { options, rng: &mut rng, candidates: Vec::new() }.draw(&logits)
        };
        let sum: f32 = logits.iter().map(|l| l.exp()).sum();
        let (token, confidence) = draw(&options);
        assert_eq!(token, 1);
        assert!((confidence - 3f32.exp() / sum).abs() < 1e-6);
        options.confidence = Confidence::Margin;
        let margin = (3f32.exp() - 2f32.exp()) / sum;
        assert!((draw(&options).1 - margin).abs() < 1e-6);
        options.confidence = Confidence::Entropy;
        let entropy: f32 = logits.iter().map(|l| -l.exp() / sum * (l.exp() / sum).ln()).sum();
        assert!((draw(&options).1 + entropy).abs() < 1e-5);
        options = DiffusionOptions { top_k: 1, temperature: 1.0, ..options };
        assert_eq!(draw(&options).0, 1);
        options = DiffusionOptions { top_k: 0, top_p: 0.9, temperature: 5.0, ..options };
        let drawn: Vec<u32> =
            (0..40).map(|seed| draw(&DiffusionOptions { seed, ..options.clone() }).0).collect();
        assert!(drawn.contains(&1) && drawn.contains(&3) && !drawn.contains(&2), "{drawn:?}");
        let again: Vec<u32> =
            (0..40).map(|seed| draw(&DiffusionOptions { seed, ..options.clone() }).0).collect();
        assert_eq!(drawn, again);
    }
}
