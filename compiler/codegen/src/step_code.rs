//! The instructions that a back end gives for steps.

use crate::error::EmitError;

type EmitResult<T> = std::result::Result<T, EmitError>;

/// Operations on 64-bit integers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IntOp {
    Add,
    Sub,
    Mul,
    UnsignedDiv,
    SignedDiv,
    SignedRem,
    SignedMin,
    SignedMax,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IntCompare {
    SignedLess,
    SignedGreater,
    UnsignedLess,
    UnsignedGreater,
    UnsignedAtLeast,
}

/// The result of a worker's claim on a launch in pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ClaimedWork {
    /// Nothing is left.
    None,
    /// A piece; there may be more.
    Chunk,
    /// The worker's whole share.
    Share,
}

/// The instructions of a back end, added at the end of the function of a step.
pub(crate) trait StepCode {
    /// A 64-bit integer, an address, or a condition.
    type Value: Copy;
    type Block: Copy;
    /// The first block of a loop, which is entered with a number.
    type Head;

    /// The context.
    fn context(&self) -> Self::Value;
    /// Worker and workers, in 64 bits.
    fn share(&self) -> [Self::Value; 2];

    fn int(&mut self, value: i64) -> Self::Value;
    fn op(&mut self, op: IntOp, a: Self::Value, b: Self::Value) -> EmitResult<Self::Value>;
    /// A condition.
    fn compare(&mut self, compare: IntCompare, a: Self::Value, b: Self::Value) -> EmitResult<Self::Value>;
    /// 1 if the condition holds, else 0.
    fn number(&mut self, condition: Self::Value) -> EmitResult<Self::Value>;

    /// The address `bytes` bytes later, in the same object.
    fn offset(&mut self, address: Self::Value, bytes: u64) -> EmitResult<Self::Value>;
    fn advance(&mut self, address: Self::Value, bytes: Self::Value) -> EmitResult<Self::Value>;
    /// The integer at an offset in bytes.
    fn load_int(&mut self, address: Self::Value, offset: usize) -> EmitResult<Self::Value>;
    fn load_address(&mut self, address: Self::Value, offset: usize) -> EmitResult<Self::Value>;
    /// Number `index` of a table of 32-bit integers, taken as one without a sign.
    fn load_entry(&mut self, table: Self::Value, index: Self::Value) -> EmitResult<Self::Value>;

    fn block(&mut self, name: &'static str) -> Self::Block;
    /// Goes on in a block.
    fn enter(&mut self, block: Self::Block);
    fn jump(&mut self, to: Self::Block) -> EmitResult<()>;
    fn branch(&mut self, condition: Self::Value, then: Self::Block, otherwise: Self::Block)
    -> EmitResult<()>;
    /// Begins a loop and goes on in its first block; gives the numbers that it is entered with, `first` at
    /// first.
    fn begin_loop(
        &mut self,
        name: &'static str,
        first: [Self::Value; 2],
    ) -> EmitResult<(Self::Head, [Self::Value; 2])>;
    /// Runs the loop again with other numbers.
    fn repeat(&mut self, head: Self::Head, next: [Self::Value; 2]) -> EmitResult<()>;
    /// The same if the condition holds; else goes to `done`.
    fn repeat_if(
        &mut self,
        condition: Self::Value,
        head: Self::Head,
        next: [Self::Value; 2],
        done: Self::Block,
    ) -> EmitResult<()>;
    fn leave(&mut self, status: i32) -> EmitResult<()>;

    fn call(&mut self, kernel: &str, args: &[Self::Value]) -> EmitResult<()>;
    /// A barrier, if there are several workers.
    fn wait(&mut self) -> EmitResult<()>;
    /// Calls [`mlcc_abi::Ctx::all_gather`] for the item of that number: where the part and the rows of all
    /// ranks are, how many rows, bytes of a row.
    fn all_gather(&mut self, item: u32, args: [Self::Value; 4]) -> EmitResult<()>;
    /// The item of that number is over, for a caller that traces.
    fn report_done(&mut self, item: u32) -> EmitResult<()>;
    /// An integer of 32 bits for [`StepCode::claim_chunk`].
    fn narrow(&mut self, value: Self::Value) -> EmitResult<Self::Value>;
    /// Takes a piece of a launch that is worth `pieces` of the smallest ones; gives one of [`ClaimedWork`].
    fn claim_chunk(&mut self, pieces: Self::Value) -> EmitResult<Self::Value>;
    /// A condition.
    fn is_claimed(&mut self, taken: Self::Value, what: ClaimedWork) -> EmitResult<Self::Value>;
    /// The share that was taken last, as worker and workers.
    fn claimed_share(&mut self) -> EmitResult<[Self::Value; 2]>;
}
