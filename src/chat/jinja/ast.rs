//! The tree of a template.

use std::sync::Arc;

pub type Name = Arc<str>;

#[derive(Debug)]
pub enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug, Default)]
pub struct Args {
    pub positional: Vec<Expr>,
    pub named: Vec<(Name, Expr)>,
    pub star: Option<Box<Expr>>,
    pub double_star: Option<Box<Expr>>,
}

#[derive(Debug)]
pub enum Expr {
    Literal(Literal),
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Box<Expr>, Name),
    Item(Box<Expr>, Box<Expr>),
    Slice([Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Args),
    /// `None`: what the filter block or the set block holds.
    Filter(Option<Box<Expr>>, Name, Args),
    Test(Box<Expr>, Name, Args),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    /// The condition, the value, the value otherwise.
    If(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}

#[derive(Debug)]
pub enum Target {
    Name(Name),
    /// A field of a namespace.
    Field(Name, Name),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub struct Loop {
    pub target: Target,
    pub iterable: Expr,
    pub condition: Option<Expr>,
    pub is_recursive: bool,
    pub body: Vec<Statement>,
    pub otherwise: Vec<Statement>,
}

/// A macro, or the body of a call block, which has no name.
#[derive(Debug)]
pub struct Macro {
    pub name: Option<Name>,
    pub parameters: Vec<(Name, Option<Expr>)>,
    pub body: Vec<Statement>,
    /// Whether the body reads `varargs`, `kwargs`, `caller`.
    pub reads: [bool; 3],
}

pub const SPECIAL: [&str; 3] = ["varargs", "kwargs", "caller"];

#[derive(Debug)]
pub enum Kind {
    Text(Arc<str>),
    Print(Vec<Expr>),
    Set(Target, Expr),
    SetBlock(Target, Option<Expr>, Vec<Statement>),
    For(Arc<Loop>),
    If(Vec<(Expr, Vec<Statement>)>, Vec<Statement>),
    With(Vec<(Target, Expr)>, Vec<Statement>),
    Filter(Expr, Vec<Statement>),
    Macro(Arc<Macro>),
    Call(Expr, Arc<Macro>),
    /// Text for training.
    Generation(Vec<Statement>),
    /// Whether it sees the names around it, and its body.
    Block(bool, Vec<Statement>),
    Break,
    Continue,
    /// Another template, which there is none of: `include`, `import`, `extends`.
    Other(&'static str, Vec<Expr>),
}

#[derive(Debug)]
pub struct Statement {
    pub line: usize,
    pub kind: Kind,
}
