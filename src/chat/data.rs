//! Texts of the program's own tables, which are read once and stay.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

pub type Text = &'static str;
pub type Texts = &'static [&'static str];

/// A table that is part of the program, so that it can be read.
pub fn table<T: DeserializeOwned>(text: &str) -> T {
    toml::from_str(text).expect("the program's own table")
}

pub fn text<'de, D: Deserializer<'de>>(from: D) -> Result<Text, D::Error> {
    Ok(String::deserialize(from)?.leak())
}

pub fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<Texts, D::Error> {
    let texts = Vec::<String>::deserialize(from)?.into_iter();
    Ok(texts.map(|text| &*text.leak()).collect::<Vec<_>>().leak())
}

pub fn pair<'de, D: Deserializer<'de>>(from: D) -> Result<Option<(Text, Text)>, D::Error> {
    let (begin, end) = <(String, String)>::deserialize(from)?;
    Ok(Some((begin.leak(), end.leak())))
}
