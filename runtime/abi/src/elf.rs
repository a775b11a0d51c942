//! A reader of ELF64 little-endian shared objects over a byte slice: program headers, sections by name, and
//! the bytes that the code hash covers. It allocates nothing and trusts nothing: every offset is checked
//! against the slice, so a truncated file is an error here and not a SIGBUS in the dynamic loader.
//!
//! Source of the layout: System V ABI, chapters 4 and 5.

use core::fmt;
use core::ops::Range;

pub const HEADER_BYTES: usize = 64;
pub const PROGRAM_HEADER_BYTES: usize = 56;
pub const SECTION_HEADER_BYTES: usize = 64;

pub const MACHINE_X86_64: u16 = 62;
pub const MACHINE_AARCH64: u16 = 183;
pub const SHT_PROGBITS: u32 = 1;
pub const SHT_NOBITS: u32 = 8;
pub const PT_LOAD: u32 = 1;
pub const PT_DYNAMIC: u32 = 2;

/// The place of `e_shoff` and `e_shentsize, e_shnum, e_shstrndx` in the header. Appending or stripping
/// sections changes these and nothing else that is loaded, so the code hash reads them as zero.
pub const SHOFF_FIELD: Range<usize> = 40..48;
pub const SHCOUNT_FIELDS: Range<usize> = 58..64;

/// The faults of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElfError {
    NotElf,
    NotElf64Little,
    NotSharedObject,
    /// The named part lies outside the file.
    Truncated(&'static str),
    /// The named part contradicts the format.
    Malformed(&'static str),
}

impl fmt::Display for ElfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotElf => f.write_str("not an ELF file"),
            Self::NotElf64Little => f.write_str("not a 64-bit little-endian ELF file"),
            Self::NotSharedObject => f.write_str("an ELF file, but not a shared object"),
            Self::Truncated(what) => write!(f, "the file is truncated: its {what} lies beyond its end"),
            Self::Malformed(what) => write!(f, "the file is corrupt: its {what} is malformed"),
        }
    }
}

impl core::error::Error for ElfError {}

/// One program header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramHeader {
    pub kind: u32,
    pub flags: u32,
    pub offset: u64,
    pub vaddr: u64,
    pub file_bytes: u64,
    pub memory_bytes: u64,
    pub align: u64,
}

/// One section header with its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectionHeader<'a> {
    pub name: &'a [u8],
    pub kind: u32,
    pub flags: u64,
    pub offset: u64,
    pub bytes: u64,
    pub align: u64,
}

/// A checked view of a shared object.
#[derive(Clone, Copy, Debug)]
pub struct ElfFile<'a> {
    file: &'a [u8],
    machine: u16,
    segments: &'a [u8],
    sections: &'a [u8],
    names: &'a [u8],
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    b.get(at..at + 2).map_or(0, |s| u16::from_le_bytes([s[0], s[1]]))
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    (u32::from(u16_at(b, at + 2)) << 16) | u32::from(u16_at(b, at))
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    (u64::from(u32_at(b, at + 4)) << 32) | u64::from(u32_at(b, at))
}

fn slice<'a>(file: &'a [u8], offset: u64, bytes: u64, what: &'static str) -> Result<&'a [u8], ElfError> {
    let end = offset.checked_add(bytes).ok_or(ElfError::Malformed(what))?;
    let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok());
    range.and_then(|(from, to)| file.get(from..to)).ok_or(ElfError::Truncated(what))
}

impl<'a> ElfFile<'a> {
    /// Checks headers, segment bounds and section bounds.
    pub fn parse(file: &'a [u8]) -> Result<Self, ElfError> {
        if !file.starts_with(b"\x7fELF") {
            return Err(if file.is_empty() { ElfError::Truncated("header") } else { ElfError::NotElf });
        }
        let header = slice(file, 0, HEADER_BYTES as u64, "header")?;
        if header[4] != 2 || header[5] != 1 {
            return Err(ElfError::NotElf64Little);
        }
        if u16_at(header, 16) != 3 {
            return Err(ElfError::NotSharedObject);
        }
        if u16_at(header, 54) as usize != PROGRAM_HEADER_BYTES || u16_at(header, 56) == 0 {
            return Err(ElfError::Malformed("program header table"));
        }
        if u16_at(header, 58) as usize != SECTION_HEADER_BYTES || u16_at(header, 60) == 0 {
            return Err(ElfError::Malformed("section header table"));
        }
        let n_segments = u64::from(u16_at(header, 56)) * PROGRAM_HEADER_BYTES as u64;
        let n_sections = u64::from(u16_at(header, 60)) * SECTION_HEADER_BYTES as u64;
        let mut elf = Self {
            file,
            machine: u16_at(header, 18),
            segments: slice(file, u64_at(header, 32), n_segments, "program header table")?,
            sections: slice(file, u64_at(header, 40), n_sections, "section header table")?,
            names: &[],
        };
        let at = usize::from(u16_at(header, 62)) * SECTION_HEADER_BYTES;
        let names =
            elf.sections.get(at..at + SECTION_HEADER_BYTES).ok_or(ElfError::Malformed("section names"))?;
        elf.names = slice(file, u64_at(names, 24), u64_at(names, 32), "section names")?;
        elf.check_bounds()?;
        Ok(elf)
    }

    fn check_bounds(&self) -> Result<(), ElfError> {
        for s in self.segments() {
            slice(self.file, s.offset, s.file_bytes, "program segment")?;
            if s.kind == PT_LOAD
                && (s.memory_bytes < s.file_bytes || s.vaddr.checked_add(s.memory_bytes).is_none())
            {
                return Err(ElfError::Malformed("program segment"));
            }
        }
        for s in self.sections() {
            if s.kind != SHT_NOBITS && s.kind != 0 {
                slice(self.file, s.offset, s.bytes, "section")?;
            }
        }
        Ok(())
    }

    pub fn file(&self) -> &'a [u8] {
        self.file
    }

    pub fn machine(&self) -> u16 {
        self.machine
    }

    /// The section header table as it lies in the file.
    pub fn section_headers(&self) -> &'a [u8] {
        self.sections
    }

    /// The string table of section names.
    pub fn section_names(&self) -> &'a [u8] {
        self.names
    }

    pub fn segments(&self) -> impl Iterator<Item = ProgramHeader> + use<'a> {
        self.segments.chunks_exact(PROGRAM_HEADER_BYTES).map(|h| ProgramHeader {
            kind: u32_at(h, 0),
            flags: u32_at(h, 4),
            offset: u64_at(h, 8),
            vaddr: u64_at(h, 16),
            file_bytes: u64_at(h, 32),
            memory_bytes: u64_at(h, 40),
            align: u64_at(h, 48),
        })
    }

    pub fn sections(&self) -> impl Iterator<Item = SectionHeader<'a>> + use<'a> {
        let names = self.names;
        self.sections.chunks_exact(SECTION_HEADER_BYTES).map(move |h| {
            let rest = names.get(u32_at(h, 0) as usize..).unwrap_or(&[]);
            let end = rest.iter().position(|&c| c == 0).unwrap_or(rest.len());
            SectionHeader {
                name: &rest[..end],
                kind: u32_at(h, 4),
                flags: u64_at(h, 8),
                offset: u64_at(h, 24),
                bytes: u64_at(h, 32),
                align: u64_at(h, 48),
            }
        })
    }

    /// The contents of a section, `None` if there is none with that name.
    pub fn section(&self, name: &str) -> Option<&'a [u8]> {
        let found = self.sections().find(|s| s.name == name.as_bytes() && s.kind != SHT_NOBITS)?;
        slice(self.file, found.offset, found.bytes, "section").ok()
    }

    /// Entries of the dynamic table as (tag, value), up to its end mark.
    pub fn dynamic(&self) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        let table = self.segments().find(|s| s.kind == PT_DYNAMIC);
        let bytes = table.and_then(|s| slice(self.file, s.offset, s.file_bytes, "dynamic table").ok());
        let entries = bytes.unwrap_or(&[]).chunks_exact(16).map(|e| (u64_at(e, 0), u64_at(e, 8)));
        entries.take_while(|(tag, _)| *tag != 0)
    }

    /// Feeds everything that the dynamic loader maps to `sink`: per PT_LOAD its header, then its bytes, with
    /// the section fields of the ELF header read as zero. Equal before and after payload is appended or
    /// `strip` runs.
    pub fn code_bytes(&self, mut sink: impl FnMut(&[u8])) {
        for s in self.segments().filter(|s| s.kind == PT_LOAD) {
            for v in [u64::from(s.flags), s.vaddr, s.file_bytes, s.memory_bytes] {
                sink(&v.to_le_bytes());
            }
            let Ok(bytes) = slice(self.file, s.offset, s.file_bytes, "program segment") else { continue };
            if s.offset == 0 && bytes.len() >= HEADER_BYTES {
                let mut header = [0u8; HEADER_BYTES];
                header.copy_from_slice(&bytes[..HEADER_BYTES]);
                header[SHOFF_FIELD].fill(0);
                header[SHCOUNT_FIELDS].fill(0);
                sink(&header);
                sink(&bytes[HEADER_BYTES..]);
            } else {
                sink(bytes);
            }
        }
    }
}
