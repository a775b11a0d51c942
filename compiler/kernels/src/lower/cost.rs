//! The least memory traffic and arithmetic of a kernel, from its group function: for profiles, not for
//! decisions.

use super::attention;
use super::error::LowerError;
use super::operands::{AppendedRows, value_bytes};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{AttentionOp, Op, OpFamily};
use mlcc_ir::types::{DType, Packing};

/// The arithmetic that most operations of a kernel are done in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ComputeType {
    F32,
    /// Dot products of pairs of bf16.
    BF16,
    /// Dot products of bytes.
    I8,
    /// Dot products of 4-bit weights with bytes. Like `I8` where an instruction takes bytes; without one,
    /// pairs are added in 16 bits.
    I4,
}

impl ComputeType {
    pub const ALL: [ComputeType; 4] = [ComputeType::F32, ComputeType::BF16, ComputeType::I8, ComputeType::I4];
    pub fn name(self) -> &'static str {
        match self {
            ComputeType::F32 => "f32",
            ComputeType::BF16 => "bf16",
            ComputeType::I8 => "i8",
            ComputeType::I4 => "i4",
        }
    }
}

/// Least work of one launch.
#[derive(Clone, PartialEq, Debug)]
pub struct LaunchCost {
    /// Bytes read or written, by argument of the kernel.
    pub bytes: Vec<Dim>,
    /// A multiplication and an addition are two.
    pub ops: Dim,
    pub arithmetic: ComputeType,
    /// Matrices that each worker reads its share of in turn: those of chosen experts.
    pub matrices: Dim,
    /// Most parts that the work can be cut into, where those may be few.
    pub parts: Option<i64>,
}

impl LaunchCost {
    /// The cost of kernels in one launch, with their arguments in order.
    pub fn combine(parts: &[&LaunchCost]) -> LaunchCost {
        let sum = |ops: &dyn Fn(&LaunchCost) -> Dim| {
            parts.iter().fold(Dim::from(0), |sum, part| sum.add(&ops(part)))
        };
        let dots =
            parts.iter().map(|part| part.arithmetic).find(|&arithmetic| arithmetic != ComputeType::F32);
        LaunchCost {
            bytes: parts.iter().flat_map(|part| part.bytes.iter().cloned()).collect(),
            ops: sum(&|part| part.ops.clone()),
            arithmetic: dots.unwrap_or(ComputeType::F32),
            matrices: parts.first().map_or(Dim::from(1), |part| part.matrices.clone()),
            parts: None,
        }
    }
}

/// The cost of a group function whose inputs `i` with `packings[i]` are parameters.
pub fn of_group(
    module: &Module,
    f: &Function,
    packings: &[Option<Packing>],
) -> Result<LaunchCost, LowerError> {
    let mut bytes = Vec::new();
    for (&v, &packing) in f.inputs.iter().zip(packings) {
        bytes.push(read_bytes(f, v, packing)?);
    }
    for &v in &f.outputs {
        bytes.push(value_bytes(f.ty(v), None)?);
    }
    let ops = f.live_nodes().fold(Dim::from(0), |sum, (_, n)| sum.add(&ops(module, f, n)));
    let dots = |n: &GraphNode| weight_matmul(f, n).map(|p| p.arithmetic).filter(|&a| a != ComputeType::F32);
    let arithmetic = f.live_nodes().find_map(|(_, n)| dots(n)).unwrap_or(ComputeType::F32);
    let matrices = f.live_nodes().find_map(|(_, n)| chosen_experts(f, n)).unwrap_or(Dim::from(1));
    let parts = attention::max_slices(f);
    Ok(LaunchCost { bytes, ops, arithmetic, matrices, parts })
}

/// The cost of an attention that appends the rows of other groups to its caches.
pub fn of_appending(
    module: &Module,
    f: &Function,
    packings: &[Option<Packing>],
    rows: &[AppendedRows],
) -> Result<LaunchCost, LowerError> {
    let mut cost = of_group(module, f, packings)?;
    for group in rows {
        let of_rows = of_group(module, group.f, group.packings)?;
        let (read, made) = of_rows.bytes.split_at(group.f.inputs.len());
        for (&cache, bytes) in group.into.iter().zip(made) {
            cost.bytes[cache] = cost.bytes[cache].add(bytes);
        }
        let results = cost.bytes.len() - f.outputs.len();
        cost.bytes.splice(results..results, read.iter().cloned());
        cost.ops = cost.ops.add(&of_rows.ops);
    }
    Ok(cost)
}

/// A product with a matrix: the operand that holds it, and what its multiplications are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WeightMatmul {
    pub weight: ValueId,
    pub arithmetic: ComputeType,
    /// Dot products per multiplication: 16-bit activations are two planes of bytes.
    pub planes: i64,
}

/// `node` as a product; `None` for other ops.
pub fn weight_matmul(f: &Function, node: &GraphNode) -> Option<WeightMatmul> {
    let activations = f.ty(*node.inputs.first()?).dtype;
    let (weight, arithmetic) = match node.op {
        Op::MatMulI8 { .. } | Op::MatMulExpertsI8 { .. } => {
            let four = |&v: &ValueId| matches!(f.ty(v).dtype, DType::Packed(format) if format.bits < 8);
            let four = node.inputs.get(3).is_some_and(four);
            (3, if four { ComputeType::I4 } else { ComputeType::I8 })
        }
        Op::MatMul { .. } | Op::MatMulExperts { .. } if activations == DType::BF16 => (1, ComputeType::BF16),
        Op::MatMul { .. } | Op::MatMulExperts { .. } => (1, ComputeType::F32),
        _ => return None,
    };
    let integers = matches!(arithmetic, ComputeType::I8 | ComputeType::I4);
    let planes = if integers && activations == DType::I16 { 2 } else { 1 };
    Some(WeightMatmul { weight: *node.inputs.get(weight)?, arithmetic, planes })
}

/// The cost of a kernel that joins unfinished results of `between` bytes, given its outputs.
pub fn of_merge(f: &Function, between: &Dim, reads: &[usize]) -> Result<LaunchCost, LowerError> {
    let mut bytes = vec![between.clone()];
    for &v in reads.iter().map(|&i| &f.inputs[i]).chain(&f.outputs) {
        bytes.push(value_bytes(f.ty(v), None)?);
    }
    let (ops, arithmetic, matrices) = (between.floor_div(2), ComputeType::F32, Dim::from(1));
    Ok(LaunchCost { bytes, ops, arithmetic, matrices, parts: None })
}

/// Rows that are picked count, not the table that they are picked from.
fn read_bytes(f: &Function, v: ValueId, packing: Option<Packing>) -> Result<Dim, LowerError> {
    let all = value_bytes(f.ty(v), packing)?;
    let mut users = f.live_nodes().filter(|(_, n)| n.inputs.contains(&v)).map(|(_, n)| n);
    let (Some(user), None, Some(whole)) = (users.next(), users.next(), all.as_const()) else {
        return Ok(all);
    };
    Ok(match user.op {
        Op::Gather if user.inputs[0] == v => {
            let rows = f.ty(v).dims[0].as_const().unwrap_or(1).max(1);
            f.ty(user.inputs[1]).elements().scale(whole / rows)
        }
        Op::MatMulExperts { experts } | Op::MatMulExpertsI8 { experts, .. }
            if user.inputs[user.inputs.len() - 2] == v =>
        {
            let chosen = chosen_experts(f, user).unwrap_or(Dim::from(experts as i64));
            chosen.scale(whole / experts.max(1) as i64)
        }
        _ => all,
    })
}

/// Most experts that the rows of a product choose; `None` for other ops.
fn chosen_experts(f: &Function, node: &GraphNode) -> Option<Dim> {
    match node.op {
        Op::MatMulExperts { experts } | Op::MatMulExpertsI8 { experts, .. } => {
            let ids = f.ty(*node.inputs.last()?);
            Some(ids.elements().minimum(&Dim::from(experts as i64)))
        }
        _ => None,
    }
}

fn ops(module: &Module, f: &Function, node: &GraphNode) -> Dim {
    let results = || node.outputs.first().map_or(Dim::from(0), |&v| f.ty(v).elements());
    let operand = |i: usize| node.inputs.get(i).map_or(Dim::from(0), |&v| f.ty(v).elements());
    let depth = || f.ty(node.inputs[0]).dims.last().and_then(Dim::as_const).unwrap_or(0);
    let planes = || weight_matmul(f, node).map_or(1, |p| p.planes);
    let packed_depth = |weight: usize| f.ty(node.inputs[weight]).dims[1].as_const().unwrap_or(0);
    match node.op.family() {
        OpFamily::Structure => scan_ops(module, f, node),
        // Norms are decomposed before lowering.
        OpFamily::Elementwise | OpFamily::Norm => match node.op {
            Op::Constant { .. } | Op::Cast(_) => Dim::from(0),
            _ => results(),
        },
        OpFamily::Movement => Dim::from(0),
        OpFamily::Contraction | OpFamily::Experts => match node.op {
            Op::Reduce { .. } | Op::TopK { .. } => operand(0),
            Op::MatMulExpertsI8 { .. } => results().scale(2 * planes() * packed_depth(3)),
            _ => results().scale(2 * depth()),
        },
        OpFamily::Attention(a) => attention_ops(f, node, a),
        OpFamily::Quant => match node.op {
            Op::MatMulI8 { .. } => results().scale(2 * planes() * packed_depth(3)),
            Op::QuantizeRows { .. } => operand(0).scale(3),
            Op::Dequantize => results(),
            _ => operand(0),
        },
    }
}

fn attention_ops(f: &Function, node: &GraphNode, a: &AttentionOp) -> Dim {
    let (q, keys, values) = (f.ty(node.inputs[0]), f.ty(node.inputs[1]), f.ty(node.inputs[2]));
    let (n, t) = (&q.dims[0], &keys.dims[0]);
    // Query i sees t - n + 1 + i keys, if none ahead.
    let seen = match a.window {
        _ if a.ahead == AttentionOp::ALL => n.product(t),
        0 if a.ahead > 0 => n.product(t),
        0 => n.product(t).sub(&n.product(&n.sub(&Dim::from(1))).floor_div(2)),
        window => n.product(&t.minimum(&Dim::from((window + a.ahead) as i64))),
    };
    let size = |dims: &[Dim]| dims[2].as_const().unwrap_or(0);
    let heads = q.dims[1].as_const().unwrap_or(0);
    seen.scale(2 * heads * (size(&keys.dims) + size(&values.dims)))
}

/// The operations of the steps of a scan; other ops of the structure compute nothing.
fn scan_ops(module: &Module, f: &Function, node: &GraphNode) -> Dim {
    let Op::Scan { body, carries, .. } = &node.op else { return Dim::from(0) };
    let body = &module.functions[*body];
    let once = body.live_nodes().fold(Dim::from(0), |sum, (_, n)| sum.add(&ops(module, body, n)));
    let length = node.inputs.get(*carries).and_then(|&v| f.ty(v).dims.first().cloned());
    once.product(&length.unwrap_or(Dim::from(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_ir::dim::SizeSymbol;
    use mlcc_ir::dim::SymValues;
    use mlcc_ir::graph::FunctionKind;
    use mlcc_ir::ops::AttentionOp;
    use mlcc_ir::types::QuantFormat;
    use mlcc_ir::types::TensorType;

    const AT: SymValues = SymValues { n: 3, b: 1, past: 5 };

    fn ty(dims: Vec<Dim>) -> TensorType {
        TensorType { dtype: DType::F32, dims }
    }

    fn cost(op: Op, inputs: &[TensorType], packings: &[Option<Packing>]) -> LaunchCost {
        let module = Module::new("t");
        let mut f = Function::new("group", FunctionKind::Group);
        let values: Vec<ValueId> = inputs.iter().map(|t| f.add_input(t.clone())).collect();
        f.outputs = f.append(&module, op, &values).unwrap();
        of_group(&module, &f, packings).unwrap()
    }

    fn costs(op: Op, inputs: &[TensorType], packings: &[Option<Packing>]) -> (i64, Vec<i64>) {
        let cost = cost(op, inputs, packings);
        (cost.ops.eval(&AT), cost.bytes.iter().map(|d| d.eval(&AT)).collect())
    }

    #[test]
    fn products() {
        let inputs = [ty(vec![Dim::sym(SizeSymbol::N), 8.into()]), ty(vec![4.into(), 8.into()])];
        let (ops, bytes) = costs(Op::MatMul { transpose_b: true }, &inputs, &[None, Some(Packing::RowMajor)]);
        assert_eq!((ops, bytes), (2 * 3 * 8 * 4, vec![4 * 3 * 8, 4 * 4 * 8, 4 * 3 * 4]));
    }

    #[test]
    fn products_of_codes() {
        let packed = |format, codes| {
            let of = |dtype, dims| TensorType { dtype, dims };
            let (rows, groups) = (Dim::sym(SizeSymbol::N), Dim::from(1));
            let inputs = [
                of(codes, vec![rows.clone(), 32.into()]),
                ty(vec![rows.clone(), groups.clone()]),
                of(DType::I32, vec![rows, groups]),
                of(DType::Packed(format), vec![4.into(), 32.into()]),
            ];
            let cost = cost(Op::MatMulI8 { group: 32 }, &inputs, &[None, None, None, Some(Packing::Tile16)]);
            (cost.arithmetic, cost.ops.eval(&AT))
        };
        let once = 2 * 3 * 32 * 4;
        assert_eq!(packed(QuantFormat::Q8G32, DType::I8), (ComputeType::I8, once));
        assert_eq!(packed(QuantFormat::Q4G32, DType::I8), (ComputeType::I4, once));
        assert_eq!(packed(QuantFormat::Q4G32, DType::I16), (ComputeType::I4, 2 * once), "two planes");
    }

    #[test]
    fn rows_that_are_picked() {
        let ids = TensorType { dtype: DType::I32, dims: vec![Dim::sym(SizeSymbol::N)] };
        let inputs = [ty(vec![100.into(), 8.into()]), ids];
        let (ops, bytes) = costs(Op::Gather, &inputs, &[Some(Packing::RowMajor), None]);
        assert_eq!((ops, bytes), (0, vec![3 * 32, 3 * 4, 3 * 32]));
    }

    #[test]
    fn attention_sees_what_lies_before() {
        let t = Dim::sym(SizeSymbol::Past).add(&Dim::sym(SizeSymbol::N));
        let cache = ty(vec![t, 2.into(), 8.into()]);
        let inputs = [ty(vec![Dim::sym(SizeSymbol::N), 4.into(), 8.into()]), cache.clone(), cache];
        let (ops, bytes) = costs(Op::Attention(AttentionOp::causal(1.0)), &inputs, &[None; 3]);
        // Queries at positions 5, 6 and 7 see 6, 7 and 8 keys.
        assert_eq!(ops, 2 * 4 * (8 + 8) * (6 + 7 + 8));
        assert_eq!(bytes[1], 8 * 2 * 8 * 4);
    }
}
