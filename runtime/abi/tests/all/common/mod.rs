//! Reads everything that the ELF reader offers; shared with the fuzz target `artifact`.

pub fn read_all(file: &[u8]) {
    let Ok(elf) = mlcc_abi::elf::ElfFile::parse(file) else { return };
    let mut bytes = 0;
    elf.code_bytes(|b| bytes += b.len());
    for s in elf.sections() {
        let _ = std::str::from_utf8(s.name).ok().and_then(|name| elf.section(name));
    }
    let _ = (elf.segments().count(), elf.dynamic().count(), elf.machine());
}
