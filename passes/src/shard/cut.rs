//! Parts of values and parameters: which elements along an axis a rank holds.

use mlcc_ir::dim::Dim;
use mlcc_ir::module::{ParamSource, RowBlocks};
use mlcc_ir::types::TensorType;

/// Rank `r` of `ranks` holds part `r * parts / ranks` of `parts` equal ones along an axis; where the axis has segments, that of each
/// of them, one behind the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Cut {
    pub axis: usize,
    pub parts: usize,
    pub segments: Option<Segments>,
}

impl Cut {
    pub fn new(axis: usize, parts: usize) -> Cut {
        Cut { axis, parts, segments: None }
    }
    pub fn along(self, axis: usize) -> Cut {
        Cut { axis, ..self }
    }

    /// Whether an axis of this size has such parts.
    pub fn divides(&self, dim: &Dim) -> bool {
        match self.segments {
            None => divides(dim, self.parts),
            Some(segments) => dim.as_const() == Some(segments.len() as i64),
        }
    }

    /// The size of a part.
    pub fn of(&self, dim: &Dim) -> Dim {
        match self.segments {
            None => dim.floor_div(self.parts as i64),
            Some(segments) => Dim::from(segments.local()),
        }
    }

    /// What a rank has of these elements of the axis: where they begin in its part, and the cut of what they are alone, `None` where
    /// every rank has all of them. Nothing if they begin or end within a segment.
    pub fn slice(&self, start: usize, len: usize) -> Option<(usize, Option<Cut>)> {
        let (at, segments) = self.segments?.slice(start, len)?;
        let cut = match segments.iter().next() {
            Some((_, 1)) if segments.count == 1 => None,
            Some((_, parts)) if segments.count == 1 => Some(Cut::new(self.axis, parts)),
            _ => Some(Cut { segments: Some(segments), ..*self }),
        };
        Some((at, cut))
    }
}

/// Most segments of an axis.
const MOST: usize = 8;

/// What an axis joins: so many elements, in so many parts each. With one part all of them are on every rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Segments {
    count: usize,
    of: [(usize, usize); MOST],
}

impl Segments {
    pub fn new(of: &[(usize, usize)]) -> Option<Segments> {
        let mut all = [(0, 0); MOST];
        all.get_mut(..of.len())?.copy_from_slice(of);
        (!of.is_empty()).then_some(Segments { count: of.len(), of: all })
    }

    /// Lengths and numbers of parts.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.of[..self.count].iter().copied()
    }

    pub fn len(&self) -> usize {
        self.iter().map(|(len, _)| len).sum()
    }

    /// Elements of a rank.
    pub fn local(&self) -> usize {
        self.iter().map(|(len, parts)| len / parts).sum()
    }

    /// Those of a range, and where they begin on a rank.
    fn slice(&self, start: usize, len: usize) -> Option<(usize, Segments)> {
        let (mut at, mut local, mut found) = (0, 0, Vec::new());
        for (size, parts) in self.iter() {
            match at {
                at if at >= start && at + size <= start + len => found.push((size, parts)),
                at if at + size <= start => local += size / parts,
                at if at >= start + len => {}
                _ => return None,
            }
            at += size;
        }
        Some((local, Segments::new(&found)?))
    }

    /// With borders around a range, and so many parts of what is in it, if that is told. `None` if there would be too many.
    pub fn with(&self, start: usize, len: usize, parts: Option<usize>) -> Option<Segments> {
        let (mut at, mut all) = (0, Vec::new());
        for (size, own) in self.iter() {
            let borders = [start, start + len].map(|border| border.clamp(at, at + size));
            let pieces = [at..borders[0], borders[0]..borders[1], borders[1]..at + size];
            for (number, piece) in pieces.into_iter().enumerate().filter(|(_, piece)| !piece.is_empty()) {
                let parts = if number == 1 { parts.map_or(own, |parts| parts.min(own)) } else { own };
                // What does not divide is on every rank.
                all.push((piece.len(), if piece.len().is_multiple_of(parts) { parts } else { 1 }));
            }
            at += size;
        }
        Segments::new(&all)
    }
}

/// How rows of parameters go to ranks: of `of` rows in `outer` blocks, each rank has one of `parts` of every block, or of each of
/// the segments.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct RowCut {
    pub outer: usize,
    pub parts: usize,
    pub segments: Option<Segments>,
}

impl RowCut {
    /// The rows of a rank, of a source of so many.
    pub fn source(&self, source: &ParamSource, rows: usize, rank: usize, ranks: usize) -> ParamSource {
        let of_rows = |blocks| ParamSource::Rows(blocks, Box::new(source.clone()));
        let Some(segments) = self.segments else {
            let stride = rows / self.outer;
            let len = stride / self.parts;
            let start = rank * self.parts / ranks * len;
            return of_rows(RowBlocks { start, len, stride, count: self.outer, of: rows });
        };
        let mut at = 0;
        let part = |(size, parts): (usize, usize)| {
            let (begin, len) = (at, size / parts);
            at += size;
            of_rows(RowBlocks::range(begin + rank * parts / ranks * len, len, rows))
        };
        ParamSource::Concat(segments.iter().map(part).collect())
    }
}

/// The type of a part; the sizes divide.
pub(super) fn cut_type(ty: &mut TensorType, cut: Option<Cut>) {
    if let Some(cut) = cut {
        ty.dims[cut.axis] = cut.of(&ty.dims[cut.axis]);
    }
}

/// Whether a size is constant and divides.
pub(super) fn divides(dim: &Dim, parts: usize) -> bool {
    dim.as_const().is_some_and(|size| size > 0 && size % parts as i64 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(of: &[(usize, usize)]) -> Segments {
        Segments::new(of).unwrap()
    }

    #[test]
    fn borders_make_segments() {
        let whole = segments(&[(24, 2)]);
        let three = whole.with(8, 6, None).unwrap();
        assert_eq!(three, segments(&[(8, 2), (6, 2), (10, 2)]));
        // Again the same, and a smaller one inside that every rank has.
        assert_eq!(three.with(8, 6, None), Some(three));
        let shared = three.with(14, 4, Some(1)).unwrap();
        assert_eq!(shared, segments(&[(8, 2), (6, 2), (4, 1), (6, 2)]));
        assert_eq!((shared.len(), shared.local()), (24, 4 + 3 + 4 + 3));
        // Seven elements do not divide, nor does the one that is left.
        assert_eq!(whole.with(0, 7, None), Some(segments(&[(7, 1), (17, 1)])));
        let many = (0..9).try_fold(segments(&[(24, 2)]), |all, at| all.with(2 * at, 2, None));
        assert_eq!(many, None);
    }

    #[test]
    fn slices_are_whole_segments() {
        let cut = Cut { axis: 1, parts: 2, segments: Some(segments(&[(8, 2), (4, 1), (6, 2)])) };
        assert_eq!(cut.slice(0, 8), Some((0, Some(Cut::new(1, 2)))));
        assert_eq!(cut.slice(8, 4), Some((4, None)));
        let two = Cut { segments: Some(segments(&[(4, 1), (6, 2)])), ..cut };
        assert_eq!(cut.slice(8, 10), Some((4, Some(two))));
        assert_eq!(cut.slice(8, 3), None);
        assert_eq!(Cut::new(1, 2).slice(0, 4), None);
    }

    #[test]
    fn rows_of_segments_are_joined() {
        let cut = RowCut { outer: 1, parts: 2, segments: Some(segments(&[(8, 2), (4, 1)])) };
        let source = ParamSource::Tensor("w".into());
        let ParamSource::Concat(parts) = cut.source(&source, 12, 1, 2) else { panic!("not joined") };
        let rows = |start, len| ParamSource::Rows(RowBlocks::range(start, len, 12), Box::new(source.clone()));
        assert_eq!(parts, [rows(4, 4), rows(8, 4)]);
    }
}
