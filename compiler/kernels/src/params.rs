//! Schedule parameters of the generators: plain data, chosen from the target without tuning by [`choose`].

use crate::contraction::{Activation, CodeBlock};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{ExprId, Ty};
use mlcc_ir::types::{DType, Format};
use mlcc_kernel_lang::math::Quotient;
use mlcc_quant::TILE;
use mlcc_target::{Arch, Level};
use std::collections::BTreeSet;

/// What a generator needs to know of a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelTarget {
    pub arch: Arch,
    /// LLVM feature names, complete.
    pub features: BTreeSet<String>,
    /// Widest vector that kernels should use; ignored on a GPU.
    pub vector_bits: u32,
}

impl KernelTarget {
    pub fn new(arch: Arch, level: &Level) -> KernelTarget {
        let features = level.features.iter().cloned().collect();
        KernelTarget { arch, features, vector_bits: level.vector_bits }
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

    /// Whether instructions multiply with one lane of a vector, so that an operand need not be repeated in all lanes.
    pub fn by_lane(&self) -> bool {
        self.arch == Arch::Aarch64
    }

    /// True if the machine has the instruction.
    pub fn has(&self, instr: InstrId) -> bool {
        let def = instr.def();
        def.arch == self.arch.name() && def.features.iter().all(|f| self.features.contains(*f))
    }

    /// How activations divide. A divider works beside the units that multiply: on vectors of up to 256 bits for 5 to 7 cycles (Skylake,
    /// Zen 1), about what the 7 operations of the polynomial take from them. Of 512 bits it takes 16, and cores that multiply
    /// two such vectors at once are done earlier; Zen 4 (a bf16 dot, no AVX-VNNI) multiplies them in two passes.
    pub fn quotient(&self) -> Quotient {
        let has = |feature| self.features.contains(feature);
        let passes = has("avx512bf16") && !has("avxvnni");
        if self.arch == Arch::X86_64 && (self.f32_lanes() < 16 || passes) {
            Quotient::Division
        } else {
            Quotient::Polynomial
        }
    }

    /// The instruction for vectors of 16, 8 or 4 lanes of 32 bits, whichever this machine uses.
    fn find_wide(&self, names: [&[&str]; 3]) -> Option<InstrId> {
        match self.f32_lanes() {
            16 => self.find(names[0]),
            8 => self.find(names[1]),
            _ => self.find(names[2]),
        }
    }

    /// Asks for memory ahead of its use; packed weights are bytes.
    pub fn prefetch(&self, dtype: DType) -> Option<InstrId> {
        let name = match dtype {
            DType::F32 => "prefetch_f32",
            DType::F16 => "prefetch_f16",
            DType::BF16 => "prefetch_bf16",
            DType::I8 => "prefetch_i8",
            _ => "prefetch_u8",
        };
        self.find(&[name])
    }

    /// Reads a line for nothing but to have it; see [`Self::drops_requests`].
    pub fn touch(&self, dtype: DType) -> Option<InstrId> {
        let name = match dtype {
            DType::F32 => "touch_f32",
            DType::F16 => "touch_f16",
            DType::BF16 => "touch_bf16",
            DType::I8 => "touch_i8",
            _ => return None,
        };
        self.find(&[name])
    }

    /// Whether requests ahead of their use do less than plain loads in the order of memory, which its prefetchers follow. So it was
    /// measured on Zen 4, the core with a bf16 dot and without AVX-VNNI, which Zen 5 and Sapphire Rapids have: it drops
    /// requests when it has too many.
    pub fn drops_requests(&self) -> bool {
        let has = |feature| self.features.contains(feature);
        self.arch == Arch::X86_64 && has("avx512bf16") && !has("avxvnni")
    }

    /// How integer activations meet packed weights here.
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

    fn long(&self) -> Option<Long> {
        let find = |name| self.find_wide([&[], &[], &[name]]);
        Some(Long { multiply: find("smull_128")?, pairs: find("saddlp_128")?, join: find("addp_128")? })
    }

    /// How products of pairs of 16-bit codes are added, where that is faster than products in f32.
    pub fn pair_dot(&self) -> Option<PairDot> {
        let added = self.find_wide([&["vpdpwssd_512"], &["vpdpwssd_256", "vpdpwssd_avx_256"], &[]]);
        let products = self.find_wide([&[], &["vpmaddwd_256"], &["pmaddwd_128"]]);
        added.map(PairDot::Added).or(products.map(PairDot::Products))
    }

    /// Multiplies two rows of 8 codes with two others, every one with every other: twice the products of a dot instruction.
    pub fn squares(&self) -> Option<InstrId> {
        self.find_wide([&[], &[], &["smmla_128"]])
    }

    /// Keeps a vector of sums, in i16 or in i32, at its place in the code: for machines with 16 registers.
    fn in_order(&self) -> Option<[InstrId; 2]> {
        let here = |name| self.find_wide([&[], &[name], &[]]);
        Some([here("here_i16_256")?, here("here_i32_256")?])
    }

    /// The first of `names` that the machine has.
    fn find(&self, names: &[&str]) -> Option<InstrId> {
        names.iter().filter_map(|n| InstrId::by_name(n)).find(|&i| self.has(i))
    }
}

/// How products of pairs of 16-bit codes are added in i32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PairDot {
    /// `i32 += i16 * i16 + i16 * i16`, at twice the rate of f32 products.
    Added(InstrId),
    /// `i16 * i16 + i16 * i16`; sums are an operation of their own, which goes to other units than products where cores have them
    /// (Intel's have three, Zen 3 four).
    Products(InstrId),
}

impl PairDot {
    /// `sum + dot`, lane by lane; `a` and `b` are words of two codes.
    pub(crate) fn add(self, kb: &mut KernelBuilder, sum: ExprId, a: ExprId, b: ExprId) -> ExprId {
        let pairs = Ty::vector(DType::I16, 2 * kb.ty(sum).lanes);
        let (a, b) = (kb.bitcast(a, pairs), kb.bitcast(b, pairs));
        match self {
            PairDot::Added(instr) => kb.instr(instr, vec![sum, a, b]),
            PairDot::Products(instr) => {
                let product = kb.instr(instr, vec![a, b]);
                kb.add(sum, product)
            }
        }
    }
}

/// How 8-bit activations meet integer weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntDot {
    /// `i32 += dot4(u8, i8)`: weights as stored, the zero point repaired with the sums of the activations.
    Unsigned(InstrId),
    /// `i32 += dot4(i8, i8)`: weights with the zero point removed.
    Signed(InstrId),
    /// `i16 = u8 * i8 + u8 * i8` (saturating) and `i32 = i16 * i16 + i16 * i16`; `sign` puts the signs of one operand on the other.
    Pairs { bytes: InstrId, words: InstrId, sign: Option<InstrId> },
    /// `i16 = i8 * i8`, and sums of neighbours.
    Long(Long),
    /// Widening multiplications, column by column.
    Widen,
}

/// Products of bytes as words of their own: `multiply` 8 of them, `pairs` adds neighbouring words in i32, `join` those of two vectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Long {
    pub multiply: InstrId,
    pub pairs: InstrId,
    pub join: InstrId,
}

/// How one product of codes is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CodeProduct {
    /// `i32 += dot4`; `centred`: of weights with the zero point removed.
    Dot { instr: InstrId, centred: bool },
    /// The 16-bit sums of pairs meet in i16 over a whole group of 4-bit codes (16 products of at most 15 * 128 fit).
    SumsOfPairs { bytes: InstrId, words: InstrId },
    /// Magnitudes of centred weights times activations with their signs: a pair of at most 128 * 127 each fits i16.
    Magnitudes { bytes: InstrId, words: InstrId, sign: Option<InstrId> },
    /// Codes of even and odd columns widened to 16 bits, times 16-bit activations of both planes.
    Words { words: InstrId },
    /// Products of so many quads meet in i16 before they are added in i32; `centred`: of weights with the zero point removed.
    Long { long: Long, quads: usize, centred: bool },
    /// `i32 +=` every product of two rows of 8 centred codes with two of activations.
    Squares { instr: InstrId },
    /// Widening multiplications, column by column.
    Widen,
}

impl CodeProduct {
    /// Whether weights come with the zero point removed, so that it need not be repaired with sums.
    pub fn is_centred(self) -> bool {
        match self {
            CodeProduct::Dot { centred, .. } | CodeProduct::Long { centred, .. } => centred,
            CodeProduct::Magnitudes { .. } | CodeProduct::Squares { .. } => true,
            CodeProduct::SumsOfPairs { .. } | CodeProduct::Words { .. } | CodeProduct::Widen => false,
        }
    }

    /// Type of the weight codes that it takes.
    pub fn codes_type(self) -> DType {
        match self {
            CodeProduct::Dot { instr, .. } => instr.def().args[1].dtype,
            CodeProduct::Magnitudes { .. } | CodeProduct::Long { .. } | CodeProduct::Squares { .. } => {
                DType::I8
            }
            CodeProduct::SumsOfPairs { .. } | CodeProduct::Words { .. } | CodeProduct::Widen => DType::U8,
        }
    }
}

impl IntDot {
    /// The product of weights of `format` and activations in one or two planes of bytes; single ones are at most 127.
    pub fn product(self, format: Format, planes: usize) -> CodeProduct {
        match (self, format) {
            (IntDot::Unsigned(instr), _) => CodeProduct::Dot { instr, centred: false },
            // 4-bit codes are positive with or without a sign.
            (IntDot::Signed(instr), Format::Q4G32) => CodeProduct::Dot { instr, centred: false },
            (IntDot::Signed(instr), Format::Q8G32) => CodeProduct::Dot { instr, centred: true },
            (IntDot::Pairs { bytes, words, .. }, Format::Q4G32) => CodeProduct::SumsOfPairs { bytes, words },
            (IntDot::Pairs { bytes, words, sign }, Format::Q8G32) if planes == 1 => {
                CodeProduct::Magnitudes { bytes, words, sign }
            }
            (IntDot::Pairs { words, .. }, Format::Q8G32) => CodeProduct::Words { words },
            // 8 products of at most 15 * 128 fit i16, two of at most 128 * 127, and one where activations may be -128.
            (IntDot::Long(long), Format::Q4G32) => CodeProduct::Long { long, quads: 8, centred: false },
            (IntDot::Long(long), Format::Q8G32) => {
                CodeProduct::Long { long, quads: if planes == 1 { 2 } else { 1 }, centred: true }
            }
            (IntDot::Widen, _) => CodeProduct::Widen,
        }
    }
}

/// Parameters of the CPU contraction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatMulParams {
    /// Vector lanes of 32 bits: 4, 8 or 16; a tile of 16 weight rows is `16 / lanes` vectors.
    pub lanes: u32,
    /// Activation rows that share one unpacking of the weights, in falling order; the last entry is 1 so that every
    /// count can be met.
    pub rows: Vec<u32>,
    /// Tiles of weights that share each activation that is broadcast.
    pub tiles: u32,
    /// Columns per iteration of the loop over plain weights (even).
    pub unroll: u32,
    /// Accumulators wanted in flight; with few rows the sum over columns is split to reach it.
    pub in_flight: u32,
    pub dot: IntDot,
    /// For integer products of many rows, in place of `dot`: see [`CodeProduct::Squares`].
    pub squares: Option<InstrId>,
    /// Activations are lanes of a vector ([`KernelTarget::by_lane`]).
    pub by_lane: bool,
    /// 16-entry f32 lookup for 4-bit codes; needs 16 lanes.
    pub lookup: Option<InstrId>,
    /// `f32 += dot2(bf16, bf16)` of `lanes` lanes, for bf16 weights against bf16 activations.
    pub bf16_dot: Option<InstrId>,
    /// How weights that stream from memory are asked for, if they are.
    pub prefetch: Option<Prefetch>,
    /// For products of several rows: asks for weights before their use, in integer products of few rows by so many groups.
    pub ahead: Option<(InstrId, u32)>,
    /// Most rows of integer products that pass by the weights together; more take strips of many columns.
    pub few: u32,
    /// Rows and tiles of the blocks of integer products whose number of rows, at most `few`, is a multiple of that: more
    /// rows share an unpacking.
    pub tall: Option<(u32, u32)>,
    /// Activation rows per pass over the weights, so that they stay in cache; `None` takes all.
    pub chunk: Option<u32>,
    /// Keeps the products of each quad together, where a product is several instructions: sums in i16 and in i32.
    pub in_order: Option<[InstrId; 2]>,
    /// Asks for what the epilogue touches while the last columns of a block are worked on.
    pub touch: Option<InstrId>,
    /// Workers share the chunks of rows too, not the columns alone.
    pub share_rows: bool,
}

/// Asks for weights ahead of their use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prefetch {
    pub instr: InstrId,
    /// Bytes from where weights are read to where they are asked for.
    pub distance: u32,
    /// Asks for one line of each group (or iteration) only; the processor finds the others.
    pub sparse: bool,
}

/// Activation rows per pass over the weights: their sums (with 48 weight rows 48 KiB) and codes stay in the second-level
/// cache between the pieces of long rows.
const CHUNK: u32 = 256;

/// Groups that integer products of few rows ask for in advance.
const AHEAD: u32 = 8;
/// Rows of integer products whose sums stay in the first-level cache; with more, weights are better unpacked once.
const FEW_ROWS: u32 = 24;
/// The same where only unpacked weights meet twice as many activations at once: by the cycles of a Neoverse N2 in LLVM's model a group
/// of 32 columns takes 129 per block of four rows as it is, unpacked 67, and about 65 to unpack it.
const FEW_ROWS_BESIDE_SQUARES: u32 = 7;

/// Parameters for a machine. `single_row`: the contraction is a matvec (decode).
pub fn choose(
    target: &KernelTarget,
    weight: DType,
    activation: Activation,
    single_row: bool,
) -> MatMulParams {
    let lanes = target.f32_lanes();
    let dot = if weight.is_packed() { target.int_dot() } else { IntDot::Widen };
    let lookup = match weight {
        DType::Packed(Format::Q4G32) => target.find_wide([&["vpermps_512"], &[], &[]]),
        _ => None,
    };
    let bf16_dot = match activation {
        Activation::BF16 if weight == DType::BF16 => {
            target.find_wide([&["vdpbf16ps_512"], &["vdpbf16ps_256"], &["bfdot_128"]])
        }
        Activation::F32 | Activation::BF16 | Activation::Codes(_) => None,
    };
    let squares = target.squares().filter(|_| !single_row && matches!(activation, Activation::Codes(_)));
    let prefetch = target.prefetch(weight);
    let (rows, tiles) = block(target, weight, activation, single_row);
    MatMulParams {
        lanes,
        rows,
        tiles,
        // Lanes of a vector of bf16 have two columns each.
        unroll: match single_row {
            true => 16,
            false if target.by_lane() && bf16_dot.is_some() => 8,
            false => 4,
        },
        in_flight: 8,
        dot,
        squares,
        by_lane: target.by_lane(),
        lookup,
        bf16_dot,
        prefetch: prefetch.filter(|_| single_row).and_then(|instr| stream(target, weight, instr)),
        ahead: prefetch.filter(|_| !single_row).map(|instr| (instr, AHEAD)),
        few: if squares.is_some() { FEW_ROWS_BESIDE_SQUARES } else { FEW_ROWS },
        tall: tall(target, weight, activation, dot).filter(|_| !single_row),
        chunk: (!single_row).then_some(CHUNK),
        in_order: target.in_order().filter(|_| !single_row && matches!(dot, IntDot::Pairs { .. })),
        touch: target.prefetch(DType::F32).filter(|_| !single_row),
        share_rows: false,
    }
}

/// How a single row asks for its weights, as measured. Older cores keep few lines on their way by themselves. Zen 5 and Sapphire
/// Rapids (a bf16 dot and AVX-VNNI) read faster what they find by themselves, where the loop has few operations per byte and is
/// short, so that the loads of a stream stand in few places of the code; a line of every group tells them of the next pages. Without
/// AVX-512 it was measured on Zen 3: it reads 98 % of what a bare loop does with requests 1.5 to 2.5 KiB ahead, but 82 to 91 % of
/// it with 5 KiB (4-bit and 8-bit codes), floats of 16 bits best with 1 to 1.25 KiB (93 and 90 % for f16 and bf16, with 2 KiB 86), and
/// those of 32, which take few operations, without any.
fn stream(target: &KernelTarget, weight: DType, instr: InstrId) -> Option<Prefetch> {
    if target.drops_requests() {
        return None;
    }
    let finds = target.arch == Arch::X86_64 && target.features.contains("avx512bf16");
    let light = matches!(weight, DType::Packed(Format::Q8G32) | DType::F32 | DType::BF16);
    let sparse = finds && light;
    let distance = match (target.f32_lanes(), weight) {
        (..=8, DType::F32) if target.arch == Arch::X86_64 => return None,
        (..=8, DType::F16 | DType::BF16) if target.arch == Arch::X86_64 => 1152,
        (..=8, _) if target.arch == Arch::X86_64 => 2048,
        _ if sparse => 4096,
        _ => 5120,
    };
    Some(Prefetch { instr, distance, sparse })
}

/// Bytes of plain weights that stay in the second-level cache while all rows pass by.
const SMALL: usize = 256 * 1024;

impl MatMulParams {
    /// How codes of activations lie for these products.
    pub fn code_block(&self) -> CodeBlock {
        CodeBlock { rows: self.rows[0], columns: if self.squares.is_some() { 8 } else { 4 } }
    }

    /// The same for a dense product with weights of `n` rows and `k` columns. Small plain weights of few rows and many
    /// columns (the first of a pair of low rank) have too few slices to go round, and many rows of activations that are read
    /// once: so workers share those rows, and slices are as wide as they can be.
    pub fn for_dense(mut self, weight: DType, n: usize, k: usize) -> MatMulParams {
        let small = weight.bytes().is_some_and(|size| n * k * size <= SMALL);
        if !small || self.rows.len() == 1 || n > THIN || n >= k {
            return self.for_shape(weight, n, k);
        }
        let tiles = n.div_ceil(TILE) as u32;
        self.tiles = tiles.div_ceil(tiles.div_ceil(self.tiles));
        self.chunk = Some(SMALL_ROWS);
        self.share_rows = true;
        self
    }

    /// The same for weights of `n` rows and `k` columns, where that calls for something else.
    pub fn for_shape(mut self, weight: DType, n: usize, k: usize) -> MatMulParams {
        self.tall = self.tall.filter(|_| n.div_ceil(TILE) as u32 >= 4 * self.tiles);
        self.tiles = even_tiles(self.tiles, n.div_ceil(TILE) as u32);
        let bytes = weight.bytes().map(|size| n * k * size);
        if self.rows.len() > 1 && bytes.is_some_and(|b| b <= SMALL) {
            // Long rows of results, not a few columns of all rows: those would be in as many pages. With few columns of
            // weights what the epilogue touches is most of the work.
            let few = BLOCKS_PER_CHUNK * self.rows[0];
            self.chunk = Some(if k < FEW_COLUMNS { few } else { few.max(SMALL_ROWS) });
        }
        self
    }
}

/// Rows of weights that are few.
const THIN: usize = 128;
/// Activation rows that pass by small weights together: enough of them that converting the weights of a slice once pays.
const SMALL_ROWS: u32 = 64;
/// Blocks of rows that share a slice from the first-level cache where weights have fewer columns than this.
const BLOCKS_PER_CHUNK: u32 = 3;
const FEW_COLUMNS: usize = 64;

/// At most `most` tiles per slice, fewer where that makes an even number of equal slices out of the few that there are.
fn even_tiles(most: u32, tiles: u32) -> u32 {
    if tiles >= 4 * most {
        return most;
    }
    let even = |t: &u32| tiles.is_multiple_of(*t) && (tiles / t).is_multiple_of(2);
    (1..=most).rev().find(even).unwrap_or(most)
}

/// How the codes of integer activations lie for products with more than one row.
pub fn code_block(target: &KernelTarget) -> CodeBlock {
    let rows = match (target.arch, target.f32_lanes()) {
        (Arch::X86_64, 8 | 16) => 4,
        (Arch::X86_64, _) => 2,
        // Two vectors of words for every vector of sums.
        (Arch::Aarch64, _) if matches!(target.int_dot(), IntDot::Long(_)) => 2,
        (Arch::Aarch64 | Arch::Nvptx, _) => 4,
    };
    CodeBlock { rows, columns: if target.squares().is_some() { 8 } else { 4 } }
}

/// Blocks of 8 rows and 2 tiles have 16 integer sums in registers, and their f32 sums in part in memory. Unpacking 4-bit
/// codes costs them 1.75 vector operations per row and tile, blocks of 4 rows 3.5, beside 10.25 for the product.
fn tall(target: &KernelTarget, weight: DType, activation: Activation, dot: IntDot) -> Option<(u32, u32)> {
    let Activation::Codes(codes) = activation else { return None };
    let registers = target.arch == Arch::X86_64 && target.f32_lanes() == 16;
    let unpacked = weight == DType::Packed(Format::Q4G32) && matches!(dot, IntDot::Unsigned(_));
    (registers && unpacked && codes.planes == 1).then_some((2 * code_block(target).rows, 2))
}

/// Rows of activations and tiles of weights that are worked on together, so that the accumulators (rows * tiles *
/// 16 / lanes) and their operands fit the registers: 32 with AVX-512 and on AArch64, 16 elsewhere. A block near a square
/// has the fewest loads: an Ice Lake server core loads about one 512-bit vector per cycle, broadcasts included, and
/// multiplies two.
fn block(target: &KernelTarget, weight: DType, activation: Activation, single_row: bool) -> (Vec<u32>, u32) {
    if single_row {
        return (vec![1], 1);
    }
    match (target.arch, target.f32_lanes(), activation) {
        (Arch::X86_64, 16, Activation::Codes(_)) => (vec![code_block(target).rows, 2, 1], 3),
        (_, _, Activation::Codes(_)) if code_block(target).rows > 2 => {
            (vec![code_block(target).rows, 2, 1], 1)
        }
        (_, _, Activation::Codes(_)) => (vec![code_block(target).rows, 1], 1),
        (Arch::X86_64, 16, _) if weight.is_packed() => (vec![12, 4, 1], 1),
        // Dots of pairs need no strip, so that a few rows beyond whole blocks are better one block than two.
        (Arch::X86_64, 16, Activation::BF16) => (vec![8, 4, 2, 1], 3),
        (Arch::X86_64, 16, _) => (vec![8, 2, 1], 3),
        (Arch::X86_64, 8, _) => (vec![4, 1], 1),
        (Arch::X86_64, ..) => (vec![2, 1], 1),
        (Arch::Aarch64 | Arch::Nvptx, ..) => (vec![4, 1], 1),
    }
}
