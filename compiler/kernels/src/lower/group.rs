//! One group function to one kernel: which template fits.

use super::attention::attention_group;
use super::contraction::{self, Contraction};
use super::error::LowerError;
use super::experts;
use super::kernel::{ArgContract, GroupKernel, finish_kernel};
use super::operands::{AppendedRows, InPages, bind_inputs, result_name};
use super::{rows, scan};
use crate::attention::{self, decode::NewRows};
use crate::params::KernelTarget;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::{Function, GraphNode};
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::Packing;
use mlcc_kernel_lang::interleave_steps;
use mlcc_target::Arch;

/// The template that a group takes.
pub enum KernelTemplate<'a> {
    Scan(&'a GraphNode),
    Attention(&'a GraphNode),
    Experts(&'a GraphNode),
    Contraction(Contraction),
    Rows,
}

/// Chooses the template; `packings` as in [`lower_group`].
pub fn choose_template<'a>(
    f: &'a Function,
    packings: &[Option<Packing>],
    target: &KernelTarget,
) -> KernelTemplate<'a> {
    if let Some((_, node)) = f.live_nodes().find(|(_, n)| matches!(n.op, Op::Scan { .. })) {
        return KernelTemplate::Scan(node);
    }
    if let Some(node) = attention::find_attention(f) {
        return KernelTemplate::Attention(node);
    }
    if let Some(node) = experts::find_experts(f, packings, target) {
        return KernelTemplate::Experts(node);
    }
    match contraction::find_contraction(f, packings, target) {
        Some(contraction) => KernelTemplate::Contraction(contraction),
        None => KernelTemplate::Rows,
    }
}

/// True if the kernel of a group reads caches in their pages.
pub(super) fn reads_pages(f: &Function, template: &KernelTemplate) -> bool {
    match template {
        KernelTemplate::Attention(_) => true,
        KernelTemplate::Rows => !f.live_nodes().any(|(_, n)| matches!(n.op, Op::QuantizeRows { .. })),
        KernelTemplate::Scan(_) | KernelTemplate::Experts(_) | KernelTemplate::Contraction(_) => false,
    }
}

/// True if a group reads codes that are in blocks and planes, as only the generators of products know them.
fn reads_codes(f: &Function, target: &KernelTarget) -> bool {
    target.arch != Arch::Nvptx && f.live_nodes().any(|(_, n)| matches!(n.op, Op::MatMulI8 { .. }))
}

/// Lowers a group function. `packings[i]` is the packing of input `i` if it is a parameter.
pub fn lower_group(
    module: &Module,
    f: &Function,
    name: &str,
    packings: &[Option<Packing>],
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    lower_appending(module, f, name, (packings, None), &[], target)
}

/// Lowers a group function; if it is an attention, the results of the groups `rows` are appended to its
/// caches first. The inputs of these groups are arguments after the inputs of `f`; then comes the table of
/// pages, if there is one.
pub fn lower_appending(
    module: &Module,
    f: &Function,
    name: &str,
    (packings, pages): (&[Option<Packing>], Option<InPages>),
    rows: &[AppendedRows],
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let mut kb = KernelBuilder::new(name);
    let written = |i: usize| rows.iter().any(|group| group.into.contains(&i));
    let (inputs, mut inliner) = bind_inputs(&mut kb, f, packings, pages, target, written)?;
    let chosen = choose_template(f, packings, target);
    if let KernelTemplate::Attention(node) = chosen {
        let mut appended = Vec::new();
        for group in rows {
            let (_, inliner) = bind_inputs(&mut kb, group.f, group.packings, None, target, |_| false)?;
            let caches = group.into.iter().map(|&i| inputs[i]);
            let stores = group.f.outputs.iter().copied().zip(caches).collect();
            appended.push(NewRows { inliner, stores, pages: Vec::new() });
        }
        if let Some(pages) = pages {
            pages.bind(&mut kb, &mut inliner);
        }
        for (rows, group) in appended.iter_mut().zip(rows) {
            let of = |&i: &usize| Some((inputs[i], inliner.pages_of(f.inputs[i])?));
            rows.pages = group.into.iter().filter_map(of).collect();
        }
        return attention_group(kb, f, node, inliner, &appended, target);
    }
    if let KernelTemplate::Experts(node) = chosen
        && let Some(choice) = experts::long_choice(f, node, target)
    {
        return experts::choose_long(kb, f, node, choice, &inliner, target);
    }
    if let KernelTemplate::Scan(node) = chosen
        && let Some(chunks) = scan::chunks_of((module, f, node), target)?
    {
        return scan::in_chunks(kb, (module, f, node), &chunks, &inputs, target);
    }
    let table = pages.and_then(|pages| pages.bind(&mut kb, &mut inliner));
    let mut outputs = Vec::new();
    for &v in &f.outputs {
        let ty = f.ty(v);
        outputs.push(kb.param(result_name(f, v), ty.dtype, ty.elements(), ParamAccess::Out, 64));
    }
    let product = matches!(chosen, KernelTemplate::Contraction(_)) && target.arch != Arch::Nvptx;
    let mut emitted = match chosen {
        KernelTemplate::Attention(_) => return Err(LowerError::internal("an attention is lowered above")),
        KernelTemplate::Experts(node) => experts::emit(&mut kb, f, node, inliner, &inputs, &outputs, target)?,
        KernelTemplate::Scan(node) => {
            scan::emit(&mut kb, (module, f, node), inliner, (&inputs, &outputs), target)?
        }
        KernelTemplate::Contraction(c) => {
            contraction::emit(&mut kb, f, &c, inliner, &inputs, &outputs, target)?
        }
        KernelTemplate::Rows if reads_codes(f, target) => {
            let what = format!("group {} has an integer product beside what is no epilogue of it", f.name);
            return Err(LowerError::internal(what));
        }
        KernelTemplate::Rows => rows::emit(&mut kb, f, inliner, &outputs, target)?,
    };
    if let (Some(_), Some(pages)) = (table, pages) {
        let caches = emitted.args.iter_mut().zip(pages.rows).filter(|(_, row)| row.is_some());
        caches.for_each(|(arg, _)| arg.partition = None);
        let arg = ArgContract { access: ParamAccess::In, partition: None, in_place: vec![] };
        emitted.args.insert(f.inputs.len(), arg);
    }
    let mut lowered = finish_kernel(kb, f, emitted, target)?;
    if product {
        lowered.kernel = interleave_steps(lowered.kernel);
    }
    Ok(lowered)
}
