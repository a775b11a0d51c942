//! The product generators against plain f64 arithmetic, through the kernel interpreter: every weight format
//! and activation type, with the parameters of every feature level, at shapes that leave short groups, short
//! tiles and left-over rows.

use crate::product_case::{CaseActivation, MatmulTestCase, NoiseStream, activation};
use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{BufId, ParamAccess};
use mlcc_ir::text::print_kernel;
use mlcc_ir::types::{DType, Packing, QuantFormat};
use mlcc_kernels::matmul::plan::TallTile;
use mlcc_kernels::matmul::{
    CpuPlan, FinishedSums, GpuMatmulPlan, MatmulActivation, TensorCoreGemvPlan, choose, choose_gpu,
    emit_gpu_matmul, emit_matmul, emit_tensor_core_gemv,
};
use mlcc_kernels::params::{IntDot, KernelTarget};
use mlcc_kernels::quantize::CodeBlock;
use mlcc_quant::packed::TileSizes;
use mlcc_quant::{FragmentSizes, PackOptions, TensorLayout, dequantize, pack, storage_types};
use mlcc_target::{Arch, MatrixTile};

const Q4: DType = DType::Packed(QuantFormat::Q4G32);
const Q8: DType = DType::Packed(QuantFormat::Q8G32);

/// Every format of which there are products with integer activations.
fn packed() -> impl Iterator<Item = DType> {
    QuantFormat::ALL
        .iter()
        .filter(|format| format.has_integer_products())
        .map(|&format| DType::Packed(format))
}

fn cpu_levels() -> Vec<(String, KernelTarget)> {
    mlcc_target::specs()
        .unwrap()
        .iter()
        .filter(|s| s.arch != Arch::Nvptx)
        .flat_map(|s| s.levels.iter().map(|l| (l.name.clone(), KernelTarget::new(s.arch, l))))
        .collect()
}

/// The same before there are buffers.
fn kind(x: CaseActivation) -> MatmulActivation {
    activation(x, CodeBlock::SINGLE, BufId(0), BufId(0))
}

const SHAPES: [(usize, usize); 6] = [(32, 64), (5, 7), (33, 100), (20, 45), (60, 33), (16, 290)];

/// The plain types, q4g32 and q8g32 meet every case; the other formats, whose products differ in how codes
/// become numbers, one of `turns`, by turns.
fn meets(weight: DType, case: usize, turns: usize) -> bool {
    match weight {
        DType::Packed(format) if ![QuantFormat::Q4G32, QuantFormat::Q8G32].contains(&format) => {
            let number = QuantFormat::ALL.iter().position(|&other| other == format).unwrap();
            case % turns == number % turns
        }
        _ => true,
    }
}

/// Every distinct set of parameters that some level chooses.
fn check_all(formats: impl Iterator<Item = DType>, x: CaseActivation, m: usize) {
    for weight in formats {
        let mut sets: Vec<(String, CpuPlan)> = Vec::new();
        for (name, target) in cpu_levels() {
            let plan = choose(&target, weight, kind(x), m == 1);
            if sets.iter().all(|(_, known)| *known != plan) {
                sets.push((name.clone(), plan));
            }
        }
        let shapes = SHAPES.into_iter().enumerate();
        for (i, (n, k)) in shapes.filter(|&(i, _)| meets(weight, i, 3)) {
            let case = MatmulTestCase::new(weight, Packing::Tile16, x, (m, n, k));
            let options = ExecutionOptions { workers: i, order: ExecutionOrder::Shuffled(i as u64) };
            sets.iter().for_each(|(name, plan)| case.check_cpu(name, plan, &options));
        }
    }
}

#[test]
fn matvec_f32() {
    check_all(storage_types(), CaseActivation::F32, 1);
}

#[test]
fn matmul_f32() {
    check_all(storage_types(), CaseActivation::F32, 17);
}

#[test]
fn few_rows_f32() {
    check_all(storage_types(), CaseActivation::F32, 3);
}

#[test]
fn matvec_bf16() {
    check_all(storage_types(), CaseActivation::BF16, 1);
}

#[test]
fn matmul_bf16() {
    check_all(storage_types(), CaseActivation::BF16, 13);
}

#[test]
fn matvec_f16() {
    check_all(storage_types(), CaseActivation::F16, 1);
}

#[test]
fn matmul_f16() {
    check_all(storage_types(), CaseActivation::F16, 13);
}

#[test]
fn matvec_int8() {
    check_all(packed(), CaseActivation::I8, 1);
}

/// Enough blocks that the weights are unpacked once for all, with rows left over.
#[test]
fn matmul_int8() {
    check_all(packed(), CaseActivation::I8, 31);
}

/// One block, and blocks of all sizes that pass by the weights together.
#[test]
fn few_rows_int8() {
    check_all(packed(), CaseActivation::I8, 4);
    check_all(packed(), CaseActivation::I8, 11);
}

/// One, two and three blocks of eight rows, where the target has such blocks.
#[test]
fn eights_of_rows_int8() {
    check_all(packed(), CaseActivation::I8, 8);
    check_all(packed(), CaseActivation::I8, 24);
    let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == "x86-64-v4-vnni").unwrap();
    let plan = choose(&target, Q4, kind(CaseActivation::I8), false);
    assert_eq!((Q4, plan.tall), (Q4, Some(TallTile { rows: 8, tiles: 2 })));
    // Several pieces of the columns, the last of which has a short group of activations.
    let case = MatmulTestCase::new(Q4, Packing::Tile16, CaseActivation::I8, (16, 50, 1100));
    case.check_cpu("in pieces", &plan, &ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse });
}

#[test]
fn matvec_int16() {
    check_all(packed(), CaseActivation::I16, 1);
}

#[test]
fn matmul_int16() {
    check_all(packed(), CaseActivation::I16, 26);
    check_all(packed(), CaseActivation::I16, 7);
}

/// Codes as large as they get, in both planes, of one row and of many, whose products have one sign or the
/// other: no sum of words overflows.
#[test]
fn extreme_codes_of_many_rows() {
    let (n, k) = (16, 128);
    for (x_type, largest) in [(CaseActivation::I8, 1.0), (CaseActivation::I16, 32384.0 / 32512.0)] {
        for (weight, sign, m) in [Q4, Q8].into_iter().flat_map(|w| [(w, 1.0, 1), (w, -1.0, 4), (w, -1.0, 32)])
        {
            // The first column decides about the scale.
            let raw = (0..m * k).map(|i| if i % k == 0 { 1.0 } else { largest * sign }).collect();
            let w = (0..n * k).map(|i| if i / k % 2 == 0 { -1.0 } else { sign }).collect();
            let case = MatmulTestCase::of(weight, Packing::Tile16, x_type, (m, n, k), (w, raw));
            for (name, target) in cpu_levels() {
                let plan = choose(&target, weight, kind(x_type), m == 1);
                case.check_cpu(&name, &plan, &ExecutionOptions::default());
            }
        }
    }
}

/// The chosen instructions are those that the levels were made for.
#[test]
fn choices() {
    let dot = |level: &str| {
        let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == level).unwrap();
        match choose(&target, Q4, kind(CaseActivation::I8), true).dot {
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
fn mmla() {
    for (name, target) in cpu_levels() {
        let mmla = choose(&target, Q4, kind(CaseActivation::I8), false).mmla.map(|i| i.def().name);
        assert_eq!(mmla, (name == "armv8.6").then_some("smmla_128"), "{name}");
    }
}

/// Lines of weights that a single row prefetches, per group.
#[test]
fn prefetches() {
    let lines = |level: &str, weight| {
        let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == level).unwrap();
        let plan = choose(&target, weight, kind(CaseActivation::I8), true);
        let case = MatmulTestCase::new(weight, Packing::Tile16, CaseActivation::I8, (1, 32, 256));
        let kernel = case.kernel(CodeBlock::SINGLE, |kb, problem, epilogue| {
            emit_matmul(kb, &problem, &plan, epilogue);
        });
        let instr = plan.stream.instr().map_or("prefetch", |instr| instr.def().name);
        print_kernel(&kernel).matches(instr).count()
    };
    let [q4, q8] = [Q4, Q8];
    assert_eq!(lines("x86-64-v4-vnni", q4), 5);
    assert_eq!(lines("x86-64-v4-vnni", q8), 9);
    assert_eq!(lines("x86-64-v4-avxvnni", q4), 5);
    assert_eq!(lines("x86-64-v4-avxvnni", q8), 1);
    assert_eq!(lines("x86-64-v4-bf16", q4), 0);
    assert_eq!(lines("x86-64-v4-bf16", q8), 0);
    assert_eq!(lines("x86-64-v3", q4), 5);
    assert_eq!(lines("x86-64-v3", q8), 9);
}

/// Codes at the ends of their ranges: the 16-bit sums of the pair instructions must not saturate.
#[test]
fn extreme_codes() {
    let (m, n, k) = (1, 16, 64);
    for weight in packed() {
        for (sign, lowest) in [(1.0_f32, false), (-1.0, false), (1.0, true), (-1.0, true)] {
            let mut case = MatmulTestCase::new(weight, Packing::Tile16, CaseActivation::I8, (m, n, k));
            let mut bytes =
                pack(weight, Packing::Tile16, n, k, &vec![1.0; n * k], PackOptions::default()).unwrap();
            if lowest {
                // Values that a file may hold, though no weight is packed so: -8 and -128 times the scale.
                let DType::Packed(format) = weight else { unreachable!() };
                let sizes = TileSizes::new(format, k);
                bytes.chunks_mut(sizes.group()).for_each(|group| group[sizes.header()..].fill(0));
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
                case.check_cpu(
                    &name,
                    &choose(&target, weight, kind(CaseActivation::I8), true),
                    &ExecutionOptions::default(),
                );
            }
        }
    }
}

/// Row chunks outside of the loop over tiles give the same sums.
#[test]
fn chunks_of_rows() {
    let (_, target) = cpu_levels().into_iter().find(|(name, _)| name == "x86-64-v4").unwrap();
    for (weight, x) in [(DType::F32, CaseActivation::F32), (Q4, CaseActivation::I8)] {
        let case = MatmulTestCase::new(weight, Packing::Tile16, x, (45, 40, 40));
        let plan = CpuPlan { chunk: Some(28), ..choose(&target, weight, kind(x), false) };
        case.check_cpu("chunked", &plan, &ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse });
    }
}

/// Rows longer than a strip: sums wait between its pieces, the last of which is short, also where rows come
/// in chunks.
#[test]
fn pieces_of_long_rows() {
    let level = |level| cpu_levels().into_iter().find(|(name, _)| name == level).unwrap().1;
    let [target, pairs, dots] = ["x86-64-v4-vnni", "x86-64-v3", "x86-64-v4-bf16"].map(level);
    for (x, weight) in [CaseActivation::I8, CaseActivation::I16]
        .into_iter()
        .flat_map(|x| packed().map(move |weight| (x, weight)))
    {
        let case = MatmulTestCase::new(weight, Packing::Tile16, x, (45, 50, 1100));
        let pieces = [(&target, 24), (&pairs, 256), (&target, 256), (&pairs, 24)].into_iter().enumerate();
        for (_, (target, chunk)) in pieces.filter(|&(i, _)| meets(weight, i, 4)) {
            let plan = CpuPlan { chunk: Some(chunk), ..choose(target, weight, kind(x), false) };
            case.check_cpu(
                "in pieces",
                &plan,
                &ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse },
            );
        }
    }
    for (target, weight, x) in [
        (&target, DType::F32, CaseActivation::F32),
        (&target, DType::F16, CaseActivation::F32),
        (&target, DType::BF16, CaseActivation::F32),
        (&target, DType::BF16, CaseActivation::BF16),
        (&dots, DType::BF16, CaseActivation::BF16),
    ] {
        for (m, k) in [(37, 1033), (34, 100)] {
            let case = MatmulTestCase::new(weight, Packing::Tile16, x, (m, 50, k));
            let plan = CpuPlan { chunk: Some(32), ..choose(target, weight, kind(x), false) };
            case.check_cpu(
                "in pieces",
                &plan,
                &ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse },
            );
        }
    }
}

#[test]
fn gpu() {
    let options = ExecutionOptions { workers: 1, order: ExecutionOrder::Shuffled(3) };
    for (weight, x) in storage_types()
        .flat_map(|w| [CaseActivation::F32, CaseActivation::F16, CaseActivation::BF16].map(move |x| (w, x)))
    {
        // k = 1100 and 1033 take full rounds, single pieces, partial warps and left-over columns.
        for (m, n, k) in [(1, 5, 7), (1, 9, 1033), (1, 4, 1100), (3, 5, 7), (33, 40, 70)] {
            let case = MatmulTestCase::new(weight, Packing::RowMajor, x, (m, n, k));
            let kernel = case.kernel(CodeBlock::SINGLE, |kb, problem, epilogue| {
                let plan = choose_gpu(None, &problem, m == 1).unwrap();
                emit_gpu_matmul(kb, &problem, &plan, epilogue).unwrap()
            });
            assert!(kernel.is_gpu());
            case.check("gpu", &kernel, CodeBlock::SINGLE, &options);
        }
    }
}

/// One row and weights in fragments on a machine without tensor cores, for which an artifact may have code as
/// well.
#[test]
fn gpu_rows_of_fragments_lane_by_lane() {
    for (weight, x) in fragment_cases() {
        for shape in [(1, 48, 256), (1, 16, 1152)] {
            let case = MatmulTestCase::new(weight, Packing::Fragments, x, shape);
            let kernel = case.kernel(CodeBlock::SINGLE, |kb, problem, epilogue| {
                let plan = choose_gpu(None, &problem, true).unwrap();
                emit_gpu_matmul(kb, &problem, &plan, epilogue).unwrap()
            });
            case.check("lane by lane", &kernel, CodeBlock::SINGLE, &ExecutionOptions::with_workers(1));
        }
    }
}

/// Checks the product of several rows with the tile, threads in an order by `seed`, and gives the plan.
fn check_with_tile(case: &MatmulTestCase, tile: MatrixTile, seed: usize) -> Option<GpuMatmulPlan> {
    let mut chosen = None;
    let kernel = case.kernel(CodeBlock::SINGLE, |kb, problem, epilogue| {
        let plan = choose_gpu(Some(tile), &problem, false).unwrap();
        emit_gpu_matmul(kb, &problem, &plan, epilogue).unwrap();
        chosen = Some(plan);
    });
    let options = ExecutionOptions { workers: 1, order: ExecutionOrder::Shuffled(seed as u64) };
    case.check(&format!("{tile:?}"), &kernel, CodeBlock::SINGLE, &options);
    chosen
}

/// Tiles that leave rows and columns over, with two stages and with more, for weights that are one bf16 and
/// for those that are two.
#[test]
fn gpu_on_tensor_cores() {
    let tile = |rows, columns, warps, stages| MatrixTile { rows, columns, warps, stages };
    let tiles = [tile(64, 128, [2, 2], 3), tile(32, 16, [2, 1], 2), tile(16, 32, [1, 2], 4)];
    let packed = ["q4g32", "q8g32", "q4g32_f32", "q4g128"].map(|name| DType::parse(name).unwrap());
    let plain = [CaseActivation::F32, CaseActivation::F16, CaseActivation::BF16].map(|x| (DType::F16, x));
    let packed = packed.into_iter().flat_map(|weight| {
        [CaseActivation::F32, CaseActivation::F16, CaseActivation::BF16].map(|x| (weight, x))
    });
    let all = plain.into_iter().chain([(DType::BF16, CaseActivation::BF16)]).chain(packed);
    for (i, (weight, x)) in all.enumerate() {
        for (tile, shape) in tiles.into_iter().zip([(5, 6, 128), (37, 20, 256), (33, 34, 96)]) {
            let case = MatmulTestCase::new(weight, Packing::RowMajor, x, shape);
            let plan = check_with_tile(&case, tile, i);
            assert_eq!(plan, Some(GpuMatmulPlan::Matrix(tile)), "{weight} {shape:?}");
        }
    }
}

/// Every tile that tuning tries, with rows and columns left over.
#[test]
fn tiles_that_tuning_tries() {
    let level = mlcc_target::level("sm_90").unwrap().unwrap();
    let mut tiles = Vec::new();
    for field in level.fields().iter().filter(|field| field.key.ends_with("product")) {
        for (_, change) in field.candidates(&level) {
            let target = KernelTarget::new(Arch::Nvptx, &level.with_changes(&change).unwrap());
            let tile = if field.key == "product" { target.matrix } else { target.code_matrix }.unwrap();
            if !tiles.contains(&tile) {
                tiles.push(tile);
            }
        }
    }
    assert!(tiles.len() > 25, "{}", tiles.len());
    for (i, tile) in tiles.into_iter().enumerate() {
        // Every other one with weights in fragments.
        let (packing, n, depth) =
            if i % 2 == 0 { (Packing::RowMajor, 70, 96) } else { (Packing::Fragments, 80, 192) };
        let case = MatmulTestCase::new(
            DType::parse("q4g32").unwrap(),
            packing,
            CaseActivation::F16,
            (130, n, depth),
        );
        check_with_tile(&case, tile, i);
    }
}

/// Weights in fragments: tiles that leave rows and columns over, blocks of one and of several groups.
#[test]
fn gpu_on_tensor_cores_of_fragments() {
    let tile = |rows, columns, warps, stages| MatrixTile { rows, columns, warps, stages };
    let tiles = [tile(64, 128, [2, 2], 3), tile(32, 32, [2, 1], 2), tile(16, 32, [1, 2], 4)];
    for (i, (weight, x)) in fragment_cases().into_iter().enumerate() {
        for (tile, shape) in tiles.into_iter().zip([(70, 48, 128), (5, 144, 256), (37, 32, 384)]) {
            let case = MatmulTestCase::new(weight, Packing::Fragments, x, shape);
            let plan = check_with_tile(&case, tile, i);
            assert_eq!(plan, Some(GpuMatmulPlan::Matrix(tile)), "{weight} {shape:?}");
        }
    }
}

/// Formats and activations that meet in fragments.
fn fragment_cases() -> Vec<(DType, CaseActivation)> {
    let packed = ["q4g32", "q8g32", "q4g32_f32", "q4g64", "q4g128", "e4m3g128_f32"];
    let packed = packed.map(|name| DType::parse(name).unwrap());
    let halves = [CaseActivation::F16, CaseActivation::BF16];
    let all = packed.into_iter().chain([DType::F16]).flat_map(|weight| halves.map(move |x| (weight, x)));
    all.chain([(DType::BF16, CaseActivation::BF16)]).collect()
}

/// One row and weights in fragments: warps that share columns out evenly and not, parts that are joined,
/// tiles that leave some over.
#[test]
fn gpu_rows_of_fragments() {
    for (i, (weight, x)) in fragment_cases().into_iter().enumerate() {
        for (shape, parts) in [((1, 48, 256), 1), ((1, 64, 2432), 2), ((1, 8208, 128), 1), ((1, 32, 640), 2)]
        {
            if FragmentSizes::new(weight, shape.1, shape.2).is_err() {
                continue;
            }
            let case = MatmulTestCase::new(weight, Packing::Fragments, x, shape);
            let mut joined = 0;
            let kernel = case.kernel(CodeBlock::SINGLE, |kb, problem, epilogue| {
                let plan = TensorCoreGemvPlan::for_problem(&problem, parts, false).unwrap();
                let apart = shape.1 as i64 / i64::from(parts);
                emit_tensor_core_gemv(kb, &problem, plan, None, &mut |k, column, sums| {
                    joined = sums.len();
                    for (part, &acc) in (0..).zip(sums) {
                        let col = column + part * apart;
                        epilogue(k, FinishedSums { row: k.int(0), col, lanes: 1, acc, mask: None });
                    }
                })
                .unwrap();
            });
            assert_eq!(joined, parts as usize);
            let options = ExecutionOptions { workers: 1, order: ExecutionOrder::Shuffled(i as u64) };
            case.check("a row", &kernel, CodeBlock::SINGLE, &options);
        }
    }
}

/// One kernel for up to 16 rows, up to 64 and more, with warps along a depth of as many slices as they are,
/// of half as many, and of one.
#[test]
fn gpu_on_tensor_cores_of_few_rows() {
    let tile = MatrixTile { rows: 64, columns: 128, warps: [2, 2], stages: 3 };
    let packed = ["q4g32", "q8g32"].map(|name| (DType::parse(name).unwrap(), CaseActivation::F32));
    let all =
        packed.into_iter().chain([(DType::F16, CaseActivation::F32), (DType::BF16, CaseActivation::BF16)]);
    let row_major = all.map(|(weight, x)| (weight, x, Packing::RowMajor, 70));
    let fragments = fragment_cases().into_iter().map(|(weight, x)| (weight, x, Packing::Fragments, 80));
    for (i, (weight, x, packing, n)) in row_major.chain(fragments).enumerate() {
        for (m, depth) in [(1, 128), (5, 256), (16, 192), (17, 128), (64, 96), (65, 128)] {
            if packing == Packing::Fragments && FragmentSizes::new(weight, n, depth).is_err() {
                continue;
            }
            let case = MatmulTestCase::new(weight, packing, x, (m, n, depth));
            check_with_tile(&case, tile, i);
        }
    }
}

/// Products without such a kernel get another one.
#[test]
fn what_tensor_cores_do_not_take() {
    let target = mlcc_target::level("sm_80").unwrap().unwrap();
    let tile = KernelTarget::new(Arch::Nvptx, &target).matrix;
    assert!(tile.is_some());
    for (weight, (m, n, k)) in [
        (DType::F32, (40, 32, 64)),
        (DType::F16, (40, 32, 70)),
        (DType::BF16, (40, 32, 64)),
        (DType::parse("q4g32_min").unwrap(), (40, 32, 64)),
        (DType::parse("q3g40").unwrap(), (40, 32, 160)),
        (Q4, (40, 7, 96)),
    ] {
        MatmulTestCase::new(weight, Packing::RowMajor, CaseActivation::F32, (m, n, k)).kernel(
            CodeBlock::SINGLE,
            |_, problem, _| {
                assert_eq!(
                    choose_gpu(tile, &problem, false).unwrap(),
                    GpuMatmulPlan::Tiles,
                    "{weight} {n} {k}"
                );
            },
        );
    }
}

/// The scalar fragment reads what the host reads, in every packing.
#[test]
fn unpack_scalar_reads_every_packing() {
    for weight in storage_types() {
        for packing in Packing::ALL {
            let (n, k) = if packing == Packing::Fragments { (32, 128) } else { (19, 41) };
            if packing == Packing::Fragments && FragmentSizes::new(weight, n, k).is_err() {
                continue;
            }
            let rows = NoiseStream(7).vec(n * k);
            let bytes = pack(weight, packing, n, k, &rows, PackOptions::default()).unwrap();
            let layout = TensorLayout::new(weight, packing, n, k).unwrap();
            let mut kb = KernelBuilder::new("unpack");
            let w = kb.param("w", layout.buffer_dtype(), layout.len, ParamAccess::In, 64);
            let y = kb.param("y", DType::F32, n * k, ParamAccess::Out, 64);
            let (rows_e, cols_e) = (kb.int(n as i64), kb.int(k as i64));
            kb.serial("row", rows_e, |kb, row| {
                kb.serial("col", cols_e, |kb, col| {
                    let value = mlcc_quant::unpack_scalar(kb, &layout, w, row, col);
                    let start = kb.mul_int(row, k as i64);
                    let at = kb.add(start, col);
                    kb.store(y, at, value);
                });
            });
            let mut buffers = [
                KernelBuffer::new(layout.buffer_dtype(), bytes.clone()),
                KernelBuffer::zeros(DType::F32, n * k),
            ];
            run_with(&kb.finish(), &mut buffers, &SymValues::for_tokens(1), &ExecutionOptions::default())
                .unwrap();
            let want = dequantize(weight, packing, n, k, &bytes).unwrap();
            assert_eq!(buffers[1].to_f32(), want, "{weight} {}", packing.name());
        }
    }
}
