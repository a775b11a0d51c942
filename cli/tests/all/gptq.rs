//! GPTQ of widths that no reference case has, 2 and 8 bits with both versions of the zero points: reading
//! gives the values of the codes, a build keeps all of them, and its logits are those of the same values in
//! f32.

use std::path::Path;

use crate::cases::{artifact, assert_close, build_options, feed, load, scheme};
use crate::program::case;
use half::f16;
use mlcc_driver::compile::{BuildOptions, BuildSource};
use mlcc_models::{Checkpoint, StoredType};
use serde_json::{Map, Value, json};

struct GptqLayer {
    bits: usize,
    group: usize,
    symmetric: bool,
    /// Version 1: zero points are stored less one.
    stored_minus_one: bool,
    format: &'static str,
}

/// A weight in codes: `values` are their values, `[rows, columns]`.
struct GptqCodes {
    words: Vec<u32>,
    zeros: Vec<u32>,
    scales: Vec<f16>,
    values: Vec<f32>,
}

impl GptqLayer {
    /// Rounds a matrix of `rows` outputs to the nearest codes.
    fn quantize(&self, weights: &[f32], rows: usize) -> GptqCodes {
        let columns = weights.len() / rows;
        let (most, per_word) = ((1u32 << self.bits) - 1, 32 / self.bits);
        let groups = columns / self.group;
        let mut codes = GptqCodes {
            words: vec![0; columns / per_word * rows],
            zeros: vec![0; groups * rows / per_word],
            scales: vec![f16::ZERO; groups * rows],
            values: vec![0.0; weights.len()],
        };
        for (number, group) in weights.chunks(self.group).enumerate() {
            let (row, g) = (number / groups, number % groups);
            let low = group.iter().fold(0f32, |m, &w| m.min(w));
            let high = group.iter().fold(0f32, |m, &w| m.max(w));
            let range = if self.symmetric { 2.0 * high.max(-low) } else { high - low };
            let scale = f16::from_f32(range / most as f32);
            let least = u32::from(self.stored_minus_one);
            let zero = match self.symmetric {
                true => most.div_ceil(2),
                false => (-low / scale.to_f32()).round().clamp(least as f32, most as f32) as u32,
            };
            codes.scales[g * rows + row] = scale;
            codes.zeros[(g * rows + row) / per_word] |= (zero - least) << (self.bits * (row % per_word));
            for (i, &w) in group.iter().enumerate() {
                let code = (w / scale.to_f32()).round() + zero as f32;
                let code = code.clamp(0.0, most as f32) as u32;
                let column = g * self.group + i;
                codes.words[column / per_word * rows + row] |= code << (self.bits * (column % per_word));
                codes.values[row * columns + column] = (code as f32 - zero as f32) * scale.to_f32();
            }
        }
        codes
    }

    fn config(&self) -> Value {
        let version = if self.stored_minus_one { "gptq" } else { "gptq_v2" };
        json!({
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": false,
            "sym": self.symmetric, "checkpoint_format": version
        })
    }
}

#[derive(Default)]
struct CheckpointFile {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl CheckpointFile {
    fn add(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: impl IntoIterator<Item = u8>) {
        let begin = self.data.len();
        self.data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, self.data.len()]});
        self.header.insert(name.into(), entry);
    }

    fn write(&self, folder: &Path, config: &Value) {
        std::fs::create_dir(folder).unwrap();
        let header = Value::Object(self.header.clone()).to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &self.data].concat();
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }
}

/// The matrices of a reference case in these codes, and their values, in folders of their own.
fn write(gptq: &GptqLayer, original: &Checkpoint, [packed, plain]: [&Path; 2]) {
    let (mut codes_file, mut plain_file) = (CheckpointFile::default(), CheckpointFile::default());
    for info in original.tensors() {
        let values = original.read(&info.name).unwrap().to_f32().unwrap();
        let StoredType::Packed(_) = info.dtype else {
            let bytes = || values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes());
            codes_file.add(&info.name, "F16", &info.shape, bytes());
            plain_file.add(&info.name, "F16", &info.shape, bytes());
            continue;
        };
        let &[rows, columns] = info.shape.as_slice() else { panic!("{} is no matrix", info.name) };
        let (per_word, groups) = (32 / gptq.bits, columns / gptq.group);
        let codes = gptq.quantize(&values, rows);
        let module = info.name.strip_suffix(".weight").unwrap();
        let mut part = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
            codes_file.add(&format!("{module}.{name}"), dtype, shape, bytes);
        };
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
        part("qweight", "I32", &[columns / per_word, rows], words(&codes.words));
        part("qzeros", "I32", &[groups, rows / per_word], words(&codes.zeros));
        part("scales", "F16", &[groups, rows], codes.scales.iter().flat_map(|s| s.to_le_bytes()).collect());
        let order: Vec<u32> = (0..columns).map(|column| (column / gptq.group) as u32).collect();
        part("g_idx", "I32", &[columns], words(&order));
        plain_file.add(
            &info.name,
            "F32",
            &info.shape,
            codes.values.iter().flat_map(|value| value.to_le_bytes()),
        );
    }
    let config = std::fs::read(case("quant-gptq").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    plain_file.write(plain, &config);
    config["quantization_config"] = gptq.config();
    codes_file.write(packed, &config);
}

fn checkpoint(folder: &Path) -> Checkpoint {
    BuildSource::open(&build_options(folder)).unwrap_or_else(|e| panic!("{e}")).checkpoint
}

#[test]
fn two_and_eight_bits_are_kept() {
    let of = |bits, group, symmetric, stored_minus_one, format| GptqLayer {
        bits,
        group,
        symmetric,
        stored_minus_one,
        format,
    };
    let all = [
        of(2, 32, false, true, "q4g32_zero"),
        of(2, 64, true, false, "q4g64"),
        of(8, 128, true, true, "q8g128"),
        of(8, 64, false, false, "q8g32_zero"),
    ];
    let original = checkpoint(&case("quant-gptq"));
    for gptq in all {
        let what = format!("{} bits in groups of {}, as {}", gptq.bits, gptq.group, gptq.format);
        let folder = tempfile::tempdir().unwrap();
        let [packed, plain] = ["packed", "plain"].map(|name| folder.path().join(name));
        write(&gptq, &original, [&packed, &plain]);
        let (codes, values) = (checkpoint(&packed), checkpoint(&plain));
        for info in values.tensors() {
            let of = |checkpoint: &Checkpoint| checkpoint.read(&info.name).unwrap().to_f32().unwrap();
            assert!(of(&codes) == of(&values), "{what}: {} is read otherwise", info.name);
        }
        let mut kept = build_options(&packed);
        (kept.quant, kept.keep_quant) = (scheme("q8f16_1"), true);
        let f32 = BuildOptions { quant: scheme("f32"), quant_name: "f32".into(), ..build_options(&plain) };
        let (kept, report) = artifact(&kept, folder.path(), "kept.so");
        let rows: Vec<_> = report.conversions.iter().filter(|row| row.stored == "GPTQ").collect();
        assert_eq!(rows.len(), 1, "{what}: {rows:?}");
        assert_eq!((rows[0].format.as_str(), rows[0].how), (gptq.format, "kept: the same values"), "{what}");
        let (f32, _) = artifact(&f32, folder.path(), "f32.so");
        let logits = |path: &Path| {
            let model = load(path, None, 1);
            let mut session = model.session().unwrap();
            [feed(&mut session, &[3, 1, 4, 1, 5, 9, 2, 6], 8), feed(&mut session, &[2, 7, 1], 1)]
        };
        for (expected, found) in logits(&f32).iter().zip(logits(&kept)) {
            assert_close(&what, expected, &found, 1e-3);
        }
    }
}
