//! Parts of values and parameters: which elements along an axis a rank holds.

use mlcc_ir::dim::Dim;
use mlcc_ir::module::{ParamSource, RowBlocks};
use mlcc_ir::types::TensorType;
use std::ops::Range;

/// Equally long parts of an axis. Where its size does not divide, parts overlap: the last ones begin earlier,
/// so that they have as many elements. Shared elements are the same in all parts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct AxisParts {
    pub count: usize,
    /// Elements that stay together (a head, a tile of rows); 1 where parts do not overlap.
    pub unit: usize,
}

impl AxisParts {
    pub const WHOLE: AxisParts = AxisParts::new(1);

    pub const fn new(count: usize) -> AxisParts {
        AxisParts { count, unit: 1 }
    }

    /// Parts of an axis of `size` elements, in units that divide it.
    pub fn of_units(count: usize, unit: usize, size: usize) -> AxisParts {
        let divides = size.checked_div(unit).is_some_and(|units| units.is_multiple_of(count));
        AxisParts { count, unit: if divides { 1 } else { unit } }
    }

    /// True if no element is in two parts.
    pub fn is_disjoint(self, size: usize) -> bool {
        self.unit == 1 && size.is_multiple_of(self.count)
    }

    /// True if an axis of this size has such parts.
    pub fn fits_axis(self, size: usize) -> bool {
        size > 0 && size.is_multiple_of(self.unit)
    }

    /// Elements of a part.
    pub fn len(self, size: usize) -> usize {
        (size / self.unit).div_ceil(self.count) * self.unit
    }

    /// The first element of a part.
    pub fn part_start(self, size: usize, number: usize) -> usize {
        let len = self.len(size);
        (number * len).min(size - len)
    }

    /// The pieces from which an axis is joined: numbers of parts, and the elements of each that are in no
    /// earlier part, counted from the part's first one.
    pub fn distinct_ranges(self, size: usize) -> Vec<(usize, Range<usize>)> {
        let len = self.len(size);
        let (full, rest) = (size / len, size % len);
        let mut pieces: Vec<_> = (0..full).map(|number| (number, 0..len)).collect();
        if rest > 0 {
            pieces.push((full, len - rest..len));
        }
        pieces
    }

    /// The number of the part that a rank has.
    pub fn of_rank(self, rank: usize, ranks: usize) -> usize {
        rank * self.count / ranks
    }

    /// The first rank that has a part.
    pub fn rank(self, number: usize, ranks: usize) -> usize {
        (number * ranks).div_ceil(self.count)
    }

    /// The same parts where an axis of `from` elements is one of `to` in row-major order; `None` if they
    /// begin or end within an element.
    pub fn regrouped(self, from: usize, to: usize) -> Option<AxisParts> {
        if self.is_disjoint(from) {
            return to.is_multiple_of(self.count).then_some(self);
        }
        let unit = match (to.is_multiple_of(from), from.is_multiple_of(to)) {
            (true, _) => self.unit * (to / from),
            (_, true) if self.unit.is_multiple_of(from / to) => self.unit / (from / to),
            _ => return None,
        };
        Some(AxisParts { unit, ..self })
    }
}

/// Rank `r` of `ranks` holds part `r * parts / ranks` along an axis; where the axis has segments, one such
/// part of each, concatenated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct ShardSpec {
    pub axis: usize,
    pub parts: AxisParts,
    pub segments: Option<AxisSegments>,
}

impl ShardSpec {
    pub fn new(axis: usize, parts: usize) -> ShardSpec {
        ShardSpec::with_parts(axis, AxisParts::new(parts))
    }
    pub fn with_parts(axis: usize, parts: AxisParts) -> ShardSpec {
        ShardSpec { axis, parts, segments: None }
    }
    pub fn on_axis(self, axis: usize) -> ShardSpec {
        ShardSpec { axis, ..self }
    }

    /// True if an axis of this size has such parts.
    pub fn fits_dim(&self, dim: &Dim) -> bool {
        match self.segments {
            None => constant_size(dim).is_some_and(|size| self.parts.fits_axis(size)),
            Some(segments) => constant_size(dim) == Some(segments.len()),
        }
    }

    /// The size of a part.
    pub fn part_size(&self, dim: &Dim) -> Dim {
        match (self.segments, constant_size(dim)) {
            (Some(segments), _) => Dim::from(segments.rank_len()),
            (None, Some(size)) => Dim::from(self.parts.len(size)),
            (None, None) => dim.floor_div(self.parts.count as i64),
        }
    }

    /// The elements of an axis of `size` elements that a rank has.
    pub fn rank_ranges(&self, size: usize, rank: usize, ranks: usize) -> Vec<Range<usize>> {
        let all = |parts: AxisParts, begin: usize, size: usize| {
            let start = begin + parts.part_start(size, parts.of_rank(rank, ranks));
            start..start + parts.len(size)
        };
        let Some(segments) = self.segments else { return vec![all(self.parts, 0, size)] };
        let mut at = 0;
        let of = |(size, parts): (usize, AxisParts)| {
            at += size;
            all(parts, at - size, size)
        };
        segments.iter().map(of).collect()
    }

    /// The place of these elements of the axis in a rank's part: where they begin, and their cut when they
    /// are alone, `None` where every rank has all of them. Returns `None` if they begin or end within a
    /// segment.
    pub fn slice(&self, start: usize, len: usize) -> Option<(usize, Option<ShardSpec>)> {
        let (at, segments) = self.segments?.slice(start, len)?;
        let cut = match segments.iter().next() {
            Some((_, AxisParts::WHOLE)) if segments.count == 1 => None,
            Some((_, parts)) if segments.count == 1 => Some(ShardSpec::with_parts(self.axis, parts)),
            _ => Some(ShardSpec { segments: Some(segments), ..*self }),
        };
        Some((at, cut))
    }
}

/// Most segments of an axis.
const MOST: usize = 8;

/// The segments of an axis: their sizes and parts. With one part, every rank has all of a segment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct AxisSegments {
    count: usize,
    of: [(usize, AxisParts); MOST],
}

impl AxisSegments {
    pub fn new(of: &[(usize, AxisParts)]) -> Option<AxisSegments> {
        let mut all = [(0, AxisParts::WHOLE); MOST];
        all.get_mut(..of.len())?.copy_from_slice(of);
        (!of.is_empty()).then_some(AxisSegments { count: of.len(), of: all })
    }

    /// Lengths and parts.
    pub fn iter(&self) -> impl Iterator<Item = (usize, AxisParts)> + '_ {
        self.of[..self.count].iter().copied()
    }

    pub fn len(&self) -> usize {
        self.iter().map(|(len, _)| len).sum()
    }

    /// Elements of a rank.
    pub fn rank_len(&self) -> usize {
        self.iter().map(|(len, parts)| parts.len(len)).sum()
    }

    /// The segments of a range, and where they begin on a rank.
    fn slice(&self, start: usize, len: usize) -> Option<(usize, AxisSegments)> {
        let (mut at, mut local, mut found) = (0, 0, Vec::new());
        for (size, parts) in self.iter() {
            match at {
                at if at >= start && at + size <= start + len => found.push((size, parts)),
                at if at + size <= start => local += parts.len(size),
                at if at >= start + len => {}
                _ => return None,
            }
            at += size;
        }
        Some((local, AxisSegments::new(&found)?))
    }

    /// The segments with borders around a range, and the given parts within it, if any. `None` if there would
    /// be too many.
    pub fn split_at(&self, start: usize, len: usize, parts: Option<AxisParts>) -> Option<AxisSegments> {
        let (mut at, mut all) = (0, Vec::new());
        for (size, own) in self.iter() {
            let borders = [start, start + len].map(|border| border.clamp(at, at + size));
            let pieces = [at..borders[0], borders[0]..borders[1], borders[1]..at + size];
            for (number, piece) in pieces.into_iter().enumerate().filter(|(_, piece)| !piece.is_empty()) {
                // Fewer parts, or larger units, win: so two users with different ones come to an end.
                let coarser = |parts: &AxisParts| {
                    parts.count < own.count || parts.count == own.count && parts.unit > own.unit
                };
                let asked = parts.filter(|parts| number == 1 && coarser(parts));
                let wanted = asked.unwrap_or(own);
                // Pieces that were not requested are on every rank where they do not divide.
                let keeps = piece.len() == size || asked.is_some();
                let fits =
                    if keeps { wanted.fits_axis(piece.len()) } else { wanted.is_disjoint(piece.len()) };
                all.push((piece.len(), if fits { wanted } else { AxisParts::WHOLE }));
            }
            at += size;
        }
        AxisSegments::new(&all)
    }
}

/// The distribution of rows of parameters: each rank has one of `parts` of every block of `outer`, or of each
/// of the segments.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct RowShardSpec {
    pub outer: usize,
    pub parts: AxisParts,
    pub segments: Option<AxisSegments>,
}

impl RowShardSpec {
    /// The number of rows of a rank, of `rows` in all.
    pub fn len(&self, rows: usize) -> usize {
        match self.segments {
            Some(segments) => segments.rank_len(),
            None => self.parts.len(rows / self.outer) * self.outer,
        }
    }

    /// The rows of a rank, of a source with `rows` rows.
    pub fn shard_source(&self, source: &ParamSource, rows: usize, rank: usize, ranks: usize) -> ParamSource {
        let of_rows = |blocks| ParamSource::Rows(blocks, Box::new(source.clone()));
        let Some(segments) = self.segments else {
            let (parts, stride) = (self.parts, rows / self.outer);
            let (start, len) = (parts.part_start(stride, parts.of_rank(rank, ranks)), parts.len(stride));
            return of_rows(RowBlocks { start, len, stride, count: self.outer, of: rows });
        };
        let mut at = 0;
        let part = |(size, parts): (usize, AxisParts)| {
            let start = at + parts.part_start(size, parts.of_rank(rank, ranks));
            at += size;
            of_rows(RowBlocks::range(start, parts.len(size), rows))
        };
        ParamSource::Concat(segments.iter().map(part).collect())
    }
}

/// The type of a part.
pub(super) fn cut_type(ty: &mut TensorType, cut: Option<ShardSpec>) {
    if let Some(cut) = cut {
        ty.dims[cut.axis] = cut.part_size(&ty.dims[cut.axis]);
    }
}

/// A size that is constant.
pub(super) fn constant_size(dim: &Dim) -> Option<usize> {
    usize::try_from(dim.as_const()?).ok()
}

/// True if a size is constant and divides.
pub(super) fn is_divisible(dim: &Dim, parts: usize) -> bool {
    constant_size(dim).is_some_and(|size| size > 0 && size.is_multiple_of(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(of: &[(usize, usize)]) -> AxisSegments {
        let of: Vec<_> = of.iter().map(|&(len, parts)| (len, AxisParts::new(parts))).collect();
        AxisSegments::new(&of).unwrap()
    }

    /// Every part of six heads of 16 among four ranks has two heads; the last rank has those of the one
    /// before.
    #[test]
    fn the_last_parts_overlap() {
        let heads = AxisParts::new(4);
        assert_eq!((heads.len(6), heads.is_disjoint(6)), (2, false));
        assert_eq!([0, 1, 2, 3].map(|part| heads.part_start(6, part)), [0, 2, 4, 4]);
        assert_eq!(heads.distinct_ranges(6), [(0, 0..2), (1, 0..2), (2, 0..2)]);
        let rows = heads.regrouped(6, 96).unwrap();
        assert_eq!(rows, AxisParts { count: 4, unit: 16 });
        assert_eq!(rows, AxisParts::of_units(4, 16, 96));
        assert_eq!(rows.regrouped(96, 6), Some(heads));
        assert_eq!(rows.regrouped(96, 32), None);
        // A vocabulary of 333: one row is on both ranks, and taken from the first.
        let vocabulary = AxisParts::new(2);
        assert_eq!([0, 1].map(|part| vocabulary.part_start(333, part)), [0, 166]);
        assert_eq!(vocabulary.distinct_ranges(333), [(0, 0..167), (1, 1..167)]);
    }

    #[test]
    fn parts_that_divide_have_no_unit() {
        let even = AxisParts::of_units(4, 16, 128);
        assert_eq!((even, even.is_disjoint(128)), (AxisParts::new(4), true));
        assert_eq!(even.distinct_ranges(128).len(), 4);
        assert_eq!(even.regrouped(128, 8), Some(even));
        assert_eq!(even.regrouped(128, 6), None);
        // Two key heads of four ranks, and of three.
        assert_eq!([0, 1, 2, 3].map(|rank| AxisParts::new(2).of_rank(rank, 4)), [0, 0, 1, 1]);
        assert_eq!([0, 1].map(|part| AxisParts::new(2).rank(part, 3)), [0, 2]);
    }

    #[test]
    fn borders_make_segments() {
        let whole = segments(&[(24, 2)]);
        let three = whole.split_at(8, 6, None).unwrap();
        assert_eq!(three, segments(&[(8, 2), (6, 2), (10, 2)]));
        // Again the same, and a smaller one inside that every rank has.
        assert_eq!(three.split_at(8, 6, None), Some(three));
        let shared = three.split_at(14, 4, Some(AxisParts::WHOLE)).unwrap();
        assert_eq!(shared, segments(&[(8, 2), (6, 2), (4, 1), (6, 2)]));
        assert_eq!((shared.len(), shared.rank_len()), (24, 4 + 3 + 4 + 3));
        // Seven elements do not divide, nor does the one that is left.
        assert_eq!(whole.split_at(0, 7, None), Some(segments(&[(7, 1), (17, 1)])));
        let many = (0..9).try_fold(segments(&[(24, 2)]), |all, at| all.split_at(2 * at, 2, None));
        assert_eq!(many, None);
        // Three heads of eight between two ranks, where they are requested.
        let heads = AxisParts::of_units(2, 8, 24);
        let uneven = segments(&[(40, 2)]).split_at(0, 24, Some(heads)).unwrap();
        assert_eq!(uneven.iter().collect::<Vec<_>>(), [(24, heads), (16, AxisParts::new(2))]);
        assert_eq!((uneven.rank_len(), uneven.split_at(0, 24, None)), (16 + 8, Some(uneven)));
    }

    #[test]
    fn slices_are_whole_segments() {
        let cut = ShardSpec { segments: Some(segments(&[(8, 2), (4, 1), (6, 2)])), ..ShardSpec::new(1, 2) };
        assert_eq!(cut.slice(0, 8), Some((0, Some(ShardSpec::new(1, 2)))));
        assert_eq!(cut.slice(8, 4), Some((4, None)));
        let two = ShardSpec { segments: Some(segments(&[(4, 1), (6, 2)])), ..cut };
        assert_eq!(cut.slice(8, 10), Some((4, Some(two))));
        assert_eq!(cut.slice(8, 3), None);
        assert_eq!(ShardSpec::new(1, 2).slice(0, 4), None);
    }

    #[test]
    fn rows_of_segments_are_joined() {
        let cut =
            RowShardSpec { outer: 1, parts: AxisParts::new(2), segments: Some(segments(&[(8, 2), (4, 1)])) };
        let source = ParamSource::Tensor("w".into());
        let ParamSource::Concat(parts) = cut.shard_source(&source, 12, 1, 2) else { panic!("not joined") };
        let rows = |start, len| ParamSource::Rows(RowBlocks::range(start, len, 12), Box::new(source.clone()));
        assert_eq!(parts, [rows(4, 4), rows(8, 4)]);
    }
}
