//! Scores of documents for a query: what a model reads whose head ranks.

use super::Engine;
use crate::tokenizer::EncodeOptions;
use crate::{Error, Result};

/// The places of both texts in a template.
const QUERY: &str = "{query}";
const DOCUMENT: &str = "{document}";

impl Engine {
    /// Whether the model has a head that ranks.
    pub fn ranks(&self) -> bool {
        self.model.weights.classifier.is_some()
    }

    /// The names of a ranking head's scores, if the file has some.
    pub fn labels(&self) -> Vec<String> {
        let key = self.model.descriptor.key("classifier.output_labels");
        let labels = self.gguf().strings(&key).ok().flatten().unwrap_or_default();
        labels.iter().map(|label| String::from_utf8_lossy(label).into_owned()).collect()
    }

    /// The tokens of a query and a document, by the file's template for them, or one behind the
    /// other between the tokens that begin and end texts. Control tokens are the template's alone.
    pub fn rank_tokens(&self, query: &str, document: &str) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer();
        if let Some(template) = self.gguf().str("tokenizer.chat_template.rerank")? {
            let (text, seams) = filled(template, query, document);
            let options = EncodeOptions { add_special: false, parse_special: true };
            return Ok(tokenizer.encode_with_seams(&text, options, &seams));
        }
        let special = tokenizer.special();
        let end = tokenizer.add_eos().then(|| special.eos.or(special.sep)).flatten();
        let separates = self.gguf().bool("tokenizer.ggml.add_sep_token")?.unwrap_or(false);
        let mut tokens: Vec<u32> =
            tokenizer.bos().filter(|_| tokenizer.add_bos()).into_iter().collect();
        tokens.extend(tokenizer.encode(query, EncodeOptions::TEXT));
        tokens.extend(end);
        tokens.extend(special.sep.filter(|_| separates));
        tokens.extend(tokenizer.encode(document, EncodeOptions::TEXT));
        tokens.extend(end);
        Ok(tokens)
    }

    /// Fails if the model does not rank.
    pub fn check_ranks(&self) -> Result<()> {
        if self.ranks() {
            return Ok(());
        }
        let file = self.gguf().path().display();
        Err(Error::invalid(format!(
            "{file}: the model has no head that ranks (cls.output.weight): it is no reranker"
        )))
    }
}

/// The template with both texts in their places, and the byte positions within the texts: no
/// control token goes across one.
fn filled(template: &str, query: &str, document: &str) -> (String, Vec<usize>) {
    let (mut text, mut seams, mut rest) = (String::new(), Vec::new(), template);
    let next = |rest: &str| {
        let places = [(QUERY, query), (DOCUMENT, document)].into_iter();
        let found = places.filter_map(|(name, value)| Some((rest.find(name)?, name.len(), value)));
        found.min_by_key(|(at, ..)| *at)
    };
    while let Some((at, n, value)) = next(rest) {
        text.push_str(&rest[..at]);
        let start = text.len();
        text.push_str(value);
        seams.extend((start..=text.len()).filter(|at| text.is_char_boundary(*at)));
        rest = &rest[at + n..];
    }
    text.push_str(rest);
    (text, seams)
}

#[cfg(test)]
mod tests {
    use super::filled;

    #[test]
    fn texts_take_their_places_and_no_others() {
        let (text, seams) = filled("<q>{query}<d>{document}.", "{document}", "é");
        assert_eq!(text, "<q>{document}<d>é.");
        let expected: Vec<usize> = (3..=13).chain([16, 18]).collect();
        assert_eq!(seams, expected);
        assert_eq!(filled("x", "a", "b"), ("x".to_owned(), Vec::new()));
    }
}
