//! Matrix products compiled by LLVM for every level of this machine, and emulated for those of AArch64,
//! against the interpreter: the counts of rows that take different paths (one row, few rows, strips), several
//! pieces of k, short tiles and groups; and products of rows with the matrices that they chose.
#![cfg(feature = "llvm")]

use crate::aarch64::{EmulatedDriver, KernelCall};
use crate::cases::{KernelCase, prepare};
use crate::objects::cache;
use mlcc_codegen::executor::{AlignedBytes, KernelExecutor};
use mlcc_codegen::llvm::{cached_kernels_object, callers_object};
use mlcc_interp::compare::Tolerance;
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{BufId, Kernel, ParamAccess};
use mlcc_ir::types::{DType, Packing, QuantFormat};
use mlcc_kernels::matmul::{
    DOT_COLUMNS, ExpertChoice, MatmulActivation, MatmulEpilogue, MatmulProblem, MatmulWeight,
    QuantizedActivations, choose, emit_experts, emit_matmul,
};
use mlcc_kernels::params::KernelTarget;
use mlcc_kernels::quantize::CodeBlock;
use mlcc_quant::{PackOptions, pack};
use mlcc_target::{Arch, FeatureLevel};

/// Levels that this machine runs. The dots of AVX-VNNI machines are those of AVX-512 in another encoding, so
/// a machine with these also runs their kernels, of 256-bit vectors.
fn levels() -> Vec<FeatureLevel> {
    let have = mlcc_target::detected_features();
    let specs = mlcc_target::specs().unwrap();
    let spec = specs.into_iter().find(|s| Some(s.arch) == Arch::of_host());
    let mut levels = spec.map(|s| s.levels).unwrap_or_default();
    levels.retain(|l| l.features.iter().all(|f| have.contains(&f.as_str())));
    let narrow = levels.iter().find(|l| l.name == "x86-64-v4-vnni").cloned();
    levels.extend(narrow.map(|l| {
        let narrow = l.reduced(l.features.clone(), 256).unwrap();
        FeatureLevel { name: "vnni of 256 bits".into(), ..narrow }
    }));
    levels
}

/// Activations; integers in this many planes.
#[derive(Clone, Copy)]
enum MatmulInput {
    F32,
    BF16,
    Codes(usize),
}

#[derive(Clone, Copy)]
struct MatmulCase {
    weight: DType,
    x: MatmulInput,
    m: usize,
    n: usize,
    k: usize,
    /// Matrices of `n` rows, of which each row chooses `SLOTS`; none: there is one matrix.
    experts: Option<usize>,
}

const SLOTS: usize = 2;

/// Columns per activation scale.
const SCALED: usize = 128;

impl MatmulCase {
    fn activation(&self, block: CodeBlock, [scales, starts]: [BufId; 2]) -> MatmulActivation {
        match self.x {
            MatmulInput::Codes(planes) => {
                MatmulActivation::Codes(QuantizedActivations { planes, group: SCALED, block, scales, starts })
            }
            MatmulInput::F32 => MatmulActivation::F32,
            MatmulInput::BF16 => MatmulActivation::BF16,
        }
    }

    fn case(&self, target: &KernelTarget) -> KernelCase {
        let MatmulCase { weight, m, n, k, experts, .. } = *self;
        let (matrices, results) = (experts.unwrap_or(1), experts.map_or(m, |_| m * SLOTS));
        let none = self.activation(CodeBlock::SINGLE, [BufId(0); 2]);
        let plan = choose(target, weight, none, m == 1);
        let plan = match experts {
            Some(_) => plan.for_shape(weight, n, k),
            None => plan.for_dense(weight, n, k),
        };
        let mut noise = noise();
        let values: Vec<f32> = (0..matrices * n * k).map(|_| noise()).collect();
        let packed = pack(weight, Packing::Tile16, matrices * n, k, &values, PackOptions::default()).unwrap();
        let (x_type, stride) = match self.x {
            MatmulInput::Codes(1) => (DType::I8, k.next_multiple_of(DOT_COLUMNS)),
            MatmulInput::Codes(_) => (DType::I16, k.next_multiple_of(DOT_COLUMNS)),
            MatmulInput::F32 => (DType::F32, k),
            MatmulInput::BF16 => (DType::BF16, k),
        };
        let w_type = if weight.is_packed() { DType::U8 } else { weight };
        let mut kb = KernelBuilder::new(format!("product_{m}_{n}_{k}"));
        let x = kb.param("x", x_type, m * stride, ParamAccess::In, 64);
        let scales = kb.param("scales", DType::F32, m * k.div_ceil(SCALED), ParamAccess::In, 64);
        let starts = kb.param("starts", DType::I32, m * k.div_ceil(DOT_COLUMNS), ParamAccess::In, 64);
        let w = kb.param("w", w_type, packed.len() / w_type.bytes().unwrap(), ParamAccess::In, 64);
        let ids = kb.param("ids", DType::I32, results, ParamAccess::In, 64);
        let y = kb.param("y", DType::F32, results * n, ParamAccess::Out, 64);
        let rows = kb.int(m as i64);
        let activation = self.activation(plan.code_block(), [scales, starts]);
        let kind = MatmulWeight::from_dtype(weight).unwrap();
        let problem = MatmulProblem {
            x,
            activation,
            w,
            w_offset: 0,
            weight: kind,
            packing: Packing::Tile16,
            m: rows,
            n,
            k,
            epilogue_operands: [Some(y), None, None, None],
        };
        let store: &mut MatmulEpilogue = &mut |k, sums| sums.store(k.view(y, [1, n as i64]));
        match experts {
            Some(experts) => {
                let choice = ExpertChoice { ids, experts, slots: SLOTS as i64, shared: true };
                emit_experts(&mut kb, &problem, &plan, &choice, store);
            }
            None => {
                emit_matmul(&mut kb, &problem, &plan, store);
            }
        }
        let x = match self.x {
            MatmulInput::Codes(1) => {
                KernelBuffer::from_ints(DType::I8, &integers(&mut noise, m * stride, 127.0))
            }
            MatmulInput::Codes(_) => {
                KernelBuffer::from_ints(DType::I16, &integers(&mut noise, m * stride, 32512.0))
            }
            MatmulInput::F32 => KernelBuffer::from_f32(&floats(&mut noise, m * stride)),
            MatmulInput::BF16 => KernelBuffer::from_floats(DType::BF16, &floats(&mut noise, m * stride)),
        };
        let scales = KernelBuffer::from_f32(&floats(&mut noise, m * k.div_ceil(SCALED)));
        let starts =
            KernelBuffer::from_ints(DType::I32, &integers(&mut noise, m * k.div_ceil(DOT_COLUMNS), 1e6));
        let ids: Vec<i32> = (0..results).map(|i| (i * i % 7 % matrices) as i32).collect();
        let (ids, y) = (KernelBuffer::from_i32(&ids), KernelBuffer::zeros(DType::F32, results * n));
        let buffers = vec![x, scales, starts, KernelBuffer::new(w_type, packed), ids, y];
        let mut case = KernelCase::new(kb.finish(), buffers);
        case.dims = SymValues::for_tokens(m as i64);
        case.tolerance = Tolerance::relative(1e-5);
        case
    }
}

/// Deterministic values in -1..1.
fn noise() -> impl FnMut() -> f32 {
    let mut seed = 1_u32;
    move || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / 8_388_608.0 - 1.0
    }
}

fn floats(noise: &mut impl FnMut() -> f32, len: usize) -> Vec<f32> {
    (0..len).map(|_| noise()).collect()
}

fn integers(noise: &mut impl FnMut() -> f32, len: usize, most: f32) -> Vec<i64> {
    (0..len).map(|_| (noise() * most) as i64).collect()
}

/// Holds the products against the interpreter at every level, with one and with three workers.
fn check(problems: &[MatmulCase]) {
    for level in levels() {
        let target = KernelTarget::new(Arch::of_host().unwrap(), &level);
        let cases = prepare(problems.iter().map(|p| p.case(&target)).collect());
        let kernels: Vec<_> = cases.iter().map(|(c, _)| c.kernel.clone()).collect();
        let executor = KernelExecutor::from_cache(&kernels, &level, &cache()).unwrap();
        for (case, want) in &cases {
            for workers in [1, 3] {
                let mut buffers: Vec<AlignedBytes> =
                    case.buffers.iter().map(|b| AlignedBytes::from_bytes(&b.bytes)).collect();
                executor.run(&case.kernel.name, &mut buffers, &case.dims, workers).unwrap();
                let got: Vec<Vec<u8>> = buffers.iter().map(|b| b.bytes().to_vec()).collect();
                case.check(&format!("{} x{workers}", level.name), &got, want);
            }
        }
    }
}

/// The same at the levels of AArch64, by an emulator where one is installed.
fn check_emulated(problems: &[MatmulCase]) {
    const TRIPLE: &str = "aarch64-unknown-linux-gnu";
    let Some(emulator) = EmulatedDriver::find() else { return };
    let specs = mlcc_target::specs().unwrap();
    let levels = &specs.iter().find(|s| s.arch == Arch::Aarch64).unwrap().levels;
    for level in levels {
        let target = KernelTarget::new(Arch::Aarch64, level);
        let cases = prepare(problems.iter().map(|p| p.case(&target)).collect());
        let kernels: Vec<Kernel> = cases.iter().map(|(c, _)| c.kernel.clone()).collect();
        let calls: Vec<KernelCall<'_>> = (cases.iter())
            .map(|(c, _)| KernelCall { kernel: &c.kernel, dims: &c.dims, buffers: &c.buffers })
            .collect();
        let code = cached_kernels_object(Arch::Aarch64, TRIPLE, level, &kernels, &cache()).unwrap();
        let callers = callers_object(Arch::Aarch64, TRIPLE, &levels[0], &kernels).unwrap();
        let results = emulator.run(code, callers, &calls, 3);
        for ((case, want), got) in cases.iter().zip(&results) {
            case.check(&level.name, got, want);
        }
    }
}

/// Rows, weight rows, columns: one row; few rows that pass by together, in blocks of up to four and of eight;
/// strips of one and of two pieces, with rows and tiles left over.
const SHAPES: [(usize, usize, usize); 6] =
    [(1, 40, 160), (6, 56, 96), (21, 40, 160), (16, 200, 1100), (25, 56, 96), (26, 40, 544)];

/// The plain types, q4g32 and q8g32 meet every shape; the other formats, whose products differ in how codes
/// become numbers, two each, by turns.
fn problems(weight: DType, x: MatmulInput) -> Vec<MatmulCase> {
    let turn = match weight {
        DType::Packed(QuantFormat::Q4G32 | QuantFormat::Q8G32) => None,
        DType::Packed(format) => QuantFormat::ALL.iter().position(|&other| other == format),
        _ => None,
    };
    let shapes = SHAPES.into_iter().enumerate();
    let mine = shapes.filter(|(i, _)| turn.is_none_or(|turn| i % 3 == turn % 3));
    mine.map(|(_, (m, n, k))| MatmulCase { weight, x, m, n, k, experts: None }).collect()
}

fn check_weight(weight: DType, x: MatmulInput) {
    check(&problems(weight, x));
}

fn integer_formats() -> impl Iterator<Item = DType> {
    QuantFormat::ALL
        .iter()
        .filter(|format| format.has_integer_products())
        .map(|&format| DType::Packed(format))
}

#[test]
fn packed_weights_and_int8_codes() {
    integer_formats().for_each(|weight| check_weight(weight, MatmulInput::Codes(1)));
}

#[test]
fn packed_weights_and_int16_codes() {
    integer_formats().for_each(|weight| check_weight(weight, MatmulInput::Codes(2)));
}

#[test]
fn packed_weights_and_floats() {
    QuantFormat::ALL.iter().for_each(|&format| check_weight(DType::Packed(format), MatmulInput::F32));
}

#[test]
fn plain_weights() {
    for weight in [DType::F32, DType::F16, DType::BF16] {
        check_weight(weight, MatmulInput::F32);
    }
    check_weight(DType::BF16, MatmulInput::BF16);
}

/// Rows that each choose two of five matrices: one row; few and many rows of a matrix, and one that no row
/// chose.
#[test]
fn chosen_matrices() {
    choices().chunks(3).for_each(check);
}

fn choices() -> Vec<MatmulCase> {
    let shapes = [(1, 32, 96), (13, 48, 96), (50, 32, 544)];
    let kinds = [
        (DType::Packed(QuantFormat::Q4G32), MatmulInput::Codes(1)),
        (DType::Packed(QuantFormat::Q8G32), MatmulInput::Codes(2)),
        (DType::F16, MatmulInput::F32),
    ];
    let of_kind = |(weight, x)| shapes.map(|(m, n, k)| MatmulCase { weight, x, m, n, k, experts: Some(5) });
    kinds.into_iter().flat_map(of_kind).collect()
}

// Tests of their own, which run side by side: by an emulator these take longest.

#[test]
fn int8_codes_on_aarch64() {
    integer_formats().for_each(|weight| check_emulated(&problems(weight, MatmulInput::Codes(1))));
}

#[test]
fn int16_codes_on_aarch64() {
    integer_formats().for_each(|weight| check_emulated(&problems(weight, MatmulInput::Codes(2))));
}

#[test]
fn floats_on_aarch64() {
    integer_formats().for_each(|weight| check_emulated(&problems(weight, MatmulInput::F32)));
    for weight in [DType::F32, DType::F16, DType::BF16] {
        check_emulated(&problems(weight, MatmulInput::F32));
    }
    check_emulated(&problems(DType::BF16, MatmulInput::BF16));
}

#[test]
fn chosen_matrices_on_aarch64() {
    choices().chunks(3).for_each(check_emulated);
}
