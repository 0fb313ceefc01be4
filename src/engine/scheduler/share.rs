//! How prompts and decode share the time while both want it.

use std::time::Duration;

pub struct Share {
    /// The part of the time that prompts get, in 0..1.
    prompts: f64,
    /// Time that decode has had too little of, in seconds.
    owed_to_decode: f64,
}

impl Share {
    pub fn new(prompts: f64) -> Share {
        Share { prompts, owed_to_decode: 0.0 }
    }

    /// A prompt has computed while texts in decode waited.
    pub fn add_prompt(&mut self, time: Duration) {
        self.owed_to_decode += time.as_secs_f64() * (1.0 - self.prompts) / self.prompts;
    }

    /// A step of decode has computed while a prompt waited.
    pub fn add_decode(&mut self, time: Duration) {
        self.owed_to_decode -= time.as_secs_f64();
    }

    /// Starts over: one of the two wants no time.
    pub fn reset(&mut self) {
        self.owed_to_decode = 0.0;
    }

    /// Whether a step of decode comes before the prompt's next layer.
    pub fn is_decode_due(&self) -> bool {
        self.owed_to_decode >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time of prompts and of decode, in ms, when layers take `layer` and steps `step`, and the
    /// longest time without a step.
    fn run(prompts: f64, layer: u64, step: u64) -> [u64; 3] {
        let mut share = Share::new(prompts);
        let (mut times, mut gap) = ([0, 0, 0], 0);
        for _ in 0..1000 {
            while share.is_decode_due() {
                share.add_decode(Duration::from_millis(step));
                times[1] += step;
                times[2] = times[2].max(gap);
                gap = 0;
            }
            share.add_prompt(Duration::from_millis(layer));
            times[0] += layer;
            gap += layer;
        }
        times
    }

    #[test]
    fn each_gets_its_part_and_no_gap_is_longer_than_a_layer_or_a_step_takes() {
        for (layer, step) in [(1, 20), (20, 1), (100, 30), (7, 7)] {
            let [prompt, decode, gap] = run(0.5, layer, step);
            assert!(prompt.abs_diff(decode) <= layer + step, "{layer} {step}: {prompt} {decode}");
            assert!(gap <= layer + step, "{layer} {step}: {gap}");
        }
        let [prompt, decode, _] = run(0.8, 10, 10);
        assert!((3.9..4.1).contains(&(prompt as f64 / decode as f64)), "{prompt} {decode}");
    }
}
