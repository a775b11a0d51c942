//! Establishes what lowering needs and models need not give: products of matrices have rank 2, and a new
//! state value is not the memory of another state or of a parameter. Ops that no kernel can compute are
//! refused here, by name.

use crate::pattern::{MatchSite, OpKind, any, op};
use crate::rewrite::{NearMisses, RewriteBuilder, RewriteRule, apply};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, FunctionKind, ValueId};
use mlcc_ir::module::{Module, StateId};
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::DType;
use mlcc_kernels::lower::scan::SCAN_BODIES;
use mlcc_kernels::scan::{is_channelwise, shape_of};

const PASS: &str = "legalize";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    check_supported(&program.module)?;
    let flatten = RewriteRule {
        name: "product of batched rows as one matrix",
        pattern: op(OpKind::MatMul, [any("x"), any("w")])
            .when("has a transposed weight of rank 2", |at| {
                let transposed = at.node().is_some_and(|n| n.op == Op::MatMul { transpose_b: true });
                transposed && at.operand_type(1).is_some_and(|w| w.rank() == 2)
            })
            .when("has more than two axes with a size that can be joined", |at| {
                at.operand_type(0).is_some_and(|x| x.rank() > 2) && rows_of(at).is_some()
            }),
        build: flatten,
    };
    let mut changes = apply(program, ctx, PASS, &[flatten], NearMisses::Report)?;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let f = &program.module.functions[id];
        let (rebuilt, n) = own_states(&program.module, f).map_err(PassError::op_error(PASS))?;
        program.module.functions[id] = rebuilt;
        changes += n;
    }
    Ok(changes)
}

/// Refuses ops that no kernel computes.
fn check_supported(module: &Module) -> Result<(), PassError> {
    let unsupported = |what: String, hint: &str| Err(PassError::Unsupported { what, hint: hint.into() });
    for param in module.params.values() {
        if param.ty.rank() > 2 {
            let what = format!("parameter {} of type {}", param.name, param.ty);
            return unsupported(
                what,
                "weights have at most two axes: split it, or join axes where it is declared",
            );
        }
    }
    for f in module.functions.values() {
        for (_, node) in f.live_nodes() {
            let Op::Scan { body, carries, .. } = node.op else { continue };
            let body = &module.functions[body];
            let all_f32 = node.inputs.iter().chain(&node.outputs).all(|&v| f.ty(v).dtype == DType::F32);
            let has_kernel = is_channelwise(body) || shape_of(body, carries).is_some();
            if !has_kernel || !all_f32 {
                let what = format!("the scan in @{} with body @{}", f.name, body.name);
                return unsupported(what, SCAN_BODIES);
            }
        }
    }
    Ok(())
}

/// All leading axes of the first operand as one.
fn rows_of(at: &MatchSite) -> Option<Dim> {
    let x = at.operand_type(0)?;
    leading(&x.dims)
}

fn leading(dims: &[Dim]) -> Option<Dim> {
    dims[..dims.len().checked_sub(1)?].iter().try_fold(Dim::from(1), |a, d| a.mul(d))
}

fn flatten(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    let (x, w) = (b.get("x"), b.get("w"));
    let mut dims = b.f.ty(x).dims.clone();
    let k = dims.last().cloned().unwrap_or(Dim::from(1));
    let rows = leading(&dims).expect("the guard has joined them");
    let matrix = b.op(Op::Reshape { dims: vec![rows, k] }, &[x])?;
    let product = b.op(b.root().clone(), &[matrix, w])?;
    if let Some(last) = dims.last_mut() {
        *last = b.f.ty(w).dims[0].clone();
    }
    b.op(Op::Reshape { dims }, &[product])
}

/// The origin of a value's memory, if no kernel makes it.
enum ValueOrigin {
    State(StateId),
    Other,
}

fn value_origin(f: &Function, mut v: ValueId) -> Option<ValueOrigin> {
    loop {
        match f.defining_node(v).map(|n| (&n.op, &n.inputs)) {
            None => return Some(ValueOrigin::Other),
            Some((Op::Reshape { .. }, inputs)) => v = inputs[0],
            Some((Op::StateRead(s), _)) => return Some(ValueOrigin::State(*s)),
            Some((Op::Param(_), _)) => return Some(ValueOrigin::Other),
            Some(_) => return None,
        }
    }
}

/// A state that is written with its own old value is not written; one that gets memory from outside of this
/// step gets a copy of it.
fn own_states(module: &Module, f: &Function) -> Result<(Function, usize), OpError> {
    let mut changes = 0;
    if f.kind != FunctionKind::Entry {
        return Ok((f.clone(), 0));
    }
    let rebuilt = f.rebuild(|out, _, op, inputs| {
        let Op::StateWrite(state) = op else { return Ok(None) };
        match value_origin(out, inputs[0]) {
            None => return Ok(None),
            Some(ValueOrigin::State(s)) if s == *state => {}
            Some(_) => {
                // A cast to the same type is a copy: `canonicalize`, which removes such casts, has run.
                let copy = out.append(module, Op::Cast(out.ty(inputs[0]).dtype), inputs)?;
                out.append(module, op.clone(), &copy)?;
            }
        }
        changes += 1;
        Ok::<_, OpError>(Some(vec![]))
    })?;
    Ok((rebuilt, changes))
}
