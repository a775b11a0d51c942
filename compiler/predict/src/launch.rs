//! A launch as a kernel sees it: grid, arguments, and the few words of the device's memory whose values are
//! known before anything runs.

use mlcc_abi::{Control, DimExpr, LaunchArg, Sequence, arg, repeat};
use std::mem::offset_of;

/// Sizes from the artifact's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArtifactPlan {
    pub vocab: u64,
    /// Bytes of all weights, of the state of a sequence, and pages of a full context.
    pub weights_bytes: u64,
    pub state_bytes: u64,
    pub pages: u64,
}

/// A sequence of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceSizes {
    pub rows: u64,
    pub past: u64,
}

/// A call of an entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PredictedCall {
    pub plan: ArtifactPlan,
    pub sequences: Vec<SequenceSizes>,
    /// True for the entry points of several sequences.
    pub batch: bool,
}

impl PredictedCall {
    pub fn rows(&self) -> u64 {
        self.sequences.iter().map(|s| s.rows).sum()
    }

    /// Tokens before those of the call.
    pub fn past(&self) -> u64 {
        if self.batch { 0 } else { self.sequences.first().map_or(0, |s| s.past) }
    }

    fn max_of(&self, of: impl Fn(&SequenceSizes) -> u64) -> u64 {
        self.sequences.iter().map(of).max().unwrap_or(0)
    }
}

/// A launch of one kernel in a call.
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig<'a> {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Asked for at launch.
    pub shared_bytes: u32,
    pub args: &'a [LaunchArg],
    /// A value of [`repeat`].
    pub repeat: u32,
}

impl LaunchConfig<'_> {
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }
}

/// The grid of a launch in a call; with no blocks it is not launched. The rules are those of the runtime.
pub fn evaluate_grid(extents: &[DimExpr; 3], of: u32, call: &PredictedCall) -> [u32; 3] {
    let (n, past) = match of {
        repeat::EACH_SEQUENCE => (call.max_of(|s| s.rows), call.max_of(|s| s.past)),
        repeat::OUTPUTS => (call.sequences.len() as u64, call.past()),
        _ => (call.rows(), call.past()),
    };
    let mut out = extents.map(|e| {
        let sum = e.coef_n.saturating_mul(n as i64).saturating_add(e.coef_past.saturating_mul(past as i64));
        let sum = sum.saturating_add(e.constant);
        let blocks = sum.saturating_add(e.div - 1).div_euclid(e.div.max(1));
        u32::try_from(blocks).unwrap_or(if blocks < 0 { 0 } else { u32::MAX })
    });
    if of == repeat::EACH_SEQUENCE {
        out[2] = call.sequences.len() as u32;
    }
    out
}

/// The first bit of the kind of an argument in its address.
const KIND_BIT: u32 = 44;
/// The distance from the table of pages of a sequence to the next, and likewise of states.
const SEQUENCE_STEP: u64 = 1 << 32;

fn base(kind: u32) -> u64 {
    u64::from(kind + 1) << KIND_BIT
}

/// The address that an argument has.
pub fn arg_address(a: &LaunchArg, repeat: u32) -> u64 {
    let moved = matches!(a.kind, arg::STATE | arg::PAGE_TABLE) && repeat == repeat::EACH_SEQUENCE;
    if moved { a.offset } else { base(a.kind).wrapping_add(a.offset) }
}

/// The state of the data at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataResidency {
    /// Weights, pages of caches and states: not in the second level when a kernel begins, as all weights come
    /// between two steps.
    Memory,
    /// Data that a kernel before has written, or that the host has just sent.
    Recent,
}

pub fn data_residency(address: u64) -> DataResidency {
    match (address >> KIND_BIT).checked_sub(1).and_then(|kind| u32::try_from(kind).ok()) {
        Some(arg::WEIGHTS | arg::STATE | arg::PAGES) => DataResidency::Memory,
        _ => DataResidency::Recent,
    }
}

/// The value of up to eight bytes of the device's memory, where it is known.
pub fn memory_value(address: u64, bytes: u64, call: &PredictedCall) -> Option<u64> {
    let kind = u32::try_from((address >> KIND_BIT).checked_sub(1)?).ok()?;
    let at = address & ((1 << KIND_BIT) - 1);
    let word = match kind {
        arg::CONTROL => control(at & !7, call)?,
        arg::SEQUENCES => sequence(at & !7, call)?,
        // Pages of sequences lie apart and in order.
        arg::PAGE_TABLE => {
            let (sequence, index) = (at / SEQUENCE_STEP, at % SEQUENCE_STEP / 4);
            let page = |index: u64| (sequence * call.plan.pages + index) & 0xffff_ffff;
            return whole(page(index) | page(index + 1) << 32, at % 4, bytes);
        }
        // The last row of each sequence.
        arg::OUTPUT_ROWS => {
            let last = |i: u64| {
                let rows: u64 = call.sequences.iter().take(i as usize + 1).map(|s| s.rows).sum();
                rows.saturating_sub(1)
            };
            return whole(last(at / 4) | last(at / 4 + 1) << 32, at % 4, bytes);
        }
        // From all over the vocabulary.
        arg::TOKENS => {
            let token = |i: u64| i.wrapping_mul(7919).wrapping_add(1) % call.plan.vocab.max(1);
            return whole(token(at / 4) | token(at / 4 + 1) << 32, at % 4, bytes);
        }
        _ => return None,
    };
    whole(word, at % 8, bytes)
}

/// Some bytes of a word from a place in it on.
fn whole(word: u64, from: u64, bytes: u64) -> Option<u64> {
    let word = word >> (8 * from);
    (from + bytes <= 8).then(|| if bytes < 8 { word & ((1 << (8 * bytes)) - 1) } else { word })
}

fn control(at: u64, call: &PredictedCall) -> Option<u64> {
    let several = |value: u64| if call.batch { value } else { 0 };
    Some(match at as usize {
        at if at == offset_of!(Control, n) => call.rows(),
        at if at == offset_of!(Control, past) => call.past(),
        at if at == offset_of!(Control, b) => several(call.sequences.len() as u64),
        at if at == offset_of!(Control, n_outputs) => several(call.sequences.len() as u64),
        _ => return None,
    })
}

fn sequence(at: u64, call: &PredictedCall) -> Option<u64> {
    let size = size_of::<Sequence>() as u64;
    let index = at / size;
    let sizes = call.sequences.get(index as usize)?;
    let begin = |kind: u32| base(kind).wrapping_add(index * SEQUENCE_STEP);
    Some(match (at % size) as usize {
        at if at == offset_of!(Sequence, state) => begin(arg::STATE),
        at if at == offset_of!(Sequence, page_table) => begin(arg::PAGE_TABLE),
        at if at == offset_of!(Sequence, past) => sizes.past,
        at if at == offset_of!(Sequence, first) => {
            call.sequences.iter().take(index as usize).map(|s| s.rows).sum()
        }
        at if at == offset_of!(Sequence, rows) => sizes.rows,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(sequences: &[(u64, u64)], batch: bool) -> PredictedCall {
        let plan = ArtifactPlan { vocab: 1000, weights_bytes: 1 << 30, state_bytes: 0, pages: 10 };
        let sequences = sequences.iter().map(|&(rows, past)| SequenceSizes { rows, past }).collect();
        PredictedCall { plan, sequences, batch }
    }

    #[test]
    fn grids_are_those_of_the_runtime() {
        let one = DimExpr { coef_n: 0, coef_past: 0, constant: 1, div: 1 };
        let rows = DimExpr { coef_n: 1, constant: 0, div: 4, ..one };
        assert_eq!(evaluate_grid(&[rows, one, one], repeat::ONCE, &call(&[(9, 5)], false)), [3, 1, 1]);
        let three = call(&[(9, 5), (1, 7), (2, 0)], true);
        assert_eq!(evaluate_grid(&[rows, one, one], repeat::EACH_SEQUENCE, &three), [3, 1, 3]);
        assert_eq!(evaluate_grid(&[rows, one, one], repeat::OUTPUTS, &three), [1, 1, 1]);
        let long = DimExpr { coef_past: 1, ..one };
        assert_eq!(evaluate_grid(&[long, one, one], repeat::EACH_SEQUENCE, &three), [8, 1, 3]);
    }

    #[test]
    fn sizes_pages_and_sequences_are_known() {
        let two = call(&[(9, 5), (1, 7)], true);
        let at = |kind, offset| memory_value(base(kind) + offset, 8, &two);
        assert_eq!(at(arg::CONTROL, offset_of!(Control, n) as u64), Some(10));
        assert_eq!(memory_value(base(arg::CONTROL) + offset_of!(Control, n) as u64 + 4, 4, &two), Some(0));
        let second = size_of::<Sequence>() as u64;
        assert_eq!(at(arg::SEQUENCES, second + offset_of!(Sequence, first) as u64), Some(9));
        let table = at(arg::SEQUENCES, second + offset_of!(Sequence, page_table) as u64).unwrap();
        assert_eq!(memory_value(table + 12, 4, &two), Some(13), "the fourth page of the second sequence");
        assert_eq!(memory_value(base(arg::OUTPUT_ROWS) + 4, 4, &two), Some(9));
        assert_eq!(at(arg::ARENA, 0), None);
        assert_eq!(
            [data_residency(base(arg::WEIGHTS) + 9), data_residency(base(arg::ARENA))],
            [DataResidency::Memory, DataResidency::Recent]
        );
    }
}
