//! Packed weight formats as data. A weight is `(number - zero) * scale` of the number that its code means,
//! with a scale for each group of consecutive weights of a row; [`QuantFormat`] says how many bits a code
//! has, how large groups are, and which numbers are stored for each of them. Quantizer, packer, kernels,
//! reports and tables follow from these fields (`mlcc-quant` has the arithmetic and the bytes).

/// A group-quantized weight format: how the weights of one row are encoded, not how they lie in memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct QuantFormat {
    /// Bits of a code, 2 to 8.
    pub bits: usize,
    pub values: CodeValues,
    pub group: GroupSize,
    pub scale: ScaleType,
    pub zero: ZeroPoint,
    /// Systematic, see [`QuantFormat::systematic_name`].
    name: &'static str,
}

/// The numbers that codes mean.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CodeValues {
    /// Themselves.
    Whole,
    /// The 15 values of floats with 2 bits of exponent and 1 of mantissa (OCP E2M1), from -6 to 6 in this
    /// order, in halves and with the zero point added: whole numbers.
    E2M1,
    /// The 254 values of floats with 4 bits of exponent and 3 of mantissa (OCP E4M3), which are no whole
    /// numbers: the bits of the float, with its sign in the lowest place.
    E4M3,
}

/// The numbers of [`CodeValues::E2M1`]: zero point 12. For machines without tables they are
/// `4 c + 5 - (2 a + b)` where `a` is `c` within 1 and 13, and `b` is `a` within 3 and 11. No weight has the
/// last code.
const E2M1: [u8; 16] = [0, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 28];

/// Weights that share a scale.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum GroupSize {
    /// Groups of this many columns of a row; the last group of a row may be shorter.
    Columns(usize),
    /// A whole row (per channel).
    Row,
}

/// Type in which the scale of a group is stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ScaleType {
    F16,
    BF16,
    F32,
}

/// The zero point of groups: the code of zero, or the value of code 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ZeroPoint {
    /// `(code - zero) * scale` with the same zero point everywhere: symmetric.
    Constant(u8),
    /// `(code - zero) * scale` with a whole zero point for each group, stored in the type of the scale (AWQ,
    /// GPTQ).
    PerGroup,
    /// `code * scale + minimum` with a minimum for each group, stored in the type of the scale (ggml Q4_1).
    Minimum,
}

impl ScaleType {
    pub const fn bytes(self) -> usize {
        match self {
            ScaleType::F16 | ScaleType::BF16 => 2,
            ScaleType::F32 => 4,
        }
    }
    pub const fn name(self) -> &'static str {
        match self {
            ScaleType::F16 => "f16",
            ScaleType::BF16 => "bf16",
            ScaleType::F32 => "f32",
        }
    }
}

/// Bits of the words that codes are packed in.
const WORD: usize = 32;

/// Columns that kernels take together where codes divide a byte.
const BLOCK: usize = 32;

impl QuantFormat {
    /// The registry: every format that there is. Another one is a line here, and lines for what `--quant`
    /// calls it in `mlcc_passes::scheme`.
    pub const ALL: &'static [QuantFormat] = &[
        // MLC q4f16, ggml Q4_0: codes 0..=14, and 15 in blocks kept as a file has them.
        QuantFormat::new("q4g32", 4, GroupSize::Columns(32), ZeroPoint::Constant(7)),
        // MLC q8f16, ggml Q8_0: codes 1..=255, and 0 in blocks kept as a file has them.
        QuantFormat::new("q8g32", 8, GroupSize::Columns(32), ZeroPoint::Constant(128)),
        // MLC q3f16: ten codes 0..=6 in a word.
        QuantFormat::new("q3g40", 3, GroupSize::Columns(40), ZeroPoint::Constant(3)),
        QuantFormat::new("q4g32_f32", 4, GroupSize::Columns(32), ZeroPoint::Constant(7))
            .with_scale(ScaleType::F32),
        QuantFormat::new("q4g32_bf16", 4, GroupSize::Columns(32), ZeroPoint::Constant(7))
            .with_scale(ScaleType::BF16),
        // AWQ, GPTQ, compressed-tensors.
        QuantFormat::new("q4g64", 4, GroupSize::Columns(64), ZeroPoint::Constant(7)),
        QuantFormat::new("q4g128", 4, GroupSize::Columns(128), ZeroPoint::Constant(7)),
        QuantFormat::new("q8g128", 8, GroupSize::Columns(128), ZeroPoint::Constant(128)),
        QuantFormat::new("q4g32_zero", 4, GroupSize::Columns(32), ZeroPoint::PerGroup),
        QuantFormat::new("q4g64_zero", 4, GroupSize::Columns(64), ZeroPoint::PerGroup),
        QuantFormat::new("q4g128_zero", 4, GroupSize::Columns(128), ZeroPoint::PerGroup),
        QuantFormat::new("q8g32_zero", 8, GroupSize::Columns(32), ZeroPoint::PerGroup),
        // For scales that f16 does not hold.
        QuantFormat::new("q4g32_bf16_zero", 4, GroupSize::Columns(32), ZeroPoint::PerGroup)
            .with_scale(ScaleType::BF16),
        // One scale per output channel.
        QuantFormat::new("q8row", 8, GroupSize::Row, ZeroPoint::Constant(128)),
        // ggml Q4_1; Q5_1 with bits to spare.
        QuantFormat::new("q4g32_min", 4, GroupSize::Columns(32), ZeroPoint::Minimum),
        QuantFormat::new("q8g32_min", 8, GroupSize::Columns(32), ZeroPoint::Minimum),
        // MXFP4 (OCP): scales are powers of two, of which bf16 has all.
        QuantFormat::new("e2m1g32_bf16", 4, GroupSize::Columns(32), ZeroPoint::Constant(12))
            .with_scale(ScaleType::BF16)
            .with_values(CodeValues::E2M1),
        // FP8 in blocks of 128 x 128, and per channel: each row of a block has its scale.
        QuantFormat::new("e4m3g128_f32", 8, GroupSize::Columns(128), ZeroPoint::Constant(0))
            .with_scale(ScaleType::F32)
            .with_values(CodeValues::E4M3),
    ];

    pub const Q4G32: QuantFormat = QuantFormat::by_name("q4g32");
    pub const Q8G32: QuantFormat = QuantFormat::by_name("q8g32");

    /// A format with f16 scales.
    const fn new(name: &'static str, bits: usize, group: GroupSize, zero: ZeroPoint) -> QuantFormat {
        QuantFormat { bits, values: CodeValues::Whole, group, scale: ScaleType::F16, zero, name }
    }

    const fn with_scale(self, scale: ScaleType) -> QuantFormat {
        QuantFormat { scale, ..self }
    }

    const fn with_values(self, values: CodeValues) -> QuantFormat {
        QuantFormat { values, ..self }
    }

    /// The format of a name that there is, for constants.
    pub const fn by_name(name: &str) -> QuantFormat {
        let mut at = 0;
        while at < QuantFormat::ALL.len() {
            if same(QuantFormat::ALL[at].name, name) {
                return QuantFormat::ALL[at];
            }
            at += 1;
        }
        panic!("no format has this name");
    }

    pub const fn name(self) -> &'static str {
        self.name
    }

    pub fn parse(name: &str) -> Option<QuantFormat> {
        QuantFormat::ALL.iter().copied().find(|format| format.name == name)
    }

    /// `q<bits>g<columns of a group>` (`q<bits>row` for whole rows; `e2m1` or `e4m3` in place of `q<bits>`
    /// for such floats), then what differs from f16 scales and a constant zero point: `_bf16` or `_f32`,
    /// `_zero` or `_min`.
    pub fn systematic_name(self) -> String {
        let group = match self.group {
            GroupSize::Columns(columns) => format!("g{columns}"),
            GroupSize::Row => "row".into(),
        };
        let scale = match self.scale {
            ScaleType::F16 => "",
            ScaleType::BF16 => "_bf16",
            ScaleType::F32 => "_f32",
        };
        let zero = match self.zero {
            ZeroPoint::Constant(_) => "",
            ZeroPoint::PerGroup => "_zero",
            ZeroPoint::Minimum => "_min",
        };
        let codes = match self.values {
            CodeValues::Whole => format!("q{}", self.bits),
            CodeValues::E2M1 => "e2m1".into(),
            CodeValues::E4M3 => "e4m3".into(),
        };
        format!("{codes}{group}{scale}{zero}")
    }

    // ---- codes

    /// The largest code.
    pub const fn max_code(self) -> usize {
        (1 << self.bits) - 1
    }

    /// Codes that weights have: from 0 on.
    pub const fn code_count(self) -> usize {
        match self.values {
            CodeValues::Whole => self.max_code() + 1,
            CodeValues::E2M1 => 15,
            CodeValues::E4M3 => 254,
        }
    }

    /// The number that a code means, zero point included.
    pub fn decode(self, code: u8) -> f32 {
        match self.values {
            CodeValues::Whole => code.into(),
            CodeValues::E2M1 => E2M1[usize::from(code & 15)].into(),
            // The exponent of an f32 less 120.
            CodeValues::E4M3 => {
                f32::from_bits((u32::from(code) & 0xfe) << 19 | u32::from(code) << 31) * 2f32.powi(120)
            }
        }
    }

    /// The largest of these numbers that a weight has, where they are whole.
    pub const fn largest_number(self) -> usize {
        match self.values {
            CodeValues::Whole => self.max_code(),
            CodeValues::E2M1 => E2M1[14] as usize,
            CodeValues::E4M3 => 448,
        }
    }

    /// Codes in a word of 32 bits: as many as fit, the lowest bits first.
    pub const fn codes_per_word(self) -> usize {
        WORD / self.bits
    }

    /// True if codes fill bytes; others may lie across the border of two.
    pub const fn fills_bytes(self) -> bool {
        8 % self.bits == 0
    }

    // ---- groups

    /// Weights per group in rows of `k` columns; where that is a whole row, whole blocks of it.
    pub const fn group_size(self, k: usize) -> usize {
        match self.group {
            GroupSize::Columns(columns) => columns,
            GroupSize::Row if k == 0 => BLOCK,
            GroupSize::Row => k.next_multiple_of(BLOCK),
        }
    }

    /// Columns that kernels take together, a part of a group.
    pub const fn block_columns(self) -> usize {
        match self.group {
            GroupSize::Columns(columns) if !self.fills_bytes() => columns,
            GroupSize::Columns(_) | GroupSize::Row => BLOCK,
        }
    }

    /// Numbers of the scale's type that are stored for each group.
    pub const fn numbers_per_group(self) -> usize {
        match self.zero {
            ZeroPoint::Constant(_) => 1,
            ZeroPoint::PerGroup | ZeroPoint::Minimum => 2,
        }
    }

    /// Bits of one weight with its share of what its group stores, in long rows.
    pub fn bits_per_weight(self) -> f64 {
        let codes = WORD as f64 / self.codes_per_word() as f64;
        match self.group {
            GroupSize::Columns(columns) => {
                codes + (8 * self.numbers_per_group() * self.scale.bytes()) as f64 / columns as f64
            }
            GroupSize::Row => codes,
        }
    }

    /// True if all groups have the same zero point.
    pub const fn is_symmetric(self) -> bool {
        matches!(self.zero, ZeroPoint::Constant(_))
    }

    /// True if kernels have integer products for it.
    pub const fn has_integer_products(self) -> bool {
        matches!(self.bits, 4 | 8) && !matches!(self.values, CodeValues::E4M3)
    }
}

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_systematic_and_parse() {
        for &format in QuantFormat::ALL {
            assert_eq!(format.name(), format.systematic_name());
            assert_eq!(QuantFormat::parse(format.name()), Some(format));
        }
        assert_eq!(QuantFormat::parse("q4g33"), None);
    }

    #[test]
    fn numbers_of_small_floats() {
        let format = QuantFormat::by_name("e2m1g32_bf16");
        let values: Vec<f32> = (0..15).map(|code| (format.decode(code) - 12.0) / 2.0).collect();
        let positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        assert_eq!(values[7..], positive);
        assert!(values.iter().rev().zip(&values).all(|(a, b)| *a == -b));
        for code in 0..16 {
            let a = code.clamp(1, 13);
            assert_eq!(format.decode(code), f32::from(4 * code + 5 - (2 * a + a.clamp(3, 11))));
        }
        let format = QuantFormat::by_name("e4m3g128_f32");
        let codes = [0x00, 0x02, 0x10, 0x70, 0x71, 0xfc, 0xfd];
        let values = [0.0, 2f32.powi(-9), 2f32.powi(-6), 1.0, -1.0, 448.0, -448.0];
        assert_eq!(codes.map(|code| format.decode(code)), values);
    }

    /// Properties that layouts and kernels rely on.
    #[test]
    fn groups_are_whole_blocks_of_whole_words() {
        for &format in QuantFormat::ALL {
            assert!((2..=8).contains(&format.bits), "{}", format.name());
            assert!(format.block_columns().is_multiple_of(format.codes_per_word()), "{}", format.name());
            if let ZeroPoint::Constant(zero) = format.zero {
                let zeros =
                    (0..format.code_count()).filter(|&code| format.decode(code as u8) == f32::from(zero));
                // A float has a second one.
                assert!(matches!(zeros.count(), 1 | 2), "{}: the code of 0", format.name());
            }
            for k in [0, 1, 40, 300] {
                assert!(format.group_size(k).is_multiple_of(format.block_columns()), "{}", format.name());
            }
        }
    }
}
