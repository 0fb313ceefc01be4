//! Cache policies, traces and replay.

// Look-aheads are computed for predictors that want them alone.
mod look_aheads;

// Profiles kept, damaged and refused; replays of the committed traces.
mod profiles;

// Replay counts the hits, misses and bytes of the live engine.
mod replay_live;

// `trace import`: routing of other programs, its statistics and its bounds.
mod trace_import;

// `trace record`: the trace holds what the model computed.
mod trace_record;

// `trace train`: a predictor learned, kept and used.
mod trace_train;
