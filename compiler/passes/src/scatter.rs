//! Memory scattering and rearrangement: one memory a field, or one a constant leading index.
//!
//! An array of structures treated as one memory has one port for all of its fields. Each group of
//! fields that no access cuts becomes a memory of its own; an access of several groups becomes
//! several accesses. Fields of a union overlap; the group is what they cover together, which is the
//! union's rearrangement: views that are used apart lie apart.
//!
//! The class form: where every access of an array of arrays has a constant leading index (after
//! unrolling), each inner array is a memory.

use std::collections::BTreeSet;

use beeline_ir::tree::{
    Binary, Element, Expr, Mem, MemField, MemId, Place, Stmt, VarId, VarKind, walk, words,
};

use crate::place::rewrite_all;

/// Ranges `(first bit, bits)` that no access cuts, in order.
fn groups(element: &Element, mem: MemId) -> Vec<(u32, u32)> {
    let memory = element.mem(mem);
    // Every place where some field begins or ends may be a border, unless an access of one field
    // lies across it.
    let mut borders: BTreeSet<u32> = BTreeSet::from([0, memory.bits]);
    for field in &memory.fields {
        borders.insert(field.offset);
        borders.insert(field.offset + field.bits);
    }
    // A union's views, and an access inside a field, join what they cover: only fields that overlap
    // or accesses that begin or end inside a range forbid a border there.
    for field in &memory.fields {
        let inside: Vec<u32> =
            borders.range(field.offset + 1..field.offset + field.bits).copied().collect();
        let used = accessed_as(element, mem, field);
        if used {
            for border in inside {
                borders.remove(&border);
            }
        }
    }
    let list: Vec<u32> = borders.into_iter().filter(|border| *border <= memory.bits).collect();
    list.windows(2).map(|pair| (pair[0], pair[1] - pair[0])).collect()
}

/// True where an access lies inside the field, and not in all of the entry.
fn accessed_as(element: &Element, mem: MemId, field: &MemField) -> bool {
    let entry = element.mem(mem).bits;
    let mut found = false;
    let mut look = |stmt: &Stmt| {
        if let Stmt::Read { mem: m, offset, bits, .. } | Stmt::Write { mem: m, offset, bits, .. } =
            stmt
            && *m == mem
            && *bits < entry
        {
            found |= *offset >= field.offset && offset + bits <= field.offset + field.bits;
        }
    };
    walk(&element.handler, &mut look);
    if let Some(signal) = &element.signal {
        walk(signal, &mut look);
    }
    found
}

/// Splits a memory by its fields; the new memories' names, empty where there is nothing to split.
pub(crate) fn by_fields(element: &mut Element, mem: MemId) -> Vec<String> {
    let memory = element.mem(mem).clone();
    if memory.fields.len() < 2 {
        return Vec::new();
    }
    let groups = groups(element, mem);
    if groups.len() < 2 {
        return Vec::new();
    }
    let mut parts: Vec<(u32, u32, MemId)> = Vec::new();
    let mut names = Vec::new();
    for (offset, bits) in groups {
        let field = memory.fields.iter().find(|field| field.offset == offset);
        let suffix = field.map_or_else(|| format!("{offset}"), |field| field.name.clone());
        let name = format!("{}_{suffix}", memory.name);
        names.push(name.clone());
        let id = element.add_mem(Mem {
            name,
            bits,
            fields: vec![MemField { name: String::new(), offset: 0, bits }],
            initial: part(&memory, offset, bits),
            ..memory.clone()
        });
        parts.push((offset, bits, id));
    }
    let mut temporaries: Vec<(VarId, u32)> = Vec::new();
    let mut next = u32::try_from(element.vars.len()).unwrap_or(u32::MAX);
    let mut rewrite = |stmt: Stmt| -> Vec<Stmt> {
        let (m, offset, bits) = match &stmt {
            Stmt::Read { mem, offset, bits, .. } | Stmt::Write { mem, offset, bits, .. } => {
                (*mem, *offset, *bits)
            }
            _ => return vec![stmt],
        };
        if m != mem {
            return vec![stmt];
        }
        let mut all = Vec::new();
        for (first, width, id) in &parts {
            let start = offset.max(*first);
            let end = (offset + bits).min(first + width);
            if start >= end {
                continue;
            }
            let var = VarId(next);
            next += 1;
            temporaries.push((var, end - start));
            let inside = Place { var, offset: 0, index: Vec::new() };
            match &stmt {
                Stmt::Read { to, index, .. } => {
                    let to = Place { var: *to, offset: start - offset, index: Vec::new() };
                    all.push(Stmt::Read {
                        to: var,
                        mem: *id,
                        index: index.clone(),
                        offset: start - first,
                        bits: end - start,
                    });
                    all.push(Stmt::Copy { to, from: inside, bits: end - start });
                }
                Stmt::Write { from, index, .. } => {
                    let from = Place { var: *from, offset: start - offset, index: Vec::new() };
                    all.push(Stmt::Copy { to: inside, from, bits: end - start });
                    all.push(Stmt::Write {
                        mem: *id,
                        index: index.clone(),
                        offset: start - first,
                        bits: end - start,
                        from: var,
                    });
                }
                _ => {}
            }
        }
        all
    };
    rewrite_all(element, &mut rewrite);
    for (var, bits) in temporaries {
        let made = element.add_var(format!("%part{}", var.0), bits, VarKind::Local);
        debug_assert_eq!(made, var);
    }
    names
}

/// Bits of every entry's initial value.
fn part(memory: &Mem, offset: u32, bits: u32) -> Vec<u64> {
    let per = words(memory.bits);
    let mut all = Vec::new();
    for entry in memory.initial.chunks(per) {
        for at in (0..bits).step_by(64) {
            let width = (bits - at).min(64);
            all.push(beeline_ir::interpreter::extract(entry, offset + at, width));
        }
    }
    all
}

/// Splits a memory by its leading index: entry `k` of the first dimension is memory `k`.
pub(crate) fn by_leading(element: &mut Element, mem: MemId) -> u32 {
    let memory = element.mem(mem).clone();
    let Some((count, rest)) = memory.dimensions.split_first() else { return 0 };
    let (count, rest) = (*count, rest.to_vec());
    let per: usize = rest.iter().product::<u32>() as usize * words(memory.bits);
    let parts: Vec<MemId> = (0..count)
        .map(|k| {
            let start = k as usize * per;
            let initial = memory.initial.iter().skip(start).take(per).copied().collect();
            element.add_mem(Mem {
                name: format!("{}_{k}", memory.name),
                dimensions: rest.clone(),
                initial,
                ..memory.clone()
            })
        })
        .collect();
    let mut rewrite = |stmt: Stmt| -> Vec<Stmt> {
        let (index, to) = match &stmt {
            Stmt::Read { mem: m, index, to, .. } if *m == mem => (index.clone(), Some(*to)),
            Stmt::Write { mem: m, index, .. } if *m == mem => (index.clone(), None),
            _ => return vec![stmt],
        };
        let Some((leading, rest)) = index.split_first() else { return vec![stmt] };
        let mut all: Vec<Stmt> = to.map(Stmt::Clear).into_iter().collect();
        for (k, id) in (0_u64..).zip(&parts) {
            let mut access = stmt.clone();
            if let Stmt::Read { mem, index, .. } | Stmt::Write { mem, index, .. } = &mut access {
                *mem = *id;
                *index = rest.to_vec();
            }
            if k > beeline_ir::tree::mask(leading.bits) {
                break;
            }
            let number = Expr::constant(k, leading.bits);
            let condition = Expr::binary(Binary::Equal, leading.clone(), number);
            match condition.known() {
                Some(0) => {}
                Some(_) => all.push(access),
                None => {
                    all.push(Stmt::If { condition, then: vec![access], otherwise: Vec::new() });
                }
            }
        }
        all
    };
    rewrite_all(element, &mut rewrite);
    count
}
