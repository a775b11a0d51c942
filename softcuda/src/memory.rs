//! Device memory: allocations at addresses of their own, with a shadow that knows what was written and by
//! whom.
//!
//! Words are atomics, so blocks may run on several threads and a race of the program is none of this driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Memory without an address.
pub struct MemoryChunk {
    pub bytes: u64,
    words: Box<[AtomicU32]>,
    /// Per word: bytes that were written (4 bits), writer and reader among the blocks of the last launch that
    /// touched it (20 bits each), the number of that launch (20 bits).
    shadow: Box<[AtomicU64]>,
}

/// Memory at an address.
#[derive(Clone)]
pub struct MemoryRegion {
    pub base: u64,
    pub chunk: Arc<MemoryChunk>,
    pub accessible: bool,
}

/// All memory at a moment, by address.
#[derive(Clone, Default)]
pub struct MemoryView {
    pub regions: Vec<MemoryRegion>,
}

/// The block of a launch that accesses memory.
#[derive(Clone, Copy)]
pub struct AccessingBlock {
    /// Number of the launch, of [`LAUNCH_BITS`] bits.
    pub launch: u64,
    /// Number of the block, from 1.
    pub block: u64,
    /// The block has synchronised with others by atomics and fences: the writers before that are not known
    /// here.
    pub synchronised: bool,
}

/// The finding of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessFinding {
    Fine,
    /// This block wrote here in this launch.
    Own,
    Unwritten,
    /// Another block wrote here in this launch.
    Written,
    /// Another block read here in this launch.
    Read,
}

pub const LAUNCH_BITS: u32 = 20;
const BLOCK_MASK: u64 = 0xf_ffff;
const MANY: u64 = BLOCK_MASK;
const WRITER: u32 = 4;
const READER: u32 = 24;
const LAUNCH: u32 = 44;

/// A block's number as shadows hold it; two far apart may share one.
pub fn block_number(linear: u64) -> u64 {
    linear % (BLOCK_MASK - 1) + 1
}

fn zeroed<T: AtomicInteger>(count: usize) -> Box<[T]> {
    // SAFETY: `AtomicInteger` is implemented for atomic integers only, for which zero bytes are a value.
    unsafe { Box::new_zeroed_slice(count).assume_init() }
}

/// Atomic integers.
trait AtomicInteger {}
impl AtomicInteger for AtomicU32 {}
impl AtomicInteger for AtomicU64 {}

impl MemoryChunk {
    pub fn new(bytes: u64, checked: bool) -> Self {
        let count = bytes.div_ceil(4) as usize;
        Self { bytes, words: zeroed(count), shadow: zeroed(if checked { count } else { 0 }) }
    }

    /// An element of 1, 2, 4 or 8 bytes that does not cross words unless it is two of them.
    pub fn load(&self, at: u64, bytes: u32) -> u64 {
        let word = |i: u64| u64::from(self.words[i as usize].load(Relaxed));
        let i = at / 4;
        match bytes {
            8 => word(i) | word(i + 1) << 32,
            4 => word(i),
            _ => word(i) >> (at % 4 * 8) & ((1 << (bytes * 8)) - 1),
        }
    }

    pub fn store(&self, at: u64, bytes: u32, value: u64) {
        let i = (at / 4) as usize;
        match bytes {
            8 => {
                self.words[i].store(value as u32, Relaxed);
                self.words[i + 1].store((value >> 32) as u32, Relaxed);
            }
            4 => self.words[i].store(value as u32, Relaxed),
            _ => {
                let shift = at % 4 * 8;
                let mask = ((1u32 << (bytes * 8)) - 1) << shift;
                let bits = (value as u32) << shift & mask;
                let changed = |word: u32| Some(word & !mask | bits);
                let _ = self.words[i].fetch_update(Relaxed, Relaxed, changed);
            }
        }
    }

    /// Changes 4 or 8 bytes and gives what they were. Eight bytes are changed under the lock that callers
    /// hold.
    pub fn update(&self, at: u64, bytes: u32, f: impl Fn(u64) -> u64) -> u64 {
        if bytes == 8 {
            let old = self.load(at, 8);
            self.store(at, 8, f(old));
            return old;
        }
        let change = |word: u32| Some(f(u64::from(word)) as u32);
        let old = self.words[(at / 4) as usize].fetch_update(Relaxed, Relaxed, change);
        u64::from(old.unwrap_or_else(|old| old))
    }

    pub fn read(&self, at: u64, to: &mut [u8]) {
        let mut at = at as usize;
        let mut rest = to;
        while !rest.is_empty() {
            let word = self.words[at / 4].load(Relaxed).to_le_bytes();
            let from = &word[at % 4..];
            let n = from.len().min(rest.len());
            let (now, later) = rest.split_at_mut(n);
            now.copy_from_slice(&from[..n]);
            rest = later;
            at += n;
        }
    }

    /// Writes bytes of the host. No kernel may be running.
    pub fn write(&self, at: u64, from: &[u8]) {
        let whole = at.is_multiple_of(4);
        let (words, rest) = if whole { from.split_at(from.len() & !3) } else { from.split_at(0) };
        let first = (at / 4) as usize;
        for (to, word) in self.words[first..].iter().zip(words.chunks_exact(4)) {
            to.store(u32::from_le_bytes([word[0], word[1], word[2], word[3]]), Relaxed);
        }
        for (i, byte) in rest.iter().enumerate() {
            self.store(at + (words.len() + i) as u64, 1, u64::from(*byte));
        }
        self.mark(at, from.len() as u64);
    }

    /// The bytes count as written.
    pub fn mark(&self, at: u64, bytes: u64) {
        if self.shadow.is_empty() || bytes == 0 {
            return;
        }
        for i in at / 4..(at + bytes).div_ceil(4) {
            let (first, last) = (at.max(i * 4) - i * 4, (at + bytes).min(i * 4 + 4) - i * 4);
            let valid = (1u64 << last) - (1 << first);
            let cell = &self.shadow[i as usize];
            if cell.load(Relaxed) & valid != valid {
                cell.fetch_or(valid, Relaxed);
            }
        }
    }

    /// Copies whole words and what is known of them. No kernel may be running.
    pub fn copy_words(&self, to_at: u64, from: &MemoryChunk, from_at: u64, bytes: u64) {
        let (to_first, from_first, n) = ((to_at / 4) as usize, (from_at / 4) as usize, (bytes / 4) as usize);
        for i in 0..n {
            self.words[to_first + i].store(from.words[from_first + i].load(Relaxed), Relaxed);
        }
        if self.shadow.is_empty() || from.shadow.is_empty() {
            return;
        }
        for i in 0..n {
            let to = &self.shadow[to_first + i];
            let valid = from.shadow[from_first + i].load(Relaxed) & 15;
            let old = to.load(Relaxed);
            if old & 15 != valid {
                to.store((old & !15) | valid, Relaxed);
            }
        }
    }

    /// Forgets launches, so that their numbers can be used again.
    pub fn forget_launches(&self) {
        for cell in &self.shadow {
            cell.fetch_and(15, Relaxed);
        }
    }

    /// Notes that a block reads a part of a word.
    pub fn note_read(&self, at: u64, bytes: u32, who: AccessingBlock) -> AccessFinding {
        let Some(cell) = self.shadow.get((at / 4) as usize) else { return AccessFinding::Fine };
        let mask = byte_mask(at, bytes);
        loop {
            let old = cell.load(Relaxed);
            if old & mask != mask {
                return AccessFinding::Unwritten;
            }
            let (mut writer, mut reader) = (old >> WRITER & BLOCK_MASK, old >> READER & BLOCK_MASK);
            if old >> LAUNCH != who.launch {
                (writer, reader) = (0, 0);
            }
            if writer != 0 && writer != who.block {
                return if who.synchronised { AccessFinding::Fine } else { AccessFinding::Written };
            }
            let found = if writer != 0 { AccessFinding::Own } else { AccessFinding::Fine };
            if reader == who.block || reader == MANY || bytes < 4 {
                return found;
            }
            reader = if reader == 0 { who.block } else { MANY };
            let new = old & 15 | writer << WRITER | reader << READER | who.launch << LAUNCH;
            if cell.compare_exchange_weak(old, new, Relaxed, Relaxed).is_ok() {
                return found;
            }
        }
    }

    /// Notes that a block writes a part of a word. Parts of words may belong to several blocks, so only whole
    /// ones race.
    pub fn note_write(&self, at: u64, bytes: u32, who: AccessingBlock) -> AccessFinding {
        let Some(cell) = self.shadow.get((at / 4) as usize) else { return AccessFinding::Fine };
        let mask = byte_mask(at, bytes);
        loop {
            let old = cell.load(Relaxed);
            let (writer, reader, same) =
                (old >> WRITER & BLOCK_MASK, old >> READER & BLOCK_MASK, old >> LAUNCH == who.launch);
            let mut new = old | mask;
            let mut found = AccessFinding::Fine;
            if bytes >= 4 {
                if same && !who.synchronised {
                    if writer != 0 && writer != who.block {
                        return AccessFinding::Written;
                    }
                    if reader != 0 && reader != who.block {
                        return AccessFinding::Read;
                    }
                }
                if same && writer == who.block {
                    found = AccessFinding::Own;
                }
                let reader = if same { reader } else { 0 };
                new = old & 15 | mask | who.block << WRITER | reader << READER | who.launch << LAUNCH;
            }
            if new == old || cell.compare_exchange_weak(old, new, Relaxed, Relaxed).is_ok() {
                return found;
            }
        }
    }

    /// An atomic access: it races with nothing, and needs a value.
    pub fn note_atomic(&self, at: u64, bytes: u32) -> AccessFinding {
        let Some(cell) = self.shadow.get((at / 4) as usize) else { return AccessFinding::Fine };
        let mask = byte_mask(at, bytes);
        if cell.load(Relaxed) & mask == mask { AccessFinding::Fine } else { AccessFinding::Unwritten }
    }

    /// True if this launch wrote the word.
    pub fn written_in(&self, at: u64, launch: u64) -> bool {
        self.shadow.get((at / 4) as usize).is_some_and(|cell| {
            let cell = cell.load(Relaxed);
            cell >> LAUNCH == launch && cell >> WRITER & BLOCK_MASK != 0
        })
    }
}

fn byte_mask(at: u64, bytes: u32) -> u64 {
    ((1u64 << bytes.min(4)) - 1) << (at % 4)
}

impl MemoryView {
    /// The region that holds all of the bytes. `hint` is where the last one was found.
    pub fn find(&self, at: u64, bytes: u64, hint: &mut usize) -> Option<&MemoryRegion> {
        let holds = |r: &MemoryRegion| {
            at >= r.base
                && r.accessible
                && at - r.base < r.chunk.bytes
                && r.chunk.bytes - (at - r.base) >= bytes
        };
        if let Some(region) = self.regions.get(*hint)
            && holds(region)
        {
            return Some(region);
        }
        let index = self.regions.partition_point(|r| r.base <= at).checked_sub(1)?;
        *hint = index;
        self.regions.get(index).filter(|region| holds(region))
    }

    /// The allocation near an address, for messages.
    pub fn describe(&self, at: u64) -> String {
        let before = self.regions.partition_point(|r| r.base <= at).checked_sub(1);
        match before.map(|i| &self.regions[i]) {
            Some(r) if at - r.base < r.chunk.bytes && !r.accessible => {
                "the memory there was given no access".into()
            }
            Some(r) if at - r.base < r.chunk.bytes => {
                format!("it crosses the end of an allocation of {} bytes at {:#x}", r.chunk.bytes, r.base)
            }
            Some(r) => format!(
                "the allocation before it has {} bytes at {:#x} and ends {} bytes earlier",
                r.chunk.bytes,
                r.base,
                at - r.base - r.chunk.bytes
            ),
            None => "no allocation lies before it".into(),
        }
    }

    /// Pieces of a range that lie in one region each: region, offset in it, bytes. `None` where some byte has
    /// no memory.
    pub fn pieces(&self, at: u64, bytes: u64) -> Option<Vec<(&MemoryRegion, u64, u64)>> {
        let (mut at, mut rest, mut hint, mut out) = (at, bytes, 0, vec![]);
        while rest > 0 {
            let region = self.find(at, 1, &mut hint)?;
            let offset = at - region.base;
            let n = rest.min(region.chunk.bytes - offset);
            out.push((region, offset, n));
            at += n;
            rest -= n;
        }
        Some(out)
    }
}
