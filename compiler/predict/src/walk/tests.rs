use super::*;
use crate::launch::{ArtifactPlan, SequenceSizes};
use crate::model::{KernelResources, predict};
use crate::sass;
use mlcc_abi::{LaunchArg, arg, repeat};
use mlcc_target::{GpuModel, InstrLatency};

/// A kernel of these instructions, each with the stall, the scoreboards (result, wait) behind it.
fn kernel(lines: &[(&str, u64)]) -> DecodedKernel {
    let mut text = String::from(".text.k_t:\n");
    let mut at = 0;
    for (line, upper) in lines {
        if line.ends_with(':') {
            text.push_str(&format!("{line}\n"));
            continue;
        }
        text.push_str(&format!("/*{at:04x}*/ {line} ; /* 0x0 */\n/* 0x{upper:016x} */\n"));
        at += 16;
    }
    DecodedKernel::new(&sass::parse(&text).unwrap()[0], 90).unwrap()
}

/// The upper half of an encoding: bits 105 stall, 110 result, 113 operands, 116 wait.
fn control(stall: u64, result: u64, wait: u64) -> u64 {
    stall << 41 | result << 46 | 7 << 49 | wait << 52
}

const NONE: u64 = 7;

fn plain(stall: u64) -> u64 {
    control(stall, NONE, 0)
}

fn call(rows: u64, past: u64) -> PredictedCall {
    let plan = ArtifactPlan { vocab: 100, weights_bytes: 1 << 40, state_bytes: 0, pages: 4 };
    PredictedCall { plan, sequences: vec![SequenceSizes { rows, past }], batch: false }
}

const WEIGHTS: LaunchArg = LaunchArg { kind: arg::WEIGHTS, reserved: 0, offset: 0 };
const PAST: LaunchArg = LaunchArg { kind: arg::CONTROL, reserved: 0, offset: 8 };

fn walked(
    kernel: &DecodedKernel,
    args: &[LaunchArg],
    threads: u32,
    call: &PredictedCall,
    block: [u32; 3],
) -> WalkedBlock {
    let shape =
        LaunchConfig { grid: [8, 1, 1], block: [threads, 1, 1], shared_bytes: 0, args, repeat: repeat::ONCE };
    walk_block(kernel, &shape, call, &gpu(), block).unwrap()
}

/// A GPU with the latencies that the sums below are made of.
fn gpu() -> GpuModel {
    let latency = InstrLatency { l1: 41, shared: 29, l2: 263, memory: 479, other: 24, operands: 12 };
    GpuModel { latency, ..mlcc_target::gpus().unwrap().remove(0) }
}

/// Each thread reads 16 bytes of weights, at 512 bytes for each warp and 4 KiB for each block.
const READS: [(&str, u64); 7] = [
    ("S2R R0, SR_TID.X", 0),
    ("S2R R1, SR_CTAID.X", 0),
    ("ULDC.64 UR4, c[0x0][0x210]", 0),
    ("IMAD.SHL.U32 R1, R1, 0x1000, RZ", 0),
    ("LEA R0, R0, R1, 0x4", 0),
    ("IADD3 R2, P0, R0, UR4, RZ", 0),
    ("IADD3.X R3, RZ, UR5, RZ, P0, !PT", 0),
];

fn reading(rest: &[(&str, u64)]) -> DecodedKernel {
    let begin = READS.iter().map(|(line, _)| (*line, plain(1)));
    kernel(&begin.chain(rest.iter().copied()).collect::<Vec<_>>())
}

#[test]
fn what_is_read_and_how_long_it_takes() {
    // Issue at 7, result 479 clocks later, the next waits for scoreboard 0, then five clocks of the exit.
    let kernel = reading(&[
        ("LDG.E.128 R4, desc[UR6][R2.64]", control(2, 0, 0)),
        ("FADD R4, R4, R5", control(4, NONE, 1)),
        ("EXIT", plain(5)),
    ]);
    let one = walked(&kernel, &[WEIGHTS], 64, &call(1, 0), [0, 0, 0]);
    assert_eq!(one.alone, 7 + 479 + 4 + 5);
    let counts = one.counts;
    assert_eq!(counts.instructions, 2 * 10);
    assert_eq!((counts.read.len(), counts.l2_sectors), (2 * 512 / 32, 32));
    assert_eq!(counts.bank_cycles, 2 * 4, "four lines of each warp");
    let by = |pipe: ExecutionPipe| counts.by_pipe[pipe as usize];
    assert_eq!([ExecutionPipe::Float, ExecutionPipe::Integer, ExecutionPipe::Load].map(by), [2, 2 * 4, 2]);
    let other = walked(&kernel, &[WEIGHTS], 64, &call(1, 0), [1, 0, 0]);
    assert!(other.counts.read.is_disjoint(&counts.read), "another block, other weights");
}

#[test]
fn what_was_read_before_is_near() {
    let kernel = reading(&[
        ("LDG.E.128 R4, desc[UR6][R2.64]", control(2, 0, 0)),
        ("FADD R4, R4, R5", control(4, NONE, 1)),
        ("LDG.E.128 R4, desc[UR6][R2.64]", control(2, 0, 0)),
        ("FADD R4, R4, R5", control(4, NONE, 1)),
        ("EXIT", plain(5)),
    ]);
    let one = walked(&kernel, &[WEIGHTS], 32, &call(1, 0), [0, 0, 0]);
    assert_eq!(one.alone, 7 + 479 + 4 + 41 + 4 + 5);
    assert_eq!(one.counts.l2_sectors, 16);
}

#[test]
fn loops_go_on_as_long_as_the_sizes_say() {
    // i from past downwards in steps of 3, signed.
    let kernel = kernel(&[
        ("ULDC.64 UR4, c[0x0][0x210]", plain(1)),
        ("IMAD.U32 R2, RZ, RZ, UR4", plain(1)),
        ("IMAD.U32 R3, RZ, RZ, UR5", plain(1)),
        ("LDG.E R4, desc[UR6][R2.64]", control(1, 0, 0)),
        ("NOP", control(1, NONE, 1)),
        (".L_x_0:", 0),
        ("FFMA R8, R8, R8, R8", plain(4)),
        ("IADD3 R4, R4, -0x3, RZ", plain(5)),
        ("ISETP.GT.AND P0, PT, R4, RZ, PT", plain(13)),
        ("@P0 BRA `(.L_x_0)", plain(5)),
        ("EXIT", plain(5)),
    ]);
    for (past, turns) in [(1, 1), (3, 1), (10, 4), (3000, 1000)] {
        let one = walked(&kernel, &[PAST], 32, &call(1, past), [0, 0, 0]);
        assert_eq!(one.counts.by_pipe[ExecutionPipe::Float as usize], turns, "past {past}");
        assert!(one.counts.reads_past);
        // The control block lies in the second level.
        assert_eq!(one.alone, 3 + 263 + 1 + turns * 27 + 5);
    }
}

#[test]
fn lanes_that_part_join_again() {
    let kernel = kernel(&[
        ("S2R R0, SR_TID.X", plain(1)),
        ("ISETP.LT.U32.AND P0, PT, R0, 0x8, PT", plain(1)),
        ("@P0 BRA `(.L_x_0)", plain(1)),
        ("MUFU.EX2 R1, R1", plain(1)),
        (".L_x_0:", 0),
        ("FADD R1, R1, R1", plain(1)),
        ("EXIT", plain(1)),
    ]);
    let counts = walked(&kernel, &[], 32, &call(1, 0), [0, 0, 0]).counts;
    let by = |pipe: ExecutionPipe| counts.by_pipe[pipe as usize];
    assert_eq!([by(ExecutionPipe::Special), by(ExecutionPipe::Float)], [1, 1]);
}

#[test]
fn warps_wait_for_the_slowest_at_a_barrier() {
    // The second warp alone goes through the slow instructions.
    let kernel = kernel(&[
        ("S2R R0, SR_TID.X", plain(1)),
        ("ISETP.LT.U32.AND P0, PT, R0, 0x20, PT", plain(1)),
        ("@P0 BRA `(.L_x_0)", plain(1)),
        ("FADD R1, R1, R1", plain(15)),
        ("FADD R1, R1, R1", plain(15)),
        (".L_x_0:", 0),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", plain(1)),
        ("EXIT", plain(1)),
    ]);
    let gpu = gpu();
    let shape =
        LaunchConfig { grid: [1; 3], block: [64, 1, 1], shared_bytes: 0, args: &[], repeat: repeat::ONCE };
    let walked = walk_block(&kernel, &shape, &call(1, 0), &gpu, [0; 3]).unwrap();
    assert_eq!(walked.alone, 3 + 30 + 1);
}

#[test]
fn copies_are_waited_for_by_groups() {
    let kernel = reading(&[
        ("LDGSTS.E.BYPASS.128 [R0], desc[UR6][R2.64]", plain(1)),
        ("LDGDEPBAR", control(1, 0, 0)),
        ("LDGSTS.E.BYPASS.128 [R0], desc[UR6][R2.64+0x200]", plain(1)),
        ("LDGDEPBAR", control(1, 0, 0)),
        ("DEPBAR.LE SB0, 0x1", plain(1)),
        ("EXIT", plain(1)),
    ]);
    let one = walked(&kernel, &[WEIGHTS], 32, &call(1, 0), [0, 0, 0]);
    // The first copy alone, which was issued at 7.
    assert_eq!(one.alone, 7 + 479 + 1 + 1);
    assert_eq!(one.counts.read.len(), 32);
}

#[test]
fn stores_to_shared_memory_are_read_back() {
    let kernel = kernel(&[
        ("S2R R0, SR_TID.X", plain(1)),
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ", plain(1)),
        ("STS [R1], R0", plain(1)),
        ("LDS R2, [R1+0x4]", plain(1)),
        // Lane 2 has 3 and leaves.
        ("ISETP.EQ.U32.AND P0, PT, R2, 0x3, PT", plain(1)),
        ("@P0 EXIT", plain(1)),
        ("SHFL.BFLY PT, R3, R0, 0x1, 0x1f", plain(1)),
        ("ISETP.NE.U32.AND P0, PT, R3, 0x4, PT", plain(1)),
        ("@P0 EXIT", plain(1)),
        // Lane 5 alone, whose neighbour is 4.
        ("FADD R4, R4, R4", plain(1)),
        ("EXIT", plain(1)),
    ]);
    let counts = walked(&kernel, &[], 32, &call(1, 0), [0, 0, 0]).counts;
    assert_eq!((counts.by_pipe[ExecutionPipe::Float as usize], counts.bank_cycles), (1, 3));
}

#[test]
fn unknown_places_count_as_memory_of_their_own() {
    let kernel = kernel(&[
        ("DADD R8, R8, R8", plain(1)),
        ("LDG.E R4, desc[UR6][R8.64]", plain(1)),
        ("FSETP.GT.AND P0, PT, R4, RZ, PT", plain(1)),
        ("@P0 BRA `(.L_x_0)", plain(1)),
        ("FADD R4, R4, R4", plain(1)),
        (".L_x_0:", 0),
        ("EXIT", plain(1)),
    ]);
    let counts = walked(&kernel, &[], 32, &call(1, 0), [0, 0, 0]).counts;
    assert_eq!((counts.unknown_sectors, counts.undecided), (4, 1));
    assert_eq!(counts.by_pipe[ExecutionPipe::Float as usize], 1, "what is not known is false");
}

#[test]
fn integers_by_hand() {
    // A result that is not known equals nothing.
    let cases: &[(&str, u32)] = &[
        ("LOP3.LUT R9, R1, 0xff, R2, 0xea, !PT", 0x1234_5678 & 0xff | 0x1000),
        ("SHF.R.U32.HI R9, RZ, 0x4, R1", 0x0123_4567),
        ("SHF.R.S32.HI R9, RZ, 0x1f, R3", u32::MAX),
        ("SHF.L.U64.HI R9, R1, 0x8, R2", 0x1000 << 8 | 0x12),
        ("SHF.R.U64 R9, R1, 0x8, R2", 0x0012_3456),
        ("LEA.HI R9, R1, R2, RZ, 0x4", 0x1 + 0x1000),
        ("LEA.HI.SX32 R9, R3, R2, 0x1c", 0x1000 - 0x10),
        ("PRMT R9, R1, 0x5410, R2", 0x1000_5678),
        ("PRMT R9, R1, 0x8880, RZ", 0x78),
        ("SGXT.U32 R9, R1, 0x4", 8),
        ("SGXT R9, R1, 0x4", 0xffff_fff8),
        ("IMAD R9, R2, 0x3, R2", 0x4000),
        ("IMAD.HI.U32 R9, R1, 0x10, RZ", 1),
        ("IADD3 R9, R2, -R2, 0x7", 7),
        ("IMNMX R9, R1, R3, PT", 0xffff_ff00),
        ("IMNMX.U32 R9, R1, R3, PT", 0x1234_5678),
        ("SEL R9, R1, R2, !PT", 0x1000),
        ("FLO.U32 R9, R2", 12),
        ("POPC R9, R2", 1),
        ("BMSK R9, RZ, R4", 0xff),
        ("HFMA2.MMA R9, -RZ, RZ, 0, 1.78813934326171875e-07", 3),
        ("HFMA2.MMA R9, -RZ, RZ, 1.75, -23776", 0x3f00_f5ce),
    ];
    for (line, expected) in cases {
        let test = format!("ISETP.EQ.U32.AND P0, PT, R9, {expected:#x}, PT");
        let kernel = kernel(&[
            ("MOV R1, 0x12345678", plain(1)),
            ("MOV R2, 0x1000", plain(1)),
            ("MOV R3, -0x100", plain(1)),
            ("MOV R4, 0x8", plain(1)),
            (line, plain(1)),
            (&test, plain(1)),
            ("@!P0 EXIT", plain(1)),
            ("FADD R0, R0, R0", plain(1)),
            ("EXIT", plain(1)),
        ]);
        let counts = walked(&kernel, &[], 32, &call(1, 0), [0, 0, 0]).counts;
        assert_eq!(counts.by_pipe[ExecutionPipe::Float as usize], 1, "{line} is not {expected:#x}");
    }
}

/// A register that nothing set holds something, so bits that are set there are known: compilers keep
/// predicates so.
#[test]
fn bits_are_set_in_fresh_registers() {
    let kernel = kernel(&[
        ("LOP3.LUT R9, R9, 0xfffffdff, RZ, 0xc0, !PT", plain(1)),
        ("@PT LOP3.LUT R9, R9, 0x200, RZ, 0xfc, !PT", plain(1)),
        ("LOP3.LUT P0, RZ, R9, 0x200, RZ, 0xc0, !PT", plain(1)),
        ("@!P0 EXIT", plain(1)),
        ("FADD R0, R0, R0", plain(1)),
        ("EXIT", plain(1)),
    ]);
    let counts = walked(&kernel, &[], 32, &call(1, 0), [0, 0, 0]).counts;
    assert_eq!(counts.by_pipe[ExecutionPipe::Float as usize], 1);
}

#[test]
fn carries_go_from_word_to_word() {
    // 0x1_00000000 - 1 = 0x0_ffffffff, and a product of 64 bits.
    let kernel = kernel(&[
        ("MOV R2, RZ", plain(1)),
        ("MOV R3, 0x1", plain(1)),
        ("IADD3 R4, P0, R2, -0x1, RZ", plain(1)),
        ("IADD3.X R5, R3, -0x1, RZ, P0, !PT", plain(1)),
        ("ISETP.NE.U32.AND P1, PT, R4, -0x1, PT", plain(1)),
        ("ISETP.NE.OR P1, PT, R5, RZ, P1", plain(1)),
        ("@P1 EXIT", plain(1)),
        ("IMAD.WIDE.U32 R6, R4, R4, RZ", plain(1)),
        // (2^32 - 1)^2 = 0xfffffffe_00000001.
        ("ISETP.NE.U32.AND P1, PT, R6, 0x1, PT", plain(1)),
        ("ISETP.NE.AND.EX P1, PT, R7, -0x2, PT, P1", plain(1)),
        ("@P1 EXIT", plain(1)),
        ("FADD R0, R0, R0", plain(1)),
        ("EXIT", plain(1)),
    ]);
    let counts = walked(&kernel, &[], 32, &call(1, 0), [0, 0, 0]).counts;
    assert_eq!(counts.by_pipe[ExecutionPipe::Float as usize], 1);
}

#[test]
fn what_is_not_known_is_refused() {
    let text = ".text.k_t:\n/*0000*/ FROB.X R1, R2 ; /* 0x0 */\n/* 0x0 */\n";
    let error = DecodedKernel::new(&sass::parse(text).unwrap()[0], 90).err().unwrap().to_string();
    assert_eq!(error, "kernel k_t: predictions do not cover the instruction `FROB.X` (at 0x0)");
    let kernel = kernel(&[("NOP", plain(1))]);
    let shape =
        LaunchConfig { grid: [1; 3], block: [32, 1, 1], shared_bytes: 0, args: &[], repeat: repeat::ONCE };
    let gpu = gpu();
    let error = walk_block(&kernel, &shape, &call(1, 0), &gpu, [0; 3]).unwrap_err().to_string();
    assert!(error.contains("an end without an exit"), "{error}");
}

/// Blocks side by side share a tile of weights, or all of them but one have nothing to do: tiles come from
/// memory once.
#[test]
fn tiles_of_several_blocks_are_read_once() {
    let bytes = |shift: &str, guard: &str| {
        let shifted = format!("SHF.R.U32.HI R1, RZ, {shift}, R1");
        let exit = format!("{guard} EXIT");
        let lines = [
            "S2R R0, SR_TID.X",
            "S2R R1, SR_CTAID.X",
            "ULDC.64 UR4, c[0x0][0x210]",
            "LOP3.LUT R6, R1, 0x3, RZ, 0xc0, !PT",
            "ISETP.NE.AND P0, PT, R6, RZ, PT",
            &exit,
            &shifted,
            "IMAD.SHL.U32 R1, R1, 0x1000, RZ",
            "LEA R0, R0, R1, 0x4",
            "IADD3 R2, P0, R0, UR4, RZ",
            "IADD3.X R3, RZ, UR5, RZ, P0, !PT",
            "LDG.E.128 R4, desc[UR6][R2.64]",
            "EXIT",
        ];
        let kernel = kernel(&lines.map(|line| (line, plain(1))));
        let shape = LaunchConfig {
            grid: [1, 896, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            args: &[WEIGHTS],
            repeat: repeat::ONCE,
        };
        let along = [shape, LaunchConfig { grid: [896, 1, 1], ..shape }];
        let resources = KernelResources { registers: 32, shared_bytes: 0 };
        along.map(|shape| predict(&kernel, resources, &shape, &call(1, 0), &gpu()).unwrap().work.memory_bytes)
    };
    // 512 bytes of each tile. Along y all blocks have the first one.
    assert_eq!(bytes("0x0", "@!PT"), [512.0, 896.0 * 512.0]);
    assert_eq!(bytes("0x1", "@!PT"), [512.0, 448.0 * 512.0]);
    assert_eq!(bytes("0x2", "@!PT"), [512.0, 224.0 * 512.0]);
    assert_eq!(bytes("0x2", "@P0"), [512.0, 224.0 * 512.0], "three of four are idle");
}

/// One block in 32 has something to do, as of an attention over a short cache; one in eight of those that are
/// followed first.
#[test]
fn more_blocks_are_followed_where_they_differ() {
    let begin = [
        "S2R R1, SR_CTAID.X",
        "LOP3.LUT R6, R1, 0x1f, RZ, 0xc0, !PT",
        "ISETP.NE.AND P0, PT, R6, RZ, PT",
        "@P0 EXIT",
    ];
    let lines = begin.into_iter().chain(["FADD R0, R0, R0"; 32]).chain(["EXIT"]);
    let kernel = kernel(&lines.map(|line| (line, plain(1))).collect::<Vec<_>>());
    let shape = LaunchConfig {
        grid: [32, 512, 1],
        block: [32, 1, 1],
        shared_bytes: 0,
        args: &[],
        repeat: repeat::ONCE,
    };
    let resources = KernelResources { registers: 32, shared_bytes: 0 };
    let work = predict(&kernel, resources, &shape, &call(1, 0), &gpu()).unwrap().work;
    assert_eq!(work.by_pipe[ExecutionPipe::Float as usize], 1.0);
}
