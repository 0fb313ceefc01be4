//! `moeba embed`: vectors of texts, and scores of documents, as llama-embedding prints them.

use super::args::{self, BatchArgs, ThreadsArg};
use super::model::ModelArg;
use super::out;
use super::prompt::{read_prompt, unescape};
use super::values::{self, Parsed};
use crate::engine::{EUCLIDEAN, Embedding, Engine, Pooling};
use crate::tokenizer::{EncodeOptions, Tokenizer};
use crate::{Error, Result, terminal};
use clap::ValueEnum;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Numbers of a text among several that are shown, and of a token at each end.
const SHOWN: usize = 16;
const SHOWN_OF_TOKEN: usize = 3;

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    texts: TextArgs,
    /// How the outputs of a text's tokens become its vector: none, mean, cls, last, or rank for the
    /// score of a query and a document [default: as the file says, or last]
    #[arg(long, value_name = "NAME", env = "MOEBA_POOLING")]
    pooling: Option<Pooling>,
    /// Norm that vectors are divided by: -1 none, 0 so that the largest number is 32760, 1 taxicab,
    /// 2 Euclidean, and others by their power
    #[arg(long, value_name = "N", default_value_t = EUCLIDEAN, value_parser = norm)]
    embd_normalize: i32,
    /// Print numbers in a table (the default), as an array of arrays, as OpenAI's JSON, as the same
    /// with the cosine similarities of all texts, or in plain lines
    #[arg(long, value_name = "FORMAT")]
    embd_output_format: Option<Format>,
    /// Size of the context in tokens; 0 is what the longest text needs
    #[arg(short, long, value_name = "N", default_value = "0", help_heading = "Engine")]
    #[arg(value_parser = args::tokens_or_zero, env = "MOEBA_CTX_SIZE")]
    ctx_size: usize,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Texts")]
struct TextArgs {
    /// Texts, one an argument
    #[arg(value_name = "TEXT", conflicts_with_all = ["prompt", "file"])]
    text: Vec<String>,
    /// Texts with the separator between them; by default a text a line
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "file")]
    prompt: Option<String>,
    /// File of texts, with the separator between them (- is stdin, as is nothing)
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Separator of texts
    #[arg(long, value_name = "TEXT", default_value = "\\n", allow_hyphen_values = true)]
    embd_separator: String,
    /// Separator of a query and its document, with --pooling rank
    #[arg(long, value_name = "TEXT", default_value = "\\t", allow_hyphen_values = true)]
    cls_separator: String,
    /// Read \n, \r, \t, \", \', \\ and \xHH in --prompt as in C, as always in separators; the
    /// default
    #[arg(short, long, overrides_with = "no_escape")]
    escape: bool,
    /// Leave them as they are
    #[arg(long, overrides_with = "escape")]
    no_escape: bool,
}

/// How vectors are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Array,
    Json,
    #[value(name = "json+")]
    JsonWithSimilarities,
    Raw,
}

fn norm(text: &str) -> Parsed<i32> {
    values::integer(text, -1, 1000)
}

impl TextArgs {
    fn texts(&self) -> Result<Vec<String>> {
        if !self.text.is_empty() {
            return Ok(self.text.clone());
        }
        let all = match (&self.prompt, &self.file) {
            (Some(text), _) if self.no_escape && !self.escape => text.clone(),
            (Some(text), _) => unescape(text),
            (None, file) => read_prompt(file.as_deref().unwrap_or(Path::new("-")))?,
        };
        let separator = unescape(&self.embd_separator);
        if separator.is_empty() {
            return Err(Error::Usage("--embd-separator: expected some text".into()));
        }
        Ok(all.split(&separator).map(str::to_owned).collect())
    }

    /// The query and the document of a text.
    fn pair<'t>(&self, text: &'t str) -> Result<(&'t str, &'t str)> {
        text.split_once(&unescape(&self.cls_separator)).ok_or_else(|| {
            Error::invalid(format!(
                "{text:?}: expected a query and a document with {:?} between them: see \
                 --cls-separator",
                self.cls_separator
            ))
        })
    }
}

pub fn run(args: Args) -> Result<()> {
    let texts = args.texts.texts()?;
    let model = args.model.resolve()?;
    let n_ctx = match args.ctx_size {
        0 => context(&model.open()?, &texts)?,
        n => n,
    };
    let options = args.batch.options(n_ctx, args.threads.count());
    let engine = model.load(&options)?;
    let pooling = args.pooling.map_or_else(|| engine.pooling(), Ok)?;
    engine.check_embeds(pooling)?;
    let mut session = engine.new_session()?;
    let bar = terminal::bar("embed", texts.len() as u64);
    let mut embeddings = Vec::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        let tokens = match pooling {
            Pooling::Rank => {
                let (query, document) = args.texts.pair(text)?;
                engine.rank_tokens(query, document)?
            }
            _ => engine.tokenizer().encode(text, EncodeOptions::PROMPT),
        };
        let embedding = session.embed(&tokens, pooling);
        let mut embedding = embedding.map_err(|e| of_text(e, i, texts.len()))?;
        if pooling != Pooling::Rank {
            embedding.normalize(args.embd_normalize);
        }
        embeddings.push(embedding);
        bar.inc(1);
    }
    drop(bar);
    let printed = Printed { args: &args, engine: &engine, pooling, texts: &texts, embeddings };
    out::write(printed.text().as_bytes())
}

/// Tokens of the longest text, as far as the model was trained for as many. A query and a document
/// may have a template around them.
fn context(gguf: &crate::gguf::Gguf, texts: &[String]) -> Result<usize> {
    let tokenizer = Tokenizer::from_gguf(gguf)?;
    let architecture = gguf.require_str("general.architecture")?;
    let trained = gguf.u64(&format!("{architecture}.context_length"))?.unwrap_or(u64::MAX);
    let template = gguf.str("tokenizer.chat_template.rerank")?.unwrap_or_default();
    let n = |text: &str| tokenizer.encode(text, EncodeOptions::PROMPT).len();
    let longest = texts.iter().map(|text| n(text)).max().unwrap_or(0);
    // The separator may be one token less than what stands in its place.
    let needed = longest + n(template) + 4;
    Ok(needed.min(usize::try_from(trained).unwrap_or(usize::MAX)))
}

/// An error that names its text, if there are several.
fn of_text(error: Error, i: usize, n: usize) -> Error {
    match error {
        Error::Invalid(why) if n > 1 => Error::Invalid(format!("text {}: {why}", i + 1)),
        other => other,
    }
}

/// Vectors, and how they are printed.
struct Printed<'a> {
    args: &'a Args,
    engine: &'a Engine,
    pooling: Pooling,
    texts: &'a [String],
    embeddings: Vec<Embedding>,
}

impl Printed<'_> {
    fn text(&self) -> String {
        match self.args.embd_output_format {
            None if self.pooling == Pooling::Rank => self.scores(),
            None if self.pooling == Pooling::None => self.tokens(),
            None => self.table() + &self.similarity_table(),
            Some(Format::Array) => {
                let rows: Vec<String> = self.rows().map(|row| self.array(row)).collect();
                format!("[{}]\n", rows.join(","))
            }
            Some(Format::Raw) => {
                let line = |row: &[f32]| {
                    let numbers: Vec<String> = row.iter().map(|x| self.number(*x)).collect();
                    numbers.join(" ") + "\n"
                };
                self.rows().map(line).collect()
            }
            Some(Format::Json) => self.json(""),
            Some(Format::JsonWithSimilarities) => self.json(&self.similarities()),
        }
    }

    /// All rows, of all texts.
    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.embeddings.iter().flat_map(Embedding::rows)
    }

    fn is_whole(&self) -> bool {
        self.args.embd_normalize == 0
    }

    fn number(&self, x: f32) -> String {
        if self.is_whole() { format!("{x:.0}") } else { format!("{x:.7}") }
    }

    fn array(&self, row: &[f32]) -> String {
        let numbers: Vec<String> = row.iter().map(|x| self.number(*x)).collect();
        format!("[{}]", numbers.join(","))
    }

    /// Numbers of a table.
    fn cells(&self, row: &[f32]) -> String {
        let cell = |x: &f32| match self.is_whole() {
            true => format!("{x:6.0} "),
            false => format!("{x:9.6} "),
        };
        row.iter().map(cell).collect()
    }

    fn table(&self) -> String {
        let most = if self.embeddings.len() > 1 { SHOWN } else { usize::MAX };
        let lines = self.rows().enumerate();
        let line = |(i, row): (usize, &[f32])| {
            format!("embedding {i}: {}\n", self.cells(&row[..row.len().min(most)]))
        };
        lines.map(line).collect()
    }

    fn tokens(&self) -> String {
        let line = |(i, row): (usize, &[f32])| {
            let n = SHOWN_OF_TOKEN.min(row.len());
            let (first, last) = (self.cells(&row[..n]), self.cells(&row[row.len() - n..]));
            format!("embedding {i}: {first} ... {last}\n")
        };
        self.rows().enumerate().map(line).collect()
    }

    fn scores(&self) -> String {
        let (labels, mut out) = (self.engine.labels(), String::new());
        for (i, row) in self.rows().enumerate() {
            for (l, score) in row.iter().enumerate() {
                let label = labels.get(l).cloned().unwrap_or_else(|| l.to_string());
                let label = if row.len() > 1 { format!(" [{label}]") } else { String::new() };
                let _ = writeln!(out, "rerank score {i}: {score:12.3}{label}");
            }
        }
        out
    }

    fn json(&self, more: &str) -> String {
        let object = |(i, row): (usize, &[f32])| {
            format!(
                "    {{\n      \"object\": \"embedding\",\n      \"index\": {i},\n      \
                 \"embedding\": {}\n    }}",
                self.array(row)
            )
        };
        let data: Vec<String> = self.rows().enumerate().map(object).collect();
        let data = data.join(",\n");
        format!("{{\n  \"object\": \"list\",\n  \"data\": [\n{data}\n  ]{more}\n}}\n")
    }

    /// Cosine similarities make sense of several texts that have a row each.
    fn has_similarities(&self) -> bool {
        let is_row = ![Pooling::None, Pooling::Rank].contains(&self.pooling);
        is_row && self.texts.len() > 1
    }

    fn similarities(&self) -> String {
        if !self.has_similarities() {
            return String::new();
        }
        let line = |a: &[f32]| {
            let all: Vec<String> = self.rows().map(|b| format!("{:6.2}", cosine(a, b))).collect();
            format!("    [{} ]", all.join(", "))
        };
        let lines: Vec<String> = self.rows().map(line).collect();
        format!(",\n  \"cosineSimilarity\": [\n{}\n  ]", lines.join(",\n"))
    }

    fn similarity_table(&self) -> String {
        if !self.has_similarities() {
            return String::new();
        }
        let begin = |text: &str, n: usize| text.chars().take(n).collect::<String>();
        let names: String = self.texts.iter().map(|t| format!("{:>6} ", begin(t, 6))).collect();
        let mut out = format!("\ncosine similarity matrix:\n\n{names}\n");
        for (text, a) in self.texts.iter().zip(self.rows()) {
            let line: String = self.rows().map(|b| format!("{:6.2} ", cosine(a, b))).collect();
            let _ = writeln!(out, "{line}{}", begin(text, 10));
        }
        out
    }
}

/// The cosine of the angle between two vectors; two of zeros are alike.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let product = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    match (product(a, a), product(b, b)) {
        (0.0, 0.0) => 1.0,
        (n, m) if n * m == 0.0 => 0.0,
        (n, m) => product(a, b) / (n * m).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use super::cosine;

    #[test]
    fn cosines_are_of_angles() {
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 2.0]), 0.0);
        assert_eq!(cosine(&[3.0, 4.0], &[-6.0, -8.0]), -1.0);
        assert_eq!(cosine(&[0.0], &[0.0]), 1.0);
        assert_eq!(cosine(&[0.0], &[1.0]), 0.0);
    }
}
