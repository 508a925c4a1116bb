//! Which words of which variables a block reads and writes.

use std::collections::{BTreeMap, BTreeSet};

use beeline_ir::tree::{Element, ExprKind, Place, Stmt, VarId, VarKind, expressions, walk, words};

/// A word of a variable.
pub(crate) type Word = (VarId, usize);

/// True for state and ports, which outlive a call.
pub(crate) fn outlives(element: &Element, var: VarId) -> bool {
    element.var(var).kind != VarKind::Local
}

/// Calls `look` with each part of a variable that a statement itself reads or writes: the place, its
/// width, and whether it is written.
fn places(stmt: &Stmt, look: &mut impl FnMut(&Place, u32, bool)) {
    expressions(stmt, &mut |expr| {
        if let ExprKind::Get(place) = &expr.kind {
            look(place, expr.bits, false);
        }
    });
    match stmt {
        Stmt::Set { place, value } => look(place, value.bits, true),
        Stmt::Copy { to, from, bits } => {
            look(to, *bits, true);
            look(from, *bits, false);
        }
        Stmt::Clear(var) => look(&Place::whole(*var), u32::MAX, true),
        Stmt::Read { to, bits, .. } => look(&Place::whole(*to), *bits, true),
        Stmt::Write { from, bits, .. } => look(&Place::whole(*from), *bits, false),
        _ => {}
    }
}

/// Every variable that a block touches.
pub(crate) fn vars(block: &[Stmt]) -> BTreeSet<VarId> {
    let mut all = BTreeSet::new();
    walk(block, &mut |stmt| {
        places(stmt, &mut |place, _, _| {
            all.insert(place.var);
        });
    });
    all
}

/// The variables that a block indexes at run time.
pub(crate) fn indexed(block: &[Stmt]) -> BTreeSet<VarId> {
    let mut all = BTreeSet::new();
    walk(block, &mut |stmt| {
        places(stmt, &mut |place, _, _| {
            if !place.index.is_empty() {
                all.insert(place.var);
            }
        });
    });
    all
}

/// What a block touches.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// Words that the block itself, a loop in it, or two of its branches touch.
    pub(crate) here: BTreeSet<Word>,
    /// Words that the block or anything in it writes.
    pub(crate) written: BTreeSet<Word>,
}

impl Uses {
    /// Of a block.
    pub(crate) fn of(element: &Element, block: &[Stmt]) -> Self {
        let mut uses = Self::default();
        let mut branches = BTreeMap::new();
        uses.collect(element, block, &mut branches);
        let shared = branches.into_iter().filter(|(_, count)| *count > 1);
        uses.here.extend(shared.map(|(word, _)| word));
        uses
    }

    fn collect(&mut self, element: &Element, block: &[Stmt], branches: &mut BTreeMap<Word, u32>) {
        for stmt in block {
            let mut touched = BTreeSet::new();
            self.note(element, stmt, &mut touched);
            self.here.extend(touched);
            match stmt {
                Stmt::If { then, otherwise, .. } => {
                    let mut inside = BTreeSet::new();
                    for block in [then, otherwise] {
                        walk(block, &mut |stmt| self.note(element, stmt, &mut inside));
                    }
                    for word in inside {
                        *branches.entry(word).or_default() += 1;
                    }
                }
                Stmt::Scope { body, .. } | Stmt::Async(body) => {
                    self.collect(element, body, branches);
                }
                Stmt::Loop { body, .. } => {
                    let mut inside = BTreeSet::new();
                    walk(body, &mut |stmt| self.note(element, stmt, &mut inside));
                    self.here.extend(inside);
                }
                _ => {}
            }
        }
    }

    fn note(&mut self, element: &Element, stmt: &Stmt, touched: &mut BTreeSet<Word>) {
        places(stmt, &mut |place, bits, written| {
            let count = words(element.var(place.var).bits);
            let (first, end) = if place.index.is_empty() {
                let first = (place.offset / 64) as usize;
                (first, words(place.offset.saturating_add(bits)).min(count))
            } else {
                (0, count)
            };
            for word in first..end {
                touched.insert((place.var, word));
                if written {
                    self.written.insert((place.var, word));
                }
            }
        });
    }
}
