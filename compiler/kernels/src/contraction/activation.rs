//! The activations of a contraction: floats, or integers and the order in which they lie.

use mlcc_ir::kernel::BufId;

/// Type and row length of the activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// f32, rows of k.
    F32,
    /// bf16, rows of k.
    BF16,
    /// Integers, made at run time by the kernel of `quantize_rows`.
    Codes(Codes),
}

/// Integer activations, with zeros behind k up to whole groups of 32.
///
/// The codes are bytes in planes: one plane of -127..=127, or two for 16-bit codes `256 high + low`. Rows come in blocks of
/// `block`, each ordered `[groups of 32][planes][32 / columns][rows][columns]`, so that a product reads one stream; the rows
/// behind the last whole block follow one by one, in the same order with one row per block. Rows for chosen experts, which
/// meet other rows than their neighbours, all come one by one. The buffer has elements of as many bytes as there are planes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Codes {
    /// 1 or 2.
    pub planes: usize,
    /// Columns per scale, a multiple of 32.
    pub group: usize,
    pub block: CodeBlock,
    /// f32 `[rows, groups of columns per scale]`: first the scale of the last group; then for each further group the scale
    /// of the group before it over its own. So a sum over k is kept in units of the group that it has come to, and needs
    /// one set of accumulators.
    pub scales: BufId,
    /// i32 `[rows, groups of 32]`: minus the zero point of the weights times the sum of the codes.
    pub starts: BufId,
}

/// Rows of codes that lie together: `columns` codes (4 or 8) of each, then the next columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CodeBlock {
    pub rows: u32,
    pub columns: u32,
}

impl CodeBlock {
    /// Every row for itself.
    pub const SINGLE: CodeBlock = CodeBlock { rows: 1, columns: 4 };
}

impl Codes {
    /// Elements of the buffer that hold four codes of a plane.
    pub fn quad_elements(&self) -> usize {
        4 / self.planes
    }
    /// Quads of one row, all planes.
    pub fn row_quads(&self, k: usize) -> usize {
        k.div_ceil(GROUP) * self.planes * GROUP / 4
    }
}

/// Group of all packed weight formats.
pub const GROUP: usize = 32;

impl Activation {
    /// Elements from one row of float activations to the next.
    pub fn row_stride(self, k: usize) -> usize {
        match self {
            Activation::F32 | Activation::BF16 => k,
            Activation::Codes(_) => k.next_multiple_of(GROUP),
        }
    }
}
