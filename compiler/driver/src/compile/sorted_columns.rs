//! Packed weights whose groups are no neighbours (`g_idx` of GPTQ with `desc_act`): their columns are sorted
//! by group, and so are the inputs of the products that read them. Weights that read the same input in the
//! same order share the sorted input.

use std::collections::BTreeMap;

use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::module::{ModelParam, Module, ParamId, ParamRole, ParamSource};
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::{DType, TensorType};
use mlcc_passes::PassError;

use super::{BuildError, BuildOptions, BuildSource, keep};

/// Sorts what `--quant keep` keeps and the user's policy does not decide about.
pub(super) fn sort_columns(
    module: &mut Module,
    source: &BuildSource,
    options: &BuildOptions,
) -> Result<(), BuildError> {
    let mut orders: Vec<Vec<usize>> = Vec::new();
    let mut sorted: BTreeMap<ParamId, usize> = BTreeMap::new();
    for (id, param) in module.params.iter() {
        let ParamSource::Tensor(name) = &param.source else { continue };
        if param.ty.rank() != 2
            || options.policy.rule_for(&param.name).is_some()
            || !is_only_multiplied(module, id)
        {
            continue;
        }
        let Some(order) = source.checkpoint.column_order(name) else { continue };
        if !keep::holds_sorted(&source.checkpoint, name) {
            continue;
        }
        let known = orders.iter().position(|other| *other == order);
        sorted.insert(id, known.unwrap_or(orders.len()));
        if known.is_none() {
            orders.push(order);
        }
    }
    if sorted.is_empty() {
        return Ok(());
    }
    for (&id, &number) in &sorted {
        let source = &mut module.params[id].source;
        *source = ParamSource::Columns(orders[number].clone(), Box::new(source.clone()));
    }
    // f32 holds the numbers of columns: there are less than 2^24.
    let table = |(number, order): (usize, &Vec<usize>)| ModelParam {
        name: format!("columns.{number}"),
        ty: TensorType::new(DType::F32, [order.len()]),
        role: ParamRole::Vector,
        source: ParamSource::Values(order.iter().map(|&column| column as f32).collect()),
        packing: None,
    };
    let tables: Vec<ModelParam> = orders.iter().enumerate().map(table).collect();
    let tables: Vec<ParamId> = tables.into_iter().map(|table| module.params.push(table)).collect();
    for id in module.functions.ids().collect::<Vec<_>>() {
        let mut made: BTreeMap<(ValueId, usize), ValueId> = BTreeMap::new();
        let rebuilt = module.functions[id].rebuild(|out, _, op, inputs| {
            let (Op::MatMul { .. }, &[x, w]) = (op, inputs) else { return Ok(None) };
            let Some(&number) = weight_param(out, w).and_then(|id| sorted.get(&id)) else { return Ok(None) };
            let x = match made.get(&(x, number)) {
                Some(&made) => made,
                None => {
                    let value = permute_columns(module, out, x, tables[number])?;
                    made.insert((x, number), value);
                    value
                }
            };
            out.append(module, op.clone(), &[x, w]).map(Some)
        });
        module.functions[id] = rebuilt.map_err(PassError::op_error("sort"))?;
    }
    Ok(())
}

/// `x: [n, k]` with its columns in the order of a table.
fn permute_columns(
    module: &Module,
    f: &mut Function,
    x: ValueId,
    table: ParamId,
) -> Result<ValueId, OpError> {
    let mut op = |op, inputs: &[ValueId]| f.append(module, op, inputs).map(|outputs| outputs[0]);
    let order = op(Op::Param(table), &[])?;
    let order = op(Op::Cast(DType::I32), &[order])?;
    let turned = op(Op::Permute { perm: vec![1, 0] }, &[x])?;
    let picked = op(Op::Gather, &[turned, order])?;
    op(Op::Permute { perm: vec![1, 0] }, &[picked])
}

/// The parameter that a product reads, as it is or transposed.
fn weight_param(f: &Function, w: ValueId) -> Option<ParamId> {
    let node = f.defining_node(w)?;
    match &node.op {
        Op::Param(id) => Some(*id),
        Op::Permute { perm } if perm == &[1, 0] => weight_param(f, node.inputs[0]),
        _ => None,
    }
}

/// True if a parameter is used only in products of matrices.
fn is_only_multiplied(module: &Module, id: ParamId) -> bool {
    let fits = |f: &Function| {
        let is = |v: ValueId| weight_param(f, v) == Some(id);
        f.live_nodes().all(|(_, node)| match &node.op {
            Op::Permute { perm } => perm == &[1, 0] || !node.inputs.iter().any(|&v| is(v)),
            Op::MatMul { .. } => {
                !is(node.inputs[0]) && (!is(node.inputs[1]) || f.ty(node.inputs[0]).rank() == 2)
            }
            _ => !node.inputs.iter().any(|&v| is(v)),
        }) && !f.outputs.iter().any(|&v| is(v))
    };
    module.functions.values().all(fits)
}
