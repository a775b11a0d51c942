//! The meaning of recorded kernels, by the interpreter; mistakes name the line that made them.

use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{ExprType, Kernel};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{PrefetchMethod, Recorder, ThreadTeam, Val, WARP, reduce_each, transpose, warp_sum};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex};

/// `out: f32[len]` of a kernel with one output.
fn output(kernel: &Kernel, inputs: &[KernelBuffer], len: usize) -> Vec<f32> {
    let mut buffers = inputs.to_vec();
    buffers.push(KernelBuffer::zeros(DType::F32, len));
    run(kernel, &mut buffers, &SymValues::for_tokens(1)).unwrap();
    buffers.pop().unwrap().to_f32()
}

fn count(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

#[test]
fn a_fold_over_views_is_a_product() {
    let k = Recorder::new("matvec");
    let w = k.input("w", DType::F32, [3, 5]);
    let x = k.input("x", DType::F32, [5]);
    let out = k.output("out", DType::F32, [3]);
    k.par("row", 3, |row| {
        out.set([row], k.fold("c", 5, 0.5, |c, sum| w.at([row, c]).fma(x.at([c]), sum)));
    });
    let got =
        output(&k.finish(), &[KernelBuffer::from_f32(&count(15)), KernelBuffer::from_f32(&count(5))], 3);
    assert_eq!(got, [30.5, 80.5, 130.5]);
}

#[test]
fn places_follow_shape_and_pitch() {
    let k = Recorder::new("places");
    let x = k.input("x", DType::F32, [2, 3, 4]);
    let padded = k.view(x.buf(), [4, 4]).pitch(6);
    let out = k.output("out", DType::F32, [4]);
    k.par("once", 1, |zero| {
        out.set([0], x.at((1, 2, 3)));
        out.set([1], x.flat().at([7]));
        out.set([2], padded.at((2, 1)));
        out.set([3], padded.at([zero + 3, zero]));
    });
    let got = output(&k.finish(), &[KernelBuffer::from_f32(&count(24))], 4);
    assert_eq!(got, [23.0, 7.0, 13.0, 18.0]);
}

#[test]
fn masked_lanes_read_nothing_and_are_zero() {
    let k = Recorder::new("masked");
    let x = k.input("x", DType::F32, [6]);
    let out = k.output("out", DType::F32, [2, 4]);
    k.par("row", 2, |row| {
        let inside = (row * 4).ramp(1, 4).lt(k.literal(6.0, ExprType::vector(DType::I64, 4)));
        out.set((row, 0), x.load_where(inside, [row * 4], 4));
    });
    let got = output(&k.finish(), &[KernelBuffer::from_f32(&count(6))], 8);
    assert_eq!(got, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]);
}

#[test]
fn vectors_of_indices_gather() {
    let k = Recorder::new("gather");
    let x = k.input("x", DType::F32, [3, 4]);
    let out = k.output("out", DType::F32, [2, 4]);
    k.par("row", 2, |row| {
        let diagonal = row.ramp(1, 4).min(2);
        out.set((row, 0), x.at((diagonal, 1)));
    });
    let got = output(&k.finish(), &[KernelBuffer::from_f32(&count(12))], 8);
    assert_eq!(got, [1.0, 5.0, 9.0, 9.0, 5.0, 9.0, 9.0, 9.0]);
}

#[test]
fn masked_lanes_write_nothing() {
    let k = Recorder::new("masked");
    let x = k.input("x", DType::F32, [6]);
    let out = k.output("out", DType::F32, [6]);
    k.par("once", 1, |zero| {
        let odd = (zero.ramp(1, 4) & 1).equals(1);
        out.set_where(odd, [zero + 2], x.load([zero], 4));
        let last = x.at_where(zero.lt(0), [zero + 5]);
        k.when_else(zero.equals(0), || out.set([0], x.at([5])), || out.set([1], last));
    });
    assert_eq!(output(&k.finish(), &[KernelBuffer::from_f32(&count(6))], 6), [5.0, 0.0, 0.0, 1.0, 0.0, 3.0]);
}

#[test]
fn lanes_meet() {
    let k = Recorder::new("lanes");
    let x = k.input("x", DType::F32, [8, 8]);
    let out = k.output("out", DType::F32, [12, 8]);
    k.par("once", 1, |zero| {
        let rows: Vec<Val> = (0..8).map(|row| x.load((zero + row, 0), 8)).collect();
        out.set((8, 0), reduce_each(rows.clone(), |a, b| a + b));
        out.set((9, 0), reduce_each(rows[..2].to_vec(), |a, b| a.max(b)));
        out.set((10, 0), rows[0].shuffle_with(rows[1], [0, 8, 1, 9, 2, 10, 3, 11]));
        out.set((11, 0), rows[1].shuffle([7, 6]));
        for (row, column) in transpose(rows).into_iter().enumerate() {
            out.set((row as i64, 0), column);
        }
    });
    let got = output(&k.finish(), &[KernelBuffer::from_f32(&count(64))], 96);
    assert!((0..64).all(|i| got[i] == (i % 8 * 8 + i / 8) as f32), "{got:?}");
    let sums: Vec<f32> = (0..8).map(|row| (0..8).map(|c| (row * 8 + c) as f32).sum()).collect();
    assert_eq!(got[64..72], sums);
    // Lanes in pairs, of both vectors in turn.
    assert_eq!(got[72..80], [1.0, 9.0, 3.0, 11.0, 5.0, 13.0, 7.0, 15.0]);
    assert_eq!(got[80..88], [0.0, 8.0, 1.0, 9.0, 2.0, 10.0, 3.0, 11.0]);
    assert_eq!(got[88..90], [15.0, 14.0]);
}

#[test]
fn long_values_alternate_and_short_ones_do_not() {
    let names = |long: bool| {
        let k = Recorder::new("interleaved");
        let (x, y) = (k.input("x", DType::F32, [3]), k.output("y", DType::F32, [3]));
        k.interleaved(0..3, |i| {
            let value = if long { x.at([i]).tanh() } else { -x.at([i]) };
            y.set([i], value.named("value"));
        });
        let kernel = k.finish();
        kernel.body.iter().map(|s| format!("{s:?}").starts_with("Let")).collect::<Vec<bool>>()
    };
    assert_eq!(names(true), [true, true, true, false, false, false]);
    assert_eq!(names(false), [true, false, true, false, true, false]);
}

#[test]
fn branches_may_share_what_they_change() {
    let k = Recorder::new("branch");
    let out = k.output("out", DType::F32, [4]);
    let mut seen = Vec::new();
    k.par("i", 4, |i| {
        k.branch(i.lt(1), |holds| {
            seen.push(holds);
            out.set([i], k.float(if holds { 1.0 } else { 2.0 }));
        });
    });
    assert_eq!(seen, [true, false]);
    assert_eq!(output(&k.finish(), &[], 4), [1.0, 2.0, 2.0, 2.0]);
}

/// Reads 100 elements of 4 bytes in each of 3 iterations, and adds them up.
fn streamed(stream: PrefetchMethod) -> (Kernel, String) {
    let k = Recorder::new("streamed");
    let x = k.input("x", DType::F32, [300]);
    let out = k.output("out", DType::F32, [3]);
    k.par("i", 3, |i| {
        stream.prefetch_ahead(x, i * 100, 100, k.int(200));
        out.set([i], k.fold("c", 100, 0.0, |c, sum| sum + x.at([i * 100 + c])));
    });
    let kernel = k.finish();
    let text = mlcc_ir::text::print_kernel(&kernel);
    (kernel, text)
}

#[test]
fn a_stream_prefetches_lines_ahead() {
    let instr = |name| InstrId::by_name(name).unwrap();
    let (prefetch, load) = (instr("prefetch_f32"), instr("touch_f32"));
    let (plain, _) = streamed(PrefetchMethod::None);
    let want = output(&plain, &[KernelBuffer::from_f32(&count(300))], 3);
    // 400 bytes have seven lines.
    for (stream, lines, name) in [
        (PrefetchMethod::None, 0, "prefetch_f32"),
        (PrefetchMethod::Lines { prefetch, distance: 800 }, 7, "prefetch_f32"),
        (PrefetchMethod::Sparse { prefetch, distance: 800 }, 1, "prefetch_f32"),
        (PrefetchMethod::Touch { load, distance: 800 }, 7, "touch_f32"),
    ] {
        let (kernel, text) = streamed(stream);
        assert_eq!(text.matches(name).count(), lines, "{text}");
        assert_eq!(text.contains("min(add(mul(%i, 100), 200), 200)"), lines > 0, "{text}");
        assert_eq!(output(&kernel, &[KernelBuffer::from_f32(&count(300))], 3), want);
        assert_eq!(stream.instr().is_some(), lines > 0);
    }
}

/// `body(x)` for `x: i64` 0 to 9, as f32.
fn of_numbers(body: impl for<'k> Fn(Val<'k>) -> Val<'k>) -> Vec<f32> {
    let k = Recorder::new("numbers");
    let x = k.input("x", DType::I64, [10]);
    let out = k.output("out", DType::F32, [10]);
    k.par("i", 10, |i| out.set([i], body(x.at([i])).cast(DType::F32)));
    output(&k.finish(), &[KernelBuffer::from_i64(&(0..10).collect::<Vec<i64>>())], 10)
}

#[test]
fn literals_take_the_type_beside_them() {
    let expected = |f: fn(i64) -> i64| (0..10).map(|i| f(i) as f32).collect::<Vec<f32>>();
    assert_eq!(of_numbers(|x| 100 - x * 3), expected(|x| 100 - x * 3));
    assert_eq!(of_numbers(|x| ((x << 2) | 1) & 13), expected(|x| ((x << 2) | 1) & 13));
    assert_eq!(of_numbers(|x| x / 4 + x % 4), expected(|x| x / 4 + x % 4));
    assert_eq!(of_numbers(|x| x.div_ceil(4)), expected(|x| (x + 3) / 4));
    assert_eq!(of_numbers(|x| x.max(3).min(7)), expected(|x| x.clamp(3, 7)));
    assert_eq!(of_numbers(|x| x.lt(4).select(x, -1)), expected(|x| if x < 4 { x } else { -1 }));
    assert_eq!(of_numbers(|x| -x ^ 5), expected(|x| -x ^ 5));
    assert_eq!(of_numbers(|x| x.differs(3).select(1, x)), expected(|x| if x != 3 { 1 } else { x }));
    assert_eq!(of_numbers(|x| x.like(7) - x), expected(|x| 7 - x));
    assert_eq!(of_numbers(|x| 0.5 * x.cast(DType::F32) * 2.0), expected(|x| x));
}

#[test]
fn one_iteration_needs_no_loop_and_none_no_code() {
    let text = |extent: i64| {
        let k = Recorder::new("loops");
        let out = k.output("out", DType::F32, [4]);
        k.serial("i", extent, |i| out.set([i], k.float(1.0)));
        k.finish().body
    };
    assert!(text(0).is_empty());
    assert_eq!(text(1).len(), 1);
    assert!(format!("{:?}", text(1)).starts_with("[Store"));
    assert!(format!("{:?}", text(2)).starts_with("[For"));
}

/// Sums of 40 numbers times their place, shared out by a block of 64 threads; then the sum over the first
/// warp.
fn team_kernel() -> Kernel {
    let k = Recorder::new("team");
    let x = k.input("x", DType::F32, [40]);
    let out = k.output("out", DType::F32, [41]);
    let team = ThreadTeam::new(&k, 2 * WARP);
    k.blocks("block", 0, 1, |_| {
        let doubled = k.shared("doubled", [40]);
        let mine = k.registers("mine", [team.items_per_thread(40)]);
        team.each(40, |i| doubled.set([i], x.at([i]) * 2.0));
        k.barrier();
        team.each_slot(40, |i, slot| mine.set([slot], doubled.at([39 - i])));
        team.each_slot(40, |i, slot| out.set([i], mine.at([slot])));
        team.run(|thread| {
            k.when(thread.lt(WARP), || {
                let sum = warp_sum(x.at([thread]));
                k.when(thread.equals(0), || out.set([40], sum));
            });
        });
    });
    k.finish()
}

#[test]
fn a_team_shares_out_items() {
    for order in [ExecutionOrder::Forward, ExecutionOrder::Reverse, ExecutionOrder::Shuffled(5)] {
        let mut buffers = [KernelBuffer::from_f32(&count(40)), KernelBuffer::zeros(DType::F32, 41)];
        let options = ExecutionOptions { workers: 1, order };
        run_with(&team_kernel(), &mut buffers, &SymValues::for_tokens(1), &options).unwrap();
        let got = buffers[1].to_f32();
        assert!((0..40).all(|i| got[i] == 2.0 * (39 - i) as f32), "{got:?}");
        assert_eq!(got[40], (0..32).sum::<i32>() as f32);
    }
}

/// The message and the line of the panic of `body`.
fn mistake(body: impl FnOnce(&Recorder) -> u32) -> (String, String, u32) {
    static ONE_HOOK: Mutex<()> = Mutex::new(());
    let _guard = ONE_HOOK.lock();
    let seen = Arc::new(Mutex::new(None));
    let (old, into) = (panic::take_hook(), seen.clone());
    panic::set_hook(Box::new(move |info| {
        let at = info.location().expect("panics have a place");
        *into.lock().unwrap() = Some((info.to_string(), at.file().to_string(), at.line()));
    }));
    let result = panic::catch_unwind(AssertUnwindSafe(|| body(&Recorder::new("wrong"))));
    panic::set_hook(old);
    assert!(result.is_err(), "nothing was refused");
    seen.lock().unwrap().take().expect("the hook ran")
}

#[test]
fn mistakes_name_their_line() {
    type Body = fn(&Recorder) -> u32;
    let here = line!();
    let cases: [(&str, Body); 6] = [
        ("operands of add", |k| (k.float(1.0) + k.int(1)).lanes()),
        ("integer literal 2 beside f32", |k| (k.float(1.0) * 2).lanes()),
        ("literal 0.5 beside i64", |k| (k.int(1).max(0.5)).lanes()),
        ("load index of x", |k| k.input("x", DType::F16, [1]).at([k.float(0.0)]).lanes()),
        ("operands with 4 and 8 lanes", |k| (k.int(0).splat(4) + k.int(0).splat(8)).lanes()),
        ("no instruction is called nothing", |k| (k.int(0).instr("nothing", &[])).lanes()),
    ];
    for (at, (text, body)) in cases.into_iter().enumerate() {
        let (message, file, line) = mistake(body);
        assert!(message.contains(text), "{text}: {message}");
        assert!(file.ends_with("language.rs"), "{text}: {file}");
        assert_eq!(line, here + 2 + at as u32, "{text}");
    }
}

#[test]
fn views_begin_where_they_are_told() {
    let k = Recorder::new("tails");
    let x = k.input("x", DType::F32, [2, 3, 4]);
    let out = k.output("out", DType::F32, [6]);
    k.par("once", 1, |zero| {
        out.set([0], x.row(zero + 1).at((2, 3)));
        out.set([1], x.row(zero + 1).row(zero + 1).at([1]));
        out.set([2], x.starting_at((0, zero + 2, 1)).at([2]));
        out.set([3], x.row(1).row(0).starting_at([zero + 1]).named("tail").at([zero + 1]));
        out.starting_at([4]).fill(2, k.float(7.0));
    });
    let got = output(&k.finish(), &[KernelBuffer::from_f32(&count(24))], 6);
    assert_eq!(got, [23.0, 17.0, 11.0, 14.0, 7.0, 7.0]);
}

#[test]
fn a_register_tile_adds_outer_products() {
    let k = Recorder::new("outer");
    let (a, b) = (k.input("a", DType::F32, [3, 2]), k.input("b", DType::F32, [3, 8]));
    let out = k.output("out", DType::F32, [2, 8]);
    k.par("once", 1, |_| {
        let sums = k.regs("sum", [2, 2], |r, _| k.literal(r as f64, ExprType::vector(DType::F32, 4)));
        k.serial("k", 3, |i| {
            let columns = [0, 4].map(|c| b.load((i, c), 4).named("b"));
            sums.add_outer((0..2).map(|r| a.at((i, r))), &columns, |sum, a, b| b.fma(a, sum));
        });
        for (r, row) in (0..).zip(sums.rows()) {
            k.vectors("c", 8, 8, |c| out.set((r, c), row[0].get().shuffle_with(row[1].get(), 0..8)));
        }
    });
    let got =
        output(&k.finish(), &[KernelBuffer::from_f32(&count(6)), KernelBuffer::from_f32(&count(24))], 16);
    let expected =
        |r: usize, c: usize| r as f32 + (0..3).map(|i| (2 * i + r) as f32 * (8 * i + c) as f32).sum::<f32>();
    assert!((0..16).all(|at| got[at] == expected(at / 8, at % 8)), "{got:?}");
}

#[test]
fn bits_fill_lanes_of_another_type() {
    let k = Recorder::new("bits");
    let x = k.input("x", DType::I32, [2]);
    let out = k.output("out", DType::F32, [4]);
    k.par("once", 1, |_| out.set([0], x.load([0], 2).bits(DType::I16).cast(DType::F32)));
    let got = output(&k.finish(), &[KernelBuffer::from_i32(&[0x0002_0001, -1])], 4);
    assert_eq!(got, [1.0, 2.0, -1.0, -1.0]);
}
