//! Text to token ids and back.
//!
//! One closed set of tokenizers. All of them load from memory ([`Tokenizer::from_bytes`]), because an
//! artifact carries its tokenizer in a payload section, and all of them know the bytes of every token, so
//! that streams never split a character ([`DecodeStream`]).

mod added_tokens;
mod auxiliary_files;
mod bpe_json;
mod checkpoint_files;
mod file;
mod gguf;
mod growth_bound;
mod hf;
mod merge;
mod prefix_index;
mod regexes;
mod sentencepiece;
mod stream;
mod table;
mod tiktoken;
mod token_reach;
mod wordpiece_json;
mod world;

use thiserror::Error;

pub use added_tokens::{AddedToken, TokenizerExtras};
pub use checkpoint_files::CheckpointFiles;
pub use file::{TokenizerFile, TokenizerKind};
pub use gguf::GgufVocabulary;
pub use hf::HfTokenizer;
pub use sentencepiece::SentencePieceTokenizer;
pub use stream::{DecodeStream, Utf8Stream};
pub use tiktoken::{TiktokenPattern, TiktokenTokenizer};
pub use world::WorldTokenizer;

use table::{EntryKind, TokenTable};

/// A token id, in the type of the entry points of a compiled model.
pub type TokenId = i32;

/// Larger ids than any published vocabulary has; keeps a damaged file from asking for gigabytes.
const MAX_ID: u32 = 1 << 24;

/// The treatment of control tokens when decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// They are no text.
    Skip,
    /// Show them by their names.
    Keep,
}

#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error("cannot read the tokenizer {path}: {source}")]
    Io { path: String, source: std::io::Error },
    /// A file that is there and cannot be read, as a link to nothing.
    #[error(transparent)]
    Unreadable(Box<dyn std::error::Error + Send + Sync>),
    #[error(
        "the tokenizer's {step} {detail}. No published tokenizer does that: get the file again, from where it was published."
    )]
    Grows { step: String, detail: String },
    #[error(
        "a text of {bytes} bytes becomes more than {most} bytes before it is split into tokens, which is more than the \
         limit; shorten it or use the tokenizer that was published with the model"
    )]
    TooLong { bytes: usize, most: usize },
    #[error(
        "no tokenizer in {folder}: expected tokenizer.json, 20B_tokenizer.json, rwkv_vocab_*.txt, tokenizer.model, \
         sentencepiece.bpe.model, *.tiktoken, vocab.json with merges.txt, or vocab.txt there. Put one of them next to \
         the weights, or name the file with --tokenizer."
    )]
    NotFound { folder: String },
    #[error(
        "{path} is not a supported tokenizer file: expected a Hugging Face tokenizer (.json), an RWKV World \
         vocabulary (.txt), a sentencepiece model (.model) or tiktoken ranks (.tiktoken)"
    )]
    UnknownFile { path: String },
    #[error(
        "the tokenizer of this artifact is of kind {found:?}, which this version does not support (it supports \
         {known}). Use the mlcc version that built the artifact, or build it again."
    )]
    UnknownKind { found: String, known: String },
    #[error("the tokenizer section of the artifact cannot be read: {reason}. Build the artifact again.")]
    Section { reason: String },
    #[error("{file}, next to the tokenizer, is not as expected: {reason}")]
    Companion { file: String, reason: String },
    #[error(
        "tokenizer_class {class} is not supported: {detail}. Give a tokenizer.json with --tokenizer.",
        class = brief(.class)
    )]
    UnknownClass { class: String, detail: String },
    #[error("not a readable sentencepiece model: {reason}")]
    SentencePiece { reason: String },
    #[error("line {line} of the tiktoken ranks: expected {expected}")]
    TiktokenLine { line: usize, expected: &'static str },
    #[error("the tiktoken ranks have no token for the single byte 0x{byte:02x}; all 256 are needed")]
    TiktokenByte { byte: u8 },
    #[error("the tokenizer in the GGUF file cannot be used: {reason}")]
    Gguf { reason: String },
    /// `near` is empty, or asks whether a name of [`GgufVocabulary::pre_tokenizers`] was meant.
    #[error(
        "the tokenizer in the GGUF file cannot be used: tokenizer.ggml.pre `{name}` is not supported: \
         {near}docs/checkpoints-and-tokenizers.md lists those that are. {way_out}",
        name = brief(.name),
        way_out = gguf::WAY_OUT
    )]
    PreTokenizer { name: String, near: String },
    #[error("{path}: {source}")]
    InFile { path: String, source: Box<TokenizerError> },
    #[error("the tokenizer has no tokens: the file is empty or damaged, get it again")]
    Empty,
    #[error(
        "not a Hugging Face tokenizer.json: {reason}. The file is damaged or of a newer format, get it again."
    )]
    Json { reason: String },
    #[error(
        "the added token {token:?} has id {stated} in the file but {found} in the vocabulary: its ids leave a gap or \
         collide. Get the tokenizer that belongs to this checkpoint."
    )]
    AddedToken { token: String, stated: u32, found: String },
    #[error(
        "the template in the tokenizer's post_processor is wrong: {name:?} {problem}. Get the file again."
    )]
    Template { name: String, problem: String },
    #[error("token {token:?} has id {id}, expected at most {limit}: the tokenizer is damaged, get it again")]
    HugeId { token: String, id: u32, limit: u32 },
    #[error(
        "the tokenizer's decoder is not supported: {found}. Expected ByteLevel, Metaspace, or a sequence of Replace, \
         ByteFallback, Fuse and Strip, as language models use them."
    )]
    Decoder { found: String },
    #[error(
        "a tokenizer of kind {kind} does not define how two texts are joined into one input: give a tokenizer.json \
         with --tokenizer"
    )]
    NoPairs { kind: &'static str },
    #[error("cannot encode a text of {bytes} bytes: {reason}")]
    Encode { bytes: usize, reason: String },
    #[error("line {line} of the RWKV World vocabulary: expected {expected}, found {found}")]
    WorldLine { line: usize, expected: &'static str, found: String },
    #[error(
        "the RWKV World vocabulary has no token for the single byte 0x{byte:02x}; all 256 are needed. The file is \
         incomplete, get it again."
    )]
    WorldByte { byte: u8 },
    #[error(
        "the tokenizer does not belong to this model: the model's vocabulary has {model_vocab} entries, but {count} \
         token(s) have higher ids (largest: {id}, {token:?}). Use the tokenizer of this checkpoint, or a checkpoint \
         whose embedding covers it.",
        token = brief(.token)
    )]
    BeyondVocab { model_vocab: usize, count: usize, id: TokenId, token: String },
}

/// A text of a file as an error repeats it: cut, because files are as long as they like.
fn brief(text: &str) -> String {
    const LONGEST: usize = 120;
    let end = text.floor_char_boundary(LONGEST);
    match end < text.len() {
        true => format!("{}... ({} bytes)", &text[..end], text.len()),
        false => text.to_owned(),
    }
}

pub struct Tokenizer {
    scheme: TokenizerScheme,
    /// Put after what [`Tokenizer::encode_prompt`] gives: see [`Tokenizer::with_decoder_start`].
    decoder_start: Option<TokenId>,
}

enum TokenizerScheme {
    Hf(Box<HfTokenizer>),
    RwkvWorld(WorldTokenizer),
    SentencePiece(Box<SentencePieceTokenizer>),
    Tiktoken(Box<TiktokenTokenizer>),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", self.kind().tag(), self.vocab_size())
    }
}

impl Tokenizer {
    /// Reads a tokenizer file that needs no other files.
    pub fn from_bytes(kind: TokenizerKind, bytes: &[u8]) -> Result<Self, TokenizerError> {
        Tokenizer::new(kind, bytes, TokenizerExtras::default())
    }

    /// Reads a tokenizer file, with the content of other files.
    pub fn new(kind: TokenizerKind, bytes: &[u8], extras: TokenizerExtras) -> Result<Self, TokenizerError> {
        let scheme = match kind {
            TokenizerKind::HfJson => TokenizerScheme::Hf(Box::new(HfTokenizer::from_bytes(bytes)?)),
            TokenizerKind::RwkvWorld => TokenizerScheme::RwkvWorld(WorldTokenizer::from_bytes(bytes)?),
            TokenizerKind::SentencePiece => {
                TokenizerScheme::SentencePiece(Box::new(SentencePieceTokenizer::from_bytes(bytes, extras)?))
            }
            TokenizerKind::Tiktoken => {
                TokenizerScheme::Tiktoken(Box::new(TiktokenTokenizer::from_bytes(bytes, extras)?))
            }
        };
        Ok(Tokenizer { scheme, decoder_start: None })
    }

    /// Encodes a prompt of an encoder-decoder model: a source text, and behind it the token that the decoder
    /// starts with.
    pub fn with_decoder_start(self, start: Option<TokenId>) -> Tokenizer {
        Tokenizer { decoder_start: start, ..self }
    }

    /// The tokenizer that lies in a checkpoint's folder.
    pub fn from_dir(folder: &std::path::Path, files: &dyn CheckpointFiles) -> Result<Self, TokenizerError> {
        TokenizerFile::find(folder, files)?.load()
    }

    pub fn kind(&self) -> TokenizerKind {
        match &self.scheme {
            TokenizerScheme::Hf(_) => TokenizerKind::HfJson,
            TokenizerScheme::RwkvWorld(_) => TokenizerKind::RwkvWorld,
            TokenizerScheme::SentencePiece(_) => TokenizerKind::SentencePiece,
            TokenizerScheme::Tiktoken(_) => TokenizerKind::Tiktoken,
        }
    }

    /// The ids of `text` alone, nothing added.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        match &self.scheme {
            TokenizerScheme::Hf(hf) => hf.encode(text, false),
            TokenizerScheme::RwkvWorld(world) => Ok(world.encode(text.as_bytes())),
            TokenizerScheme::SentencePiece(sp) => sp.encode(text, false),
            TokenizerScheme::Tiktoken(tiktoken) => tiktoken.encode(text, false),
        }
    }

    /// The ids of `text` as the start of a model's input: with the begin token, where the tokenizer's
    /// template asks for one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = match &self.scheme {
            TokenizerScheme::Hf(hf) => hf.encode(text, true)?,
            TokenizerScheme::RwkvWorld(world) => world.encode(text.as_bytes()),
            TokenizerScheme::SentencePiece(sp) => sp.encode(text, true)?,
            TokenizerScheme::Tiktoken(tiktoken) => tiktoken.encode(text, true)?,
        };
        // Tokens behind the start token are no source any more.
        ids.retain(|&id| Some(id) != self.decoder_start);
        Ok(self.as_prompt(ids))
    }

    /// Ids that are the start of a model's input: of an encoder-decoder model with the token behind the
    /// source text.
    pub fn as_prompt(&self, mut ids: Vec<TokenId>) -> Vec<TokenId> {
        let missing = self.decoder_start.filter(|start| !ids.is_empty() && !ids.contains(start));
        ids.extend(missing);
        ids
    }

    /// The ids of two texts as one input of a model that compares them, and the type of each token (the
    /// number of its text, for models that look at that).
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<(Vec<TokenId>, Vec<u32>), TokenizerError> {
        match &self.scheme {
            TokenizerScheme::Hf(hf) => hf.encode_pair(first, second),
            TokenizerScheme::SentencePiece(sp) if sp.takes_pairs() => {
                let ids = sp.encode_pair(first, second)?;
                let types = vec![0; ids.len()];
                Ok((ids, types))
            }
            TokenizerScheme::RwkvWorld(_)
            | TokenizerScheme::SentencePiece(_)
            | TokenizerScheme::Tiktoken(_) => Err(TokenizerError::NoPairs { kind: self.kind().tag() }),
        }
    }

    /// The text of `ids`. Ids without a token (a model's vocabulary may be padded) have no text; bytes that
    /// are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[TokenId], special: SpecialTokens) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.text_of(id, special)).copied().collect();
        let strip = bytes.iter().take(self.leading_strip()).take_while(|&&b| b == b' ').count();
        String::from_utf8_lossy(&bytes[strip..]).into_owned()
    }

    /// The bytes of one token (a control token's are its name); `None` if no token has this id.
    pub fn bytes_of(&self, id: TokenId) -> Option<&[u8]> {
        self.table().get(id).map(|(bytes, _)| bytes)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.table().len()
    }

    /// True for a control token.
    pub fn is_special(&self, id: TokenId) -> bool {
        matches!(self.table().get(id), Some((_, EntryKind::Special)))
    }

    /// All control tokens, ascending.
    pub fn special_ids(&self) -> &[TokenId] {
        match &self.scheme {
            TokenizerScheme::Hf(hf) => hf.specials(),
            TokenizerScheme::RwkvWorld(_) => &[world::END_OF_TEXT],
            TokenizerScheme::SentencePiece(sp) => sp.specials(),
            TokenizerScheme::Tiktoken(tiktoken) => tiktoken.specials(),
        }
    }

    /// The id of a token by its name in the file (control tokens of `tokenizer_config.json` are given so).
    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        match &self.scheme {
            TokenizerScheme::Hf(hf) => hf.token_to_id(token),
            TokenizerScheme::RwkvWorld(world) => match world.encode(token.as_bytes())[..] {
                [id] => Some(id),
                _ => None,
            },
            TokenizerScheme::SentencePiece(sp) => sp.token_to_id(token),
            TokenizerScheme::Tiktoken(tiktoken) => tiktoken.token_to_id(token),
        }
    }

    /// Fails if the tokenizer can produce ids that a model with `model_vocab` embedding rows does not have.
    pub fn check_vocab(&self, model_vocab: usize) -> Result<(), TokenizerError> {
        let beyond = model_vocab..self.vocab_size();
        let count = beyond.clone().filter(|&id| self.table().get(id as TokenId).is_some()).count();
        if count == 0 {
            return Ok(());
        }
        // The table ends at its largest token.
        let id = beyond.end as TokenId - 1;
        let token = String::from_utf8_lossy(self.bytes_of(id).unwrap_or_default()).into_owned();
        Err(TokenizerError::BeyondVocab { model_vocab, count, id, token })
    }

    /// The bytes that a token adds to a text.
    fn text_of(&self, id: TokenId, special: SpecialTokens) -> &[u8] {
        match (self.table().get(id), special) {
            (Some((bytes, EntryKind::Text)), _)
            | (Some((bytes, EntryKind::Special)), SpecialTokens::Keep) => bytes,
            (Some((_, EntryKind::Special)), SpecialTokens::Skip) => &[],
            (Some((_, EntryKind::Absent)) | None, _) => &[],
        }
    }

    /// The number of spaces that a whole text loses at its begin (sentencepiece puts one there when
    /// encoding).
    fn leading_strip(&self) -> usize {
        match &self.scheme {
            TokenizerScheme::Hf(hf) => hf.leading_strip,
            TokenizerScheme::SentencePiece(sp) => sp.leading_strip(),
            TokenizerScheme::RwkvWorld(_) | TokenizerScheme::Tiktoken(_) => 0,
        }
    }

    fn table(&self) -> &TokenTable {
        match &self.scheme {
            TokenizerScheme::Hf(hf) => hf.table(),
            TokenizerScheme::RwkvWorld(world) => world.table(),
            TokenizerScheme::SentencePiece(sp) => sp.table(),
            TokenizerScheme::Tiktoken(tiktoken) => tiktoken.table(),
        }
    }
}
