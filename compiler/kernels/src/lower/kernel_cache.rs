//! Kernels by what they compute: equal groups share one.

use super::attention::keys_of_row;
use super::cost::{self, LaunchCost};
use super::error::LowerError;
use super::group::lower_appending;
use super::kernel::{ArgContract, GroupKernel, TemplateResult, finish_kernel};
use super::operands::{AppendedRows, InPages, elements_of_pages, page_table_param};
use super::plan::Partition;
use crate::attention;
use crate::inline::PagedBuffer;
use crate::machine::MachineKind;
use crate::pages::{PageLayout, emit_append, identity_function, row_elements};
use crate::params::KernelTarget;
use crate::scan::{self, matrix::ChunkScan};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::{Function, GraphNode};
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::module::{FuncId, Module};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{Packing, TensorType};
use mlcc_kernel_lang::Recorder;

/// Kernels made so far: a group function is lowered once per combination of parameter packings.
pub(super) struct KernelCache<'a> {
    pub module: &'a Module,
    pub target: &'a KernelTarget,
    /// The page layout of the caches, if there are any.
    pub pages: Option<PageLayout>,
    made: Vec<(KernelKey, usize)>,
    pub kernels: Vec<GroupKernel>,
    pub costs: Vec<LaunchCost>,
    /// For each kernel of an attention: the keys that a row looks at.
    pub keys: Vec<Option<Dim>>,
    /// For each kernel: the one that finishes its results.
    pub merges: Vec<Option<CachedMerge>>,
}

/// See [`MergeKernel`](super::kernel::MergeKernel).
#[derive(Clone)]
pub(super) struct CachedMerge {
    pub kernel: usize,
    pub bytes: Dim,
    pub reads: Vec<usize>,
}

/// A group function, with the packings of its parameters.
#[derive(Clone, PartialEq)]
pub(super) struct PackedGroup {
    pub f: FuncId,
    pub packings: Vec<Option<Packing>>,
    /// For each input that is a cache in pages: elements of a row.
    pub rows: Vec<Option<i64>>,
}

/// A group whose results become rows of caches, inputs `into` of an attention.
#[derive(Clone, PartialEq)]
pub(super) struct AppendGroup {
    pub group: PackedGroup,
    pub into: Vec<usize>,
}

#[derive(PartialEq)]
enum KernelKey {
    Group(PackedGroup),
    /// An attention that appends what the groups make to its caches.
    Appending(PackedGroup, Vec<AppendGroup>),
    /// A group for one row.
    OneRow(PackedGroup),
    /// Type, alignment of source and destination.
    Copy(TensorType, [u32; 2]),
    /// Rows of this type to a cache in pages.
    Append(TensorType),
    /// A cache out of its pages as a tensor of this type; `.1`: elements of a row.
    Gather(TensorType, i64),
}

impl<'a> KernelCache<'a> {
    pub fn new(module: &'a Module, target: &'a KernelTarget) -> Self {
        let (made, kernels, costs) = (Vec::new(), Vec::new(), Vec::new());
        let pages = PageLayout::for_module(module, target.arch);
        KernelCache { module, target, pages, made, kernels, costs, keys: Vec::new(), merges: Vec::new() }
    }

    pub fn group_kernel(&mut self, group: PackedGroup) -> Result<usize, LowerError> {
        let f = &self.module.functions[group.f];
        let (packings, pages) = (group.packings.clone(), group.rows.clone());
        self.get(KernelKey::Group(group), f, f.name.clone(), (&packings, &pages), &[])
    }

    /// The kernel of an attention that appends `rows` to its caches.
    pub fn append_kernel(&mut self, group: PackedGroup, rows: &[AppendGroup]) -> Result<usize, LowerError> {
        let f = &self.module.functions[group.f];
        let (packings, pages) = (group.packings.clone(), group.rows.clone());
        self.get(KernelKey::Appending(group, rows.to_vec()), f, f.name.clone(), (&packings, &pages), rows)
    }

    /// The kernel of a group for one row, if it has another one for that: attention of one query, a step of a
    /// scan over matrices.
    pub fn one_row(&mut self, group: &PackedGroup) -> Result<Option<usize>, LowerError> {
        let several = &self.module.functions[group.f];
        let is_other = attention::find_attention(several).is_some() || self.steps_matrices_otherwise(several);
        if !is_other || self.target.batch_invariant {
            return Ok(None);
        }
        let f = one_row(several);
        let name = format!("{}_row", several.name);
        self.get(KernelKey::OneRow(group.clone()), &f, name, (&group.packings, &group.rows), &[]).map(Some)
    }

    /// True for a scan over matrices of which a single step is computed in another way than several: on a CPU
    /// always, on a GPU where several are products.
    fn steps_matrices_otherwise(&self, f: &Function) -> bool {
        let is_other = |node: &GraphNode| match node.op {
            Op::Scan { body, carries, .. } => {
                let body = &self.module.functions[body];
                let of_gpu = matches!(MachineKind::for_target(self.target), MachineKind::Gpu { .. });
                scan::shape_of(body, carries).is_some_and(|shape| {
                    let length = &f.ty(node.inputs[carries]).dims[0];
                    !of_gpu || ChunkScan::analyze(body, (carries, length), shape, self.target).is_some()
                })
            }
            _ => false,
        };
        f.live_nodes().any(|(_, node)| is_other(node))
    }

    /// The group that a kernel is of.
    pub fn group_of(&self, kernel: usize) -> Option<&PackedGroup> {
        self.made.iter().find_map(|(key, index)| match key {
            KernelKey::Group(group) if *index == kernel => Some(group),
            KernelKey::Group(_) | KernelKey::Appending(..) | KernelKey::OneRow(_) => None,
            KernelKey::Copy(..) | KernelKey::Append(_) | KernelKey::Gather(..) => None,
        })
    }

    /// A kernel that copies a tensor between places of these alignments.
    pub fn copy_kernel(&mut self, ty: &TensorType, align: [u32; 2]) -> Result<usize, LowerError> {
        let f = identity_function(self.module, "copy", ty).map_err(LowerError::internal)?;
        let index =
            self.get(KernelKey::Copy(ty.clone(), align), &f, name_of("copy", ty), (&[None], &[None]), &[])?;
        let kernel = &mut self.kernels[index].kernel;
        for (i, align) in align.into_iter().enumerate() {
            let buf = kernel.params[i];
            kernel.bufs[buf].align = align;
        }
        Ok(index)
    }

    /// A kernel that returns a cache as a tensor of type `ty` outside of pages: for readers that cannot read
    /// it there.
    pub fn gather_kernel(&mut self, ty: &TensorType, row: i64) -> Result<usize, LowerError> {
        let f = identity_function(self.module, "gather", ty).map_err(LowerError::internal)?;
        let key = KernelKey::Gather(ty.clone(), row);
        self.get(key, &f, name_of("gather", ty), (&[None], &[Some(row)]), &[])
    }

    /// A kernel that appends rows of type `ty` to a cache in pages: rows, table, cache.
    pub fn append_rows_kernel(&mut self, ty: &TensorType) -> Result<usize, LowerError> {
        let key = KernelKey::Append(ty.clone());
        if let Some(kernel) = self.known(&key) {
            return Ok(kernel);
        }
        let unfit = || LowerError::internal(format!("rows of type {ty} are none of a cache in pages"));
        let layout = self.pages.as_ref().ok_or_else(unfit)?;
        let row = row_elements(ty).ok_or_else(unfit)?;
        let f = identity_function(self.module, "append", ty).map_err(LowerError::internal)?;
        let mut kb = KernelBuilder::new(self.free_name(name_of("append", ty)));
        let rows = kb.param("rows", ty.dtype, ty.elements(), ParamAccess::In, 64);
        let table = page_table_param(&mut kb, layout);
        let cache =
            kb.param("cache", ty.dtype, elements_of_pages(layout, ty.dtype, row), ParamAccess::InOut, 64);
        let paged = PagedBuffer { table, bytes: layout.bytes as i64, row };
        let machine = MachineKind::for_target(self.target);
        let plan = match machine {
            MachineKind::Cpu { lanes, .. } => format!("{lanes} lanes"),
            MachineKind::Gpu { .. } => "a block for each row".into(),
        };
        Recorder::within(&mut kb, |k| {
            let (n, past) = (k.dim(&ty.dims[0]), k.dim(&Dim::sym(SizeSymbol::Past)));
            emit_append(k, (n, past), rows, (cache, paged), machine);
        });
        let arg = |access, partition| ArgContract { access, partition, in_place: vec![] };
        let of_rows = Some(Partition::Rows(ty.dims[0].clone()));
        let args =
            vec![arg(ParamAccess::In, of_rows), arg(ParamAccess::In, None), arg(ParamAccess::InOut, None)];
        let emitted = TemplateResult { args, generator: "pages", plan };
        let made = finish_kernel(kb, &f, emitted, self.target)?;
        let mut cost = cost::of_group(self.module, &f, &[None])?;
        cost.bytes.insert(1, Dim::from(0));
        self.kernels.push(made);
        self.costs.push(cost);
        self.keys.push(None);
        self.merges.push(None);
        self.made.push((key, self.kernels.len() - 1));
        Ok(self.kernels.len() - 1)
    }

    fn known(&self, key: &KernelKey) -> Option<usize> {
        self.made.iter().find(|(k, _)| k == key).map(|(_, kernel)| *kernel)
    }

    fn free_name(&self, name: String) -> String {
        let taken = |name: &str| self.kernels.iter().any(|k| k.kernel.name == name);
        let variants = (1..).map(|i| format!("{name}_v{i}"));
        std::iter::once(name.clone()).chain(variants).find(|n| !taken(n)).unwrap_or(name)
    }

    fn get(
        &mut self,
        key: KernelKey,
        f: &Function,
        name: String,
        (packings, pages): (&[Option<Packing>], &[Option<i64>]),
        rows: &[AppendGroup],
    ) -> Result<usize, LowerError> {
        if let Some(kernel) = self.known(&key) {
            return Ok(kernel);
        }
        let name = self.free_name(name);
        let module = self.module;
        let appended = rows.iter().map(|append| AppendedRows {
            f: &module.functions[append.group.f],
            packings: &append.group.packings,
            into: &append.into,
        });
        let appended: Vec<AppendedRows> = appended.collect();
        let pages = self.pages.as_ref().map(|layout| InPages { layout, rows: pages });
        let mut made = lower_appending(module, f, &name, (packings, pages), &appended, self.target)?;
        let merge = made.merge.take();
        self.kernels.push(made);
        let mut cost = cost::of_appending(module, f, packings, &appended)?;
        if pages.is_some_and(|pages| pages.rows.iter().any(Option::is_some)) {
            // The table, between inputs and results.
            cost.bytes.insert(cost.bytes.len() - f.outputs.len(), Dim::from(0));
        }
        if let Some(merge) = &merge
            && f.outputs.len() > 1
        {
            // One unfinished result represents all of them.
            cost.bytes.truncate(cost.bytes.len() - f.outputs.len());
            cost.bytes.push(merge.bytes.clone());
        }
        self.costs.push(cost);
        self.keys.push(keys_of_row(f));
        self.merges.push(None);
        let index = self.kernels.len() - 1;
        self.made.push((key, index));
        if let Some(merge) = merge {
            self.costs.push(cost::of_merge(f, &merge.bytes, &merge.reads)?);
            self.keys.push(None);
            let (kernel, bytes, reads) = (self.kernels.len(), merge.bytes, merge.reads);
            self.merges[index] = Some(CachedMerge { kernel, bytes, reads });
            self.kernels.push(*merge.kernel);
            self.merges.push(None);
        }
        Ok(index)
    }
}

/// A group function with `n` = 1. Codes of attention are for several queries.
fn one_row(f: &Function) -> Function {
    let one = Dim::from(1);
    let at_one = |dim: &mut Dim| *dim = dim.substitute(SizeSymbol::N, &one);
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

/// Name of a kernel that moves a tensor.
fn name_of(what: &str, ty: &TensorType) -> String {
    format!("{what}_{}", ty.to_string().replace(|c: char| !c.is_alphanumeric(), "_"))
}
