//! Checkpoints: a list of named tensors that can be streamed, whatever file format they are stored in.
//!
//! Invariants: tensors are listed in a fixed order (files in order of name, inside a file in order of position); names are
//! unique; every tensor's bytes have been checked to lie inside its file when the checkpoint was opened, so that reading
//! one later fails only for a type that is not a float. Files are mapped, not loaded: the memory in use is about that of
//! the tensor being read.

pub mod bytes;
pub mod data;
pub mod finite;
pub mod gguf;
pub mod merged;
pub mod packed;
pub mod pickle;
pub mod quantized;
pub mod random;
pub mod safetensors;
pub mod shards;
pub mod stored_type;
pub mod torch;

pub use data::TensorData;
pub use finite::FiniteCheck;
pub use packed::{PackedKind, Quantization, StoredCodes, StoredGroups};
pub use random::{Distribution, RandomTensor};
pub use shards::WeightFiles;
pub use stored_type::StoredType;

use crate::error::CheckpointError;
use bytes::FileBytes;
use data::TensorContent;
use gguf::GgufArchitecture;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// One tensor as the checkpoint describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// The name used from here on; [`Checkpoint::rename`] changes it.
    pub name: String,
    /// The name in the file, for messages.
    pub stored_name: String,
    /// The name that the reader gives it: that of the file, or of the checkpoint that the file was converted from.
    pub listed_name: String,
    pub dtype: StoredType,
    pub shape: Vec<usize>,
    storage: TensorStorage,
}

impl TensorInfo {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
    /// True if adapters change it.
    pub fn is_merged(&self) -> bool {
        matches!(self.storage, TensorStorage::Merged(_))
    }
    pub fn bytes(&self) -> usize {
        self.elements() / self.dtype.block().0 * self.dtype.block().1
    }
}

/// Where the elements are.
#[derive(Clone, Debug, PartialEq)]
enum TensorStorage {
    /// Row-major elements from byte `start` of file number `file`.
    Contiguous { file: usize, start: usize },
    /// Element (i, j, ...) at byte `start + size * (i*strides[0] + j*strides[1] + ...)`.
    Strided { file: usize, start: usize, strides: Vec<usize> },
    /// Rows of a tensor of a GGUF file.
    View(gguf::view::GgufView),
    /// Codes, scales and zero points.
    Packed(Box<packed::PackedWeight>),
    /// A tensor that adapters change.
    Merged(Box<merged::MergedTensor>),
    /// Generated.
    Random(RandomTensor),
}

impl TensorStorage {
    /// The same with files counted from `first` on.
    fn offset_files(self, first: usize) -> TensorStorage {
        match self {
            TensorStorage::Contiguous { file, start } => {
                TensorStorage::Contiguous { file: file + first, start }
            }
            TensorStorage::Strided { file, start, strides } => {
                TensorStorage::Strided { file: file + first, start, strides }
            }
            // What adapters are not stored as.
            place @ (TensorStorage::View(_)
            | TensorStorage::Packed(_)
            | TensorStorage::Merged(_)
            | TensorStorage::Random(_)) => place,
        }
    }

    /// The file of the elements; none of random ones.
    fn file_index(&self) -> Option<usize> {
        match self {
            TensorStorage::Contiguous { file, .. } | TensorStorage::Strided { file, .. } => Some(*file),
            TensorStorage::View(view) => Some(view.file),
            TensorStorage::Packed(weight) => Some(weight.file_index()),
            TensorStorage::Merged(merged) => merged.base.storage.file_index(),
            TensorStorage::Random(_) => None,
        }
    }
}

/// File format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointFormat {
    Safetensors,
    /// `torch.save` zip: `.pth`, `.pt`, `.bin`.
    Torch,
    /// `.gguf` of llama.cpp.
    Gguf,
    Random,
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Directory or file, for messages.
    pub origin: String,
    pub format: CheckpointFormat,
    /// What a GGUF file says beside its tensors; empty for others.
    pub metadata: gguf::GgufMetadata,
    files: Vec<FileBytes>,
    tensors: Vec<TensorInfo>,
    by_name: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Maps and checks all files. The tensors of a GGUF file keep the names that they have there.
    pub fn open(weights: &WeightFiles) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open_as(weights, &[])
    }

    /// The same with the names of the Hugging Face checkpoint for tensors of GGUF files of these architectures.
    pub fn open_as(
        weights: &WeightFiles,
        architectures: &[&GgufArchitecture],
    ) -> Result<Checkpoint, CheckpointError> {
        let files = weights.files.iter().map(|path| FileBytes::map(path)).collect::<Result<Vec<_>, _>>()?;
        let mut checkpoint =
            Checkpoint::from_files(weights.origin.clone(), weights.format, files, architectures)?;
        weights.check_index(&checkpoint)?;
        if let Some(quantization) = &weights.quantization {
            checkpoint = checkpoint.with_packed_weights(quantization)?;
        }
        for (prefix, path) in &weights.auxiliary {
            checkpoint.add_auxiliary_file(prefix, path)?;
        }
        Ok(checkpoint)
    }

    /// The tensors of a file of another part of the model, with `prefix` and a dot before their names.
    fn add_auxiliary_file(&mut self, prefix: &str, path: &Path) -> Result<(), CheckpointError> {
        let (number, file) = (self.files.len(), FileBytes::map(path)?);
        let mut tensors = match shards::format_of(path) {
            Some(CheckpointFormat::Torch) => torch::list_tensors(number, &file)?,
            _ => safetensors::list_tensors(number, &file)?,
        };
        for tensor in &mut tensors {
            tensor.listed_name = format!("{prefix}.{}", tensor.listed_name);
            tensor.name.clone_from(&tensor.listed_name);
        }
        self.files.push(file);
        self.tensors.extend(tensors);
        self.index_names()
    }

    /// The checkpoint with one weight in place of the tensors that a quantized weight is made of.
    pub fn with_packed_weights(self, quantization: &Quantization) -> Result<Checkpoint, CheckpointError> {
        let Checkpoint { origin, format, metadata, files, tensors, .. } = self;
        let tensors = packed::collect_packed_weights(quantization, &files, tensors)?;
        Checkpoint::with_tensors(origin, format, metadata, files, tensors)
    }

    /// A checkpoint of one file that is in memory already; `label` stands for its path in messages.
    pub fn from_bytes(
        label: &str,
        format: CheckpointFormat,
        bytes: Vec<u8>,
    ) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::from_bytes_as(label, format, bytes, &[])
    }

    /// The same with the names of [`Checkpoint::open_as`].
    pub fn from_bytes_as(
        label: &str,
        format: CheckpointFormat,
        bytes: Vec<u8>,
        architectures: &[&GgufArchitecture],
    ) -> Result<Checkpoint, CheckpointError> {
        let files = vec![FileBytes::owned(label, bytes)];
        Checkpoint::from_files(label.to_string(), format, files, architectures)
    }

    /// Random weights: see [`random`]. Equal seed, name and shape give equal values, whatever else is in the list.
    pub fn random(
        seed: u64,
        tensors: Vec<(String, Vec<usize>, Distribution)>,
    ) -> Result<Checkpoint, CheckpointError> {
        let infos = tensors
            .into_iter()
            .map(|(name, shape, distribution)| TensorInfo {
                stored_name: name.clone(),
                listed_name: name.clone(),
                dtype: StoredType::F32,
                storage: TensorStorage::Random(RandomTensor::new(seed, &name, distribution)),
                name,
                shape,
            })
            .collect();
        Checkpoint::with_tensors(
            format!("random weights (seed {seed})"),
            CheckpointFormat::Random,
            gguf::GgufMetadata::default(),
            Vec::new(),
            infos,
        )
    }

    fn from_files(
        origin: String,
        format: CheckpointFormat,
        files: Vec<FileBytes>,
        architectures: &[&GgufArchitecture],
    ) -> Result<Checkpoint, CheckpointError> {
        if format == CheckpointFormat::Gguf {
            let (tensors, metadata) = gguf::list_tensors(&files, architectures)?;
            return Checkpoint::with_tensors(origin, format, metadata, files, tensors);
        }
        let mut tensors = Vec::new();
        for (number, file) in files.iter().enumerate() {
            let listed = match format {
                CheckpointFormat::Safetensors => safetensors::list_tensors(number, file)?,
                CheckpointFormat::Torch => torch::list_tensors(number, file)?,
                CheckpointFormat::Gguf | CheckpointFormat::Random => Vec::new(),
            };
            tensors.extend(listed);
        }
        Checkpoint::with_tensors(origin, format, gguf::GgufMetadata::default(), files, tensors)
    }

    fn with_tensors(
        origin: String,
        format: CheckpointFormat,
        metadata: gguf::GgufMetadata,
        files: Vec<FileBytes>,
        tensors: Vec<TensorInfo>,
    ) -> Result<Checkpoint, CheckpointError> {
        let mut checkpoint =
            Checkpoint { origin, format, metadata, files, tensors, by_name: BTreeMap::new() };
        checkpoint.index_names()?;
        Ok(checkpoint)
    }

    /// Gives every tensor the name that `rename` returns. Two tensors under one name are an error.
    pub fn rename(&mut self, rename: impl Fn(&str) -> String) -> Result<(), CheckpointError> {
        for tensor in &mut self.tensors {
            tensor.name = rename(&tensor.listed_name);
        }
        self.index_names()
    }

    /// Gives tensors that are missing under their name the one that is stored in their place: the first that is there of those that
    /// `stand_ins` gives.
    pub fn apply_fallbacks(
        &mut self,
        expected: &[(String, Vec<usize>)],
        stand_ins: impl Fn(&str) -> &'static [&'static str],
    ) -> Result<(), CheckpointError> {
        for (name, _) in expected {
            if self.by_name.contains_key(name) {
                continue;
            }
            let Some(number) = stand_ins(name).iter().find_map(|other| self.by_name.get(*other)).copied()
            else {
                continue;
            };
            self.tensors[number].name.clone_from(name);
            self.index_names()?;
        }
        Ok(())
    }

    /// Turns the matrices that `wanted` picks by their stored names, without moving their elements. Only those that are
    /// stored as plain elements can be turned; the shape of others tells that they have not been.
    pub fn transpose(&mut self, wanted: impl Fn(&str) -> bool) {
        for tensor in self.tensors.iter_mut().filter(|t| wanted(&t.stored_name)) {
            let &[rows, columns] = tensor.shape.as_slice() else { continue };
            let (file, start, strides) = match &tensor.storage {
                TensorStorage::Contiguous { file, start } => (*file, *start, vec![1, columns]),
                TensorStorage::Strided { file, start, strides } => {
                    (*file, *start, strides.iter().rev().copied().collect())
                }
                TensorStorage::View(_)
                | TensorStorage::Packed(_)
                | TensorStorage::Merged(_)
                | TensorStorage::Random(_) => continue,
            };
            tensor.storage = TensorStorage::Strided { file, start, strides };
            tensor.shape = vec![columns, rows];
        }
    }

    /// Changes tensors as an adapter says, whose own tensors the changes are made of. Names are those of this checkpoint; the
    /// shapes have been compared.
    pub fn apply_adapter(&mut self, adapter: Checkpoint, changes: Vec<(String, merged::AdapterChange)>) {
        let first = self.files.len();
        self.files.extend(adapter.files);
        for (name, change) in changes {
            let Some(&number) = self.by_name.get(&name) else { continue };
            let tensor = &mut self.tensors[number];
            *tensor = merged::apply_change(tensor.clone(), change.offset_files(first));
        }
    }

    fn index_names(&mut self) -> Result<(), CheckpointError> {
        self.by_name.clear();
        for (number, tensor) in self.tensors.iter().enumerate() {
            if let Some(first) = self.by_name.insert(tensor.name.clone(), number) {
                return Err(CheckpointError::Duplicate {
                    tensor: tensor.name.clone(),
                    first: self.describe_source(&self.tensors[first]),
                    second: self.describe_source(tensor),
                });
            }
        }
        Ok(())
    }

    /// All tensors in their fixed order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&number| &self.tensors[number])
    }

    /// The groups of a packed weight, if a storage format of groups may hold its codes.
    pub fn stored_groups(&self, name: &str) -> Option<StoredGroups> {
        match &self.tensor_info(name)?.storage {
            TensorStorage::Packed(weight) => weight.stored_groups(&self.files, false),
            _ => None,
        }
    }

    /// The same with columns in the [order](Checkpoint::column_order) of their groups.
    pub fn sorted_groups(&self, name: &str) -> Option<StoredGroups> {
        match &self.tensor_info(name)?.storage {
            TensorStorage::Packed(weight) => weight.stored_groups(&self.files, true),
            _ => None,
        }
    }

    /// The columns of a packed weight in an order in which those of each group are neighbours; `None` if they are already, or
    /// groups are not equally large.
    pub fn column_order(&self, name: &str) -> Option<Vec<usize>> {
        match &self.tensor_info(name)?.storage {
            TensorStorage::Packed(weight) => weight.column_order(&self.files),
            _ => None,
        }
    }

    /// Opens one tensor for reading. Dropping it gives the pages of its file back to the system.
    pub fn read(&self, name: &str) -> Result<TensorData<'_>, CheckpointError> {
        let info =
            self.tensor_info(name).ok_or_else(|| CheckpointError::NotFound { tensor: name.to_string() })?;
        self.open_tensor(info)
    }

    fn open_tensor<'a>(&'a self, info: &'a TensorInfo) -> Result<TensorData<'a>, CheckpointError> {
        let content = match &info.storage {
            TensorStorage::Random(random) => TensorContent::Random(random),
            TensorStorage::Contiguous { file, start } => {
                let file = &self.files[*file];
                TensorContent::Mapped {
                    file,
                    start: *start,
                    bytes: Cow::Borrowed(file.slice(*start, info.bytes())),
                }
            }
            TensorStorage::Strided { file, start, strides } => {
                let file = &self.files[*file];
                // Block formats occur only in views.
                let gathered = data::gather_strided(file, *start, &info.shape, strides, info.dtype.size());
                TensorContent::Mapped { file, start: *start, bytes: Cow::Owned(gathered) }
            }
            TensorStorage::View(view) => {
                let file = &self.files[view.file];
                match view.transpose {
                    Some(_) => TensorContent::Values(view.read_transposed(file)),
                    None => TensorContent::Viewed { file, view },
                }
            }
            TensorStorage::Packed(weight) => {
                TensorContent::Packed(packed::PackedReader::new(&self.files, weight)?)
            }
            TensorStorage::Merged(merged) => {
                TensorContent::Merged(merged::MergedReader::new(merged, |info| self.open_tensor(info))?)
            }
        };
        Ok(TensorData::new(info, content))
    }

    /// The configuration that a GGUF file holds, as fields of a config.json; `None` for other formats.
    pub fn embedded_config(
        &self,
        architectures: &[&GgufArchitecture],
    ) -> Result<Option<crate::config::ConfigFields>, CheckpointError> {
        match self.format {
            CheckpointFormat::Gguf => gguf::config::read_config_fields(&self.files, architectures).map(Some),
            CheckpointFormat::Safetensors | CheckpointFormat::Torch | CheckpointFormat::Random => Ok(None),
        }
    }

    /// "stored name in file", for messages.
    fn describe_source(&self, tensor: &TensorInfo) -> String {
        let file = tensor.storage.file_index().map_or(&self.origin, |file| &self.files[file].label);
        match tensor.stored_name == tensor.name {
            true => file.clone(),
            false => format!("{file} (as `{}`)", tensor.stored_name),
        }
    }
}
