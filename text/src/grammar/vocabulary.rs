//! A tokenizer's vocabulary as llguidance takes it.

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId as GrammarToken, TokenizerEnv};

use super::GrammarError;
use crate::tokenizer::{TokenId, Tokenizer};

/// Longest token that llguidance's tables hold.
const LONGEST_TOKEN: usize = 255;

/// All tokens of a model, and behind them one more for every end of a text: the request says which tokens end
/// one.
pub(super) struct GrammarVocabulary {
    trie: TokTrie,
}

impl GrammarVocabulary {
    /// `vocab`: the model's number of logits. Ids without a token, and control tokens where a grammar does
    /// not name them, are never allowed.
    pub fn env(tokenizer: &Tokenizer, vocab: usize) -> Result<TokEnv, GrammarError> {
        let wrong = |reason: &str| GrammarError::Tokenizer { reason: reason.to_owned() };
        let end = u32::try_from(vocab).ok().filter(|&n| n < u32::MAX >> 8);
        let end = end.ok_or_else(|| wrong("it is too large"))?;
        let mut words: Vec<Vec<u8>> = (0..vocab).map(|id| word(tokenizer, id as TokenId)).collect();
        if words.iter().all(Vec::is_empty) {
            return Err(wrong("it has no tokens"));
        }
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], b"<|end of the text|>".as_slice()].concat());
        let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &words);
        Ok(std::sync::Arc::new(GrammarVocabulary { trie }))
    }
}

/// The bytes of a token; none if no text has it.
fn word(tokenizer: &Tokenizer, id: TokenId) -> Vec<u8> {
    let Some(bytes) = tokenizer.bytes_of(id).filter(|bytes| bytes.len() < LONGEST_TOKEN) else {
        return Vec::new();
    };
    match (tokenizer.is_special(id), bytes.first()) {
        (true, Some(_)) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        // This byte is no part of UTF-8, and the marker of control tokens.
        (false, Some(&TokTrie::SPECIAL_TOKEN_MARKER)) => Vec::new(),
        (false, Some(_)) => bytes.to_vec(),
        (_, None) => Vec::new(),
    }
}

impl TokenizerEnv for GrammarVocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<GrammarToken> {
        self.trie.greedy_tokenize(text)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
