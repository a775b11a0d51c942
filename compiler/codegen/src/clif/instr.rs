//! Integer dot products and lookups that Cranelift can say in a few 128-bit operations, on any machine with
//! vectors. All others, and all of them elsewhere, are expanded from their meaning.

use super::emit::ClifKernelEmitter;
use super::isa::CraneliftIsa;
use super::value::{ClifValue, LaneForm};
use cranelift_codegen::ir::{InstBuilder, Value};
use mlcc_ir::instr::{InstrDef, InstrId};
use mlcc_ir::types::DType;
use mlcc_target::Arch;

/// The operation on each 128-bit piece of the operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LaneOperation {
    /// `i32 + dot4(8-bit, 8-bit)`.
    Dot4,
    /// Neighbouring i16 products as i32.
    AddProducts,
    /// `i32 + dot2(i16, i16)`.
    Dot2,
    /// Neighbouring u8 x i8 products added with saturation to i16.
    AddByteProducts,
    /// A table of bytes, looked up.
    LookUp,
}

impl LaneOperation {
    /// The pattern of an instruction, if this machine has the operations for it.
    pub fn for_instr(instr: InstrId, machine: &CraneliftIsa) -> Option<LaneOperation> {
        let pattern = match instr.def().name {
            "vpdpbusd_512" | "vpdpbusd_256" | "vpdpbusd_avx_256" | "sdot_128" | "udot_128" | "usdot_128" => {
                LaneOperation::Dot4
            }
            "vpmaddwd_512" | "vpmaddwd_256" | "pmaddwd_128" => LaneOperation::AddProducts,
            "vpdpwssd_512" | "vpdpwssd_256" | "vpdpwssd_avx_256" => LaneOperation::Dot2,
            "vpmaddubsw_512" | "vpmaddubsw_256" | "pmaddubsw_128" => LaneOperation::AddByteProducts,
            "vpshufb_512" | "vpshufb_256" | "pshufb_128" | "tbl1_128" => LaneOperation::LookUp,
            _ => return None,
        };
        let x86 = machine.arch == Arch::X86_64;
        let of_x86 = pattern == LaneOperation::AddByteProducts
            || pattern == LaneOperation::LookUp && instr.def().arch != "aarch64";
        (machine.simd && (x86 || !of_x86)).then_some(pattern)
    }
}

impl ClifKernelEmitter<'_, '_> {
    pub fn dot_product(
        &mut self,
        pattern: LaneOperation,
        def: &InstrDef,
        args: &[ClifValue],
        form: LaneForm,
    ) -> ClifValue {
        let signed: Vec<bool> = def.args.iter().map(|ty| ty.dtype != DType::U8).collect();
        let last = args.len() - 1;
        let mut parts = Vec::with_capacity(args[last].parts.len());
        for i in 0..args[last].parts.len() {
            let (a, b) = (args[last - 1].parts[i], args[last].parts[i]);
            parts.push(match pattern {
                LaneOperation::AddProducts => self.add_products(a, b),
                LaneOperation::Dot2 => {
                    let sums = self.add_products(a, b);
                    self.fb.ins().iadd(args[0].parts[i], sums)
                }
                LaneOperation::AddByteProducts => self.fb.ins().x86_pmaddubsw(b, a),
                LaneOperation::LookUp if def.arch == Arch::X86_64.name() => self.fb.ins().x86_pshufb(a, b),
                LaneOperation::LookUp => self.fb.ins().swizzle(a, b),
                LaneOperation::Dot4 => {
                    let (a, b) = (self.widen(&[a], signed[1]), self.widen(&[b], signed[2]));
                    let (low, high) = (self.add_products(a[0], b[0]), self.add_products(a[1], b[1]));
                    let sums = self.fb.ins().iadd_pairwise(low, high);
                    self.fb.ins().iadd(args[0].parts[i], sums)
                }
            });
        }
        ClifValue::new(form, parts)
    }

    /// `a[2i] * b[2i] + a[2i + 1] * b[2i + 1]` in i32; one instruction on x86.
    fn add_products(&mut self, a: Value, b: Value) -> Value {
        let (a, b) = (self.widen(&[a], true), self.widen(&[b], true));
        let (low, high) = (self.fb.ins().imul(a[0], b[0]), self.fb.ins().imul(a[1], b[1]));
        self.fb.ins().iadd_pairwise(low, high)
    }
}
