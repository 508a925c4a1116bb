//! Exclusive accesses become one: two reads, or two writes, of a memory under conditions that
//! exclude each other share a port.

use crate::ssa::{Access, Body, Op, ReadId, ValueId};

/// Merges until nothing more can be.
pub(crate) fn merge(body: &mut Body) {
    while merge_reads(body) || merge_writes(body) {}
}

/// True where `value` depends on what the read gave.
fn depends(body: &Body, value: ValueId, read: ReadId) -> bool {
    let mut stack = vec![value];
    let mut seen = vec![false; body.nodes.len()];
    while let Some(value) = stack.pop() {
        if std::mem::replace(&mut seen[value.0 as usize], true) {
            continue;
        }
        if matches!(body.node(value).op, Op::Data(r, _) if r == read) {
            return true;
        }
        stack.extend(body.operands(value));
    }
    false
}

fn merge_reads(body: &mut Body) -> bool {
    for later in 0..body.accesses.len() {
        let Access::Read(b) = body.accesses[later] else { continue };
        for earlier in (0..later).rev() {
            match body.accesses[earlier] {
                Access::Write(at) => {
                    let write = &body.writes[at];
                    if write.memory == body.reads[b.0 as usize].memory
                        && !body.excludes(write.when, body.reads[b.0 as usize].when)
                    {
                        break;
                    }
                }
                Access::Read(a) => {
                    let (first, second) = (&body.reads[a.0 as usize], &body.reads[b.0 as usize]);
                    if first.memory != second.memory || !body.excludes(first.when, second.when) {
                        continue;
                    }
                    let (addresses, whens) =
                        ((first.address, second.address), (first.when, second.when));
                    if depends(body, addresses.1, a) || depends(body, whens.1, a) {
                        continue;
                    }
                    let address = body.select(whens.1, addresses.1, addresses.0);
                    let when = body.or(whens.0, whens.1);
                    // The one read stands where the later one stood, in the list of values too.
                    let read = &mut body.reads[a.0 as usize];
                    read.address = address;
                    read.when = when;
                    replace_data(body, b, a);
                    body.accesses.remove(later);
                    reorder(body);
                    return true;
                }
            }
        }
    }
    false
}

/// Uses of one read's data become uses of another's.
fn replace_data(body: &mut Body, from: ReadId, to: ReadId) {
    for node in &mut body.nodes {
        if let Op::Data(read, word) = node.op
            && read == from
        {
            node.op = Op::Data(to, word);
        }
    }
}

/// Puts operands before users again, by copying.
fn reorder(body: &mut Body) {
    *body = crate::clean::rebuild(body, &std::collections::HashMap::new(), &|_| true, true);
}

fn merge_writes(body: &mut Body) -> bool {
    for later in 0..body.accesses.len() {
        let Access::Write(b) = body.accesses[later] else { continue };
        for earlier in (0..later).rev() {
            match body.accesses[earlier] {
                Access::Read(read) => {
                    let read = &body.reads[read.0 as usize];
                    // The earlier write moves past this read.
                    if read.memory == body.writes[b].memory {
                        let Some(first) = earlier_write(body, earlier, b) else { break };
                        if !body.excludes(read.when, body.writes[first].when) {
                            break;
                        }
                    }
                }
                Access::Write(a) => {
                    let (first, second) = (body.writes[a].clone(), body.writes[b].clone());
                    if first.memory != second.memory {
                        continue;
                    }
                    let same = (first.offset, first.bits) == (second.offset, second.bits);
                    if !same || !body.excludes(first.when, second.when) {
                        break;
                    }
                    let address = body.select(second.when, second.address, first.address);
                    let words = first
                        .words
                        .iter()
                        .zip(&second.words)
                        .map(|(x, y)| body.select(second.when, *y, *x))
                        .collect();
                    let when = body.or(first.when, second.when);
                    let write = &mut body.writes[b];
                    write.address = address;
                    write.words = words;
                    write.when = when;
                    body.accesses.remove(earlier);
                    let zero = body.constant(0, 1);
                    body.writes[a].when = zero;
                    reorder(body);
                    return true;
                }
            }
        }
    }
    false
}

/// The write of the same memory that stands before a place.
fn earlier_write(body: &Body, before: usize, like: usize) -> Option<usize> {
    body.accesses[..before].iter().rev().find_map(|access| match access {
        Access::Write(at) if body.writes[*at].memory == body.writes[like].memory => Some(*at),
        _ => None,
    })
}
