//! Tensor names against the patterns of descriptors.

/// The layer and the expert in a name that fits a pattern.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct At {
    pub layer: Option<u64>,
    pub expert: Option<u64>,
}

/// Compares part by part between dots; `{layer}` and `{expert}` stand for a number.
pub fn matched(pattern: &str, name: &str) -> Option<At> {
    let mut at = At::default();
    let (mut parts, mut found) = (pattern.split('.'), name.split('.'));
    loop {
        match (parts.next(), found.next()) {
            (None, None) => return Some(at),
            (Some(part), Some(text)) => {
                if let Some((before, after)) = part.split_once("{layer}") {
                    at.layer = Some(number(before, text, after)?);
                } else if let Some((before, after)) = part.split_once("{expert}") {
                    at.expert = Some(number(before, text, after)?);
                } else if part != text {
                    return None;
                }
            }
            _ => return None,
        }
    }
}

/// A number as checkpoints write it: `07` would be another tensor's name.
fn number(before: &str, text: &str, after: &str) -> Option<u64> {
    let text = text.strip_prefix(before)?.strip_suffix(after)?;
    let n: u64 = text.parse().ok()?;
    (n.to_string() == text).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names_only() {
        let pattern = "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight";
        let at = matched(pattern, "model.layers.3.mlp.experts.12.up_proj.weight");
        assert_eq!(at, Some(At { layer: Some(3), expert: Some(12) }));
        for name in [
            "model.layers.03.mlp.experts.12.up_proj.weight",
            "model.layers.3.mlp.experts.12.up_proj",
            "model.layers.3.mlp.experts.12.up_proj.weight.x",
            "model.layers.-3.mlp.experts.12.up_proj.weight",
            "model.layers.x.mlp.experts.12.up_proj.weight",
        ] {
            assert_eq!(matched(pattern, name), None, "{name}");
        }
        assert_eq!(matched("lm_head.weight", "lm_head.weight"), Some(At::default()));
    }

    #[test]
    fn a_number_may_have_text_about_it() {
        let at = matched("block.{layer}.expert_{expert}.wi", "block.1.expert_7.wi");
        assert_eq!(at, Some(At { layer: Some(1), expert: Some(7) }));
        assert_eq!(matched("expert_{expert}.wi", "expert_.wi"), None);
        assert_eq!(matched("expert_{expert}.wi", "export_7.wi"), None);
    }
}
