//! Random straight-line programs over all types, against the interpreter.
//!
//! A program is a list of numbers; each adds one value to a pool by an operation on earlier ones. Operations
//! without a single right answer are left out: bits of floats (sign of zero, NaN payload), fused products of
//! inexact numbers, division by tiny ones.

use super::elementwise::{defined_operand, samples};
use super::harness::{ClifCase, host_levels, try_check};
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, ExprType, ParamAccess, UnOp};
use mlcc_ir::types::DType;
use proptest::prelude::*;

const ROUNDS: i64 = 2;
const OUTPUTS: usize = 4;

struct RandomProgram<'a> {
    kb: &'a mut KernelBuilder,
    inputs: Vec<BufId>,
    at: ExprId,
    lanes: u32,
    pool: Vec<ExprId>,
}

/// Takes a number below `n` out of the choice.
fn take(choice: &mut u64, n: usize) -> usize {
    let picked = (*choice % n as u64) as usize;
    *choice /= n as u64;
    picked
}

impl RandomProgram<'_> {
    fn pick(&self, choice: &mut u64) -> ExprId {
        // Late values more often, so that programs get deep.
        let n = self.pool.len();
        let from = n.saturating_sub(8);
        match take(choice, 3) {
            0 => self.pool[take(choice, n)],
            _ => self.pool[from + take(choice, n - from)],
        }
    }

    fn pick_of(&mut self, choice: &mut u64, dtype: DType) -> ExprId {
        let picked = self.pick(choice);
        self.kb.cast(picked, dtype)
    }

    fn lane_numbers(&mut self, value: ExprId, below: f64) -> ExprId {
        let as_int = self.kb.cast(value, DType::U8);
        let mask = self.kb.constant(below - 1.0, ExprType::scalar(DType::U8));
        let small = self.kb.binary(BinOp::And, as_int, mask);
        self.kb.cast(small, DType::I64)
    }

    fn step(&mut self, mut choice: u64) {
        let c = &mut choice;
        let value = match take(c, 9) {
            0 => self.unary(c),
            1 | 2 => self.binary(c),
            3 => {
                let to = DType::PLAIN[take(c, DType::PLAIN.len())];
                self.pick_of(c, to)
            }
            4 => {
                let (a, cond) = (self.pick(c), self.pick_of(c, DType::Bool));
                let dtype = self.kb.ty(a).dtype;
                let b = self.pick_of(c, dtype);
                self.kb.select(cond, a, b)
            }
            5 => self.shuffle(c),
            6 => {
                let small: Vec<ExprId> = (0..3)
                    .map(|_| {
                        let byte = self.pick_of(c, DType::I8);
                        self.kb.cast(byte, DType::F32)
                    })
                    .collect();
                self.kb.fma(small[0], small[1], small[2])
            }
            7 => self.load(c),
            _ => {
                let value = self.pick(c);
                self.kb.let_("pinned", value)
            }
        };
        self.pool.push(value);
    }

    fn unary(&mut self, c: &mut u64) -> ExprId {
        let a = self.pick(c);
        let dtype = self.kb.ty(a).dtype;
        let ops: &[UnOp] = match dtype {
            DType::Bool => &[UnOp::Not],
            d if d.is_int() => &[UnOp::Not, UnOp::Neg, UnOp::Abs],
            _ => &[UnOp::Neg, UnOp::Abs, UnOp::Sqrt, UnOp::Floor, UnOp::Round],
        };
        self.kb.unary(ops[take(c, ops.len())], a)
    }

    fn binary(&mut self, c: &mut u64) -> ExprId {
        let a = self.pick(c);
        let dtype = self.kb.ty(a).dtype;
        let b = self.pick_of(c, dtype);
        let op = BinOp::ALL[take(c, BinOp::ALL.len())];
        let bits = matches!(op, BinOp::And | BinOp::Or | BinOp::Xor);
        let arithmetic = matches!(op, BinOp::Div | BinOp::Rem | BinOp::Shl | BinOp::Shr);
        match dtype {
            DType::Bool if !bits && !matches!(op, BinOp::Eq | BinOp::Ne) => self.kb.binary(BinOp::Xor, a, b),
            d if d.is_float() && matches!(op, BinOp::Div | BinOp::Rem) => {
                let magnitude = self.kb.unary(UnOp::Abs, b);
                let least = self.kb.constant(0.5, ExprType::scalar(d));
                let divisor = self.kb.max(magnitude, least);
                self.kb.binary(op, a, divisor)
            }
            d if d.is_float() && (bits || arithmetic) => self.kb.binary(BinOp::Sub, a, b),
            _ => {
                let b = defined_operand(self.kb, op, b);
                self.kb.binary(op, a, b)
            }
        }
    }

    fn shuffle(&mut self, c: &mut u64) -> ExprId {
        let a = self.pick(c);
        let dtype = self.kb.ty(a).dtype;
        let b = self.pick_of(c, dtype);
        let b = (take(c, 2) == 0).then_some(b);
        let total = self.lanes * if b.is_some() { 2 } else { 1 };
        let (step, first) = (take(c, 9) as u32, take(c, 16) as u32);
        let lanes = (0..self.lanes).map(|i| (i * step + first) % total).collect();
        self.kb.shuffle(a, b, lanes)
    }

    fn load(&mut self, c: &mut u64) -> ExprId {
        let buf = self.inputs[take(c, self.inputs.len())];
        let picked = self.pick(c);
        let mask = (take(c, 2) == 0).then(|| self.kb.cast(picked, DType::Bool));
        match take(c, 3) {
            0 => {
                let number = self.pick(c);
                let index = self.lane_numbers(number, 64.0);
                self.kb.load_masked(buf, index, mask)
            }
            1 => {
                let one = self.kb.load(buf, self.at);
                self.kb.splat(one, self.lanes)
            }
            _ => {
                let offset = take(c, 16) as i64;
                let at = self.kb.add_int(self.at, offset);
                let run = self.kb.ramp1(at, self.lanes);
                self.kb.load_masked(buf, run, mask)
            }
        }
    }
}

fn program(name: String, lanes: u32, choices: &[u64]) -> ClifCase {
    let mut kb = KernelBuilder::new(name);
    let types = [DType::F32, DType::I8, DType::I32, DType::BF16];
    let mut buffers: Vec<KernelBuffer> = types.iter().zip(1..).map(|(&t, seed)| samples(t, seed)).collect();
    let inputs: Vec<BufId> = types
        .iter()
        .zip(&buffers)
        .map(|(&t, b)| kb.param(&format!("in_{t}"), t, b.len(), ParamAccess::In, 1))
        .collect();
    let mut outputs = Vec::new();
    let rounds = kb.int(ROUNDS);
    kb.par("round", rounds, |kb, round| {
        let at = kb.mul_int(round, i64::from(lanes));
        let pool = inputs.iter().map(|&b| kb.load_vec(b, at, lanes)).collect();
        let mut program = RandomProgram { kb, inputs, at, lanes, pool };
        choices.iter().for_each(|&c| program.step(c));
        let RandomProgram { kb, pool, .. } = program;
        for &value in pool.iter().rev().take(OUTPUTS) {
            let dtype = kb.ty(value).dtype;
            let len = ROUNDS as usize * lanes as usize;
            let out = kb.param(&format!("out{}", outputs.len()), dtype, len, ParamAccess::Out, 1);
            kb.store_vec(out, at, value);
            outputs.push(KernelBuffer::zeros(dtype, len));
        }
    });
    buffers.extend(outputs);
    ClifCase::new(kb.finish(), buffers)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 200, ..ProptestConfig::default() })]
    #[test]
    fn random_programs(
        programs in prop::collection::vec(
            (prop::sample::select(vec![1u32, 2, 3, 4, 8, 16, 32]), prop::collection::vec(any::<u64>(), 1..30)),
            1..8,
        )
    ) {
        let cases: Vec<ClifCase> = programs
            .iter()
            .enumerate()
            .map(|(i, (lanes, choices))| program(format!("random{i}"), *lanes, choices))
            .collect();
        if let Err(message) = try_check(&cases, &host_levels()) {
            return Err(TestCaseError::fail(message));
        }
    }
}
