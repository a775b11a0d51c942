//! Values of a group in memory: their sizes, layouts, and the parameters of the kernel that hold them.

use super::error::LowerError;
use crate::inline::{Binding, Inliner, PagedBuffer};
use crate::pages::PageLayout;
use crate::params::KernelTarget;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BinOp, BufId, ParamAccess};
use mlcc_ir::ops::Op;
use mlcc_ir::step::PAGE_ROWS;
use mlcc_ir::types::{DType, Packing, TensorType};
use mlcc_quant::TensorLayout;
use mlcc_target::Arch;
use std::collections::HashMap;

/// Element type of the buffer that holds a value of type `ty` (`u8` for packed parameters).
pub fn buffer_dtype(ty: &TensorType) -> DType {
    if ty.dtype.is_packed() { DType::U8 } else { ty.dtype }
}

/// Bytes of a value in memory.
pub fn value_bytes(ty: &TensorType, packing: Option<Packing>) -> Result<Dim, LowerError> {
    match (packing, ty.dtype.bytes()) {
        // Plain contiguous elements need no layout, whatever the number of axes.
        (None | Some(Packing::RowMajor), Some(bytes)) => Ok(ty.elements().scale(bytes as i64)),
        (packing, _) => {
            let layout = param_layout(ty, packing.unwrap_or(Packing::RowMajor))?;
            Ok(Dim::from(layout.bytes()))
        }
    }
}

/// Layout of a parameter; vectors count as one row.
pub fn param_layout(ty: &TensorType, packing: Packing) -> Result<TensorLayout, LowerError> {
    let sizes: Option<Vec<usize>> =
        ty.dims.iter().map(|d| d.as_const().and_then(|d| usize::try_from(d).ok())).collect();
    let (n, k) = match sizes.as_deref() {
        Some([]) => (1, 1),
        Some([k]) => (1, *k),
        Some([n, k]) => (*n, *k),
        _ => return Err(LowerError::internal(format!("a parameter of type {ty}"))),
    };
    Ok(TensorLayout::new(ty.dtype, packing, n, k)?)
}

/// Inputs of a group that are caches in pages.
#[derive(Clone, Copy)]
pub struct InPages<'a> {
    pub layout: &'a PageLayout,
    /// For each input: elements of a row of the cache. `None` for other inputs.
    pub rows: &'a [Option<i64>],
}

impl InPages<'_> {
    /// The parameter of their table, after the inputs; binds them with it. Nothing, if there are none.
    pub(super) fn bind(&self, kb: &mut KernelBuilder, inliner: &mut Inliner<'_, 'static>) -> Option<BufId> {
        if self.rows.iter().all(Option::is_none) {
            return None;
        }
        let table = page_table_param(kb, self.layout);
        for (input, &row) in inliner.f.inputs.iter().zip(self.rows) {
            if let (Some(row), Some(Binding::Buffer { pages, .. })) = (row, inliner.bindings.get_mut(input)) {
                *pages = Some(PagedBuffer { table, bytes: self.layout.bytes as i64, row });
            }
        }
        Some(table)
    }
}

/// The parameter of a table of pages.
pub(super) fn page_table_param(kb: &mut KernelBuilder, layout: &PageLayout) -> BufId {
    kb.param("page_table", DType::I32, Dim::from(layout.pages as i64), ParamAccess::In, 4)
}

/// Elements of the buffer of a cache in pages, from its rows in page 0 to those in the last one that
/// sequences need: a pool may have more of them.
pub(super) fn elements_of_pages(layout: &PageLayout, dtype: DType, row: i64) -> Dim {
    let page = layout.bytes as i64 / dtype.bytes().unwrap_or(1) as i64;
    Dim::sym(SizeSymbol::B).scale(layout.pages as i64 * page).add(&Dim::from(PAGE_ROWS as i64 * row - page))
}

/// Rows that a group makes, as [`lower_appending`](super::group::lower_appending) takes it.
pub struct AppendedRows<'a> {
    pub f: &'a Function,
    pub packings: &'a [Option<Packing>],
    /// The input of the attention that is the cache, for each of the results.
    pub into: &'a [usize],
}

/// Parameters of a kernel for the inputs of a group, and their bindings. `written` ones are inputs and
/// outputs.
pub(super) fn bind_inputs<'a>(
    kb: &mut KernelBuilder,
    f: &'a Function,
    packings: &[Option<Packing>],
    pages: Option<InPages>,
    target: &KernelTarget,
    written: impl Fn(usize) -> bool,
) -> Result<(Vec<BufId>, Inliner<'a, 'static>), LowerError> {
    let (mut inputs, mut bindings) = (Vec::new(), HashMap::new());
    for (i, &v) in f.inputs.iter().enumerate() {
        let ty = f.ty(v);
        let dtype = buffer_dtype(ty);
        let bytes = value_bytes(ty, packings[i])?;
        let in_pages = pages.and_then(|pages| Some((pages.layout, (*pages.rows.get(i)?)?)));
        let len = if let Some((layout, row)) = in_pages {
            elements_of_pages(layout, dtype, row)
        } else if ty.dtype.is_packed() || packings[i].is_some() {
            bytes.floor_div(dtype.bytes().unwrap_or(1) as i64)
        } else {
            ty.elements()
        };
        let access = if written(i) { ParamAccess::InOut } else { ParamAccess::In };
        // A single element may lie anywhere: the temperature is a field of the call.
        let align = if len.as_const() == Some(1) { dtype.bytes().unwrap_or(1) as u32 } else { 64 };
        let buf = kb.param(&operand_name(f, v, packings[i]), dtype, len, access, align);
        let plain = matches!(packings[i], None | Some(Packing::RowMajor)) && !ty.dtype.is_packed();
        let layout =
            if plain { None } else { Some(param_layout(ty, packings[i].unwrap_or(Packing::RowMajor))?) };
        bindings.insert(v, Binding::Buffer { buf, layout, pages: None });
        inputs.push(buf);
    }
    let lanes = if target.arch == Arch::Nvptx { 1 } else { target.f32_lanes() };
    let inliner = Inliner { reduce_lanes: lanes, ..Inliner::new(f, bindings) };
    Ok((inputs, inliner))
}

/// The role of an input in its group: the name of its buffer in the text of the kernel.
fn operand_name(f: &Function, v: ValueId, packing: Option<Packing>) -> String {
    let named = |node: &GraphNode| (0..node.inputs.len()).any(|i| operand_of(&node.op, i).is_some());
    let unnamed = match packing {
        _ if f.live_nodes().any(|(_, node)| named(node)) => "operand",
        Some(_) => "w",
        None => "x",
    };
    name_of_use(f, v).unwrap_or_else(|| unnamed.into())
}

/// The role of a value for the first op that has names for its operands, through elementwise ops. Next to
/// rows of that op, a factor of fewer elements is their scales.
fn name_of_use(f: &Function, v: ValueId) -> Option<String> {
    let users = f.live_nodes().filter(|(_, node)| node.inputs.contains(&v));
    users.into_iter().find_map(|(_, node)| {
        let at = node.inputs.iter().position(|&i| i == v)?;
        if let Some(name) = operand_of(&node.op, at) {
            return Some(name.into());
        }
        let (views, scales) = match node.op {
            Op::Reshape { .. } | Op::Dequantize => (true, false),
            Op::Binary(BinOp::Mul) => (true, f.ty(v).dims != f.ty(node.outputs[0]).dims),
            _ => (node.op.is_elementwise(), false),
        };
        let name = views.then(|| name_of_use(f, node.outputs[0])).flatten()?;
        Some(if scales { format!("{}_scales", name.trim_end_matches('s')) } else { name })
    })
}

/// The role of operand `i` for an op that is not elementwise.
fn operand_of(op: &Op, i: usize) -> Option<&'static str> {
    let names: &[&str] = match op {
        Op::MatMul { .. } => &["x", "w"],
        Op::MatMulI8 { .. } => &["x", "x_scales", "x_starts", "w"],
        Op::MatMulExperts { .. } => &["x", "w", "ids"],
        Op::MatMulExpertsI8 { .. } => &["x", "x_scales", "x_starts", "w", "ids"],
        Op::Attention(a) => {
            let others = [
                (a.slopes_input(), "slopes"),
                (a.prefix_input(), "prefix"),
                (a.span_input(), "first_keys"),
                (a.sink_input(), "q_for_sinks"),
                (a.null_input(), "null_logits"),
                (a.terms_input(), "terms"),
            ];
            let other = others.into_iter().find(|(at, _)| *at == Some(i)).map(|(_, name)| name);
            return other.or(["q", "keys", "values"].get(i).copied());
        }
        Op::Gather => &["table", "ids"],
        Op::Scan { carries, .. } if i < *carries => return Some("state"),
        Op::Scan { carries, seqs, .. } if i < carries + seqs => return Some("sequence"),
        Op::Scan { .. } => return Some("constant"),
        _ => &[],
    };
    names.get(i).copied()
}

/// The role of a result for the op that makes it, likewise.
pub(super) fn result_name(f: &Function, v: ValueId) -> &'static str {
    let Some(node) = f.defining_node(v) else { return "y" };
    let at = node.outputs.iter().position(|&o| o == v).unwrap_or(0);
    let names: &[&str] = match node.op {
        Op::QuantizeRows { .. } => &["codes", "scales", "starts"],
        Op::TopK { .. } => &["values", "ids"],
        Op::Scan { carries, .. } if at < carries => return "new_state",
        _ => &[],
    };
    names.get(at).copied().unwrap_or("y")
}
