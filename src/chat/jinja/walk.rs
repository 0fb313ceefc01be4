//! The names that a tree reads and makes, in the order of its text.

use super::ast::{Args, Expr, Kind, Name, Statement, Target};
use super::{checks, filters};
use std::collections::HashSet;

#[derive(Clone, Copy)]
pub enum Event<'a> {
    Reads(&'a Name),
    Makes(&'a Name),
    Filter(&'a Name),
    Test(&'a Name),
    /// The beginning and the end of what may not be reached.
    Conditional(bool),
    /// The beginning and the end of a scope, in which Jinja forgets that it may not be reached.
    Scope(bool),
}

type Visit<'a, 'f> = dyn FnMut(Event<'a>) + 'f;

/// Names that are read before the tree makes them.
pub fn free(body: &[Statement]) -> HashSet<String> {
    let (mut made, mut free) = (HashSet::new(), HashSet::new());
    statements(body, &mut |event| match event {
        Event::Makes(name) => drop(made.insert(name.clone())),
        Event::Reads(name) if !made.contains(name) => drop(free.insert(name.to_string())),
        _ => {}
    });
    free
}

/// The first filter or test that there is none of, where it is sure to be reached.
pub fn unknown(body: &[Statement]) -> Option<String> {
    let (mut depth, mut outer, mut unknown) = (0usize, Vec::new(), None);
    statements(body, &mut |event| match event {
        Event::Conditional(true) => depth += 1,
        Event::Conditional(false) => depth -= 1,
        Event::Scope(true) => outer.push(std::mem::take(&mut depth)),
        Event::Scope(false) => depth = outer.pop().unwrap_or(0),
        Event::Filter(name) if depth == 0 && !filters::is_known(name) => {
            unknown.get_or_insert(format!("unknown filter `{name}`"));
        }
        Event::Test(name) if depth == 0 && !checks::is_known(name) => {
            unknown.get_or_insert(format!("unknown test `{name}`"));
        }
        _ => {}
    });
    unknown
}

/// Whether the body reads this name before it makes it.
pub fn reads(body: &[Statement], name: &str) -> bool {
    free(body).contains(name)
}

/// The names that an assignment makes.
pub fn stores(target: &Target) -> impl Iterator<Item = &Name> {
    let mut names = Vec::new();
    store(target, &mut |event| {
        if let Event::Makes(name) = event {
            names.push(name);
        }
    });
    names.into_iter()
}

fn store<'a>(target: &'a Target, visit: &mut Visit<'a, '_>) {
    match target {
        Target::Name(name) => visit(Event::Makes(name)),
        Target::Field(name, _) => visit(Event::Reads(name)),
        Target::Tuple(all) => all.iter().for_each(|target| store(target, visit)),
    }
}

pub fn statements<'a>(body: &'a [Statement], visit: &mut Visit<'a, '_>) {
    for statement in body {
        match &statement.kind {
            Kind::Text(_) | Kind::Break | Kind::Continue => {}
            Kind::Print(all) | Kind::Other(_, all) => all.iter().for_each(|e| expr(e, visit)),
            Kind::Set(target, value) => {
                expr(value, visit);
                store(target, visit);
            }
            Kind::SetBlock(target, filter, body) => {
                visit(Event::Scope(true));
                filter.iter().for_each(|e| expr(e, visit));
                statements(body, visit);
                visit(Event::Scope(false));
                store(target, visit);
            }
            Kind::For(of) => {
                expr(&of.iterable, visit);
                visit(Event::Scope(true));
                store(&of.target, visit);
                of.condition.iter().for_each(|e| expr(e, visit));
                statements(&of.body, visit);
                statements(&of.otherwise, visit);
                visit(Event::Scope(false));
            }
            Kind::If(branches, otherwise) => {
                visit(Event::Conditional(true));
                for (test, body) in branches {
                    expr(test, visit);
                    statements(body, visit);
                }
                statements(otherwise, visit);
                visit(Event::Conditional(false));
            }
            Kind::With(all, body) => {
                for (target, value) in all {
                    expr(value, visit);
                    store(target, visit);
                }
                scope(body, visit);
            }
            Kind::Filter(filter, body) => {
                visit(Event::Scope(true));
                expr(filter, visit);
                statements(body, visit);
                visit(Event::Scope(false));
            }
            Kind::Macro(of) => {
                of.name.iter().for_each(|name| visit(Event::Makes(name)));
                macro_(of, visit);
            }
            Kind::Call(call, of) => {
                expr(call, visit);
                macro_(of, visit);
            }
            Kind::Generation(body) | Kind::Block(_, body) => scope(body, visit),
        }
    }
}

fn scope<'a>(body: &'a [Statement], visit: &mut Visit<'a, '_>) {
    visit(Event::Scope(true));
    statements(body, visit);
    visit(Event::Scope(false));
}

fn macro_<'a>(of: &'a super::ast::Macro, visit: &mut Visit<'a, '_>) {
    visit(Event::Scope(true));
    for (name, default) in &of.parameters {
        default.iter().for_each(|e| expr(e, visit));
        visit(Event::Makes(name));
    }
    statements(&of.body, visit);
    visit(Event::Scope(false));
}

fn expr<'a>(e: &'a Expr, visit: &mut Visit<'a, '_>) {
    match e {
        Expr::Literal(_) => {}
        Expr::Name(name) => visit(Event::Reads(name)),
        Expr::List(all) | Expr::Tuple(all) | Expr::Concat(all) => {
            all.iter().for_each(|e| expr(e, visit));
        }
        Expr::Dict(all) => all.iter().for_each(|(key, value)| {
            expr(key, visit);
            expr(value, visit);
        }),
        Expr::Attribute(e, _) | Expr::Not(e) | Expr::Negative(e) | Expr::Positive(e) => {
            expr(e, visit);
        }
        Expr::Item(a, b) | Expr::Binary(_, a, b) | Expr::And(a, b) | Expr::Or(a, b) => {
            expr(a, visit);
            expr(b, visit);
        }
        Expr::Slice(parts) => parts.iter().flatten().for_each(|e| expr(e, visit)),
        Expr::Call(e, all) => {
            expr(e, visit);
            args(all, visit);
        }
        Expr::Filter(e, name, all) => {
            visit(Event::Filter(name));
            e.iter().for_each(|e| expr(e, visit));
            args(all, visit);
        }
        Expr::Test(e, name, all) => {
            visit(Event::Test(name));
            expr(e, visit);
            args(all, visit);
        }
        Expr::Compare(first, rest) => {
            expr(first, visit);
            rest.iter().for_each(|(_, e)| expr(e, visit));
        }
        Expr::If(test, value, otherwise) => {
            visit(Event::Conditional(true));
            expr(test, visit);
            expr(value, visit);
            otherwise.iter().for_each(|e| expr(e, visit));
            visit(Event::Conditional(false));
        }
    }
}

fn args<'a>(all: &'a Args, visit: &mut Visit<'a, '_>) {
    all.positional.iter().for_each(|e| expr(e, visit));
    all.named.iter().for_each(|(_, e)| expr(e, visit));
    all.star.iter().chain(&all.double_star).for_each(|e| expr(e, visit));
}
