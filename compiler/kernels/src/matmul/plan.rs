//! The plan of a product on a machine: plain data, chosen from the target without tuning by [`choose`].

use super::problem::MatmulActivation;
use crate::params::{IntDot, KernelTarget, WideningDot};
use crate::quantize::CodeBlock;
use mlcc_ir::format::CodeValues;
use mlcc_ir::instr::InstrId;
use mlcc_ir::types::{DType, QuantFormat};
use mlcc_kernel_lang::PrefetchMethod;
use mlcc_quant::TILE;
pub use mlcc_target::TallTile;
use mlcc_target::{MatmulTuning, StreamPrefetch as StreamTune, StreamTuning};
use std::fmt;

/// The plan of a product on a CPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CpuPlan {
    /// Vector lanes of 32 bits: 4, 8 or 16; a tile of 16 weight rows is `16 / lanes` vectors.
    pub lanes: u32,
    /// Activation rows of a register tile, which share one unpacking of the weights, in falling order; the
    /// last entry is 1 so that every count can be met.
    pub rows: Vec<u32>,
    /// Tiles of weights in a register tile: they share each activation that is broadcast.
    pub tiles: u32,
    /// Columns per iteration of the loop over plain weights (even).
    pub unroll: u32,
    /// The target number of accumulators in flight; with few rows the sum over columns is split to reach it.
    pub in_flight: u32,
    pub dot: IntDot,
    /// The instruction for integer products of many rows, in place of `dot`: see [`CodeDot::Mmla`].
    pub mmla: Option<InstrId>,
    /// Activations are lanes of a vector ([`KernelTarget::by_lane`]).
    pub by_lane: bool,
    /// 16-entry f32 lookup for 4-bit codes; needs 16 lanes.
    pub lookup: Option<InstrId>,
    /// 16-entry lookup of bytes, for 4-bit codes whose values are not the codes themselves.
    pub byte_lookup: Option<InstrId>,
    /// `f32 += dot2(bf16, bf16)` of `lanes` lanes, for bf16 weights against bf16 activations.
    pub bf16_dot: Option<InstrId>,
    /// The prefetch method of a single row for its weights.
    pub stream: PrefetchMethod,
    /// Prefetches of several rows: of the weights that come next, a few lines at a time.
    pub spread: Option<SpreadPrefetch>,
    /// Most rows of integer products that pass by the weights together; more take panels of many columns.
    pub few: u32,
    /// Register tiles of integer products whose number of rows, at most `few`, is a multiple of that: more
    /// rows share an unpacking.
    pub tall: Option<TallTile>,
    /// Activation rows per pass over the weights, so that they stay in cache; `None` takes all.
    pub chunk: Option<u32>,
    /// Keeps the products of each quad together, where a product is several instructions: sums in i16 and in
    /// i32.
    pub in_order: Option<[InstrId; 2]>,
    /// Prefetches what the epilogue touches while the last columns of a register tile are worked on.
    pub epilogue_prefetch: Option<InstrId>,
    pub shares: MatmulShares,
    /// Sizes of the machine.
    pub sizes: MatmulTuning,
    /// The choices that are not as usual, with their reasons.
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
            PrefetchMethod::None => {}
            PrefetchMethod::Lines { distance, .. } => write!(f, ", prefetches {distance} bytes ahead")?,
            PrefetchMethod::Sparse { distance, .. } => {
                write!(f, ", sparse prefetches {distance} bytes ahead")?
            }
            PrefetchMethod::Touch { distance, .. } => write!(f, ", touches {distance} bytes ahead")?,
        }
        if self.spread.is_some() {
            write!(f, ", prefetches spread over register tiles")?;
        }
        match self.shares {
            MatmulShares::Slices => write!(f, ", workers share slices")?,
            MatmulShares::SlicesAndChunks => write!(f, ", workers share slices and chunks")?,
        }
        self.why.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

/// The work that workers share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MatmulShares {
    /// Slices of the weights: each worker has some columns of all rows.
    Slices,
    /// Slices and chunks of rows.
    SlicesAndChunks,
}

/// Prefetches in equal parts while other weights are worked on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpreadPrefetch {
    pub prefetch: InstrId,
    /// Groups ahead, for rows of integer products that pass by the weights alone.
    pub groups: u32,
}

/// The way in which codes of weights and activations are multiplied and added, four columns (a quad) or more
/// at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CodeDot {
    /// `i32 += dot4`; `centred`: of weights with the zero point removed.
    Dot4 { instr: InstrId, centred: bool },
    /// The 16-bit sums of pairs of small numbers meet in i16 over `quads` quads: of 4-bit codes over all 8
    /// (16 products of at most 15 * 128 fit), of E2M1 over 4 (8 of at most 24 * 128).
    PairSums { bytes: InstrId, words: InstrId, quads: usize },
    /// Magnitudes of centred weights times activations with their signs: a pair of at most 128 * 127 each
    /// fits i16.
    SignedPairs { bytes: InstrId, words: InstrId, sign: Option<InstrId> },
    /// Codes of even and odd columns widened to 16 bits, times 16-bit activations of both planes.
    WidePairs { words: InstrId },
    /// Widening multiplies: products of `quads` quads meet in i16 before they are added in i32; `centred`: of
    /// weights with the zero point removed.
    Long { long: WideningDot, quads: usize, centred: bool },
    /// `i32 +=` every product of two rows of 8 centred codes with two of activations.
    Mmla { instr: InstrId },
    /// Plain multiplications in i32, column by column.
    Columns,
}

impl CodeDot {
    /// The product of weights of `format` and activations in one or two planes of bytes; single ones are at
    /// most 127.
    pub fn for_weights(dot: IntDot, format: QuantFormat, planes: usize) -> CodeDot {
        const SMALL: usize = 24;
        match (dot, format.largest_number()) {
            (IntDot::Unsigned(instr), _) => CodeDot::Dot4 { instr, centred: false },
            // Small numbers are positive with or without a sign.
            (IntDot::Signed(instr), ..=SMALL) => CodeDot::Dot4 { instr, centred: false },
            (IntDot::Signed(instr), _) => CodeDot::Dot4 { instr, centred: true },
            (IntDot::Pairs { bytes, words, .. }, largest @ ..=SMALL) => {
                CodeDot::PairSums { bytes, words, quads: if largest < 16 { 8 } else { 4 } }
            }
            (IntDot::Pairs { bytes, words, sign }, _) if planes == 1 => {
                CodeDot::SignedPairs { bytes, words, sign }
            }
            (IntDot::Pairs { words, .. }, _) => CodeDot::WidePairs { words },
            // 8 products of at most 24 * 128 fit i16, two of at most 128 * 127, and one where activations may
            // be -128.
            (IntDot::Long(long), ..=SMALL) => CodeDot::Long { long, quads: 8, centred: false },
            (IntDot::Long(long), _) => {
                CodeDot::Long { long, quads: if planes == 1 { 2 } else { 1 }, centred: true }
            }
            (IntDot::Widen, _) => CodeDot::Columns,
        }
    }

    /// True if weights come with the zero point removed, so that it need not be corrected with sums.
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
    pub fn accumulators_per_vector(self) -> usize {
        if let CodeDot::Mmla { .. } = self { 2 } else { 1 }
    }
}

/// The plan for a machine. `single_row`: the product is a matvec (decode).
pub fn choose(
    target: &KernelTarget,
    weight: DType,
    activation: MatmulActivation,
    single_row: bool,
) -> CpuPlan {
    let lanes = target.f32_lanes();
    let dot = match activation {
        MatmulActivation::Codes(_) => target.int_dot(),
        MatmulActivation::F32 | MatmulActivation::F16 | MatmulActivation::BF16 => IntDot::Widen,
    };
    let lookup = match weight {
        DType::Packed(format) if format.bits == 4 => target.find_wide([&["vpermps_512"], &[], &[]]),
        _ => None,
    };
    let byte_lookup = match weight {
        DType::Packed(format) if format.values == CodeValues::E2M1 => {
            target.find_wide([&["vpshufb_512"], &["vpshufb_256"], &["pshufb_128", "tbl1_128"]])
        }
        _ => None,
    };
    let bf16_dot = match activation {
        MatmulActivation::BF16 if weight == DType::BF16 => {
            target.find_wide([&["vdpbf16ps_512"], &["vdpbf16ps_256"], &["bfdot_128"]])
        }
        MatmulActivation::F32
        | MatmulActivation::F16
        | MatmulActivation::BF16
        | MatmulActivation::Codes(_) => None,
    };
    let mmla =
        target.mmla_instr().filter(|_| !single_row && matches!(activation, MatmulActivation::Codes(_)));
    let prefetch = target.prefetch_instr(weight);
    let (rows, tiles) = register_tile(target, weight, activation, single_row);
    let tall = tall(target, weight, activation, dot).filter(|_| !single_row);
    let stream = match prefetch.filter(|_| single_row) {
        Some(prefetch) => stream(&target.tune.stream, weight, prefetch),
        None => PrefetchMethod::None,
    };
    let reasons = [
        (single_row && target.drops_requests(), "no prefetches, because this core drops them"),
        (
            matches!(stream, PrefetchMethod::Sparse { .. }),
            "sparse prefetches, because this core finds the other lines",
        ),
        (mmla.is_some(), "panels from few rows on, because only they feed the MMLA instruction"),
        (tall.is_some(), "tall register tiles, because more rows share the unpacking of 4-bit codes"),
    ];
    let sizes = target.tune.product;
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
        // Sums over columns are cut alike for any number of rows, so not at all.
        in_flight: if target.batch_invariant && !weight.is_packed() { 1 } else { 8 },
        dot,
        mmla,
        by_lane: target.by_lane(),
        lookup,
        byte_lookup,
        bf16_dot,
        stream,
        spread: prefetch
            .filter(|_| !single_row)
            .map(|prefetch| SpreadPrefetch { prefetch, groups: sizes.groups_ahead }),
        few: if mmla.is_some() { sizes.few_rows_by_mmla } else { sizes.few_rows },
        tall,
        chunk: (!single_row).then_some(sizes.chunk_rows),
        in_order: target.in_order().filter(|_| !single_row && matches!(dot, IntDot::Pairs { .. })),
        epilogue_prefetch: target.prefetch_instr(DType::F32).filter(|_| !single_row),
        shares: MatmulShares::Slices,
        sizes,
        why: reasons.into_iter().filter(|(holds, _)| *holds).map(|(_, why)| why).collect(),
    }
}

/// The prefetch method of a single row for its weights.
fn stream(streams: &StreamTuning, weight: DType, prefetch: InstrId) -> PrefetchMethod {
    let stream = match weight {
        DType::F32 => streams.f32,
        DType::F16 => streams.f16,
        DType::BF16 => streams.bf16,
        DType::Packed(format) if format.bits == 8 => streams.q8,
        _ => streams.q4,
    };
    match stream {
        StreamTune::None => PrefetchMethod::None,
        StreamTune::Every { distance } => PrefetchMethod::Lines { prefetch, distance: distance.into() },
        StreamTune::One { distance } => PrefetchMethod::Sparse { prefetch, distance: distance.into() },
    }
}

impl CpuPlan {
    /// The layout of codes of activations for these products.
    pub fn code_block(&self) -> CodeBlock {
        CodeBlock { rows: self.rows[0], columns: if self.mmla.is_some() { 8 } else { 4 } }
    }

    /// The same for a dense product with weights of `n` rows and `k` columns. Small plain weights of few rows
    /// and many columns (the first of a pair of low rank) have too few slices to go round, and many rows of
    /// activations that are read once: so workers share those rows, and slices are as wide as they can be.
    pub fn for_dense(mut self, weight: DType, n: usize, k: usize) -> CpuPlan {
        let small = weight.bytes().is_some_and(|size| n * k * size <= self.sizes.small_bytes as usize);
        if !small || self.rows.len() == 1 || n > self.sizes.thin_rows as usize || n >= k {
            return self.for_shape(weight, n, k);
        }
        let tiles = n.div_ceil(TILE) as u32;
        self.tiles = tiles.div_ceil(tiles.div_ceil(self.tiles));
        self.chunk = Some(self.sizes.small_rows);
        self.shares = MatmulShares::SlicesAndChunks;
        self.why.push("workers share rows, because the weights are small and have too few slices");
        self
    }

    /// The same for weights of `n` rows and `k` columns, where that calls for something else.
    pub fn for_shape(mut self, weight: DType, n: usize, k: usize) -> CpuPlan {
        self.tall = self.tall.filter(|_| n.div_ceil(TILE) as u32 >= 4 * self.tiles);
        self.tiles = even_tiles(self.tiles, n.div_ceil(TILE) as u32);
        let bytes = weight.bytes().map(|size| n * k * size);
        if self.rows.len() > 1 && bytes.is_some_and(|b| b <= self.sizes.small_bytes as usize) {
            // Long rows of results, not a few columns of all rows: those would be in as many pages. With few
            // columns of weights what the epilogue touches is most of the work.
            let few = self.sizes.tiles_per_chunk * self.rows[0];
            let narrow = k < self.sizes.few_columns as usize;
            self.chunk = Some(if narrow { few } else { few.max(self.sizes.small_rows) });
            self.why.push("short chunks, because the weights stay in the second-level cache");
        }
        self
    }
}

/// At most `most` tiles per slice, fewer where that makes an even number of equal slices out of the few that
/// there are.
fn even_tiles(most: u32, tiles: u32) -> u32 {
    if tiles >= 4 * most {
        return most;
    }
    let even = |t: &u32| tiles.is_multiple_of(*t) && (tiles / t).is_multiple_of(2);
    (1..=most).rev().find(even).unwrap_or(most)
}

/// The layout of the codes of integer activations for products with more than one row.
pub fn code_block(target: &KernelTarget) -> CodeBlock {
    let rows = target.tune.tile.codes.rows[0];
    CodeBlock { rows, columns: if target.mmla_instr().is_some() { 8 } else { 4 } }
}

/// Register tiles of more rows, where the machine has registers for them and codes are unpacked for a dot.
fn tall(target: &KernelTarget, weight: DType, activation: MatmulActivation, dot: IntDot) -> Option<TallTile> {
    let MatmulActivation::Codes(codes) = activation else { return None };
    let unpacked = matches!(weight, DType::Packed(format) if format.bits < 8);
    target.tune.tile.tall.filter(|_| unpacked && matches!(dot, IntDot::Unsigned(_)) && codes.planes == 1)
}

/// Rows of activations and tiles of weights that are worked on together, so that the accumulators (rows *
/// tiles * 16 / lanes) and their operands fit the registers.
fn register_tile(
    target: &KernelTarget,
    weight: DType,
    activation: MatmulActivation,
    single_row: bool,
) -> (Vec<u32>, u32) {
    if single_row {
        return (vec![1], 1);
    }
    let tiles = &target.tune.tile;
    let tile = match activation {
        MatmulActivation::Codes(_) => &tiles.codes,
        _ if weight.is_packed() => &tiles.packed,
        MatmulActivation::BF16 => &tiles.bf16,
        MatmulActivation::F32 | MatmulActivation::F16 => &tiles.plain,
    };
    (tile.rows.clone(), tile.tiles)
}
