//! A name for a request by all that its answer's bytes follow from, so that who repeats it can show
//! that it is the same one.

use sha2::{Digest, Sha256};

use super::digest::hex;
use super::request::{Prompt, Request};

/// The header that has the name.
pub const HEADER: &str = "x-moeba-request-hash";

/// The digest of a prompt's tokens and of the parameters that decide what follows them, among
/// them how much of each adapter the text takes. The
/// request's seed is the one that its first answer has.
pub fn hash(request: &Request, prompt: &[u32], adapters: &[f32]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update((prompt.len() as u64).to_le_bytes());
    prompt.iter().for_each(|token| hash.update(token.to_le_bytes()));
    let Request { sampling, limits, n_choices, form, n_logprobs, .. } = request;
    hash.update(format!("{sampling:?} {limits:?} {n_choices} {form:?} {n_logprobs:?}"));
    if let Prompt::Chat(chat) = &request.prompt {
        let calls = (&chat.tools, &chat.tool_choice, chat.has_parallel_calls);
        let reasoning = (chat.reasoning_budget, chat.keeps_reasoning_in_content);
        hash.update(format!("{calls:?} {reasoning:?}"));
    }
    adapters.iter().for_each(|scale| hash.update(scale.to_le_bytes()));
    hash.finalize().into()
}

/// The name of a request, or of several that came as one.
pub fn name<'a>(hashes: impl Iterator<Item = &'a [u8; 32]>) -> String {
    let hash = hashes.fold(Sha256::new(), |all, hash| all.chain_update(hash)).finalize();
    hex(&hash)
}
