//! Any bytes as the code of an artifact: an image that can be mapped, or a typed error, never a panic. It is
//! not executed.
#![no_main]

use mlcc_abi::elf::ElfFile;
use mlcc_loader::{CodeImage, LoadedImage};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Ok(elf) = ElfFile::parse(input) else { return };
    if let Ok(image) = CodeImage::check(&elf) {
        let _ = image.functions().count();
        let _ = LoadedImage::map(&image);
    }
});
