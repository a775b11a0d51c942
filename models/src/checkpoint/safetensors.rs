//! safetensors: 8 bytes header length, a JSON header, then the tensors without gaps.
//!
//! The types are those of the `safetensors` crate; the header is walked here, because the crate's own reader does not
//! name the tensor at fault and lets a name that occurs twice overwrite the first. A test compares the two.
//! Rules checked (the format's own): the header ends inside the file; tensors follow each other without gap or overlap
//! from the first byte after the header to the end of the file; each has as many bytes as its shape and type need.

use super::bytes::FileBytes;
use super::{StoredType, TensorInfo, TensorStorage};
use crate::error::CheckpointError;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo as HeaderEntry;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// The limit of the reference implementation.
const LARGEST_HEADER: usize = 100_000_000;
/// More dimensions than any tensor has; keeps a hostile header from being printed back at length.
const MOST_DIMS: usize = 16;

/// The tensors of one file in the order of their position.
pub(super) fn list_tensors(number: usize, file: &FileBytes) -> Result<Vec<TensorInfo>, CheckpointError> {
    let damaged = |detail: String| CheckpointError::Damaged { file: file.label.clone(), detail };
    let bytes = file.as_bytes();
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(damaged(format!("is {} bytes long, a safetensors file has at least 10", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length).ok().filter(|&n| n <= LARGEST_HEADER);
    let Some(header) = header else {
        return Err(damaged(format!("is not a safetensors file: its header would be {length} bytes long")));
    };
    let Some((header, data)) = rest.split_at_checked(header) else {
        return Err(damaged(format!(
            "ends inside its header: {length} bytes expected, {} there",
            rest.len()
        )));
    };
    let header =
        std::str::from_utf8(header).map_err(|_| damaged("has a header that is not UTF-8".to_string()))?;
    let mut entries = parse_header(header).map_err(|error| damaged(format!("has a bad header: {error}")))?;
    entries.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
    let infos = place_entries(number, file, &entries, bytes.len() - data.len())?;
    let used = entries.last().map_or(0, |(_, entry)| entry.data_offsets.1);
    if used != data.len() {
        return Err(damaged(format!("holds {} bytes of tensors, its header describes {used}", data.len())));
    }
    Ok(infos)
}

/// Checks that the entries, sorted by position, tile the data from its first byte on.
fn place_entries(
    number: usize,
    file: &FileBytes,
    entries: &[(String, HeaderEntry)],
    data_start: usize,
) -> Result<Vec<TensorInfo>, CheckpointError> {
    let data_length = file.as_bytes().len() - data_start;
    let mut position = 0;
    let mut infos: Vec<TensorInfo> = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let damaged = |detail: String| CheckpointError::DamagedTensor {
            file: file.label.clone(),
            tensor: name.clone(),
            detail,
        };
        let (start, end) = entry.data_offsets;
        if end < start || end > data_length {
            return Err(damaged(format!("lies at bytes {start}..{end} of {data_length} bytes of tensors")));
        }
        if start != position {
            let kind = if start < position { "overlaps the tensor before it" } else { "follows a gap" };
            return Err(damaged(format!("{kind}: starts at byte {start}, expected {position}")));
        }
        let dtype = stored_type(entry.dtype).ok_or_else(|| CheckpointError::UnsupportedTensor {
            file: file.label.clone(),
            tensor: name.clone(),
            detail: format!("is stored as {:?}, which mlcc does not support", entry.dtype),
        })?;
        let needed = byte_count(&entry.shape, dtype.size());
        if entry.shape.len() > MOST_DIMS || needed != Some(end - start) {
            let shape = &entry.shape[..entry.shape.len().min(MOST_DIMS)];
            return Err(damaged(format!(
                "has {} bytes, not what shape {shape:?} of {dtype} needs",
                end - start
            )));
        }
        position = end;
        infos.push(TensorInfo {
            name: name.clone(),
            stored_name: name.clone(),
            listed_name: name.clone(),
            dtype,
            shape: entry.shape.clone(),
            storage: TensorStorage::Contiguous { file: number, start: data_start + start },
        });
    }
    Ok(infos)
}

/// Bytes of a tensor; `None` when the number does not fit.
pub(super) fn byte_count(shape: &[usize], size: usize) -> Option<usize> {
    shape.iter().try_fold(size, |product, &dim| product.checked_mul(dim))
}

fn stored_type(dtype: Dtype) -> Option<StoredType> {
    Some(match dtype {
        Dtype::BOOL => StoredType::Bool,
        Dtype::I8 => StoredType::I8,
        Dtype::U8 => StoredType::U8,
        Dtype::I16 => StoredType::I16,
        Dtype::U16 => StoredType::U16,
        Dtype::I32 => StoredType::I32,
        Dtype::U32 => StoredType::U32,
        Dtype::I64 => StoredType::I64,
        Dtype::U64 => StoredType::U64,
        Dtype::F16 => StoredType::F16,
        Dtype::BF16 => StoredType::BF16,
        Dtype::F32 => StoredType::F32,
        Dtype::F64 => StoredType::F64,
        Dtype::C64 => StoredType::C64,
        Dtype::F8_E4M3 => StoredType::F8E4M3,
        Dtype::F8_E5M2 => StoredType::F8E5M2,
        Dtype::F8_E8M0 => StoredType::F8E8M0,
        // Block formats below a byte, and what a later version of the crate may add.
        _ => return None,
    })
}

/// The header's entries in the order of the file, each name once.
fn parse_header(text: &str) -> Result<Vec<(String, HeaderEntry)>, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let entries = reader.deserialize_map(EntriesVisitor)?;
    reader.end()?;
    Ok(entries)
}

/// Collects the map into a list and refuses a name that comes again, which serde's own maps would overwrite.
struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Vec<(String, HeaderEntry)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        use serde::de::Error;
        let mut entries = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format!("`{name}` occurs twice")));
            }
            let value: Value = map.next_value()?;
            if name == "__metadata__" {
                continue;
            }
            let entry = serde_json::from_value(value)
                .map_err(|error| A::Error::custom(format!("tensor `{name}`: {error}")))?;
            entries.push((name, entry));
        }
        Ok(entries)
    }
}
