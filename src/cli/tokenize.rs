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
    /// The text, after -- if it begins with a dash; - or nothing is stdin, to the last byte
    #[arg(value_name = "TEXT", default_value = "-")]
    text: String,
    /// The text, in the place of TEXT
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "text")]
    prompt: Option<String>,
    /// Print a JSON list of ids
    #[arg(long, visible_alias = "ids")]
    json: bool,
    /// Print a line per token, with its id and its text
    #[arg(long, conflicts_with = "json")]
    pieces: bool,
    /// Do not add BOS or EOS tokens
    #[arg(long)]
    no_bos: bool,
    /// Treat special tokens in the text as plain text
    #[arg(long)]
    no_parse_special: bool,
}

pub fn run(args: Args) -> Result<()> {
    let tokenizer = Tokenizer::from_gguf(&args.model.open()?)?;
    let text = match args.prompt {
        Some(text) => text,
        None if args.text == "-" => prompt::read_text(Path::new("-"))?,
        None => args.text,
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
    /// Token ids, as 1,2,3 or 1 2 3 or [1,2,3]; - or nothing is stdin
    #[arg(value_name = "IDS", default_value = "-")]
    ids: Vec<String>,
    /// Leave out control tokens
    #[arg(long)]
    skip_special: bool,
}

pub fn detokenize(args: DetokenizeArgs) -> Result<()> {
    let given = args.ids.join(" ");
    // Wrong ids are told before a model is opened; stdin is read after that.
    let ids = (given != "-").then(|| parse_ids(&given)).transpose()?;
    let tokenizer = Tokenizer::from_gguf(&args.model.open()?)?;
    let ids = match ids {
        Some(ids) => ids,
        None => parse_ids(&prompt::read_text(Path::new("-"))?)?,
    };
    out::write(&tokenizer.decode(&ids, args.skip_special)?)
}

/// Ids with commas or white space between them, in brackets or not.
fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let wrong =
        |got: &str| Err(Error::Usage(format!("token ids: expected numbers like 1,2,3, got {got}")));
    let inner = text.trim();
    let inner = inner.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(inner).trim();
    let mut ids = Vec::new();
    if inner.is_empty() {
        return Ok(ids);
    }
    for between_commas in inner.split(',') {
        if between_commas.trim().is_empty() {
            return wrong("nothing between two commas");
        }
        for id in between_commas.split_whitespace() {
            let Ok(id) = id.parse() else { return wrong(&format!("`{id}`")) };
            ids.push(id);
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::parse_ids;

    #[test]
    fn ids_in_all_spellings() {
        for text in ["1,2,3", "1 2 3", "[1, 2, 3]\n", " 1,\n2\t3 ", "1 2,3"] {
            assert_eq!(parse_ids(text).unwrap(), [1, 2, 3], "{text:?}");
        }
        for text in ["", " \n", "[]", "[ ]"] {
            assert!(parse_ids(text).unwrap().is_empty(), "{text:?}");
        }
        for text in ["1,x", "-1", "4294967296", "1;2", "[1", "1,,2", ",1", "1, ,2", "[1,]"] {
            let e = parse_ids(text).unwrap_err();
            assert!(matches!(e, crate::Error::Usage(_)), "{text:?}: {e}");
        }
    }
}
