//! Products that read one input become one product: their weights (parameters stored alike) are joined along
//! the rows, and each result is a slice. One pass over the activations, one launch and one barrier in place
//! of several. Where every result has a bias, these are joined too, and added before the slices are taken: in
//! the product's epilogue.
//!
//! Parameters are shared by the entry functions, so a set is merged only if every function that reads one of
//! them reads all of them in this way.

use crate::pattern::{MatchSite, OpKind, any, op};
use crate::rewrite::{NearMisses, RewriteBuilder, RewriteRule, apply};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, NodeId, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::module::{ModelParam, Module, ParamId, ParamSource};
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::{DType, TensorType};
use petgraph::Direction::Outgoing;
use petgraph::visit::IntoNeighborsDirected;
use std::collections::{BTreeMap, BTreeSet};

const PASS: &str = "merge_projections";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let merged: Vec<Vec<ParamId>> = agreed_sets(program);
    let mut joined: Vec<FusedProjection> = Vec::new();
    for set in merged.iter().cloned() {
        let biases = agreed_biases(&program.module, &set);
        let weight = join_params(program, &set);
        let bias = biases.map(|set| join_params(program, &set));
        ctx.note(format!("{} as one", program.module.params[weight].name));
        joined.push(FusedProjection { set, weight, bias });
    }
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let f = &program.module.functions[id];
        let merges: Vec<ProjectionSite> =
            joined.iter().filter_map(|joined| ProjectionSite::new(f, joined)).collect();
        if !merges.is_empty() {
            let rebuilt =
                replace_projections(&program.module, f, &merges).map_err(PassError::op_error(PASS))?;
            program.module.functions[id] = rebuilt;
        }
    }
    if !merged.is_empty() {
        let split = op(OpKind::Reshape, [op(OpKind::Slice, [any("x")]).named("slice")])
            .when("divides the columns of a slice into whole heads", |at| heads_of(at).is_some());
        let rewrite =
            RewriteRule { name: "heads of a slice as a slice of heads", pattern: split, build: slice_heads };
        apply(program, ctx, PASS, &[rewrite], NearMisses::Skip)?;
    }
    Ok(merged.len())
}

/// Columns of a head, where a slice of columns becomes `[.., heads, size]` and starts with a whole head.
fn heads_of(at: &MatchSite) -> Option<i64> {
    let slice = at.f.defining_node(at.node()?.inputs[0])?;
    let Op::Slice { axis, start, .. } = &slice.op else { return None };
    let (x, out) = (at.f.ty(slice.inputs[0]), at.ty());
    let size = out.dims.last()?.as_const().filter(|&s| s > 0)?;
    let whole = |d: &Dim| d.as_const().is_some_and(|d| d % size == 0);
    let splits = axis + 1 == x.rank() && out.rank() == x.rank() + 1 && out.dims[..*axis] == x.dims[..*axis];
    (splits && whole(start) && whole(&x.dims[*axis])).then_some(size)
}

/// The reshape is a view of the product, so that users read the slice where they need it.
fn slice_heads(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    let (Op::Slice { axis, start, .. }, Op::Reshape { dims }) =
        (b.captured_op("slice").clone(), b.root().clone())
    else {
        unreachable!("the pattern matches a reshape of a slice");
    };
    let x = b.get("x");
    let size = dims[axis + 1].clone();
    let by = size.as_const().unwrap_or(1);
    let mut all = b.f.ty(x).dims.clone();
    all[axis] = all[axis].floor_div(by);
    all.push(size);
    let heads = b.op(Op::Reshape { dims: all }, &[x])?;
    b.op(Op::Slice { axis, start: start.floor_div(by), len: dims[axis].clone() }, &[heads])
}

/// The inputs of a product and the parameter that it multiplies by; `None` if it is none that can be merged.
fn match_projection(f: &Function, id: NodeId) -> Option<(&Op, &[ValueId], ParamId)> {
    let node = &f.nodes[id];
    if !matches!(node.op, Op::MatMul { transpose_b: true } | Op::MatMulI8 { .. }) {
        return None;
    }
    let (weight, inputs) = node.inputs.split_last()?;
    match f.defining_node(*weight)?.op {
        Op::Param(p) if f.ty(*weight).rank() == 2 => Some((&node.op, inputs, p)),
        _ => None,
    }
}

/// The product that reads a parameter.
fn product_of(f: &Function, param: ParamId) -> Option<NodeId> {
    f.live_nodes().map(|(id, _)| id).find(|&id| match_projection(f, id).is_some_and(|(.., p)| p == param))
}

/// Sets of at least two parameters that every function agrees on, each in order of declaration.
fn agreed_sets(program: &LoweredProgram) -> Vec<Vec<ParamId>> {
    // Looked at once: a model of 100 layers has hundreds of sets in thousands of nodes.
    let functions = program.module.functions.values();
    let functions: Vec<_> = functions
        .map(|f| (param_uses(f), sets_of(program, f).into_iter().collect::<BTreeSet<_>>()))
        .collect();
    let sets: BTreeSet<&Vec<ParamId>> = functions.iter().flat_map(|(_, sets)| sets).collect();
    let agrees = |set: &Vec<ParamId>, (uses, sets): &(BTreeMap<ParamId, usize>, BTreeSet<Vec<ParamId>>)| {
        set.iter().all(|p| !uses.contains_key(p))
            || set.iter().all(|p| uses.get(p) == Some(&1)) && sets.contains(set)
    };
    sets.into_iter().filter(|set| functions.iter().all(|f| agrees(set, f))).cloned().collect()
}

/// The number of uses of each parameter in a function.
fn param_uses(f: &Function) -> BTreeMap<ParamId, usize> {
    let mut uses = BTreeMap::new();
    for v in f.live_nodes().flat_map(|(_, n)| &n.inputs).chain(&f.outputs) {
        if let Some(Op::Param(p)) = f.defining_node(*v).map(|n| &n.op) {
            *uses.entry(*p).or_insert(0) += 1;
        }
    }
    uses
}

/// Weights of products with equal op and inputs, stored and packed alike.
fn sets_of(program: &LoweredProgram, f: &Function) -> Vec<Vec<ParamId>> {
    type Key = (String, Vec<ValueId>, DType, String);
    let mut found: BTreeMap<Key, Vec<ParamId>> = BTreeMap::new();
    for (id, _) in f.live_nodes() {
        if let Some((op, inputs, p)) = match_projection(f, id) {
            let param = &program.module.params[p];
            let options = program.pack_options(&param.name);
            let alike = format!("{options:?} {:?} {:?}", param.packing, param.role);
            let key = (format!("{op:?}"), inputs.to_vec(), param.ty.dtype, alike);
            found.entry(key).or_default().push(p);
        }
    }
    let mut sets: Vec<Vec<ParamId>> = found.into_values().filter(|set| set.len() > 1).collect();
    sets.iter_mut().for_each(|set| set.sort_unstable());
    sets
}

/// The addition of a vector that is all that reads a product, and the parameter that it adds.
fn bias_of(f: &Function, product: NodeId) -> Option<(NodeId, ParamId)> {
    let out = *f.nodes[product].outputs.first()?;
    let mut users = f.neighbors_directed(product, Outgoing);
    let id = users.next()?;
    let add = &f.nodes[id];
    let only = users.next().is_none() && !f.outputs.contains(&out);
    let (Op::Binary(BinOp::Add), &[a, b]) = (&add.op, add.inputs.as_slice()) else { return None };
    let bias = if a == out { b } else { a };
    match f.defining_node(bias)?.op {
        Op::Param(p) if only && f.ty(bias).dims[..] == f.ty(out).dims[1..] => Some((id, p)),
        _ => None,
    }
}

/// The biases of merged products, where all have one and all functions agree on them.
fn agreed_biases(module: &Module, set: &[ParamId]) -> Option<Vec<ParamId>> {
    let mut agreed: Option<Vec<ParamId>> = None;
    for f in module.functions.values() {
        let nodes: Vec<NodeId> = set.iter().filter_map(|&p| product_of(f, p)).collect();
        if nodes.is_empty() {
            continue;
        }
        let here = nodes.iter().map(|&n| bias_of(f, n).map(|(_, p)| p)).collect::<Option<Vec<_>>>()?;
        if agreed.get_or_insert_with(|| here.clone()) != &here {
            return None;
        }
    }
    let alike = |a: &ParamId, b: &ParamId| {
        let (a, b) = (&module.params[*a], &module.params[*b]);
        (a.ty.dtype, a.role, a.packing) == (b.ty.dtype, b.role, b.packing)
    };
    agreed.filter(|biases| biases.windows(2).all(|pair| alike(&pair[0], &pair[1])))
}

/// Declares the parameter that joins a set.
fn join_params(program: &mut LoweredProgram, set: &[ParamId]) -> ParamId {
    let parts: Vec<&ModelParam> = set.iter().map(|&p| &program.module.params[p]).collect();
    let rows = parts.iter().fold(Dim::from(0), |sum, p| sum.add(&p.ty.dims[0]));
    let names: Vec<&str> = parts.iter().map(|p| p.name.as_str()).collect();
    let joined = ModelParam {
        name: names.join("+"),
        ty: TensorType::new(
            parts[0].ty.dtype,
            std::iter::once(rows).chain(parts[0].ty.dims[1..].iter().cloned()),
        ),
        role: parts[0].role,
        source: joined_source(&parts),
        packing: parts[0].packing,
    };
    let options = program.pack_options(&parts[0].name);
    program.pack_options.insert(joined.name.clone(), options);
    program.module.params.push(joined)
}

/// The sources, concatenated; where one has parts of ranks, those of each rank.
fn joined_source(params: &[&ModelParam]) -> ParamSource {
    let of_rank = |rank| params.iter().filter_map(|p| p.source.of_rank(rank).cloned()).collect();
    let ranks = |param: &&ModelParam| match &param.source {
        ParamSource::Ranks(parts) => Some(parts.len()),
        _ => None,
    };
    match params.iter().find_map(ranks) {
        Some(ranks) => {
            ParamSource::Ranks((0..ranks).map(|rank| ParamSource::Concat(of_rank(rank))).collect())
        }
        None => ParamSource::Concat(params.iter().map(|p| p.source.clone()).collect()),
    }
}

/// A set of parameters, and those that take its place.
struct FusedProjection {
    set: Vec<ParamId>,
    weight: ParamId,
    bias: Option<ParamId>,
}

/// A set in a function: its products, in the order of the joined rows, and what adds their biases, if those
/// are joined.
struct ProjectionSite<'a> {
    joined: &'a FusedProjection,
    products: Vec<NodeId>,
    biased: Vec<NodeId>,
}

impl<'a> ProjectionSite<'a> {
    /// `None` where the function does not read the parameters.
    fn new(f: &Function, joined: &'a FusedProjection) -> Option<ProjectionSite<'a>> {
        let products: Option<Vec<NodeId>> = joined.set.iter().map(|&p| product_of(f, p)).collect();
        let products = products?;
        let biased = match joined.bias {
            Some(_) => products.iter().filter_map(|&n| bias_of(f, n).map(|(add, _)| add)).collect(),
            None => vec![],
        };
        Some(ProjectionSite { joined, products, biased })
    }

    /// The slices of the one product that takes the place of all, each for a product.
    fn slice_outputs(
        &self,
        module: &Module,
        (f, out): (&Function, &mut Function),
        op: &Op,
        inputs: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let weight = out.append(module, Op::Param(self.joined.weight), &[])?[0];
        let mut operands = inputs.to_vec();
        if let Some(last) = operands.last_mut() {
            *last = weight;
        }
        let mut product = out.append(module, op.clone(), &operands)?[0];
        if let Some(bias) = self.joined.bias {
            let bias = out.append(module, Op::Param(bias), &[])?[0];
            product = out.append(module, Op::Binary(BinOp::Add), &[product, bias])?[0];
        }
        let axis = out.ty(product).rank() - 1;
        let mut start = Dim::from(0);
        let mut slices = Vec::new();
        for &n in &self.products {
            let len = f.ty(f.nodes[n].outputs[0]).dims[axis].clone();
            let slice = Op::Slice { axis, start: start.clone(), len: len.clone() };
            slices.push(out.append(module, slice, &[product])?[0]);
            start = start.add(&len);
        }
        Ok(slices)
    }
}

/// Replaces products, and what adds their biases, by slices of joined ones: of all sets at once, because a
/// deep model has hundreds.
fn replace_projections(
    module: &Module,
    f: &Function,
    merges: &[ProjectionSite<'_>],
) -> Result<Function, OpError> {
    let places = |nodes: fn(&ProjectionSite<'_>) -> Vec<NodeId>| -> BTreeMap<NodeId, (usize, usize)> {
        let of_merge = |(m, merge)| nodes(merge).into_iter().enumerate().map(move |(i, n)| (n, (m, i)));
        merges.iter().enumerate().flat_map(of_merge).collect()
    };
    let (products, biased) = (places(|m| m.products.clone()), places(|m| m.biased.clone()));
    let mut slices: Vec<Vec<ValueId>> = vec![Vec::new(); merges.len()];
    f.rebuild(|out, id, op, inputs| {
        if let Some(&(merge, at)) = biased.get(&id) {
            return Ok(Some(vec![slices[merge][at]]));
        }
        let Some(&(merge, at)) = products.get(&id) else { return Ok(None) };
        if slices[merge].is_empty() {
            slices[merge] = merges[merge].slice_outputs(module, (f, out), op, inputs)?;
        }
        Ok(Some(vec![slices[merge][at]]))
    })
}
