//! Downloads from a model hub, served by a small HTTP server on this machine.

// The program with names of hub models in place of files.
mod cli;

// The library: ranges, redirects, refusals, stalls, wrong bytes.
mod download;

// The server.
