//! A restricted unpickler: it builds the values of a state dict and nothing else.
//!
//! Pickle is a program for a stack machine (Python's `pickletools.py` is its reference). Two opcodes of it can call any
//! function of the Python installation; here `GLOBAL` knows a closed list of names ([`PickleGlobal`]), everything else is
//! refused by its name, and `REDUCE` and `BUILD` only act on those. Nothing is ever executed.
//!
//! Invariants: every read is bounds-checked; values are small copies that point into arenas, so that nesting costs no
//! recursion; memory is linear in the size of the pickle, which is limited.

mod globals;
mod value;

pub use globals::PickleGlobal;
pub use value::{PickleValue, StorageRef, TensorRef};

use std::collections::BTreeMap;

/// Larger than the pickle of any published model (about 100 bytes per tensor) by a factor of a hundred.
pub const LARGEST_PICKLE: usize = 16 << 20;
const HIGHEST_PROTOCOL: u8 = 5;
/// About 40 instructions make one tensor: enough for 100 000 tensors. Bounds time and memory.
const MOST_INSTRUCTIONS: usize = 1 << 22;
/// Functions of a state dict take 4 to 7.
const MOST_ARGUMENTS: usize = 8;

/// Why a pickle is not a state dict, at which byte.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset}: {detail}")]
pub struct PickleError {
    pub offset: usize,
    pub detail: String,
}

/// The values of a pickle. Containers and strings live in arenas, [`PickleValue`] points to them.
#[derive(Debug, Default)]
pub struct Pickle {
    pub(super) strings: Vec<String>,
    pub(super) tuples: Vec<Vec<PickleValue>>,
    pub(super) lists: Vec<Vec<PickleValue>>,
    pub(super) dicts: Vec<Vec<(PickleValue, PickleValue)>>,
    pub(super) storages: Vec<StorageRef>,
    pub(super) tensors: Vec<TensorRef>,
    /// What the pickle evaluates to.
    pub root: PickleValue,
}

impl Pickle {
    pub fn parse(bytes: &[u8]) -> Result<Pickle, PickleError> {
        if bytes.len() > LARGEST_PICKLE {
            let detail = format!("is {} bytes long, at most {LARGEST_PICKLE} are read", bytes.len());
            return Err(PickleError { offset: 0, detail });
        }
        let machine = PickleMachine {
            input: bytes,
            position: 0,
            opcode_at: 0,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: BTreeMap::new(),
            pickle: Pickle::default(),
        };
        machine.run()
    }

    pub fn string(&self, value: PickleValue) -> Option<&str> {
        match value {
            PickleValue::Str(id) => Some(&self.strings[id as usize]),
            _ => None,
        }
    }
    pub fn dict(&self, value: PickleValue) -> Option<&[(PickleValue, PickleValue)]> {
        match value {
            PickleValue::Dict(id) => Some(&self.dicts[id as usize]),
            _ => None,
        }
    }
    pub fn tensor(&self, value: PickleValue) -> Option<&TensorRef> {
        match value {
            PickleValue::Tensor(id) => Some(&self.tensors[id as usize]),
            _ => None,
        }
    }
    pub fn storage(&self, id: u32) -> &StorageRef {
        &self.storages[id as usize]
    }
    pub(super) fn tuple(&self, value: PickleValue) -> Option<&[PickleValue]> {
        match value {
            PickleValue::Tuple(id) => Some(&self.tuples[id as usize]),
            _ => None,
        }
    }
}

struct PickleMachine<'a> {
    input: &'a [u8],
    position: usize,
    /// Of the instruction being executed, for messages.
    opcode_at: usize,
    stack: Vec<PickleValue>,
    /// Heights of the stack at each MARK.
    marks: Vec<usize>,
    memo: BTreeMap<u32, PickleValue>,
    pickle: Pickle,
}

type PickleResult<T = ()> = Result<T, PickleError>;

impl PickleMachine<'_> {
    fn run(mut self) -> PickleResult<Pickle> {
        for _ in 0..MOST_INSTRUCTIONS {
            self.opcode_at = self.position;
            let opcode = self.byte()?;
            if opcode == b'.' {
                self.pickle.root = self.pop()?;
                return Ok(self.pickle);
            }
            self.execute(opcode)?;
        }
        self.fail(format!("has more than {MOST_INSTRUCTIONS} instructions"))
    }

    fn execute(&mut self, opcode: u8) -> PickleResult {
        match opcode {
            0x80 => self.protocol(),
            0x95 => self.take(8).map(drop), // FRAME: a hint about buffering
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' => self.pop().map(drop),
            b'N' | 0x88 | 0x89 | b'K' | b'M' | b'J' | 0x8a | b'G' => self.scalar(opcode),
            b'X' | 0x8c | 0x8d => self.unicode(opcode),
            b')' | b't' | 0x85..=0x87 => self.new_tuple(opcode),
            b']' | b'a' | b'e' => self.list_op(opcode),
            b'}' | b's' | b'u' => self.dict_op(opcode),
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.memo_op(opcode),
            b'c' | 0x93 => self.global(opcode),
            b'Q' => self.persistent_id(),
            b'R' => self.reduce(),
            b'b' => self.build(),
            other => self.refuse_opcode(other),
        }
    }

    fn protocol(&mut self) -> PickleResult {
        match self.byte()? {
            2..=HIGHEST_PROTOCOL => Ok(()),
            version => self.fail(format!("uses pickle protocol {version}, 2 to {HIGHEST_PROTOCOL} are read")),
        }
    }

    fn scalar(&mut self, opcode: u8) -> PickleResult {
        let value = match opcode {
            b'N' => PickleValue::None,
            0x88 => PickleValue::Bool(true),
            0x89 => PickleValue::Bool(false),
            b'K' => PickleValue::Int(self.byte()? as i64),
            b'M' => PickleValue::Int(u16::from_le_bytes(self.array()?) as i64),
            b'J' => PickleValue::Int(i32::from_le_bytes(self.array()?) as i64),
            0x8a => PickleValue::Int(self.long()?),
            _ => PickleValue::Float(f64::from_be_bytes(self.array()?)),
        };
        self.push(value)
    }

    /// LONG1: little-endian two's complement of up to 255 bytes; sizes need at most 8.
    fn long(&mut self) -> PickleResult<i64> {
        let length = self.byte()? as usize;
        let raw = self.take(length)?;
        if length > 8 {
            return self.fail(format!("holds an integer of {length} bytes"));
        }
        let sign = if raw.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut bytes = [sign; 8];
        bytes[..length].copy_from_slice(raw);
        Ok(i64::from_le_bytes(bytes))
    }

    fn unicode(&mut self, opcode: u8) -> PickleResult {
        let length = match opcode {
            b'X' => u32::from_le_bytes(self.array()?) as u64,
            0x8c => self.byte()? as u64,
            _ => u64::from_le_bytes(self.array()?),
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let text = match std::str::from_utf8(self.take(length)?) {
            Ok(text) => text.to_string(),
            Err(_) => return self.fail("holds a string that is not UTF-8".to_string()),
        };
        let id = self.pickle.strings.len() as u32;
        self.pickle.strings.push(text);
        self.push(PickleValue::Str(id))
    }

    fn new_tuple(&mut self, opcode: u8) -> PickleResult {
        let items = match opcode {
            b')' => Vec::new(),
            b't' => self.pop_mark()?,
            _ => {
                let count = (opcode - 0x84) as usize;
                let base = self.floor();
                match self.stack.len().checked_sub(count) {
                    Some(start) if start >= base => self.stack.split_off(start),
                    _ => return self.fail("takes more values than there are".to_string()),
                }
            }
        };
        let id = self.pickle.tuples.len() as u32;
        self.pickle.tuples.push(items);
        self.push(PickleValue::Tuple(id))
    }

    fn list_op(&mut self, opcode: u8) -> PickleResult {
        if opcode == b']' {
            let id = self.pickle.lists.len() as u32;
            self.pickle.lists.push(Vec::new());
            return self.push(PickleValue::List(id));
        }
        let items = if opcode == b'a' { vec![self.pop()?] } else { self.pop_mark()? };
        match self.top()? {
            PickleValue::List(id) => self.pickle.lists[id as usize].extend(items),
            other => return self.fail(format!("appends to {}", other.kind())),
        }
        Ok(())
    }

    fn dict_op(&mut self, opcode: u8) -> PickleResult {
        if opcode == b'}' {
            return self.new_dict();
        }
        let items = if opcode == b's' {
            let value = self.pop()?;
            vec![self.pop()?, value]
        } else {
            self.pop_mark()?
        };
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return self.fail("sets a key without a value".to_string());
        }
        match self.top()? {
            PickleValue::Dict(id) => {
                self.pickle.dicts[id as usize].extend(pairs.iter().map(|&[k, v]| (k, v)))
            }
            other => return self.fail(format!("sets an item of {}", other.kind())),
        }
        Ok(())
    }

    fn new_dict(&mut self) -> PickleResult {
        let id = self.pickle.dicts.len() as u32;
        self.pickle.dicts.push(Vec::new());
        self.push(PickleValue::Dict(id))
    }

    fn memo_op(&mut self, opcode: u8) -> PickleResult {
        let slot = match opcode {
            b'q' | b'h' => self.byte()? as u32,
            b'r' | b'j' => u32::from_le_bytes(self.array()?),
            _ => self.memo.len() as u32,
        };
        if matches!(opcode, b'q' | b'r' | 0x94) {
            let value = self.top()?;
            self.memo.insert(slot, value);
            return Ok(());
        }
        match self.memo.get(&slot) {
            Some(&value) => self.push(value),
            None => self.fail(format!("reads memo {slot}, which was not written")),
        }
    }

    /// The class or function named by a GLOBAL: only those of the closed list.
    fn global(&mut self, opcode: u8) -> PickleResult {
        let (module, name) = if opcode == b'c' {
            (self.line()?, self.line()?)
        } else {
            let (name, module) = (self.pop()?, self.pop()?);
            match (self.pickle.string(module), self.pickle.string(name)) {
                (Some(module), Some(name)) => (module.to_string(), name.to_string()),
                _ => return self.fail("names a class by something that is not text".to_string()),
            }
        };
        match PickleGlobal::find(&module, &name) {
            Some(global) => self.push(PickleValue::Global(global)),
            None => self.fail(format!(
                "wants `{module}.{name}`, which is not part of a plain state dict; mlcc does not run code from a \
                 checkpoint. Save it again with torch.save(model.state_dict(), ...) or as safetensors"
            )),
        }
    }

    fn line(&mut self) -> PickleResult<String> {
        let rest = &self.input[self.position..];
        let Some(end) = rest.iter().take(256).position(|&byte| byte == b'\n') else {
            return self.fail("ends inside a name".to_string());
        };
        self.position += end + 1;
        Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
    }

    fn persistent_id(&mut self) -> PickleResult {
        let id = self.pop()?;
        let storage = value::storage_of(&self.pickle, id).or_else(|detail| self.fail(detail))?;
        let id = self.pickle.storages.len() as u32;
        self.pickle.storages.push(storage);
        self.push(PickleValue::Storage(id))
    }

    fn reduce(&mut self) -> PickleResult {
        let arguments = self.pop()?;
        let function = self.pop()?;
        let list = self.pickle.tuple(arguments).filter(|list| list.len() <= MOST_ARGUMENTS);
        let Some(arguments) = list.map(<[PickleValue]>::to_vec) else {
            let kind = arguments.kind();
            return self.fail(format!(
                "calls with {kind} for arguments, a tuple of at most {MOST_ARGUMENTS} expected"
            ));
        };
        match function {
            PickleValue::Global(PickleGlobal::OrderedDict) if arguments.is_empty() => self.new_dict(),
            PickleValue::Global(PickleGlobal::RebuildTensor) => {
                let tensor =
                    value::tensor_of(&self.pickle, &arguments).or_else(|detail| self.fail(detail))?;
                let id = self.pickle.tensors.len() as u32;
                self.pickle.tensors.push(tensor);
                self.push(PickleValue::Tensor(id))
            }
            PickleValue::Global(PickleGlobal::RebuildParameter) => match arguments.first() {
                Some(&tensor @ PickleValue::Tensor(_)) => self.push(tensor),
                _ => self.fail("makes a parameter of something that is not a tensor".to_string()),
            },
            other => self.fail(format!("calls {} with {} arguments", other.kind(), arguments.len())),
        }
    }

    /// `state_dict()` leaves version numbers (`_metadata`) as an attribute of its OrderedDict: read and dropped.
    fn build(&mut self) -> PickleResult {
        self.pop()?;
        match self.top()? {
            PickleValue::Dict(_) => Ok(()),
            other => self.fail(format!("sets attributes of {}", other.kind())),
        }
    }

    fn refuse_opcode(&self, opcode: u8) -> PickleResult {
        let name = globals::opcode_name(opcode);
        self.fail(format!("uses opcode {name} (0x{opcode:02x}), which a state dict does not need"))
    }

    fn push(&mut self, value: PickleValue) -> PickleResult {
        self.stack.push(value);
        Ok(())
    }

    /// Values below the last mark belong to an outer container.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> PickleResult<PickleValue> {
        if self.stack.len() <= self.floor() {
            return self.fail("takes a value from an empty stack".to_string());
        }
        Ok(self.stack.pop().unwrap_or(PickleValue::None))
    }

    fn top(&self) -> PickleResult<PickleValue> {
        match self.stack.last() {
            Some(&value) if self.stack.len() > self.floor() => Ok(value),
            _ => self.fail("looks at an empty stack".to_string()),
        }
    }

    fn pop_mark(&mut self) -> PickleResult<Vec<PickleValue>> {
        match self.marks.pop() {
            Some(height) => Ok(self.stack.split_off(height)),
            None => self.fail("closes a group that was not opened".to_string()),
        }
    }

    fn byte(&mut self) -> PickleResult<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn array<const N: usize>(&mut self) -> PickleResult<[u8; N]> {
        let Some(array) = self.input[self.position..].first_chunk::<N>() else {
            return self.fail("ends in the middle of an instruction".to_string());
        };
        self.position += N;
        Ok(*array)
    }

    fn take(&mut self, length: usize) -> PickleResult<&[u8]> {
        let end = self.position.checked_add(length).filter(|&end| end <= self.input.len());
        let Some(end) = end else { return self.fail("ends in the middle of a value".to_string()) };
        let start = std::mem::replace(&mut self.position, end);
        Ok(&self.input[start..end])
    }

    fn fail<T>(&self, detail: String) -> PickleResult<T> {
        Err(PickleError { offset: self.opcode_at, detail })
    }
}
