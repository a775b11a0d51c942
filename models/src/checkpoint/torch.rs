//! `torch.save` archives (`.pth`, `.pt`, `.bin`): a zip with the pickled state dict in `<top>/data.pkl` and each storage in
//! `<top>/data/<key>`, uncompressed.
//!
//! The zip directory is read by the `zip` crate, the pickle by [`super::pickle`]; storages are used where they lie in the
//! mapped file. The checksums of the zip are not compared: torch can be told to write none.

use super::bytes::FileBytes;
use super::pickle::{Pickle, PickleValue, TensorRef};
use super::{TensorInfo, TensorStorage};
use crate::error::CheckpointError;
use std::collections::BTreeMap;
use std::io::Cursor;
use zip::{CompressionMethod, ZipArchive};

/// Start and length of an archive's entry in the file.
type ArchiveEntries = BTreeMap<String, (usize, usize)>;

const LONGEST_NAME: usize = 1024;

/// Keys under which training scripts put the state dict.
const WRAPPERS: [&str; 3] = ["state_dict", "model", "module"];

/// The tensors of one file in the order of the state dict.
pub(super) fn list_tensors(number: usize, file: &FileBytes) -> Result<Vec<TensorInfo>, CheckpointError> {
    let archive = TorchArchive::open(file)?;
    archive.check_byte_order()?;
    let pickle_bytes = archive.read_entry("data.pkl")?;
    let pickle = Pickle::parse(pickle_bytes).map_err(|error| CheckpointError::Pickle {
        file: file.label.clone(),
        offset: error.offset,
        detail: error.detail,
    })?;
    let tensors = state_dict(file, &pickle)?;
    tensors.into_iter().map(|(name, tensor)| place_tensor(number, &archive, &pickle, name, tensor)).collect()
}

/// Finds a tensor's storage in the archive and checks that it is as long as the pickle says.
fn place_tensor(
    number: usize,
    archive: &TorchArchive<'_>,
    pickle: &Pickle,
    name: &str,
    tensor: &TensorRef,
) -> Result<TensorInfo, CheckpointError> {
    let damaged = |detail: String| CheckpointError::DamagedTensor {
        file: archive.file.label.clone(),
        tensor: name.to_string(),
        detail,
    };
    let storage = pickle.storage(tensor.storage);
    let entry = format!("data/{}", storage.key);
    let place = archive.find_entry(&entry);
    let (start, length) =
        place.ok_or_else(|| damaged(format!("its storage `{entry}` is not in the archive")))?;
    let size = storage.dtype.size();
    let needed = storage.elements * size;
    if needed > length {
        return Err(damaged(format!("its storage `{entry}` has {length} bytes, {needed} are needed")));
    }
    let start = start + tensor.offset * size;
    Ok(TensorInfo {
        name: name.to_string(),
        stored_name: name.to_string(),
        listed_name: name.to_string(),
        dtype: storage.dtype,
        shape: tensor.shape.clone(),
        storage: match tensor.is_contiguous() {
            true => TensorStorage::Contiguous { file: number, start },
            false => TensorStorage::Strided { file: number, start, strides: tensor.strides.clone() },
        },
    })
}

/// Names and tensors of the pickled dict, or of the dict in it under one of the usual keys.
fn state_dict<'p>(
    file: &FileBytes,
    pickle: &'p Pickle,
) -> Result<Vec<(&'p str, &'p TensorRef)>, CheckpointError> {
    let unsupported = |detail: String| CheckpointError::Unsupported { file: file.label.clone(), detail };
    let Some(mut items) = pickle.dict(pickle.root) else {
        return Err(unsupported(format!("holds {}, expected a state dict of tensors", pickle.root.kind())));
    };
    let is_tensor = |value: &PickleValue| pickle.tensor(*value).is_some();
    if !items.iter().any(|(_, value)| is_tensor(value)) {
        let wrapped = items.iter().find(|(key, value)| {
            pickle.dict(*value).is_some() && pickle.string(*key).is_some_and(|key| WRAPPERS.contains(&key))
        });
        items = wrapped.and_then(|(_, value)| pickle.dict(*value)).unwrap_or(items);
    }
    let mut tensors = Vec::new();
    for (key, value) in items {
        let Some(tensor) = pickle.tensor(*value) else { continue };
        match pickle.string(*key) {
            Some(name) if name.len() <= LONGEST_NAME => tensors.push((name, tensor)),
            Some(name) => return Err(unsupported(format!("has a tensor name of {} bytes", name.len()))),
            None => return Err(unsupported(format!("has a tensor whose name is {}", key.kind()))),
        }
    }
    if tensors.is_empty() {
        return Err(unsupported("holds a dict without tensors, expected a state dict".to_string()));
    }
    Ok(tensors)
}

/// The directory of the zip, with the names relative to its one top folder.
struct TorchArchive<'a> {
    file: &'a FileBytes,
    entries: ArchiveEntries,
}

impl<'a> TorchArchive<'a> {
    fn open(file: &'a FileBytes) -> Result<TorchArchive<'a>, CheckpointError> {
        let bytes = file.as_bytes();
        let unsupported = |detail: &str| {
            Err(CheckpointError::Unsupported { file: file.label.clone(), detail: detail.to_string() })
        };
        if bytes.first_chunk::<2>().is_some_and(|start| start == b"\x80\x02") {
            return unsupported(
                "is of the kind that torch wrote before version 1.6 (no zip); load it with torch and save it again",
            );
        }
        if !bytes.starts_with(b"PK") {
            return unsupported("is not a torch archive: it does not start like a zip file");
        }
        let mut zip = ZipArchive::new(Cursor::new(bytes)).map_err(|error| broken_zip(file, &error))?;
        let mut entries = ArchiveEntries::new();
        let mut top: Option<String> = None;
        for number in 0..zip.len() {
            let (name, place) = locate_entry(file, &mut zip, number)?;
            // torch puts everything into one folder; pieces outside of it belong to something else.
            let Some((folder, rest)) = name.split_once('/') else { continue };
            if top.get_or_insert_with(|| folder.to_string()) != folder {
                return unsupported("is a zip with several folders, a torch archive has one");
            }
            if entries.insert(rest.to_string(), place).is_some() {
                let detail = format!("its entry `{name}` occurs twice");
                return Err(CheckpointError::Damaged { file: file.label.clone(), detail });
            }
        }
        Ok(TorchArchive { file, entries })
    }

    fn find_entry(&self, name: &str) -> Option<(usize, usize)> {
        self.entries.get(name).copied()
    }

    fn read_entry(&self, name: &str) -> Result<&'a [u8], CheckpointError> {
        match self.find_entry(name) {
            Some((start, length)) => Ok(self.file.slice(start, length)),
            None => Err(CheckpointError::Unsupported {
                file: self.file.label.clone(),
                detail: format!("is a zip without `{name}`, so it was not written by torch.save"),
            }),
        }
    }

    /// torch 2.1 and later say how they stored numbers; before, it was always little-endian.
    fn check_byte_order(&self) -> Result<(), CheckpointError> {
        match self.find_entry("byteorder").map(|(start, length)| self.file.slice(start, length)) {
            None | Some(b"little") => Ok(()),
            Some(other) => Err(CheckpointError::Unsupported {
                file: self.file.label.clone(),
                detail: format!(
                    "was saved with byte order `{}`, only `little` is read",
                    String::from_utf8_lossy(&other[..other.len().min(16)])
                ),
            }),
        }
    }
}

/// Name, start and length of one entry, checked to lie inside the file.
fn locate_entry(
    file: &FileBytes,
    zip: &mut ZipArchive<Cursor<&[u8]>>,
    number: usize,
) -> Result<(String, (usize, usize)), CheckpointError> {
    let entry = zip.by_index_raw(number).map_err(|error| broken_zip(file, &error))?;
    let name = entry.name().map_err(|error| broken_zip(file, &error))?.into_owned();
    let file_label = file.label.clone();
    if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
        let detail = format!("its entry `{name}` is compressed or encrypted; torch.save does neither");
        return Err(CheckpointError::Unsupported { file: file_label, detail });
    }
    let start = entry.data_start();
    let length = Some(entry.size()).filter(|&size| size == entry.compressed_size());
    let end = start.zip(length).and_then(|(start, length)| start.checked_add(length));
    match (start, end) {
        (Some(start), Some(end)) if end <= file.as_bytes().len() as u64 => {
            Ok((name, (start as usize, (end - start) as usize)))
        }
        _ => {
            let detail = format!("its entry `{name}` reaches beyond the end of the file");
            Err(CheckpointError::Damaged { file: file_label, detail })
        }
    }
}

fn broken_zip(file: &FileBytes, error: &zip::result::ZipError) -> CheckpointError {
    let detail = format!("is a broken zip archive: {error}");
    CheckpointError::Damaged { file: file.label.clone(), detail }
}
