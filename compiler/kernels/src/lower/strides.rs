//! The layout of values that exist once per sequence: in sequence order, in one buffer for all sequences.

use mlcc_ir::dim::{Dim, DimAtom, SizeBounds, SizeSymbol};
use mlcc_ir::sequences::RowBatching;

/// The value of sequence `s`, whose first row is row `r` of all, lies at `row * r + sequence * s` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SequenceStrides {
    /// 0 in buffers that all sequences share, and in states, of which each has its own.
    pub row: u64,
    pub sequence: u64,
}

/// Limits of a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SequenceBounds {
    /// Rows of one call.
    pub rows: i64,
    /// All rows, of models with caches.
    pub context: Option<i64>,
}

impl SequenceStrides {
    /// Strides for values of `bytes` bytes, by the rows `n` of the sequence and its `past`. None overlaps the
    /// next, and each is aligned. `None` if a size has no limit.
    pub fn for_batching(
        bytes: &Dim,
        batching: RowBatching,
        limits: SequenceBounds,
        align: u64,
    ) -> Option<SequenceStrides> {
        let context = limits.context;
        let (row, sequence) = match batching {
            RowBatching::Ragged => line(bytes, limits)?,
            // Its one row is all that a sequence has.
            RowBatching::Single | RowBatching::OneEach => {
                (bytes.value_range(&SizeBounds { chunk: 1, batch: 1, context })?.1.max(1), 0)
            }
        };
        let aligned = |bytes: i64| Some(u64::try_from(bytes).ok()?.next_multiple_of(align));
        Some(SequenceStrides { row: aligned(row)?, sequence: aligned(sequence)? })
    }

    /// Bytes of the values of all sequences: `n` rows of `b` sequences.
    pub fn total_bytes(&self) -> Dim {
        let times = |sym, bytes: u64| Dim::sym(sym).scale(bytes as i64);
        times(SizeSymbol::N, self.row).add(&times(SizeSymbol::B, self.sequence))
    }
}

/// `(slope, constant)` of a line through `n` that a size does not exceed.
fn line(bytes: &Dim, SequenceBounds { rows, context }: SequenceBounds) -> Option<(i64, i64)> {
    // A sequence has no more rows than the context, where that is limited.
    let bounds = SizeBounds { chunk: context.unwrap_or(rows).min(rows), batch: 1, context };
    let n = Dim::sym(SizeSymbol::N);
    let (mut slope, mut constant) = (0i64, bytes.constant());
    for (atom, coefficient) in bytes.terms() {
        match atom {
            DimAtom::Sym(SizeSymbol::N) => slope = slope.checked_add(*coefficient)?,
            DimAtom::Sym(SizeSymbol::Past) => {
                let most = coefficient.checked_mul(context?)?;
                constant = constant.checked_add(most.max(0))?;
            }
            DimAtom::Product(factors) if *coefficient > 0 && factors.contains(&n) => {
                let mut others = factors.clone();
                others.remove(factors.iter().position(|factor| *factor == n)?);
                let (_, most) = others.iter().fold(Dim::from(1), |p, d| p.product(d)).value_range(&bounds)?;
                slope = slope.checked_add(most.max(0).checked_mul(*coefficient)?)?;
            }
            other => {
                let (_, most) = Dim::of_atom(other.clone()).scale(*coefficient).value_range(&bounds)?;
                constant = constant.checked_add(most)?;
            }
        }
    }
    Some((slope.max(0), constant.max(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No value of a sequence reaches into that of the next.
    #[test]
    fn values_of_sequences_lie_apart() {
        let (n, past) = (Dim::sym(SizeSymbol::N), Dim::sym(SizeSymbol::Past));
        let all = past.add(&n);
        let sizes = [
            Dim::from(12),
            n.scale(20),
            n.scale(64),
            n.scale(8).add(&Dim::from(24)),
            all.scale(4),
            n.product(&all).scale(4),
            n.ceil_div(16).scale(256),
            n.product(&n).scale(8),
            all.ceil_div(64).minimum(&Dim::from(3)).scale(100),
        ];
        let (context, most) = (40, 25);
        let limits = SequenceBounds { rows: most, context: Some(context) };
        for size in sizes {
            let strides =
                SequenceStrides::for_batching(&size, RowBatching::Ragged, limits, 64).expect("a limit");
            for rows in 1..=most {
                let values = |past| mlcc_ir::dim::SymValues { n: rows, b: 1, past };
                let most = (0..=context - rows).map(|past| size.eval(&values(past))).max();
                let room = strides.row * rows as u64 + strides.sequence;
                assert!(most.is_some_and(|most| most as u64 <= room), "{rows} rows of {size}");
            }
        }
        let exact = |size: &Dim| SequenceStrides::for_batching(size, RowBatching::Ragged, limits, 64);
        assert_eq!(exact(&n.scale(128)), Some(SequenceStrides { row: 128, sequence: 0 }));
        assert_eq!(exact(&Dim::from(100)), Some(SequenceStrides { row: 0, sequence: 128 }));
        let unlimited = SequenceBounds { rows: most, context: None };
        let one = SequenceStrides::for_batching(&Dim::from(100), RowBatching::OneEach, unlimited, 64);
        assert_eq!(one, Some(SequenceStrides { row: 128, sequence: 0 }));
        assert_eq!(SequenceStrides::for_batching(&past, RowBatching::Ragged, unlimited, 64), None);
    }
}
