//! Packing of small codes: halves of bytes, top bits apart, quarters of bytes, bits.

/// Codes of four bits: byte i of `qs` holds code i in its low half and code i + n in its high
/// half, n being the number of bytes.
pub fn nibbles(qs: &[u8]) -> impl Iterator<Item = u8> + '_ {
    qs.iter().map(|q| q & 15).chain(qs.iter().map(|q| q >> 4))
}

/// The bytes of 2N codes of four bits (what is above the low four is ignored).
pub fn pack_nibbles<const N: usize>(codes: &[u8]) -> [u8; N] {
    assert_eq!(codes.len(), 2 * N);
    std::array::from_fn(|i| codes[i] & 15 | codes[i + N] << 4)
}

/// 32 codes of five bits: bit i of the little-endian `qh` is the top bit of code i.
pub fn five_bits<'a>(qh: &[u8; 4], qs: &'a [u8; 16]) -> impl Iterator<Item = u8> + 'a {
    let top = u32::from_le_bytes(*qh);
    nibbles(qs).enumerate().map(move |(i, low)| low | ((top >> i & 1) as u8) << 4)
}

pub fn pack_five_bits(codes: &[u8; 32]) -> ([u8; 4], [u8; 16]) {
    let top = codes.iter().enumerate().fold(0u32, |top, (i, c)| top | ((c >> 4) as u32) << i);
    (top.to_le_bytes(), pack_nibbles(codes))
}

/// Code k of 256 codes of two bits: each 32 bytes hold 128 codes, code 32s + i of them in bits 2s
/// and 2s + 1 of byte i.
#[inline]
pub fn two_bits(qs: &[u8; 64], k: usize) -> u8 {
    qs[32 * (k / 128) + k % 32] >> (2 * (k / 32 % 4)) & 3
}

pub fn pack_two_bits(codes: &[u8; 256]) -> [u8; 64] {
    let mut qs = [0; 64];
    for (k, code) in codes.iter().enumerate() {
        qs[32 * (k / 128) + k % 32] |= (code & 3) << (2 * (k / 32 % 4));
    }
    qs
}

/// Bit i of `bits` as byte i of the little-endian number, 0 or 1.
#[inline]
pub fn eight_bits(bits: u8) -> u64 {
    let apart = (u64::from(bits) * 0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
    (apart + 0x7f7f_7f7f_7f7f_7f7f) >> 7 & 0x0101_0101_0101_0101
}

/// Bits 2i and 2i + 1 of `codes` as byte i of the little-endian number.
#[inline]
pub fn eight_two_bits(codes: u16) -> u64 {
    let four = u64::from(codes);
    let four = (four | four << 24) & 0x0000_00ff_0000_00ff;
    let two = (four | four << 12) & 0x000f_000f_000f_000f;
    (two | two << 6) & 0x0303_0303_0303_0303
}
