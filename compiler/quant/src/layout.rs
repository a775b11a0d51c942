//! The place of element (row, k) of a weight tensor: index arithmetic as data, so that the host and kernel IR
//! share one definition of every packing.

use crate::group::GroupSpec;
use crate::plain::{self, PlainType};
use crate::{QuantError, packed};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::ExprId;
use mlcc_ir::types::{DType, Packing};

/// Weight rows of a tile of [`Packing::Tile16`].
pub const TILE: usize = 16;

/// An index of the tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightAxis {
    /// Output channel, `0..N`.
    Row,
    /// Position along the reduction, `0..K`.
    Col,
}

/// `stride * ((axis / div) % modulo)`; a modulo of 0 means none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressTerm {
    pub axis: WeightAxis,
    pub div: usize,
    pub modulo: usize,
    pub stride: usize,
}

impl AddressTerm {
    pub(crate) fn new(axis: WeightAxis, div: usize, modulo: usize, stride: usize) -> AddressTerm {
        AddressTerm { axis, div, modulo, stride }
    }
}

/// A sum of terms and a constant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AddressExpr {
    pub offset: usize,
    pub terms: Vec<AddressTerm>,
}

impl AddressExpr {
    pub fn evaluate(&self, row: usize, col: usize) -> usize {
        let term = |t: &AddressTerm| {
            let index = match t.axis {
                WeightAxis::Row => row,
                WeightAxis::Col => col,
            } / t.div;
            t.stride * if t.modulo == 0 { index } else { index % t.modulo }
        };
        self.offset + self.terms.iter().map(term).sum::<usize>()
    }

    /// The same as kernel IR, of i64 indices.
    pub fn emit(&self, kb: &mut KernelBuilder, row: ExprId, col: ExprId) -> ExprId {
        let mut sum = kb.int(self.offset as i64);
        for t in &self.terms {
            let index = match t.axis {
                WeightAxis::Row => row,
                WeightAxis::Col => col,
            };
            let div = kb.int(t.div as i64);
            let mut value = kb.div(index, div);
            if t.modulo != 0 {
                let modulo = kb.int(t.modulo as i64);
                value = kb.rem(value, modulo);
            }
            let value = kb.mul_int(value, t.stride as i64);
            sum = kb.add(sum, value);
        }
        sum
    }
}

/// The contents of the places.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LayoutRegion {
    /// `place` counts elements.
    Plain { plain: PlainType, place: AddressExpr },
    /// Places count bytes; `shift` is the bit at which a code starts within its byte (its word, where codes
    /// do not fill bytes), where codes share those.
    Group {
        spec: GroupSpec,
        codes: AddressExpr,
        shift: Option<AddressExpr>,
        scales: AddressExpr,
        zeros: Option<AddressExpr>,
    },
}

/// Order in memory of an `[N, K]` tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorLayout {
    /// Length of the buffer that holds it: elements of a plain type, bytes of a packed one (buffers of type
    /// u8).
    pub len: usize,
    pub region: LayoutRegion,
}

impl TensorLayout {
    pub fn new(dtype: DType, packing: Packing, n: usize, k: usize) -> Result<TensorLayout, QuantError> {
        // No layout takes more than 4 bytes per element of the padded tensor plus the numbers of each group.
        let padding = if let DType::Packed(format) = dtype { 2 * format.group_size(1) } else { 2 };
        let bound = n.checked_add(TILE).and_then(|n| k.checked_add(padding)?.checked_mul(n)?.checked_mul(8));
        if bound.is_none_or(|b| b > isize::MAX as usize) {
            return Err(QuantError::TooLarge { dtype, packing, n, k });
        }
        match dtype {
            DType::F32 => plain::layout(PlainType::F32, packing, n, k),
            DType::F16 => plain::layout(PlainType::F16, packing, n, k),
            DType::BF16 => plain::layout(PlainType::BF16, packing, n, k),
            DType::Packed(format) => packed::layout(format, packing, n, k),
            DType::Bool
            | DType::I8
            | DType::U8
            | DType::I16
            | DType::U16
            | DType::I32
            | DType::U32
            | DType::I64 => Err(QuantError::UnsupportedType { dtype }),
        }
    }
    /// The same tensor `offset` buffer elements further on.
    pub fn at_offset(mut self, offset: usize) -> TensorLayout {
        match &mut self.region {
            LayoutRegion::Plain { place, .. } => place.offset += offset,
            LayoutRegion::Group { codes, scales, zeros, .. } => {
                let places = [codes, scales].into_iter().chain(zeros);
                places.for_each(|place| place.offset += offset);
            }
        }
        self
    }
    pub fn bytes(&self) -> usize {
        match &self.region {
            LayoutRegion::Plain { plain, .. } => self.len * plain.bytes(),
            LayoutRegion::Group { .. } => self.len,
        }
    }
    /// Element type of the buffer that holds the tensor.
    pub fn buffer_dtype(&self) -> DType {
        match &self.region {
            LayoutRegion::Plain { plain, .. } => plain.dtype(),
            LayoutRegion::Group { .. } => DType::U8,
        }
    }
}

/// Bytes of an `[N, K]` tensor in a format and packing.
pub fn packed_bytes(dtype: DType, packing: Packing, n: usize, k: usize) -> Result<usize, QuantError> {
    Ok(TensorLayout::new(dtype, packing, n, k)?.bytes())
}
