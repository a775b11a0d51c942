//! A product as a problem: `y[i][j] = sum over k of x[i][k] * w[j][k]`, with its operands and the epilogue of
//! the sums.

use crate::quantize::CodeBlock;
use mlcc_ir::kernel::{BufId, ExprId};
use mlcc_ir::types::{DType, Packing, QuantFormat};
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use mlcc_quant::TILE;
use mlcc_quant::packed::TileSizes;
use mlcc_quant::plain::PlainType;

/// One product.
#[derive(Clone, Copy, Debug)]
pub struct MatmulProblem {
    pub x: BufId,
    pub activation: MatmulActivation,
    /// The weights; u8 for packed formats.
    pub w: BufId,
    /// Elements of `w` before the tensor.
    pub w_offset: usize,
    pub weight: MatmulWeight,
    /// Their order, on a GPU; CPU kernels read tiles.
    pub packing: Packing,
    /// Rows of the result, i64.
    pub m: ExprId,
    /// Rows of w, or of one of its matrices.
    pub n: usize,
    pub k: usize,
    /// f32 `[m, n]` that the epilogue reads or writes, at the places of the sums that it gets.
    pub epilogue_operands: [Option<BufId>; EPILOGUE_OPERANDS],
}

/// Most operands and results of an epilogue that are prefetched.
pub const EPILOGUE_OPERANDS: usize = 4;

/// Columns that integer products take together: a group of weights or a part of one.
pub const DOT_COLUMNS: usize = 32;

/// The type of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MatmulWeight {
    Plain(PlainType),
    Packed(QuantFormat),
}

impl MatmulWeight {
    pub fn from_dtype(dtype: DType) -> Option<MatmulWeight> {
        match dtype {
            DType::F32 => Some(MatmulWeight::Plain(PlainType::F32)),
            DType::F16 => Some(MatmulWeight::Plain(PlainType::F16)),
            DType::BF16 => Some(MatmulWeight::Plain(PlainType::BF16)),
            DType::Packed(format) => Some(MatmulWeight::Packed(format)),
            DType::Bool
            | DType::I8
            | DType::U8
            | DType::I16
            | DType::U16
            | DType::I32
            | DType::U32
            | DType::I64 => None,
        }
    }

    /// Bytes of an element of the buffer that holds them.
    pub fn buffer_bytes(self) -> usize {
        match self {
            MatmulWeight::Plain(plain) => plain.bytes(),
            MatmulWeight::Packed(_) => 1,
        }
    }

    pub fn dtype(self) -> DType {
        match self {
            MatmulWeight::Plain(plain) => plain.dtype(),
            MatmulWeight::Packed(format) => DType::Packed(format),
        }
    }
}

impl MatmulProblem {
    /// Elements of a tile of 16 rows.
    pub fn tile_len(&self) -> usize {
        match self.weight {
            MatmulWeight::Plain(plain) => self.k.next_multiple_of(plain.pair_columns()) * TILE,
            MatmulWeight::Packed(format) => TileSizes::new(format, self.k).tile(),
        }
    }

    /// Tiles of one matrix.
    pub fn tiles(&self) -> usize {
        self.n.div_ceil(TILE)
    }

    /// Times [`DOT_COLUMNS`] columns of a row.
    pub fn groups(&self) -> usize {
        self.k.div_ceil(DOT_COLUMNS)
    }
}

/// Type and row length of the activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MatmulActivation {
    /// f32, rows of k.
    F32,
    /// f16, rows of k.
    F16,
    /// bf16, rows of k.
    BF16,
    /// Integers, made at run time by the kernel of `quantize_rows`.
    Codes(QuantizedActivations),
}

/// Integer activations, with zeros after k up to whole groups of 32.
///
/// The codes are bytes in planes: one plane of -127..=127, or two for 16-bit codes `256 high + low`. Rows
/// come in blocks of `block`, each ordered `[groups of 32][planes][32 / columns][rows][columns]`, so that a
/// product reads one stream; the rows after the last whole block follow one by one, in the same order with
/// one row per block. Rows for chosen experts, which meet other rows than their neighbours, all come one by
/// one. The buffer has elements of as many bytes as there are planes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuantizedActivations {
    /// 1 or 2.
    pub planes: usize,
    /// Columns per scale, a multiple of 32.
    pub group: usize,
    pub block: CodeBlock,
    /// f32 `[rows, groups of columns per scale]`: first the scale of the last group; then for each further
    /// group the scale of the group before it divided by its own. So a sum over k is kept in units of the
    /// group that it has reached, and needs one set of accumulators.
    pub scales: BufId,
    /// i32 `[rows, groups of 32]`: minus the zero point of the weights times the sum of the codes.
    pub starts: BufId,
}

impl QuantizedActivations {
    /// Elements of the buffer that hold four codes of a plane.
    pub fn quad_elements(&self) -> usize {
        4 / self.planes
    }
    /// Quads of one row, all planes.
    pub fn row_quads(&self, k: usize) -> usize {
        k.div_ceil(DOT_COLUMNS) * self.planes * DOT_COLUMNS / 4
    }
    /// Groups of weights that share an activation scale.
    pub fn groups_per_scale(&self) -> usize {
        self.group / DOT_COLUMNS
    }
    /// Activation scales of a row.
    pub fn row_scales(&self, k: usize) -> usize {
        k.div_ceil(self.group)
    }
}

impl MatmulActivation {
    /// Elements from one row of float activations to the next.
    pub fn row_stride(self, k: usize) -> usize {
        match self {
            MatmulActivation::F32 | MatmulActivation::F16 | MatmulActivation::BF16 => k,
            MatmulActivation::Codes(_) => k.next_multiple_of(DOT_COLUMNS),
        }
    }
}

/// Finished sums, handed to the epilogue.
#[derive(Clone, Copy)]
pub struct FinishedSums<'k> {
    /// Row of the result.
    pub row: Val<'k>,
    /// First column.
    pub col: Val<'k>,
    pub lanes: u32,
    /// f32, `lanes` consecutive columns.
    pub acc: Val<'k>,
    /// The columns that exist; `None` means all.
    pub mask: Option<Val<'k>>,
}

impl<'k> FinishedSums<'k> {
    /// Stores them in a matrix of results.
    pub fn store(self, out: BufferView<'k, 2>) {
        self.store_values(out, self.acc);
    }

    /// Stores what was made of them, lane by lane, in their place.
    pub fn store_values(self, out: BufferView<'k, 2>, values: Val<'k>) {
        let at = [self.row, self.col];
        match self.mask {
            Some(mask) => out.set_where(mask, at, values),
            None => out.set(at, values),
        }
    }
}

/// Stores (or uses) a vector of sums.
pub type MatmulEpilogue<'a> = dyn for<'k> FnMut(&'k Recorder, FinishedSums<'k>) + 'a;
