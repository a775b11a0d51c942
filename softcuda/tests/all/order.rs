//! Lanes that part meet again, loops of different lengths, guards, votes.

use crate::machine::{KernelArg, TestLaunch, kernel};

fn all(body: &str, threads: u32) -> Vec<u32> {
    let args = [KernelArg::Empty(u64::from(threads) * 4)];
    let mine = "mov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd0, %rd8;\n";
    let text = kernel(1, &format!("{mine}{body}\nst.global.u32 [%rd9], %r1;\nret;"));
    TestLaunch::new(text, threads, &args).run().unwrap_or_else(|f| panic!("{}", f.what)).remove(0)
}

#[test]
fn loops_of_different_lengths() {
    // The sum of 1 to the lane's number, with the exit of the loop before its body.
    let body = "mov.u32 %r1, 0;\nmov.u32 %r2, 0;\nbra HEAD;\nEXIT:\nbra.uni END;\nHEAD:\nsetp.ge.u32 %p0, %r2, %r0;\n@%p0 bra EXIT;\n\
                add.s32 %r2, %r2, 1;\nadd.s32 %r1, %r1, %r2;\nbra HEAD;\nEND:\nbar.sync 0;";
    assert_eq!(all(body, 64), (0..64u32).map(|i| i * (i + 1) / 2).collect::<Vec<_>>());
}

#[test]
fn nested_branches_meet_before_a_vote() {
    let body = "and.b32 %r2, %r0, 1;\nsetp.eq.s32 %p0, %r2, 1;\nmov.u32 %r1, 0;\n@%p0 bra ODD;\nsetp.lt.u32 %p1, %r0, 8;\n@!%p1 bra BOTH;\n\
                add.s32 %r1, %r1, 100;\nbra BOTH;\nODD:\nadd.s32 %r1, %r1, 1;\nBOTH:\nvote.sync.ballot.b32 %r3, %p0, 0xffffffff;\n\
                setp.eq.u32 %p2, %r3, 0xaaaaaaaa;\n@%p2 add.s32 %r1, %r1, 10;";
    let expected = |i: u32| match i {
        _ if i % 2 == 1 => 11,
        0..8 => 110,
        _ => 10,
    };
    assert_eq!(all(body, 32), (0..32).map(expected).collect::<Vec<_>>());
}

#[test]
fn masks_of_a_part_of_the_lanes() {
    let body =
        "setp.lt.u32 %p0, %r0, 8;\nmov.u32 %r1, 5;\n@!%p0 bra END;\nredux.sync.add.s32 %r1, %r0, 0xff;\nEND:";
    assert_eq!(all(body, 32), (0..32).map(|i| if i < 8 { 28 } else { 5 }).collect::<Vec<_>>());
}

#[test]
fn three_axes_and_a_partial_warp() {
    let args = [KernelArg::Empty(6 * 7 * 4)];
    let body = "mov.u32 %r0, %tid.x;\nmov.u32 %r1, %tid.y;\nmov.u32 %r2, %ntid.x;\nmad.lo.s32 %r3, %r1, %r2, %r0;\nmov.u32 %r4, %ctaid.y;\n\
                mov.u32 %r5, %nctaid.y;\nmad.lo.s32 %r6, %r3, %r5, %r4;\nmul.wide.u32 %rd1, %r6, 4;\nadd.s64 %rd2, %rd0, %rd1;\n\
                st.global.u32 [%rd2], %r6;\nret;";
    let launch =
        TestLaunch { grid: [1, 7, 1], block: [3, 2, 1], ..TestLaunch::new(kernel(1, body), 0, &args) };
    assert_eq!(launch.run().unwrap()[0], (0..42).collect::<Vec<_>>());
}

#[test]
fn the_first_fault_is_that_of_the_first_block() {
    let body = "mov.u32 %r0, %ctaid.x;\nsetp.lt.u32 %p0, %r0, 3;\n@%p0 bra END;\nst.global.u32 [%rd0+4096], %r0;\nEND:\nret;";
    let args = [KernelArg::Empty(4)];
    let failure = TestLaunch { grid: [4, 1, 1], ..TestLaunch::new(kernel(1, body), 1, &args) }.failure();
    assert!(failure.what.contains("block (3, 0, 0)"), "{}", failure.what);
}

/// Each block stores a part, then counts itself; the last one adds the parts. `fences` are where the ISA asks
/// for them.
fn last_block_adds(fence: &str) -> softcuda::driver::DriverResult<Vec<Vec<u32>>> {
    let body = format!(
        "mov.u32 %r0, %ctaid.x;\nmul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd1, %rd8;\nadd.s32 %r1, %r0, 10;\nst.global.u32 [%rd9], %r1;\n\
         {fence}\natom.global.add.u32 %r2, [%rd2], 1;\n{fence}\nsetp.ne.u32 %p0, %r2, 3;\n@%p0 bra END;\n\
         ld.global.v4.u32 {{%r3, %r4, %r5, %r6}}, [%rd1];\nadd.s32 %r3, %r3, %r4;\nadd.s32 %r5, %r5, %r6;\nadd.s32 %r3, %r3, %r5;\n\
         st.global.u32 [%rd0], %r3;\nEND:\nret;"
    );
    let args = [KernelArg::Empty(4), KernelArg::Empty(16), KernelArg::Words(&[0])];
    TestLaunch { grid: [4, 1, 1], ..TestLaunch::new(kernel(3, &body), 1, &args) }.run()
}

#[test]
fn the_last_block_may_read_what_others_wrote() {
    assert_eq!(last_block_adds("membar.gl;").unwrap_or_else(|f| panic!("{}", f.what))[0][0], 46);
    assert_eq!(last_block_adds("fence.acq_rel.gpu;").unwrap()[0][0], 46);
    assert!(last_block_adds("").unwrap_err().what.contains("another block of this launch writes it"));
}

#[test]
fn local_memory_is_each_lanes_own() {
    let body = ".local .align 16 .b8 depot[16];\nmov.u64 %rd1, depot;\ncvta.local.u64 %rd2, %rd1;\nst.local.u32 [%rd1+4], %r0;\n\
                bar.warp.sync 0xffffffff;\nld.local.u32 %r1, [%rd1+4];";
    assert_eq!(all(body, 64), (0..64).collect::<Vec<_>>());
    let args = [KernelArg::Empty(4)];
    let text = |load: &str| {
        kernel(1, &format!(".local .align 16 .b8 depot[16];\n{load}\nst.global.u32 [%rd0], %r1;\nret;"))
    };
    let failure = |load: &str| TestLaunch::new(text(load), 1, &args).failure().what;
    assert!(failure("ld.local.u32 %r1, [depot];").contains("local memory is read before it has a value"));
    assert!(failure("ld.local.u32 %r1, [depot+16];").contains("local memory, which has 16"));
}
