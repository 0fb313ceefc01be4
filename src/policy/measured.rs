//! Costs that runs have measured on this machine, in a profile. `moeba trace train` finds FineMoE's
//! prefetch distance from them.
//!
//! Layout, little-endian: version (u32); then as f64 the four of `Costs` in their order and
//! `absent`.

use super::{Costs, Profile};

const VERSION: u32 = 1;

/// Names in errors, in the order of the layout.
const NAMES: [&str; 5] = ["attention", "experts", "head", "load", "absent share"];

const BYTES: usize = size_of::<u32>() + NAMES.len() * size_of::<f64>();

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    pub costs: Costs,
    /// The share of needed experts that had to be loaded, in time or not.
    pub absent: f64,
}

impl Measured {
    pub const SECTION: &'static str = "measured";

    pub fn save(&self, profile: &mut Profile) {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        self.values().iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        profile.set(Self::SECTION, bytes);
    }

    /// Returns the reason as a clause, for use after a colon.
    pub fn restore(bytes: &[u8]) -> Result<Measured, String> {
        if bytes.len() != BYTES {
            return Err(format!("it has {} bytes, expected {BYTES}", bytes.len()));
        }
        let (version, values) = bytes.split_at(size_of::<u32>());
        let version = u32::from_le_bytes(version.try_into().expect("of 4 bytes"));
        if version != VERSION {
            return Err(format!("it has version {version}, this moeba reads version {VERSION}"));
        }
        let values = values.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
        for (name, value) in NAMES.iter().zip(values.clone()) {
            if !value.is_finite() || value < 0.0 {
                return Err(format!("its {name} is {value}"));
            }
        }
        let values: Vec<f64> = values.collect();
        let [attention_ns, experts_ns, head_ns, load_ns, absent] = values[..] else {
            unreachable!("as many as the length says")
        };
        if absent > 1.0 {
            return Err(format!("its share of absent experts is {absent}"));
        }
        Ok(Measured { costs: Costs { attention_ns, experts_ns, head_ns, load_ns }, absent })
    }

    fn values(&self) -> [f64; NAMES.len()] {
        let Costs { attention_ns, experts_ns, head_ns, load_ns } = self.costs;
        [attention_ns, experts_ns, head_ns, load_ns, self.absent]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: Measured = Measured {
        costs: Costs { attention_ns: 1.5, experts_ns: 2.0, head_ns: 0.0, load_ns: 1e7 },
        absent: 0.25,
    };

    fn saved() -> Vec<u8> {
        let mut profile = Profile::default();
        MEASURED.save(&mut profile);
        profile.get(Measured::SECTION).unwrap().to_vec()
    }

    #[test]
    fn what_was_saved_comes_back() {
        assert_eq!(Measured::restore(&saved()), Ok(MEASURED));
    }

    #[test]
    fn what_cannot_have_been_measured_is_refused() {
        let bytes = saved();
        for n in [0, 3, bytes.len() - 1] {
            let message = Measured::restore(&bytes[..n]).unwrap_err();
            assert_eq!(message, format!("it has {n} bytes, expected 44"));
        }
        let with = |at: usize, value: &[u8]| {
            let mut bytes = bytes.clone();
            bytes[at..at + value.len()].copy_from_slice(value);
            Measured::restore(&bytes).unwrap_err()
        };
        assert_eq!(with(0, &[2]), "it has version 2, this moeba reads version 1");
        for (i, name) in NAMES.iter().enumerate() {
            for bad in [f64::NAN, f64::INFINITY, -1.0] {
                let message = with(4 + 8 * i, &bad.to_le_bytes());
                assert_eq!(message, format!("its {name} is {bad}"));
            }
        }
        assert_eq!(with(36, &1.5f64.to_le_bytes()), "its share of absent experts is 1.5");
    }
}
