//! `runtime/core/include/mlcc.h` and this crate are one contract: the C compiler checks every size, offset
//! and constant that Rust has.

use mlcc_abi::*;
use std::fmt::Write;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

/// Asserts on one struct: its size and the offset of each field (and so their number, by the size).
macro_rules! layout {
    ($out:expr, $rust:ty, $c:literal, $($field:ident),*) => {
        writeln!($out, "_Static_assert(sizeof({}) == {}, \"size of {}\");", $c, size_of::<$rust>(), $c).unwrap();
        $(writeln!($out, "_Static_assert(offsetof({}, {}) == {}, \"{}.{}\");", $c, stringify!($field),
            offset_of!($rust, $field), $c, stringify!($field)).unwrap();)*
    };
}

fn constant(out: &mut String, name: &str, value: u64) {
    writeln!(out, "_Static_assert({name} == {value}ULL, \"{name}\");").unwrap();
}

fn layouts(out: &mut String) {
    layout!(out, Str, "mlcc_str", ptr, len);
    layout!(
        out,
        Ctx,
        "mlcc_ctx",
        weights,
        arena,
        state,
        tokens,
        n,
        past,
        logits,
        probs,
        barrier,
        barrier_self,
        temperature,
        reserved0,
        trace,
        trace_self,
        sequences,
        next_chunk,
        next_chunk_self,
        b,
        output_rows,
        n_outputs,
        pages,
        page_table,
        all_gather,
        all_gather_self,
        adapters
    );
    layout!(out, Sequence, "mlcc_sequence", state, page_table, past, first, rows);
    layout!(out, VariantEntry, "mlcc_entry", name, kind, reserved, function, adapted);
    layout!(out, Variant, "mlcc_variant", name, features, entries, n_entries);
    layout!(out, Param, "mlcc_param", name, format, packing, ndim, of_slots, dims, offset, bytes);
    layout!(out, State, "mlcc_state", name, offset, bytes, init, fill, format, kind, sinks, rows, row_bytes);
    layout!(out, DeviceImage, "mlcc_device_image", kind, sm, scope, ptr, len);
    layout!(out, DimExpr, "mlcc_dim_expr", coef_n, coef_past, constant, div);
    layout!(out, Control, "mlcc_control", n, past, b, n_outputs, temperature, reserved);
    layout!(out, LaunchArg, "mlcc_launch_arg", kind, reserved, offset);
    layout!(out, Launch, "mlcc_launch", kernel, grid, block, shared_bytes, args, n_args, repeat, reserved);
    layout!(
        out,
        ModelPlan,
        "mlcc_plan",
        weights_bytes,
        arena_bytes,
        state_bytes,
        alignment,
        chunk,
        context,
        batch,
        vocab,
        max_workers,
        page_bytes,
        text_width,
        ranks,
        adapter_slots,
        adapter_rank,
        adapter_bytes,
        decoder_start
    );
    layout!(out, DeviceEntry, "mlcc_device_entry", name, launches, n_launches);
    layout!(
        out,
        ModelTable,
        "mlcc_model_table",
        magic,
        abi_version,
        struct_size,
        flags,
        target,
        compiler,
        metadata,
        variants,
        n_variants,
        params,
        n_params,
        states,
        n_states,
        images,
        n_images,
        device_entries,
        n_device_entries,
        plan,
        reserved
    );
}

fn constants(out: &mut String) {
    constant(out, "MLCC_MAGIC", MAGIC);
    constant(out, "MLCC_ABI_VERSION", u64::from(ABI_VERSION));
    constant(out, "MLCC_NO_CHUNK", u64::from(NO_CHUNK));
    constant(out, "MLCC_BUFFER_ALIGN", BUFFER_ALIGN as u64);
    constant(out, "MLCC_PAGE_ROWS", PAGE_ROWS);
    constant(out, "MLCC_SECTION_ALIGN", SECTION_ALIGN);
    constant(out, "MLCC_OK", status::OK as u64);
    constant(out, "MLCC_BAD_TOKEN", status::BAD_TOKEN as u64);
    constant(out, "MLCC_BAD_LENGTH", status::BAD_LENGTH as u64);
    constant(out, "MLCC_CONTEXT_FULL", status::CONTEXT_FULL as u64);
    constant(out, "MLCC_INIT_ZERO", u64::from(init::ZERO));
    constant(out, "MLCC_INIT_FILL_F32", u64::from(init::FILL_F32));
    constant(out, "MLCC_WHOLE_PROMPTS", table_flag::WHOLE_PROMPTS);
    constant(out, "MLCC_STATE_RECURRENT", u64::from(state_kind::RECURRENT));
    constant(out, "MLCC_STATE_CACHE", u64::from(state_kind::CACHE));
    constant(out, "MLCC_STATE_DROPPED_ROWS", u64::from(state_kind::DROPPED_ROWS));
    constant(out, "MLCC_STATE_SEQUENCE_LENGTH", u64::from(state_kind::SEQUENCE_LENGTH));
    constant(out, "MLCC_STATE_ADAPTER_SLOT", u64::from(state_kind::ADAPTER_SLOT));
    constant(out, "MLCC_STATE_SOURCE_LENGTH", u64::from(state_kind::SOURCE_LENGTH));
    constant(out, "MLCC_DEVICE_LATER", u64::from(device_scope::LATER));
    constant(out, "MLCC_DEVICE_EXACT", u64::from(device_scope::EXACT));
    constant(out, "MLCC_DEVICE_FAMILY", u64::from(device_scope::FAMILY));
    for kind in EntryForm::ALL {
        let name: String = format!("{kind:?}").chars().fold(String::new(), |mut name, c| {
            if c.is_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(c.to_ascii_uppercase());
            name
        });
        constant(out, &format!("MLCC_ENTRY_{name}"), kind as u64);
        assert_eq!(EntryForm::from_value(kind as u32), Some(kind));
    }
    let args = [
        ("WEIGHTS", arg::WEIGHTS),
        ("ARENA", arg::ARENA),
        ("STATE", arg::STATE),
        ("TOKENS", arg::TOKENS),
        ("LOGITS", arg::LOGITS),
        ("PROBS", arg::PROBS),
        ("CONTROL", arg::CONTROL),
        ("OUTPUT_ROWS", arg::OUTPUT_ROWS),
        ("SEQUENCES", arg::SEQUENCES),
        ("PAGES", arg::PAGES),
        ("PAGE_TABLE", arg::PAGE_TABLE),
    ];
    for (name, value) in args {
        constant(out, &format!("MLCC_ARG_{name}"), u64::from(value));
    }
    constant(out, "MLCC_REPEAT_ONCE", u64::from(repeat::ONCE));
    constant(out, "MLCC_REPEAT_OUTPUTS", u64::from(repeat::OUTPUTS));
    constant(out, "MLCC_REPEAT_EACH_SEQUENCE", u64::from(repeat::EACH_SEQUENCE));
    for (bit, name) in feature::ALL {
        let name = name.replace("sse4.", "sse4_").replace('-', "_").to_uppercase();
        constant(out, &format!("MLCC_FEATURE_{name}"), *bit);
    }
}

#[test]
fn header_and_crate_agree() {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler (`cc`) on this machine");
        return;
    }
    let mut source = String::from("#include \"mlcc.h\"\n");
    layouts(&mut source);
    constants(&mut source);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mlcc_header_check.c");
    std::fs::write(&file, source).unwrap();
    let out = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror", "-fsyntax-only", "-I"])
        .arg(root.join("../core/include"))
        .arg(&file)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn section_names_agree() {
    let header = include_str!("../../../core/include/mlcc.h");
    let names = [
        ("WEIGHTS", section::WEIGHTS),
        ("RECIPE", section::RECIPE),
        ("METADATA", section::METADATA),
        ("TOKENIZER", section::TOKENIZER),
        ("CHAT", section::CHAT),
        ("GRAPH", section::GRAPH),
        ("GOLDEN", section::GOLDEN),
        ("REPORT", section::REPORT),
        ("HASHES", section::HASHES),
    ];
    for (name, value) in names {
        let line = format!("#define MLCC_SECTION_{name} \"{value}\"");
        assert!(header.lines().any(|l| l == line), "the header lacks: {line}");
        assert!(value.starts_with(section::PREFIX));
    }
}

#[test]
fn entry_points_are_found_by_their_names() {
    let header = include_str!("../../../core/include/mlcc.h");
    for point in EntryPoint::all() {
        assert_eq!(EntryPoint::from_name(point.name()), Some(point));
        assert_eq!(EntryPoint::of_function(point.name()), Some((point, false)));
        let adapted = format!("{ADAPTED}{}", point.name());
        assert_eq!(EntryPoint::of_function(&adapted), point.has_adapted().then_some((point, true)));
        // Those of devices alone are not called from C.
        assert!(
            point == EntryPoint::TopK || header.contains(point.name()),
            "{} is not in mlcc.h",
            point.name()
        );
    }
    assert_eq!(EntryPoint::from_name("hidden_states"), None);
    assert_eq!(EntryForm::from_value(EntryForm::ALL.len() as u32), None);
}
