//! Operations that threads of a GPU do together or asynchronously: barriers, copies, fragments in registers
//! of 32 bits.

use super::emit::{EmitResult, LlvmValue, vector_type};
use super::kernel::{ExecutionModel, KernelEmitter};
use crate::error::EmitError;
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicValueEnum, InstructionOpcode as Op};
use mlcc_ir::instr::{ExecutionScope, InstrDef, InstrSemantics};
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

impl<'c> KernelEmitter<'_, 'c> {
    pub(super) fn barrier(&self) -> EmitResult<()> {
        self.emit_effect("bar.sync 0;")
    }

    pub(super) fn commit(&self) -> EmitResult<()> {
        self.emit_effect("cp.async.commit_group;")
    }

    pub(super) fn wait(&self, pending: u32) -> EmitResult<()> {
        match pending {
            0 => self.emit_effect("cp.async.wait_all;"),
            _ => self.emit_effect(&format!("cp.async.wait_group {pending};")),
        }
    }

    fn emit_effect(&self, asm: &str) -> EmitResult<()> {
        if self.machine == ExecutionModel::Cpu {
            return Err(EmitError(format!("`{asm}` in a CPU kernel")));
        }
        self.e.inline_asm(asm, "~{memory}", &[], None, true).map(|_| ())
    }

    /// An instruction that is spelled in PTX. Operands and results of more than 32 bits are several words;
    /// where the meaning asks for the address of a load, that is one operand.
    pub(super) fn ptx(
        &mut self,
        def: &InstrDef,
        (asm, constraints): (&str, &str),
        args: &[ExprId],
    ) -> EmitResult<Option<LlvmValue<'c>>> {
        let mut operands = Vec::new();
        for &arg in args {
            match def.meaning {
                InstrSemantics::LoadMatrix { .. } | InstrSemantics::Copy { .. } => {
                    operands.push(self.element_address(arg)?)
                }
                _ => {
                    let value = self.expr(arg)?;
                    operands.extend(self.register_words(value, self.kernel.ty(arg))?);
                }
            }
        }
        let convergent = def.scope == ExecutionScope::Warp;
        let Some(ret) = def.ret else {
            return self.e.inline_asm(asm, constraints, &operands, None, convergent);
        };
        let (word, count) = (self.word_type(ret), word_count(ret)?);
        let ty: BasicTypeEnum<'c> = match count {
            1 => word,
            _ => self.e.ctx.struct_type(&vec![word; count as usize], false).into(),
        };
        let raw = self.e.inline_asm(asm, constraints, &operands, Some(ty), convergent)?;
        let raw = raw.ok_or_else(|| EmitError(format!("{} without a result", def.name)))?;
        let joined = match raw {
            BasicValueEnum::StructValue(all) => {
                let mut words = vector_type(word, count)?.get_poison();
                for i in 0..count {
                    words = self.e.insert(words, self.e.b.build_extract_value(all, i, "")?, i)?;
                }
                words.into()
            }
            one => one,
        };
        self.e.bitcast(joined, self.e.ty(ret)?).map(Some)
    }

    /// Address of the element that a load would read, as an integer.
    fn element_address(&mut self, load: ExprId) -> EmitResult<LlvmValue<'c>> {
        let Expr::Load { buf, index, .. } = *self.kernel.exprs.expr(load) else {
            return Err(EmitError::new("the address of something that is not a load"));
        };
        let index = self.expr(index)?;
        let address = self.address(buf, index, true)?;
        self.e.cast(Op::PtrToInt, address.into(), self.e.ctx.i64_type().into())
    }

    fn word_type(&self, ty: ExprType) -> BasicTypeEnum<'c> {
        match ty.dtype {
            DType::F32 => self.e.ctx.f32_type().into(),
            _ => self.e.ctx.i32_type().into(),
        }
    }

    /// The registers of a value.
    fn register_words(&self, value: LlvmValue<'c>, ty: ExprType) -> EmitResult<Vec<LlvmValue<'c>>> {
        let (word, count) = (self.word_type(ty), word_count(ty)?);
        if count == 1 {
            return Ok(vec![self.e.bitcast(value, word)?]);
        }
        let words = self.e.bitcast(value, vector_type(word, count)?.into())?;
        (0..count).map(|i| self.e.extract(words, i)).collect()
    }
}

fn word_count(ty: ExprType) -> EmitResult<u32> {
    let bits = ty.dtype.bytes().unwrap_or(0) as u32 * ty.lanes * 8;
    match bits > 0 && bits.is_multiple_of(32) {
        true => Ok(bits / 32),
        false => Err(EmitError(format!("{ty} in registers of 32 bits"))),
    }
}
