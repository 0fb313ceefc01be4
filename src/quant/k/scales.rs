//! The eight 6-bit scales and eight 6-bit mins that Q4_K and Q5_K pack into 12 bytes:
//! bytes 0–3 are scales 0–3 and bytes 4–7 mins 0–3 in their low six bits; bytes 8–11 hold scales
//! 4–7 (low half) and mins 4–7 (high half) without their top two bits, which sit in the top two
//! bits of bytes 0–3 and 4–7.

pub fn unpack(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for j in 0..4 {
        scales[j] = packed[j] & 63;
        mins[j] = packed[j + 4] & 63;
        scales[j + 4] = packed[j + 8] & 15 | packed[j] >> 6 << 4;
        mins[j + 4] = packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4;
    }
    (scales, mins)
}

pub fn pack(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = scales[j] | scales[j + 4] >> 4 << 6;
        packed[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        packed[j + 8] = scales[j + 4] & 15 | mins[j + 4] << 4;
    }
    packed
}
