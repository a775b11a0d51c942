//! Names of a function: registers, arrays in shared memory, parameters, labels, constants.

use std::collections::HashMap;

use super::op::{
    AnyRegister, CONSTANT, DoubleRegister, PredRegister, PtxAddress, SpecialRegister, WordRegister,
};
use super::text::{PtxFunction, PtxItem, PtxOperand, PtxVariable, bytes_of};

/// Distance between two arrays in shared memory: an index that is one too large shall not find the next one.
const SHARED_GAP: u32 = 128;
/// Shared memory does not begin at address 0, which a null pointer would find.
pub const SHARED_BASE: u32 = 1024;
/// The same for local memory.
pub const LOCAL_BASE: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RegisterClass {
    Word,
    Double,
    Pred,
}

/// `%r<8>`: numbers of registers of one declaration.
#[derive(Clone, Debug)]
pub struct RegisterDeclaration {
    pub name: String,
    pub count: Option<u32>,
    pub class: RegisterClass,
    pub first: u32,
}

/// An array in shared memory.
#[derive(Clone, Debug)]
pub struct SharedArray {
    pub name: String,
    pub at: u32,
    pub bytes: u32,
}

pub struct FunctionScope<'a> {
    registers: HashMap<&'a str, usize>,
    hidden: Vec<Vec<(&'a str, Option<usize>)>>,
    pub ranges: Vec<RegisterDeclaration>,
    pub counts: HashMap<RegisterClass, u32>,
    pub words: Vec<u32>,
    pub doubles: Vec<u64>,
    word_numbers: HashMap<u32, u32>,
    double_numbers: HashMap<u64, u32>,
    arrays: HashMap<&'a str, u32>,
    pub shared: Vec<SharedArray>,
    /// The begin of memory of the launch's size.
    pub shared_end: u32,
    pub local_end: u32,
    params: HashMap<&'a str, u32>,
    labels: HashMap<&'a str, u32>,
}

impl<'a> FunctionScope<'a> {
    pub fn new(function: &PtxFunction<'a>, module_arrays: &[PtxVariable<'a>]) -> Result<Self, String> {
        let mut scope = Self {
            registers: HashMap::new(),
            hidden: vec![],
            ranges: vec![],
            counts: HashMap::new(),
            words: vec![],
            doubles: vec![],
            word_numbers: HashMap::new(),
            double_numbers: HashMap::new(),
            arrays: HashMap::new(),
            shared: vec![],
            shared_end: SHARED_BASE,
            local_end: LOCAL_BASE,
            params: HashMap::new(),
            labels: HashMap::new(),
        };
        let mut offset = 0u32;
        for param in &function.params {
            offset = offset.next_multiple_of(param.align);
            scope.params.insert(param.name, offset);
            offset += param.bytes;
        }
        let mut at = 0;
        let mut dynamic = vec![];
        for variable in module_arrays {
            if variable.dynamic { dynamic.push(variable.name) } else { scope.array(variable)? }
        }
        for item in &function.body {
            match item {
                PtxItem::Shared(variable) => scope.array(variable)?,
                PtxItem::Local(variable) => scope.local(variable)?,
                PtxItem::Label(name) => scope.label_at(name, at)?,
                PtxItem::Statement(_) => at += 1,
                _ => {}
            }
        }
        for name in dynamic {
            scope.arrays.insert(name, scope.shared_end);
        }
        Ok(scope)
    }

    fn local(&mut self, variable: &PtxVariable<'a>) -> Result<(), String> {
        let at = self.local_end.next_multiple_of(variable.align.max(16));
        self.arrays.insert(variable.name, at);
        self.local_end = at.checked_add(variable.bytes).ok_or("too much local memory")?;
        Ok(())
    }

    fn label_at(&mut self, name: &'a str, at: u32) -> Result<(), String> {
        match self.labels.insert(name, at) {
            Some(_) => Err(format!("label {name} stands twice")),
            None => Ok(()),
        }
    }

    fn array(&mut self, variable: &PtxVariable<'a>) -> Result<(), String> {
        let at = self.shared_end.next_multiple_of(variable.align.max(16));
        self.arrays.insert(variable.name, at);
        self.shared.push(SharedArray { name: variable.name.to_string(), at, bytes: variable.bytes });
        let end = at.checked_add(variable.bytes).and_then(|end| end.checked_add(SHARED_GAP));
        self.shared_end = end.ok_or("too much shared memory")?.next_multiple_of(SHARED_GAP);
        Ok(())
    }

    /// Declares registers.
    pub fn declare(&mut self, ty: &str, name: &'a str, count: Option<u32>) -> Result<(), String> {
        let class = match ty.strip_prefix('.') {
            Some("pred") => RegisterClass::Pred,
            Some(ty) => match bytes_of(ty) {
                Some(1..=4) => RegisterClass::Word,
                Some(8) => RegisterClass::Double,
                _ => return Err(format!("unknown type .{ty} of a register")),
            },
            None => return Err(format!("unknown type {ty}")),
        };
        let total = self.counts.entry(class).or_default();
        let range = RegisterDeclaration { name: name.to_string(), count, class, first: *total };
        *total =
            count.unwrap_or(1).checked_add(*total).filter(|n| *n < CONSTANT).ok_or("too many registers")?;
        let before = self.registers.insert(name, self.ranges.len());
        if let Some(scope) = self.hidden.last_mut() {
            scope.push((name, before));
        }
        self.ranges.push(range);
        Ok(())
    }

    pub fn open(&mut self) {
        self.hidden.push(vec![]);
    }

    pub fn close(&mut self) {
        for (name, before) in self.hidden.pop().unwrap_or_default().into_iter().rev() {
            match before {
                Some(index) => self.registers.insert(name, index),
                None => self.registers.remove(name),
            };
        }
    }

    fn find(&self, name: &str) -> Option<(RegisterClass, u32)> {
        if let Some(&index) = self.registers.get(name) {
            let range = &self.ranges[index];
            if range.count.is_none() {
                return Some((range.class, range.first));
            }
        }
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let range = &self.ranges[*self.registers.get(prefix)?];
        let number: u32 = name[prefix.len()..].parse().ok()?;
        (number < range.count?).then_some((range.class, range.first + number))
    }

    /// A register by name.
    pub fn register(&self, name: &str) -> Result<AnyRegister, String> {
        match self.find(name) {
            Some((RegisterClass::Word, n)) => Ok(AnyRegister::W(WordRegister(n))),
            Some((RegisterClass::Double, n)) => Ok(AnyRegister::D(DoubleRegister(n))),
            Some((RegisterClass::Pred, n)) => Ok(AnyRegister::P(PredRegister(n))),
            None => Err(format!("{name} is not declared")),
        }
    }

    pub fn constant_w(&mut self, value: u32) -> WordRegister {
        let words = &mut self.words;
        let number = *self.word_numbers.entry(value).or_insert_with(|| {
            words.push(value);
            words.len() as u32 - 1
        });
        WordRegister(number | CONSTANT)
    }

    pub fn constant_d(&mut self, value: u64) -> DoubleRegister {
        let doubles = &mut self.doubles;
        let number = *self.double_numbers.entry(value).or_insert_with(|| {
            doubles.push(value);
            doubles.len() as u32 - 1
        });
        DoubleRegister(number | CONSTANT)
    }

    /// A source of at most 32 bits. Constants of 16-bit instructions are cut to 16 bits.
    pub fn w(&mut self, operand: &PtxOperand<'a>, bytes: u32) -> Result<WordRegister, String> {
        match operand {
            PtxOperand::Int(value) => {
                let bits = *value as u32;
                Ok(self.constant_w(if bytes == 2 { bits & 0xffff } else { bits }))
            }
            PtxOperand::Float(bits) => Ok(self.constant_w(*bits)),
            PtxOperand::Name(name) => match self.find(name) {
                Some((RegisterClass::Word, n)) => Ok(WordRegister(n)),
                Some(_) => Err(format!("{name} has not the size of the instruction")),
                None => match self.arrays.get(name).copied() {
                    Some(at) => Ok(self.constant_w(at)),
                    None => Err(format!("{name} is not declared")),
                },
            },
            other => Err(format!("operand {other:?} does not fit")),
        }
    }

    pub fn d(&mut self, operand: &PtxOperand<'a>) -> Result<DoubleRegister, String> {
        match operand {
            PtxOperand::Int(value) => Ok(self.constant_d(*value as u64)),
            PtxOperand::Double(bits) => Ok(self.constant_d(*bits)),
            PtxOperand::Name(name) => match self.find(name) {
                Some((RegisterClass::Double, n)) => Ok(DoubleRegister(n)),
                Some(_) => Err(format!("{name} has not the size of the instruction")),
                None => match self.arrays.get(name).copied() {
                    Some(at) => Ok(self.constant_d(u64::from(at))),
                    None => Err(format!("{name} is not declared")),
                },
            },
            other => Err(format!("operand {other:?} does not fit")),
        }
    }

    pub fn p(&self, operand: &PtxOperand<'a>) -> Result<PredRegister, String> {
        match operand {
            PtxOperand::Name(name) => self.pred(name),
            other => Err(format!("operand {other:?} is no predicate")),
        }
    }

    pub fn pred(&self, name: &str) -> Result<PredRegister, String> {
        match self.register(name)? {
            AnyRegister::P(p) => Ok(p),
            _ => Err(format!("{name} is no predicate")),
        }
    }

    /// A predicate that may be negated.
    pub fn p_or_not(&self, operand: &PtxOperand<'a>) -> Result<(PredRegister, bool), String> {
        match operand {
            PtxOperand::Not(name) => Ok((self.pred(name)?, true)),
            other => Ok((self.p(other)?, false)),
        }
    }

    /// A destination of at most 32 bits.
    pub fn dw(&self, operand: &PtxOperand<'a>) -> Result<WordRegister, String> {
        match self.dest(operand)? {
            AnyRegister::W(w) => Ok(w),
            _ => Err(format!("{operand:?} has not the size of the instruction")),
        }
    }

    pub fn dd(&self, operand: &PtxOperand<'a>) -> Result<DoubleRegister, String> {
        match self.dest(operand)? {
            AnyRegister::D(d) => Ok(d),
            _ => Err(format!("{operand:?} has not the size of the instruction")),
        }
    }

    pub fn dest(&self, operand: &PtxOperand<'a>) -> Result<AnyRegister, String> {
        match operand {
            PtxOperand::Name(name) => self.register(name),
            other => Err(format!("{other:?} is no register")),
        }
    }

    pub fn address(&mut self, operand: &PtxOperand<'a>) -> Result<PtxAddress, String> {
        let PtxOperand::Address(name, offset) = operand else {
            return Err(format!("{operand:?} is no address"));
        };
        if name.is_empty() {
            return Ok(PtxAddress { base: AnyRegister::D(self.constant_d(0)), offset: *offset });
        }
        if let Some(&at) = self.arrays.get(name) {
            return Ok(PtxAddress { base: AnyRegister::D(self.constant_d(u64::from(at))), offset: *offset });
        }
        match self.register(name)? {
            AnyRegister::P(_) => Err(format!("{name} is no address")),
            base => Ok(PtxAddress { base, offset: *offset }),
        }
    }

    /// The offset of a parameter.
    pub fn param(&self, operand: &PtxOperand<'a>) -> Result<u32, String> {
        match operand {
            PtxOperand::Address(name, offset) => match self.params.get(name) {
                Some(at) => Ok((i64::from(*at) + offset) as u32),
                None => Err(format!("{name} is no parameter")),
            },
            other => Err(format!("{other:?} is no parameter")),
        }
    }

    pub fn label(&self, operand: &PtxOperand<'a>) -> Result<u32, String> {
        match operand {
            PtxOperand::Name(name) => {
                self.labels.get(name).copied().ok_or_else(|| format!("there is no label {name}"))
            }
            other => Err(format!("{other:?} is no label")),
        }
    }
}

/// `%tid.x` and the like.
pub fn special(name: &str) -> Option<SpecialRegister> {
    let axis = |rest: &str| ["x", "y", "z"].iter().position(|axis| *axis == rest);
    let (base, rest) = name.strip_prefix('%')?.split_once('.').unwrap_or((&name[1..], ""));
    Some(match base {
        "tid" => SpecialRegister::Tid(axis(rest)?),
        "ntid" => SpecialRegister::Ntid(axis(rest)?),
        "ctaid" => SpecialRegister::Ctaid(axis(rest)?),
        "nctaid" => SpecialRegister::Nctaid(axis(rest)?),
        "laneid" => SpecialRegister::Lane,
        "warpid" => SpecialRegister::WarpId,
        "lanemask_lt" => SpecialRegister::LaneMaskLt,
        "lanemask_le" => SpecialRegister::LaneMaskLe,
        "lanemask_eq" => SpecialRegister::LaneMaskEq,
        "lanemask_ge" => SpecialRegister::LaneMaskGe,
        "lanemask_gt" => SpecialRegister::LaneMaskGt,
        _ => return None,
    })
}
