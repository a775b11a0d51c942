//! The cost of an access of a warp: sectors and lines of global memory, turns of the banks of shared memory.

use super::lanes::active_lanes;

pub const SECTOR_BYTES: u64 = 32;
const LINE_BYTES: u64 = 128;
const BANKS: usize = 32;

/// The sectors that the lanes of a mask touch, each once, in order.
pub fn touched_sectors(addresses: &[u64; 32], mask: u32, bytes: u64) -> Vec<u64> {
    let mut out: Vec<u64> = active_lanes(mask)
        .flat_map(|i| addresses[i] / SECTOR_BYTES..=(addresses[i] + bytes - 1) / SECTOR_BYTES)
        .collect();
    out.sort_unstable();
    out.dedup();
    out
}

/// Lines of the first level that sorted sectors lie in.
pub fn count_lines(sectors: &[u64]) -> u64 {
    let line = |sector: &u64| sector * SECTOR_BYTES / LINE_BYTES;
    let mut count = 0;
    let mut last = None;
    for sector in sectors {
        count += u64::from(last != Some(line(sector)));
        last = Some(line(sector));
    }
    count
}

/// Turns that the banks need: lanes go in sets of as many as 128 bytes serve, and a bank gives one word in a
/// turn.
pub fn bank_cycles(addresses: &[u64; 32], mask: u32, bytes: u64) -> u64 {
    let per_set = (LINE_BYTES / bytes.max(4)).clamp(1, 32) as usize;
    let set = |first: usize| {
        let mut words: Vec<u64> = active_lanes(mask)
            .filter(|i| (first..first + per_set).contains(i))
            .flat_map(|i| addresses[i] / 4..=(addresses[i] + bytes - 1) / 4)
            .collect();
        words.sort_unstable();
        words.dedup();
        let mut banks = [0u64; BANKS];
        words.iter().for_each(|word| banks[*word as usize % BANKS] += 1);
        banks.into_iter().max().unwrap_or(0)
    };
    (0..32).step_by(per_set).map(set).sum::<u64>().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_sectors() {
        let all = u32::MAX;
        let neighbours = std::array::from_fn(|i| 4 * i as u64);
        assert_eq!(
            (touched_sectors(&neighbours, all, 4).len(), count_lines(&touched_sectors(&neighbours, all, 4))),
            (4, 1)
        );
        let wide = std::array::from_fn(|i| 16 * i as u64);
        assert_eq!(
            (touched_sectors(&wide, all, 16).len(), count_lines(&touched_sectors(&wide, all, 16))),
            (16, 4)
        );
        let apart = std::array::from_fn(|i| 256 * i as u64);
        assert_eq!(
            (touched_sectors(&apart, all, 4).len(), count_lines(&touched_sectors(&apart, all, 4))),
            (32, 32)
        );
        assert_eq!(touched_sectors(&[30; 32], 1, 4), [0, 1], "it crosses a border");
    }

    #[test]
    fn lanes_wait_for_banks() {
        let all = u32::MAX;
        let step = |bytes: u64| std::array::from_fn(|i| bytes * i as u64);
        assert_eq!(bank_cycles(&step(4), all, 4), 1);
        assert_eq!(bank_cycles(&[64; 32], all, 4), 1, "one word for all");
        assert_eq!(bank_cycles(&step(128), all, 4), 32, "one bank for all");
        assert_eq!(bank_cycles(&step(8), all, 4), 2);
        assert_eq!(bank_cycles(&step(16), all, 16), 4, "512 bytes");
        assert_eq!(bank_cycles(&step(64), all, 16), 4 * 4, "eight lanes in two sets of banks");
        assert_eq!(bank_cycles(&step(4), 0, 4), 1, "nobody");
    }
}
