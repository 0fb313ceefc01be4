//! The expressions of descriptors: numbers, names and arithmetic over them, written as
//! `model::descriptor` documents.

use std::iter::Peekable;
use std::str::Chars;

/// The meaning of the names in an expression.
pub trait Names {
    type Error;

    /// The number that a name stands for; `None` where there is none.
    fn number(&self, name: &str) -> Result<Option<f64>, Self::Error>;

    /// The number that a text or a list starts with.
    fn first(&self, name: &str) -> Result<Option<f64>, Self::Error>;

    /// The length of a list, or of its leading run of elements that are `word`.
    fn leading(&self, list: &str, word: Option<&str>) -> Result<Option<f64>, Self::Error>;
}

#[derive(Clone, Debug, PartialEq)]
enum Expr {
    Number(f64),
    Name(String),
    Binary(Box<Expr>, char, Box<Expr>),
    Floor(Box<Expr>),
    Sqrt(Box<Expr>),
    First(String),
    /// `len(list)`, `leading(list, word)`
    Leading(String, Option<String>),
}

/// The expression if it is a name and nothing else.
pub fn lone_name(text: &str) -> Option<&str> {
    let text = text.trim();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    (text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(is_name))
        .then_some(text)
}

/// The value of an expression; `None` where a name has none. Expressions are part of the program:
/// one that does not parse is a bug, found by the test of all descriptors.
pub fn evaluate<N: Names>(text: &str, names: &N) -> Result<Option<f64>, N::Error> {
    let expr = parse(text).unwrap_or_else(|| panic!("expression {text:?}"));
    value(&expr, names)
}

/// Whether a text is an expression.
#[cfg(test)]
pub fn is_expression(text: &str) -> bool {
    parse(text).is_some()
}

fn value<N: Names>(expr: &Expr, names: &N) -> Result<Option<f64>, N::Error> {
    Ok(match expr {
        Expr::Number(x) => Some(*x),
        Expr::Name(name) => names.number(name)?,
        Expr::Floor(inner) => value(inner, names)?.map(f64::floor),
        Expr::Sqrt(inner) => value(inner, names)?.map(f64::sqrt),
        Expr::First(name) => names.first(name)?,
        Expr::Leading(list, word) => names.leading(list, word.as_deref())?,
        Expr::Binary(a, operator, b) => match (value(a, names)?, value(b, names)?) {
            (Some(a), Some(b)) => Some(match operator {
                '+' => a + b,
                '-' => a - b,
                '*' => a * b,
                _ => a / b,
            }),
            _ => None,
        },
    })
}

fn parse(text: &str) -> Option<Expr> {
    let mut parser = Parser { rest: text.chars().peekable() };
    let expr = parser.sum()?;
    (parser.peek().is_none()).then_some(expr)
}

struct Parser<'a> {
    rest: Peekable<Chars<'a>>,
}

impl Parser<'_> {
    /// The next character that is no space.
    fn peek(&mut self) -> Option<char> {
        while self.rest.next_if(|c| c.is_whitespace()).is_some() {}
        self.rest.peek().copied()
    }

    fn next_if(&mut self, wanted: &[char]) -> Option<char> {
        let found = self.peek().filter(|c| wanted.contains(c))?;
        self.rest.next();
        Some(found)
    }

    fn sum(&mut self) -> Option<Expr> {
        let mut left = self.product()?;
        while let Some(operator) = self.next_if(&['+', '-']) {
            left = Expr::Binary(Box::new(left), operator, Box::new(self.product()?));
        }
        Some(left)
    }

    fn product(&mut self) -> Option<Expr> {
        let mut left = self.atom()?;
        while let Some(operator) = self.next_if(&['*', '/']) {
            left = Expr::Binary(Box::new(left), operator, Box::new(self.atom()?));
        }
        Some(left)
    }

    fn atom(&mut self) -> Option<Expr> {
        if self.next_if(&['(']).is_some() {
            let inner = self.sum()?;
            return self.next_if(&[')']).map(|_| inner);
        }
        let word = self.word();
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.parse().ok().map(Expr::Number);
        }
        if word.is_empty() {
            return None;
        }
        if self.next_if(&['(']).is_none() {
            return Some(Expr::Name(word));
        }
        let call = match word.as_str() {
            "floor" => Expr::Floor(Box::new(self.sum()?)),
            "sqrt" => Expr::Sqrt(Box::new(self.sum()?)),
            "first" => Expr::First(self.name()?),
            "len" => Expr::Leading(self.name()?, None),
            "leading" => {
                let list = self.name()?;
                self.next_if(&[','])?;
                Expr::Leading(list, Some(self.name()?))
            }
            _ => return None,
        };
        self.next_if(&[')']).map(|_| call)
    }

    fn name(&mut self) -> Option<String> {
        Some(self.word()).filter(|word| !word.is_empty())
    }

    /// Letters, digits, `_`, `.`, and the sign of an exponent.
    fn word(&mut self) -> String {
        self.peek();
        let mut word = String::new();
        while let Some(c) = self.rest.peek().copied() {
            let exponent = word.ends_with('e') && word.starts_with(|c: char| c.is_ascii_digit());
            if !(c.is_ascii_alphanumeric() || "_.".contains(c) || (c == '-' && exponent)) {
                break;
            }
            word.push(c);
            self.rest.next();
        }
        word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fields;

    impl Names for Fields {
        type Error = ();

        fn number(&self, name: &str) -> Result<Option<f64>, ()> {
            match name {
                "a" => Ok(Some(6.0)),
                "b.c" => Ok(Some(4.0)),
                "text" => Err(()),
                _ => Ok(None),
            }
        }

        fn first(&self, name: &str) -> Result<Option<f64>, ()> {
            Ok((name == "layers").then_some(3.0))
        }

        fn leading(&self, list: &str, word: Option<&str>) -> Result<Option<f64>, ()> {
            Ok((list == "list").then_some(if word == Some("dense") { 2.0 } else { 5.0 }))
        }
    }

    fn of(text: &str) -> Result<Option<f64>, ()> {
        evaluate(text, &Fields)
    }

    #[test]
    fn arithmetic_has_its_usual_order() {
        assert_eq!(of("1 + 2 * a"), Ok(Some(13.0)));
        assert_eq!(of("(1 + 2) * a - b.c / 2"), Ok(Some(16.0)));
        assert_eq!(of("a - 1 - 1"), Ok(Some(4.0)));
        assert_eq!(of("1e-6"), Ok(Some(1e-6)));
        assert_eq!(of("0.1*a"), Ok(Some(0.1 * 6.0)));
        assert_eq!(of("floor(a / b.c)"), Ok(Some(1.0)));
        assert_eq!(of("sqrt(a * a)"), Ok(Some(6.0)));
        assert_eq!(of("first(layers) + 1"), Ok(Some(4.0)));
        assert_eq!(of("leading(list, dense) + len(list)"), Ok(Some(7.0)));
    }

    #[test]
    fn what_is_not_there_has_no_value_and_what_is_wrong_is_told() {
        assert_eq!(of("a + none"), Ok(None));
        assert_eq!(of("len(none)"), Ok(None));
        assert_eq!(of("a * text"), Err(()));
    }

    #[test]
    fn other_texts_are_no_expressions() {
        for text in ["", "a +", "(a", "a b", "sin(a)", "1x", "leading(list)", "a ? b"] {
            assert!(!is_expression(text), "{text}");
        }
        assert_eq!(lone_name(" a.b_1 "), Some("a.b_1"));
        assert_eq!(lone_name("1"), None);
        assert_eq!(lone_name("a + b"), None);
    }
}
