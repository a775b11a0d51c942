//! Texts to vectors: embeddings, and scores of pairs of texts for rerankers.

use mlcc_runtime::{Error, Model, Texts};
use serde_json::Value;

use crate::tokenizer::{TokenId, Tokenizer, TokenizerError};

#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error(transparent)]
    Runtime(#[from] Error),
    #[error("text {index}: {source}")]
    Tokenizer { index: usize, source: TokenizerError },
    #[error("text {index} is empty: there is nothing to make a vector of")]
    Empty { index: usize },
    #[error("the model has no prompt `{name}`, it has {known}")]
    UnknownPrompt { name: String, known: String },
    #[error("{what}: the model gives {found} scores for a text, a reranker gives one")]
    NoReranker { what: &'static str, found: usize },
    #[error("the model gives scores of pairs of texts (see `mlcc rerank`), and no embeddings")]
    NoEmbeddings,
    #[error("{dim} numbers of a vector of {width}: choose 1 to {width}")]
    Dim { dim: usize, width: usize },
}

/// What a model of texts is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Embedding,
    Scores,
}

/// A loaded model of texts with its tokenizer.
pub struct TextModel {
    texts: Texts,
    tokenizer: Tokenizer,
    purpose: Purpose,
    /// By name, in the order of the checkpoint's file.
    prompts: Vec<(String, String)>,
    default_prompt: Option<String>,
}

/// What is asked for with texts that are to be embedded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Embed<'a> {
    /// Name of the prompt that is put before each; `None`: the model's default, if it has one.
    pub prompt: Option<&'a str>,
    /// This text in place of a prompt of the model.
    pub prompt_text: Option<&'a str>,
    /// So many first numbers of a vector, which then has length 1 again (models trained for that say so: Matryoshka).
    pub dim: Option<usize>,
}

/// Vectors of equal width.
#[derive(Clone, Debug, PartialEq)]
pub struct Vectors {
    pub dim: usize,
    pub values: Vec<f32>,
    /// Tokens that were read.
    pub tokens: usize,
}

impl Vectors {
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.dim)
    }
}

impl TextModel {
    pub fn new(model: &Model, tokenizer: Tokenizer) -> Result<TextModel, TextError> {
        let texts = model.texts()?;
        let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
        let about = &metadata["texts"];
        let purpose = if about["purpose"] == "scores" { Purpose::Scores } else { Purpose::Embedding };
        let named = about["prompts"].as_object().into_iter().flatten();
        let prompts = named.filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_string())));
        let default_prompt = about["default_prompt"].as_str().map(str::to_string);
        Ok(TextModel { texts, tokenizer, purpose, prompts: prompts.collect(), default_prompt })
    }

    pub fn model(&self) -> &Model {
        self.texts.model()
    }

    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The vectors of `texts`, in their order.
    pub fn embed(&mut self, texts: &[&str], how: &Embed<'_>) -> Result<Vectors, TextError> {
        let dim = self.dim(how)?;
        let prompt = self.prompt(how)?.to_string();
        let mut ids = Vec::with_capacity(texts.len());
        for (index, text) in texts.iter().enumerate() {
            if text.trim().is_empty() {
                return Err(TextError::Empty { index });
            }
            let with_prompt = format!("{prompt}{text}");
            let tokens = self.tokenizer.encode_prompt(&with_prompt);
            ids.push(tokens.map_err(|source| TextError::Tokenizer { index, source })?);
        }
        self.vectors(&ids, dim)
    }

    /// Numbers of a vector that are asked for.
    fn dim(&self, how: &Embed<'_>) -> Result<usize, TextError> {
        if self.purpose != Purpose::Embedding {
            return Err(TextError::NoEmbeddings);
        }
        let width = self.texts.model().text_width();
        match how.dim.unwrap_or(width) {
            dim if (1..=width).contains(&dim) => Ok(dim),
            dim => Err(TextError::Dim { dim, width }),
        }
    }

    fn vectors(&mut self, ids: &[Vec<TokenId>], dim: usize) -> Result<Vectors, TextError> {
        let (width, tokens) = (self.texts.model().text_width(), ids.iter().map(Vec::len).sum());
        let vectors = self.run(ids)?;
        let values = match dim == width {
            true => vectors.to_vec(),
            false => vectors.chunks_exact(width).flat_map(|vector| of_length_one(&vector[..dim])).collect(),
        };
        Ok(Vectors { dim, values, tokens })
    }

    /// The vectors of texts that are token ids already, with the special tokens that the model wants.
    pub fn embed_ids(&mut self, texts: &[Vec<TokenId>], how: &Embed<'_>) -> Result<Vectors, TextError> {
        let dim = self.dim(how)?;
        self.vectors(texts, dim)
    }

    /// How well each of `documents` answers `query`: a number that has no bounds, larger is better.
    pub fn rerank(&mut self, query: &str, documents: &[&str]) -> Result<Vec<f32>, TextError> {
        let found = self.texts.model().text_width();
        let what = match self.purpose {
            Purpose::Embedding => "this is a model of embeddings",
            Purpose::Scores => "this is a classifier",
        };
        if self.purpose != Purpose::Scores || found != 1 {
            return Err(TextError::NoReranker { what, found });
        }
        let mut ids = Vec::with_capacity(documents.len());
        for (index, document) in documents.iter().enumerate() {
            if document.trim().is_empty() || query.trim().is_empty() {
                return Err(TextError::Empty { index });
            }
            let tokens = self.tokenizer.encode_pair(query, document);
            ids.push(tokens.map_err(|source| TextError::Tokenizer { index, source })?);
        }
        Ok(self.run(&ids)?.to_vec())
    }

    fn run(&mut self, ids: &[Vec<TokenId>]) -> Result<&[f32], TextError> {
        let ids: Vec<&[TokenId]> = ids.iter().map(Vec::as_slice).collect();
        Ok(self.texts.run(&ids)?)
    }

    fn prompt<'a>(&'a self, how: &Embed<'a>) -> Result<&'a str, TextError> {
        if let Some(text) = how.prompt_text {
            return Ok(text);
        }
        let Some(name) = how.prompt.or(self.default_prompt.as_deref()) else { return Ok("") };
        let found = self.prompts.iter().find(|(known, _)| known == name);
        found.map(|(_, text)| text.as_str()).ok_or_else(|| {
            let names: Vec<&str> = self.prompts.iter().map(|(name, _)| name.as_str()).collect();
            let known = if names.is_empty() { "none".to_string() } else { names.join(", ") };
            TextError::UnknownPrompt { name: name.to_string(), known }
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
