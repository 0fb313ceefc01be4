//! Breaks an answer's lines between words, while its words come piece by piece.

use unicode_width::UnicodeWidthChar;

/// Marks the lines around code, which keeps its own lines.
const FENCE: &str = "```";

/// The line that is written on a terminal.
#[derive(Clone, Debug, Default)]
pub struct Wrap {
    /// Columns that text may fill; `None` breaks nothing.
    width: Option<usize>,
    column: usize,
    /// The word at the line's end, and the columns that it fills.
    word: String,
    word_width: usize,
    /// The line's first characters, as many as a fence has.
    start: String,
    in_code: bool,
}

impl Wrap {
    /// For a terminal of so many columns. The last one stays empty: behind it terminals differ in
    /// where the cursor is.
    pub fn new(n_columns: Option<usize>) -> Wrap {
        let width = n_columns.map(|n| n.saturating_sub(1)).filter(|n| *n > 0);
        Wrap { width, ..Wrap::default() }
    }

    /// The next characters of a text, as they are to be written. A word that does not fit the line
    /// is taken from there and written in the next one.
    pub fn text(&mut self, text: &str) -> String {
        let Some(width) = self.width else { return text.to_owned() };
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            self.push(c, width, &mut out);
        }
        out
    }

    fn push(&mut self, c: char, width: usize, out: &mut String) {
        let columns = match c {
            '\n' | '\r' => return self.end_line(c, out),
            '\t' => 8 - self.column % 8,
            c => c.width().unwrap_or(0),
        };
        if self.start.len() < FENCE.len() {
            self.start.push(c);
            self.in_code ^= self.start == FENCE;
        }
        let is_space = c.is_whitespace();
        if self.column + columns > width && !self.in_code {
            let is_moved = !is_space && columns < 2 && self.word_width < self.column;
            if is_moved && self.word_width > 0 {
                out.push_str(&format!("\x1b[{}D\x1b[K", self.word_width));
            }
            out.push('\n');
            self.column = 0;
            if is_moved {
                out.push_str(&self.word);
                self.column = self.word_width;
            }
            if is_space {
                return self.end_word();
            }
        }
        out.push(c);
        self.column += columns;
        // A line may end behind a wide character.
        if is_space || columns > 1 {
            return self.end_word();
        }
        self.word.push(c);
        self.word_width += columns;
        if self.word_width >= width {
            self.end_word();
        }
    }

    fn end_word(&mut self) {
        self.word.clear();
        self.word_width = 0;
    }

    fn end_line(&mut self, c: char, out: &mut String) {
        out.push(c);
        self.end_word();
        self.column = 0;
        if c == '\n' {
            self.start.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The screen after a text that came in pieces of each length.
    fn screens(n_columns: usize, text: &str) -> Vec<String> {
        let chars: Vec<char> = text.chars().collect();
        let of_length = |n: usize| {
            let mut wrap = Wrap::new(Some(n_columns));
            let pieces = chars.chunks(n).map(|piece| piece.iter().collect::<String>());
            screen(&pieces.map(|piece| wrap.text(&piece)).collect::<String>())
        };
        (1..=chars.len().max(1)).map(of_length).collect()
    }

    /// The text that a terminal shows: the cursor goes left, and the rest of the line goes.
    fn screen(written: &str) -> String {
        let mut parts = written.split("\x1b[");
        let mut out: Vec<char> = parts.next().unwrap_or_default().chars().collect();
        for part in parts {
            let (moved, text) = match part.strip_prefix('K') {
                Some(text) => (0, text),
                None => {
                    let (n, text) = part.split_once('D').expect("a number of columns");
                    (n.parse().expect("a number"), text)
                }
            };
            out.truncate(out.len() - moved);
            out.extend(text.chars());
        }
        out.into_iter().collect()
    }

    #[test]
    fn lines_break_between_words() {
        for (text, expected) in [
            ("in this case words", "in this \ncase words"),
            ("a\nsecond line of text", "a\nsecond line\nof text"),
            ("1234567890 12", "1234567890 \n12"),
            ("123456789012345", "12345678901\n2345"),
            ("ab 文文文文文", "ab 文文文文\n文"),
            ("", ""),
        ] {
            let n_columns = 12;
            screens(n_columns, text).iter().for_each(|shown| assert_eq!(shown, expected, "{text}"));
        }
    }

    #[test]
    fn code_keeps_its_lines() {
        let text = "```\nlet answer = 42;\n```\nand the text";
        let expected = "```\nlet answer = 42;\n```\nand the \ntext";
        screens(10, text).iter().for_each(|shown| assert_eq!(shown, expected));
        assert_eq!(Wrap::new(None).text("no terminal, no lines"), "no terminal, no lines");
    }
}
