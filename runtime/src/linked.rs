//! What the dynamic loader will make of an artifact, checked before it does. The loader trusts what it is given: it follows
//! every address of the dynamic table and writes wherever a relocation says. Artifacts need little of it (one exported
//! symbol, relative relocations of its data), so everything else is refused.
//!
//! Sources: System V ABI, chapter 5; the GNU hash table as glibc's `dl-lookup.c` reads it.

use std::collections::BTreeMap;
use std::ops::Range;

use mlcc_abi::MODEL_SYMBOL;
use mlcc_abi::elf::{Elf, MACHINE_AARCH64, MACHINE_X86_64, PT_DYNAMIC, PT_LOAD, Segment};

/// Smallest page that a loader maps.
const PAGE: u64 = 4096;
/// Largest page that a linker rounds to.
const LARGE_PAGE: u64 = 64 << 10;
/// Most address space between the segments of a file, beyond its own size.
const MOST_GAPS: u64 = 1 << 30;

const PT_NOTE: u32 = 4;
const PT_PHDR: u32 = 6;
const PT_TLS: u32 = 7;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
const PT_GNU_STACK: u32 = 0x6474_e551;
const PT_GNU_RELRO: u32 = 0x6474_e552;
const PT_GNU_PROPERTY: u32 = 0x6474_e553;
const EXECUTABLE: u32 = 1;
const WRITABLE: u32 = 2;
const READABLE: u32 = 4;

const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_RELAENT: u64 = 9;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_SONAME: u64 = 14;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const DT_RELACOUNT: u64 = 0x6fff_fff9;
/// Tags that are numbers without consequences here: SYMBOLIC, DEBUG, FLAGS, FLAGS_1, and those of AArch64 for branch
/// protection.
const HARMLESS_TAGS: [u64; 7] = [16, 21, 30, 0x6fff_fffb, 0x7000_0001, 0x7000_0003, 0x7000_0005];

const RELOCATION_BYTES: u64 = 24;
const SYMBOL_BYTES: u64 = 24;
/// A symbol that is data and exported.
const GLOBAL_OBJECT: u8 = (1 << 4) | 1;
/// The kind of a function in the low bits of a symbol's `info`.
const FUNCTION: u8 = 2;

type Result<T> = std::result::Result<T, String>;

/// The parts of a checked artifact by address, relative to where it will be loaded.
#[derive(Debug)]
pub(crate) struct Linked {
    loads: Vec<Segment>,
    /// The bytes of [`MODEL_SYMBOL`].
    pub table: Range<u64>,
    /// Names by address; none in a stripped file.
    functions: BTreeMap<u64, Vec<String>>,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

fn text(strings: &[u8], at: u32) -> Option<&[u8]> {
    strings.get(at as usize..)?.split(|&c| c == 0).next()
}

impl Linked {
    /// Checks everything that the loader will follow. An error says what is wrong; [`Linked::table`] is empty where
    /// the file has no symbol [`MODEL_SYMBOL`].
    pub fn check(elf: &Elf<'_>) -> Result<Self> {
        let loads = loads(elf)?;
        let view = View { elf, loads: &loads };
        view.check_other_segments()?;
        let dynamic = view.dynamic()?;
        let table = view.table(&dynamic)?;
        view.check_relocations(&dynamic)?;
        let functions = functions(elf);
        Ok(Self { loads, table, functions })
    }

    /// Whether all of a range of addresses is mapped from the file, in one piece.
    pub fn holds(&self, addresses: &Range<u64>) -> bool {
        let inside = |s: &Segment| addresses.start >= s.vaddr && addresses.end - s.vaddr <= s.file_bytes;
        addresses.start <= addresses.end && self.loads.iter().any(inside)
    }

    /// Whether an address is one of code; `names` is what a function there may be called, where the file tells.
    pub fn is_function(&self, address: u64, names: &[&str]) -> bool {
        let code =
            |s: &Segment| s.flags & EXECUTABLE != 0 && address >= s.vaddr && address - s.vaddr < s.file_bytes;
        let found = self.functions.get(&address);
        let named = found.is_some_and(|found| found.iter().any(|name| names.contains(&name.as_str())));
        self.loads.iter().any(code) && (named || self.functions.is_empty())
    }
}

/// The segments that are mapped: ascending, on pages of their own, none both writable and executable.
fn loads(elf: &Elf<'_>) -> Result<Vec<Segment>> {
    let loads: Vec<Segment> = elf.segments().filter(|s| s.kind == PT_LOAD).collect();
    let wrong = || Err("its segments are malformed".to_string());
    let mut end = 0;
    for (index, s) in loads.iter().enumerate() {
        let both = s.flags & (WRITABLE | EXECUTABLE) == WRITABLE | EXECUTABLE;
        // Bytes that are not in the file are zeroed, in a page that has to be writable.
        let grows = s.memory_bytes != s.file_bytes && s.flags & WRITABLE == 0;
        let placed = s.vaddr / PAGE * PAGE >= end && s.vaddr % PAGE == s.offset % PAGE;
        if !placed || both || grows || s.flags & READABLE == 0 || (index == 0 && s.vaddr != 0) {
            return wrong();
        }
        let most = elf.file().len() as u64 + MOST_GAPS;
        match s.vaddr.checked_add(s.memory_bytes).filter(|&end| end <= most) {
            Some(of) => end = of.next_multiple_of(PAGE),
            None => return wrong(),
        }
    }
    if loads.is_empty() { wrong() } else { Ok(loads) }
}

/// Names of the functions that the compiler exports to its own table.
fn functions(elf: &Elf<'_>) -> BTreeMap<u64, Vec<String>> {
    let mut found = BTreeMap::<u64, Vec<String>>::new();
    let (Some(symbols), Some(strings)) = (elf.section(".symtab"), elf.section(".strtab")) else {
        return found;
    };
    for symbol in symbols.chunks_exact(SYMBOL_BYTES as usize).filter(|s| s[4] & 15 == FUNCTION) {
        let name = word(symbol, 0).and_then(|at| text(strings, at)).and_then(|n| std::str::from_utf8(n).ok());
        if let (Some(name), Some(address)) = (name, long(symbol, 8)) {
            found.entry(address).or_default().push(name.to_string());
        }
    }
    found
}

struct View<'a> {
    elf: &'a Elf<'a>,
    loads: &'a [Segment],
}

impl<'a> View<'a> {
    /// The segment that holds all of a range of addresses, in its part that comes from the file.
    fn load(&self, address: u64, bytes: u64) -> Option<&'a Segment> {
        let inside = |s: &&Segment| {
            let at = address.checked_sub(s.vaddr);
            at.and_then(|at| at.checked_add(bytes)).is_some_and(|end| end <= s.file_bytes)
        };
        self.loads.iter().find(inside)
    }

    fn bytes(&self, address: u64, bytes: u64) -> Option<&'a [u8]> {
        let load = self.load(address, bytes)?;
        let from = usize::try_from(load.offset + (address - load.vaddr)).ok()?;
        self.elf.file().get(from..from + bytes as usize)
    }

    /// From an address to the end of its segment.
    fn rest(&self, address: u64) -> Option<&'a [u8]> {
        let load = self.load(address, 0)?;
        self.bytes(address, load.file_bytes - (address - load.vaddr))
    }

    /// Segments that only name a part of those that are mapped.
    fn check_other_segments(&self) -> Result<()> {
        for s in self.elf.segments() {
            let placed = self.load(s.vaddr, s.file_bytes);
            let fits = match s.kind {
                PT_DYNAMIC | PT_NOTE | PT_PHDR | PT_GNU_EH_FRAME | PT_GNU_PROPERTY => {
                    placed.is_some_and(|l| s.offset.wrapping_sub(l.offset) == s.vaddr - l.vaddr)
                }
                PT_GNU_RELRO => placed.is_some_and(|l| {
                    let end = (l.vaddr + l.memory_bytes).next_multiple_of(LARGE_PAGE);
                    let own = s.vaddr.checked_add(s.memory_bytes).is_some_and(|own| own <= end);
                    l.flags & WRITABLE != 0 && own
                }),
                PT_GNU_STACK => s.flags & EXECUTABLE == 0,
                PT_TLS => false,
                _ => true,
            };
            if !fits {
                return Err(format!("its segment of kind {:#x} is malformed", s.kind));
            }
        }
        Ok(())
    }

    /// The dynamic table: it ends, and has only what an artifact needs.
    fn dynamic(&self) -> Result<BTreeMap<u64, u64>> {
        let wrong = || "its dynamic table is malformed".to_string();
        let mut tables = self.elf.segments().filter(|s| s.kind == PT_DYNAMIC);
        let (Some(table), None) = (tables.next(), tables.next()) else { return Err(wrong()) };
        let writable = self.load(table.vaddr, table.file_bytes).is_some_and(|l| l.flags & WRITABLE != 0);
        let ends = (self.elf.dynamic().count() as u64 + 1).saturating_mul(16) <= table.file_bytes;
        if !writable || !ends || table.vaddr % 8 != 0 {
            return Err(wrong());
        }
        let mut found = BTreeMap::new();
        for (tag, value) in self.elf.dynamic() {
            match tag {
                DT_STRTAB | DT_SYMTAB | DT_RELA | DT_RELASZ | DT_RELAENT | DT_STRSZ | DT_SYMENT
                | DT_SONAME | DT_GNU_HASH | DT_RELACOUNT => {
                    if found.insert(tag, value).is_some() {
                        return Err(wrong());
                    }
                }
                tag if HARMLESS_TAGS.contains(&tag) => {}
                other => {
                    return Err(format!(
                        "its dynamic table asks the loader for something (tag {other:#x}) that no artifact needs"
                    ));
                }
            }
        }
        let is = |tag, value| found.get(&tag).is_none_or(|&v| v == value);
        if !is(DT_SYMENT, SYMBOL_BYTES) || !is(DT_RELAENT, RELOCATION_BYTES) {
            return Err(wrong());
        }
        Ok(found)
    }

    /// Every symbol that a search may come by, and the address of the model table.
    fn table(&self, dynamic: &BTreeMap<u64, u64>) -> Result<Range<u64>> {
        let find = || {
            let strings = self.bytes(*dynamic.get(&DT_STRTAB)?, *dynamic.get(&DT_STRSZ)?)?;
            let named = dynamic.get(&DT_SONAME).is_none_or(|&at| at < strings.len() as u64);
            if strings.last() != Some(&0) || !named {
                return None;
            }
            let symbols = *dynamic.get(&DT_SYMTAB)?;
            let mut table = 0..0;
            for index in hashed_symbols(self.rest(*dynamic.get(&DT_GNU_HASH)?)?)? {
                let at = symbols.checked_add(u64::from(index) * SYMBOL_BYTES)?;
                let symbol = self.bytes(at, SYMBOL_BYTES)?;
                let name = text(strings, word(symbol, 0)?)?;
                let (address, bytes) = (long(symbol, 8)?, long(symbol, 16)?);
                if name != MODEL_SYMBOL.as_bytes() || symbol[4] != GLOBAL_OBJECT || symbol[6..8] == [0, 0] {
                    return None;
                }
                let writable = self.load(address, bytes).is_some_and(|l| l.flags & WRITABLE != 0);
                table = Some(address..address + bytes).filter(|_| writable && address % 8 == 0)?;
            }
            Some(table)
        };
        find().ok_or_else(|| "its symbol table is malformed".into())
    }

    /// Relocations write only addresses of what is mapped, and only into data: what the loader itself goes by is either in segments
    /// that nobody writes, or the dynamic table, which is left out.
    fn check_relocations(&self, dynamic: &BTreeMap<u64, u64>) -> Result<()> {
        let relative: u32 = match self.elf.machine() {
            MACHINE_X86_64 => 8,
            MACHINE_AARCH64 => 1027,
            other => return Err(format!("it is made for the unknown machine {other}")),
        };
        let get = |tag| dynamic.get(&tag).copied().unwrap_or(0);
        let (bytes, count) = (get(DT_RELASZ), get(DT_RELACOUNT));
        let list = if bytes == 0 { Some(&[][..]) } else { self.bytes(get(DT_RELA), bytes) };
        let followed = [DT_STRTAB, DT_SYMTAB, DT_GNU_HASH, DT_RELA].map(get);
        let constant = |at: u64| self.load(at, 0).is_none_or(|l| l.flags & WRITABLE == 0);
        if !followed.into_iter().all(constant) {
            return Err("the loader's tables are in memory that is written".into());
        }
        let whole = bytes % RELOCATION_BYTES == 0 && count <= bytes / RELOCATION_BYTES;
        let list = list.filter(|_| whole).ok_or("its relocation table is malformed")?;
        let is_right = |r: &[u8]| {
            let (at, info, to) = (long(r, 0)?, long(r, 8)?, long(r, 16)?);
            let end = at.checked_add(8)?;
            let dynamic = self.elf.segments().filter(|s| s.kind == PT_DYNAMIC);
            let free = dynamic.into_iter().all(|s| end <= s.vaddr || at >= s.vaddr + s.memory_bytes);
            let data = at % 8 == 0 && free && self.load(at, 8)?.flags & WRITABLE != 0;
            (info == u64::from(relative) && data && self.load(to, 0).is_some()).then_some(())
        };
        match list.chunks_exact(RELOCATION_BYTES as usize).all(|r| is_right(r).is_some()) {
            true => Ok(()),
            false => Err("its relocations are malformed".into()),
        }
    }
}

/// The symbols that a GNU hash table leads to, `None` where a search would leave its segment.
fn hashed_symbols(table: &[u8]) -> Option<Vec<u32>> {
    let (buckets, first) = (word(table, 0)?, word(table, 4)?);
    let (filters, shift) = (word(table, 8)?, word(table, 12)?);
    if buckets == 0 || !filters.is_power_of_two() || shift >= 64 {
        return None;
    }
    let buckets_at = 16 + 8 * u64::from(filters);
    let chains_at = buckets_at + 4 * u64::from(buckets);
    if chains_at > table.len() as u64 {
        return None;
    }
    let mut found = Vec::new();
    for bucket in 0..u64::from(buckets) {
        let mut symbol = word(table, (buckets_at + 4 * bucket) as usize)?;
        while symbol != 0 {
            let link = u64::from(symbol.checked_sub(first)?);
            let hash = word(table, usize::try_from(chains_at + 4 * link).ok()?)?;
            found.push(symbol);
            // Chains do not meet: there are no more symbols than links.
            if found.len() * 4 > table.len() {
                return None;
            }
            symbol = if hash & 1 == 1 { 0 } else { symbol.checked_add(1)? };
        }
    }
    Some(found)
}
