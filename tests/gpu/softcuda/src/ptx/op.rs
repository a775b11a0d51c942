//! Instructions over numbered registers, as they are executed.

pub use super::types::*;

/// A second result and a predicate to combine with, of `setp`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setp {
    pub cmp: Cmp,
    pub d: P,
    /// The result of the negated comparison.
    pub q: Option<P>,
    pub with: Option<(Logic, P, bool)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fragment {
    F16,
    BF16,
    S8,
    U8,
}

/// `mma.sync.aligned.m16n8k*.row.col`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mma {
    pub k: u32,
    pub a_ty: Fragment,
    pub b_ty: Fragment,
    /// The sums are f16 (two in a register) in place of f32 or s32.
    pub half_sums: bool,
    pub satfinite: bool,
    pub d: Vec<W>,
    pub a: Vec<W>,
    pub b: Vec<W>,
    pub c: Vec<W>,
}

#[derive(Clone, PartialEq, Debug)]
pub enum Op {
    MovW {
        d: W,
        a: W,
    },
    MovD {
        d: D,
        a: D,
    },
    Special {
        d: W,
        what: Special,
    },
    /// `mov.b32 {lo, hi}, a`.
    SplitW {
        lo: W,
        hi: W,
        a: W,
    },
    SplitD {
        lo: W,
        hi: W,
        a: D,
    },
    JoinW {
        d: W,
        lo: W,
        hi: W,
    },
    JoinD {
        d: D,
        lo: W,
        hi: W,
    },
    IntW {
        f: IntFn,
        ty: Ty,
        d: W,
        a: W,
        b: W,
    },
    IntD {
        f: IntFn,
        signed: bool,
        d: D,
        a: D,
        b: D,
    },
    OneW {
        f: IntOne,
        ty: Ty,
        d: W,
        a: W,
    },
    OneD {
        f: IntOne,
        d: D,
        a: D,
    },
    /// Counts of 64 bits fit into 32.
    CountD {
        f: IntOne,
        d: W,
        a: D,
    },
    /// 16 x 16 bits.
    WideW {
        signed: bool,
        d: W,
        a: W,
        b: W,
        c: Option<W>,
    },
    /// 32 x 32 bits.
    WideD {
        signed: bool,
        d: D,
        a: W,
        b: W,
        c: Option<D>,
    },
    MadW {
        high: bool,
        ty: Ty,
        d: W,
        a: W,
        b: W,
        c: W,
    },
    MadD {
        high: bool,
        signed: bool,
        d: D,
        a: D,
        b: D,
        c: D,
    },
    ShiftW {
        left: bool,
        ty: Ty,
        d: W,
        a: W,
        b: W,
    },
    ShiftD {
        left: bool,
        signed: bool,
        d: D,
        a: D,
        b: W,
    },
    /// `shf`: 32 of the 64 bits of `b:a`.
    Funnel {
        left: bool,
        wrap: bool,
        d: W,
        a: W,
        b: W,
        c: W,
    },
    BfeW {
        signed: bool,
        d: W,
        a: W,
        b: W,
        c: W,
    },
    BfeD {
        signed: bool,
        d: D,
        a: D,
        b: W,
        c: W,
    },
    BfiW {
        d: W,
        a: W,
        b: W,
        c: W,
        e: W,
    },
    BfiD {
        d: D,
        a: D,
        b: D,
        c: W,
        e: W,
    },
    Lop3 {
        d: W,
        a: W,
        b: W,
        c: W,
        table: u8,
    },
    Prmt {
        d: W,
        a: W,
        b: W,
        c: W,
    },
    Dp4a {
        signed_a: bool,
        signed_b: bool,
        d: W,
        a: W,
        b: W,
        c: W,
    },
    Float {
        f: FloatFn,
        ftz: bool,
        sat: bool,
        d: W,
        a: W,
        b: W,
    },
    FloatOne {
        f: FloatOne,
        ftz: bool,
        d: W,
        a: W,
    },
    Fma {
        ftz: bool,
        sat: bool,
        d: W,
        a: W,
        b: W,
        c: W,
    },
    HalfFn {
        of: Half,
        f: FloatFn,
        ftz: bool,
        sat: bool,
        d: W,
        a: W,
        b: W,
    },
    HalfOne {
        of: Half,
        f: FloatOne,
        ftz: bool,
        d: W,
        a: W,
    },
    HalfFma {
        of: Half,
        ftz: bool,
        sat: bool,
        relu: bool,
        d: W,
        a: W,
        b: W,
        c: W,
    },
    SetpW {
        ty: Ty,
        s: Setp,
        a: W,
        b: W,
    },
    SetpD {
        signed: bool,
        s: Setp,
        a: D,
        b: D,
    },
    SetpF {
        ftz: bool,
        s: Setp,
        a: W,
        b: W,
    },
    SetpH {
        bf16: bool,
        ftz: bool,
        s: Setp,
        a: W,
        b: W,
    },
    SelW {
        d: W,
        a: W,
        b: W,
        p: P,
    },
    SelD {
        d: D,
        a: D,
        b: D,
        p: P,
    },
    Logic {
        f: Logic,
        d: P,
        a: P,
        b: P,
    },
    NotP {
        d: P,
        a: P,
    },
    MovP {
        d: P,
        a: P,
    },
    ConstP {
        d: P,
        value: bool,
    },
    Cvt {
        to: Ty,
        from: Ty,
        round: Option<Round>,
        integral: bool,
        ftz: bool,
        sat: bool,
        relu: bool,
        d: Any,
        a: Any,
    },
    /// Two f32 into halves of a register: `a` becomes the upper one.
    CvtPack {
        bf16: bool,
        round: Round,
        relu: bool,
        d: W,
        a: W,
        b: W,
    },
    LdParam {
        ty: Ty,
        d: Vec<Any>,
        offset: u32,
    },
    Ld {
        space: Space,
        nc: bool,
        order: Ordering,
        ty: Ty,
        d: Vec<Any>,
        at: Address,
    },
    St {
        space: Space,
        order: Ordering,
        ty: Ty,
        a: Vec<Any>,
        at: Address,
    },
    Atom {
        space: Space,
        f: AtomFn,
        ty: Ty,
        d: Option<Any>,
        at: Address,
        b: Any,
        c: Option<Any>,
    },
    CpAsync {
        bytes: u32,
        to: Address,
        from: Address,
        from_bytes: Option<W>,
    },
    CpCommit,
    /// At most so many groups may be under way afterwards; `None`: and nothing outside of groups.
    CpWait {
        groups: Option<u32>,
    },
    Shfl {
        mode: ShflMode,
        d: W,
        p: Option<P>,
        a: W,
        b: W,
        c: W,
        mask: W,
    },
    Vote {
        mode: VoteMode,
        d: Any,
        a: P,
        negated: bool,
        mask: W,
    },
    Activemask {
        d: W,
    },
    Redux {
        f: IntFn,
        ty: Ty,
        d: W,
        a: W,
        mask: W,
    },
    Ldmatrix {
        transposed: bool,
        d: Vec<W>,
        at: Address,
    },
    Mma(Box<Mma>),
    /// Barrier of the block; `threads` where not all take part.
    Bar {
        id: W,
        threads: Option<W>,
    },
    WarpSync {
        mask: W,
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
pub struct Inst {
    pub op: Op,
    /// Executed where the predicate holds (does not hold: `true`).
    pub guard: Option<(P, bool)>,
    pub line: u32,
}
