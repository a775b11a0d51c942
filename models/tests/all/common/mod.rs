//! Paths of the project's own checkpoints, and builders for damaged ones.

use std::path::{Path, PathBuf};

pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

pub fn golden(case: &str) -> PathBuf {
    project().join("tests/goldens").join(case)
}

pub fn tiny_books() -> PathBuf {
    project().join("assets/rwkv4-tiny-books")
}

/// The folder with all reference cases, where it exists.
pub fn shared() -> Option<PathBuf> {
    let dir = std::env::var_os("MLCC_SHARED").map_or_else(|| project().join("../shared"), PathBuf::from);
    let found = dir.join("goldens").is_dir();
    if !found {
        eprintln!("skipped: no reference cases at {} (set MLCC_SHARED)", dir.display());
    }
    found.then_some(dir)
}

/// A safetensors file from its header text and data.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A zip with stored entries, written as torch does (but without checksums).
pub fn stored_zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut directory = Vec::new();
    for (name, data) in entries {
        let offset = file.len() as u32;
        let sizes = [0u32, data.len() as u32, data.len() as u32].map(u32::to_le_bytes).concat();
        file.extend_from_slice(b"PK\x03\x04\x14\x00\x00\x00\x00\x00\x00\x00\x21\x00");
        file.extend_from_slice(&sizes);
        file.extend_from_slice(&(name.len() as u16).to_le_bytes());
        file.extend_from_slice(&[0, 0]);
        file.extend_from_slice(name.as_bytes());
        file.extend_from_slice(data);
        directory.extend_from_slice(b"PK\x01\x02\x14\x00\x14\x00\x00\x00\x00\x00\x00\x00\x21\x00");
        directory.extend_from_slice(&sizes);
        directory.extend_from_slice(&(name.len() as u16).to_le_bytes());
        directory.extend_from_slice(&[0; 12]);
        directory.extend_from_slice(&offset.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
    }
    let start = file.len() as u32;
    let count = (entries.len() as u16).to_le_bytes();
    file.extend_from_slice(&directory);
    file.extend_from_slice(b"PK\x05\x06\x00\x00\x00\x00");
    file.extend_from_slice(&[count, count].concat());
    file.extend_from_slice(&(directory.len() as u32).to_le_bytes());
    file.extend_from_slice(&start.to_le_bytes());
    file.extend_from_slice(&[0, 0]);
    file
}

/// Writes pickles as torch does, opcode by opcode.
#[derive(Clone, Default)]
pub struct PickleWriter {
    pub bytes: Vec<u8>,
}

impl PickleWriter {
    pub fn new() -> PickleWriter {
        PickleWriter { bytes: vec![0x80, 2] }
    }
    pub fn raw(mut self, bytes: &[u8]) -> PickleWriter {
        self.bytes.extend_from_slice(bytes);
        self
    }
    pub fn text(self, text: &str) -> PickleWriter {
        self.raw(b"X").raw(&(text.len() as u32).to_le_bytes()).raw(text.as_bytes())
    }
    pub fn int(self, value: i32) -> PickleWriter {
        self.raw(b"J").raw(&value.to_le_bytes())
    }
    pub fn ints(self, values: &[i32]) -> PickleWriter {
        values.iter().fold(self.raw(b"("), |writer, &value| writer.int(value)).raw(b"t")
    }
    pub fn global(self, module: &str, name: &str) -> PickleWriter {
        self.raw(format!("c{module}\n{name}\n").as_bytes())
    }
    /// `_rebuild_tensor_v2(storage, offset, shape, strides, False, OrderedDict())`
    pub fn tensor(
        self,
        storage: (&str, &str, i32),
        offset: i32,
        shape: &[i32],
        strides: &[i32],
    ) -> PickleWriter {
        let (class, key, elements) = storage;
        let writer = self.global("torch._utils", "_rebuild_tensor_v2").raw(b"((").text("storage");
        let writer = writer.global("torch", class).text(key).text("cpu").int(elements).raw(b"tQ");
        let writer = writer.int(offset).ints(shape).ints(strides).raw(b"\x89");
        writer.global("collections", "OrderedDict").raw(b")RtR")
    }
    pub fn end(self) -> Vec<u8> {
        self.raw(b".").bytes
    }
    /// A state dict of one tensor.
    pub fn one_tensor(
        name: &str,
        storage: (&str, &str, i32),
        offset: i32,
        shape: &[i32],
        strides: &[i32],
    ) -> Vec<u8> {
        PickleWriter::new().raw(b"}(").text(name).tensor(storage, offset, shape, strides).raw(b"u").end()
    }
}

/// A torch archive of a pickle and storages.
pub fn torch_archive(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    let names: Vec<String> = storages.iter().map(|(key, _)| format!("model/data/{key}")).collect();
    let mut entries: Vec<(&str, &[u8])> = vec![("model/data.pkl", pickle), ("model/byteorder", b"little")];
    entries.extend(names.iter().zip(storages).map(|(name, (_, data))| (name.as_str(), *data)));
    stored_zip(&entries)
}
