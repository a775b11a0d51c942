//! The artifact as a file: mapped, bounds-checked, hashed. It is not executed here, so a file for any machine
//! can be inspected.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, MmapOptions};
use mlcc_abi::elf::{ElfError, ElfFile, MACHINE_AARCH64, MACHINE_X86_64, SHT_NOBITS};
use mlcc_abi::section;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::hashes::{SectionHashes, SectionLocation, SectionRecord};
use crate::ranks::rank_of_section;
use crate::weight_generator::WeightGenerator;
use crate::{Error, Result};

/// Sections up to this size are verified at every load; larger ones (the weights) only on request.
pub const ALWAYS_VERIFIED_BYTES: u64 = 16 << 20;

/// A payload section's place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionInfo {
    pub name: String,
    pub offset: u64,
    pub bytes: u64,
}

/// An opened artifact. Sections stay mapped as long as it lives.
pub struct Artifact {
    path: PathBuf,
    /// Kept open: its number names the file to the dynamic loader (see `library`).
    file: File,
    map: Mmap,
    machine: u16,
    sections: Vec<SectionInfo>,
    hashes: SectionHashes,
    /// The weights of `--split-weights`.
    split_weights: Option<SplitWeightsFile>,
    /// The generator of weights that are made on load.
    weight_generator: Option<WeightGenerator>,
}

/// A file of weights, and of each rank the bytes that are mapped from it and where they begin.
type WeightsLocation<'a> = (&'a File, Vec<(&'a [u8], u64)>);

struct SplitWeightsFile {
    path: PathBuf,
    file: File,
    map: Mmap,
    offset: usize,
}

impl Artifact {
    /// Maps the file and checks its structure, the hash of its code and of its small sections.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let (file, map) = map_file(&path)?;
        let elf = ElfFile::parse(&map).map_err(|source| Error::Elf { path: path.clone(), source })?;
        let sections: Vec<SectionInfo> = elf
            .sections()
            .filter(|s| s.kind != SHT_NOBITS && s.name.starts_with(section::PREFIX.as_bytes()))
            .map(|s| SectionInfo {
                name: String::from_utf8_lossy(s.name).into_owned(),
                offset: s.offset,
                bytes: s.bytes,
            })
            .collect();
        let Some(text) = elf.section(section::HASHES) else {
            let what = format!("it is a shared object without the section {}", section::HASHES);
            return Err(Error::NotArtifact { path, what });
        };
        let hashes =
            SectionHashes::parse(text).map_err(|what| Error::Corrupt { path: path.clone(), what })?;
        let mut code = Xxh3::new();
        elf.code_bytes(|bytes| code.update(bytes));
        if code.digest128() != hashes.code {
            return Err(Error::Corrupt { path, what: "the hash of its code does not match".into() });
        }
        let machine = elf.machine();
        let mut artifact =
            Self { path, file, map, machine, sections, hashes, split_weights: None, weight_generator: None };
        artifact.check_sizes()?;
        artifact.open_split_weights()?;
        artifact.open_generator()?;
        artifact.verify(ALWAYS_VERIFIED_BYTES)?;
        Ok(artifact)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The file, whose structure was checked when it was opened.
    pub(crate) fn elf(&self) -> Result<ElfFile<'_>> {
        ElfFile::parse(&self.map).map_err(|source| Error::Elf { path: self.path.clone(), source })
    }

    /// ELF machine number.
    pub fn machine(&self) -> u16 {
        self.machine
    }

    /// Name of the machine that the code is for, as targets spell it.
    pub fn machine_name(&self) -> String {
        match self.machine {
            MACHINE_X86_64 => "x86-64".into(),
            MACHINE_AARCH64 => "aarch64".into(),
            other => format!("ELF machine {other}"),
        }
    }

    /// Payload sections in file order.
    pub fn sections(&self) -> &[SectionInfo] {
        &self.sections
    }

    /// The contents of a payload section of the artifact, or of its separate weights.
    pub fn section(&self, name: &str) -> Option<&[u8]> {
        if let (Some(beside), true) = (&self.split_weights, name == section::WEIGHTS) {
            return beside.map.get(beside.offset..);
        }
        let found = self.sections.iter().find(|s| s.name == name)?;
        let from = usize::try_from(found.offset).ok()?;
        self.map.get(from..from.checked_add(usize::try_from(found.bytes).ok()?)?)
    }

    /// The weights of a rank.
    pub(crate) fn rank_weights(&self, rank: usize) -> Option<&[u8]> {
        if rank == 0 {
            return self.section(section::WEIGHTS);
        }
        let found = self.sections.iter().find(|s| rank_of_section(&s.name) == Some(rank))?;
        let from = usize::try_from(found.offset).ok()?;
        self.map.get(from..from.checked_add(usize::try_from(found.bytes).ok()?)?)
    }

    /// The file of the weights, and where those of each of these ranks lie in it.
    pub(crate) fn weights_locations(&self, ranks: Range<usize>) -> Option<WeightsLocation<'_>> {
        if let (Some(beside), Range { start: 0, end: 1 }) = (&self.split_weights, &ranks) {
            return Some((&beside.file, vec![(self.section(section::WEIGHTS)?, beside.offset as u64)]));
        }
        let place = |rank| {
            let found = self.sections.iter().find(|s| rank_of_section(&s.name) == Some(rank))?;
            Some((self.rank_weights(rank)?, found.offset))
        };
        Some((&self.file, ranks.map(place).collect::<Option<_>>()?))
    }

    /// The metadata JSON.
    pub fn metadata(&self) -> Option<&str> {
        std::str::from_utf8(self.section(section::METADATA)?).ok()
    }

    /// The file that holds the weights, if it is not the artifact itself.
    pub fn weights_file(&self) -> Option<&Path> {
        self.split_weights.as_ref().map(|b| b.path.as_path())
    }

    /// The generator of the weights, if the artifact has none.
    pub fn weight_generator(&self) -> Option<&WeightGenerator> {
        self.weight_generator.as_ref()
    }

    /// Recorded hash of a payload section, or of the weights that are made in its place.
    pub fn hash(&self, name: &str) -> Option<u128> {
        self.hashes.find_section(name).map(|e| e.hash)
    }

    /// Recorded hash of the code.
    pub fn code_hash(&self) -> u128 {
        self.hashes.code
    }

    /// Verifies the hash of every payload section of at most `up_to` bytes; weights that are made on load are
    /// made for that.
    pub fn verify(&self, up_to: u64) -> Result<()> {
        for entry in self.hashes.sections.iter().filter(|e| e.bytes <= up_to) {
            let (found, path) = match (&entry.location, &self.weight_generator) {
                (SectionLocation::Made, Some(recipe)) => (recipe.hash(), self.path.as_path()),
                (SectionLocation::External { .. }, _) => {
                    (self.section_hash(&entry.name), self.weights_file().unwrap_or(&self.path))
                }
                (SectionLocation::Inside | SectionLocation::Made, _) => {
                    (self.section_hash(&entry.name), self.path.as_path())
                }
            };
            if found != entry.hash {
                let what = format!("the hash of its section {} does not match", entry.name);
                return Err(Error::Corrupt { path: path.to_path_buf(), what });
            }
        }
        Ok(())
    }

    fn section_hash(&self, name: &str) -> u128 {
        xxh3_128(self.section(name).unwrap_or(&[]))
    }

    /// Asks the system to read the weights ahead, in large pages where it can.
    pub(crate) fn advise_weights(&self, ranks: &Range<usize>) {
        // Hints: a kernel that knows one of them not is fine.
        if let Some(beside) = &self.split_weights {
            let _ = beside.map.advise(Advice::WillNeed);
            return;
        }
        for found in self
            .sections
            .iter()
            .filter(|s| rank_of_section(&s.name).is_some_and(|rank| ranks.contains(&rank)))
        {
            let _ = self.map.advise_range(Advice::WillNeed, found.offset as usize, found.bytes as usize);
            let place = found.offset as usize..(found.offset + found.bytes) as usize;
            crate::pages::prefer_huge(&self.map, place);
        }
    }

    /// Every hashed section is there with its size, and every section is hashed.
    fn check_sizes(&self) -> Result<()> {
        let corrupt = |what: String| Err(Error::Corrupt { path: self.path.clone(), what });
        for entry in self.hashes.sections.iter().filter(|e| e.location == SectionLocation::Inside) {
            match self.sections.iter().find(|s| s.name == entry.name) {
                None => return corrupt(format!("its section {} is missing", entry.name)),
                Some(s) if s.bytes != entry.bytes => {
                    return corrupt(format!(
                        "its section {} has {} bytes, not {}",
                        entry.name, s.bytes, entry.bytes
                    ));
                }
                Some(_) => {}
            }
        }
        let unknown =
            |s: &&SectionInfo| s.name != section::HASHES && self.hashes.find_section(&s.name).is_none();
        match self.sections.iter().find(unknown) {
            Some(s) => corrupt(format!("its section {} has no hash", s.name)),
            None => Ok(()),
        }
    }

    /// Reads how the weights are made, of an artifact that has none.
    fn open_generator(&mut self) -> Result<()> {
        let mut made = self.hashes.sections.iter().filter(|e| e.location == SectionLocation::Made);
        let (Some(entry), None) = (made.next(), made.next()) else { return Ok(()) };
        let corrupt = |what: String| Error::Corrupt { path: self.path.clone(), what };
        let section = self.section(section::RECIPE).filter(|_| entry.name == section::WEIGHTS);
        let section = section.ok_or_else(|| corrupt(format!("it has no recipe for {}", entry.name)))?;
        let recipe = WeightGenerator::parse(section).map_err(corrupt)?;
        if recipe.bytes != entry.bytes {
            let what = format!("its recipe makes {} bytes of weights, not {}", recipe.bytes, entry.bytes);
            return Err(corrupt(what));
        }
        self.weight_generator = Some(recipe);
        Ok(())
    }

    /// Maps the weights that lie in another file and checks that it is the one of the same build.
    fn open_split_weights(&mut self) -> Result<()> {
        let Some((entry, offset, name)) = self.hashes.sections.iter().find_map(external) else {
            return Ok(());
        };
        let file = self.path.with_file_name(name);
        let refuse = |what: String| Error::SplitWeights { path: self.path.clone(), file: file.clone(), what };
        if name.contains('/') || entry.name != section::WEIGHTS {
            return Err(refuse("its name is not a plain file name".into()));
        }
        let (opened, map) = map_file(&file).map_err(|e| refuse(e.to_string()))?;
        let found = (map.len() as u64).checked_sub(offset);
        if found != Some(entry.bytes) {
            let expected = offset.saturating_add(entry.bytes);
            return Err(refuse(format!("it has {} bytes, not {expected}", map.len())));
        }
        let head = String::from_utf8_lossy(&map[..map.len().min(256)]).into_owned();
        if !head.contains(&format!("\"xxh3_128\":\"{:032x}\"", entry.hash)) {
            return Err(refuse("it belongs to another build".into()));
        }
        self.split_weights =
            Some(SplitWeightsFile { path: file, file: opened, map, offset: offset as usize });
        Ok(())
    }
}

fn external(entry: &SectionRecord) -> Option<(&SectionRecord, u64, &str)> {
    match &entry.location {
        SectionLocation::External { offset, file } => Some((entry, *offset, file)),
        SectionLocation::Inside | SectionLocation::Made => None,
    }
}

fn map_file(path: &Path) -> Result<(File, Mmap)> {
    let fail = |action| move |source| Error::Io { action, path: path.to_path_buf(), source };
    let meta = std::fs::metadata(path).map_err(fail("open"))?;
    if meta.is_dir() {
        return Err(fail("open")(std::io::ErrorKind::IsADirectory.into()));
    }
    // Opening a pipe would wait for its other end.
    if !meta.is_file() {
        let what = "it is not a regular file";
        return Err(fail("open")(std::io::Error::new(std::io::ErrorKind::InvalidInput, what)));
    }
    let file = File::open(path).map_err(fail("open"))?;
    if meta.len() == 0 {
        return Err(Error::Elf { path: path.to_path_buf(), source: ElfError::Truncated("header") });
    }
    // SAFETY: read-only and private. Files are replaced by rename, never written in place; who truncates one
    // under a running process gets SIGBUS, as with any shared library.
    let map = unsafe { MmapOptions::new().map_copy_read_only(&file) }.map_err(fail("map"))?;
    Ok((file, map))
}
