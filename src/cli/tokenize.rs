//! `moeba tokenize` and `moeba detokenize`: text to token ids and back, by metadata alone.

use super::model::ModelArg;
use super::{out, prompt};
use crate::tokenizer::{EncodeOptions, Tokenizer};
use crate::{Error, Result};
use std::path::Path;

#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// The text; - or nothing is stdin, to the last byte
    #[arg(value_name = "TEXT", default_value = "-", allow_hyphen_values = true)]
    text: String,
    /// A JSON list of ids
    #[arg(long)]
    json: bool,
    /// A line for each token: its id and its text
    #[arg(long, conflicts_with = "json")]
    pieces: bool,
    /// Add no BOS or EOS token
    #[arg(long)]
    no_bos: bool,
    /// Take the names of control tokens in the text for text
    #[arg(long)]
    no_parse_special: bool,
}

pub fn run(args: Args) -> Result<()> {
    let tokenizer = Tokenizer::from_gguf(&args.model.open()?)?;
    let text = match args.text.as_str() {
        "-" => prompt::read_text(Path::new("-"))?,
        _ => args.text,
    };
    let options =
        EncodeOptions { add_special: !args.no_bos, parse_special: !args.no_parse_special };
    let ids = tokenizer.encode(&text, options);
    match (args.json, args.pieces) {
        (true, _) => out::line(&serde_json::json!(ids).to_string()),
        (_, true) => ids.iter().try_for_each(|&id| out::line(&piece_line(&tokenizer, id)?)),
        _ => out::line(&ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
    }
}

/// The piece as a string literal; bytes that are no character as U+FFFD.
fn piece_line(tokenizer: &Tokenizer, id: u32) -> Result<String> {
    Ok(format!("{id}\t{:?}", String::from_utf8_lossy(tokenizer.piece(id)?)))
}

#[derive(clap::Args, Debug)]
pub struct DetokenizeArgs {
    #[command(flatten)]
    model: ModelArg,
    /// Token ids, as 1,2,3 or "1 2 3" or [1,2,3]; - or nothing is stdin
    #[arg(value_name = "IDS", default_value = "-")]
    ids: String,
    /// Leave control tokens out
    #[arg(long)]
    skip_special: bool,
}

pub fn detokenize(args: DetokenizeArgs) -> Result<()> {
    let tokenizer = Tokenizer::from_gguf(&args.model.open()?)?;
    let ids = match args.ids.as_str() {
        "-" => parse_ids(&prompt::read_text(Path::new("-"))?)?,
        text => parse_ids(text)?,
    };
    out::write(&tokenizer.decode(&ids, args.skip_special)?)
}

fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let inner = text.trim();
    let inner = inner.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(inner);
    inner
        .split([',', ' ', '\t', '\r', '\n'])
        .filter(|id| !id.is_empty())
        .map(|id| {
            id.parse().map_err(|_| {
                Error::Usage(format!("token ids: expected numbers like 1,2,3, got `{id}`"))
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::parse_ids;

    #[test]
    fn ids_in_all_spellings() {
        for text in ["1,2,3", "1 2 3", "[1, 2, 3]\n", " 1,\n2,,3 "] {
            assert_eq!(parse_ids(text).unwrap(), [1, 2, 3], "{text:?}");
        }
        assert!(parse_ids("[]").unwrap().is_empty());
        for text in ["1,x", "-1", "4294967296", "1;2", "[1"] {
            assert!(parse_ids(text).is_err(), "{text:?}");
        }
    }
}
