//! Inheritance between descriptors: `inherits = "NAME"` begins with all that `models/NAME.toml`
//! says, itself with what it inherits.
//!
//! Tables merge key by key, at every depth; any other value replaces the inherited one. `key =
//! false` removes an inherited key that is not a flag. A file says only what is its own: to repeat
//! an inherited value is an error.

use toml::{Table, Value};

const INHERITS: &str = "inherits";

/// Keys that belong to one architecture: they are never inherited.
const OWN: [&str; 3] = ["about", "architecture", "hf_classes"];

/// The table of descriptor `name` with all that it inherits. `text_of` finds the text of a
/// descriptor. The error is a complete message.
pub fn resolve<'a>(
    name: &'a str,
    text_of: &dyn Fn(&str) -> Option<&'a str>,
) -> Result<Table, String> {
    // The descriptor itself first, then what it inherits from.
    let mut chain: Vec<(String, Table)> = Vec::new();
    let mut next = Some(name.to_owned());
    while let Some(name) = next {
        if chain.iter().any(|(known, _)| *known == name) {
            let names: Vec<&str> = chain.iter().map(|(known, _)| known.as_str()).collect();
            return Err(format!(
                "models/{name}.toml inherits itself: {} -> {name}",
                names.join(" -> ")
            ));
        }
        let Some(text) = text_of(&name) else {
            let by = chain.last().map_or("", |(by, _)| by);
            return Err(format!("models/{by}.toml inherits {name:?}, which is unknown"));
        };
        let mut table: Table =
            text.parse().map_err(|error| format!("models/{name}.toml: {error}"))?;
        next = match table.remove(INHERITS) {
            None => None,
            Some(Value::String(base)) => Some(base),
            Some(other) => {
                return Err(format!("models/{name}.toml: {INHERITS} = {other} is not a name"));
            }
        };
        chain.push((name, table));
    }
    let mut merged = Table::new();
    for (name, own) in chain.into_iter().rev() {
        OWN.iter().for_each(|key| drop(merged.remove(*key)));
        merge(&mut merged, own, "").map_err(|fault| format!("models/{name}.toml: {fault}"))?;
    }
    Ok(merged)
}

/// Puts `own` over `table`, whose keys are under `path`.
fn merge(table: &mut Table, own: Table, path: &str) -> Result<(), String> {
    for (key, value) in own {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match (table.get_mut(&key), value) {
            (Some(Value::Table(inherited)), Value::Table(value)) => merge(inherited, value, &path)?,
            (Some(inherited), value) if *inherited == value => {
                return Err(format!("{path} repeats what it inherits"));
            }
            (Some(Value::Boolean(flag)), Value::Boolean(value)) => *flag = value,
            (Some(_), Value::Boolean(false)) => drop(table.remove(&key)),
            (_, value) => drop(table.insert(key, value)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &[(&str, &str)] = &[
        ("base", "n = 1\nflag = true\n[rows]\na = { to = 'x', steps = [1] }\nb = 2\n"),
        ("middle", "inherits = 'base'\narchitecture = 'middle'\nflag = false\n"),
        ("leaf", "inherits = 'middle'\nn = 2\n[rows]\na = { steps = [2, 3] }\nb = false\nc = 4\n"),
        ("alone", "inherits = 'nothing'\n"),
        ("ring", "inherits = 'rung'\n"),
        ("rung", "inherits = 'ring'\n"),
        ("again", "inherits = 'base'\n[rows]\na = { to = 'x' }\n"),
        ("number", "inherits = 7\n"),
    ];

    fn resolved(name: &str) -> Result<Table, String> {
        resolve(name, &|name| Some(FILES.iter().find(|(file, _)| *file == name)?.1))
    }

    #[test]
    fn tables_merge_and_other_values_replace() {
        let expected = "n = 2\nflag = false\n[rows]\na = { to = 'x', steps = [2, 3] }\nc = 4\n";
        assert_eq!(resolved("leaf").unwrap(), expected.parse().unwrap());
        assert_eq!(resolved("middle").unwrap()["architecture"].as_str(), Some("middle"));
    }

    #[test]
    fn faults_are_named() {
        for (name, fault) in [
            ("alone", "models/alone.toml inherits \"nothing\", which is unknown"),
            ("ring", "models/ring.toml inherits itself: ring -> rung -> ring"),
            ("again", "models/again.toml: rows.a.to repeats what it inherits"),
            ("number", "models/number.toml: inherits = 7 is not a name"),
        ] {
            assert_eq!(resolved(name).unwrap_err(), fault);
        }
    }
}
