//! Terms of the scores by distance: rows of a table, taken by the distance of query and key within two
//! bounds.

use super::layout::{LayoutChain, constant};
use super::positions::{PositionForm, PositionReader};
use super::{AxisRole, MissReason, miss};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// The terms that are added to scores.
#[derive(Clone, Copy)]
pub struct ScoreBias {
    /// The terms, in the shape of the scores.
    added: ValueId,
    /// `[n, t, heads]`.
    rows: ValueId,
    /// `[distances, heads]`, or transposed.
    pub table: ValueId,
    pub transposed: bool,
    /// The row of distance 0.
    pub zero_row: usize,
}

/// True for what may be such terms.
pub fn is_gathered(f: &Function, v: ValueId) -> bool {
    rows_of(f, v).is_some()
}

/// The rows of a table that a value is made of.
fn rows_of(f: &Function, mut v: ValueId) -> Option<(ValueId, &GraphNode)> {
    loop {
        let node = f.defining_node(v)?;
        match node.op {
            Op::Gather => return Some((v, node)),
            Op::Reshape { .. } | Op::Permute { .. } => v = node.inputs[0],
            _ => return None,
        }
    }
}

impl ScoreBias {
    pub fn read(r: &PositionReader, added: ValueId) -> Result<ScoreBias, MissReason> {
        let Some((rows, GraphNode { inputs, .. })) = rows_of(r.f, added) else { return Err(None) };
        let (table, places) = (inputs[0], inputs[1]);
        let count = r.f.ty(table).dims[0].as_const().unwrap_or(0) as f64;
        let (table, transposed) = match r.f.defining_node(table) {
            Some(GraphNode { op: Op::Permute { perm }, inputs, .. }) if perm[..] == [1, 0] => {
                (inputs[0], true)
            }
            _ => (table, false),
        };
        let whole = r.f.ty(places).dims == [r.n.clone(), r.t.clone()];
        let Some(place) = match_clamped(r, places).filter(|_| whole) else {
            return miss("rows of a table are added to the scores that are not taken by distance");
        };
        // place = min(max(j - p + c, low), high) + shift
        let (c, behind) = (place.form.constant, place.form.constant - place.low);
        let by_distance = place.form.coefficients() == (-1.0, 1.0, 0.0, c);
        let in_table = place.low + place.shift == 0.0 && place.high + place.shift == count - 1.0;
        if !by_distance || !in_table || !(0.0..count).contains(&behind) {
            return miss("rows of a table are added to the scores for other distances than it has");
        }
        Ok(ScoreBias { added, rows, table, transposed, zero_row: behind as usize })
    }

    /// The terms, if each is that of the head, query and key of its score.
    pub fn of_heads(
        self,
        f: &Function,
        axes: &[(Dim, AxisRole)],
        heads: i64,
    ) -> Result<ScoreBias, MissReason> {
        let ty = f.ty(self.table);
        let rank = f.ty(self.added).rank();
        let of_heads = &ty.dims[usize::from(!self.transposed)];
        if ty.dtype != DType::F32 || *of_heads != Dim::from(heads) || rank != axes.len() + 2 {
            return miss(format!("terms by distance {ty} are not one per head"));
        }
        let chain = LayoutChain::trace(f, self.added, false);
        let of = |role: AxisRole| axes.iter().enumerate().filter(move |(_, a)| a.1 == role).map(|(i, _)| i);
        let order = [rank - 2, rank - 1].into_iter().chain(of(AxisRole::Kv)).chain(of(AxisRole::Group));
        let order: Vec<usize> = order.flat_map(|axis| chain.axes[axis].clone()).collect();
        match chain.in_order(&order) {
            Some((rows, _)) if rows == self.rows => Ok(self),
            _ => miss("terms by distance are in another order than the scores"),
        }
    }
}

/// `min(max(form, low), high) + shift`.
struct ClampedForm {
    form: PositionForm,
    low: f64,
    high: f64,
    shift: f64,
}

fn match_clamped(r: &PositionReader, v: ValueId) -> Option<ClampedForm> {
    if let Some(form) = r.read(v) {
        return Some(ClampedForm { form, low: f64::NEG_INFINITY, high: f64::INFINITY, shift: 0.0 });
    }
    let node = r.f.defining_node(v)?;
    let Op::Binary(op) = node.op else { return None };
    let [a, b] = [node.inputs[0], node.inputs[1]];
    let (x, c) = match (constant(r.f, a), constant(r.f, b)) {
        (_, Some(c)) => (a, c),
        (Some(c), None) if op != BinOp::Sub => (b, c),
        _ => return None,
    };
    let inner = match_clamped(r, x).filter(|_| r.f.ty(x).dims == r.f.ty(v).dims)?;
    let limit = c - inner.shift;
    Some(match op {
        BinOp::Add => ClampedForm { shift: inner.shift + c, ..inner },
        BinOp::Sub => ClampedForm { shift: inner.shift - c, ..inner },
        BinOp::Max => ClampedForm { low: inner.low.max(limit), high: inner.high.max(limit), ..inner },
        BinOp::Min => ClampedForm { low: inner.low.min(limit), high: inner.high.min(limit), ..inner },
        _ => return None,
    })
}
