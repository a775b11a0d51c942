//! Weights in huge pages.
//!
//! Weights are mapped from the artifact, which makes a short start and lets processes share them. But pages
//! of a file are read more slowly than huge pages of anonymous memory (measured on a virtual machine: 9.0
//! instead of 11.1 GB/s), also where the page cache has large folios. So a process that goes on decoding
//! moves them: piece by piece, between steps, the file is read into a huge page, and `mremap` puts that in
//! the place of the file's pages. Addresses stay as they are, and there is never more than one piece per
//! worker in memory twice.
//!
//! Memory lies on the NUMA node of the thread that touches it first, which is here who moves a piece. So
//! pieces are moved by workers of the nodes where they are to be ([`NumaPlacer`](crate::numa::NumaPlacer)).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(target_os = "linux")]
use memmap2::{Advice, MmapOptions};

/// The time at which weights move into huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// A little after each decode step, once there were some, where there is memory for it.
    #[default]
    Auto,
    /// All of them while the model is loaded.
    On,
    /// Never.
    Off,
}

/// Size and alignment of a huge page on x86-64, and on AArch64 with pages of 4 KiB.
pub(crate) const HUGE: usize = 2 << 20;
/// Decode steps before `Auto` begins: a process that reads the weights less often gains less than the move
/// costs (as much as 6 to 25 reads).
const PATIENCE: usize = 64;
/// Fewer bytes stay where they are.
const LEAST: usize = 64 << 20;
/// Every piece is a mapping of its own; Linux permits 65530.
const MOST_PIECES: usize = 8192;

/// The weights of one model, on their way.
pub(crate) struct HugePageMigrator {
    file: File,
    mappings: Vec<WeightsMapping>,
    /// Bytes of a piece, and how many all stretches have.
    piece: usize,
    pieces: usize,
    /// Pieces of every node on which some are to be; at least one node.
    nodes: Vec<NodePieces>,
    steps: AtomicUsize,
}

/// Weights that are mapped in one piece: all, or those of a rank.
struct WeightsMapping {
    /// Address and place in the file of its first piece.
    address: usize,
    offset: u64,
    /// Bytes from the first byte of its weights to its first piece.
    skip: usize,
    /// The number of its first piece.
    first: usize,
}

/// Pieces that belong to one node.
struct NodePieces {
    /// Numbers of pieces, rising; `None`: all.
    pieces: Option<Vec<u32>>,
    /// The numbers of pieces that were started, and that have moved.
    next: AtomicUsize,
    moved: AtomicUsize,
}

impl NodePieces {
    fn new(pieces: Option<Vec<u32>>) -> NodePieces {
        NodePieces { pieces, next: AtomicUsize::new(0), moved: AtomicUsize::new(0) }
    }
}

impl HugePageMigrator {
    /// The migrator of weights that are mapped from `file`, by rank: the bytes, and their start in it. `None`
    /// where that does not apply. The mappings must live as long as pieces are moved.
    pub fn new(file: &File, weights: &[(&[u8], u64)], wanted: HugePages) -> Option<HugePageMigrator> {
        let skip = |weights: &[u8]| weights.as_ptr().addr().next_multiple_of(HUGE) - weights.as_ptr().addr();
        let whole = |weights: &[u8]| weights.len().saturating_sub(skip(weights)) / HUGE;
        let len = weights.iter().map(|(weights, _)| whole(weights) * HUGE).sum::<usize>();
        let fits = match wanted {
            HugePages::Off => false,
            HugePages::On => true,
            HugePages::Auto => len >= LEAST && available_memory() >= (len + len / 4) as u64,
        };
        if !fits || len == 0 || !are_supported() {
            return None;
        }
        let piece = (len / HUGE).div_ceil(MOST_PIECES) * HUGE;
        let (mut pieces, mut stretches) = (0, Vec::with_capacity(weights.len()));
        for &(weights, offset) in weights {
            let skip = skip(weights);
            let (address, offset) = (weights.as_ptr().addr() + skip, offset + skip as u64);
            stretches.push(WeightsMapping { address, offset, skip, first: pieces });
            pieces += whole(weights) * HUGE / piece;
        }
        Some(HugePageMigrator {
            file: file.try_clone().ok()?,
            mappings: stretches,
            piece,
            pieces,
            nodes: vec![NodePieces::new(None)],
            steps: AtomicUsize::new(0),
        })
    }

    /// Distributes the pieces among `nodes` nodes. `home` gets a rank and the bytes of its weights in a
    /// piece, and returns the number of a node. Nothing may have moved yet.
    pub fn assign_nodes(&mut self, nodes: usize, mut home: impl FnMut(usize, Range<u64>) -> usize) {
        let mut parts = vec![Vec::new(); nodes];
        for piece in 0..self.pieces {
            let rank = self.rank_of(piece);
            let stretch = &self.mappings[rank];
            let begin = (stretch.skip + (piece - stretch.first) * self.piece) as u64;
            if let Some(part) = parts.get_mut(home(rank, begin..begin + self.piece as u64)) {
                part.push(piece as u32);
            }
        }
        self.nodes = parts.into_iter().map(|pieces| NodePieces::new(Some(pieces))).collect();
    }

    /// The rank whose weights a piece has: stretches without a piece have no number.
    fn rank_of(&self, piece: usize) -> usize {
        self.mappings.partition_point(|stretch| stretch.first <= piece) - 1
    }

    fn node_len(&self, part: &NodePieces) -> usize {
        part.pieces.as_ref().map_or(self.pieces, Vec::len)
    }

    /// Bytes that have moved, by the number of the node.
    pub fn moved_bytes(&self) -> Vec<u64> {
        let bytes = |part: &NodePieces| (part.moved.load(Ordering::Relaxed) * self.piece) as u64;
        self.nodes.iter().map(bytes).collect()
    }

    /// Counts a decode step; true if pieces are to be moved after it.
    pub fn count_step(&self) -> bool {
        self.nodes.iter().any(|part| part.next.load(Ordering::Relaxed) < self.node_len(part))
            && self.steps.fetch_add(1, Ordering::Relaxed) >= PATIENCE
    }

    /// Moves the next piece of a node; false if there is none. Any number of threads may call it, those that
    /// run on that node.
    pub fn move_next_piece(&self, node: usize) -> bool {
        let Some(part) = self.nodes.get(node) else { return false };
        let i = part.next.fetch_add(1, Ordering::Relaxed);
        if i >= self.node_len(part) {
            part.next.store(self.node_len(part), Ordering::Relaxed);
            return false;
        }
        let piece = part.pieces.as_ref().map_or(i, |pieces| pieces[i] as usize);
        let moved = self.move_piece(piece);
        if moved.is_some() {
            part.moved.fetch_add(1, Ordering::Relaxed);
        } else {
            // No memory, or a file system that went away: the rest stays mapped from the file.
            self.nodes.iter().for_each(|part| part.next.store(self.node_len(part), Ordering::Relaxed));
        }
        moved.is_some()
    }

    #[cfg(target_os = "linux")]
    fn move_piece(&self, piece: usize) -> Option<()> {
        let stretch = &self.mappings[self.rank_of(piece)];
        let at = (piece - stretch.first) * self.piece;
        let mut fresh = MmapOptions::new().len(self.piece + HUGE).no_reserve_swap().map_anon().ok()?;
        let start = fresh.as_ptr() as usize;
        let skip = start.next_multiple_of(HUGE) - start;
        fresh.advise_range(Advice::HugePage, skip, self.piece).ok()?;
        self.file.read_exact_at(&mut fresh[skip..skip + self.piece], stretch.offset + at as u64).ok()?;
        let fresh = fresh.make_read_only().ok()?;
        // SAFETY: `piece` bytes inside of both mappings, which no one else unmaps. The bytes at the target
        // are the same before and after, and the kernel exchanges them at once for all threads.
        if !unsafe { linux::replace(start + skip, self.piece, stretch.address + at) } {
            return None;
        }
        // Where the piece was, another thread may have a mapping by now: dropping `fresh` would take that
        // away.
        let end = start + fresh.len();
        std::mem::forget(fresh);
        // SAFETY: what is left of the forgotten mapping, before the piece and after it.
        unsafe {
            linux::unmap(start, skip);
            linux::unmap(start + skip + self.piece, end - (start + skip + self.piece));
        }
        Some(())
    }

    #[cfg(not(target_os = "linux"))]
    fn move_piece(&self, _: usize) -> Option<()> {
        None
    }
}

/// True if the system gives huge pages of the size that is known here to who asks for them.
fn are_supported() -> bool {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}"));
    read("enabled").is_ok_and(|text| !text.contains("[never]"))
        && read("hpage_pmd_size").is_ok_and(|text| text.trim().parse() == Ok(HUGE))
}

/// Bytes that can be had without swapping; 0 if unknown.
fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(target_os = "linux")]
pub(crate) mod linux {
    use std::ffi::{c_int, c_void};

    const MREMAP_MAYMOVE: c_int = 1;
    const MREMAP_FIXED: c_int = 2;

    unsafe extern "C" {
        fn mremap(old: *mut c_void, old_len: usize, len: usize, flags: c_int, ...) -> *mut c_void;
        fn munmap(address: *mut c_void, len: usize) -> c_int;
    }

    /// Puts the pages of `from..from + len` in the place of those at the address `to`; false if it did not.
    /// Linux looks at its limits (how many mappings there may be) before it takes away what is at `to`.
    ///
    /// # Safety
    /// Whole pages of mappings that the caller owns; no one relies on what was at `to`.
    pub unsafe fn replace(from: usize, len: usize, to: usize) -> bool {
        let flags = MREMAP_MAYMOVE | MREMAP_FIXED;
        // SAFETY: as the caller promises.
        let found = unsafe { mremap(from as *mut c_void, len, len, flags, to as *mut c_void) };
        found as usize == to
    }

    /// Gives back the pages of `from..from + len`; none if `len` is 0.
    ///
    /// # Safety
    /// Whole pages of a mapping that the caller owns and that is not used any more.
    pub unsafe fn unmap(from: usize, len: usize) {
        if len > 0 {
            // SAFETY: as the caller promises.
            let _ = unsafe { munmap(from as *mut c_void, len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn moved_weights_are_the_same() {
        let len = 3 * HUGE + 12345;
        let bytes: Vec<u8> = (0..len).map(|i| (i / 7 * 31 % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[9; 4096]).unwrap();
        file.write_all(&bytes).unwrap();
        // SAFETY: the file has no other user.
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file) }.unwrap();
        let weights = &map[4096..];
        let whole = [(weights, 4096)];
        assert!(HugePageMigrator::new(&file, &whole, HugePages::Off).is_none());
        assert!(HugePageMigrator::new(&file, &whole, HugePages::Auto).is_none(), "too few");
        let Some(mover) = HugePageMigrator::new(&file, &whole, HugePages::On) else {
            return println!("skipped: this system has no huge pages");
        };
        assert!(mover.pieces >= 2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| while mover.move_next_piece(0) {});
            }
            for _ in 0..20 {
                assert!(weights == bytes, "while they move");
            }
        });
        assert!(weights == bytes);
        assert!(!mover.move_next_piece(0));
        assert!(!mover.count_step(), "nothing is left");
        assert_eq!(mover.moved_bytes(), [(mover.pieces * mover.piece) as u64]);
    }

    /// A rank whose weights are less than a huge page has no piece.
    #[test]
    fn weights_of_all_ranks_move() {
        let ranks = [3 * HUGE, 12345, 2 * HUGE + 64];
        let len = ranks.iter().sum::<usize>();
        let bytes: Vec<u8> = (0..len).map(|i| (i / 5 * 29 % 253) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        // SAFETY: the file has no other user.
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file) }.unwrap();
        let mut at = 0;
        let weights = ranks.map(|len| {
            at += len;
            (&map[at - len..at], (at - len) as u64)
        });
        let Some(mut mover) = HugePageMigrator::new(&file, &weights, HugePages::On) else {
            return println!("skipped: this system has no huge pages");
        };
        let mut asked = Vec::new();
        mover.assign_nodes(2, |rank, bytes| {
            asked.push((rank, bytes.start + weights[rank].0.as_ptr() as u64, bytes.end));
            usize::from(rank > 0)
        });
        assert!(asked.iter().all(|&(rank, address, end)| {
            rank != 1 && address % HUGE as u64 == 0 && end <= ranks[rank] as u64
        }));
        let of = |wanted: usize| asked.iter().filter(|(rank, ..)| *rank == wanted).count();
        assert!(of(0) >= 2 && of(2) >= 1, "{asked:?}");
        let count = |node| (0..).take_while(|_| mover.move_next_piece(node)).count();
        assert_eq!([count(0), count(1)], [of(0), of(2)]);
        assert!(map[..] == bytes);
    }

    #[test]
    fn each_node_has_pieces_of_its_own() {
        let len = 6 * HUGE;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; len]).unwrap();
        // SAFETY: the file has no other user.
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file) }.unwrap();
        let Some(mut mover) = HugePageMigrator::new(&file, &[(&map, 0)], HugePages::On) else {
            return println!("skipped: this system has no huge pages");
        };
        let mut ends = Vec::new();
        mover.assign_nodes(2, |_, bytes| {
            ends.push(bytes.end);
            ends.len() % 3 / 2
        });
        assert!(
            ends.windows(2).all(|pair| pair[1] == pair[0] + HUGE as u64)
                && *ends.last().unwrap() <= len as u64
        );
        let count = |node| (0..).take_while(|_| mover.move_next_piece(node)).count();
        let counts = [count(1), count(0), count(0), count(7)];
        assert_eq!((counts[0] + counts[1], &counts[2..]), (mover.pieces, &[0, 0][..]));
        assert_eq!(counts[0], mover.pieces.div_ceil(3) - usize::from(mover.pieces % 3 == 1));
        assert_eq!(mover.moved_bytes(), [counts[1], counts[0]].map(|n| (n * HUGE) as u64));
        assert!(!mover.count_step() && map.iter().all(|&byte| byte == 7));
    }

    #[test]
    fn patience() {
        let file = tempfile::tempfile().unwrap();
        let mover = HugePageMigrator {
            file,
            mappings: Vec::new(),
            piece: HUGE,
            pieces: 1,
            nodes: vec![NodePieces::new(None)],
            steps: AtomicUsize::new(0),
        };
        assert_eq!((0..PATIENCE + 2).filter(|_| mover.count_step()).count(), 2);
    }
}
