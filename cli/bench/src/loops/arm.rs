//! The inner loops for AArch64, in assembly: Rust has no stable names for the products of matrices.

use super::CHAINS;
use std::arch::asm;

/// A loop of one instruction on each of the 16 accumulators `v0` to `v15`, with operands whose lanes are all
/// one (as f32).
macro_rules! chains {
    ($name:ident, $feature:literal, $instr:literal, $acc:literal, $operand:literal) => {
        /// # Safety
        /// The machine has the feature; `rounds` is positive.
        #[target_feature(enable = $feature)]
        pub unsafe fn $name(rounds: u64) -> u64 {
            const { assert!(CHAINS == 16) };
            // SAFETY: registers alone are used, and said; the loop ends after `rounds` rounds.
            unsafe {
                asm!(
                    "fmov v16.4s, #1.0",
                    "fmov v17.4s, #1.0",
                    ".irp chain, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
                    "movi v\\chain\\().16b, #0",
                    ".endr",
                    "2:",
                    ".irp chain, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
                    concat!($instr, " v\\chain\\()", $acc, ", v16", $operand, ", v17", $operand),
                    ".endr",
                    "subs {rounds}, {rounds}, #1",
                    "b.ne 2b",
                    rounds = inout(reg) rounds => _,
                    out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _,
                    out("v6") _, out("v7") _, out("v8") _, out("v9") _, out("v10") _, out("v11") _,
                    out("v12") _, out("v13") _, out("v14") _, out("v15") _, out("v16") _, out("v17") _,
                    options(nomem, nostack),
                );
            }
            rounds
        }
    };
}

chains!(fmla, "neon", "fmla", ".4s", ".4s");
chains!(smlal, "neon", "smlal", ".8h", ".8b");
chains!(sdot, "dotprod", "sdot", ".4s", ".16b");
chains!(smmla, "i8mm", "smmla", ".4s", ".16b");
chains!(bfmmla, "bf16", "bfmmla", ".4s", ".8h");
