//! The segments of a checked image.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use mlcc_abi::elf::{ElfFile, MACHINE_AARCH64, MACHINE_X86_64, PT_DYNAMIC, PT_LOAD, ProgramHeader};

use crate::dynamic::{DynamicTable, SYMBOL_BYTES, long_at, text_at, word_at};
use crate::error::ImageError;

/// Smallest page of any system.
const MIN_PAGE: u64 = 4096;
/// Largest page that a linker rounds to.
const MAX_PAGE: u64 = 64 << 10;
/// Most address space between the segments of a file, beyond its own size.
const MAX_GAPS: u64 = 1 << 30;
/// Most program headers. Linkers write about ten.
const MAX_SEGMENTS: usize = 64;

const PT_NOTE: u32 = 4;
const PT_PHDR: u32 = 6;
const PT_TLS: u32 = 7;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
const PT_GNU_STACK: u32 = 0x6474_e551;
const PT_GNU_RELRO: u32 = 0x6474_e552;
const PT_GNU_PROPERTY: u32 = 0x6474_e553;
pub(crate) const EXECUTABLE: u32 = 1;
pub(crate) const WRITABLE: u32 = 2;
const READABLE: u32 = 4;

/// The kind of a function in the low bits of a symbol's `info`.
const FUNCTION: u8 = 2;

/// A function that the symbol table names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeFunction<'a> {
    pub name: &'a str,
    /// Relative to the start of the image.
    pub address: u64,
    pub bytes: u64,
}

/// The code of an artifact after every check. Addresses are relative to where the image will be loaded.
#[derive(Debug)]
pub struct CodeImage<'a> {
    elf: ElfFile<'a>,
    mapped_segments: Vec<ProgramHeader>,
    model_table: Range<u64>,
    /// The relocations in the form of the file.
    pub(crate) relocations: &'a [u8],
    /// Names by address; none in a stripped file.
    functions: BTreeMap<u64, Vec<String>>,
}

impl<'a> CodeImage<'a> {
    /// Checks everything that a loader follows: segments, dynamic table, symbols, relocations.
    /// [`CodeImage::model_table`] is empty where the file has no symbol [`mlcc_abi::MODEL_SYMBOL`].
    pub fn check(elf: &ElfFile<'a>) -> Result<Self, ImageError> {
        let relative = match elf.machine() {
            MACHINE_X86_64 => 8,
            MACHINE_AARCH64 => 1027,
            other => return Err(ImageError::Machine(other)),
        };
        let (model_table, relocations) = (0..0, &[][..]);
        let functions = BTreeMap::new();
        let mut image =
            Self { elf: *elf, mapped_segments: check_loads(elf)?, model_table, relocations, functions };
        image.check_other_segments()?;
        let dynamic = DynamicTable::read(&image)?;
        image.model_table = dynamic.find_model_table(&image)?;
        image.relocations = dynamic.check_relocations(&image, relative)?;
        image.functions = names_by_address(elf);
        Ok(image)
    }

    /// The addresses of [`mlcc_abi::MODEL_SYMBOL`].
    pub fn model_table(&self) -> Range<u64> {
        self.model_table.clone()
    }

    /// True if all of a range of addresses is mapped from the file, in one piece.
    pub fn contains_range(&self, addresses: &Range<u64>) -> bool {
        let inside =
            |s: &ProgramHeader| addresses.start >= s.vaddr && addresses.end - s.vaddr <= s.file_bytes;
        addresses.start <= addresses.end && self.mapped_segments.iter().any(inside)
    }

    /// True if an address is one of code; `names` are the names that a function there may have, where the
    /// file tells.
    pub fn is_function(&self, address: u64, names: &[&str]) -> bool {
        let code = |s: &ProgramHeader| {
            s.flags & EXECUTABLE != 0 && address >= s.vaddr && address - s.vaddr < s.file_bytes
        };
        let found = self.functions.get(&address);
        let named = found.is_some_and(|found| found.iter().any(|name| names.contains(&name.as_str())));
        self.mapped_segments.iter().any(code) && (named || self.functions.is_empty())
    }

    /// Functions in the order of the symbol table; none in a stripped file.
    pub fn functions(&self) -> impl Iterator<Item = CodeFunction<'a>> + use<'a> {
        read_functions(&self.elf)
    }

    /// The segments that are mapped, by ascending addresses.
    pub(crate) fn mapped_segments(&self) -> &[ProgramHeader] {
        &self.mapped_segments
    }

    pub(crate) fn elf(&self) -> &ElfFile<'a> {
        &self.elf
    }

    /// The segment that holds all of a range of addresses, in its part that comes from the file.
    pub(crate) fn find_segment(&self, address: u64, bytes: u64) -> Option<&ProgramHeader> {
        let inside = |s: &&ProgramHeader| {
            let at = address.checked_sub(s.vaddr);
            at.and_then(|at| at.checked_add(bytes)).is_some_and(|end| end <= s.file_bytes)
        };
        self.mapped_segments.iter().find(inside)
    }

    pub(crate) fn bytes(&self, address: u64, bytes: u64) -> Option<&'a [u8]> {
        let load = self.find_segment(address, bytes)?;
        let from = usize::try_from(load.offset + (address - load.vaddr)).ok()?;
        self.elf.file().get(from..from + bytes as usize)
    }

    /// The bytes from an address to the end of its segment.
    pub(crate) fn bytes_to_end(&self, address: u64) -> Option<&'a [u8]> {
        let load = self.find_segment(address, 0)?;
        self.bytes(address, load.file_bytes - (address - load.vaddr))
    }

    /// Checks the segments that only name a part of those that are mapped.
    fn check_other_segments(&self) -> Result<(), ImageError> {
        for s in self.elf.segments() {
            let placed = self.find_segment(s.vaddr, s.file_bytes);
            let fits = match s.kind {
                PT_DYNAMIC | PT_NOTE | PT_PHDR | PT_GNU_EH_FRAME | PT_GNU_PROPERTY => {
                    placed.is_some_and(|l| s.offset.wrapping_sub(l.offset) == s.vaddr - l.vaddr)
                }
                PT_GNU_RELRO => placed.is_some_and(|l| {
                    let end = (l.vaddr + l.memory_bytes).next_multiple_of(MAX_PAGE);
                    let own = s.vaddr.checked_add(s.memory_bytes).is_some_and(|own| own <= end);
                    l.flags & WRITABLE != 0 && own
                }),
                PT_TLS => return Err(ImageError::ForeignSegment { kind: s.kind }),
                PT_GNU_STACK if s.flags & EXECUTABLE != 0 => {
                    return Err(ImageError::ForeignSegment { kind: s.kind });
                }
                _ => true,
            };
            if !fits {
                return Err(ImageError::OtherSegment { kind: s.kind });
            }
        }
        Ok(())
    }
}

/// The segments that are mapped: ascending, on pages of their own, none both writable and executable.
fn check_loads(elf: &ElfFile<'_>) -> Result<Vec<ProgramHeader>, ImageError> {
    if elf.segments().count() > MAX_SEGMENTS {
        return Err(ImageError::Segments("there are more than 64"));
    }
    let loads: Vec<ProgramHeader> = elf.segments().filter(|s| s.kind == PT_LOAD).collect();
    let mut end = 0;
    for (index, s) in loads.iter().enumerate() {
        let wrong = |what| Err(ImageError::Segment { index, what });
        if index == 0 && s.vaddr != 0 {
            return wrong("does not begin at address 0");
        }
        if s.vaddr / MIN_PAGE * MIN_PAGE < end {
            return wrong("shares a page with the one before, or lies before it");
        }
        if s.vaddr % MIN_PAGE != s.offset % MIN_PAGE {
            return wrong("lies elsewhere in a page than in the file");
        }
        if s.flags & (WRITABLE | EXECUTABLE) == WRITABLE | EXECUTABLE {
            return wrong("is both writable and executable");
        }
        if s.flags & READABLE == 0 {
            return wrong("is not readable");
        }
        // Bytes that are not in the file are zeroed, in a page that has to be writable.
        if s.memory_bytes != s.file_bytes && s.flags & WRITABLE == 0 {
            return wrong("is read-only and larger than its part of the file");
        }
        let most = elf.file().len() as u64 + MAX_GAPS;
        match s.vaddr.checked_add(s.memory_bytes).filter(|&end| end <= most) {
            Some(of) => end = of.next_multiple_of(MIN_PAGE),
            None => return wrong("ends far beyond the size of the file"),
        }
    }
    if loads.is_empty() { Err(ImageError::Segments("nothing is mapped")) } else { Ok(loads) }
}

fn read_functions<'a>(elf: &ElfFile<'a>) -> impl Iterator<Item = CodeFunction<'a>> + use<'a> {
    let (symbols, strings) = match (elf.section(".symtab"), elf.section(".strtab")) {
        (Some(symbols), Some(strings)) => (symbols, strings),
        _ => (&[][..], &[][..]),
    };
    let functions = symbols.chunks_exact(SYMBOL_BYTES as usize).filter(|s| s[4] & 15 == FUNCTION);
    functions.filter_map(|symbol| {
        let name = core::str::from_utf8(text_at(strings, word_at(symbol, 0)?)?).ok()?;
        Some(CodeFunction { name, address: long_at(symbol, 8)?, bytes: long_at(symbol, 16)? })
    })
}

/// Names of the functions that the compiler exports to its own table.
fn names_by_address(elf: &ElfFile<'_>) -> BTreeMap<u64, Vec<String>> {
    let mut found = BTreeMap::<u64, Vec<String>>::new();
    for function in read_functions(elf) {
        found.entry(function.address).or_default().push(function.name.to_owned());
    }
    found
}
