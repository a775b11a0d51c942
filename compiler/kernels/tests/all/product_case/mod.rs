//! One contraction with its inputs and the exact result.

use mlcc_interp::kernel::{ExecutionOptions, KernelBuffer, run_with};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::kernel::{BufId, Kernel, ParamAccess};
use mlcc_ir::types::{DType, Packing};
use mlcc_kernels::matmul::{
    CpuPlan, DOT_COLUMNS, MatmulActivation, MatmulEpilogue, MatmulProblem, MatmulWeight,
    QuantizedActivations, emit_matmul,
};
use mlcc_kernels::quantize::CodeBlock;
use mlcc_quant::{PackOptions, dequantize, pack};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CaseActivation {
    F32,
    F16,
    BF16,
    /// int8 codes, scales per 64 columns.
    I8,
    /// 16-bit codes in two planes, scales per 128 columns.
    I16,
}

impl CaseActivation {
    /// Planes and columns per scale of integer activations.
    pub fn codes(self) -> Option<(usize, usize)> {
        match self {
            CaseActivation::F32 | CaseActivation::F16 | CaseActivation::BF16 => None,
            CaseActivation::I8 => Some((1, 64)),
            CaseActivation::I16 => Some((2, 128)),
        }
    }
}

/// Deterministic values in -1..1.
pub struct NoiseStream(pub u64);
impl NoiseStream {
    pub fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32 / 8_388_608.0) - 1.0
    }
    pub fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// One problem with its inputs and the exact result.
pub struct MatmulTestCase {
    pub weight: DType,
    pub packing: Packing,
    pub x_type: CaseActivation,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Elements of w before the tensor.
    pub w_offset: usize,
    pub w_bytes: Vec<u8>,
    /// Float activations.
    pub x: KernelBuffer,
    /// Integer activations, row-major, with their scales and starts.
    pub codes: Vec<i32>,
    pub scales: Vec<f32>,
    pub starts: Vec<i32>,
    pub want: Vec<f64>,
    /// Sum of the magnitudes of the products of each result, for the tolerance.
    pub size: Vec<f64>,
}

impl MatmulTestCase {
    pub fn new(
        weight: DType,
        packing: Packing,
        x_type: CaseActivation,
        (m, n, k): (usize, usize, usize),
    ) -> MatmulTestCase {
        let mut noise = NoiseStream((m * 1009 + n * 31 + k) as u64);
        let w = noise.vec(n * k);
        MatmulTestCase::of(weight, packing, x_type, (m, n, k), (w, noise.vec(m * k)))
    }

    pub fn of(
        weight: DType,
        packing: Packing,
        x_type: CaseActivation,
        (m, n, k): (usize, usize, usize),
        (w, raw): (Vec<f32>, Vec<f32>),
    ) -> MatmulTestCase {
        let w_offset = 64;
        let bytes = pack(weight, packing, n, k, &w, PackOptions::default()).unwrap();
        let w = dequantize(weight, packing, n, k, &bytes).unwrap();
        let element = weight.bytes().unwrap_or(1);
        let mut w_bytes = vec![0xff; w_offset * element];
        w_bytes.extend(bytes);
        let mut case = MatmulTestCase {
            weight,
            packing,
            x_type,
            m,
            n,
            k,
            w_offset,
            w_bytes,
            x: KernelBuffer::zeros(DType::F32, 0),
            codes: Vec::new(),
            scales: Vec::new(),
            starts: Vec::new(),
            want: Vec::new(),
            size: Vec::new(),
        };
        let x = case.activations(&raw);
        // Codes and what groups subtract meet the activations apart.
        let largest = w.iter().fold(0.0_f32, |m, w| m.max(w.abs()));
        let symmetric = !matches!(weight, DType::Packed(format) if !format.is_symmetric());
        let offset = if symmetric { 0.0 } else { 2.0 * f64::from(largest) };
        for i in 0..m {
            for j in 0..n {
                let product = |c| f64::from(x[i * k + c]) * f64::from(w[j * k + c]);
                case.want.push((0..k).map(product).sum());
                case.size
                    .push((0..k).map(|c| product(c).abs() + f64::from(x[i * k + c]).abs() * offset).sum());
            }
        }
        case
    }

    /// Fills the buffers of the activations and returns their values.
    pub fn activations(&mut self, raw: &[f32]) -> Vec<f32> {
        let (m, k, stride) = (self.m, self.k, self.k.next_multiple_of(DOT_COLUMNS));
        let padded: Vec<f32> = raw
            .chunks(k)
            .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, stride - k)))
            .collect();
        let Some((planes, group)) = self.x_type.codes() else {
            if self.x_type == CaseActivation::F32 {
                self.x = KernelBuffer::from_f32(raw);
                return raw.to_vec();
            }
            let dtype = if self.x_type == CaseActivation::F16 { DType::F16 } else { DType::BF16 };
            self.x = KernelBuffer::from_floats(dtype, raw);
            return self.x.to_f32();
        };
        let largest_code = if planes == 1 { 127.0 } else { 32512.0 };
        let zero_point = match self.weight {
            DType::Packed(format) => mlcc_quant::tile::sum_factor(format) as i32,
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
                self.starts.extend(here.chunks(DOT_COLUMNS).map(|c| -zero_point * c.iter().sum::<i32>()));
                values.extend(here.iter().map(|&c| c as f32 * scale));
                self.codes.extend(here);
            }
            self.scales[begin] = before;
        }
        (0..m * k).map(|i| values[i / k * stride + i % k]).collect()
    }

    /// The codes in the order of [`Codes`].
    pub fn ordered(&self, planes: usize, block: CodeBlock) -> KernelBuffer {
        let stride = self.k.next_multiple_of(DOT_COLUMNS);
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
            for g in 0..stride / DOT_COLUMNS {
                for plane in 0..planes {
                    for first in (0..DOT_COLUMNS).step_by(columns) {
                        for r in row..row + rows {
                            let at = r * stride + g * DOT_COLUMNS + first;
                            bytes.extend(self.codes[at..at + columns].iter().map(|&c| byte(c, plane) as u8));
                        }
                    }
                }
            }
            row += rows;
        }
        KernelBuffer::new(if planes == 1 { DType::I8 } else { DType::I16 }, bytes)
    }

    pub fn x(&self, block: CodeBlock) -> KernelBuffer {
        match self.x_type.codes() {
            Some((planes, _)) => self.ordered(planes, block),
            None => self.x.clone(),
        }
    }

    /// Declares the buffers and emits the contraction with an epilogue that stores the sums.
    pub fn kernel(
        &self,
        block: CodeBlock,
        emit: impl FnOnce(&mut KernelBuilder, MatmulProblem, &mut MatmulEpilogue),
    ) -> Kernel {
        let mut kb = KernelBuilder::new("contraction");
        let x = self.x(block);
        let x = kb.param("x", x.dtype, x.len(), ParamAccess::In, 64);
        let (scales, starts) = (
            kb.param("scales", DType::F32, self.scales.len(), ParamAccess::In, 64),
            kb.param("starts", DType::I32, self.starts.len(), ParamAccess::In, 64),
        );
        let w_dtype = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let w_len = self.w_bytes.len() / w_dtype.bytes().unwrap();
        let w = kb.param("w", w_dtype, w_len, ParamAccess::In, 64);
        let y_len = Dim::sym(SizeSymbol::N).scale(self.n as i64);
        let y = kb.param("y", DType::F32, y_len, ParamAccess::Out, 64);
        let activation = activation(self.x_type, block, scales, starts);
        let m = if self.m == 1 { kb.int(1) } else { kb.sym(SizeSymbol::N) };
        let weight = MatmulWeight::from_dtype(self.weight).unwrap();
        let (n, k, w_offset) = (self.n, self.k, self.w_offset);
        let epilogue_operands = [Some(y), None, None, None];
        let packing = self.packing;
        let problem =
            MatmulProblem { x, activation, w, w_offset, weight, packing, m, n, k, epilogue_operands };
        emit(&mut kb, problem, &mut |k, sums| sums.store(k.view(y, [1, n as i64])));
        kb.finish()
    }

    pub fn check(&self, what: &str, kernel: &Kernel, block: CodeBlock, options: &ExecutionOptions) {
        let what =
            format!("{what}: {} x {:?}, m {} n {} k {}", self.weight, self.x_type, self.m, self.n, self.k);
        // Each of about k roundings costs half a unit of the running sum, at most; integer groups cost one
        // per group.
        let exact_groups = self.x_type.codes().is_some();
        let roundings = if exact_groups { self.k.div_ceil(DOT_COLUMNS) * 4 } else { self.k + 8 };
        for (i, got) in self.run(&what, kernel, block, options).into_iter().enumerate() {
            let tolerance = roundings as f64 * 2.0_f64.powi(-24) * self.size[i] + 1e-30;
            let error = (f64::from(got) - self.want[i]).abs();
            let want = self.want[i];
            assert!(error <= tolerance, "{what}: result {i} is {got}, want {want} (+- {tolerance:e})");
        }
    }

    pub fn run(&self, what: &str, kernel: &Kernel, block: CodeBlock, options: &ExecutionOptions) -> Vec<f32> {
        let w_dtype = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let mut buffers = [
            self.x(block),
            KernelBuffer::from_f32(&self.scales),
            KernelBuffer::from_i32(&self.starts),
            KernelBuffer::new(w_dtype, self.w_bytes.clone()),
            KernelBuffer::zeros(DType::F32, self.m * self.n),
        ];
        if let Err(e) = run_with(kernel, &mut buffers, &SymValues::for_tokens(self.m as i64), options) {
            panic!("{what}: {e}");
        }
        buffers[4].to_f32()
    }

    pub fn check_cpu(&self, what: &str, plan: &CpuPlan, options: &ExecutionOptions) {
        let block = plan.code_block();
        let kernel = self.kernel(block, |kb, problem, epilogue| {
            emit_matmul(kb, &problem, plan, epilogue);
        });
        self.check(what, &kernel, block, options);
    }
}

/// The activation type as the generators know it.
pub fn activation(x: CaseActivation, block: CodeBlock, scales: BufId, starts: BufId) -> MatmulActivation {
    match (x, x.codes()) {
        (CaseActivation::F32, _) => MatmulActivation::F32,
        (CaseActivation::F16, _) => MatmulActivation::F16,
        (_, Some((planes, group))) => {
            MatmulActivation::Codes(QuantizedActivations { planes, group, block, scales, starts })
        }
        _ => MatmulActivation::BF16,
    }
}
