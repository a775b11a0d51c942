//! Statements to instructions: arithmetic here, the rest in the files beside.

use super::modifiers::OpcodeModifiers;
use super::op::{FloatFn, FloatOne, HalfFormat, IntFn, IntOne, LogicOp, PtxOp, PtxType};
use super::scope::FunctionScope;
use super::text::{PtxOperand, PtxStatement};
use super::{convert_ops, memory_ops, warp_ops};

/// The parts that an instruction is made from.
pub struct InstructionDecoder<'s, 'a> {
    pub scope: &'s mut FunctionScope<'a>,
    pub m: OpcodeModifiers<'a>,
    operands: &'s [PtxOperand<'a>],
}

pub type DecodeResult = Result<PtxOp, String>;

const INTEGERS: [PtxType; 6] =
    [PtxType::U16, PtxType::S16, PtxType::U32, PtxType::S32, PtxType::U64, PtxType::S64];
const BITS: [PtxType; 3] = [PtxType::B16, PtxType::B32, PtxType::B64];

/// Makes an instruction, or says what is not known.
pub fn decode<'a>(scope: &mut FunctionScope<'a>, statement: &PtxStatement<'a>) -> DecodeResult {
    let (name, m) = OpcodeModifiers::split(statement.opcode);
    let mut decoder = InstructionDecoder { scope, m, operands: &statement.operands };
    let op = decoder.named(name)?;
    decoder.m.done()?;
    Ok(op)
}

impl<'a> InstructionDecoder<'_, 'a> {
    /// Takes exactly `N` operands.
    pub fn operands<const N: usize>(&self) -> Result<[PtxOperand<'a>; N], String> {
        let found = self.operands.len();
        self.operands
            .to_vec()
            .try_into()
            .map_err(|_| format!("`{}` with {found} operands, it takes {N}", self.m.opcode()))
    }

    pub fn count(&self) -> usize {
        self.operands.len()
    }

    pub fn all(&self) -> Vec<PtxOperand<'a>> {
        self.operands.to_vec()
    }

    pub fn unknown(&self) -> String {
        format!("unknown instruction `{}`", self.m.opcode())
    }

    fn named(&mut self, name: &str) -> DecodeResult {
        match name {
            "add" | "sub" | "min" | "max" => self.add_like(name),
            "mul" | "mad" => self.mul_like(name == "mad"),
            "div" | "rem" => self.div_like(name == "div"),
            "and" | "or" | "xor" => self.bitwise(name),
            "not" | "neg" | "abs" => self.one(name),
            "popc" | "clz" | "brev" => self.count_bits(name),
            "shl" | "shr" => self.shift(name == "shl"),
            "shf" => self.funnel(),
            "bfe" | "bfi" => self.field(name == "bfe"),
            "lop3" => self.lop3(),
            "prmt" => {
                self.m.ty_in(&[PtxType::B32])?;
                let [d, a, b, c] = self.operands()?;
                let s = &mut *self.scope;
                Ok(PtxOp::Prmt { d: s.dw(&d)?, a: s.w(&a, 4)?, b: s.w(&b, 4)?, c: s.w(&c, 4)? })
            }
            "dp4a" => self.dp4a(),
            "fma" => self.fma(),
            "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => self.function(name),
            "copysign" => {
                self.m.ty_in(&[PtxType::F32])?;
                // The first source gives the sign, the second the value.
                let [d, sign, value] = self.operands()?;
                let s = &mut *self.scope;
                let (d, a, b) = (s.dw(&d)?, s.w(&value, 4)?, s.w(&sign, 4)?);
                Ok(PtxOp::Float { f: FloatFn::CopySign, ftz: false, sat: false, d, a, b })
            }
            "mov" | "cvt" | "cvta" | "selp" | "setp" => convert_ops::decode(self, name),
            "ld" | "st" | "atom" | "red" | "prefetch" | "prefetchu" | "cp" | "ldmatrix" | "ldu" => {
                memory_ops::decode(self, name)
            }
            _ => warp_ops::decode(self, name),
        }
    }

    fn w3(&mut self, bytes: u32) -> Result<[super::op::WordRegister; 3], String> {
        let [d, a, b] = self.operands()?;
        let s = &mut *self.scope;
        Ok([s.dw(&d)?, s.w(&a, bytes)?, s.w(&b, bytes)?])
    }

    fn d3(&mut self) -> Result<[super::op::DoubleRegister; 3], String> {
        let [d, a, b] = self.operands()?;
        let s = &mut *self.scope;
        Ok([s.dd(&d)?, s.d(&a)?, s.d(&b)?])
    }

    fn int(&mut self, f: IntFn, ty: PtxType) -> DecodeResult {
        if ty.bytes() == 8 {
            let [d, a, b] = self.d3()?;
            return Ok(PtxOp::IntD { f, signed: ty.signed(), d, a, b });
        }
        let [d, a, b] = self.w3(ty.bytes())?;
        Ok(PtxOp::IntW { f, ty, d, a, b })
    }

    fn add_like(&mut self, name: &str) -> DecodeResult {
        let ty = self.m.ty()?;
        if ty.integer() && ty.bytes() > 1 {
            let f = match name {
                "add" => IntFn::Add,
                "sub" => IntFn::Sub,
                "min" => IntFn::Min,
                _ => IntFn::Max,
            };
            return self.int(f, ty);
        }
        let extreme = matches!(name, "min" | "max");
        let nan = extreme && self.m.take("NaN");
        let f = match (name, nan) {
            ("add", _) => FloatFn::Add,
            ("sub", _) => FloatFn::Sub,
            ("min", false) => FloatFn::Min,
            ("max", false) => FloatFn::Max,
            ("min", true) => FloatFn::MinNan,
            _ => FloatFn::MaxNan,
        };
        self.float(f, ty, !extreme)
    }

    /// An operation of two floats. Without a rounding modifier it is rounded to nearest as well.
    fn float(&mut self, f: FloatFn, ty: PtxType, rounds: bool) -> DecodeResult {
        if rounds {
            self.m.take("rn");
        }
        let (ftz, sat) = (self.m.take("ftz"), rounds && self.m.take("sat"));
        if let Some(of) = half(ty) {
            let [d, a, b] = self.w3(if of.two { 4 } else { 2 })?;
            return Ok(PtxOp::HalfFn { of, f, ftz, sat, d, a, b });
        }
        if ty != PtxType::F32 {
            return Err(self.unknown());
        }
        let [d, a, b] = self.w3(4)?;
        Ok(PtxOp::Float { f, ftz, sat, d, a, b })
    }

    fn mul_like(&mut self, add: bool) -> DecodeResult {
        let ty = self.m.ty()?;
        if ty.float() {
            // `mad.f32` is `fma` on every target since sm_20.
            return if add { self.fma_of(ty) } else { self.float(FloatFn::Mul, ty, true) };
        }
        if !INTEGERS.contains(&ty) {
            return Err(self.unknown());
        }
        if self.m.take("wide") {
            return self.wide(ty, add);
        }
        let high = self.m.take("hi");
        if !high && !self.m.take("lo") {
            return Err(format!("`{}` lacks .lo, .hi or .wide", self.m.opcode()));
        }
        if !add {
            return self.int(if high { IntFn::MulHi } else { IntFn::MulLo }, ty);
        }
        let [d, a, b, c] = self.operands()?;
        let (s, n) = (&mut *self.scope, ty.bytes());
        if n == 8 {
            let (d, a, b, c) = (s.dd(&d)?, s.d(&a)?, s.d(&b)?, s.d(&c)?);
            return Ok(PtxOp::MadD { high, signed: ty.signed(), d, a, b, c });
        }
        Ok(PtxOp::MadW { high, ty, d: s.dw(&d)?, a: s.w(&a, n)?, b: s.w(&b, n)?, c: s.w(&c, n)? })
    }

    fn wide(&mut self, ty: PtxType, add: bool) -> DecodeResult {
        let (signed, n) = (ty.signed(), ty.bytes());
        let expected = if add { 4 } else { 3 };
        if self.count() != expected || n == 8 {
            return Err(self.unknown());
        }
        let o = self.operands.to_vec();
        let s = &mut *self.scope;
        let (a, b) = (s.w(&o[1], n)?, s.w(&o[2], n)?);
        if n == 2 {
            let c = o.get(3).map(|c| s.w(c, 4)).transpose()?;
            return Ok(PtxOp::WideW { signed, d: s.dw(&o[0])?, a, b, c });
        }
        let c = o.get(3).map(|c| s.d(c)).transpose()?;
        Ok(PtxOp::WideD { signed, d: s.dd(&o[0])?, a, b, c })
    }

    fn div_like(&mut self, div: bool) -> DecodeResult {
        let ty = self.m.ty()?;
        if INTEGERS.contains(&ty) {
            return self.int(if div { IntFn::Div } else { IntFn::Rem }, ty);
        }
        if ty != PtxType::F32 || !div {
            return Err(self.unknown());
        }
        let kinds = [("approx", FloatFn::DivApprox), ("full", FloatFn::DivFull), ("rn", FloatFn::Div)];
        let Some(f) = self.m.one_of(&kinds) else { return Err(self.unknown()) };
        self.float(f, ty, false)
    }

    fn bitwise(&mut self, name: &str) -> DecodeResult {
        let ty = self.m.ty()?;
        let f = match name {
            "and" => (IntFn::And, LogicOp::And),
            "or" => (IntFn::Or, LogicOp::Or),
            _ => (IntFn::Xor, LogicOp::Xor),
        };
        if ty == PtxType::Pred {
            let [d, a, b] = self.operands()?;
            let s = &*self.scope;
            let (d, a) = (s.p(&d)?, s.p(&a)?);
            // A constant: all bits are one value.
            return Ok(match (f.1, &b) {
                (LogicOp::And, PtxOperand::Int(0)) => PtxOp::ConstP { d, value: false },
                (LogicOp::Or, PtxOperand::Int(1 | -1)) => PtxOp::ConstP { d, value: true },
                (LogicOp::Xor, PtxOperand::Int(1 | -1)) => PtxOp::NotP { d, a },
                (LogicOp::And, PtxOperand::Int(1 | -1))
                | (LogicOp::Or | LogicOp::Xor, PtxOperand::Int(0)) => PtxOp::MovP { d, a },
                _ => PtxOp::Logic { f: f.1, d, a, b: s.p(&b)? },
            });
        }
        if !BITS.contains(&ty) {
            return Err(self.unknown());
        }
        self.int(f.0, ty)
    }

    fn one(&mut self, name: &str) -> DecodeResult {
        let ty = self.m.ty()?;
        let [d, a] = self.operands()?;
        let f = match name {
            "not" => IntOne::Not,
            "neg" => IntOne::Neg,
            _ => IntOne::Abs,
        };
        let float = if name == "neg" { FloatOne::Neg } else { FloatOne::Abs };
        let ftz = ty.float() && self.m.take("ftz");
        let s = &mut *self.scope;
        match (name, ty) {
            ("not", PtxType::Pred) => Ok(PtxOp::NotP { d: s.p(&d)?, a: s.p(&a)? }),
            ("not", PtxType::B64) | ("neg" | "abs", PtxType::S64) => {
                Ok(PtxOp::OneD { f, d: s.dd(&d)?, a: s.d(&a)? })
            }
            ("not", PtxType::B16 | PtxType::B32) | ("neg" | "abs", PtxType::S16 | PtxType::S32) => {
                Ok(PtxOp::OneW { f, ty, d: s.dw(&d)?, a: s.w(&a, ty.bytes())? })
            }
            ("neg" | "abs", PtxType::F32) => {
                Ok(PtxOp::FloatOne { f: float, ftz, d: s.dw(&d)?, a: s.w(&a, 4)? })
            }
            ("neg" | "abs", _) if half(ty).is_some() => {
                let of = half(ty).unwrap_or(HalfFormat { bf16: false, two: false });
                Ok(PtxOp::HalfOne { of, f: float, ftz, d: s.dw(&d)?, a: s.w(&a, ty.bytes())? })
            }
            _ => Err(self.unknown()),
        }
    }

    fn count_bits(&mut self, name: &str) -> DecodeResult {
        let ty = self.m.ty_in(&[PtxType::B32, PtxType::B64])?;
        let [d, a] = self.operands()?;
        let f = match name {
            "popc" => IntOne::Popc,
            "clz" => IntOne::Clz,
            _ => IntOne::Brev,
        };
        let s = &mut *self.scope;
        Ok(match (ty, f) {
            (PtxType::B32, _) => PtxOp::OneW { f, ty, d: s.dw(&d)?, a: s.w(&a, 4)? },
            (_, IntOne::Brev) => PtxOp::OneD { f, d: s.dd(&d)?, a: s.d(&a)? },
            _ => PtxOp::CountD { f, d: s.dw(&d)?, a: s.d(&a)? },
        })
    }

    fn shift(&mut self, left: bool) -> DecodeResult {
        let ty = self.m.ty()?;
        let known = BITS.contains(&ty) || !left && INTEGERS.contains(&ty);
        if !known {
            return Err(self.unknown());
        }
        let [d, a, b] = self.operands()?;
        let s = &mut *self.scope;
        // The amount has 32 bits whatever the type is.
        let b = s.w(&b, 4)?;
        Ok(match ty.bytes() {
            8 => PtxOp::ShiftD { left, signed: ty.signed(), d: s.dd(&d)?, a: s.d(&a)?, b },
            n => PtxOp::ShiftW { left, ty, d: s.dw(&d)?, a: s.w(&a, n)?, b },
        })
    }

    fn funnel(&mut self) -> DecodeResult {
        self.m.ty_in(&[PtxType::B32])?;
        let left = self.m.take("l");
        let wrap = self.m.take("wrap");
        if !left && !self.m.take("r") || !wrap && !self.m.take("clamp") {
            return Err(self.unknown());
        }
        let [d, a, b, c] = self.operands()?;
        let s = &mut *self.scope;
        Ok(PtxOp::Funnel { left, wrap, d: s.dw(&d)?, a: s.w(&a, 4)?, b: s.w(&b, 4)?, c: s.w(&c, 4)? })
    }

    fn field(&mut self, extract: bool) -> DecodeResult {
        if extract {
            let ty = self.m.ty_in(&[PtxType::U32, PtxType::S32, PtxType::U64, PtxType::S64])?;
            let [d, a, b, c] = self.operands()?;
            let s = &mut *self.scope;
            let (signed, b, c) = (ty.signed(), s.w(&b, 4)?, s.w(&c, 4)?);
            return Ok(match ty.bytes() {
                8 => PtxOp::BfeD { signed, d: s.dd(&d)?, a: s.d(&a)?, b, c },
                _ => PtxOp::BfeW { signed, d: s.dw(&d)?, a: s.w(&a, 4)?, b, c },
            });
        }
        let ty = self.m.ty_in(&[PtxType::B32, PtxType::B64])?;
        let [d, a, b, c, e] = self.operands()?;
        let s = &mut *self.scope;
        let (c, e) = (s.w(&c, 4)?, s.w(&e, 4)?);
        Ok(match ty {
            PtxType::B64 => PtxOp::BfiD { d: s.dd(&d)?, a: s.d(&a)?, b: s.d(&b)?, c, e },
            _ => PtxOp::BfiW { d: s.dw(&d)?, a: s.w(&a, 4)?, b: s.w(&b, 4)?, c, e },
        })
    }

    fn lop3(&mut self) -> DecodeResult {
        self.m.ty_in(&[PtxType::B32])?;
        let [d, a, b, c, table] = self.operands()?;
        let PtxOperand::Int(table @ 0..=255) = table else {
            return Err("the table of lop3 is a byte".into());
        };
        let s = &mut *self.scope;
        let (d, a, b, c) = (s.dw(&d)?, s.w(&a, 4)?, s.w(&b, 4)?, s.w(&c, 4)?);
        Ok(PtxOp::Lop3 { d, a, b, c, table: table as u8 })
    }

    fn dp4a(&mut self) -> DecodeResult {
        let signs = [PtxType::U32, PtxType::S32];
        let (a_ty, b_ty) = (self.m.ty_in(&signs)?, self.m.ty_in(&signs)?);
        let [d, a, b, c] = self.operands()?;
        let s = &mut *self.scope;
        let (d, a, b, c) = (s.dw(&d)?, s.w(&a, 4)?, s.w(&b, 4)?, s.w(&c, 4)?);
        Ok(PtxOp::Dp4a { signed_a: a_ty.signed(), signed_b: b_ty.signed(), d, a, b, c })
    }

    fn fma(&mut self) -> DecodeResult {
        let ty = self.m.ty()?;
        if !self.m.take("rn") {
            return Err(format!("`{}`: only .rn is known", self.m.opcode()));
        }
        self.fma_of(ty)
    }

    fn fma_of(&mut self, ty: PtxType) -> DecodeResult {
        self.m.take("rn");
        let (ftz, sat) = (self.m.take("ftz"), self.m.take("sat"));
        let [d, a, b, c] = self.operands()?;
        let s = &mut *self.scope;
        let n = ty.bytes();
        if ty == PtxType::F32 {
            return Ok(PtxOp::Fma { ftz, sat, d: s.dw(&d)?, a: s.w(&a, n)?, b: s.w(&b, n)?, c: s.w(&c, n)? });
        }
        let Some(of) = half(ty) else { return Err(self.unknown()) };
        let (d, a, b, c) = (s.dw(&d)?, s.w(&a, n)?, s.w(&b, n)?, s.w(&c, n)?);
        Ok(PtxOp::HalfFma { of, ftz, sat, relu: self.m.take("relu"), d, a, b, c })
    }

    fn function(&mut self, name: &str) -> DecodeResult {
        let ty = self.m.ty_in(&[PtxType::F32])?;
        let approx = self.m.take("approx");
        if !approx && !self.m.take("rn") {
            return Err(format!("`{}`: only .rn and .approx are known", self.m.opcode()));
        }
        let f = match (name, approx) {
            ("sqrt", false) => FloatOne::Sqrt,
            ("rcp", false) => FloatOne::Rcp,
            ("sqrt", true) => FloatOne::SqrtApprox,
            ("rcp", true) => FloatOne::RcpApprox,
            ("rsqrt", true) => FloatOne::RsqrtApprox,
            ("ex2", true) => FloatOne::Ex2Approx,
            ("lg2", true) => FloatOne::Lg2Approx,
            ("sin", true) => FloatOne::SinApprox,
            ("cos", true) => FloatOne::CosApprox,
            ("tanh", true) => FloatOne::TanhApprox,
            _ => return Err(self.unknown()),
        };
        let ftz = self.m.take("ftz");
        let [d, a] = self.operands()?;
        let s = &mut *self.scope;
        Ok(PtxOp::FloatOne { f, ftz, d: s.dw(&d)?, a: s.w(&a, ty.bytes())? })
    }
}

/// The half-precision formats.
pub fn half(ty: PtxType) -> Option<HalfFormat> {
    Some(match ty {
        PtxType::F16 => HalfFormat { bf16: false, two: false },
        PtxType::F16x2 => HalfFormat { bf16: false, two: true },
        PtxType::BF16 => HalfFormat { bf16: true, two: false },
        PtxType::BF16x2 => HalfFormat { bf16: true, two: true },
        _ => return None,
    })
}
