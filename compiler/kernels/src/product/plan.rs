//! How a product is computed on a machine: plain data, chosen from the target without tuning by [`choose`].

use super::problem::{Activation, CodeBlock};
use crate::params::{IntDot, KernelTarget, Long};
use mlcc_ir::instr::InstrId;
use mlcc_ir::types::{DType, Format};
use mlcc_kernel_lang::Stream;
use mlcc_quant::TILE;
use mlcc_target::Arch;
use std::fmt;

/// The plan of a product on a CPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CpuPlan {
    /// Vector lanes of 32 bits: 4, 8 or 16; a tile of 16 weight rows is `16 / lanes` vectors.
    pub lanes: u32,
    /// Activation rows of a register tile, which share one unpacking of the weights, in falling order; the last entry is 1
    /// so that every count can be met.
    pub rows: Vec<u32>,
    /// Tiles of weights in a register tile: they share each activation that is broadcast.
    pub tiles: u32,
    /// Columns per iteration of the loop over plain weights (even).
    pub unroll: u32,
    /// Accumulators wanted in flight; with few rows the sum over columns is split to reach it.
    pub in_flight: u32,
    pub dot: IntDot,
    /// For integer products of many rows, in place of `dot`: see [`CodeDot::Mmla`].
    pub mmla: Option<InstrId>,
    /// Activations are lanes of a vector ([`KernelTarget::by_lane`]).
    pub by_lane: bool,
    /// 16-entry f32 lookup for 4-bit codes; needs 16 lanes.
    pub lookup: Option<InstrId>,
    /// `f32 += dot2(bf16, bf16)` of `lanes` lanes, for bf16 weights against bf16 activations.
    pub bf16_dot: Option<InstrId>,
    /// How a single row prefetches its weights.
    pub stream: Stream,
    /// With several rows: prefetches the weights that come next, a few lines at a time.
    pub spread: Option<Spread>,
    /// Most rows of integer products that pass by the weights together; more take panels of many columns.
    pub few: u32,
    /// Register tiles of integer products whose number of rows, at most `few`, is a multiple of that: more rows share an
    /// unpacking.
    pub tall: Option<TallTile>,
    /// Activation rows per pass over the weights, so that they stay in cache; `None` takes all.
    pub chunk: Option<u32>,
    /// Keeps the products of each quad together, where a product is several instructions: sums in i16 and in i32.
    pub in_order: Option<[InstrId; 2]>,
    /// Prefetches what the epilogue touches while the last columns of a register tile are worked on.
    pub epilogue_prefetch: Option<InstrId>,
    pub shares: Shares,
    /// What of this is not as usual, and why.
    pub why: Vec<&'static str>,
}

impl fmt::Display for CpuPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<String> = self.rows.iter().map(u32::to_string).collect();
        write!(f, "register tiles of {} rows x {} tiles, {} lanes", rows.join("/"), self.tiles, self.lanes)?;
        if let Some(tall) = self.tall {
            write!(f, ", tall ones of {} x {}", tall.rows, tall.tiles)?;
        }
        for (what, instr) in [("dot", self.dot.instr()), ("dot", self.bf16_dot), ("panels by", self.mmla)] {
            if let Some(instr) = instr {
                write!(f, ", {what} {}", instr.def().name)?;
            }
        }
        if let Some(chunk) = self.chunk {
            write!(f, ", chunks of {chunk} rows")?;
        }
        match self.stream {
            Stream::None => {}
            Stream::Lines { distance, .. } => write!(f, ", prefetches {distance} bytes ahead")?,
            Stream::Sparse { distance, .. } => write!(f, ", sparse prefetches {distance} bytes ahead")?,
            Stream::Touch { distance, .. } => write!(f, ", touches {distance} bytes ahead")?,
        }
        if self.spread.is_some() {
            write!(f, ", prefetches spread over register tiles")?;
        }
        match self.shares {
            Shares::Slices => write!(f, ", workers share slices")?,
            Shares::SlicesAndChunks => write!(f, ", workers share slices and chunks")?,
        }
        self.why.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

/// What workers share out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shares {
    /// Slices of the weights: each worker has some columns of all rows.
    Slices,
    /// Slices and chunks of rows.
    SlicesAndChunks,
}

/// Rows and tiles of weights of a register tile that has more rows and fewer tiles than others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TallTile {
    pub rows: u32,
    pub tiles: u32,
}

/// Prefetches in equal parts while other weights are worked on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spread {
    pub prefetch: InstrId,
    /// Groups ahead, for rows of integer products that pass by the weights alone.
    pub groups: u32,
}

/// How codes of weights and activations are multiplied and added, four columns (a quad) or more at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CodeDot {
    /// `i32 += dot4`; `centred`: of weights with the zero point removed.
    Dot4 { instr: InstrId, centred: bool },
    /// The 16-bit sums of pairs meet in i16 over a whole group of 4-bit codes (16 products of at most 15 * 128 fit).
    PairSums { bytes: InstrId, words: InstrId },
    /// Magnitudes of centred weights times activations with their signs: a pair of at most 128 * 127 each fits i16.
    SignedPairs { bytes: InstrId, words: InstrId, sign: Option<InstrId> },
    /// Codes of even and odd columns widened to 16 bits, times 16-bit activations of both planes.
    WidePairs { words: InstrId },
    /// Widening multiplies: products of so many quads meet in i16 before they are added in i32; `centred`: of weights with
    /// the zero point removed.
    Long { long: Long, quads: usize, centred: bool },
    /// `i32 +=` every product of two rows of 8 centred codes with two of activations.
    Mmla { instr: InstrId },
    /// Plain multiplications in i32, column by column.
    Columns,
}

impl CodeDot {
    /// The product of weights of `format` and activations in one or two planes of bytes; single ones are at most 127.
    pub fn of(dot: IntDot, format: Format, planes: usize) -> CodeDot {
        match (dot, format) {
            (IntDot::Unsigned(instr), _) => CodeDot::Dot4 { instr, centred: false },
            // 4-bit codes are positive with or without a sign.
            (IntDot::Signed(instr), Format::Q4G32) => CodeDot::Dot4 { instr, centred: false },
            (IntDot::Signed(instr), Format::Q8G32) => CodeDot::Dot4 { instr, centred: true },
            (IntDot::Pairs { bytes, words, .. }, Format::Q4G32) => CodeDot::PairSums { bytes, words },
            (IntDot::Pairs { bytes, words, sign }, Format::Q8G32) if planes == 1 => {
                CodeDot::SignedPairs { bytes, words, sign }
            }
            (IntDot::Pairs { words, .. }, Format::Q8G32) => CodeDot::WidePairs { words },
            // 8 products of at most 15 * 128 fit i16, two of at most 128 * 127, and one where activations may be -128.
            (IntDot::Long(long), Format::Q4G32) => CodeDot::Long { long, quads: 8, centred: false },
            (IntDot::Long(long), Format::Q8G32) => {
                CodeDot::Long { long, quads: if planes == 1 { 2 } else { 1 }, centred: true }
            }
            (IntDot::Widen, _) => CodeDot::Columns,
        }
    }

    /// Whether weights come with the zero point removed, so that it need not be repaired with sums.
    pub fn is_centred(self) -> bool {
        match self {
            CodeDot::Dot4 { centred, .. } | CodeDot::Long { centred, .. } => centred,
            CodeDot::SignedPairs { .. } | CodeDot::Mmla { .. } => true,
            CodeDot::PairSums { .. } | CodeDot::WidePairs { .. } | CodeDot::Columns => false,
        }
    }

    /// Type of the weight codes that it takes.
    pub fn codes_type(self) -> DType {
        match self {
            CodeDot::Dot4 { instr, .. } => instr.def().args[1].dtype,
            CodeDot::SignedPairs { .. } | CodeDot::Long { .. } | CodeDot::Mmla { .. } => DType::I8,
            CodeDot::PairSums { .. } | CodeDot::WidePairs { .. } | CodeDot::Columns => DType::U8,
        }
    }

    /// Vectors of sums that the rows of one vector of weights have with a row of activations, or with two.
    pub fn sums_per_vector(self) -> usize {
        if let CodeDot::Mmla { .. } = self { 2 } else { 1 }
    }
}

/// Activation rows per pass over the weights: their sums (with 48 weight rows 48 KiB) and codes stay in the second-level
/// cache between the pieces of long rows.
const CHUNK: u32 = 256;

/// Groups that integer products of few rows prefetch in advance.
const AHEAD: u32 = 8;
/// Rows of integer products whose sums stay in the first-level cache; with more, weights are better unpacked once.
const FEW_ROWS: u32 = 24;
/// The same where only unpacked weights meet twice as many activations at once: by the cycles of a Neoverse N2 in LLVM's model a group
/// of 32 columns takes 129 per block of four rows as it is, unpacked 67, and about 65 to unpack it.
const FEW_ROWS_BESIDE_MMLA: u32 = 7;

/// The plan for a machine. `single_row`: the product is a matvec (decode).
pub fn choose(target: &KernelTarget, weight: DType, activation: Activation, single_row: bool) -> CpuPlan {
    let lanes = target.f32_lanes();
    let dot = match activation {
        Activation::Codes(_) => target.int_dot(),
        Activation::F32 | Activation::BF16 => IntDot::Widen,
    };
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
    let mmla = target.squares().filter(|_| !single_row && matches!(activation, Activation::Codes(_)));
    let prefetch = target.prefetch(weight);
    let (rows, tiles) = register_tile(target, weight, activation, single_row);
    let tall = tall(target, weight, activation, dot).filter(|_| !single_row);
    let stream = match prefetch.filter(|_| single_row) {
        Some(prefetch) => stream(target, weight, prefetch),
        None => Stream::None,
    };
    let reasons = [
        (single_row && target.drops_requests(), "no prefetches, because this core drops them"),
        (
            matches!(stream, Stream::Sparse { .. }),
            "sparse prefetches, because this core finds the other lines",
        ),
        (mmla.is_some(), "panels from few rows on, because only they feed the MMLA instruction"),
        (tall.is_some(), "tall register tiles, because more rows share the unpacking of 4-bit codes"),
    ];
    CpuPlan {
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
        mmla,
        by_lane: target.by_lane(),
        lookup,
        bf16_dot,
        stream,
        spread: prefetch.filter(|_| !single_row).map(|prefetch| Spread { prefetch, groups: AHEAD }),
        few: if mmla.is_some() { FEW_ROWS_BESIDE_MMLA } else { FEW_ROWS },
        tall,
        chunk: (!single_row).then_some(CHUNK),
        in_order: target.in_order().filter(|_| !single_row && matches!(dot, IntDot::Pairs { .. })),
        epilogue_prefetch: target.prefetch(DType::F32).filter(|_| !single_row),
        shares: Shares::Slices,
        why: reasons.into_iter().filter(|(holds, _)| *holds).map(|(_, why)| why).collect(),
    }
}

/// How a single row prefetches its weights, as measured. Older cores keep few lines on their way by themselves. Zen 5 and Sapphire
/// Rapids (a bf16 dot and AVX-VNNI) read faster what they find by themselves, where the loop has few operations per byte and is
/// short, so that the loads of a stream stand in few places of the code; a line of every group tells them of the next pages. Without
/// AVX-512 it was measured on Zen 3: it reads 98 % of what a bare loop does with prefetches 1.5 to 2.5 KiB ahead, but 82 to 91 % of
/// it with 5 KiB (4-bit and 8-bit codes), floats of 16 bits best with 1 to 1.25 KiB (93 and 90 % for f16 and bf16, with 2 KiB 86), and
/// those of 32, which take few operations, without any.
fn stream(target: &KernelTarget, weight: DType, prefetch: InstrId) -> Stream {
    if target.drops_requests() {
        return Stream::None;
    }
    let finds = target.arch == Arch::X86_64 && target.features.contains("avx512bf16");
    let light = matches!(weight, DType::Packed(Format::Q8G32) | DType::F32 | DType::BF16);
    let sparse = finds && light;
    let distance = match (target.f32_lanes(), weight) {
        (..=8, DType::F32) if target.arch == Arch::X86_64 => return Stream::None,
        (..=8, DType::F16 | DType::BF16) if target.arch == Arch::X86_64 => 1152,
        (..=8, _) if target.arch == Arch::X86_64 => 2048,
        _ if sparse => 4096,
        _ => 5120,
    };
    match sparse {
        true => Stream::Sparse { prefetch, distance },
        false => Stream::Lines { prefetch, distance },
    }
}

/// Bytes of plain weights that stay in the second-level cache while all rows pass by.
const SMALL: usize = 256 * 1024;

impl CpuPlan {
    /// How codes of activations lie for these products.
    pub fn code_block(&self) -> CodeBlock {
        CodeBlock { rows: self.rows[0], columns: if self.mmla.is_some() { 8 } else { 4 } }
    }

    /// The same for a dense product with weights of `n` rows and `k` columns. Small plain weights of few rows and many
    /// columns (the first of a pair of low rank) have too few slices to go round, and many rows of activations that are read
    /// once: so workers share those rows, and slices are as wide as they can be.
    pub fn for_dense(mut self, weight: DType, n: usize, k: usize) -> CpuPlan {
        let small = weight.bytes().is_some_and(|size| n * k * size <= SMALL);
        if !small || self.rows.len() == 1 || n > THIN || n >= k {
            return self.for_shape(weight, n, k);
        }
        let tiles = n.div_ceil(TILE) as u32;
        self.tiles = tiles.div_ceil(tiles.div_ceil(self.tiles));
        self.chunk = Some(SMALL_ROWS);
        self.shares = Shares::SlicesAndChunks;
        self.why.push("workers share rows, because the weights are small and have too few slices");
        self
    }

    /// The same for weights of `n` rows and `k` columns, where that calls for something else.
    pub fn for_shape(mut self, weight: DType, n: usize, k: usize) -> CpuPlan {
        self.tall = self.tall.filter(|_| n.div_ceil(TILE) as u32 >= 4 * self.tiles);
        self.tiles = even_tiles(self.tiles, n.div_ceil(TILE) as u32);
        let bytes = weight.bytes().map(|size| n * k * size);
        if self.rows.len() > 1 && bytes.is_some_and(|b| b <= SMALL) {
            // Long rows of results, not a few columns of all rows: those would be in as many pages. With few columns of
            // weights what the epilogue touches is most of the work.
            let few = TILES_PER_CHUNK * self.rows[0];
            self.chunk = Some(if k < FEW_COLUMNS { few } else { few.max(SMALL_ROWS) });
            self.why.push("short chunks, because the weights stay in the second-level cache");
        }
        self
    }
}

/// Rows of weights that are few.
const THIN: usize = 128;
/// Activation rows that pass by small weights together: enough of them that converting the weights of a slice once pays.
const SMALL_ROWS: u32 = 64;
/// Register tiles that share a slice from the first-level cache where weights have fewer columns than this.
const TILES_PER_CHUNK: u32 = 3;
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

/// Register tiles of 8 rows and 2 tiles have 16 integer sums in registers, and their f32 sums in part in memory. Unpacking
/// 4-bit codes costs them 1.75 vector operations per row and tile, those of 4 rows 3.5, beside 10.25 for the product.
fn tall(target: &KernelTarget, weight: DType, activation: Activation, dot: IntDot) -> Option<TallTile> {
    let Activation::Codes(codes) = activation else { return None };
    let registers = target.arch == Arch::X86_64 && target.f32_lanes() == 16;
    let unpacked = weight == DType::Packed(Format::Q4G32) && matches!(dot, IntDot::Unsigned(_));
    let tall = TallTile { rows: 2 * code_block(target).rows, tiles: 2 };
    (registers && unpacked && codes.planes == 1).then_some(tall)
}

/// Rows of activations and tiles of weights that are worked on together, so that the accumulators (rows * tiles *
/// 16 / lanes) and their operands fit the registers: 32 with AVX-512 and on AArch64, 16 elsewhere. A tile near a square
/// has the fewest loads: an Ice Lake server core loads about one 512-bit vector per cycle, broadcasts included, and
/// multiplies two.
fn register_tile(
    target: &KernelTarget,
    weight: DType,
    activation: Activation,
    single_row: bool,
) -> (Vec<u32>, u32) {
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
        // Dots of pairs need no panel, so that a few rows beyond whole tiles are better one tile than two.
        (Arch::X86_64, 16, Activation::BF16) => (vec![8, 4, 2, 1], 3),
        (Arch::X86_64, 16, _) => (vec![8, 2, 1], 3),
        (Arch::X86_64, 8, _) => (vec![4, 1], 1),
        (Arch::X86_64, ..) => (vec![2, 1], 1),
        (Arch::Aarch64 | Arch::Nvptx, ..) => (vec![4, 1], 1),
    }
}
