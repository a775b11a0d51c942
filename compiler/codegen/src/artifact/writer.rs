//! Streaming writer of the artifact file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use mlcc_abi::elf::{self, ElfFile};
use mlcc_abi::{SECTION_ALIGN, section};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::ArtifactError;
use super::file::PendingFile;
use super::split::{SplitFile, SplitTensor};

/// The destination of the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightDestination {
    /// Into the artifact.
    Inside,
    /// Into this safetensors file in the artifact's folder: all parameters and the payload's size.
    Split { path: PathBuf, tensors: Vec<SplitTensor>, bytes: u64 },
}

/// Summary of an artifact for the build report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArtifactSummary {
    /// Size of the artifact file.
    pub file_bytes: u64,
    /// Size of the linked object in it.
    pub code_bytes: u64,
    /// Payload sections with their sizes, in order.
    pub sections: Vec<(String, u64)>,
}

struct WrittenSection {
    name: String,
    offset: u64,
    bytes: u64,
    hash: u128,
}

enum OpenSection {
    None,
    Inside { name: String, offset: u64, hash: Box<Xxh3> },
    Split,
}

/// See the [module](super).
pub struct ArtifactWriter {
    out: PendingFile,
    split: Option<SplitFile>,
    linked: Vec<u8>,
    code_hash: u128,
    written: Vec<WrittenSection>,
    open: OpenSection,
    /// Lines about sections that are made when the artifact is loaded.
    made: String,
    /// The place of the next section, after a preview.
    resume: Option<u64>,
}

impl ArtifactWriter {
    /// Starts the artifact `path` with the linked object `linked_so`. The object is checked: it must be a
    /// shared object that imports nothing.
    pub fn create(path: &Path, linked_so: &Path, weights: WeightDestination) -> Result<Self, ArtifactError> {
        let linked = std::fs::read(linked_so).map_err(|e| ArtifactError::Io {
            action: "read",
            path: linked_so.to_path_buf(),
            source: e,
        })?;
        let elf = ElfFile::parse(&linked)
            .map_err(|e| ArtifactError::Linked { path: linked_so.to_path_buf(), source: e })?;
        let names = imported_names(&elf);
        if !names.is_empty() {
            return Err(ArtifactError::Imports { path: linked_so.to_path_buf(), names });
        }
        let mut hash = Xxh3::new();
        elf.code_bytes(|bytes| hash.update(bytes));
        let mut out = PendingFile::create(path)?;
        out.write(&linked)?;
        let split = match weights {
            WeightDestination::Inside => None,
            WeightDestination::Split { path: beside, tensors, bytes } => {
                if beside.parent() != path.parent() {
                    return Err(ArtifactError::Misuse("split weights must lie beside the artifact".into()));
                }
                Some(SplitFile::create(&beside, &tensors, bytes)?)
            }
        };
        let (code_hash, written) = (hash.digest128(), Vec::new());
        Ok(Self {
            out,
            split,
            linked,
            code_hash,
            written,
            open: OpenSection::None,
            made: String::new(),
            resume: None,
        })
    }

    /// Begins a payload section; its name begins with [`section::PREFIX`].
    pub fn begin_section(&mut self, name: &str) -> Result<(), ArtifactError> {
        if !matches!(self.open, OpenSection::None) {
            return Err(ArtifactError::Misuse(format!("section {name} begins inside another one")));
        }
        let plain = name.bytes().all(|c| c.is_ascii_graphic());
        let free = name != section::HASHES && self.written.iter().all(|w| w.name != name);
        if !name.starts_with(section::PREFIX) || !plain || !free {
            return Err(ArtifactError::Misuse(format!("bad or repeated section name `{name}`")));
        }
        self.end_preview()?;
        self.open = match &mut self.split {
            Some(split) if name == section::WEIGHTS => {
                split.start()?;
                OpenSection::Split
            }
            _ => {
                self.out.align(SECTION_ALIGN)?;
                OpenSection::Inside {
                    name: name.to_string(),
                    offset: self.out.position(),
                    hash: Box::default(),
                }
            }
        };
        Ok(())
    }

    /// Appends to the open section.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        match (&mut self.open, &mut self.split) {
            (OpenSection::Inside { hash, .. }, _) => {
                hash.update(bytes);
                self.out.write(bytes)
            }
            (OpenSection::Split, Some(split)) => split.write(bytes),
            _ => Err(ArtifactError::Misuse("write outside of a section".into())),
        }
    }

    pub fn end_section(&mut self) -> Result<(), ArtifactError> {
        match std::mem::replace(&mut self.open, OpenSection::None) {
            OpenSection::Inside { name, offset, hash } => {
                let bytes = self.out.position() - offset;
                self.written.push(WrittenSection { name, offset, bytes, hash: hash.digest128() });
                Ok(())
            }
            OpenSection::Split => Ok(()),
            OpenSection::None => Err(ArtifactError::Misuse("no section is open".into())),
        }
    }

    /// A section that is not written: the runtime makes it, and these are its size and XXH3-128.
    pub fn add_generated_section(&mut self, name: &str, bytes: u64, hash: u128) {
        let _ = writeln!(self.made, "made {name} {bytes} {hash:032x}");
    }

    /// A whole section at once.
    pub fn write_section(&mut self, name: &str, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.begin_section(name)?;
        self.write(bytes)?;
        self.end_section()
    }

    /// Completes the file under its temporary name, which is returned: it can be loaded and measured before
    /// it gets its final name. A caller that has it mapped must unmap it before the writer goes on. Not for
    /// split weights, which have no name yet.
    pub fn write_preview(&mut self) -> Result<PathBuf, ArtifactError> {
        if !matches!(self.open, OpenSection::None) || self.split.is_some() {
            return Err(ArtifactError::Misuse("preview inside a section, or of split weights".into()));
        }
        self.end_preview()?;
        self.resume = Some(self.out.position());
        let hashes = self.hash_lines("");
        self.section_unchecked(section::HASHES, hashes.as_bytes())?;
        self.section_table()?;
        self.out.flush()?;
        Ok(self.out.temporary_path().to_path_buf())
    }

    /// Takes hashes and section table of a preview off again.
    fn end_preview(&mut self) -> Result<(), ArtifactError> {
        let Some(end) = self.resume.take() else { return Ok(()) };
        self.written.pop();
        self.out.truncate(end)
    }

    /// Writes the hashes and the section table and gives the file its final name.
    pub fn finish(mut self) -> Result<ArtifactSummary, ArtifactError> {
        if !matches!(self.open, OpenSection::None) {
            return Err(ArtifactError::Misuse("finish inside a section".into()));
        }
        self.end_preview()?;
        // The artifact is complete on disk before the weights take their name, so that a full disk leaves
        // neither.
        let split_line = match self.split.take() {
            Some(split) => {
                self.out.sync()?;
                split.finish()?
            }
            None => String::new(),
        };
        let hashes = self.hash_lines(&split_line);
        self.section_unchecked(section::HASHES, hashes.as_bytes())?;
        let code_bytes = self.linked.len() as u64;
        self.section_table()?;
        let summary = ArtifactSummary {
            file_bytes: self.out.position(),
            code_bytes,
            sections: self.written.iter().map(|w| (w.name.clone(), w.bytes)).collect(),
        };
        self.out.commit()?;
        Ok(summary)
    }

    fn section_unchecked(&mut self, name: &str, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.out.align(SECTION_ALIGN)?;
        let offset = self.out.position();
        self.out.write(bytes)?;
        self.written.push(WrittenSection { name: name.into(), offset, bytes: bytes.len() as u64, hash: 0 });
        Ok(())
    }

    /// The text of `.mlcc.hashes`: one line each for code and sections, then the hash of those lines.
    fn hash_lines(&self, split_line: &str) -> String {
        let mut text = format!("mlcc-hashes 1 xxh3-128\ncode {:032x}\n", self.code_hash);
        for w in &self.written {
            let _ = writeln!(text, "section {} {} {:032x}", w.name, w.bytes, w.hash);
        }
        text.push_str(&self.made);
        text.push_str(split_line);
        let own = xxh3_128(text.as_bytes());
        let _ = writeln!(text, "self {own:032x}");
        text
    }

    /// Writes the names and headers of the linker's sections and of ours, and points the ELF header at them.
    /// (The linker's own table stays where it was, unused.)
    fn section_table(&mut self) -> Result<(), ArtifactError> {
        let linked = &self.linked;
        let elf = ElfFile::parse(linked).map_err(|e| ArtifactError::Misuse(e.to_string()))?;
        let mut names = elf.section_names().to_vec();
        let mut headers = elf.section_headers().to_vec();
        let names_index = usize::from(u16::from_le_bytes([linked[62], linked[63]]));
        for w in &self.written {
            let mut h = [0u8; elf::SECTION_HEADER_BYTES];
            h[0..4].copy_from_slice(&(names.len() as u32).to_le_bytes());
            h[4..8].copy_from_slice(&elf::SHT_PROGBITS.to_le_bytes());
            h[24..32].copy_from_slice(&w.offset.to_le_bytes());
            h[32..40].copy_from_slice(&w.bytes.to_le_bytes());
            h[48..56].copy_from_slice(&SECTION_ALIGN.to_le_bytes());
            headers.extend_from_slice(&h);
            names.extend_from_slice(w.name.as_bytes());
            names.push(0);
        }
        let own = names_index * elf::SECTION_HEADER_BYTES;
        headers[own + 24..own + 32].copy_from_slice(&self.out.position().to_le_bytes());
        headers[own + 32..own + 40].copy_from_slice(&(names.len() as u64).to_le_bytes());
        self.out.write(&names)?;
        self.out.align(8)?;
        let table_at = self.out.position();
        self.out.write(&headers)?;
        let count = (headers.len() / elf::SECTION_HEADER_BYTES) as u16;
        self.out.patch(elf::SHOFF_FIELD.start as u64, &table_at.to_le_bytes())?;
        self.out.patch(elf::SHCOUNT_FIELDS.start as u64 + 2, &count.to_le_bytes())
    }
}

/// Needed libraries and undefined symbols.
fn imported_names(elf: &ElfFile<'_>) -> Vec<String> {
    const DT_NEEDED: u64 = 1;
    let names = elf.section(".dynstr").unwrap_or(&[]);
    let text = |at: u64| {
        let rest = names.get(at as usize..).unwrap_or(&[]);
        let end = rest.iter().position(|&c| c == 0).unwrap_or(rest.len());
        String::from_utf8_lossy(&rest[..end]).into_owned()
    };
    let needed = elf.dynamic().filter(|(tag, _)| *tag == DT_NEEDED).map(|(_, at)| text(at));
    let symbols = elf.section(".dynsym").unwrap_or(&[]).chunks_exact(24).skip(1);
    let undefined = symbols.filter(|s| s[6] == 0 && s[7] == 0);
    let undefined = undefined.map(|s| text(u64::from(u32::from_le_bytes([s[0], s[1], s[2], s[3]]))));
    needed.chain(undefined).collect()
}
