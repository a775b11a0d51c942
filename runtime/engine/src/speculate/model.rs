//! Drafts by a smaller model of the same vocabulary.

use mlcc_text::TokenId;

use crate::generate::RewindModel;
use crate::serving::{ModelRunner, OutputRows, SequenceInput};
use crate::speculate::Drafter;

/// Drafts of the most probable tokens by a model. An error of it costs drafts and nothing else. It computes
/// drafts as they are made; a sequence that cannot roll them back is copied before, and goes on from the
/// copy.
pub struct DraftModel<M: ModelRunner> {
    model: M,
    sequences: Vec<DraftSequence<M::Sequence>>,
}

/// The tokens of a text that the model has computed.
struct DraftSequence<S> {
    sequence: S,
    computed_tokens: Vec<TokenId>,
    /// A copy from before its last draft, with its number of tokens, where the sequence cannot roll back.
    checkpoint: Option<(usize, S)>,
}

impl<S: RewindModel> DraftSequence<S> {
    /// Drops all but the first `same` tokens, and more where the sequence can go back no other way.
    fn rollback(&mut self, same: usize) -> Option<()> {
        if same >= self.computed_tokens.len() {
            return Some(());
        }
        if self.sequence.can_truncate_to(same) {
            self.sequence.truncate(same).ok()?;
            self.computed_tokens.truncate(same);
        } else if let Some((past, copy)) = self.checkpoint.take().filter(|(past, _)| *past <= same) {
            self.sequence = copy;
            self.computed_tokens.truncate(past);
        } else {
            self.sequence.truncate(0).ok()?;
            self.computed_tokens.clear();
        }
        Some(())
    }
}

impl<M: ModelRunner> DraftModel<M> {
    pub fn new(model: M) -> Self {
        DraftModel { model, sequences: Vec::new() }
    }

    /// Computes new tokens of a text, up to a piece of a prompt; returns whether that is all.
    fn catch_up(&mut self, index: usize, tokens: &[TokenId]) -> Option<bool> {
        let text = &mut self.sequences[index];
        // The logits are those behind the last token, so that is computed in any case.
        let same =
            text.computed_tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count().min(tokens.len() - 1);
        text.rollback(same)?;
        let from = text.computed_tokens.len();
        let to = tokens.len().min(from + self.model.limits().chunk);
        self.forward_tokens(index, &tokens[from..to])?;
        Some(to == tokens.len())
    }

    fn forward_tokens(&mut self, index: usize, tokens: &[TokenId]) -> Option<()> {
        let DraftSequence { sequence, computed_tokens: fed, .. } = &mut self.sequences[index];
        self.model.step(&mut [SequenceInput { sequence, tokens, outputs: OutputRows::Last }]).ok()?;
        fed.extend_from_slice(tokens);
        Some(())
    }

    /// Makes sure that tokens computed from now on can be rolled back; false if they cannot.
    fn save_checkpoint(&mut self, index: usize) -> bool {
        let DraftSequence { sequence, computed_tokens: fed, checkpoint: mark } = &mut self.sequences[index];
        if sequence.can_truncate() {
            return true;
        }
        // The old copy is dropped first, so that there are no two.
        *mark = None;
        *mark = self.model.fork(sequence).ok().map(|copy| (fed.len(), copy));
        mark.is_some()
    }

    fn draft_tokens(&mut self, index: usize, tokens: &mut Vec<TokenId>, most: usize) -> Option<()> {
        if !self.catch_up(index, tokens)? {
            return Some(());
        }
        let most = if most < 2 || self.save_checkpoint(index) { most } else { 1 };
        for left in (0..most).rev() {
            let logits = self.model.logits().iter().enumerate();
            let (likeliest, _) = logits.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
            let token = TokenId::try_from(likeliest).ok()?;
            tokens.push(token);
            if left > 0 {
                self.forward_tokens(index, &[token])?;
            }
        }
        Some(())
    }
}

impl<M: ModelRunner> Drafter for DraftModel<M> {
    fn append_draft(&mut self, text: usize, tokens: &mut Vec<TokenId>, most: usize) {
        let room = self.model.limits().context.is_none_or(|context| tokens.len() + most <= context);
        if !room || tokens.is_empty() || most == 0 {
            return;
        }
        while self.sequences.len() <= text {
            let Ok(sequence) = self.model.new_sequence() else { return };
            self.sequences.push(DraftSequence { sequence, computed_tokens: Vec::new(), checkpoint: None });
        }
        if self.draft_tokens(text, tokens, most).is_none() {
            // The sequence is unknown now.
            self.sequences.truncate(text);
        }
    }
}
