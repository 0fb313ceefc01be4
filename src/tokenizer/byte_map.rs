//! GPT-2's map between bytes and printable characters, by which byte-level BPE vocabularies
//! write their tokens: printable Latin-1 bytes stand for themselves, the other 68 bytes for
//! U+0100 onwards in ascending order (so a space is `Ġ`, U+0120).

/// The character that stands for `byte`.
pub fn char_of(byte: u8) -> char {
    if stands_for_itself(byte) {
        return byte as char;
    }
    let rank = (0..byte).filter(|&b| !stands_for_itself(b)).count() as u32;
    char::from_u32(0x100 + rank).expect("U+0100 to U+0143 are characters")
}

/// How byte-level vocabularies write `bytes`.
pub fn text_of(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| char_of(byte)).collect()
}

fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The bytes that a token's characters stand for; `None` if one of them stands for none (an added
/// token written as plain text).
pub struct Decoder {
    by_char: [Option<u8>; 0x144],
}

impl Decoder {
    pub fn new() -> Self {
        let mut by_char = [None; 0x144];
        for byte in 0..=255u8 {
            by_char[char_of(byte) as usize] = Some(byte);
        }
        Self { by_char }
    }

    pub fn bytes(&self, token: &str) -> Option<Vec<u8>> {
        token.chars().map(|c| self.by_char.get(c as usize).copied().flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_characters() {
        assert_eq!(char_of(b' '), 'Ġ');
        assert_eq!(char_of(b'\n'), 'Ċ');
        assert_eq!(char_of(b'a'), 'a');
        assert_eq!(char_of(0xAD), '\u{143}');
    }

    #[test]
    fn every_byte_comes_back() {
        let decoder = Decoder::new();
        for byte in 0..=255u8 {
            assert_eq!(decoder.bytes(&char_of(byte).to_string()), Some(vec![byte]));
        }
        assert_eq!(decoder.bytes("▁the"), None);
    }
}
