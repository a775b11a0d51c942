//! Kernels by what they compute: equal groups share one.

use super::attention::keys_of_row;
use super::cost::{self, Cost};
use super::error::LowerError;
use super::group::lower_appending;
use super::kernel::GroupKernel;
use super::operands::Appended;
use crate::attention;
use crate::params::KernelTarget;
use mlcc_ir::dim::{Dim, Sym};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::module::{FuncId, Module};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{Packing, TensorType};
use mlcc_target::Arch;

/// Kernels made so far: a group function is lowered once per combination of parameter packings.
pub(super) struct KernelCache<'a> {
    pub module: &'a Module,
    pub target: &'a KernelTarget,
    made: Vec<(Key, usize)>,
    pub kernels: Vec<GroupKernel>,
    pub costs: Vec<Cost>,
    /// By kernel, of an attention: keys that a row looks at.
    pub keys: Vec<Option<Dim>>,
    /// By kernel: the one that joins what it left, and the bytes between them.
    pub merges: Vec<Option<(usize, Dim)>>,
}

/// A group function, with the packings of its parameters.
#[derive(Clone, PartialEq)]
pub(super) struct PackedGroup {
    pub f: FuncId,
    pub packings: Vec<Option<Packing>>,
}

/// A group whose results become rows of caches, inputs `into` of an attention.
#[derive(Clone, PartialEq)]
pub(super) struct Append {
    pub group: PackedGroup,
    pub into: Vec<usize>,
}

#[derive(PartialEq)]
enum Key {
    Group(PackedGroup),
    /// An attention that appends what the groups make to its caches.
    Appending(PackedGroup, Vec<Append>),
    /// A group for one row.
    OneRow(PackedGroup),
    /// Type, alignment of source and destination.
    Copy(TensorType, [u32; 2]),
}

impl<'a> KernelCache<'a> {
    pub fn new(module: &'a Module, target: &'a KernelTarget) -> Self {
        let (made, kernels, costs) = (Vec::new(), Vec::new(), Vec::new());
        KernelCache { module, target, made, kernels, costs, keys: Vec::new(), merges: Vec::new() }
    }

    pub fn group(&mut self, group: PackedGroup) -> Result<usize, LowerError> {
        let f = &self.module.functions[group.f];
        let packings = group.packings.clone();
        self.get(Key::Group(group), f, f.name.clone(), &packings, &[])
    }

    /// The kernel of an attention that appends `rows` to its caches.
    pub fn appending(&mut self, group: PackedGroup, rows: &[Append]) -> Result<usize, LowerError> {
        let f = &self.module.functions[group.f];
        let packings = group.packings.clone();
        self.get(Key::Appending(group, rows.to_vec()), f, f.name.clone(), &packings, rows)
    }

    /// The kernel of a group for one row, if it has another one for that: attention of one query.
    pub fn one_row(&mut self, group: &PackedGroup) -> Result<Option<usize>, LowerError> {
        let several = &self.module.functions[group.f];
        if attention::find(several).is_none()
            || self.target.arch == Arch::Nvptx
            || self.target.batch_invariant
        {
            return Ok(None);
        }
        let f = one_row(several);
        let name = format!("{}_row", several.name);
        self.get(Key::OneRow(group.clone()), &f, name, &group.packings, &[]).map(Some)
    }

    /// The group that a kernel is of.
    pub fn group_of(&self, kernel: usize) -> Option<&PackedGroup> {
        self.made.iter().find_map(|(key, index)| match key {
            Key::Group(group) if *index == kernel => Some(group),
            Key::Group(_) | Key::Appending(..) | Key::OneRow(_) | Key::Copy(..) => None,
        })
    }

    /// A kernel that copies a tensor between places of these alignments.
    pub fn copy(&mut self, ty: &TensorType, align: [u32; 2]) -> Result<usize, LowerError> {
        let mut f = Function::new("copy", FunctionKind::Group);
        let input = f.add_input(ty.clone());
        let out = f.append(self.module, Op::Reshape { dims: ty.dims.clone() }, &[input]);
        f.outputs = out.map_err(|e| LowerError::internal(e.to_string()))?;
        let name = format!("copy_{}", ty.to_string().replace(|c: char| !c.is_alphanumeric(), "_"));
        let index = self.get(Key::Copy(ty.clone(), align), &f, name, &[None], &[])?;
        let kernel = &mut self.kernels[index].kernel;
        for (i, align) in align.into_iter().enumerate() {
            let buf = kernel.params[i];
            kernel.bufs[buf].align = align;
        }
        Ok(index)
    }

    fn get(
        &mut self,
        key: Key,
        f: &Function,
        name: String,
        packings: &[Option<Packing>],
        rows: &[Append],
    ) -> Result<usize, LowerError> {
        if let Some((_, kernel)) = self.made.iter().find(|(k, _)| *k == key) {
            return Ok(*kernel);
        }
        let taken = |name: &str| self.kernels.iter().any(|k| k.kernel.name == name);
        let variants = (1..).map(|i| format!("{name}_v{i}"));
        let name = std::iter::once(name.clone()).chain(variants).find(|n| !taken(n)).unwrap_or(name);
        let module = self.module;
        let appended = rows.iter().map(|append| Appended {
            f: &module.functions[append.group.f],
            packings: &append.group.packings,
            into: &append.into,
        });
        let appended: Vec<Appended> = appended.collect();
        let mut made = lower_appending(module, f, &name, packings, &appended, self.target)?;
        let merge = made.merge.take();
        self.kernels.push(made);
        self.costs.push(cost::of_appending(module, f, packings, &appended)?);
        self.keys.push(keys_of_row(f));
        self.merges.push(None);
        let index = self.kernels.len() - 1;
        self.made.push((key, index));
        if let Some(merge) = merge {
            self.costs.push(cost::of_merge(f, &merge.bytes)?);
            self.keys.push(None);
            self.merges[index] = Some((self.kernels.len(), merge.bytes));
            self.kernels.push(*merge.kernel);
            self.merges.push(None);
        }
        Ok(index)
    }
}

/// A group function with `n` = 1. Codes of attention are for several queries.
fn one_row(f: &Function) -> Function {
    let one = Dim::from(1);
    let at_one = |dim: &mut Dim| *dim = dim.substitute(Sym::N, &one);
    let mut f = f.clone();
    for id in f.values.ids().collect::<Vec<_>>() {
        f.values[id].ty.dims.iter_mut().for_each(at_one);
    }
    for id in f.nodes.ids().collect::<Vec<_>>() {
        match &mut f.nodes[id].op {
            Op::Reshape { dims } => dims.iter_mut().for_each(at_one),
            Op::Slice { start, len, .. } | Op::Iota { start, len } => {
                at_one(start);
                at_one(len);
            }
            Op::Attention(attention) => attention.codes = false,
            _ => {}
        }
    }
    f
}
