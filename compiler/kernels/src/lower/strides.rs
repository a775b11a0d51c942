//! How values that exist once per sequence lie in memory: one after another, in a buffer that all sequences have together.

use mlcc_ir::dim::{Atom, Bounds, Dim, Sym};
use mlcc_ir::sequences::Batching;

/// The value of sequence `s`, whose first row is row `r` of all, lies at `row * r + sequence * s` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Strides {
    /// 0 in buffers that all sequences share, and in states, of which each has its own.
    pub row: u64,
    pub sequence: u64,
}

/// What a sequence has at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Rows of one call.
    pub rows: i64,
    /// All rows, of models with caches.
    pub context: Option<i64>,
}

impl Strides {
    /// Places of values of so many bytes, by the rows `n` of the sequence and its `past`. None overlaps the next, and each is
    /// aligned. `None` if a size has no limit.
    pub fn of(bytes: &Dim, batching: Batching, limits: Limits, align: u64) -> Option<Strides> {
        let context = limits.context;
        let (row, sequence) = match batching {
            Batching::Ragged => line(bytes, limits)?,
            // Its one row is all that a sequence has.
            Batching::Single | Batching::OneEach => {
                (bytes.range(&Bounds { chunk: 1, batch: 1, context })?.1.max(1), 0)
            }
        };
        let aligned = |bytes: i64| Some(u64::try_from(bytes).ok()?.next_multiple_of(align));
        Some(Strides { row: aligned(row)?, sequence: aligned(sequence)? })
    }

    /// Bytes of the values of all sequences: `n` rows of `b` sequences.
    pub fn total(&self) -> Dim {
        let times = |sym, bytes: u64| Dim::sym(sym).scale(bytes as i64);
        times(Sym::N, self.row).add(&times(Sym::B, self.sequence))
    }
}

/// `(slope, constant)` of a line through `n` that a size does not exceed.
fn line(bytes: &Dim, Limits { rows, context }: Limits) -> Option<(i64, i64)> {
    // A sequence has no more rows than the context, where that is limited.
    let bounds = Bounds { chunk: context.unwrap_or(rows).min(rows), batch: 1, context };
    let n = Dim::sym(Sym::N);
    let (mut slope, mut constant) = (0i64, bytes.constant());
    for (atom, coefficient) in bytes.terms() {
        match atom {
            Atom::Sym(Sym::N) => slope = slope.checked_add(*coefficient)?,
            Atom::Sym(Sym::Past) => {
                let most = coefficient.checked_mul(context?)?;
                constant = constant.checked_add(most.max(0))?;
            }
            Atom::Product(factors) if *coefficient > 0 && factors.contains(&n) => {
                let mut others = factors.clone();
                others.remove(factors.iter().position(|factor| *factor == n)?);
                let (_, most) = others.iter().fold(Dim::from(1), |p, d| p.product(d)).range(&bounds)?;
                slope = slope.checked_add(most.max(0).checked_mul(*coefficient)?)?;
            }
            other => {
                let (_, most) = Dim::of_atom(other.clone()).scale(*coefficient).range(&bounds)?;
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
        let (n, past) = (Dim::sym(Sym::N), Dim::sym(Sym::Past));
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
        let limits = Limits { rows: most, context: Some(context) };
        for size in sizes {
            let strides = Strides::of(&size, Batching::Ragged, limits, 64).expect("a limit");
            for rows in 1..=most {
                let values = |past| mlcc_ir::dim::SymValues { n: rows, b: 1, past };
                let most = (0..=context - rows).map(|past| size.eval(&values(past))).max();
                let room = strides.row * rows as u64 + strides.sequence;
                assert!(most.is_some_and(|most| most as u64 <= room), "{rows} rows of {size}");
            }
        }
        let exact = |size: &Dim| Strides::of(size, Batching::Ragged, limits, 64);
        assert_eq!(exact(&n.scale(128)), Some(Strides { row: 128, sequence: 0 }));
        assert_eq!(exact(&Dim::from(100)), Some(Strides { row: 0, sequence: 128 }));
        let unlimited = Limits { rows: most, context: None };
        let one = Strides::of(&Dim::from(100), Batching::OneEach, unlimited, 64);
        assert_eq!(one, Some(Strides { row: 128, sequence: 0 }));
        assert_eq!(Strides::of(&past, Batching::Ragged, unlimited, 64), None);
    }
}
