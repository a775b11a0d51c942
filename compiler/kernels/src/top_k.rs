//! The largest elements of long rows on a GPU: the tokens of a vocabulary among which the next one is chosen.
//!
//! A block takes a tile of a row. Its elements become keys: integers that are larger where the element is,
//! and, for equal elements, where it is earlier. Runs of as many keys as are requested are sorted; then two
//! runs become one of the largest of both, until one is left ("bitonic top-k" of Shanbhag, Pirk and Madden,
//! "Efficient Top-K Query Processing on Massively Parallel Hardware", SIGMOD 2018). For rows of several tiles
//! a second kernel does the same with the results of the tiles.
//!
//! NaN comes after all numbers, and -0 equals 0, which is stored for it.

use crate::inline::{Inliner, LaneIndex};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BufId, MemorySpace};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, ThreadTeam, Val};

/// Elements of a row that a block takes, 32 KiB of keys in shared memory.
const TILE: i64 = 4096;
/// Most threads of a block.
const THREADS: i64 = 512;
/// Fewer are chosen faster one by one, as the experts of a token.
const FEW: i64 = 16;
/// Less than every key of an element.
const NOTHING: i64 = -i64::MAX;
/// Numbers of elements are below this.
const LAST_ID: i64 = i32::MAX as i64;

/// The way in which the largest `count` of `columns` elements of a row are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TopKPlan {
    pub count: i64,
    pub columns: i64,
}

impl TopKPlan {
    /// `None` where other kernels are better, or rows too long.
    pub fn new(count: i64, columns: i64) -> Option<TopKPlan> {
        let choice = TopKPlan { count, columns };
        (count > FEW && choice.list_length() * choice.tile_count() <= TILE).then_some(choice)
    }

    /// Keys that a tile leaves.
    fn list_length(self) -> i64 {
        self.count.unsigned_abs().next_power_of_two() as i64
    }

    pub fn tile_count(self) -> i64 {
        self.columns.unsigned_abs().div_ceil(TILE as u64) as i64
    }

    /// Keys of a row between the two kernels.
    pub fn partial_keys(self) -> i64 {
        self.tile_count() * self.list_length()
    }

    /// Records the kernel that looks at rows of `x`, one lane each. The keys of a tile go to `between`, or
    /// where there is one tile what was chosen to `results`.
    pub fn emit(self, inliner: &Inliner<'_, '_>, k: &Recorder, x: ValueId, to: TopKOutput) {
        let rows = inliner.f.ty(x).dims[0].clone();
        let element = |row, column| {
            let at = [LaneIndex::scalar(row), LaneIndex::scalar(column)];
            sort_key(inliner.value(k, x, &at), column)
        };
        let size = if self.tile_count() == 1 { self.columns } else { TILE };
        k.blocks("tile", 0, self.tile_count(), |tile| {
            k.blocks("row", 1, &rows, |row| {
                let first = tile * size;
                let sorted = self.sort_keys(k, size, |i, keep| {
                    let column = (first + i).named("column");
                    k.when(column.lt(self.columns), || keep(element(row, column)));
                });
                match to {
                    TopKOutput::Results { values, ids } => self.store(k, sorted, row, [values, ids]),
                    TopKOutput::Partial(keys) => {
                        let to = k.view(keys, [1, self.tile_count(), self.list_length()]);
                        sorted.team.each(self.list_length(), |i| {
                            to.set([row, tile, i], sorted.keys.at([i]));
                        });
                    }
                }
            });
        });
    }

    /// Records the kernel that joins what the tiles of each row have left.
    pub fn emit_merge(self, k: &Recorder, rows: &Dim, between: BufId, [values, ids]: [Option<BufId>; 2]) {
        let from = k.view(between, [1, self.partial_keys()]);
        k.blocks("row", 0, rows, |row| {
            let sorted = self.sort_keys(k, self.partial_keys(), |i, keep| {
                k.when(i.lt(self.partial_keys()), || keep(from.at([row, i])));
            });
            self.store(k, sorted, row, [values, ids]);
        });
    }

    fn store<'k>(self, k: &'k Recorder, sorted: SortedKeys<'k>, row: Val<'k>, results: [Option<BufId>; 2]) {
        sorted.team.each(self.count, |i| {
            let (value, id) = element_of(sorted.keys.at([i]).named("key"));
            for (buf, result) in results.into_iter().zip([value, id]) {
                if let Some(buf) = buf {
                    k.view(buf, [1, self.count]).set([row, i], result);
                }
            }
        });
    }

    /// The largest of `size` keys in falling order, valid in all threads. `load` gives the key at a place to
    /// its second argument, or nothing.
    fn sort_keys<'k>(
        self,
        k: &'k Recorder,
        size: i64,
        load: impl FnOnce(Val<'k>, &dyn Fn(Val<'k>)),
    ) -> SortedKeys<'k> {
        let list = self.list_length();
        let size = (size.unsigned_abs().next_power_of_two() as i64).max(list);
        let team = ThreadTeam::new(k, (size / 2).clamp(32, THREADS));
        let keys = k.alloc("keys", DType::I64, [size], MemorySpace::Shared);
        team.each(size, |i| {
            let key = k.reg("key", k.int(NOTHING));
            load(i, &|loaded| key.set(loaded));
            keys.set([i], key.get());
        });
        k.barrier();
        let sorter = BitonicSorter { k, team, keys };
        // Runs of the length of a list, in falling and in rising order in turns.
        let mut run = 2;
        while run <= list {
            sorter.sort_runs(run, size / 2, |pair, distance| {
                let at = pair_start(pair, distance);
                (at, (at & run).equals(0))
            });
            run *= 2;
        }
        // Runs lie `stride` apart.
        let mut stride = list;
        while stride < size {
            let pairs = size / stride / 2;
            team.each(pairs * list, |i| {
                let at = ((i / list) * (2 * stride) + i % list).named("at");
                keys.set([at], keys.at([at]).max(keys.at([at + stride])));
            });
            k.barrier();
            stride *= 2;
            sorter.sort_runs(list, pairs * list / 2, |pair, distance| {
                let (run, pair) = (pair / (list / 2), pair % (list / 2));
                (run * stride + pair_start(pair, distance), (run & 1).equals(0))
            });
        }
        SortedKeys { team, keys }
    }
}

/// The output of the first kernel.
#[derive(Clone, Copy)]
pub enum TopKOutput {
    /// `[rows, count]` values and indices.
    Results { values: Option<BufId>, ids: Option<BufId> },
    /// `[rows, tiles, list]` keys.
    Partial(BufId),
}

#[derive(Clone, Copy)]
struct SortedKeys<'k> {
    team: ThreadTeam<'k>,
    keys: BufferView<'k, 1>,
}

struct BitonicSorter<'k> {
    k: &'k Recorder,
    team: ThreadTeam<'k>,
    keys: BufferView<'k, 1>,
}

impl<'k> BitonicSorter<'k> {
    /// Puts bitonic runs of `run` keys in order. `place(pair, distance)` returns for each of `pairs` pairs
    /// where its first key is (the other one is `distance` further), and whether the larger one comes first.
    fn sort_runs(&self, run: i64, pairs: i64, place: impl FnOnce(Val<'k>, Val<'k>) -> (Val<'k>, Val<'k>)) {
        let BitonicSorter { k, team, keys } = self;
        k.serial("step", i64::from(run.ilog2()), |step| {
            let distance = (k.int(run / 2) >> step).named("distance");
            team.each(pairs, |pair| {
                let (at, falling) = place(pair, distance);
                let at = at.named("at");
                let (a, b) = (keys.at([at]).named("a"), keys.at([at + distance]).named("b"));
                let (larger, smaller) = (a.max(b), a.min(b));
                keys.set([at], falling.select(larger, smaller));
                keys.set([at + distance], falling.select(smaller, larger));
            });
            k.barrier();
        });
    }
}

/// The place of the first key of a pair whose keys are `distance` apart, a power of two.
fn pair_start<'k>(pair: Val<'k>, distance: Val<'k>) -> Val<'k> {
    let within = pair & (distance + -1);
    (pair - within) * 2 + within
}

/// Sorts as the element does, of equal ones the earlier one last.
fn sort_key<'k>(value: Val<'k>, id: Val<'k>) -> Val<'k> {
    // -0 becomes 0.
    let value = (value + 0.0).named("value");
    let least = value.recorder().int32(i32::MIN.into());
    let ordered = value.equals(value).select(ordered_bits(value.bits(DType::I32)), least);
    (ordered.cast(DType::I64) << 32) | (LAST_ID - id)
}

fn element_of<'k>(key: Val<'k>) -> (Val<'k>, Val<'k>) {
    let value = ordered_bits((key >> 32).cast(DType::I32)).bits(DType::F32);
    (value, (LAST_ID - (key & LAST_ID)).cast(DType::I32))
}

/// The bits of an f32 as a number that is larger where the f32 is, and back.
fn ordered_bits(bits: Val<'_>) -> Val<'_> {
    bits ^ ((bits >> 31) & i64::from(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vocabularies_have_two_kernels_and_experts_other_ones() {
        let of = |count, columns| TopKPlan::new(count, columns).map(|c| (c.tile_count(), c.partial_keys()));
        assert_eq!(of(64, 300), Some((1, 64)));
        assert_eq!(of(64, 128_256), Some((32, 2048)));
        assert_eq!(of(64, 262_144), Some((64, 4096)));
        assert_eq!(of(64, 262_145), None);
        assert_eq!(of(40, 4097), Some((2, 128)));
        assert_eq!(of(8, 128), None);
    }
}
