//! The program as users call it: what it prints, which files it writes, how it ends.

// Flags, help, usage errors, completions, exit codes: everything before a model is opened.
mod args;

// Bytes and operations a token, as `bench` counts them, against counts by hand.
mod bench_walls;

// Command lines of model cards and guides run as they are published.
mod cards;

// The interactive chat on a pseudo-terminal.
mod chat;

// NVIDIA drivers that are missing, too old, incomplete or without a usable GPU.
mod cuda_driver;

// Devices on the command line, planned on the emulated GPU.
mod devices;

// `doctor`: its JSON and its table.
mod doctor;

// `embed`: formats, and agreement with `logits`.
mod embed;

// Messages about model files, vocabularies, token ids, messages and chat templates.
mod files;

// `imatrix`, divergence from another model, and scores of tasks.
mod judge;

// `launch`: what it prints for each client.
mod launch;

// `logits`, `perplexity` and `bench`.
mod measure;

// Answers of `run` that follow a grammar or a JSON schema.
mod grammar;

// `moeba` alone on a terminal, and the bundled model.
mod overview;

// Files that commands write, and files that they must not replace.
mod outputs;

// Plans for published models' shapes.
mod preset;

// `run`: output, ends of generations, prompts, signals.
mod run;
