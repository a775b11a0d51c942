//! Weights that are made when a model is loaded, for artifacts without them (`mlcc build --weights-on-load`).
//!
//! The section `.mlcc.recipe` is text, one entry per line in the order of the weights; what no entry covers
//! is zero:
//!
//! ```text
//! mlcc-recipe 1 <seed> <bytes of the weights>
//! draw <offset> <count> <key> <piece> ...
//! bytes <offset> <hex digits>
//! ```
//!
//! `draw` repeats its pieces `count` times from `offset` on. A piece is `<kind>:<bytes>` with what the kind
//! needs:
//!
//! | piece | content |
//! | --- | --- |
//! | `fill:<bytes>:<byte>` | this byte |
//! | `codes:<bytes>` | every bit random |
//! | `scales:<bytes>:<f16>` | this f16 with a random sign, so that uneven codes are 0 in the mean |
//! | `f32:<bytes>:normal:<mean>:<deviation>`, `f16:...`, `bf16:...` | floats; f16 and bf16 are cut off |
//! | `f32:<bytes>:uniform:<low>:<high>`, `f16:...`, `bf16:...` | the same, evenly spread |
//!
//! Bytes, f16 and f32 are hexadecimal digits of their bits. A value is a function of the key and of its place
//! after `offset` alone: SplitMix64 of a counter, as in random checkpoints. So any piece can be made at any
//! time by any thread, and every machine makes the same bytes.

use std::fmt;

use memmap2::{Mmap, MmapMut};
use xxhash_rust::xxh3::Xxh3;

use crate::{Error, Result};

mod draw;
mod text;

/// Bytes that are made at a time.
const PORTION: u64 = 1 << 20;

/// The rules by which weights are made.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightGenerator {
    /// The seed, for people: the keys follow from it.
    pub seed: u64,
    /// Bytes of all weights.
    pub bytes: u64,
    /// Ascending, without overlap.
    pub entries: Vec<GeneratorEntry>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum GeneratorEntry {
    Draw(RandomDraw),
    /// Bytes as they are, from `offset` of the weights on.
    Stored {
        offset: u64,
        bytes: Vec<u8>,
    },
}

/// `count` times these pieces, in order, from `offset` of the weights on.
#[derive(Clone, Debug, PartialEq)]
pub struct RandomDraw {
    pub offset: u64,
    pub count: u64,
    pub key: u64,
    pub pieces: Vec<DrawPiece>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawPiece {
    pub bytes: u64,
    pub content: PieceContent,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PieceContent {
    Fill(u8),
    Codes,
    /// Bits of an f16.
    Scales(u16),
    Floats(FloatType, ValueDistribution),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    F32,
    F16,
    BF16,
}

/// The distribution of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValueDistribution {
    /// The sum of four uniform numbers: mean and deviation are exact, the tails end at 3.46 deviations.
    Normal {
        mean: f32,
        deviation: f32,
    },
    Uniform {
        low: f32,
        high: f32,
    },
}

/// A run of whole periods of a draw, or stored bytes.
enum GeneratedPortion<'a> {
    Drawn { draw: &'a RandomDraw, first: u64 },
    Stored(&'a [u8]),
}

impl WeightGenerator {
    /// Reads and checks the section.
    pub fn parse(section: &[u8]) -> std::result::Result<WeightGenerator, String> {
        let recipe = text::parse(section)?;
        recipe.check()?;
        Ok(recipe)
    }

    /// Bytes that are in the artifact as they are.
    pub fn stored_bytes(&self) -> u64 {
        let stored = |entry: &GeneratorEntry| match entry {
            GeneratorEntry::Stored { bytes, .. } => bytes.len() as u64,
            GeneratorEntry::Draw(_) => 0,
        };
        self.entries.iter().map(stored).sum()
    }

    /// The weights, made by `threads` threads; the number changes no byte.
    pub fn generate(&self, threads: usize) -> Result<Mmap> {
        let refuse = || Error::OutOfMemory { what: "the weights", bytes: self.bytes };
        let len = usize::try_from(self.bytes).map_err(|_| refuse())?;
        let mut memory = MmapMut::map_anon(len.max(1)).map_err(|_| refuse())?;
        // A hint: fewer pages are read faster.
        crate::pages::prefer_huge(&memory, 0..len.max(1));
        let mut jobs = Vec::new();
        let (mut rest, mut at) = (&mut memory[..len], 0);
        for (offset, bytes, portion) in self.portions() {
            let (_, from) = rest.split_at_mut((offset - at) as usize);
            let (here, behind) = from.split_at_mut(bytes as usize);
            jobs.push((portion, here));
            (rest, at) = (behind, offset + bytes);
        }
        let jobs = std::sync::Mutex::new(jobs.into_iter());
        let next = || jobs.lock().map_or(None, |mut jobs| jobs.next());
        std::thread::scope(|scope| {
            for _ in 0..threads.max(1) {
                scope.spawn(|| {
                    while let Some((portion, out)) = next() {
                        portion.write_to(out);
                    }
                });
            }
        });
        memory.make_read_only().map_err(|_| refuse())
    }

    /// XXH3-128 of the weights, made piece by piece without room for all.
    pub fn hash(&self) -> u128 {
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut hash = Xxh3::new();
        let pad = |hash: &mut Xxh3, mut bytes: u64| {
            while bytes > 0 {
                let piece = bytes.min(ZEROS.len() as u64);
                hash.update(&ZEROS[..piece as usize]);
                bytes -= piece;
            }
        };
        let (mut at, mut buffer) = (0, Vec::new());
        for (offset, bytes, portion) in self.portions() {
            pad(&mut hash, offset - at);
            buffer.resize(bytes as usize, 0);
            portion.write_to(&mut buffer);
            hash.update(&buffer);
            at = offset + bytes;
        }
        pad(&mut hash, self.bytes - at);
        hash.digest128()
    }

    /// Offset, bytes and content of what is made at a time, in ascending order.
    fn portions(&self) -> impl Iterator<Item = (u64, u64, GeneratedPortion<'_>)> {
        self.entries.iter().flat_map(|entry| {
            let (whole, period) = match entry {
                GeneratorEntry::Stored { bytes, .. } => (1, bytes.len() as u64),
                GeneratorEntry::Draw(draw) => (draw.count, draw.period_bytes()),
            };
            let step = (PORTION / period.max(1)).max(1);
            (0..whole).step_by(step as usize).map(move |first| {
                let bytes = step.min(whole - first) * period;
                match entry {
                    GeneratorEntry::Stored { offset, bytes: stored } => {
                        (*offset, bytes, GeneratedPortion::Stored(stored))
                    }
                    GeneratorEntry::Draw(draw) => {
                        (draw.offset + first * period, bytes, GeneratedPortion::Drawn { draw, first })
                    }
                }
            })
        })
    }

    /// Entries lie inside of the weights, in order, and pieces hold whole values.
    fn check(&self) -> std::result::Result<(), String> {
        let mut end = 0;
        for entry in &self.entries {
            let (offset, bytes) = match entry {
                GeneratorEntry::Stored { offset, bytes } => (*offset, Some(bytes.len() as u64)),
                GeneratorEntry::Draw(draw) => (draw.offset, draw.bytes()),
            };
            let behind = bytes.and_then(|bytes| offset.checked_add(bytes));
            match behind {
                Some(behind) if offset >= end && behind <= self.bytes => end = behind,
                _ => return Err(format!("its recipe has no space for the entry at {offset}")),
            }
            let whole = |piece: &DrawPiece| piece.bytes.is_multiple_of(piece.content.value_bytes());
            if let GeneratorEntry::Draw(draw) = entry
                && (draw.bytes() == Some(0) || !draw.pieces.iter().all(whole))
            {
                return Err(format!("the entry of its recipe at {offset} has no whole values"));
            }
        }
        Ok(())
    }
}

impl fmt::Display for WeightGenerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}

impl RandomDraw {
    /// Bytes of its pieces; of a recipe that was checked.
    fn period_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// `None` if that is no number.
    fn bytes(&self) -> Option<u64> {
        let period = self.pieces.iter().try_fold(0_u64, |sum, piece| sum.checked_add(piece.bytes))?;
        period.checked_mul(self.count)
    }
}

impl PieceContent {
    /// Bytes of a value.
    fn value_bytes(self) -> u64 {
        match self {
            PieceContent::Fill(_) | PieceContent::Codes => 1,
            PieceContent::Scales(_) => 2,
            PieceContent::Floats(float, _) => float.value_bytes(),
        }
    }
}

impl FloatType {
    fn value_bytes(self) -> u64 {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::BF16 => 2,
        }
    }
}

impl GeneratedPortion<'_> {
    fn write_to(&self, out: &mut [u8]) {
        match self {
            GeneratedPortion::Stored(bytes) => out.copy_from_slice(bytes),
            GeneratedPortion::Drawn { draw, first } => draw::fill_periods(draw, *first, out),
        }
    }
}

#[cfg(test)]
mod tests;
