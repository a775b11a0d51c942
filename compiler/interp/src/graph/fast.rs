//! Compute definitions of common form evaluated by plain loops: copies, elementwise arithmetic, reductions
//! and dot products over elements whose indices are linear in the loop variables.
//!
//! Every form adds and multiplies in the order of the definition, so that its result equals
//! [`ScalarProgram`]'s bit by bit. Other definitions, and those that would leave an input's bounds, are left
//! to the program, which reports them.
//!
//! [`ScalarProgram`]: super::program::ScalarProgram

use super::place::row_major_strides;
use super::program::{InputShape, RegisterKind};
use super::scalar;
use mlcc_ir::compute::{RedOp, ScalarExpr};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::BinOp;
use mlcc_ir::types::DType;

/// `base + sum(axis index * strides) + reduction index * red` into input `arg`.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct AffineAccess {
    arg: usize,
    base: i64,
    strides: Vec<i64>,
    red: i64,
}

#[derive(Clone, Debug)]
pub(super) enum FastPath {
    Copy(AffineAccess),
    Unary(fn(f64) -> f64, AffineAccess),
    Binary(fn(f64, f64) -> f64, AffineAccess, AffineAccess),
    Reduce(RedOp, i64, AffineAccess),
    /// Sum of products.
    Dot(i64, AffineAccess, AffineAccess),
    /// Sum of products whose left operand has a scale per group of this many elements (codes of activations).
    ScaledDot {
        extent: i64,
        group: i64,
        codes: AffineAccess,
        scales: AffineAccess,
        right: AffineAccess,
    },
}

/// A linear integer expression: constant, coefficient of each output axis, coefficient of the reduction
/// variable.
struct LinearForm {
    constant: i64,
    axes: Vec<i64>,
    red: i64,
}

impl LinearForm {
    fn constant(constant: i64, rank: usize) -> LinearForm {
        LinearForm { constant, axes: vec![0; rank], red: 0 }
    }
    fn as_const(&self) -> Option<i64> {
        (self.red == 0 && self.axes.iter().all(|&c| c == 0)).then_some(self.constant)
    }
    fn scale(mut self, by: i64) -> LinearForm {
        self.constant *= by;
        self.red *= by;
        self.axes.iter_mut().for_each(|c| *c *= by);
        self
    }
    fn add(mut self, other: &LinearForm) -> LinearForm {
        self.constant += other.constant;
        self.red += other.red;
        self.axes.iter_mut().zip(&other.axes).for_each(|(a, b)| *a += b);
        self
    }
    /// True if it stays in `0..size` for all output indices and `reduction` in `0..extent`.
    fn stays_within(&self, size: usize, dims: &[usize], extent: i64) -> bool {
        let (mut low, mut high) = (self.constant, self.constant);
        let sizes = dims.iter().map(|&d| d as i64).chain([extent]);
        for (&c, n) in self.axes.iter().chain([&self.red]).zip(sizes) {
            let last = c * (n - 1).max(0);
            low += last.min(0);
            high += last.max(0);
        }
        low >= 0 && high < size as i64
    }
}

/// The domain on which a definition is evaluated.
pub(super) struct EvaluationDomain<'a> {
    pub dims: &'a [usize],
    /// Type of the output.
    pub dtype: DType,
    pub args: &'a [InputShape],
    pub syms: &'a SymValues,
}

impl FastPath {
    /// The loops for a definition, if it has one of the known forms and stays within bounds.
    pub fn recognise(scalar: &ScalarExpr, domain: &EvaluationDomain) -> Option<FastPath> {
        match scalar {
            ScalarExpr::Load { .. } => domain.affine(scalar, None, false).map(FastPath::Copy),
            // From a float, the rounding to the output's type is the cast; integers would wrap instead.
            ScalarExpr::Cast(dtype, inner) if *dtype == domain.dtype => {
                domain.affine(inner, None, true).map(FastPath::Copy)
            }
            ScalarExpr::Unary(op, a) => {
                Some(FastPath::Unary(scalar::float_unary(*op)?, domain.affine(a, None, true)?))
            }
            ScalarExpr::Binary(op, a, b) => {
                let f = scalar::float_binary(*op)?;
                Some(FastPath::Binary(f, domain.affine(a, None, true)?, domain.affine(b, None, true)?))
            }
            ScalarExpr::Reduce { op, var, extent, body } => {
                let red = Some((*var, extent.eval(domain.syms)));
                let count = red?.1;
                if let Some(scaled) = domain.scaled_dot(*op, *var, count, body) {
                    return Some(scaled);
                }
                if let ScalarExpr::Binary(BinOp::Mul, a, b) = &**body
                    && *op == RedOp::Sum
                {
                    return Some(FastPath::Dot(
                        count,
                        domain.affine(a, red, true)?,
                        domain.affine(b, red, true)?,
                    ));
                }
                Some(FastPath::Reduce(*op, count, domain.affine(body, red, true)?))
            }
            _ => None,
        }
    }

    /// Elements of the output, row-major, rounded to `dtype`.
    pub fn run(&self, dims: &[usize], dtype: DType, args: &[&[f64]]) -> Vec<f64> {
        let mut out = vec![0.0; dims.iter().product()];
        match self {
            FastPath::Copy(a) => {
                let x = args[a.arg];
                rows(dims, [a], |row, [i], [s]| {
                    for (k, o) in out[row].iter_mut().enumerate() {
                        *o = x[at(i, k, s)];
                    }
                });
            }
            FastPath::Unary(f, a) => {
                let x = args[a.arg];
                rows(dims, [a], |row, [i], [s]| {
                    for (k, o) in out[row].iter_mut().enumerate() {
                        *o = f(x[at(i, k, s)]);
                    }
                });
            }
            FastPath::Binary(f, a, b) => {
                let (x, y) = (args[a.arg], args[b.arg]);
                rows(dims, [a, b], |row, [i, j], [s, t]| {
                    for (k, o) in out[row].iter_mut().enumerate() {
                        *o = f(x[at(i, k, s)], y[at(j, k, t)]);
                    }
                });
            }
            FastPath::Reduce(op, extent, a) => {
                let x = args[a.arg];
                rows(dims, [a], |row, [i], [s]| {
                    for (k, o) in out[row].iter_mut().enumerate() {
                        *o = reduce(*op, *extent, x, at(i, k, s) as i64, a.red);
                    }
                });
            }
            FastPath::Dot(extent, a, b) => {
                let (x, y) = (args[a.arg], args[b.arg]);
                let n = (*extent).max(0) as usize;
                rows(dims, [a, b], |row, [i, j], [s, t]| {
                    let out = &mut out[row];
                    if s == 0 && t == 1 && b.red != 1 {
                        // One row of the right operand after the other: each element still sums in order.
                        for r in 0..n {
                            let (w, from) = (x[at(i, r, a.red)], at(j, r, b.red));
                            axpy(w, &y[from..from + out.len()], out);
                        }
                        return;
                    }
                    for (k, o) in out.iter_mut().enumerate() {
                        *o = dot(n, (x, at(i, k, s), a.red), (y, at(j, k, t), b.red));
                    }
                });
            }
            FastPath::ScaledDot { extent, group, codes, scales, right } => {
                let (x, scale, y) = (args[codes.arg], args[scales.arg], args[right.arg]);
                let n = (*extent).max(0) as usize;
                let mut left = vec![0.0; n];
                rows(dims, [codes, scales, right], |row, [i, g, j], [.., t]| {
                    for (r, l) in left.iter_mut().enumerate() {
                        *l = x[at(i, r, codes.red)] * scale[at(g, r / *group as usize, scales.red)];
                    }
                    for (k, o) in out[row].iter_mut().enumerate() {
                        *o = dot(n, (&left, 0, 1), (y, at(j, k, t), right.red));
                    }
                });
            }
        }
        // Copies from another type (casts) are rounded as well; for others it changes nothing.
        for v in &mut out {
            *v = scalar::from_float(dtype, *v);
        }
        out
    }
}

fn at(base: i64, k: usize, stride: i64) -> usize {
    (base + k as i64 * stride) as usize
}

/// Calls `f` for each run of the innermost output axis: output range, offset of each operand, its stride.
fn rows<const K: usize>(
    dims: &[usize],
    operands: [&AffineAccess; K],
    mut f: impl FnMut(std::ops::Range<usize>, [i64; K], [i64; K]),
) {
    if dims.contains(&0) {
        return;
    }
    let (inner, outer) = match dims.split_last() {
        Some((&inner, outer)) => (inner, outer),
        None => (1, dims),
    };
    let inner_strides = operands.map(|a| a.strides.last().copied().unwrap_or(0));
    let mut index = vec![0usize; outer.len()];
    let mut offsets = operands.map(|a| a.base);
    let total: usize = outer.iter().product();
    for row in 0..total {
        f(row * inner..(row + 1) * inner, offsets, inner_strides);
        for axis in (0..outer.len()).rev() {
            index[axis] += 1;
            let wrapped = index[axis] == outer[axis];
            for (offset, a) in offsets.iter_mut().zip(operands) {
                *offset += a.strides[axis] * if wrapped { 1 - outer[axis] as i64 } else { 1 };
            }
            if !wrapped {
                break;
            }
            index[axis] = 0;
        }
    }
}

fn axpy(w: f64, y: &[f64], out: &mut [f64]) {
    for (o, v) in out.iter_mut().zip(y) {
        *o += w * v;
    }
}

fn dot(n: usize, (x, i, s): (&[f64], usize, i64), (y, j, t): (&[f64], usize, i64)) -> f64 {
    let mut sum = 0.0;
    if s == 1 && t == 1 {
        for (a, b) in x[i..i + n].iter().zip(&y[j..j + n]) {
            sum += a * b;
        }
    } else {
        for r in 0..n {
            sum += x[at(i as i64, r, s)] * y[at(j as i64, r, t)];
        }
    }
    sum
}

fn reduce(op: RedOp, extent: i64, x: &[f64], from: i64, stride: i64) -> f64 {
    let elements = (0..extent.max(0)).map(|r| x[(from + r * stride) as usize]);
    match op {
        RedOp::Sum => elements.fold(op.identity(), |a, b| a + b),
        RedOp::Max => elements.fold(op.identity(), f64::max),
    }
}

impl EvaluationDomain<'_> {
    /// `sum over r: codes[.., r] * scales[.., r / group] * right[..,
    /// r]`, where the left side is the same along the innermost axis.
    fn scaled_dot(&self, op: RedOp, var: u32, extent: i64, body: &ScalarExpr) -> Option<FastPath> {
        let ScalarExpr::Binary(BinOp::Mul, left, right) = body else { return None };
        let ScalarExpr::Binary(BinOp::Mul, codes, scales) = &**left else { return None };
        let ScalarExpr::Load { arg, index } = &**scales else { return None };
        let Some(ScalarExpr::Binary(BinOp::Div, r, group)) = index.last() else { return None };
        let (ScalarExpr::Red(r), ScalarExpr::Int(group)) = (&**r, &**group) else { return None };
        if op != RedOp::Sum || *r != var || *group <= 0 {
            return None;
        }
        // The number of a group takes the place of the reduction's index.
        let mut index = index.clone();
        *index.last_mut()? = ScalarExpr::Red(var);
        let scales = ScalarExpr::Load { arg: *arg, index };
        let groups = (extent + group - 1) / group;
        let (codes, scales, right) = (
            self.affine(codes, Some((var, extent)), false)?,
            self.affine(&scales, Some((var, groups)), true)?,
            self.affine(right, Some((var, extent)), true)?,
        );
        let same = |a: &AffineAccess| a.strides.last().is_none_or(|&s| s == 0);
        (same(&codes) && same(&scales)).then_some(FastPath::ScaledDot {
            extent,
            group: *group,
            codes,
            scales,
            right,
        })
    }

    /// A load with linear indices that stay within bounds; `float`: of float elements only.
    fn affine(&self, scalar: &ScalarExpr, red: Option<(u32, i64)>, float: bool) -> Option<AffineAccess> {
        let ScalarExpr::Load { arg, index } = scalar else { return None };
        let operand = self.args.get(*arg)?;
        if index.len() != operand.dims.len()
            || float && RegisterKind::of_dtype(operand.dtype) != RegisterKind::Float
        {
            return None;
        }
        let rank = self.dims.len();
        let mut offset = LinearForm::constant(0, rank);
        let strides = row_major_strides(&operand.dims);
        for ((e, &size), stride) in index.iter().zip(&operand.dims).zip(strides) {
            let linear = self.linear(e, red.map(|r| r.0))?;
            if !linear.stays_within(size, self.dims, red.map_or(1, |r| r.1)) {
                return None;
            }
            offset = offset.add(&linear.scale(stride));
        }
        Some(AffineAccess { arg: *arg, base: offset.constant, strides: offset.axes, red: offset.red })
    }

    fn linear(&self, e: &ScalarExpr, red: Option<u32>) -> Option<LinearForm> {
        let rank = self.dims.len();
        match e {
            ScalarExpr::Axis(axis) if *axis < rank => {
                let mut l = LinearForm::constant(0, rank);
                l.axes[*axis] = 1;
                Some(l)
            }
            ScalarExpr::Red(var) if red == Some(*var) => {
                Some(LinearForm { red: 1, ..LinearForm::constant(0, rank) })
            }
            ScalarExpr::Int(value) => Some(LinearForm::constant(*value, rank)),
            ScalarExpr::Dim(dim) => Some(LinearForm::constant(dim.eval(self.syms), rank)),
            ScalarExpr::Binary(BinOp::Add, a, b) => Some(self.linear(a, red)?.add(&self.linear(b, red)?)),
            ScalarExpr::Binary(BinOp::Sub, a, b) => {
                Some(self.linear(a, red)?.add(&self.linear(b, red)?.scale(-1)))
            }
            ScalarExpr::Binary(BinOp::Mul, a, b) => {
                let (a, b) = (self.linear(a, red)?, self.linear(b, red)?);
                match (a.as_const(), b.as_const()) {
                    (_, Some(c)) => Some(a.scale(c)),
                    (Some(c), _) => Some(b.scale(c)),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}
