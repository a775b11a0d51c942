//! The two algorithms of sentencepiece on normalized text: the best path of a unigram model, and pair merging
//! by score.

use std::collections::HashMap;
use std::ops::Range;

use super::super::merge::merge;
use super::super::prefix_index::PrefixIndex;
use super::proto::{ModelProto, PieceKind};

/// A piece found: its place in the normalized text and its id.
pub(super) type PieceMatch = (Range<usize>, u32);

/// Taken off the lowest score for a character without a piece (`kUnkPenalty`).
const UNKNOWN_PENALTY: f32 = 10.0;

/// Shortest-path segmentation (`unigram::ModelProto::EncodeOptimized`). `pieces` has all pieces that text can
/// match.
pub(super) fn unigram(model: &ModelProto, pieces: &PrefixIndex, unknown: u32, text: &str) -> Vec<PieceMatch> {
    let normal =
        || model.pieces.iter().filter(|piece| piece.kind == PieceKind::Normal).map(|piece| piece.score);
    let unknown_score = normal().fold(f32::MAX, f32::min) - UNKNOWN_PENALTY;
    let highest = normal().fold(f32::MIN_POSITIVE, f32::max);
    // Per end of a path: where its last piece begins, that piece, the score of the path.
    let mut best: Vec<Option<(usize, u32, f32)>> = vec![None; text.len() + 1];
    let offer = |best: &mut Vec<Option<(usize, u32, f32)>>, range: Range<usize>, id: u32, score: f64| {
        let slot = &mut best[range.end];
        if slot.is_none_or(|(_, _, old)| score > f64::from(old)) {
            *slot = Some((range.start, id, score as f32));
        }
    };
    for (start, c) in text.char_indices() {
        // Every earlier character has offered at least a path over itself, so this one is reached.
        let reached = best[start].map_or(0.0, |(_, _, score)| score);
        let mut alone = false;
        for (length, id) in pieces.prefixes(&text.as_bytes()[start..]) {
            let piece = &model.pieces[id as usize];
            let score = match piece.kind {
                PieceKind::Unused => continue,
                // Always chosen before what it could be split into.
                PieceKind::UserDefined => f64::from(length as f32 * highest) - 0.1,
                _ => f64::from(piece.score),
            };
            offer(&mut best, start..start + length, id, score + f64::from(reached));
            alone |= length == c.len_utf8();
        }
        if !alone {
            let range = start..start + c.len_utf8();
            offer(&mut best, range, unknown, f64::from(unknown_score + reached));
        }
    }
    let mut found = Vec::new();
    let mut end = text.len();
    while let Some((start, id, _)) = best[end].filter(|_| end > 0) {
        found.push((start..end, id));
        end = start;
    }
    found.reverse();
    found
}

/// Merging of the pair whose joined piece has the highest score (`bpe::ModelProto::SampleEncode` without
/// sampling).
pub(super) fn bpe(
    model: &ModelProto,
    ids: &HashMap<Box<[u8]>, u32>,
    symbols: &PrefixIndex,
    unknown: u32,
    text: &str,
) -> Vec<PieceMatch> {
    let bytes = text.as_bytes();
    let mut first = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let (length, frozen) = match symbols.longest(&bytes[at..]) {
            Some((length, _)) => (length, true),
            None => (text[at..].chars().next().map_or(1, char::len_utf8), false),
        };
        first.push((length, frozen));
        at += length;
    }
    // How pieces of kind "unused" were joined last: they are taken apart again at the end.
    let mut halves: HashMap<&[u8], usize> = HashMap::new();
    let merged = merge(first, |range, middle| {
        let joined = &bytes[range.clone()];
        let piece = &model.pieces[*ids.get(joined)? as usize];
        if piece.kind == PieceKind::Unused {
            halves.insert(joined, middle - range.start);
        }
        Some(order(piece.score))
    });
    let mut found = Vec::new();
    let mut pending: Vec<Range<usize>> = Vec::new();
    for range in merged {
        pending.push(range);
        while let Some(range) = pending.pop() {
            let id = ids.get(&bytes[range.clone()]).copied();
            let unused = id.is_some_and(|id| model.pieces[id as usize].kind == PieceKind::Unused);
            match halves.get(&bytes[range.clone()]).filter(|_| unused) {
                Some(&half) => {
                    pending.push(range.start + half..range.end);
                    pending.push(range.start..range.start + half);
                }
                None => found.push((range, id.unwrap_or(unknown))),
            }
        }
    }
    found
}

/// Ascending numbers for descending scores.
fn order(score: f32) -> u32 {
    // Adding zero makes -0 equal to 0.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::order;

    #[test]
    fn the_order_of_scores() {
        let scores = [7.5f32, 1.0, f32::MIN_POSITIVE, 0.0, -1e-9, -1.0, -2.0, -1e30];
        assert!(scores.windows(2).all(|pair| order(pair[0]) < order(pair[1])));
        assert_eq!(order(0.0), order(-0.0));
    }
}
