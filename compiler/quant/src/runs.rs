//! A packing as runs of bytes of one kind, for weights that are drawn where they lie and never quantized.

use crate::group::GroupSpec;
use crate::layout::TILE;
use crate::packed::{TileSizes, padding_word};
use crate::plain::PlainType;
use crate::{FragmentSizes, QuantError, packed_bytes};
use mlcc_ir::types::{DType, Packing, QuantFormat};

/// The role of a byte of a packed tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ByteKind {
    Value(PlainType),
    Code,
    /// A scale, in the type of the format's scales.
    Scale,
    /// A zero point or a minimum, of the same type.
    Zero,
    /// The byte in places without a weight.
    Padding(u8),
}

/// `count` times these adjacent pieces (bytes, kind).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ByteRun {
    pub offset: usize,
    pub count: usize,
    pub pieces: Vec<(usize, ByteKind)>,
}

/// The runs of an `[N, K]` tensor, which cover it in ascending order. `None` where padded columns lie among
/// the others: K is then no multiple of what a packing takes together.
pub fn byte_runs(
    dtype: DType,
    packing: Packing,
    n: usize,
    k: usize,
) -> Result<Option<Vec<ByteRun>>, QuantError> {
    let bytes = packed_bytes(dtype, packing, n, k)?;
    let runs = match dtype {
        DType::F32 => plain(PlainType::F32, packing, n, k),
        DType::F16 => plain(PlainType::F16, packing, n, k),
        DType::BF16 => plain(PlainType::BF16, packing, n, k),
        DType::Packed(format) => grouped(format, packing, n, k),
        _ => return Err(QuantError::UnsupportedType { dtype }),
    };
    let used = |run: &ByteRun| run.count > 0 && bytes > 0;
    Ok(runs.map(|runs| runs.into_iter().filter(used).collect()))
}

fn plain(plain: PlainType, packing: Packing, n: usize, k: usize) -> Option<Vec<ByteRun>> {
    let (size, value) = (plain.bytes(), ByteKind::Value(plain));
    Some(match packing {
        Packing::RowMajor | Packing::Fragments => {
            vec![ByteRun { offset: 0, count: n, pieces: vec![(k * size, value)] }]
        }
        Packing::ColMajor => vec![ByteRun { offset: 0, count: k, pieces: vec![(n * size, value)] }],
        Packing::Tile16 => {
            let pair = plain.pair_columns() * size;
            if !k.is_multiple_of(plain.pair_columns()) {
                return None;
            }
            let (tiles, rest) = (n / TILE, n % TILE);
            let part = vec![(rest * pair, value), ((TILE - rest) * pair, ByteKind::Padding(0))];
            vec![
                ByteRun { offset: 0, count: tiles, pieces: vec![(k * TILE * size, value)] },
                ByteRun {
                    offset: tiles * k * TILE * size,
                    count: if rest > 0 { k / plain.pair_columns() } else { 0 },
                    pieces: part,
                },
            ]
        }
    })
}

fn grouped(format: QuantFormat, packing: Packing, n: usize, k: usize) -> Option<Vec<ByteRun>> {
    let spec = GroupSpec::new(format, k);
    if !k.is_multiple_of(spec.group) {
        return None;
    }
    let (groups, words) = (k / spec.group, spec.group / format.codes_per_word());
    let number = format.scale.bytes();
    let run = |offset, count, bytes, kind| ByteRun { offset, count, pieces: vec![(bytes, kind)] };
    let kinds = &[ByteKind::Scale, ByteKind::Zero][..format.numbers_per_group()];
    // Where the numbers of each kind begin.
    let begin = |i: usize| n * groups * (4 * words + i * number);
    let numbers = |count: usize, bytes: usize| {
        kinds.iter().enumerate().map(move |(i, &kind)| run(begin(i), count, bytes, kind))
    };
    Some(match packing {
        Packing::RowMajor => {
            let codes = run(0, n, groups * 4 * words, ByteKind::Code);
            std::iter::once(codes).chain(numbers(n, number * groups)).collect()
        }
        Packing::ColMajor => {
            let codes = run(0, groups * words, 4 * n, ByteKind::Code);
            std::iter::once(codes).chain(numbers(groups, number * n)).collect()
        }
        Packing::Tile16 => {
            let sizes = TileSizes::new(format, k);
            let (tiles, rest) = (n / TILE, n % TILE);
            let mut part = Vec::new();
            for &kind in kinds {
                part.extend([(number * rest, kind), (number * (TILE - rest), ByteKind::Padding(0))]);
            }
            for _ in 0..words {
                part.push((4 * rest, ByteKind::Code));
                part.extend(padding(spec, TILE - rest));
            }
            let count = if rest > 0 { groups } else { 0 };
            let codes = (sizes.group() - sizes.header(), ByteKind::Code);
            let whole = kinds.iter().map(|&kind| (number * TILE, kind)).chain([codes]).collect();
            vec![
                ByteRun { offset: 0, count: tiles * groups, pieces: whole },
                ByteRun { offset: tiles * sizes.tile(), count, pieces: part },
            ]
        }
        Packing::Fragments => {
            let sizes = FragmentSizes::new(DType::Packed(format), n, k).ok()?;
            let pieces = vec![(sizes.scale_bytes(), ByteKind::Scale), (sizes.code_bytes(), ByteKind::Code)];
            vec![ByteRun { offset: 0, count: sizes.blocks(), pieces }]
        }
    })
}

/// The pieces of this many words without weights.
fn padding(spec: GroupSpec, words: usize) -> Vec<(usize, ByteKind)> {
    let word = padding_word(spec);
    if word.iter().all(|&byte| byte == word[0]) {
        return vec![(words * word.len(), ByteKind::Padding(word[0]))];
    }
    vec![word.map(|byte| (1, ByteKind::Padding(byte))); words].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PackOptions, TensorLayout, layout::LayoutRegion, pack, storage_types};

    /// The kind of every byte.
    fn kinds(runs: &[ByteRun], bytes: usize) -> Vec<ByteKind> {
        let mut kinds = Vec::new();
        for run in runs {
            assert_eq!(run.offset, kinds.len(), "runs follow each other");
            for _ in 0..run.count {
                run.pieces.iter().for_each(|&(bytes, kind)| kinds.extend(std::iter::repeat_n(kind, bytes)));
            }
        }
        assert_eq!(kinds.len(), bytes, "runs cover the tensor");
        kinds
    }

    /// The runs agree with the layout about the place of every element; elsewhere they say what the packer
    /// writes there.
    #[test]
    fn runs_agree_with_layouts_and_the_packer() {
        for dtype in storage_types() {
            let group = if let DType::Packed(format) = dtype { format.group_size(1) } else { 32 };
            for packing in Packing::ALL {
                let (one, two, three) = (group, 2 * group, 3 * group);
                for (n, k) in [
                    (1, one),
                    (16, two),
                    (32, 4 * group),
                    (40, three),
                    (35, one),
                    (7, 5),
                    (33, 2),
                    (0, one),
                    (3, 0),
                ] {
                    if packing == Packing::Fragments && FragmentSizes::new(dtype, n, k).is_err() {
                        continue;
                    }
                    let layout = TensorLayout::new(dtype, packing, n, k).unwrap();
                    let Some(runs) = byte_runs(dtype, packing, n, k).unwrap() else {
                        assert!(k % group != 0, "{dtype} {} {n} x {k}", packing.name());
                        continue;
                    };
                    let kinds = kinds(&runs, layout.bytes());
                    let mut expected = vec![None; kinds.len()];
                    let mut put = |at: usize, bytes: usize, kind| expected[at..at + bytes].fill(Some(kind));
                    for (row, col) in (0..n).flat_map(|row| (0..k).map(move |col| (row, col))) {
                        match &layout.region {
                            LayoutRegion::Plain { plain, place } => {
                                let size = plain.bytes();
                                put(place.evaluate(row, col) * size, size, ByteKind::Value(*plain));
                            }
                            LayoutRegion::Group { spec, codes, scales, zeros, .. } => {
                                let unit = if spec.format.fills_bytes() { 1 } else { 4 };
                                put(codes.evaluate(row, col), unit, ByteKind::Code);
                                put(scales.evaluate(row, col), spec.number_type().bytes(), ByteKind::Scale);
                                if let Some(zeros) = zeros {
                                    put(zeros.evaluate(row, col), spec.number_type().bytes(), ByteKind::Zero);
                                }
                            }
                        }
                    }
                    let written =
                        pack(dtype, packing, n, k, &vec![1.0; n * k], PackOptions::default()).unwrap();
                    for (at, (kind, expected)) in kinds.iter().zip(&expected).enumerate() {
                        let padding = ByteKind::Padding(written[at]);
                        assert_eq!(
                            *kind,
                            expected.unwrap_or(padding),
                            "{dtype} {} {n} x {k}, byte {at}",
                            packing.name()
                        );
                    }
                }
            }
        }
    }
}
