//! A recipe as text; the format is described in the [module](super).

use std::fmt::{self, Write};

use super::{
    DrawPiece, FloatType, GeneratorEntry, PieceContent, RandomDraw, ValueDistribution, WeightGenerator,
};

const HEAD: &str = "mlcc-recipe 1";

pub(super) fn write(recipe: &WeightGenerator, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(f, "{HEAD} {} {}", recipe.seed, recipe.bytes)?;
    for entry in &recipe.entries {
        match entry {
            GeneratorEntry::Draw(draw) => {
                write!(f, "draw {} {} {:016x}", draw.offset, draw.count, draw.key)?;
                for piece in &draw.pieces {
                    f.write_char(' ')?;
                    write_piece(piece, f)?;
                }
            }
            GeneratorEntry::Stored { offset, bytes } => {
                write!(f, "bytes {offset} ")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            }
        }
        f.write_char('\n')?;
    }
    Ok(())
}

fn write_piece(piece: &DrawPiece, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let bytes = piece.bytes;
    match piece.content {
        PieceContent::Fill(byte) => write!(f, "fill:{bytes}:{byte:02x}"),
        PieceContent::Codes => write!(f, "codes:{bytes}"),
        PieceContent::Scales(scale) => write!(f, "scales:{bytes}:{scale:04x}"),
        PieceContent::Floats(float, spread) => {
            let (kind, a, b) = match spread {
                ValueDistribution::Normal { mean, deviation } => ("normal", mean, deviation),
                ValueDistribution::Uniform { low, high } => ("uniform", low, high),
            };
            write!(f, "{}:{bytes}:{kind}:{:08x}:{:08x}", float_name(float), a.to_bits(), b.to_bits())
        }
    }
}

fn float_name(float: FloatType) -> &'static str {
    match float {
        FloatType::F32 => "f32",
        FloatType::F16 => "f16",
        FloatType::BF16 => "bf16",
    }
}

pub(super) fn parse(section: &[u8]) -> Result<WeightGenerator, String> {
    let text = std::str::from_utf8(section).map_err(|_| "its recipe is not text".to_string())?;
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default();
    let numbers = head.strip_prefix(HEAD).and_then(|rest| rest.trim_start().split_once(' '));
    let sizes = numbers.and_then(|(seed, bytes)| Some((seed.parse().ok()?, bytes.parse().ok()?)));
    let (seed, bytes) = sizes.ok_or_else(|| format!("its recipe starts with `{}`", shorten(head)))?;
    let entry = |line: &str| {
        parse_entry(line).ok_or_else(|| format!("unknown line in its recipe: `{}`", shorten(line)))
    };
    Ok(WeightGenerator { seed, bytes, entries: lines.map(entry).collect::<Result<_, _>>()? })
}

fn shorten(line: &str) -> String {
    line.chars().take(80).collect()
}

fn parse_entry(line: &str) -> Option<GeneratorEntry> {
    let mut words = line.split(' ');
    match words.next()? {
        "draw" => {
            let (offset, count) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            let key = u64::from_str_radix(words.next()?, 16).ok()?;
            let pieces = words.map(parse_piece).collect::<Option<Vec<_>>>()?;
            Some(GeneratorEntry::Draw(RandomDraw { offset, count, key, pieces }))
        }
        "bytes" => {
            let (offset, digits) = (words.next()?.parse().ok()?, words.next()?.as_bytes());
            let digit = |d: u8| char::from(d).to_digit(16).map(|d| d as u8);
            let (pairs, rest) = digits.as_chunks::<2>();
            let bytes: Option<Vec<u8>> =
                pairs.iter().map(|[a, b]| Some(digit(*a)? << 4 | digit(*b)?)).collect();
            let ends = rest.is_empty() && words.next().is_none();
            ends.then_some(GeneratorEntry::Stored { offset, bytes: bytes? })
        }
        _ => None,
    }
}

fn parse_piece(word: &str) -> Option<DrawPiece> {
    let mut fields = word.split(':');
    let (kind, bytes) = (fields.next()?, fields.next()?.parse().ok()?);
    let mut floats = |float| {
        let kind = fields.next()?;
        let mut bits = || Some(f32::from_bits(u32::from_str_radix(fields.next()?, 16).ok()?));
        let (a, b) = (bits()?, bits()?);
        let spread = match kind {
            "normal" => ValueDistribution::Normal { mean: a, deviation: b },
            "uniform" => ValueDistribution::Uniform { low: a, high: b },
            _ => return None,
        };
        (a.is_finite() && b.is_finite()).then_some(PieceContent::Floats(float, spread))
    };
    let content = match kind {
        "f32" => floats(FloatType::F32)?,
        "f16" => floats(FloatType::F16)?,
        "bf16" => floats(FloatType::BF16)?,
        "fill" => PieceContent::Fill(u8::from_str_radix(fields.next()?, 16).ok()?),
        "codes" => PieceContent::Codes,
        "scales" => PieceContent::Scales(u16::from_str_radix(fields.next()?, 16).ok()?),
        _ => return None,
    };
    fields.next().is_none().then_some(DrawPiece { bytes, content })
}
