//! Parsers of flag values. clap takes `NaN`, infinities and any integer that fits its type; these
//! say which range was expected.

use std::fmt::Display;

/// A flag's value, or what was expected.
pub type Parsed<T> = Result<T, String>;

/// A whole number from `min` to `max`.
pub fn integer<T>(text: &str, min: i64, max: i64) -> Parsed<T>
where
    T: TryFrom<i64>,
{
    let wrong = || format!("expected a whole number from {min} to {max}");
    let value: i64 = text.trim().parse().map_err(|_| wrong())?;
    if !(min..=max).contains(&value) {
        return Err(wrong());
    }
    T::try_from(value).map_err(|_| wrong())
}

/// A port to listen on; 0 is any that is free.
pub fn port(text: &str) -> Parsed<u16> {
    integer(text, 0, i64::from(u16::MAX))
}

/// A switch that a variable sets, as llama.cpp reads it, and more.
pub fn boolean(text: &str) -> Parsed<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "on" | "enabled" | "true" | "yes" | "y" | "t" | "1" => Ok(true),
        "off" | "disabled" | "false" | "no" | "n" | "f" | "0" => Ok(false),
        _ => Err("expected on or off".into()),
    }
}

/// A comma-separated list of at least one value.
pub fn list<T, E: Display>(text: &str, parse: impl Fn(&str) -> Result<T, E>) -> Parsed<Vec<T>> {
    text.split(',').map(|item| parse(item).map_err(|e| format!("{item:?}: {e}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_their_range_are_refused() {
        assert_eq!(integer::<usize>("7", 1, 8), Ok(7));
        assert_eq!(integer::<i64>("-1", -1, 8), Ok(-1));
        for bad in ["0", "9", "", "x", "1.5", "99999999999999999999", "NaN"] {
            assert!(integer::<usize>(bad, 1, 8).is_err(), "{bad}");
        }
    }

    #[test]
    fn switches_have_several_names() {
        for text in ["on", "1", "true", "ENABLED", "yes"] {
            assert_eq!(boolean(text), Ok(true), "{text}");
        }
        for text in ["off", "0", "False", "disabled", "no"] {
            assert_eq!(boolean(text), Ok(false), "{text}");
        }
        assert!(boolean("").is_err() && boolean("2").is_err());
    }

    #[test]
    fn a_list_names_its_bad_item() {
        let parse = |text: &str| list(text, |item| integer::<u32>(item, 0, 9));
        assert_eq!(parse("1,2,3"), Ok(vec![1, 2, 3]));
        assert!(parse("1,x").unwrap_err().contains("\"x\""));
        assert!(parse("").is_err());
    }
}
