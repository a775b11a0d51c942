//! A mapped image has the bytes of its file, its own addresses, and pages that are read-only.

use mlcc_abi::elf::ElfFile;
use mlcc_loader::{CodeImage, LoadedImage};

use crate::builder::{self, CODE, TABLE, TABLE_BYTES};

fn loaded() -> (Vec<u8>, LoadedImage) {
    let file = builder::shared_object();
    let elf = ElfFile::parse(&file).expect("it is well-formed");
    let image = CodeImage::check(&elf).expect("it is as an artifact is");
    let loaded = LoadedImage::map(&image).expect("the system maps it");
    (file, loaded)
}

#[test]
fn the_table_leads_to_code_that_runs() {
    let (file, image) = loaded();
    let table = image.base().wrapping_add(TABLE as usize);
    // SAFETY: the image is mapped, and the table has 32 bytes.
    let table = unsafe { std::slice::from_raw_parts(table.cast::<u64>(), TABLE_BYTES as usize / 8) };
    let base = image.base().addr() as u64;
    assert_eq!(table, [base + CODE, base + TABLE, 0x1122, 0x3344]);
    // SAFETY: this machine's code of a function without arguments.
    let answer = unsafe {
        std::mem::transmute::<*const u8, extern "C" fn() -> i32>(image.base().wrapping_add(CODE as usize))
    };
    assert_eq!(answer(), 42);
    // SAFETY: the first segment is mapped.
    let headers = unsafe { std::slice::from_raw_parts(image.base(), 0x600) };
    assert_eq!(headers, &file[..0x600]);
}

/// Two images of one file are independent, and dropping one removes its pages.
#[test]
fn images_are_independent() {
    let ((_, first), (_, second)) = (loaded(), loaded());
    assert_ne!(first.base(), second.base());
    drop(first);
    // SAFETY: the second image is still mapped.
    let entry = unsafe { second.base().wrapping_add(TABLE as usize).cast::<u64>().read() };
    assert_eq!(entry, second.base().addr() as u64 + CODE);
}

#[cfg(target_os = "linux")]
#[test]
fn no_page_is_writable_and_only_code_is_executable() {
    let (_, image) = loaded();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux tells the mappings");
    let base = image.base().addr();
    let access = |at: usize| {
        let line = maps.lines().find(|line| {
            let (range, _) = line.split_once(' ').expect("a range");
            let (start, end) = range.split_once('-').expect("two addresses");
            let number = |text| usize::from_str_radix(text, 16).expect("a number");
            (number(start)..number(end)).contains(&at)
        });
        line.and_then(|line| line.split(' ').nth(1)).expect("it is mapped").to_string()
    };
    assert_eq!(access(base), "r--p");
    assert_eq!(access(base + CODE as usize), "r-xp");
    assert_eq!(access(base + TABLE as usize), "r--p");
}
