//! The ELF reader on a hand-made file, on every cut of it and on random damage: a value or an error, never a
//! panic. `MLCC_FUZZ_RUNS` makes the random part longer.

use crate::common;
use mlcc_abi::elf::{ElfError, ElfFile};

/// Two sections (`.mlcc.x` with "payload", the names) and one PT_LOAD segment of the first 200 bytes.
fn sample() -> Vec<u8> {
    let mut f = vec![0u8; 64];
    f[..6].copy_from_slice(b"\x7fELF\x02\x01");
    let put = |f: &mut Vec<u8>, at: usize, bytes: &[u8]| f[at..at + bytes.len()].copy_from_slice(bytes);
    put(&mut f, 16, &3u16.to_le_bytes());
    put(&mut f, 18, &62u16.to_le_bytes());
    put(&mut f, 32, &64u64.to_le_bytes());
    put(&mut f, 54, &56u16.to_le_bytes());
    put(&mut f, 56, &1u16.to_le_bytes());
    let mut segment = [0u64; 7];
    segment[0] = 1 | 5 << 32;
    (segment[4], segment[5], segment[6]) = (200, 300, 4096);
    f.extend(segment.iter().flat_map(|w| w.to_le_bytes()));
    f.resize(200, 0xaa);
    f.extend_from_slice(b"payload");
    let names_at = f.len() as u64;
    f.extend_from_slice(b"\0.mlcc.x\0.names\0");
    f.resize(f.len().next_multiple_of(8), 0);
    let table = f.len() as u64;
    for (name, kind, offset, bytes) in [(0u32, 0u32, 0, 0), (1, 1, 200, 7), (9, 3, names_at, 16)] {
        let mut h = [0u8; 64];
        h[..4].copy_from_slice(&name.to_le_bytes());
        h[4..8].copy_from_slice(&kind.to_le_bytes());
        h[24..32].copy_from_slice(&u64::to_le_bytes(offset));
        h[32..40].copy_from_slice(&u64::to_le_bytes(bytes));
        f.extend_from_slice(&h);
    }
    put(&mut f, 40, &table.to_le_bytes());
    for (at, v) in [(58, 64u16), (60, 3), (62, 2)] {
        put(&mut f, at, &v.to_le_bytes());
    }
    f
}

fn code(elf: &ElfFile<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    elf.code_bytes(|b| out.extend_from_slice(b));
    out
}

#[test]
fn reads_the_sample() {
    let file = sample();
    let elf = ElfFile::parse(&file).unwrap();
    assert_eq!(elf.machine(), 62);
    assert_eq!(elf.section(".mlcc.x"), Some(&b"payload"[..]));
    assert_eq!(elf.section(".mlcc"), None);
    assert_eq!(elf.segments().next().map(|s| (s.kind, s.flags, s.file_bytes)), Some((1, 5, 200)));
    assert_eq!(code(&elf).len(), 32 + 200);
}

#[test]
fn code_does_not_depend_on_the_section_table() {
    let file = sample();
    let before = code(&ElfFile::parse(&file).unwrap());
    let mut moved = file.clone();
    let table = u64::from_le_bytes(file[40..48].try_into().unwrap()) as usize;
    moved.extend_from_within(table..);
    moved[40..48].copy_from_slice(&(file.len() as u64).to_le_bytes());
    assert_eq!(code(&ElfFile::parse(&moved).unwrap()), before);
    moved[150] ^= 1;
    assert_ne!(code(&ElfFile::parse(&moved).unwrap()), before);
}

#[test]
fn cuts_and_wrong_kinds_are_named() {
    let file = sample();
    for n in 0..file.len() {
        assert!(ElfFile::parse(&file[..n]).is_err(), "cut at {n}");
    }
    let with = |at: usize, v: u8| {
        let mut f = file.clone();
        f[at] = v;
        ElfFile::parse(&f).err()
    };
    assert_eq!(with(0, 0), Some(ElfError::NotElf));
    assert_eq!(with(4, 1), Some(ElfError::NotElf64Little));
    assert_eq!(with(16, 2), Some(ElfError::NotSharedObject));
    assert_eq!(with(62, 200), Some(ElfError::Malformed("section names")));
    assert_eq!(with(41, 0xff), Some(ElfError::Truncated("section header table")));
}

#[test]
fn random_damage_never_panics() {
    let file = sample();
    let runs = std::env::var("MLCC_FUZZ_RUNS").ok().and_then(|r| r.parse().ok()).unwrap_or(20_000u64);
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..runs {
        let mut bad = file.clone();
        for _ in 0..next() % 8 + 1 {
            let at = (next() % bad.len() as u64) as usize;
            bad[at] = if next() & 1 == 0 { next() as u8 } else { 0xff };
        }
        bad.truncate((next() % (2 * file.len() as u64)) as usize);
        common::read_all(&bad);
    }
}
