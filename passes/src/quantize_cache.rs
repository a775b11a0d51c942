//! Storage types of caches. Rows of keys and values are converted where they are appended; users get f32
//! back, except that attention reads half-precision rows itself and unpacks codes itself (fusion copies the
//! arithmetic into it). Numbers change here, as in `quantize`.

use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::module::{ModelState, Module, StateId};
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::{DType, TensorType};
use std::collections::BTreeMap;

const PASS: &str = "quantize_cache";

/// Storage format of the rows of caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheType {
    #[default]
    F32,
    F16,
    BF16,
    /// Codes -127..=127 with one f32 scale per row and head.
    I8,
}

impl CacheType {
    pub const ALL: [CacheType; 4] = [CacheType::F32, CacheType::F16, CacheType::BF16, CacheType::I8];
    pub fn name(self) -> &'static str {
        self.dtype().name()
    }
    /// The type of that name.
    pub fn from_name(name: &str) -> Option<CacheType> {
        CacheType::ALL.into_iter().find(|c| c.name() == name)
    }
    /// Type of the stored elements.
    pub fn dtype(self) -> DType {
        match self {
            CacheType::F32 => DType::F32,
            CacheType::F16 => DType::F16,
            CacheType::BF16 => DType::BF16,
            CacheType::I8 => DType::I8,
        }
    }
}

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let wanted = ctx.options.kv_cache;
    let module = &mut program.module;
    let mut scales: BTreeMap<StateId, Option<StateId>> = BTreeMap::new();
    if wanted != CacheType::F32 {
        for id in module.states.ids().collect::<Vec<_>>() {
            let state = &module.states[id];
            let fits = state.ty.dtype == DType::F32 && state.ty.rank() == 3 && state.init == 0.0;
            if !module.is_cache(id) {
                continue;
            }
            if !fits {
                ctx.note(format!("{} stays {}: not rows of heads in f32", state.name, state.ty));
                continue;
            }
            let scale = (wanted == CacheType::I8).then(|| {
                let dims = state.ty.dims[..2].to_vec();
                let name = format!("{}.scale", state.name);
                ModelState { name, ty: TensorType { dtype: DType::F32, dims }, init: 0.0 }
            });
            module.states[id].ty.dtype = wanted.dtype();
            scales.insert(id, scale.map(|s| module.states.push(s)));
        }
    }
    if scales.is_empty() {
        return Ok(0);
    }
    ctx.note(format!("{} caches as {}", scales.len(), wanted.name()));
    for id in module.functions.ids().collect::<Vec<_>>() {
        let module = &program.module;
        let rebuilt = module.functions[id].rebuild(|out, _, op, inputs| match op {
            Op::CacheAppend(s) if scales.contains_key(s) => {
                let all = match scales[s] {
                    None => append_halves(module, out, *s, inputs[0]),
                    Some(scale) => append_codes(module, out, (*s, scale), inputs[0]),
                };
                all.map(|v| Some(vec![v]))
            }
            Op::Attention(_) => {
                let rows: Vec<ValueId> = inputs[1..3].iter().map(|&v| before_cast(out, v)).collect();
                if out.ty(rows[0]).dtype != out.ty(rows[1]).dtype {
                    return Ok(None);
                }
                let operands = [&inputs[..1], &rows, &inputs[3..]].concat();
                out.append(module, op.clone(), &operands).map(Some)
            }
            _ => Ok::<_, OpError>(None),
        });
        let rebuilt = rebuilt.map_err(PassError::op_error(PASS))?;
        program.module.functions[id] = rebuilt;
    }
    Ok(scales.len())
}

/// The value that a cast from half precision casts.
fn before_cast(f: &Function, v: ValueId) -> ValueId {
    match f.defining_node(v) {
        Some(node) if node.op == Op::Cast(DType::F32) => {
            let x = node.inputs[0];
            if matches!(f.ty(x).dtype, DType::F16 | DType::BF16) { x } else { v }
        }
        _ => v,
    }
}

fn append_halves(module: &Module, f: &mut Function, s: StateId, rows: ValueId) -> Result<ValueId, OpError> {
    let mut op = |op: Op, v: ValueId| Ok::<_, OpError>(f.append(module, op, &[v])?[0]);
    let rows = op(Op::Cast(module.states[s].ty.dtype), rows)?;
    let all = op(Op::CacheAppend(s), rows)?;
    op(Op::Cast(DType::F32), all)
}

/// One group per row and head.
fn append_codes(
    module: &Module,
    f: &mut Function,
    (codes, scales): (StateId, StateId),
    rows: ValueId,
) -> Result<ValueId, OpError> {
    let dims = f.ty(rows).dims.clone();
    let [n, heads, size] = &dims[..] else { return Ok(rows) };
    let group = size.as_const().unwrap_or(1) as usize;
    let mut op = |op: Op, inputs: &[ValueId]| Ok::<_, OpError>(f.append(module, op, inputs)?[0]);
    let flat = Op::Reshape { dims: vec![n.product(heads), size.clone()] };
    let flat = op(flat, &[rows])?;
    let scale = op(Op::GroupScale { group, bits: 8 }, &[flat])?;
    let code = op(Op::GroupQuantize { group, bits: 8, part: group }, &[flat, scale])?;
    let code = op(Op::Reshape { dims: dims.clone() }, &[code])?;
    let scale = op(Op::Reshape { dims: vec![n.clone(), heads.clone()] }, &[scale])?;
    let code = op(Op::CacheAppend(codes), &[code])?;
    let scale = op(Op::CacheAppend(scales), &[scale])?;
    let code = op(Op::Cast(DType::F32), &[code])?;
    let all = Dim::sym(mlcc_ir::dim::SizeSymbol::Past).add(n);
    let scale = op(Op::Reshape { dims: vec![all, heads.clone(), Dim::from(1)] }, &[scale])?;
    op(Op::Binary(BinOp::Mul), &[code, scale])
}
