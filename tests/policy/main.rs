//! Cache policies, traces and replay.

// Look-aheads are computed for predictors that want them alone.
mod look_aheads;

// Profiles kept, damaged and refused; replays of the committed traces.
mod profiles;

// Replay counts the hits, misses and bytes of the live engine.
mod replay_live;

// `trace record`: the trace holds what the model computed.
mod trace_record;

// `trace train`: a predictor learned, kept and used.
mod trace_train;

/// The profile's section of `auto` that keeps this candidate, and knows of no other.
fn auto_choice(kept: &str) -> Vec<u8> {
    let (version, numbers, pause) = (4u32.to_le_bytes(), [0, 0, 1], 16u32.to_le_bytes());
    let no_bout = [0; 1 + 2 * size_of::<f64>()];
    let ratio = 0f64.to_le_bytes();
    let head = [&version[..], &numbers, &pause, &pause, &no_bout].concat();
    [&head[..], &[kept.len() as u8], kept.as_bytes(), &ratio].concat()
}
