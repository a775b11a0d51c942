use super::draw::f16_bits;
use super::*;

const NORMAL: ValueDistribution = ValueDistribution::Normal { mean: 0.0, deviation: 0.5 };

fn piece(bytes: u64, content: PieceContent) -> DrawPiece {
    DrawPiece { bytes, content }
}

fn draw(offset: u64, count: u64, key: u64, pieces: Vec<DrawPiece>) -> GeneratorEntry {
    GeneratorEntry::Draw(RandomDraw { offset, count, key, pieces })
}

/// Every kind of entry, gaps before, between and after them, draws of several portions.
fn sample() -> WeightGenerator {
    let group = vec![piece(32, PieceContent::Scales(0x2c1f)), piece(256, PieceContent::Codes)];
    let part = vec![
        piece(6, PieceContent::Scales(0x2c1f)),
        piece(26, PieceContent::Fill(0)),
        piece(12, PieceContent::Codes),
        piece(52, PieceContent::Fill(0x77)),
    ];
    let floats = |float, bytes| vec![piece(bytes, PieceContent::Floats(float, NORMAL))];
    let uniform = ValueDistribution::Uniform { low: -2.0, high: 3.0 };
    WeightGenerator {
        seed: 7,
        bytes: 6_000_000,
        entries: vec![
            draw(64, 9000, 1, group),
            draw(2_592_128, 3, 2, part),
            GeneratorEntry::Stored { offset: 2_600_000, bytes: (0..200).collect() },
            draw(2_600_256, 600, 3, floats(FloatType::F32, 4096)),
            draw(5_100_032, 50, 4, floats(FloatType::F16, 6000)),
            draw(5_500_032, 1, 5, floats(FloatType::BF16, 200_000)),
            draw(5_800_000, 1, 6, vec![piece(40_000, PieceContent::Floats(FloatType::F32, uniform))]),
        ],
    }
}

#[test]
fn text_reads_back() {
    let recipe = sample();
    assert_eq!(WeightGenerator::parse(recipe.to_string().as_bytes()), Ok(recipe));
}

#[test]
fn threads_and_portions_change_no_byte() {
    let recipe = sample();
    let one = recipe.generate(1).unwrap();
    assert_eq!(one.len(), 6_000_000);
    assert!(one[..] == recipe.generate(2).unwrap()[..] && one[..] == recipe.generate(5).unwrap()[..]);
    assert_eq!(recipe.hash(), xxhash_rust::xxh3::xxh3_128(&one));
    // Bytes between entries are zero, and stored bytes are unchanged.
    assert!(one[..64].iter().chain(&one[5_840_000..]).all(|&b| b == 0));
    assert!(one[2_600_000..2_600_200].iter().copied().eq(0..200));
    // A draw equals the same draw with another begin: places count from its own begin.
    let GeneratorEntry::Draw(first) = &recipe.entries[0] else { panic!() };
    let moved = WeightGenerator {
        seed: 7,
        bytes: first.bytes().unwrap(),
        entries: vec![GeneratorEntry::Draw(RandomDraw { offset: 0, ..first.clone() })],
    };
    assert!(moved.generate(1).unwrap()[..] == one[64..64 + 9000 * 288]);
}

/// The bytes are part of the format: every version of this code makes the same ones. These were made by
/// another program, from the description in the module's comment.
#[test]
fn bytes_are_fixed() {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let made = |text: &str| hex(&WeightGenerator::parse(text.as_bytes()).unwrap().generate(1).unwrap());
    assert_eq!(
        made("mlcc-recipe 1 0 32\ndraw 0 2 0000000000000001 scales:4:3c00 codes:12\n"),
        "00bc00bc1d169256c15c0289ec2d0a9100bc00bca18debbe5e5532fbeea293f8"
    );
    assert_eq!(
        made("mlcc-recipe 1 0 12\ndraw 0 1 0000000000000001 f32:12:normal:00000000:3f000000\n"),
        "7723a5bf5f159ebe7246093f"
    );
}

fn values(float: FloatType, spread: ValueDistribution) -> Vec<f32> {
    let bytes = 200_000 * float.value_bytes();
    let entries = vec![draw(0, 1, 99, vec![piece(bytes, PieceContent::Floats(float, spread))])];
    let made = WeightGenerator { seed: 0, bytes, entries }.generate(1).unwrap();
    let half = |bits: u16| {
        let magnitude = match u32::from(bits & 0x7fff) {
            0 => 0.0,
            m => f32::from_bits((m << 13) + (112 << 23)),
        };
        if bits & 0x8000 != 0 { -magnitude } else { magnitude }
    };
    match float {
        FloatType::F32 => made.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        FloatType::F16 => made.as_chunks::<2>().0.iter().map(|b| half(u16::from_le_bytes(*b))).collect(),
        FloatType::BF16 => {
            let value = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            made.as_chunks::<2>().0.iter().map(value).collect()
        }
    }
}

fn moments(values: &[f32]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    (mean, (values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n).sqrt())
}

#[test]
fn values_are_spread_as_told() {
    for float in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        let (mean, deviation) =
            moments(&values(float, ValueDistribution::Normal { mean: 1.0, deviation: 0.25 }));
        assert!(
            (mean - 1.0).abs() < 0.005 && (deviation - 0.25).abs() < 0.005,
            "{float:?} {mean} {deviation}"
        );
        let all = values(float, ValueDistribution::Uniform { low: -5.0, high: 3.0 });
        let (mean, deviation) = moments(&all);
        assert!((mean + 1.0).abs() < 0.03 && (deviation - 8.0 / 12_f64.sqrt()).abs() < 0.03, "{float:?}");
        assert!(all.iter().all(|x| (-5.0..=3.0).contains(x)));
    }
    assert!(
        values(FloatType::F32, ValueDistribution::Uniform { low: 2.5, high: 2.5 }).iter().all(|&x| x == 2.5)
    );
}

#[test]
fn codes_and_signs_are_even() {
    let pieces = vec![piece(32, PieceContent::Scales(0x3c00)), piece(256, PieceContent::Codes)];
    let made = WeightGenerator { seed: 0, bytes: 288 * 1000, entries: vec![draw(0, 1000, 5, pieces)] }
        .generate(2)
        .unwrap();
    let (mut counts, mut negative) = ([0_u32; 16], 0);
    for group in made.chunks(288) {
        negative += group[..32].as_chunks::<2>().0.iter().filter(|s| **s == 0xbc00_u16.to_le_bytes()).count();
        assert!(group[..32].as_chunks::<2>().0.iter().all(|s| u16::from_le_bytes(*s) & 0x7fff == 0x3c00));
        group[32..].iter().for_each(|b| {
            counts[usize::from(b & 15)] += 1;
            counts[usize::from(b >> 4)] += 1;
        });
    }
    assert!((7500..8500).contains(&negative), "{negative} of 16000");
    assert!(counts.iter().all(|c| (31_000..33_000).contains(c)), "{counts:?}");
}

#[test]
fn halves_are_cut_off() {
    let expected = [
        (0.0, 0x0000),
        (1.0, 0x3c00),
        (-1.5, 0xbe00),
        (1.9999, 0x3fff),
        (65504.0, 0x7bff),
        (1e9, 0x7bff),
        (6.2e-5, 0x0410),
        (6e-5, 0),
    ];
    assert_eq!(expected.map(|(value, _)| f16_bits(value)), expected.map(|(_, bits)| bits));
}

#[test]
fn damaged_recipes_are_refused() {
    let refused = |text: &str, why: &str| {
        let error = WeightGenerator::parse(text.as_bytes()).unwrap_err();
        assert!(error.contains(why), "{text}: {error}");
    };
    refused("", "starts with");
    refused("mlcc-recipe 2 0 100\n", "starts with");
    refused("mlcc-recipe 1 0\n", "starts with");
    for line in [
        "what 0",
        "draw 0 1",
        "draw 0 1 zz codes:8",
        "draw 0 1 1 codes",
        "draw 0 1 1 codes:8:1",
        "draw 0 1 1 f32:8:normal:0:7f800000",
        "draw 0 1 1 f32:8:even:0:0",
        "bytes 0 123",
        "bytes 0 1g",
        "bytes 0 11 22",
    ] {
        refused(&format!("mlcc-recipe 1 0 100\n{line}\n"), "unknown line");
    }
    for line in [
        "draw 0 13 1 codes:8",
        "draw 99 1 1 codes:2",
        "draw 0 18446744073709551615 1 codes:8",
        "draw 18446744073709551615 1 1 codes:8",
        "draw 0 1 1 codes:18446744073709551615 codes:2",
        "bytes 8 00\nbytes 8 00",
        "bytes 100 00",
    ] {
        refused(&format!("mlcc-recipe 1 0 100\n{line}\n"), "no space");
    }
    for line in
        ["draw 0 1 1 f32:6:normal:0:0", "draw 0 1 1 scales:3:0000", "draw 0 5 1", "draw 0 0 1 codes:8"]
    {
        refused(&format!("mlcc-recipe 1 0 100\n{line}\n"), "no whole values");
    }
    let huge = WeightGenerator::parse(format!("mlcc-recipe 1 0 {}\n", u64::MAX).as_bytes()).unwrap();
    assert!(matches!(huge.generate(1), Err(Error::OutOfMemory { .. })));
}
