//! Cache policies, traces and replay.

// Profiles kept, damaged and refused; replays of the committed traces.
mod profiles;

// Replay counts the hits, misses and bytes of the live engine.
mod replay_live;

// `trace record`: the trace holds what the model computed.
mod trace_record;

// `trace train`: a predictor learned, kept and used.
mod trace_train;
