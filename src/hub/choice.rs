//! Which file of a repository is meant. The rules are llama.cpp's: a type is looked for in the
//! files' names, whatever its case, with a dot or a dash behind it; without a type Q4_K_M is
//! wanted, then Q8_0, then the first model that there is.

/// Taken in this order where the user names no type.
const USUAL: [&str; 2] = ["Q4_K_M", "Q8_0"];

/// GGUF files beside a model that are not models: projectors of images, matrices for quantising,
/// heads that draft tokens.
const COMPANIONS: [&str; 6] = ["mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"];

/// The files of a model in shard order, or what there is instead.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice<'a> {
    Files(Vec<&'a str>),
    /// No file is of that type; these models there are.
    NoSuchType(Vec<&'a str>),
    /// No file has that name; these GGUF files there are.
    NoSuchFile(Vec<&'a str>),
    /// No GGUF file at all.
    NoModel,
    /// A split model lacks this shard.
    NoShard(String),
}

/// `files` are all names of a repository.
pub fn choose<'a>(files: &[&'a str], quant: Option<&str>, file: Option<&str>) -> Choice<'a> {
    let found = match file {
        Some(name) => files.iter().copied().find(|f| *f == name),
        None => by_type(files, quant),
    };
    match found {
        Some(first) => with_shards(files, first),
        None if file.is_some() => Choice::NoSuchFile(ggufs(files)),
        None if models(files).next().is_none() => Choice::NoModel,
        None => Choice::NoSuchType(models(files).collect()),
    }
}

fn by_type<'a>(files: &[&'a str], quant: Option<&str>) -> Option<&'a str> {
    let of_type = |quant: &str| models(files).find(|file| names_type(file, quant));
    match quant {
        Some(quant) => of_type(quant),
        None => USUAL.iter().find_map(|q| of_type(q)).or_else(|| models(files).next()),
    }
}

fn ggufs<'a>(files: &[&'a str]) -> Vec<&'a str> {
    files.iter().copied().filter(|f| f.ends_with(".gguf")).collect()
}

/// Models, each by its first file.
fn models<'a>(files: &[&'a str]) -> impl Iterator<Item = &'a str> {
    ggufs(files).into_iter().filter(|path| {
        let name = path.rsplit('/').next().unwrap_or(path);
        let first = Shard::of(path).is_none_or(|shard| shard.no == 1);
        first && !COMPANIONS.iter().any(|word| name.contains(word))
    })
}

/// Models among the files of a folder, each by the name that it has without its ending and its
/// first file.
pub fn models_of<'a>(files: &[&'a str]) -> Vec<(&'a str, &'a str)> {
    let stem = |path: &'a str| match Shard::of(path) {
        Some(shard) => shard.stem,
        None => path.strip_suffix(".gguf").unwrap_or(path),
    };
    models(files).map(|path| (stem(path), path)).collect()
}

/// All files of the model among those of a folder whose first file this is.
pub fn files_of<'a>(files: &[&'a str], first: &'a str) -> Vec<&'a str> {
    match choose(files, None, Some(first)) {
        Choice::Files(files) => files,
        _ => vec![first],
    }
}

fn names_type(path: &str, quant: &str) -> bool {
    let (path, quant) = (path.to_ascii_lowercase(), quant.to_ascii_lowercase());
    path.match_indices(&quant).any(|(at, _)| path[at + quant.len()..].starts_with(['.', '-']))
}

/// The type that a file's name ends in, or is told by its folder: for a listing.
pub fn type_of(path: &str) -> Option<String> {
    let stem = match Shard::of(path) {
        Some(shard) => shard.stem,
        None => path.strip_suffix(".gguf")?,
    };
    let is_type = |word: &&str| {
        let upper = word.to_ascii_uppercase();
        let known = ["Q", "IQ", "TQ", "F", "BF", "MXFP", "NVFP"].iter().any(|prefix| {
            upper
                .strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        });
        known && upper.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let word = stem.rsplit(['-', '.', '/']).find(is_type)?;
    Some(word.to_ascii_uppercase())
}

/// `STEM-00001-of-00003.gguf`
struct Shard<'a> {
    stem: &'a str,
    no: u32,
    count: u32,
}

/// More shards than any model has; each is a file that must be listed anyway.
const MAX_SHARDS: u32 = 10_000;

impl<'a> Shard<'a> {
    fn of(path: &'a str) -> Option<Self> {
        let stem = path.strip_suffix(".gguf")?;
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (stem, no) = stem.rsplit_once('-')?;
        let number = |text: &str| match text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())
        {
            true => text.parse::<u32>().ok(),
            false => None,
        };
        let (no, count) = (number(no)?, number(count)?);
        (1..=count.min(MAX_SHARDS)).contains(&no).then_some(Shard { stem, no, count })
    }

    fn name(&self, no: u32) -> String {
        format!("{}-{no:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

/// A file and, if it is one of a split model, all of the model.
fn with_shards<'a>(files: &[&'a str], file: &'a str) -> Choice<'a> {
    let Some(shard) = Shard::of(file) else { return Choice::Files(vec![file]) };
    let mut out = Vec::new();
    for no in 1..=shard.count {
        let name = shard.name(no);
        match files.iter().find(|f| **f == name) {
            Some(found) => out.push(*found),
            None => return Choice::NoShard(name),
        }
    }
    Choice::Files(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &[&str] = &[
        "README.md",
        "imatrix-Q4_K_M.gguf",
        "m-F16.gguf",
        "m-IQ4_NL.gguf",
        "m-Q4_K_M.gguf",
        "m-Q8_0.gguf",
        "mmproj-F16.gguf",
        "big/m-BF16-00001-of-00002.gguf",
        "big/m-BF16-00002-of-00002.gguf",
    ];

    fn one(quant: Option<&str>) -> String {
        match choose(FILES, quant, None) {
            Choice::Files(files) => files.join(" "),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn the_type_is_looked_for_in_names() {
        assert_eq!(one(None), "m-Q4_K_M.gguf");
        assert_eq!(one(Some("q8_0")), "m-Q8_0.gguf");
        assert_eq!(one(Some("F16")), "m-F16.gguf", "not the projector");
        assert_eq!(one(Some("iq4_nl")), "m-IQ4_NL.gguf");
        assert!(one(Some("Q4_K")).starts_with("NoSuchType"), "a type's beginning is no type");
        assert!(one(Some("Q2_K")).contains("m-Q8_0.gguf"), "a miss names what there is");
        assert!(!one(Some("Q2_K")).contains("imatrix") && !one(Some("Q2_K")).contains("00002-of"));
    }

    #[test]
    fn without_a_type_the_usual_ones_come_first() {
        let choice = |files| choose(files, None, None);
        assert_eq!(choice(&["a-F16.gguf", "a-Q8_0.gguf"]), Choice::Files(vec!["a-Q8_0.gguf"]));
        assert_eq!(choice(&["a-F16.gguf", "a-F32.gguf"]), Choice::Files(vec!["a-F16.gguf"]));
        assert_eq!(choice(&["model.safetensors", "mmproj-F16.gguf"]), Choice::NoModel);
    }

    #[test]
    fn a_split_model_is_all_of_its_files() {
        let (first, second) = ("big/m-BF16-00001-of-00002.gguf", "big/m-BF16-00002-of-00002.gguf");
        assert_eq!(choose(FILES, Some("bf16"), None), Choice::Files(vec![first, second]));
        assert_eq!(choose(FILES, None, Some(first)), Choice::Files(vec![first, second]));
        let missing = Choice::NoShard("a-00002-of-00003.gguf".into());
        assert_eq!(
            choose(&["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], None, None),
            missing
        );
        // What only looks like a shard is a file of its own.
        for odd in ["a-0001-of-0002.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf"] {
            assert_eq!(choose(&[odd], None, None), Choice::Files(vec![odd]), "{odd}");
        }
    }

    #[test]
    fn a_file_by_its_name() {
        assert_eq!(
            choose(FILES, None, Some("mmproj-F16.gguf")),
            Choice::Files(vec!["mmproj-F16.gguf"])
        );
        let Choice::NoSuchFile(there) = choose(FILES, None, Some("x.gguf")) else { panic!() };
        assert_eq!(there.len(), 8);
    }

    #[test]
    fn types_are_read_off_names() {
        let cases = [
            ("m-Q4_K_M.gguf", Some("Q4_K_M")),
            ("m.q8_0.gguf", Some("Q8_0")),
            ("UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf", Some("Q2_K_XL")),
            ("BF16/m-00001-of-00002.gguf", Some("BF16")),
            ("m-mxfp4.gguf", Some("MXFP4")),
            ("m.gguf", None),
            ("README.md", None),
        ];
        for (path, expected) in cases {
            assert_eq!(type_of(path).as_deref(), expected, "{path}");
        }
    }
}
