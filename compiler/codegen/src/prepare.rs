//! Preparation of kernels: the operations that a target can execute, and the rewriting that every back end
//! needs before it sees a kernel.

use crate::error::CodegenError;
use crate::halfs::{HalfSupport, lower_halfs};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{Expr, Kernel, Stmt};
use mlcc_ir::rewrite::expand_instrs;
use mlcc_target::{Arch, FeatureLevel};
use std::collections::BTreeSet;

/// Capabilities of one target level, as code generation needs them.
#[derive(Clone, Debug)]
pub struct LevelCapabilities {
    pub arch: Arch,
    pub level: FeatureLevel,
    pub vector_bits: u32,
    /// A fused multiply-add that is one instruction.
    pub fma: bool,
    pub halfs: HalfSupport,
}

impl LevelCapabilities {
    pub fn new(arch: Arch, level: &FeatureLevel) -> LevelCapabilities {
        let (fma, f16_casts) = match arch {
            Arch::X86_64 => (level.has("fma"), level.has("f16c")),
            Arch::Aarch64 | Arch::Nvptx => (true, true),
        };
        let vector_bits = level.vector_bits;
        LevelCapabilities { arch, level: level.clone(), vector_bits, fma, halfs: HalfSupport { f16_casts } }
    }
    pub fn has(&self, feature: &str) -> bool {
        self.level.has(feature)
    }
    /// True if the target executes the instruction itself.
    pub fn has_instr(&self, instr: InstrId) -> bool {
        let def = instr.def();
        def.arch == self.arch.name() && self.level.has_all(def.features)
    }
}

/// Expands instructions that the target lacks, then half-precision arithmetic.
pub fn prepare_kernel(kernel: &Kernel, caps: &LevelCapabilities) -> Kernel {
    let expanded = expand_instrs(kernel, |id| caps.has_instr(id));
    lower_halfs(&expanded, caps.halfs)
}

/// The target instructions that a kernel names.
pub fn instrs_of(kernel: &Kernel) -> BTreeSet<InstrId> {
    fn of_statements(body: &[Stmt], all: &mut BTreeSet<InstrId>) {
        for stmt in body {
            match stmt {
                Stmt::Instr { instr, .. } => drop(all.insert(*instr)),
                Stmt::For { body, .. } => of_statements(body, all),
                Stmt::If { then, otherwise, .. } => {
                    of_statements(then, all);
                    of_statements(otherwise, all);
                }
                Stmt::Let { .. }
                | Stmt::Store { .. }
                | Stmt::Alloc { .. }
                | Stmt::Barrier
                | Stmt::Commit
                | Stmt::Wait { .. } => {}
            }
        }
    }
    let of_expr = |id| match kernel.exprs.expr(id) {
        Expr::Instr(instr, _) => Some(*instr),
        _ => None,
    };
    let mut all = kernel.exprs.ids().filter_map(of_expr).collect();
    of_statements(&kernel.body, &mut all);
    all
}

/// The bits of [`mlcc_abi::feature`] that a loader must check for this level.
pub fn abi_features(level: &FeatureLevel) -> Result<u64, CodegenError> {
    let mut bits = 0;
    for name in &level.features {
        // Part of every x86-64.
        if matches!(name.as_str(), "sse" | "sse2") {
            continue;
        }
        let missing = || CodegenError::Feature { level: level.name.clone(), feature: name.clone() };
        bits |= mlcc_abi::feature::by_name(name).ok_or_else(missing)?;
    }
    Ok(bits)
}
