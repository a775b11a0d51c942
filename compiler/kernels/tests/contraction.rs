//! The contraction generators against plain f64 arithmetic, through the kernel interpreter: every weight format and
//! activation type, with the parameters of every feature level, at shapes that leave short groups, short tiles and
//! left-over rows.

use mlcc_interp::kernel::{Buffer, Options, Order, run_with};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, Sym, SymValues};
use mlcc_ir::kernel::{Access, Kernel};
use mlcc_ir::types::{DType, Format, Packing};
use mlcc_kernels::contraction::{
    Activation, GROUP, MatMul, Weight, choose_gpu, emit_gpu_matmul, emit_matmul,
};
use mlcc_kernels::params::{IntDot, KernelTarget, MatMulParams, choose};
use mlcc_quant::{Layout, PackOptions, dequantize, pack};
use mlcc_target::Arch;

const FORMATS: [DType; 5] =
    [DType::F32, DType::F16, DType::BF16, DType::Packed(Format::Q4G32), DType::Packed(Format::Q8G32)];
const PACKED: [DType; 2] = [DType::Packed(Format::Q4G32), DType::Packed(Format::Q8G32)];

#[derive(Clone, Copy, PartialEq, Debug)]
enum X {
    F32,
    BF16,
    I8,
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
    /// Rows of x before the first used one; elements of w before the tensor.
    x_first: usize,
    w_offset: usize,
    w_bytes: Vec<u8>,
    x: Buffer,
    scales: Vec<f32>,
    sums: Vec<i32>,
    want: Vec<f64>,
    /// Sum of the magnitudes of the products of each result, for the tolerance.
    size: Vec<f64>,
    /// Largest activation and weight.
    largest: f64,
}

impl Case {
    fn new(weight: DType, packing: Packing, x_type: X, (m, n, k): (usize, usize, usize)) -> Case {
        let mut noise = Noise((m * 1009 + n * 31 + k) as u64);
        let (x_first, w_offset) = (2, 64);
        let w = noise.vec(n * k);
        let bytes = pack(weight, packing, n, k, &w, PackOptions::default()).unwrap();
        let w = dequantize(weight, packing, n, k, &bytes).unwrap();
        let element = weight.bytes().unwrap_or(1);
        let mut w_bytes = vec![0xff; w_offset * element];
        w_bytes.extend(bytes);
        let rows = m + x_first;
        let raw = noise.vec(rows * k);
        let mut case = Case {
            weight,
            x_type,
            m,
            n,
            k,
            x_first,
            w_offset,
            w_bytes,
            x: Buffer::zeros(DType::F32, 0),
            scales: Vec::new(),
            sums: Vec::new(),
            want: Vec::new(),
            size: Vec::new(),
            largest: 0.0,
        };
        let x = case.activations(&raw, rows);
        let max = |v: &[f32]| v.iter().fold(0.0_f64, |m, x| m.max(f64::from(x.abs())));
        case.largest = max(&x) * max(&w);
        for i in 0..m {
            for j in 0..n {
                let product = |c| f64::from(x[(i + x_first) * k + c]) * f64::from(w[j * k + c]);
                case.want.push((0..k).map(product).sum());
                case.size.push((0..k).map(|c| product(c).abs()).sum());
            }
        }
        case
    }

    /// Fills the buffers of the activations and returns the values that they stand for.
    fn activations(&mut self, raw: &[f32], rows: usize) -> Vec<f32> {
        let (k, stride) = (self.k, self.k.next_multiple_of(GROUP));
        let padded: Vec<f32> = raw
            .chunks(k)
            .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, stride - k)))
            .collect();
        match self.x_type {
            X::F32 => {
                self.x = Buffer::from_f32(raw);
                raw.to_vec()
            }
            X::BF16 => {
                self.x = Buffer::from_floats(DType::BF16, &padded);
                let rounded = self.x.to_f32();
                (0..rows * k).map(|i| rounded[i / k * stride + i % k]).collect()
            }
            X::I8 => {
                let mut codes = Vec::new();
                for group in padded.chunks(GROUP) {
                    let scale = group.iter().fold(0.0_f32, |m, v| m.max(v.abs())) / 127.0;
                    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                    let here: Vec<i8> = group.iter().map(|v| (v * inverse).round() as i8).collect();
                    self.scales.push(scale);
                    self.sums.push(here.iter().map(|&c| i32::from(c)).sum());
                    codes.extend(here);
                }
                self.x = Buffer::from_i8(&codes);
                let groups = stride / GROUP;
                (0..rows * k)
                    .map(|i| {
                        let (row, col) = (i / k, i % k);
                        f32::from(codes[row * stride + col]) * self.scales[row * groups + col / GROUP]
                    })
                    .collect()
            }
        }
    }

    /// Declares the buffers and emits the contraction with an epilogue that stores the sums.
    fn kernel(
        &self,
        emit: impl FnOnce(&mut KernelBuilder, MatMul, &mut mlcc_kernels::contraction::Epilogue),
    ) -> Kernel {
        let mut kb = KernelBuilder::new("contraction");
        let x = kb.param("x", self.x.dtype, self.x.len(), Access::In, 64);
        let (scales, sums) = (
            kb.param("scales", DType::F32, self.scales.len(), Access::In, 64),
            kb.param("sums", DType::I32, self.sums.len(), Access::In, 64),
        );
        let w_dtype = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let w_len = self.w_bytes.len() / w_dtype.bytes().unwrap();
        let w = kb.param("w", w_dtype, w_len, Access::In, 64);
        let y_len = Dim::sym(Sym::N).scale(self.n as i64);
        let y = kb.param("y", DType::F32, y_len, Access::Out, 64);
        let activation = match self.x_type {
            X::F32 => Activation::F32,
            X::BF16 => Activation::BF16,
            X::I8 => Activation::I8 { scales, sums },
        };
        let m = if self.m == 1 { kb.int(1) } else { kb.sym(Sym::N) };
        let x_first = kb.int(self.x_first as i64);
        let weight = Weight::of(self.weight).unwrap();
        let (n, k, w_offset) = (self.n, self.k, self.w_offset);
        let spec = MatMul { x, activation, x_first, w, w_offset, weight, m, n, k };
        emit(&mut kb, spec, &mut |kb, tile| {
            let start = kb.mul_int(tile.row, n as i64);
            let at = kb.add(start, tile.col);
            let index = kb.ramp1(at, tile.lanes);
            kb.store_masked(y, index, tile.acc, tile.mask);
        });
        kb.finish()
    }

    /// `split`: activations were rounded to 16 bits per group.
    fn check(&self, what: &str, kernel: &Kernel, options: &Options, split: bool) {
        let what =
            format!("{what}: {} x {:?}, m {} n {} k {}", self.weight, self.x_type, self.m, self.n, self.k);
        // Each of about k roundings costs half a unit of the running sum, at most; integer groups cost one per group.
        let exact_groups = self.x_type == X::I8 && !kernel.is_gpu();
        let roundings = if exact_groups { self.k.div_ceil(GROUP) * 4 } else { self.k + 8 };
        for (i, got) in self.run(&what, kernel, options).into_iter().enumerate() {
            let tolerance = roundings as f64 * 2.0_f64.powi(-24) * self.size[i] + 1e-30;
            let tolerance = tolerance + if split { self.largest * self.k as f64 / 65_000.0 } else { 0.0 };
            let error = (f64::from(got) - self.want[i]).abs();
            let want = self.want[i];
            assert!(error <= tolerance, "{what}: result {i} is {got}, want {want} (+- {tolerance:e})");
        }
    }

    fn run(&self, what: &str, kernel: &Kernel, options: &Options) -> Vec<f32> {
        let w_dtype = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let mut buffers = [
            self.x.clone(),
            Buffer::from_f32(&self.scales),
            Buffer::from_i32(&self.sums),
            Buffer::new(w_dtype, self.w_bytes.clone()),
            Buffer::zeros(DType::F32, self.m * self.n),
        ];
        if let Err(e) = run_with(kernel, &mut buffers, &SymValues::tokens(self.m as i64), options) {
            panic!("{what}: {e}");
        }
        buffers[4].to_f32()
    }

    fn check_cpu(&self, what: &str, params: &MatMulParams, options: &Options) {
        let kernel = self.kernel(|kb, spec, epilogue| {
            emit_matmul(kb, &spec, params, epilogue);
        });
        let split = params.split && self.weight.is_packed() && self.x_type != X::I8;
        self.check(what, &kernel, options, split);
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

/// The activation type as the generator wants to know it before there are buffers.
fn kind(x: X) -> Activation {
    let none = mlcc_ir::kernel::BufId(0);
    match x {
        X::F32 => Activation::F32,
        X::BF16 => Activation::BF16,
        X::I8 => Activation::I8 { scales: none, sums: none },
    }
}

const SHAPES: [(usize, usize); 5] = [(32, 64), (5, 7), (33, 100), (20, 45), (60, 33)];

/// Every distinct set of parameters that some level chooses.
fn check_all(formats: &[DType], x: X, m: usize) {
    for &weight in formats {
        let mut sets: Vec<(String, MatMulParams)> = Vec::new();
        for (name, target) in cpu_levels() {
            let params = choose(&target, weight, kind(x), m == 1);
            let unsplit = MatMulParams { split: false, ..params.clone() };
            let splits = params.split && weight.is_packed() && x != X::I8;
            for params in [params, unsplit].into_iter().take(if splits { 2 } else { 1 }) {
                if sets.iter().all(|(_, known)| *known != params) {
                    sets.push((name.clone(), params));
                }
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

#[test]
fn matmul_int8() {
    check_all(&PACKED, X::I8, 17);
}

/// The chosen instructions are those that the levels were made for.
#[test]
fn choices() {
    let dot = |level: &str| {
        let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == level).unwrap();
        match choose(&target, PACKED[0], kind(X::I8), true).dot {
            IntDot::Unsigned(i) | IntDot::Signed(i) => i.def().name,
            IntDot::Pairs { bytes, .. } => bytes.def().name,
            IntDot::Widen => "widen",
        }
    };
    let want = [
        ("x86-64-v2", "pmaddubsw_128"),
        ("x86-64-v3", "vpmaddubsw_256"),
        ("x86-64-v4", "vpmaddubsw_512"),
        ("x86-64-v4-vnni", "vpdpbusd_512"),
        ("armv8.0", "widen"),
        ("armv8.2-dotprod", "sdot_128"),
        ("armv8.6", "usdot_128"),
    ];
    for (level, instr) in want {
        assert_eq!(dot(level), instr, "{level}");
    }
}

/// Codes at the ends of their ranges: the 16-bit sums of the pair instructions must not saturate.
#[test]
fn extreme_codes() {
    let (m, n, k) = (1, 16, 64);
    for weight in PACKED {
        for sign in [1.0_f32, -1.0] {
            let mut case = Case::new(weight, Packing::Tile16, X::I8, (m, n, k));
            let bytes =
                pack(weight, Packing::Tile16, n, k, &vec![1.0; n * k], PackOptions::default()).unwrap();
            let w = dequantize(weight, Packing::Tile16, n, k, &bytes).unwrap();
            case.w_bytes.truncate(case.w_offset);
            case.w_bytes.extend(bytes);
            (case.scales, case.sums) = (Vec::new(), Vec::new());
            let x = case.activations(&vec![sign; 3 * k], 3);
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
        let case = Case::new(weight, Packing::Tile16, x, (29, 40, 40));
        let params = MatMulParams { chunk: Some(13), ..choose(&target, weight, kind(x), false) };
        case.check_cpu("chunked", &params, &Options { workers: 2, order: Order::Reverse });
    }
}

#[test]
fn gpu() {
    let params = choose_gpu();
    let options = Options { workers: 1, order: Order::Shuffled(3) };
    let activations = |weight: DType| if weight.is_packed() { [X::F32, X::I8] } else { [X::F32, X::BF16] };
    for (weight, x) in FORMATS.into_iter().flat_map(|w| activations(w).map(|x| (w, x))) {
        // k = 1100 and 1033 take full rounds, single pieces, partial warps and left-over columns.
        for (m, n, k) in [(1, 5, 7), (1, 9, 1033), (1, 4, 1100), (3, 5, 7), (33, 40, 70)] {
            let case = Case::new(weight, Packing::RowMajor, x, (m, n, k));
            let kernel =
                case.kernel(|kb, spec, epilogue| emit_gpu_matmul(kb, &spec, &params, epilogue).unwrap());
            assert!(kernel.is_gpu());
            case.check("gpu", &kernel, &options, false);
        }
    }
}

/// NaN and infinities among the activations must not turn into numbers.
#[test]
fn nan_stays_nan() {
    let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == "x86-64-v4-vnni").unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Case::new(PACKED[0], Packing::Tile16, X::F32, (3, 16, 64));
        let mut x = case.x.to_f32();
        x[(case.x_first + 1) * case.k + 40] = bad;
        case.x = Buffer::from_f32(&x);
        let params = choose(&target, PACKED[0], kind(X::F32), false);
        assert!(params.split);
        let kernel = case.kernel(|kb, spec, epilogue| {
            emit_matmul(kb, &spec, &params, epilogue);
        });
        let y = case.run("nan", &kernel, &Options::default());
        let rows: Vec<bool> = y.chunks(case.n).map(|row| row.iter().all(|v| v.is_nan())).collect();
        assert_eq!(rows, [false, true, false]);
        assert!(y[..case.n].iter().chain(&y[2 * case.n..]).all(|v| v.is_finite()));
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
