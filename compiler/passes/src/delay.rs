//! Delayed write, as register forwarding.
//!
//! A memory that an iteration reads and writes keeps the next iteration waiting until the write is
//! visible. Registers hold the last writes: `valid`, `address`, `value` for each of the last
//! iterations whose write a read may miss. A read compares its address with each, newest first, and
//! takes the register's value on a match. The write itself goes to the memory at once; where the
//! paper delays the write by an iteration and needs a slot more for it, this form is always whole
//! once the pipeline is empty, which signals and state export rely on.
//!
//! Not for two writes that do not exclude each other, nor for writes of a part of an entry.

use beeline_ir::tree::Binary;

use crate::build::States;
use crate::ssa::{Access, Body, MemoryId, Op, StateId, ValueId};

/// What the pass did with a memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delayed {
    /// So many slots.
    Slots(u32),
    /// Why not.
    Refused(&'static str),
}

/// Registers of one slot.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    valid: StateId,
    address: (StateId, u32),
    words: Vec<(StateId, u32)>,
}

/// Forwards `memory` in the handler; the slots, for the signal handler.
pub(crate) fn forward(
    body: &mut Body,
    states: &mut States,
    memory: MemoryId,
    (name, bits): (&str, u32),
    slots: u32,
) -> Result<Vec<Slot>, &'static str> {
    let of = |access: &Access| match access {
        Access::Write(at) => body.writes[*at].memory == memory,
        Access::Read(id) => body.reads[id.0 as usize].memory == memory,
    };
    let list: Vec<Access> = body.accesses.iter().copied().filter(of).collect();
    let writes: Vec<usize> = list
        .iter()
        .filter_map(|access| match access {
            Access::Write(at) => Some(*at),
            Access::Read(_) => None,
        })
        .collect();
    let [at] = writes[..] else { return Err("several writes that do not exclude each other") };
    let write = body.writes[at].clone();
    if write.offset != 0 || write.bits != bits {
        return Err("a write of a part of an entry");
    }
    let after = list.iter().skip_while(|access| **access != Access::Write(at)).skip(1);
    for access in after {
        if let Access::Read(id) = access
            && !body.excludes(body.reads[id.0 as usize].when, write.when)
        {
            return Err("a read after the write in one iteration");
        }
    }
    let width = body.bits(write.address);
    let list: Vec<Slot> = (1..=slots)
        .map(|at| Slot {
            valid: states.add(format!("{name}_pending{at}_valid"), 1, None),
            address: (states.add(format!("{name}_pending{at}_address"), width, None), width),
            words: write
                .words
                .iter()
                .enumerate()
                .map(|(word, value)| {
                    let bits = body.bits(*value);
                    let name = format!("{name}_pending{at}_value{word}");
                    (states.add(name, bits, None), bits)
                })
                .collect(),
        })
        .collect();
    let replaced = crate::clean::rebuild_with(body, &mut |to, read, address, word| {
        if to.reads[read.0 as usize].memory != memory {
            return None;
        }
        let bits = list.first()?.words.get(word as usize)?.1;
        let mut value = to.make(Op::Data(read, word), bits);
        for slot in list.iter().rev() {
            let (valid, held, words) = held(to, slot);
            let same = to.binary(Binary::Equal, held, address);
            let hit = to.and(valid, same);
            value = to.select(hit, words[word as usize], value);
        }
        Some(value)
    });
    *body = replaced;
    // The newest slot takes this iteration's write, each older one the slot before it.
    let write = body.writes[at].clone();
    let mut newer = (write.when, write.address, write.words);
    for slot in &list {
        let held = held(body, slot);
        body.updates.push((slot.valid, newer.0));
        body.updates.push((slot.address.0, newer.1));
        for (state, value) in slot.words.iter().zip(&newer.2) {
            body.updates.push((state.0, *value));
        }
        newer = held;
    }
    Ok(list)
}

/// What a slot holds.
fn held(body: &mut Body, slot: &Slot) -> (ValueId, ValueId, Vec<ValueId>) {
    let valid = body.make(Op::State(slot.valid), 1);
    let address = body.make(Op::State(slot.address.0), slot.address.1);
    let words = slot.words.iter().map(|(id, bits)| body.make(Op::State(*id), *bits)).collect();
    (valid, address, words)
}

/// A signal's write makes slots with its address invalid.
pub(crate) fn forget(signal: &mut Body, memory: MemoryId, slots: &[Slot]) {
    let writes: Vec<(ValueId, ValueId)> = signal
        .accesses
        .iter()
        .filter_map(|access| match access {
            Access::Write(at) if signal.writes[*at].memory == memory => {
                Some((signal.writes[*at].when, signal.writes[*at].address))
            }
            _ => None,
        })
        .collect();
    if writes.is_empty() {
        return;
    }
    for slot in slots {
        let (mut valid, held, _) = held(signal, slot);
        for (when, address) in &writes {
            let same = signal.binary(Binary::Equal, held, *address);
            let hit = signal.and(*when, same);
            let keep = signal.not(hit);
            valid = signal.and(valid, keep);
        }
        signal.updates.push((slot.valid, valid));
    }
}
