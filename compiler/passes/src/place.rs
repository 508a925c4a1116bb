//! Placement: which variables lie in registers and which in memories.
//!
//! A scalar, or an array that only constants index and that has at most [`SMALL_BITS`], lies in
//! registers; everything else in block memory. `register`, `local` and `global` decide otherwise.
//! With the pass off, all state lies in block memory, as a tool without the rule would have it.

use beeline_ir::tree::{
    Element, Expr, Index, Label, Mem, MemField, MemId, Place, Stmt, VarId, VarKind,
};
use beeline_syntax::ast::Storage;

/// Largest array in registers.
pub const SMALL_BITS: u64 = 1_024;

/// Moves a memory into a variable: its accesses become accesses of an array in a variable.
pub(crate) fn into_registers(element: &mut Element, mem: MemId) {
    let memory = element.mem(mem).clone();
    let bits = memory.entries() * memory.bits;
    let var = element.add_var(memory.name.clone(), bits, VarKind::State);
    let mut rewrite = |stmt: Stmt| -> Vec<Stmt> {
        let place = |index: Vec<Expr>, offset: u32| {
            let mut stride = bits;
            let index = index
                .into_iter()
                .zip(&memory.dimensions)
                .map(|(at, count)| {
                    stride /= count;
                    Index { at, stride, count: *count }
                })
                .collect();
            Place { var, offset, index }
        };
        match stmt {
            Stmt::Read { to, mem: from, index, offset, bits } if from == mem => {
                // Past the end a read gives zeros, as an array in a variable does.
                vec![Stmt::Copy { to: Place::whole(to), from: place(index, offset), bits }]
            }
            Stmt::Write { mem: to, index, offset, bits, from } if to == mem => {
                vec![Stmt::Copy { to: place(index, offset), from: Place::whole(from), bits }]
            }
            other => vec![other],
        }
    };
    rewrite_all(element, &mut rewrite);
    if !memory.initial.is_empty() {
        let per = beeline_ir::tree::words(memory.bits);
        let mut first = Vec::new();
        for (entry, words) in (0_u32..).zip(memory.initial.chunks(per)) {
            for (at, word) in (0_u32..).step_by(64).zip(words) {
                let width = (memory.bits - at).min(64);
                let place = Place { var, offset: entry * memory.bits + at, index: Vec::new() };
                first.push(Stmt::Set { place, value: Expr::constant(*word, width) });
            }
        }
        first.append(&mut element.init);
        element.init = first;
    }
}

/// Moves a state variable into a memory of one entry.
pub(crate) fn into_memory(element: &mut Element, var: VarId) {
    let described = element.var(var).clone();
    let bits = described.bits;
    let mem = element.add_mem(Mem {
        name: described.name.clone(),
        dimensions: vec![1],
        bits,
        fields: vec![MemField { name: String::new(), offset: 0, bits }],
        initial: Vec::new(),
        constant: false,
        storage: Storage::Local,
        independent: false,
        span: described.span,
    });
    // The handler works on a copy: read first, written last.
    element.vars[var.0 as usize].kind = VarKind::Local;
    let read = Stmt::Read { to: var, mem, index: vec![Expr::constant(0, 1)], offset: 0, bits };
    let write = Stmt::Write { mem, index: vec![Expr::constant(0, 1)], offset: 0, bits, from: var };
    let writes = |block: &[Stmt]| {
        let mut found = false;
        beeline_ir::tree::walk(block, &mut |stmt| match stmt {
            Stmt::Set { place, .. } => found |= place.var == var,
            Stmt::Copy { to, .. } => found |= to.var == var,
            Stmt::Clear(v) | Stmt::Read { to: v, .. } => found |= *v == var,
            _ => {}
        });
        found
    };
    let uses = |block: &[Stmt]| {
        let mut found = writes(block);
        beeline_ir::tree::walk(block, &mut |stmt| {
            if let Stmt::Write { from, .. } = stmt {
                found |= *from == var;
            }
            if let Stmt::Copy { from, .. } = stmt {
                found |= from.var == var;
            }
            beeline_ir::tree::expressions(stmt, &mut |e| {
                if let beeline_ir::tree::ExprKind::Get(place) = &e.kind {
                    found |= place.var == var;
                }
            });
        });
        found
    };
    let label = element.add_label();
    let wrap = |block: Vec<Stmt>, label: Label| {
        let (used, written) = (uses(&block), writes(&block));
        if !used {
            return block;
        }
        let mut all = vec![read.clone(), Stmt::Scope { label, body: block }];
        if written {
            all.push(write.clone());
        }
        all
    };
    element.init = wrap(std::mem::take(&mut element.init), label);
    let label = element.add_label();
    element.handler = wrap(std::mem::take(&mut element.handler), label);
    let label = element.add_label();
    element.signal = element.signal.take().map(|block| wrap(block, label));
}

/// Replaces every statement of an element by what `rewrite` makes of it; inner blocks first.
pub(crate) fn rewrite_all(element: &mut Element, rewrite: &mut dyn FnMut(Stmt) -> Vec<Stmt>) {
    element.init = rewrite_block(std::mem::take(&mut element.init), rewrite);
    element.handler = rewrite_block(std::mem::take(&mut element.handler), rewrite);
    element.signal = element.signal.take().map(|block| rewrite_block(block, rewrite));
}

fn rewrite_block(block: Vec<Stmt>, rewrite: &mut dyn FnMut(Stmt) -> Vec<Stmt>) -> Vec<Stmt> {
    let mut all = Vec::with_capacity(block.len());
    for stmt in block {
        let stmt = match stmt {
            Stmt::If { condition, then, otherwise } => Stmt::If {
                condition,
                then: rewrite_block(then, rewrite),
                otherwise: rewrite_block(otherwise, rewrite),
            },
            Stmt::Loop { label, body, info } => {
                Stmt::Loop { label, body: rewrite_block(body, rewrite), info }
            }
            Stmt::Scope { label, body } => {
                Stmt::Scope { label, body: rewrite_block(body, rewrite) }
            }
            Stmt::Async(body) => Stmt::Async(rewrite_block(body, rewrite)),
            other => other,
        };
        all.extend(rewrite(stmt));
    }
    all
}
