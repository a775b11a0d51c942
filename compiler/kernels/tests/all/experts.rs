//! Products with chosen experts against plain f64 arithmetic, through the kernel interpreter: every weight
//! format, float and integer activations, with the parameters of every feature level, for few rows and many,
//! experts that no row or every row chose, one row of activations for all slots or one for each.

use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::testing::TestRng;
use mlcc_ir::types::{DType, Packing, QuantFormat, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;
use mlcc_quant::{PackOptions, dequantize, pack, tile};
use mlcc_target::Arch;

const Q4: DType = DType::Packed(QuantFormat::Q4G32);
const Q8: DType = DType::Packed(QuantFormat::Q8G32);
/// Columns per scale of integer activations.
const GROUP: usize = 64;

#[derive(Clone, Copy, Debug)]
struct ExpertMatmulShape {
    rows: usize,
    slots: usize,
    /// One row of activations for all slots of a row.
    shared: bool,
    experts: usize,
    n: usize,
    k: usize,
}

struct ExpertMatmulCase {
    shape: ExpertMatmulShape,
    weight: DType,
    /// Bits of integer activations.
    bits: Option<usize>,
    x: Vec<f32>,
    ids: Vec<i32>,
    w_bytes: Vec<u8>,
    w: Vec<f32>,
}

fn noise(count: usize, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

impl ExpertMatmulCase {
    fn new(
        weight: DType,
        bits: Option<usize>,
        shape: ExpertMatmulShape,
        choose: impl Fn(usize) -> usize,
    ) -> ExpertMatmulCase {
        let ExpertMatmulShape { rows, slots, shared, experts, n, k } = shape;
        let raw = noise(experts * n * k, 3);
        let w_bytes = pack(weight, Packing::Tile16, experts * n, k, &raw, PackOptions::default()).unwrap();
        let w = dequantize(weight, Packing::Tile16, experts * n, k, &w_bytes).unwrap();
        let x = noise(rows * if shared { 1 } else { slots } * k, 7);
        let ids = (0..rows * slots).map(|i| choose(i) as i32).collect();
        ExpertMatmulCase { shape, weight, bits, x, ids, w_bytes, w }
    }

    /// Lowers a group of one op.
    fn kernel(op: Op, types: Vec<TensorType>, weight: Option<usize>, target: &KernelTarget) -> Kernel {
        let module = Module::new("m");
        let mut f = Function::new("group", FunctionKind::Group);
        let packings: Vec<_> =
            (0..types.len()).map(|i| (Some(i) == weight).then_some(Packing::Tile16)).collect();
        let inputs: Vec<_> = types.into_iter().map(|ty| f.add_input(ty)).collect();
        f.outputs = f.append(&module, op, &inputs).unwrap();
        lower_group(&module, &f, "group", &packings, target).unwrap().kernel
    }

    fn run(&self, kernel: &Kernel, buffers: &mut [KernelBuffer], options: &ExecutionOptions) {
        let rows = SymValues::for_tokens(self.shape.rows as i64);
        if let Err(e) = run_with(kernel, buffers, &rows, options) {
            panic!("{:?}, {}: {e}", self.shape, self.weight);
        }
    }

    /// Results on a machine, and the activations that they were computed from.
    fn results(&self, target: &KernelTarget, options: &ExecutionOptions) -> (Vec<f32>, Vec<f64>) {
        let ExpertMatmulShape { rows, slots, shared, experts, n, k } = self.shape;
        let count = if rows == 1 { Dim::from(1) } else { Dim::sym(SizeSymbol::N) };
        let x_slots = if shared { 1 } else { slots };
        let x_ty = |dtype, columns: usize| {
            TensorType::new(dtype, [count.clone(), Dim::from(x_slots), Dim::from(columns)])
        };
        let w_ty = TensorType::new(self.weight, [Dim::from(experts * n), Dim::from(k)]);
        let ids_ty = TensorType::new(DType::I32, [count.clone(), Dim::from(slots)]);
        let w_dtype = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let w = KernelBuffer::new(w_dtype, self.w_bytes.clone());
        let ids = KernelBuffer::from_i32(&self.ids);
        let y = KernelBuffer::zeros(DType::F32, rows * slots * n);
        let (Some(bits), DType::Packed(format)) = (self.bits, self.weight) else {
            let types = vec![x_ty(DType::F32, k), w_ty, ids_ty];
            let kernel = Self::kernel(Op::MatMulExperts { experts }, types, Some(1), target);
            let mut buffers = [KernelBuffer::from_f32(&self.x), w, ids, y];
            self.run(&kernel, &mut buffers, options);
            return (buffers[3].to_f32(), self.x.iter().map(|&v| f64::from(v)).collect());
        };
        let (part, zero) = (32, tile::sum_factor(format) as usize);
        let quantize = Op::QuantizeRows { group: GROUP, bits, part, zero };
        let kernel = Self::kernel(quantize, vec![x_ty(DType::F32, k)], None, target);
        let (padded, x_rows) = (k.next_multiple_of(part), rows * x_slots);
        let code_type = if bits == 8 { DType::I8 } else { DType::I16 };
        let mut made = [
            KernelBuffer::from_f32(&self.x),
            KernelBuffer::zeros(code_type, x_rows * padded),
            KernelBuffer::zeros(DType::F32, x_rows * k.div_ceil(GROUP)),
            KernelBuffer::zeros(DType::I32, x_rows * k.div_ceil(part)),
        ];
        self.run(&kernel, &mut made, options);
        let [_, codes, scales, starts] = made;
        let values = self.values(&codes, &scales.to_f32(), bits / 8);
        let types = vec![
            x_ty(code_type, padded),
            x_ty(DType::F32, k.div_ceil(GROUP)),
            x_ty(DType::I32, k.div_ceil(part)),
            w_ty,
            ids_ty,
        ];
        let op = Op::MatMulExpertsI8 { experts, group: GROUP };
        let kernel = Self::kernel(op, types, Some(3), target);
        let mut buffers = [codes, scales, starts, w, ids, y];
        self.run(&kernel, &mut buffers, options);
        (buffers[5].to_f32(), values)
    }

    /// The values of codes: rows in order, planes side by side per 32 columns.
    fn values(&self, codes: &KernelBuffer, scales: &[f32], planes: usize) -> Vec<f64> {
        let k = self.shape.k;
        let padded = k.next_multiple_of(32);
        let rows = codes.bytes.chunks(padded * planes).zip(scales.chunks(k.div_ceil(GROUP)));
        rows.flat_map(|(row, ratios)| {
            let scale = |column: usize| {
                let later = ratios[1..].iter().skip(column / GROUP);
                later.fold(f64::from(ratios[0]), |scale, &ratio| scale * f64::from(ratio))
            };
            let value = move |column: usize| {
                let byte = |plane| row[(column / 32 * planes + plane) * 32 + column % 32] as i8;
                let code = (0..planes).fold(0.0, |code, plane| 256.0 * code + f64::from(byte(plane)));
                code * scale(column)
            };
            (0..k).map(value).collect::<Vec<f64>>()
        })
        .collect()
    }

    fn check(&self, target: &KernelTarget, what: &str, options: &ExecutionOptions) {
        let ExpertMatmulShape { slots, shared, n, k, .. } = self.shape;
        let (found, x) = self.results(target, options);
        let roundings = if self.bits.is_some() { k.div_ceil(32) * 4 } else { k + 8 };
        for (at, &found) in found.iter().enumerate() {
            let (pair, out) = (at / n, at % n);
            let x_row = if shared { pair / slots } else { pair };
            let w_row = self.ids[pair] as usize * n + out;
            let product = |c| x[x_row * k + c] * f64::from(self.w[w_row * k + c]);
            let want: f64 = (0..k).map(product).sum();
            let size: f64 = (0..k).map(|c| product(c).abs()).sum();
            let tolerance = roundings as f64 * 2.0_f64.powi(-24) * size + 1e-30;
            assert!(
                (f64::from(found) - want).abs() <= tolerance,
                "{what}: {} {:?} {:?}: result {at} is {found}, want {want}",
                self.weight,
                self.bits,
                self.shape
            );
        }
    }
}

/// Targets that differ in lanes or dot instructions.
fn targets() -> Vec<(String, KernelTarget)> {
    let mut targets: Vec<(String, KernelTarget)> = Vec::new();
    for spec in mlcc_target::specs().unwrap().iter().filter(|s| s.arch != Arch::Nvptx) {
        for level in &spec.levels {
            let target = KernelTarget::new(spec.arch, level);
            let known =
                |t: &KernelTarget| t.f32_lanes() == target.f32_lanes() && t.int_dot() == target.int_dot();
            if targets.iter().all(|(_, t)| !known(t)) {
                targets.push((level.name.clone(), target));
            }
        }
    }
    targets
}

const KINDS: [(DType, Option<usize>); 7] = [
    (DType::F32, None),
    (DType::F16, None),
    (DType::BF16, None),
    (Q4, None),
    (Q4, Some(8)),
    (Q8, Some(8)),
    (Q4, Some(16)),
];

fn check_all(shape: ExpertMatmulShape, choose: impl Fn(usize) -> usize + Copy) {
    for (weight, bits) in KINDS {
        let case = ExpertMatmulCase::new(weight, bits, shape, choose);
        for (i, (name, target)) in targets().iter().enumerate() {
            let options = ExecutionOptions { workers: 1 + i % 3, order: ExecutionOrder::Shuffled(i as u64) };
            case.check(target, name, &options);
        }
    }
}

const TINY: ExpertMatmulShape =
    ExpertMatmulShape { rows: 1, slots: 2, shared: true, experts: 3, n: 32, k: 40 };

/// A token that is generated: each slot by itself.
#[test]
fn a_single_row() {
    check_all(TINY, |pair| 2 - pair);
    check_all(ExpertMatmulShape { slots: 3, shared: false, experts: 5, n: 16, ..TINY }, |pair| pair * 2);
}

/// Experts with 0, 1, 2, 3 and more rows, in no order.
#[test]
fn rows_of_every_number() {
    let rows = ExpertMatmulShape { rows: 12, slots: 2, shared: true, experts: 6, ..TINY };
    let choose = |pair: usize| [5, 1, 5, 2, 3, 5, 2, 5, 3, 5, 3, 5][pair * 5 % 12];
    check_all(rows, choose);
    check_all(ExpertMatmulShape { rows: 7, shared: false, n: 48, k: 33, ..rows }, choose);
}

/// Blocks of threads, with races looked for, over random shapes and choices: routing of a token alone and of
/// prompts, one row for all slots or one for each, as latent attention has it, whose every row chooses all.
#[test]
fn blocks_of_threads() {
    let mut rng = TestRng(5);
    let level =
        |name: &str| KernelTarget::new(Arch::Nvptx, &mlcc_target::resolve_target(name).unwrap().levels[0]);
    let targets = [("sm_70", level("sm_70")), ("sm_80", level("sm_80"))];
    for round in 0..24_usize {
        let experts = 2 + rng.below(5);
        let all = round % 4 == 3;
        let shape = ExpertMatmulShape {
            rows: if round % 3 == 0 { 1 } else { 2 + rng.below(18) },
            slots: if all { experts } else { 1 + rng.below(experts) },
            shared: !all && rng.chance(2),
            experts,
            n: 16 * (1 + rng.below(4)),
            k: 8 + rng.below(90),
        };
        let seed = rng.below(1000);
        let choose = |pair: usize| if all { pair % experts } else { (pair * pair + seed * pair) % experts };
        let (weight, _) = KINDS[round % 4];
        let case = ExpertMatmulCase::new(weight, None, shape, choose);
        let (name, target) = &targets[round % 2];
        let order =
            if rng.chance(2) { ExecutionOrder::Reverse } else { ExecutionOrder::Shuffled(round as u64) };
        case.check(target, name, &ExecutionOptions { workers: 1, order });
    }
}

/// Enough rows of one expert that its weights are unpacked for all of them, and none of the others.
#[test]
fn all_rows_on_one_expert() {
    check_all(ExpertMatmulShape { rows: 37, slots: 1, shared: false, experts: 2, n: 16, k: 36 }, |_| 1);
    check_all(ExpertMatmulShape { rows: 19, experts: 2, n: 16, k: 36, ..TINY }, |_| 0);
}

/// Sums wait between the pieces of long rows, also where the rows of an expert come in chunks.
#[test]
fn long_rows() {
    let shape = ExpertMatmulShape { rows: 150, slots: 2, shared: false, experts: 2, n: 16, k: 530 };
    let level = |name: &str| targets().into_iter().find(|(n, _)| n == name).unwrap().1;
    for (weight, bits) in [(DType::F16, None), (Q4, Some(8)), (Q4, Some(16))] {
        let case = ExpertMatmulCase::new(weight, bits, shape, |pair| usize::from(pair % 37 == 5));
        case.check(
            &level("x86-64-v4-vnni"),
            "long",
            &ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse },
        );
    }
}

/// More choices than are sorted at a time.
#[test]
fn many_choices() {
    let shape = ExpertMatmulShape { rows: 1100, slots: 4, shared: true, experts: 3, n: 16, k: 8 };
    let (_, target) = targets().swap_remove(0);
    for (weight, bits) in [(DType::F32, None), (Q8, Some(8))] {
        let case = ExpertMatmulCase::new(weight, bits, shape, |pair| pair * pair % 3);
        case.check(&target, "many", &ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse });
    }
}

/// The same bits whatever the number of workers.
#[test]
fn workers_change_nothing() {
    let shape = ExpertMatmulShape { rows: 21, slots: 2, shared: true, experts: 4, n: 96, k: 64 };
    let (_, target) = targets().into_iter().find(|(name, _)| name == "x86-64-v4-vnni").unwrap();
    for (weight, bits) in [(DType::F32, None), (Q4, Some(8))] {
        let case = ExpertMatmulCase::new(weight, bits, shape, |pair| pair * 7 % 4);
        let with =
            |workers| case.results(&target, &ExecutionOptions { workers, order: ExecutionOrder::Reverse }).0;
        let one: Vec<u32> = with(1).into_iter().map(f32::to_bits).collect();
        for workers in [2, 3, 8] {
            let many: Vec<u32> = with(workers).into_iter().map(f32::to_bits).collect();
            assert_eq!(one, many, "{workers} workers, {weight}");
        }
    }
}
