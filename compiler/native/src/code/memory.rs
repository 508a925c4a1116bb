//! Reads and writes of memories.

use beeline_ir::tree::{Expr, MemId, VarId, mask, words};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder as _, MemFlagsData, Value, types};

use super::Coder;

impl Coder<'_, '_> {
    /// Address of an entry, and whether the indices are in range.
    fn entry(&mut self, mem: MemId, index: &[Expr]) -> (Value, Option<Value>) {
        let memory = self.element.mem(mem);
        let (dimensions, bits) = (memory.dimensions.clone(), memory.bits);
        let slot = i32::try_from(mem.0 * 8).unwrap_or(i32::MAX);
        let base = self.builder.ins().load(types::I64, MemFlagsData::trusted(), self.mems, slot);
        let mut at = self.number(0);
        let mut inside: Option<Value> = None;
        for (size, index) in dimensions.iter().zip(index) {
            let value = self.value(index);
            if index.largest() >= u64::from(*size) {
                let limit = self.number(u64::from(*size));
                let fits = self.builder.ins().icmp(IntCC::UnsignedLessThan, value, limit);
                inside = Some(match inside {
                    Some(other) => self.builder.ins().band(other, fits),
                    None => fits,
                });
            }
            let size = self.number(u64::from(*size));
            let scaled = self.builder.ins().imul(at, size);
            at = self.builder.ins().iadd(scaled, value);
        }
        let per = self.number(words(bits) as u64 * 8);
        let bytes = self.builder.ins().imul(at, per);
        (self.builder.ins().iadd(base, bytes), inside)
    }

    pub(super) fn read(&mut self, to: VarId, mem: MemId, index: &[Expr], offset: u32, bits: u32) {
        let (address, inside) = self.entry(mem, index);
        let exits = inside.map(|inside| {
            let fits = self.builder.create_block();
            let past = self.builder.create_block();
            let done = self.builder.create_block();
            self.builder.ins().brif(inside, fits, &[], past, &[]);
            self.builder.switch_to_block(past);
            for at in (0..bits).step_by(64) {
                let zero = self.number(0);
                self.set_fixed(to, at, (bits - at).min(64), zero);
            }
            self.builder.ins().jump(done, &[]);
            self.builder.switch_to_block(fits);
            done
        });
        for at in (0..bits).step_by(64) {
            let part = (bits - at).min(64);
            let start = offset + at;
            let (word, shift) = (start / 64, start % 64);
            let byte = i32::try_from(word * 8).unwrap_or(0);
            let trusted = MemFlagsData::trusted();
            let mut value = self.builder.ins().load(types::I64, trusted, address, byte);
            if shift > 0 {
                value = self.builder.ins().ushr_imm_u(value, i64::from(shift));
            }
            if shift + part > 64 {
                let high = self.builder.ins().load(types::I64, trusted, address, byte + 8);
                let high = self.builder.ins().ishl_imm_u(high, i64::from(64 - shift));
                value = self.builder.ins().bor(value, high);
            }
            let value = self.masked(value, part);
            self.set_fixed(to, at, part, value);
        }
        if let Some(done) = exits {
            self.builder.ins().jump(done, &[]);
            self.builder.switch_to_block(done);
        }
    }

    pub(super) fn write(
        &mut self,
        mem: MemId,
        index: &[Expr],
        offset: u32,
        bits: u32,
        from: VarId,
    ) {
        let entry_bits = self.element.mem(mem).bits;
        let (address, inside) = self.entry(mem, index);
        let done = inside.map(|inside| {
            let fits = self.builder.create_block();
            let done = self.builder.create_block();
            self.builder.ins().brif(inside, fits, &[], done, &[]);
            self.builder.switch_to_block(fits);
            done
        });
        let trusted = MemFlagsData::trusted();
        for at in (0..bits).step_by(64) {
            let part = (bits - at).min(64);
            let value = self.get_fixed(from, at, part);
            let start = offset + at;
            let (word, shift) = (start / 64, start % 64);
            let byte = i32::try_from(word * 8).unwrap_or(0);
            let whole = (entry_bits - word * 64).min(64);
            if shift == 0 && part >= whole {
                self.builder.ins().store(trusted, value, address, byte);
                continue;
            }
            let old = self.builder.ins().load(types::I64, trusted, address, byte);
            let keep = self.number(!(mask(part) << shift));
            let kept = self.builder.ins().band(old, keep);
            let moved = if shift > 0 {
                self.builder.ins().ishl_imm_u(value, i64::from(shift))
            } else {
                value
            };
            let new = self.builder.ins().bor(kept, moved);
            self.builder.ins().store(trusted, new, address, byte);
            if shift + part > 64 {
                let old = self.builder.ins().load(types::I64, trusted, address, byte + 8);
                let keep = self.number(!(mask(part) >> (64 - shift)));
                let kept = self.builder.ins().band(old, keep);
                let moved = self.builder.ins().ushr_imm_u(value, i64::from(64 - shift));
                let new = self.builder.ins().bor(kept, moved);
                self.builder.ins().store(trusted, new, address, byte + 8);
            }
        }
        if let Some(done) = done {
            self.builder.ins().jump(done, &[]);
            self.builder.switch_to_block(done);
        }
    }
}
