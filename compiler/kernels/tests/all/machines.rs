//! Differences between processors come from their specs.

use mlcc_ir::types::{DType, QuantFormat};
use mlcc_kernel_lang::PrefetchMethod as Plan;
use mlcc_kernel_lang::math::QuotientMethod;
use mlcc_kernels::matmul::MatmulActivation;
use mlcc_kernels::matmul::plan::{choose, code_block};
use mlcc_kernels::params::KernelTarget;
use mlcc_target::{Arch, DivisionMethod, RegisterTileSize, StreamPrefetch, resolve_target};
use std::path::Path;

const Q8: DType = DType::Packed(QuantFormat::Q8G32);

fn target(name: &str) -> KernelTarget {
    let target = resolve_target(name).unwrap();
    KernelTarget::new(target.arch, &target.levels[0])
}

/// Distance and whether only one line of each group is requested, of 8-bit weights.
fn read(machine: &KernelTarget) -> Option<(i64, bool)> {
    match choose(machine, Q8, MatmulActivation::F32, true).stream {
        Plan::Lines { distance, .. } => Some((distance, false)),
        Plan::Sparse { distance, .. } => Some((distance, true)),
        _ => None,
    }
}

#[test]
fn schedules_follow_the_tuning() {
    let mut machine = target("x86-64-v4-vnni");
    assert_eq!((machine.quotient_method(), machine.drops_requests()), (QuotientMethod::Polynomial, false));
    assert_eq!(read(&machine), Some((5120, false)));
    machine.tune.division = DivisionMethod::Divider;
    machine.tune.drops_requests = true;
    assert_eq!((machine.quotient_method(), machine.drops_requests()), (QuotientMethod::Division, true));
    machine.tune.stream.q8 = StreamPrefetch::One { distance: 320 };
    assert_eq!(read(&machine), Some((320, true)));
    machine.tune.stream.q8 = StreamPrefetch::None;
    assert_eq!(read(&machine), None);

    machine.tune.tile.packed = RegisterTileSize { rows: vec![6, 1], tiles: 2 };
    machine.tune.tile.codes = RegisterTileSize { rows: vec![2, 1], tiles: 1 };
    (machine.tune.product.few_rows, machine.tune.product.chunk_rows) = (9, 77);
    let many = choose(&machine, Q8, MatmulActivation::F32, false);
    assert_eq!((many.rows, many.tiles, many.few, many.chunk), (vec![6, 1], 2, 9, Some(77)));
    assert_eq!(code_block(&machine).rows, 2);
}

/// Zen 4 is a processor, not a pair of features.
#[test]
fn processors_are_told_apart_by_data() {
    let (zen, sapphire, ice) = (target("znver4"), target("sapphirerapids"), target("icelake-server"));
    assert!(zen.drops_requests() && !sapphire.drops_requests() && !ice.drops_requests());
    assert_eq!(zen.quotient_method(), QuotientMethod::Division);
    assert_eq!(sapphire.quotient_method(), QuotientMethod::Polynomial);
    assert_eq!([&zen, &sapphire, &ice].map(read), [None, Some((4096, true)), Some((5120, false))]);
    // Levels of instructions have what was measured on their processors.
    assert_eq!(zen.tune, target("x86-64-v4-bf16").tune);
}

/// Every level, with register tiles that fit.
#[test]
fn all_levels_have_schedules() {
    for spec in mlcc_target::specs().unwrap().iter().filter(|s| s.arch != Arch::Nvptx) {
        for level in spec.all_levels() {
            assert!(level.tune.is_some(), "{}", level.name);
            let machine = KernelTarget::new(spec.arch, level);
            let params = choose(&machine, Q8, MatmulActivation::F32, false);
            let sums = i64::from(params.rows[0] * params.tiles * 16 / params.lanes);
            assert!(sums <= machine.registers(), "{}: {sums} sums", level.name);
        }
    }
}

/// Sources ask for no feature or level by its name: instructions are rows of a table, everything else is in
/// the specs.
#[test]
fn no_source_asks_for_a_feature() {
    fn look(folder: &Path, names: &[String]) -> usize {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut files = 0;
        for path in entries {
            if path.is_dir() {
                files += look(&path, names);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let found = names.iter().find(|name| text.contains(&format!("(\"{name}\")")));
            assert_eq!(found, None, "{}", path.display());
            files += 1;
        }
        files
    }
    let specs = mlcc_target::specs().unwrap();
    let levels = specs.iter().flat_map(|spec| spec.all_levels());
    let names: Vec<String> = levels.flat_map(|l| l.features.iter().chain([&l.name])).cloned().collect();
    assert!(look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &names) > 10);
}
