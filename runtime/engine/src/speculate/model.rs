//! Drafts by a smaller model of the same vocabulary.

use crate::generate::RewindModel;
use crate::serving::{Feed, Step, Want};
use crate::speculate::Drafter;
use crate::tokenizer::TokenId;

/// The likeliest tokens by a model. An error of it costs drafts and nothing else.
pub struct DraftModel<M: Step> {
    model: M,
    texts: Vec<Text<M::Sequence>>,
}

/// What the model has been fed of a text.
struct Text<S> {
    sequence: S,
    fed: Vec<TokenId>,
}

impl<M: Step> DraftModel<M> {
    pub fn new(model: M) -> Self {
        DraftModel { model, texts: Vec::new() }
    }

    /// Feeds what is new of a text, up to a piece of a prompt; whether that is all.
    fn catch_up(&mut self, index: usize, tokens: &[TokenId]) -> Option<bool> {
        let text = &mut self.texts[index];
        // The logits are those behind the last token, so that is fed in any case.
        let same = text.fed.iter().zip(tokens).take_while(|(a, b)| a == b).count().min(tokens.len() - 1);
        if same < text.fed.len() {
            let keep = if text.sequence.can_truncate_to(same) { same } else { 0 };
            text.sequence.truncate(keep).ok()?;
            text.fed.truncate(keep);
        }
        let from = text.fed.len();
        let to = tokens.len().min(from + self.model.limits().chunk);
        self.feed(index, &tokens[from..to])?;
        Some(to == tokens.len())
    }

    fn feed(&mut self, index: usize, tokens: &[TokenId]) -> Option<()> {
        let Text { sequence, fed } = &mut self.texts[index];
        self.model.step(&mut [Feed { sequence, tokens, want: Want::Last }]).ok()?;
        fed.extend_from_slice(tokens);
        Some(())
    }

    fn guess(&mut self, index: usize, tokens: &mut Vec<TokenId>, most: usize) -> Option<()> {
        if !self.catch_up(index, tokens)? {
            return Some(());
        }
        for left in (0..most).rev() {
            let logits = self.model.logits().iter().enumerate();
            let (likeliest, _) = logits.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
            let token = TokenId::try_from(likeliest).ok()?;
            tokens.push(token);
            if left > 0 {
                self.feed(index, &[token])?;
            }
        }
        Some(())
    }
}

impl<M: Step> Drafter for DraftModel<M> {
    fn draft(&mut self, text: usize, tokens: &mut Vec<TokenId>, most: usize) {
        let room = self.model.limits().context.is_none_or(|context| tokens.len() + most <= context);
        if !room || tokens.is_empty() || most == 0 {
            return;
        }
        while self.texts.len() <= text {
            let Ok(sequence) = self.model.sequence() else { return };
            self.texts.push(Text { sequence, fed: Vec::new() });
        }
        if self.guess(text, tokens, most).is_none() {
            // The sequence is unknown now.
            self.texts.truncate(text);
        }
    }
}
