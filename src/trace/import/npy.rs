//! Reads NumPy arrays: whole numbers, floating-point numbers, truth values and text, in C order.

use super::Fault;
use half::f16;

pub const MAGIC: &[u8] = b"\x93NUMPY";

#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Values,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Truth values are 0 and 1.
    Whole(Vec<i64>),
    Real(Vec<f32>),
    Text(Vec<String>),
}

/// `name`: of the array, for messages.
pub fn read(bytes: &[u8], name: &str) -> Result<Array, Fault> {
    let broken = |got: &str| Fault::new(name, "an array of NumPy", got);
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| broken("something else"))?;
    // The version; from 2.0 on the header's length has four bytes.
    let &[major, _, ref rest @ ..] = rest else { return Err(broken("its beginning")) };
    let width = if major == 1 { 2 } else { 4 };
    let (length, rest) = rest.split_at_checked(width).ok_or_else(|| broken("its beginning"))?;
    let length = length.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte));
    let (header, data) = rest.split_at_checked(length).ok_or_else(|| broken("its beginning"))?;
    let header = String::from_utf8_lossy(header);
    let descr = field(&header, "descr").ok_or_else(|| broken("no type"))?;
    if field(&header, "fortran_order").is_some_and(|value| value.starts_with("True")) {
        return Err(Fault::new(name, "an array in C order", "Fortran order"));
    }
    let shape = shape(&header).ok_or_else(|| broken("no shape"))?;
    let descr: String = descr.chars().take_while(|c| !",}".contains(*c)).collect();
    of_bytes(descr.trim().trim_matches(['\'', '"']), shape, data, name)
}

/// The text behind a key of the header, which is a dictionary of Python.
fn field<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(&format!("'{key}'"))?;
    Some(rest.trim_start().strip_prefix(':')?.trim_start())
}

fn shape(header: &str) -> Option<Vec<usize>> {
    let (inner, _) = field(header, "shape")?.strip_prefix('(')?.split_once(')')?;
    let numbers = inner.split(',').map(str::trim).filter(|text| !text.is_empty());
    numbers.map(|text| text.parse().ok()).collect()
}

/// An array of a type that NumPy names, such as `<i4` or `uint8`.
pub fn of_bytes(descr: &str, shape: Vec<usize>, data: &[u8], name: &str) -> Result<Array, Fault> {
    let unknown = || Fault::new(name, "little-endian numbers or text", format!("type {descr:?}"));
    let (kind, size) = kind(descr).ok_or_else(unknown)?;
    let n = shape.iter().try_fold(1_usize, |n, size| n.checked_mul(*size));
    let n_bytes = n.and_then(|n| n.checked_mul(size));
    if n_bytes != Some(data.len()) {
        let expected = format!("{shape:?} values of {size} bytes");
        return Err(Fault::new(name, expected, format!("{} bytes", data.len())));
    }
    let values = || data.chunks_exact(size.max(1));
    let values = match (kind, size) {
        ('b' | 'u', 1 | 2 | 4 | 8) => Values::Whole(values().map(unsigned).collect()),
        ('i', 1 | 2 | 4 | 8) => Values::Whole(values().map(signed).collect()),
        ('f', 2) => {
            Values::Real(values().map(|b| f16::from_le_bytes([b[0], b[1]]).into()).collect())
        }
        ('f', 4) => Values::Real(values().map(|b| f32::from_bits(unsigned(b) as u32)).collect()),
        ('f', 8) => {
            Values::Real(values().map(|b| f64::from_bits(unsigned(b) as u64) as f32).collect())
        }
        ('U', size) if size > 0 && size % 4 == 0 => Values::Text(values().map(text).collect()),
        _ => return Err(unknown()),
    };
    Ok(Array { shape, values })
}

/// The kind of a type, and the bytes of a value.
fn kind(descr: &str) -> Option<(char, usize)> {
    const NAMED: [(&str, char); 4] = [("uint", 'u'), ("int", 'i'), ("float", 'f'), ("bool", 'b')];
    if descr == "bool" {
        return Some(('b', 1));
    }
    if let Some((bits, kind)) =
        NAMED.iter().find_map(|(name, kind)| Some((descr.strip_prefix(name)?, *kind)))
    {
        return Some((kind, bits.parse::<usize>().ok()? / 8));
    }
    let rest = descr.strip_prefix(['<', '|', '=']).unwrap_or(descr);
    let kind = rest.chars().next().filter(char::is_ascii)?;
    let size = rest[1..].parse().ok()?;
    Some((kind, if kind == 'U' { 4_usize.checked_mul(size)? } else { size }))
}

fn unsigned(bytes: &[u8]) -> i64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | i64::from(*byte))
}

fn signed(bytes: &[u8]) -> i64 {
    let unused = 64 - 8 * bytes.len();
    unsigned(bytes) << unused >> unused
}

fn text(bytes: &[u8]) -> String {
    let chars = bytes.chunks_exact(4).map(|b| unsigned(b) as u32).take_while(|code| *code > 0);
    chars.map(|code| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}
