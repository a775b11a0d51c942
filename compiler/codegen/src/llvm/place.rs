//! The begin of a GPU kernel: it finds its sizes, and its buffers at their places in this call or for this
//! sequence ([`crate::placement`]).

use super::emit::{EmitResult, LlvmValue};
use super::kernel::{GLOBAL_SPACE, KernelEmitter};
use crate::error::EmitError;
use crate::placement::{AddressOrigin, AddressStrides, ArgumentWord, BufferPlacement};
use inkwell::basic_block::BasicBlock;
use inkwell::values::{InstructionOpcode as Op, PointerValue};
use inkwell::{AddressSpace, IntPredicate};
use mlcc_abi::{PAGE_ROWS, Sequence};
use mlcc_ir::dim::SizeSymbol;
use mlcc_ir::entity::EntityId;
use mlcc_ir::step::SequenceFilter;
use std::mem::offset_of;

/// Values by which buffers move.
#[derive(Clone, Copy, Default)]
struct BufferOffsets<'c> {
    past: Option<LlvmValue<'c>>,
    page_table: Option<PointerValue<'c>>,
    /// The state's address, the first row and the number of the sequence, in a launch for each sequence.
    state: Option<PointerValue<'c>>,
    first: Option<LlvmValue<'c>>,
    number: Option<LlvmValue<'c>>,
}

impl<'c> KernelEmitter<'_, 'c> {
    /// Binds sizes and buffers; `words` are the arguments behind the buffers. Blocks that have no sequence go
    /// to `exit`.
    pub(super) fn place_buffers(
        &mut self,
        placement: &BufferPlacement,
        words: &[LlvmValue<'c>],
        exit: BasicBlock<'c>,
    ) -> EmitResult<()> {
        let mut found = BufferOffsets::default();
        let given = placement.argument_words(self.kernel.dims.len());
        let mut count = None;
        for (word, &argument) in given.iter().zip(words) {
            match *word {
                ArgumentWord::Size(i) => {
                    let (sym, var) = self.kernel.dims[i];
                    argument.set_name(sym.name());
                    self.vars[var.index()] = Some(self.load_word(argument)?);
                }
                ArgumentWord::Past => found.past = Some(self.load_word(argument)?),
                ArgumentWord::PageTable => found.page_table = Some(argument.into_pointer_value()),
                ArgumentWord::SequenceCount => count = Some(self.load_word(argument)?),
                ArgumentWord::Sequences => {
                    let count = count.ok_or_else(|| EmitError::new("sequences without their number"))?;
                    found =
                        self.bind_sequence(placement.sequences.unwrap_or_default(), (count, argument), exit)?;
                }
            }
        }
        let params = self.kernel.params.clone();
        for (buf, moves) in params.into_iter().zip(&placement.buffers) {
            self.bufs[buf.index()] = Some(self.offset_address(self.buf(buf)?, moves, &found)?);
        }
        Ok(())
    }

    /// The sequence of this block, if it has one of those that the launch is for.
    fn bind_sequence(
        &mut self,
        of: SequenceFilter,
        (count, all): (LlvmValue<'c>, LlvmValue<'c>),
        exit: BasicBlock<'c>,
    ) -> EmitResult<BufferOffsets<'c>> {
        let number = self.gpu_index("ctaid", 2)?;
        let inside = self.e.icmp(IntPredicate::SLT, number, count)?;
        self.only_if(inside, exit)?;
        let size = self.e.i64(size_of::<Sequence>() as i64);
        let at = self.e.mul(number, size)?;
        let entry = self.e.element(all.into_pointer_value(), self.e.ctx.i8_type().into(), at, true)?;
        let word = |offset: usize| self.load_word(self.e.offset(entry, offset as u64)?.into());
        let rows = word(offset_of!(Sequence, rows))?;
        let one = self.e.i64(1);
        match of {
            SequenceFilter::All => {}
            SequenceFilter::OneRow => self.only_if(self.e.icmp(IntPredicate::EQ, rows, one)?, exit)?,
            SequenceFilter::SeveralRows => self.only_if(self.e.icmp(IntPredicate::SGT, rows, one)?, exit)?,
        }
        let word = |offset: usize| self.load_word(self.e.offset(entry, offset as u64)?.into());
        let past = word(offset_of!(Sequence, past))?;
        let first = word(offset_of!(Sequence, first))?;
        let pointer = self.e.ctx.ptr_type(AddressSpace::from(GLOBAL_SPACE));
        let place = |offset: usize, name: &str| -> EmitResult<PointerValue<'c>> {
            Ok(self.e.b.build_int_to_ptr(word(offset)?.into_int_value(), pointer, name)?)
        };
        let state = place(offset_of!(Sequence, state), "state")?;
        let page_table = place(offset_of!(Sequence, page_table), "page_table")?;
        for (sym, var) in &self.kernel.dims {
            self.vars[var.index()] = Some(match sym {
                SizeSymbol::N => rows,
                SizeSymbol::Past => past,
                SizeSymbol::B => count,
            });
        }
        Ok(BufferOffsets {
            past: Some(past),
            page_table: Some(page_table),
            state: Some(state),
            first: Some(first),
            number: Some(number),
        })
    }

    /// Goes on with what comes next where `cond` holds, which all threads of a block agree on.
    fn only_if(&self, cond: LlvmValue<'c>, exit: BasicBlock<'c>) -> EmitResult<()> {
        let next = self.e.ctx.append_basic_block(self.function, "there");
        self.e.b.build_conditional_branch(cond.into_int_value(), next, exit)?;
        self.e.b.position_at_end(next);
        Ok(())
    }

    fn offset_address(
        &self,
        from: PointerValue<'c>,
        moves: &AddressStrides,
        found: &BufferOffsets<'c>,
    ) -> EmitResult<PointerValue<'c>> {
        let byte = self.e.ctx.i8_type().into();
        let mut pointer = from;
        let origin = match moves.from {
            AddressOrigin::Fixed => None,
            AddressOrigin::State => Some(found.state),
            AddressOrigin::PageTable => Some(found.page_table),
        };
        if let Some(origin) = origin {
            let offset = self.e.b.build_ptr_to_int(from, self.e.ctx.i64_type(), "offset")?;
            pointer = self.e.element(origin.ok_or_else(unknown)?, byte, offset.into(), true)?;
        }
        let mut past = found.past;
        if moves.per_page > 0 {
            let (page, row) = self.place_in_pages(found)?;
            let before = self.e.op(Op::Mul, page, self.e.i64(moves.per_page as i64))?;
            pointer = self.e.element(pointer, byte, before, true)?;
            past = Some(row);
        }
        let steps =
            [(moves.per_past, past), (moves.per_row, found.first), (moves.per_sequence, found.number)];
        for (bytes, times) in steps.into_iter().filter(|(bytes, _)| *bytes > 0) {
            let times = times.ok_or_else(unknown)?;
            let before = self.e.op(Op::Mul, times, self.e.i64(bytes as i64))?;
            pointer = self.e.element(pointer, byte, before, true)?;
        }
        Ok(pointer)
    }

    /// The page that the new row is in, and its place there.
    fn place_in_pages(&self, found: &BufferOffsets<'c>) -> EmitResult<(LlvmValue<'c>, LlvmValue<'c>)> {
        let (past, table) = (found.past.ok_or_else(unknown)?, found.page_table.ok_or_else(unknown)?);
        let (rows, i32) = (PAGE_ROWS as i64, self.e.ctx.i32_type());
        let index = self.e.op(Op::LShr, past, self.e.i64(rows.trailing_zeros().into()))?;
        let entry = self.e.element(table, i32.into(), index, true)?;
        let page = self.fixed_in_memory(i32, entry.into(), 4)?.into_int_value();
        let page = self.e.b.build_int_s_extend(page, self.e.ctx.i64_type(), "page")?;
        Ok((page.into(), self.e.op(Op::And, past, self.e.i64(rows - 1))?))
    }
}

fn unknown() -> EmitError {
    EmitError::new("a buffer moves by what is not known")
}
