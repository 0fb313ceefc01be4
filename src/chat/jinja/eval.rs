//! Runs the tree of a template.

use super::ast::{Args, Expr, Kind, Literal, Loop, Macro, Name, SPECIAL, Statement, Target};
use super::value::{Closure, Dict, Key, LoopState, Value};
use super::{Arguments, Fault, Limits, Result, within_bounds};
use super::{checks, filters, format, globals, json, methods, ops, sequences};
use crate::chat::clock::Clock;
use serde_json::{Map, Value as Json};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Names of one block, and of those around it.
#[derive(Default)]
pub struct Scope {
    names: RefCell<HashMap<Name, Value>>,
    outer: Option<Rc<Scope>>,
}

impl Scope {
    fn within(outer: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self { names: RefCell::default(), outer: Some(outer.clone()) })
    }

    fn get(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some(value) = scope.names.borrow().get(name) {
                return Some(value.clone());
            }
            scope = scope.outer.as_deref()?;
        }
    }

    fn set(&self, name: &Name, value: Value) {
        self.names.borrow_mut().insert(name.clone(), value);
    }
}

#[derive(PartialEq, Eq)]
enum Flow {
    On,
    Break,
    Continue,
}

pub struct Interpreter {
    pub clock: Clock,
    limits: Limits,
    steps: u64,
    depth: usize,
    out: String,
    root: Rc<Scope>,
    /// Scopes that macros and loops hold, and that may hold those.
    held: Vec<Rc<Scope>>,
    pub namespaces: Vec<Rc<RefCell<Dict>>>,
}

/// Values may hold each other in circles through scopes and namespaces, and nowhere else.
impl Drop for Interpreter {
    fn drop(&mut self) {
        self.held.iter().for_each(|scope| scope.names.borrow_mut().clear());
        self.namespaces.iter().for_each(|fields| fields.borrow_mut().clear());
    }
}

impl Interpreter {
    pub fn new(context: Map<String, Json>, clock: Clock, limits: Limits) -> Self {
        let names = context.into_iter().map(|(name, value)| (name.into(), json::value(value)));
        let given = Rc::new(Scope { names: RefCell::new(names.collect()), outer: None });
        let root = Scope::within(&given);
        let held = vec![root.clone()];
        let (out, namespaces) = (String::new(), Vec::new());
        Self { clock, limits, steps: limits.steps, depth: 0, out, root, held, namespaces }
    }

    pub fn render(mut self, body: &[Statement]) -> Result<String> {
        let root = self.root.clone();
        self.run(body, &root)?;
        Ok(std::mem::take(&mut self.out))
    }

    /// Counts work.
    pub fn spend(&mut self, n: usize) -> Result<()> {
        within_bounds()?;
        match self.steps.checked_sub(n as u64) {
            Some(left) => {
                self.steps = left;
                Ok(())
            }
            None => Err(Fault::new(format!(
                "the template ran out of fuel: more than {} steps",
                self.limits.steps
            ))),
        }
    }

    /// The items of a value, each of which is work.
    pub fn items(&mut self, value: &Value) -> Result<Vec<Value>> {
        self.spend(value.length().unwrap_or(0) / 8)?;
        value.items()
    }

    fn write(&mut self, text: &str) -> Result<()> {
        if self.out.len() + text.len() > self.limits.output_bytes {
            let most = self.limits.output_bytes;
            return Err(Fault::new(format!("more than {most} bytes of text")));
        }
        self.out.push_str(text);
        Ok(())
    }

    /// The text that `work` writes.
    fn captured<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<(T, String)> {
        let outer = std::mem::take(&mut self.out);
        let done = work(self);
        let text = std::mem::replace(&mut self.out, outer);
        done.map(|done| (done, text))
    }

    /// Goes one level of macros and recursive loops deeper.
    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= self.limits.depth {
            return Err(Fault::new(format!(
                "recursion: more than {} calls within each other",
                self.limits.depth
            )));
        }
        self.depth += 1;
        let done = work(self);
        self.depth -= 1;
        done
    }

    fn run(&mut self, body: &[Statement], scope: &Rc<Scope>) -> Result<Flow> {
        for statement in body {
            let flow = self.statement(statement, scope).map_err(|f| f.at(statement.line))?;
            if flow != Flow::On {
                return Ok(flow);
            }
        }
        Ok(Flow::On)
    }

    /// Runs a body in a scope of its own, to the end.
    fn run_within(&mut self, body: &[Statement], scope: &Rc<Scope>) -> Result<()> {
        self.run(body, &Scope::within(scope)).map(drop)
    }

    fn statement(&mut self, statement: &Statement, scope: &Rc<Scope>) -> Result<Flow> {
        self.spend(1)?;
        match &statement.kind {
            Kind::Text(text) => self.write(text)?,
            Kind::Print(all) => {
                for e in all {
                    let text = self.eval(e, scope)?.print()?;
                    self.write(&text)?;
                }
            }
            Kind::Set(target, value) => {
                let value = self.eval(value, scope)?;
                self.assign(target, value, scope)?;
            }
            Kind::SetBlock(_, filter, body) => {
                return self.captured_block(statement, filter.as_ref(), body, scope);
            }
            Kind::For(of) => {
                let iterable = self.eval(&of.iterable, scope)?;
                self.run_loop(of, &iterable, scope, 0)?;
            }
            Kind::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.eval(test, scope)?.is_true() {
                        return self.run(body, scope);
                    }
                }
                return self.run(otherwise, scope);
            }
            Kind::With(all, body) => {
                let inner = Scope::within(scope);
                for (target, value) in all {
                    // The values see the names around the block, not each other.
                    let value = self.eval(value, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.run(body, &inner);
            }
            Kind::Filter(filter, body) => {
                return self.captured_block(statement, Some(filter), body, scope);
            }
            Kind::Macro(of) => {
                let closure = self.closure(of, scope);
                if let Some(name) = &of.name {
                    scope.set(name, closure);
                }
            }
            Kind::Call(call, of) => {
                let Expr::Call(callee, args) = call else { return Ok(Flow::On) };
                let caller = self.closure(of, scope);
                let value = self.call_expr(callee, args, Some(caller), scope)?;
                self.write(&value.print()?)?;
            }
            Kind::Generation(body) => self.run_within(body, scope)?,
            Kind::Block(true, body) => self.run_within(body, scope)?,
            Kind::Block(false, body) => {
                let root = self.root.clone();
                self.run_within(body, &root)?;
            }
            Kind::Break => return Ok(Flow::Break),
            Kind::Continue => return Ok(Flow::Continue),
            Kind::Other(name, _) => {
                return Err(Fault::new(format!("`{name}`: there are no other templates")));
            }
        }
        Ok(Flow::On)
    }

    /// A block whose text is filtered, and then written or assigned.
    fn captured_block(
        &mut self,
        statement: &Statement,
        filter: Option<&Expr>,
        body: &[Statement],
        scope: &Rc<Scope>,
    ) -> Result<Flow> {
        let inner = Scope::within(scope);
        let (flow, text) = self.captured(|this| this.run(body, &inner))?;
        if flow == Flow::On {
            let value = self.filtered(filter, text, scope)?;
            match &statement.kind {
                Kind::SetBlock(target, ..) => self.assign(target, value, scope)?,
                _ => self.write(&value.print()?)?,
            }
        }
        Ok(flow)
    }

    fn closure(&mut self, of: &Arc<Macro>, scope: &Rc<Scope>) -> Value {
        self.hold(scope);
        Value::Macro(Rc::new(Closure { of: of.clone(), scope: scope.clone() }))
    }

    fn hold(&mut self, scope: &Rc<Scope>) {
        if !self.held.last().is_some_and(|last| Rc::ptr_eq(last, scope)) {
            self.held.push(scope.clone());
        }
    }

    /// The text of a block after its filters.
    fn filtered(
        &mut self,
        filter: Option<&Expr>,
        text: String,
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        let Some(Expr::Filter(inner, name, args)) = filter else { return Ok(text.into()) };
        let value = self.filtered(inner.as_deref(), text, scope)?;
        let args = self.arguments(args, None, scope)?;
        filters::call(self, name, &value, &args)
    }

    fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Result<()> {
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Field(name, field) => {
                let Some(Value::Namespace(fields)) = self.lookup(name, scope) else {
                    return Err(Fault::new(format!("`{name}` is no namespace")));
                };
                globals::check_field(field)?;
                fields.borrow_mut().insert(Value::str_key(field), value);
            }
            Target::Tuple(all) => {
                let items = self.items(&value)?;
                if items.len() != all.len() {
                    let (expected, got) = (all.len(), items.len());
                    let message = format!("expected {expected} values to assign, got {got}");
                    return Err(Fault::new(message));
                }
                for (target, item) in all.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
            }
        }
        Ok(())
    }

    fn run_loop(
        &mut self,
        of: &Arc<Loop>,
        iterable: &Value,
        scope: &Rc<Scope>,
        depth: usize,
    ) -> Result<()> {
        let mut items = self.items(iterable)?;
        if let Some(condition) = &of.condition {
            let mut kept = Vec::new();
            for item in items {
                self.spend(1)?;
                let inner = Scope::within(scope);
                self.assign(&of.target, item.clone(), &inner)?;
                if self.eval(condition, &inner)?.is_true() {
                    kept.push(item);
                }
            }
            items = kept;
        }
        let recursive = of.is_recursive.then(|| (of.clone(), scope.clone()));
        if recursive.is_some() {
            self.hold(scope);
        }
        let (index, changed) = (Cell::new(0), RefCell::new(None));
        let state = Rc::new(LoopState { items, index, depth, changed, recursive });
        let name: Name = "loop".into();
        // A pass that ends by `break` or `continue` does not count.
        let mut is_passed = false;
        for index in 0..state.items.len() {
            self.spend(1)?;
            state.index.set(index);
            let inner = Scope::within(scope);
            inner.set(&name, Value::Loop(state.clone()));
            self.assign(&of.target, state.items[index].clone(), &inner)?;
            match self.run(&of.body, &inner)? {
                Flow::On => is_passed = true,
                Flow::Continue => {}
                Flow::Break => break,
            }
        }
        if is_passed { Ok(()) } else { self.run_within(&of.otherwise, scope) }
    }

    fn lookup(&self, name: &str, scope: &Scope) -> Option<Value> {
        scope.get(name).or_else(|| globals::function(name))
    }

    fn eval(&mut self, e: &Expr, scope: &Rc<Scope>) -> Result<Value> {
        self.spend(1)?;
        Ok(match e {
            Expr::Literal(literal) => match literal {
                Literal::None => Value::None,
                Literal::Bool(b) => Value::Bool(*b),
                Literal::Int(n) => Value::Int(*n),
                Literal::Float(x) => Value::Float(*x),
                Literal::Str(text) => Value::Str(text.clone()),
            },
            Expr::Name(name) => match self.lookup(name, scope) {
                Some(value) => value,
                None if &**name == "self" => return Err(Fault::new("`self` is not supported")),
                None => Value::undefined(format!("`{name}`")),
            },
            Expr::List(all) => Value::list(self.all(all, scope)?),
            Expr::Tuple(all) => Value::tuple(self.all(all, scope)?),
            Expr::Dict(all) => {
                let mut dict = Dict::default();
                for (key, value) in all {
                    let key = Key::new(&self.eval(key, scope)?)?;
                    dict.insert(key, self.eval(value, scope)?);
                }
                Value::Dict(Rc::new(dict))
            }
            Expr::Attribute(of, name) => {
                let of = self.eval(of, scope)?;
                self.attribute(&of, name)?
            }
            Expr::Item(of, key) => {
                let of = self.eval(of, scope)?;
                match &**key {
                    Expr::Slice(parts) => match self.sliced(&of, parts, scope)? {
                        Some(slice) => slice,
                        None => {
                            let kind = of.kind();
                            return Err(Fault::new(format!("a {kind} has no such slice")));
                        }
                    },
                    key => {
                        let key = self.eval(key, scope)?;
                        self.item(&of, &key)?
                    }
                }
            }
            Expr::Call(callee, args) => self.call_expr(callee, args, None, scope)?,
            Expr::Filter(of, name, args) => {
                let value = match of {
                    Some(of) => self.eval(of, scope)?,
                    None => Value::None,
                };
                let args = self.arguments(args, None, scope)?;
                filters::call(self, name, &value, &args)?
            }
            Expr::Test(of, name, args) => {
                let value = self.eval(of, scope)?;
                let args = self.arguments(args, None, scope)?;
                Value::Bool(checks::call(name, &value, &args)?)
            }
            _ => return self.operation(e, scope),
        })
    }

    fn operation(&mut self, e: &Expr, scope: &Rc<Scope>) -> Result<Value> {
        Ok(match e {
            Expr::Not(of) => Value::Bool(!self.eval(of, scope)?.is_true()),
            Expr::Negative(of) => ops::negative(&self.eval(of, scope)?)?,
            Expr::Positive(of) => ops::positive(&self.eval(of, scope)?)?,
            Expr::Binary(operator, a, b) => {
                let (a, b) = (self.eval(a, scope)?, self.eval(b, scope)?);
                ops::binary(*operator, &a, &b)?
            }
            Expr::Compare(first, rest) => {
                let mut left = self.eval(first, scope)?;
                for (comparison, right) in rest {
                    let right = self.eval(right, scope)?;
                    if !ops::compare(*comparison, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            Expr::And(a, b) => match self.eval(a, scope)? {
                value if value.is_true() => self.eval(b, scope)?,
                value => value,
            },
            Expr::Or(a, b) => match self.eval(a, scope)? {
                value if value.is_true() => value,
                _ => self.eval(b, scope)?,
            },
            Expr::Concat(all) => concat(&self.all(all, scope)?)?,
            Expr::If(test, value, otherwise) => match (self.eval(test, scope)?, otherwise) {
                (test, _) if test.is_true() => self.eval(value, scope)?,
                (_, Some(otherwise)) => self.eval(otherwise, scope)?,
                _ => Value::undefined("an `if` without its `else`"),
            },
            _ => return Err(Fault::new("a slice within a tuple is not supported")),
        })
    }

    fn all(&mut self, all: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>> {
        all.iter().map(|e| self.eval(e, scope)).collect()
    }

    fn sliced(
        &mut self,
        of: &Value,
        parts: &[Option<Box<Expr>>; 3],
        scope: &Rc<Scope>,
    ) -> Result<Option<Value>> {
        let mut values = [Value::None, Value::None, Value::None];
        for (value, part) in values.iter_mut().zip(parts) {
            if let Some(part) = part {
                *value = self.eval(part, scope)?;
            }
        }
        if let Value::Undefined(what) = of {
            return Err(Fault::undefined(what));
        }
        self.spend(of.length().unwrap_or(0) / 8)?;
        ops::slice(of, &values)
    }

    /// `value.name`: the attribute, or else the item.
    pub fn attribute(&mut self, value: &Value, name: &str) -> Result<Value> {
        let found = match sequences::attribute(value, name)? {
            Some(found) => Some(found),
            None => sequences::item(value, &name.into())?,
        };
        Ok(found.unwrap_or_else(|| missing(value, &format!("`{name}`"))))
    }

    /// `value[key]`: the item, or else the attribute.
    pub fn item(&mut self, value: &Value, key: &Value) -> Result<Value> {
        let found = match (sequences::item(value, key)?, key.as_str()) {
            (None, Some(name)) => sequences::attribute(value, name)?,
            (found, _) => found,
        };
        Ok(match found {
            Some(found) => found,
            None => missing(value, &key.repr().unwrap_or_default()),
        })
    }

    fn arguments(
        &mut self,
        args: &Args,
        caller: Option<Value>,
        scope: &Rc<Scope>,
    ) -> Result<Arguments> {
        let mut positional = self.all(&args.positional, scope)?;
        let mut named = Vec::new();
        for (name, e) in &args.named {
            named.push((name.clone(), self.eval(e, scope)?));
        }
        if let Some(star) = &args.star {
            let star = self.eval(star, scope)?;
            positional.extend(self.items(&star)?);
        }
        if let Some(double_star) = &args.double_star {
            let Value::Dict(dict) = self.eval(double_star, scope)? else {
                return Err(Fault::new("`**` expects a mapping"));
            };
            for (key, value) in dict.iter() {
                let Some(name) = key.0.as_str() else {
                    return Err(Fault::new("`**` expects a mapping with texts for keys"));
                };
                if named.iter().any(|(other, _)| **other == *name) {
                    return Err(Fault::new(format!("the argument `{name}` is given twice")));
                }
                named.push((name.into(), value.clone()));
            }
        }
        named.extend(caller.map(|caller| ("caller".into(), caller)));
        Ok(Arguments { positional, named })
    }

    fn call_expr(
        &mut self,
        callee: &Expr,
        args: &Args,
        caller: Option<Value>,
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        if let Some(value) = self.change_list(callee, args, scope)? {
            return Ok(value);
        }
        let callee = self.eval(callee, scope)?;
        let args = self.arguments(args, caller, scope)?;
        self.call(&callee, &args)
    }

    /// `append(value)` and `pop(index)` of a list in a namespace. The sandbox has none of them, but
    /// templates of Kimi are written for an environment that does.
    fn change_list(
        &mut self,
        callee: &Expr,
        args: &Args,
        scope: &Rc<Scope>,
    ) -> Result<Option<Value>> {
        let Expr::Attribute(of, method) = callee else { return Ok(None) };
        let Expr::Attribute(of, field) = &**of else { return Ok(None) };
        let Expr::Name(name) = &**of else { return Ok(None) };
        let Some(Value::Namespace(fields)) = self.lookup(name, scope) else { return Ok(None) };
        let field = Value::str_key(field);
        let is_list = matches!(fields.borrow().get(&field), Some(Value::List(_)));
        if !is_list || !["append", "pop"].contains(&&**method) {
            return Ok(None);
        }
        let args = self.arguments(args, None, scope)?;
        let args = args.bind(method, &[""], usize::from(&**method == "append"))?;
        let mut fields = fields.borrow_mut();
        let Some(Value::List(items)) = fields.get_mut(&field) else { return Ok(None) };
        let items = Rc::make_mut(items);
        if &**method == "append" {
            items.push(args.value(0));
            return Ok(Some(Value::None));
        }
        let (at, n) = (args.int(0, -1)?, items.len() as i128);
        let at = if at < 0 { at + n } else { at };
        match usize::try_from(at).ok().filter(|at| *at < items.len()) {
            Some(at) => Ok(Some(items.remove(at))),
            None => Err(Fault::new("`pop`: there is no such item")),
        }
    }

    pub fn call(&mut self, callee: &Value, args: &Arguments) -> Result<Value> {
        match callee {
            Value::Function(name) => globals::call(self, name, args),
            Value::Macro(closure) => self.call_macro(closure, args),
            Value::Method(method) => match (&method.0, &*method.1) {
                (Value::Str(text), "format") => Ok(format::format(self, text, args)?.into()),
                (Value::Str(text), "format_map") => {
                    let args = args.bind("format_map", &[""], 1)?;
                    let Value::Dict(dict) = args.value(0) else {
                        return Err(Fault::new("`format_map` expects a mapping"));
                    };
                    let named = dict
                        .iter()
                        .filter_map(|(key, value)| Some((key.0.as_str()?.into(), value.clone())));
                    let args = Arguments { positional: Vec::new(), named: named.collect() };
                    Ok(format::format(self, text, &args)?.into())
                }
                (Value::Str(text), name) => methods::call(text, name, args),
                (Value::Markup(text), name) => methods::call_safe(text, name, args),
                (value, name) => sequences::call(value, name, args),
            },
            Value::Joiner(state) => {
                args.none("joiner")?;
                Ok(if state.1.replace(true) { state.0.clone() } else { "".into() })
            }
            Value::Loop(state) => {
                let Some((of, scope)) = &state.recursive else {
                    return Err(Fault::new("a loop that is called must be `recursive`"));
                };
                let args = args.bind("loop", &["iterable"], 1)?;
                let (items, depth) = (args.value(0), state.depth + 1);
                let (_, text) = self
                    .deeper(|this| this.captured(|this| this.run_loop(of, &items, scope, depth)))?;
                Ok(text.into())
            }
            Value::Undefined(what) => Err(Fault::undefined(what)),
            _ => Err(Fault::new(format!("a value of type {} cannot be called", callee.kind()))),
        }
    }

    fn call_macro(&mut self, closure: &Closure, args: &Arguments) -> Result<Value> {
        let of = &closure.of;
        let name = of.name.as_deref().unwrap_or("caller");
        let scope = Scope::within(&closure.scope);
        let mut named = args.named.clone();
        let mut take = |name: &str| {
            let at = named.iter().position(|(other, _)| **other == *name)?;
            Some(named.remove(at).1)
        };
        let mut missing = Vec::new();
        for (n, (parameter, default)) in of.parameters.iter().enumerate() {
            let given = args.positional.get(n).cloned().or_else(|| take(parameter));
            if given.is_none() {
                missing.push((parameter, default));
            }
            let what = || Value::undefined(format!("the parameter `{parameter}` of `{name}`"));
            scope.set(parameter, given.unwrap_or_else(what));
        }
        let is_parameter = |name: &str| of.parameters.iter().any(|(other, _)| **other == *name);
        let [varargs, kwargs, caller] = of.reads;
        if caller && !is_parameter(SPECIAL[2]) {
            let caller = take(SPECIAL[2]).filter(|caller| !caller.is_none());
            let caller = caller.unwrap_or_else(|| Value::undefined("the caller"));
            scope.set(&SPECIAL[2].into(), caller);
        }
        if kwargs && !is_parameter(SPECIAL[1]) {
            let pairs = named.into_iter().map(|(name, value)| (Value::str_key(&name), value));
            scope.set(&SPECIAL[1].into(), Value::Dict(Rc::new(pairs.collect())));
        } else if let Some((other, _)) = named.first() {
            return Err(Fault::new(format!("the macro `{name}` takes no argument `{other}`")));
        }
        let rest = args.positional.get(of.parameters.len()..).unwrap_or_default();
        if varargs && !is_parameter(SPECIAL[0]) {
            scope.set(&SPECIAL[0].into(), Value::tuple(rest.to_vec()));
        } else if !rest.is_empty() {
            let most = of.parameters.len();
            return Err(Fault::new(format!("the macro `{name}` takes at most {most} arguments")));
        }
        let (_, text) = self.deeper(|this| {
            for (parameter, default) in missing {
                if let Some(default) = default {
                    let value = this.eval(default, &scope)?;
                    scope.set(parameter, value);
                }
            }
            this.captured(|this| this.run(&of.body, &scope))
        })?;
        Ok(text.into())
    }
}

fn missing(value: &Value, name: &str) -> Value {
    Value::undefined(format!("{name} of a {}", value.kind()))
}

/// `a ~ b`: texts one behind the other.
fn concat(all: &[Value]) -> Result<Value> {
    let texts = all.iter().map(Value::print);
    Ok(texts.collect::<Result<Vec<_>>>()?.concat().into())
}
