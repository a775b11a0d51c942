//! GPU kernels side by side in one grid: some of its blocks are those of one kernel, the next ones those of
//! another.

use crate::builder::KernelBuilder;
use crate::dim::Dim;
use crate::entity::EntityId;
use crate::kernel::*;
use crate::step::LaunchGrid;
use crate::types::DType;

/// One of the kernels, and how many blocks it has in x, y and z.
#[derive(Clone, Copy)]
pub struct GridMember<'a> {
    pub kernel: &'a Kernel,
    pub blocks: &'a [Dim; 3],
}

/// The grid of several kernels, with the blocks of one after those of another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FusedGrid {
    /// The axis along which the blocks of one come after those of another.
    axis: usize,
    /// The number of blocks of each part along this axis; all blocks of a part whose number is constant.
    along: Vec<i64>,
    pub blocks: [Dim; 3],
}

impl FusedGrid {
    /// `None` where there is no axis with a constant number of blocks of every part that agrees with the
    /// others on the other two.
    pub fn for_members(parts: &[&[Dim; 3]]) -> Option<FusedGrid> {
        (0..3).find_map(|axis| FusedGrid::along_axis(parts, axis))
    }

    fn along_axis(parts: &[&[Dim; 3]], axis: usize) -> Option<FusedGrid> {
        let of = |blocks: &&[Dim; 3]| constant(blocks).or_else(|| blocks[axis].as_const());
        let along: Vec<i64> = parts.iter().map(of).collect::<Option<_>>()?;
        let varying = parts.iter().filter(|blocks| constant(blocks).is_none());
        let mut blocks = [0; 3].map(|_| Dim::from(1));
        for part in varying {
            for other in (0..3).filter(|&other| other != axis && part[other].as_const() != Some(1)) {
                if blocks[other].as_const() == Some(1) {
                    blocks[other] = part[other].clone();
                }
                if blocks[other] != part[other] {
                    return None;
                }
            }
        }
        let all = along.iter().try_fold(0i64, |sum, part| sum.checked_add(*part))?;
        blocks[axis] = Dim::from(all);
        LaunchGrid::axis_fault(axis, all).is_none().then_some(FusedGrid { axis, along, blocks })
    }
}

/// The number of blocks, where it is constant.
fn constant(blocks: &[Dim; 3]) -> Option<i64> {
    blocks.iter().try_fold(1i64, |product, blocks| product.checked_mul(blocks.as_const()?))
}

/// True if threads meet inside of a loop over them, which then has to be as wide as a block.
pub fn syncs_in_threads(kernel: &Kernel) -> bool {
    fn meets(body: &[Stmt], in_threads: bool) -> bool {
        body.iter().any(|stmt| match stmt {
            Stmt::Barrier => in_threads,
            Stmt::For { kind, body, .. } => meets(body, in_threads || matches!(kind, ForKind::Thread(_))),
            Stmt::If { then, otherwise, .. } => meets(then, in_threads) || meets(otherwise, in_threads),
            _ => false,
        })
    }
    meets(&kernel.body, false)
}

/// The kernels as one: its parameters are those of the first, then those of the second, and so on; sizes of
/// one symbol are one. `None` for a kernel that is no nest of block loops, which the verifier refuses.
pub fn fuse_kernels(name: &str, parts: &[GridMember], layout: &FusedGrid) -> Option<Kernel> {
    let nests: Vec<BlockNest> =
        parts.iter().map(|part| BlockNest::of_kernel(part.kernel)).collect::<Option<_>>()?;
    let mut kb = KernelBuilder::new(name);
    let mut copies: Vec<CopiedKernel> =
        parts.iter().map(|part| CopiedKernel::declare(part.kernel, &mut kb)).collect();
    share_memory(&mut kb, parts, &mut copies);
    let mut loops = Vec::new();
    let mut indices = [kb.int(0); 3];
    let FusedGrid { axis, along, blocks } = layout;
    for at in (0..3).filter(|at| at == axis || blocks[*at].as_const() != Some(1)) {
        let extent = match blocks[at].as_const() {
            Some(constant) => kb.int(constant),
            None => {
                let of = parts.iter().position(|part| part.blocks[at] == blocks[at])?;
                let (_, _, extent) = *nests[of].loops.iter().find(|(_, axis, _)| *axis == at)?;
                copies[of].expr(&mut kb, extent)
            }
        };
        let (open, index) = kb.begin_for("block", extent, ForKind::Block(at as u8))?;
        indices[at] = index;
        loops.push(open);
    }
    let mut first = 0;
    let mut bodies = Vec::new();
    for (((part, nest), copied), along) in parts.iter().zip(&nests).zip(&mut copies).zip(along) {
        let own = kb.add_int(indices[*axis], -first);
        let own = match constant(part.blocks) {
            Some(_) => split_index(&mut kb, own, part.blocks),
            None => [0, 1, 2].map(|at| if at == *axis { own } else { indices[at] }),
        };
        for &(var, at, _) in &nest.loops {
            copied.vars[var.index()] = Some(own[at]);
        }
        let fixed = |at: usize| part.blocks[at].as_const() == Some(1) || constant(part.blocks).is_some();
        let once = (0..3).filter(|&at| at != *axis && fixed(at) && blocks[at].as_const() != Some(1));
        let zero = kb.int(0);
        let inside = once.map(|at| kb.binary(BinOp::Eq, indices[at], zero)).collect();
        kb.open_block();
        nest.between.iter().for_each(|stmt| copied.stmt(&mut kb, stmt));
        copied.stmts(&mut kb, nest.body);
        bodies.push((first + along, inside, kb.close_block()));
        first += along;
    }
    select_member(&mut kb, indices[*axis], bodies);
    loops.into_iter().rev().for_each(|open| kb.end_for(open));
    Some(kb.finish())
}

/// The position of block `number` in x, y and z, x first, of `blocks` blocks.
fn split_index(kb: &mut KernelBuilder, number: ExprId, blocks: &[Dim; 3]) -> [ExprId; 3] {
    let (mut rest, mut place) = (number, [kb.int(0); 3]);
    let several: Vec<usize> = (0..3).filter(|&at| blocks[at].as_const() != Some(1)).collect();
    for (position, &at) in several.iter().enumerate() {
        if position + 1 == several.len() {
            place[at] = rest;
        } else {
            let extent = kb.int(blocks[at].as_const().unwrap_or(1));
            (place[at], rest) = (kb.rem(rest, extent), kb.div(rest, extent));
        }
    }
    place
}

/// The body of the part in whose blocks the index is: the first one that ends behind it.
fn select_member(kb: &mut KernelBuilder, index: ExprId, bodies: Vec<(i64, Vec<ExprId>, Vec<Stmt>)>) {
    let mut otherwise = Vec::new();
    for (number, (end, inside, body)) in bodies.into_iter().enumerate().rev() {
        let all = inside.into_iter().reduce(|a, b| kb.binary(BinOp::And, a, b));
        let body = match all {
            Some(cond) => vec![Stmt::If { cond, then: body, otherwise: Vec::new() }],
            None => body,
        };
        if otherwise.is_empty() && number > 0 {
            // The last one has all that is left.
            otherwise = body;
            continue;
        }
        let end = kb.int(end);
        let cond = kb.lt(index, end);
        otherwise = vec![Stmt::If { cond, then: body, otherwise }];
    }
    otherwise.into_iter().for_each(|stmt| kb.push(stmt));
}

/// Block loops of a kernel, from outside to inside.
struct BlockNest<'a> {
    /// Index, axis and extent.
    loops: Vec<(VarId, usize, ExprId)>,
    /// Values and buffers that are declared between the loops.
    between: Vec<&'a Stmt>,
    body: &'a [Stmt],
}

impl<'a> BlockNest<'a> {
    fn of_kernel(kernel: &'a Kernel) -> Option<BlockNest<'a>> {
        let mut nest = BlockNest { loops: Vec::new(), between: Vec::new(), body: &kernel.body };
        while let Some((Stmt::For { var, extent, kind: ForKind::Block(axis), body }, before)) =
            nest.body.split_last()
        {
            if !before.iter().all(|stmt| matches!(stmt, Stmt::Let { .. } | Stmt::Alloc { .. })) {
                return None;
            }
            nest.loops.push((*var, usize::from(*axis), *extent));
            nest.between.extend(before);
            nest.body = body;
        }
        (!nest.loops.is_empty()).then_some(nest)
    }
}

/// The declarations of a kernel in another one.
struct CopiedKernel<'a> {
    kernel: &'a Kernel,
    bufs: Vec<Option<BufId>>,
    vars: Vec<Option<ExprId>>,
    exprs: Vec<Option<ExprId>>,
}

impl<'a> CopiedKernel<'a> {
    /// Parameters and sizes; everything else follows where it is used.
    fn declare(kernel: &'a Kernel, kb: &mut KernelBuilder) -> CopiedKernel<'a> {
        let mut copied = CopiedKernel {
            kernel,
            bufs: vec![None; kernel.bufs.len()],
            vars: vec![None; kernel.vars.len()],
            exprs: vec![None; kernel.exprs.len()],
        };
        for &param in &kernel.params {
            let decl = &kernel.bufs[param];
            copied.bufs[param.index()] = Some(kb.declare_param(renamed(decl)));
        }
        for &(sym, var) in &kernel.dims {
            copied.vars[var.index()] = Some(kb.sym(sym));
        }
        copied
    }

    fn stmts(&mut self, kb: &mut KernelBuilder, body: &[Stmt]) {
        body.iter().for_each(|stmt| self.stmt(kb, stmt));
    }

    fn block(&mut self, kb: &mut KernelBuilder, body: &[Stmt]) -> Vec<Stmt> {
        kb.open_block();
        self.stmts(kb, body);
        kb.close_block()
    }

    fn stmt(&mut self, kb: &mut KernelBuilder, stmt: &Stmt) {
        let made = match stmt {
            Stmt::For { var, extent, kind, body } => {
                let extent = self.expr(kb, *extent);
                let var = self.var(kb, *var);
                Stmt::For { var, extent, kind: *kind, body: self.block(kb, body) }
            }
            Stmt::If { cond, then, otherwise } => {
                let cond = self.expr(kb, *cond);
                let then = self.block(kb, then);
                Stmt::If { cond, then, otherwise: self.block(kb, otherwise) }
            }
            Stmt::Let { var, value } => {
                let value = self.expr(kb, *value);
                Stmt::Let { var: self.var(kb, *var), value }
            }
            Stmt::Store { buf, index, value, mask } => Stmt::Store {
                buf: self.buf(kb, *buf),
                index: self.expr(kb, *index),
                value: self.expr(kb, *value),
                mask: mask.map(|mask| self.expr(kb, mask)),
            },
            Stmt::Instr { instr, args } => {
                let args = args.iter().map(|&arg| self.expr(kb, arg)).collect();
                Stmt::Instr { instr: *instr, args }
            }
            // Declared before all parts.
            Stmt::Alloc { buf } if self.kernel.bufs[*buf].space == MemorySpace::Shared => return,
            Stmt::Alloc { buf } => Stmt::Alloc { buf: self.buf(kb, *buf) },
            Stmt::Barrier | Stmt::Commit | Stmt::Wait { .. } => stmt.clone(),
        };
        kb.push(made);
    }

    fn buf(&mut self, kb: &mut KernelBuilder, buf: BufId) -> BufId {
        *self.bufs[buf.index()].get_or_insert_with(|| kb.declare(renamed(&self.kernel.bufs[buf])))
    }

    /// A variable that is assigned in the body.
    fn var(&mut self, kb: &mut KernelBuilder, var: VarId) -> VarId {
        let VarDecl { name, ty } = &self.kernel.vars[var];
        let new = kb.new_var(without_number(name), *ty);
        self.vars[var.index()] = Some(kb.var(new));
        new
    }

    fn expr(&mut self, kb: &mut KernelBuilder, id: ExprId) -> ExprId {
        if let Some(new) = self.exprs[id.index()] {
            return new;
        }
        let mut node = self.kernel.exprs.expr(id).clone();
        node.for_each_child_mut(|child| *child = self.expr(kb, *child));
        let new = match &mut node {
            Expr::Var(var) => self.vars[var.index()],
            Expr::Load { buf, .. } => {
                *buf = self.buf(kb, *buf);
                None
            }
            _ => None,
        };
        let new = new.unwrap_or_else(|| kb.intern(node, self.kernel.exprs.ty(id)));
        self.exprs[id.index()] = Some(new);
        new
    }
}

fn renamed(decl: &BufDecl) -> BufDecl {
    BufDecl { name: without_number(&decl.name).into(), ..decl.clone() }
}

/// The name without the number that tells equal names apart in the text of one kernel: another kernel has
/// other numbers.
fn without_number(name: &str) -> &str {
    match name.rsplit_once('_') {
        Some((rest, number)) if !rest.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) => {
            without_number(rest)
        }
        _ => name,
    }
}

/// Shared memory: a block runs one part alone, so all parts have the same buffers, each as long as the
/// longest of them.
fn share_memory(kb: &mut KernelBuilder, parts: &[GridMember], copies: &mut [CopiedKernel]) {
    let mut shared: Vec<BufDecl> = Vec::new();
    let mut places = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        let mut taken = vec![false; shared.len()];
        for (buf, decl) in part.kernel.bufs.iter().filter(|(_, decl)| decl.space == MemorySpace::Shared) {
            let free =
                |dtype: DType| shared.iter().zip(&taken).position(|(s, taken)| s.dtype == dtype && !taken);
            let place = free(decl.dtype).unwrap_or(shared.len());
            match shared.get_mut(place) {
                Some(known) => {
                    known.len = longer_dim(&known.len, &decl.len);
                    known.align = known.align.max(decl.align);
                    taken[place] = true;
                }
                None => {
                    shared.push(renamed(decl));
                    taken.push(true);
                }
            }
            places.push((number, buf, place));
        }
    }
    let made: Vec<BufId> = shared.into_iter().map(|decl| kb.declare(decl)).collect();
    for &buf in &made {
        kb.push(Stmt::Alloc { buf });
    }
    for (number, buf, place) in places {
        copies[number].bufs[buf.index()] = Some(made[place]);
    }
}

fn longer_dim(a: &Dim, b: &Dim) -> Dim {
    if a.as_const() < b.as_const() { b.clone() } else { a.clone() }
}
