//! `moeba serve` from outside: the program with the demo model, and raw HTTP over sockets.

// LoRA adapters and their scales.
mod adapters;

// Hosts, origins, keys, sockets of this machine.
mod access;

// Anthropic's messages: blocks, tools, thinking, caching, errors.
mod anthropic;

// Chat completions: whole, streamed, several choices, seeds, errors.
mod chat;

// Clients of others: curl, openai, litellm, LangChain.
mod clients;

// The same bytes beside other requests and in any setting.
mod determinism;

// Models that fill in masked tokens.
mod diffusion;

// Vectors of texts, and documents in the order of their scores.
mod embeddings;

// A disk that fails under a server.
mod faults;

// A model's file that changes under the server.
mod files;

// Texts that outlive the server.
mod kv_disk;

// Requests that mean harm: halves of headers, slow senders, deep JSON, large bodies.
mod hostile;

// The end of a server with its parent's, and what servers must have in common.
mod lifeline;

// What clients take from each other: memory of bodies, places, slots, time.
mod limits;

// Cancelling, a full queue, the end of the server.
mod load;

// What the most lenient servers take: notes, null, values that mean off, llama-server's fields.
mod lenient;

// Before the model is loaded.
mod loading;

// Several models behind one server: names, loading and leaving, memory, downloads.
mod models;

// Ollama's routes: lines, figures, tools, thinking, the model, what is not served.
mod ollama;

// The document of all routes and fields, against what the server does.
mod openapi;

// Behind nginx, watched by Prometheus, told by systemd, below a prefix.
mod operations;

// The page's files and headers, and the stream of the experts.
mod page;

// Texts that share memory, and those that wait for it.
mod parking;

// Responses: items in and out, streams, tools, reasoning, what is not served.
mod responses;

// The other routes: completions, tokens, models, health, metrics.
mod routes;

// Slots, priorities, requests without a cache.
mod scheduling;

// Schemas that cannot be enforced as a whole, of tools and forms on all routes.
mod schemas;

// Texts of slots to files and back.
mod slots;

// The server and a client.
mod support;
