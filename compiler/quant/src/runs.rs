//! A packing as runs of bytes of one kind, for weights that are drawn where they lie and never quantized.

use crate::layout::TILE;
use crate::plain::Plain;
use crate::{QuantError, packed_bytes, q4g32, q8g32};
use mlcc_ir::types::{DType, Format, Packing};

/// What a byte of a packed tensor is part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Value(Plain),
    Code,
    /// An f16.
    Scale,
    /// The byte that stands in places without a weight.
    Padding(u8),
}

/// `count` times these pieces (bytes, kind), one after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    pub offset: usize,
    pub count: usize,
    pub pieces: Vec<(usize, Kind)>,
}

/// The runs of an `[N, K]` tensor, which cover it in ascending order. `None` where padded columns lie among the others: K is
/// then no multiple of what a packing takes together.
pub fn runs(dtype: DType, packing: Packing, n: usize, k: usize) -> Result<Option<Vec<Run>>, QuantError> {
    let bytes = packed_bytes(dtype, packing, n, k)?;
    let runs = match dtype {
        DType::F32 => plain(Plain::F32, packing, n, k),
        DType::F16 => plain(Plain::F16, packing, n, k),
        DType::BF16 => plain(Plain::BF16, packing, n, k),
        DType::Packed(format) => grouped(format, packing, n, k),
        _ => return Err(QuantError::UnsupportedType { dtype }),
    };
    let used = |run: &Run| run.count > 0 && bytes > 0;
    Ok(runs.map(|runs| runs.into_iter().filter(used).collect()))
}

fn plain(plain: Plain, packing: Packing, n: usize, k: usize) -> Option<Vec<Run>> {
    let (size, value) = (plain.bytes(), Kind::Value(plain));
    Some(match packing {
        Packing::RowMajor => vec![Run { offset: 0, count: n, pieces: vec![(k * size, value)] }],
        Packing::ColMajor => vec![Run { offset: 0, count: k, pieces: vec![(n * size, value)] }],
        Packing::Tile16 => {
            let pair = plain.pair() * size;
            if !k.is_multiple_of(plain.pair()) {
                return None;
            }
            let (tiles, rest) = (n / TILE, n % TILE);
            let part = vec![(rest * pair, value), ((TILE - rest) * pair, Kind::Padding(0))];
            vec![
                Run { offset: 0, count: tiles, pieces: vec![(k * TILE * size, value)] },
                Run {
                    offset: tiles * k * TILE * size,
                    count: if rest > 0 { k / plain.pair() } else { 0 },
                    pieces: part,
                },
            ]
        }
    })
}

fn grouped(format: Format, packing: Packing, n: usize, k: usize) -> Option<Vec<Run>> {
    let (spec, tile_group) = match format {
        Format::Q4G32 => (q4g32::SPEC, q4g32::TILE_GROUP),
        Format::Q8G32 => (q8g32::SPEC, q8g32::TILE_GROUP),
    };
    if !k.is_multiple_of(spec.group) {
        return None;
    }
    let (groups, bytes) = (k / spec.group, spec.group * spec.bits / 8);
    let run = |offset, count, bytes, kind| Run { offset, count, pieces: vec![(bytes, kind)] };
    Some(match packing {
        Packing::RowMajor => {
            vec![run(0, n, groups * bytes, Kind::Code), run(n * groups * bytes, n, 2 * groups, Kind::Scale)]
        }
        // Codes in words of 4 bytes.
        Packing::ColMajor => vec![
            run(0, groups * bytes / 4, 4 * n, Kind::Code),
            run(n * groups * bytes, groups, 2 * n, Kind::Scale),
        ],
        Packing::Tile16 => {
            let (tiles, rest) = (n / TILE, n % TILE);
            let zero = spec.zero_point as u8;
            let zero = Kind::Padding(if spec.bits == 4 { zero | zero << 4 } else { zero });
            let mut part = vec![(2 * rest, Kind::Scale), (2 * (TILE - rest), Kind::Padding(0))];
            for _ in 0..bytes / 4 {
                part.extend([(4 * rest, Kind::Code), (4 * (TILE - rest), zero)]);
            }
            let count = if rest > 0 { groups } else { 0 };
            vec![
                Run {
                    offset: 0,
                    count: tiles * groups,
                    pieces: vec![(2 * TILE, Kind::Scale), (tile_group - 2 * TILE, Kind::Code)],
                },
                Run { offset: tiles * groups * tile_group, count, pieces: part },
            ]
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, PackOptions, layout::Region, pack};

    const DTYPES: [DType; 5] =
        [DType::F32, DType::F16, DType::BF16, DType::Packed(Format::Q4G32), DType::Packed(Format::Q8G32)];

    /// The kind of every byte.
    fn kinds(runs: &[Run], bytes: usize) -> Vec<Kind> {
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

    /// Where the layout says that an element lies, the runs say so too, and elsewhere is what the packer writes there.
    #[test]
    fn runs_agree_with_layouts_and_the_packer() {
        for dtype in DTYPES {
            for packing in [Packing::RowMajor, Packing::ColMajor, Packing::Tile16] {
                for (n, k) in [(1, 32), (16, 64), (40, 96), (35, 32), (7, 5), (33, 2), (0, 32), (3, 0)] {
                    let layout = Layout::new(dtype, packing, n, k).unwrap();
                    let Some(runs) = runs(dtype, packing, n, k).unwrap() else {
                        assert!(k % 32 != 0, "{dtype} {} {n} x {k}", packing.name());
                        continue;
                    };
                    let kinds = kinds(&runs, layout.bytes());
                    let mut expected = vec![None; kinds.len()];
                    let mut put = |at: usize, bytes: usize, kind| expected[at..at + bytes].fill(Some(kind));
                    for (row, col) in (0..n).flat_map(|row| (0..k).map(move |col| (row, col))) {
                        match &layout.region {
                            Region::Plain { plain, place } => {
                                let size = plain.bytes();
                                put(place.at(row, col) * size, size, Kind::Value(*plain));
                            }
                            Region::Group { codes, scales, .. } => {
                                put(codes.at(row, col), 1, Kind::Code);
                                put(scales.at(row, col), 2, Kind::Scale);
                            }
                        }
                    }
                    let written =
                        pack(dtype, packing, n, k, &vec![1.0; n * k], PackOptions::default()).unwrap();
                    for (at, (kind, expected)) in kinds.iter().zip(&expected).enumerate() {
                        let padding = Kind::Padding(written[at]);
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
