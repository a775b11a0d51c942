//! Every format in every packing reads back what the arithmetic says, whatever the shape and however rows
//! arrive.

use half::{bf16, f16};
use mlcc_ir::format::ZeroPoint;
use mlcc_ir::types::{DType, Packing, QuantFormat};
use mlcc_quant::layout::LayoutRegion;
use mlcc_quant::{
    FragmentSizes, GroupSpec, PackOptions, QuantError, ScaleSearch, TensorLayout, WeightPacker, dequantize,
    dequantize_element, half_steps, pack, packed_bytes, storage_types,
};
use proptest::prelude::*;

/// The values that must be read back, computed row by row without any packing.
fn expected(dtype: DType, k: usize, rows: &[f32], search: ScaleSearch) -> Vec<f32> {
    let DType::Packed(format) = dtype else {
        return (rows.iter())
            .map(|&w| match dtype {
                DType::F16 => f16::from_f32(w).to_f32(),
                DType::BF16 => bf16::from_f32(w).to_f32(),
                _ => w,
            })
            .collect();
    };
    let spec = GroupSpec::new(format, k);
    let mut codes = vec![0; spec.group];
    let mut values = Vec::new();
    for weights in rows.chunks(k).flat_map(|row| row.chunks(spec.group)) {
        let grid = spec.quantize(weights, search, &mut codes);
        values.extend(codes[..weights.len()].iter().map(|&code| spec.decode(code, grid)));
    }
    values
}

fn tensors() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (1..40_usize, 1..300_usize).prop_flat_map(|(n, k)| {
        let weight =
            prop_oneof![4 => -1.0..1.0_f32, 1 => Just(0.0), 1 => -1e-4..1e-4_f32, 1 => -300.0..300.0_f32];
        (Just(n), Just(k), proptest::collection::vec(weight, n * k))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn reads_back((n, k, rows) in tensors(), cut in 1..20_usize, mse in any::<bool>()) {
        let scale_search = if mse { ScaleSearch::Mse } else { ScaleSearch::None };
        for dtype in storage_types() {
            let want = expected(dtype, k, &rows, scale_search);
            for packing in [Packing::RowMajor, Packing::ColMajor, Packing::Tile16] {
                let mut packer = WeightPacker::new(dtype, packing, n, k, PackOptions { scale_search }).unwrap();
                let mut bytes = Vec::new();
                for piece in rows.chunks(cut * k) {
                    packer.push_rows(piece, &mut bytes).unwrap();
                }
                packer.finish(&mut bytes).unwrap();
                prop_assert_eq!(bytes.len(), packed_bytes(dtype, packing, n, k).unwrap());
                let got = dequantize(dtype, packing, n, k, &bytes).unwrap();
                prop_assert_eq!(&got, &want, "{} {}", dtype, packing.name());
                let (row, col) = (n - 1, k / 2);
                prop_assert_eq!(dequantize_element(dtype, packing, (n, k), &bytes, (row, col)).unwrap(), want[row * k + col]);
            }
        }
    }

    /// The distance of a weight from what it reads back as is bounded by what the description says.
    #[test]
    fn errors_are_bounded((_, k, rows) in tensors()) {
        for &format in QuantFormat::ALL {
            let spec = GroupSpec::new(format, k);
            let mut codes = vec![0; spec.group];
            for weights in rows.chunks(k).flat_map(|r| r.chunks(spec.group)) {
                let grid = spec.quantize(weights, ScaleSearch::None, &mut codes);
                for (w, &code) in weights.iter().zip(&codes) {
                    let (error, bound) = ((w - spec.decode(code, grid)).abs(), spec.max_error(grid));
                    prop_assert!(error <= bound, "{}, {w}: error {error}, {grid:?}", format.name());
                }
            }
        }
    }
}

/// Places without a weight must still be harmless: their codes mean zero, with any scale. (Columns of formats
/// with minima cannot, and meet no activation.)
#[test]
fn padding_is_zero() {
    let (n, k) = (3, 5);
    for &format in QuantFormat::ALL {
        let dtype = DType::Packed(format);
        let spec = GroupSpec::new(format, k);
        // Read as a tensor of 16 whole groups.
        let bytes = pack(dtype, Packing::Tile16, n, k, &[1.0; 15], PackOptions::default()).unwrap();
        let values = dequantize(dtype, Packing::Tile16, 16, spec.group, &bytes).unwrap();
        for (at, value) in values.iter().enumerate() {
            let inside = at / spec.group < n && at % spec.group < k;
            if format.zero == ZeroPoint::Minimum && !inside && at / spec.group < n {
                continue;
            }
            assert!((value - if inside { 1.0 } else { 0.0 }).abs() < 0.01, "{dtype}: {value} at {at}");
        }
        for packing in [Packing::RowMajor, Packing::ColMajor] {
            let bytes = pack(dtype, packing, n, k, &[1.0; 15], PackOptions::default()).unwrap();
            let values = dequantize(dtype, packing, n, spec.group, &bytes).unwrap();
            for (at, value) in values.iter().enumerate() {
                let want = if at % spec.group < k { 1.0 } else { 0.0 };
                if format.zero == ZeroPoint::Minimum && want == 0.0 {
                    continue;
                }
                assert!((value - want).abs() < 0.01, "{dtype} {}: {value} at {at}", packing.name());
            }
        }
    }
}

/// One group by hand: the exact bytes of a q4g32 tile.
#[test]
fn tile_bytes_of_q4() {
    let row: Vec<f32> = (0..32).map(|c| (c % 15) as f32 - 7.0).collect();
    let bytes = pack(DType::Packed(QuantFormat::Q4G32), Packing::Tile16, 1, 32, &row, PackOptions::default())
        .unwrap();
    assert_eq!(bytes.len(), 288);
    assert_eq!(bytes[..2], f16::ONE.to_le_bytes());
    // Block 1, row 0: columns 4..8 in the low nibbles, 20..24 (codes 5..9) in the high ones.
    assert_eq!(bytes[32 + 64..32 + 68], [0x54, 0x65, 0x76, 0x87]);
}

#[test]
fn refuses_bad_input() {
    let q4 = DType::Packed(QuantFormat::Q4G32);
    let new = |n, k| WeightPacker::new(q4, Packing::Tile16, n, k, PackOptions::default()).unwrap();
    let mut out = Vec::new();
    assert!(matches!(
        new(2, 3).push_rows(&[0.0; 4], &mut out),
        Err(QuantError::PartialRow { k: 3, found: 4 })
    ));
    assert!(matches!(
        new(2, 3).push_rows(&[0.0; 9], &mut out),
        Err(QuantError::RowCount { expected: 2, found: 3 })
    ));
    let mut packer = new(2, 3);
    packer.push_rows(&[0.0; 3], &mut out).unwrap();
    let bad = packer.push_rows(&[0.0, f32::NAN, 0.0], &mut out);
    assert!(matches!(bad, Err(QuantError::NotFinite { row: 1, column: 1, .. })), "{bad:?}");
    assert!(matches!(packer.finish(&mut out), Err(QuantError::RowCount { expected: 2, found: 1 })));
    assert!(matches!(
        TensorLayout::new(DType::I32, Packing::RowMajor, 1, 1),
        Err(QuantError::UnsupportedType { dtype: DType::I32 })
    ));
    assert!(matches!(
        TensorLayout::new(q4, Packing::RowMajor, usize::MAX / 2, 64),
        Err(QuantError::TooLarge { .. })
    ));
    assert!(matches!(
        dequantize(DType::F32, Packing::RowMajor, 2, 2, &[0; 15]),
        Err(QuantError::ByteCount { expected: 16, found: 15, .. })
    ));
}

/// Sizes that come in fragments read back, and no others are taken: rows by 16, columns by 64 and by groups.
#[test]
fn fragments_read_back() {
    let mut found = Vec::new();
    for dtype in storage_types() {
        for (n, k) in [(16, 64), (48, 256), (32, 192), (17, 64), (16, 96)] {
            let rows: Vec<f32> = (0..n * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
            let Ok(sizes) = FragmentSizes::new(dtype, n, k) else {
                let refused = pack(dtype, Packing::Fragments, n, k, &rows, PackOptions::default());
                assert_eq!(refused, Err(QuantError::NoFragments { dtype, n, k }));
                continue;
            };
            assert_eq!((n % 16, k % 64), (0, 0), "{dtype}");
            found.push((dtype.name(), k));
            let bytes = pack(dtype, Packing::Fragments, n, k, &rows, PackOptions::default()).unwrap();
            assert_eq!(bytes.len(), packed_bytes(dtype, Packing::Fragments, n, k).unwrap());
            assert_eq!(bytes.len(), n / 16 * sizes.tile());
            let got = dequantize(dtype, Packing::Fragments, n, k, &bytes).unwrap();
            assert_eq!(got, expected(dtype, k, &rows, ScaleSearch::None), "{dtype} {n} x {k}");
            // Lane 4 r + q of a warp has pieces of rows r and r + 8, from column 8 q on: here its first one.
            let layout = TensorLayout::new(dtype, Packing::Fragments, n, k).unwrap();
            let (place, unit) = match &layout.region {
                LayoutRegion::Plain { place, plain } => (place, plain.bytes()),
                LayoutRegion::Group { codes, .. } => (codes, 1),
            };
            for lane in 0..32 {
                assert_eq!(
                    place.evaluate(lane / 4, lane % 4 * 8) * unit,
                    sizes.scale_bytes() + 16 * lane,
                    "{dtype}"
                );
            }
        }
    }
    for taken in ["f16", "bf16", "q4g32", "q8g32", "q4g128"] {
        assert!(found.iter().any(|(name, _)| *name == taken), "{taken}");
    }
    assert!(
        found.contains(&("q4g128", 256)) && !found.contains(&("q4g128", 192)),
        "blocks are of whole groups"
    );
    assert!(!found.iter().any(|(name, _)| ["f32", "q4g32_min", "q3g40"].contains(name)));
}

/// Every weight lies within the half step of what it became, and some nearly that far from it.
#[test]
fn weights_lie_within_half_steps() {
    let (n, k) = (16, 256);
    let weight = |i: usize| ((i * i) as f64 * 0.7391).sin() as f32;
    let weights: Vec<f32> = (0..n * k).map(weight).collect();
    for dtype in storage_types().filter(|&dtype| dtype != DType::F32) {
        let packing = Packing::RowMajor;
        let options = PackOptions { scale_search: ScaleSearch::None };
        let bytes = pack(dtype, packing, n, k, &weights, options).unwrap();
        let stored = dequantize(dtype, packing, n, k, &bytes).unwrap();
        let steps = half_steps(dtype, packing, n, k, &bytes).unwrap();
        let shares = weights.iter().zip(&stored).zip(&steps).filter(|(_, step)| **step > 0.0);
        let furthest = shares.map(|((w, v), step)| (w - v).abs() / step).fold(0.0, f32::max);
        // Scales and minima are rounded as well.
        assert!((0.9..1.3).contains(&furthest), "{dtype}: {furthest} of half a step");
    }
}
