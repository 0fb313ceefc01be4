//! Splits a text at the special tokens written out in it: leftmost match first, the longest of
//! those that start there. A trie over bytes, so the work is the text's length times the longest
//! token's whatever the number of special tokens.

use super::vocab::{TokenType, Vocab};
use std::collections::HashSet;

/// A part of a text: ordinary text, or a special token.
pub enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

#[derive(Default)]
struct Node {
    /// Sorted by byte.
    children: Vec<(u8, u32)>,
    token: Option<u32>,
}

/// Byte strings, found at the start of a text.
pub struct Trie {
    nodes: Vec<Node>,
}

impl Trie {
    pub fn new() -> Self {
        Self { nodes: vec![Node::default()] }
    }

    fn child(&self, node: u32, byte: u8) -> Option<u32> {
        let children = &self.nodes[node as usize].children;
        children.binary_search_by_key(&byte, |c| c.0).ok().map(|at| children[at].1)
    }

    pub fn insert(&mut self, text: &[u8], id: u32) {
        let mut node = 0u32;
        for &byte in text {
            node = match self.child(node, byte) {
                Some(next) => next,
                None => {
                    let next = self.nodes.len() as u32;
                    self.nodes.push(Node::default());
                    let children = &mut self.nodes[node as usize].children;
                    let at = children.partition_point(|c| c.0 < byte);
                    children.insert(at, (byte, next));
                    next
                }
            };
        }
        self.nodes[node as usize].token = Some(id);
    }

    /// Calls `each` with every token at the start of `text`, shortest first: its length and id.
    pub fn prefixes(&self, text: &[u8], mut each: impl FnMut(usize, u32)) {
        let mut node = 0u32;
        for (i, &byte) in text.iter().enumerate() {
            match self.child(node, byte) {
                Some(next) => node = next,
                None => break,
            }
            if let Some(id) = self.nodes[node as usize].token {
                each(i + 1, id);
            }
        }
    }

    /// The longest token at the start of `text`: its length and id.
    fn longest(&self, text: &[u8]) -> Option<(usize, u32)> {
        let mut best = None;
        self.prefixes(text, |len, id| best = Some((len, id)));
        best
    }
}

pub struct Partition {
    /// Recognised in any text.
    user_defined: Trie,
    /// Recognised when the caller vouches for the text: user-defined, control and unknown tokens.
    all: Trie,
    /// Tokens that take the whitespace before or after them along.
    lstrip: HashSet<u32>,
    rstrip: HashSet<u32>,
}

impl Partition {
    pub fn new(vocab: &Vocab) -> Self {
        let (mut user_defined, mut all) = (Trie::new(), Trie::new());
        for (id, (token, kind)) in vocab.tokens.iter().zip(&vocab.types).enumerate() {
            // A token that is no UTF-8 cannot be in a text, and would split its characters.
            if token.is_empty() || !kind.is_special() || std::str::from_utf8(token).is_err() {
                continue;
            }
            all.insert(token, id as u32);
            if *kind == TokenType::UserDefined {
                user_defined.insert(token, id as u32);
            }
        }
        let set = |ids: &[u32]| ids.iter().copied().collect();
        Self { user_defined, all, lstrip: set(&vocab.lstrip), rstrip: set(&vocab.rstrip) }
    }

    pub fn find(&self, name: &str) -> Option<u32> {
        self.all.longest(name.as_bytes()).filter(|(len, _)| *len == name.len()).map(|(_, id)| id)
    }

    /// Calls `each` with the parts of `text` in order; text parts are never empty. Behind each of
    /// the ascending `seams` a token may begin or end, but none goes across, user-defined ones
    /// excepted.
    pub fn split<'a>(
        &self,
        text: &'a str,
        parse_special: bool,
        seams: &[usize],
        mut each: impl FnMut(Fragment<'a>),
    ) {
        let trie = if parse_special { &self.all } else { &self.user_defined };
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            let rest = &text.as_bytes()[at..];
            let crosses = |len: usize| {
                let seam = seams.get(seams.partition_point(|seam| *seam <= at));
                seam.is_some_and(|seam| *seam < at + len)
            };
            let found = match trie.longest(rest) {
                Some((len, _)) if crosses(len) => self.user_defined.longest(rest),
                found => found,
            };
            let Some((len, id)) = found else {
                at += 1;
                continue;
            };
            let before = match &text[start..at] {
                before if self.lstrip.contains(&id) => before.trim_end(),
                before => before,
            };
            if !before.is_empty() {
                each(Fragment::Text(before));
            }
            each(Fragment::Token(id));
            at += len;
            if self.rstrip.contains(&id) {
                at = text.len() - text[at..].trim_start().len();
            }
            start = at;
        }
        if start < text.len() {
            each(Fragment::Text(&text[start..]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::VocabModel;

    fn split(text: &str, parse_special: bool) -> Vec<String> {
        let tokens = ["a", "<s>", "<s>x", "<tool>", "é"];
        let mut vocab =
            Vocab::new(VocabModel::Bpe, tokens.iter().map(|t| t.as_bytes().to_vec()).collect());
        vocab.types = vec![
            TokenType::Normal,
            TokenType::Control,
            TokenType::Control,
            TokenType::UserDefined,
            TokenType::UserDefined,
        ];
        let mut out = Vec::new();
        Partition::new(&vocab).split(text, parse_special, &[], |fragment| {
            out.push(match fragment {
                Fragment::Text(text) => text.to_string(),
                Fragment::Token(id) => format!("#{id}"),
            })
        });
        out
    }

    #[test]
    fn longest_of_the_leftmost() {
        assert_eq!(split("a<s>x<s>b<s", true), ["a", "#2", "#1", "b<s"]);
        assert_eq!(split("<tool><tool>", true), ["#3", "#3"]);
        assert_eq!(split("", true), [""; 0]);
        assert_eq!(split("éaé", true), ["#4", "a", "#4"]);
    }

    #[test]
    fn some_take_whitespace_along() {
        let tokens = ["<a>", "<b>"].map(|t| t.as_bytes().to_vec());
        let mut vocab = Vocab::new(VocabModel::Bpe, tokens.to_vec());
        vocab.types = vec![TokenType::Control; 2];
        (vocab.lstrip, vocab.rstrip) = (vec![0], vec![1]);
        let partition = Partition::new(&vocab);
        let split = |text: &str| {
            let mut out = Vec::new();
            partition.split(text, true, &[], |fragment| match fragment {
                Fragment::Text(text) => out.push(text.to_string()),
                Fragment::Token(id) => out.push(format!("#{id}")),
            });
            out
        };
        assert_eq!(split("x \n<a> y"), ["x", "#0", " y"]);
        assert_eq!(split("x <b> \ny "), ["x ", "#1", "y "]);
        assert_eq!(split("<b>\u{3000}<a>\n<b>\n"), ["#1", "#0", "\n", "#1"]);
    }

    #[test]
    fn control_tokens_only_when_asked() {
        assert_eq!(split("a<s>x<tool>b", false), ["a<s>x", "#3", "b"]);
    }
}
