//! A shared object as linkers write one for an artifact, made by hand: headers and tables, a page of code, a
//! page of data.

use mlcc_abi::elf::{MACHINE_AARCH64, MACHINE_X86_64, PT_DYNAMIC, PT_LOAD, SHT_PROGBITS};

pub const CODE: u64 = 0x1000;
pub const DATA: u64 = 0x2000;
/// The model table: the address of the code, its own address, 16 bytes without relocations.
pub const TABLE: u64 = DATA + 0x200;
pub const TABLE_BYTES: u64 = 32;

pub const PROGRAM_HEADERS: usize = 64;
const SYMBOLS: usize = 0x300;
pub const HASHES: usize = 0x340;
const STRINGS: usize = 0x380;
pub const RELOCATIONS: usize = 0x3c0;
pub const RELOCATION_COUNT: usize = 2;
const END: usize = 0x2400;

pub const HERE: u16 = if cfg!(target_arch = "aarch64") { MACHINE_AARCH64 } else { MACHINE_X86_64 };
pub const RELATIVE: u64 = if cfg!(target_arch = "aarch64") { 1027 } else { 8 };

/// Machine code of `fn() -> i32 { 42 }`.
fn forty_two() -> &'static [u8] {
    if cfg!(target_arch = "aarch64") {
        &[0x40, 0x05, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6]
    } else {
        &[0xb8, 42, 0, 0, 0, 0xc3]
    }
}

pub fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

pub fn put_longs(file: &mut [u8], at: usize, values: &[u64]) {
    for (index, value) in values.iter().enumerate() {
        put(file, at + 8 * index, &value.to_le_bytes());
    }
}

/// Writes a program header whose addresses are those of the file.
pub fn put_segment(file: &mut [u8], index: usize, kind: u32, flags: u32, place: std::ops::Range<u64>) {
    let at = PROGRAM_HEADERS + 56 * index;
    put(file, at, &kind.to_le_bytes());
    put(file, at + 4, &flags.to_le_bytes());
    let bytes = place.end - place.start;
    put_longs(file, at + 8, &[place.start, place.start, place.start, bytes, bytes, 0x1000]);
}

/// The number of the program header that names the stack.
pub const STACK: usize = 4;
const DYNAMIC: [(u64, u64); 9] = [
    (5, STRINGS as u64),
    (10, 12),
    (6, SYMBOLS as u64),
    (11, 24),
    (0x6fff_fef5, HASHES as u64),
    (7, RELOCATIONS as u64),
    (8, 24 * RELOCATION_COUNT as u64),
    (9, 24),
    (0, 0),
];

/// The place in the file of the value of a tag.
pub fn dynamic_value(tag: u64) -> usize {
    let row = DYNAMIC.iter().position(|(known, _)| *known == tag).expect("a tag of the table");
    DATA as usize + 16 * row + 8
}

pub fn shared_object() -> Vec<u8> {
    let mut file = vec![0; END];
    put(&mut file, 0, b"\x7fELF\x02\x01\x01");
    put(&mut file, 16, &3u16.to_le_bytes());
    put(&mut file, 18, &HERE.to_le_bytes());
    put(&mut file, 20, &1u32.to_le_bytes());
    put_longs(&mut file, 32, &[PROGRAM_HEADERS as u64, 0]);
    put(&mut file, 52, &64u16.to_le_bytes());
    put(&mut file, 54, &56u16.to_le_bytes());
    put(&mut file, 56, &5u16.to_le_bytes());
    put_segment(&mut file, 0, PT_LOAD, 4, 0..0x600);
    put_segment(&mut file, 1, PT_LOAD, 5, CODE..CODE + 16);
    put_segment(&mut file, 2, PT_LOAD, 6, DATA..DATA + 0x300);
    put_segment(&mut file, 3, PT_DYNAMIC, 6, DATA..DATA + 16 * DYNAMIC.len() as u64);
    put_segment(&mut file, STACK, 0x6474_e551, 6, 0..0);
    // One exported symbol, of data, in section 1.
    put(&mut file, SYMBOLS + 24, &1u32.to_le_bytes());
    put(&mut file, SYMBOLS + 28, &[0x11, 0, 1, 0]);
    put_longs(&mut file, SYMBOLS + 32, &[TABLE, TABLE_BYTES]);
    // One bucket, symbols from number 1, one word of filter; a chain of one link that is the last.
    for (index, word) in [1u32, 1, 1, 0, !0, !0, 1, 1].into_iter().enumerate() {
        put(&mut file, HASHES + 4 * index, &word.to_le_bytes());
    }
    put(&mut file, STRINGS, b"\0mlcc_model\0");
    put_longs(&mut file, RELOCATIONS, &[TABLE, RELATIVE, CODE, TABLE + 8, RELATIVE, TABLE]);
    put(&mut file, CODE as usize, forty_two());
    for (row, (tag, value)) in DYNAMIC.into_iter().enumerate() {
        put_longs(&mut file, DATA as usize + 16 * row, &[tag, value]);
    }
    put_longs(&mut file, TABLE as usize + 16, &[0x1122, 0x3344]);
    with_sections(file)
}

/// Appends section headers with the names that a debugger would look up.
fn with_sections(mut file: Vec<u8>) -> Vec<u8> {
    let names = b"\0.shstrtab\0.symtab\0.strtab\0";
    let texts = b"\0answer\0";
    let (names_at, texts_at) = (file.len(), file.len() + names.len());
    let symbols_at = (texts_at + texts.len()).next_multiple_of(8);
    file.resize(symbols_at + 48, 0);
    put(&mut file, names_at, names);
    put(&mut file, texts_at, texts);
    put(&mut file, symbols_at + 24, &1u32.to_le_bytes());
    put(&mut file, symbols_at + 28, &[0x12, 0, 1, 0]);
    put_longs(&mut file, symbols_at + 32, &[CODE, 6]);
    let headers_at = file.len();
    file.resize(headers_at + 4 * 64, 0);
    let sections = [
        (1u32, 3u32, names_at, names.len()),
        (11, 2, symbols_at, 48),
        (19, SHT_PROGBITS, texts_at, texts.len()),
    ];
    for (index, (name, kind, at, bytes)) in sections.into_iter().enumerate() {
        let header = headers_at + 64 * (index + 1);
        put(&mut file, header, &name.to_le_bytes());
        put(&mut file, header + 4, &kind.to_le_bytes());
        put_longs(&mut file, header + 24, &[at as u64, bytes as u64]);
    }
    put_longs(&mut file, 40, &[headers_at as u64]);
    put(&mut file, 58, &64u16.to_le_bytes());
    put(&mut file, 60, &4u16.to_le_bytes());
    put(&mut file, 62, &1u16.to_le_bytes());
    file
}
