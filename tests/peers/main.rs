//! Peers: experts computed on other machines, to the same bits, whatever happens to these machines.

// Every golden model with two peers, in one process.
mod bits;

// A peer's routes: keys, wrong bodies, other models and versions.
mod access;

// A connection between head and peer that damages, cuts and stops.
mod middle;

// A failing peer costs nothing but time.
mod failures;

// Four machines in network namespaces.
mod network;

// Peers in this process and in processes of their own.
mod support;
