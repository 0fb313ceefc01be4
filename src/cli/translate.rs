//! `moeba run` with an encoder–decoder model: the prompt is a text that the encoder reads and the
//! decoder answers, by translating it or by filling in what `<extra_id_0>`, `<extra_id_1>` … stand
//! for.

use super::out;
use super::outcome::WithBar;
use super::run::{Run, TextArgs};
use crate::engine::{Engine, Request};
use crate::tokenizer::{EncodeOptions, Tokenizer};
use crate::{Error, Result};

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Translation")]
pub struct LanguageArgs {
    /// Language of the prompt, such as eng_Latn [default: the model's own]
    #[arg(long, value_name = "CODE")]
    src_lang: Option<String>,
    /// Language to translate to, such as fra_Latn
    #[arg(long, value_name = "CODE")]
    tgt_lang: Option<String>,
}

impl LanguageArgs {
    /// For a model that has nothing to translate with.
    pub fn refuse(&self) -> Result<()> {
        match self.src_lang.is_some() || self.tgt_lang.is_some() {
            true => {
                Err(Error::Usage("--src-lang and --tgt-lang are for translation models".into()))
            }
            false => Ok(()),
        }
    }

    /// Tokens of the source's language and of the answer's.
    fn tokens(&self, tokenizer: &Tokenizer) -> Result<(Option<u32>, Option<u32>)> {
        let token =
            |code: &Option<String>| code.as_ref().map(|code| tokenizer.language(code)).transpose();
        let (source, target) = (token(&self.src_lang)?, token(&self.tgt_lang)?);
        if tokenizer.source_language().is_some() && target.is_none() {
            let why = "a translation model needs a target language: give --tgt-lang CODE, such as \
                       fra_Latn";
            return Err(Error::Usage(why.into()));
        }
        Ok((source.or(tokenizer.source_language()), target))
    }
}

pub(super) fn run(
    mut run: Run,
    engine: &Engine,
    text: &TextArgs,
    languages: &LanguageArgs,
    prompt: Option<String>,
) -> Result<()> {
    if text.asks_for_chat() {
        return Err(Error::Usage(
            "this is an encoder-decoder model: it answers a text and cannot chat".into(),
        ));
    }
    let Some(prompt) = prompt else {
        let why = "there is no text: give one with -p, -f or on stdin";
        return Err(Error::Usage(why.into()));
    };
    let tokenizer = engine.tokenizer();
    let (language, target) = languages.tokens(tokenizer)?;
    let source = tokenizer.encode_in(&prompt, language, EncodeOptions::PROMPT);
    // What the decoder says first is given: its start, and the language to go on in.
    let start = engine.encoder().map(|encoder| encoder.start);
    let beginning: Vec<u32> = start.into_iter().chain(target).collect();
    let request = Request {
        source: Some(source),
        own_text: true,
        // Where spans are filled in, their names tell one from the next.
        shows_control: tokenizer.special_id("<extra_id_0>").is_some(),
        ..run.request(beginning, run.sampling.clone())
    };
    let mut write = |text: &str| out::write(text.as_bytes());
    let outcome = run.generator.generate(&request, &mut WithBar::new(&mut write))?;
    out::line("")?;
    run.finish(&outcome)
}
