//! Byte pair encoding over pieces of a text: the best pair of neighbours is joined until none is left.
//!
//! Best is the lowest rank, then the leftmost place. Ranks come from the joined bytes (sentencepiece,
//! tiktoken), not from the pair, which is where this differs from lists of merges.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

struct MergeSymbol {
    start: usize,
    /// Empty once it has been joined to the symbol before it.
    end: usize,
    before: Option<usize>,
    after: Option<usize>,
    frozen: bool,
}

/// `pieces` are the lengths of the symbols to begin with and whether they must stay as they are. `rank` gets
/// a pair's place in `text` and where its second half begins. Time is n log n.
pub(super) fn merge(
    pieces: impl IntoIterator<Item = (usize, bool)>,
    mut rank: impl FnMut(Range<usize>, usize) -> Option<u32>,
) -> Vec<Range<usize>> {
    let mut symbols: Vec<MergeSymbol> = Vec::new();
    let mut start = 0;
    for (length, frozen) in pieces {
        let number = symbols.len();
        if let Some(before) = symbols.last_mut() {
            before.after = Some(number);
        }
        let end = start + length;
        symbols.push(MergeSymbol { start, end, before: number.checked_sub(1), after: None, frozen });
        start = end;
    }
    // Rank, left and right symbol, length of both.
    let mut agenda: BinaryHeap<Reverse<(u32, usize, usize, usize)>> = BinaryHeap::new();
    let mut consider = |symbols: &[MergeSymbol], agenda: &mut BinaryHeap<_>, left: usize| {
        let Some(right) = symbols[left].after else { return };
        if symbols[left].frozen || symbols[right].frozen {
            return;
        }
        let (begin, end) = (symbols[left].start, symbols[right].end);
        if let Some(rank) = rank(begin..end, symbols[right].start) {
            agenda.push(Reverse((rank, left, right, end - begin)));
        }
    };
    for left in 0..symbols.len() {
        consider(&symbols, &mut agenda, left);
    }
    while let Some(Reverse((_, left, right, length))) = agenda.pop() {
        // A half that has been joined to something else since makes the entry stale.
        let alive = |symbol: &MergeSymbol| symbol.end > symbol.start;
        let current = symbols[left].after == Some(right)
            && alive(&symbols[left])
            && alive(&symbols[right])
            && symbols[right].end - symbols[left].start == length;
        if !current {
            continue;
        }
        let after = symbols[right].after;
        symbols[left].end = symbols[right].end;
        symbols[left].after = after;
        symbols[right].end = symbols[right].start;
        if let Some(after) = after {
            symbols[after].before = Some(left);
        }
        if let Some(before) = symbols[left].before {
            consider(&symbols, &mut agenda, before);
        }
        consider(&symbols, &mut agenda, left);
    }
    symbols.iter().filter(|symbol| symbol.end > symbol.start).map(|symbol| symbol.start..symbol.end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: look at all neighbours, join the best, again.
    fn slowly(text: &[u8], rank: impl Fn(&[u8]) -> Option<u32>) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = (0..text.len()).map(|i| i..i + 1).collect();
        loop {
            let pairs = parts.windows(2).enumerate();
            let best = pairs.filter_map(|(i, w)| Some((rank(&text[w[0].start..w[1].end])?, i))).min();
            let Some((_, i)) = best else { return parts };
            parts[i].end = parts[i + 1].end;
            parts.remove(i + 1);
        }
    }

    proptest::proptest! {
        #[test]
        fn equals_the_definition(text in "[ab ]{0,24}", seed in 0u32..1000) {
            let text = text.as_bytes();
            // About half of all short strings are tokens, in an order that depends on the seed.
            let rank = |bytes: &[u8]| {
                let hash = bytes.iter().fold(seed, |h, &b| (h ^ u32::from(b)).wrapping_mul(16_777_619).rotate_left(7));
                (bytes.len() < 6 && hash % 2 == 0).then_some(hash % 64)
            };
            let fast = merge(text.iter().map(|_| (1, false)), |range, _| rank(&text[range]));
            proptest::prop_assert_eq!(fast, slowly(text, rank));
        }
    }

    #[test]
    fn frozen_symbols_stay() {
        let merged = merge([(1, false), (1, false), (2, true), (1, false), (1, false)], |_, _| Some(0));
        assert_eq!(merged, [0..2, 2..4, 4..6]);
    }
}
