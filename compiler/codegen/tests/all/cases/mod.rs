//! Kernels with inputs that exercise every construct, and the comparison with the interpreter.

pub mod arithmetic;
pub mod control;
pub mod instrs;
pub mod memory;
pub mod values;

use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::kernel::{KernelBuffer, run};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{BufId, ExprId, Kernel, ParamAccess};
use mlcc_ir::types::DType;

/// One kernel with its arguments.
pub struct KernelCase {
    pub kernel: Kernel,
    pub buffers: Vec<KernelBuffer>,
    pub dims: SymValues,
    /// Tolerance of float results; integer ones must be equal.
    pub tolerance: Tolerance,
}

impl KernelCase {
    pub fn new(kernel: Kernel, buffers: Vec<KernelBuffer>) -> KernelCase {
        KernelCase { kernel, buffers, dims: SymValues::for_tokens(5), tolerance: Tolerance::EXACT }
    }
    /// The results of the interpreter.
    pub fn expected(&self) -> Vec<KernelBuffer> {
        let mut buffers = self.buffers.clone();
        run(&self.kernel, &mut buffers, &self.dims).unwrap_or_else(|e| panic!("{e}"));
        buffers
    }
    /// Fails with the name of the kernel and the first difference.
    pub fn check(&self, who: &str, got: &[Vec<u8>], want: &[KernelBuffer]) {
        for ((bytes, want), id) in got.iter().zip(want).zip(&self.kernel.params) {
            let decl = &self.kernel.bufs[*id];
            let got = KernelBuffer::new(decl.dtype, bytes.clone());
            let tolerance = if decl.dtype.is_float() { self.tolerance } else { Tolerance::EXACT };
            let result = match decl.dtype.is_float() {
                true => compare(got.to_f32(), want.to_f32(), tolerance),
                false => {
                    let as_f64 = |b: &KernelBuffer| b.to_i64().iter().map(|&v| v as f64).collect::<Vec<_>>();
                    compare(as_f64(&got), as_f64(want), tolerance)
                }
            };
            if let Err(e) = result {
                panic!("{who}: kernel {}, buffer {}: {e}", self.kernel.name, decl.name);
            }
        }
    }
}

/// Numbers the kernels, so that all of them fit into one library, and runs the interpreter.
pub fn prepare(mut cases: Vec<KernelCase>) -> Vec<(KernelCase, Vec<KernelBuffer>)> {
    for (i, case) in cases.iter_mut().enumerate() {
        case.kernel.name = format!("{}_{i}", case.kernel.name);
    }
    cases.into_iter().map(|c| (c.expected(), c)).map(|(want, c)| (c, want)).collect()
}

/// A kernel `out[i] = f(inputs[i])` over vectors of `lanes`, as long as the inputs; and its case.
pub fn map_case(
    name: &str,
    inputs: &[KernelBuffer],
    out: DType,
    lanes: u32,
    f: impl Fn(&mut KernelBuilder, &[ExprId]) -> ExprId,
) -> KernelCase {
    let len = inputs[0].len() / lanes as usize * lanes as usize;
    let mut kb = KernelBuilder::new(name);
    let ins: Vec<BufId> = inputs
        .iter()
        .enumerate()
        .map(|(i, b)| kb.param(&format!("in{i}"), b.dtype, b.len(), ParamAccess::In, 64))
        .collect();
    let result = kb.param("out", out, len, ParamAccess::Out, 64);
    let extent = kb.int((len / lanes as usize) as i64);
    kb.par("i", extent, |kb, i| {
        let at = kb.mul_int(i, i64::from(lanes));
        let values: Vec<ExprId> = ins.iter().map(|&b| kb.load_vec(b, at, lanes)).collect();
        let value = f(kb, &values);
        kb.store_vec(result, at, value);
    });
    let mut buffers = inputs.to_vec();
    buffers.push(KernelBuffer::zeros(out, len));
    KernelCase::new(kb.finish(), buffers)
}
