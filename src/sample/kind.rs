//! The samplers that a chain may have, by llama.cpp's names and letters.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplerKind {
    Penalties,
    Dry,
    TopNSigma,
    TopK,
    TypicalP,
    TopP,
    MinP,
    Xtc,
    Temperature,
    AdaptiveP,
}

use SamplerKind as K;

/// (sampler, letter, name, other names)
const TABLE: [(K, char, &str, &[&str]); 10] = [
    (K::Penalties, 'e', "penalties", &[]),
    (K::Dry, 'd', "dry", &[]),
    (K::TopNSigma, 's', "top_n_sigma", &["top_nsigma"]),
    (K::TopK, 'k', "top_k", &[]),
    (K::TypicalP, 'y', "typ_p", &["typical_p", "typical", "typ"]),
    (K::TopP, 'p', "top_p", &["nucleus"]),
    (K::MinP, 'm', "min_p", &[]),
    (K::Xtc, 'x', "xtc", &[]),
    (K::Temperature, 't', "temperature", &["temp"]),
    (K::AdaptiveP, 'a', "adaptive_p", &[]),
];

impl SamplerKind {
    /// The chain where none is asked for.
    pub const DEFAULT: [K; 9] = [
        K::Penalties,
        K::Dry,
        K::TopNSigma,
        K::TopK,
        K::TypicalP,
        K::TopP,
        K::MinP,
        K::Xtc,
        K::Temperature,
    ];

    pub fn name(self) -> &'static str {
        TABLE[self as usize].2
    }

    pub fn letter(self) -> char {
        TABLE[self as usize].1
    }

    /// A chain as `--samplers` has it: names between semicolons.
    pub fn from_names(text: &str) -> Result<Vec<SamplerKind>, String> {
        let names = text.split(';').map(str::trim).filter(|name| !name.is_empty());
        names
            .map(|name| {
                let known = name.to_ascii_lowercase().replace('-', "_");
                let row = TABLE.iter().find(|row| row.2 == known || row.3.contains(&&*known));
                row.map(|row| row.0).ok_or_else(|| {
                    let all = TABLE.map(|row| row.2).join(", ");
                    format!("there is no sampler {name:?}; the samplers are {all}")
                })
            })
            .collect()
    }

    /// A chain as `--sampler-seq` has it: a letter each.
    pub fn from_letters(text: &str) -> Result<Vec<SamplerKind>, String> {
        let kind = |letter| {
            let row = TABLE.iter().find(|row| row.1 == letter);
            row.map(|row| row.0).ok_or_else(|| {
                let all = TABLE.map(|row| format!("{} ({})", row.1, row.2)).join(", ");
                format!("there is no sampler {letter:?}; the samplers are {all}")
            })
        };
        text.trim().chars().map(kind).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i);
            assert_eq!(SamplerKind::from_names(row.0.name()), Ok(vec![row.0]));
            assert_eq!(SamplerKind::from_letters(&row.1.to_string()), Ok(vec![row.0]));
        }
    }

    #[test]
    fn chains_are_read_in_order() {
        let default = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature";
        assert_eq!(SamplerKind::from_names(default).unwrap(), SamplerKind::DEFAULT);
        assert_eq!(SamplerKind::from_letters("edskypmxt").unwrap(), SamplerKind::DEFAULT);
        let twice = SamplerKind::from_names("temp; top-k;top-k;").unwrap();
        assert_eq!(twice, [K::Temperature, K::TopK, K::TopK]);
        assert_eq!(SamplerKind::from_names(""), Ok(vec![]));
    }

    #[test]
    fn unknown_names_are_refused_with_those_that_there_are() {
        let error = SamplerKind::from_names("top_k;infill").unwrap_err();
        assert!(error.contains("\"infill\"") && error.contains("top_n_sigma"), "{error}");
        let error = SamplerKind::from_letters("kz").unwrap_err();
        assert!(error.contains("'z'") && error.contains("k (top_k)"), "{error}");
    }
}
