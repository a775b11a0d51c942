//! Weights in a `.safetensors` file beside the artifact (`--split-weights`).
//!
//! Every packed parameter is one U8 tensor; padding between parameters belongs to the one before it, because
//! the format allows no holes. The header is padded with spaces so that the data begin on a page. Its
//! `__metadata__` holds the hash of the data, so that the runtime can tell a file of another build without
//! reading it.

use std::fmt::Write as _;
use std::path::Path;

use mlcc_abi::SECTION_ALIGN;
use xxhash_rust::xxh3::Xxh3;

use super::ArtifactError;
use super::file::PendingFile;

/// A parameter's name and where it begins in the payload; ascending offsets, the first one 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitTensor {
    pub name: String,
    pub offset: u64,
}

pub(super) struct SplitFile {
    file: PendingFile,
    hash: Xxh3,
    data_at: u64,
    bytes: u64,
    /// The place of the 32 hex digits in the header.
    hash_at: u64,
    started: bool,
}

impl SplitFile {
    pub fn create(path: &Path, tensors: &[SplitTensor], bytes: u64) -> Result<Self, ArtifactError> {
        let mut file = PendingFile::create(path)?;
        let (header, hash_at) = header(tensors, bytes)?;
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(header.as_bytes())?;
        let data_at = file.position();
        Ok(Self { file, hash: Xxh3::new(), data_at, bytes, hash_at, started: false })
    }

    pub fn start(&mut self) -> Result<(), ArtifactError> {
        if std::mem::replace(&mut self.started, true) {
            return Err(ArtifactError::Misuse("the weights were written twice".into()));
        }
        Ok(())
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.hash.update(bytes);
        self.file.write(bytes)
    }

    /// Completes the file under its final name; returns its line for `.mlcc.hashes`.
    pub fn finish(mut self) -> Result<String, ArtifactError> {
        let written = self.file.position() - self.data_at;
        if written != self.bytes {
            let (path, planned) = (self.file.path().display(), self.bytes);
            return Err(ArtifactError::Misuse(format!("{path}: {planned} bytes planned, {written} written")));
        }
        let hash = format!("{:032x}", self.hash.digest128());
        self.file.patch(self.hash_at, hash.as_bytes())?;
        let name = self.file.path().file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let section = mlcc_abi::section::WEIGHTS;
        let line = format!("external {section} {written} {hash} {} {name}\n", self.data_at);
        self.file.commit()?;
        Ok(line)
    }
}

/// The padded JSON header and the file offset of its hash digits.
fn header(tensors: &[SplitTensor], bytes: u64) -> Result<(String, u64), ArtifactError> {
    let mut json = String::from("{\"__metadata__\":{\"format\":\"mlcc\",\"xxh3_128\":\"");
    let hash_at = 8 + json.len() as u64;
    let _ = write!(json, "{:032x}\"}}", 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let end = tensors.get(i + 1).map_or(bytes, |next| next.offset);
        if end < tensor.offset || (i == 0 && tensor.offset != 0) {
            let name = &tensor.name;
            return Err(ArtifactError::Misuse(format!(
                "split weights: the offset of `{name}` is out of order"
            )));
        }
        let name = serde_json::Value::from(tensor.name.as_str());
        let _ = write!(
            json,
            ",{name}:{{\"dtype\":\"U8\",\"shape\":[{}],\"data_offsets\":[{},{end}]}}",
            end - tensor.offset,
            tensor.offset
        );
    }
    json.push('}');
    let total = (8 + json.len() as u64).next_multiple_of(SECTION_ALIGN);
    json.extend(std::iter::repeat_n(' ', (total - 8) as usize - json.len()));
    Ok((json, hash_at))
}
