//! The tensor types that a GGUF file can name: number, name, elements and bytes a block.
//! The numbers are those of the GGUF specification; types removed from it (4, 5, 31–33, 36–38)
//! are not listed, so a file that names one is refused as of unknown type.

/// A tensor's storage type. All types that files use are known by size, so that any file can be
/// listed; which of them the engine computes with is `quant`'s business.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[allow(non_camel_case_types)] // the names are the format's own
pub enum TensorType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
    Q2_0 = 42,
    F8_E4M3 = 43,
}

use TensorType::*;

/// (type, name as llama.cpp prints it in upper case, elements a block, bytes a block)
const TABLE: &[(TensorType, &str, usize, usize)] = &[
    (F32, "F32", 1, 4),
    (F16, "F16", 1, 2),
    (Q4_0, "Q4_0", 32, 18),
    (Q4_1, "Q4_1", 32, 20),
    (Q5_0, "Q5_0", 32, 22),
    (Q5_1, "Q5_1", 32, 24),
    (Q8_0, "Q8_0", 32, 34),
    (Q8_1, "Q8_1", 32, 36),
    (Q2_K, "Q2_K", 256, 84),
    (Q3_K, "Q3_K", 256, 110),
    (Q4_K, "Q4_K", 256, 144),
    (Q5_K, "Q5_K", 256, 176),
    (Q6_K, "Q6_K", 256, 210),
    (Q8_K, "Q8_K", 256, 292),
    (IQ2_XXS, "IQ2_XXS", 256, 66),
    (IQ2_XS, "IQ2_XS", 256, 74),
    (IQ3_XXS, "IQ3_XXS", 256, 98),
    (IQ1_S, "IQ1_S", 256, 50),
    (IQ4_NL, "IQ4_NL", 32, 18),
    (IQ3_S, "IQ3_S", 256, 110),
    (IQ2_S, "IQ2_S", 256, 82),
    (IQ4_XS, "IQ4_XS", 256, 136),
    (I8, "I8", 1, 1),
    (I16, "I16", 1, 2),
    (I32, "I32", 1, 4),
    (I64, "I64", 1, 8),
    (F64, "F64", 1, 8),
    (IQ1_M, "IQ1_M", 256, 56),
    (BF16, "BF16", 1, 2),
    (TQ1_0, "TQ1_0", 256, 54),
    (TQ2_0, "TQ2_0", 256, 66),
    (MXFP4, "MXFP4", 32, 17),
    (NVFP4, "NVFP4", 64, 36),
    (Q1_0, "Q1_0", 128, 18),
    (Q2_0, "Q2_0", 64, 18),
    (F8_E4M3, "F8_E4M3", 1, 1),
];

impl TensorType {
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.iter().map(|row| row.0).find(|t| *t as u32 == id)
    }

    /// By name, in either case (`q4_k`, `Q4_K`).
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    fn row(self) -> &'static (TensorType, &'static str, usize, usize) {
        TABLE.iter().find(|row| row.0 == self).expect("every variant is in the table")
    }

    pub fn id(self) -> u32 {
        self as u32
    }

    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Elements a block; a row is a whole number of blocks.
    pub fn block_len(self) -> usize {
        self.row().2
    }

    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Bytes of a row of `n` elements; `None` if `n` is no whole number of blocks or the size
    /// does not fit.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        let (len, bytes) = (self.block_len() as u64, self.block_bytes() as u64);
        if n.is_multiple_of(len) { (n / len).checked_mul(bytes) } else { None }
    }

    pub fn all() -> impl Iterator<Item = TensorType> {
        TABLE.iter().map(|row| row.0)
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
