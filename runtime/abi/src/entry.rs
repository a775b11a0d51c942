//! Entry points as data: what they are called, how they are called, and the rows of the table that have their
//! functions.
//!
//! Callers find an entry point by its name. A row whose name a runtime does not know is left alone, so a new
//! entry point raises [`crate::ABI_VERSION`] only if it needs a new [`EntryForm`] or a new field of [`Ctx`].

use crate::{Ctx, Str};

/// An entry point is an SPMD step: all `workers` call it with the same `ctx` and their own number. Every
/// worker takes the same path through the barriers, so an error is seen by all of them before the first one.
pub type StepFn = unsafe extern "C" fn(ctx: *mut Ctx, worker: u32, workers: u32) -> i32;

/// One entry point of a variant.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VariantEntry {
    /// [`EntryPoint::name`], or one that this version does not know.
    pub name: Str,
    /// A value of [`EntryForm`].
    pub kind: u32,
    /// Must be zero.
    pub reserved: u32,
    pub function: Option<StepFn>,
    /// The same for calls in which some sequence has an adapter (its state of the kind
    /// [`crate::state_kind::ADAPTER_SLOT`] is not 0). There where [`crate::ModelPlan::adapter_slots`] is more
    /// than 0 and the entry point has an adapted form.
    pub adapted: Option<StepFn>,
}

/// The call of an entry point: which fields of [`Ctx`] it reads, and what it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EntryForm {
    /// `n` tokens of one sequence in, the logits of the last one out; the state advances by `n`.
    LastLogits = 0,
    /// Like [`EntryForm::LastLogits`], with the logits of every token.
    AllLogits = 1,
    /// The whole source text of a sequence in, `past` 0; no logits.
    Source = 2,
    /// The next token of each of `n` sequences in, the logits of each out; their states advance by one token.
    Batch = 3,
    /// Any number of tokens of each of `b` sequences in, the logits of the output rows out; their states
    /// advance by their tokens.
    Ragged = 4,
    /// Gives the state its initial values.
    State = 5,
    /// `n` rows of logits in, a row of results of each out.
    Rows = 6,
}

impl EntryForm {
    pub const ALL: [EntryForm; 7] = [
        EntryForm::LastLogits,
        EntryForm::AllLogits,
        EntryForm::Source,
        EntryForm::Batch,
        EntryForm::Ragged,
        EntryForm::State,
        EntryForm::Rows,
    ];

    pub fn from_value(value: u32) -> Option<EntryForm> {
        EntryForm::ALL.into_iter().find(|kind| *kind as u32 == value)
    }

    /// Feeds tokens to the model.
    pub const fn takes_tokens(self) -> bool {
        !matches!(self, EntryForm::State | EntryForm::Rows)
    }

    /// Reads [`Ctx::sequences`] in place of [`Ctx::state`] and [`Ctx::past`].
    pub const fn takes_sequences(self) -> bool {
        matches!(self, EntryForm::Batch | EntryForm::Ragged)
    }
}

/// The entry points that this version knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EntryPoint {
    /// Tokens of a prompt.
    Prefill,
    /// [`EntryPoint::Prefill`] of one token.
    Decode,
    /// [`EntryPoint::Prefill`] with the logits of every token.
    PrefillLogits,
    /// A token of each of several sequences. May be absent.
    DecodeBatch,
    /// Tokens of several sequences. May be absent.
    Step,
    /// The source text of an encoder-decoder model. There where [`crate::ModelPlan::decoder_start`] is not 0.
    Encode,
    /// Initial values of a fresh state. (KV cache or recurrent state: the name is the one users know.)
    CreateKvCache,
    /// Initial values of a used state.
    ResetKvCache,
    /// `probs = softmax(logits / temperature)`.
    Softmax,
    /// The [`TOP_K`] largest logits of each row, in falling order, equal ones by their number; only devices
    /// have it. At [`crate::arg::PROBS`] are rows of as many logits, and behind these, where the largest
    /// offset of an argument says, as many rows of their numbers, `i32`. NaN counts as less than all numbers;
    /// -0 becomes 0.
    TopK,
}

/// The facts about an entry point that are known before there is code of it.
struct EntryPointInfo {
    point: EntryPoint,
    name: &'static str,
    kind: EntryForm,
    has_adapted: bool,
}

const fn spec(point: EntryPoint, name: &'static str, kind: EntryForm, has_adapted: bool) -> EntryPointInfo {
    EntryPointInfo { point, name, kind, has_adapted }
}

/// A row for each, in the order of [`EntryPoint`].
const SPECS: [EntryPointInfo; 10] = [
    spec(EntryPoint::Prefill, "prefill", EntryForm::LastLogits, true),
    spec(EntryPoint::Decode, "decode", EntryForm::LastLogits, true),
    spec(EntryPoint::PrefillLogits, "prefill_logits", EntryForm::AllLogits, true),
    spec(EntryPoint::DecodeBatch, "decode_batch", EntryForm::Batch, true),
    spec(EntryPoint::Step, "step", EntryForm::Ragged, true),
    spec(EntryPoint::Encode, "encode", EntryForm::Source, false),
    spec(EntryPoint::CreateKvCache, "create_kv_cache", EntryForm::State, false),
    spec(EntryPoint::ResetKvCache, "reset_kv_cache", EntryForm::State, false),
    spec(EntryPoint::Softmax, "softmax_with_temperature", EntryForm::Rows, false),
    spec(EntryPoint::TopK, "top_k", EntryForm::Rows, false),
];

const _: () = {
    let mut at = 0;
    while at < SPECS.len() {
        assert!(SPECS[at].point as usize == at);
        at += 1;
    }
};

/// Logits of a row that [`EntryPoint::TopK`] finds.
pub const TOP_K: usize = 64;

/// The prefix of the names of functions, and of launch lists, that are for calls with adapters.
pub const ADAPTED: &str = "adapted_";

impl EntryPoint {
    /// Number of entry points.
    pub const COUNT: usize = SPECS.len();

    pub fn all() -> impl Iterator<Item = EntryPoint> {
        SPECS.iter().map(|spec| spec.point)
    }

    /// The name in tables, in modules and in messages.
    pub const fn name(self) -> &'static str {
        SPECS[self as usize].name
    }

    pub const fn kind(self) -> EntryForm {
        SPECS[self as usize].kind
    }

    /// An artifact with slots for adapters has a second function for it.
    pub const fn has_adapted(self) -> bool {
        SPECS[self as usize].has_adapted
    }

    pub fn from_name(name: &str) -> Option<EntryPoint> {
        SPECS.iter().find(|spec| spec.name == name).map(|spec| spec.point)
    }

    /// The entry point of a function or launch list, and whether that is the one for calls with adapters.
    pub fn of_function(name: &str) -> Option<(EntryPoint, bool)> {
        let adapted = name.strip_prefix(ADAPTED);
        let point = EntryPoint::from_name(adapted.unwrap_or(name))?;
        (adapted.is_none() || point.has_adapted()).then_some((point, adapted.is_some()))
    }
}
