//! The section "auto" of the profile. Layout, little-endian: version (u32), number of the kept
//! candidate (u8); for each candidate its name (u8 length, UTF-8) and how many times as long as
//! with the kept one a token takes with it (f64), 0 where that is not known.

const VERSION: u32 = 3;

/// A choice: of all candidates by name, and of the kept one by its number.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice<'a> {
    pub kept: usize,
    pub candidates: Vec<(&'a [u8], Option<f64>)>,
}

impl<'a> Choice<'a> {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.push(self.kept as u8);
        for (name, ratio) in &self.candidates {
            bytes.push(name.len() as u8);
            bytes.extend(*name);
            bytes.extend(ratio.unwrap_or_default().to_le_bytes());
        }
        bytes
    }

    /// `None` if the bytes are damaged, or of another version.
    pub fn decode(bytes: &'a [u8]) -> Option<Choice<'a>> {
        let (version, bytes) = bytes.split_first_chunk()?;
        let (kept, mut rest) = bytes.split_first()?;
        let mut candidates = Vec::new();
        while let Some((n, bytes)) = rest.split_first() {
            let (name, bytes) = bytes.split_at_checked((*n).into())?;
            let (ratio, bytes) = bytes.split_first_chunk()?;
            let ratio = f64::from_le_bytes(*ratio);
            if !ratio.is_finite() || ratio < 0.0 {
                return None;
            }
            candidates.push((name, (ratio > 0.0).then_some(ratio)));
            rest = bytes;
        }
        let kept = usize::from(*kept);
        let is_whole = u32::from_le_bytes(*version) == VERSION && kept < candidates.len();
        is_whole.then_some(Choice { kept, candidates })
    }
}
