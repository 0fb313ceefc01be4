//! Any bytes as a GGUF file.

#![no_main]

#[path = "../../gguf_support/exercise.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::exercise(bytes);
});
