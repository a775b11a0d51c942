//! The states of a block between their rows in memory and the columns on the stack.

use super::{StateBlock, TransposedScan};
use mlcc_kernel_lang::{BufferView, Val, transpose};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyDirection {
    In,
    Out,
}

/// Rows of a square in a buffer: the first element, and elements from row to row.
#[derive(Clone, Copy)]
struct SquareTile<'k> {
    buf: BufferView<'k, 1>,
    first: Val<'k>,
    pitch: i64,
}

impl<'k> TransposedScan<'_, 'k> {
    /// Copies the rows of a block to the columns on the stack, or back.
    pub(super) fn copy_states(&self, block: &StateBlock<'k>, direction: CopyDirection) {
        let (k, lanes, columns) = (self.k, i64::from(self.lanes), self.scan.shape.columns);
        let block_rows = self.block_rows();
        let bufs = match direction {
            CopyDirection::In => &self.scan.inputs,
            CopyDirection::Out => &self.scan.outputs,
        };
        for (i, &state) in block.states.iter().enumerate() {
            let (outside, state) = (k.flat(bufs[i]), state.flat());
            let base = self.scan.offset(self.scan.input_extent(i), block.at, 0);
            k.serial("part", self.vectors, |part| {
                let row = part * lanes;
                k.serial("square", columns / lanes, |square| {
                    let column = square * lanes;
                    let first = base + (row * columns + column);
                    let rows = SquareTile { buf: outside, first, pitch: columns };
                    let place = column * block_rows + row;
                    let places = SquareTile { buf: state, first: place, pitch: block_rows };
                    match direction {
                        CopyDirection::In => self.copy_square(rows, places),
                        CopyDirection::Out => self.copy_square(places, rows),
                    }
                });
            });
            k.serial("row", block_rows, |row| {
                let of_row = base + row * columns;
                k.serial("c", columns % lanes, |c| {
                    let c = c + columns / lanes * lanes;
                    let (at, place) = (of_row + c, c * block_rows + row);
                    match direction {
                        CopyDirection::In => state.set([place], outside.at([at])),
                        CopyDirection::Out => outside.set([at], state.at([place])),
                    }
                });
            });
        }
    }

    /// Copies a square of as many vectors as lanes, its rows becoming columns.
    fn copy_square(&self, from: SquareTile<'k>, to: SquareTile<'k>) {
        let load = |i: i64| from.buf.load([from.first + i * from.pitch], self.lanes).named("x");
        let rows: Vec<Val> = (0..i64::from(self.lanes)).map(load).collect();
        for (i, column) in (0_i64..).zip(transpose(rows)) {
            to.buf.set([to.first + i * to.pitch], column);
        }
    }
}
