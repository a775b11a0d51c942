//! Drafts by a smaller model of the same vocabulary.

use crate::generate::RewindModel;
use crate::serving::{ModelRunner, OutputRows, SequenceInput};
use crate::speculate::Drafter;
use crate::tokenizer::TokenId;

/// The likeliest tokens by a model. An error of it costs drafts and nothing else. Drafts are fed to it as they are made; one that cannot take
/// them back is copied before, and goes on from the copy.
pub struct DraftModel<M: ModelRunner> {
    model: M,
    texts: Vec<DraftSequence<M::Sequence>>,
}

/// What the model has been fed of a text.
struct DraftSequence<S> {
    sequence: S,
    fed: Vec<TokenId>,
    /// Where the sequence cannot go back: a copy from before its last draft, with so many tokens.
    mark: Option<(usize, S)>,
}

impl<S: RewindModel> DraftSequence<S> {
    /// Drops all but the first `same` tokens, and more where the sequence can go back no other way.
    fn go_back(&mut self, same: usize) -> Option<()> {
        if same >= self.fed.len() {
            return Some(());
        }
        if self.sequence.can_truncate_to(same) {
            self.sequence.truncate(same).ok()?;
            self.fed.truncate(same);
        } else if let Some((past, copy)) = self.mark.take().filter(|(past, _)| *past <= same) {
            self.sequence = copy;
            self.fed.truncate(past);
        } else {
            self.sequence.truncate(0).ok()?;
            self.fed.clear();
        }
        Some(())
    }
}

impl<M: ModelRunner> DraftModel<M> {
    pub fn new(model: M) -> Self {
        DraftModel { model, texts: Vec::new() }
    }

    /// Feeds what is new of a text, up to a piece of a prompt; whether that is all.
    fn catch_up(&mut self, index: usize, tokens: &[TokenId]) -> Option<bool> {
        let text = &mut self.texts[index];
        // The logits are those behind the last token, so that is fed in any case.
        let same = text.fed.iter().zip(tokens).take_while(|(a, b)| a == b).count().min(tokens.len() - 1);
        text.go_back(same)?;
        let from = text.fed.len();
        let to = tokens.len().min(from + self.model.limits().chunk);
        self.feed(index, &tokens[from..to])?;
        Some(to == tokens.len())
    }

    fn feed(&mut self, index: usize, tokens: &[TokenId]) -> Option<()> {
        let DraftSequence { sequence, fed, .. } = &mut self.texts[index];
        self.model.step(&mut [SequenceInput { sequence, tokens, want: OutputRows::Last }]).ok()?;
        fed.extend_from_slice(tokens);
        Some(())
    }

    /// Makes sure that what is fed from now on can be taken back; false if it cannot.
    fn mark(&mut self, index: usize) -> bool {
        let DraftSequence { sequence, fed, mark } = &mut self.texts[index];
        if sequence.can_truncate() {
            return true;
        }
        // What was there goes first, so that there are no two.
        *mark = None;
        *mark = self.model.fork(sequence).ok().map(|copy| (fed.len(), copy));
        mark.is_some()
    }

    fn guess(&mut self, index: usize, tokens: &mut Vec<TokenId>, most: usize) -> Option<()> {
        if !self.catch_up(index, tokens)? {
            return Some(());
        }
        let most = if most < 2 || self.mark(index) { most } else { 1 };
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

impl<M: ModelRunner> Drafter for DraftModel<M> {
    fn draft(&mut self, text: usize, tokens: &mut Vec<TokenId>, most: usize) {
        let room = self.model.limits().context.is_none_or(|context| tokens.len() + most <= context);
        if !room || tokens.is_empty() || most == 0 {
            return;
        }
        while self.texts.len() <= text {
            let Ok(sequence) = self.model.sequence() else { return };
            self.texts.push(DraftSequence { sequence, fed: Vec::new(), mark: None });
        }
        if self.guess(text, tokens, most).is_none() {
            // The sequence is unknown now.
            self.texts.truncate(text);
        }
    }
}
