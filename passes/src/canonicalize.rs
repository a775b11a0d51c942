//! One form for equal things: movements that move nothing disappear, movements of movements become one,
//! arithmetic with neutral constants goes. In `decode` (n = 1) this turns a token shift into the plain state.

use crate::pattern::{GraphPattern, MatchSite, OpKind, any, constant, node, op};
use crate::rewrite::{NearMisses, RewriteBuilder, RewriteRule, apply};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{GraphNode, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::{DType, TensorType};

const PASS: &str = "canonicalize";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let rules: Vec<RewriteRule> =
        [slices(), concats(), permutes(), reshapes(), sequences(), neutral(), activations()]
            .into_iter()
            .flatten()
            .collect();
    apply(program, ctx, PASS, &rules, NearMisses::Skip)
}

/// True if the first operand has the result's type.
fn keeps_type(at: &MatchSite) -> bool {
    at.operand_type(0) == Some(at.ty())
}

fn first_operand(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    Ok(b.operands()[0])
}

fn slices() -> Vec<RewriteRule> {
    let whole = node(OpKind::Slice).when("takes the whole axis", |at| {
        keeps_type(at) && matches!(slice_of(at.node()), Some((_, start, _)) if start.as_const() == Some(0))
    });
    let of_slice = op(OpKind::Slice, [op(OpKind::Slice, [any("x")]).named("inner")])
        .when("slices the axis of the first slice", |at| {
            axis_of(at.node()).is_some() && axis_of(at.node()) == axis_of(operand_node(at))
        });
    let of_part = op(OpKind::Slice, [node(OpKind::Concat).named("concat")])
        .when("lies within one part of the concatenation", |at| part_at(at).is_some());
    vec![
        RewriteRule { name: "slice of the whole axis", pattern: whole, build: first_operand },
        RewriteRule { name: "slice of a slice", pattern: of_slice, build: merge_slices },
        RewriteRule { name: "slice of one part of a concatenation", pattern: of_part, build: slice_part },
    ]
}

fn operand_node<'a>(at: &MatchSite<'a>) -> Option<&'a GraphNode> {
    at.f.defining_node(*at.node()?.inputs.first()?)
}

fn slice_of(node: Option<&GraphNode>) -> Option<(usize, &Dim, &Dim)> {
    match &node?.op {
        Op::Slice { axis, start, len } => Some((*axis, start, len)),
        _ => None,
    }
}

fn axis_of(node: Option<&GraphNode>) -> Option<usize> {
    match &node?.op {
        Op::Slice { axis, .. } | Op::Concat { axis } => Some(*axis),
        _ => None,
    }
}

fn merge_slices(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    let (outer, inner) = (b.root().clone(), b.captured_op("inner").clone());
    let x = b.get("x");
    match (outer, inner) {
        (Op::Slice { axis, start, len }, Op::Slice { start: first, .. }) => {
            b.op(Op::Slice { axis, start: start.add(&first), len }, &[x])
        }
        _ => unreachable!("the pattern matches slices"),
    }
}

/// The part of a concatenation that `len` from `start` lie in, and where in it they start.
fn part_of(parts: &[&TensorType], axis: usize, start: &Dim, len: &Dim) -> Option<(usize, Dim)> {
    let mut offset = Dim::from(0);
    for (i, part) in parts.iter().enumerate() {
        let size = part.dims.get(axis)?;
        let end = offset.add(size);
        let not_negative = |d: Dim| d.as_const().is_some_and(|d| d >= 0);
        if not_negative(start.sub(&offset)) && not_negative(end.sub(&start.add(len))) {
            return Some((i, start.sub(&offset)));
        }
        offset = end;
    }
    None
}

fn part_at(at: &MatchSite) -> Option<(usize, Dim)> {
    let (axis, start, len) = slice_of(at.node())?;
    let concat = operand_node(at)?;
    let types: Vec<&TensorType> = concat.inputs.iter().map(|&v| at.f.ty(v)).collect();
    if axis_of(Some(concat)) == Some(axis) { part_of(&types, axis, start, len) } else { None }
}

fn slice_part(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    let Op::Slice { axis, start, len } = b.root().clone() else { unreachable!("the pattern matches slices") };
    let parts = b.operands_of("concat");
    let types: Vec<&TensorType> = parts.iter().map(|&v| b.f.ty(v)).collect();
    let found = part_of(&types, axis, &start, &len);
    let (part, start) = found.expect("the guard has found it");
    b.op(Op::Slice { axis, start, len }, &[parts[part]])
}

fn concats() -> Vec<RewriteRule> {
    let single =
        node(OpKind::Concat).when("has one part", |at| at.node().is_some_and(|n| n.inputs.len() == 1));
    let empty_part = node(OpKind::Concat).when("has an empty part among others", |at| {
        let (Some(node), Some(axis)) = (at.node(), axis_of(at.node())) else { return false };
        node.inputs.len() > 1 && node.inputs.iter().any(|&v| is_empty(at.f.ty(v), axis))
    });
    let drop_empty = |b: &mut RewriteBuilder| {
        let Op::Concat { axis } = *b.root() else { unreachable!("the pattern matches concat") };
        let parts = b.operands();
        let mut kept: Vec<ValueId> = parts.iter().copied().filter(|&v| !is_empty(b.f.ty(v), axis)).collect();
        if kept.is_empty() {
            kept.push(parts[0]);
        }
        b.op(Op::Concat { axis }, &kept)
    };
    vec![
        RewriteRule { name: "concatenation of one part", pattern: single, build: first_operand },
        RewriteRule { name: "empty part of a concatenation", pattern: empty_part, build: drop_empty },
    ]
}

fn is_empty(ty: &TensorType, axis: usize) -> bool {
    ty.dims.get(axis).and_then(Dim::as_const) == Some(0)
}

fn perm_of(node: Option<&GraphNode>) -> Option<&[usize]> {
    match &node?.op {
        Op::Permute { perm } => Some(perm),
        _ => None,
    }
}

fn permutes() -> Vec<RewriteRule> {
    let identity = node(OpKind::Permute).when("keeps the order of axes", |at| {
        perm_of(at.node()).is_some_and(|p| p.iter().enumerate().all(|(i, &axis)| i == axis))
    });
    let of_permute = op(OpKind::Permute, [op(OpKind::Permute, [any("x")]).named("inner")]);
    let compose = |b: &mut RewriteBuilder| match (b.root().clone(), b.captured_op("inner").clone()) {
        (Op::Permute { perm: outer }, Op::Permute { perm: inner }) => {
            let perm = outer.iter().map(|&axis| inner[axis]).collect();
            let x = b.get("x");
            b.op(Op::Permute { perm }, &[x])
        }
        _ => unreachable!("the pattern matches permutes"),
    };
    let of_ones = node(OpKind::Permute).when("moves only axes of size 1", |at| {
        let (Some(perm), Some(from)) = (perm_of(at.node()), at.operand_type(0)) else { return false };
        let long: Vec<usize> = perm.iter().copied().filter(|&axis| from.dims[axis] != Dim::from(1)).collect();
        long.is_sorted()
    });
    let as_reshape = |b: &mut RewriteBuilder| {
        let Op::Permute { perm } = b.root().clone() else { unreachable!("the pattern matches permute") };
        let x = b.operands()[0];
        let dims = perm.iter().map(|&axis| b.f.ty(x).dims[axis].clone()).collect();
        b.op(Op::Reshape { dims }, &[x])
    };
    let through_reshape = op(OpKind::Permute, [op(OpKind::Reshape, [node(OpKind::Permute).named("first")])])
        .when("is of a reshape that adds or drops axes of size 1 only", |at| {
            let (Some(inner), Some(to)) = (operand_node(at), at.operand_type(0)) else { return false };
            let from = &at.f.ty(inner.inputs[0]).dims;
            long_axes(from).map(|i| &from[i]).eq(long_axes(&to.dims).map(|i| &to.dims[i]))
        });
    vec![
        RewriteRule {
            name: "permutations with axes of size 1 added between",
            pattern: through_reshape,
            build: permute_long,
        },
        RewriteRule { name: "permutation that moves nothing", pattern: identity, build: first_operand },
        RewriteRule { name: "permutation of a permutation", pattern: of_permute, build: compose },
        RewriteRule { name: "permutation of axes of size 1", pattern: of_ones, build: as_reshape },
    ]
}

fn long_axes(dims: &[Dim]) -> impl Iterator<Item = usize> + '_ {
    (0..dims.len()).filter(|&i| dims[i].as_const() != Some(1))
}

/// The second permutation right after the first, of the axes that are not of size 1, and the reshape last.
fn permute_long(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    let Op::Permute { perm } = b.root().clone() else { unreachable!("the pattern matches permute") };
    let (first, reshaped) = (b.get("first"), b.operands()[0]);
    let (from, to) = (b.f.ty(first).dims.clone(), b.f.ty(reshaped).dims.clone());
    let place = |axis: usize| long_axes(&to).position(|i| i == axis).and_then(|at| long_axes(&from).nth(at));
    let short = (0..from.len()).filter(|&i| from[i].as_const() == Some(1));
    let moved = short.chain(perm.iter().filter_map(|&axis| place(axis))).collect();
    let moved = b.op(Op::Permute { perm: moved }, &[first])?;
    b.op(Op::Reshape { dims: perm.iter().map(|&axis| to[axis].clone()).collect() }, &[moved])
}

fn reshapes() -> Vec<RewriteRule> {
    let same_shape = |kind| node(kind).when("keeps the type", keeps_type);
    let of_reshape = op(OpKind::Reshape, [op(OpKind::Reshape, [any("x")])]);
    let outer = |b: &mut RewriteBuilder| {
        let (root, x) = (b.root().clone(), b.get("x"));
        b.op(root, &[x])
    };
    vec![
        RewriteRule {
            name: "reshape to the same shape",
            pattern: same_shape(OpKind::Reshape),
            build: first_operand,
        },
        RewriteRule {
            name: "cast to the same type",
            pattern: same_shape(OpKind::Cast),
            build: first_operand,
        },
        RewriteRule { name: "reshape of a reshape", pattern: of_reshape, build: outer },
    ]
}

/// Splits move towards what is computed for all sequences, so that what is read of one row (heads of merged
/// projections) is known in front of the kernel that reads it.
fn sequences() -> Vec<RewriteRule> {
    let rows_stay = |at: &MatchSite| match at.operand_type(0).zip(operand_node(at)) {
        Some((_, GraphNode { op: Op::Slice { axis, .. }, .. })) => *axis > 0,
        Some((ty, GraphNode { op: Op::Reshape { .. }, inputs, .. })) => {
            at.f.ty(inputs[0]).dims.first() == ty.dims.first()
        }
        _ => false,
    };
    let of = |kind| {
        op(OpKind::SequenceSplit, [op(kind, [any("x")]).named("inner")]).when("keeps the rows", rows_stay)
    };
    let split_first = |b: &mut RewriteBuilder| {
        let (split, inner, x) = (b.root().clone(), b.captured_op("inner").clone(), b.get("x"));
        let row = b.op(split, &[x])?;
        let rows = b.f.ty(row).dims[0].clone();
        let inner = match inner {
            Op::Reshape { dims } => {
                Op::Reshape { dims: std::iter::once(rows).chain(dims[1..].iter().cloned()).collect() }
            }
            other => other,
        };
        b.op(inner, &[row])
    };
    let joined = op(OpKind::SequenceSplit, [op(OpKind::SequenceJoin, [any("x")])]);
    let apart = op(OpKind::SequenceJoin, [op(OpKind::SequenceSplit, [any("x")])]);
    let x = |b: &mut RewriteBuilder| Ok(b.get("x"));
    vec![
        RewriteRule { name: "split of a slice", pattern: of(OpKind::Slice), build: split_first },
        RewriteRule { name: "split of a reshape", pattern: of(OpKind::Reshape), build: split_first },
        RewriteRule { name: "split of what was joined", pattern: joined, build: x },
        RewriteRule { name: "join of what was split", pattern: apart, build: x },
    ]
}

/// Arithmetic that gives one operand back. (`x + 0` turns -0 into 0, which nothing here distinguishes.)
fn neutral() -> Vec<RewriteRule> {
    let with = |op_: BinOp, neutral: f64| -> GraphPattern {
        op(OpKind::Binary(op_), [any("x"), constant(neutral)])
            .when("has the operand's type", |at| at.capture("x").is_some_and(|x| at.f.ty(x) == at.ty()))
    };
    let x = |b: &mut RewriteBuilder| Ok(b.get("x"));
    let negation = OpKind::Unary(UnOp::Neg);
    vec![
        RewriteRule { name: "x * 1", pattern: with(BinOp::Mul, 1.0), build: x },
        RewriteRule { name: "x / 1", pattern: with(BinOp::Div, 1.0), build: x },
        RewriteRule { name: "x + 0", pattern: with(BinOp::Add, 0.0), build: x },
        RewriteRule { name: "x - 0", pattern: with(BinOp::Sub, 0.0), build: x },
        RewriteRule { name: "-(-x)", pattern: op(negation, [op(negation, [any("x")])]), build: x },
    ]
}

/// Forms of one function with fewer operations.
fn activations() -> Vec<RewriteRule> {
    let half = op(OpKind::Binary(BinOp::Mul), [any("x"), constant(0.5)]);
    let tanh = op(OpKind::Unary(UnOp::Tanh), [any("u")]);
    let one_more = op(OpKind::Binary(BinOp::Add), [tanh, constant(1.0)]);
    let product =
        op(OpKind::Binary(BinOp::Mul), [half, one_more]).when("is of f32 values of one shape", |at| {
            let same = |name| at.capture(name).is_some_and(|v| at.f.ty(v) == at.ty());
            at.ty().dtype == DType::F32 && same("x") && same("u")
        });
    vec![RewriteRule {
        name: "x / 2 * (1 + tanh(u)) as x * sigmoid(2 u)",
        pattern: product,
        build: as_sigmoid,
    }]
}

/// The factor 2 joins one that is there.
fn as_sigmoid(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    let (x, mut u, mut factor) = (b.get("x"), b.get("u"), 2.0);
    if let Some(GraphNode { op: Op::Binary(BinOp::Mul), inputs, .. }) = b.f.defining_node(u) {
        let constant = |v: ValueId| match b.f.defining_node(v).map(|n| &n.op) {
            Some(Op::Constant { value, .. }) => Some(*value),
            _ => None,
        };
        let found = match (constant(inputs[0]), constant(inputs[1])) {
            (None, Some(c)) => Some((inputs[0], c)),
            (Some(c), None) => Some((inputs[1], c)),
            _ => None,
        };
        if let Some((scaled, c)) = found.filter(|(scaled, _)| b.f.ty(*scaled) == b.f.ty(u)) {
            (u, factor) = (scaled, 2.0 * c);
        }
    }
    let factor = b.op(Op::Constant { value: factor, dtype: DType::F32 }, &[])?;
    let scaled = b.op(Op::Binary(BinOp::Mul), &[u, factor])?;
    let gate = b.op(Op::Unary(UnOp::Sigmoid), &[scaled])?;
    b.op(Op::Binary(BinOp::Mul), &[x, gate])
}
