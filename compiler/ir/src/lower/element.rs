//! Lowers one element with its parameters.

use std::collections::HashMap;

use beeline_syntax::ast::{self, Storage};
use beeline_syntax::{Diagnostic, Diagnostics, Span};

use super::types::{Type, World};
use super::world::{TOO_LARGE, constant_of, dimension, has_room, resolve};
use crate::tree::{
    Element, Expr, Index, Label, Mem, MemId, Place, Port, Stmt, Var, VarId, VarKind, words,
};

/// What a name stands for.
#[derive(Clone, Debug)]
pub(super) enum Binding {
    Var(VarId, Type),
    /// The type is that of an entry.
    Mem(MemId, Type),
    Number(u64, u32),
    Port {
        input: bool,
        index: usize,
    },
}

/// The value of an expression.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Scalar(Expr),
    /// Part of a variable.
    Place(Place, Type),
    /// Part of a memory; `index` grows to the memory's dimensions, then `inside` does.
    Memory {
        mem: MemId,
        index: Vec<Expr>,
        offset: u32,
        inside: Vec<Index>,
        ty: Type,
    },
    Void,
}

/// Where `return` goes.
#[derive(Clone, Debug)]
pub(super) struct Return {
    pub(super) label: Label,
    pub(super) result: Option<(VarId, Type)>,
    /// In the handler, the value is the bitmap of ports.
    pub(super) handler: bool,
}

/// The diagnostic is recorded.
pub(super) struct Failed;
pub(super) type Lowered<T> = Result<T, Failed>;

/// An element being lowered.
pub(super) struct Lower<'a> {
    pub(super) world: &'a World,
    pub(super) found: &'a mut Diagnostics,
    pub(super) element: Element,
    pub(super) scopes: Vec<HashMap<String, Binding>>,
    pub(super) blocks: Vec<Vec<Stmt>>,
    /// Labels of `break` and `continue`.
    pub(super) loops: Vec<(Label, Option<Label>)>,
    pub(super) returns: Option<Return>,
    pub(super) inlined: u32,
    pub(super) emitted: u32,
    pub(super) independent: u32,
    pub(super) in_signal: bool,
    pub(super) tables: HashMap<String, (MemId, Type)>,
}

/// Deepest inlining.
pub(super) const DEEPEST: u32 = 64;
/// Most statements of one element.
const MOST: u32 = 200_000;
/// Widest variable that is no memory.
const WIDEST: u32 = 16_384;

/// Lowers `declared` with `arguments`.
pub(super) fn lower(
    world: &World,
    declared: &ast::Element,
    arguments: &[(ast::Name, u64)],
    found: &mut Diagnostics,
) -> Option<Element> {
    let parameters: Vec<String> =
        arguments.iter().map(|(name, value)| format!("{} = {value}", name.text)).collect();
    let element = Element {
        name: declared.name.text.clone(),
        parameters: parameters.join(", "),
        inputs: Vec::new(),
        outputs: Vec::new(),
        vars: Vec::new(),
        mems: Vec::new(),
        init: Vec::new(),
        handler: Vec::new(),
        signal: None,
        in_valid: Vec::new(),
        in_data: Vec::new(),
        out_set: Vec::new(),
        out_data: Vec::new(),
        next_ports: VarId(0),
        sig_in: VarId(1),
        sig_out: VarId(2),
        labels: 0,
        span: declared.span,
        lines: 0,
    };
    let mut lower = Lower {
        world,
        found,
        element,
        scopes: vec![HashMap::new()],
        blocks: Vec::new(),
        loops: Vec::new(),
        returns: None,
        inlined: 0,
        emitted: 0,
        independent: 0,
        in_signal: false,
        tables: HashMap::new(),
    };
    lower.all(declared, arguments).ok()?;
    Some(lower.element)
}

impl Lower<'_> {
    fn all(&mut self, declared: &ast::Element, arguments: &[(ast::Name, u64)]) -> Lowered<()> {
        let count = declared.inputs.len().max(declared.outputs.len());
        if count > 32 {
            return self.fail(
                "bad-port",
                declared.name.span,
                "an element has at most 32 ports a side",
            );
        }
        let ports = u32::try_from(declared.inputs.len()).unwrap_or(32).max(1);
        self.element.next_ports = self.element.add_var("%next", ports, VarKind::Port);
        self.element.sig_in = self.element.add_var("%signal", 512, VarKind::Port);
        self.element.sig_out = self.element.add_var("%answer", 512, VarKind::Port);
        self.parameters(declared, arguments)?;
        self.ports(declared)?;
        // Past an error the rest is still looked at, so that one run shows several errors.
        let mut initial = Vec::new();
        let mut failed = false;
        for variable in &declared.state {
            match self.state(variable) {
                Ok(Some(statement)) => initial.push(statement),
                Ok(None) => {}
                Err(Failed) => failed = true,
            }
        }
        let init = self.section(&declared.init, false)?;
        self.element.init = initial;
        self.element.init.extend(init);
        let mut handler = Vec::new();
        for at in 0..self.element.out_set.len() {
            handler.push(Stmt::Set {
                place: Place::whole(self.element.out_set[at]),
                value: Expr::constant(0, 1),
            });
        }
        let next = self.element.next_ports;
        handler
            .push(Stmt::Set { place: Place::whole(next), value: Expr::constant(u64::MAX, ports) });
        handler.extend(self.section(&declared.handler, true)?);
        self.element.handler = handler;
        if let Some(signal) = &declared.signal {
            self.in_signal = true;
            let answer = self.element.sig_out;
            let mut all = vec![Stmt::Copy {
                to: Place::whole(answer),
                from: Place::whole(self.element.sig_in),
                bits: 512,
            }];
            all.extend(self.section(signal, false)?);
            self.element.signal = Some(all);
        }
        if failed { Err(Failed) } else { Ok(()) }
    }

    fn parameters(
        &mut self,
        declared: &ast::Element,
        arguments: &[(ast::Name, u64)],
    ) -> Lowered<()> {
        for parameter in &declared.parameters {
            let name = &parameter.name;
            let given = arguments.iter().find(|(given, _)| given.text == name.text);
            let local = self.constants();
            let value = match (given, &parameter.initial) {
                (Some((_, value)), _) => *value,
                (None, Some(_)) => {
                    match constant_of(self.world, parameter, &|n| local.get(n).copied(), self.found)
                    {
                        Some(constant) => constant.values[0],
                        None => return Err(Failed),
                    }
                }
                (None, None) => {
                    let message = format!("{:?} has no value here", name.text);
                    return self.fail("no-parameter", name.span, message);
                }
            };
            let ty = resolve(self.world, &parameter.ty, &|_| None, self.found).ok_or(Failed)?;
            let bits = self.world.bits(&ty).clamp(1, 64);
            let value = value & crate::tree::mask(bits);
            self.scopes[0].insert(name.text.clone(), Binding::Number(value, bits.max(32)));
        }
        for (name, _) in arguments {
            if !declared.parameters.iter().any(|p| p.name.text == name.text) {
                let known: Vec<&str> =
                    declared.parameters.iter().map(|p| p.name.text.as_str()).collect();
                self.found.push(
                    Diagnostic::error(
                        "unknown-parameter",
                        name.span,
                        format!("{} has no parameter {:?}", declared.name.text, name.text),
                    )
                    .help(if known.is_empty() {
                        "it has none".to_owned()
                    } else {
                        format!("it has {}", known.join(", "))
                    }),
                );
            }
        }
        Ok(())
    }

    /// Numbers in scope.
    pub(super) fn constants(&self) -> HashMap<String, u64> {
        let mut all = HashMap::new();
        for scope in &self.scopes {
            for (name, binding) in scope {
                match binding {
                    Binding::Number(value, _) => all.insert(name.clone(), *value),
                    _ => all.remove(name),
                };
            }
        }
        all
    }

    fn ports(&mut self, declared: &ast::Element) -> Lowered<()> {
        for (input, list) in [(true, &declared.inputs), (false, &declared.outputs)] {
            for (index, port) in list.iter().enumerate() {
                let ty = resolve(self.world, &port.ty, &|_| None, self.found).ok_or(Failed)?;
                let bits = self.world.bits(&ty);
                let name = &port.name;
                if self.scopes[0].contains_key(&name.text) {
                    let message = format!("a second port or parameter named {:?}", name.text);
                    return self.fail("twice", name.span, message);
                }
                self.scopes[0].insert(name.text.clone(), Binding::Port { input, index });
                let flag = self.element.add_var(format!("%flag_{}", name.text), 1, VarKind::Port);
                let data =
                    self.element.add_var(format!("%item_{}", name.text), bits, VarKind::Port);
                let port = Port { name: name.text.clone(), bits };
                if input {
                    self.element.inputs.push(port);
                    self.element.in_valid.push(flag);
                    self.element.in_data.push(data);
                } else {
                    self.element.outputs.push(port);
                    self.element.out_set.push(flag);
                    self.element.out_data.push(data);
                }
            }
        }
        Ok(())
    }

    /// A state variable; the statement that gives it its first value.
    fn state(&mut self, variable: &ast::Variable) -> Lowered<Option<Stmt>> {
        let span = variable.name.span;
        let name = variable.name.text.clone();
        let local = self.constants();
        let local = |n: &str| local.get(n).copied();
        if let Some(Binding::Var(..) | Binding::Mem(..) | Binding::Port { .. }) =
            self.scopes[0].get(&name)
        {
            return self.fail("twice", span, format!("a second state variable named {name:?}"));
        }
        let ty = resolve(self.world, &variable.ty, &local, self.found).ok_or(Failed)?;
        if ty == Type::Void {
            return self.fail("unknown-type", span, "a variable cannot be void");
        }
        let bits = self.world.bits(&ty);
        let mut dimensions = Vec::new();
        for size in &variable.dimensions {
            dimensions.push(dimension(self.world, size, &local, self.found).ok_or(Failed)?);
        }
        if dimensions.is_empty() {
            let value = match &variable.initial {
                None => None,
                Some(_) => {
                    let constant = constant_of(self.world, variable, &local, self.found);
                    Some(constant.ok_or(Failed)?.values[0])
                }
            };
            let id = self.element.add_var(name.clone(), bits, VarKind::State);
            let var = &mut self.element.vars[id.0 as usize];
            var.storage = variable.storage;
            var.span = span;
            self.scopes[0].insert(name, Binding::Var(id, ty));
            let set = |value| Stmt::Set {
                place: Place::whole(id),
                value: Expr::constant(value, bits.min(64)),
            };
            return Ok(value.map(set));
        }
        if !has_room(&dimensions, bits) {
            return self.fail("bad-size", span, TOO_LARGE);
        }
        let initial = match &variable.initial {
            None => Vec::new(),
            Some(_) => {
                let constant = constant_of(self.world, variable, &local, self.found);
                constant.ok_or(Failed)?.values
            }
        };
        let id = self.element.add_mem(Mem {
            name: name.clone(),
            dimensions,
            bits,
            fields: self.world.mem_fields(&ty),
            initial,
            constant: variable.storage == Storage::Constant,
            storage: variable.storage,
            independent: false,
            span,
        });
        self.scopes[0].insert(name, Binding::Mem(id, ty));
        Ok(None)
    }

    /// `.init`, `.handler` or `.signal`.
    fn section(&mut self, body: &[ast::Statement], handler: bool) -> Lowered<Vec<Stmt>> {
        let label = self.element.add_label();
        self.returns = Some(Return { label, result: None, handler });
        let body = self.block(body)?;
        self.returns = None;
        Ok(vec![Stmt::Scope { label, body }])
    }

    pub(super) fn fail<T>(
        &mut self,
        code: &'static str,
        span: Span,
        message: impl Into<String>,
    ) -> Lowered<T> {
        self.found.push(Diagnostic::error(code, span, message));
        Err(Failed)
    }

    pub(super) fn emit(&mut self, statement: Stmt) -> Lowered<()> {
        self.emitted += 1;
        if self.emitted > MOST {
            if self.emitted == MOST + 1 {
                let span = self.element.span;
                self.found.push(Diagnostic::error(
                    "too-large",
                    span,
                    format!("more than {MOST} statements after inlining"),
                ));
            }
            return Err(Failed);
        }
        if let Some(block) = self.blocks.last_mut() {
            block.push(statement);
        }
        Ok(())
    }

    /// Runs `inner` with a new block; its statements.
    pub(super) fn nested(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Lowered<()>,
    ) -> Lowered<Vec<Stmt>> {
        self.blocks.push(Vec::new());
        let depth = self.blocks.len();
        let result = inner(self);
        debug_assert_eq!(depth, self.blocks.len());
        let block = self.blocks.pop().unwrap_or_default();
        result.map(|()| block)
    }

    /// Number of statements in the current block.
    pub(super) fn mark(&self) -> usize {
        self.blocks.last().map_or(0, Vec::len)
    }

    /// Puts a statement in front of those since `mark`.
    pub(super) fn insert(&mut self, mark: usize, statement: Stmt) {
        if let Some(block) = self.blocks.last_mut() {
            block.insert(mark, statement);
        }
    }

    /// A new local variable of that width.
    pub(super) fn temporary(&mut self, bits: u32) -> VarId {
        let name = format!("%{}", self.element.vars.len());
        self.element.add_var(name, bits, VarKind::Local)
    }

    /// A new named local variable.
    pub(super) fn local(
        &mut self,
        name: &ast::Name,
        ty: &Type,
        storage: Storage,
    ) -> Lowered<VarId> {
        let bits = self.world.bits(ty);
        if bits > WIDEST {
            let message = format!("a local variable of {bits} bits; at most {WIDEST} are possible");
            self.found.push(
                Diagnostic::error("bad-size", name.span, message).help("declare it in .state"),
            );
            return Err(Failed);
        }
        let id = self.element.add_var(name.text.clone(), bits, VarKind::Local);
        let var: &mut Var = &mut self.element.vars[id.0 as usize];
        var.storage = storage;
        var.span = name.span;
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.text.clone(), Binding::Var(id, ty.clone()));
        }
        Ok(id)
    }

    pub(super) fn lookup(&self, name: &str) -> Option<Binding> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).cloned()
    }

    /// The memory of a constant table.
    pub(super) fn table(&mut self, name: &str) -> Option<(MemId, Type)> {
        if let Some(known) = self.tables.get(name) {
            return Some(known.clone());
        }
        let constant = self.world.constants.get(name)?.clone();
        let bits = self.world.bits(&constant.ty);
        let per = words(bits);
        let mut initial = Vec::with_capacity(constant.values.len() * per);
        for value in &constant.values {
            initial.push(*value);
            initial.extend(std::iter::repeat_n(0, per - 1));
        }
        let id = self.element.add_mem(Mem {
            name: name.to_owned(),
            dimensions: constant.dimensions.clone(),
            bits,
            fields: self.world.mem_fields(&constant.ty),
            initial,
            constant: true,
            storage: Storage::Constant,
            independent: true,
            span: constant.span,
        });
        self.tables.insert(name.to_owned(), (id, constant.ty.clone()));
        Some((id, constant.ty))
    }
}
