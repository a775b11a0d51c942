//! Steps as GPU launch lists, and the launch shape of a kernel.
//!
//! Arguments are the same in every call: addresses of buffers, then of what the kernel reads for its sizes
//! and to find buffers that move ([`crate::placement`]).

use crate::error::{CodegenError, EmitError};
use crate::model::{EntryLimits, gpu_kernel_symbol};
use crate::placement::{ArgumentWord, BufferPlacement, placements};
use crate::table::{DeviceEntryDesc, DimExpr, LaunchArg, LaunchDesc};
use mlcc_abi::{Control, arg, repeat};
use mlcc_ir::dim::{Dim, DimAtom, SizeBounds, SizeSymbol};
use mlcc_ir::kernel::{BufId, ExprArena, ForKind, Kernel, MemorySpace, Stmt};
use mlcc_ir::step::{
    AllGather, BufferRef, LaunchGrid, LaunchItem, MemoryBase, RepeatMode, StepItem, StepProgram,
};
use std::collections::BTreeMap;
use std::mem::offset_of;

/// Threads per block along each axis: the widest `Thread` loops of the kernel.
pub fn threads_of(kernel: &Kernel) -> Result<[u32; 3], CodegenError> {
    let mut threads = [1; 3];
    find_widest(&kernel.body, &kernel.exprs, &mut threads)
        .map_err(|f| CodegenError::Internal { kernel: kernel.name.clone(), what: f.0 })?;
    Ok(threads)
}

/// Blocks of a launch; `None` where their number depends on the call.
pub fn blocks_of(kernel: &Kernel) -> Option<i64> {
    fn of(body: &[Stmt], exprs: &ExprArena) -> Option<i64> {
        let all = body.iter().map(|stmt| match stmt {
            Stmt::For { extent, kind: ForKind::Block(_), body, .. } => {
                Some(exprs.as_int(*extent)? * of(body, exprs)?)
            }
            Stmt::For { body, .. } => of(body, exprs),
            Stmt::If { then, otherwise, .. } => Some(of(then, exprs)?.max(of(otherwise, exprs)?)),
            _ => Some(1),
        });
        all.reduce(|most, other| Some(most?.max(other?))).unwrap_or(Some(1))
    }
    of(&kernel.body, &kernel.exprs)
}

fn find_widest(body: &[Stmt], exprs: &ExprArena, threads: &mut [u32; 3]) -> Result<(), EmitError> {
    for stmt in body {
        match stmt {
            Stmt::For { extent, kind, body, .. } => {
                if let ForKind::Thread(axis) = kind {
                    let slot = threads.get_mut(usize::from(*axis));
                    let slot = slot.ok_or_else(|| EmitError(format!("thread axis {axis}")))?;
                    let extent = exprs.as_int(*extent).and_then(|e| u32::try_from(e).ok());
                    let extent =
                        extent.ok_or_else(|| EmitError::new("extent of a thread loop is not constant"))?;
                    *slot = (*slot).max(extent);
                }
                find_widest(body, exprs, threads)?;
            }
            Stmt::If { then, otherwise, .. } => {
                find_widest(then, exprs, threads)?;
                find_widest(otherwise, exprs, threads)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The places of a kernel's buffers in shared memory.
pub struct SharedMemory {
    /// Bytes that are asked for at launch: all of it, or none where it is so little that a kernel may declare
    /// it.
    pub dynamic_bytes: u32,
    /// The offsets of the buffers in it.
    pub offsets: BTreeMap<BufId, u32>,
}

impl SharedMemory {
    /// Most bytes that a kernel may declare itself.
    const DECLARED_BYTES: u64 = 48 << 10;
    /// Alignment of dynamic shared memory, and of each buffer in it.
    pub const ALIGN: u32 = 128;

    /// Bytes of its buffers.
    pub fn bytes_of(kernel: &Kernel) -> u64 {
        let shared = kernel.bufs.values().filter(|buf| buf.space == MemorySpace::Shared);
        let bytes = shared.map(|buf| {
            let len = buf.len.as_const().and_then(|len| u64::try_from(len).ok()).unwrap_or(0);
            len.saturating_mul(buf.dtype.bytes().unwrap_or(1) as u64)
        });
        bytes.fold(0, u64::saturating_add)
    }

    pub fn for_kernel(kernel: &Kernel) -> SharedMemory {
        let (mut places, mut end) = (BTreeMap::new(), 0u64);
        for (id, buf) in kernel.bufs.iter().filter(|(_, buf)| buf.space == MemorySpace::Shared) {
            let len = buf.len.as_const().and_then(|len| u64::try_from(len).ok()).unwrap_or(0);
            let bytes = len.saturating_mul(buf.dtype.bytes().unwrap_or(1) as u64);
            places.insert(id, u32::try_from(end).unwrap_or(u32::MAX));
            end = end.saturating_add(bytes).next_multiple_of(u64::from(Self::ALIGN));
        }
        match Self::bytes_of(kernel) > Self::DECLARED_BYTES {
            true => SharedMemory { dynamic_bytes: u32::try_from(end).unwrap_or(u32::MAX), offsets: places },
            false => SharedMemory { dynamic_bytes: 0, offsets: BTreeMap::new() },
        }
    }
}

const _: () = assert!(matches!(
    (LaunchGrid::MOST_BLOCKS, mlcc_abi::MOST_BLOCKS),
    ([a, b, c], [x, y, z]) if a == x as i64 && b == y as i64 && c == z as i64
));

/// The launch lists of steps, of which no launch may be impossible within `limits`.
pub fn device_entries(
    steps: &[StepProgram],
    kernels: &[Kernel],
    limits: EntryLimits,
) -> Result<Vec<DeviceEntryDesc>, CodegenError> {
    let mut known = BTreeMap::new();
    for kernel in kernels {
        known.insert(kernel.name.as_str(), LaunchedKernel { kernel, placements: placements(kernel, steps) });
    }
    steps.iter().map(|step| device_entry(step, &known, limits)).collect()
}

/// A kernel as launches need it.
struct LaunchedKernel<'a> {
    kernel: &'a Kernel,
    placements: Vec<BufferPlacement>,
}

fn device_entry(
    step: &StepProgram,
    kernels: &BTreeMap<&str, LaunchedKernel<'_>>,
    limits: EntryLimits,
) -> Result<DeviceEntryDesc, CodegenError> {
    let bounds = SizeBounds {
        chunk: match limits.max_rows(&step.name) {
            0 => i64::MAX,
            most => i64::try_from(most).unwrap_or(i64::MAX),
        },
        batch: 1,
        context: i64::try_from(limits.context).ok().filter(|context| *context > 0),
    };
    let mut launches = Vec::new();
    for item in &step.items {
        // Launches of one stream are ordered: barriers say nothing new.
        let launch = match item {
            StepItem::Launch(launch) => launch,
            StepItem::Barrier => continue,
            StepItem::AllGather(exchange) => {
                let described = self::all_gather_launch(exchange).map_err(|f| CodegenError::Step {
                    step: step.name.clone(),
                    what: format!("an exchange: {f}"),
                })?;
                launches.push(described);
                continue;
            }
        };
        let described = describe_launch(launch, kernels, &bounds).map_err(|f| CodegenError::Step {
            step: step.name.clone(),
            what: format!("kernel {}: {f}", launch.kernel),
        })?;
        launches.push(described);
    }
    Ok(DeviceEntryDesc { name: step.name.clone(), launches })
}

/// The launch of an all-gather, which has no kernel: the runtime joins the rows of all ranks.
fn all_gather_launch(exchange: &AllGather) -> Result<LaunchDesc, EmitError> {
    let AllGather { part, all, shape: parts, output_rows: wanted } = exchange;
    let mut args = Vec::new();
    for place in [part, all] {
        if *place != BufferRef::fixed(place.base, place.offset, place.bytes) {
            return Err(EmitError::new("its buffers move"));
        }
        let (kind, base) = base_address(place.base)?;
        args.push(LaunchArg { kind, reserved: 0, offset: base + place.offset });
    }
    let one = || grid_extent(&Dim::from(1));
    Ok(LaunchDesc {
        kernel: String::new(),
        grid: [grid_extent(&parts.rows)?, one()?, one()?],
        block: [1; 3],
        shared_bytes: u32::try_from(parts.row_bytes).map_err(|_| EmitError::new("its rows are too long"))?,
        args,
        repeat: if *wanted { repeat::ALL_GATHER_OUTPUTS } else { repeat::ALL_GATHER },
    })
}

fn describe_launch(
    launch: &LaunchItem,
    kernels: &BTreeMap<&str, LaunchedKernel<'_>>,
    bounds: &SizeBounds,
) -> Result<LaunchDesc, EmitError> {
    let found = kernels.get(launch.kernel.as_str());
    let LaunchedKernel { kernel, placements } =
        found.ok_or_else(|| EmitError::new("is launched but not among the kernels"))?;
    let (buffers, dims) = (launch.buffers.len(), launch.dims.len());
    if buffers != kernel.params.len() || dims != kernel.dims.len() {
        let (b, d) = (kernel.params.len(), kernel.dims.len());
        return Err(EmitError(format!("takes {b} buffers and {d} sizes, got {buffers} and {dims}")));
    }
    let grid = launch.grid.as_ref().ok_or_else(|| EmitError::new("has no launch shape"))?;
    let threads = threads_of(kernel).map_err(|e| EmitError(e.to_string()))?;
    if threads != grid.threads {
        return Err(EmitError(format!(
            "has thread loops for {threads:?} but is launched with {:?}",
            grid.threads
        )));
    }
    for (axis, blocks) in grid.blocks.iter().enumerate() {
        let most = blocks.value_range(bounds).map(|(_, most)| most);
        if let Some(fault) = most.and_then(|most| LaunchGrid::axis_fault(axis, most)) {
            return Err(EmitError(format!("{fault}; build with a smaller --chunk or -c/--ctx-size")));
        }
    }
    let repeat = match launch.repeat {
        RepeatMode::Once => repeat::ONCE,
        RepeatMode::Outputs => repeat::OUTPUTS,
        RepeatMode::EachSequence { .. } => repeat::EACH_SEQUENCE,
        RepeatMode::EachWorker => return Err(EmitError::new("is for each worker, of which a GPU has none")),
    };
    if repeat == repeat::EACH_SEQUENCE && grid.blocks[2].as_const() != Some(1) {
        return Err(EmitError::new("has blocks in z, which are those of sequences"));
    }
    let address = |kind, offset| LaunchArg { kind, reserved: 0, offset };
    let field = |offset: usize| address(arg::CONTROL, offset as u64);
    let mut args = Vec::new();
    for buffer in &launch.buffers {
        let (kind, base) = base_address(buffer.base)?;
        args.push(address(kind, base + buffer.offset));
    }
    let placement = BufferPlacement::for_launch(launch);
    let number = placements.iter().position(|known| *known == placement);
    let number = number.ok_or_else(|| EmitError::new("has buffers in places that its code does not know"))?;
    for word in placement.argument_words(dims) {
        args.push(match word {
            ArgumentWord::Size(i) => field(size_field(&launch.dims[i], &launch.repeat)?),
            ArgumentWord::Past => field(offset_of!(Control, past)),
            ArgumentWord::PageTable => address(arg::PAGE_TABLE, 0),
            ArgumentWord::SequenceCount => field(offset_of!(Control, b)),
            ArgumentWord::Sequences => address(arg::SEQUENCES, 0),
        });
    }
    if let Some(size) = launch.dims.iter().zip(&kernel.dims).find(|(dim, (sym, _))| **dim != Dim::sym(*sym))
        && repeat == repeat::EACH_SEQUENCE
    {
        return Err(EmitError(format!("takes `{}` for a size of each sequence", size.0)));
    }
    let [x, y, z] = &grid.blocks;
    Ok(LaunchDesc {
        kernel: gpu_kernel_symbol(&launch.kernel, number),
        grid: [grid_extent(x)?, grid_extent(y)?, grid_extent(z)?],
        block: grid.threads,
        shared_bytes: SharedMemory::for_kernel(kernel).dynamic_bytes,
        args,
        repeat,
    })
}

/// The kind of an address and where the base begins.
fn base_address(base: MemoryBase) -> Result<(u32, u64), EmitError> {
    Ok(match base {
        MemoryBase::Adapters => (arg::ADAPTERS, 0),
        MemoryBase::Weights => (arg::WEIGHTS, 0),
        MemoryBase::State => (arg::STATE, 0),
        MemoryBase::Arena => (arg::ARENA, 0),
        MemoryBase::Tokens => (arg::TOKENS, 0),
        MemoryBase::Logits => (arg::LOGITS, 0),
        MemoryBase::Probs => (arg::PROBS, 0),
        MemoryBase::Temperature => (arg::CONTROL, offset_of!(Control, temperature) as u64),
        MemoryBase::Pages => (arg::PAGES, 0),
        MemoryBase::PageTable => (arg::PAGE_TABLE, 0),
        MemoryBase::LogitIndices => (arg::OUTPUT_ROWS, 0),
    })
}

/// The place of a size in the control block.
fn size_field(dim: &Dim, repeat: &RepeatMode) -> Result<usize, EmitError> {
    match (dim.constant(), dim.terms()) {
        (0, [(DimAtom::Sym(SizeSymbol::N), 1)]) if *repeat == RepeatMode::Outputs => {
            Ok(offset_of!(Control, n_outputs))
        }
        (0, [(DimAtom::Sym(SizeSymbol::N), 1)]) => Ok(offset_of!(Control, n)),
        (0, [(DimAtom::Sym(SizeSymbol::Past), 1)]) => Ok(offset_of!(Control, past)),
        _ => Err(EmitError(format!("size `{dim}` cannot be an argument of a launch (only n and past)"))),
    }
}

/// A size as `ceil((coef_n * n + coef_past * past + constant) / div)`: linear, or one floor division plus a
/// constant.
fn grid_extent(dim: &Dim) -> Result<DimExpr, EmitError> {
    let unfit = || EmitError(format!("grid size `{dim}` is not of the form (a*n + b*past + c) / d"));
    match dim.terms() {
        [(DimAtom::FloorDiv(inner, div), 1)] => {
            let mut linear = linear_expr(inner).ok_or_else(unfit)?;
            // floor(x / d) + k = ceil((x - d + 1 + k * d) / d)
            linear.constant += 1 - div + dim.constant() * div;
            linear.div = *div;
            Ok(linear)
        }
        _ => linear_expr(dim).ok_or_else(unfit),
    }
}

fn linear_expr(dim: &Dim) -> Option<DimExpr> {
    let mut out = DimExpr { coef_n: 0, coef_past: 0, constant: dim.constant(), div: 1 };
    for (atom, coefficient) in dim.terms() {
        match atom {
            DimAtom::Sym(SizeSymbol::N) => out.coef_n = *coefficient,
            DimAtom::Sym(SizeSymbol::Past) => out.coef_past = *coefficient,
            _ => return None,
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_ir::builder::KernelBuilder;
    use mlcc_ir::dim::SymValues;
    use mlcc_ir::kernel::ParamAccess;
    use mlcc_ir::step::{GatherShape, WorkSchedule};
    use mlcc_ir::types::DType;

    fn eval(e: &DimExpr, n: i64, past: i64) -> i64 {
        let x = e.coef_n * n + e.coef_past * past + e.constant;
        x.div_euclid(e.div) + i64::from(x.rem_euclid(e.div) != 0)
    }

    #[test]
    fn grid_sizes_equal_their_dims() {
        let n = Dim::from(SizeSymbol::N);
        let dims = [
            Dim::from(7),
            n.clone(),
            n.scale(3).add(&Dim::from(5)),
            n.ceil_div(16),
            n.add(&Dim::from(SizeSymbol::Past)).floor_div(4),
            n.scale(2).floor_div(3).add(&Dim::from(2)),
        ];
        for dim in &dims {
            let expr = grid_extent(dim).unwrap();
            for n in 1..70 {
                for past in [0, 1, 5] {
                    let values = SymValues { n, b: 1, past };
                    assert_eq!(eval(&expr, n, past), dim.eval(&values), "{dim} for n={n}, past={past}");
                }
            }
        }
    }

    /// Axes multiply, branches take the larger side, and a size that a call has is no number.
    #[test]
    fn blocks_are_counted_where_they_are_constant() {
        let kernel = |first: Dim| {
            let mut kb = KernelBuilder::new("blocks");
            let (first, six) = (kb.dim(&first), kb.int(6));
            kb.for_("x", first, ForKind::Block(0), |kb, _| kb.for_("y", six, ForKind::Block(1), |_, _| {}));
            kb.finish()
        };
        assert_eq!(blocks_of(&kernel(Dim::from(7))), Some(42));
        assert_eq!(blocks_of(&kernel(Dim::from(SizeSymbol::N))), None);
        assert_eq!(blocks_of(&KernelBuilder::new("none").finish()), Some(1));
    }

    #[test]
    fn exchanges_are_launches_without_a_kernel() {
        let place = |offset| BufferRef::fixed(MemoryBase::Arena, offset, 4096);
        let parts = GatherShape { ranks: 2, rows: SizeSymbol::N.into(), row_bytes: 64 };
        let exchange = AllGather { part: place(128), all: place(8192), shape: parts, output_rows: true };
        let made = super::all_gather_launch(&exchange).unwrap();
        assert_eq!(
            (made.kernel.as_str(), made.shared_bytes, made.repeat),
            ("", 64, repeat::ALL_GATHER_OUTPUTS)
        );
        assert_eq!([made.args[0].offset, made.args[1].offset], [128, 8192]);
        assert_eq!(eval(&made.grid[0], 7, 5), 7);
        let moves = BufferRef { per_past: 64, ..place(0) };
        assert!(super::all_gather_launch(&AllGather { part: moves, ..exchange }).is_err());
    }

    #[test]
    fn grids_beyond_the_limits_of_the_build_are_refused() {
        let mut kb = KernelBuilder::new("k");
        let rows = kb.sym(SizeSymbol::N);
        kb.for_("row", rows, ForKind::Block(1), |_, _| ());
        let kernel = kb.finish();
        let grid =
            LaunchGrid { blocks: [Dim::from(1), Dim::sym(SizeSymbol::N), Dim::from(1)], threads: [1; 3] };
        let launch = LaunchItem {
            kernel: "k".into(),
            buffers: vec![],
            dims: vec![Dim::sym(SizeSymbol::N)],
            grid: Some(grid),
            repeat: RepeatMode::Once,
            schedule: WorkSchedule::Static,
        };
        let items = vec![StepItem::Launch(launch)];
        let step = StepProgram { name: "prefill".into(), items, arena_bytes: 0 };
        let made = |chunk, context| {
            let limits = EntryLimits { chunk, context, ..EntryLimits::default() };
            device_entries(std::slice::from_ref(&step), std::slice::from_ref(&kernel), limits)
                .map_err(|e| e.to_string())
        };
        assert!(made(65_535, 0).is_ok() && made(100_000, 65_535).is_ok());
        let text = made(65_536, 0).unwrap_err();
        assert!(text.contains("kernel k: has up to 65536 blocks in y"), "{text}");
        assert!(text.contains("--chunk"), "{text}");
        assert!(made(0, 0).is_err(), "without a limit there is no telling that it fits");
    }

    #[test]
    fn buffers_that_move_are_told_how_many_rows_are_before_them() {
        let mut kb = KernelBuilder::new("k");
        for name in ["x", "y"] {
            kb.param(name, DType::F32, 16, ParamAccess::Out, 64);
        }
        let past = kb.sym(SizeSymbol::Past);
        kb.for_("i", past, ForKind::Block(0), |_, _| ());
        let kernel = kb.finish();
        let launch = |per_past: [u64; 2]| {
            let buffer = |per_past| BufferRef { per_past, ..BufferRef::fixed(MemoryBase::State, 64, 64) };
            StepItem::Launch(LaunchItem {
                kernel: "k".into(),
                buffers: per_past.map(buffer).to_vec(),
                dims: vec![Dim::sym(SizeSymbol::Past)],
                grid: Some(LaunchGrid {
                    blocks: [SizeSymbol::Past.into(), 1.into(), 1.into()],
                    threads: [1; 3],
                }),
                repeat: RepeatMode::Once,
                schedule: WorkSchedule::Static,
            })
        };
        let entry = |launches: &[[u64; 2]]| {
            let items = launches.iter().map(|l| launch(*l)).collect();
            let steps = [StepProgram { name: "decode".into(), items, arena_bytes: 0 }];
            let limits = EntryLimits { context: 9, ..EntryLimits::default() };
            device_entries(&steps, std::slice::from_ref(&kernel), limits).map(|mut entries| entries.remove(0))
        };
        let args =
            |launch: &LaunchDesc| launch.args.iter().map(|a| (a.kind, a.offset as usize)).collect::<Vec<_>>();
        let past = offset_of!(Control, past);
        let state = (arg::STATE, 64);
        // The second buffer moves in one launch and is fixed in the other, which has code of its own.
        let made = entry(&[[0, 128], [0, 0]]).unwrap();
        assert_eq!(args(&made.launches[0]), [state, state, (arg::CONTROL, past), (arg::CONTROL, past)]);
        assert_eq!(args(&made.launches[1]), [state, state, (arg::CONTROL, past)]);
        assert_eq!(made.launches.iter().map(|l| l.kernel.as_str()).collect::<Vec<_>>(), ["k_k$1", "k_k"]);
        let fixed = entry(&[[0, 0]]).unwrap();
        assert_eq!(args(&fixed.launches[0]), [state, state, (arg::CONTROL, past)]);
    }

    #[test]
    fn other_forms_are_refused() {
        let odd = Dim::from(SizeSymbol::N).floor_div(2).scale(2);
        assert!(grid_extent(&odd).unwrap_err().to_string().contains("grid size"));
        assert_eq!(
            size_field(&Dim::from(SizeSymbol::Past), &RepeatMode::Once).unwrap(),
            offset_of!(Control, past)
        );
        let rows = Dim::from(SizeSymbol::N);
        assert_eq!(size_field(&rows, &RepeatMode::Outputs).unwrap(), offset_of!(Control, n_outputs));
        for size in [odd, Dim::from(SizeSymbol::N).add(&Dim::from(1)), Dim::from(3), Dim::from(SizeSymbol::B)]
        {
            assert!(
                size_field(&size, &RepeatMode::Once).unwrap_err().to_string().contains("only n and past")
            );
        }
    }
}
