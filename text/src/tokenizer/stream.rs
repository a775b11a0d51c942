//! Token ids to text, piece by piece.
//!
//! Invariant: the pieces of a stream joined together are exactly what [`Tokenizer::decode`] gives for all ids
//! at once, and every piece is whole characters. A byte sequence that can no longer become a character turns
//! into U+FFFD as in [`String::from_utf8_lossy`] (one per maximal invalid part).

use super::{SpecialTokens, TokenId, Tokenizer};

/// Bytes to text: holds back the up to three bytes of a character that is not complete yet.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    pending: Vec<u8>,
    text: String,
}

impl Utf8Stream {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes and returns the characters that are complete now (maybe none).
    pub fn push(&mut self, bytes: &[u8]) -> &str {
        self.text.clear();
        self.pending.extend_from_slice(bytes);
        let mut at = 0;
        loop {
            match std::str::from_utf8(&self.pending[at..]) {
                Ok(rest) => {
                    self.text.push_str(rest);
                    at = self.pending.len();
                    break;
                }
                Err(error) => {
                    let valid = at + error.valid_up_to();
                    // The part before the error has just been found valid, so nothing is replaced here.
                    self.text.push_str(&String::from_utf8_lossy(&self.pending[at..valid]));
                    at = valid;
                    let Some(invalid) = error.error_len() else { break };
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    at += invalid;
                }
            }
        }
        self.pending.drain(..at);
        &self.text
    }

    /// True if a character is not complete yet.
    pub fn is_open(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Ends the text: an incomplete character becomes one U+FFFD.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        &self.text
    }
}

/// Token ids to text, one id at a time.
#[derive(Debug, Clone)]
pub struct DecodeStream<'t> {
    tokenizer: &'t Tokenizer,
    special: SpecialTokens,
    utf8: Utf8Stream,
    /// Leading spaces that are still to be dropped.
    strip: usize,
}

impl<'t> DecodeStream<'t> {
    /// A text from its beginning: equals [`Tokenizer::decode`].
    pub fn new(tokenizer: &'t Tokenizer, special: SpecialTokens) -> Self {
        DecodeStream { tokenizer, special, utf8: Utf8Stream::new(), strip: tokenizer.leading_strip() }
    }

    /// The continuation of a text, as a model writes it after a prompt: the space that some tokenizers put
    /// before a text is kept here, because it is between the prompt and the first new word.
    pub fn continuing(tokenizer: &'t Tokenizer, special: SpecialTokens) -> Self {
        DecodeStream { strip: 0, ..Self::new(tokenizer, special) }
    }

    /// The text that `id` completes; `None` while there is none.
    pub fn push(&mut self, id: TokenId) -> Option<&str> {
        let mut bytes = self.tokenizer.text_of(id, self.special);
        while self.strip > 0 {
            match bytes.split_first() {
                Some((b' ', rest)) => {
                    bytes = rest;
                    self.strip -= 1;
                }
                Some(_) => self.strip = 0,
                None => break,
            }
        }
        some_text(self.utf8.push(bytes))
    }

    /// Ends the text. A character that never became complete gives one U+FFFD.
    pub fn finish(&mut self) -> Option<&str> {
        some_text(self.utf8.finish())
    }
}

fn some_text(text: &str) -> Option<&str> {
    if text.is_empty() { None } else { Some(text) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn streamed<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
        let mut stream = Utf8Stream::new();
        let mut text = String::new();
        for piece in pieces {
            text.push_str(stream.push(piece));
        }
        text.push_str(stream.finish());
        text
    }

    #[test]
    fn holds_back_an_open_character() {
        let mut stream = Utf8Stream::new();
        let smile = "😀".as_bytes();
        assert_eq!(stream.push(&smile[..1]), "");
        assert_eq!(stream.push(&smile[1..3]), "");
        assert_eq!(stream.push(&[smile[3], b'!', 0xe4]), "😀!");
        assert!(stream.is_open());
        assert_eq!(stream.push(b"a"), "\u{fffd}a");
        assert!(!stream.is_open());
        assert_eq!(stream.finish(), "");
    }

    proptest! {
        #[test]
        fn equals_lossy_decoding(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..4), 0..24)) {
            let whole: Vec<u8> = pieces.concat();
            prop_assert_eq!(streamed(pieces.iter().map(Vec::as_slice)), String::from_utf8_lossy(&whole));
        }

        #[test]
        fn equals_lossy_decoding_of_damaged_text(text in "\\PC{0,16}", cut in 0usize..64, bad in any::<u8>()) {
            let mut bytes = text.into_bytes();
            let at = cut.min(bytes.len());
            bytes.insert(at, bad);
            prop_assert_eq!(streamed(bytes.chunks(1)), String::from_utf8_lossy(&bytes));
        }
    }
}
