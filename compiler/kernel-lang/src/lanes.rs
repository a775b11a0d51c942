//! Vectors of values against each other: transposed, or joined lane by lane.

use crate::Val;

/// Rows of a square to its columns, by exchanging ever smaller quarters (Eklundh 1972): as many vectors as
/// each has lanes.
pub fn transpose(mut rows: Vec<Val<'_>>) -> Vec<Val<'_>> {
    let lanes = rows.len() as u32;
    let mut half = lanes / 2;
    while half > 0 {
        for i in (0..lanes).filter(|i| i & half == 0) {
            let (a, b) = (rows[i as usize], rows[(i + half) as usize]);
            // Lane l of the results, in terms of a followed by b.
            let low = (0..lanes).map(|l| if l & half == 0 { l } else { lanes + l - half });
            let high = (0..lanes).map(|l| if l & half == 0 { l + half } else { lanes + l });
            let (low, high) = (a.shuffle_with(b, low), a.shuffle_with(b, high));
            rows[i as usize] = low.named("t");
            rows[(i + half) as usize] = high.named("t");
        }
        half /= 2;
    }
    rows
}

/// Concatenates equally long vectors, whose number is a power of two.
pub fn join_vectors<'k>(parts: &[Val<'k>]) -> Val<'k> {
    if let [only] = parts {
        return *only;
    }
    let (first, second) = parts.split_at(parts.len() / 2);
    let (first, second) = (join_vectors(first), join_vectors(second));
    first.shuffle_with(second, 0..2 * first.lanes())
}

/// Joins the lanes of each part of as many lanes as there are vectors by `op`: lane `i` of a part of the
/// result is the reduction of that part of vector `i`. The number of vectors is a power of two.
pub fn reduce_each<'k>(mut vectors: Vec<Val<'k>>, op: impl Fn(Val<'k>, Val<'k>) -> Val<'k>) -> Val<'k> {
    let lanes = vectors[0].lanes();
    // Lanes that stay neighbours.
    let mut unit = 1;
    if vectors.len().is_multiple_of(4) {
        // Both operands pick lanes within four: such exchanges are cheap everywhere, and neither needs a
        // mask.
        let pick = |odd: u32| {
            (0..lanes).map(move |l| l / 4 * 4 + l % 2 * 2 + odd + if l % 4 < 2 { 0 } else { lanes })
        };
        for _ in 0..2 {
            let join = |pair: &[Val<'k>]| {
                let (x, y) = (pair[0].shuffle_with(pair[1], pick(0)), pair[0].shuffle_with(pair[1], pick(1)));
                op(x, y).named("joined")
            };
            vectors = vectors.chunks(2).map(join).collect();
        }
        unit = 4;
    }
    // Each round joins pairs of vectors and halves the lanes that belong to one result. The one operand is a
    // choice of lanes in place (a blend, which every vector unit executes), only the other an exchange.
    while vectors.len() > 1 {
        let upper = vectors.split_off(vectors.len() / 2);
        let half = upper.len() as u32 * unit;
        let low = |l: &u32| l & half == 0;
        let stay = (0..lanes).map(|l| if low(&l) { l } else { lanes + l });
        let cross = (0..lanes).map(|l| if low(&l) { l + half } else { lanes + l - half });
        for (a, b) in vectors.iter_mut().zip(upper) {
            let (x, y) = (a.shuffle_with(b, stay.clone()), a.shuffle_with(b, cross.clone()));
            *a = op(x, y).named("joined");
        }
    }
    vectors[0]
}
