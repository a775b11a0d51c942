//! What the fuzz targets and the short mutation run do with one input: read all that can be read, in every way that the
//! compiler does. Nothing here may panic or use memory out of proportion to the input.

use mlcc_models::checkpoint::{Checkpoint, CheckpointFormat, FiniteCheck};
use mlcc_models::families::gguf_architectures;
use mlcc_models::{ModelConfig, golden, tensor_check};

pub fn safetensors(input: &[u8]) {
    checkpoint(CheckpointFormat::Safetensors, input);
}

pub fn torch(input: &[u8]) {
    checkpoint(CheckpointFormat::Torch, input);
}

pub fn gguf(input: &[u8]) {
    checkpoint(CheckpointFormat::Gguf, input);
}

pub fn config(input: &[u8]) {
    if let Ok(config) = ModelConfig::parse("fuzz.json", input) {
        let text = serde_json::to_vec(&config.raw).expect("a JSON object prints");
        // Not compared: a float may change in its last bit when serde_json reads it back.
        ModelConfig::parse("fuzz.json", &text).expect("what was read is printed and read again");
    }
    let _ = golden::GoldenFile::parse("fuzz.json", input);
}

fn checkpoint(format: CheckpointFormat, input: &[u8]) {
    let mut open = match Checkpoint::from_bytes_as("fuzz", format, input.to_vec(), &gguf_architectures()) {
        Ok(open) => open,
        Err(error) => {
            let message = error.to_string();
            assert!(message.len() < 4096, "a message of {} bytes", message.len());
            return;
        }
    };
    for info in open.tensors() {
        let tensor = open.read(&info.name).expect("a listed tensor opens");
        assert!(tensor.bytes().is_none_or(|bytes| bytes.len() == info.bytes()));
        if format == CheckpointFormat::Gguf {
            let _ = (tensor.row_blocks(0), tensor.row_blocks(usize::MAX));
        } else {
            assert!(tensor.bytes().is_some());
        }
        assert!(info.bytes() <= input.len(), "{} bytes from a file of {}", info.bytes(), input.len());
        if let Ok(values) = tensor.to_f32() {
            assert_eq!(values.len(), info.elements());
            let _ = FiniteCheck::new(info).check(0, &values);
        }
    }
    if let Ok(Some(fields)) = open.embedded_config(&gguf_architectures()) {
        let json = serde_json::to_vec(&fields.raw).expect("a JSON object prints");
        let _ = ModelConfig::parse("fuzz.json", &json);
    }
    if let Ok(config) = ModelConfig::of_rwkv_tensors(&open) {
        let architecture = &config.architecture;
        // A hostile file may claim many layers only by having many tensors.
        let renamed = open.rename(|name| architecture.canonical_name(name)).is_ok();
        if renamed {
            let _ = tensor_check::check_tensors(&architecture.tensor_shapes(), &open, |name| {
                architecture.is_ignored(name)
            });
        }
    }
}
