//! The kernels: PTX, by file.

/// (file's stem, text), of kernels/ptx; build.rs lists the folder. A stem `x.sm_80` is x again, for
/// devices of that compute capability and newer.
pub const MODULES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The module that has the kernel of this name, for a device of this compute capability: of several
/// the one for the newest that it is.
pub fn module_of(kernel: &str, (major, minor): (u32, u32)) -> Option<usize> {
    let entry = format!(".entry {kernel}(");
    // Stems come in order, so that what is for all comes before its variants.
    let for_all = MODULES.iter().position(|(_, text)| text.contains(&entry))?;
    let variant = |at: &usize| -> Option<u32> {
        let of = MODULES[*at].0.strip_prefix(MODULES[for_all].0)?.strip_prefix(".sm_")?;
        of.parse().ok().filter(|sm| *sm <= 10 * major + minor)
    };
    let variants = (0..MODULES.len()).filter(|at| variant(at).is_some());
    Some(variants.max_by_key(variant).unwrap_or(for_all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_get_what_was_made_for_them() {
        let module = |kernel, compute| module_of(kernel, compute).map(|at| MODULES[at].0);
        for compute in [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0)] {
            assert_eq!(module("rope", compute), Some("rope"));
            let prompts =
                if compute < (8, 0) { "attention_prompt" } else { "attention_prompt.sm_80" };
            assert_eq!(module("attention_prompt_64", compute), Some(prompts));
            assert_eq!(module("no_such", compute), None);
        }
    }
}
