//! The text that `nvdisasm -c -hex -ndf` prints: functions of instructions, with what the assembler tells the
//! scheduler of each.
//!
//! NVIDIA does not document the encoding of these control fields; where they lie is known from Jia and
//! others, "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking" (arXiv 1804.06826), and is
//! the same up to Hopper.

use std::collections::BTreeMap;

mod operand;

pub use operand::{SassAddress, SassOperand, SassRegister};

use crate::PredictError;

/// A kernel, with the functions that it calls behind it.
#[derive(Clone, PartialEq, Debug)]
pub struct SassFunction {
    pub name: String,
    pub code: Vec<SassInstr>,
}

#[derive(Clone, PartialEq, Debug)]
pub struct SassInstr {
    /// Bytes from the beginning of the function.
    pub at: u32,
    pub guard: Option<PredicateGuard>,
    /// `LDG`, and `E`, `128`.
    pub name: String,
    pub modifiers: Vec<String>,
    pub operands: Vec<SassOperand>,
    pub control: ControlCode,
}

impl SassInstr {
    pub fn has(&self, modifier: &str) -> bool {
        self.modifiers.iter().any(|m| m == modifier)
    }
}

/// `@!P0`: only lanes for which it holds execute the instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PredicateGuard {
    pub register: u8,
    pub uniform: bool,
    pub negated: bool,
}

/// Control fields of an instruction, from the assembler for the scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlCode {
    /// Clocks until the next instruction of the warp.
    pub stall: u8,
    /// The scoreboard that is free when the result is there, and when the operands have been read.
    pub result: Option<u8>,
    pub operands: Option<u8>,
    /// Scoreboards that are waited for first.
    pub wait: u8,
}

impl ControlCode {
    /// Decodes the upper half of an instruction's 128 bits.
    pub fn decode(upper: u64) -> ControlCode {
        let field = |from: u32, bits: u32| (upper >> (from - 64) & ((1 << bits) - 1)) as u8;
        let scoreboard = |value: u8| (value < 6).then_some(value);
        ControlCode {
            stall: field(105, 4),
            result: scoreboard(field(110, 3)),
            operands: scoreboard(field(113, 3)),
            wait: field(116, 6),
        }
    }
}

/// The kernels of a disassembly.
pub fn parse(text: &str) -> Result<Vec<SassFunction>, PredictError> {
    let mut functions = Vec::new();
    let mut current: Option<SassParser> = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        let fault = |what: String| PredictError::Listing { line: number + 1, what };
        if let Some(name) = line.strip_prefix(".text.").and_then(|l| l.strip_suffix(':')) {
            functions.extend(current.take().map(SassParser::finish).transpose()?);
            current = Some(SassParser::new(name));
        } else if let Some(reading) = &mut current {
            reading.line(line).map_err(fault)?;
        }
    }
    functions.extend(current.map(SassParser::finish).transpose()?);
    Ok(functions)
}

/// A function as far as it has been read.
struct SassParser {
    function: SassFunction,
    labels: BTreeMap<String, u32>,
    /// Labels that no instruction follows yet.
    open: Vec<String>,
}

impl SassParser {
    fn new(name: &str) -> Self {
        let function = SassFunction { name: name.into(), code: Vec::new() };
        SassParser { function, labels: BTreeMap::new(), open: Vec::new() }
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        if let Some(label) = line.strip_suffix(':') {
            self.open.push(label.to_string());
            return Ok(());
        }
        let Some(rest) = line.strip_prefix("/*") else { return Ok(()) };
        let (first, rest) = rest.split_once("*/").ok_or("a comment without an end")?;
        if let Some(word) = first.trim().strip_prefix("0x") {
            // The upper half of the instruction before.
            let upper = u64::from_str_radix(word, 16).map_err(|_| format!("`{word}` is not an encoding"))?;
            if let Some(last) = self.function.code.last_mut() {
                last.control = ControlCode::decode(upper);
            }
            return Ok(());
        }
        let at = u32::from_str_radix(first.trim(), 16).map_err(|_| format!("`{first}` is no place"))?;
        let text = rest.split(';').next().unwrap_or_default().trim();
        self.labels.extend(self.open.drain(..).map(|label| (label, at)));
        self.function.code.push(instruction(at, text)?);
        Ok(())
    }

    /// Puts places for labels.
    fn finish(mut self) -> Result<SassFunction, PredictError> {
        let end = self.function.code.last().map_or(0, |last| last.at + 16);
        self.labels.extend(self.open.drain(..).map(|label| (label, end)));
        let kernel = &self.function.name;
        for instr in &mut self.function.code {
            for operand in &mut instr.operands {
                let SassOperand::Label(label) = operand else { continue };
                let place = self.labels.get(label).ok_or_else(|| PredictError::Kernel {
                    kernel: kernel.clone(),
                    what: format!("the disassembly has no label `{label}`"),
                })?;
                *operand = SassOperand::Immediate(i64::from(*place));
            }
        }
        Ok(self.function)
    }
}

fn instruction(at: u32, text: &str) -> Result<SassInstr, String> {
    let mut rest = text.trim_start_matches('{').trim();
    let mut guard = None;
    if let Some(after) = rest.strip_prefix('@') {
        let (name, after) = after.split_once(' ').ok_or_else(|| format!("`{text}` is only a guard"))?;
        guard = Some(operand::guard(name).ok_or_else(|| format!("`{name}` is no guard"))?);
        rest = after.trim();
    }
    let (name, operands) = rest.split_once(' ').unwrap_or((rest, ""));
    let mut parts = name.split('.').map(String::from);
    let name = parts.next().unwrap_or_default();
    // A return names the function that its place is relative to behind the register; it begins at 0.
    let operands =
        if name.starts_with("RET") { operands.split('`').next().unwrap_or_default() } else { operands };
    let operands: Vec<SassOperand> = operand::split(operands)
        .map(|o| operand::parse(o).ok_or_else(|| format!("`{o}` of `{text}` is not an operand")))
        .collect::<Result<_, _>>()?;
    let control = ControlCode { stall: 1, result: None, operands: None, wait: 0 };
    Ok(SassInstr { at, guard, name, modifiers: parts.collect(), operands, control })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\t.section\t.text.k_a,\"ax\",@progbits\n.text.k_a:\n\
        \x20       /*0000*/                   LDC R1, c[0x0][0x28] ;  /* 0x00000a00ff017b82 */\n\
        \x20                                                          /* 0x000fe20000000800 */\n\
        .L_x_1:\n\
        \x20       /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64+-0x10] ;  /* 0x0 */\n\
        \x20                                                          /* 0x000ea4000c1e1d00 */\n\
        \x20       /*0020*/               @P1 BRA `(.L_x_1) ;         /* 0x0 */\n\
        \x20                                                          /* 0x004fea000383ffff */\n";

    #[test]
    fn functions_are_read() {
        let functions = parse(TEXT).unwrap();
        assert_eq!((functions.len(), functions[0].name.as_str()), (1, "k_a"));
        let code = &functions[0].code;
        assert_eq!(
            (code[1].name.as_str(), code[1].modifiers.join("."), code[1].at),
            ("LDG", "E.128".into(), 16)
        );
        assert_eq!(code[1].guard, Some(PredicateGuard { register: 0, uniform: false, negated: true }));
        assert_eq!(code[2].operands, [SassOperand::Immediate(16)], "the label's place");
    }

    #[test]
    fn scoreboards_and_stalls_are_decoded() {
        let code = parse(TEXT).unwrap().remove(0).code;
        // Decoded by hand: bits 105-108 stall, 110-112 result, 113-115 operands, 116-121 wait.
        assert_eq!(code[0].control, ControlCode { stall: 1, result: None, operands: None, wait: 0 });
        assert_eq!(code[1].control, ControlCode { stall: 2, result: Some(2), operands: None, wait: 0 });
        assert_eq!(code[2].control, ControlCode { stall: 5, result: None, operands: None, wait: 0b100 });
    }

    #[test]
    fn what_is_no_disassembly_is_named() {
        let text = TEXT.replace("R4, desc", "R4 $, desc");
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.contains("line 6") && error.contains("is not an operand"), "{error}");
        let error = parse(&TEXT.replace("`(.L_x_1)", "`(.L_x_2)")).unwrap_err().to_string();
        assert!(error.contains("kernel k_a: the disassembly has no label `.L_x_2`"), "{error}");
    }
}
