//! Parameters of a machine that generators need.

use mlcc_ir::dim::Dim;
use mlcc_ir::instr::InstrId;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::QuotientMethod;
use mlcc_target::{Arch, AttentionTile, DivisionMethod, FeatureLevel, MatrixTile, TuneTables};
use std::collections::BTreeSet;

/// The parameters of a machine that a generator needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelTarget {
    pub arch: Arch,
    /// LLVM feature names, complete.
    pub features: BTreeSet<String>,
    /// Widest vector that kernels should use; ignored on a GPU.
    pub vector_bits: u32,
    /// The tuning of the level's spec beyond its instructions; the default on a GPU.
    pub tune: TuneTables,
    /// Results of a row have the same bits, whatever other rows there are
    /// (docs/design/0042-batch-invariance.md), even if that takes other kernels than the fastest of a single
    /// row. For CPUs.
    pub batch_invariant: bool,
    /// The tile of products of many rows on tensor cores, where there are some.
    pub matrix: Option<MatrixTile>,
    /// The tile of packed weights with f16 activations, where that is another one.
    pub code_matrix: Option<MatrixTile>,
    /// The tile of attention on tensor cores.
    pub attention: Option<AttentionTile>,
}

impl KernelTarget {
    pub fn new(arch: Arch, level: &FeatureLevel) -> KernelTarget {
        let features = level.features.iter().cloned().collect();
        let tune = level.tune.clone().unwrap_or_default();
        let matrix = level.gpu.as_ref().and_then(|gpu| gpu.product);
        let code_matrix = level.gpu.as_ref().and_then(|gpu| gpu.code_product);
        let attention = level.gpu.as_ref().and_then(|gpu| gpu.attention);
        let vector_bits = level.vector_bits;
        let batch_invariant = false;
        KernelTarget { arch, features, vector_bits, tune, batch_invariant, matrix, code_matrix, attention }
    }

    /// Lanes of an f32 vector.
    pub fn f32_lanes(&self) -> u32 {
        (self.vector_bits / 32).clamp(4, 16).next_power_of_two()
    }

    /// Vector registers.
    pub fn registers(&self) -> i64 {
        match self.arch {
            Arch::X86_64 if self.f32_lanes() < 16 => 16,
            Arch::X86_64 | Arch::Aarch64 | Arch::Nvptx => 32,
        }
    }

    /// True if instructions multiply with one lane of a vector, so that an operand need not be repeated in
    /// all lanes.
    pub fn by_lane(&self) -> bool {
        self.arch == Arch::Aarch64
    }

    /// True if ops around a product with results of these dims belong into its kernel: for a single row on a
    /// GPU, where a launch costs more than to compute a row of activations again in every block.
    pub fn joins_single_rows(&self, dims: &[Dim]) -> bool {
        self.arch == Arch::Nvptx && matches!(dims, [row, _] if row.as_const() == Some(1))
    }

    /// True if the machine has the instruction.
    pub fn has(&self, instr: InstrId) -> bool {
        let def = instr.def();
        def.arch == self.arch.name() && def.features.iter().all(|f| self.features.contains(*f))
    }

    /// The way in which activations divide.
    pub fn quotient_method(&self) -> QuotientMethod {
        match self.tune.division {
            DivisionMethod::Divider => QuotientMethod::Division,
            DivisionMethod::Polynomial => QuotientMethod::Polynomial,
        }
    }

    /// The instruction for vectors of 16, 8 or 4 lanes of 32 bits, whichever this machine uses.
    pub(crate) fn find_wide(&self, names: [&[&str]; 3]) -> Option<InstrId> {
        match self.f32_lanes() {
            16 => self.find(names[0]),
            8 => self.find(names[1]),
            _ => self.find(names[2]),
        }
    }

    /// Prefetches a cache line; packed weights are bytes.
    pub fn prefetch_instr(&self, dtype: DType) -> Option<InstrId> {
        let name = match dtype {
            DType::F32 => "prefetch_f32",
            DType::F16 => "prefetch_f16",
            DType::BF16 => "prefetch_bf16",
            DType::I8 => "prefetch_i8",
            _ => "prefetch_u8",
        };
        self.find(&[name])
    }

    /// The instruction that reads a line only to have it in the cache; see [`Self::drops_requests`].
    pub fn touch_instr(&self, dtype: DType) -> Option<InstrId> {
        let name = match dtype {
            DType::F32 => "touch_f32",
            DType::F16 => "touch_f16",
            DType::BF16 => "touch_bf16",
            DType::I8 => "touch_i8",
            _ => return None,
        };
        self.find(&[name])
    }

    /// True if prefetches do less than plain loads in the order of memory.
    pub fn drops_requests(&self) -> bool {
        self.tune.drops_requests
    }

    /// The products of integer activations with packed weights.
    pub fn int_dot(&self) -> IntDot {
        let unsigned =
            self.find_wide([&["vpdpbusd_512"], &["vpdpbusd_256", "vpdpbusd_avx_256"], &["usdot_128"]]);
        let signed = self.find_wide([&[], &[], &["sdot_128"]]);
        let bytes = self.find_wide([&["vpmaddubsw_512"], &["vpmaddubsw_256"], &["pmaddubsw_128"]]);
        let words = self.find_wide([&["vpmaddwd_512"], &["vpmaddwd_256"], &["pmaddwd_128"]]);
        match (unsigned, signed, bytes, words) {
            (Some(instr), ..) => IntDot::Unsigned(instr),
            (None, Some(instr), ..) => IntDot::Signed(instr),
            (None, None, Some(bytes), Some(words)) => {
                let sign = self.find_wide([&[], &["vpsignb_256"], &["psignb_128"]]);
                IntDot::Pairs { bytes, words, sign }
            }
            _ => self.long().map_or(IntDot::Widen, IntDot::Long),
        }
    }

    fn long(&self) -> Option<WideningDot> {
        let find = |name| self.find_wide([&[], &[], &[name]]);
        Some(WideningDot {
            multiply: find("smull_128")?,
            pairs: find("saddlp_128")?,
            join: find("addp_128")?,
        })
    }

    /// The way in which products of pairs of 16-bit codes are added, where that is faster than products in
    /// f32.
    pub fn pair_dot(&self) -> Option<PairDot> {
        let added = self.find_wide([&["vpdpwssd_512"], &["vpdpwssd_256", "vpdpwssd_avx_256"], &[]]);
        let products = self.find_wide([&[], &["vpmaddwd_256"], &["pmaddwd_128"]]);
        added.map(PairDot::Added).or(products.map(PairDot::Products))
    }

    /// Multiplies two rows of 8 codes with two others, every one with every other: twice the products of a
    /// dot instruction.
    pub fn mmla_instr(&self) -> Option<InstrId> {
        self.find_wide([&[], &[], &["smmla_128"]])
    }

    /// Keeps a vector of sums, in i16 or in i32, at its place in the code: for machines with 16 registers.
    pub(crate) fn in_order(&self) -> Option<[InstrId; 2]> {
        let here = |name| self.find_wide([&[], &[name], &[]]);
        Some([here("here_i16_256")?, here("here_i32_256")?])
    }

    /// True if copies to shared memory go on while a thread computes.
    pub fn copies_asynchronously(&self) -> bool {
        self.find(&["cp_async_16_f32"]).is_some()
    }

    /// True if it multiplies fragments of bf16.
    pub fn multiplies_bf16(&self) -> bool {
        self.find(&["mma_m16n8k16_bf16"]).is_some() && self.copies_asynchronously()
    }

    /// The first of `names` that the machine has.
    fn find(&self, names: &[&str]) -> Option<InstrId> {
        names.iter().filter_map(|n| InstrId::by_name(n)).find(|&i| self.has(i))
    }
}

/// The way in which products of pairs of 16-bit codes are added in i32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PairDot {
    /// `i32 += i16 * i16 + i16 * i16`, at twice the rate of f32 products.
    Added(InstrId),
    /// `i16 * i16 + i16 * i16`; sums are an operation of their own, which goes to other units than products
    /// where cores have them (Intel's have three, Zen 3 four).
    Products(InstrId),
}

impl PairDot {
    /// The instruction that multiplies.
    pub fn instr(self) -> InstrId {
        match self {
            PairDot::Added(instr) | PairDot::Products(instr) => instr,
        }
    }
}

impl IntDot {
    /// The instruction that multiplies, if there is one.
    pub fn instr(self) -> Option<InstrId> {
        match self {
            IntDot::Unsigned(instr) | IntDot::Signed(instr) => Some(instr),
            IntDot::Pairs { bytes, .. } => Some(bytes),
            IntDot::Long(long) => Some(long.multiply),
            IntDot::Widen => None,
        }
    }
}

/// The products of 8-bit activations with integer weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntDot {
    /// `i32 += dot4(u8, i8)`: weights as stored, the zero point repaired with the sums of the activations.
    Unsigned(InstrId),
    /// `i32 += dot4(i8, i8)`: weights with the zero point removed.
    Signed(InstrId),
    /// `i16 = u8 * i8 + u8 * i8` (saturating) and `i32 = i16 * i16 + i16 * i16`; `sign` puts the signs of one
    /// operand on the other.
    Pairs { bytes: InstrId, words: InstrId, sign: Option<InstrId> },
    /// `i16 = i8 * i8`, and sums of neighbours.
    Long(WideningDot),
    /// Widening multiplications, column by column.
    Widen,
}

/// Products of bytes as words of their own: `multiply` 8 of them, `pairs` adds neighbouring words in i32,
/// `join` those of two vectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WideningDot {
    pub multiply: InstrId,
    pub pairs: InstrId,
    pub join: InstrId,
}
