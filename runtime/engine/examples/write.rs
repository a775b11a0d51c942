//! Writes a text for a prompt: the prompt becomes a message where the model has a chat template, and is
//! continued where it has none.
//!
//! cargo run -p mlcc-engine --example write -- model.so "The sea was"

// docs: begin
use std::io::Write;
use std::ops::ControlFlow;

use mlcc_engine::text::ChatMessage;
use mlcc_engine::{GenerationRequest, SamplingParams, TextGenerator, artifact_text};
use mlcc_runtime::{LoadOptions, Model};

/// Writes at most `most` tokens to `out`, as they come.
pub fn write(
    path: &str,
    prompt: &str,
    most: usize,
    out: &mut impl Write,
) -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(path, &LoadOptions::default())?;
    let tokenizer = artifact_text::tokenizer(&model)?;
    let metadata = serde_json::from_str(model.metadata())?;
    let mut eos = artifact_text::eos_ids(&metadata);
    let ids = match artifact_text::chat_format(&model)? {
        Some(format) => {
            eos.extend(format.end_tokens(&tokenizer));
            let text = format.render(&[ChatMessage::new("user", prompt)], true, &Default::default())?;
            format.encode(&tokenizer, &text)?
        }
        None => tokenizer.encode_prompt(prompt)?,
    };
    // The model's own values; `SamplingParams { temperature: 0.0, .. }` always takes the likeliest token.
    let sampling: SamplingParams = artifact_text::sampling(&metadata)?;
    let request =
        GenerationRequest { max_tokens: Some(most), eos: &eos, ..GenerationRequest::new(&ids, sampling) };
    let mut generator = TextGenerator::new(model.session()?);
    generator.generate(&tokenizer, &request, |piece| match write!(out, "{piece}") {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    })?;
    Ok(())
}
// docs: end

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, prompt] = args.as_slice() else { return Err("usage: write MODEL.so PROMPT".into()) };
    write(path, prompt, 100, &mut std::io::stdout().lock())
}
