//! `ntohs` and its like: one instruction for what lowering writes as a statement a byte.

use beeline_ir::tree::{Element, Expr, ExprKind, Stmt, VarId, mask};
use cranelift_codegen::ir::dfg::ValueDef;
use cranelift_codegen::ir::{Function, InstructionData, Opcode, Value};

/// The bytes of one variable in the other order, as lowering writes them: a statement a byte.
pub(super) struct Turned {
    pub(super) from: VarId,
    pub(super) to: VarId,
    pub(super) bits: u32,
}

impl Turned {
    /// At the beginning of `block`.
    pub(super) fn of(element: &Element, block: &[Stmt]) -> Option<Self> {
        let parts = |stmt: &Stmt| match stmt {
            Stmt::Set { place, value: Expr { bits: 8, kind: ExprKind::Get(from) } }
                if place.index.is_empty() && from.index.is_empty() =>
            {
                Some((place.var, place.offset, from.var, from.offset))
            }
            _ => None,
        };
        let (to, _, from, _) = parts(block.first()?)?;
        let bits = element.var(to).bits;
        if !matches!(bits, 16 | 32 | 64) || element.var(from).bits != bits || from == to {
            return None;
        }
        let each = (0..bits).step_by(8).zip(block);
        let all = each.clone().count() == (bits / 8) as usize;
        let turned = all
            && each
                .into_iter()
                .all(|(at, stmt)| parts(stmt) == Some((to, bits - 8 - at, from, at)));
        turned.then_some(Self { from, to, bits })
    }
}

/// A value without the mask that leaves its lowest `bits` bits: turning shifts the others out.
pub(super) fn unmasked(function: &Function, value: Value, bits: u32) -> Value {
    let instruction = |value: Value| match function.dfg.value_def(value) {
        ValueDef::Result(made, 0) => Some(function.dfg.insts[made]),
        _ => None,
    };
    let Some(InstructionData::Binary { opcode: Opcode::Band, args: [inner, by] }) =
        instruction(value)
    else {
        return value;
    };
    match instruction(by) {
        Some(InstructionData::UnaryImm { opcode: Opcode::Iconst, imm })
            if imm.bits().cast_unsigned() == mask(bits) =>
        {
            inner
        }
        _ => value,
    }
}
