//! The processor, as the system describes it.

use super::text;

/// Name and the features that matter to kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    pub name: String,
    /// In the system's spelling.
    pub features: Vec<String>,
}

/// The features that kernels use or could use.
const FEATURES: &[&str] = &[
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimdhp",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
];

impl Processor {
    pub fn read() -> Processor {
        Processor::parse(&text("/proc/cpuinfo"))
    }

    /// x86 says `model name` and `flags`; ARM says `Features` and, on most systems, no name.
    fn parse(cpuinfo: &str) -> Processor {
        let field = |names: &[&str]| {
            let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
            let mut found = fields.filter(|(key, _)| names.contains(&key.trim()));
            found.next().map(|(_, value)| value.trim()).unwrap_or_default()
        };
        let all: Vec<&str> = field(&["flags", "Features"]).split_whitespace().collect();
        let features = FEATURES.iter().filter(|name| all.contains(name));
        Processor {
            name: field(&["model name", "Model"]).to_owned(),
            features: features.map(|name| (*name).to_owned()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_read() {
        let x86 = "processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx2 avx512f avx\n";
        let expected = ["avx", "avx2", "avx512f"].map(String::from).to_vec();
        let processor = Processor::parse(x86);
        assert_eq!((processor.name.as_str(), processor.features), ("A Xeon", expected));
        let arm = "processor\t: 0\nFeatures\t: fp asimd asimddp\n";
        assert_eq!(Processor::parse(arm).features, ["asimd", "asimddp"]);
        assert_eq!(Processor::parse(""), Processor::default());
    }
}
