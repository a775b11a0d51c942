//! Instructions over numbered registers, as they are executed.

pub use super::types::*;

/// A second result and a predicate to combine with, of `setp`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetpOp {
    pub cmp: PtxComparison,
    pub d: PredRegister,
    /// The result of the negated comparison.
    pub q: Option<PredRegister>,
    pub with: Option<(LogicOp, PredRegister, bool)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MmaElement {
    F16,
    BF16,
    S8,
    U8,
}

/// `mma.sync.aligned.m16n8k*.row.col`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MmaOp {
    pub k: u32,
    pub a_ty: MmaElement,
    pub b_ty: MmaElement,
    /// The sums are f16 (two in a register) in place of f32 or s32.
    pub half_sums: bool,
    pub satfinite: bool,
    pub d: Vec<WordRegister>,
    pub a: Vec<WordRegister>,
    pub b: Vec<WordRegister>,
    pub c: Vec<WordRegister>,
}

#[derive(Clone, PartialEq, Debug)]
pub enum PtxOp {
    MovW {
        d: WordRegister,
        a: WordRegister,
    },
    MovD {
        d: DoubleRegister,
        a: DoubleRegister,
    },
    Special {
        d: WordRegister,
        what: SpecialRegister,
    },
    /// `mov.b32 {lo, hi}, a`.
    SplitW {
        lo: WordRegister,
        hi: WordRegister,
        a: WordRegister,
    },
    SplitD {
        lo: WordRegister,
        hi: WordRegister,
        a: DoubleRegister,
    },
    JoinW {
        d: WordRegister,
        lo: WordRegister,
        hi: WordRegister,
    },
    JoinD {
        d: DoubleRegister,
        lo: WordRegister,
        hi: WordRegister,
    },
    IntW {
        f: IntFn,
        ty: PtxType,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
    },
    IntD {
        f: IntFn,
        signed: bool,
        d: DoubleRegister,
        a: DoubleRegister,
        b: DoubleRegister,
    },
    OneW {
        f: IntOne,
        ty: PtxType,
        d: WordRegister,
        a: WordRegister,
    },
    OneD {
        f: IntOne,
        d: DoubleRegister,
        a: DoubleRegister,
    },
    /// Counts of 64 bits fit into 32.
    CountD {
        f: IntOne,
        d: WordRegister,
        a: DoubleRegister,
    },
    /// 16 x 16 bits.
    WideW {
        signed: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: Option<WordRegister>,
    },
    /// 32 x 32 bits.
    WideD {
        signed: bool,
        d: DoubleRegister,
        a: WordRegister,
        b: WordRegister,
        c: Option<DoubleRegister>,
    },
    MadW {
        high: bool,
        ty: PtxType,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
    },
    MadD {
        high: bool,
        signed: bool,
        d: DoubleRegister,
        a: DoubleRegister,
        b: DoubleRegister,
        c: DoubleRegister,
    },
    ShiftW {
        left: bool,
        ty: PtxType,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
    },
    ShiftD {
        left: bool,
        signed: bool,
        d: DoubleRegister,
        a: DoubleRegister,
        b: WordRegister,
    },
    /// `shf`: 32 of the 64 bits of `b:a`.
    Funnel {
        left: bool,
        wrap: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
    },
    BfeW {
        signed: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
    },
    BfeD {
        signed: bool,
        d: DoubleRegister,
        a: DoubleRegister,
        b: WordRegister,
        c: WordRegister,
    },
    BfiW {
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
        e: WordRegister,
    },
    BfiD {
        d: DoubleRegister,
        a: DoubleRegister,
        b: DoubleRegister,
        c: WordRegister,
        e: WordRegister,
    },
    Lop3 {
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
        table: u8,
    },
    Prmt {
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
    },
    Dp4a {
        signed_a: bool,
        signed_b: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
    },
    Float {
        f: FloatFn,
        ftz: bool,
        sat: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
    },
    FloatOne {
        f: FloatOne,
        ftz: bool,
        d: WordRegister,
        a: WordRegister,
    },
    Fma {
        ftz: bool,
        sat: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
    },
    HalfFn {
        of: HalfFormat,
        f: FloatFn,
        ftz: bool,
        sat: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
    },
    HalfOne {
        of: HalfFormat,
        f: FloatOne,
        ftz: bool,
        d: WordRegister,
        a: WordRegister,
    },
    HalfFma {
        of: HalfFormat,
        ftz: bool,
        sat: bool,
        relu: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
    },
    SetpW {
        ty: PtxType,
        s: SetpOp,
        a: WordRegister,
        b: WordRegister,
    },
    SetpD {
        signed: bool,
        s: SetpOp,
        a: DoubleRegister,
        b: DoubleRegister,
    },
    SetpF {
        ftz: bool,
        s: SetpOp,
        a: WordRegister,
        b: WordRegister,
    },
    SetpH {
        bf16: bool,
        ftz: bool,
        s: SetpOp,
        a: WordRegister,
        b: WordRegister,
    },
    SelW {
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
        p: PredRegister,
    },
    SelD {
        d: DoubleRegister,
        a: DoubleRegister,
        b: DoubleRegister,
        p: PredRegister,
    },
    Logic {
        f: LogicOp,
        d: PredRegister,
        a: PredRegister,
        b: PredRegister,
    },
    NotP {
        d: PredRegister,
        a: PredRegister,
    },
    MovP {
        d: PredRegister,
        a: PredRegister,
    },
    ConstP {
        d: PredRegister,
        value: bool,
    },
    Cvt {
        to: PtxType,
        from: PtxType,
        round: Option<RoundingMode>,
        integral: bool,
        ftz: bool,
        sat: bool,
        relu: bool,
        d: AnyRegister,
        a: AnyRegister,
    },
    /// Two f32 into halves of a register: `a` becomes the upper one.
    CvtPack {
        bf16: bool,
        round: RoundingMode,
        relu: bool,
        d: WordRegister,
        a: WordRegister,
        b: WordRegister,
    },
    LdParam {
        ty: PtxType,
        d: Vec<AnyRegister>,
        offset: u32,
    },
    Ld {
        space: StateSpace,
        nc: bool,
        order: MemoryOrdering,
        ty: PtxType,
        d: Vec<AnyRegister>,
        at: PtxAddress,
    },
    St {
        space: StateSpace,
        order: MemoryOrdering,
        ty: PtxType,
        a: Vec<AnyRegister>,
        at: PtxAddress,
    },
    Atom {
        space: StateSpace,
        f: AtomFn,
        ty: PtxType,
        d: Option<AnyRegister>,
        at: PtxAddress,
        b: AnyRegister,
        c: Option<AnyRegister>,
    },
    CpAsync {
        bytes: u32,
        to: PtxAddress,
        from: PtxAddress,
        from_bytes: Option<WordRegister>,
    },
    CpCommit,
    /// Waits until at most this many groups are under way; `None`: also for copies outside of groups.
    CpWait {
        groups: Option<u32>,
    },
    Shfl {
        mode: ShflMode,
        d: WordRegister,
        p: Option<PredRegister>,
        a: WordRegister,
        b: WordRegister,
        c: WordRegister,
        mask: WordRegister,
    },
    Vote {
        mode: VoteMode,
        d: AnyRegister,
        a: PredRegister,
        negated: bool,
        mask: WordRegister,
    },
    Activemask {
        d: WordRegister,
    },
    Redux {
        f: IntFn,
        ty: PtxType,
        d: WordRegister,
        a: WordRegister,
        mask: WordRegister,
    },
    Ldmatrix {
        transposed: bool,
        d: Vec<WordRegister>,
        at: PtxAddress,
    },
    Mma(Box<MmaOp>),
    /// Barrier of the block; `threads` where not all take part.
    Bar {
        id: WordRegister,
        threads: Option<WordRegister>,
    },
    WarpSync {
        mask: WordRegister,
    },
    Fence {
        block: bool,
    },
    Bra {
        to: u32,
    },
    Ret,
    Trap,
    /// Prefetches.
    Nothing,
}

/// One instruction.
#[derive(Clone, PartialEq, Debug)]
pub struct PtxInst {
    pub op: PtxOp,
    /// Executed where the predicate holds (does not hold: `true`).
    pub guard: Option<(PredRegister, bool)>,
    pub line: u32,
}
