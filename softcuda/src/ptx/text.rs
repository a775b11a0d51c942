//! A PTX text as functions of statements; what the words mean is decided by [`super::decode`].

use super::PtxError;
use super::tokens::{PtxToken, PtxTokens};

#[derive(Debug)]
pub struct PtxModule<'a> {
    /// Times ten: 78 is PTX 7.8.
    pub version: u32,
    /// `sm_90` is 90.
    pub sm: u32,
    /// The target has a suffix (`sm_90a`), and the code runs on this capability only.
    pub exact: bool,
    pub functions: Vec<PtxFunction<'a>>,
    /// Arrays in shared memory outside of functions.
    pub shared: Vec<PtxVariable<'a>>,
}

#[derive(Debug)]
pub struct PtxFunction<'a> {
    pub name: &'a str,
    pub params: Vec<PtxVariable<'a>>,
    pub max_threads: Option<[u32; 3]>,
    pub body: Vec<PtxItem<'a>>,
}

#[derive(Clone, Debug)]
pub struct PtxVariable<'a> {
    pub name: &'a str,
    pub align: u32,
    pub bytes: u32,
    /// The size is that of the launch.
    pub dynamic: bool,
}

#[derive(Debug)]
pub enum PtxItem<'a> {
    /// `.reg .b32 %r<8>`: type, name, and the count where there are several.
    Register {
        ty: &'a str,
        name: &'a str,
        count: Option<u32>,
    },
    Shared(PtxVariable<'a>),
    Local(PtxVariable<'a>),
    Label(&'a str),
    Statement(PtxStatement<'a>),
    Open,
    Close,
}

#[derive(Debug)]
pub struct PtxStatement<'a> {
    pub line: u32,
    /// Predicate, and whether it is negated.
    pub guard: Option<(&'a str, bool)>,
    pub opcode: &'a str,
    pub operands: Vec<PtxOperand<'a>>,
}

#[derive(Clone, PartialEq, Debug)]
pub enum PtxOperand<'a> {
    Name(&'a str),
    /// `!%p1`.
    Not(&'a str),
    Int(i64),
    Float(u32),
    Double(u64),
    /// `[name + offset]`.
    Address(&'a str, i64),
    Vector(Vec<PtxOperand<'a>>),
    /// `%r1|%p1`.
    Pair(&'a str, &'a str),
}

/// Bytes of a fundamental type.
pub fn bytes_of(ty: &str) -> Option<u32> {
    Some(match ty {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        "b128" => 16,
        _ => return None,
    })
}

pub fn read(text: &str) -> Result<PtxModule<'_>, PtxError> {
    let mut t = PtxTokens::new(text)?;
    let mut module = PtxModule { version: 0, sm: 0, exact: false, functions: vec![], shared: vec![] };
    loop {
        if t.peek() == PtxToken::End {
            break;
        }
        match t.word()? {
            ".version" => {
                // `7.8` is no number of the language.
                let word = match t.take()? {
                    PtxToken::Int(major) => format!("{major}.0"),
                    PtxToken::Word(word) => word.to_string(),
                    other => return Err(t.error(format!("expected a version, found {other:?}"))),
                };
                let (major, minor) = word.split_once('.').unwrap_or((&word, "0"));
                let number = |part: &str| part.parse::<u32>().map_err(|_| t.error("no version"));
                module.version = number(major)? * 10 + number(minor)?;
            }
            ".target" => {
                let target = t.word()?;
                let digits = target.strip_prefix("sm_").unwrap_or("");
                let bare = digits.trim_end_matches(['a', 'f']);
                module.exact = bare != digits;
                module.sm = bare.parse().map_err(|_| t.error(format!("unknown target {target}")))?;
                while t.skip(b',')? {
                    t.word()?;
                }
            }
            ".address_size" => match t.int()? {
                64 => {}
                other => return Err(t.error(format!("addresses of {other} bits"))),
            },
            // Linking: the visibility of a name makes no difference here.
            ".visible" | ".weak" => {}
            ".extern" => match t.word()? {
                ".shared" => module.shared.push(variable(&mut t, true)?),
                other => return Err(t.error(format!("unknown directive .extern {other}"))),
            },
            ".shared" => module.shared.push(variable(&mut t, false)?),
            ".entry" => module.functions.push(function(&mut t)?),
            other => return Err(t.error(format!("unknown directive {other}"))),
        }
    }
    match module.version {
        0 => Err(PtxError { line: 1, what: "a PTX text begins with .version and .target".into() }),
        _ => Ok(module),
    }
}

/// `.align 4 .b8 name[16]` and the like, after the state space.
fn variable<'a>(t: &mut PtxTokens<'a>, external: bool) -> Result<PtxVariable<'a>, PtxError> {
    let mut variable = declaration(t, external)?;
    if t.skip(b',')? {
        return Err(t.error("several variables in one declaration"));
    }
    t.expect(b';')?;
    variable.align = variable.align.max(1);
    Ok(variable)
}

fn declaration<'a>(t: &mut PtxTokens<'a>, external: bool) -> Result<PtxVariable<'a>, PtxError> {
    let mut align = 0;
    let size = loop {
        let word = t.word()?;
        match word {
            ".align" => align = t.int()? as u32,
            // Attributes of pointers among parameters.
            ".ptr" | ".global" => {}
            _ => match word.strip_prefix('.').and_then(bytes_of) {
                Some(bytes) => break bytes,
                None => return Err(t.error(format!("unknown type {word}"))),
            },
        }
    };
    while matches!(t.peek(), PtxToken::Word(".ptr" | ".global" | ".align")) {
        if t.word()? == ".align" {
            t.int()?;
        }
    }
    let name = t.word()?;
    let (mut bytes, mut dynamic) = (size, false);
    while t.skip(b'[')? {
        if external && t.skip(b']')? {
            dynamic = true;
            bytes = 0;
            continue;
        }
        let count = t.int()?;
        bytes = u32::try_from(count)
            .ok()
            .and_then(|c| c.checked_mul(bytes))
            .ok_or_else(|| t.error("too large"))?;
        t.expect(b']')?;
    }
    if external && !dynamic {
        return Err(t.error(format!("{name} is defined in another module")));
    }
    Ok(PtxVariable { name, align: align.max(size), bytes, dynamic })
}

fn function<'a>(t: &mut PtxTokens<'a>) -> Result<PtxFunction<'a>, PtxError> {
    let name = t.word()?;
    let mut function = PtxFunction { name, params: vec![], max_threads: None, body: vec![] };
    if t.skip(b'(')? && !t.skip(b')')? {
        loop {
            if t.word()? != ".param" {
                return Err(t.error("expected .param"));
            }
            function.params.push(declaration(t, false)?);
            if !t.skip(b',')? {
                break;
            }
        }
        t.expect(b')')?;
    }
    loop {
        match t.peek() {
            PtxToken::Sign(b'{') => break,
            _ => match t.word()? {
                name @ (".maxntid" | ".reqntid") => {
                    let mut threads = [1; 3];
                    for (i, axis) in threads.iter_mut().enumerate() {
                        if i > 0 && !t.skip(b',')? {
                            break;
                        }
                        *axis = t.int()? as u32;
                    }
                    if name == ".maxntid" || function.max_threads.is_none() {
                        function.max_threads = Some(threads);
                    }
                }
                ".minnctapersm" | ".maxnreg" => {
                    t.int()?;
                }
                other => return Err(t.error(format!("unknown directive {other}"))),
            },
        }
    }
    t.expect(b'{')?;
    body(t, &mut function.body)?;
    Ok(function)
}

fn body<'a>(t: &mut PtxTokens<'a>, items: &mut Vec<PtxItem<'a>>) -> Result<(), PtxError> {
    let mut depth = 1;
    while depth > 0 {
        let line = t.next_line();
        match t.peek() {
            PtxToken::Sign(b'{') => {
                t.take()?;
                depth += 1;
                items.push(PtxItem::Open);
            }
            PtxToken::Sign(b'}') => {
                t.take()?;
                depth -= 1;
                items.push(PtxItem::Close);
            }
            PtxToken::Sign(b';') => {
                t.take()?;
            }
            PtxToken::Sign(b'@') => {
                t.take()?;
                let negated = t.skip(b'!')?;
                let guard = Some((t.word()?, negated));
                let opcode = t.word()?;
                items.push(PtxItem::Statement(statement(t, line, guard, opcode)?));
            }
            _ => {
                let word = t.word()?;
                match word {
                    ".reg" => registers(t, items)?,
                    ".shared" => items.push(PtxItem::Shared(variable(t, false)?)),
                    ".local" => items.push(PtxItem::Local(variable(t, false)?)),
                    // Advice for the assembler, and where the code comes from.
                    ".pragma" => {
                        t.take()?;
                        t.expect(b';')?;
                    }
                    _ if word.starts_with('.') => return Err(t.error(format!("unknown directive {word}"))),
                    _ if t.skip(b':')? => items.push(PtxItem::Label(word)),
                    _ => items.push(PtxItem::Statement(statement(t, line, None, word)?)),
                }
            }
        }
    }
    Ok(())
}

fn registers<'a>(t: &mut PtxTokens<'a>, items: &mut Vec<PtxItem<'a>>) -> Result<(), PtxError> {
    let ty = t.word()?;
    loop {
        let name = t.word()?;
        let mut count = None;
        if t.skip(b'<')? {
            count = Some(t.int()? as u32);
            t.expect(b'>')?;
        }
        items.push(PtxItem::Register { ty, name, count });
        if !t.skip(b',')? {
            break;
        }
    }
    t.expect(b';')
}

fn statement<'a>(
    t: &mut PtxTokens<'a>,
    line: u32,
    guard: Option<(&'a str, bool)>,
    opcode: &'a str,
) -> Result<PtxStatement<'a>, PtxError> {
    let mut operands = vec![];
    if !t.skip(b';')? {
        loop {
            operands.push(operand(t)?);
            if !t.skip(b',')? {
                break;
            }
        }
        t.expect(b';')?;
    }
    Ok(PtxStatement { line, guard, opcode, operands })
}

fn signed(t: &mut PtxTokens<'_>) -> Result<i64, PtxError> {
    let negative = t.skip(b'-')?;
    let value = t.int()? as i64;
    Ok(if negative { value.wrapping_neg() } else { value })
}

fn operand<'a>(t: &mut PtxTokens<'a>) -> Result<PtxOperand<'a>, PtxError> {
    match t.peek() {
        PtxToken::Sign(b'{') => {
            t.take()?;
            let mut parts = vec![];
            loop {
                parts.push(operand(t)?);
                if !t.skip(b',')? {
                    break;
                }
            }
            t.expect(b'}')?;
            Ok(PtxOperand::Vector(parts))
        }
        PtxToken::Sign(b'[') => {
            t.take()?;
            let (base, mut offset) = match t.peek() {
                PtxToken::Word(word) => {
                    t.take()?;
                    (word, 0)
                }
                _ => ("", signed(t)?),
            };
            while t.skip(b'+')? {
                offset += signed(t)?;
            }
            if t.peek() == PtxToken::Sign(b'-') {
                offset += signed(t)?;
            }
            t.expect(b']')?;
            Ok(PtxOperand::Address(base, offset))
        }
        PtxToken::Sign(b'!') => {
            t.take()?;
            Ok(PtxOperand::Not(t.word()?))
        }
        PtxToken::Sign(b'-') => Ok(PtxOperand::Int(signed(t)?)),
        _ => match t.take()? {
            PtxToken::Word(first) if t.skip(b'|')? => Ok(PtxOperand::Pair(first, t.word()?)),
            PtxToken::Word(name) => Ok(PtxOperand::Name(name)),
            PtxToken::Int(value) => Ok(PtxOperand::Int(value as i64)),
            PtxToken::Float(bits) => Ok(PtxOperand::Float(bits)),
            PtxToken::Double(bits) => Ok(PtxOperand::Double(bits)),
            other => Err(t.error(format!("expected an operand, found {other:?}"))),
        },
    }
}
