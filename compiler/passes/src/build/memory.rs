//! Accesses of memories: addresses, reads that are shared, writes.

use beeline_ir::tree::{Binary, Expr, VarId, mask, words};

use super::{Builder, Path};
use crate::ssa::{Access, MemoryId, Op, Read, ReadId, ValueId, Write};

impl Builder<'_> {
    /// The address of an entry, and whether it is inside.
    pub(super) fn address(
        &mut self,
        memory: MemoryId,
        index: &[Expr],
        path: &mut Path,
    ) -> (ValueId, Option<ValueId>) {
        let dimensions = self.element.mems[memory.0 as usize].dimensions.clone();
        let entries: u32 = dimensions.iter().product();
        let width = (32 - (entries.max(2) - 1).leading_zeros()).max(1);
        let mut address = self.body.constant(0, width);
        let mut inside: Option<ValueId> = None;
        for (size, index) in dimensions.iter().zip(index) {
            let at = self.value(index, path);
            let bits = self.body.bits(at);
            if u64::from(*size) <= mask(bits) && index.largest() >= u64::from(*size) {
                let fits = if size.is_power_of_two() {
                    let low = size.trailing_zeros();
                    let above = self.body.extract(at, low, bits - low);
                    let none = self.body.constant(0, bits - low);
                    self.body.binary(Binary::Equal, above, none)
                } else {
                    let limit = self.body.constant(u64::from(*size), bits);
                    self.body.binary(Binary::Less, at, limit)
                };
                inside = Some(match inside {
                    Some(other) => self.body.and(other, fits),
                    None => fits,
                });
            }
            let at = self.body.resize(at, width);
            let size = self.body.constant(u64::from(*size), width);
            let scaled = self.body.binary(Binary::Multiply, address, size);
            address = self.body.binary(Binary::Add, scaled, at);
        }
        (address, inside)
    }

    pub(super) fn read(
        &mut self,
        to: VarId,
        memory: MemoryId,
        index: &[Expr],
        (offset, bits): (u32, u32),
        path: &mut Path,
    ) {
        let (address, inside) = self.address(memory, index, path);
        if let Some(entries) = self.constant_entry(memory, address, inside) {
            for at in (0..bits).step_by(64) {
                let part = (bits - at).min(64);
                let value = beeline_ir::interpreter::extract(&entries, offset + at, part);
                let value = self.body.constant(value, part);
                self.set_fixed(to, at, value, path);
            }
            return;
        }
        let when = match inside {
            Some(inside) => self.body.and(path.when, inside),
            None => path.when,
        };
        let version = self.versions[memory.0 as usize];
        let key = (memory, address, version);
        let shared = self.same.get(&key).copied().filter(|_| self.clean);
        let id = match shared {
            Some(id) => {
                // One read serves both; it must not depend on what comes later.
                let old = self.body.reads[id.0 as usize].when;
                if self.body.implies(when, old) { Some(id) } else { None }
            }
            None => None,
        };
        let id = id.unwrap_or_else(|| {
            let id = ReadId(u32::try_from(self.body.reads.len()).unwrap_or(u32::MAX));
            self.body.reads.push(Read { memory, address, when });
            self.body.accesses.push(Access::Read(id));
            self.same.insert(key, id);
            id
        });
        let entry = self.element.mems[memory.0 as usize].bits;
        let word = |builder: &mut Self, at: u32| {
            let bits = (entry - at * 64).min(64);
            builder.body.make(Op::Data(id, at), bits)
        };
        for at in (0..bits).step_by(64) {
            let part = (bits - at).min(64);
            let start = offset + at;
            let (first, shift) = (start / 64, start % 64);
            let low = word(self, first);
            let mut value = if shift + part <= 64 {
                self.body.extract(low, shift, part)
            } else {
                let low = self.body.extract(low, shift, 64 - shift);
                let high = word(self, first + 1);
                let high = self.body.extract(high, 0, part - (64 - shift));
                let wide = self.body.resize(low, part);
                self.body.insert(wide, high, 64 - shift)
            };
            if let Some(inside) = inside {
                let zero = self.body.constant(0, part);
                value = self.body.select(inside, value, zero);
            }
            self.set_fixed(to, at, value, path);
        }
    }

    /// The entry of a constant table at a constant address.
    fn constant_entry(
        &self,
        memory: MemoryId,
        address: ValueId,
        inside: Option<ValueId>,
    ) -> Option<Vec<u64>> {
        let mem = &self.element.mems[memory.0 as usize];
        if !mem.constant || inside.is_some_and(|i| self.body.constant_of(i) != Some(1)) {
            return None;
        }
        let at = usize::try_from(self.body.constant_of(address)?).ok()?;
        let per = words(mem.bits);
        let mut entry: Vec<u64> = mem.initial.iter().skip(at * per).take(per).copied().collect();
        entry.resize(per, 0);
        Some(entry)
    }

    pub(super) fn write(
        &mut self,
        from: VarId,
        memory: MemoryId,
        index: &[Expr],
        (offset, bits): (u32, u32),
        path: &mut Path,
    ) {
        let (address, inside) = self.address(memory, index, path);
        let when = match inside {
            Some(inside) => self.body.and(path.when, inside),
            None => path.when,
        };
        let list = (0..bits)
            .step_by(64)
            .map(|at| self.fixed(from, at, (bits - at).min(64), path))
            .collect();
        if self.body.constant_of(when) == Some(0) {
            return;
        }
        self.versions[memory.0 as usize] += 1;
        self.body.accesses.push(Access::Write(self.body.writes.len()));
        self.body.writes.push(Write { memory, address, when, offset, bits, words: list });
    }
}
