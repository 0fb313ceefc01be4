//! Facts that peers and their head must have in common for their bits to be the same.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::wire::ModelKey;

/// The model and all else that the bits of experts depend on.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// The program's version.
    pub version: String,
    /// The version of its arithmetic.
    pub arithmetic: u32,
    /// A digest of the file.
    pub model: String,
    /// The file's types of tensors, with the bytes of each.
    pub tensor_types: String,
}

/// A peer's answer to the question what it is.
#[derive(Debug, Deserialize, Serialize)]
pub struct Greeting {
    pub facts: Facts,
    /// Bytes of memory for experts.
    pub memory: u64,
}

impl Facts {
    pub fn key(&self) -> ModelKey {
        let mut hash = Sha256::new();
        let Facts { version, arithmetic, model, tensor_types } = self;
        hash.update(format!("{version};{arithmetic};{model};{tensor_types}"));
        hash.finalize().into()
    }

    /// The first thing in which another machine's facts differ, as "version 1, and this one 2".
    pub fn difference(&self, theirs: &Facts) -> Option<String> {
        let facts = |f: &Facts| {
            let Facts { version, arithmetic, model, tensor_types } = f.clone();
            [version, arithmetic.to_string(), tensor_types, model]
        };
        let names = ["version", "arithmetic", "tensors", "model"];
        let pairs = facts(theirs).into_iter().zip(facts(self));
        let (name, (theirs, own)) = names.iter().zip(pairs).find(|(_, (a, b))| a != b)?;
        Some(format!("{name} {theirs}, and this machine {own}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_has_a_name() {
        let own = Facts {
            version: "1.0".into(),
            arithmetic: 1,
            model: "ab".into(),
            tensor_types: "F32 10".into(),
        };
        assert_eq!(own.difference(&own), None);
        let other = Facts { version: "1.1".into(), ..own.clone() };
        let said = own.difference(&other).unwrap();
        assert_eq!(said, "version 1.1, and this machine 1.0");
        let others = [
            other,
            Facts { arithmetic: 2, ..own.clone() },
            Facts { model: "cd".into(), ..own.clone() },
            Facts { tensor_types: "Q4_K 10".into(), ..own.clone() },
        ];
        for other in others {
            assert_ne!(own.key(), other.key(), "{other:?}");
            assert!(own.difference(&other).is_some());
        }
    }
}
