//! GGUF, the file format of llama.cpp (specification: `docs/gguf.md` of ggml), versions 2 and 3, little-endian.
//!
//! [`header`] reads and checks what the file says of itself, [`blocks`] the quantized element types. [`GgufArchitecture`] is what
//! a family says of its files; by it `names` leads from the tensors to those of the Hugging Face checkpoint that the file
//! was converted from (and undoes what the converter did to them), `config` from the metadata to the fields of that
//! checkpoint's config.json. So a GGUF file is another checkpoint of the same model.

mod architecture;
pub mod blocks;
pub(super) mod config;
mod conversion;
pub mod header;
pub mod metadata;
mod names;
mod rope;
pub(super) mod view;
mod writer;

pub use architecture::GgufArchitecture;
pub(crate) use architecture::{BACKBONE_TOP, GEMMA_TOP, GgufVariant, INTERLEAVED, NORMS_BEHIND};
pub(crate) use conversion::{NameMapping, TensorConversion, TensorNameMap, ValueHeadAxis};
pub use metadata::{GgufMetadata, MetadataValue};
pub(crate) use writer::{ConfigFieldWriter, FieldResult, MAMBA_FIELDS};

use super::bytes::FileBytes;
use super::{TensorInfo, TensorStorage};
use crate::error::CheckpointError;
use header::GgufHeader;

/// A tensor as the file lists it, found to lie inside of it.
#[derive(Clone, Debug, PartialEq)]
pub struct RawTensor {
    pub name: String,
    pub dtype: super::StoredType,
    /// Row-major: the file's dimensions in reverse, so the last one is contiguous.
    pub shape: Vec<usize>,
    /// Number of the file.
    pub file: usize,
    /// First byte in the file.
    pub start: usize,
}

/// All tensors of a model's files as they are, and the metadata of the first file.
fn read_headers(files: &[FileBytes]) -> Result<(Vec<RawTensor>, GgufMetadata), CheckpointError> {
    let mut tensors = Vec::new();
    let mut metadata: Option<GgufMetadata> = None;
    for (number, file) in files.iter().enumerate() {
        let header = GgufHeader::read(number, file)?;
        tensors.extend(header.tensors);
        metadata.get_or_insert(header.metadata);
    }
    Ok((tensors, metadata.unwrap_or_default()))
}

/// All tensors of a model's files under their Hugging Face names, and the metadata of the first file.
pub(super) fn list_tensors(
    files: &[FileBytes],
    architectures: &[&GgufArchitecture],
) -> Result<(Vec<TensorInfo>, GgufMetadata), CheckpointError> {
    let (tensors, metadata) = read_headers(files)?;
    let label = files.first().map_or("", |file| file.label.as_str());
    let infos = names::map_tensors(label, &metadata, &tensors, architectures)?;
    Ok((infos, metadata))
}

impl RawTensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The tensor as it stands, under `name`.
    fn as_stored(&self, name: String) -> TensorInfo {
        let place = match self.dtype.is_block() {
            false => TensorStorage::Contiguous { file: self.file, start: self.start },
            true => TensorStorage::View(view::GgufView::of_tensor(self)),
        };
        TensorInfo {
            name: name.clone(),
            stored_name: self.name.clone(),
            listed_name: name,
            dtype: self.dtype,
            shape: self.shape.clone(),
            storage: place,
        }
    }

    /// A changed view of the tensor, under `name`.
    fn with_view(&self, name: String, shape: Vec<usize>, view: view::GgufView) -> TensorInfo {
        let place = TensorStorage::View(view);
        TensorInfo {
            name: name.clone(),
            stored_name: self.name.clone(),
            listed_name: name,
            dtype: self.dtype,
            shape,
            storage: place,
        }
    }
}
