//! The parts of an opcode, each of which has to be understood.

use super::op::{PtxType, RoundingMode};

pub struct OpcodeModifiers<'a> {
    opcode: &'a str,
    parts: Vec<(&'a str, bool)>,
}

impl<'a> OpcodeModifiers<'a> {
    /// The name, and what follows it.
    pub fn split(opcode: &'a str) -> (&'a str, Self) {
        let mut parts = opcode.split('.');
        let name = parts.next().unwrap_or("");
        (name, Self { opcode, parts: parts.map(|part| (part, false)).collect() })
    }

    pub fn opcode(&self) -> &'a str {
        self.opcode
    }

    /// True if there is such a modifier; it counts as understood.
    pub fn take(&mut self, name: &str) -> bool {
        let found = self.parts.iter_mut().find(|(part, used)| *part == name && !used);
        found.map(|(_, used)| *used = true).is_some()
    }

    /// The first modifier of a list of names.
    pub fn one_of<T: Copy>(&mut self, names: &[(&str, T)]) -> Option<T> {
        names.iter().find(|(name, _)| self.take(name)).map(|(_, value)| *value)
    }

    /// The next type that was not taken yet.
    pub fn ty(&mut self) -> Result<PtxType, String> {
        for (part, used) in &mut self.parts {
            if let (false, Some(ty)) = (*used, PtxType::of(part)) {
                *used = true;
                return Ok(ty);
            }
        }
        Err(format!("`{}` has no type that this driver knows", self.opcode))
    }

    pub fn ty_in(&mut self, allowed: &[PtxType]) -> Result<PtxType, String> {
        let ty = self.ty()?;
        match allowed.contains(&ty) {
            true => Ok(ty),
            false => Err(format!("unknown type in `{}`", self.opcode)),
        }
    }

    pub fn round(&mut self) -> Option<RoundingMode> {
        self.one_of(&[
            ("rn", RoundingMode::Nearest),
            ("rz", RoundingMode::Zero),
            ("rm", RoundingMode::Down),
            ("rp", RoundingMode::Up),
        ])
    }

    /// `.v2` or `.v4`.
    pub fn vector(&mut self) -> usize {
        self.one_of(&[("v2", 2), ("v4", 4)]).unwrap_or(1)
    }

    /// Hints for caches, which change no value.
    pub fn cache_hints(&mut self) {
        const HINTS: [&str; 21] = [
            "ca",
            "cg",
            "cs",
            "lu",
            "cv",
            "wb",
            "wt",
            "L1::evict_normal",
            "L1::evict_unchanged",
            "L1::evict_first",
            "L1::evict_last",
            "L1::no_allocate",
            "L2::evict_first",
            "L2::evict_last",
            "L2::evict_normal",
            "L2::64B",
            "L2::128B",
            "L2::256B",
            "weak",
            "L2",
            "L1",
        ];
        for hint in HINTS {
            self.take(hint);
        }
    }

    pub fn done(&self) -> Result<(), String> {
        match self.parts.iter().find(|(_, used)| !used) {
            None => Ok(()),
            Some((part, _)) => Err(format!("unknown modifier .{part} of `{}`", self.opcode)),
        }
    }
}
