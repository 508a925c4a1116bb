//! A channel's ring in machine code: room, places, and an item in or out.
//!
//! The words are those of a channel's part of the control block (`fused.rs`): address, the oldest item's
//! byte, the byte of the first free place, items inside, items that went in. A ring is touched by the
//! function that a graph became, and by the host between two calls of it.

use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{Block, InstBuilder as _, Value, types};
use cranelift_frontend::FunctionBuilder;

use crate::fused::{go_on_if, load, store};

/// A channel's ring.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    /// First word of its part of the control words.
    pub(crate) at: usize,
    /// Bytes of an item.
    pub(crate) width: i64,
    /// Items.
    pub(crate) depth: i64,
    pub(crate) control: Value,
}

impl Ring {
    /// The items inside, where there is room for one more; otherwise control goes to `full`.
    pub(crate) fn with_room(&self, builder: &mut FunctionBuilder<'_>, full: Block) -> Value {
        let count = load(builder, self.control, self.at + 3);
        let depth = builder.ins().iconst(types::I64, self.depth);
        let room = builder.ins().icmp(IntCC::UnsignedLessThan, count, depth);
        go_on_if(builder, room, full);
        count
    }

    /// The place after one.
    pub(crate) fn after(&self, builder: &mut FunctionBuilder<'_>, place: Value) -> Value {
        let next = builder.ins().iadd_imm_s(place, self.width);
        let size = builder.ins().iconst(types::I64, self.width * self.depth);
        let over = builder.ins().icmp(IntCC::Equal, next, size);
        let zero = builder.ins().iconst(types::I64, 0);
        builder.ins().select(over, zero, next)
    }

    /// Puts an item in.
    pub(crate) fn put(&self, builder: &mut FunctionBuilder<'_>, count: Value, item: &[Value]) {
        let base = load(builder, self.control, self.at);
        let tail = load(builder, self.control, self.at + 2);
        let to = builder.ins().iadd(base, tail);
        for (word, value) in item.iter().enumerate() {
            store(builder, to, word, *value);
        }
        let tail = self.after(builder, tail);
        store(builder, self.control, self.at + 2, tail);
        let count = builder.ins().iadd_imm_s(count, 1);
        store(builder, self.control, self.at + 3, count);
        self.passed(builder);
    }

    /// Counts an item that went in.
    pub(crate) fn passed(&self, builder: &mut FunctionBuilder<'_>) {
        let passed = load(builder, self.control, self.at + 4);
        let passed = builder.ins().iadd_imm_s(passed, 1);
        store(builder, self.control, self.at + 4, passed);
    }

    /// Takes the oldest item; its address, good until the ring is written again.
    pub(crate) fn take(&self, builder: &mut FunctionBuilder<'_>, count: Value) -> Value {
        let base = load(builder, self.control, self.at);
        let head = load(builder, self.control, self.at + 1);
        let from = builder.ins().iadd(base, head);
        let head = self.after(builder, head);
        store(builder, self.control, self.at + 1, head);
        let count = builder.ins().iadd_imm_s(count, -1);
        store(builder, self.control, self.at + 3, count);
        from
    }
}
