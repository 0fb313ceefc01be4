//! From tokens to the tree, by the grammar of Jinja 3.1 with its loop controls and the
//! `generation` tag of transformers.

use super::ast::{Args, Binary, Comparison, Expr, Kind, Literal, Loop, Macro, SPECIAL};
use super::ast::{Name, Statement, Target};
use super::lexer::{Token, tokens};
use super::{Fault, walk};
use std::sync::Arc;

/// Python's parser and its compiler give up near this depth too.
const MAX_NESTING: usize = 100;

/// Links of `a.b.c`, `a + b + c`, `a | b | c`. Python's recursion ends near 1,000.
const MAX_CHAIN: usize = 400;

pub struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
    nesting: usize,
    /// Whether `break` and `continue` have a loop.
    is_in_loop: bool,
}

type Parsed<T> = Result<T, Fault>;

/// The statements of a template.
pub fn parse(source: &str) -> Parsed<Vec<Statement>> {
    let mut parser = Parser { tokens: tokens(source)?, at: 0, nesting: 0, is_in_loop: false };
    let (body, _) = parser.statements(&[])?;
    Ok(body)
}

impl Parser {
    fn token(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn line(&self) -> usize {
        self.tokens[self.at].1
    }

    fn advance(&mut self) {
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
    }

    fn fault<T>(&self, message: impl Into<String>) -> Parsed<T> {
        Err(Fault::new(message).at(self.line()))
    }

    fn unexpected<T>(&self, expected: &str) -> Parsed<T> {
        let got = match self.token() {
            Token::Data(_) => "text".to_string(),
            Token::VariableBegin => "`{{`".into(),
            Token::VariableEnd => "`}}`".into(),
            Token::BlockBegin => "`{%`".into(),
            Token::BlockEnd => "`%}`".into(),
            Token::Name(name) => format!("`{name}`"),
            Token::Str(text) => format!("the string {text:?}"),
            Token::Int(n) => format!("`{n}`"),
            Token::Float(x) => format!("`{x}`"),
            Token::Operator(operator) => format!("`{operator}`"),
            Token::End => "the end of the template".into(),
        };
        self.fault(format!("syntax error: expected {expected}, got {got}"))
    }

    fn is(&self, operator: &str) -> bool {
        matches!(self.token(), Token::Operator(other) if *other == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        self.is_name_at(self.at, name)
    }

    fn is_name_at(&self, at: usize, name: &str) -> bool {
        matches!(self.tokens.get(at), Some((Token::Name(other), _)) if **other == *name)
    }

    fn skip(&mut self, operator: &str) -> bool {
        let found = self.is(operator);
        if found {
            self.advance();
        }
        found
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.advance();
        }
        found
    }

    fn expect(&mut self, operator: &str) -> Parsed<()> {
        if self.skip(operator) { Ok(()) } else { self.unexpected(&format!("`{operator}`")) }
    }

    fn expect_name(&mut self, name: &str) -> Parsed<()> {
        if self.skip_name(name) { Ok(()) } else { self.unexpected(&format!("`{name}`")) }
    }

    fn name(&mut self) -> Parsed<Name> {
        let Token::Name(name) = self.token() else { return self.unexpected("a name") };
        let name = name.clone();
        self.advance();
        Ok(name)
    }

    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.nesting >= MAX_NESTING {
            return self.fault(format!("nested more than {MAX_NESTING} deep"));
        }
        self.nesting += 1;
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Counts a link of a chain.
    fn link(&self, n: &mut usize) -> Parsed<()> {
        *n += 1;
        match *n > MAX_CHAIN {
            true => self.fault(format!("an expression of more than {MAX_CHAIN} parts in a row")),
            false => Ok(()),
        }
    }

    /// Statements up to one of these tags, whose name comes with them; up to the end, if there are
    /// none.
    fn statements(&mut self, ends: &[&'static str]) -> Parsed<(Vec<Statement>, &'static str)> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            match self.token() {
                Token::Data(text) => {
                    let kind = Kind::Text(text.clone());
                    body.push(Statement { line, kind });
                    self.advance();
                }
                Token::VariableBegin => {
                    self.advance();
                    let kind = Kind::Print(vec![self.tuple(true, &[], false)?]);
                    if *self.token() != Token::VariableEnd {
                        return self.unexpected("`}}`");
                    }
                    self.advance();
                    body.push(Statement { line, kind });
                }
                Token::BlockBegin => {
                    self.advance();
                    if let Some(end) = ends.iter().find(|end| self.is_name(end)) {
                        self.advance();
                        return Ok((body, end));
                    }
                    let tag = self.name()?;
                    let kind = self.nested(|parser| parser.statement(&tag))?;
                    self.block_end()?;
                    body.push(Statement { line, kind });
                }
                Token::End if ends.is_empty() => return Ok((body, "")),
                _ => return self.unexpected(&format!("`{{% {} %}}`", ends.join(" %}` or `{% "))),
            }
        }
    }

    fn block_end(&mut self) -> Parsed<()> {
        if *self.token() != Token::BlockEnd {
            return self.unexpected("`%}`");
        }
        self.advance();
        Ok(())
    }

    /// The body of a statement, and the tag that ends it.
    fn body(&mut self, ends: &[&'static str]) -> Parsed<(Vec<Statement>, &'static str)> {
        self.skip(":");
        self.block_end()?;
        self.statements(ends)
    }

    /// A body that is a function of its own, where `break` has no loop.
    fn own_body(&mut self, end: &'static str) -> Parsed<Vec<Statement>> {
        let outer = std::mem::take(&mut self.is_in_loop);
        let (body, _) = self.body(&[end])?;
        self.is_in_loop = outer;
        Ok(body)
    }

    fn statement(&mut self, tag: &str) -> Parsed<Kind> {
        Ok(match tag {
            "set" => self.set()?,
            "for" => self.for_loop()?,
            "if" => self.condition()?,
            "with" => self.with()?,
            "macro" => {
                let name = self.name()?;
                Kind::Macro(Arc::new(self.macro_of(Some(name), "endmacro")?))
            }
            "call" => self.call_block()?,
            "filter" => {
                let filter = self.filter(None, true)?;
                let (body, _) = self.body(&["endfilter"])?;
                Kind::Filter(filter.unwrap_or(Expr::Literal(Literal::None)), body)
            }
            "generation" => Kind::Generation(self.own_body("endgeneration")?),
            "print" => {
                let mut all = Vec::new();
                while *self.token() != Token::BlockEnd {
                    if !all.is_empty() {
                        self.expect(",")?;
                    }
                    all.push(self.expression()?);
                }
                Kind::Print(all)
            }
            "break" | "continue" if !self.is_in_loop => {
                return self.fault(format!("`{tag}` outside of a loop"));
            }
            "break" => Kind::Break,
            "continue" => Kind::Continue,
            "block" => self.block()?,
            "autoescape" => {
                let switch = self.expression()?;
                let (body, _) = self.body(&["endautoescape"])?;
                if !matches!(switch, Expr::Literal(Literal::Bool(false))) {
                    return self.fault("`autoescape` other than `false` is not supported");
                }
                Kind::With(Vec::new(), body)
            }
            "include" | "import" | "from" | "extends" => self.other(tag)?,
            _ => return self.fault(format!("syntax error: unknown tag `{tag}`")),
        })
    }

    fn set(&mut self) -> Parsed<Kind> {
        let target = self.target(true, &[])?;
        if self.skip("=") {
            return Ok(Kind::Set(target, self.tuple(true, &[], false)?));
        }
        let filter = self.filter(None, false)?;
        let (body, _) = self.body(&["endset"])?;
        Ok(Kind::SetBlock(target, filter, body))
    }

    fn for_loop(&mut self) -> Parsed<Kind> {
        let target = self.target(false, &["in"])?;
        self.expect_name("in")?;
        let iterable = self.tuple(false, &["recursive"], false)?;
        let condition = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let is_recursive = self.skip_name("recursive");
        let outer = std::mem::replace(&mut self.is_in_loop, true);
        let (body, end) = self.body(&["endfor", "else"])?;
        self.is_in_loop = outer;
        let otherwise = if end == "else" { self.body(&["endfor"])?.0 } else { Vec::new() };
        let of = Loop { target, iterable, condition, is_recursive, body, otherwise };
        if walk::stores(&of.target).any(|name| **name == *"loop") {
            return self.fault("a loop's variable cannot have the name `loop`");
        }
        Ok(Kind::For(Arc::new(of)))
    }

    fn condition(&mut self) -> Parsed<Kind> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, &[], false)?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((test, body));
            let otherwise = match end {
                "elif" => continue,
                "else" => self.body(&["endif"])?.0,
                _ => Vec::new(),
            };
            return Ok(Kind::If(branches, otherwise));
        }
    }

    fn with(&mut self) -> Parsed<Kind> {
        let mut all = Vec::new();
        while *self.token() != Token::BlockEnd && !self.is(":") {
            if !all.is_empty() {
                self.expect(",")?;
            }
            let target = self.target(false, &[])?;
            self.expect("=")?;
            all.push((target, self.expression()?));
        }
        Ok(Kind::With(all, self.body(&["endwith"])?.0))
    }

    /// Parameters, if there are any, and the body.
    fn macro_of(&mut self, name: Option<Name>, end: &'static str) -> Parsed<Macro> {
        let parameters = self.signature()?;
        let body = self.own_body(end)?;
        Ok(macro_with(name, parameters, body))
    }

    fn signature(&mut self) -> Parsed<Vec<(Name, Option<Expr>)>> {
        let mut parameters: Vec<(Name, Option<Expr>)> = Vec::new();
        self.expect("(")?;
        while !self.is(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
            }
            let name = self.name()?;
            let default = if self.skip("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|last| last.1.is_some()) {
                return self.fault("a parameter without a default follows one with a default");
            }
            if parameters.iter().any(|(other, _)| *other == name) {
                return self.fault(format!("two parameters have the name `{name}`"));
            }
            parameters.push((name, default));
        }
        self.expect(")")?;
        Ok(parameters)
    }

    fn call_block(&mut self) -> Parsed<Kind> {
        let parameters = if self.is("(") { self.signature()? } else { Vec::new() };
        let call = self.expression()?;
        if !matches!(call, Expr::Call(..)) {
            return self.fault("syntax error: expected a call");
        }
        let body = self.own_body("endcall")?;
        Ok(Kind::Call(call, Arc::new(macro_with(None, parameters, body))))
    }

    fn block(&mut self) -> Parsed<Kind> {
        let name = self.name()?;
        let is_scoped = self.skip_name("scoped");
        if self.is_name("required") {
            return self.fault("required blocks are not supported");
        }
        let body = self.own_body("endblock")?;
        self.skip_name(&name);
        Ok(Kind::Block(is_scoped, body))
    }

    /// Statements that load other templates.
    fn other(&mut self, tag: &str) -> Parsed<Kind> {
        let name = ["include", "import", "from", "extends"].into_iter().find(|name| *name == tag);
        let template = self.expression()?;
        while *self.token() != Token::BlockEnd && *self.token() != Token::End {
            self.advance();
        }
        Ok(Kind::Other(name.unwrap_or("include"), vec![template]))
    }

    fn target(&mut self, with_fields: bool, ends: &[&str]) -> Parsed<Target> {
        let (mut all, mut is_tuple) = (Vec::new(), false);
        loop {
            if ends.iter().any(|end| self.is_name(end)) || self.is("=") || self.is(")") {
                break;
            }
            all.push(self.single_target(with_fields)?);
            if !self.skip(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, all.pop()) {
            (false, Some(target)) => Ok(target),
            (true, last) => {
                all.extend(last);
                Ok(Target::Tuple(all))
            }
            (false, None) => self.unexpected("a name"),
        }
    }

    fn single_target(&mut self, with_fields: bool) -> Parsed<Target> {
        if self.skip("(") {
            let target = self.nested(|parser| parser.target(with_fields, &[]))?;
            self.expect(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if with_fields && self.skip(".") {
            return Ok(Target::Field(name, self.name()?));
        }
        if ["true", "false", "none", "True", "False", "None"].contains(&&*name) {
            return self.fault(format!("syntax error: cannot assign to `{name}`"));
        }
        Ok(Target::Name(name))
    }

    /// An expression, or several with commas between them, which are a tuple.
    fn tuple(&mut self, with_if: bool, ends: &[&str], in_parentheses: bool) -> Parsed<Expr> {
        let (mut all, mut is_tuple) = (Vec::new(), false);
        loop {
            let is_end = matches!(self.token(), Token::VariableEnd | Token::BlockEnd)
                || self.is(")")
                || ends.iter().any(|end| self.is_name(end));
            if is_end {
                break;
            }
            all.push(if with_if { self.expression()? } else { self.nested(Self::or)? });
            if !self.skip(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, all.len()) {
            (false, 1) => Ok(all.remove(0)),
            (false, 0) if !in_parentheses => self.unexpected("an expression"),
            _ => Ok(Expr::Tuple(all)),
        }
    }

    fn expression(&mut self) -> Parsed<Expr> {
        self.nested(|parser| {
            let (mut value, mut n) = (parser.or()?, 0);
            while parser.skip_name("if") {
                parser.link(&mut n)?;
                let test = parser.or()?;
                let otherwise = match parser.skip_name("else") {
                    true => Some(Box::new(parser.expression()?)),
                    false => None,
                };
                value = Expr::If(Box::new(test), Box::new(value), otherwise);
            }
            Ok(value)
        })
    }

    fn or(&mut self) -> Parsed<Expr> {
        let (mut left, mut n) = (self.and()?, 0);
        while self.skip_name("or") {
            self.link(&mut n)?;
            left = Expr::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Parsed<Expr> {
        let (mut left, mut n) = (self.not()?, 0);
        while self.skip_name("and") {
            self.link(&mut n)?;
            left = Expr::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Parsed<Expr> {
        match self.skip_name("not") {
            true => Ok(Expr::Not(Box::new(self.nested(Self::not)?))),
            false => self.compare(),
        }
    }

    fn compare(&mut self) -> Parsed<Expr> {
        let first = self.sum()?;
        let (mut rest, mut n) = (Vec::new(), 0);
        loop {
            let operators = [
                ("==", Comparison::Eq),
                ("!=", Comparison::Ne),
                ("<", Comparison::Lt),
                ("<=", Comparison::Le),
                (">", Comparison::Gt),
                (">=", Comparison::Ge),
            ];
            let comparison = match operators.into_iter().find(|(text, _)| self.is(text)) {
                Some((_, comparison)) => comparison,
                None if self.is_name("in") => Comparison::In,
                None if self.is_name("not") && self.is_name_at(self.at + 1, "in") => {
                    self.advance();
                    Comparison::NotIn
                }
                None => break,
            };
            self.advance();
            self.link(&mut n)?;
            rest.push((comparison, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Compare(Box::new(first), rest) })
    }

    fn sum(&mut self) -> Parsed<Expr> {
        self.binary(&[("+", Binary::Add), ("-", Binary::Sub)], Self::concat)
    }

    fn concat(&mut self) -> Parsed<Expr> {
        let mut all = vec![self.product()?];
        while self.skip("~") {
            all.push(self.product()?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Expr::Concat(all) })
    }

    fn product(&mut self) -> Parsed<Expr> {
        const OPERATORS: [(&str, Binary); 4] =
            [("*", Binary::Mul), ("/", Binary::Div), ("//", Binary::FloorDiv), ("%", Binary::Mod)];
        self.binary(&OPERATORS, |parser| {
            parser.binary(&[("**", Binary::Pow)], |parser| parser.unary(true))
        })
    }

    fn binary(
        &mut self,
        operators: &[(&str, Binary)],
        mut operand: impl FnMut(&mut Self) -> Parsed<Expr>,
    ) -> Parsed<Expr> {
        let (mut left, mut n) = (operand(self)?, 0);
        while let Some((text, operator)) = operators.iter().find(|(text, _)| self.is(text)) {
            self.skip(text);
            self.link(&mut n)?;
            left = Expr::Binary(*operator, Box::new(left), Box::new(operand(self)?));
        }
        Ok(left)
    }

    fn unary(&mut self, with_filters: bool) -> Parsed<Expr> {
        let node = match (self.skip("-"), self.is("+")) {
            (true, _) => Expr::Negative(Box::new(self.nested(|parser| parser.unary(false))?)),
            (false, true) => {
                self.advance();
                Expr::Positive(Box::new(self.nested(|parser| parser.unary(false))?))
            }
            _ => self.primary()?,
        };
        let mut n = 0;
        let node = self.postfix(node, &mut n)?;
        if with_filters { self.filters(node, &mut n) } else { Ok(node) }
    }

    fn primary(&mut self) -> Parsed<Expr> {
        let literal = match self.token() {
            Token::Name(name) => match &**name {
                "true" | "True" => Literal::Bool(true),
                "false" | "False" => Literal::Bool(false),
                "none" | "None" => Literal::None,
                _ => return Ok(Expr::Name(self.name()?)),
            },
            Token::Str(_) => {
                let mut all = String::new();
                while let Token::Str(text) = self.token() {
                    all.push_str(text);
                    self.advance();
                }
                return Ok(Expr::Literal(Literal::Str(all.into())));
            }
            Token::Int(n) => Literal::Int(*n),
            Token::Float(x) => Literal::Float(*x),
            Token::Operator("(") => {
                self.advance();
                let inner = self.nested(|parser| parser.tuple(true, &[], true))?;
                self.expect(")")?;
                return Ok(inner);
            }
            Token::Operator("[") => {
                self.advance();
                return Ok(Expr::List(self.items("]", Self::expression)?));
            }
            Token::Operator("{") => {
                self.advance();
                return Ok(Expr::Dict(self.items("}", |parser| {
                    let key = parser.expression()?;
                    parser.expect(":")?;
                    Ok((key, parser.expression()?))
                })?));
            }
            _ => return self.unexpected("an expression"),
        };
        self.advance();
        Ok(Expr::Literal(literal))
    }

    /// Items up to the closing bracket, with commas between them and perhaps behind them.
    fn items<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<Vec<T>> {
        let mut all = Vec::new();
        while !self.is(close) {
            if !all.is_empty() {
                self.expect(",")?;
                if self.is(close) {
                    break;
                }
            }
            all.push(item(self)?);
        }
        self.expect(close)?;
        Ok(all)
    }

    fn postfix(&mut self, mut node: Expr, n: &mut usize) -> Parsed<Expr> {
        loop {
            self.link(n)?;
            if self.skip(".") {
                node = match self.token() {
                    Token::Name(_) => Expr::Attribute(Box::new(node), self.name()?),
                    Token::Int(index) => {
                        let index = Expr::Literal(Literal::Int(*index));
                        self.advance();
                        Expr::Item(Box::new(node), Box::new(index))
                    }
                    _ => return self.unexpected("a name or a number"),
                };
            } else if self.skip("[") {
                let mut all = self.items("]", |parser| parser.nested(Self::subscript))?;
                let index = match all.len() {
                    1 => all.remove(0),
                    _ => Expr::Tuple(all),
                };
                node = Expr::Item(Box::new(node), Box::new(index));
            } else if self.is("(") {
                node = Expr::Call(Box::new(node), self.args()?);
            } else {
                return Ok(node);
            }
        }
    }

    fn subscript(&mut self) -> Parsed<Expr> {
        let mut parts = [None, None, None];
        if !self.is(":") {
            let first = self.expression()?;
            if !self.is(":") {
                return Ok(first);
            }
            parts[0] = Some(Box::new(first));
        }
        self.expect(":")?;
        for (n, part) in parts.iter_mut().enumerate().skip(1) {
            if n == 2 && !self.skip(":") {
                break;
            }
            if !self.is(":") && !self.is("]") && !self.is(",") {
                *part = Some(Box::new(self.expression()?));
            }
        }
        Ok(Expr::Slice(parts))
    }

    fn filters(&mut self, mut node: Expr, n: &mut usize) -> Parsed<Expr> {
        loop {
            self.link(n)?;
            if self.is("|") {
                node = self.filter(Some(node), false)?.unwrap_or(Expr::Literal(Literal::None));
            } else if self.is_name("is") {
                node = self.test(node)?;
            } else if self.is("(") {
                node = Expr::Call(Box::new(node), self.args()?);
            } else {
                return Ok(node);
            }
        }
    }

    fn dotted(&mut self) -> Parsed<Name> {
        let mut name = self.name()?;
        while self.skip(".") {
            name = format!("{name}.{}", self.name()?).into();
        }
        Ok(name)
    }

    /// The filters that follow; `is_inline`: the first one has no `|`.
    fn filter(&mut self, node: Option<Expr>, mut is_inline: bool) -> Parsed<Option<Expr>> {
        let (mut node, mut n) = (node, 0);
        while is_inline || self.skip("|") {
            self.link(&mut n)?;
            is_inline = false;
            let name = self.dotted()?;
            let args = if self.is("(") { self.args()? } else { Args::default() };
            node = Some(Expr::Filter(node.map(Box::new), name, args));
        }
        Ok(node)
    }

    fn test(&mut self, node: Expr) -> Parsed<Expr> {
        self.expect_name("is")?;
        let is_negated = self.skip_name("not");
        let name = self.dotted()?;
        let begins = match self.token() {
            Token::Name(name) => !["else", "or", "and"].contains(&&**name),
            Token::Str(_) | Token::Int(_) | Token::Float(_) => true,
            _ => self.is("[") || self.is("{"),
        };
        let args = if self.is("(") {
            self.args()?
        } else if self.is_name("is") {
            return self.fault("syntax error: tests with `is` cannot follow each other");
        } else if begins {
            let argument = self.primary()?;
            let argument = self.postfix(argument, &mut 0)?;
            Args { positional: vec![argument], ..Args::default() }
        } else {
            Args::default()
        };
        let test = Expr::Test(Box::new(node), name, args);
        Ok(if is_negated { Expr::Not(Box::new(test)) } else { test })
    }

    fn args(&mut self) -> Parsed<Args> {
        self.expect("(")?;
        let mut args = Args::default();
        let mut is_first = true;
        while !self.is(")") {
            if !is_first {
                self.expect(",")?;
                if self.is(")") {
                    break;
                }
            }
            is_first = false;
            let is_free = args.star.is_none() && args.double_star.is_none();
            let is_named = matches!(self.token(), Token::Name(_))
                && self.tokens.get(self.at + 1).is_some_and(|t| t.0 == Token::Operator("="));
            if self.is("*") && is_free {
                self.advance();
                args.star = Some(Box::new(self.expression()?));
            } else if self.is("**") && args.double_star.is_none() {
                self.advance();
                args.double_star = Some(Box::new(self.expression()?));
            } else if is_named && args.double_star.is_none() {
                let name = self.name()?;
                self.expect("=")?;
                let value = self.expression()?;
                if args.named.iter().any(|(other, _)| *other == name) {
                    return self.fault(format!("the argument `{name}` is given twice"));
                }
                args.named.push((name, value));
            } else if is_free && args.named.is_empty() {
                args.positional.push(self.expression()?);
            } else {
                return self.fault("syntax error: arguments in a wrong order");
            }
        }
        self.expect(")")?;
        Ok(args)
    }
}

fn macro_with(
    name: Option<Name>,
    parameters: Vec<(Name, Option<Expr>)>,
    body: Vec<Statement>,
) -> Macro {
    let reads = SPECIAL.map(|special| walk::reads(&body, special));
    Macro { name, parameters, body, reads }
}
