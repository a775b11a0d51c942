//! Encoders as GGUF files (`tools/gguf_encoders.py`): the vectors of the checkpoints that they were made
//! from.

use std::path::Path;

use crate::cases::{artifact, build_options, load, scheme};
use crate::texts::{F32, check, inputs};

#[test]
fn gguf_encoders_give_the_vectors_of_their_checkpoints() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data");
    for (case, head) in [
        ("embed-bert", ["embedding", "cls"]),
        ("embed-modernbert", ["embedding", "mean"]),
        ("embed-gemma", ["embedding", "mean"]),
        ("embed-nomic", ["embedding", "mean"]),
        ("rerank-xlmr", ["scores", "cls"]),
        ("rerank-modernbert", ["scores", "mean"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = build_options(&data.join(format!("{case}.gguf")));
        options.quant = scheme("f32");
        options.quant_name = "f32".into();
        let model = load(&artifact(&options, folder.path(), "case.so").0, None, 2);
        let metadata: serde_json::Value = serde_json::from_str(model.metadata()).unwrap();
        let found = ["purpose", "pooling"].map(|field| metadata["texts"][field].as_str().unwrap());
        assert_eq!(found, head, "{case}");
        check(&format!("{case}.gguf"), &model, &inputs(case), F32);
    }
}
