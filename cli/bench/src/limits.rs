//! The room of a model for a sequence.

/// Limits on the length of a model's sequences; `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceLimits {
    /// Tokens of one sequence.
    pub context: Option<usize>,
    /// Tokens of one prompt.
    pub prompt: Option<usize>,
}

impl SequenceLimits {
    pub fn from_model(model: &mlcc_runtime::Model) -> SequenceLimits {
        SequenceLimits::from_table(model.table())
    }

    pub fn from_table(table: &mlcc_runtime::ArtifactTable) -> SequenceLimits {
        let plan = &table.plan;
        // A window drops what is oldest.
        let endless = plan.context == 0 || table.sliding_window().is_some();
        let context = (!endless).then_some(plan.context as usize);
        let whole = table.whole_prompts.then_some(plan.chunk as usize);
        SequenceLimits { context, prompt: SequenceLimits::min_limit(context, whole) }
    }

    /// The limits that hold for both.
    pub fn intersect(self, other: SequenceLimits) -> SequenceLimits {
        let least = SequenceLimits::min_limit;
        SequenceLimits {
            context: least(self.context, other.context),
            prompt: least(self.prompt, other.prompt),
        }
    }

    fn min_limit(a: Option<usize>, b: Option<usize>) -> Option<usize> {
        a.into_iter().chain(b).min()
    }
}
