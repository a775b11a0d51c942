//! Mistakes that were put into kernels: each is found, and the message names kernel, line, block and lane.

use crate::machine::{KernelArg, TestLaunch, kernel};
use softcuda::driver::Status;

/// The address of this thread's word of `%rd0` in `%rd9`, its number in `%r0`.
const MINE: &str = "mov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd0, %rd8;\n";

fn found(text: &str, threads: u32, args: &[KernelArg<'_>], status: Status, parts: &[&str]) {
    for order in ["turns", "backwards", "random:1", "random:77"] {
        let switches = [("ORDER", order)];
        let launch = TestLaunch { switches: &switches, ..TestLaunch::new(text.to_string(), threads, args) };
        let failure = launch.failure();
        assert_eq!(failure.status, status, "{order}: {}", failure.what);
        for part in parts {
            assert!(failure.what.contains(part), "{order}: {part:?} is not in: {}", failure.what);
        }
    }
}

fn works(text: &str, threads: u32, args: &[KernelArg<'_>]) -> Vec<Vec<u32>> {
    let of = |order: &str| {
        let switches = [("ORDER", order)];
        let launch = TestLaunch { switches: &switches, ..TestLaunch::new(text.to_string(), threads, args) };
        launch.run().unwrap_or_else(|f| panic!("{order}: {}", f.what))
    };
    let results = of("turns");
    for order in ["backwards", "random:1", "random:77"] {
        assert_eq!(of(order), results);
    }
    results
}

#[test]
fn an_index_beyond_an_allocation() {
    let text = kernel(1, &format!("{MINE}st.global.u32 [%rd9+4], %r0;\nret;"));
    let args = [KernelArg::Empty(64 * 4)];
    let parts = [
        "kernel k, PTX line 14 `st.global.u32 [%rd9+4], %r0;`",
        "block (0, 0, 0)",
        "lane 31 of warp 1",
        "256 bytes",
    ];
    found(&text, 64, &args, Status::IllegalAddress, &parts);
    let right = kernel(1, &format!("{MINE}st.global.u32 [%rd9], %r0;\nret;"));
    assert_eq!(works(&right, 64, &args)[0], (0..64).collect::<Vec<_>>());
}

#[test]
fn an_index_beyond_an_array_in_shared_memory() {
    let body = |offset: u32| {
        format!(
            ".shared .align 4 .b8 xs[128];\n.shared .align 4 .b8 ys[128];\n{MINE}mov.u64 %rd10, xs;\nadd.s64 %rd11, %rd10, %rd8;\n\
             st.shared.u32 [%rd11+{offset}], %r0;\nbar.sync 0;\nld.shared.u32 %r1, [%rd11+{offset}];\nst.global.u32 [%rd9], %r1;\nret;"
        )
    };
    let args = [KernelArg::Empty(128)];
    found(
        &kernel(1, &body(4)),
        32,
        &args,
        Status::IllegalAddress,
        &["lane 31 of warp 0", "shared memory", "xs 0x400..0x480"],
    );
    assert_eq!(works(&kernel(1, &body(0)), 32, &args)[0], (0..32).collect::<Vec<_>>());
}

#[test]
fn addresses_beyond_all_memory() {
    let args = [KernelArg::Empty(128)];
    for space in ["shared", "local", "global"] {
        for at in ["-4", "0", "0x7fffffffffffffff"] {
            let body = format!(
                ".shared .align 4 .b8 xs[128];\n.local .align 4 .b8 ys[16];\nmov.u64 %rd10, {at};\nand.b64 %rd10, %rd10, -4;\n\
                 ld.{space}.u32 %r1, [%rd10];\nst.global.u32 [%rd0], %r1;\nret;"
            );
            found(&kernel(1, &body), 1, &args, Status::IllegalAddress, &[&format!("of {space} memory")]);
        }
    }
}

/// Every thread reads what its neighbour wrote.
fn exchange(first: &str, second: &str) -> String {
    let body = format!(
        ".shared .align 4 .b8 xs[256];\n{MINE}mov.u64 %rd10, xs;\nadd.s64 %rd11, %rd10, %rd8;\nxor.b32 %r2, %r0, 32;\n\
         mul.wide.u32 %rd12, %r2, 4;\nadd.s64 %rd13, %rd10, %rd12;\nst.shared.u32 [%rd11], %r0;\n{first}\n\
         ld.shared.u32 %r1, [%rd13];\n{second}\nst.shared.u32 [%rd11], %r1;\nst.global.u32 [%rd9], %r1;\nret;"
    );
    kernel(1, &body)
}

#[test]
fn a_missing_barrier() {
    let args = [KernelArg::Empty(256)];
    let failures = [
        // A warp that runs far ahead reads unwritten memory.
        (exchange("", "bar.sync 0;"), None),
        (exchange("bar.sync 0;", ""), Some("no barrier stands between")),
    ];
    for (text, part) in failures {
        for order in ["turns", "backwards", "random:1", "random:77"] {
            let switches = [("ORDER", order)];
            let launch = TestLaunch { switches: &switches, ..TestLaunch::new(text.clone(), 64, &args) };
            let failure = launch.failure();
            assert_eq!(failure.status, Status::LaunchFailed);
            assert!(failure.what.contains(part.unwrap_or("shared")), "{order}: {}", failure.what);
        }
    }
    let results = works(&exchange("bar.sync 0;", "bar.sync 0;"), 64, &args);
    assert_eq!(results[0], (0..64).map(|i| i ^ 32).collect::<Vec<_>>());
}

#[test]
fn lanes_of_one_warp_race_too() {
    let text =
        |between: &str| exchange(between, between).replace("xor.b32 %r2, %r0, 32", "xor.b32 %r2, %r0, 1");
    let args = [KernelArg::Empty(128)];
    found(&text(""), 32, &args, Status::LaunchFailed, &["no barrier stands between", "wrote xs +"]);
    works(&text("bar.warp.sync 0xffffffff;"), 32, &args);
}

#[test]
fn a_vector_off_its_alignment() {
    let body = "mov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 8;\nadd.s64 %rd9, %rd1, %rd8;\n\
                ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd9];\nst.global.u32 [%rd0], %r1;\nret;";
    let words: Vec<u32> = (0..64).collect();
    let args = [KernelArg::Empty(4), KernelArg::Words(&words)];
    found(&kernel(2, body), 2, &args, Status::MisalignedAddress, &["lane 1 of warp 0", "16 bytes at"]);
}

#[test]
fn a_register_that_has_no_value_on_one_way() {
    let body = format!(
        "{MINE}setp.lt.u32 %p0, %r0, 7;\n@%p0 bra SKIP;\nmov.u32 %r5, 1;\nSKIP:\nadd.s32 %r6, %r5, 1;\nst.global.u32 [%rd9], %r6;\nret;"
    );
    let args = [KernelArg::Empty(128)];
    found(
        &kernel(1, &body),
        32,
        &args,
        Status::LaunchFailed,
        &["lane 0 of warp 0", "%r5 is read before it has a value"],
    );
}

#[test]
fn memory_that_was_never_written() {
    let global = kernel(2, "ld.global.u32 %r0, [%rd1+4];\nst.global.u32 [%rd0], %r0;\nret;");
    let parts = ["global memory is read before it has a value", "ld.global.u32 %r0, [%rd1+4];"];
    found(&global, 1, &[KernelArg::Empty(4), KernelArg::Empty(8)], Status::LaunchFailed, &parts);
    let shared = kernel(
        1,
        ".shared .align 4 .b8 xs[8];\nld.shared.u32 %r0, [xs+4];\nst.global.u32 [%rd0], %r0;\nret;",
    );
    found(
        &shared,
        1,
        &[KernelArg::Empty(4)],
        Status::LaunchFailed,
        &["xs + 4 of shared memory is read before"],
    );
}

#[test]
fn a_barrier_that_a_part_of_the_threads_comes_to() {
    let text = |limit: u32, more: &str| {
        kernel(
            1,
            &format!(
                "{MINE}setp.ge.u32 %p0, %r0, {limit};\n@%p0 bra SKIP;\nbar.sync 0;\nSKIP:\n{more}st.global.u32 [%rd9], %r0;\nret;"
            ),
        )
    };
    let args = [KernelArg::Empty(256)];
    // A part of a warp, a whole warp.
    found(&text(16, ""), 64, &args, Status::LaunchFailed, &["bar.sync 0;"]);
    found(&text(32, ""), 64, &args, Status::LaunchFailed, &["bar.sync 0;", "waits at a barrier for ever"]);
    // Two barriers where the lanes of a warp wait for each other.
    found(&text(16, "bar.sync 0;\n"), 32, &args, Status::LaunchFailed, &["do not come"]);
    works(&text(64, ""), 64, &args);
}

#[test]
fn a_shuffle_that_a_part_of_the_lanes_comes_to() {
    let body = |guard: &str| {
        format!(
            "{MINE}setp.lt.u32 %p0, %r0, 16;\n{guard} bra SKIP;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffffffff;\n\
             st.global.u32 [%rd9], %r1;\nSKIP:\nbar.warp.sync 0xffffffff;\nret;"
        )
    };
    let args = [KernelArg::Empty(128)];
    found(&kernel(1, &body("@%p0")), 32, &args, Status::LaunchFailed, &["do not come"]);
    let all = body("@%p0").replace("%r0, 16", "%r0, 0");
    assert_eq!(works(&kernel(1, &all), 32, &args)[0], (0..32).map(|i| i ^ 1).collect::<Vec<_>>());
}

#[test]
fn blocks_that_touch_the_same_word() {
    let text = |store: &str| kernel(1, &format!("mov.u32 %r0, %ctaid.x;\n{store}\nret;"));
    let run = |store: &str| {
        let args = [KernelArg::Words(&[5, 0, 0, 0])];
        TestLaunch { grid: [4, 1, 1], ..TestLaunch::new(text(store), 1, &args) }.run()
    };
    let failure = run("st.global.u32 [%rd0], %r0;").unwrap_err();
    assert!(failure.what.contains("another block of this launch writes it"), "{}", failure.what);
    let failure = run("ld.global.u32 %r1, [%rd0];\nst.global.u32 [%rd0+4], %r1;").unwrap_err();
    assert!(failure.what.contains("writes it"), "{}", failure.what);
    assert_eq!(run("red.global.add.u32 [%rd0], 1;").unwrap()[0][0], 9);
    let failure =
        run("ld.global.nc.u32 %r1, [%rd0];\nadd.s32 %r1, %r1, 1;\nst.global.u32 [%rd0], %r1;").unwrap_err();
    assert!(failure.what.contains("is read by ld.global.nc and this launch writes it"), "{}", failure.what);
}

#[test]
fn threads_of_a_block_that_exchange_through_global_memory() {
    let body = |barrier: &str| {
        format!(
            "{MINE}st.global.u32 [%rd9], %r0;\n{barrier}\nxor.b32 %r2, %r0, 1;\nmul.wide.u32 %rd12, %r2, 4;\nadd.s64 %rd13, %rd0, %rd12;\n\
             ld.global.u32 %r3, [%rd13];\nadd.s64 %rd14, %rd1, %rd8;\nst.global.u32 [%rd14], %r3;\nret;"
        )
    };
    let args = [KernelArg::Empty(256), KernelArg::Empty(256)];
    found(
        &kernel(2, &body("")),
        64,
        &args,
        Status::LaunchFailed,
        &["global memory is read here", "no barrier stands between"],
    );
    works(&kernel(2, &body("bar.sync 0;")), 64, &args);
}

/// A copy to shared memory by each thread, then what its neighbour copied.
fn copied(wait: &str) -> String {
    let body = format!(
        ".shared .align 16 .b8 xs[512];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 16;\nmov.u64 %rd10, xs;\nadd.s64 %rd11, %rd10, %rd8;\n\
         add.s64 %rd12, %rd1, %rd8;\ncp.async.cg.shared.global [%rd11], [%rd12], 16;\ncp.async.commit_group;\n{wait}\n\
         ld.shared.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd11];\nmul.wide.u32 %rd13, %r0, 4;\nadd.s64 %rd14, %rd0, %rd13;\n\
         st.global.u32 [%rd14], %r3;\ncp.async.wait_all;\nret;"
    );
    kernel(2, &body)
}

#[test]
fn a_copy_that_was_not_waited_for() {
    let words: Vec<u32> = (0..128).collect();
    let args = [KernelArg::Empty(128), KernelArg::Words(&words)];
    let part = ["is read while a copy to it is under way"];
    found(&copied(""), 32, &args, Status::LaunchFailed, &part);
    // The last group may be under way still.
    found(&copied("cp.async.wait_group 1;"), 32, &args, Status::LaunchFailed, &part);
    let expected: Vec<u32> = (0..32).map(|i| 4 * i + 2).collect();
    assert_eq!(works(&copied("cp.async.wait_group 0;"), 32, &args)[0], expected);
    // Bytes that others copied need a barrier as well.
    let neighbour =
        |wait: &str| copied(wait).replace("ld.shared.v4", "xor.b64 %rd11, %rd11, 16;\nld.shared.v4");
    found(&neighbour("cp.async.wait_all;"), 32, &args, Status::LaunchFailed, &["no barrier stands between"]);
    let expected: Vec<u32> = (0..32).map(|i| 4 * (i ^ 1) + 2).collect();
    assert_eq!(works(&neighbour("cp.async.wait_all;\nbar.sync 0;"), 32, &args)[0], expected);
}

#[test]
fn a_stage_that_is_used_again_too_early() {
    let text = copied("cp.async.cg.shared.global [%rd11], [%rd12], 16;\ncp.async.wait_all;");
    let words: Vec<u32> = (0..128).collect();
    let args = [KernelArg::Empty(128), KernelArg::Words(&words)];
    found(&text, 32, &args, Status::LaunchFailed, &["is written while a copy to it is under way"]);
}

#[test]
fn a_division_by_zero_and_a_trap() {
    let zero = [0];
    let args = [KernelArg::Empty(4), KernelArg::Words(&zero)];
    let text = kernel(2, "ld.global.u32 %r0, [%rd1];\nmov.u32 %r1, 7;\ndiv.u32 %r2, %r1, %r0;\nret;");
    found(&text, 1, &args, Status::LaunchFailed, &["a division by zero"]);
    found(&kernel(2, "trap;\nret;"), 1, &args, Status::IllegalInstruction, &["trap;"]);
}
