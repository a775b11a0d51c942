//! The contraction generators against plain f64 arithmetic, through the kernel interpreter: every weight format and
//! activation type, with the parameters of every feature level, at shapes that leave short groups, short tiles and
//! left-over rows.

use mlcc_interp::kernel::{Buffer, Options, Order, run_with};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, Sym, SymValues};
use mlcc_ir::kernel::{Access, BufId, Kernel};
use mlcc_ir::text::print_kernel;
use mlcc_ir::types::{DType, Format, Packing};
use mlcc_kernels::contraction::{
    Activation, CodeBlock, Codes, GROUP, MatMul, Weight, choose_gpu, emit_gpu_matmul, emit_matmul,
};
use mlcc_kernels::params::{IntDot, KernelTarget, MatMulParams, choose};
use mlcc_quant::tile::group_bytes;
use mlcc_quant::{Layout, PackOptions, TILE, dequantize, pack};
use mlcc_target::Arch;

const FORMATS: [DType; 5] =
    [DType::F32, DType::F16, DType::BF16, DType::Packed(Format::Q4G32), DType::Packed(Format::Q8G32)];
const PACKED: [DType; 2] = [DType::Packed(Format::Q4G32), DType::Packed(Format::Q8G32)];

#[derive(Clone, Copy, PartialEq, Debug)]
enum X {
    F32,
    BF16,
    /// int8 codes, scales per 64 columns.
    I8,
    /// 16-bit codes in two planes, scales per 128 columns.
    I16,
}

impl X {
    /// Planes and columns per scale of integer activations.
    fn codes(self) -> Option<(usize, usize)> {
        match self {
            X::F32 | X::BF16 => None,
            X::I8 => Some((1, 64)),
            X::I16 => Some((2, 128)),
        }
    }
}

/// Deterministic values in -1..1.
struct Noise(u64);
impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32 / 8_388_608.0) - 1.0
    }
    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// One problem with its inputs and the exact result.
struct Case {
    weight: DType,
    x_type: X,
    m: usize,
    n: usize,
    k: usize,
    /// Elements of w before the tensor.
    w_offset: usize,
    w_bytes: Vec<u8>,
    /// Float activations.
    x: Buffer,
    /// Integer activations, row-major, with their scales and starts.
    codes: Vec<i32>,
    scales: Vec<f32>,
    starts: Vec<i32>,
    want: Vec<f64>,
    /// Sum of the magnitudes of the products of each result, for the tolerance.
    size: Vec<f64>,
}

impl Case {
    fn new(weight: DType, packing: Packing, x_type: X, (m, n, k): (usize, usize, usize)) -> Case {
        let mut noise = Noise((m * 1009 + n * 31 + k) as u64);
        let w_offset = 64;
        let w = noise.vec(n * k);
        let bytes = pack(weight, packing, n, k, &w, PackOptions::default()).unwrap();
        let w = dequantize(weight, packing, n, k, &bytes).unwrap();
        let element = weight.bytes().unwrap_or(1);
        let mut w_bytes = vec![0xff; w_offset * element];
        w_bytes.extend(bytes);
        let raw = noise.vec(m * k);
        let mut case = Case {
            weight,
            x_type,
            m,
            n,
            k,
            w_offset,
            w_bytes,
            x: Buffer::zeros(DType::F32, 0),
            codes: Vec::new(),
            scales: Vec::new(),
            starts: Vec::new(),
            want: Vec::new(),
            size: Vec::new(),
        };
        let x = case.activations(&raw);
        for i in 0..m {
            for j in 0..n {
                let product = |c| f64::from(x[i * k + c]) * f64::from(w[j * k + c]);
                case.want.push((0..k).map(product).sum());
                case.size.push((0..k).map(|c| product(c).abs()).sum());
            }
        }
        case
    }

    /// Fills the buffers of the activations and returns the values that they stand for.
    fn activations(&mut self, raw: &[f32]) -> Vec<f32> {
        let (m, k, stride) = (self.m, self.k, self.k.next_multiple_of(GROUP));
        let padded: Vec<f32> = raw
            .chunks(k)
            .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, stride - k)))
            .collect();
        let Some((planes, group)) = self.x_type.codes() else {
            if self.x_type == X::F32 {
                self.x = Buffer::from_f32(raw);
                return raw.to_vec();
            }
            self.x = Buffer::from_floats(DType::BF16, raw);
            return self.x.to_f32();
        };
        let largest_code = if planes == 1 { 127.0 } else { 32512.0 };
        let zero_point = match self.weight {
            DType::Packed(format) => mlcc_quant::tile::zero_point(format) as i32,
            _ => 0,
        };
        let mut values = Vec::new();
        for row in padded.chunks(stride) {
            let (begin, mut before) = (self.scales.len(), 1.0);
            for columns in row.chunks(group) {
                let scale = columns.iter().fold(0.0_f32, |m, v| m.max(v.abs())) / largest_code;
                let here: Vec<i32> = columns.iter().map(|v| (v / scale).round() as i32).collect();
                self.scales.push(before / scale);
                before = scale;
                self.starts.extend(here.chunks(GROUP).map(|c| -zero_point * c.iter().sum::<i32>()));
                values.extend(here.iter().map(|&c| c as f32 * scale));
                self.codes.extend(here);
            }
            self.scales[begin] = before;
        }
        (0..m * k).map(|i| values[i / k * stride + i % k]).collect()
    }

    /// The codes in the order of [`Codes`].
    fn ordered(&self, planes: usize, block: CodeBlock) -> Buffer {
        let stride = self.k.next_multiple_of(GROUP);
        let byte = |code: i32, plane: usize| match (planes, plane) {
            (1, _) => code as i8,
            (_, 0) => ((code + 128) >> 8) as i8,
            _ => (code - (((code + 128) >> 8) << 8)) as i8,
        };
        let mut bytes = Vec::new();
        let mut row = 0;
        while row < self.m {
            let (all, columns) = (block.rows as usize, block.columns as usize);
            let rows = if row + all <= self.m { all } else { 1 };
            for g in 0..stride / GROUP {
                for plane in 0..planes {
                    for first in (0..GROUP).step_by(columns) {
                        for r in row..row + rows {
                            let at = r * stride + g * GROUP + first;
                            bytes.extend(self.codes[at..at + columns].iter().map(|&c| byte(c, plane) as u8));
                        }
                    }
                }
            }
            row += rows;
        }
        Buffer::new(if planes == 1 { DType::I8 } else { DType::I16 }, bytes)
    }

    fn x(&self, block: CodeBlock) -> Buffer {
        match self.x_type.codes() {
            Some((planes, _)) => self.ordered(planes, block),
            None => self.x.clone(),
        }
    }

    /// Declares the buffers and emits the contraction with an epilogue that stores the sums.
    fn kernel(
        &self,
        block: CodeBlock,
        emit: impl FnOnce(&mut KernelBuilder, MatMul, &mut mlcc_kernels::contraction::Epilogue),
    ) -> Kernel {
        let mut kb = KernelBuilder::new("contraction");
        let x = self.x(block);
        let x = kb.param("x", x.dtype, x.len(), Access::In, 64);
        let (scales, starts) = (
            kb.param("scales", DType::F32, self.scales.len(), Access::In, 64),
            kb.param("starts", DType::I32, self.starts.len(), Access::In, 64),
        );
        let w_dtype = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let w_len = self.w_bytes.len() / w_dtype.bytes().unwrap();
        let w = kb.param("w", w_dtype, w_len, Access::In, 64);
        let y_len = Dim::sym(Sym::N).scale(self.n as i64);
        let y = kb.param("y", DType::F32, y_len, Access::Out, 64);
        let activation = activation(self.x_type, block, scales, starts);
        let m = if self.m == 1 { kb.int(1) } else { kb.sym(Sym::N) };
        let weight = Weight::of(self.weight).unwrap();
        let (n, k, w_offset) = (self.n, self.k, self.w_offset);
        let streams = [Some(y), None, None, None];
        let spec = MatMul { x, activation, w, w_offset, weight, m, n, k, chosen: None, streams };
        emit(&mut kb, spec, &mut |kb, tile| {
            let start = kb.mul_int(tile.row, n as i64);
            let at = kb.add(start, tile.col);
            let index = kb.ramp1(at, tile.lanes);
            kb.store_masked(y, index, tile.acc, tile.mask);
        });
        kb.finish()
    }

    fn check(&self, what: &str, kernel: &Kernel, block: CodeBlock, options: &Options) {
        let what =
            format!("{what}: {} x {:?}, m {} n {} k {}", self.weight, self.x_type, self.m, self.n, self.k);
        // Each of about k roundings costs half a unit of the running sum, at most; integer groups cost one per group.
        let exact_groups = self.x_type.codes().is_some();
        let roundings = if exact_groups { self.k.div_ceil(GROUP) * 4 } else { self.k + 8 };
        for (i, got) in self.run(&what, kernel, block, options).into_iter().enumerate() {
            let tolerance = roundings as f64 * 2.0_f64.powi(-24) * self.size[i] + 1e-30;
            let error = (f64::from(got) - self.want[i]).abs();
            let want = self.want[i];
            assert!(error <= tolerance, "{what}: result {i} is {got}, want {want} (+- {tolerance:e})");
        }
    }

    fn run(&self, what: &str, kernel: &Kernel, block: CodeBlock, options: &Options) -> Vec<f32> {
        let w_dtype = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let mut buffers = [
            self.x(block),
            Buffer::from_f32(&self.scales),
            Buffer::from_i32(&self.starts),
            Buffer::new(w_dtype, self.w_bytes.clone()),
            Buffer::zeros(DType::F32, self.m * self.n),
        ];
        if let Err(e) = run_with(kernel, &mut buffers, &SymValues::tokens(self.m as i64), options) {
            panic!("{what}: {e}");
        }
        buffers[4].to_f32()
    }

    fn check_cpu(&self, what: &str, params: &MatMulParams, options: &Options) {
        let block = params.code_block();
        let kernel = self.kernel(block, |kb, spec, epilogue| {
            emit_matmul(kb, &spec, params, epilogue);
        });
        self.check(what, &kernel, block, options);
    }
}

fn cpu_levels() -> Vec<(String, KernelTarget)> {
    mlcc_target::specs()
        .unwrap()
        .iter()
        .filter(|s| s.arch != Arch::Nvptx)
        .flat_map(|s| s.levels.iter().map(|l| (l.name.clone(), KernelTarget::new(s.arch, l))))
        .collect()
}

/// The activation type as the generators know it.
fn activation(x: X, block: CodeBlock, scales: BufId, starts: BufId) -> Activation {
    match (x, x.codes()) {
        (X::F32, _) => Activation::F32,
        (_, Some((planes, group))) => Activation::Codes(Codes { planes, group, block, scales, starts }),
        _ => Activation::BF16,
    }
}

/// The same before there are buffers.
fn kind(x: X) -> Activation {
    activation(x, CodeBlock::SINGLE, BufId(0), BufId(0))
}

const SHAPES: [(usize, usize); 5] = [(32, 64), (5, 7), (33, 100), (20, 45), (60, 33)];

/// Every distinct set of parameters that some level chooses.
fn check_all(formats: &[DType], x: X, m: usize) {
    for &weight in formats {
        let mut sets: Vec<(String, MatMulParams)> = Vec::new();
        for (name, target) in cpu_levels() {
            let params = choose(&target, weight, kind(x), m == 1);
            if sets.iter().all(|(_, known)| *known != params) {
                sets.push((name.clone(), params));
            }
        }
        for (i, (n, k)) in SHAPES.into_iter().enumerate() {
            let case = Case::new(weight, Packing::Tile16, x, (m, n, k));
            let options = Options { workers: i, order: Order::Shuffled(i as u64) };
            sets.iter().for_each(|(name, params)| case.check_cpu(name, params, &options));
        }
    }
}

#[test]
fn matvec_f32() {
    check_all(&FORMATS, X::F32, 1);
}

#[test]
fn matmul_f32() {
    check_all(&FORMATS, X::F32, 17);
}

#[test]
fn few_rows_f32() {
    check_all(&FORMATS, X::F32, 3);
}

#[test]
fn matvec_bf16() {
    check_all(&FORMATS, X::BF16, 1);
}

#[test]
fn matmul_bf16() {
    check_all(&FORMATS, X::BF16, 13);
}

#[test]
fn matvec_int8() {
    check_all(&PACKED, X::I8, 1);
}

/// So many blocks that the weights are unpacked once for all, with rows left over.
#[test]
fn matmul_int8() {
    check_all(&PACKED, X::I8, 31);
}

/// One block, and blocks of all sizes that pass by the weights together.
#[test]
fn few_rows_int8() {
    check_all(&PACKED, X::I8, 4);
    check_all(&PACKED, X::I8, 11);
}

/// One, two and three blocks of eight rows, where the target has such blocks.
#[test]
fn eights_of_rows_int8() {
    check_all(&PACKED, X::I8, 8);
    check_all(&PACKED, X::I8, 24);
    let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == "x86-64-v4-vnni").unwrap();
    let params = choose(&target, PACKED[0], kind(X::I8), false);
    assert_eq!((PACKED[0], params.tall), (DType::Packed(Format::Q4G32), Some((8, 2))));
    // Several pieces of the columns, the last of which has a short group of activations.
    let case = Case::new(PACKED[0], Packing::Tile16, X::I8, (16, 50, 1100));
    case.check_cpu("in pieces", &params, &Options { workers: 2, order: Order::Reverse });
}

#[test]
fn matvec_int16() {
    check_all(&PACKED, X::I16, 1);
}

#[test]
fn matmul_int16() {
    check_all(&PACKED, X::I16, 26);
    check_all(&PACKED, X::I16, 7);
}

/// The chosen instructions are those that the levels were made for.
#[test]
fn choices() {
    let dot = |level: &str| {
        let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == level).unwrap();
        match choose(&target, PACKED[0], kind(X::I8), true).dot {
            IntDot::Unsigned(i) | IntDot::Signed(i) => i.def().name,
            IntDot::Pairs { bytes, .. } => bytes.def().name,
            IntDot::Long(long) => long.multiply.def().name,
            IntDot::Widen => "widen",
        }
    };
    let want = [
        ("x86-64-v2", "pmaddubsw_128"),
        ("x86-64-v3", "vpmaddubsw_256"),
        ("x86-64-v3-vnni", "vpdpbusd_avx_256"),
        ("x86-64-v4", "vpmaddubsw_512"),
        ("x86-64-v4-vnni", "vpdpbusd_512"),
        ("armv8.0", "smull_128"),
        ("armv8.2-dotprod", "sdot_128"),
        ("armv8.6", "usdot_128"),
    ];
    for (level, instr) in want {
        assert_eq!(dot(level), instr, "{level}");
    }
}

/// Many rows have an instruction of their own where the level has one.
#[test]
fn squares() {
    for (name, target) in cpu_levels() {
        let squares = choose(&target, PACKED[0], kind(X::I8), false).squares.map(|i| i.def().name);
        assert_eq!(squares, (name == "armv8.6").then_some("smmla_128"), "{name}");
    }
}

/// Lines of weights that a single row asks for, per group.
#[test]
fn requests() {
    let asked = |level: &str, weight| {
        let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == level).unwrap();
        let params = choose(&target, weight, kind(X::I8), true);
        let case = Case::new(weight, Packing::Tile16, X::I8, (1, 32, 256));
        let kernel = case.kernel(CodeBlock::SINGLE, |kb, spec, epilogue| {
            emit_matmul(kb, &spec, &params, epilogue);
        });
        let instr = params.prefetch.map_or("prefetch", |p| p.instr.def().name);
        print_kernel(&kernel).matches(instr).count()
    };
    let [q4, q8] = PACKED;
    assert_eq!(asked("x86-64-v4-vnni", q4), 5);
    assert_eq!(asked("x86-64-v4-vnni", q8), 9);
    assert_eq!(asked("x86-64-v4-avxvnni", q4), 5);
    assert_eq!(asked("x86-64-v4-avxvnni", q8), 1);
    assert_eq!(asked("x86-64-v4-bf16", q4), 0);
    assert_eq!(asked("x86-64-v4-bf16", q8), 0);
    assert_eq!(asked("x86-64-v3", q4), 5);
    assert_eq!(asked("x86-64-v3", q8), 9);
}

/// Codes at the ends of their ranges: the 16-bit sums of the pair instructions must not saturate.
#[test]
fn extreme_codes() {
    let (m, n, k) = (1, 16, 64);
    for weight in PACKED {
        for (sign, lowest) in [(1.0_f32, false), (-1.0, false), (1.0, true), (-1.0, true)] {
            let mut case = Case::new(weight, Packing::Tile16, X::I8, (m, n, k));
            let mut bytes =
                pack(weight, Packing::Tile16, n, k, &vec![1.0; n * k], PackOptions::default()).unwrap();
            if lowest {
                // What a file may hold, though no weight is packed so: -8 and -128 times the scale.
                let DType::Packed(format) = weight else { unreachable!() };
                let group = group_bytes(format);
                bytes.chunks_mut(group).for_each(|group| group[2 * TILE..].fill(0));
            }
            let w = dequantize(weight, Packing::Tile16, n, k, &bytes).unwrap();
            case.w_bytes.truncate(case.w_offset);
            case.w_bytes.extend(bytes);
            (case.codes, case.scales, case.starts) = (Vec::new(), Vec::new(), Vec::new());
            let x = case.activations(&vec![sign; k]);
            let total: f64 = (0..k).map(|c| f64::from(x[c]) * f64::from(w[c])).sum();
            case.want = vec![total; n];
            case.size = vec![total.abs(); n];
            for (name, target) in cpu_levels() {
                case.check_cpu(&name, &choose(&target, weight, kind(X::I8), true), &Options::default());
            }
        }
    }
}

/// Row chunks outside of the loop over tiles give the same sums.
#[test]
fn chunks_of_rows() {
    let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == "x86-64-v4").unwrap();
    for (weight, x) in [(DType::F32, X::F32), (PACKED[0], X::I8)] {
        let case = Case::new(weight, Packing::Tile16, x, (45, 40, 40));
        let params = MatMulParams { chunk: Some(28), ..choose(&target, weight, kind(x), false) };
        case.check_cpu("chunked", &params, &Options { workers: 2, order: Order::Reverse });
    }
}

/// Rows longer than a strip: sums wait between its pieces, the last of which is short, also where rows come in chunks.
#[test]
fn pieces_of_long_rows() {
    let level = |level| cpu_levels().into_iter().find(|(name, _)| name == level).unwrap().1;
    let [target, pairs, dots] = ["x86-64-v4-vnni", "x86-64-v3", "x86-64-v4-bf16"].map(level);
    for (x, weight) in [X::I8, X::I16].into_iter().flat_map(|x| PACKED.map(|weight| (x, weight))) {
        let case = Case::new(weight, Packing::Tile16, x, (45, 50, 1100));
        for (target, chunk) in [(&target, 24), (&target, 256), (&pairs, 24), (&pairs, 256)] {
            let params = MatMulParams { chunk: Some(chunk), ..choose(target, weight, kind(x), false) };
            case.check_cpu("in pieces", &params, &Options { workers: 2, order: Order::Reverse });
        }
    }
    for (target, weight, x) in [
        (&target, DType::F32, X::F32),
        (&target, DType::F16, X::F32),
        (&target, DType::BF16, X::F32),
        (&target, DType::BF16, X::BF16),
        (&dots, DType::BF16, X::BF16),
    ] {
        for (m, k) in [(37, 1033), (34, 100)] {
            let case = Case::new(weight, Packing::Tile16, x, (m, 50, k));
            let params = MatMulParams { chunk: Some(32), ..choose(target, weight, kind(x), false) };
            case.check_cpu("in pieces", &params, &Options { workers: 2, order: Order::Reverse });
        }
    }
}

#[test]
fn gpu() {
    let params = choose_gpu();
    let options = Options { workers: 1, order: Order::Shuffled(3) };
    let activations = |weight: DType| if weight.is_packed() { vec![X::F32] } else { vec![X::F32, X::BF16] };
    for (weight, x) in FORMATS.into_iter().flat_map(|w| activations(w).into_iter().map(move |x| (w, x))) {
        // k = 1100 and 1033 take full rounds, single pieces, partial warps and left-over columns.
        for (m, n, k) in [(1, 5, 7), (1, 9, 1033), (1, 4, 1100), (3, 5, 7), (33, 40, 70)] {
            let case = Case::new(weight, Packing::RowMajor, x, (m, n, k));
            let kernel = case.kernel(CodeBlock::SINGLE, |kb, spec, epilogue| {
                emit_gpu_matmul(kb, &spec, &params, epilogue).unwrap()
            });
            assert!(kernel.is_gpu());
            case.check("gpu", &kernel, CodeBlock::SINGLE, &options);
        }
    }
}

/// The scalar fragment reads what the host reads, in every packing.
#[test]
fn unpack_scalar_reads_every_packing() {
    let (n, k) = (19, 41);
    for weight in FORMATS {
        for packing in Packing::ALL {
            let rows = Noise(7).vec(n * k);
            let bytes = pack(weight, packing, n, k, &rows, PackOptions::default()).unwrap();
            let layout = Layout::new(weight, packing, n, k).unwrap();
            let mut kb = KernelBuilder::new("unpack");
            let w = kb.param("w", layout.buffer_dtype(), layout.len, Access::In, 64);
            let y = kb.param("y", DType::F32, n * k, Access::Out, 64);
            let (rows_e, cols_e) = (kb.int(n as i64), kb.int(k as i64));
            kb.serial("row", rows_e, |kb, row| {
                kb.serial("col", cols_e, |kb, col| {
                    let value = mlcc_quant::unpack_scalar(kb, &layout, w, row, col);
                    let start = kb.mul_int(row, k as i64);
                    let at = kb.add(start, col);
                    kb.store(y, at, value);
                });
            });
            let mut buffers =
                [Buffer::new(layout.buffer_dtype(), bytes.clone()), Buffer::zeros(DType::F32, n * k)];
            run_with(&kb.finish(), &mut buffers, &SymValues::tokens(1), &Options::default()).unwrap();
            let want = dequantize(weight, packing, n, k, &bytes).unwrap();
            assert_eq!(buffers[1].to_f32(), want, "{weight} {}", packing.name());
        }
    }
}
