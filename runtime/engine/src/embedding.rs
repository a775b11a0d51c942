//! Texts to vectors: embeddings, and scores of pairs of texts for rerankers.

use mlcc_runtime::{Error, Model, TextEmbedder};
use mlcc_text::tokenizer::TokenizerError;
use mlcc_text::{ChatError, ChatTemplate, TokenId, Tokenizer};
use serde_json::Value;

use crate::local_machine::LocalMachine;

#[derive(Debug, thiserror::Error)]
pub enum EmbeddingError {
    #[error(transparent)]
    Runtime(#[from] Error),
    #[error("text {index}: {source}")]
    Tokenizer { index: usize, source: TokenizerError },
    #[error("text {index}: {source}")]
    Chat { index: usize, source: ChatError },
    #[error("the artifact's template for pairs of texts cannot be read: {0}")]
    Template(ChatError),
    #[error(
        "text {index}: the tokenizer gives a token the type {found}, but the model has {types} token types: give the \
         tokenizer of this checkpoint with --tokenizer"
    )]
    TokenType { index: usize, found: u32, types: usize },
    #[error("text {index}: token {found} is not one of the {vocab} of the vocabulary")]
    TokenId { index: usize, found: TokenId, vocab: usize },
    #[error(
        "this reranker takes no instruction: it reads only the two texts. Instructions are for rerankers that answer \
         with a token"
    )]
    NoInstruction,
    #[error("text {index} is empty: there is nothing to embed")]
    Empty { index: usize },
    #[error("the model has no prompt `{name}`, it has {known}")]
    UnknownPrompt { name: String, known: String },
    #[error("{what}: the model gives {found} scores for a text, but a reranker gives one")]
    NoReranker { what: &'static str, found: usize },
    #[error("the model scores pairs of texts (see `mlcc rerank`), it makes no embeddings")]
    NoEmbeddings,
    #[error("{dim} numbers of a vector of {width}: choose 1 to {width}")]
    Dim { dim: usize, width: usize },
}

/// The purpose of a model of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingTask {
    Embedding,
    Scores,
}

/// A loaded model of texts with its tokenizer.
pub struct EmbeddingModel {
    texts: TextEmbedder,
    tokenizer: Tokenizer,
    purpose: PoolingTask,
    pairs: PairFormat,
    /// Prompts by name, in the order of the checkpoint's file.
    prompts: Vec<(String, String)>,
    default_prompt: Option<String>,
}

/// The way in which a query and a document become one input.
enum PairFormat {
    /// The tokenizer's template for pairs. `types`: types of tokens that the model has.
    Tokenizer {
        types: usize,
    },
    Chat {
        template: Box<ChatTemplate>,
        opens_answer: bool,
    },
}

impl PairFormat {
    fn from_metadata(
        model: &Model,
        purpose: PoolingTask,
        about: &Value,
    ) -> Result<PairFormat, EmbeddingError> {
        if purpose == PoolingTask::Scores
            && let Some(section) = model.chat()
        {
            let template =
                ChatTemplate::from_section(section, &LocalMachine).map_err(EmbeddingError::Template)?;
            let opens_answer = about["opens_answer"] == true;
            return Ok(PairFormat::Chat { template: Box::new(template), opens_answer });
        }
        let types = about["token_types"].as_u64().and_then(|types| usize::try_from(types).ok());
        Ok(PairFormat::Tokenizer { types: types.unwrap_or(1).max(1) })
    }
}

/// Options of texts that are to be embedded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmbedOptions<'a> {
    /// Name of the prompt that is put before each; `None`: the model's default, if it has one.
    pub prompt: Option<&'a str>,
    /// This text in place of a prompt of the model.
    pub prompt_text: Option<&'a str>,
    /// The number of first elements of a vector that are kept; it then has length 1 again (models trained for
    /// that say so: Matryoshka).
    pub dim: Option<usize>,
}

/// Vectors of equal width.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingVectors {
    pub dim: usize,
    pub values: Vec<f32>,
    /// Tokens that were read.
    pub tokens: usize,
}

impl EmbeddingVectors {
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.dim)
    }
}

impl EmbeddingModel {
    pub fn new(model: &Model, tokenizer: Tokenizer) -> Result<EmbeddingModel, EmbeddingError> {
        let texts = model.text_embedder()?;
        let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
        let about = &metadata["texts"];
        let purpose = if about["purpose"] == "scores" { PoolingTask::Scores } else { PoolingTask::Embedding };
        let pairs = PairFormat::from_metadata(model, purpose, about)?;
        let named = about["prompts"].as_object().into_iter().flatten();
        let prompts = named.filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_string())));
        let default_prompt = about["default_prompt"].as_str().map(str::to_string);
        Ok(EmbeddingModel { texts, tokenizer, purpose, pairs, prompts: prompts.collect(), default_prompt })
    }

    pub fn model(&self) -> &Model {
        self.texts.model()
    }

    pub fn purpose(&self) -> PoolingTask {
        self.purpose
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The vectors of `texts`, in their order.
    pub fn embed(
        &mut self,
        texts: &[&str],
        how: &EmbedOptions<'_>,
    ) -> Result<EmbeddingVectors, EmbeddingError> {
        let dim = self.dim(how)?;
        let prompt = self.prompt(how)?.to_string();
        let mut ids = Vec::with_capacity(texts.len());
        for (index, text) in texts.iter().enumerate() {
            if text.trim().is_empty() {
                return Err(EmbeddingError::Empty { index });
            }
            let with_prompt = format!("{prompt}{text}");
            let tokens = self.tokenizer.encode_prompt(&with_prompt);
            ids.push(tokens.map_err(|source| EmbeddingError::Tokenizer { index, source })?);
        }
        self.vectors(&ids, dim)
    }

    /// Numbers of a vector that are asked for.
    fn dim(&self, how: &EmbedOptions<'_>) -> Result<usize, EmbeddingError> {
        if self.purpose != PoolingTask::Embedding {
            return Err(EmbeddingError::NoEmbeddings);
        }
        let width = self.texts.model().text_width();
        match how.dim.unwrap_or(width) {
            dim if (1..=width).contains(&dim) => Ok(dim),
            dim => Err(EmbeddingError::Dim { dim, width }),
        }
    }

    fn vectors(&mut self, ids: &[Vec<TokenId>], dim: usize) -> Result<EmbeddingVectors, EmbeddingError> {
        let (width, tokens) = (self.texts.model().text_width(), ids.iter().map(Vec::len).sum());
        let vectors = self.run(ids)?;
        let values = match dim == width {
            true => vectors.to_vec(),
            false => vectors.chunks_exact(width).flat_map(|vector| of_length_one(&vector[..dim])).collect(),
        };
        Ok(EmbeddingVectors { dim, values, tokens })
    }

    /// The vectors of texts that are token ids already, with the special tokens that the model needs.
    pub fn embed_ids(
        &mut self,
        texts: &[Vec<TokenId>],
        how: &EmbedOptions<'_>,
    ) -> Result<EmbeddingVectors, EmbeddingError> {
        let dim = self.dim(how)?;
        // Numbers beyond the vocabulary are tokens of other types, which a text alone has none of.
        let types = if let PairFormat::Tokenizer { types } = self.pairs { types } else { 1 };
        let vocab = self.texts.model().vocab() / types;
        for (index, ids) in texts.iter().enumerate() {
            if let Some(&found) = ids.iter().find(|&&id| id as usize >= vocab) {
                return Err(EmbeddingError::TokenId { index, found, vocab });
            }
        }
        self.vectors(texts, dim)
    }

    /// The score of each of `documents` as an answer to `query`: a number without bounds, larger is better.
    pub fn rerank(&mut self, query: &str, documents: &[&str]) -> Result<Vec<f32>, EmbeddingError> {
        self.rerank_as(None, query, documents)
    }

    /// The same by what `instruct` says of what a document is to be; only where
    /// [`EmbeddingModel::takes_instructions`].
    pub fn rerank_as(
        &mut self,
        instruct: Option<&str>,
        query: &str,
        documents: &[&str],
    ) -> Result<Vec<f32>, EmbeddingError> {
        let found = self.texts.model().text_width();
        let what = match self.purpose {
            PoolingTask::Embedding => "this is a model of embeddings",
            PoolingTask::Scores => "this is a classifier",
        };
        if self.purpose != PoolingTask::Scores || found != 1 {
            return Err(EmbeddingError::NoReranker { what, found });
        }
        let mut ids = Vec::with_capacity(documents.len());
        for (index, document) in documents.iter().enumerate() {
            if document.trim().is_empty() || query.trim().is_empty() {
                return Err(EmbeddingError::Empty { index });
            }
            ids.push(self.pair(instruct, query, document, index)?);
        }
        Ok(self.run(&ids)?.to_vec())
    }

    /// True if [`EmbeddingModel::rerank_as`] can be given an instruction.
    pub fn takes_instructions(&self) -> bool {
        matches!(self.pairs, PairFormat::Chat { .. })
    }

    /// The input for document number `index`.
    fn pair(
        &self,
        instruct: Option<&str>,
        query: &str,
        document: &str,
        index: usize,
    ) -> Result<Vec<TokenId>, EmbeddingError> {
        let failed = |source| EmbeddingError::Tokenizer { index, source };
        let types = match &self.pairs {
            PairFormat::Chat { template, opens_answer } => {
                let instruct = match instruct {
                    Some(instruct) => Some(instruct),
                    None => Some(self.prompt(&EmbedOptions::default())?).filter(|prompt| !prompt.is_empty()),
                };
                let text = template
                    .render_pair(instruct, query, document, *opens_answer)
                    .map_err(|source| EmbeddingError::Chat { index, source })?;
                return self.tokenizer.encode(&text).map_err(failed);
            }
            PairFormat::Tokenizer { .. } if instruct.is_some() => return Err(EmbeddingError::NoInstruction),
            PairFormat::Tokenizer { types } => *types,
        };
        let (mut ids, kinds) = self.tokenizer.encode_pair(query, document).map_err(failed)?;
        if types > 1 {
            let vocab = self.texts.model().vocab() / types;
            for (id, &found) in ids.iter_mut().zip(&kinds) {
                if found as usize >= types {
                    return Err(EmbeddingError::TokenType { index, found, types });
                }
                // Below the vocabulary times the types, which is an `i32`.
                *id += (found as usize * vocab) as TokenId;
            }
        }
        Ok(ids)
    }

    fn run(&mut self, ids: &[Vec<TokenId>]) -> Result<&[f32], EmbeddingError> {
        let ids: Vec<&[TokenId]> = ids.iter().map(Vec::as_slice).collect();
        Ok(self.texts.embed(&ids)?)
    }

    fn prompt<'a>(&'a self, how: &EmbedOptions<'a>) -> Result<&'a str, EmbeddingError> {
        if let Some(text) = how.prompt_text {
            return Ok(text);
        }
        let Some(name) = how.prompt.or(self.default_prompt.as_deref()) else { return Ok("") };
        let found = self.prompts.iter().find(|(known, _)| known == name);
        found.map(|(_, text)| text.as_str()).ok_or_else(|| {
            let names: Vec<&str> = self.prompts.iter().map(|(name, _)| name.as_str()).collect();
            let known = if names.is_empty() { "none".to_string() } else { names.join(", ") };
            EmbeddingError::UnknownPrompt { name: name.to_string(), known }
        })
    }
}

fn of_length_one(vector: &[f32]) -> impl Iterator<Item = f32> {
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-12);
    vector.iter().map(move |x| x / length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_vectors_have_length_one() {
        let short: Vec<f32> = of_length_one(&[3.0, 4.0]).collect();
        assert_eq!(short, [0.6, 0.8]);
        assert_eq!(of_length_one(&[0.0, 0.0]).collect::<Vec<_>>(), [0.0, 0.0]);
    }
}
