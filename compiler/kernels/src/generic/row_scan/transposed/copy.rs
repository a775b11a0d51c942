//! The states of a block between their rows in memory and the columns on the stack.

use super::{Block, Transposed};
use crate::attention::product::transpose;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId};

impl Transposed<'_> {
    /// Copies the rows of a block to the columns on the stack, or back.
    pub(super) fn copy_states(&self, kb: &mut KernelBuilder, block: &Block, direction: Direction) {
        let (lanes, columns) = (i64::from(self.lanes), self.scan.shape.columns);
        let bufs = match direction {
            Direction::In => &self.scan.inputs,
            Direction::Out => &self.scan.outputs,
        };
        let (parts, squares) = (kb.int(self.vectors as i64), kb.int(columns / lanes));
        for (i, &state) in block.states.iter().enumerate() {
            let base = self.scan.offset(kb, self.scan.extent(self.scan.body.inputs[i]), block.tile, 0);
            kb.serial("part", parts, |kb, part| {
                let part = kb.mul_int(part, lanes);
                kb.serial("square", squares, |kb, square| {
                    let column = kb.mul_int(square, lanes);
                    let row = kb.mul_int(part, columns);
                    let row = kb.add(row, column);
                    let row = kb.add(base, row);
                    let place = kb.mul_int(column, self.block_rows());
                    let place = kb.add(place, part);
                    let (rows, places) = ((bufs[i], row, columns), (state, place, self.block_rows()));
                    match direction {
                        Direction::In => self.copy_square(kb, rows, places),
                        Direction::Out => self.copy_square(kb, places, rows),
                    }
                });
            });
            let (rows, rest) = (kb.int(self.block_rows()), kb.int(columns % lanes));
            kb.serial("row", rows, |kb, row| {
                let of_row = kb.mul_int(row, columns);
                let of_row = kb.add(base, of_row);
                kb.serial("c", rest, |kb, c| {
                    let c = kb.add_int(c, columns / lanes * lanes);
                    let at = kb.add(of_row, c);
                    let place = kb.mul_int(c, self.block_rows());
                    let place = kb.add(place, row);
                    let ((from, source), (to, target)) = match direction {
                        Direction::In => ((bufs[i], at), (state, place)),
                        Direction::Out => ((state, place), (bufs[i], at)),
                    };
                    let value = kb.load(from, source);
                    kb.store(to, target, value);
                });
            });
        }
    }

    /// Copies a square of as many vectors as lanes, its rows becoming columns; `(buffer, first element, from row to row)`.
    fn copy_square(&self, kb: &mut KernelBuilder, from: (BufId, ExprId, i64), to: (BufId, ExprId, i64)) {
        let row = |(_, first, stride): (BufId, ExprId, i64), i: u32| (first, stride * i64::from(i));
        let vectors: Vec<ExprId> = (0..self.lanes)
            .map(|i| {
                let (first, offset) = row(from, i);
                let at = kb.add_int(first, offset);
                let value = kb.load_vec(from.0, at, self.lanes);
                kb.let_("x", value)
            })
            .collect();
        for (i, value) in transpose(kb, vectors).into_iter().enumerate() {
            let (first, offset) = row(to, i as u32);
            let at = kb.add_int(first, offset);
            kb.store_vec(to.0, at, value);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    In,
    Out,
}
