//! The kernel interpreter: the meaning of kernel IR, for CPU kernels and (lockstep, see [`crate::simt`]) GPU
//! kernels.
//!
//! Values: f32 arithmetic rounds after each operation, `Fma` once; f16 and bf16 operations are computed in
//! f32 and rounded to nearest even; integers wrap; transcendental functions are computed in f64 and rounded
//! to f32 (then to the type). Division by zero, an overflowing division and a shift by the width or more are
//! errors, because compiled code gives them no meaning. Target instructions are replaced by their meaning.
//!
//! Memory: every index is checked against the length of its buffer, every buffer against the alignment that
//! generated code assumes ([`BufDecl::assumed_align`]). `Out` parameters and all allocations start without
//! contents, and reading what was not written is an error. With several workers, and always on GPUs, accesses
//! of one cell that no barrier orders are an error if one of them is a write; so is an access of what an
//! asynchronous copy is about to write, or a write of what it reads, before its thread has waited; so is a
//! store outside of `par` loops in a kernel that several workers run, because each of them executes it.

pub mod buffer;
pub mod cell;
pub(crate) mod copies;
pub mod error;
pub(crate) mod machine;
pub mod memory;
pub mod program;

pub use buffer::KernelBuffer;
pub use error::{InterpError, KernelFault};
pub use program::KernelProgram;

use error::{LocatedFault, RunResult};
use machine::{ExecutionTask, KernelMachine};
use memory::BufferStorage;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{BufDecl, Kernel, MemorySpace};
use mlcc_ir::step::WorkShare;

/// Most values of registers and allocations, all threads of a block together.
const MAX_CELLS: u128 = 1 << 27;

/// Order in which workers or blocks run; results must not depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ExecutionOrder {
    #[default]
    Forward,
    Reverse,
    Shuffled(u64),
}

/// Options of a run of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExecutionOptions {
    /// CPU workers; GPU kernels ignore it.
    pub workers: usize,
    pub order: ExecutionOrder,
}

impl Default for ExecutionOptions {
    fn default() -> ExecutionOptions {
        ExecutionOptions { workers: 1, order: ExecutionOrder::Forward }
    }
}

impl ExecutionOptions {
    pub fn with_workers(workers: usize) -> ExecutionOptions {
        ExecutionOptions { workers, order: ExecutionOrder::Forward }
    }
}

/// Runs a kernel with one worker, or all blocks of a GPU kernel in order. `buffers`: one per parameter.
pub fn run(kernel: &Kernel, buffers: &mut [KernelBuffer], dims: &SymValues) -> Result<(), InterpError> {
    KernelProgram::new(kernel)?.run(buffers, dims, &ExecutionOptions::default())
}

/// Runs a kernel with several workers, or in another order.
pub fn run_with(
    kernel: &Kernel,
    buffers: &mut [KernelBuffer],
    dims: &SymValues,
    options: &ExecutionOptions,
) -> Result<(), InterpError> {
    KernelProgram::new(kernel)?.run(buffers, dims, options)
}

impl KernelProgram {
    /// Runs the kernel on `buffers`, one per parameter. After an error the buffers hold what had been stored
    /// so far.
    pub fn run(
        &self,
        buffers: &mut [KernelBuffer],
        dims: &SymValues,
        options: &ExecutionOptions,
    ) -> Result<(), InterpError> {
        self.explain_fault(
            self.launch(buffers, dims, options.workers, |machine| self.list_tasks(machine, options)),
        )
    }

    /// Runs a share of a CPU kernel, and nothing else. Outputs keep what they held elsewhere.
    pub fn run_share(
        &self,
        buffers: &mut [KernelBuffer],
        dims: &SymValues,
        share: WorkShare,
    ) -> Result<(), InterpError> {
        if self.gpu {
            let what = "a GPU kernel has blocks, not workers".into();
            return self.explain_fault(Err(KernelFault::Malformed(what).into()));
        }
        let tasks = |_: &KernelMachine| vec![ExecutionTask::Worker { share, number: 0 }];
        self.explain_fault(self.launch(buffers, dims, 1, tasks))
    }

    fn explain_fault(&self, run: RunResult) -> Result<(), InterpError> {
        run.map_err(|failure| {
            let LocatedFault { fault, at } = *failure;
            InterpError { kernel: self.kernel.name.clone(), fault, at }
        })
    }

    fn launch(
        &self,
        buffers: &mut [KernelBuffer],
        dims: &SymValues,
        workers: usize,
        tasks: impl FnOnce(&KernelMachine) -> Vec<ExecutionTask>,
    ) -> RunResult {
        self.check_arguments(buffers, dims)?;
        self.check_size(dims)?;
        let memory = self.bind_memory(buffers, dims, workers);
        let values: Vec<i64> = self.kernel.dims.iter().map(|(sym, _)| dims.get(*sym)).collect();
        let mut machine = KernelMachine::new(self, memory, &values)?;
        let result = tasks(&machine).into_iter().try_for_each(|task| machine.run(task));
        let mut memory: Vec<Option<BufferStorage>> = machine.memory.into_iter().map(Some).collect();
        for (id, buffer) in self.kernel.params.iter().zip(buffers) {
            buffer.bytes = memory[id.0 as usize].take().map(BufferStorage::into_bytes).unwrap_or_default();
        }
        result
    }

    fn check_arguments(&self, buffers: &[KernelBuffer], dims: &SymValues) -> RunResult {
        let fault = |name: &str, expected: String, found: String| {
            KernelFault::Argument { name: name.into(), expected, found }.into()
        };
        if buffers.len() != self.kernel.params.len() {
            let (expected, found) = (self.kernel.params.len(), buffers.len());
            return Err(fault("list", format!("{expected} buffers"), found.to_string()));
        }
        for (id, buffer) in self.kernel.params.iter().zip(buffers) {
            let decl = &self.kernel.bufs[*id];
            let len = decl.len.eval(dims);
            if decl.dtype != buffer.dtype || (buffer.len() as i64) < len {
                let expected = format!("{len} elements of {}", decl.dtype);
                return Err(fault(&decl.name, expected, format!("{} of {}", buffer.len(), buffer.dtype)));
            }
            let align = decl.assumed_align();
            if len > 0 && !buffer.address.is_multiple_of(u64::from(align)) {
                let (buffer, address) = (decl.name.clone(), buffer.address);
                return Err(KernelFault::Misplaced { buffer, address, align }.into());
            }
        }
        Ok(())
    }

    /// The interpreter's own memory is bounded, whatever a text asks for.
    fn check_size(&self, dims: &SymValues) -> RunResult {
        let threads: usize = self.threads.iter().product();
        let own = self.kernel.bufs.values().filter(|b| b.space != MemorySpace::Global);
        let cells = own.map(|b| b.len.eval(dims).max(0) as u128).sum::<u128>() + self.cells as u128;
        let cells = cells * threads as u128;
        if cells > MAX_CELLS {
            let what = format!("it needs {cells} values for registers and allocations; at most {MAX_CELLS}");
            return Err(KernelFault::Malformed(what).into());
        }
        Ok(())
    }

    fn bind_memory(
        &self,
        buffers: &mut [KernelBuffer],
        dims: &SymValues,
        workers: usize,
    ) -> Vec<BufferStorage> {
        let threads = self.threads.iter().product();
        let concurrent = self.gpu || workers > 1;
        let mut params: Vec<Option<usize>> = vec![None; self.kernel.bufs.len()];
        for (i, id) in self.kernel.params.iter().enumerate() {
            params[id.0 as usize] = Some(i);
        }
        let storage = |(decl, param): (&BufDecl, Option<usize>)| {
            let len = decl.len.eval(dims).max(0) as usize;
            match param {
                Some(i) => {
                    let (writes, reads) = (decl.access.writes(), decl.access.reads());
                    BufferStorage::param(&decl.name, &mut buffers[i], len, !reads, writes && concurrent)
                }
                None => BufferStorage::for_allocation(&decl.name, decl.dtype, decl.space, len, threads),
            }
        };
        self.kernel.bufs.values().zip(params).map(storage).collect()
    }

    /// All workers or all blocks, in the requested order.
    fn list_tasks(&self, machine: &KernelMachine, options: &ExecutionOptions) -> Vec<ExecutionTask> {
        let mut tasks: Vec<ExecutionTask> = if self.gpu {
            let extent = |axis: usize| {
                self.blocks[axis].iter().map(|r| machine.cells(*r)[0] as i64).max().unwrap_or(1)
            };
            let (x, y, z) = (extent(0), extent(1), extent(2));
            let all = (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k])));
            all.enumerate().map(|(number, index)| ExecutionTask::Block { index, number }).collect()
        } else {
            let workers = options.workers.max(1);
            (0..workers)
                .map(|number| ExecutionTask::Worker { share: WorkShare::equal_part(number, workers), number })
                .collect()
        };
        options.order.apply(&mut tasks);
        tasks
    }
}

impl ExecutionOrder {
    /// Puts what is in ascending order into this one.
    pub(crate) fn apply<T>(self, items: &mut [T]) {
        match self {
            ExecutionOrder::Forward => {}
            ExecutionOrder::Reverse => items.reverse(),
            ExecutionOrder::Shuffled(seed) => shuffle(items, seed),
        }
    }
}

/// Fisher-Yates with splitmix64.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for i in (1..items.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        items.swap(i, ((z ^ (z >> 31)) % (i as u64 + 1)) as usize);
    }
}
