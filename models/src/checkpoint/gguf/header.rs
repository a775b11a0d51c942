//! Header, metadata and list of tensors. Nothing is allocated for a count before that many elements fit into the rest of
//! the file.

use super::super::bytes::FileBytes;
use super::super::stored_type::StoredType;
use super::RawTensor;
use super::metadata::{GgufMetadata, MetadataValue};
use crate::error::CheckpointError;
use std::collections::{BTreeMap, BTreeSet};

/// What one file says of itself.
#[derive(Debug)]
pub struct GgufHeader {
    pub metadata: GgufMetadata,
    /// In the order of the file.
    pub tensors: Vec<RawTensor>,
}

const MOST_KEYS: u64 = 1 << 16;
const MOST_TENSORS: u64 = 1 << 20;
const LONGEST_KEY: usize = 1 << 16;
const LONGEST_NAME: usize = 1024;
const MOST_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const LARGEST_ALIGNMENT: u64 = 1 << 20;

impl GgufHeader {
    /// `number` is the file's place in the list of files.
    pub fn read(number: usize, file: &FileBytes) -> Result<GgufHeader, CheckpointError> {
        let mut cursor = HeaderCursor { file, position: 0 };
        if cursor.take_bytes(4, "the magic number")? != b"GGUF" {
            return Err(cursor.unsupported_error("is not a GGUF file: it does not start with `GGUF`"));
        }
        let version = cursor.read_u32("the version")?;
        match version {
            2 | 3 => {}
            1 => {
                return Err(
                    cursor.unsupported_error("is GGUF version 1, 2 and 3 are read; convert the model again")
                );
            }
            v if v.swap_bytes() <= 3 => {
                return Err(
                    cursor.unsupported_error("is a big-endian GGUF file, only little-endian ones are read")
                );
            }
            other => {
                return Err(cursor.unsupported_error(&format!("is GGUF version {other}, 2 and 3 are read")));
            }
        }
        let tensors = cursor.read_u64("the number of tensors")?;
        let pairs = cursor.read_u64("the number of metadata pairs")?;
        if tensors > MOST_TENSORS || pairs > MOST_KEYS {
            return Err(cursor.damaged_error(format!("claims {tensors} tensors and {pairs} metadata pairs")));
        }
        let mut values = BTreeMap::new();
        for _ in 0..pairs {
            let key = cursor.read_string("a metadata key", LONGEST_KEY)?;
            let value = cursor.read_typed_value(&key)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(cursor.damaged_error(format!("has metadata `{key}` twice")));
            }
        }
        let metadata = GgufMetadata { origin: file.label.clone(), values };
        let entries = (0..tensors).map(|_| cursor.read_tensor()).collect::<Result<Vec<_>, _>>()?;
        let alignment = alignment(&metadata)?;
        let data = (cursor.position as u64).next_multiple_of(alignment);
        let tensors = place_tensors(number, file, entries, data, alignment)?;
        Ok(GgufHeader { metadata, tensors })
    }
}

fn alignment(metadata: &GgufMetadata) -> Result<u64, CheckpointError> {
    let alignment = metadata.number("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    match alignment.is_power_of_two() && alignment <= LARGEST_ALIGNMENT {
        true => Ok(alignment),
        false => Err(CheckpointError::Unsupported {
            file: metadata.origin.clone(),
            detail: format!(
                "has general.alignment {alignment}, expected a power of two up to {LARGEST_ALIGNMENT}"
            ),
        }),
    }
}

/// A tensor as listed, not checked against the file.
struct ListedTensor {
    name: String,
    dtype: StoredType,
    shape: Vec<usize>,
    offset: u64,
}

/// Checks that every tensor lies in the file, aligned, and on no byte of another.
fn place_tensors(
    number: usize,
    file: &FileBytes,
    entries: Vec<ListedTensor>,
    data: u64,
    alignment: u64,
) -> Result<Vec<RawTensor>, CheckpointError> {
    let mut names = BTreeSet::new();
    let mut ranges: Vec<(u64, u64, usize)> = Vec::with_capacity(entries.len());
    let mut tensors = Vec::with_capacity(entries.len());
    for (place, entry) in entries.into_iter().enumerate() {
        let damaged = |detail: String| CheckpointError::DamagedTensor {
            file: file.label.clone(),
            tensor: entry.name.clone(),
            detail,
        };
        if !names.insert(entry.name.clone()) {
            return Err(damaged("occurs twice".to_string()));
        }
        let elements = entry.shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
        let row = entry.shape.last().copied().unwrap_or(1);
        let bytes = elements.and_then(|elements| entry.dtype.checked_bytes(elements, row));
        let bytes = bytes.ok_or_else(|| {
            damaged(format!("has shape {:?}, which {} does not allow", entry.shape, entry.dtype))
        })?;
        if !entry.offset.is_multiple_of(alignment) {
            return Err(damaged(format!(
                "begins at byte {} of the data, not a multiple of {alignment}",
                entry.offset
            )));
        }
        let start = data.checked_add(entry.offset);
        let end = start.and_then(|start| start.checked_add(bytes as u64));
        let (Some(start), Some(end)) = (start, end.filter(|&end| end <= file.as_bytes().len() as u64)) else {
            let length = file.as_bytes().len();
            return Err(damaged(format!(
                "would have {bytes} bytes from {}, the file has {length}",
                entry.offset
            )));
        };
        ranges.push((start, end, place));
        tensors.push(RawTensor {
            name: entry.name,
            dtype: entry.dtype,
            shape: entry.shape,
            file: number,
            start: start as usize,
        });
    }
    ranges.sort_unstable();
    if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        return Err(CheckpointError::DamagedTensor {
            file: file.label.clone(),
            tensor: tensors[pair[1].2].name.clone(),
            detail: format!("overlaps the tensor `{}`", tensors[pair[0].2].name),
        });
    }
    Ok(tensors)
}

/// A position in the file.
struct HeaderCursor<'a> {
    file: &'a FileBytes,
    position: usize,
}

impl<'a> HeaderCursor<'a> {
    fn damaged_error(&self, detail: String) -> CheckpointError {
        CheckpointError::Damaged { file: self.file.label.clone(), detail }
    }
    fn unsupported_error(&self, detail: &str) -> CheckpointError {
        CheckpointError::Unsupported { file: self.file.label.clone(), detail: detail.to_string() }
    }

    fn take_bytes(&mut self, length: usize, what: &str) -> Result<&'a [u8], CheckpointError> {
        let end = self.position.checked_add(length).filter(|&end| end <= self.file.as_bytes().len());
        let end = end.ok_or_else(|| self.damaged_error(format!("ends inside {what}")))?;
        let start = std::mem::replace(&mut self.position, end);
        Ok(&self.file.as_bytes()[start..end])
    }

    fn take_array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], CheckpointError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take_bytes(N, what)?);
        Ok(array)
    }
    fn read_u32(&mut self, what: &str) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.take_array(what)?))
    }
    fn read_u64(&mut self, what: &str) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.take_array(what)?))
    }

    fn read_string(&mut self, what: &str, longest: usize) -> Result<String, CheckpointError> {
        let length = self.read_u64(what)?;
        let length = usize::try_from(length).ok().filter(|&length| length <= longest);
        let length = length.ok_or_else(|| self.damaged_error(format!("has {what} that is too long")))?;
        let text = std::str::from_utf8(self.take_bytes(length, what)?);
        text.map(str::to_string).map_err(|_| self.damaged_error(format!("has {what} that is not UTF-8")))
    }

    fn read_tensor(&mut self) -> Result<ListedTensor, CheckpointError> {
        let name = self.read_string("a tensor name", LONGEST_NAME)?;
        let dims = self.read_u32("a tensor's description")?;
        if dims > MOST_DIMS {
            return Err(self.damaged_error(format!("has a tensor `{name}` of {dims} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            let dim = self.read_u64("a tensor's description")?;
            let dim = usize::try_from(dim)
                .map_err(|_| self.damaged_error(format!("has a tensor `{name}` of {dim} elements")))?;
            shape.push(dim);
        }
        shape.reverse();
        let number = self.read_u32("a tensor's description")?;
        let offset = self.read_u64("a tensor's description")?;
        let dtype =
            StoredType::from_ggml(number).map_err(|type_name| CheckpointError::UnsupportedTensor {
                file: self.file.label.clone(),
                tensor: name.clone(),
                detail: format!(
                    "is stored as {type_name}, which mlcc does not support; it supports {}",
                    StoredType::GGML_READ
                ),
            })?;
        Ok(ListedTensor { name, dtype, shape, offset })
    }

    fn read_typed_value(&mut self, key: &str) -> Result<MetadataValue, CheckpointError> {
        let kind = self.read_u32("a metadata value")?;
        if kind == ARRAY {
            return self.read_array(key);
        }
        let mut list = self.read_array_elements(key, kind, 1)?;
        let value = match &mut list {
            MetadataValue::Unsigneds(list) => list.pop().map(MetadataValue::Unsigned),
            MetadataValue::Signeds(list) => list.pop().map(MetadataValue::Signed),
            MetadataValue::Floats(list) => list.pop().map(MetadataValue::Float),
            MetadataValue::Bools(list) => list.pop().map(MetadataValue::Bool),
            MetadataValue::Strings(list) => list.pop().map(MetadataValue::String),
            _ => None,
        };
        value.ok_or_else(|| self.damaged_error(format!("has no value for metadata `{key}`")))
    }

    fn read_array(&mut self, key: &str) -> Result<MetadataValue, CheckpointError> {
        let kind = self.read_u32("a metadata list")?;
        let count = self.read_u64("a metadata list")?;
        if kind == ARRAY {
            return Err(self.unsupported_error(&format!("has a list of lists in metadata `{key}`")));
        }
        // Every element takes at least one byte, a string eight.
        let least = if kind == STRING { 8 } else { 1 };
        let rest = (self.file.as_bytes().len() - self.position) as u64 / least;
        match usize::try_from(count).ok().filter(|_| count <= rest) {
            Some(count) => self.read_array_elements(key, kind, count),
            None => Err(self.damaged_error(format!("claims {count} elements in metadata `{key}`"))),
        }
    }

    /// `count` values of the type with number `kind`.
    fn read_array_elements(
        &mut self,
        key: &str,
        kind: u32,
        count: usize,
    ) -> Result<MetadataValue, CheckpointError> {
        let what = "a metadata value";
        macro_rules! numbers {
            ($variant:ident, $number:ty, $to:expr) => {{
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push($to(<$number>::from_le_bytes(self.take_array(what)?)));
                }
                MetadataValue::$variant(list)
            }};
        }
        Ok(match kind {
            0 => numbers!(Unsigneds, u8, u64::from),
            1 => numbers!(Signeds, i8, i64::from),
            2 => numbers!(Unsigneds, u16, u64::from),
            3 => numbers!(Signeds, i16, i64::from),
            4 => numbers!(Unsigneds, u32, u64::from),
            5 => numbers!(Signeds, i32, i64::from),
            6 => numbers!(Floats, f32, shortest_decimal),
            7 => {
                let mut list = Vec::new();
                for &byte in self.take_bytes(count, what)? {
                    list.push(byte);
                }
                match list.iter().find(|&&byte| byte > 1) {
                    None => MetadataValue::Bools(list.into_iter().map(|byte| byte == 1).collect()),
                    Some(byte) => {
                        return Err(self.damaged_error(format!("has the bool {byte} in metadata `{key}`")));
                    }
                }
            }
            STRING => {
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push(self.read_string(what, usize::MAX)?);
                }
                MetadataValue::Strings(list)
            }
            10 => numbers!(Unsigneds, u64, std::convert::identity),
            11 => numbers!(Signeds, i64, std::convert::identity),
            12 => numbers!(Floats, f64, std::convert::identity),
            other => {
                return Err(
                    self.damaged_error(format!("has type {other} in metadata `{key}`, 0 to 12 are known"))
                );
            }
        })
    }
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// The f64 that prints like the f32.
fn shortest_decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}
