//! Matrices in the registers of a warp, and copies to shared memory that are under way while threads compute.

use crate::{BufferView, IndexTuple, Recorder, Val, WARP};
use mlcc_ir::fragment::{BitStride, Fragment};
use mlcc_ir::instr::{InstrId, InstrSemantics};
use mlcc_ir::kernel::{Expr, Stmt};

/// Row and column of element `element` of the fragment, in the lane `lane`.
pub fn fragment_position<'k>(of: &Fragment, lane: Val<'k>, element: u32) -> [Val<'k>; 2] {
    let (row, column) = of.coordinates(0, element);
    [along(of, lane, |step| step.0) + i64::from(row), along(of, lane, |step| step.1) + i64::from(column)]
}

/// The sum of the steps of a lane's bits along one axis: neighbouring bits that double are one number.
fn along<'k>(of: &Fragment, lane: Val<'k>, axis: impl Fn(&BitStride) -> u32) -> Val<'k> {
    let steps: Vec<i64> = of.lane.iter().map(|step| axis(step).into()).collect();
    let mut sum = lane.recorder().int(0);
    let mut bit = 0;
    while bit < steps.len() {
        let mut end = bit + 1;
        while steps[bit] > 0 && end < steps.len() && steps[end] == steps[bit] << (end - bit) {
            end += 1;
        }
        let number = lane / (1 << bit);
        let number = if 1 << end == WARP { number } else { number % (1 << (end - bit)) };
        if steps[bit] > 0 {
            sum = sum + number * steps[bit];
        }
        bit = end;
    }
    sum
}

impl<'k> Val<'k> {
    /// `self + a * b` of fragments; the types of `a` and `b` choose the instruction.
    #[track_caller]
    pub fn mma(self, a: Val<'k>, b: Val<'k>) -> Val<'k> {
        let types = [self.ty(), a.ty(), b.ty()];
        let fits =
            |id: &InstrId| matches!(id.def().meaning, InstrSemantics::Mma(_)) && id.def().args == types;
        let Some(instr) = InstrId::all().find(fits) else { panic!("no product of fragments {types:?}") };
        self.instr(instr, &[a, b])
    }
}

impl<'k, const N: usize> BufferView<'k, N> {
    /// `matrices` (2 or 4) times 8 rows of 16 bytes of shared memory, in the registers of a warp; lane
    /// `8 i + r` says where row `r` of matrix `i` begins. `transposed`: with rows and columns of units of 16
    /// bits exchanged.
    #[track_caller]
    pub fn load_matrices(self, at: impl IndexTuple<'k, N>, matrices: u32, transposed: bool) -> Val<'k> {
        let wanted = |id: &InstrId| match id.def().meaning {
            InstrSemantics::LoadMatrix { matrices: count, transposed: exchanged } => {
                (count, exchanged) == (matrices, transposed) && id.def().args[0].dtype == self.dtype()
            }
            _ => false,
        };
        let Some(instr) = InstrId::all().find(wanted) else {
            panic!("no instruction loads {matrices} matrices of {}", self.dtype());
        };
        self.at(at).instr(instr, &[])
    }

    /// Begins to copy `bytes` bytes to this place, in shared memory, from `source`, in global memory;
    /// [`Recorder::wait_copies`] ends it.
    #[track_caller]
    pub fn start_copy<const M: usize>(
        self,
        at: impl IndexTuple<'k, N>,
        bytes: u32,
        source: BufferView<'k, M>,
        from: impl IndexTuple<'k, M>,
    ) {
        let wanted = |id: &InstrId| match id.def().meaning {
            InstrSemantics::Copy { bytes: count } => count == bytes && id.def().args[0].dtype == self.dtype(),
            _ => false,
        };
        let Some(instr) = InstrId::all().find(wanted) else {
            panic!("no instruction copies {bytes} bytes of {}", self.dtype());
        };
        let (to, from) = (self.at(at), source.at(from));
        to.recorder().builder(|kb| {
            let place = |kb: &mlcc_ir::builder::KernelBuilder, id| match *kb.expr(id) {
                Expr::Load { buf, index, .. } => (buf, index),
                _ => unreachable!("an element of a view is a load"),
            };
            let (to, from) = (place(kb, to.id()), place(kb, from.id()));
            kb.async_copy(instr, to, from);
        });
    }
}

impl Recorder {
    /// The copies that a thread has started since the last time become a group.
    pub fn commit_copies(&self) {
        self.builder(|kb| kb.push(Stmt::Commit));
    }

    /// Waits until at most the newest `pending` groups of copies of this thread are under way.
    pub fn wait_copies(&self, pending: u32) {
        self.builder(|kb| kb.push(Stmt::Wait { pending }));
    }
}
