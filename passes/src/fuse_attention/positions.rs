//! Integers that a mask or a bias is made of, as linear forms in the positions of query and key.

use super::layout::constant;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// `query * p + key * j + prefix * count + near * min(p, limit) +
/// constant`, where `p` and `j` are the positions of query and key in the sequence.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PositionForm {
    pub query: f64,
    pub key: f64,
    pub prefix: f64,
    pub near: f64,
    pub constant: f64,
    /// The `i32[1]` that `prefix` counts.
    pub count: Option<ValueId>,
    /// The upper limit of the position that `near` counts.
    pub limit: Option<f64>,
}

impl PositionForm {
    fn combine(self, other: PositionForm, sign: f64) -> Option<PositionForm> {
        let differs = |a: Option<f64>, b: Option<f64>| a.is_some() && b.is_some() && a != b;
        let counts_differ = self.count.is_some() && other.count.is_some() && self.count != other.count;
        if counts_differ || differs(self.limit, other.limit) {
            return None;
        }
        Some(PositionForm {
            query: self.query + sign * other.query,
            key: self.key + sign * other.key,
            prefix: self.prefix + sign * other.prefix,
            near: self.near + sign * other.near,
            constant: self.constant + sign * other.constant,
            count: self.count.or(other.count),
            limit: self.limit.or(other.limit),
        })
    }
    pub fn sub(self, other: PositionForm) -> Option<PositionForm> {
        self.combine(other, -1.0)
    }
    pub fn scale(self, by: f64) -> PositionForm {
        PositionForm {
            query: self.query * by,
            key: self.key * by,
            prefix: self.prefix * by,
            near: self.near * by,
            constant: self.constant * by,
            count: self.count,
            limit: self.limit,
        }
    }
    /// A number.
    fn is_constant(&self) -> bool {
        self.coefficients() == (0.0, 0.0, 0.0, self.constant) && self.near == 0.0
    }
    /// The coefficients but `near`.
    pub fn coefficients(&self) -> (f64, f64, f64, f64) {
        (self.query, self.key, self.prefix, self.constant)
    }
}

/// Reads values that broadcast to scores `[.., n, t]`.
pub struct PositionReader<'a> {
    pub f: &'a Function,
    pub n: &'a Dim,
    pub t: &'a Dim,
}

impl PositionReader<'_> {
    /// The linear form of a value that has no part in `min(p, limit)`, if it is one.
    pub fn read(&self, v: ValueId) -> Option<PositionForm> {
        self.read_near(v).filter(|p| p.near == 0.0)
    }

    /// The linear form of a value, if it is one.
    pub fn read_near(&self, v: ValueId) -> Option<PositionForm> {
        let rank = self.f.ty(v).rank();
        self.read_at(v, &(0..rank).rev().collect::<Vec<_>>())
    }

    /// `places[i]` counts the axis of the scores that axis `i` of the value lies on, from the last.
    fn read_at(&self, v: ValueId, places: &[usize]) -> Option<PositionForm> {
        if let Some(value) = constant(self.f, v) {
            return Some(PositionForm { constant: value, ..PositionForm::default() });
        }
        let operand = |node: &mlcc_ir::graph::GraphNode, i: usize| {
            let (v, rank) = (node.inputs[i], places.len());
            self.read_at(v, &places[rank - self.f.ty(v).rank()..])
        };
        let found = self.f.defining_node(v).and_then(|node| match &node.op {
            Op::Iota { start, len } => self.iota(start, len, places[0]),
            Op::Cast(_) => operand(node, 0),
            Op::Unary(UnOp::Neg) => operand(node, 0).map(|p| p.scale(-1.0)),
            Op::Binary(BinOp::Add) => operand(node, 0)?.combine(operand(node, 1)?, 1.0),
            Op::Binary(BinOp::Sub) => operand(node, 0)?.sub(operand(node, 1)?),
            Op::Binary(BinOp::Mul) => {
                let (a, b) = (operand(node, 0)?, operand(node, 1)?);
                match (a.is_constant(), b.is_constant()) {
                    (true, _) => Some(b.scale(a.constant)),
                    (_, true) => Some(a.scale(b.constant)),
                    _ => None,
                }
            }
            Op::Binary(BinOp::Min) => {
                let (a, b) = (operand(node, 0)?, operand(node, 1)?);
                let (p, limit) = if b.is_constant() { (a, b) } else { (b, a) };
                let is_query =
                    p.coefficients() == (1.0, 0.0, 0.0, 0.0) && p.near == 0.0 && limit.is_constant();
                let limit = Some(limit.constant);
                is_query.then_some(PositionForm { near: 1.0, limit, ..PositionForm::default() })
            }
            Op::Permute { perm } => {
                let mut source = vec![0; places.len()];
                perm.iter().zip(places).for_each(|(&from, &place)| source[from] = place);
                self.read_at(node.inputs[0], &source)
            }
            Op::Reshape { dims } => {
                let x = node.inputs[0];
                let long = |dims: &[Dim]| -> Vec<usize> {
                    (0..dims.len()).filter(|&i| dims[i].as_const() != Some(1)).collect()
                };
                let (from, to) = (long(&self.f.ty(x).dims), long(dims));
                let same = from.len() == to.len()
                    && from.iter().zip(&to).all(|(&a, &b)| self.f.ty(x).dims[a] == dims[b]);
                let mut source = vec![0; self.f.ty(x).rank()];
                from.iter().zip(&to).for_each(|(&a, &b)| source[a] = places[b]);
                if same { self.read_at(x, &source) } else { None }
            }
            _ => None,
        });
        found.or_else(|| self.read_count(v))
    }

    fn iota(&self, start: &Dim, len: &Dim, place: usize) -> Option<PositionForm> {
        let behind_past = start.sub(&self.t.sub(self.n)).as_const();
        let single = len.as_const() == Some(1);
        match (behind_past, start.as_const()) {
            (_, Some(c)) if single => Some(PositionForm { constant: c as f64, ..PositionForm::default() }),
            (Some(c), _) if len == self.n && (place == 1 || single) => {
                Some(PositionForm { query: 1.0, constant: c as f64, ..PositionForm::default() })
            }
            (_, Some(c)) if len == self.t && place == 0 => {
                Some(PositionForm { key: 1.0, constant: c as f64, ..PositionForm::default() })
            }
            _ => None,
        }
    }

    /// Any other single integer counts the keys of a prefix.
    fn read_count(&self, v: ValueId) -> Option<PositionForm> {
        let ty = self.f.ty(v);
        let single =
            ty.dtype == DType::I32 && ty.dims.iter().all(|d| d.as_const() == Some(1)) && ty.rank() == 1;
        single.then_some(PositionForm { prefix: 1.0, count: Some(v), ..PositionForm::default() })
    }
}
