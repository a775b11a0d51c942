//! The work of the fuzz targets and of the tests with damaged files on one input: an error, or something that
//! works. Nothing here may panic or use memory out of proportion to the input.

use mlcc_text::chat::{ChatMessage, ChatTemplate, TemplateInputs};
use mlcc_text::{SpecialTokens, TemplateHost, Tokenizer, TokenizerKind};

pub fn tokenizer(kind: TokenizerKind, bytes: &[u8]) {
    let tokenizer = match Tokenizer::from_bytes(kind, bytes) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            let message = error.to_string();
            assert!(message.len() < 4096, "a message of {} bytes", message.len());
            return;
        }
    };
    if let Ok(ids) = tokenizer.encode_prompt("ab c\n é") {
        tokenizer.decode(&ids, SpecialTokens::Keep);
    }
    let _ = tokenizer.check_vocab(200);
}

pub fn sentence_piece(bytes: &[u8]) {
    tokenizer(TokenizerKind::SentencePiece, bytes);
}

pub fn tiktoken(bytes: &[u8]) {
    tokenizer(TokenizerKind::Tiktoken, bytes);
}

/// A section of an artifact: head and file.
pub fn tokenizer_section(bytes: &[u8]) {
    let _ = Tokenizer::from_section(bytes);
}

pub fn chat(bytes: &[u8], host: &'static dyn TemplateHost) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(template) = ChatTemplate::from_jinja(text, host) else { return };
    let messages = [
        ChatMessage::new("system", "s"),
        ChatMessage::new("user", "<u>\n"),
        ChatMessage::new("assistant", "a"),
    ];
    let _ = template.render(&messages, true, &TemplateInputs { now: Some(0), ..TemplateInputs::default() });
}
