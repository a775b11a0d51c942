//! Launches of kernels: their arguments, and their grids.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use mlcc_abi::{DimExpr, EntryPoint, LaunchArg, MOST_BLOCKS, arg};

use super::device::{CudaContext, CudaDevice};
use super::driver::{self, DevicePtr, DriverHandle};
use crate::table::{KernelLaunch, LaunchRepeat, MAX_LAUNCH_ARGS};
use crate::{Error, Result};

/// Dynamic shared memory beyond this must be asked for.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

/// A launch with its kernel resolved.
#[derive(Clone)]
pub(crate) struct ResolvedLaunch {
    function: DriverHandle,
    launch: KernelLaunch,
}

/// Lengths of the sequence before a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LengthRange {
    pub first: i64,
    pub last: i64,
}

impl LengthRange {
    /// One length.
    pub fn single(past: u64) -> Self {
        Self { first: past as i64, last: past as i64 }
    }
}

/// The base addresses of the arguments of a launch.
#[derive(Clone, Copy, Default)]
pub(crate) struct BaseAddresses {
    pub arena: DevicePtr,
    pub state: DevicePtr,
    pub tokens: DevicePtr,
    pub logits: DevicePtr,
    pub probs: DevicePtr,
    pub control: DevicePtr,
    pub output_rows: DevicePtr,
    pub sequences: DevicePtr,
    pub page_table: DevicePtr,
}

/// Sizes that grids depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct GridSizes {
    pub n: i64,
    /// Grids have blocks enough for all of these.
    pub past: LengthRange,
    /// True for the launches of sequences with adapters.
    pub adapted: bool,
    pub batch: BatchSizes,
}

/// Sizes of a call for several sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct BatchSizes {
    pub sequences: i64,
    /// The most rows of one of them.
    pub max_rows: i64,
    /// Rows whose logits are wanted.
    pub outputs: i64,
}

impl CudaDevice {
    /// Puts every launch of an entry point on the stream.
    pub fn launch(
        &self,
        kernels: &[ResolvedLaunch],
        bases: &BaseAddresses,
        sizes: &GridSizes,
        stream: DriverHandle,
    ) -> Result<()> {
        let driver = self.context().make_current()?;
        for kernel in kernels {
            let Some(grid) = grid_dims(&kernel.launch, sizes)? else { continue };
            if kernel.launch.is_all_gather {
                self.all_gather(&kernel.launch, grid[0].into(), bases, stream)?;
                continue;
            }
            let mut addresses = [0 as DevicePtr; MAX_LAUNCH_ARGS];
            for (address, a) in addresses.iter_mut().zip(&kernel.launch.args) {
                *address = self.argument_address(a, kernel.launch.repeat, bases);
            }
            let mut pointers = addresses.each_mut().map(|a| std::ptr::from_mut(a).cast::<c_void>());
            let [bx, by, bz] = kernel.launch.block;
            // SAFETY: one pointer per argument, in the order that the compiler recorded for this kernel; all
            // are addresses.
            let status = unsafe {
                (driver.functions.launch)(
                    kernel.function,
                    grid[0],
                    grid[1],
                    grid[2],
                    bx,
                    by,
                    bz,
                    kernel.launch.shared_bytes,
                    stream,
                    pointers.as_mut_ptr(),
                    null_mut(),
                )
            };
            driver.check("cuLaunchKernel", status).map_err(|e| match e {
                Error::Driver { call, what } => {
                    Error::Driver { call, what: format!("{}: {what}", kernel.launch.kernel) }
                }
                other => other,
            })?;
        }
        Ok(())
    }

    fn all_gather(
        &self,
        launch: &KernelLaunch,
        rows: u64,
        bases: &BaseAddresses,
        stream: DriverHandle,
    ) -> Result<()> {
        // Both were checked to be there: ranks that do not exchange load no such model.
        let (Some(ranks), [part, all]) = (self.ranks(), &launch.args[..]) else { return Ok(()) };
        let place = |a| self.argument_address(a, launch.repeat, bases);
        ranks.all_gather(
            self.context(),
            (place(part), place(all)),
            (rows, launch.shared_bytes.into()),
            stream,
        )
    }

    fn argument_address(&self, a: &LaunchArg, repeat: LaunchRepeat, bases: &BaseAddresses) -> DevicePtr {
        let base = match a.kind {
            arg::WEIGHTS => self.weights(),
            arg::ADAPTERS => self.adapters(),
            arg::ARENA => bases.arena,
            // The kernel adds where those of its sequence begin.
            arg::STATE | arg::PAGE_TABLE if repeat == LaunchRepeat::EachSequence => 0,
            arg::STATE => bases.state,
            arg::PAGE_TABLE => bases.page_table,
            arg::PAGES => self.pages().map_or(0, |pages| pages.memory().base()),
            arg::OUTPUT_ROWS => bases.output_rows,
            arg::SEQUENCES => bases.sequences,
            arg::TOKENS => bases.tokens,
            arg::LOGITS => bases.logits,
            arg::PROBS => bases.probs,
            // The table was checked: there are no other kinds.
            _ => bases.control,
        };
        base.wrapping_add(a.offset)
    }
}

impl ResolvedLaunch {
    /// The kernel of a launch in a module.
    pub fn resolve(context: &CudaContext, module: DriverHandle, launch: &KernelLaunch) -> Result<Self> {
        let driver = context.make_current()?;
        if launch.is_all_gather {
            return Ok(Self { function: null_mut(), launch: launch.clone() });
        }
        let name = CString::new(launch.kernel.as_str()).unwrap_or_default();
        let mut function = null_mut();
        // SAFETY: the module is loaded, the name NUL-terminated.
        let status = unsafe { (driver.functions.module_function)(&mut function, module, name.as_ptr()) };
        driver.check("cuModuleGetFunction", status).map_err(|e| match e {
            Error::Driver { call, what } => {
                Error::Driver { call, what: format!("kernel {}: {what}", launch.kernel) }
            }
            other => other,
        })?;
        if launch.shared_bytes > PLAIN_SHARED_BYTES {
            let bytes = launch.shared_bytes as i32;
            // SAFETY: the function is valid.
            let status = unsafe {
                (driver.functions.function_attribute)(function, driver::FUNCTION_SHARED_BYTES, bytes)
            };
            driver.check("cuFuncSetAttribute", status)?;
        }
        Ok(Self { function, launch: launch.clone() })
    }

    /// True if the launch has more blocks for longer sequences.
    pub fn grid_grows(&self) -> bool {
        self.launch.grid.iter().any(|g| g.coef_past != 0)
    }
}

/// The launch list of a step; that for sequences with adapters, where some have one.
pub(super) fn entry_kernels(
    device: &CudaDevice,
    step: EntryPoint,
    adapted: bool,
) -> Result<&[ResolvedLaunch]> {
    let missing = || Error::Driver {
        call: "launch list",
        what: format!("the artifact has no launches for `{}`; build it again", step.name()),
    };
    device.entry_kernels(step, adapted).ok_or_else(missing)
}

/// The grid, `None` if it is empty.
fn grid_dims(launch: &KernelLaunch, sizes: &GridSizes) -> Result<Option<[u32; 3]>> {
    let mut out = [0; 3];
    let n = match launch.repeat {
        LaunchRepeat::Once => sizes.n,
        LaunchRepeat::Outputs => sizes.batch.outputs,
        LaunchRepeat::EachSequence => sizes.batch.max_rows,
    };
    for (i, (to, expr)) in out.iter_mut().zip(&launch.grid).enumerate() {
        // A size that overflows is too large as well.
        let at = |past| evaluate_dim(expr, n, past).unwrap_or(i64::MAX);
        let blocks = match (launch.repeat, i) {
            (LaunchRepeat::EachSequence, 2) => sizes.batch.sequences,
            _ => at(sizes.past.first).max(at(sizes.past.last)),
        };
        let most = MOST_BLOCKS[i];
        *to = u32::try_from(blocks).ok().filter(|blocks| *blocks <= most).ok_or_else(|| Error::Grid {
            kernel: launch.kernel.clone(),
            axis: ['x', 'y', 'z'][i],
            blocks,
            most,
        })?;
    }
    Ok((!out.contains(&0)).then_some(out))
}

/// Rows of an exchange of a call of `n` tokens.
pub(super) fn all_gather_rows(launch: &KernelLaunch, n: u64) -> u64 {
    evaluate_dim(&launch.grid[0], n as i64, 0).and_then(|rows| u64::try_from(rows).ok()).unwrap_or(u64::MAX)
}

/// `ceil((coef_n * n + coef_past * past + constant) / div)`, `None` on overflow.
fn evaluate_dim(e: &DimExpr, n: i64, past: i64) -> Option<i64> {
    let sum =
        e.coef_n.checked_mul(n)?.checked_add(e.coef_past.checked_mul(past)?)?.checked_add(e.constant)?;
    Some(sum.checked_add(e.div - 1)?.div_euclid(e.div))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_round_up() {
        let e = DimExpr { coef_n: 3, coef_past: 1, constant: -1, div: 4 };
        assert_eq!(evaluate_dim(&e, 2, 0), Some(2));
        assert_eq!(evaluate_dim(&e, 2, 4), Some(3));
        assert_eq!(evaluate_dim(&DimExpr { coef_n: i64::MAX, ..e }, 2, 0), None);
    }

    #[test]
    fn grids_have_blocks_for_every_length_of_a_span() {
        let one = DimExpr { coef_n: 0, coef_past: 0, constant: 1, div: 1 };
        let with = |coef_past, first, last| {
            let grown = DimExpr { coef_past, constant: 20, div: 4, ..one };
            let grid = [grown, one, one];
            let launch = launch_of(grid, LaunchRepeat::Once);
            super::grid_dims(
                &launch,
                &GridSizes { past: LengthRange { first, last }, ..GridSizes::default() },
            )
            .unwrap()
        };
        assert_eq!(with(1, 4, 4), Some([6, 1, 1]));
        assert_eq!(with(1, 4, 7), Some([7, 1, 1]));
        assert_eq!(with(-1, 4, 7), Some([4, 1, 1]));
    }

    fn launch_of(grid: [DimExpr; 3], repeat: LaunchRepeat) -> KernelLaunch {
        KernelLaunch {
            kernel: "k".into(),
            grid,
            block: [1; 3],
            shared_bytes: 0,
            args: vec![],
            repeat,
            is_all_gather: false,
        }
    }

    #[test]
    fn grids_of_sequences_are_as_deep_as_there_are_some() {
        let one = DimExpr { coef_n: 0, coef_past: 0, constant: 1, div: 1 };
        let rows = DimExpr { coef_n: 1, constant: 0, ..one };
        let batch = BatchSizes { sequences: 3, max_rows: 5, outputs: 2 };
        let sizes = GridSizes { n: 9, batch, ..GridSizes::default() };
        let with = |repeat| super::grid_dims(&launch_of([rows, one, one], repeat), &sizes).unwrap();
        assert_eq!(with(LaunchRepeat::Once), Some([9, 1, 1]));
        assert_eq!(with(LaunchRepeat::Outputs), Some([2, 1, 1]));
        assert_eq!(with(LaunchRepeat::EachSequence), Some([5, 1, 3]));
    }

    #[test]
    fn grids_that_a_gpu_cannot_launch_are_named() {
        let one = DimExpr { coef_n: 0, coef_past: 0, constant: 1, div: 1 };
        let rows = DimExpr { coef_n: 2, constant: 0, ..one };
        let with = |grid: [DimExpr; 3], n: i64| {
            let launch = launch_of(grid, LaunchRepeat::Once);
            let sizes = GridSizes { n, ..GridSizes::default() };
            super::grid_dims(&launch, &sizes).map_err(|e| e.to_string())
        };
        assert_eq!(with([rows, one, one], 1 << 20).unwrap(), Some([1 << 21, 1, 1]));
        assert_eq!(with([one, rows, one], 32_767).unwrap(), Some([1, 65_534, 1]));
        assert_eq!(with([one, rows, one], 0).unwrap(), None);
        let text = with([one, rows, one], 32_768).unwrap_err();
        assert!(
            text.contains("kernel k would need 65536 blocks in y, but a GPU has at most 65535"),
            "{text}"
        );
        assert!(with([one, one, rows], 32_768).unwrap_err().contains("in z"));
        assert!(with([rows, one, one], i64::MAX).unwrap_err().contains("in x"));
    }
}
