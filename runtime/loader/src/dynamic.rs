//! The dynamic table of an image and what it leads to: the exported symbol and the relocations.
//!
//! Sources: System V ABI, chapter 5; the GNU hash table as glibc's `dl-lookup.c` reads it.

use alloc::vec::Vec;
use core::ops::Range;

use mlcc_abi::MODEL_SYMBOL;
use mlcc_abi::elf::{PT_DYNAMIC, ProgramHeader};

use crate::error::ImageError;
use crate::image::{CodeImage, WRITABLE};

/// Tags that are numbers without consequences here: SYMBOLIC, DEBUG, FLAGS, FLAGS_1, and those of AArch64 for
/// branch protection.
const HARMLESS_TAGS: [u64; 7] = [16, 21, 30, 0x6fff_fffb, 0x7000_0001, 0x7000_0003, 0x7000_0005];

pub(crate) const RELOCATION_BYTES: u64 = 24;
pub(crate) const SYMBOL_BYTES: u64 = 24;
/// A symbol that is data and exported.
const GLOBAL_OBJECT: u8 = (1 << 4) | 1;

pub(crate) fn word_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

pub(crate) fn long_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// A string of a string table without its end mark.
pub(crate) fn text_at(strings: &[u8], at: u32) -> Option<&[u8]> {
    strings.get(at as usize..)?.split(|&c| c == 0).next()
}

/// The entries of the dynamic table that an artifact needs.
#[derive(Debug, Default)]
pub(crate) struct DynamicTable {
    /// The addresses of the table itself.
    place: Range<u64>,
    string_table: Option<u64>,
    string_bytes: Option<u64>,
    symbol_table: Option<u64>,
    symbol_entry_bytes: Option<u64>,
    hash_table: Option<u64>,
    relocations: Option<u64>,
    relocation_bytes: Option<u64>,
    relocation_entry_bytes: Option<u64>,
    relative_count: Option<u64>,
    soname: Option<u64>,
}

impl DynamicTable {
    /// Reads the table: it ends, each tag occurs once, and it asks for nothing that an artifact does not
    /// need.
    pub fn read(image: &CodeImage<'_>) -> Result<Self, ImageError> {
        let wrong = ImageError::DynamicTable;
        let elf = image.elf();
        let mut tables = elf.segments().filter(|s| s.kind == PT_DYNAMIC);
        let (Some(table), None) = (tables.next(), tables.next()) else {
            return Err(wrong("there is not exactly one"));
        };
        let writable =
            image.find_segment(table.vaddr, table.file_bytes).is_some_and(|l| l.flags & WRITABLE != 0);
        if !writable || table.vaddr % 8 != 0 {
            return Err(wrong("it does not lie in data"));
        }
        if (elf.dynamic().count() as u64 + 1).saturating_mul(16) > table.file_bytes {
            return Err(wrong("it has no end"));
        }
        // The size in memory may be that of the whole rest of the segment.
        let place = table.vaddr..table.vaddr.saturating_add(table.memory_bytes);
        let mut found = Self { place, ..Self::default() };
        for (tag, value) in elf.dynamic() {
            let field = match found.field(tag) {
                Some(field) => field,
                None if HARMLESS_TAGS.contains(&tag) => continue,
                None => return Err(ImageError::DynamicTag(tag)),
            };
            if field.replace(value).is_some() {
                return Err(wrong("a tag stands twice"));
            }
        }
        let is = |field: Option<u64>, value| field.is_none_or(|found| found == value);
        if !is(found.symbol_entry_bytes, SYMBOL_BYTES) || !is(found.relocation_entry_bytes, RELOCATION_BYTES)
        {
            return Err(wrong("its symbols or relocations have another size than those of ELF64"));
        }
        Ok(found)
    }

    fn field(&mut self, tag: u64) -> Option<&mut Option<u64>> {
        Some(match tag {
            5 => &mut self.string_table,
            6 => &mut self.symbol_table,
            7 => &mut self.relocations,
            8 => &mut self.relocation_bytes,
            9 => &mut self.relocation_entry_bytes,
            10 => &mut self.string_bytes,
            11 => &mut self.symbol_entry_bytes,
            14 => &mut self.soname,
            0x6fff_fef5 => &mut self.hash_table,
            0x6fff_fff9 => &mut self.relative_count,
            _ => return None,
        })
    }

    /// Checks every symbol that a search may come by, and finds the addresses of the model table.
    pub fn find_model_table(&self, image: &CodeImage<'_>) -> Result<Range<u64>, ImageError> {
        let wrong = ImageError::Symbols;
        let strings = || image.bytes(self.string_table?, self.string_bytes?);
        let strings = strings().ok_or(wrong("its strings lie outside of the image"))?;
        let named = self.soname.is_none_or(|at| at < strings.len() as u64);
        if strings.last() != Some(&0) || !named {
            return Err(wrong("its strings have no end"));
        }
        let hashes = || hashed_symbols(image.bytes_to_end(self.hash_table?)?);
        let indices = hashes().ok_or(wrong("its hash table leads outside of itself"))?;
        let mut table = 0..0;
        for index in indices {
            let symbol = || {
                let at = self.symbol_table?.checked_add(u64::from(index) * SYMBOL_BYTES)?;
                let symbol = image.bytes(at, SYMBOL_BYTES)?;
                let name = text_at(strings, word_at(symbol, 0)?)?;
                Some((symbol, name, long_at(symbol, 8)?, long_at(symbol, 16)?))
            };
            let (symbol, name, address, bytes) = symbol().ok_or(wrong("a symbol lies outside of it"))?;
            if name != MODEL_SYMBOL.as_bytes() || symbol[4] != GLOBAL_OBJECT || symbol[6..8] == [0, 0] {
                return Err(wrong("it exports or imports more than the model table"));
            }
            let writable = image.find_segment(address, bytes).is_some_and(|l| l.flags & WRITABLE != 0);
            if !writable || address % 8 != 0 {
                return Err(wrong("the model table does not lie in data"));
            }
            table = address..address + bytes;
        }
        Ok(table)
    }

    /// Checks that relocations write only addresses of mapped memory, and only into data: what a loader
    /// itself goes by is either in segments that are not written, or the dynamic table, which is left out.
    /// `relative` is the machine's kind of relocation that adds the image's address.
    pub fn check_relocations<'a>(
        &self,
        image: &CodeImage<'a>,
        relative: u32,
    ) -> Result<&'a [u8], ImageError> {
        let wrong = ImageError::RelocationTable;
        let (bytes, count) = (self.relocation_bytes.unwrap_or(0), self.relative_count.unwrap_or(0));
        let list = match bytes {
            0 => Some(&[][..]),
            _ => self.relocations.and_then(|at| image.bytes(at, bytes)),
        };
        let followed = [self.string_table, self.symbol_table, self.hash_table, self.relocations];
        let constant = |at: u64| image.find_segment(at, 0).is_none_or(|l| l.flags & WRITABLE == 0);
        if !followed.into_iter().flatten().all(constant) {
            return Err(ImageError::WritableTables);
        }
        let list = list.ok_or(wrong("it lies outside of the image"))?;
        if bytes % RELOCATION_BYTES != 0 || count > bytes / RELOCATION_BYTES {
            return Err(wrong("it holds no whole number of relocations"));
        }
        for (index, relocation) in list.chunks_exact(RELOCATION_BYTES as usize).enumerate() {
            let what = self.check_relocation(image, relocation, relative);
            if let Some(what) = what {
                return Err(ImageError::Relocation { index, what });
            }
        }
        Ok(list)
    }

    fn check_relocation(
        &self,
        image: &CodeImage<'_>,
        relocation: &[u8],
        relative: u32,
    ) -> Option<&'static str> {
        let (Some(at), Some(info), Some(to)) =
            (long_at(relocation, 0), long_at(relocation, 8), long_at(relocation, 16))
        else {
            return Some("is cut off");
        };
        if info != u64::from(relative) {
            return Some("is no relative one");
        }
        let data = |s: &ProgramHeader| at % 8 == 0 && s.flags & WRITABLE != 0;
        if !image.find_segment(at, 8).is_some_and(data) {
            return Some("writes outside of data");
        }
        if at < self.place.end && at + 8 > self.place.start {
            return Some("writes into the dynamic table");
        }
        image.find_segment(to, 0).is_none().then_some("leads outside of the image")
    }
}

/// The symbols that a GNU hash table leads to, `None` where a search would leave its segment.
fn hashed_symbols(table: &[u8]) -> Option<Vec<u32>> {
    let (buckets, first) = (word_at(table, 0)?, word_at(table, 4)?);
    let (filters, shift) = (word_at(table, 8)?, word_at(table, 12)?);
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
        let mut symbol = word_at(table, (buckets_at + 4 * bucket) as usize)?;
        while symbol != 0 {
            let link = u64::from(symbol.checked_sub(first)?);
            let hash = word_at(table, usize::try_from(chains_at + 4 * link).ok()?)?;
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
